"""Ends the stay of a resident whose process has ended, and frees what the process held."""

from __future__ import annotations

from app.core.device.device_events import ProcessExited
from app.core.device.stay_state import StayState
from app.core.model.provisions.resources import MEMORY
from workers.device.host.egress import EgressDesk
from workers.device.processes.resident import Resident
from workers.device.stays.device_stays import DeviceStays
from workers.device.stays.listening import ResidentListener
from workers.device.stays.sandbox_change import SandboxChange
from workers.device.stays.spawning import Spawner
from workers.device.stays.storing import ResultStore
from workers.device.supervision.side_work import SideWork

#: A task whose stay is in one of these states can only continue from its newest image.
LEFT = frozenset({StayState.PAUSED, StayState.DROPPED})


class ResidentExits:
    """Takes the exits of resident processes."""

    def __init__(
        self,
        stays: DeviceStays,
        listener: ResidentListener,
        spawner: Spawner,
        storing: ResultStore,
        side: SideWork,
        egress: EgressDesk,
        change: SandboxChange,
    ) -> None:
        self.stays = stays
        self.listener = listener
        self.spawner = spawner
        self.storing = storing
        self.side = side
        self.egress = egress
        self.change = change

    def exited(self, resident: Resident, status: int) -> None:
        self.listener.hear_the_rest(resident)
        resident.exit_status = status
        if resident.is_parsed:  # another thread parses its final message
            return
        if not self.egress.is_settled(resident):  # the proxy still counts the task's last bytes
            return
        held_bytes = resident.peaks.get(MEMORY, 0)
        refused = self.spawner.groups.refused(str(resident.id), held_bytes=held_bytes)
        resident.refused = resident.refused or refused
        resident.lacked_memory |= self.spawner.groups.toll(str(resident.id)).oom_kills > 0
        if self.change.goes_on(resident):
            return
        if resident.is_in_image and resident.stay.state in LEFT:
            # the stay that continues from the image completes these lines
            resident.stay.log.leave_begun()
        resident.stay.log.end()
        resident.is_gone = True
        self.spawner.groups.remove(str(resident.id))
        resident.close()
        self.side.close(resident.wire.close)
        if resident.is_saving:
            self.storing.read_from.append(resident)
        else:
            self.side.close(resident.close_stores)
        self.side.remove(resident.room.scratch)
        self.stays.give(ProcessExited(process=resident.id))
        del self.stays.residents[resident.id]
