"""Starts a task in a new process."""

from __future__ import annotations

import os
from dataclasses import replace

from app.core.device.device_events import ProcessBegan, ProcessRenewed
from app.core.device.device_records import ProcessRecord
from app.core.model import codec
from app.core.model import preset as presets
from app.core.model.checkpoints.manifest import About
from app.core.model.device_fraction import cap_bytes
from app.core.model.protocol.messages import Launch
from app.core.model.provisions import resources
from workers.criu import pids as criu_pids
from workers.device.host.egress import EgressDesk
from workers.device.host.mounts import CannotMount, DeviceMounts
from workers.device.processes.process_ends import ProcessEnds, close_all
from workers.device.processes.resident import Adoption, Resident
from workers.device.stay import Stay
from workers.device.stays.command_images import CommandImages
from workers.device.stays.device_stays import DeviceStays
from workers.device.stays.listening import ResidentListener
from workers.device.stays.spawning import Spawner
from workers.device.store_io import Fetched
from workers.device.supervision.late_inputs import LateInputs
from workers.process.isolation.cgroups import OWN_PROCESSES
from workers.process.isolation.sandbox import Room
from workers.process.task_start import InputFile, SlabImage, TaskStart
from workers.process.wire import Trust
from workers.transfer.host_context import House


class CannotLimit(Exception):
    """Raised when a limit that a task asks for cannot be enforced; says which, and why."""


class TaskStarter:
    """Starts tasks whose code and inputs are here."""

    def __init__(
        self,
        house: House,
        stays: DeviceStays,
        trust: Trust,
        spawner: Spawner,
        listener: ResidentListener,
        late: LateInputs,
        mounts: DeviceMounts,
        egress: EgressDesk,
    ) -> None:
        self.house = house
        self.stays = stays
        self.trust = trust
        self.spawner = spawner
        self.listener = listener
        self.late = late
        self.mounts = mounts
        self.egress = egress
        self.images: CommandImages | None = None  # set if processes of commands can be stored

    def spawn(self, stay: Stay, fetched: Fetched) -> None:
        assert self.spawner.zygote is not None
        if told := self._lacks(stay):
            self.stays.fail(stay, "device", told, "unfetched")
            fetched.close()
            return
        try:
            walls, shown = self.spawner.walls, fetched.access
            mounts = self.mounts.of_launch(stay.launch, walls, shown)
            mounts += self.mounts.of_folders(fetched.folders, walls)
            self.mounts.check_image(fetched.root, mounts, walls)
        except CannotMount as error:
            self.stays.fail(stay, "mount", str(error), "unfetched")
            fetched.close()
            return
        self.spawner.last_id += 1
        try:
            room = self._limited_room(stay, fetched)
        except CannotLimit as error:
            self.stays.fail(stay, "device", str(error), "unfetched")
            fetched.close()
            return
        ends = ProcessEnds.made()
        sort = "command" if stay.spec.run.kind == "command" else "job"
        room = replace(room, nodes=shown.nodes, folders=shown.folders, mounts=mounts)
        if (root := fetched.root) is not None:
            room = replace(room, image=root.root)
        if (environment := fetched.environment) is not None:
            folders = (*shown.folders, environment.base)
            room = replace(room, environment=environment.folder, folders=folders)
        adoption = self._adoption(stay, fetched, ends.writes)
        last_pid = criu_pids.RESERVED if self._stores_processes(stay) and adoption is None else 0
        self._fork(self.spawner.last_id, room, ends, stay, fetched.slab, sort, last_pid)
        resident = Resident(
            record=self._begin(stay, sort, fetched),
            wire=ends.wire,
            bulk=ends.bulk,
            slab=fetched.slab,
            pipes=ends.pipes,
            room=room,
            stay=stay,
            saved=fetched.image,
            environment=fetched.environment,
            folders=fetched.locks,
            adoption=adoption,
            dump_damaged=fetched.manifest is not None and fetched.manifest.about.dump_damaged,
            bound_because=self._why_bound(stay),
        )
        resident.measure()
        self.stays.residents[resident.id] = resident
        stay.resident = resident
        # Commands and remote ranks manage their own memory.
        resident.may_leave = not (resident.is_command or stay.is_outpost)
        self._begin_task(resident, fetched)
        self._listen_to(resident)

    def _fork(
        self,
        id: int,
        room: Room,
        ends: ProcessEnds,
        stay: Stay,
        slab: int,
        sort: str,
        last_pid: int = 0,
    ) -> None:
        """Have the zygote fork the resident with this number."""
        assert self.spawner.zygote is not None
        outlet = [self.egress.expect(id)] if stay.spec.network.allow else []
        given = [*ends.given(self.trust.fd, slab), *outlet]
        self.spawner.zygote.spawn(id, room, self.spawner.walls, given, sort, last_pid)
        ends.close_given()
        close_all(outlet)

    def _listen_to(self, resident: Resident) -> None:
        for fd in (resident.wire.fileno(), *resident.pipes):
            self.listener.listen_to(resident, fd)

    def go_on(
        self, resident: Resident, fetched: Fetched, image: SlabImage, links: list[int]
    ) -> None:
        """Start the next process of a gang that has left its devices; it has the folder, the
        limits, the environment and the slab of the last one.

        What is left of the last one is ended first. `links` are its connections to other hosts.
        Raises CannotLimit, and then has taken nothing.
        """
        stay, shown, environment = resident.stay, fetched.access, resident.environment
        self.spawner.groups.remove(str(resident.id))
        groups = self._grouped(stay, str(resident.id), fetched)
        close_all([fetched.slab, *fetched.locks])
        if fetched.environment is not None:
            fetched.environment.close()
        base = () if environment is None else (environment.base,)
        folders = (*shown.folders, *base)
        room = replace(resident.room, groups=groups, nodes=shown.nodes, folders=folders)
        ends = ProcessEnds.made()
        self._fork(resident.id, room, ends, stay, resident.slab, "job")
        start = replace(self._start(stay, room, fetched), image=image, goes_on=True)
        fds = [*fetched.fds, *links]
        resident.go_on(ends, room, codec.to_json(start), fds)
        close_all(fds)
        self.late.bring(stay)
        self._listen_to(resident)

    def renew(self, stay: Stay, fetched: Fetched, resident: Resident) -> None:
        """Start a function in a resting process, which keeps its packages and its limits."""
        close_all([fetched.slab, *fetched.locks])
        if fetched.environment is not None:
            fetched.environment.close()
        self.stays.give(ProcessRenewed(process=resident.id, stay=stay.key))
        resident.begin_again(stay)
        self._begin_task(resident, fetched)

    def _begin_task(self, resident: Resident, fetched: Fetched) -> None:
        """Tell the process its task."""
        stay = resident.stay
        stay.resumed = "fresh"
        if fetched.image:
            stay.resumed = "folder" if resident.is_command else "image"
        stay.input_bytes, stay.fetched_bytes = fetched.input_bytes, fetched.fetched_bytes
        stay.ways = fetched.ways
        stay.keep_out(fetched.redactor)
        started = replace(
            self._start(stay, resident.room, fetched),
            stores_processes=self._stores_processes(stay),
            adopts=resident.adoption is not None,
            dump_damaged=resident.dump_damaged,
            rests=bool(stay.shared_key),
        )
        fds = [*fetched.fds, *stay.hand_over()]
        resident.send("begin", fds, start=codec.to_json(started), files=len(fds))
        self.late.bring(stay)
        close_all(fds)

    def _stores_processes(self, stay: Stay) -> bool:
        return self.images is not None and self.images.may_store(stay.launch)

    def _why_bound(self, stay: Stay) -> str:
        if self.images is None or stay.spec.run.kind != "command":
            return ""
        return self.images.why_not(stay.launch)

    def _adoption(self, stay: Stay, fetched: Fetched, writes: dict[str, int]) -> Adoption | None:
        """Return the processes of the task's image that can be restored here; None if there are
        none.

        They may be restored only for the task that they belong to, or for a task of the same tenant
        that begins from their checkpoint.
        """
        manifest, launch = fetched.manifest, stay.launch
        if not self._stores_processes(stay) or manifest is None or len(manifest.ranks) < 2:
            return None
        if not _may_go_on(manifest.about, launch):
            return None
        pipes = {name: os.dup(write) for name, write in writes.items()}
        return Adoption(manifest=manifest, pipes=pipes, held=fetched.beside)

    def _lacks(self, stay: Stay) -> str:
        """Return a sentence that says what the task needs and this device does not have; "" if
        nothing.
        """
        if stay.spec.network.allow and not self.spawner.has_egress:
            return "It needs the network, which this device gives to no task."
        return ""

    def _limited_room(self, stay: Stay, fetched: Fetched) -> Room:
        """Make the task's sandbox directory and control groups, with the limits that it asked for.

        Raises CannotLimit if one cannot be set: no task runs without its limits.
        """
        asked, name = dict(stay.spec.resources.asked()), str(self.spawner.last_id)
        if lacking := [*resources.lacking(tuple(asked.items()), self.spawner.gives)]:
            raise CannotLimit(f"This device cannot keep its limits: {', '.join(lacking)}.")
        room = self.spawner.room(name, fetched.code)
        groups = self._grouped(stay, name, fetched)
        try:
            template = self.spawner.template_for(asked.get(resources.DISK, 0))
        except OSError as error:
            raise CannotLimit(f"This device could not set its limits: {error}.") from error
        most = asked.get(resources.PROCESSES)
        if most and "processes" not in self.spawner.groups.standing:
            room = replace(room, processes=most + OWN_PROCESSES)
        return replace(room, groups=groups, template=template)

    def _grouped(self, stay: Stay, name: str, fetched: Fetched) -> tuple[str, ...]:
        """Make the task's control groups; raises CannotLimit."""
        asked, nodes = dict(stay.spec.resources.asked()), fetched.access.nodes
        spare_bytes = self._spare_bytes(stay) if self.house.kind == "cpu" else 0
        try:
            return tuple(self.spawner.groups.make(name, asked, spare_bytes, nodes))
        except OSError as error:
            raise CannotLimit(f"This device could not set its limits: {error}.") from error

    def _spare_bytes(self, stay: Stay) -> int:
        """Return the memory of the device that the task may not have."""
        devices, all_bytes = stay.spec.devices, self.house.memory_bytes
        most_bytes = cap_bytes(devices.choice.fraction_milli, devices.memory_bytes, all_bytes)
        return max(0, all_bytes - most_bytes)

    def _fraction(self, stay: Stay) -> float:
        """Return the part of an accelerator's memory that the task's process may use."""
        all_bytes = self.house.memory_bytes
        used = 1 - self._spare_bytes(stay) / all_bytes if all_bytes else 1.0
        return self.house.device_fraction * used

    def _begin(self, stay: Stay, sort: str, fetched: Fetched) -> ProcessRecord:
        """Tell the machine of the new process; return what the machine knows of it."""
        id, image = self.spawner.last_id, fetched.image
        self.stays.give(
            ProcessBegan(
                process=id,
                stay=stay.key,
                is_command=sort == "command",
                saved_step=None if image is None else image.step,
            )
        )
        return self.stays.machine.processes[id]

    def _start(self, stay: Stay, room: Room, fetched: Fetched) -> TaskStart:
        launch, image = stay.launch, None
        code, scratch = room.inside(self.spawner.walls)
        if fetched.image is not None:
            image = SlabImage(step=fetched.image.step, index_bytes=fetched.index_bytes)
        return TaskStart(
            task=launch.task,
            spec=launch.spec,
            inputs={
                port: InputFile(
                    format=source.get("format", ""), datablock=source.get("datablock", "")
                )
                for port, source in launch.inputs.items()
            },
            preset=presets.of_process(launch.preset),
            kind=self.house.kind,
            code=str(code),
            scratch=str(scratch),
            lease_margin_s=self.house.lease_margin_s,
            patience_s=self.house.patience_s,
            device_fraction=self._fraction(stay),
            image=image,
            seats=tuple(launch.seats),
            host=launch.host,
            variables=fetched.access.variables if launch.guests else {},
            secrets=fetched.secrets,
            image_variables={} if fetched.root is None else fetched.root.variables,
        )


def _may_go_on(about: About, launch: Launch) -> bool:
    """True if this launch may restore the processes of an image."""
    if about.tenant != launch.tenant:
        return False
    if about.task != launch.task:
        return launch.spec.from_checkpoint is not None
    return about.epoch <= launch.epoch
