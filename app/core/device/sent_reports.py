"""Decides whether a device sends its whole report, or a Pulse: that an acknowledged one holds.

The device compares each report with the one that its island acknowledged last. While a device
continues as before, only few numbers differ: its time, the steps and held time of its tasks, their
memory, and readings such as heat. A Pulse has the steps and the held time. The other figures are
reported after some minutes, as nothing is decided by them.

Whenever the island may know something else, the device sends the whole report: if something
changed, if an event or a log line waits for its acknowledgement, if heartbeats were not answered,
if the island asks for it, and every quarter of an hour or so.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field, replace
from typing import Any

from app.core.model.protocol.messages import Alive, Answer, Pulse, ResidentView, encode
from app.core.model.protocol.wellformed import PROGRESS_MOST

FIGURES_EVERY_US = 240_000_000  # how often changed figures are reported
WHOLE_EVERY_US = 900_000_000  # how often the whole report is sent, whatever it says
UNANSWERED_MOST = 2  # after so many heartbeats without an answer, the whole report is sent
SENT_MOST = 8  # most reports that are remembered until one of them is acknowledged


@dataclass(frozen=True, slots=True)
class SentReport:
    """Describes a report that was sent, to compare later ones with it.

    The texts do not change while the device goes on to change what the report was made of.
    """

    device: str
    sent_us: int
    standing: str  # all that it says, except what changes while nothing happens
    figures: str  # what neither `standing` nor a Pulse has: readings, and memory in use
    peaks: tuple[tuple[int, int], ...]  # memory of each resident: of its process, and in the host
    is_plain: bool  # True: no event and no log line waits, and a Pulse can have its progress

    @classmethod
    def of(cls, alive: Alive) -> SentReport:
        facts = {name: value for name, value in alive.facts.items() if name != "held_bytes"}
        health = {name: value for name, value in alive.health.items() if name != "reading"}
        residents = [_unmoved(view) for view in alive.residents]
        changed: dict[str, Any] = {"facts": facts, "health": health, "residents": residents}
        memory = [(v.memory_bytes, v.on_device_bytes, v.host_bytes) for v in alive.residents]
        moved = [count for view in alive.residents for count in _progress(view)]
        waits = bool(alive.events or alive.logs)
        return cls(
            device=alive.device,
            sent_us=alive.sent_us,
            standing=_text(encode(replace(alive, sent_us=0, events=[], logs=[], **changed))),
            figures=_text([alive.health.get("reading"), alive.facts.get("held_bytes"), memory]),
            peaks=tuple((view.memory_bytes, view.host_bytes) for view in alive.residents),
            is_plain=not waits and max(moved, default=0) < PROGRESS_MOST,
        )

    def holds(self, now: SentReport) -> bool:
        """True if the report says what the device would report now, but for what a Pulse has."""
        if not now.is_plain or now.standing != self.standing:
            return False
        # pairwise, as the standing names as many residents
        if any(map(_is_higher, now.peaks, self.peaks)):
            return False
        # spread over time, so that few devices send whole reports at once
        part = 0.5 + (zlib.crc32(self.device.encode()) % 1024) / 1024
        passed_us = now.sent_us - self.sent_us
        if passed_us >= WHOLE_EVERY_US * part:
            return False
        return passed_us < FIGURES_EVERY_US * part or now.figures == self.figures


def _unmoved(view: ResidentView) -> ResidentView:
    """Leave out what changes while nothing happens."""
    still = replace(view, step=0, held_us=0, staged_us=0)
    return replace(still, memory_bytes=0, on_device_bytes=0, host_bytes=0)


def _is_higher(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] > other[0] or one[1] > other[1]


def _progress(view: ResidentView) -> list[int]:
    return [view.step, view.held_us, view.staged_us]


def _text(body: Any) -> str:
    return json.dumps(body, separators=(",", ":"))


@dataclass
class SentReports:
    """Remembers the reports of one device process that were sent, and which one holds."""

    _sent: dict[int, SentReport] = field(default_factory=dict)  # not acknowledged, by `sent_us`
    _acknowledged: SentReport | None = None
    _answer_us: int = 0  # `sent_us` of the newest Answer
    _unanswered: int = 0  # heartbeats since the last answer

    def heartbeat(self, alive: Alive) -> Alive | Pulse:
        """Return what to send of this report, which has the time of sending."""
        holds, now = self._acknowledged, SentReport.of(alive)
        is_sure = self._unanswered < UNANSWERED_MOST
        self._unanswered += 1
        if holds is not None and is_sure and holds.holds(now):
            return Pulse(
                device=alive.device,
                incarnation=alive.incarnation,
                sent_us=alive.sent_us,
                report=holds.sent_us,
                answer=self._answer_us,
                progress=[_progress(view) for view in alive.residents],
            )
        self._sent[alive.sent_us] = now
        if len(self._sent) > SENT_MOST:
            del self._sent[min(self._sent)]
        return alive

    def answered(self, answer: Answer) -> None:
        """Take in an Answer, newer than all before."""
        self._unanswered, self._answer_us = 0, answer.sent_us
        found = self._sent.get(answer.sent_us, self._acknowledged)
        self._acknowledged = found if answer.pulses else None
        self._sent = {us: one for us, one in self._sent.items() if us > answer.sent_us}

    def renewed(self) -> None:
        """Take in that a Pulse was answered as before."""
        self._unanswered = 0

    def forget(self) -> None:
        """Send whole reports until one is acknowledged."""
        self._acknowledged = None
