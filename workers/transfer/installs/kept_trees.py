"""Keeps folders that are made once on a host, each under its name, and shared read-only.

A folder is made as a draft, and renamed when it is complete. From then on nothing changes it. Each
folder has a lock file. While a process makes the folder, it holds the lock alone. A device worker
shares the lock as long as one of its residents sees the folder. So a folder in use is never
removed. A lock file goes with its folder, and if the folder cannot be made: names come from what
tenants send.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import time
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.storage.backend import make_private
from workers.process.file_locks import hold
from workers.transfer.tree_removal import remove_tree

JSON = dict[str, Any]

ABOUT = "about.json"  # name of a file in each folder, with notes from when the folder was made
# longest pause until the next look; it is random, so that two waiting processes do not stay in step
_AGAIN_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTrees:
    """The folders of one sort, of up to `limit_bytes` on disk."""

    folder: Path
    limit_bytes: int

    def built(self, name: str) -> Path:
        return self.folder / "built" / name

    @property
    def work(self) -> Path:
        """The folder for drafts; folders that are removed are first moved there, too."""
        return self.folder / "work"

    @property
    def changed_ns(self) -> int:
        """Return when a folder was last added or removed; 0 if none was ever added."""
        try:
            return (self.folder / "built").stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def lock_file(self, name: str) -> int:
        """Return a descriptor of the lock file, which is not locked yet (`hold`)."""
        path = self._lock_path(name)
        make_private(path.parent)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def about(self, name: str) -> JSON | None:
        """Return what was noted about a folder when it was made; None if it is not made yet."""
        try:
            noted: JSON = json.loads((self.built(name) / ABOUT).read_text())
        except (FileNotFoundError, ValueError):
            return None
        return noted

    def shared(
        self, name: str, make: Callable[[], None], until_s: float
    ) -> tuple[int, JSON] | None:
        """Share the lock of a folder; if the folder is not there, `make` makes it first.

        Returns the descriptor that holds the lock, and the notes about the folder. Returns None if
        another process has held the lock for too long without making the folder.
        """
        while True:
            fd = self.lock_file(name)
            try:
                if hold(fd, fcntl.LOCK_SH, until_s) and self._is_lock_file(fd, name):
                    if (noted := self.about(name)) is not None:
                        os.utime(self.built(name))
                        return fd, noted
                    # To make the folder, this process must give up its shared lock. Then another
                    # process may make the folder first, and share the lock for long. So look for
                    # the folder again, and do not only wait for the lock.
                    if hold(fd, fcntl.LOCK_EX) and self._is_lock_file(fd, name):
                        self._make(name, make)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # then share the lock with all processes that waited
            if time.monotonic() >= until_s and self.about(name) is None:
                return None
            time.sleep(random.uniform(0.0, _AGAIN_S))

    def _make(self, name: str, make: Callable[[], None]) -> None:
        if self.about(name) is None:
            try:
                make()
            except BaseException:
                self._lock_path(name).unlink()
                raise

    def _lock_path(self, name: str) -> Path:
        return self.folder / "locks" / name

    def _is_lock_file(self, fd: int, name: str) -> bool:
        """Return False if the file was removed while this process waited for its lock."""
        try:
            return os.path.samestat(os.fstat(fd), self._lock_path(name).stat())
        except FileNotFoundError:
            return False

    def by_use(self) -> list[str]:
        """Return all names, ordered by last use, the oldest first."""
        entries = [(one.stat().st_mtime, one.name) for one in os.scandir(self.folder / "built")]
        return [name for _, name in sorted(entries)]

    def let_go(self, name: str, folder: Path) -> int:
        """Remove a folder unless it is in use; return the bytes that this freed."""
        fd = self.lock_file(name)
        try:
            if not (hold(fd, fcntl.LOCK_EX) and self._is_lock_file(fd, name)):
                return 0
            size = disk_bytes(folder)
            self.remove(folder)
            self._lock_path(name).unlink()
            return size
        finally:
            os.close(fd)

    def let_go_unused(self, over_bytes: int, kept: Collection[str]) -> None:
        """Remove folders, the longest unused first, until `over_bytes` are free; `kept` stays."""
        for name in self.by_use():
            if over_bytes <= 0:
                return
            if name not in kept:
                over_bytes -= self.let_go(name, self.built(name))

    def remove_left_drafts(self, older_than_s: float) -> None:
        """Remove drafts whose maker has died."""
        for old in self.work.glob("making-*"):
            if time.time() - old.stat().st_mtime > older_than_s:
                self.remove(old)

    def remove(self, folder: Path) -> None:
        if folder.exists():
            folder.chmod(0o755)  # only root can rename a folder that is read-only
            gone = self.work / f"gone-{uuid.uuid4().hex[:12]}"
            folder.rename(gone)
            remove_tree(gone)


def make_read_only(folder: Path) -> int:
    """Let all users read a tree, and none write to it; return its size on disk.

    It belongs to our user from then on.
    """
    us = os.geteuid()
    for path, folders, files in os.walk(folder):
        if os.lstat(path).st_uid != us:
            os.chown(path, us, us, follow_symlinks=False)
        for name in files:
            at = os.path.join(path, name)
            status = os.lstat(at)
            if status.st_uid != us:
                os.chown(at, us, us, follow_symlinks=False)
            if not os.path.islink(at):
                os.chmod(at, 0o555 if status.st_mode & 0o100 else 0o444)
        for name in folders:
            at = os.path.join(path, name)
            if not os.path.islink(at):
                os.chmod(at, 0o755)  # writable until everything below it is done
    for path, _, _ in os.walk(folder, topdown=False):
        os.chmod(path, 0o555)
    return disk_bytes(folder)


def disk_bytes(folder: Path) -> int:
    """Return the size of a tree on disk; a file counts once, however many names it has."""
    blocks = dict[tuple[int, int], int]()
    for path, _, files in os.walk(folder):
        for name in files:
            with suppress(FileNotFoundError):  # of a tree that is being written
                status = os.lstat(os.path.join(path, name))
                blocks[status.st_dev, status.st_ino] = status.st_blocks
    return 512 * sum(blocks.values())
