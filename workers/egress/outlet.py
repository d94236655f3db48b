"""Serves the connections of one task within its rules and limits, and counts its use of the
network.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from app.core.device.token_bucket import TokenBucket
from app.core.model.provisions.network_policy import Destination, is_allowed
from app.core.security.proxy_request import (
    HEAD_BYTES,
    TUNNEL_OPEN,
    NotServed,
    ProxyRequest,
    answer,
    read_request,
)
from workers.egress.addresses import Connector

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 64  # at once, per task
RESOLVED_MAX = 4  # most connections of a task that are being opened at once
NEW_BURST, NEW_PER_S = 128, 32.0  # limit of new connections of a task
TOLD_BURST, TOLD_PER_S = 10, 0.2  # limit of refusals that are reported to the owner
HEAD_S = 10.0  # time limit until a head has arrived
ANSWER_S = 5.0  # time limit until a refusal was read
IDLE_S = 900.0  # a connection ends after so long without a byte in either direction
IDLE_LOOK_S = 30.0
BLOCK_BYTES = 64 * 1024

Told = Callable[[str], None]


@dataclass(slots=True)
class OutletUse:
    """Counts a task's use of its outlet."""

    connections: int = 0
    refused: int = 0
    sent_bytes: int = 0  # by the task
    received_bytes: int = 0  # by the task

    def numbers(self) -> list[int]:
        return [self.connections, self.refused, self.sent_bytes, self.received_bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutletRules:
    """Lists what a task may reach.

    `withdrawn` was allowed when the task was submitted, and no longer is.
    """

    allow: tuple[Destination, ...]
    withdrawn: tuple[Destination, ...] = ()

    def check(self, wanted: Destination) -> None:
        """Raise NotServed if the task may not reach the destination."""
        if is_allowed(self.allow, wanted):
            return
        if is_allowed(self.withdrawn, wanted):
            raise NotServed(403, f"the policy of the tenant does not allow {wanted} any more")
        raise NotServed(403, f"{wanted} is not in network.allow of this task")


@dataclass
class Outlet:
    """Accepts connections at a socket that only one task can reach.

    `tell` takes a sentence about a refusal, for the owner of the task.
    """

    listener: socket.socket
    rules: OutletRules
    connector: Connector
    tell: Told
    idle_s: float = IDLE_S
    use: OutletUse = field(default_factory=OutletUse)
    untold: int = 0  # refusals since the last report

    def __post_init__(self) -> None:
        self.listener.setblocking(False)
        self._new = TokenBucket(NEW_BURST, NEW_PER_S)
        self._told = TokenBucket(TOLD_BURST, TOLD_PER_S)
        self._making = asyncio.Semaphore(RESOLVED_MAX)
        self._places = asyncio.Semaphore(2 * CONNECTIONS_MAX)
        self._open: set[asyncio.Task[None]] = set()
        self._serving = asyncio.create_task(self._serve())

    @property
    def open_connections(self) -> int:
        return len(self._open)

    async def close(self) -> None:
        """End the outlet and all of its connections."""
        tasks = [self._serving, *self._open]
        for task in tasks:
            task.cancel()
        # no connection waits for the listener any more
        await asyncio.gather(*tasks, return_exceptions=True)
        self.listener.close()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._places.acquire()
            try:
                sock, _ = await loop.sock_accept(self.listener)
            except OSError:
                self._places.release()
                await asyncio.sleep(1.0)  # no descriptors are left: let connections end
                continue
            task = asyncio.create_task(self._connection(sock))
            self._open.add(task)
            task.add_done_callback(self._ended)
            now_us = time.monotonic_ns() // 1000
            self._new.take(1, now_us)
            if debt_us := self._new.debt_us(now_us):  # only this task waits
                await asyncio.sleep(debt_us / 1e6)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        self._places.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a connection failed", exc_info=error)

    async def _connection(self, sock: socket.socket) -> None:
        with sock:
            sock.setblocking(False)
            try:
                request, rest = await self._request(sock)
                async with self._making:
                    there = await self.connector.connect(request.destination)
            except NotServed as refusal:
                await self._refuse(sock, refusal)
                return
            except OSError:
                return  # the task has closed the connection
            with there:
                self.use.connections += 1
                await Relay(sock, there, self.use, self.idle_s).run(
                    to_task=TUNNEL_OPEN if request.is_tunnel else b"",
                    to_server=request.first_bytes + rest,
                )

    async def _request(self, sock: socket.socket) -> tuple[ProxyRequest, bytes]:
        """Return an allowed request, and the bytes behind its head; raises NotServed."""
        try:
            head, rest = await asyncio.wait_for(_head(sock), HEAD_S)
        except TimeoutError as error:
            raise NotServed(408, f"no request came in {HEAD_S:g} s") from error
        if self.open_connections > CONNECTIONS_MAX:
            told = f"a task can have {CONNECTIONS_MAX} connections at once"
            raise NotServed(429, f"{told}; close some, or retry later")
        request = read_request(head)
        self.rules.check(request.destination)
        return request, rest

    async def _refuse(self, sock: socket.socket, refusal: NotServed) -> None:
        self.use.refused += 1
        self._tell_owner(refusal.told)
        # the other side is gone, or does not read; includes TimeoutError
        with contextlib.suppress(OSError):
            said = answer(refusal.status, refusal.told)
            await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(sock, said), ANSWER_S)
            sock.shutdown(socket.SHUT_WR)

    def _tell_owner(self, told: str) -> None:
        now_us = time.monotonic_ns() // 1000
        if self._told.debt_us(now_us) or self._told.left < 1:
            self.untold += 1
            return
        self._told.take(1, now_us)
        more = f" ({self.untold} more refusals before it are not listed)" if self.untold else ""
        self.untold = 0
        self.tell(told + more)


async def _head(sock: socket.socket) -> tuple[bytes, bytes]:
    """Read a head; return it and the bytes behind it."""
    loop, read = asyncio.get_running_loop(), b""
    while (end := read.find(b"\r\n\r\n")) < 0:
        if len(read) >= HEAD_BYTES:
            raise NotServed(431, f"the head of a request must be at most {HEAD_BYTES} bytes")
        data = await loop.sock_recv(sock, HEAD_BYTES - len(read))
        if not data:
            raise ConnectionResetError
        read += data
    return read[: end + 4], read[end + 4 :]


class Relay:
    """Passes bytes between a task and a server until both have ended, or both are silent.

    Each direction holds at most one block. So a side that does not read stops the other side, and
    no other connection.
    """

    def __init__(
        self, task: socket.socket, server: socket.socket, use: OutletUse, idle_s: float
    ) -> None:
        self._task, self._server, self._use, self._idle_s = task, server, use, idle_s
        self._moved_s = time.monotonic()

    async def run(self, *, to_task: bytes, to_server: bytes) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                ways = [
                    group.create_task(self._out(to_server)),
                    group.create_task(self._back(to_task)),
                ]
                watch = group.create_task(self._watch())
                await asyncio.wait(ways)
                watch.cancel()
        except* OSError:
            pass  # one side reset the connection, or both are idle: the bytes are counted anyway

    async def _out(self, first: bytes) -> None:
        def count(sent: int) -> None:
            self._use.sent_bytes += sent

        await self._pass_on(self._task, self._server, first, count)

    async def _back(self, first: bytes) -> None:
        def count(sent: int) -> None:
            self._use.received_bytes += sent

        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._task, first)  # the proxy's own bytes are not counted
        await self._pass_on(self._server, self._task, b"", count)

    async def _pass_on(
        self,
        source: socket.socket,
        target: socket.socket,
        first: bytes,
        count: Callable[[int], None],
    ) -> None:
        loop, block = asyncio.get_running_loop(), memoryview(bytearray(BLOCK_BYTES))
        if first:
            await loop.sock_sendall(target, first)
            count(len(first))
        while size := await loop.sock_recv_into(source, block):
            self._moved_s = time.monotonic()
            count(size)
            await loop.sock_sendall(target, block[:size])
            self._moved_s = time.monotonic()
        with contextlib.suppress(OSError):  # the other side has closed both directions
            target.shutdown(socket.SHUT_WR)

    async def _watch(self) -> None:
        while (left_s := self._moved_s + self._idle_s - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s + 0.01, IDLE_LOOK_S))
        raise TimeoutError  # ends the group, and both directions
