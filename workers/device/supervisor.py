"""Supervises one device: owns its slot and all residents that live there.

At most one resident steps at a time: the resident in the slot.  The other residents stay in
memory: paused, prepared, or between their slices.  Tasks that share the device
(`core.scheduling.sharing.turns`) hold the slot in turn, some milliseconds each.  Orders and answers
only put a message into the supervisor's inbox.  One long-lived thread does everything.  All
processes that it spawned die with it.

Invariants:
* The process speaks for the device only while it holds the device's lock, which no resident can
  reach, and after every recorded resident (`workers.device.processes.resident_records`) has ended.
* A stale or repeated order changes nothing.  An order alone gives no task the slot unless the order
  is fresh: otherwise the island must first have answered a report that names the resident.
* No job steps past the trust deadline that the island's answers set.  A job that cannot stop is
  killed when the lease and its grace have ended.
* Every event is reported until the island acknowledges it.

This module imports no torch, opens no database and interprets no bytes of a tenant.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Any

from app.core.device.device_events import Instruction, LeaveAsked
from app.core.device.device_machine import DeviceMachine
from app.core.device.health_readings import Reading
from app.core.model.protocol.messages import (
    Answer,
    Given,
    LeaseRenewal,
    Order,
    ReportWanted,
)
from app.core.model.provisions.tunnel import TunnelTicket
from app.core.security import peer_proof
from app.storage.backend import make_private
from workers.device import hang_report
from workers.device.heartbeat import HeartbeatTransport, Rhythm, now_us
from workers.device.host.device_presets import DevicePresets
from workers.device.host.egress import EgressDesk
from workers.device.host.environments import DeviceEnvironments
from workers.device.host.gang_hosts import GangHosts
from workers.device.host.health import DeviceHealth
from workers.device.host.mounts import DeviceMounts
from workers.device.host.resource_watch import ResourceWatch
from workers.device.host.tunnel_opener import TunnelOpener
from workers.device.memory_tiers import Residency
from workers.device.prefetch import Lookout
from workers.device.processes.resident import Resident
from workers.device.stays.admission import Admission
from workers.device.stays.command_images import CommandImages
from workers.device.stays.device_stays import DeviceStays
from workers.device.stays.exits import ResidentExits
from workers.device.stays.listening import ResidentListener
from workers.device.stays.resident_messages import ResidentMessages
from workers.device.stays.sandbox_change import SandboxChange
from workers.device.stays.spawning import LOCK_WAIT_S, Spawner
from workers.device.stays.starting import TaskStarter
from workers.device.stays.storing import ResultStore
from workers.device.supervision.answers import AnswerDesk
from workers.device.supervision.deadlines import DeadlineWatch
from workers.device.supervision.instructions import InstructionRunner
from workers.device.supervision.late_inputs import LateInputs
from workers.device.supervision.orders import OrderDesk
from workers.device.supervision.reports import DeviceReports
from workers.device.supervision.side_work import SideWork
from workers.device.supervisor_watchdog import Watchdog
from workers.device.tunnels import TunnelServer
from workers.process.wire import Trust
from workers.transfer.host_context import CannotServe, House, lock_device, locked, set_aside
from workers.transfer.peer_auth import Desk, Links
from workers.transfer.peer_blocks import Giver

log = logging.getLogger(__name__)

# part of the time to drain that is kept for saving a command after its notice
SAVE_PART = 0.5
LEAVE_S = 2.0  # time to end all processes, after the time to drain


class Supervisor(threading.Thread):
    """Runs one device.

    Other threads may call only `receive`, `stop` and the methods that say so.
    """

    def __init__(
        self,
        house: House,
        transport: HeartbeatTransport,
        *,
        on_fatal: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name=f"device {house.device}", daemon=True)
        self.house, self.on_fatal = house, on_fatal
        self.failure = ""  # why it ended, unless it was asked to
        self.serves = False  # True from the moment when it may take work
        self.has_left = False  # True when everything that it held was released
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._lock_fd = -1
        self._device_fd: int | None = None
        self.watchdog = Watchdog(self._end_at_once)
        self.rhythm = Rhythm(int(house.beat_s * 1e6), host=house.host)
        self.trust = Trust()
        self.stop_by_us: int | None = None  # when a stopping worker ends at the latest
        self.lookout = Lookout(house, self._look_around)
        self.giver = Giver(house.cache, house.block_bytes_per_s)
        self.tunnels = TunnelServer(self.giver.secret, self.receive, self._open_tunnel)
        desks: dict[int, Desk] = {peer_proof.BLOCK: self.giver, peer_proof.TUNNEL: self.tunnels}
        self.links = Links(house.address, self.receive, desks)
        self.side = SideWork(self.receive, house.residents_max + 4)
        self.health = DeviceHealth(house, self.receive, self.rhythm)
        self.mounts = DeviceMounts(house, self.receive, self.rhythm)
        self.environments = DeviceEnvironments(house, self.receive, self.rhythm)
        self._make_state(transport)
        self._make_parts()
        self.health.on_reading = self._measured

    def _make_state(self, transport: HeartbeatTransport) -> None:
        """Make the parts that keep what is on the device."""
        house, rhythm = self.house, self.rhythm
        machine = DeviceMachine(
            house.device,
            house.incarnation,
            lease_margin_us=int(house.lease_margin_s * 1e6),
            stop_grace_us=int(house.stop_grace_s * 1e6),
        )
        stays = self.stays = DeviceStays(machine, self._run_instruction)
        self.residency = Residency(
            house, stays.residents, stays.evict, lambda: self.lookout.held_bytes
        )
        self.reports = DeviceReports(
            *(house, transport, rhythm, stays, self.residency),
            *(self.lookout, self.links, self.giver, self.health, self.mounts),
            self.environments,
        )
        self.hosts = GangHosts(stays, self.links, self.side)
        self.storing = ResultStore(self.receive, house, stays, rhythm, self.side)
        self.presets = DevicePresets(house, stays, self.receive)

    def _make_parts(self) -> None:
        """Make the parts that act on messages, orders, answers and time."""
        house, rhythm, stays = self.house, self.rhythm, self.stays
        selector, side, residency = self._selector, self.side, self.residency
        self.listener = ResidentListener(selector, side, stays, rhythm, self._exited)
        self.spawner = Spawner(house, selector, stays, self.reports, rhythm, self._exited)
        self.tunnel_opener = TunnelOpener(stays, self.spawner, self.trust)
        self.images = CommandImages(house, self.spawner, self.reports, side)
        self.storing.images = self.images
        self.egress = EgressDesk(house, selector, stays, self.spawner, rhythm, self._exited)
        self.late = LateInputs(house, stays, self.lookout, side)
        self.starter = TaskStarter(
            *(house, stays, self.trust, self.spawner, self.listener, self.late),
            *(self.mounts, self.egress),
        )
        self.starter.images = self.images
        self.change = SandboxChange(house, stays, side, self.starter, self.presets)
        self.hosts.on_other_devices = self.change.begin
        self.exits = ResidentExits(
            *(stays, self.listener, self.spawner, self.storing, side, self.egress, self.change)
        )
        self.admission = Admission(stays, self.starter, self.spawner, residency)
        self.orders = OrderDesk(stays, self.storing)
        self.answers = AnswerDesk(
            *(house, stays, self.late, self.reports, residency, self.lookout),
            *(rhythm, self.watchdog, self.health, self.mounts),
        )
        self.deadlines = DeadlineWatch(
            *(stays, self.hosts, self.admission, self.spawner),
            *(self.listener, self.reports, residency),
            *(rhythm, self.egress, ResourceWatch(house, stays, lambda: self.spawner.groups)),
        )
        self.runner = InstructionRunner(
            *(house, self.trust, stays, self.hosts, self.storing, self.late, self.admission),
            *(residency, self.lookout, rhythm, side, self.presets, self.egress),
        )
        messages = ResidentMessages(
            house, stays, self.hosts, residency, rhythm, lambda: self.spawner.groups
        )
        self.listener.handlers = {
            **messages.handlers(),
            "part": self.listener.take_part,
            "saving": self.storing.saving,
            "adopts": self.images.adopt,
            "left": self.change.left,
        }

    def _run_instruction(self, instruction: Instruction, now: int) -> None:
        self.runner.run(instruction, now)

    def _open_tunnel(self, ticket: TunnelTicket, theirs: socket.socket) -> str:
        return self.tunnel_opener.open(ticket, theirs)

    def _exited(self, resident: Resident, status: int) -> None:
        self.exits.exited(resident, status)

    def receive(self, message: Any) -> None:
        """Queue an order, an answer, or a function to be called in the supervisor's thread."""
        self.inbox.put(message)
        os.eventfd_write(self._woken, 1)

    def ask_to_leave(self) -> None:
        """Pause and durably save all tasks, report that, and end; without waiting for it."""
        self.receive(self._begin_to_leave)

    def stop(self) -> None:
        """Let it leave, and wait for that."""
        self.ask_to_leave()
        self.join(self.house.drain_s + LEAVE_S)

    def run(self) -> None:
        try:
            self._move_in()
            self.serves = True
            self.watchdog.start()
            while not self._may_leave():
                self._round()
            self.reports.say_goodbye()
        except CannotServe as error:
            log.critical("%s: %s", self.house.device, error)
            self.failure = str(error)
            self.on_fatal()
        except Exception as error:
            log.exception("%s: the supervisor failed; all its processes end", self.house.device)
            self.failure = f"{type(error).__name__}: {error}"
            self.on_fatal()
        finally:
            self.watchdog.end()
            self._move_out()
            self.has_left = True

    def _end_at_once(self) -> None:
        """Kill all residents and the zygote.

        The watchdog calls this when the supervisor hangs.
        """
        try:
            self._write_down_why()
        except OSError:
            log.exception("%s: cannot record what made it hang", self.house.device)
        for resident in list(self.stays.residents.values()):
            resident.kill()
        if self.spawner.zygote is not None:
            self.spawner.zygote.process.kill()
        self.on_fatal()

    def _write_down_why(self) -> None:
        here, hearing = self.house.device, self.listener.hearing
        there = {resident.stay.key for resident in list(self.stays.residents.values())}
        tasks = hang_report.blamed(hearing.stay.key if hearing is not None else None, there)
        for task, _ in tasks or sorted(there):
            story = self.stays.machine.story.of(task)
            log.critical("%s hung; what happened to %s:\n%s", here, task, "\n".join(story))
        if tasks:
            log.critical("%s hung while it was busy with %s", here, tasks)
            hang_report.write_down(self.reports.hung_file, tasks)

    def _round(self) -> None:
        # 1. Read messages of residents, the zygote and the inbox.
        timeout_s = self.deadlines.timeout_s(self.stop_by_us)
        self.watchdog.rests()
        ready = self._selector.select(timeout_s)
        self.watchdog.works()
        unheard, self.listener.unheard = self.listener.unheard, []
        for key, _ in ready:
            key.data()
        for resident in unheard:
            self.listener.hear(resident)
        while not self.inbox.empty():
            self._hear(self.inbox.get())
        # 2. Apply deadlines.
        self.deadlines.apply(now_us())
        self.health.look()
        self.mounts.look(self.spawner.walls)
        # 3. Start processes, let tasks yield, and fill the slot.
        self.admission.admit()
        self.admission.end_round()
        self.change.look(now_us())
        self.presets.look()
        # 4. Report changes.
        self.reports.report_if_due()

    def _hear(self, message: Any) -> None:
        match message:
            case Order():
                self.orders.receive(message)
            case Answer():
                self.answers.receive(message)
            case LeaseRenewal():
                self.answers.renew(message)
            case ReportWanted():
                self.answers.tell_all(message)
            case Given():
                self.late.given(message)
            case _:
                message()

    def _move_in(self) -> None:
        make_private(self.house.folder)
        self._lock_fd = locked(self.house.run / f"{self.house.device}.lock", LOCK_WAIT_S)
        self._device_fd = lock_device(self.house, LOCK_WAIT_S)
        self.reports.hung = hang_report.written_down(self.reports.hung_file)
        self.spawner.end_predecessors()
        for name in ("code", "scratch"):
            self.side.remove(set_aside(self.house.folder / name))
            make_private(self.house.folder / name)
        self._selector.register(self._woken, selectors.EVENT_READ, self._awake)
        self.tunnels.start()
        self.links.listen()
        self.reports.sender.start()
        self.presets.start()
        self.health.start()
        self.mounts.start()
        self.environments.start()
        if self.house.kind == "cpu":
            self.spawner.offer_fractions()
        else:
            self.spawner.count_device_memory(is_counted=self.health.has_monitor)
        self.spawner.open(self._lock_fd)
        house = self.house
        house.allocations.serve(
            *(house.device, house.kind, house.access, self._look_again, self.presets.set_for)
        )

    def _awake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._woken)

    def _begin_to_leave(self) -> None:
        if self.stop_by_us is None:
            drain_us = int(self.house.drain_s * 1e6)
            self.stop_by_us = now_us() + drain_us
            pause_by_us = self.stop_by_us - int(drain_us * SAVE_PART)
            self.reports.begin_to_stop()
            self.stays.give(LeaveAsked(pause_by_us=pause_by_us))

    def _may_leave(self) -> bool:
        if self.stop_by_us is None:
            return False
        kept = [r for r in self.stays.residents.values() if not r.kill_reason]
        done = self.stays.holder is None and all(r.is_kept and not r.is_saving for r in kept)
        return done or now_us() >= self.stop_by_us

    def _look_again(self) -> None:
        """Have a round soon.  Called from other threads."""
        self.receive(lambda: None)

    def _move_out(self) -> None:
        self.house.allocations.leave(self.house.device)
        if self.spawner.zygote is not None:
            self.spawner.zygote.end()
        self.egress.close()
        self.reports.sender.end()
        self.health.end()
        self.presets.end()
        self.images.end()
        self.side.cancel_waiting()  # their peers are dead
        for resident in self.stays.residents.values():
            self.change.forget(resident)
            resident.close()
            self.side.close(resident.wire.close)
        for resident in (*self.stays.residents.values(), *self.storing.read_from):
            self.side.close(resident.close_stores)
        self.side.end()
        for _, fetched in self.admission.fetched:
            fetched.close()
        self.lookout.close()
        self.environments.end()
        self.links.close()
        self.tunnels.close()
        self.giver.close()
        self._selector.close()
        self.trust.close()
        self.spawner.close()
        if self._device_fd is not None:
            os.close(self._device_fd)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)

    def _measured(self, reading: Reading) -> None:
        if self.house.kind != "cpu":
            self.residency.measured(reading.processes, self.stays.kill, now_us())

    def _look_around(self) -> None:
        """Make the next report due now.  Called from another thread."""
        self.receive(self._something_happened)

    def _something_happened(self) -> None:
        self.rhythm.happened = True
