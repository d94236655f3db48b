"""Starts the process of a gang anew when its devices change, in a sandbox that shows the new ones.

A sandbox shows the nodes of certain devices from its beginning to its end, so that no process gains
or keeps a device that its task does not hold.  A change of devices therefore needs new processes:

1. What the next sandbox needs is fetched, and its devices make room and are set as the preset says,
   while the ranks still run.
2. The gang is told.  Its ranks stop at a cut and stage an image into the slab, and it says `left`.
3. When its processes have ended, the next ones begin with the same slab, and go on from the image.

For the machine this is one process, which holds the slot all the time, and nothing goes to the
store.  Orders that are sent meanwhile are sent again, as the old process may not have read them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any

from app.core.device.device_events import HostsMissed
from app.core.device.stay_state import StayState
from app.core.model.preset import of_device
from app.core.model.protocol.messages import Resize
from app.core.placement.partitions import late
from workers.device import store_io
from workers.device.driver_settings import NotSet
from workers.device.heartbeat import now_us
from workers.device.host.device_presets import ANSWER_US, DevicePresets
from workers.device.processes.process_ends import close_all
from workers.device.processes.resident import Resident
from workers.device.stay import Stay
from workers.device.stays.admission import ROOM_WITHIN_US
from workers.device.stays.device_stays import DeviceStays
from workers.device.stays.starting import CannotLimit, TaskStarter
from workers.device.store_io import Fetched, NotFetched
from workers.device.supervision.side_work import SideWork
from workers.process import untrusted
from workers.process.task_start import SlabImage
from workers.process.untrusted import Nonsense
from workers.transfer.host_context import House

log = logging.getLogger(__name__)

JSON = dict[str, Any]


#: While it has been told, a process may still leave its devices in one of these states.
_LEAVES = frozenset({StayState.RUNNING, StayState.NOTICED, StayState.PAUSING, StayState.STOPPING})


@dataclass(slots=True)
class NextSandbox:
    """Holds what the process of a gang needs on its next devices; `image` is None until it has left
    the present ones.
    """

    wanted: Resize
    fetched: Fetched
    arrived_us: int
    are_set: bool | None = None  # whether its devices are as the preset says; None: not asked for
    is_told: bool = False  # True: the process knows that it is to leave
    links: list[int] = field(default_factory=list)  # descriptors: connections to its other hosts
    came: set[str] = field(default_factory=set)  # late inputs that are not in the image
    image: SlabImage | None = None

    def close(self) -> None:
        self.fetched.close()
        close_all(self.links)


class SandboxChange:
    """Moves gangs to other devices of this host, each in a process that goes on in the same
    stay.
    """

    def __init__(
        self,
        house: House,
        stays: DeviceStays,
        side: SideWork,
        starter: TaskStarter,
        presets: DevicePresets,
    ) -> None:
        self.house = house
        self.stays = stays
        self.side = side
        self.starter = starter
        self.presets = presets
        self.next: dict[int, NextSandbox] = {}  # by resident

    def begin(self, resident: Resident) -> None:
        """Fetch what the next sandbox needs; then tell the process to leave its devices."""
        stay, wanted = resident.stay, resident.stay.record.wanted
        assert wanted is not None
        launch = replace(stay.launch, images=[], seats=wanted.seats, guests=wanted.guests)
        self.side.aside(
            lambda: store_io.fetch(launch, self.house, {}),
            lambda fetched: self._take(resident, stay, wanted, fetched),
            is_long=launch.spec.environment is not None or launch.spec.image is not None,
        )

    def _take(
        self, resident: Resident, stay: Stay, wanted: Resize, fetched: Fetched | BaseException
    ) -> None:
        is_wanted = stay.record.wanted is wanted and stay.state == StayState.RUNNING
        if isinstance(fetched, Fetched):
            if is_wanted and stay.process is resident and not resident.is_gone:
                self.forget(resident)
                self.next[resident.id] = NextSandbox(wanted, fetched, now_us())
            else:
                fetched.close()
            return
        if isinstance(fetched, NotFetched):
            told = fetched.message
        else:
            log.error("cannot change the devices of task %s", resident.task, exc_info=fetched)
            told = f"its inputs could not be fetched: {type(fetched).__name__}"
        if is_wanted:
            self._keep_devices(resident, stay, wanted, told)

    def _keep_devices(self, resident: Resident, stay: Stay, wanted: Resize, told: str) -> None:
        """Let a task that cannot change its devices go on; pause it if others need what it has."""
        log.warning("task %s cannot change its devices: %s", resident.task, told)
        if {*stay.record.guests} - {*wanted.guests}:
            self.stays.pause(stay)  # no step is lost
        else:
            self.stays.give(HostsMissed(stay=stay.key, told=told))

    def look(self, now: int) -> None:
        """Tell processes to leave their devices as soon as the next ones have room for them."""
        for id, change in list(self.next.items()):
            resident = self.stays.residents[id]
            stay = resident.stay
            may = _LEAVES if change.is_told else {StayState.RUNNING}
            if stay.record.wanted is not change.wanted or stay.state not in may:
                self.forget(resident)
                continue
            if change.is_told and resident.repeated is not None:
                continue  # else it has gone on since, and may have dropped the order
            if not self._are_set(resident, change, now):
                continue
            is_late = now >= change.arrived_us + ROOM_WITHIN_US
            if is_late or self.house.allocations.have_room(change.wanted.guests):
                change.is_told = True
                change.links += stay.hand_over()
                resident.send("resize", seats=change.wanted.seats, elsewhere=True)
                resident.repeated = []

    def _are_set(self, resident: Resident, change: NextSandbox, now: int) -> bool:
        """True if the next devices are as the task's preset says; has them set first."""
        if change.are_set is None:
            change.are_set = False
            launch, guests = resident.stay.launch, change.wanted.guests
            self.presets.set_all(launch, guests, lambda e: self._set(resident, change, e))
        elif not change.are_set and now >= change.arrived_us + ANSWER_US:
            self._set(resident, change, NotSet(f"no answer within {ANSWER_US // 10**6} s"))
        return change.are_set and resident.id in self.next

    def _set(self, resident: Resident, change: NextSandbox, error: Exception | None) -> None:
        if self.next.get(resident.id) is not change or change.are_set:
            return
        stay, change.are_set = resident.stay, True
        if error is None or not of_device(stay.launch.preset):
            return
        self.forget(resident)
        if stay.record.wanted is change.wanted and stay.state == StayState.RUNNING:
            told = f"they did not take the preset: {error}"
            self._keep_devices(resident, stay, change.wanted, told)

    def left(self, resident: Resident, message: JSON) -> None:
        """Note that all state of the gang is in its slab, and that its process ends."""
        change, stay = self.next.get(resident.id), resident.stay
        if change is None or not change.is_told or stay.record.wanted is not change.wanted:
            raise Nonsense("it left its devices without being told to")
        if resident.is_saving or resident.leaving:
            raise Nonsense("it left its devices before its images and outputs were stored")
        step, index_bytes = (untrusted.number(message, name) for name in ("step", "index_bytes"))
        change.image = SlabImage(step=step, index_bytes=index_bytes, is_kept=False)
        change.came = {*untrusted.words(message, "came")}

    def goes_on(self, resident: Resident) -> bool:
        """Start the next process of a gang whose last one has left and ended; False if there is
        none to start.
        """
        change = self.next.pop(resident.id, None)
        if change is None:
            return False
        wire, stay, wanted = resident.wire, resident.stay, change.wanted
        has_left = change.image is not None and stay.state in _LEAVES - {StayState.STOPPING}
        if has_left and not self._can_fork():
            self.stays.kill(resident, "zygote")  # without an event: the island starts it again
        if change.image is None or not has_left or resident.kill_reason:
            change.close()
            return False
        self._bring_again(resident, change.came)
        stay.launch = replace(stay.launch, seats=wanted.seats, guests=wanted.guests)
        try:
            self.starter.go_on(resident, change.fetched, change.image, change.links)
        except CannotLimit as error:
            change.close()
            self.stays.fail(stay, "device", str(error), "unfetched")
            return False
        self.side.close(wire.close)
        return True

    def _can_fork(self) -> bool:
        zygote = self.starter.spawner.zygote
        return zygote is not None and zygote.is_ready and not zygote.wire.closed

    def _bring_again(self, resident: Resident, came: set[str]) -> None:
        """Let late inputs be brought again that its image lacks, or that it may not have read."""
        stay, orders = resident.stay, resident.repeated or ()
        unread = {order.said["port"] for order in orders if order.word == "block"}
        for port in {*late(stay.spec.run.part)} & (came | unread):
            stay.lacks.add(port)
            stay.coming.discard(port)

    def forget(self, resident: Resident) -> None:
        """Forget a change that the process did not make."""
        if (change := self.next.pop(resident.id, None)) is not None:
            change.close()
