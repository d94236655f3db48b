"""Records which residents of a device may be alive, in a folder that no tenant can reach.

The zygote writes a record before a resident runs any code, and removes the record when the process
has ended. So a starting device worker can end all processes of the worker before it, even a process
that asked the kernel not to die with its parent. No lock held by residents shows this: a tenant's
process could lock any file that it has open.

A record is an empty file, named by the boot of the host, the process id, and the start time of the
process: together they name exactly one process.
"""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path


def write_record(folder: Path, pid: int) -> Path:
    """Record a process that has begun; raises ProcessLookupError if it is gone."""
    record = folder / _name_of(pid)
    record.touch()
    return record


def end_recorded(folder: Path, wait_s: float) -> list[int]:
    """Kill every recorded process; return the ids of those still alive after `wait_s`."""
    until_s = time.monotonic() + wait_s
    left = []
    for record in sorted(folder.iterdir()):
        if _has_ended(record.name, until_s):
            record.unlink()
        else:
            left.append(_pid_in(record.name))
    return left


def _has_ended(name: str, until_s: float) -> bool:
    pid = _pid_in(name)
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        if _name_of(pid) != name:
            return True  # another process has this id now
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        left_s = max(0.0, until_s - time.monotonic())
        return bool(select.select([pidfd], [], [], left_s)[0])
    except ProcessLookupError:
        return True
    finally:
        os.close(pidfd)


def _pid_in(name: str) -> int:
    return int(name.split("-")[1])


def _name_of(pid: int) -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except FileNotFoundError as error:
        raise ProcessLookupError(pid) from error
    return f"{boot}-{pid}-{int(fields[19])}"  # proc(5): starttime, in ticks since the boot
