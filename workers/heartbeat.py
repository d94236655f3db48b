"""The pulse of a device: its whole truth goes up, and the answer says how long it may go on.

A `Pulse` is a thread that sends the newest report it was given; sending may block while Redis is
away, and the supervisor must not.  A report that could not be sent is not kept: the next one says
all that it said.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from app.core.messages import Alive, Answer

log = logging.getLogger(__name__)

LOGS_LIMIT_BYTES = 64 * 1024  # of log lines in one report
SOON_S = 0.1  # what happens together is told together
CHATTER_S = 0.5  # log lines, metrics and progress go up at most this often


def now_us() -> int:
    """The device's own clock: monotonic, and the same for all processes of a host."""
    return time.monotonic_ns() // 1000


class Transport(Protocol):
    def send(self, alive: Alive) -> None:
        """Publish one report; any exception means that it was not sent."""


# --- until when to trust ourselves ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Stepping may begin until `trusted_until_us`; at `ends_us` the island may give the work away.

    Both count from when the answered report was *sent*, so they hold however long the way was.
    """

    trusted_until_us: int = 0
    ends_us: int = 0
    answered_us: int = 0  # when the newest answered report was sent

    def after(self, answer: Answer, *, margin_us: int) -> Lease:
        if answer.sent_us < self.answered_us:
            return self
        ends_us = answer.sent_us + answer.lease_us
        return Lease(
            trusted_until_us=ends_us - margin_us, ends_us=ends_us, answered_us=answer.sent_us
        )


# --- when to report -------------------------------------------------------------------------------


class Rhythm:
    """At once when something happened, later when there is chatter, else every `beat_us`.

    Chatter waits for the answer to what was said before, so that a talkative job never piles up
    reports in front of an island that is away.
    """

    def __init__(self, beat_us: int) -> None:
        self.beat_us = beat_us
        self.sent_us = -beat_us
        self.happened = False
        self.chatter = False
        self.soon_us: int | None = None

    def soon(self, now_us: int) -> None:
        """Something happened that nobody acts upon, and more is likely to happen at once."""
        if self.soon_us is None:
            self.soon_us = now_us + int(SOON_S * 1e6)

    def due_us(self, answered_us: int) -> int:
        if self.happened:
            return 0
        due_us = self.sent_us + self.beat_us
        if self.chatter and answered_us >= self.sent_us:
            due_us = self.sent_us + int(CHATTER_S * 1e6)
        return due_us if self.soon_us is None else min(due_us, self.soon_us)

    def reported(self, now_us: int) -> None:
        self.sent_us, self.happened, self.chatter = now_us, False, False
        self.soon_us = None


class Pulse(threading.Thread):
    def __init__(self, transport: Transport, *, clock_us: Callable[[], int] = now_us) -> None:
        super().__init__(name="pulse", daemon=True)
        self.transport, self.clock_us = transport, clock_us
        self._newest: Alive | None = None
        self._changed = threading.Condition()
        self._sending = False
        self._ended = False
        self._failing = False

    def say(self, alive: Alive) -> None:
        """Send this as soon as can be, instead of whatever was not sent yet."""
        with self._changed:
            self._newest = alive
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was said has been sent or given up."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._newest is None and not self._sending, timeout_s
            )

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def run(self) -> None:
        while (alive := self._take()) is not None:
            self._send(alive)
            with self._changed:
                self._sending = False
                self._changed.notify_all()

    def _take(self) -> Alive | None:
        with self._changed:
            self._changed.wait_for(lambda: self._newest is not None or self._ended)
            alive, self._newest = self._newest, None
            self._sending = alive is not None
            return alive

    def _send(self, alive: Alive) -> None:
        # The lease counts from here: the time is taken before anything can delay the message.
        stamped = replace(alive, sent_us=self.clock_us())
        try:
            self.transport.send(stamped)
        except Exception as error:
            if not self._failing:
                log.warning("no report reaches the island: %s; trying at every beat", error)
            self._failing = True
            return
        if self._failing:
            log.warning("reports reach the island again")
        self._failing = False
