"""Names the open files of an image that lost the name by which they were opened, but have another.

glibc makes a semaphore in a file with a random name, links that file to the semaphore's name, and
removes the first name; the process has it mapped by the first.  CRIU makes a new name beside such a
file while it dumps, and expects that name at the restore.  The folders of the image were copied
before, and CRIU takes its names away as the processes run on.  So this module writes the file's
remaining name into the image: then all processes get the same file again.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from workers.criu.image_check import FILES
from workers.criu.image_records import ImageFile, ImageRecord

REMAPS, LIST = "remap-fpath.img", "files.img"
REMAP_MAGIC = 0x59133954
_REG, _NAME = 3, 6  # fields: a regular file of an open file, and its path
# kind of a remap: the file has another name; other kinds are files without any name, and files of
# /proc
_LINKED = 0
_FOLDERS = ("scratch", "tmp", "dev/shm")  # folders that go with an image
_GONE = " (deleted)"

FileId = tuple[int, int]


class NoName(Exception):
    """Raised when an open file has another name, but the image has no file of that name."""


def name(images: Path, root: Path, pids: Iterable[int]) -> None:
    """Change the image in a folder, while its processes are stopped. Raises NoName, BadRecord,
    OSError.

    `root` is the root folder as the processes see it, `pids` are their ids there.
    """
    if not (images / REMAPS).exists():
        return
    remaps = ImageFile.read((images / REMAPS).read_bytes(), REMAP_MAGIC)
    linked = {each.number(1): each.number(2) for each in remaps.records if _is_linked(each)}
    if not linked:
        return
    files = ImageFile.read((images / LIST).read_bytes(), FILES)
    opened = {each.number(2): _path(each) for each in files.records if each.number(2) in linked}
    names = _names(root, [*pids], {*opened.values()})
    made = {*linked.values()}  # the names that CRIU made
    kept = [each for each in files.records if each.number(2) not in made]
    changed = (
        _renamed(each, names[opened[each.number(2)]]) if each.number(2) in opened else each
        for each in kept
    )
    (images / LIST).write_bytes(ImageFile(FILES, tuple(changed)).encoded())
    others = tuple(each for each in remaps.records if not _is_linked(each))
    if others:
        (images / REMAPS).write_bytes(ImageFile(REMAP_MAGIC, others).encoded())
    else:
        (images / REMAPS).unlink()


def _is_linked(remap: ImageRecord) -> bool:
    return remap.number(3, _LINKED) == _LINKED


def _path(opened: ImageRecord) -> str:
    return os.fsdecode(opened.message(_REG).text(_NAME))


def _renamed(opened: ImageRecord, path: str) -> ImageRecord:
    return opened.with_message(_REG, lambda entry: entry.with_text(_NAME, os.fsencode(path)))


def _names(root: Path, pids: list[int], paths: set[str]) -> dict[str, str]:
    """Return the remaining name of each file that was opened by one of these removed names."""
    ids = {path: _id_of(root, pids, path) for path in paths}
    wanted, found = {*ids.values()}, dict[FileId, str]()
    for folder in _FOLDERS:
        for file, status in _below(root / folder):
            if (its := _id(status)) in wanted:
                found.setdefault(its, f"/{file.relative_to(root)}")
    for path, its in ids.items():
        if its not in found:
            raise NoName(f"{path} was removed, and its other name is in no folder of the image")
    return {path: found[its] for path, its in ids.items()}


def _id_of(root: Path, pids: list[int], path: str) -> FileId:
    found = {_id(status) for pid in pids for status in _opened(root / "proc" / str(pid), path)}
    if len(found) != 1:
        raise NoName(f"{path} was removed, and {len(found)} open files had that name")
    return found.pop()


def _opened(process: Path, path: str) -> Iterator[os.stat_result]:
    """Yield the files that a process has open or mapped by a name that was removed."""
    for entry in os.scandir(process / "fd"):
        if os.readlink(entry.path) == path + _GONE:
            yield entry.stat()
    for line in (process / "maps").read_text("utf-8", "surrogateescape").splitlines():
        at, *_, mapped = line.split(maxsplit=5)
        if mapped == path + _GONE:
            begin, end = (int(address, 16) for address in at.split("-"))
            yield os.stat(process / "map_files" / f"{begin:x}-{end:x}")


def _below(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the regular files below a folder and on its file system. Links are not followed."""
    device, left = folder.stat().st_dev, [folder]
    while left:
        for entry in os.scandir(left.pop()):
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if status.st_dev == device and stat.S_ISDIR(status.st_mode):
                    left.append(Path(entry.path))
                elif stat.S_ISREG(status.st_mode):
                    yield Path(entry.path), status


def _id(status: os.stat_result) -> FileId:
    return status.st_dev, status.st_ino


def root_of(pidfd: int) -> Path:
    """Return the root folder that the process of a pidfd sees, as a path of this process."""
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
        if line.startswith("Pid:") and int(line.split()[1]) > 0:
            return Path(f"/proc/{int(line.split()[1])}/root")
    raise ProcessLookupError("the stub has ended")
