"""Places for the store's bytes, by name: a shared folder, or a bucket (`app.storage.s3_backend`).

A name is a path like "chunks/ten_1/ab/ab12...". For both kinds these rules always hold:
* A name that exists is whole and durable: bytes are written under no visible name, made durable,
  and only then get their name.
* Bytes under a name never change; to put them again is harmless.
* In a folder, no other account of the machine can read them (`make_private`, `close_to_others`).
* `Missing` means that the store answered and has no such name.  An OSError means that the store did
  not answer, or could not do it; it says nothing about the name.
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

INCOMING = "incoming"  # folder of bytes without a name, some of them left by killed writers
PIECE_BYTES = 2**20  # size of one read
FLUSH_BYTES = 4 * 2**20  # bytes after which a flush begins while the file is still written
BLOCK_BYTES = 4096  # alignment and granularity of writes that bypass the page cache
OWN_FOLDER, OWN_FILE = 0o700, 0o400  # modes of what we create; no file is ever changed
OF_OTHERS = 0o077  # the mode bits of other accounts


class Missing(Exception):
    """The store has nothing under this name."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"{name} is not in the store")


@dataclass(frozen=True, slots=True)
class Named:
    """Describes a name in the store. `changed_s` is when it was put, by the store's clock
    (`Place.now_s`).
    """

    name: str
    size: int
    changed_s: float


class Batch(Protocol):
    """Bytes that become durable together; usable from several threads."""

    def put(self, name: str, body: Iterable[Bytes]) -> None:
        """Take the pieces.

        They are copied, and may be without their name until `settle`.
        """

    def settle(self) -> None:
        """Make everything that was put durable under its name before returning."""


class Place(Protocol):
    hands: int  # number of concurrent calls that keeps the place busy
    is_near: bool  # True if a check for a name costs next to nothing

    def size(self, name: str) -> int | None:
        """The number of bytes under the name, or None if there is no such name."""

    def get(self, name: str) -> bytes:
        """Return all bytes under the name; raises Missing."""

    def open(self, name: str) -> IO[bytes]:
        """Return a local file with the bytes, at its beginning; raises Missing."""

    def read(self, name: str, start: int, end: int) -> Iterator[bytes | memoryview]:
        """Yield the bytes from `start` to `end` (at least one), piece by piece.

        Raises Missing at once.  If the name vanishes later, that is an OSError.
        """

    def keep(self, pieces: Iterable[Bytes], named: Callable[[], str]) -> None:
        """Durably store the pieces under the name that `named` returns after the last piece."""

    def batch(self) -> contextlib.AbstractContextManager[Batch]: ...

    def listed(self, prefix: str) -> Iterator[Named]:
        """Yield all names below the folder `prefix`, in no order."""

    def move(self, name: str, to: str) -> None:
        """Rename; the new name counts as put at the time of the move. Raises Missing."""

    def delete(self, name: str) -> None:
        """Delete the name; no error if it does not exist."""

    def now_s(self) -> float:
        """The time of the clock that `Named.changed_s` uses."""

    def tidy(self, *, older_than_s: float) -> int:
        """Delete unfinished writes older than this that never got a name; returns their number."""


# --- access for our account only ----------------------------------------------------------------


def make_private(folder: Path) -> None:
    """Create the folder and missing folders above it; other accounts may not enter them."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=OWN_FOLDER, exist_ok=True)


@functools.cache
def close_to_others(root: Path, *marks: str) -> None:
    """Remove other accounts' access to a folder and its content; an earlier version gave it to
    them.

    A folder that contains none of the names `marks` was not made by us, and is left unchanged.
    """
    if not root.is_dir() or not root.stat().st_mode & OF_OTHERS:
        return
    if not any((root / mark).exists() for mark in marks):
        return
    try:
        _take_from_others(root)  # first, since no other account can enter it from now on
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
        self._durable = {root}  # folders with names that are flushed to disk

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

    def read(self, name: str, start: int, end: int) -> Iterator[bytes | memoryview]:
        return _pieces(self.open(name), start, end)

    def keep(self, pieces: Iterable[Bytes], named: Callable[[], str]) -> None:
        draft = self._draft(pieces, sync=True)
        try:
            path = self._publish(draft, named())
            self._sync_name(path)
        finally:
            draft.unlink(missing_ok=True)

    def _sync_name(self, path: Path) -> None:
        """Flush the name in its folder and, once for each, the names of the folders above it."""
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
            # Set the time first: if the process is killed between the two calls, a young name is
            # left at the old place, never an old name at the new place.
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
        """Write the pieces to a file without a final name, on disk if `sync`."""
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
    """Writes many files, and flushes the file system twice for all of them.

    That is quicker than a flush for each file and each folder (docs/benchmarks.md).
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


def _pieces(file: IO[bytes], start: int, end: int) -> Iterator[bytes]:
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
    """Write whole blocks directly to the disk; returns the number of bytes that the file system
    took so.

    Checkpoints are not read soon, so they would only displace useful pages from the cache.  Also,
    on a virtual machine that must be given each new page, a write to the cache is slower than to
    the disk: 300 MB took 0.65 s, and take 0.27 s this way (docs/benchmarks.md).
    """
    flags, taken = fcntl.fcntl(fd, fcntl.F_GETFL), 0
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        while taken < len(left):
            taken += os.write(fd, left[taken:])
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: no direct writes, or no more from here on
            raise
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return taken


def _begins_a_page(piece: memoryview) -> bool:
    if piece.readonly:
        return False  # ctypes gives no address for read-only bytes
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
    """Start writing to the disk while the next piece arrives; only fsync confirms that all is
    there.
    """
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
