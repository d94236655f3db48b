"""Holds a resident's images in host memory that it shares with its device worker.

A slab is a memfd that the device worker makes before the resident starts.  Its length is the limit
of an image.  The length is sealed, and only written pages take memory.  So the kernel enforces the
limit, and no process can shrink the slab, of which a reader would die by SIGBUS.  The kernel also
knows how much memory the slab takes (`held_bytes`), whatever the resident reports.

    0          an image, as its `layout` says
    limit      an index: the layout and related data, up to INDEX_LIMIT_BYTES

An index is lines of JSON, each for one storage, tensor or other small item.  So its reader, which
does not trust it, never parses much at once and stops at a limit.

The resident maps the slab and copies into it at memory speed; the device worker reads it.  While
the device worker reads an image, from `saving` to `kept`, the resident must not change it; if it
does, it spoils only its own checkpoint.
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

INDEX_LIMIT_BYTES = 24 * 2**20  # about 120 bytes per storage and per tensor
LINES_LIMIT = 250_000
LINE_LIMIT_BYTES = 64 * 1024
VALUES_LIMIT = 1_000  # in one line
_PIECE_BYTES = 1 << 18
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, from Linux 5.14 on
_REMOVE = 9  # MADV_REMOVE
_STEP = 2**24  # in bytes: memory is allocated in such pieces, so that no thread waits for long


class BadIndex(Exception):
    """Raised when a slab holds no valid index."""


# --- both sides -----------------------------------------------------------------------------------


def made(limit_bytes: int) -> int:
    """Make a slab for images of up to `limit_bytes`; return its descriptor."""
    fd = os.memfd_create("slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, _pages(limit_bytes) + INDEX_LIMIT_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def limit_bytes(fd: int) -> int:
    """Return the limit of an image in the slab."""
    return os.fstat(fd).st_size - INDEX_LIMIT_BYTES


def held_bytes(fd: int) -> int:
    """Return the memory that the slab takes."""
    return os.fstat(fd).st_blocks * 512


def write_index(fd: int, body: JSON) -> int:
    """Write `body` behind the image; return its size in bytes.  Raises BadIndex."""
    return _write_at(fd, limit_bytes(fd), body, INDEX_LIMIT_BYTES)


def read_index(fd: int, size: int) -> JSON:
    """Return a copy of the index; raises BadIndex."""
    return _read_at(fd, limit_bytes(fd), size, INDEX_LIMIT_BYTES)


def _write_at(fd: int, start: int, body: JSON, limit: int) -> int:
    text = "".join(f"{json.dumps(line)}\n" for line in _lines(body)).encode()
    if len(text) > limit:
        raise BadIndex(f"the index has {len(text)} bytes; the limit is {limit}")
    at = 0
    while at < len(text):
        at += os.pwrite(fd, memoryview(text)[at:], start + at)
    return len(text)


def _read_at(fd: int, start: int, size: int, limit: int) -> JSON:
    if size > limit:
        raise BadIndex(f"the index has {size} bytes; the limit is {limit}")
    body: JSON = {}
    for count, line in enumerate(_read_lines(fd, start, size)):
        if count >= LINES_LIMIT:
            raise BadIndex(f"the index has more than {LINES_LIMIT} lines")
        try:
            _take_line(body, line)
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
            raise BadIndex(f"the index has an invalid line: {error!r:.200}") from error
    if not body:
        raise BadIndex("the index is empty")
    return body


# Lines are: [KEY, VALUE]; [KEY, NAME, VALUE] for an entry of a table; [KEY, NAME, VALUE, "more"]
# for an item of a list in a table.
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
        raise ValueError(f"more than {VALUES_LIMIT} values")
    match json.loads(line):
        case [str(key), value]:
            body[key] = value
        case [str(key), str(name), value]:
            body[key][name] = value
        case [str(key), str(name), value, "more"]:
            body[key][name].append(value)
        case _:
            raise ValueError("neither [KEY, VALUE] nor [KEY, NAME, VALUE]")


def _read_lines(fd: int, start: int, size: int) -> Iterator[bytes]:
    """Yield the lines of the index, read piece by piece; raises BadIndex if a line is too long."""
    rest = b""
    for at in range(0, size, _PIECE_BYTES):
        *lines, rest = (rest + os.pread(fd, min(_PIECE_BYTES, size - at), start + at)).split(b"\n")
        yield from lines
        if len(rest) > LINE_LIMIT_BYTES:
            raise BadIndex(f"the index has a line of more than {LINE_LIMIT_BYTES} bytes")
    if rest:
        raise BadIndex("the last line of the index does not end with a newline")


def _pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


# --- the resident's side --------------------------------------------------------------------------


class Slab:
    """A mapped slab; `address` is its start in this process.

    It may also map a part of a slab, from `start` on, for an image of up to `limit` bytes.  The
    part has its own index behind it, of up to `index_limit` bytes.
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
        self.used_bytes = 0  # size of the longest image whose memory may still be allocated
        with suppress(OSError):
            self.memory.madvise(mmap.MADV_DONTFORK)  # children of a job do not need the slab
        with suppress(OSError, AttributeError):
            self.memory.madvise(
                mmap.MADV_HUGEPAGE
            )  # takes effect if the host allows huge pages for shared memory

    def write_index(self, body: JSON) -> int:
        """Write the index behind this part, as the function of this name."""
        return _write_at(self.fd, self.start + self.limit_bytes, body, self.index_limit)

    def read_index(self, size: int) -> JSON:
        return _read_at(self.fd, self.start + self.limit_bytes, size, self.index_limit)

    def view(self, offset: int, size: int) -> memoryview:
        return memoryview(self.memory)[offset : offset + size]

    def make_ready(self, size: int) -> None:
        """Allocate the memory for an image of `size` bytes now, so that copying is faster later."""
        for start in range(0, min(size, self.limit_bytes), _STEP):
            with suppress(OSError):  # older kernel, or no memory left: copying allocates it
                self.memory.madvise(_POPULATE_WRITE, start, _pages(min(_STEP, size - start)))

    def used(self, size: int) -> None:
        """Note that the next image has `size` bytes.

        If the last image was much longer, free the rest.
        """
        if self.used_bytes > 2 * size + _STEP:
            start = _pages(size)
            with suppress(OSError):
                self.memory.madvise(_REMOVE, start, _pages(self.used_bytes) - start)
            self.used_bytes = 0
        self.used_bytes = max(self.used_bytes, size)
