"""Does everything that becomes due by time alone, and tells when something is due next.

`app.core.device.device_machine` decides whether the end of the lease kills a process.
"""

from __future__ import annotations

import contextlib
import logging

from app.core.device.device_events import DeadlinesDue
from workers.device.heartbeat import Rhythm, now_us
from workers.device.host.egress import EgressDesk
from workers.device.host.gang_hosts import GangHosts
from workers.device.host.resource_watch import ResourceWatch
from workers.device.memory_tiers import Residency
from workers.device.processes.resident import Resident
from workers.device.stays.admission import Admission
from workers.device.stays.device_stays import DeviceStays
from workers.device.stays.listening import ResidentListener
from workers.device.stays.spawning import Spawner
from workers.device.supervision.reports import DeviceReports

log = logging.getLogger(__name__)

# in microseconds: time until the next attempt to send to a process that did not read
SEND_AGAIN_US = 20_000


class DeadlineWatch:
    """Watches the deadlines of residents, stays and the lease."""

    def __init__(
        self,
        stays: DeviceStays,
        hosts: GangHosts,
        admission: Admission,
        spawner: Spawner,
        listener: ResidentListener,
        reports: DeviceReports,
        residency: Residency,
        rhythm: Rhythm,
        egress: EgressDesk,
        watch: ResourceWatch,
    ) -> None:
        self.stays = stays
        self.hosts = hosts
        self.admission = admission
        self.spawner = spawner
        self.listener = listener
        self.reports = reports
        self.residency = residency
        self.rhythm = rhythm
        self.egress = egress
        self.watch = watch

    def apply(self, now: int) -> None:
        self.watch.look(now)
        for resident in list(self.stays.residents.values()):
            self._flush(resident, now)
            if self.residency.lacks and resident.owes_image(now):
                log.warning("task %s was paused but sent no saved state", resident.task)
                self.stays.kill(resident, "unsaved")
            elif resident.save_again_us is not None and now >= resident.save_again_us:
                resident.save_again_us = None
                resident.send("save")
        self._give_up_waiting(now)
        self.stays.give(DeadlinesDue())
        for due_us, resident, fd in list(self.listener.muted):
            if now >= due_us:
                self.listener.muted.remove((due_us, resident, fd))
                self.listener.listen_to(resident, fd)
        if self.spawner.zygote_due_us is not None and now >= self.spawner.zygote_due_us:
            self.spawner.start_zygote()
        self.egress.look(now)

    def _flush(self, resident: Resident, now: int) -> None:
        """Send again the messages that a process did not read; kill a process that never reads."""
        if resident.kill_reason or resident.wire.unread_since_us is None:
            return
        with contextlib.suppress(OSError):  # it is dying; its exit will be reported
            resident.wire.flush()
        if resident.is_deaf(now):
            log.warning("task %s does not read its messages", resident.task)
            self.stays.kill(resident, "deaf")

    def _give_up_waiting(self, now: int) -> None:
        for stay in list(self.stays.by_key.values()):
            if stay.give_up_us is not None and now >= stay.give_up_us:
                self.hosts.give_up(stay)

    def timeout_s(self, stop_by_us: int | None) -> float:
        """Return how long nothing is due, at most 10 s."""
        now, machine = now_us(), self.stays.machine
        due = [us for us in (stop_by_us, self.spawner.zygote_due_us) if us is not None]
        due += [self.rhythm.due_us(machine.lease.answered_us)] if self.reports.may_report() else []
        due += [] if (look_us := self.watch.due_us()) is None else [look_us]
        due += [] if (machine_us := machine.due_us(now)) is None else [machine_us]
        due += [*(due_us for due_us, _, _ in self.listener.muted), *self.egress.due_us()]
        due += [0] if self.listener.unheard else []
        due += [s.give_up_us for s in self.stays.by_key.values() if s.give_up_us is not None]
        if self.residency.lacks and self.stays.holder is None:
            due.append(max(self.admission.lacking_until_us(), now + 500_000))
        for resident in self.stays.residents.values():
            due += _due_of(resident, now)
        return min(10.0, max(0.0, (min(due) - now) / 1e6)) if due else 10.0


def _due_of(resident: Resident, now: int) -> list[int]:
    due = [] if resident.wire.unread_since_us is None else [now + SEND_AGAIN_US]
    due += [] if resident.save_again_us is None else [resident.save_again_us]
    return due + ([resident.leave_by_us] if resident.level == "leaving" else [])
