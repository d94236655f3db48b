"""Sends the heartbeats of a device: reports with its whole state, and pulses while that holds.

A `HeartbeatSender` is a thread that sends the newest report that it was given. Sending may block
while Redis is away, and the supervisor must not block. A report that could not be sent is
discarded: the next report includes all that was in it.

The devices of a host report at the same times (`Rhythm`), and their pulses go in one message
(`PulseGatherer`).
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from app.core.device.sent_reports import SentReports
from app.core.model.protocol.messages import Alive, Answer, HostPulses, Pulse

log = logging.getLogger(__name__)

LOGS_LIMIT_BYTES = 64 * 1024  # limit of log lines in one report
SOON_S = 0.1  # wait so long that events of the same moment share a report
SOONEST_PART, UNANSWERED_PART = 0.25, 0.25  # of a beat
GATHER_S = 0.05  # wait so long for the pulses of the host's other devices
CHATTER_S = 0.5  # log lines, metrics and progress are reported at most this often


def now_us() -> int:
    """Return the device's clock: monotonic, and the same for all processes of a host."""
    return time.monotonic_ns() // 1000


class HeartbeatTransport(Protocol):
    def send(self, heartbeat: Alive | Pulse) -> None:
        """Publish one heartbeat; any exception means that it was not sent."""


# --- when to report -------------------------------------------------------------------------------


class Rhythm:
    """Decides when the next report is due: at once after an event, a little later after chatter,
    otherwise every `beat_us`.

    The times of a beat are the same for all devices of a host, and others for each host, so that
    hosts which began together do not go on together. A device that has just reported leaves one
    out. An island of many devices asks for a slower beat. After a report that was not answered, the
    next one comes sooner.

    Chatter (log lines, metrics, progress) waits for the answer to the previous report, so that a
    talkative job never piles up reports for an unreachable island.
    """

    def __init__(self, beat_us: int, *, host: str = "") -> None:
        self.own_us = self.beat_us = beat_us
        self.phase = zlib.crc32(host.encode()) / 2**32  # of a beat
        self.next_us = 0  # time of the next report, if the last one was answered
        self.sent_us = -beat_us
        self.happened = False
        self.chatter = False
        self.soon_us: int | None = None

    def soon(self, now_us: int, *, is_followed: bool) -> None:
        """Make a report due within SOON_S, after an event that is not urgent and is often followed
        by others; within CHATTER_S if others certainly follow.
        """
        if self.soon_us is None:
            self.soon_us = now_us + int((CHATTER_S if is_followed else SOON_S) * 1e6)

    def due_us(self, answered_us: int) -> int:
        if self.happened:
            return 0
        is_answered = answered_us >= self.sent_us
        again_us = max(self.own_us, int(self.beat_us * UNANSWERED_PART))
        due_us = self.next_us if is_answered else self.sent_us + again_us
        if self.chatter and is_answered:
            due_us = self.sent_us + int(CHATTER_S * 1e6)
        return due_us if self.soon_us is None else min(due_us, self.soon_us)

    def reported(self, now_us: int) -> None:
        self.sent_us, self.happened, self.chatter = now_us, False, False
        self.soon_us, self.next_us = None, self._next_us(now_us)

    def set_pace(self, beat_us: int) -> None:
        """Report within the time for which the island asks; 0: within the device's own beat."""
        if (beat_us := max(self.own_us, beat_us)) != self.beat_us:
            self.beat_us = beat_us
            self.next_us = self._next_us(self.sent_us)

    def _next_us(self, now_us: int) -> int:
        """Return the host's next time of a beat that is not too soon after `now_us`."""
        first_us = int(self.phase * self.beat_us)
        soonest_us = now_us + int(self.beat_us * SOONEST_PART)
        beats = -((first_us - soonest_us) // self.beat_us)
        return first_us + beats * self.beat_us


class HeartbeatSender(threading.Thread):
    """Sends each report, or a Pulse in its place.  The methods may be called by other threads."""

    def __init__(
        self, transport: HeartbeatTransport, *, clock_us: Callable[[], int] = now_us
    ) -> None:
        super().__init__(name="heartbeats", daemon=True)
        self.transport, self.clock_us = transport, clock_us
        self._reports = SentReports()
        self._newest: Alive | None = None
        self._changed = threading.Condition()
        self._sending = False
        self._ended = False
        self._failing = False

    def say(self, alive: Alive) -> None:
        """Send this report as soon as possible, in place of any report not sent yet."""
        with self._changed:
            self._newest = alive
            self._changed.notify_all()

    def answered(self, answer: Answer) -> None:
        """Take in an Answer, newer than all before."""
        with self._changed:
            self._reports.answered(answer)

    def renewed(self) -> None:
        """Take in that a Pulse was answered as before."""
        with self._changed:
            self._reports.renewed()

    def tell_all(self) -> None:
        """Send whole reports until one is answered."""
        with self._changed:
            self._reports.forget()

    def flush(self, timeout_s: float) -> bool:
        """Wait until the last report was sent or given up; False after `timeout_s`."""
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
        # The lease counts from this time, so take the time before anything can delay the message.
        stamped = replace(alive, sent_us=self.clock_us())
        with self._changed:
            heartbeat = self._reports.heartbeat(stamped)
        try:
            self.transport.send(heartbeat)
        except Exception as error:
            if not self._failing:
                log.warning(
                    "cannot send reports to the island: %s; trying again at every heartbeat", error
                )
            self._failing = True
            return
        if self._failing:
            log.warning("reports reach the island again")
        self._failing = False


class PulseGatherer:
    """Sends the pulses that several threads have at almost the same time in one message.

    The first thread waits a moment for the others and sends for all. Each thread learns whether its
    pulse was sent.
    """

    def __init__(self, publish: Callable[[Pulse | HostPulses], None], *, most: int) -> None:
        self.publish, self.most = publish, most
        self._changed = threading.Condition()
        self._batch = _Batch()

    def send(self, pulse: Pulse) -> None:
        """Publish the pulse with those of others; raises what `publish` raises."""
        with self._changed:
            batch = self._batch
            is_first = not batch.pulses
            batch.pulses.append(pulse)
            self._changed.notify_all()
            if is_first:
                self._changed.wait_for(lambda: len(batch.pulses) >= self.most, GATHER_S)
                self._batch = _Batch()
            else:
                self._changed.wait_for(lambda: batch.is_over)
        if is_first:
            self._publish(batch)
        elif batch.error is not None:
            raise ConnectionError(f"the pulses of this host were not sent: {batch.error}")

    def _publish(self, batch: _Batch) -> None:
        pulses = batch.pulses
        try:
            self.publish(HostPulses.of(pulses) if len(pulses) > 1 else pulses[0])
        except Exception as error:
            batch.error = error
            raise
        finally:
            with self._changed:
                batch.is_over = True
                self._changed.notify_all()


class _Batch:
    """Holds the pulses of one message."""

    def __init__(self) -> None:
        self.pulses: list[Pulse] = []
        self.is_over = False
        self.error: Exception | None = None
