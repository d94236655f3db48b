"""Passes JSON messages and file descriptors between a supervisor and the processes that it owns.

A frame is four bytes of length and that many bytes of JSON, over a Unix stream socket.  File
descriptors travel with the frame that they belong to.

A tenant's process is not trusted: its frames are short (`TENANT_FRAME_BYTES`), their depth and size
are checked before they are parsed, and no call waits for it (`TenantWire`).  Longer messages of a
tenant's process come in parts (`ToSupervisor`, `Parts`).
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

LIMIT_BYTES = 4 * 2**20  # limit of a frame, and of a message in parts
READS_LIMIT = 128  # most reads in one `receive`, so that an endless writer cannot block the reader
TENANT_FRAME_BYTES = 64 * 1024  # limit of a frame from a tenant's process
TENANT_FRAMES_AT_ONCE = 64
TENANT_READS_AT_ONCE = 4
UNSENT_LIMIT_BYTES = 4 * LIMIT_BYTES  # most bytes that wait for one process that does not read
DEPTH_LIMIT = 64
CONTAINERS_LIMIT = 2_000  # lists and tables in one frame
# lists and tables in a message in parts, enough for the copies of a large graph
PARTS_CONTAINERS_LIMIT = 250_000
# length of one part of a message; with JSON's escapes, a part still fits into a frame
PART_CHARACTERS = 24_000
FDS_LIMIT = 64
#: The descriptors that a new resident gets: control, bulk, trust, stdout, stderr, slab; a resident
#: with a network gets one more, for the listener of its proxy.
FDS_PER_RESIDENT = 6
#: The descriptors of a process beside a resident: control, tunnel, trust, pidfd of the resident,
#: and a file in memory with the data that it needs to begin.
FDS_BESIDE = 5

_LENGTH = struct.Struct("!I")
_DEADLINE = struct.Struct("=q")
_F_SEAL_FUTURE_WRITE = 0x10
_FD_BYTES = array.array("i").itemsize


class Garbled(Exception):
    """Raised for an invalid frame; nothing after it can be trusted."""


class Wire:
    """Represents an end of a socket. `send` blocks until all is written; `receive` never blocks."""

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
        """Send a message; raises OSError if the other end is gone, TimeoutError if it stops
        reading.
        """
        body = json.dumps(message).encode()
        frame = memoryview(_LENGTH.pack(len(body)) + body)
        sent = socket.send_fds(self.sock, [frame], fds) if fds else self.sock.send(frame)
        self.sock.sendall(frame[sent:])

    def receive(self) -> list[JSON]:
        """Return the complete messages that have arrived, up to a limit; raises Garbled."""
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
    """Represents the resident's end of the socket. Messages longer than a frame are sent in
    parts.
    """

    def send(self, message: JSON, fds: list[int] | None = None) -> None:
        text = json.dumps(message)
        if len(text) <= TENANT_FRAME_BYTES:
            super().send(message, fds)
            return
        for at in range(0, len(text), PART_CHARACTERS):
            end = at + PART_CHARACTERS
            super().send({"is": "part", "text": text[at:end], "last": end >= len(text)})


class Parts:
    """Collects the parts of a message of a tenant's process."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._size = 0

    def add(self, message: JSON) -> bytes | None:
        """Add a part; return the whole message when its last part has come. Raises Garbled."""
        text, last = message.get("text"), message.get("last")
        if not isinstance(text, str) or not isinstance(last, bool) or not text.isascii():
            raise Garbled("an invalid part of a message")
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
    """Parse a message that came in parts.  Slow; raises Garbled."""
    must_be_bounded(body, PARTS_CONTAINERS_LIMIT)
    message = _message(body)
    if message["is"] == "part":
        raise Garbled("a part inside a message that came in parts")
    return message


class TenantWire(Wire):
    """Represents the device worker's end of the socket to a tenant's process; no call blocks or
    takes long.
    """

    limit_bytes = TENANT_FRAME_BYTES

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        sock.setblocking(False)
        self.has_more = False  # a complete frame has arrived; the next `receive` returns it
        self.read_bytes = 0
        self.unread_since_us: int | None = None  # since when the process has not read what was sent
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()
        self._unsent_bytes = 0

    def send(self, message: JSON, fds: list[int] | None = None) -> None:
        """Send a message; what the other end does not read now is sent later. Raises OSError."""
        body = json.dumps(message).encode()
        frame = memoryview(_LENGTH.pack(len(body)) + body)
        self._unsent.append((frame, [os.dup(fd) for fd in fds or []]))
        self._unsent_bytes += len(frame)
        self.flush()

    def flush(self) -> None:
        """Send waiting frames, as far as the other end reads; raises OSError."""
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
        """Return a few of the messages that have arrived; raises Garbled."""
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
        length: int = _LENGTH.unpack_from(self._received)[0]
        return length > self.limit_bytes or len(self._received) >= _LENGTH.size + length

    def _parsed(self, body: bytes) -> JSON:
        must_be_bounded(body, CONTAINERS_LIMIT)
        return _message(body)


# A string without an end matches up to the end of the message, so that no byte is scanned twice.
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_BRACKETS = re.compile(rb"[\[\]{}]")


def must_be_bounded(body: bytes, containers: int) -> None:
    """Raise Garbled for a body that is slow to parse or nests deeply."""
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
        raise Garbled("a frame without a message")
    return message


def _descriptors(rights: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in rights:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % _FD_BYTES])
    return fds.tolist()


def pair() -> tuple[Wire, socket.socket]:
    """Return our end, wrapped, and the end to give away."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.settimeout(5.0)  # a process that has not read by then counts as dead
    return Wire(ours), theirs


def tenant_pair() -> tuple[TenantWire, socket.socket]:
    """Return the same pair for a tenant's process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return TenantWire(ours), theirs


class Trust:
    """Holds the device's trust deadline in shared memory, so that it needs no message.

    The supervisor moves the deadline.  Its residents read it before every step, even while the
    supervisor hangs.  Unit: microseconds of the host's monotonic clock, which all its processes
    share.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("trust", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, mmap.PAGESIZE)
        self._page = mmap.mmap(self.fd, mmap.PAGESIZE)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        # before Linux 5.1 there was no such seal, and a tenant could extend its own trust
        except OSError:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)

    def extend(self, until_us: int) -> None:
        _DEADLINE.pack_into(self._page, 0, until_us)

    def close(self) -> None:
        self._page.close()
        os.close(self.fd)


class TrustSeen:
    """A resident's read-only view of the supervisor's `Trust`."""

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, mmap.PAGESIZE, prot=mmap.PROT_READ)
        os.close(fd)

    def left_us(self) -> int:
        return int(_DEADLINE.unpack_from(self._page)[0]) - time.monotonic_ns() // 1000
