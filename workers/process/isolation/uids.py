"""Reserves user ids for residents, so that no two device workers of a host use the same.

A device worker holds one range of ids while it lives, by a lock on a file of the host. The kernel
frees the lock when the device worker is dead. The search starts at a range that depends on the
worker's name, so a worker usually gets the same range after a restart. Residents hold no descriptor
of such a file.
"""

from __future__ import annotations

import fcntl
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from workers.process.file_locks import hold

FIRST_UID, RANGES, UIDS_PER_RANGE = 200_000, 4096, 256
BUILDER = FIRST_UID - 1  # the user that compiles packages; no resident and no proxy has it
#: The folder for all device workers of a host that run as root, whatever their instance.
HOST_FOLDER = Path("/run/roundhouse-uids")


class NoUids(Exception):
    """Raised when no range of user ids is available; the message says why."""


@dataclass(frozen=True, slots=True)
class UidRange:
    """A range of user ids, held until `close`."""

    first: int
    fd: int

    def uid(self, resident: int) -> int:
        return self.first + resident % (UIDS_PER_RANGE - 1)

    @property
    def of_proxy(self) -> int:
        """The user id of the proxy, which no resident gets."""
        return self.first + UIDS_PER_RANGE - 1

    def close(self) -> None:
        os.close(self.fd)


def reserve(name: str, folders: Iterable[Path] = (HOST_FOLDER,)) -> UidRange:
    """Reserve a range for the device worker of this name, in the first writable folder."""
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
        if hold(fd, fcntl.LOCK_EX):
            return UidRange(FIRST_UID + number * UIDS_PER_RANGE, fd)
        os.close(fd)
    raise NoUids(f"all {RANGES} ranges of user ids in {folder} are held by device workers")
