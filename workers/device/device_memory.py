"""Accounts for the memory of an accelerator by its driver's counts, not by the reports of jobs.

The driver counts the bytes of each process on the device: its context, its allocator, all of it.
Each count is compared with what the residents reported since the previous count:

* A resident that reported less is booked with the driver's count.
* A resident beyond its cap is ended.
* A resident that reported that it had left the device, but holds more than a context and what it
  reported, counts as not having left.  It is ended as soon as nothing is lost by that.
* Memory of processes that are no resident's is missing from the device.  It is booked for the
  tenant whose resident held it, if the driver counted the process before the resident ended.

In a container the driver may name processes by numbers of another PID namespace.  Then only the
sums are compared: what exceeds the residents' reports is missing from the device.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from workers.device.processes.resident import ALL_PROCESSES, Resident, family

log = logging.getLogger(__name__)

#: Bytes that a process has on a device besides its tensors: the context of the driver, and the
#: workspaces of libraries.
CONTEXT_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Leftover:
    """Describes memory on the device that is held by a process of no living resident."""

    process: int
    held_bytes: int
    tenant: str  # tenant of the resident to which the process belonged; "" if unknown


class DeviceAccount:
    """Keeps the driver's last counts on one device.  It runs in the supervisor's thread."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.leftovers: list[Leftover] = []
        # memory of processes that cannot be seen here, above what residents report
        self.unseen_bytes = 0
        # counts by process, of processes with memory on the device
        self._tenants: dict[int, str] = {}

    def cap_bytes(self, resident: Resident, processes: int = 1) -> int:
        """Return the most that the driver may count for a resident with `processes` processes.

        Each of its ranks has a context of its own; its other processes are allowed none.
        """
        ranks = min(processes, resident.stay.spec.world_size)
        return resident.cap_bytes(self.budget_bytes) + CONTEXT_BYTES * ranks

    @property
    def leftover_bytes(self) -> int:
        return self.unseen_bytes + sum(one.held_bytes for one in self.leftovers)

    def by_tenant(self) -> dict[str, int]:
        """Return the bytes on the device of each tenant's residents that have ended."""
        held: dict[str, int] = {}
        for one in self.leftovers:
            if one.tenant:
                held[one.tenant] = held.get(one.tenant, 0) + one.held_bytes
        return held

    def measure(
        self, counted: Iterable[tuple[int, int]], residents: Iterable[Resident]
    ) -> tuple[list[Resident], list[Resident]]:
        """Book what the driver counted, as (process, bytes).

        Returns the residents beyond their cap or with too many processes to be counted, and the
        residents that reported that they had left the device but still hold memory.
        """
        left = dict(counted)
        tenants: dict[int, str] = {}
        beyond, stayed, told_bytes = [], [], 0
        for resident in residents:
            own = _own_of(resident, left)
            if own is None:
                resident.measured_bytes = None
                beyond.append(resident)
                continue
            if not own:  # the process holds nothing, or the driver's ids are not ours
                resident.measured_bytes = None
                told_bytes += resident.memory_bytes
                continue
            tenants |= dict.fromkeys(own, resident.stay.launch.tenant)
            resident.measured_bytes = sum(left.pop(process) for process in own)
            if resident.measured_bytes > self.cap_bytes(resident, len(own)):
                beyond.append(resident)
            elif resident.level == "host" and _has_stayed(resident):
                stayed.append(resident)
            resident.memory_bytes = min(resident.measured_bytes, self.budget_bytes)
        unseen = {one for one in left if one not in self._tenants and not _is_seen(one)}
        self.unseen_bytes = max(0, sum(left.pop(one) for one in unseen) - told_bytes)
        self._take_leftovers(left, tenants)
        return beyond, stayed

    def _take_leftovers(self, left: Mapping[int, int], tenants: dict[int, str]) -> None:
        before = {one.process for one in self.leftovers}
        self.leftovers = [
            Leftover(process, held_bytes, self._tenants.get(process, ""))
            for process, held_bytes in sorted(left.items())
            if held_bytes
        ]
        for one in self.leftovers:
            if one.process not in before:
                log.warning(
                    "process %d holds %d bytes on the device and belongs to no task here%s",
                    one.process,
                    one.held_bytes,
                    f"; it was started by tenant {one.tenant}" if one.tenant else "",
                )
        kept = {one.process: one.tenant for one in self.leftovers if one.tenant}
        self._tenants = tenants | kept


def _has_stayed(resident: Resident) -> bool:
    """True if a resident holds more than a context and the tensors that it reported."""
    return (resident.measured_bytes or 0) > resident.memory_bytes + CONTEXT_BYTES


def _is_seen(process: int) -> bool:
    return os.path.exists(f"/proc/{process}")


def _own_of(resident: Resident, counted: Mapping[int, int]) -> list[int] | None:
    """Return the processes of the resident among the counted ones; None if it has too many."""
    own: list[int] = []
    try:
        for process in family(resident.pid, ALL_PROCESSES):
            if process in counted:
                own.append(process)
    except OSError:
        return own  # the resident has just ended
    except ValueError:
        return None
    return own
