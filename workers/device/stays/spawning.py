"""Runs the zygote of a device, which forks residents, and makes their sandbox directories."""

from __future__ import annotations

import logging
import os
import selectors
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.core.model import device_fraction
from app.core.model.provisions import network_policy, resources
from app.core.security import sandbox_layers
from app.storage.backend import make_private
from workers.device import store_io
from workers.device.heartbeat import Rhythm, now_us
from workers.device.processes import resident_records
from workers.device.processes.resident import Resident
from workers.device.processes.zygote_handle import Zygote
from workers.device.stays.device_stays import DeviceStays
from workers.device.supervision.reports import DeviceReports
from workers.process import volumes
from workers.process.isolation import cgroups, uids
from workers.process.isolation.sandbox import PASSAGE, Room
from workers.process.isolation.uids import NoUids, UidRange
from workers.transfer.host_context import CannotServe, House

log = logging.getLogger(__name__)

JSON = dict[str, Any]

LOCK_WAIT_S = 30.0
ZYGOTE_AGAIN_S = 1.0
BEGUN_ELSEWHERE = 4  # tasks that other devices of the host may begin at the same moment
# most sizes with a template; a resident copies its template as soon as it begins
TEMPLATES_KEPT = 16
DEVICE_MEMORY = "device_memory"  # limit of an accelerator's memory, by its driver's count


class Spawner:
    """Owns the zygote, the users, the control groups and the folders of residents."""

    def __init__(
        self,
        house: House,
        selector: selectors.BaseSelector,
        stays: DeviceStays,
        reports: DeviceReports,
        rhythm: Rhythm,
        exited: Callable[[Resident, int], None],
    ) -> None:
        self.house = house
        self.selector = selector
        self.stays = stays
        self.reports = reports
        self.rhythm = rhythm
        self._exited = exited
        # function that is called when the layers are known
        self.on_layers: Callable[[], None] = lambda: None
        self.zygote: Zygote | None = None
        self.zygote_due_us: int | None = None
        self.walls: list[str] = []
        self.is_without_proxy = False  # True if the proxy was tried and does not start
        self.last_id = 0
        self.lock_fd = -1
        self.uids: UidRange | None = None  # None unless run by root, which can assign other uids
        self.groups = cgroups.ControlGroups("", house.bounds)
        # file system image of scratch folders, if their size is limited
        self.template: Path | None = None
        self.unlimited: dict[str, str] = {}  # limit not enforced on this device -> reason
        # limits enforced on this device, in addition to those of control groups
        self.limits: list[str] = []
        self.gives: dict[str, int] = {}  # resource -> the most that a task may ask for
        self.scratch_bytes = 0
        self.templates: list[Path] = []  # templates of sizes that tasks asked for, the newest last

    def open(self, lock_fd: int) -> None:
        """Prepare what residents need, and start the zygote, which inherits the device's lock."""
        self.lock_fd = lock_fd
        for folder in self.passages[1:]:  # an earlier version made them readable for all users
            folder.chmod(stat.S_IMODE(folder.stat().st_mode) & PASSAGE)
        device, run = self.house.device, self.house.run
        self.groups = cgroups.ControlGroups.made(device, run, self.house.bounds)
        self.house.helpers.open(device, run)
        if os.geteuid() == 0:
            self.reserve_uids()
        self.unlimited |= self.groups.missing
        self.make_template()
        self.start_zygote()

    def close(self) -> None:
        self.groups.close()
        self.house.helpers.close()
        if self.uids is not None:
            self.uids.close()

    def end_predecessors(self) -> None:
        """End all processes of the device worker before this one."""
        make_private(self.records)
        if left := resident_records.end_recorded(self.records, LOCK_WAIT_S):
            raise CannotServe(f"processes {left} of the worker before do not end; end them first")

    @property
    def records(self) -> Path:
        return self.house.folder / "residents"

    def reserve_uids(self) -> None:
        """Reserve uids on the whole host.

        If a container forbids that, reserve them among the devices of this home.
        """
        run = self.house.run.absolute()
        folders = (uids.HOST_FOLDER, run / "uids")
        try:
            self.uids = uids.reserve(f"{run}/{self.house.device}", folders)
        except NoUids as error:
            raise CannotServe(str(error)) from error

    def count_device_memory(self, *, is_counted: bool) -> None:
        """Note whether the driver counts device memory for each process."""
        if is_counted:
            self.limits.append(DEVICE_MEMORY)
            self.offer_fractions()
        else:
            self.unlimited[DEVICE_MEMORY] = "no monitor counts it (ROUNDHOUSE_DEVICE_MONITOR)"

    def offer_fractions(self) -> None:
        """Tell the island that several tasks may have the device at once.

        Each of them then has a memory cap, so this needs a count of each one's memory by the kernel
        or the driver.
        """
        facts = self.reports.facts
        self.reports.facts = facts | {"offers": [*facts.get("offers", []), device_fraction.NEED]}

    def make_template(self) -> None:
        """Make the file system image from which scratch folders start, if this host can mount
        one.
        """
        if self.house.sandbox == "off":
            self.unlimited["disk"] = "the sandbox is off"
            return
        template = (self.house.folder / "scratch" / "template").absolute()
        size_bytes = self.house.scratch_bytes or volumes.usual_bytes(template.parent)
        self.scratch_bytes = size_bytes
        why = volumes.make_template(template, size_bytes)
        if why:
            self.unlimited["disk"] = why
        else:
            self.template = template

    def template_for(self, disk_bytes: int) -> Path | None:
        """Return the file system image for a task that asked for `disk_bytes`; 0 stands for the
        usual size.
        """
        if self.template is None or not disk_bytes:
            return self.template
        size_bytes = volumes.with_overhead(disk_bytes)
        template = self.template.with_name(f"template-{size_bytes}")
        if template not in self.templates:
            if why := volumes.make_template(template, size_bytes):
                raise OSError(why)
            self.templates.append(template)
            for old in self.templates[:-TEMPLATES_KEPT]:
                old.unlink(missing_ok=True)
            self.templates = self.templates[-TEMPLATES_KEPT:]
        return template

    def has_disk(self, asked: resources.Resources) -> bool:
        """True if the disk has room for the scratch folder of a task that asked for this."""
        if self.template is None:
            return True
        size_bytes = self.scratch_bytes
        if asked.disk_bytes:
            size_bytes = volumes.with_overhead(asked.disk_bytes)
        files = 1
        if begun := self.stays.residents.values():
            # some may not have reserved theirs yet, and neither may those of other devices
            files += sum(not r.is_prepared for r in begun) + BEGUN_ELSEWHERE
        return volumes.has_room(self.template.parent, files * size_bytes)

    def start_zygote(self) -> None:
        self.zygote_due_us = None
        probe = (
            None
            if self.house.sandbox == "off"
            else self.room("probe", store_io.unpack("", self.house))
        )
        self.zygote = Zygote(
            lock_fd=self.lock_fd,
            probe=probe,
            records=self.records,
            variables=self.house.access.variables,
        )
        self.selector.register(self.zygote.wire, selectors.EVENT_READ, lambda: self._zygote_says())

    def _zygote_says(self) -> None:
        assert self.zygote is not None
        wire = self.zygote.wire
        for message in wire.receive():
            match message["is"]:
                case "forked":
                    self.zygote.forked(message["pid"], wire.fds.pop(0))
                case "ready":
                    self._zygote_ready(message)
                case "spawned":
                    self._spawned(message, wire.fds.pop(0))
                case "exited":
                    self._exited(self.stays.residents[message["id"]], message["status"])
        if wire.closed:
            self._zygote_gone()

    def _zygote_ready(self, message: JSON) -> None:
        assert self.zygote is not None
        self.zygote.is_ready = True
        self.walls, missing = message["walls"], message["missing"]
        for name, why in missing.items():
            log.warning("sandbox: no layer %r (%s): %s", name, sandbox_layers.LAYERS[name], why)
        self._judge_sandbox()
        self._judge_limits(message["unbounded"])
        self._judge_network()
        if message["unwatched"]:
            log.warning("states are saved while jobs wait: %s", message["unwatched"])
        self.reports.facts = {
            **self.reports.facts,
            "torch": message["torch"],
            "capabilities": [] if message["unwatched"] else ["overlap"],
        }
        self.rhythm.happened = True
        self.on_layers()

    def _judge_sandbox(self) -> None:
        """Raise CannotServe if a required sandbox layer is missing; the island is told first."""
        self.reports.facts |= {"sandbox": self.walls, "sandbox_mode": self.house.sandbox}
        lacking = sandbox_layers.missing(self.walls)
        if self.house.sandbox == "required" and lacking:
            self.reports.facts["refuses"] = sandbox_layers.refusal(lacking)
            self.reports.say_goodbye()
            raise CannotServe(
                f"{self.reports.facts['refuses']} (see above, why); {sandbox_layers.MENDS}"
            )
        if lacking:
            log.warning(
                "%s", "\n".join(sandbox_layers.warning([(self.house.device, self._sandbox)]))
            )

    def _judge_limits(self, unbounded: str) -> None:
        """Report the limits on residents; `unbounded` says why scratch folders have none."""
        if unbounded:
            self.template = None
            self.unlimited.setdefault("disk", unbounded)
        for name, why in self.unlimited.items():
            log.warning("processes have no limit of %s here: %s", name, why)
        disk = [] if self.template is None else ["disk"]
        standing = [*self.groups.standing, *disk, *self.limits]
        self.gives = self._gives()
        offers = [*self.reports.facts.get("offers", []), *map(resources.offer_of, self.gives)]
        self.reports.facts |= {
            "limits": standing,
            "unlimited": sorted(self.unlimited),
            resources.GIVES: self.gives,
            "watched": [*({resources.MEMORY} & {*self.gives} - {*self.groups.standing})],
            "offers": [*dict.fromkeys(offers)],
        }

    @property
    def limits_users(self) -> bool:
        """True if each resident has a user of its own, so that its processes can be limited."""
        return self.uids is not None and {"user", "limits"} <= {*self.walls}

    @property
    def enters_jobs(self) -> bool:
        """True if a process can be started beside a job, and ends and is limited together with the
        job.
        """
        is_limited = {"memory", "processes"} <= {*self.groups.standing}
        return self.uids is not None and {"processes", "user"} <= {*self.walls} and is_limited

    def _gives(self) -> dict[str, int]:
        """Return the limits that a task can ask for here, each with its largest value."""
        counts = "processes" in self.groups.standing or self.limits_users
        # where no control group counts memory, only root sees what processes share
        sees = "memory" in self.groups.standing or os.geteuid() == 0
        most = {
            resources.MEMORY: self.house.bounds.task_memory_bytes if sees else 0,
            resources.PROCESSES: resources.MOST_PROCESSES if counts else 0,
            resources.CPUS: 1000 * (os.cpu_count() or 1) if self.groups.limits_cpus() else 0,
            resources.DISK: 0 if self.template is None else self.scratch_bytes,
        }
        return {name: value for name, value in most.items() if value}

    def _judge_network(self) -> None:
        """Report whether tasks may reach the network here."""
        offered = {*self.reports.facts.get("offers", ())} - {network_policy.NEED}
        if self.has_egress:
            offered.add(network_policy.NEED)
        self.reports.facts |= {"offers": sorted(offered)}

    @property
    def has_egress(self) -> bool:
        """True if tasks can reach the network, each through an outlet of its own."""
        return self.house.egress and "network" in self.walls and not self.is_without_proxy

    def withdraw_egress(self) -> None:
        """Stop offering a network, because the proxy does not start."""
        self.is_without_proxy = True
        self._judge_network()
        self.rhythm.happened = True

    @property
    def _sandbox(self) -> sandbox_layers.Sandbox:
        return sandbox_layers.Sandbox.of(self.reports.facts)

    def _zygote_gone(self) -> None:
        """Replace a zygote that died. Its residents died with it, but no task counts as failed."""
        assert self.zygote is not None
        log.error("the zygote of %s died and is replaced", self.house.device)
        self.selector.unregister(self.zygote.wire)
        self.zygote.end()
        self.zygote = None
        for resident in list(self.stays.residents.values()):
            self.stays.kill(resident, "zygote")
            if resident.pidfd is None:
                self._exited(resident, -9)  # its process never began
            else:
                self._await_end(resident, resident.pidfd)
        self.zygote_due_us = now_us() + int(ZYGOTE_AGAIN_S * 1e6)

    def _await_end(self, resident: Resident, pidfd: int) -> None:
        """Wait for the end of a killed process, which takes a moment; its pidfd reports it."""

        def ended() -> None:
            self.selector.unregister(pidfd)
            if not resident.is_gone:
                self._exited(resident, -9)

        self.selector.register(pidfd, selectors.EVENT_READ, ended)

    @property
    def passages(self) -> tuple[Path, ...]:
        """Our folders on the path to a resident's code and scratch folder."""
        run, folder = self.house.run, self.house.folder
        return run.parent, run, folder, folder / "code", folder / "scratch"

    def room(self, name: str, code: Path | None = None) -> Room:
        """Make a sandbox directory for one resident, with its own user if we are root."""
        scratch = self.house.folder / "scratch" / name
        scratch.mkdir(mode=0o700, exist_ok=True)
        room = Room(
            code=code or self.house.folder / "code",
            scratch=scratch,
            uid=os.geteuid() if self.uids is None else self.uids.uid(self.last_id),
            nodes=self.house.access.nodes,
            folders=self.house.access.folders,
            passages=self.passages,
            tmp_bytes=self.house.tmp_bytes,
            template=self.template,
        )
        if self.uids is not None and (name == "probe" or "user" in self.walls):
            os.chown(scratch, room.uid, room.uid)
        return room

    def _spawned(self, message: JSON, pidfd: int) -> None:
        resident = self.stays.residents[message["id"]]
        resident.pid, resident.pidfd = message["pid"], pidfd
        if resident.kill_reason:
            resident.kill()
