"""Stores a command's working folder as an image in a slab, and restores it.

A command is an unmodified program, so only the files of its working folder can be stored and moved.
Each file lies in the slab as a storage, byte for byte.  The image's graph is a JSON list of the
files and their places, so nothing is pickled or unpickled.

Invariants:
* An image shows one moment: `copy` is called while no process of the command runs.
* That moment is short: `ahead` copies changed files while the command still runs, and `copy` copies
  only later changes.  A file counts as unchanged if the kernel shows the same inode, size and both
  times, if it was not changed for a while before it was read, and if no process has it mapped for
  writing.

`INTERNAL` in the folder is ours, for data of one process only; it is not part of an image.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workers.capture.job_files import date, write_all
from workers.process.image_layout import Extent, Layout, from_json
from workers.process.slab import Slab

JSON = dict[str, Any]

INTERNAL = ".roundhouse"
FORMAT = "roundhouse command 1"
FILES_LIMIT = 20_000
# file system clocks are coarse: a change this soon after the last one may not show in a file's
# times
SETTLED_NS = 100_000_000
WASTE_BYTES = 2**26  # most unused slab space that files which grew or vanished may leave
_PIECE = 2**22

#: (path inside the folder, mode, mtime in ns, number of its storage, target of a link)
Entry = tuple[str, int, int, int | None, str | None]


class FolderTooLarge(Exception):
    """Raised when the folder holds more than can be stored; the message says how much can."""


class BadFolder(Exception):
    """Raised when a checkpoint describes no valid working folder."""


class ImageUnwanted(Exception):
    """Raised when the image is no longer wanted."""


@dataclass(slots=True)
class _Slot:
    """Describes the place of a file in the slab, and the file's state when it was copied there."""

    offset: int
    capacity: int
    seen: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderImage:
    """Describes an image in the slab; `moved_bytes` were copied while the tree was stopped."""

    layout: Layout
    moved_bytes: int


@dataclass
class WorkingFolder:
    """Stores the working folder `path` of a command as images in a slab.

    `beside` are other folders that an image may have, each under a name inside `INTERNAL`.
    """

    path: Path
    slab: Slab
    beside: Mapping[str, Path] = field(default_factory=dict)
    is_abandoned: bool = False  # set by another thread to stop a running copy
    _slots: dict[str, _Slot] = field(default_factory=dict)
    _end: int = 0

    def ahead(self) -> None:
        """Copy changed files while the command may still change them; raises TooLarge."""
        with suppress(FileNotFoundError, NotADirectoryError):  # the folder was removed meanwhile
            self._copy_all((), with_beside=False)

    def copy(
        self, about: JSON, mapped: Collection[str] = (), *, with_beside: bool = False
    ) -> FolderImage:
        """Make the image, with the data `about` in it; no process of the command may run.

        `mapped` are files that a process has mapped for writing. Raises TooLarge, Abandoned.
        """
        found, moved_bytes = self._copy_all(mapped, with_beside=with_beside)
        storages = [Extent(offset=slot.offset, size=size) for _, slot, size in found]
        numbers = {path: number for number, (path, _, _) in enumerate(found)}
        entries = list(self._entries(numbers, with_beside=with_beside))
        body = {"format": FORMAT, **about, "entries": entries}
        graph = json.dumps(body).encode()
        at = self._room(len(graph))
        self.slab.view(at, len(graph))[:] = graph
        layout = Layout(graph=Extent(offset=at, size=len(graph)), storages=tuple(storages))
        self.slab.used(layout.end)
        return FolderImage(layout=layout, moved_bytes=moved_bytes)

    def _copy_all(
        self, mapped: Collection[str], *, with_beside: bool
    ) -> tuple[list[tuple[str, _Slot, int]], int]:
        """Copy changed files; return (each file with its place and size, bytes copied)."""
        files = {name: status for name, status in self._files(with_beside=with_beside)}
        for name in self._slots.keys() - files.keys():
            del self._slots[name]
        self._make_room(files)
        found, moved_bytes = [], 0
        for name, status in files.items():
            slot, size = self._slots[name], status.st_size
            if slot.seen != _seen(status) or name in mapped:
                slot.seen = ()
                size = self._copy(name, slot)
                moved_bytes += size
            found.append((name, slot, size))
        return found, moved_bytes

    def _walk(self, *, with_beside: bool) -> Iterator[tuple[os.DirEntry[str], str]]:
        yield from _below(self.path)
        for name, folder in self.beside.items() if with_beside else ():
            yield from _below(folder, f"{name}/", device=folder.stat().st_dev)

    def _place_of(self, name: str) -> Path:
        """Return where the file of this name lies."""
        for under, folder in self.beside.items():
            if name.startswith(f"{under}/"):
                return folder / name.removeprefix(f"{under}/")
        return self.path / name

    def _files(self, *, with_beside: bool) -> Iterator[tuple[str, os.stat_result]]:
        for entry, name in self._walk(with_beside=with_beside):
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield name, status

    def _make_room(self, files: dict[str, os.stat_result]) -> None:
        """Give each file a place in the slab; a file that grew gets a new, larger one. Raises
        TooLarge.
        """
        whole = sum(status.st_size for status in files.values())
        if len(files) > FILES_LIMIT or whole > self.slab.limit_bytes:
            raise FolderTooLarge(
                f"the working folder has {whole} bytes in {len(files)} files; at most "
                f"{self.slab.limit_bytes} bytes and {FILES_LIMIT} files can be saved here"
            )
        lacking = [name for name, status in files.items() if not self._fits(name, status)]
        for name in lacking:
            self._slots.pop(name, None)
        wanted = sum(_capacity(files[name].st_size) for name in lacking)
        held = sum(slot.capacity for slot in self._slots.values()) + wanted
        end, spare = self._end + wanted, _capacity
        if end > 2 * held + WASTE_BYTES or end + 200 * len(files) > self.slab.limit_bytes:
            self._slots, self._end = {}, 0  # place all files again, without gaps
            lacking, spare = list(files), _pages
        for name in lacking:
            capacity = spare(files[name].st_size)
            self._slots[name] = _Slot(self._end, capacity)
            self._end += capacity
        if self._end > self.slab.limit_bytes:
            raise FolderTooLarge(
                f"{whole} bytes in {len(files)} files do not fit into the memory for saved states"
            )

    def _fits(self, name: str, status: os.stat_result) -> bool:
        slot = self._slots.get(name)
        return slot is not None and status.st_size <= slot.capacity

    def _room(self, size: int) -> int:
        """Return the place of the list of files, which follows all files."""
        if self._end + size > self.slab.limit_bytes:
            raise FolderTooLarge(
                f"the list of its files is {size} bytes larger than the memory left for saved "
                "states"
            )
        return self._end

    def _copy(self, name: str, slot: _Slot) -> int:
        """Copy a file into its place; return the copied length.

        If the file has grown, only what fits the place is copied.
        """
        try:
            fd = os.open(self._place_of(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
                return 0  # removed or replaced, which happens only while the command runs
            raise
        with os.fdopen(fd, "rb", buffering=0) as file:
            before, at = os.fstat(fd), 0
            while at < slot.capacity:
                if self.is_abandoned:
                    raise ImageUnwanted
                view = self.slab.view(slot.offset + at, min(_PIECE, slot.capacity - at))
                if not (length := file.readinto(view)):
                    break
                at += length
        # for files of a folder beside: a write to mapped shared memory does not change the file's
        # times
        is_inside = not name.startswith(f"{INTERNAL}/")
        is_settled = time.time_ns() - max(before.st_mtime_ns, before.st_ctime_ns) >= SETTLED_NS
        if is_settled and is_inside:
            slot.seen = _seen(before)
        return at

    def _entries(self, numbers: dict[str, int], *, with_beside: bool) -> Iterator[Entry]:
        for entry, name in self._walk(with_beside=with_beside):
            status, number, target = entry.stat(follow_symlinks=False), numbers.get(name), None
            if entry.is_symlink():
                target = os.readlink(entry.path)
            elif number is None and not entry.is_dir(follow_symlinks=False):
                continue  # a socket or a pipe: the command makes it again if needed
            yield (name, stat.S_IMODE(status.st_mode), status.st_mtime_ns, number, target)


def _below(
    folder: Path, under: str = "", device: int | None = None
) -> Iterator[tuple[os.DirEntry[str], str]]:
    """Yield (entry, its path inside the folder), parents first, in the same order everywhere.

    `device` leaves out entries of other file systems and of other users. In /tmp these are files of
    the host that the sandbox shows there, and the folders that lead to them.
    """
    with os.scandir(folder) as inside:
        entries = sorted(inside, key=lambda entry: entry.name)
    for entry in entries:
        name = f"{under}{entry.name}"
        if name == INTERNAL or (device is not None and not _is_own(entry, device)):
            continue
        yield entry, name
        if entry.is_dir(follow_symlinks=False):
            yield from _below(Path(entry.path), f"{name}/", device)


def _is_own(entry: os.DirEntry[str], device: int) -> bool:
    with suppress(FileNotFoundError):
        status = entry.stat(follow_symlinks=False)
        return status.st_dev == device and status.st_uid == os.geteuid()
    return False


def _seen(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _capacity(size: int) -> int:
    """Return the space for a file: a quarter more than its size, so that it may grow in place."""
    return _pages(size + size // 4 + 1)


def _pages(size: int) -> int:
    return -(-size // 4096) * 4096


# --- restoring ------------------------------------------------------------------------------------


def restore(
    slab: Slab, layout: JSON, folder: Path, beside: Mapping[str, Path] | None = None
) -> JSON:
    """Fill the empty `folder` from the image; return the data that was stored as `about`.

    The folders `beside` are filled too; without them, their part of the image is left out. Raises
    BadLayout, BadFolder; OSError if it cannot be written (the disk is full).
    """
    placed = from_json(layout, limit_bytes=slab.limit_bytes)
    body = _read(slab, placed.graph)
    others = beside or {}
    made: set[str] = {"", *others}
    place = WorkingFolder(folder, slab, others)._place_of
    folders = list[tuple[Path, int, int]]()
    for name, mode, changed_ns, number, target in body["entries"]:
        if not others and name.startswith(f"{INTERNAL}/"):
            continue
        path = place(_inside(name, made))
        if target is not None:
            path.symlink_to(target)
        elif number is None:
            path.mkdir()
            made.add(name)
            folders.append((path, mode, changed_ns))
        else:
            part = placed.storages[number]
            with path.open("xb", buffering=0) as file:
                write_all(file, slab.view(part.offset, part.size))
            date(path, mode, changed_ns)
    for of in reversed(folders):  # set at the end, as adding files changes a folder's mtime
        date(*of)
    return body


def _read(slab: Slab, graph: Extent) -> JSON:
    try:
        body = json.loads(bytes(slab.view(graph.offset, graph.size)))
        if body["format"] != FORMAT:
            raise BadFolder(f"its format is {body['format']!r:.80}, not {FORMAT!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise BadFolder(f"the index of the stored folder is not valid: {error!r:.200}") from error
    return dict(body)


def _inside(name: str, made: set[str]) -> str:
    """Return `name` if its folder was made here and is not a link; raise BadFolder otherwise."""
    parent, _, last = name.rpartition("/")
    if parent not in made or last in ("", ".", "..") or name in ("/", INTERNAL):
        raise BadFolder(f"{name!r:.200} is outside the working folder")
    return name


def begun_from(code: Path, folder: Path) -> None:
    """Fill the working folder of a new command with a writable copy of its bundle."""
    shutil.copytree(code, folder, dirs_exist_ok=True, symlinks=True, copy_function=_copied)
    folder.chmod(0o700)  # the mode that the restored folder has


def _copied(source: str, target: str) -> str:
    shutil.copyfile(source, target, follow_symlinks=False)
    os.chmod(target, 0o700 if os.stat(source).st_mode & 0o100 else 0o600)
    return target
