"""Finds memory for tasks, and lets tasks leave the slot for their successors."""

from __future__ import annotations

import logging
from collections import Counter

from app.core.device.device_events import SlotDue
from workers.device.heartbeat import now_us
from workers.device.memory_tiers import Residency
from workers.device.stay import Stay
from workers.device.stays.device_stays import DeviceStays
from workers.device.stays.spawning import Spawner
from workers.device.stays.starting import TaskStarter
from workers.device.store_io import Fetched

log = logging.getLogger(__name__)

SQUEEZE_US = 1_000_000  # how long a co-located task waits for memory before another one yields
READY_AHEAD = 2  # processes that are made ready for functions of a batch before their turn
#: How long a task waits for memory that frozen commands hold, or for disk that others hold.
ROOM_WITHIN_US = 10_000_000


class Admission:
    """Owns the tasks that are fetched and wait for memory."""

    def __init__(
        self,
        stays: DeviceStays,
        starter: TaskStarter,
        spawner: Spawner,
        residency: Residency,
    ) -> None:
        self.stays = stays
        self.starter = starter
        self.spawner = spawner
        self.residency = residency
        self.fetched: list[tuple[Stay, Fetched]] = []  # tasks that are fetched and wait for memory

    def take(self, stay: Stay, fetched: Fetched) -> None:
        """Keep the fetched data until there is memory for the task.

        If the task was given up meanwhile, close them.
        """
        if stay.state == "seating":
            self.fetched.append((stay, fetched))
            self.claim()  # its other devices must make room, too
        else:
            fetched.close()

    def admit(self) -> None:
        """Find memory first for residents that are off the device, then for tasks without a
        process.
        """
        now = now_us()
        if not self.residency.look(now):
            self._end_a_frozen(now)
            self._squeeze(now)
            return
        for here in list(self.fetched):
            stay, fetched = here
            if stay.state != "seating":
                self.fetched.remove(here)
                fetched.close()
            elif (
                not stay.record.is_linked
                or self.spawner.zygote is None
                or not self.spawner.zygote.is_ready
            ):
                continue
            elif (shared := self.stays.find_shared(stay.shared_key)) is not None:
                if shared.is_resting:
                    self.fetched.remove(here)
                    self.starter.renew(stay, fetched, shared)
            elif stay.record.behind_until_us is not None and self._are_enough_ready():
                continue
            elif self._find_room(stay, now):
                self.fetched.remove(here)
                self.starter.spawn(stay, fetched)
            elif self.stays.machine.slot.rota.is_heir(stay.launch.task):
                # no task yields to a standby task, which is launched again when its turn comes
                self.stays.pause(stay)
            else:
                self._end_a_frozen(now)
                self._squeeze(now)
                return

    def _find_room(self, stay: Stay, now: int) -> bool:
        """True if disk and memory have room for the task; otherwise begin to make room."""
        needed_bytes = stay.spec.devices.memory_bytes
        if not (self._find_disk(stay, now) and self.residency.has_room(needed_bytes, now)):
            return False
        # before it is confirmed, the tasks before it may still run on its other devices
        is_late = stay.record.is_confirmed and now >= stay.arrived_us + ROOM_WITHIN_US
        return is_late or self.residency.house.allocations.have_room(stay.launch.guests)

    def claim(self) -> None:
        """Claim the memory that tasks of this device hold on its host's other devices.

        A task holds as much on each of them as here.
        """
        house, claims = self.residency.house, Counter[str]()
        for stay, _ in self.fetched:
            claims.update(dict.fromkeys(stay.launch.guests, stay.spec.devices.memory_bytes))
        for resident in self.stays.residents.values():
            record = resident.stay.record
            wanted = [] if record.wanted is None else record.wanted.guests
            held_bytes = resident.on_device_bytes
            claims.update(dict.fromkeys({*record.guests, *wanted}, held_bytes))
        house.allocations.claim(house.device, claims)
        house.allocations.note_room(house.device, has_room=self.residency.free_bytes >= 0)

    def _find_disk(self, stay: Stay, now: int) -> bool:
        """True if the disk has room for the task's scratch folder.

        Otherwise have a paused task make room. If none can, as other devices of this host hold the
        disk, the task goes back to its queue after ROOM_WITHIN_US.
        """
        if self.spawner.has_disk(stay.spec.resources):
            return True
        self.residency.lacks = "disk"
        # the kernel frees the disk of a process some time after the process has ended
        is_freeing = any(r.kill_reason for r in self.stays.residents.values())
        if is_freeing or self.residency.end_one():
            return False
        if now >= stay.arrived_us + ROOM_WITHIN_US:
            self.stays.pause(stay)
        return False

    def _are_enough_ready(self) -> bool:
        """True if as many processes as may be made ready ahead have not begun their task."""
        ready = [r for r in self.stays.residents.values() if r.stay.state == "seating"]
        return len(ready) >= READY_AHEAD

    def _squeeze(self, now: int) -> None:
        """If not all tasks that share the device fit in its memory, pause the one with the most
        device time.
        """
        slot = self.stays.machine.slot
        beside = [s for s in self.stays.by_key.values() if s.state == "seating" and s.launch.beside]
        beside = [stay for stay in beside if stay.record.behind_until_us is None]
        waits = [stay for stay in beside if not slot.rota.is_heir(stay.launch.task)]
        if not self.residency.lacks or not waits:
            return
        if any(r.stay.state == "pausing" or r.level == "leaving" for r in self.residency.living):
            return  # another task is releasing memory already
        here = {p.task: p.stay for p in slot.sharers() if p.stay.state == "running"}
        arrived_us = [stay.arrived_us for stay in waits]
        newest_us = max(arrived_us + [stay.arrived_us for stay in here.values()])
        if here and now >= newest_us + SQUEEZE_US:
            self.stays.pause(self.stays.by_key[here[slot.best_served(here, now)].key])

    def _end_a_frozen(self, now: int) -> None:
        """End a frozen command to free memory, as the last resort, if the slot would otherwise stay
        empty for ever.

        This happens once a task has waited for ROOM_WITHIN_US. The chosen command is the one paused
        longest among those with a durable working folder; it starts again in its folder.
        """
        if (
            self.stays.holder is not None
            or not self.residency.lacks
            or now < self.lacking_until_us()
        ):
            return
        frozen = [r for r in self.residency.living if r.is_command and r.stay.state == "paused"]
        kept = [r for r in frozen if r.is_kept and not r.is_saving]
        if kept:
            longest = min(kept, key=lambda r: (not r.is_durable, r.paused_us))
            told = "" if longest.is_durable else "; it begins again in its folder"
            log.warning("%s ends to make room%s", longest.task, told)
            self.stays.evict(longest)

    def lacking_until_us(self) -> int:
        waits_us = [s.arrived_us for s in self.stays.by_key.values() if s.state == "seating"]
        return min(waits_us, default=now_us()) + ROOM_WITHIN_US

    def end_round(self) -> None:
        """Let the slot change hands.

        This comes last, when it is known which tasks have memory.
        """
        away = frozenset(r.id for r in self.residency.living if r.level != "device")
        waiting = frozenset(stay.launch.task for stay, _ in self.fetched)
        is_short = bool(self.residency.lacks)
        for stay in self.stays.by_key.values():
            is_next = stay.state == "seating" and stay.record.behind_until_us is None
            stay.waits_for = self.residency.lacks if is_next else ""
        self.claim()
        self.stays.give(SlotDue(is_short=is_short, waiting=waiting, away=away))
