"""JSON messages and file descriptors between a supervisor and the processes it owns.

One frame is four bytes of length and that many bytes of JSON, over a Unix stream socket.  File
descriptors travel beside the frame that they belong to.  Whoever reads from a tenant's process
reads with a limit and believes nothing.
"""

from __future__ import annotations

import array
import fcntl
import json
import math
import mmap
import os
import select
import socket
import struct
import time
from typing import Any

JSON = dict[str, Any]

LIMIT_BYTES = 4 * 2**20  # the largest frame either side takes
READS_LIMIT = 128  # at once, so that nobody who writes without end holds up a reader
FDS_LIMIT = 64
#: What a resident is born with: control, bulk, trust, stdout, stderr, house, slab.
FDS_PER_RESIDENT = 7

_LENGTH = struct.Struct("!I")
_DEADLINE = struct.Struct("=q")
_F_SEAL_FUTURE_WRITE = 0x10
_FD_BYTES = array.array("i").itemsize


class Garbled(Exception):
    """The other side sent what is no frame; nothing after it can be trusted."""


class Wire:
    """One end of a socket.  `send` blocks until all is written; `receive` never blocks."""

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
        self.fds += _descriptors(rights)
        if flags & socket.MSG_CTRUNC:
            raise Garbled(f"more than {FDS_LIMIT} file descriptors at once")
        self._received += data
        self.closed = not data

    def _take(self) -> JSON | None:
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if length > LIMIT_BYTES:
            raise Garbled(f"a frame of {length} bytes; the limit is {LIMIT_BYTES}")
        end = _LENGTH.size + length
        if len(self._received) < end:
            return None
        body = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
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
    ours.settimeout(5.0)  # nobody may hold up the supervisor by not reading
    return Wire(ours), theirs


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
