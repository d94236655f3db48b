"""Ends a task that has a fraction of a CPU device and holds more memory than that fraction.

The kernel counts the memory of its processes. Where the host's control groups work, they limit it
too. They also count images and shared memory, so their limit is higher.
"""

from __future__ import annotations

import logging

from workers.device.processes.resident import Resident, family, kernel_memory
from workers.device.stays.device_stays import DeviceStays
from workers.transfer.host_context import House

log = logging.getLogger(__name__)

#: Bytes that a process holds besides its tensors: the interpreter, torch, other libraries.
CODE_BYTES = 2**29
PROCESSES = 8  # per task; further processes have no spare memory
EVERY_US = 250_000


class HostMemoryCaps:
    """Counts the tasks with fractions of a CPU device, every EVERY_US."""

    def __init__(self, house: House, stays: DeviceStays) -> None:
        self.house, self.stays = house, stays
        self._counted_us = 0

    def look(self, now_us: int) -> None:
        """Count if a count is due; end a task beyond its cap."""
        if self.house.kind != "cpu" or now_us < self._counted_us + EVERY_US:
            return
        self._counted_us = now_us
        for resident in list(self.stays.residents.values()):
            if resident.is_fraction and resident.pid and not resident.kill_reason:
                self._count(resident)

    def _count(self, resident: Resident) -> None:
        most_bytes = resident.cap_bytes(self.house.memory_bytes)
        counted = kernel_memory(resident.pid)
        if counted is None or counted[0] <= most_bytes + CODE_BYTES:
            return
        try:
            processes = min(PROCESSES, sum(1 for _ in family(resident.pid)))
        except (OSError, ValueError):
            return  # the process has just ended; the next count says more
        if counted[0] > most_bytes + CODE_BYTES * processes:
            log.warning("task %s holds %d bytes of %d", resident.task, counted[0], most_bytes)
            self.stays.kill(resident, "device_memory")
