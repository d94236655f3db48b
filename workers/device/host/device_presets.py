"""Sets the part of a preset that devices have themselves, while a task with one holds the slot.

A driver may take long to change a setting, or hang.  So a separate thread asks the driver.  Until
the driver has answered, messages to the task's process are kept back, in their order, so the
process does not begin.  When no task that wants settings holds the slot, they are put back.

A task may hold further devices of its host.  Each is set by its own supervisor, which also puts its
settings back, even if the supervisor of the task's home device has failed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from app.core.model import preset as presets
from app.core.model.protocol.messages import Launch
from workers.device.driver_settings import AppliedPreset, NotSet, find_settings
from workers.device.heartbeat import now_us
from workers.device.processes.resident import Resident
from workers.device.stays.device_stays import DeviceStays
from workers.process.isolation.device_access import NoSuchDevice
from workers.transfer.host_context import House

log = logging.getLogger(__name__)

JSON = dict[str, Any]
Told = Callable[[Exception | None], None]  # gets why something has failed; None: it has not
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


class _Answers:
    """Counts the answers for several devices, and tells the first error once all have answered."""

    def __init__(self, awaited: int, then: Told) -> None:
        self.awaited, self.then = awaited, then
        self.error: Exception | None = None

    def take(self, error: Exception | None) -> None:
        self.awaited -= 1
        self.error = self.error or error
        if not self.awaited:
            self.then(self.error)


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
        self._guests: set[str] = set()  # other devices of this host that a task here has set
        # home device of the task that holds this device as a further one; "": none wants it set
        self._lent_to = ""

    def start(self) -> None:
        """Put back settings that a killed worker has left, before a task begins."""
        file = self.house.folder / "settings_before.json"
        self._applied = AppliedPreset(find_settings(self.house), file)
        self._thread.start()
        if self._applied.before:
            log.warning("%s puts back the device's settings", self.house.device)
            self._ask({}, lambda error: None)

    def begin(self, resident: Resident, go: Word, now: int) -> None:
        """Call `go` when the task's devices are as its preset says; if that fails, the task fails.

        A task that wants no settings begins in any case, even if those of the last task cannot be
        restored.
        """
        stay = resident.stay
        wanted = presets.of_device(stay.launch.preset)
        self._changes[resident.id] = change = _Change(resident.id, wanted, now + ANSWER_US)
        change.words.append(go)
        self.set_all(stay.launch, stay.record.guests, lambda error: self._answered(change, error))

    def set_all(self, launch: Launch, guests: Iterable[str], then: Told) -> None:
        """Set this device and `guests`, further ones of this host, as a task's preset says.

        `then` is called in the supervisor's thread; a device that hangs never lets it be called.
        """
        wanted, guests = presets.of_device(launch.preset), sorted({*guests})
        self._guests.update(guests)
        self._lent_to = ""
        answers = _Answers(1 + len(guests), then)
        for guest in guests:
            self._set_guest(guest, wanted, answers.take)
        self._set(wanted, answers.take)

    def _set_guest(self, guest: str, wanted: JSON | None, then: Told) -> None:
        def answer(error: Exception | None) -> None:
            told = None if error is None else NotSet(f"{guest}: {error}")
            self._receive(lambda: then(told))

        try:
            self.house.allocations.set_preset(guest, self.house.device, wanted, answer)
        except NoSuchDevice as error:
            then(NotSet(str(error)))

    def set_for(self, home: str, wanted: JSON | None, then: Told) -> None:
        """Set this device for a task of another home device (`host_allocations.SetPreset`)."""
        self._receive(lambda: self._lend(home, wanted, then))

    def _lend(self, home: str, wanted: JSON | None, then: Told) -> None:
        if wanted is not None:
            self._lent_to = home
            self._set(wanted, then)
            return
        if self._lent_to == home:
            self._lent_to = ""
        then(None)

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
        holder = self.stays.holder
        if holder is None and self._asked and not self._lent_to:
            self._ask({}, lambda error: None)
        if self._guests:
            self._release_guests(holder)

    def _release_guests(self, holder: Resident | None) -> None:
        """Let go of the devices that no task here holds any more."""
        record = None if holder is None else holder.stay.record
        held = set[str]() if record is None else {*record.guests}
        if record is not None and record.wanted is not None:
            held.update(record.wanted.guests)
        for guest in self._guests - held:
            self._set_guest(guest, None, lambda error: None)  # one that is gone needs nothing
        self._guests &= held

    def end(self) -> None:
        """Put the settings back, if the driver does that soon."""
        if self._applied is not None and (self._asked or not self._is_settled):
            last = self._thread.submit(self._applied.apply, {})
            try:
                last.result(END_S)
            except (NotSet, TimeoutError) as error:
                log.warning("the device's settings are put back at the next start: %s", error)
        self._thread.end()

    def _set(self, wanted: JSON, then: Told) -> None:
        if self._is_settled and wanted == self._asked:
            then(None)
        else:
            self._ask(wanted, then)

    def _ask(self, wanted: JSON, then: Told) -> None:
        assert self._applied is not None
        self._asked, self._is_settled = wanted, False

        def done(future: Future[JSON]) -> None:
            self._receive(lambda: self._done(wanted, future, then))

        self._thread.submit(self._applied.apply, wanted).add_done_callback(done)

    def _done(self, wanted: JSON, future: Future[JSON], then: Told) -> None:
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
