"""Watches what tasks take of their host: ends a task that exceeds its memory, and records peaks.

The kernel enforces most limits by itself (`workers.process.isolation.cgroups`, `volumes`). Only the
memory of a task that asked for a limit is watched here: images of a task lie in memory that the
kernel counts as the task's own, so the kernel's limit leaves room for them. On a host without
control groups only this watch limits memory, and RLIMIT_NPROC limits processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from app.core.device.device_events import KillAsked
from app.core.model.provisions.resources import CPUS, DISK, MEMORY, PROCESSES, exceeded
from workers.device.processes.resident import Resident, family
from workers.device.stays.device_stays import DeviceStays
from workers.process.isolation.cgroups import ControlGroups, GroupUsage
from workers.process.isolation.sandbox import SCRATCH

LIMITED_US = 250_000  # how often a task with a limit of memory is looked at
USUAL_US = 2_000_000  # how often all other tasks are looked at
CPUS_OVER_US = 1_000_000  # processors are an average over this time at least
EXCEEDED = "host_memory"  # the kill reason
_FIXED = (b"Pss_Anon:", b"Pss_Shmem:")  # rows of smaps_rollup, in KiB
_TICK_US = 1_000_000 // os.sysconf("SC_CLK_TCK")


class ResourceWatch:
    """Looks at the residents that have the slot. The use of other residents does not change."""

    def __init__(self, stays: DeviceStays, groups: Callable[[], ControlGroups]) -> None:
        self.stays, self.groups = stays, groups

    def look(self, now_us: int) -> None:
        for resident in list(self.stays.residents.values()):
            if not resident.kill_reason and resident.pid and now_us >= resident.look_us:
                resident.look_us = now_us + self._every_us(resident)
                self.measure(resident)

    def due_us(self) -> int | None:
        """Return when the next look is due; None while no resident runs."""
        return min((r.look_us for r in self.stays.residents.values() if r.pid), default=None)

    def _every_us(self, resident: Resident) -> int:
        return LIMITED_US if resident.stay.spec.resources.memory_bytes else USUAL_US

    def measure(self, resident: Resident) -> None:
        """Record the peaks of one resident, and end it if it holds more memory than its limit."""
        usage = self._usage(resident)
        resident.measure()  # an image is no memory of the resident
        held_bytes = max(0, usage.memory_bytes - resident.slab_bytes)
        resident.reach(MEMORY, held_bytes)
        resident.reach(PROCESSES, usage.processes)
        resident.reach(DISK, disk_bytes(resident.pid))
        self._measure_cpus(resident)
        most = resident.stay.spec.resources.memory_bytes
        if most and held_bytes > most:
            resident.refused = exceeded(MEMORY, held_bytes, most)
            self.stays.give(KillAsked(process=resident.id, reason=EXCEEDED))

    def _usage(self, resident: Resident) -> GroupUsage:
        """Return what the resident holds: by its control groups or, without these, by its
        processes.
        """
        groups = self.groups()
        counted = groups.usage(str(resident.id))
        if "memory" not in groups.standing:
            held = memory_bytes(resident.pid, with_itself=not resident.is_command)
            counted = replace(counted, memory_bytes=held)
        if "processes" not in groups.standing:
            counted = replace(counted, processes=threads(resident.pid))
        return counted

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


def memory_bytes(pid: int, *, with_itself: bool) -> int:
    """Return the memory of a process and all below it, without pages of files; 0 if it cannot be
    seen.

    Pages that several processes share count once. The first process of a command is the platform's
    own, and shares most pages with the zygote: `with_itself` says whether it counts.
    """
    held = 0
    with suppress(OSError, ValueError):
        for at in family(pid):
            if at == pid and not with_itself:
                continue
            with suppress(OSError), open(f"/proc/{at}/smaps_rollup", "rb") as file:
                held += sum(1024 * int(row.split()[1]) for row in file if row.startswith(_FIXED))
    return held


def threads(pid: int) -> int:
    """Return the number of processes and threads in the tree of a process; 0 if there are too many
    to count.
    """
    with suppress(OSError, ValueError):
        return sum(len(os.listdir(f"/proc/{at}/task")) for at in family(pid))
    return 0


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
