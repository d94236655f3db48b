"""Carries one tunnel between a WebSocket and the device worker that has its task.

Messages of the user and frames of the task pass through, one by one; only their heads are checked.
So this process keeps one frame for each direction, and a side that takes nothing stops the other.
Text messages go to the user alone and tell what happens to the task: JSON with `is`, one of

    attached   the tunnel is open; `device` says where
    waiting    the task does not run now; `told` says why, its place and when it is expected
    ended      nothing follows; `told` says why

Input for a task that does not run waits until the task runs again in the same process.  A task that
began anew has lost its processes, so its tunnel ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import struct
import time
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from app.api.access.gate import in_thread
from app.core.model.provisions.session import LEAST_IDLE_S
from app.core.model.provisions.tunnel import (
    FRAME_HEAD,
    FROM_HELPER,
    BadFrame,
    FrameKind,
    TunnelTicket,
    checked_head,
    frame_of_message,
    message_of,
)
from app.core.security import peer_proof
from app.db.transactions import transaction
from app.errors import Unavailable
from app.intake import tunnels
from app.intake.tunnels import SEEN_EVERY_S, TakenTunnel, TunnelPlace
from app.messaging.live_updates import Subscription, changes
from app.storage.signing import tunnel_key

log = logging.getLogger(__name__)

CONNECT_S = 5.0
LOOK_APART_S = 0.25  # shortest time, in seconds, between two looks at the task
#: A session counts as idle only after more silence than this (`provisions.session.LEAST_IDLE_S`).
JUST_S = LEAST_IDLE_S / 2
REFUSALS_MAX = 10  # how often the device worker may answer that the task is not there yet
FROM_DEVICE = FROM_HELPER | {FrameKind.OPENED, FrameKind.REFUSED}
NORMAL, VIOLATION, TRY_LATER = 1000, 1008, 1013  # codes with which a WebSocket closes
_LENGTH = struct.Struct("!H")


class TunnelEnded(Exception):
    """Raised to end the tunnel; the message says why."""


class DeviceLink:
    """A connection to a device worker, with one tunnel."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def opened(cls, place: TunnelPlace, ticket: TunnelTicket) -> DeviceLink:
        """Connect, prove that this side knows the ticket's key, and open the tunnel; raises
        OSError.
        """
        address, port = place.links
        async with asyncio.timeout(CONNECT_S):
            link = cls(*await asyncio.open_connection(address, port))
            try:
                await link._prove(place.secret, ticket)
            except BaseException:
                link.close()
                raise
        return link

    async def _prove(self, secret: str, ticket: TunnelTicket) -> None:
        body = ticket.encoded()
        named = hashlib.sha256(body).digest()
        key = bytes.fromhex(tunnel_key(secret, named.hex()))
        hello = peer_proof.hello_to(peer_proof.TUNNEL, key, named=named)
        self.writer.write(hello)
        try:
            challenge = await self.reader.readexactly(peer_proof.CHALLENGE_BYTES)
            proof = await self.reader.readexactly(peer_proof.PROOF_BYTES)
            if not peer_proof.is_proof(proof, key, b"home", hello, challenge):
                raise ConnectionRefusedError("the device worker does not know its own secret")
            self.writer.write(peer_proof.proof_of(key, b"outpost", hello, challenge))
            self.writer.write(_LENGTH.pack(len(body)) + body)
            kind, _, said = await self.read()
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("the device worker closed the connection") from error
        if kind != FrameKind.OPENED:
            raise ConnectionRefusedError(said.decode("utf-8", "replace"))

    async def read(self) -> tuple[FrameKind, int, bytes]:
        """Read a frame; raises IncompleteReadError at the end, and BadFrame."""
        head = await self.reader.readexactly(FRAME_HEAD.size)
        kind, channel, size = FRAME_HEAD.unpack(head)
        known = checked_head(kind, channel, size, FROM_DEVICE)
        return known, channel, await self.reader.readexactly(size)

    async def send(self, frame: bytes) -> None:
        self.writer.write(frame)
        await self.writer.drain()

    def close(self) -> None:
        self.writer.transport.abort()


class TunnelRelay:
    def __init__(self, socket: WebSocket, tunnel: TakenTunnel) -> None:
        self.socket, self.tunnel = socket, tunnel
        self.link: DeviceLink | None = None
        self.connected = asyncio.Event()
        self.sent = self.received = 0
        self.active_s = time.monotonic()
        self.has_exited = False  # True once the shell's exit status has passed
        self.told = ""  # the last message about the task
        self.is_idle = False  # True while the session has given its device back
        self.news: Subscription | None = None
        self.refusals = 0
        self.code = NORMAL

    async def run(self) -> None:
        """Carry the tunnel to its end."""
        with changes.subscribe(self.tunnel.request_id) as news:
            self.news = news
            parts = (self._from_user(), self._from_task(), self._watch(news))
            tasks = [asyncio.create_task(part) for part in parts]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
                if self.link is not None:
                    self.link.close()
        why = next(str(e) for e in _errors(results, done, tasks))
        await self._say_goodbye(why)
        await in_thread(self.tunnel.tenant_id, self._end, why, wait_s=30.0)

    async def _say_goodbye(self, why: str) -> None:
        with contextlib.suppress(RuntimeError, WebSocketDisconnect, OSError):  # the user is gone
            async with asyncio.timeout(CONNECT_S):
                await self._say("ended", told=why)
                await self.socket.close(self.code)

    async def _say(self, word: str, **said: Any) -> None:
        await self.socket.send_text(json.dumps({"is": word, **said}))

    # --- bytes ---

    async def _from_user(self) -> None:
        while True:
            message = await self.socket.receive()
            if message["type"] == "websocket.disconnect":
                raise TunnelEnded("the user left")
            try:
                kind, frame = frame_of_message(message.get("bytes") or b"")
            except BadFrame as error:
                self.code = VIOLATION
                raise TunnelEnded(f"the user's side sent {error}") from error
            if kind == FrameKind.DATA:
                self._typed()
            self.sent += len(frame) - FRAME_HEAD.size
            await self.connected.wait()
            assert self.link is not None
            try:
                await self.link.send(frame)
            except ConnectionError:
                await asyncio.Event().wait()  # the task's last words come from the other side

    def _typed(self) -> None:
        self.active_s = time.monotonic()
        if self.is_idle and self.news is not None:
            self.news.wake()

    async def _from_task(self) -> None:
        await self.connected.wait()
        assert self.link is not None
        while True:
            try:
                kind, channel, body = await self.link.read()
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                raise TunnelEnded(self._why_closed()) from error
            except BadFrame as error:
                raise TunnelEnded(f"the task's side sent {error}") from error
            self.has_exited = self.has_exited or kind == FrameKind.EXIT
            self.received += len(body)
            await self.socket.send_bytes(message_of(kind, channel, body))

    def _why_closed(self) -> str:
        if self.has_exited:
            return "the shell has ended"
        return "the task's side was closed: its processes have ended, or its device was lost"

    # --- the task ---

    async def _watch(self, news: Subscription) -> None:
        while True:
            began_s = time.monotonic()
            try:
                place = await in_thread(self.tunnel.tenant_id, self._look, wait_s=SEEN_EVERY_S)
            except Unavailable:
                continue  # the database is busy; bytes pass meanwhile
            if place.over:
                await self._last_words()
                raise TunnelEnded(place.over)
            await self._follow(place)
            if place.is_idle and self._has_just_typed():
                await in_thread(self.tunnel.tenant_id, self._wake, wait_s=SEEN_EVERY_S)
                continue
            if changes.closing:
                self.code = TRY_LATER
                raise TunnelEnded("the service stops; connect again")
            await asyncio.sleep(max(0.0, LOOK_APART_S - (time.monotonic() - began_s)))
            again_s = 1.0 if place.runs and self.link is None else SEEN_EVERY_S
            await news.wait(again_s)

    def _has_just_typed(self) -> bool:
        """True if the user typed shortly before the session was found idle, or after that."""
        return time.monotonic() - self.active_s < JUST_S

    async def _last_words(self) -> None:
        """Pass on the last output of the task first."""
        if self.link is not None:
            await asyncio.sleep(LOOK_APART_S)

    async def _follow(self, place: TunnelPlace) -> None:
        if self.link is None and place.runs:
            await self._connect(place)
        self.is_idle = place.is_idle
        told = "" if place.runs else place.waits
        if told != self.told:
            self.told = told
            if told:
                await self._say("waiting", told=told)
            elif self.link is not None:
                await self._say("attached", device=place.device)

    async def _connect(self, place: TunnelPlace) -> None:
        try:
            ticket = self.tunnel.ticket(place.epoch, place.clock_s)
            self.link = await DeviceLink.opened(place, ticket)
        except (OSError, TimeoutError, BadFrame) as error:
            self.refusals += 1
            if self.refusals >= REFUSALS_MAX:
                log.warning("no tunnel to %s: %s", place.device, error)
                raise TunnelEnded(f"{place.device} opens no tunnel: {error}") from error
            return
        self.connected.set()
        self.told = ""
        await self._say("attached", device=place.device)

    def _look(self) -> TunnelPlace:
        with transaction() as session:
            return tunnels.look(
                session,
                self.tunnel,
                sent=self.sent,
                received=self.received,
                idle_s=time.monotonic() - self.active_s,
            )

    def _wake(self) -> None:
        with transaction() as session:
            tunnels.wake(session, self.tunnel)

    def _end(self, why: str) -> None:
        with transaction() as session:
            tunnels.end(session, self.tunnel, sent=self.sent, received=self.received, why=why)


def _errors(results: list[Any], done: set[Any], tasks: list[Any]) -> list[BaseException]:
    """Return why the tunnel ended: the errors of the tasks that are done; raises any unexpected
    error.
    """
    found = [r for r, t in zip(results, tasks, strict=True) if t in done]
    for error in found:
        if not isinstance(error, TunnelEnded | WebSocketDisconnect | OSError | RuntimeError):
            raise error
    return found
