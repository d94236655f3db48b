"""Gives the inner end of a tunnel to the process of its task, or starts it beside a job."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict
from typing import Any

from app.core.model.provisions.tunnel import FILES, TunnelTicket, why_not_into
from workers.device.processes.resident import Resident
from workers.device.stays.device_stays import DeviceStays
from workers.device.stays.spawning import Spawner
from workers.process.isolation import sandbox
from workers.process.wire import Trust, tenant_pair

NOT_HERE = "the task is not on this device any more"
NOT_BESIDE = (
    "this device worker starts nothing beside a job: it needs root, the sandbox layers processes "
    "and user, and control groups for memory and processes"
)


class TunnelOpener:
    """Opens tunnels, in the supervisor's thread; no call blocks."""

    def __init__(self, stays: DeviceStays, spawner: Spawner, trust: Trust) -> None:
        self.stays = stays
        self.spawner = spawner
        self.trust = trust

    def open(self, ticket: TunnelTicket, theirs: socket.socket) -> str:
        """Send the socket to the task's process; return "", or why it is refused.

        If the process is paused, it starts its end of the tunnel when it continues.
        """
        stay = self.stays.by_key.get((ticket.task, ticket.epoch))
        resident = self.stays.find_resident(stay) if stay is not None else None
        if resident is None or resident.kill_reason or not resident.is_prepared:
            return NOT_HERE
        spec = resident.stay.spec
        if why := why_not_into("running", spec):
            return why
        if ticket.kind == FILES and not resident.is_command:
            return "only a command has a working folder"
        if resident.is_command:
            resident.send("open", [theirs.fileno()], ticket=asdict(ticket))
            return ""
        return self._enter(resident, ticket, theirs)

    def _enter(self, resident: Resident, ticket: TunnelTicket, theirs: socket.socket) -> str:
        """Start the inner end beside a job, whose own process only steps."""
        spec, zygote = resident.stay.spec, self.spawner.zygote
        if not self.spawner.enters_jobs:
            return NOT_BESIDE
        # a process that has not entered its sandbox yet has the namespaces of the host
        if zygote is None or resident.pidfd is None or not resident.has_entered:
            return NOT_HERE
        variables = {**spec.env, "ROUNDHOUSE_TASK": resident.task}
        if spec.network.allow:
            variables = {**sandbox.proxy_environment(), **variables}
        is_seated = resident.shells.is_seated
        said = {"ticket": asdict(ticket), "environment": variables, "is_seated": is_seated}
        begin = _written(said)
        wire, control = tenant_pair()
        fds = [control.fileno(), theirs.fileno(), self.trust.fd, resident.pidfd, begin]
        zygote.enter(resident.room, self.spawner.walls, fds)
        os.close(begin)
        os.close(control.detach())
        resident.shells.add(wire)
        return ""


def _written(begin: dict[str, Any]) -> int:
    """Return a file in memory with the data that the inner end needs to begin.

    The zygote passes the file on unread, because residents of other tenants inherit the zygote's
    memory.
    """
    fd = os.memfd_create("begin", os.MFD_CLOEXEC)
    os.write(fd, json.dumps(begin).encode())
    return fd
