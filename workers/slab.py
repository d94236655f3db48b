"""The host memory in which a resident's images lie, shared with its device worker.

A slab is a memfd that the device worker makes before the resident is born.  Its length is the most
that an image may take; it is sealed at that, and memory is only where something was written.  So
the kernel keeps the bound, nobody can cut it off under a reader (who would die of SIGBUS), and how
much it really takes can be asked of the kernel (`held_bytes`), whatever the resident says.

    0          an image, as its `layout` says
    limit      an index: the layout and what belongs to it, of up to INDEX_LIMIT_BYTES

An index is lines of JSON, each for one storage or tensor or another small thing: so its reader, who
does not believe in it, never parses much at once, and stops at too much.

The resident maps it and copies into it at the speed of memory; the device worker reads.  While the
device worker reads an image, from `saving` to `kept`, the resident leaves it alone; if it does not,
it spoils its own checkpoint only.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

JSON = dict[str, Any]

INDEX_LIMIT_BYTES = 24 * 2**20  # about 120 bytes for a storage, and as many for a tensor
LINES_LIMIT = 250_000
LINE_LIMIT_BYTES = 64 * 1024
VALUES_LIMIT = 1_000  # in one line
_PIECE_BYTES = 1 << 18
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, from Linux 5.14 on
_REMOVE = 9  # MADV_REMOVE
_STEP = 2**24  # memory is given out in so large pieces, so that nobody waits for long


class BadIndex(Exception):
    """What lies where an index should be is none."""


# --- both sides -----------------------------------------------------------------------------------


def made(limit_bytes: int) -> int:
    """A new one, for images of up to `limit_bytes`; its descriptor."""
    fd = os.memfd_create("slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, _pages(limit_bytes) + INDEX_LIMIT_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def limit_bytes(fd: int) -> int:
    """How long an image in it may be."""
    return os.fstat(fd).st_size - INDEX_LIMIT_BYTES


def held_bytes(fd: int) -> int:
    """The memory that it takes."""
    return os.fstat(fd).st_blocks * 512


def write_index(fd: int, body: JSON) -> int:
    """Keep `body` behind the image; its length in bytes.  Raises BadIndex if it is too long."""
    return _write_at(fd, limit_bytes(fd), body, INDEX_LIMIT_BYTES)


def read_index(fd: int, size: int) -> JSON:
    """What was kept, in a copy; raises BadIndex."""
    return _read_at(fd, limit_bytes(fd), size, INDEX_LIMIT_BYTES)


def _write_at(fd: int, start: int, body: JSON, limit: int) -> int:
    text = "".join(f"{json.dumps(line)}\n" for line in _lines(body)).encode()
    if len(text) > limit:
        raise BadIndex(f"it has {len(text)} bytes, and {limit} are allowed")
    at = 0
    while at < len(text):
        at += os.pwrite(fd, memoryview(text)[at:], start + at)
    return len(text)


def _read_at(fd: int, start: int, size: int, limit: int) -> JSON:
    if size > limit:
        raise BadIndex(f"it has {size} bytes, and {limit} are allowed")
    body: JSON = {}
    for count, line in enumerate(_read_lines(fd, start, size)):
        if count >= LINES_LIMIT:
            raise BadIndex(f"it has more than {LINES_LIMIT} lines")
        try:
            _take_line(body, line)
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
            raise BadIndex(f"a line of it is none: {error!r:.200}") from error
    if not body:
        raise BadIndex("it is empty")
    return body


# A line is [KEY, VALUE], or [KEY, NAME, VALUE] of a table, or [KEY, NAME, VALUE, "more"] of a list
# in that table.
def _lines(body: JSON) -> Iterator[list[Any]]:
    for key, value in body.items():
        if not isinstance(value, dict):
            yield [key, value]
            continue
        yield [key, {}]
        for name, part in value.items():
            if not (isinstance(part, list | tuple) and part and isinstance(part[0], dict)):
                yield [key, name, part]
                continue
            yield [key, name, []]
            for one in part:
                yield [key, name, one, "more"]


def _take_line(body: JSON, line: bytes) -> None:
    if line.count(b",") + line.count(b"[") + line.count(b"{") > VALUES_LIMIT:
        raise ValueError(f"it has more than {VALUES_LIMIT} values")
    match json.loads(line):
        case [str(key), value]:
            body[key] = value
        case [str(key), str(name), value]:
            body[key][name] = value
        case [str(key), str(name), value, "more"]:
            body[key][name].append(value)
        case _:
            raise ValueError("it has another form")


def _read_lines(fd: int, start: int, size: int) -> Iterator[bytes]:
    """Piece by piece; raises BadIndex for a line that is too long."""
    rest = b""
    for at in range(0, size, _PIECE_BYTES):
        *lines, rest = (rest + os.pread(fd, min(_PIECE_BYTES, size - at), start + at)).split(b"\n")
        yield from lines
        if len(rest) > LINE_LIMIT_BYTES:
            raise BadIndex(f"a line of more than {LINE_LIMIT_BYTES} bytes")
    if rest:
        raise BadIndex("its last line has no end")


def _pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


# --- the resident's side --------------------------------------------------------------------------


class Slab:
    """A slab, mapped: `address` is where it begins in this process.

    Or a part of one, from `start` on: for an image of up to `limit` bytes with its own index behind
    it, of up to `index_limit`.
    """

    def __init__(
        self,
        fd: int,
        start: int = 0,
        limit: int | None = None,
        index_limit: int = INDEX_LIMIT_BYTES,
    ) -> None:
        self.fd, self.start, self.index_limit = fd, start, index_limit
        self.limit_bytes = limit_bytes(fd) if limit is None else limit
        self.memory = mmap.mmap(-1, 1)
        if self.limit_bytes:
            self.memory = mmap.mmap(fd, self.limit_bytes, offset=start)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.used_bytes = 0  # by the longest image that may still lie there
        with suppress(OSError):
            self.memory.madvise(mmap.MADV_DONTFORK)  # a job's children have no business in it
        with suppress(OSError, AttributeError):
            self.memory.madvise(mmap.MADV_HUGEPAGE)  # where the host allows them for shared memory

    def write_index(self, body: JSON) -> int:
        """As the function of this name, behind this part."""
        return _write_at(self.fd, self.start + self.limit_bytes, body, self.index_limit)

    def read_index(self, size: int) -> JSON:
        return _read_at(self.fd, self.start + self.limit_bytes, size, self.index_limit)

    def view(self, offset: int, size: int) -> memoryview:
        return memoryview(self.memory)[offset : offset + size]

    def make_ready(self, size: int) -> None:
        """Take the memory for an image of `size` bytes now, so that copying need not."""
        for start in range(0, min(size, self.limit_bytes), _STEP):
            with suppress(OSError):  # an older kernel, or none left: then copying takes it
                self.memory.madvise(_POPULATE_WRITE, start, _pages(min(_STEP, size - start)))

    def used(self, size: int) -> None:
        """An image of `size` bytes is about to lie here; give back what a much longer one took."""
        if self.used_bytes > 2 * size + _STEP:
            start = _pages(size)
            with suppress(OSError):
                self.memory.madvise(_REMOVE, start, _pages(self.used_bytes) - start)
            self.used_bytes = 0
        self.used_bytes = max(self.used_bytes, size)
