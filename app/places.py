"""Where the store's bytes lie, by name: a folder that every host sees, or a bucket (`app.bucket`).

A name is a path like "chunks/ten_1/ab/ab12...".  What always holds, for both:
* a name that is there is whole and durable: bytes are written where nobody looks, made durable,
  and only then get their name;
* bytes under a name never change; putting them once more is harmless;
* in a folder, no other account of the machine can read them (`make_private`, `close_to_others`);
* `Missing` says that the store answered and has no such name; an OSError says that it did not
  answer, or could not do it, and says nothing about the name.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import logging
import os
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import IO, Protocol

log = logging.getLogger(__name__)

Bytes = bytes | bytearray | memoryview

INCOMING = "incoming"  # bytes without a name; whoever wrote them may have been killed
PIECE_BYTES = 2**20  # are read at a time
FLUSH_BYTES = 4 * 2**20  # so much of a file goes to the disk while the rest is still written
BLOCK_BYTES = 4096  # what bypasses the page cache begins and ends at multiples of this
OWN_FOLDER, OWN_FILE = 0o700, 0o400  # modes of what we make; no file is ever changed
OF_OTHERS = 0o077  # the bits of a mode that say what other accounts may do


class Missing(Exception):
    """The store has nothing of this name."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"{name} is not in the store")


@dataclass(frozen=True, slots=True)
class Named:
    """`changed_s` is when it was put, by the clock of the store (`Place.now_s`)."""

    name: str
    size: int
    changed_s: float


class Batch(Protocol):
    """Bytes that become durable together; usable from several threads."""

    def put(self, name: str, body: Iterable[Bytes]) -> None:
        """Take the pieces in; they are copied, and need not have their name before `settle`."""

    def settle(self) -> None:
        """All that was put is durable and has its name when this returns."""


class Place(Protocol):
    hands: int  # how many calls at once it takes to keep it busy
    is_near: bool  # asking whether a name is there costs next to nothing

    def size(self, name: str) -> int | None:
        """Bytes under the name, or None if there is no such name."""

    def get(self, name: str) -> bytes:
        """Raises Missing."""

    def open(self, name: str) -> IO[bytes]:
        """A file of this host with the bytes, at its beginning; raises Missing."""

    def read(self, name: str, start: int, end: int) -> Iterator[Bytes]:
        """The bytes from `start` to `end` (at least one), piece by piece.

        Raises Missing at once; what is asked for later may find the name gone, and is an OSError.
        """

    def keep(self, pieces: Iterable[Bytes], named: Callable[[], str]) -> None:
        """Durably keep the pieces, however many, under the name that `named` gives after them."""

    def batch(self) -> contextlib.AbstractContextManager[Batch]: ...

    def listed(self, prefix: str) -> Iterator[Named]:
        """All names below the folder `prefix`, in no order."""

    def move(self, name: str, to: str) -> None:
        """Raises Missing.  What was moved counts as put now."""

    def delete(self, name: str) -> None:
        """No error if it is not there."""

    def now_s(self) -> float:
        """The clock by which `Named.changed_s` is told."""

    def tidy(self, *, older_than_s: float) -> int:
        """Delete what was begun so long ago and never got a name; returns how many."""


# --- only for ourselves -------------------------------------------------------------------------


def make_private(folder: Path) -> None:
    """Make the folder, and those above it that are missing; no other account may enter them."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=OWN_FOLDER, exist_ok=True)


@functools.cache
def close_to_others(root: Path, *marks: str) -> None:
    """Take a folder and all that is in it from other accounts; an earlier version gave it to them.

    A folder that holds none of the names `marks` was made by somebody else, and stays as it is.
    """
    if not root.is_dir() or not root.stat().st_mode & OF_OTHERS:
        return
    if not any((root / mark).exists() for mark in marks):
        return
    try:
        _take_from_others(root)  # first, as nobody else gets past it from now on
        for folder, _, names in os.walk(root):
            for path in (Path(folder), *(Path(folder, name) for name in names)):
                _take_from_others(path)
    except PermissionError as error:
        log.warning("other accounts of this machine can read %s: %s; chmod -R go= it", root, error)


def _take_from_others(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
        if (mode := stat.S_IMODE(path.lstat().st_mode)) & OF_OTHERS:
            path.chmod(mode & ~OF_OTHERS)


# --- a folder -----------------------------------------------------------------------------------


class Folder:
    hands = 2
    is_near = True

    def __init__(self, root: Path) -> None:
        self.root = root
        self._durable = {root}  # folders whose own names are: we have seen to it

    def __str__(self) -> str:
        return str(self.root)

    def path(self, name: str) -> Path:
        return self.root / name

    def size(self, name: str) -> int | None:
        try:
            return os.stat(self.path(name)).st_size
        except FileNotFoundError:
            return None

    def get(self, name: str) -> bytes:
        with self.open(name) as file:
            return file.read()

    def open(self, name: str) -> IO[bytes]:
        try:
            return open(self.path(name), "rb", buffering=0)
        except FileNotFoundError:
            raise Missing(name) from None

    def read(self, name: str, start: int, end: int) -> Iterator[Bytes]:
        return _pieces(self.open(name), start, end)

    def keep(self, pieces: Iterable[Bytes], named: Callable[[], str]) -> None:
        draft = self._draft(pieces, sync=True)
        try:
            path = self._publish(draft, named())
            self._sync_name(path)
        finally:
            draft.unlink(missing_ok=True)

    def _sync_name(self, path: Path) -> None:
        """The name in its folder, and, once, that of each folder that holds it in the next one."""
        _sync(path.parent)
        new = list(takewhile(lambda folder: folder not in self._durable, path.parents))
        for folder in new:
            _sync(folder.parent)
        self._durable.update(new)

    @contextlib.contextmanager
    def batch(self) -> Iterator[Batch]:
        batch = _FolderBatch(self)
        try:
            yield batch
        finally:
            batch.drop()

    def listed(self, prefix: str) -> Iterator[Named]:
        folders = [prefix]
        while folders:
            folder = folders.pop()
            for entry in _entries(self.path(folder)):
                name = f"{folder}/{entry.name}"
                if entry.is_dir():
                    folders.append(name)
                elif (found := _stat(entry)) is not None:
                    yield Named(name, found.st_size, found.st_mtime)

    def move(self, name: str, to: str) -> None:
        path = self.path(to)
        make_private(path.parent)
        try:
            # Its age first: whoever is killed between the two leaves a young name, never an old one
            # in the new place.
            os.utime(self.path(name))
            os.rename(self.path(name), path)
        except FileNotFoundError:
            raise Missing(name) from None

    def delete(self, name: str) -> None:
        self.path(name).unlink(missing_ok=True)

    def now_s(self) -> float:
        with tempfile.NamedTemporaryFile(dir=self._incoming()) as file:
            return os.fstat(file.fileno()).st_mtime

    def tidy(self, *, older_than_s: float) -> int:
        before_s = self.now_s() - older_than_s
        old = [found for found in self.listed(INCOMING) if found.changed_s < before_s]
        for found in old:
            self.delete(found.name)
        return len(old)

    def _incoming(self) -> Path:
        folder = self.path(INCOMING)
        make_private(folder)
        return folder

    def _draft(self, pieces: Iterable[Bytes], *, sync: bool) -> Path:
        """The pieces in a file without a name, on disk if `sync`."""
        path = self._incoming() / f"{os.getpid()}-{uuid.uuid4().hex}"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, OWN_FILE)
            try:
                written = flushed = 0
                for piece in pieces:
                    _write(fd, memoryview(piece))
                    written += len(piece)
                    if sync and written - flushed >= FLUSH_BYTES:
                        _begin_to_flush(fd, flushed, written)
                        flushed = written
                if sync:
                    os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise self._failed(error) from error
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path

    def _failed(self, error: OSError) -> OSError:
        told = f"the store in {self.root} could not take it in: {error.strerror or error}"
        return OSError(error.errno or errno.EIO, told)

    def _publish(self, draft: Path, name: str) -> Path:
        path = self.path(name)
        try:
            os.rename(draft, path)
        except FileNotFoundError:
            make_private(path.parent)
            self._durable = {self.root}
            os.rename(draft, path)
        return path


class _FolderBatch:
    """Many files, and two flushes of the file system for all of them: quicker than one for each
    file and each of their folders (docs/benchmarks.md).
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.drafts: list[tuple[Path, str]] = []

    def put(self, name: str, body: Iterable[Bytes]) -> None:
        self.drafts.append((self.folder._draft(body, sync=False), name))

    def settle(self) -> None:
        if not self.drafts:
            return
        try:
            _sync_all(self.folder.root)
            for draft, name in self.drafts:
                self.folder._publish(draft, name)
            _sync_all(self.folder.root)
        except OSError as error:
            raise self.folder._failed(error) from error
        self.drafts = []

    def drop(self) -> None:
        for draft, _ in self.drafts:
            draft.unlink(missing_ok=True)


def _pieces(file: IO[bytes], start: int, end: int) -> Iterator[Bytes]:
    with file:
        file.seek(start)
        while start < end and (piece := file.read(min(PIECE_BYTES, end - start))):
            start += len(piece)
            yield piece


def _write(fd: int, left: memoryview) -> None:
    whole = len(left) // BLOCK_BYTES * BLOCK_BYTES if _begins_a_page(left) else 0
    if whole and os.lseek(fd, 0, os.SEEK_CUR) == 0:
        left = left[_past_the_cache(fd, left[:whole]) :]
    while left:
        left = left[os.write(fd, left) :]


def _past_the_cache(fd: int, left: memoryview) -> int:
    """Write whole blocks straight to the disk; how many bytes of them the file system took so.

    Nobody reads a checkpoint soon, so pages of the cache would be taken from who needs them; and
    a virtual machine that has to be given each new page writes to the cache slower than to its
    disk: 300 MB took 0.65 s, and take 0.27 s so (docs/benchmarks.md).
    """
    flags, taken = fcntl.fcntl(fd, fcntl.F_GETFL), 0
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        while taken < len(left):
            taken += os.write(fd, left[taken:])
    except OSError as error:
        if error.errno != errno.EINVAL:  # else it knows no such way, or not from here on
            raise
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return taken


def _begins_a_page(piece: memoryview) -> bool:
    if piece.readonly:
        return False  # of bytes that cannot be changed nobody tells where they lie
    return ctypes.addressof(ctypes.c_char.from_buffer(piece)) % BLOCK_BYTES == 0


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _stat(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat()
    except FileNotFoundError:
        return None  # deleted meanwhile


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _begin_to_flush(fd: int, start: int, end: int) -> None:
    """So that the disk works while the next piece comes; only fsync says that all is there."""
    if _sync_file_range is not None:
        _sync_file_range(fd, start, end - start, _WRITE)


_libc = ctypes.CDLL(None, use_errno=True)
_syncfs = getattr(_libc, "syncfs", None)
_sync_file_range = getattr(_libc, "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
_WRITE = 2  # SYNC_FILE_RANGE_WRITE


def _sync_all(folder: Path) -> None:
    """Flush the whole file system of `folder`; raises OSError if something could not be written."""
    if _syncfs is None:
        os.sync()
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _syncfs(fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(fd)
