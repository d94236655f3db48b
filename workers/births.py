"""Which residents of a device may be alive, written down where no tenant can reach it.

The zygote writes a record before a resident runs any code, and removes it when the process has
ended.  So a device worker that starts ends whatever its predecessor left, even a process that
asked the kernel not to die with its parent.  A resident holds no lock of ours: whatever a tenant's
process holds, it can lock.

A record is an empty file, named by the boot of the host, the process, and when that started: this
names one process and no other.
"""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path


def write_record(folder: Path, pid: int) -> Path:
    """Write down a process that has begun; raises ProcessLookupError if it is gone."""
    record = folder / _name_of(pid)
    record.touch()
    return record


def end_recorded(folder: Path, wait_s: float) -> list[int]:
    """End every process that is written down; the ids of those still there after `wait_s`."""
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
            return True  # the number is another process's by now
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
