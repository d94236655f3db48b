"""Inputs on the disk of this host, by their hash: what one task has fetched the next finds here.

All device workers of a host share the folder, and none waits for another.  An entry is a folder of
its own, named by the SHA-256 of the file in it, and gets that name when the file is whole, checked
and on disk; when it was used last is the time of that folder.  Those used longest ago go first.
Whoever has the file open keeps it.

Where the store is a folder of the same file system, an entry is only another name of its file.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from app.store import Store

log = logging.getLogger(__name__)

LEFT_S = 3600.0  # a draft that is older belongs to nobody any more
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A file at its beginning, read only; `is_fetched` if the store was read for it."""

    fd: int
    is_fetched: bool


@dataclass(frozen=True, slots=True)
class Cache:
    """Of up to `limit_bytes`; 0: everything is read from the store each time."""

    folder: Path
    limit_bytes: int

    def opened(self, sha256: str, store: Store) -> Opened:
        """Raises app.store.Damaged, or OSError if the store does not answer."""
        entry = self.folder / sha256
        try:
            fd = os.open(entry / "body", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return Opened(fd=self._fetched(sha256, store), is_fetched=True)
        try:
            os.utime(entry)
        except FileNotFoundError:
            log.debug("%s was let go of just now", sha256)  # and is open here all the same
        return Opened(fd=fd, is_fetched=False)

    def bring(self, sha256: str, size_bytes: int, store: Store) -> None:
        """Have it here before it is asked for, if it can be; raises as `opened` does."""
        if size_bytes <= self.limit_bytes and not (self.folder / sha256).exists():
            os.close(self._fetched(sha256, store))

    def _fetched(self, sha256: str, store: Store) -> int:
        with store.open(sha256) as file:
            if os.fstat(file.fileno()).st_size <= self.limit_bytes:
                try:
                    self._take_in(sha256, file)
                except OSError as error:
                    log.warning("an input is not kept on this host: %s", error)
            file.seek(0)
            return os.dup(file.fileno())

    def _take_in(self, sha256: str, file: IO[bytes]) -> None:
        draft = self.folder / f".{uuid.uuid4().hex}"
        draft.mkdir(parents=True, mode=0o700)
        try:
            _lay_down(file, draft / "body")
            try:
                draft.rename(self.folder / sha256)
            except OSError:
                if not (self.folder / sha256 / "body").exists():
                    raise  # else another device brought it meanwhile
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        self._make_room()

    def _make_room(self) -> None:
        """Let go of what was used longest ago, and of what a killed worker left."""
        entries = sorted(_entries(self.folder))
        over = sum(size for _, size, _ in entries) - self.limit_bytes
        for used_s, size, entry in entries:
            is_draft = entry.name.startswith(".")
            if (over > 0 and not is_draft) or (is_draft and time.time() - used_s > LEFT_S):
                over -= size
                self._let_go(entry)

    def _let_go(self, entry: Path) -> None:
        gone = self.folder / f".{uuid.uuid4().hex}"
        try:
            entry.rename(gone)
        except FileNotFoundError:
            return  # another device did
        shutil.rmtree(gone, ignore_errors=True)


def _lay_down(file: IO[bytes], path: Path) -> None:
    """The file under another name, or a copy of it, durable."""
    fd = file.fileno()
    try:
        # Only with a folder's descriptor, which it does not need, does Python follow the link.
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
        return
    except OSError:
        pass  # it lies elsewhere, has no name at all, or is not ours to name
    file.seek(0)
    with path.open("xb") as copy:
        shutil.copyfileobj(file, copy, _PIECE)
        copy.flush()
        os.fsync(copy.fileno())


def _entries(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """When each was used last, its bytes, and the entry."""
    with os.scandir(folder) as found:
        for entry in found:
            with suppress(FileNotFoundError):  # another device let go of it meanwhile
                used_s, body = entry.stat().st_mtime, Path(entry) / "body"
                yield used_s, body.stat().st_size if body.exists() else 0, Path(entry)
