"""Connects the hosts of a gang: the coordinator host waits, the remote hosts join it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from app.core.device.device_events import HostsJoined, HostsMissed
from workers.device.heartbeat import now_us
from workers.device.processes.process_ends import close_all
from workers.device.processes.resident import Resident
from workers.device.stay import Stay
from workers.device.stays.device_stays import DeviceStays
from workers.device.supervision.side_work import SideWork
from workers.transfer import peer_auth
from workers.transfer.peer_auth import Links, Sockets

log = logging.getLogger(__name__)

JSON = dict[str, Any]


class GangHosts:
    """Waits for the hosts of gangs, and joins their coordinator hosts."""

    def __init__(
        self,
        stays: DeviceStays,
        links: Links,
        side: SideWork,
    ) -> None:
        self.stays = stays
        self.links = links
        self.side = side
        # function that moves a process to other devices of this host
        self.on_other_devices: Callable[[Resident], None] = lambda resident: None

    def expect(self, stay: Stay, slots: list[int], how: JSON) -> None:
        """Wait for all hosts of the task's gang to connect; then the task starts or is resized."""
        self.forget(stay)
        if len(slots) == 1:
            self._joined(stay, [])
            return
        stay.links = None
        stay.expects, stay.give_up_us = how["secret"], now_us() + int(peer_auth.WITHIN_S * 1e6)
        self.links.expect(stay.expects, len(slots) - 1, lambda joined: self._joined(stay, joined))

    def forget(self, stay: Stay) -> None:
        """Wait for no host of the task's gang any more."""
        if stay.expects:
            self.links.forget(stay.expects)
        stay.expects, stay.give_up_us = "", None
        close_all(stay.hand_over())

    def send_resize(self, resident: Resident) -> None:
        """Give the process the connections to the hosts that its gang now has.

        If its devices on this host change, its next process gets them.
        """
        wanted = resident.stay.record.wanted
        assert wanted is not None
        if wanted.guests != resident.stay.record.guests:
            self.on_other_devices(resident)
            return
        fds = resident.stay.hand_over()
        resident.send("resize", fds, seats=wanted.seats)
        close_all(fds)

    def _joined(self, stay: Stay, joined: Sockets) -> None:
        stay.expects, stay.give_up_us, stay.links = "", None, joined
        self.stays.give(HostsJoined(stay=stay.key))

    def give_up(self, stay: Stay) -> None:
        """Stop waiting for a host of the task's gang that did not connect in time."""
        told = f"A host of its gang did not connect within {peer_auth.WITHIN_S:.0f} s."
        self.stays.give(HostsMissed(stay=stay.key, told=told))

    def join_coordinator(self, resident: Resident) -> None:
        """Connect to the coordinator host, now that the process of the remote ranks exists."""
        stay, launch = resident.stay, resident.stay.launch
        home, secret = launch.links["home"], launch.links["secret"]
        self.side.aside(
            lambda: peer_auth.connect(home, secret, launch.host, lambda: not resident.kill_reason),
            lambda joined: self._joined_coordinator(stay, joined),
        )

    def _joined_coordinator(self, stay: Stay, joined: Sockets | BaseException) -> None:
        if isinstance(joined, BaseException):
            log.warning("cannot join the coordinator host of task %s: %s", stay.launch.task, joined)
            self.stays.drop(stay, "unlinked")
            return
        stay.links = joined
        fds = stay.hand_over()
        if stay.resident is not None:
            stay.resident.send("link", fds)
        close_all(fds)
