"""Sends the reports of a device. Each report has all that the device holds."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from app.core.device.clock_skew import began_s
from app.core.device.device_events import ReportDue
from app.core.model.metric_rows import MESSAGE_BYTES
from app.core.model.protocol.messages import (
    Alive,
)
from workers.device.heartbeat import (
    LOGS_LIMIT_BYTES,
    HeartbeatSender,
    HeartbeatTransport,
    Rhythm,
    now_us,
)
from workers.device.host.environments import DeviceEnvironments
from workers.device.host.health import DeviceHealth
from workers.device.host.mounts import DeviceMounts
from workers.device.memory_tiers import Residency
from workers.device.prefetch import Lookout
from workers.device.stay import log_lines
from workers.device.stays.device_stays import DeviceStays
from workers.transfer.host_context import House
from workers.transfer.peer_auth import Links
from workers.transfer.peer_blocks import Giver

JSON = dict[str, Any]


class DeviceReports:
    """Owns the device's report of itself, and the thread that sends it."""

    def __init__(
        self,
        house: House,
        transport: HeartbeatTransport,
        rhythm: Rhythm,
        stays: DeviceStays,
        residency: Residency,
        lookout: Lookout,
        links: Links,
        giver: Giver,
        health: DeviceHealth,
        mounts: DeviceMounts,
        environments: DeviceEnvironments,
    ) -> None:
        self.house = house
        self.rhythm = rhythm
        self.stays = stays
        self.residency = residency
        self.lookout = lookout
        self.links = links
        self.giver = giver
        self.health = health
        self.mounts = mounts
        self.environments = environments
        self.sender = HeartbeatSender(transport)
        self.facts: JSON = house.facts
        self.clock_began_s: int | None = None
        self.is_trial_over = False  # True once the trial of storing processes has ended
        self.is_stopping = False  # the worker stops once all tasks are saved
        self.hung: list[Any] = []  # tasks that made the previous worker hang, until reported

    def forget_hung(self) -> None:
        """Forget the tasks that made the last worker hang, because the island has received their
        names.
        """
        if self.hung:
            self.hung = []
            self.hung_file.unlink()

    @property
    def hung_file(self) -> Path:
        return self.house.folder / "hung.json"

    def begin_to_stop(self) -> None:
        """Tell the island at once that this device accepts no more work."""
        self.is_stopping = self.rhythm.happened = True

    def say_goodbye(self) -> None:
        """Send the last report: all events, no residents, and the lease is given back."""
        self.sender.flush(1.0)
        for _ in range(2):  # sent twice, as no later report repeats it
            self.sender.say(self.alive(leaving=True))
            self.sender.flush(1.0)

    def may_report(self) -> bool:
        """True once the device can work and was checked, because a device that reports is given
        work.
        """
        is_judged = self.health.is_judged and self.mounts.is_judged
        return "torch" in self.facts and is_judged and self.is_trial_over

    def report_if_due(self) -> None:
        now = now_us()
        if self.may_report() and now >= self.rhythm.due_us(self.stays.machine.lease.answered_us):
            self.rhythm.reported(now)
            self.sender.say(self.alive())

    def alive(self, *, leaving: bool = False) -> Alive:
        now = now_us()
        self.stays.give(ReportDue())
        for resident in self.stays.residents.values():
            resident.measure()
        stays = list(self.stays.by_key.values())
        shown = [] if leaving else [stay for stay in stays if stay.state != "dropped"]
        have_rows = sum(1 for stay in shown if stay.rows)
        rows_bytes = MESSAGE_BYTES // max(1, have_rows)
        held = [stay.view(now, rows_bytes) for stay in shown]
        return Alive(
            device=self.house.device,
            incarnation=self.house.incarnation,
            sent_us=now,
            facts={**self.facts, **self._facts_now(leaving)},
            residents=held,
            events=[event for stay in stays for event in stay.events],
            logs=log_lines(stays, LOGS_LIMIT_BYTES - (MESSAGE_BYTES if have_rows else 0)),
            ahead=self.lookout.view(),
            links=self.links.place,
            secret=self.giver.secret,
            hung=self.hung,
            grace_us=self.stays.machine.lease.asked_us,
            health=self.health.report(),
        )

    def _facts_now(self, leaving: bool) -> JSON:
        held = {"held_bytes": self.residency.by_tenant(), **self.mounts.facts()}
        held |= self.environments.facts()
        self.clock_began_s = held["clock_began_s"] = began_s(
            self.clock_began_s, wall_s=time.time(), monotonic_s=time.monotonic()
        )
        mounts = self.mounts.offers(self.facts.get("sandbox", ()))
        offers = [*mounts, *self.environments.offers()]
        held["offers"] = [*self.facts.get("offers", ()), *offers]
        ends = {"stopping": self.is_stopping, "leaving": leaving}
        return held | {name: True for name, holds in ends.items() if holds}
