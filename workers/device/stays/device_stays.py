"""Keeps all stays and residents of a device, and tells the device's state machine what happens to
them.
"""

from __future__ import annotations

from collections.abc import Callable

from app.core.device.device_events import (
    DeviceEvent,
    DropAsked,
    Instruction,
    KillAsked,
    PauseAsked,
    StayKey,
    TaskUnable,
)
from app.core.device.device_machine import DeviceMachine
from app.core.device.stay_state import StayState
from workers.device.heartbeat import now_us
from workers.device.processes.resident import Resident
from workers.device.stay import Stay, StayProcess

#: States of a function whose process may rest after it.
BEFORE_REST = frozenset({StayState.SEATING, StayState.RUNNING})


class DeviceStays:
    """Owns all stays and residents of a device, and the state machine that decides about them.

    `run` carries out one instruction of the machine; its second argument is the time.
    """

    def __init__(self, machine: DeviceMachine, run: Callable[[Instruction, int], None]) -> None:
        self.machine, self._run = machine, run
        self.residents: dict[int, Resident] = {}
        self.by_key: dict[StayKey, Stay] = {}

    def give(self, event: DeviceEvent) -> None:
        """Give an event to the machine, and do what it says."""
        now = now_us()
        for instruction in self.machine.handle(event, now):
            self._run(instruction, now)

    @property
    def holders(self) -> list[Resident]:
        """The residents that have the slot: one, or several with fractions of the device."""
        return [self.residents[holder.id] for holder in self.machine.slot.holders]

    @property
    def holder(self) -> Resident | None:
        """The resident that has had the slot for longest."""
        return next(iter(self.holders), None)

    def find_resident(self, stay: Stay) -> Resident | None:
        """Return the resident that runs this stay, if it has not ended."""
        return next((r for r in self.residents.values() if r.stay is stay), None)

    def find_shared(self, key: str) -> Resident | None:
        """Return a process that may run a function of this key.

        A resting process is preferred to one that still runs another function.
        """
        if not key:
            return None
        shared = [r for r in self.residents.values() if r.stay.shared_key == key]
        alive = [r for r in shared if not r.kill_reason]
        running = (r for r in alive if r.stay.state in BEFORE_REST)
        return next((r for r in alive if r.is_resting), next(running, None))

    def kill(self, process: StayProcess, reason: str) -> None:
        self.give(KillAsked(process=process.id, reason=reason))

    def pause(self, stay: Stay) -> None:
        if self._is_newest(stay):
            self.give(PauseAsked(stay=stay.key))

    def drop(self, stay: Stay, reason: str) -> None:
        """Drop the stay without an event; its process is killed."""
        if self._is_newest(stay):
            self.give(DropAsked(stay=stay.key, reason=reason))
        elif stay.resident is not None:
            self.kill(stay.resident, reason)

    def fail(self, stay: Stay, cause: str, told: str, reason: str) -> None:
        """End the stay as failed; `reason` is the kill reason of its process, if it has one."""
        if self._is_newest(stay):
            self.give(TaskUnable(stay=stay.key, cause=cause, told=told, reason=reason))
        elif stay.resident is not None:
            self.kill(stay.resident, reason)

    def _is_newest(self, stay: Stay) -> bool:
        """True unless the stay is over, or a newer launch of its epoch has arrived (a resize)."""
        return self.machine.stays.get(stay.key) is stay.record

    def evict(self, resident: Resident) -> None:
        """End a resident to make room."""
        if resident.is_resting:
            self.kill(resident, "rested")
            return
        self.drop(resident.stay, "evicted")
