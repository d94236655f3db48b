"""Obeys the answers of the island: which tasks may stay, and until when."""

from __future__ import annotations

from app.core.device.device_events import AnswerCame, StayForgotten
from app.core.model import messages
from app.core.model.messages import (
    Answer,
)
from workers.device.heartbeat import Rhythm
from workers.device.memory_tiers import Residency
from workers.device.prefetch import Lookout
from workers.device.supervision.late_inputs import LateInputs
from workers.device.supervision.lives import DeviceLives
from workers.device.supervision.reports import DeviceReports
from workers.device.watchdog import Watchdog
from workers.process.wire import Trust
from workers.transfer.host_context import House


class AnswerDesk:
    """Takes the island's answers to the device's reports."""

    def __init__(
        self,
        house: House,
        trust: Trust,
        lives: DeviceLives,
        late: LateInputs,
        reports: DeviceReports,
        residency: Residency,
        lookout: Lookout,
        rhythm: Rhythm,
        watchdog: Watchdog,
    ) -> None:
        self.house = house
        self.trust = trust
        self.lives = lives
        self.late = late
        self.reports = reports
        self.residency = residency
        self.lookout = lookout
        self.rhythm = rhythm
        self.watchdog = watchdog

    def receive(self, answer: Answer) -> None:
        if not self.lives.machine.is_fresh(answer):
            return
        self.lives.give(AnswerCame(answer=answer))
        self.trust.extend(self.lives.machine.lease.trusted_until_us)
        self.watchdog.limit_s = answer.lease_us / 1e6
        self.reports.forget_hung()
        for stay in list(self.lives.stays.values()):
            name = messages.key(*stay.key)
            stay.heard(answer.heard.get(name, 0))
            stay.log.acknowledged(answer.logged.get(name, 0))
            if stay.is_over():
                self.lives.give(StayForgotten(stay=stay.key))
        self.residency.expected = answer.next
        for given in answer.given:
            self.late.given(given)
        self._may_stay(is_wanted=answer.wanted)
        self.lookout.expect(answer.expect, here=[task for task, _ in self.lives.stays])
        self.rhythm.chatter |= bool(answer.expect)  # more of it will soon be prefetched

    def _may_stay(self, *, is_wanted: bool) -> None:
        """Tell a task that waits for an input how long it may hold the slot."""
        holder = self.lives.holder
        if holder is None or not holder.stay.stands_still:
            return
        is_wanted |= any(
            stay.state in ("seating", "running")
            for stay in self.lives.stays.values()
            if stay is not holder.stay
        )
        patience_s = self.house.patience_s if is_wanted else self.house.at_rest_s
        holder.send("patience", s=patience_s)
        self.rhythm.chatter = True  # another task may be launched here
