"""Watches the health of the device: a thread reads its monitor, the supervisor judges.

The thread may hang in the driver for ever. Then the supervisor hears nothing, and this silence is
judged too (`core.device.health_findings`). A device does not report before its health was judged
for the first time, and so gets no work until then.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from app.core.device.health_findings import HealthLimits, HealthWatch
from app.core.device.health_readings import Reading
from workers.device.heartbeat import Rhythm, now_us
from workers.device.monitors import DeviceLost, DeviceMonitor, MonitorGone, find_monitor
from workers.transfer.host_context import House

log = logging.getLogger(__name__)

JSON = dict[str, Any]
Said = Reading | DeviceLost | MonitorGone


class MonitorThread(threading.Thread):
    """Reads a monitor again and again; calls `said` in this thread with each outcome."""

    def __init__(
        self, monitor: DeviceMonitor, said: Callable[[Said], None], *, every_s: float
    ) -> None:
        # the thread may hang, and must not keep the worker alive
        super().__init__(name="monitor", daemon=True)
        self.monitor, self.said, self.every_s = monitor, said, every_s
        self._ended = threading.Event()

    def end(self) -> None:
        self._ended.set()

    def run(self) -> None:
        wait_s = 0.0
        while not self._ended.is_set():
            try:
                self.said(self.monitor.read(wait_s))
            except (DeviceLost, MonitorGone) as error:
                self.said(error)
                self._ended.wait(self.every_s)
            except Exception as error:
                log.exception("the monitor of the device failed")
                self.said(MonitorGone(f"{type(error).__name__}: {error}"[:200]))
                self._ended.wait(self.every_s)
            wait_s = self.every_s
        self.monitor.close()


class DeviceHealth:
    """Owns the judgement of the device's health, which heartbeats carry."""

    def __init__(self, house: House, receive: Callable[[Any], None], rhythm: Rhythm) -> None:
        self.house, self.rhythm = house, rhythm
        self._receive = receive
        self._watch: HealthWatch | None = None
        self._thread: MonitorThread | None = None
        #: Called in the supervisor's thread with each reading.
        self.on_reading: Callable[[Reading], None] = lambda reading: None
        self._told: JSON = {}  # the last judgement, without the figures
        self.is_judged = True

    def start(self) -> None:
        """Begin to read the monitor, if there is one.  Raises CannotServe."""
        monitor = find_monitor(self.house)
        if monitor is None:
            return
        limits = HealthLimits(patience_us=int(self.house.health_patience_s * 1e6))
        self._watch, self.is_judged = HealthWatch(limits, now_us()), False
        every_s = self.house.health_every_s
        self._thread = MonitorThread(monitor, self._heard, every_s=every_s)
        self._thread.start()

    @property
    def has_monitor(self) -> bool:
        return self._watch is not None

    def end(self) -> None:
        if self._thread is not None:
            self._thread.end()

    def check(self, number: int) -> None:
        """Begin the check that the island asks for, unless it has begun."""
        if self._watch is not None and number > self._watch.number:
            self._watch.check(number, now_us())

    def look(self) -> None:
        """Judge the silence of the monitor."""
        if self._watch is not None:
            self._watch.look(now_us())
            self._note()

    def report(self) -> JSON:
        return {} if self._watch is None else self._watch.report(now_us())

    def _heard(self, said: Said) -> None:
        self._receive(lambda: self._judge(said))

    def _judge(self, said: Said) -> None:
        assert self._watch is not None
        now = now_us()
        match said:
            case Reading():
                self._watch.read(said, now)
                self.on_reading(said)
            case DeviceLost():
                self._watch.lose(now)
            case MonitorGone():
                self._watch.miss(str(said), now)
        self._note()

    def _note(self) -> None:
        """Report at once when the judgement has changed."""
        assert self._watch is not None
        told = {name: value for name, value in self.report().items() if name != "reading"}
        if told == self._told:
            return
        self._told = told
        self.is_judged |= self._watch.is_checked
        self.rhythm.happened = True
        for finding in told.get("findings", ()):
            log.warning("%s: %s", self.house.device, finding["reason"])
