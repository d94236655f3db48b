"""Does the stub's part when the processes of its command are stored or restored.

The device worker stores and restores them (`workers.criu`), while the stub keeps them stopped.
"""

from __future__ import annotations

import os
import resource
import shutil
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from workers.commands.freezer import Tree
from workers.hardware.cuda_checkpoint import TreeMemory

JSON = dict[str, Any]

#: Folders in memory that a command may write to. They are stored with its processes, under these
#: names.
BESIDE = {".roundhouse/tmp": Path("/tmp"), ".roundhouse/shm": Path("/dev/shm")}
_SQLITE, _ROLLBACK = b"SQLite format 3\0", 1
_SPARE_FILES = 4  # files that CRIU opens in each process while it stores the process


class FirstProcess(Protocol):
    """Describes the first process of a command or of a rank: started here, or restored."""

    @property
    def pid(self) -> int: ...

    returncode: int | None


@dataclass
class AdoptedProcess:
    """Represents a restored first process. It is a child of this stub, like one that was started
    here.
    """

    pid: int
    returncode: int | None = None


def announced(
    tree: Tree, first: FirstProcess, *, devices: TreeMemory, has_beside: bool, has_tunnels: bool
) -> JSON:
    """Return what the device worker must know to store a stopped tree.

    `has_beside` says that the image of the folder also has the folders beside it. Raises NotStored
    if the first process has ended, or if something would be lost: files, device memory, or the
    shells of open tunnels.
    """
    if has_tunnels:
        raise NotStored("a terminal or a port is open in it, and would end", is_lasting=False)
    pids = tree.pids()
    if first.pid not in pids or first.returncode is not None:
        raise NotStored("its first process had ended")
    if not has_beside:
        raise NotStored("its files in /tmp and /dev/shm do not fit into the image")
    if holding := devices.holding(pids):
        raise NotStored(f"the device memory of process {holding[0]} did not leave the device")
    if full := _full(pids):
        raise NotStored(full)
    if name := _open_database(pids):
        raise NotStored(f"{name} is an open database, which would notice that it was copied")
    return {"first_pid": first.pid, "pids": pids}


class NotStored(Exception):
    """Raised when the processes cannot be in an image; says why.

    `is_lasting`: a later image of the running command would mostly fail too.
    """

    def __init__(self, told: str, *, is_lasting: bool = True) -> None:
        super().__init__(told)
        self.is_lasting = is_lasting


def _full(pids: Iterable[int]) -> str:
    """Return a process that has no room for the files that CRIU opens in it; "" if all have
    room.
    """
    for pid in pids:
        with suppress(OSError):
            most, _ = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            left = most - sum(int(name) < most for name in os.listdir(f"/proc/{pid}/fd"))
            if left < _SPARE_FILES:
                return (
                    f"process {pid} may open {left} more files, and storing it takes {_SPARE_FILES}"
                )
    return ""


def _open_database(pids: Iterable[int]) -> str:
    """Return the name of an open SQLite database that would break, since it compares inode numbers;
    "" if none.
    """
    for pid in pids:
        with suppress(OSError):
            for fd in os.scandir(f"/proc/{pid}/fd"):
                if _is_rollback_database(fd.path):
                    return os.path.basename(os.readlink(fd.path))
    return ""


def _is_rollback_database(path: str) -> bool:
    with suppress(OSError):
        if stat.S_ISREG(os.stat(path).st_mode):
            with open(path, "rb") as file:
                head = file.read(20)
            return head.startswith(_SQLITE) and head[18:19] == bytes([_ROLLBACK])
    return False


def clear_beside() -> None:
    """Empty the folders beside the working folder, for a command that begins again."""
    for folder in BESIDE.values():
        own = [entry for entry in folder.iterdir() if entry.lstat().st_uid == os.geteuid()]
        for entry in own:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)


def adopt(
    tree: Tree, stopped_before: Iterable[int], answer: Callable[[], JSON]
) -> tuple[AdoptedProcess | None, str]:
    """Wait for the restored processes, which stay stopped.

    Returns the first process; or None, and why there is none.
    """
    said = answer()
    if why := str(said["error"]):
        return None, why
    tree.adopt(stopped_before)
    return AdoptedProcess(int(said["pid"])), ""
