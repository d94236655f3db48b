"""Runs the zygote of a device, which forks residents, and makes their sandbox directories."""

from __future__ import annotations

import logging
import os
import selectors
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.core.security import sandbox_layers
from app.storage.backend import make_private
from workers.device import births, store_io
from workers.device.heartbeat import Rhythm, now_us
from workers.device.resident import Resident
from workers.device.supervision.lives import DeviceLives
from workers.device.supervision.reports import DeviceReports
from workers.device.zygote_handle import Zygote
from workers.process import cgroups, uids, volumes
from workers.process.sandbox import PASSAGE, Room
from workers.process.uids import NoUids, UidRange
from workers.transfer.host_context import CannotServe, House

log = logging.getLogger(__name__)

JSON = dict[str, Any]

LOCK_WAIT_S = 30.0
ZYGOTE_AGAIN_S = 1.0


class Spawner:
    """Owns the zygote, the users, the control groups and the folders of residents."""

    def __init__(
        self,
        house: House,
        selector: selectors.BaseSelector,
        lives: DeviceLives,
        reports: DeviceReports,
        rhythm: Rhythm,
        exited: Callable[[Resident, int], None],
    ) -> None:
        self.house = house
        self.selector = selector
        self.lives = lives
        self.reports = reports
        self.rhythm = rhythm
        self._exited = exited
        self.zygote: Zygote | None = None
        self.zygote_due_us: int | None = None
        self.walls: list[str] = []
        self.last_id = 0
        self.lock_fd = -1
        self.uids: UidRange | None = None  # None unless run by root, which can assign other uids
        self.groups = cgroups.ControlGroups("", house.bounds)
        # file system image of scratch folders, if their size is limited
        self.template: Path | None = None
        self.unlimited: dict[str, str] = {}  # limit not enforced on this device -> reason

    def open(self, lock_fd: int) -> None:
        """Prepare what residents need, and start the zygote, which inherits the device's lock."""
        self.lock_fd = lock_fd
        for folder in self.passages[1:]:  # an earlier version made them readable for all users
            folder.chmod(stat.S_IMODE(folder.stat().st_mode) & PASSAGE)
        device, run = self.house.device, self.house.run
        self.groups = cgroups.ControlGroups.made(device, run, self.house.bounds)
        if os.geteuid() == 0:
            self.reserve_uids()
        self.unlimited |= self.groups.missing
        self.make_template()
        self.start_zygote()

    def close(self) -> None:
        self.groups.close()
        if self.uids is not None:
            self.uids.close()

    def end_predecessors(self) -> None:
        """End all processes of the device worker before this one."""
        make_private(self.records)
        if left := births.end_recorded(self.records, LOCK_WAIT_S):
            raise CannotServe(f"processes {left} of the worker before do not end; end them first")

    @property
    def records(self) -> Path:
        return self.house.folder / "residents"

    def reserve_uids(self) -> None:
        """Reserve uids: on the whole host, or among the devices of this home if a container forbids
        that.
        """
        run = self.house.run.absolute()
        folders = (uids.HOST_FOLDER, run / "uids")
        try:
            self.uids = uids.reserve(f"{run}/{self.house.device}", folders)
        except NoUids as error:
            raise CannotServe(str(error)) from error

    def make_template(self) -> None:
        """Make the file system image that scratch folders start from, where one can be mounted."""
        if self.house.sandbox == "off":
            self.unlimited["disk"] = "the sandbox is off"
            return
        template = (self.house.folder / "scratch" / "template").absolute()
        size_bytes = self.house.scratch_bytes or volumes.usual_bytes(template.parent)
        why = volumes.make_template(template, size_bytes)
        if why:
            self.unlimited["disk"] = why
        else:
            self.template = template

    def start_zygote(self) -> None:
        self.zygote_due_us = None
        probe = (
            None
            if self.house.sandbox == "off"
            else self.room("probe", store_io.unpack("", self.house))
        )
        self.zygote = Zygote(lock_fd=self.lock_fd, probe=probe, records=self.records)
        self.selector.register(self.zygote.wire, selectors.EVENT_READ, lambda: self._zygote_says())

    def _zygote_says(self) -> None:
        assert self.zygote is not None
        wire = self.zygote.wire
        for message in wire.receive():
            match message["is"]:
                case "ready":
                    self._zygote_ready(message)
                case "spawned":
                    self._spawned(message, wire.fds.pop(0))
                case "exited":
                    self._exited(self.lives.residents[message["id"]], message["status"])
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
        if message["unwatched"]:
            log.warning("states are saved while jobs wait: %s", message["unwatched"])
        self.reports.facts = {
            **self.reports.facts,
            "torch": message["torch"],
            "capabilities": [] if message["unwatched"] else ["overlap"],
        }
        self.rhythm.happened = True

    def _judge_sandbox(self) -> None:
        """Raise CannotServe if a required sandbox layer is missing, after the island was told."""
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
        standing = [*self.groups.standing, *([] if self.template is None else ["disk"])]
        self.reports.facts |= {"limits": standing, "unlimited": sorted(self.unlimited)}

    @property
    def _sandbox(self) -> sandbox_layers.Sandbox:
        return sandbox_layers.Sandbox.of(self.reports.facts)

    def _zygote_gone(self) -> None:
        """Replace a zygote that died.  Its residents died with it; no task counts as failed."""
        assert self.zygote is not None
        log.error("the zygote of %s died and is replaced", self.house.device)
        self.selector.unregister(self.zygote.wire)
        self.zygote.end()
        self.zygote = None
        for resident in list(self.lives.residents.values()):
            self.lives.kill(resident, "zygote")
            if resident.pidfd is None:
                self._exited(resident, -9)  # its process never began
            else:
                self._await_end(resident, resident.pidfd)
        self.zygote_due_us = now_us() + int(ZYGOTE_AGAIN_S * 1e6)

    def _await_end(self, resident: Resident, pidfd: int) -> None:
        """Handle the end of a killed process when its pidfd reports it, which takes a moment."""

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
            kind=self.house.kind,
            passages=self.passages,
            tmp_bytes=self.house.tmp_bytes,
            template=self.template,
        )
        if self.uids is not None and (name == "probe" or "user" in self.walls):
            os.chown(scratch, room.uid, room.uid)
        return room

    def _spawned(self, message: JSON, pidfd: int) -> None:
        resident = self.lives.residents[message["id"]]
        resident.pid, resident.pidfd = message["pid"], pidfd
        if resident.kill_reason:
            resident.kill()
