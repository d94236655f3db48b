"""Ends the stay of a resident whose process has ended, and frees what the process held."""

from __future__ import annotations

from app.core.device.device_events import ProcessExited
from workers.device.resident import Resident
from workers.device.supervision.listening import ResidentListener
from workers.device.supervision.lives import DeviceLives
from workers.device.supervision.side_work import SideWork
from workers.device.supervision.spawning import Spawner
from workers.device.supervision.storing import ResultStore


class ResidentExits:
    """Takes the exits of resident processes."""

    def __init__(
        self,
        lives: DeviceLives,
        listener: ResidentListener,
        spawner: Spawner,
        storing: ResultStore,
        side: SideWork,
    ) -> None:
        self.lives = lives
        self.listener = listener
        self.spawner = spawner
        self.storing = storing
        self.side = side

    def exited(self, resident: Resident, status: int) -> None:
        self.listener.hear_the_rest(resident)
        resident.exit_status = status
        if resident.is_parsed:  # another thread parses its final message
            return
        resident.stay.log.end()
        resident.is_gone = True
        resident.refused = self.spawner.groups.refused(str(resident.id))
        self.spawner.groups.remove(str(resident.id))
        resident.close()
        self.side.close(resident.wire.close)
        if resident.is_saving:
            self.storing.read_from.append(resident)
        else:
            self.side.close(resident.close_stores)
        self.side.remove(resident.room.scratch)
        self.lives.give(ProcessExited(process=resident.id))
        del self.lives.residents[resident.id]
