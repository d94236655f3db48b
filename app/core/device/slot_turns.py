"""Gives the slot of a device to one process at a time; tasks that share the device take turns.

Tasks that take fractions of the device have the slot together, as long as their fractions fit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from app.core.device.device_events import StayKey
from app.core.device.device_records import ProcessRecord, StayRecord
from app.core.device.stay_state import StayState
from app.core.model.device_choice import WHOLE_MILLI
from app.core.scheduling.sharing.turns import TURN_US, Rota


class SlotTurns:
    """Chooses among the processes of a device; the stays and processes belong to the device's
    machine.

    `rota` has the shares of the newest answer; it is empty unless several tasks take turns.
    """

    def __init__(
        self, stays: Mapping[StayKey, StayRecord], processes: Mapping[int, ProcessRecord]
    ) -> None:
        self.stays, self.processes = stays, processes
        # the processes that have the slot, in the order in which they got it
        self.holders: list[ProcessRecord] = []
        self.free_since_us = 0
        self.rota = Rota({})
        self.turn_over_us = 0

    @property
    def holder(self) -> ProcessRecord | None:
        """The process that has had the slot for longest."""
        return self.holders[0] if self.holders else None

    @property
    def free_milli(self) -> int:
        """The thousandths of the device that no process in the slot takes."""
        return WHOLE_MILLI - sum(process.stay.milli for process in self.holders)

    def has(self, process: ProcessRecord) -> bool:
        """True if the process has the slot, or its fraction of it."""
        return process in self.holders

    def take(self, process: ProcessRecord, now_us: int) -> None:
        stay = process.stay
        stay.set_claim(False, now_us)
        if stay.prepared_us is None:
            stay.prepared_us = stay.before_us
        self.holders.append(process)
        self.turn_over_us = now_us + TURN_US
        process.is_still, stay.slot_since_us = False, now_us
        process.step_since_us = now_us

    def free(self, process: ProcessRecord, now_us: int) -> None:
        """Free the slot if the process has it."""
        if self.has(process):
            stay = process.stay
            stay.before_us, stay.slot_since_us = stay.held_us(now_us), None
            self.holders.remove(process)
            self.free_since_us = now_us

    def claim(self, now_us: int) -> None:
        """Count empty parts of the slot for the stays that are to begin in them (rule F1).

        The device is promised to these stays, so no other task can use it while they start. Of
        several, the one that arrived first claims first. A task that is still in the slot keeps the
        others from it, so they claim nothing meanwhile.
        """
        free_milli = self.free_milli
        for stay in sorted(self.stays.values(), key=lambda stay: stay.arrived_us):
            fits = stay.may_claim and stay.milli <= free_milli
            stay.set_claim(fits, now_us)
            free_milli -= stay.milli if fits else 0

    def sharers(self) -> list[ProcessRecord]:
        """Return the processes that can run and, by the newest answer, share the device."""
        return [
            process
            for process in self.processes.values()
            if self.rota.has(*process.stay.key)
            and not process.kill_reason
            and (process.stay.state == StayState.RUNNING or process.may_begin)
        ]

    def shared_us(self, now_us: int) -> dict[str, int]:
        """Return the slot time of each task that shares the device, even if it cannot run now."""
        return {
            task: stay.held_us(now_us)
            if (stay := self.stays.get((task, share.epoch)))
            else share.held_us
            for task, share in self.rota.shares.items()
        }

    def best_served(self, tasks: Collection[str], now_us: int) -> str:
        """Return the task whose turn would come last.

        If there are standby tasks, it is one of them.
        """
        standby = [task for task in tasks if self.rota.is_heir(task)]
        return self.rota.most_of(standby or tasks, self.shared_us(now_us))

    def is_turn_over(self, now_us: int) -> bool:
        """True if another task is to have the slot now."""
        holder = self.holder
        if holder is None or holder.yields or now_us < self.turn_over_us:
            return False
        if holder.stay.state != StayState.RUNNING or not (rivals := self._rivals()):
            return False
        if self.rota.next_of(rivals, self.shared_us(now_us)) != holder.task:
            return True
        self.turn_over_us = now_us + TURN_US
        return False

    def next_process(self, now_us: int) -> ProcessRecord | None:
        """Return the next process that fits into the slot.

        Tasks that share the device come before all others.
        """
        free_milli = self.free_milli
        here = [p for p in self.processes.values() if p.stay.milli <= free_milli]
        off = [p for p in here if p.stay.is_between_slices and not p.kill_reason]
        if not off:
            ready = (p for p in here if p.may_begin)
            return min(ready, key=lambda p: p.stay.arrived_us, default=None)
        sharers = {p.task: p for p in self.sharers()}
        if not sharers:
            # an answer on its way may leave out one of the tasks, but not all of them
            return off[0]
        return sharers[self.rota.next_of(sharers, self.shared_us(now_us))]

    def due_us(self) -> int | None:
        """Return when the turn of the process in the slot ends; None if no other task waits for the
        slot.
        """
        asks = self.holder is not None and not self.holder.yields and self._rivals()
        return self.turn_over_us if asks else None

    def _rivals(self) -> list[str]:
        """Return the tasks that share the device with the task in the slot, that task included."""
        tasks = [process.task for process in self.sharers()]
        holder = self.holder
        return tasks if holder is not None and holder.task in tasks and len(tasks) > 1 else []
