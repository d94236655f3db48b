"""Watches what tasks take of their host: ends a task that exceeds its memory, and records peaks.

The kernel enforces most limits by itself (`workers.process.isolation.cgroups`, `volumes`). Only the
memory of a task that asked for a limit, or that has a fraction of a CPU device, is watched here:
images of a task lie in memory that the kernel counts as the task's own, so the kernel's limit
leaves room for them. On a host without control groups only this watch limits memory, and
RLIMIT_NPROC limits processes. A task that has a limit and cannot be counted is ended.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import islice

from app.core import units
from app.core.device.device_events import KillAsked
from app.core.model.provisions.resources import CPUS, DISK, MEMORY, PROCESSES, exceeded
from workers.device.processes.resident import PROCESSES_LIMIT, Resident, family
from workers.device.stays.device_stays import DeviceStays
from workers.process.isolation.cgroups import ControlGroups
from workers.process.isolation.sandbox import SCRATCH
from workers.transfer.host_context import House

log = logging.getLogger(__name__)

LIMITED_US = 250_000  # how often a task with a limit of memory is looked at
USUAL_US = 2_000_000  # how often all other tasks are looked at
CPUS_OVER_US = 1_000_000  # processors are an average over this time at least
EXCEEDED = "host_memory"  # the kill reason
#: Bytes that a process holds besides its tensors: the interpreter, torch, other libraries.
CODE_BYTES = 2**29
SPARED_PROCESSES = 8  # per task with a fraction; further processes have no spare memory
_FIXED = (b"Pss_Anon:", b"Pss_Shmem:")  # rows of smaps_rollup, in KiB
_ALL = (b"RssAnon:", b"RssShmem:")  # rows of status, in KiB
UNCOUNTED = (
    f"It has more than {PROCESSES_LIMIT} processes and threads, so its memory cannot be counted on"
    " this host, which has no control groups."
)
_TICK_US = 1_000_000 // os.sysconf("SC_CLK_TCK")


class ResourceWatch:
    """Looks at the residents that have the slot. The use of other residents does not change."""

    def __init__(
        self, house: House, stays: DeviceStays, groups: Callable[[], ControlGroups]
    ) -> None:
        self.house, self.stays, self.groups = house, stays, groups

    def look(self, now_us: int) -> None:
        for resident in list(self.stays.residents.values()):
            if not resident.kill_reason and resident.pid and now_us >= resident.look_us:
                resident.look_us = now_us + self._every_us(resident)
                self.measure(resident)

    def due_us(self) -> int | None:
        """Return when the next look is due; None while no resident runs."""
        return min((r.look_us for r in self.stays.residents.values() if r.pid), default=None)

    def _every_us(self, resident: Resident) -> int:
        return LIMITED_US if self._is_limited(resident) else USUAL_US

    def _is_limited(self, resident: Resident) -> bool:
        return bool(resident.stay.spec.resources.memory_bytes) or self._is_part(resident)

    def _is_part(self, resident: Resident) -> bool:
        """True if the resident has a fraction of a device whose memory is the host's."""
        return self.house.kind == "cpu" and resident.is_fraction

    def measure(self, resident: Resident) -> None:
        """Record the peaks of one resident, and end it if it holds more memory than its limit."""
        resident.measure()  # an image is no memory of the resident
        counted_bytes = self._memory_bytes(resident)
        held_bytes = max(0, (counted_bytes or 0) - resident.slab_bytes)
        resident.reach(MEMORY, held_bytes)
        resident.reach(PROCESSES, self._processes(resident))
        resident.reach(DISK, disk_bytes(resident.pid))
        self._measure_cpus(resident)
        if not self._is_limited(resident):
            return
        if told := UNCOUNTED if counted_bytes is None else self._excess(resident, held_bytes):
            resident.refused = told
            log.warning("task %s is ended: %s", resident.task, told)
            self.stays.give(KillAsked(process=resident.id, reason=EXCEEDED))

    def _excess(self, resident: Resident, held_bytes: int) -> str:
        """Return in a sentence which limit the resident exceeds; "" if none."""
        most = resident.stay.spec.resources.memory_bytes
        if most and held_bytes > most:
            return exceeded(MEMORY, held_bytes, most)
        if not self._is_part(resident):
            return ""
        part_bytes = resident.cap_bytes(self.house.memory_bytes)
        # the processes are counted only if those of a task with one process would be too large
        spared = 1 if held_bytes <= part_bytes + CODE_BYTES else _spared(resident.pid)
        if held_bytes <= part_bytes + CODE_BYTES * spared:
            return ""
        held, part = units.size(held_bytes), units.size(part_bytes)
        return f"It held {held}, more memory than its part of the device ({part} and its code)."

    def _memory_bytes(self, resident: Resident) -> int | None:
        """Return the memory that the resident holds, by its control groups or, without these, by
        its processes; None if it has too many of them.
        """
        groups, counted = self.groups(), 0
        if "memory" in groups.standing:
            counted = groups.usage(str(resident.id)).memory_bytes
        # 0: it has just ended, or its group cannot be read; its processes say which
        return counted or memory_bytes(resident.pid, with_itself=not resident.is_command)

    def _processes(self, resident: Resident) -> int:
        groups = self.groups()
        if "processes" in groups.standing:
            return groups.usage(str(resident.id)).processes
        return threads(resident.pid)

    def _measure_cpus(self, resident: Resident) -> None:
        """Measure the processors that a resident used on average, over a second or more.

        The kernel counts the time of each process in ticks, and applies a limit to periods of a
        tenth of a second: a shorter average of many processes is mostly noise.
        """
        before_us, at_us = resident.cpu
        if (now_us := time.monotonic_ns() // 1000) < at_us + CPUS_OVER_US:
            return
        used_us = cpu_us(resident.pid)
        resident.cpu = used_us, now_us
        if used_us > before_us and at_us > 0:
            # from before the first count until after the last: it never says more than was used
            over_us = time.monotonic_ns() // 1000 - at_us
            resident.reach(CPUS, 1000 * (used_us - before_us) // over_us)


def disk_bytes(pid: int) -> int:
    """Return what the process's scratch folder holds, if that is a file system of its own."""
    with suppress(OSError):
        folder = f"/proc/{pid}/root{SCRATCH}"
        if os.stat(folder).st_dev != os.stat(f"/proc/{pid}/root").st_dev:
            disk = os.statvfs(folder)
            return (disk.f_blocks - disk.f_bfree) * disk.f_frsize
    return 0


def memory_bytes(pid: int, *, with_itself: bool) -> int | None:
    """Return the memory of a process and all below it, without pages of files; None if there are
    too many to count.

    Pages that several processes share count once. The first process of a command is the platform's
    own, and shares most pages with the zygote: `with_itself` says whether it counts.
    """
    held = 0
    try:
        for at in family(pid):
            if at != pid or with_itself:
                held += _held_by(at)
    except OSError:
        return held  # the process itself has ended
    except ValueError:
        return None
    return held


def _held_by(pid: int) -> int:
    """Return the memory of one process; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            return sum(1024 * int(row.split()[1]) for row in file if row.startswith(_FIXED))
    except PermissionError:  # the process has made itself unreadable
        with suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:
            return sum(1024 * int(row.split()[1]) for row in file if row.startswith(_ALL))
    except (OSError, ValueError):
        pass
    return 0


def threads(pid: int) -> int:
    """Return the number of processes and threads in the tree of a process, up to a bound."""
    counted = 0
    with suppress(OSError, ValueError):
        for at in family(pid):
            counted += len(os.listdir(f"/proc/{at}/task"))
    return counted


def _spared(pid: int) -> int:
    """Return for how many processes a task has spare memory."""
    counted = 1
    with suppress(OSError, ValueError):
        counted += sum(1 for _ in islice(family(pid), 1, SPARED_PROCESSES))
    return counted


def cpu_us(pid: int) -> int:
    """Return the processor time of a process and all below it, also of ended ones; 0 if it cannot
    be seen.
    """
    ticks = 0
    with suppress(OSError, ValueError):
        for at in family(pid):
            with open(f"/proc/{at}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks * _TICK_US
