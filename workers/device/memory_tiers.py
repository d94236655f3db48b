"""Decides where the state of each resident lies: on the device, in host memory, or in the store.

    device   its memory is on the device; in the slot it may step at once
    leaving  its storages are being released; their bytes are in its slab or on their way there
    host     the process and its objects live; their bytes are in its slab
    coming   its storages return, as far as memory is granted
    store    its process has ended; its image is durable, and a Launch starts from the image

Two budgets limit residents: `memory_bytes` on the device, `host_memory_bytes` for their slabs.  On
a CPU device both are memory of the same machine, but they are counted apart: the bytes of a slab
are never device memory.

The resident needed last leaves first.  Free memory goes to one returning resident at a time, so
that two of them never wait for each other.  No state is lost for the sake of memory: a process is
ended only when its image is durable.

This module has the supervisor's side and imports no torch; `offload` has the resident's side.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from workers.device.device_memory import DeviceAccount
from workers.device.heartbeat import now_us
from workers.device.processes.resident import Resident
from workers.process.untrusted import Nonsense, number
from workers.transfer.host_context import House

log = logging.getLogger(__name__)

JSON = dict[str, Any]

GRANT_BYTES = 16 * 2**20  # least memory that is granted at once, unless less is wanted
# in microseconds: limit to release memory; then the resident is ended if its image is durable
LEAVE_US = 10_000_000


class Residency:
    """Manages all residents of a device and their memory. It runs in the supervisor's thread.

    `end` ends a process. `held_ahead` returns the bytes in slabs that were prefetched for residents
    without a process yet. `lacks` is "bytes", "places" or "disk" while a task needs memory, a
    process or disk that no paused resident can give up. `expected` are tasks in the order in which
    the island will give them the slot.
    """

    def __init__(
        self,
        house: House,
        residents: dict[int, Resident],
        end: Callable[[Resident], None],
        held_ahead: Callable[[], int],
    ) -> None:
        self.house, self.residents, self.end = house, residents, end
        self.held_ahead = held_ahead
        self.account = DeviceAccount(house.memory_bytes)
        self.expected: list[str] = []
        self.lacks = ""

    # --- accounting ---

    @property
    def living(self) -> list[Resident]:
        return [r for r in self.residents.values() if not r.kill_reason]

    @property
    def free_bytes(self) -> int:
        """The free device memory; negative if a resident grew."""
        held = sum(r.on_device_bytes for r in self.living)
        guests_bytes = self.house.allocations.claimed_bytes(self.house.device)
        others = max(self.account.leftover_bytes, guests_bytes)
        return self.house.memory_bytes - held - others

    @property
    def free_host_bytes(self) -> int:
        in_slabs = sum(r.host_bytes for r in self.living) + self.held_ahead()
        return self.house.host_memory_bytes - in_slabs

    def by_tenant(self) -> JSON:
        """Return tenant -> [bytes on the device, bytes in host memory] of all living residents."""
        held: JSON = {}
        for resident in self.living:
            pair = held.setdefault(resident.stay.launch.tenant, [0, 0])
            pair[0] += resident.on_device_bytes
            pair[1] += resident.host_bytes
        for tenant, left_bytes in self.account.by_tenant().items():
            held.setdefault(tenant, [0, 0])[0] += left_bytes
        return held

    def measured(
        self, counted: Iterable[tuple[int, int]], kill: Callable[[Resident, str], None], now_us: int
    ) -> None:
        """Book what the driver counted on the device, as (process, bytes); `kill` ends a resident
        beyond its cap.
        """
        beyond, stayed = self.account.measure(counted, self.living)
        for resident in beyond:
            log.warning(
                "task %s holds %d bytes on the device, and may hold %d and a context",
                resident.task,
                resident.measured_bytes,
                resident.cap_bytes(self.account.budget_bytes),
            )
            kill(resident, "device_memory")
        for resident in stayed:
            log.warning(
                "task %s said that it had left the device, and holds %d bytes there",
                resident.task,
                resident.measured_bytes,
            )
            self._did_not_leave(resident, now_us)

    # --- free memory ---

    def look(self, now_us: int) -> bool:
        """Keep to the budgets and bring back wanted residents; True if all wanted residents are
        back.
        """
        self.lacks = ""
        for resident in self.living:
            if resident.level == "leaving" and now_us >= resident.leave_by_us:
                self._did_not_leave(resident, now_us)
            elif resident.level == "coming" and resident.stay.state == "paused":
                self.begin_to_evict(resident, now_us)  # the return was called off
        wanted = [r for r in self.living if r.stay.state == "seating" and r.level != "device"]
        if not wanted:
            self._make_room(0, now_us, places=0)
            return True
        self._let_come(min(wanted, key=lambda r: r.stay.arrived_us), now_us)
        return False

    def has_room(self, bytes_wanted: int, now_us: int) -> bool:
        """True if one more process fits; otherwise begin to make room, if a resident can."""
        self.lacks, there = self._make_room(bytes_wanted, now_us, places=1)
        return there

    def _make_room(
        self, wanted: int, now_us: int, *, places: int, coming: Resident | None = None
    ) -> tuple[str, bool]:
        """Return what is lacking although no resident can give it up, and whether there is room
        now.
        """
        while self.living and not self._has_places(places):
            if not self._end_one(self.living):
                return "places", False
        while self.free_bytes < wanted:
            leaving = [r for r in self.living if r.level == "leaving"]
            if leaving and self.free_bytes + sum(r.on_device_bytes for r in leaving) >= wanted:
                return "", False
            if self._evict_one(now_us):
                continue
            if leaving:
                return "", False
            if not self._end_for_bytes(wanted):
                others = [r for r in self.living if r is not coming and r.level != "host"]
                # If a resident is alone on the device, let it try: this code cannot tell whether it
                # fits.
                return ("bytes", False) if others else ("", True)
        return "", True

    def _has_places(self, places: int) -> bool:
        fits = len(self.living) + places <= self.house.residents_max
        return fits and self.free_host_bytes >= 0

    def _evict_one(self, now_us: int) -> bool:
        """Have the paused resident needed last release device memory; False if there is none."""
        paused = [r for r in self.living if r.stay.state == "paused" and r.level == "device"]
        fitting = (r for r in paused if r.may_leave and self._fits_host(r))
        for resident in self.needed_last_first(fitting):
            self.begin_to_evict(resident, now_us)
            return True
        return False

    def begin_to_evict(self, resident: Resident, now_us: int) -> None:
        resident.send("leave", turn=self._leaves(resident, now_us))

    def with_pause(self, resident: Resident, now_us: int) -> JSON:
        """Return extra fields for an order to pause: if a task waits for memory, release memory at
        once.
        """
        if self.lacks != "bytes" or not resident.may_leave or not self._fits_host(resident):
            return {}
        return {"leave": True, "turn": self._leaves(resident, now_us)}

    def _leaves(self, resident: Resident, now_us: int) -> int:
        resident.level, resident.leave_by_us = "leaving", now_us + LEAVE_US
        resident.turn += 1
        return resident.turn

    def _fits_host(self, resident: Resident) -> bool:
        return resident.memory_bytes - resident.slab_bytes <= self.free_host_bytes

    def _end_for_bytes(self, wanted: int) -> bool:
        """End one resident, but only if ending all that may be ended would free `wanted` bytes."""
        holding = [r for r in self.living if r.on_device_bytes]
        gained = sum(r.on_device_bytes for r in holding if _may_end(r))
        return self.free_bytes + gained >= wanted and self._end_one(holding)

    def end_one(self) -> bool:
        """End the resident needed last, for the sake of its disk; False if none may end."""
        return self._end_one(self.living)

    def _end_one(self, among: Iterable[Resident]) -> bool:
        """End the resident needed last among those with a durable image; False if there is none."""
        for resident in self.needed_last_first(filter(_may_end, among)):
            self.end(resident)
            return True
        return False

    def _did_not_leave(self, resident: Resident, now_us: int) -> None:
        if resident.stay.state == "pausing":  # the step is not over
            resident.leave_by_us = now_us + LEAVE_US
            return
        resident.level, resident.may_leave = "device", False
        if _may_end(resident):
            self.end(resident)

    # --- return to the device ---

    def _let_come(self, resident: Resident, now_us: int) -> None:
        if resident.level == "leaving":
            return  # the resident reports when it is done
        lacking = resident.lacking_bytes
        self.lacks, there = self._make_room(lacking, now_us, places=0, coming=resident)
        granted = lacking if there else min(lacking, max(0, self.free_bytes))
        # Once all its memory is back, a growth to the declared memory is granted in one piece, as
        # the resident uses it only as a whole.
        least = min(lacking, GRANT_BYTES) if resident.away_bytes else lacking
        if granted < least or (not lacking and resident.level == "coming"):
            return
        resident.level = "coming"
        resident.granted_bytes += granted
        resident.turn += 1
        resident.send("return", bytes=granted, turn=resident.turn)

    def heard(self, resident: Resident, message: JSON) -> None:
        """Process an `away` message of a resident.

        It has the bytes that are off the device, and `settled` if the last order is carried out.
        """
        away_bytes, turn = number(message, "bytes"), number(message, "turn")
        house, is_settled = self.house, message.get("settled") is True
        told = number(message, "memory_bytes")
        if is_settled and turn == resident.turn:
            # this message was sent before the memory left or came back
            resident.measured_bytes = None
        memory_bytes = resident.bounded_memory(told, house.memory_bytes, house.kind, now_us())
        if turn > resident.turn:
            raise Nonsense("it reported memory moved off the device, but had no order to move any")
        if turn < resident.turn:
            return  # a newer order is on its way, and its answer will follow
        resident.measure()
        if away_bytes > resident.slab_bytes:
            raise Nonsense("more is away than lies in its slab")
        resident.away_bytes = away_bytes
        if is_settled:
            resident.level = _level_of(resident, memory_bytes)
            resident.granted_bytes, resident.memory_bytes = 0, memory_bytes

    # --- the order of eviction ---

    def needed_last_first(self, paused: Iterable[Resident]) -> list[Resident]:
        """Sort paused residents: the one that is needed last comes first.

        The island's expected order counts first, then the time at which each resident is expected
        back. Tasks that share a device take turns: each returns about as long after its pause as it
        did before. The resident paused first has waited longest and returns first, so the one
        paused last leaves first. A cache would evict the least recently used instead.
        """
        place = {task: number for number, task in enumerate(self.expected)}
        known = [r.absent_us for r in self.living if r.absent_us]
        usual_us = sum(known) // len(known) if known else 0

        def need(resident: Resident) -> tuple[int, int]:
            back_us = resident.paused_us + (resident.absent_us or usual_us)
            return place.get(resident.task, len(place)), back_us

        return sorted(paused, key=need, reverse=True)


def _level_of(resident: Resident, memory_bytes: int) -> str:
    """Return the level of a resident that did what it was told and has `memory_bytes` on the
    device.

    A resident that took back all its memory is still coming until its growth to its declared memory
    is granted too.
    """
    if resident.away_bytes or resident.level == "leaving":
        return "host"
    may_grow = memory_bytes < resident.stay.spec.devices.memory_bytes and resident.lacking_bytes > 0
    return "coming" if resident.level == "coming" and may_grow else "device"


def _may_end(resident: Resident) -> bool:
    if resident.is_resting:
        return not resident.kill_reason
    off = resident.stay.state == "paused"
    return off and not resident.kill_reason and resident.is_durable and not resident.is_saving
