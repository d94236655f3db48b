"""Brings inputs to tasks that began without them."""

from __future__ import annotations

import os
from typing import Any

from app.core.model.protocol import messages
from app.core.model.protocol.messages import (
    Given,
)
from workers.device import store_io
from workers.device.heartbeat import now_us
from workers.device.prefetch import Lookout
from workers.device.stay import Stay, StayProcess
from workers.device.stays.device_stays import DeviceStays
from workers.device.supervision.side_work import SideWork
from workers.transfer.host_context import House

JSON = dict[str, Any]


class LateInputs:
    """Fetches late inputs and hands them to their tasks."""

    def __init__(
        self,
        house: House,
        stays: DeviceStays,
        lookout: Lookout,
        side: SideWork,
    ) -> None:
        self.house = house
        self.stays = stays
        self.lookout = lookout
        self.side = side

    def given(self, given: Given) -> None:
        stay = self.stays.by_key.get((given.task, given.epoch))
        if stay is not None:
            stay.is_given(given.port, given.source)
            self.bring(stay)

    def bring(self, stay: Stay) -> None:
        """Fetch the late inputs whose location is known, once there is a process that can take
        them.
        """
        if (process := stay.process) is None:
            return
        for port in (stay.lacks & stay.given.keys()) - stay.coming:
            stay.coming.add(port)
            self._fetch_late(process, port, stay.given[port])

    def _fetch_late(self, process: StayProcess, port: str, source: JSON) -> None:
        self.side.aside(
            lambda: store_io.opened_in_time(source, self.house, self.lookout.came),
            lambda opened: self._brought(process, port, opened),
        )

    def _brought(
        self, process: StayProcess, port: str, opened: tuple[int, str] | BaseException
    ) -> None:
        stay = process.stay  # the process still runs the same task
        if isinstance(opened, BaseException):
            self._lacks_for_good(stay, port, opened)
            return
        fd, way = opened
        if port in stay.lacks and not process.is_gone:
            stay.lacks.discard(port)
            process.send("block", [fd], port=port)
            self._tell_came(stay, port, way, os.fstat(fd).st_size)
        os.close(fd)

    def _tell_came(self, stay: Stay, port: str, way: str, size_bytes: int) -> None:
        if stay.record.is_started:
            stay.tell(messages.Came, now_us(), port=port, way=way, size_bytes=size_bytes)
        else:  # reported in its Started event, with its other inputs
            stay.ways = {**stay.ways, port: way}
            stay.input_bytes += size_bytes
            stay.fetched_bytes += size_bytes if way == "store" else 0

    def _lacks_for_good(self, stay: Stay, port: str, error: BaseException) -> None:
        """Fail a task whose late input cannot be fetched, as if the input had been missing at the
        launch.

        A task that is off its slot may still get the input later.
        """
        if stay.state not in ("seating", "running"):
            stay.given.pop(port, None)
            stay.coming.discard(port)
            return
        told = f"Its input {port} could not be fetched: {type(error).__name__}: {error}"
        self.stays.fail(stay, "store", told, "unfetched")
