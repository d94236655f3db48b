"""Reads the image that CRIU wrote into a folder, and makes it fit for a restore."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from workers.criu import image_check, image_owner
from workers.criu.dump_and_restore import ERRORS, LOG
from workers.criu.image_check import Allowed, BadImage, CheckedTree

#: Files that are not needed: those that CRIU leaves beside the image, and the list of control
#: groups, which CRIU is told to ignore.
_BESIDE = (LOG, ERRORS, "stats-dump", "stats-restore", "cgroup.img")
PAGES = "pages-"
_FILES_MOST = 10_000  # most files; a process has about ten, and one for each piece of shared memory
_SMALL_BYTES = 64 * 2**20  # size of all files but the pages; for 100 processes it is 2 MiB


def read(folder: Path) -> dict[str, bytes]:
    """Return the content of an image's files by name; for files of pages it is empty."""
    found: dict[str, bytes] = {}
    left = _SMALL_BYTES
    names = sorted({*os.listdir(folder)} - {*_BESIDE})
    if len(names) > _FILES_MOST:
        raise BadImage(
            "the image", f"its memory lies in too many pieces: {len(names)} files of CRIU"
        )
    for name in names:
        if name.startswith(PAGES):
            found[name] = b""
            continue
        found[name] = _read_file(folder / name, left)
        left -= len(found[name])
    return found


def size_bytes(folder: Path) -> int:
    """Return the size of all files of an image."""
    return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder))


def _read_file(path: Path, most: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise BadImage(path.name, "expected a regular file")
        data = file.read(most + 1)
    if len(data) > most:
        raise BadImage(path.name, "the image is too large without its pages")
    return data


def admit(folder: Path, allowed: Allowed, uid: int) -> CheckedTree:
    """Check the image in a folder, and give it to the user `uid`; raises BadImage."""
    files = read(folder)
    tree = image_check.check(files, allowed)
    for name, data in image_owner.with_owner(files, allowed.uid, uid).items():
        if data != files[name]:
            (folder / name).write_bytes(data)
    return tree
