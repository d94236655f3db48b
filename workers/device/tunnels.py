"""Carries tunnels between the API and the processes of this device's tasks.

The API connects as another host does (`workers.transfer.peer_auth`), and asks for a tunnel. It
names the hash of a ticket (`provisions.tunnel`) and proves that it knows the key of that ticket,
which is made with this device worker's secret. Then it sends the ticket itself, and gets one frame
as answer: OPENED, or REFUSED with a reason. After that, bytes pass in both directions, and are not
read here.

One thread serves all tunnels of the device. It waits for no side: bytes that one side does not take
yet are kept, up to `BUFFER_BYTES` for each direction; when these are full, the other side is not
read. A frozen task takes nothing, so the bytes for it wait in these buffers and in those of the
kernel.

The process in the task's sandbox has one end of a socket pair; the other end stays here. So no
descriptor of a tenant ever comes into this process.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from app.core.model.provisions.tunnel import (
    PER_TASK,
    TICKET_BYTES,
    BadTicket,
    FrameKind,
    TunnelTicket,
    frame_of,
)
from app.storage.signing import tunnel_key
from workers.transfer.peer_blocks import SharedPace

log = logging.getLogger(__name__)

BUFFER_BYTES = 2**17
TUNNELS_MAX = 64  # per device
TICKET_WITHIN_S = 5.0
LEAVE_WITHIN_S = 5.0
#: Limit for all tunnels of the device together, so that a flood leaves time to the supervisor.
BYTES_PER_S = 64 * 2**20
KEEPALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
_LENGTH = struct.Struct("!H")
_PIECE = 2**16

#: A function that gives the socket to the task's process; returns "", or why it cannot.
Opener = Callable[[TunnelTicket, socket.socket], str]


@dataclass(eq=False)
class Way:
    """Represents one direction of a tunnel: the bytes that `source` sent and `target` has not taken
    yet.
    """

    source: socket.socket
    target: socket.socket
    waiting: bytearray = field(default_factory=bytearray)
    is_over: bool = False  # the source sends no more
    is_lost: bool = False  # the target takes no more bytes; the other direction may still have some

    @property
    def is_read(self) -> bool:
        return not self.is_over and len(self.waiting) < BUFFER_BYTES


@dataclass(eq=False)
class OpenTunnel:
    """Represents a connection from the API.

    `inner` is our end of the socket pair, once the ticket is here.
    """

    outer: socket.socket
    named: str
    until_s: float
    came: bytearray = field(default_factory=bytearray)
    ticket: TunnelTicket | None = None
    inner: socket.socket | None = None
    ways: tuple[Way, ...] = ()
    is_leaving: bool = False  # all is sent; what still comes is discarded

    @property
    def is_timed(self) -> bool:
        return self.ticket is None or self.is_leaving


class TunnelServer(threading.Thread):
    """Serves all tunnels of a device; `call` runs a function in the supervisor's thread."""

    def __init__(
        self, secret: str, call: Callable[[Callable[[], None]], None], opener: Opener
    ) -> None:
        super().__init__(name="tunnels", daemon=True)
        self._secret, self._call, self._opener = secret, call, opener
        self._pace = SharedPace(BYTES_PER_S)
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._tunnels: set[OpenTunnel] = set()
        self._used: dict[str, float] = {}  # hash of a ticket -> until when it could be used again
        self._is_over = False

    # --- any thread ---

    def key(self, named: str) -> bytes:
        return bytes.fromhex(tunnel_key(self._secret, named))

    def serve(self, sock: socket.socket, named: str) -> None:
        self._soon(lambda: self._accept(sock, named))

    def close(self) -> None:
        self._soon(self._end)
        if self.ident is not None:
            self.join()

    def _soon(self, act: Callable[[], None]) -> None:
        self._inbox.put(act)
        os.eventfd_write(self._woken, 1)

    # --- this thread ---

    def run(self) -> None:
        self._selector.register(self._woken, selectors.EVENT_READ)
        while not self._is_over:
            for key, events in self._selector.select(self._timeout_s()):
                if key.data is None:
                    os.eventfd_read(self._woken)
                elif key.data in self._tunnels:
                    self._happened(key.data, key.fileobj, events)
            while not self._inbox.empty():
                self._inbox.get()()
            self._dismiss_silent()
        for tunnel in list(self._tunnels):
            self._drop(tunnel)
        self._selector.close()
        os.close(self._woken)

    def _end(self) -> None:
        self._is_over = True

    def _timeout_s(self) -> float | None:
        due_s = [tunnel.until_s for tunnel in self._tunnels if tunnel.is_timed]
        return max(0.0, min(due_s) - time.monotonic()) if due_s else None

    def _dismiss_silent(self) -> None:
        now_s = time.monotonic()
        for tunnel in list(self._tunnels):
            if tunnel.is_timed and now_s >= tunnel.until_s:
                self._drop(tunnel)

    def _accept(self, sock: socket.socket, named: str) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        if len(self._tunnels) >= TUNNELS_MAX:
            _refuse(sock, f"{TUNNELS_MAX} tunnels are open on this device, which is its limit")
            return
        tunnel = OpenTunnel(sock, named, time.monotonic() + TICKET_WITHIN_S)
        self._tunnels.add(tunnel)
        self._selector.register(sock, selectors.EVENT_READ, tunnel)

    def _happened(self, tunnel: OpenTunnel, fileobj: object, events: int) -> None:
        try:
            if tunnel.ticket is None:
                self._read_ticket(tunnel)
            elif tunnel.is_leaving:
                self._discard(tunnel)
            elif tunnel.ways:
                self._pass_on(tunnel)
        except OSError:
            self._drop(tunnel)
        except BadTicket as error:
            log.warning("a tunnel was refused: %s", error)
            self._refuse(tunnel, str(error))

    # --- the ticket ---

    def _read_ticket(self, tunnel: OpenTunnel) -> None:
        """Read the ticket and not one byte more: what follows is for the task's process."""
        wanted = _LENGTH.size
        if len(tunnel.came) >= _LENGTH.size:
            wanted += _LENGTH.unpack_from(tunnel.came)[0]
        if wanted > TICKET_BYTES:
            raise BadTicket("the ticket is too long")
        piece = tunnel.outer.recv(wanted - len(tunnel.came))
        if not piece:
            raise ConnectionResetError("the API closed the connection")
        tunnel.came += piece
        whole = _LENGTH.size + _LENGTH.unpack_from(tunnel.came)[0] if len(tunnel.came) > 1 else 0
        if whole and len(tunnel.came) == whole:
            self._check(tunnel, bytes(tunnel.came[_LENGTH.size :]))

    def _check(self, tunnel: OpenTunnel, body: bytes) -> None:
        """Check the ticket, and ask the supervisor to open the tunnel; raises BadTicket."""
        now_s = time.time()
        self._used = {named: until_s for named, until_s in self._used.items() if until_s > now_s}
        if hashlib.sha256(body).hexdigest() != tunnel.named:
            raise BadTicket("the ticket is not the one that was named")
        ticket = TunnelTicket.decoded(body)
        if ticket.expires_s <= now_s:
            raise BadTicket("the ticket has expired")
        if tunnel.named in self._used:
            raise BadTicket("the ticket was used before")
        self._used[tunnel.named] = ticket.expires_s
        of_task = [s for s in self._tunnels if s.ticket and s.ticket.task == ticket.task]
        if len(of_task) >= PER_TASK:
            raise BadTicket(f"the task has {PER_TASK} open tunnels, which is its limit")
        tunnel.ticket = ticket
        self._selector.unregister(tunnel.outer)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        tunnel.inner = ours
        self._call(lambda: self._ask(tunnel, ticket, theirs))

    def _ask(self, tunnel: OpenTunnel, ticket: TunnelTicket, theirs: socket.socket) -> None:
        """Open the tunnel; runs in the supervisor's thread."""
        with theirs:
            why = self._opener(ticket, theirs)
        self._soon(lambda: self._refuse(tunnel, why) if why else self._opened(tunnel))

    def _opened(self, tunnel: OpenTunnel) -> None:
        assert tunnel.inner is not None
        inwards, outwards = Way(tunnel.outer, tunnel.inner), Way(tunnel.inner, tunnel.outer)
        outwards.waiting += frame_of(FrameKind.OPENED)
        tunnel.ways = inwards, outwards
        self._happened(tunnel, None, 0)

    def _refuse(self, tunnel: OpenTunnel, why: str) -> None:
        if tunnel in self._tunnels:
            self._tunnels.discard(tunnel)
            self._forget(tunnel.outer)
            if tunnel.inner is not None:
                tunnel.inner.close()
            _refuse(tunnel.outer, why)

    # --- passing bytes on ---

    def _pass_on(self, tunnel: OpenTunnel) -> None:
        for way in tunnel.ways:
            self._read(way)
            self._write(way)
        inwards, outwards = tunnel.ways
        if inwards.is_over and not inwards.waiting:
            self._drop(tunnel)  # the API has gone, and the task has all of it
        elif outwards.is_over and not outwards.waiting:
            self._leave(tunnel)
        else:
            self._await(tunnel)

    def _leave(self, tunnel: OpenTunnel) -> None:
        """End the tunnel after the task has closed its end.

        If bytes still come in, closing at once would reset the connection, and the API could lose
        the last words.
        """
        assert tunnel.inner is not None
        self._forget(tunnel.inner)
        tunnel.inner.close()
        tunnel.inner = None
        tunnel.outer.shutdown(socket.SHUT_WR)
        tunnel.is_leaving, tunnel.until_s = True, time.monotonic() + LEAVE_WITHIN_S
        self._forget(tunnel.outer)
        self._selector.register(tunnel.outer, selectors.EVENT_READ, tunnel)

    def _discard(self, tunnel: OpenTunnel) -> None:
        try:
            is_over = not tunnel.outer.recv(_PIECE)
        except BlockingIOError:  # the event was of the time before
            return
        if is_over:
            self._drop(tunnel)

    def _read(self, way: Way) -> None:
        if not way.is_read:
            return
        try:
            piece = way.source.recv(_PIECE)
        except BlockingIOError:
            return
        except ConnectionError:
            piece = b""
        way.is_over = not piece
        way.waiting += b"" if way.is_lost else piece
        self._pace.wait(len(piece))

    def _write(self, way: Way) -> None:
        if not way.waiting:
            return
        try:
            sent = way.target.send(way.waiting)
        except BlockingIOError:
            return
        except ConnectionError:
            sent, way.is_lost = len(way.waiting), True
        del way.waiting[:sent]

    def _await(self, tunnel: OpenTunnel) -> None:
        inwards, outwards = tunnel.ways
        self._watch(tunnel, tunnel.outer, reads=inwards, writes=outwards)
        self._watch(tunnel, inwards.target, reads=outwards, writes=inwards)

    def _watch(self, tunnel: OpenTunnel, sock: socket.socket, *, reads: Way, writes: Way) -> None:
        events = selectors.EVENT_READ if reads.is_read else 0
        events |= selectors.EVENT_WRITE if writes.waiting else 0
        known = self._selector.get_map().get(sock)
        if known is not None and not events:
            self._selector.unregister(sock)
        elif known is not None and known.events != events:
            self._selector.modify(sock, events, tunnel)
        elif known is None and events:
            self._selector.register(sock, events, tunnel)

    def _forget(self, sock: socket.socket) -> None:
        if self._selector.get_map().get(sock) is not None:
            self._selector.unregister(sock)

    def _drop(self, tunnel: OpenTunnel) -> None:
        self._tunnels.discard(tunnel)
        for sock in (tunnel.outer, tunnel.inner):
            if sock is not None:
                self._forget(sock)
                sock.close()


def _refuse(sock: socket.socket, why: str) -> None:
    """Send the reason, as far as the socket takes it at once, and close the socket."""
    with sock:
        try:
            sock.send(frame_of(FrameKind.REFUSED, 0, why.encode()))
        except OSError as error:
            log.info("the API was not told why a tunnel was refused: %s", error)
