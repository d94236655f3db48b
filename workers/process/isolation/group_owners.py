"""Tells from the name of a control group whether the device worker that made it still lives.

    roundhouse-<device>-<instance>-<process id>-<start of the process>-<its PID namespace>

A killed device worker leaves its groups behind.  The next one of the same device ends what is in
them; empty groups of other devices go when any device worker starts on the host.  A group that was
just made is empty too, so a group goes only if its owner is dead.  A process id alone may belong to
another process by now, so the name also has the time at which the owner started.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

_OWNED = re.compile(r"(roundhouse-.+-[0-9a-f]{8})-(\d+)-(\d+)-(\d+)")
_STARTED = 19  # field of /proc/PID/stat after the name


def owned_name(stem: str) -> str:
    """Return the name of a group of this process."""
    return f"{stem}-{os.getpid()}-{_started(os.getpid())}-{_namespace()}"


def predecessors(parent: Path, name: str) -> list[Path]:
    """Return all groups of the same device and instance, `name` among them."""
    found = _OWNED.fullmatch(name)
    stem = found.group(1) if found else name
    return sorted({parent / name, parent / stem, *parent.glob(f"{stem}-*")})


def remove_orphans(parent: Path) -> None:
    """Remove the groups of dead device workers, with the groups inside, if they are empty.

    The kernel does not remove a group that has a process, and this function kills no process.
    """
    for group in parent.glob("roundhouse-*"):
        if is_orphaned(group.name):
            # the group is not empty yet, or another device worker was faster
            with suppress(OSError):
                for below in [entry for entry in group.iterdir() if entry.is_dir()]:
                    below.rmdir()
                group.rmdir()


def is_orphaned(name: str) -> bool:
    """True if the owner has certainly died.

    The answer for an owner in another PID namespace is False, since it cannot be known.
    """
    found = _OWNED.fullmatch(name)
    if found is None:
        return False
    pid, started, namespace = map(int, found.groups()[1:])
    return namespace == _namespace() and not _lives(pid, started)


def _lives(pid: int, started: int) -> bool:
    if (now := _started(pid)) is not None:
        return now == started
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # the process exists but belongs to another user, on a host that hides such processes
    except OSError:
        return True
    return True


def _started(pid: int) -> int | None:
    """Return when the process started, in ticks since the host started; None if it cannot be
    seen.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[_STARTED])


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
