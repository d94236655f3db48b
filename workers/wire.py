"""JSON messages and file descriptors between a supervisor and the processes it owns.

One frame is four bytes of length and that many bytes of JSON, over a Unix stream socket.  File
descriptors travel beside the frame that they belong to.

A tenant's process is believed in nothing: its frames are short (`TENANT_FRAME_BYTES`), their depth
and size are looked at before they are parsed, and no call waits for it (`TenantWire`).  What it
says that is longer comes in parts (`ToSupervisor`, `Parts`).
"""

from __future__ import annotations

import array
import fcntl
import json
import math
import mmap
import os
import re
import select
import socket
import struct
import time
from collections import deque
from typing import Any

JSON = dict[str, Any]

LIMIT_BYTES = 4 * 2**20  # the largest frame, and the longest message in parts, that is taken
READS_LIMIT = 128  # at once, so that nobody who writes without end holds up a reader
TENANT_FRAME_BYTES = 64 * 1024  # the largest frame that is taken from a tenant's process
TENANT_FRAMES_AT_ONCE = 64
TENANT_READS_AT_ONCE = 4
UNSENT_LIMIT_BYTES = 4 * LIMIT_BYTES  # for one process that does not read
DEPTH_LIMIT = 64
CONTAINERS_LIMIT = 2_000  # lists and tables in one frame,
PARTS_CONTAINERS_LIMIT = 250_000  # and in what came in parts: of a large graph, what passed
PART_CHARACTERS = 24_000  # of a message in parts; escaped once more they fit into a frame
FDS_LIMIT = 64
#: What a resident is born with: control, bulk, trust, stdout, stderr, slab.
FDS_PER_RESIDENT = 6

_LENGTH = struct.Struct("!I")
_DEADLINE = struct.Struct("=q")
_F_SEAL_FUTURE_WRITE = 0x10
_FD_BYTES = array.array("i").itemsize


class Garbled(Exception):
    """The other side sent what is no frame; nothing after it can be trusted."""


class Wire:
    """One end of a socket.  `send` blocks until all is written; `receive` never blocks."""

    limit_bytes = LIMIT_BYTES

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.closed = False  # the other end is gone
        self.fds: list[int] = []
        self._received = bytearray()
        self._own_poll = select.poll()
        self._own_poll.register(sock, select.POLLIN)

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: JSON, fds: list[int] | None = None) -> None:
        """Raises OSError if the other end is gone, TimeoutError if it does not read."""
        body = json.dumps(message).encode()
        frame = memoryview(_LENGTH.pack(len(body)) + body)
        sent = socket.send_fds(self.sock, [frame], fds) if fds else self.sock.send(frame)
        self.sock.sendall(frame[sent:])

    def receive(self) -> list[JSON]:
        """What has arrived whole, up to a limit; raises Garbled."""
        for _ in range(READS_LIMIT):
            if self.closed or not self.wait(0):
                break
            self._read()
        messages = []
        while (message := self._take()) is not None:
            messages.append(message)
        return messages

    def wait(self, timeout_s: float | None = None) -> bool:
        """True if something can be read within `timeout_s`."""
        timeout_ms = None if timeout_s is None else math.ceil(timeout_s * 1000)
        return bool(self._own_poll.poll(timeout_ms))

    def close(self) -> None:
        self.sock.close()
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()

    def _read(self) -> None:
        try:
            data, rights, flags, _ = self.sock.recvmsg(
                1 << 16, socket.CMSG_SPACE(FDS_LIMIT * _FD_BYTES), socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionError:
            data, rights, flags = b"", [], 0
        except BlockingIOError:
            return
        self.fds += _descriptors(rights)
        if flags & socket.MSG_CTRUNC:
            raise Garbled(f"more than {FDS_LIMIT} file descriptors at once")
        self._received += data
        self.closed = not data

    def _take(self) -> JSON | None:
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if length > self.limit_bytes:
            raise Garbled(f"a frame of {length} bytes; the limit is {self.limit_bytes}")
        end = _LENGTH.size + length
        if len(self._received) < end:
            return None
        body = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return self._parsed(body)

    def _parsed(self, body: bytes) -> JSON:
        return _message(body)


class ToSupervisor(Wire):
    """A resident's end: what is longer than a frame may be goes in parts."""

    def send(self, message: JSON, fds: list[int] | None = None) -> None:
        text = json.dumps(message)
        if len(text) <= TENANT_FRAME_BYTES:
            super().send(message, fds)
            return
        for at in range(0, len(text), PART_CHARACTERS):
            end = at + PART_CHARACTERS
            super().send({"is": "part", "text": text[at:end], "last": end >= len(text)})


class Parts:
    """A message of a tenant's process that comes in parts."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._size = 0

    def add(self, message: JSON) -> bytes | None:
        """The whole, once its last part is here; raises Garbled."""
        text, last = message.get("text"), message.get("last")
        if not isinstance(text, str) or not isinstance(last, bool) or not text.isascii():
            raise Garbled("a part that is none")
        self._size += len(text)
        if self._size > LIMIT_BYTES:
            raise Garbled(f"a message of more than {LIMIT_BYTES} bytes in parts")
        self._texts.append(text)
        if not last:
            return None
        whole = "".join(self._texts).encode()
        self._texts, self._size = [], 0
        return whole


def parsed_parts(body: bytes) -> JSON:
    """The message that came in parts; takes a while.  Raises Garbled."""
    must_be_bounded(body, PARTS_CONTAINERS_LIMIT)
    message = _message(body)
    if message["is"] == "part":
        raise Garbled("a part of parts")
    return message


class TenantWire(Wire):
    """The device worker's end of the socket to a tenant's process: no call waits for that, and none
    takes long.
    """

    limit_bytes = TENANT_FRAME_BYTES

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        sock.setblocking(False)
        self.has_more = False  # of what has arrived: the next `receive` gives it
        self.read_bytes = 0
        self.unread_since_us: int | None = None  # since then it does not read what is sent
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()
        self._unsent_bytes = 0

    def send(self, message: JSON, fds: list[int] | None = None) -> None:
        """Raises OSError if the other end is gone.  What it does not read yet is sent later."""
        body = json.dumps(message).encode()
        frame = memoryview(_LENGTH.pack(len(body)) + body)
        self._unsent.append((frame, [os.dup(fd) for fd in fds or []]))
        self._unsent_bytes += len(frame)
        self.flush()

    def flush(self) -> None:
        """Send what could not be sent yet, as far as the other end reads; raises OSError."""
        while self._unsent:
            frame, fds = self._unsent[0]
            try:
                sent = socket.send_fds(self.sock, [frame], fds) if fds else self.sock.send(frame)
            except BlockingIOError:
                self.unread_since_us = self.unread_since_us or time.monotonic_ns() // 1000
                return
            self.unread_since_us = None
            self._unsent_bytes -= sent
            for fd in fds:
                os.close(fd)
            self._unsent.popleft()
            if sent < len(frame):
                self._unsent.appendleft((frame[sent:], []))

    @property
    def is_overfull(self) -> bool:
        return self._unsent_bytes > UNSENT_LIMIT_BYTES

    def receive(self) -> list[JSON]:
        """A few messages of what has arrived; raises Garbled."""
        messages: list[JSON] = []
        for _ in range(TENANT_READS_AT_ONCE):
            while len(messages) < TENANT_FRAMES_AT_ONCE:
                if (message := self._take()) is None:
                    break
                messages.append(message)
            if len(messages) == TENANT_FRAMES_AT_ONCE or self.closed or not self.wait(0):
                break
            before = len(self._received)
            self._read()
            self.read_bytes += len(self._received) - before
        self.has_more = self._has_whole()
        return messages

    def close(self) -> None:
        for _, fds in self._unsent:
            self.fds += fds
        self._unsent.clear()
        super().close()

    def _has_whole(self) -> bool:
        if len(self._received) < _LENGTH.size:
            return False
        (length,) = _LENGTH.unpack_from(self._received)
        return length > self.limit_bytes or len(self._received) >= _LENGTH.size + length

    def _parsed(self, body: bytes) -> JSON:
        must_be_bounded(body, CONTAINERS_LIMIT)
        return _message(body)


# One that does not end is taken to the end: no byte is looked at twice.
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_BRACKETS = re.compile(rb"[\[\]{}]")


def must_be_bounded(body: bytes, containers: int) -> None:
    """Raises Garbled for what would take long to parse, or nests deeply."""
    bare = _STRINGS.sub(b"", body)
    if bare.count(b"[") + bare.count(b"{") > containers:
        raise Garbled(f"more than {containers} lists and tables in a message")
    depth = 0
    for bracket in _BRACKETS.findall(bare):
        depth += 1 if bracket in b"[{" else -1
        if depth > DEPTH_LIMIT:
            raise Garbled(f"a message that nests deeper than {DEPTH_LIMIT}")


def _message(body: bytes) -> JSON:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Garbled(f"a frame that is not JSON: {error}") from error
    if not isinstance(message, dict) or not isinstance(message.get("is"), str):
        raise Garbled("a frame that is no message")
    return message


def _descriptors(rights: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in rights:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % _FD_BYTES])
    return fds.tolist()


def pair() -> tuple[Wire, socket.socket]:
    """Our end, wrapped, and the end to give away."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.settimeout(5.0)  # whoever does not read by then is as good as dead
    return Wire(ours), theirs


def tenant_pair() -> tuple[TenantWire, socket.socket]:
    """The same, for a tenant's process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return TenantWire(ours), theirs


class Trust:
    """Until when a device may step, in shared memory: a deadline that needs no message.

    The supervisor moves it; its residents read it before every step, even while the supervisor
    itself hangs.  Microseconds of the host's monotonic clock, which all its processes share.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("trust", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, mmap.PAGESIZE)
        self._page = mmap.mmap(self.fd, mmap.PAGESIZE)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        except OSError:  # before Linux 5.1: a tenant could then outstay its own trust, once
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)

    def extend(self, until_us: int) -> None:
        _DEADLINE.pack_into(self._page, 0, until_us)

    def close(self) -> None:
        self._page.close()
        os.close(self.fd)


class TrustSeen:
    """A resident's view of the supervisor's `Trust`."""

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, mmap.PAGESIZE, prot=mmap.PROT_READ)
        os.close(fd)

    def left_us(self) -> int:
        return int(_DEADLINE.unpack_from(self._page)[0]) - time.monotonic_ns() // 1000
