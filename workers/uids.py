"""User ids for residents, which no two device workers of a host share.

A device worker holds one range of ids for as long as it lives, by a lock on a file of the host that
the kernel frees when the device worker is dead.  Its own range comes first in its search, so that
it usually has the same one after a restart.  Residents hold no descriptor of such a file.
"""

from __future__ import annotations

import fcntl
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FIRST_UID, RANGES, UIDS_PER_RANGE = 200_000, 4096, 256
#: Here all device workers of a host that are root look, whichever instance they belong to.
HOST_FOLDER = Path("/run/roundhouse-uids")


class NoUids(Exception):
    """No range of user ids could be had; the message says why."""


@dataclass(frozen=True, slots=True)
class UidRange:
    """A range that is held until `close`."""

    first: int
    fd: int

    def uid(self, resident: int) -> int:
        return self.first + resident % UIDS_PER_RANGE

    def close(self) -> None:
        os.close(self.fd)


def reserve(name: str, folders: Iterable[Path] = (HOST_FOLDER,)) -> UidRange:
    """Hold a range for the device worker of this name, in the first folder that can be written.

    Raises NoUids.
    """
    why = ""
    for folder in folders:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return _reserve_in(folder, zlib.crc32(name.encode()) % RANGES)
        except OSError as error:
            why = f"{folder}: {error.strerror}"
    raise NoUids(f"user ids for residents cannot be reserved: {why}")


def _reserve_in(folder: Path, begin: int) -> UidRange:
    for number in (*range(begin, RANGES), *range(begin)):
        how = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(folder / str(number), how, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
        else:
            return UidRange(FIRST_UID + number * UIDS_PER_RANGE, fd)
    raise NoUids(f"all {RANGES} ranges of user ids in {folder} are held by device workers")
