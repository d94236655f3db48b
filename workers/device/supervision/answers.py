"""Obeys the answers of the island, which say which tasks may stay, and until when."""

from __future__ import annotations

from dataclasses import replace

from app.core.device.device_events import AnswerCame, StayForgotten
from app.core.model.protocol import messages
from app.core.model.protocol.messages import Answer, LeaseRenewal, ReportWanted
from app.core.model.provisions.mounts import FOLDER, IMAGE
from workers.device.heartbeat import Rhythm
from workers.device.host.health import DeviceHealth
from workers.device.host.mounts import DeviceMounts
from workers.device.memory_tiers import Residency
from workers.device.prefetch import Lookout
from workers.device.stays.device_stays import DeviceStays
from workers.device.supervision.late_inputs import LateInputs
from workers.device.supervision.reports import DeviceReports
from workers.device.supervisor_watchdog import Watchdog
from workers.transfer.host_context import House


class AnswerDesk:
    """Takes the island's answers to the device's reports."""

    def __init__(
        self,
        house: House,
        stays: DeviceStays,
        late: LateInputs,
        reports: DeviceReports,
        residency: Residency,
        lookout: Lookout,
        rhythm: Rhythm,
        watchdog: Watchdog,
        health: DeviceHealth,
        mounts: DeviceMounts,
    ) -> None:
        self.house = house
        self.stays = stays
        self.late = late
        self.reports = reports
        self.residency = residency
        self.lookout = lookout
        self.rhythm = rhythm
        self.watchdog = watchdog
        self.health = health
        self.mounts = mounts
        self.newest: Answer | None = None
        self.wanted_us = 0  # `sent_us` of the newest request for a whole report

    def receive(self, answer: Answer) -> None:
        if self.stays.machine.is_fresh(answer):
            self.newest = answer
            self.reports.sender.answered(answer)
            self._obey(answer)

    def renew(self, renewal: LeaseRenewal) -> None:
        """Obey the newest answer once more, as the answer to a later heartbeat.

        A renewal of another answer is ignored; the next heartbeat names the newest one.
        """
        if self.newest is None or self.newest.sent_us != renewal.answer:
            return
        if self.stays.machine.is_fresh(renewal):
            self.reports.sender.renewed()
            self._obey(replace(self.newest, sent_us=renewal.sent_us))

    def tell_all(self, wanted: ReportWanted) -> None:
        """Send the whole report at once.  A late or repeated request changes nothing."""
        if self.stays.machine.is_fresh(wanted) and wanted.sent_us > self.wanted_us:
            self.wanted_us = wanted.sent_us
            self.reports.sender.tell_all()
            self.rhythm.happened = True

    def _obey(self, answer: Answer) -> None:
        self.stays.give(AnswerCame(answer=answer))
        self.watchdog.limit_s = answer.lease_us / 1e6
        self.rhythm.set_pace(answer.beat_us)
        self.reports.forget_hung()
        self.health.check(answer.check)
        self.reports.environments.told(answer.environments)
        self.mounts.told(answer.mounts, FOLDER)
        self.mounts.told(answer.images, IMAGE)
        for stay in list(self.stays.by_key.values()):
            name = messages.key(*stay.key)
            stay.heard(answer.heard.get(name, 0), answer.sent_us)
            stay.log.acknowledged(answer.logged.get(name, 0))
            if stay.is_over():
                self.stays.give(StayForgotten(stay=stay.key))
        self.residency.expected = answer.next
        for given in answer.given:
            self.late.given(given)
        self._may_stay(is_wanted=answer.wanted)
        self.lookout.expect(answer.expect, here=[task for task, _ in self.stays.by_key])
        self.rhythm.chatter |= bool(answer.expect)  # more of the image will soon be prefetched

    def _may_stay(self, *, is_wanted: bool) -> None:
        """Tell a task that waits for an input how long it may hold the slot while it waits."""
        holders = self.stays.holders
        still = [holder for holder in holders if holder.stay.stands_still]
        is_wanted |= any(
            stay.state in ("seating", "running")
            for stay in self.stays.by_key.values()
            if all(stay is not holder.stay for holder in holders)
        )
        patience_s = self.house.patience_s if is_wanted else self.house.at_rest_s
        for holder in still:
            holder.send("patience", s=patience_s)
            self.rhythm.chatter = True  # another task may now be launched here
