"""Runs the proxy of the device worker, and opens an outlet in it for each resident with a network.

The listener of an outlet comes from the resident's own network, before any code of its tenant runs.
The supervisor keeps a descriptor of it.  So if the proxy dies, its successor gets the listener
again, and connections that were waiting there are served.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.core.model.protocol.messages import Launch
from app.core.model.provisions.network_policy import FIGURES
from app.core.security.proxy_request import TOLD_CHARACTERS
from app.storage.backend import make_private
from workers.device.heartbeat import Rhythm, now_us
from workers.device.processes.resident import Resident
from workers.device.processes.zygote_handle import ROOT
from workers.device.stays.device_stays import DeviceStays
from workers.device.stays.spawning import Spawner
from workers.process import untrusted
from workers.process.untrusted import Nonsense
from workers.process.wire import Garbled, TenantWire, tenant_pair
from workers.transfer.host_context import House

log = logging.getLogger(__name__)

JSON = dict[str, Any]

AGAIN_US = 1_000_000  # least interval between two starts of the proxy
# in microseconds: how long the proxy may take to send the last figures of an outlet
SETTLE_US = 3_000_000
STARTS_MAX = 3  # failed starts in a row, after which the device offers no network
IDLE_US = 60_000_000  # a proxy without outlets ends after this time

_BOOT = (
    "import sys; sys.path.insert(0, {root!r}); from workers.egress.process import main; main({fd})"
)


@dataclass
class ResidentOutlet:
    """Represents the outlet of one resident; `said` are the last figures from the running proxy."""

    listener: socket.socket | None = None  # None until the resident has made it
    said: list[int] = field(default_factory=lambda: [0] * len(FIGURES))
    closing_us: int | None = None  # when the proxy was told to close the outlet


class EgressDesk:
    """Owns the proxy and all outlets."""

    def __init__(
        self,
        house: House,
        selector: selectors.BaseSelector,
        stays: DeviceStays,
        spawner: Spawner,
        rhythm: Rhythm,
        exited: Callable[[Resident, int], None],
    ) -> None:
        self.house = house
        self.selector = selector
        self.stays = stays
        self.spawner = spawner
        self.rhythm = rhythm
        self._exited = exited
        self.outlets: dict[int, ResidentOutlet] = {}  # by resident
        self.process: subprocess.Popen[bytes] | None = None
        self.wire: TenantWire | None = None
        self.started_us = -AGAIN_US
        self.idle_us: int | None = None  # since when there are no outlets
        # failed starts in a row; the present start counts until the proxy is ready
        self.failed_starts = 0

    # --- outlets ---

    def expect(self, resident: int) -> int:
        """Expect the listener of a new resident; return the descriptor over which it comes."""
        ours, theirs = socket.socketpair()
        self.outlets[resident] = ResidentOutlet()
        self.selector.register(ours, selectors.EVENT_READ, lambda: self._take(resident, ours))
        return theirs.detach()

    def renew(self, resident: Resident) -> None:
        """Give the outlet the rules of the launch that continues in the same process."""
        outlet = self.outlets.get(resident.id)
        if outlet is not None and outlet.listener is not None:
            self._say({"is": "rules", "outlet": resident.id, **_rules(resident.stay.launch)})

    def is_settled(self, resident: Resident) -> bool:
        """True if nothing of an ended resident is left here.

        Otherwise its outlet closes, and its exit is handled again when the last figures have
        arrived.
        """
        outlet = self.outlets.get(resident.id)
        if outlet is None:
            return True
        if outlet.listener is None or self.wire is None:
            self._forget(resident.id)
            return True
        if outlet.closing_us is None:
            outlet.closing_us = now_us()
            self._say({"is": "close", "outlet": resident.id})
        return False

    def _take(self, id: int, ours: socket.socket) -> None:
        """Take the listener of a resident; a resident that ended before sends none."""
        self.selector.unregister(ours)
        with ours:
            _, fds, _, _ = socket.recv_fds(ours, 1, 1, socket.MSG_CMSG_CLOEXEC)
        outlet = self.outlets.get(id)
        for fd in fds:
            if outlet is None:
                os.close(fd)
            else:
                outlet.listener = socket.socket(fileno=fd)
                self._open(id, outlet)

    def _open(self, id: int, outlet: ResidentOutlet) -> None:
        assert outlet.listener is not None
        if self.wire is None:
            self._start()  # opens all outlets
            return
        body = {"is": "open", "outlet": id, **_rules(self.stays.residents[id].stay.launch)}
        self._say(body, [outlet.listener.fileno()])

    def _forget(self, id: int) -> None:
        outlet = self.outlets.pop(id)
        if outlet.listener is not None:
            outlet.listener.close()
        if not self.outlets:
            self.idle_us = now_us()

    # --- the proxy ---

    def due_us(self) -> list[int]:
        """Return when `look` has something to do."""
        closing = self._closing_since_us()
        due = [since_us + SETTLE_US for since_us in closing]
        if self._is_missing:
            due.append(self.started_us + AGAIN_US)
        if self.process is not None and self.idle_us is not None:
            due.append(self.idle_us + IDLE_US)
        return due

    def _closing_since_us(self) -> list[int]:
        since = (outlet.closing_us for outlet in self.outlets.values())
        return [us for us in since if us is not None]

    def look(self, now: int) -> None:
        """Start a proxy if the last one died; end one that hangs or is not needed."""
        closing = self._closing_since_us()
        if any(now >= since_us + SETTLE_US for since_us in closing):
            log.error("the proxy of %s does not answer, and is replaced", self.house.device)
            self._gone()
        if self._is_missing and now >= self.started_us + AGAIN_US:
            self._start()
        if self.idle_us is not None and now >= self.idle_us + IDLE_US:
            self.end()

    def end(self) -> None:
        """End the proxy, and with it all connections."""
        if self.wire is not None:
            self.selector.unregister(self.wire)
            self.wire.close()
            self.wire = None
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def close(self) -> None:
        self.end()
        for outlet in self.outlets.values():
            if outlet.listener is not None:
                outlet.listener.close()

    @property
    def _is_missing(self) -> bool:
        return self.wire is None and any(outlet.listener for outlet in self.outlets.values())

    def _start(self) -> None:
        self.started_us, self.idle_us = now_us(), None
        self.failed_starts += 1
        folder = self._folder()
        self.wire, theirs = tenant_pair()
        with theirs:
            boot = _BOOT.format(root=str(ROOT), fd=theirs.fileno())
            self.process = subprocess.Popen(
                [sys.executable, "-B", "-c", boot],
                env={"LANG": "C.UTF-8"},  # without secrets, and without a proxy of the host
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
        self.selector.register(self.wire, selectors.EVENT_READ, self._hear)
        own_uids = self.spawner.uids
        self._say(
            {
                "is": "begin",
                "walls": self.spawner.walls,
                "folder": str(folder),
                "uid": os.geteuid() if own_uids is None else own_uids.of_proxy,
                "private": self.house.egress_private,
                "hosts": {name: list(each) for name, each in self.house.egress_hosts.items()},
            }
        )
        for id, outlet in self.outlets.items():
            outlet.said = [0] * len(FIGURES)
            if outlet.listener is not None and outlet.closing_us is None:
                self._open(id, outlet)

    def _folder(self) -> Path:
        """Make the empty folder that the proxy sees where the service's folders would be."""
        folder = (self.house.folder / "egress").absolute()
        make_private(folder)
        if self.spawner.uids is not None:
            os.chown(folder, self.spawner.uids.of_proxy, self.spawner.uids.of_proxy)
        return folder

    def _say(self, message: JSON, fds: list[int] | None = None) -> None:
        if self.wire is None:
            return
        try:
            self.wire.send(message, fds)
        except OSError as error:  # the proxy died; the selector will report it
            log.warning("the proxy of %s cannot be told: %s", self.house.device, error)

    def _hear(self) -> None:
        wire = self.wire
        assert wire is not None
        try:
            for message in wire.receive():
                self._obey(message)
            if wire.fds:
                raise Nonsense("it sent a file descriptor")
        except (Garbled, Nonsense) as error:
            log.error("the proxy of %s sent a malformed message: %s", self.house.device, error)
            self._gone()
            return
        if wire.closed:
            log.error("the proxy of %s died", self.house.device)
            self._gone()

    def _obey(self, message: JSON) -> None:
        match message["is"]:
            case "ready":
                self.failed_starts = 0
            case "used":
                self._count(message)
            case "refused":
                self._tell_owner(message)
            case "closed":
                self._count(message)
                self._settle(untrusted.number(message, "outlet"))
            case other:
                raise Nonsense(f"it says {other!r:.100}")

    def _count(self, message: JSON) -> None:
        id, figures = untrusted.number(message, "outlet"), untrusted.numbers(message, "figures")
        outlet, resident = self.outlets.get(id), self.stays.residents.get(id)
        if len(figures) != len(FIGURES) or outlet is None or resident is None:
            raise Nonsense(f"it has figures of outlet {id}")
        used = resident.stay.network
        for name, before, now in zip(FIGURES, outlet.said, figures, strict=True):
            used[name] = used.get(name, 0) + max(0, now - before)
        outlet.said = figures
        self.rhythm.chatter = True

    def _tell_owner(self, message: JSON) -> None:
        resident = self.stays.residents.get(untrusted.number(message, "outlet"))
        if resident is not None:
            told = untrusted.text(message, "told")[: 2 * TOLD_CHARACTERS]
            resident.stay.log.say(f"Roundhouse refused a connection: {told}")
            self.rhythm.chatter = True

    def _settle(self, id: int) -> None:
        """Forget a closed outlet, and handle the exit of its resident again."""
        outlet = self.outlets.get(id)
        if outlet is None or outlet.closing_us is None:
            raise Nonsense(f"it closed outlet {id}")
        self._forget(id)
        resident = self.stays.residents.get(id)
        if resident is not None and resident.exit_status is not None:
            self._exited(resident, resident.exit_status)

    def _gone(self) -> None:
        """Clean up after a proxy that died. If outlets remain, `look` starts another one."""
        self.end()
        if self.failed_starts >= STARTS_MAX:
            self._give_up()
        for id in [id for id, outlet in self.outlets.items() if outlet.closing_us is not None]:
            self._settle(id)

    def _give_up(self) -> None:
        """Offer no network from now on; running tasks get their connections refused at once."""
        log.critical("the proxy of %s does not start: tasks get no network here", self.house.device)
        self.spawner.withdraw_egress()
        for outlet in self.outlets.values():
            if outlet.listener is not None:
                outlet.listener.close()
                outlet.listener = None


def _rules(launch: Launch) -> JSON:
    withdrawn = [text for text in launch.spec.network.allow if text in launch.withdrawn]
    allow = [text for text in launch.spec.network.allow if text not in launch.withdrawn]
    return {"allow": allow, "withdrawn": withdrawn}
