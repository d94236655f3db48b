"""Reads what residents send and print, within limits, and passes on each message."""

from __future__ import annotations

import logging
import os
import selectors
from collections.abc import Callable
from functools import partial
from typing import Any

from workers.device.heartbeat import Rhythm, now_us
from workers.device.processes.resident import Resident
from workers.device.stays.device_stays import DeviceStays
from workers.device.supervision.side_work import SideWork
from workers.process import untrusted
from workers.process.untrusted import Nonsense
from workers.process.wire import Garbled

log = logging.getLogger(__name__)

JSON = dict[str, Any]

MUTED_US = 50_000  # in microseconds: how long output is not read if the resident's log is full
READS_AT_THE_END = 32  # most reads of each stream of an ended process

#: Kill reasons after which no further messages of the process are read.
UNREAD_REASONS = frozenset({"nonsense", "flood", "deaf"})

Handler = Callable[[Resident, JSON], None]


class ResidentListener:
    """Tracks the reading from residents: which are muted, and which have more to say."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        side: SideWork,
        stays: DeviceStays,
        rhythm: Rhythm,
        exited: Callable[[Resident, int], None],
    ) -> None:
        self.selector = selector
        self.side = side
        self.stays = stays
        self.rhythm = rhythm
        self._exited = exited
        self.handlers: dict[str, Handler] = {}  # kind of message -> its handler
        self.muted: list[tuple[int, Resident, int]] = []
        self.unheard: list[Resident] = []  # residents with messages left to read in the next round
        self.hearing: Resident | None = None  # the sender of the messages being processed now

    def listen_to(self, resident: Resident, fd: int) -> None:
        if resident.is_gone:
            return
        if fd == resident.wire.fileno():
            resident.is_muted = False
            says = partial(self.hear, resident)
            self.selector.register(fd, selectors.EVENT_READ, says)
        elif fd in resident.pipes:
            self.selector.register(fd, selectors.EVENT_READ, lambda: self._read(resident, fd))

    def _read(self, resident: Resident, fd: int) -> None:
        if fd not in resident.pipes:
            # the resident's exit was handled in this round; the descriptor may be in use for
            # something else
            return
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return
        stay_log = resident.stay.log
        if data:
            stay_log.write(resident.pipes[fd], data)
            self.rhythm.chatter = True
        if not data or stay_log.is_full:
            self.selector.unregister(fd)
        if not data:
            del resident.pipes[fd]
            os.close(fd)
        elif stay_log.is_full:
            self.muted.append((now_us() + MUTED_US, resident, fd))

    def hear(self, resident: Resident) -> None:
        if resident.is_gone or resident.is_parsed or resident.is_muted:
            return  # the resident's exit was handled in this round, or the rest is read later
        wire = resident.wire
        before = wire.read_bytes
        frames = self._hear_some(resident)
        muted_us = resident.heard(frames, wire.read_bytes - before, now_us())
        if wire.closed or resident.is_parsed:
            self._listen_no_more(resident)  # if closed, its exit will be reported
            return
        if resident.calm.left < 0:
            log.warning("task %s sends too many messages", resident.task)
            self.stays.kill(resident, "flood")
        if muted_us or resident.kill_reason:
            self._listen_no_more(resident)
        if muted_us and not resident.kill_reason:
            resident.is_muted = True
            self.muted.append((now_us() + muted_us, resident, wire.fileno()))
        elif wire.has_more:
            self.unheard.append(resident)

    def _hear_some(self, resident: Resident) -> int:
        """Process a few of the resident's messages; return how many."""
        self.hearing = resident
        try:
            said = resident.wire.receive()
            if resident.wire.fds:
                raise Nonsense("it sent a file descriptor")
            resident.said += said
            self.take_said(resident)
        except (Garbled, Nonsense) as error:
            self._speaks_nonsense(resident, error)
            return 1
        finally:
            self.hearing = None
        return len(said)

    def take_said(self, resident: Resident) -> None:
        while resident.said and not resident.kill_reason and not resident.is_parsed:
            self._take(resident, resident.said.popleft())

    def _speaks_nonsense(self, resident: Resident, error: BaseException) -> None:
        if not resident.kill_reason:
            log.warning("task %s sent a malformed message: %s", resident.task, error)
        self.stays.kill(resident, "nonsense")

    def _listen_no_more(self, resident: Resident) -> None:
        if resident.wire in self.selector.get_map():
            self.selector.unregister(resident.wire)

    def take_part(self, resident: Resident, message: JSON) -> None:
        """Add a part of a long message. When all parts are there, another thread parses and checks
        the message.
        """
        body = resident.parts.add(message)
        if body is not None:
            resident.is_parsed = True
            redactor = resident.stay.redactor
            self.side.aside(
                lambda: untrusted.whole(body, redactor), lambda told: self._parsed(resident, told)
            )

    def _parsed(self, resident: Resident, told: tuple[JSON, JSON | None] | BaseException) -> None:
        """Process a long message that was parsed, with its verdict; then the messages that came
        after it.
        """
        resident.is_parsed = False
        try:
            if isinstance(told, BaseException):
                raise told
            message, resident.checked = told
            if not resident.kill_reason:
                self._take(resident, message)
            self.take_said(resident)
        except (Garbled, Nonsense) as error:
            self._speaks_nonsense(resident, error)
        if resident.exit_status is not None:
            self._exited(resident, resident.exit_status)
        elif not (resident.wire.closed or resident.kill_reason or resident.is_parsed):
            self.listen_to(resident, resident.wire.fileno())
            self.unheard.append(resident)

    def _take(self, resident: Resident, message: JSON) -> None:
        if resident.is_resting:
            raise Nonsense(f"it sent {message['is']!r:.100}, but no function of its own runs now")
        heard = self.handlers.get(message["is"])
        if heard is None:
            raise Nonsense(f"it says {message['is']!r:.100}")
        heard(resident, message)

    def hear_the_rest(self, resident: Resident) -> None:
        self._listen_no_more(resident)
        for _ in range(READS_AT_THE_END):
            if resident.wire.closed or resident.is_parsed or resident.kill_reason in UNREAD_REASONS:
                break
            self._hear_some(resident)
        registered = self.selector.get_map()
        self.muted = [item for item in self.muted if item[1] is not resident]
        for fd in (*resident.pipes, resident.pidfd):
            if fd is not None and fd in registered:
                self.selector.unregister(fd)
        read_printed(resident)


def read_printed(resident: Resident) -> None:
    """Log all that the process has printed until now."""
    for fd, name in resident.pipes.items():
        for _ in range(READS_AT_THE_END):  # a living process may print without end
            if not (data := _read_now(fd)):
                break
            resident.stay.log.write(name, data)


def _read_now(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 16)
    except BlockingIOError:
        return b""
