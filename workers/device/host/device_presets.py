"""Sets the device's own part of a preset while a task that has one holds the slot.

A driver may take long to change a setting, or hang.  So a separate thread asks the driver.  Until
the driver has answered, messages to the task's process are kept back, in their order, so the
process does not begin.  When no task that wants settings holds the slot, they are put back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from app.core.model import preset as presets
from workers.device.driver_settings import AppliedPreset, NotSet, find_settings
from workers.device.heartbeat import now_us
from workers.device.processes.resident import Resident
from workers.device.stays.device_stays import DeviceStays
from workers.transfer.host_context import House

log = logging.getLogger(__name__)

JSON = dict[str, Any]
Word = Callable[[int], None]  # sends a message to a process; the argument is the time
ANSWER_US = 30_000_000  # time limit for the driver to change its settings
# the same limit when the worker stops; if it passes, the next worker restores the settings
END_S = 5.0


class _Change:
    """Describes a change in progress, for a process in the slot, with the messages kept back from
    it.
    """

    def __init__(self, process: int, wanted: JSON, by_us: int) -> None:
        self.process, self.wanted, self.by_us = process, wanted, by_us
        self.words: list[Word] = []


class _DriverThread(threading.Thread):
    """Changes settings one after the other. Each result is set as a future, in this thread."""

    def __init__(self) -> None:
        # the thread may hang, and must not keep the worker alive
        super().__init__(name="settings", daemon=True)
        self._asked: SimpleQueue[tuple[Callable[[JSON], JSON], JSON, Future[JSON]] | None]
        self._asked = SimpleQueue()

    def submit(self, do: Callable[[JSON], JSON], wanted: JSON) -> Future[JSON]:
        future = Future[JSON]()
        self._asked.put((do, wanted, future))
        return future

    def end(self) -> None:
        """Let the thread end after the changes that it was asked for."""
        self._asked.put(None)

    def run(self) -> None:
        while (asked := self._asked.get()) is not None:
            do, wanted, future = asked
            try:
                found = do(wanted)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(found)


class DevicePresets:
    """Owns the settings of the device's driver."""

    def __init__(self, house: House, stays: DeviceStays, receive: Callable[[Any], None]) -> None:
        self.house, self.stays, self._receive = house, stays, receive
        self._thread = _DriverThread()
        self._applied: AppliedPreset | None = None
        self._asked: JSON = {}  # what the thread was asked to set last
        self._found: JSON = {}  # what the thread read back
        self._is_settled = True  # True if the device has the settings that were asked for last
        self._changes: dict[int, _Change] = {}  # changes by process that is to begin

    def start(self) -> None:
        """Put back settings that a killed worker has left, before a task begins."""
        file = self.house.folder / "settings_before.json"
        self._applied = AppliedPreset(find_settings(self.house), file)
        self._thread.start()
        if self._applied.before:
            log.warning("%s puts back the device's settings", self.house.device)
            self._ask({}, lambda error: None)

    def begin(self, resident: Resident, go: Word, now: int) -> None:
        """Call `go` when the device is as the task's preset says; if that fails, the task fails.

        A task that wants no settings begins in any case, even if those of the last task cannot be
        restored.
        """
        wanted = presets.of_device(resident.stay.launch.preset)
        if self._is_settled and wanted == self._asked:
            resident.device_preset = dict(self._found)
            go(now)
            return
        self._changes[resident.id] = change = _Change(resident.id, wanted, now + ANSWER_US)
        change.words.append(go)
        self._ask(wanted, lambda error: self._answered(change, error))

    def keeps_back(self, process: int, word: Word) -> bool:
        """Keep a message back until the process may begin; False if it may be sent now."""
        if (change := self._changes.get(process)) is None:
            return False
        change.words.append(word)
        return True

    def look(self) -> None:
        """Restore the settings if no task holds the slot; stop waiting for a driver that hangs."""
        for change in list(self._changes.values()):
            if now_us() >= change.by_us:
                self._answered(change, NotSet(f"no answer within {ANSWER_US // 10**6} s"))
        if self.stays.machine.slot.holder is None and self._asked:
            self._ask({}, lambda error: None)

    def end(self) -> None:
        """Put the settings back, if the driver does that soon."""
        if self._applied is not None and (self._asked or not self._is_settled):
            last = self._thread.submit(self._applied.apply, {})
            try:
                last.result(END_S)
            except (NotSet, TimeoutError) as error:
                log.warning("the device's settings are put back at the next start: %s", error)
        self._thread.end()

    def _ask(self, wanted: JSON, then: Callable[[Exception | None], None]) -> None:
        assert self._applied is not None
        self._asked, self._is_settled = wanted, False

        def done(future: Future[JSON]) -> None:
            self._receive(lambda: self._done(wanted, future, then))

        self._thread.submit(self._applied.apply, wanted).add_done_callback(done)

    def _done(
        self, wanted: JSON, future: Future[JSON], then: Callable[[Exception | None], None]
    ) -> None:
        error = future.exception()
        if wanted is self._asked:  # no other preset was asked for since
            self._found = {} if error is not None else future.result()
            self._asked = wanted if error is None else {}
            self._is_settled = error is None
        if error is not None:
            log.warning("%s: settings: %s", self.house.device, error)
        then(error if isinstance(error, Exception) else None)

    def _answered(self, change: _Change, error: Exception | None) -> None:
        if self._changes.get(change.process) is not change:
            return  # this try was given up
        del self._changes[change.process]
        resident = self.stays.residents.get(change.process)
        if resident is None:
            return
        if error is not None and change.wanted:
            told = f"The device did not take the preset: {error}"
            self.stays.fail(resident.stay, "device_preset", told, "preset")
            return
        resident.device_preset = dict(self._found)
        for word in change.words:
            word(now_us())
