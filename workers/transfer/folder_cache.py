"""Builds the folders of datablocks on the disk of this host, each once, from files of the host's
cache.

A folder is an entry of the host's cache, `SHA256.tree`, named by its manifest. Its files are hard
links to the entries of the cache, so their bytes lie on the disk once, however many folders have
them and however many tasks see them; where links are not possible, they are copies. Tasks see the
folder by a read-only mount.

A process that may show a folder holds a shared lock on the entry. The cache removes no entry that
is locked (`host_cache.Cache`). A use of the folder counts as a use of its files, so that the folder
is removed before the files.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from app.core.model.provisions.folder import EMPTY, FolderFile, FolderManifest, decoded
from app.storage.backend import make_private
from app.storage.store import Store
from workers.transfer.host_cache import LOCK, TREE, Cache, boot_name, link_or_copy

CONTENT = "content"  # name of the folder inside its entry
# a use within this time after another does not count, since a folder has many files
USED_AGAIN_S = 60.0
_PLAIN, _EXECUTABLE, _PASSAGE = 0o444, 0o555, 0o755


class FolderBeyondCache(Exception):
    """Raised for a folder that is larger than the cache of the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltFolder:
    """Names a folder on the disk; it stays there until `lock` is closed.

    `fetched_bytes` of its `size_bytes` were read from the store for it.
    """

    entry: Path
    lock: int
    size_bytes: int
    fetched_bytes: int


def built(sha256: str, manifest: bytes, cache: Cache, store: Store) -> BuiltFolder:
    """Return the folder of this manifest, from the disk if it is there.

    Raises FolderBeyondCache, BadFolderManifest, app.storage.store.Damaged, or OSError if the store
    does not answer.
    """
    folder = decoded(manifest)
    if folder.size_bytes > cache.limit_bytes:
        raise FolderBeyondCache(
            f"the folder has {folder.size_bytes} bytes, and the cache of this host takes "
            f"{cache.limit_bytes} (ROUNDHOUSE_HOST_CACHE_BYTES)"
        )
    entry, fetched_bytes, is_new = cache.folder / f"{sha256}{TREE}", 0, False
    while (lock := _locked(entry)) is None:
        fetched_bytes += _build(folder, entry, cache, store)
        is_new = True
    if is_new or time.time() - entry.stat().st_mtime > USED_AGAIN_S:
        _count_as_used(folder, entry, cache)
    return BuiltFolder(
        entry=entry, lock=lock, size_bytes=folder.size_bytes, fetched_bytes=fetched_bytes
    )


def _locked(entry: Path) -> int | None:
    """Lock the entry, so that it stays on the disk; return the descriptor, or None if there is no
    valid entry.
    """
    try:
        fd = os.open(entry / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        # The entry may have been removed or replaced before this process got the lock: check that.
        if os.path.samestat(os.fstat(fd), (entry / LOCK).stat()) and (entry / boot_name()).exists():
            return fd
    except FileNotFoundError:
        pass
    os.close(fd)
    return None


def _build(folder: FolderManifest, entry: Path, cache: Cache, store: Store) -> int:
    """Make the entry, unless another device worker makes it first; return the bytes read from the
    store for it.
    """
    draft, fetched_bytes = cache.folder / f".{uuid.uuid4().hex}", 0
    make_private(draft)
    try:
        content = draft / CONTENT
        content.mkdir()
        for file in folder.files:
            fetched_bytes += _lay(file, content / file.path, cache, store)
        _open_to_all(content)
        # Files of the cache may not be on the disk yet, so the entry is valid only until the next
        # boot.
        for name in (LOCK, boot_name()):
            (draft / name).touch()
        cache.replace(draft, entry, is_valid=lambda: (entry / boot_name()).exists())
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return fetched_bytes


def _lay(file: FolderFile, path: Path, cache: Cache, store: Store) -> int:
    """Put one file at its path; return the bytes that were read from the store for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if file.sha256 == EMPTY:
        path.touch(_PLAIN)
        path.chmod(_EXECUTABLE if file.executable else _PLAIN)
        return 0
    fd, is_fetched = _opened(file.sha256, cache, store)
    try:
        if file.executable:  # a copy, because a hard link cannot have a mode of its own
            shutil.copyfile(f"/proc/self/fd/{fd}", path)
            path.chmod(_EXECUTABLE)
        else:
            link_or_copy(fd, path)
            path.chmod(_PLAIN)
    finally:
        os.close(fd)
    return file.size_bytes if is_fetched else 0


def _opened(sha256: str, cache: Cache, store: Store) -> tuple[int, bool]:
    """Open the file in the cache; also return whether it was read from the store."""
    # making room would look at all entries for each file
    opened = cache.opened(sha256, store, makes_room=False)
    if opened.is_fetched and (kept := cache.held(sha256)) is not None:
        os.close(opened.fd)
        return kept, True
    return opened.fd, opened.is_fetched


def _open_to_all(content: Path) -> None:
    """Let all users pass through and list the folders.

    Only tasks with the mount can reach them anyway.
    """
    for folder, _, _ in os.walk(content):
        os.chmod(folder, _PASSAGE)


def _count_as_used(folder: FolderManifest, entry: Path, cache: Cache) -> None:
    touch: Callable[[Path], None] = os.utime
    for used in (entry, *(cache.folder / sha256 for sha256 in folder.contents())):
        with suppress(FileNotFoundError):
            touch(used)
