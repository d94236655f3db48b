"""Obeys the messages of residents, if the state of the task permits it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from app.core.device.device_events import (
    ProcessConcluded,
    ProcessEnding,
    ProcessPaused,
    ProcessPrepared,
    ProcessProgressed,
    ProcessResized,
    ProcessStood,
)
from app.core.model.protocol.wellformed import as_sentence
from app.core.placement.partitions import late
from workers.device.heartbeat import Rhythm, now_us
from workers.device.host.gang_hosts import GangHosts
from workers.device.memory_tiers import Residency
from workers.device.processes.resident import Resident
from workers.device.stays.device_stays import DeviceStays
from workers.device.stays.listening import Handler, read_printed
from workers.process import untrusted
from workers.process.isolation.cgroups import ControlGroups
from workers.process.untrusted import Nonsense
from workers.transfer.host_context import House

JSON = dict[str, Any]

# in microseconds: how long an ended task waits for the store before it tries again; doubled each
# time
STORE_AGAIN_US, STORE_LONGEST_US = 5_000_000, 300_000_000


class ResidentMessages:
    """Takes the messages of residents about the life of their tasks."""

    def __init__(
        self,
        house: House,
        stays: DeviceStays,
        hosts: GangHosts,
        residency: Residency,
        rhythm: Rhythm,
        groups: Callable[[], ControlGroups],
    ) -> None:
        self.house = house
        self.stays = stays
        self.hosts = hosts
        self.residency = residency
        self.rhythm = rhythm
        self.groups = groups

    def awaits(self, resident: Resident, message: JSON) -> None:
        port = _late_input(resident, message, "port")
        if port in resident.stay.lacks:
            resident.stay.awaits = port
            self.rhythm.happened = True  # perhaps the input was sent and the message was lost

    def entered(self, resident: Resident, message: JSON) -> None:
        resident.has_entered = True

    def prepared(self, resident: Resident, message: JSON) -> None:
        resident.preset = untrusted.table(message, "preset")
        resident.capabilities = untrusted.words(message, "capabilities")
        step = untrusted.number(message, "step")
        self.stays.give(ProcessPrepared(process=resident.id, step=step))
        if resident.stay.is_outpost and resident.stay.state == "seating":
            self.hosts.join_coordinator(resident)

    def progress(self, resident: Resident, message: JSON) -> None:
        step = untrusted.number(message, "step")
        clean = resident.stay.redactor.json
        resident.stay.metrics = clean(untrusted.metrics(message))
        thinned = untrusted.number({"thinned": 0, **message}, "thinned")
        resident.stay.add_rows(clean(untrusted.points(message)), is_thinned=bool(thinned))
        resident.staged_us = untrusted.number(message, "staged_us")
        resident.idle_us = untrusted.number({"idle_us": 0, **message}, "idle_us")
        told = untrusted.number(message, "memory_bytes")
        spilled = untrusted.number({"spilled_bytes": 0, **message}, "spilled_bytes")
        self.stays.give(ProcessProgressed(process=resident.id, step=step))
        house, now = self.house, now_us()
        resident.memory_bytes = resident.bounded_memory(told, house.memory_bytes, house.kind, now)
        resident.spilled_bytes = resident.bounded_spill(
            spilled, house.host_memory_bytes, house.kind, now
        )
        resident.measure()
        self.rhythm.chatter = True

    def behind(self, resident: Resident, message: JSON) -> None:
        who = resident.stay.redactor.text(untrusted.text(message, "who"))
        resident.stay.behind = as_sentence(who)
        self.rhythm.chatter = True

    def away(self, resident: Resident, message: JSON) -> None:
        self.residency.heard(resident, message)
        self.rhythm.chatter = True

    def still(self, resident: Resident, message: JSON) -> None:
        self.stays.give(ProcessStood(process=resident.id, is_still=True))

    def moving(self, resident: Resident, message: JSON) -> None:
        self.stays.give(ProcessStood(process=resident.id, is_still=False))

    def paused(self, resident: Resident, message: JSON) -> None:
        if resident.is_beginning:
            raise Nonsense("it was paused before it went on")
        lacks = _late_input(resident, message, "lacks") if "lacks" in message else ""
        unstored, wait_us = _refusal(resident) if message.get("waits") == "store" else ("", 0)
        resident.shells.seat(is_seated=False)
        self.stays.give(
            ProcessPaused(
                process=resident.id,
                step=untrusted.number(message, "step"),
                has_state=message.get("has_state") is not False,
                lacks=lacks,
                is_lacking=lacks in resident.stay.lacks,
                unstored=unstored,
                wait_us=wait_us,
            )
        )

    def resized(self, resident: Resident, message: JSON) -> None:
        record = resident.stay.record
        changes = record.wanted is not None and record.wanted.guests != record.guests
        if changes and not resident.is_beginning:
            raise Nonsense("it did not leave its devices")
        slots = untrusted.numbers(message, "seats")
        step = untrusted.number(message, "step")
        self.stays.give(ProcessResized(process=resident.id, step=step, slots=slots))
        resident.can_take_orders()

    def ending(self, resident: Resident, message: JSON) -> None:
        resident.dropped = resident.stay.redactor.json(untrusted.dropped(message))
        self.stays.give(ProcessEnding(process=resident.id))

    def last(self, resident: Resident, message: JSON) -> None:
        """Keep the final message until the process has ended and all its output was read.

        A process that can run another function does not end: if it may, it rests.
        """
        step = untrusted.number(message, "step")
        resident.look_us = 0  # read its last peaks before it is gone
        resident.verdict = resident.checked or untrusted.verdict(message, resident.stay.redactor)
        resident.checked = None
        word, rests = message["is"], message.get("rests") is True
        if rests and not self._may_rest(resident):
            rests = False
            resident.send("end")
        if rests:
            read_printed(resident)
        concluded = ProcessConcluded(process=resident.id, step=step, word=word, rests=rests)
        self.stays.give(concluded)
        if resident.is_resting:
            resident.stay.log.end()
            resident.rest()

    def _may_rest(self, resident: Resident) -> bool:
        """True if the process may run another function.

        If the kernel refused it something, the process ends instead. The exit names the refusal, so
        it counts for the function that just ran and for no later one.
        """
        return resident.may_rest() and not self.groups().refused(str(resident.id))

    def handlers(self) -> dict[str, Handler]:
        return {
            "entered": self.entered,
            "prepared": self.prepared,
            "progress": self.progress,
            "behind": self.behind,
            "away": self.away,
            "still": self.still,
            "moving": self.moving,
            "resized": self.resized,
            "paused": self.paused,
            "awaits": self.awaits,
            "ending": self.ending,
            "failed": self.last,
            "finished": self.last,
            "stopped": self.last,
        }


def _refusal(resident: Resident) -> tuple[str, int]:
    """Return why the store refuses an output of the process, and when to try again."""
    if not (why := resident.unstored_output):
        raise Nonsense("it waits for the store, which has all its outputs")
    resident.holds += 1
    return why, min(STORE_LONGEST_US, STORE_AGAIN_US * 2 ** (resident.holds - 1))


def _late_input(resident: Resident, message: JSON, name: str) -> str:
    """Return the input's name in a message, after a check that this input may come late to the
    task.
    """
    port = untrusted.text(message, name)
    if port not in late(resident.stay.spec.run.part):
        raise Nonsense(f"it lacks {port!r:.100}")
    return port
