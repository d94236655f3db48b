"""Starts a task in a new process."""

from __future__ import annotations

import os
import selectors
import socket
from dataclasses import replace
from typing import Any

from app.core.device.device_events import ProcessBegan
from app.core.device.device_records import ProcessRecord
from workers.device import store_io
from workers.device.resident import Resident
from workers.device.stay import Stay
from workers.device.store_io import Fetched
from workers.device.supervision.late_inputs import LateInputs
from workers.device.supervision.listening import ResidentListener
from workers.device.supervision.lives import DeviceLives
from workers.device.supervision.spawning import Spawner
from workers.process.sandbox import Room
from workers.process.wire import Trust, tenant_pair
from workers.transfer import peer_auth
from workers.transfer.host_context import House

JSON = dict[str, Any]

BULK_TIMEOUT_S = 60.0


class TaskStarter:
    """Starts tasks whose code and inputs are here."""

    def __init__(
        self,
        house: House,
        lives: DeviceLives,
        trust: Trust,
        spawner: Spawner,
        listener: ResidentListener,
        selector: selectors.BaseSelector,
        late: LateInputs,
    ) -> None:
        self.house = house
        self.lives = lives
        self.trust = trust
        self.spawner = spawner
        self.listener = listener
        self.selector = selector
        self.late = late

    def spawn(self, stay: Stay, fetched: Fetched) -> None:
        assert self.spawner.zygote is not None
        self.spawner.last_id += 1
        room = self.spawner.room(str(self.spawner.last_id), fetched.code)
        wire, control = tenant_pair()
        bulk, bulk_end = socket.socketpair()
        peer_auth.wait_for(bulk, BULK_TIMEOUT_S)
        pipes = {"stdout": os.pipe(), "stderr": os.pipe()}
        writes = [write for _, write in pipes.values()]
        sockets = [control.fileno(), bulk_end.fileno()]
        given = [*sockets, self.trust.fd, *writes, fetched.slab]
        sort = "command" if "command" in stay.launch.run else "job"
        room = replace(room, groups=tuple(self.spawner.groups.make(str(self.spawner.last_id))))
        self.spawner.zygote.spawn(self.spawner.last_id, room, self.spawner.walls, given, sort)
        resident = Resident(
            record=self._begin(stay, sort, fetched),
            wire=wire,
            bulk=bulk,
            slab=fetched.slab,
            pipes={read: name for name, (read, _) in pipes.items()},
            room=room,
            stay=stay,
            saved=fetched.image,
        )
        resident.measure()
        store_io.close_all([control.detach(), bulk_end.detach(), *writes])
        self.lives.residents[resident.id] = resident
        stay.resident = resident
        # Commands and remote ranks manage their own memory.
        resident.may_leave = not (resident.is_command or stay.is_outpost)
        stay.resumed = "fresh"
        if fetched.image:
            stay.resumed = "folder" if resident.is_command else "image"
        fds = [*fetched.fds, *stay.hand_over()]
        stay.input_bytes, stay.fetched_bytes = fetched.input_bytes, fetched.fetched_bytes
        stay.ways = fetched.ways
        resident.send("begin", fds, spec=self._spec(stay, room, fetched), files=len(fds))
        self.late.bring(stay)
        store_io.close_all(fds)
        self.selector.register(wire, selectors.EVENT_READ, lambda: self.listener.hear(resident))
        for fd in resident.pipes:
            os.set_blocking(fd, False)
            self.listener.listen_to(resident, fd)

    def _begin(self, stay: Stay, sort: str, fetched: Fetched) -> ProcessRecord:
        """Tell the machine of the new process; return what the machine knows of it."""
        id, image = self.spawner.last_id, fetched.image
        self.lives.give(
            ProcessBegan(
                process=id,
                stay=stay.key,
                is_command=sort == "command",
                saved_step=None if image is None else image.step,
            )
        )
        return self.lives.machine.processes[id]

    def _spec(self, stay: Stay, room: Room, fetched: Fetched) -> JSON:
        """Return the spec for the process."""
        launch = stay.launch
        code, scratch = room.inside(self.spawner.walls)
        return {
            "task": launch.task,
            "run": launch.run,
            "params": launch.params,
            "inputs": {
                port: {
                    "format": source.get("format", ""),
                    "datablock": source.get("datablock", ""),
                }
                for port, source in sorted(launch.inputs.items())
            },
            "outputs": launch.outputs,
            "publish": launch.publish,
            "preset": launch.preset,
            "kind": self.house.kind,
            "rank": 0,
            "world_size": launch.world_size,
            "seats": launch.seats,
            "host": launch.host,
            "code": str(code),
            "scratch": str(scratch),
            "image": fetched.image
            and {"step": fetched.image.step, "index_bytes": fetched.index_bytes},
            "checkpoint_every_s": launch.checkpoint_every_s,
            "memory_bytes": launch.memory_bytes,
            "lease_margin_s": self.house.lease_margin_s,
            "patience_s": self.house.patience_s,
        }
