"""Caches inputs and outputs on the disk of this host, by their hash.

A task finds here what another task fetched or made, and other hosts get blocks from here
(`workers.transfer.peer_blocks`).

All device workers of a host share the folder, and none waits for another. An entry is a folder
named by the SHA-256 of its file. It gets that name when the file is complete and checked. The
folder's modification time is the time of last use; the least recently used entries are removed
first. A removed file stays readable for a process that has it open.

If the store is a folder of the same file system, an entry is only another link to its file. A file
that comes from another host, or goes to a store elsewhere, is not flushed to disk, as a task would
wait for that. Such a file has the boot of this machine in its name, and is valid until the next
boot.
"""

from __future__ import annotations

import fcntl
import functools
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import IO

from app.storage.backend import OWN_FILE, Bytes, Folder, make_private
from app.storage.store import Store, blob
from workers.process.file_locks import hold

log = logging.getLogger(__name__)

LEFT_S = 3600.0  # an older draft was left by a dead process
BODY = "body"
TREE = ".tree"  # end of the name of an entry that is a folder (`workers.transfer.folder_cache`)
# lock file of an entry that is a folder: the users of the entry hold a shared lock on it
LOCK = "lock"
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Holds a read-only file, at its beginning; `is_fetched` is True if it was read from the
    store.
    """

    fd: int
    is_fetched: bool


@dataclass(frozen=True, slots=True)
class Cache:
    """Manages the cache, of up to `limit_bytes`.

    With 0 it keeps nothing, and every read goes to the store.
    """

    folder: Path
    limit_bytes: int

    def opened(self, sha256: str, store: Store, *, makes_room: bool = True) -> Opened:
        """Open a block; raises app.storage.store.Damaged, or OSError if the store does not answer.

        If it `makes_room`, the least recently used entries are removed for a block that is fetched.
        """
        if (fd := self.held(sha256)) is not None:
            return Opened(fd=fd, is_fetched=False)
        return Opened(fd=self._fetched(sha256, store, makes_room=makes_room), is_fetched=True)

    def held(self, sha256: str) -> int | None:
        """Return the cached file, read-only and at its beginning, or None.

        The call counts as a use of the file.
        """
        entry = self.folder / sha256
        fd = _open(entry / BODY)
        fd = _open(entry / boot_name()) if fd is None else fd
        if fd is None:
            return None
        try:
            os.utime(entry)
        except FileNotFoundError:
            log.debug("%s was removed just now", sha256)  # the file is still open here
        return fd

    def stored(self, pieces: Iterable[Bytes], size_bytes: int, store: Store) -> tuple[str, int]:
        """Put the pieces into the store as `Store.put` does, and keep them here too if possible."""
        if size_bytes > self.limit_bytes:
            return store.put(pieces)
        if self._is_beside(store):
            sha256, size_bytes = store.put(pieces)
            with _only_told(), store.place.open(blob(sha256)) as file:
                self._take_in(sha256, file)
            return sha256, size_bytes
        with Draft(self) as draft:
            sha256, size_bytes = store.put(draft.copied(pieces))
            with _only_told():
                draft.keep(sha256)
                _let_pages_go(store, sha256)
        return sha256, size_bytes

    def _is_beside(self, store: Store) -> bool:
        """True if an entry can be another link to the store's file."""
        if not isinstance(store.place, Folder):
            return False
        try:
            make_private(self.folder)
            return self.folder.stat().st_dev == store.place.root.stat().st_dev
        except OSError:
            return False  # the fault is reported when a file is written there

    def _fetched(self, sha256: str, store: Store, *, makes_room: bool) -> int:
        with store.open(sha256) as file:
            if os.fstat(file.fileno()).st_size <= self.limit_bytes:
                with _only_told():
                    self._take_in(sha256, file, makes_room=makes_room)
            file.seek(0)
            return os.dup(file.fileno())

    def _take_in(self, sha256: str, file: IO[bytes], *, makes_room: bool = True) -> None:
        draft = self.folder / f".{uuid.uuid4().hex}"
        make_private(draft)
        try:
            link_or_copy(file.fileno(), draft / BODY)
            self.enter(draft, sha256, makes_room=makes_room)
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def enter(self, draft: Path, sha256: str, *, makes_room: bool = True) -> None:
        """Make the folder an entry; drop it if another device worker has added the same entry
        meanwhile.
        """
        entry = self.folder / sha256
        try:
            draft.rename(entry)
        except OSError:
            if (fd := self.held(sha256)) is not None:
                os.close(fd)
                return
            self._let_go(entry)  # the entry that is there was made before this boot
            draft.rename(entry)
        if makes_room:
            self._make_room()

    def replace(self, draft: Path, entry: Path, *, is_valid: Callable[[], bool]) -> None:
        """Make the folder the entry, unless there is a valid one already."""
        try:
            draft.rename(entry)
        except OSError:
            if is_valid() or not self._let_go(entry):
                return
            draft.rename(entry)
        self._make_room()

    def _make_room(self) -> None:
        """Remove the least recently used entries, and drafts left by a killed worker."""
        sizes = _sizes(self.folder)
        over = sum(sizes.values()) - self.limit_bytes
        for used_s, entry in _by_use(sizes if over > 0 else filter(_is_draft, sizes)):
            is_draft = _is_draft(entry)
            if (over > 0 and not is_draft) or (is_draft and time.time() - used_s > LEFT_S):
                over -= sizes[entry] if self._let_go(self.folder / entry) else 0

    def _let_go(self, entry: Path) -> bool:
        """Remove an entry.

        Returns False, and removes nothing, if it is a folder that a task may see.
        """
        gone = self.folder / f".{uuid.uuid4().hex}"
        with _unused(entry) as is_unused:
            if not is_unused:
                return False
            try:
                entry.rename(gone)
            except FileNotFoundError:
                return True  # another device removed it
        shutil.rmtree(gone, ignore_errors=True)
        return True


class Draft:
    """Holds a file on the cache's disk that is being written; it is removed unless `keep` is
    called.

    If writing to the disk fails, `failed` says why, and the written data is lost.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._folder = cache.folder / f".{uuid.uuid4().hex}"
        self._fd = -1
        self.failed: OSError | None = None
        try:
            make_private(self._folder)
            how = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fd = os.open(self._folder / boot_name(), how, OWN_FILE)
        except OSError as error:
            self.failed = error

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        shutil.rmtree(self._folder, ignore_errors=True)

    def write(self, piece: Bytes) -> None:
        left = memoryview(piece)
        try:
            while left and self.failed is None:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            self.failed = error

    def copied(self, pieces: Iterable[Bytes]) -> Iterator[Bytes]:
        for piece in pieces:
            self.write(piece)
            yield piece

    def opened(self) -> int:
        """Return a descriptor of the file, read-only and at its beginning; raises OSError."""
        if self.failed is not None:
            raise self.failed
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def keep(self, sha256: str) -> None:
        """Make the complete file an entry of this hash, unless it is too large; raises OSError."""
        if self.failed is not None:
            raise self.failed
        if os.fstat(self._fd).st_size <= self._cache.limit_bytes:
            self._cache.enter(self._folder, sha256)


@contextmanager
def _unused(entry: Path) -> Iterator[bool]:
    """Hold the lock of a folder's entry alone; yield False if a task may see the folder."""
    lock = _open(entry / LOCK) if entry.name.endswith(TREE) else None
    if lock is None:
        yield True
        return
    try:
        yield hold(lock, fcntl.LOCK_EX)
    finally:
        os.close(lock)


@contextmanager
def _only_told() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        log.warning("a block was not added to the host cache: %s", error)


def _let_pages_go(store: Store, sha256: str) -> None:
    """Drop the store's pages of a block from memory: the block is read from the cache."""
    if isinstance(store.place, Folder):
        with store.place.open(blob(sha256)) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _open(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None


@functools.cache
def boot_name() -> str:
    """Return the file name of an entry that was not flushed: after the next boot it may be
    incomplete.
    """
    return f"{BODY}.{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


def link_or_copy(fd: int, path: Path) -> None:
    """Link the open file at `path`, or copy it there durably."""
    try:
        # Python follows the symbolic link only if it gets a directory descriptor; its value does
        # not matter.
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
        return
    except OSError:
        pass  # the file is on another file system, has no name, or linking is not permitted
    os.lseek(fd, 0, os.SEEK_SET)
    how = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(path, how, OWN_FILE), "wb") as copy, open(os.dup(fd), "rb") as file:
        shutil.copyfileobj(file, copy, _PIECE)
        copy.flush()
        os.fsync(copy.fileno())


def _sizes(folder: Path) -> dict[os.DirEntry[str], int]:
    """Return the entries and the drafts with their sizes in bytes."""
    found = dict[os.DirEntry[str], int]()
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # another device removed it meanwhile
                look = _size.__wrapped__ if _is_draft(entry) else _size
                found[entry] = look(entry.path, entry.inode())
    return found


@functools.lru_cache(maxsize=2**16)
def _size(path: str, inode: int) -> int:
    """Return the size of all files in a folder.

    An entry never changes, so its size is read only once.
    """
    with os.scandir(path) as files:
        return sum(file.stat().st_size for file in files)


def _is_draft(entry: os.DirEntry[str]) -> bool:
    return entry.name.startswith(".")


def _by_use(entries: Iterable[os.DirEntry[str]]) -> list[tuple[float, os.DirEntry[str]]]:
    """Return (time of last use, entry), the least recently used first."""
    found = []
    for entry in entries:
        with suppress(FileNotFoundError):
            found.append((entry.stat().st_mtime, entry))
    return sorted(found, key=itemgetter(0))
