"""Keeps what devices reported, and the pulses that repeat it.

A pulse (`core.model.protocol.messages`) names a report that the island has acknowledged. It only
renews the lease, as long as the island's own rows are as they were when it answered
(`app.scheduling.journal.reports.quiet`). The progress in it waits for the next bulk write. If the
rows have changed, or if time alone may change the answer, the report is recorded once more, with
that progress. A pulse that names a report which is not remembered renews nothing: the island asks
for the report.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

from app.core.model.protocol.messages import Alive, Answer, Pulse, decode, encode

AT_ONCE = 4096  # most leases that one round renews, so that the round stays short


class TaskProgress(NamedTuple):
    """Tells how far a task is, by a pulse."""

    task: str
    epoch: int
    step: int
    held_us: int
    staged_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """Describes a pulse whose report is remembered; `came_s` is by the island's monotonic clock."""

    device: str
    incarnation: str
    sent_us: int
    came_s: float
    answer_us: int  # `sent_us` of the newest Answer that the device has
    progress: tuple[TaskProgress, ...]


@dataclass(frozen=True, slots=True)
class RememberedReport:
    """Keeps what a device reported last; `text` is the report without events and log lines.

    `key` is the public key of the host that sent it.
    """

    key: str
    incarnation: str
    number: int
    text: str
    stays: tuple[tuple[str, int], ...]  # (task, epoch) of each resident
    is_numbered: bool  # False for a device worker of the version before

    @classmethod
    def of(cls, alive: Alive) -> RememberedReport:
        return cls(
            key=alive.facts.get("key", ""),
            incarnation=alive.incarnation,
            number=alive.sent_us,
            text=json.dumps(encode(replace(alive, events=[], logs=[])), separators=(",", ":")),
            stays=tuple((view.task, view.epoch) for view in alive.residents),
            is_numbered=bool(alive.facts.get("pulses")),
        )

    def beat(self, pulse: Pulse, *, came_s: float) -> Beat | None:
        """Return what the pulse says; None if it names another report."""
        told = (pulse.incarnation, pulse.report, len(pulse.progress))
        if told != (self.incarnation, self.number, len(self.stays)):
            return None
        return Beat(
            device=pulse.device,
            incarnation=pulse.incarnation,
            sent_us=pulse.sent_us,
            came_s=came_s,
            answer_us=pulse.answer,
            progress=tuple(
                TaskProgress(*stay, *told)
                for stay, told in zip(self.stays, pulse.progress, strict=True)
            ),
        )

    def told_by(self, beat: Beat) -> Alive:
        """Return the whole report that the device would have sent in place of the pulse."""
        alive: Alive = decode(json.loads(self.text))
        residents = [
            replace(view, step=now.step, held_us=now.held_us, staged_us=now.staged_us)
            for view, now in zip(alive.residents, beat.progress, strict=True)
        ]
        return replace(alive, sent_us=beat.sent_us, residents=residents)


@dataclass(slots=True, kw_only=True)
class AcknowledgedReport:
    """Keeps what was answered to a report that only pulses follow, and what that rests on.

    `txid` is the transaction that wrote the device's row last, and `held` the stays on the device,
    as `stays_told` names them. `mounts` are the digests of the mounts that the device knows, if it
    may show any. `builds` is True if its host may have to install packages, and `is_paced` if the
    device takes a beat of its island.
    """

    answer: Answer
    txid: str
    held: str
    mounts: tuple[str | None, str | None]
    builds: bool
    is_paced: bool


def stays_told(stays: Iterable[tuple[str, int]]) -> str:
    """Name stays, which are (task, epoch), in one text."""
    return " ".join(sorted(f"{task}/{epoch}" for task, epoch in stays))


def acknowledged(alive: Alive, answer: Answer, *, txid: str) -> AcknowledgedReport:
    """Remember the answer to a report whose residents all run where the island believes them."""
    facts = alive.facts
    return AcknowledgedReport(
        answer=answer,
        txid=txid,
        held=stays_told((view.task, view.epoch) for view in alive.residents),
        mounts=(facts.get("mounts"), facts.get("images")),
        builds="builds" in facts,
        is_paced=bool(facts.get("paced")),
    )


@dataclass(slots=True)
class _UnwrittenProgress:
    """Holds the newest pulse whose progress is not written, and since when there is such
    progress.
    """

    beat: Beat
    since_s: float


@dataclass
class QuietHeartbeats:
    """Remembers reports, the answers that pulses repeat, and unwritten progress, by device."""

    # pulses whose leases are to be renewed
    waiting: dict[str, Beat] = field(default_factory=dict)
    _reports: dict[str, RememberedReport] = field(default_factory=dict)
    _answers: dict[str, AcknowledgedReport] = field(default_factory=dict)
    _unwritten: dict[str, _UnwrittenProgress] = field(default_factory=dict)

    def beat_of(self, pulse: Pulse, *, came_s: float) -> Beat | None:
        """Return what a pulse says; None if the report that it names is not remembered."""
        known = self._reports.get(pulse.device)
        return None if known is None else known.beat(pulse, came_s=came_s)

    def report_of(self, beat: Beat) -> AcknowledgedReport | None:
        """Return what is answered again; None if the report must be recorded once more."""
        found = self._answers.get(beat.device)
        return found if found and found.answer.incarnation == beat.incarnation else None

    def told_by(self, beat: Beat) -> Alive:
        """Return the whole report that the device would have sent in place of this pulse."""
        return self._reports[beat.device].told_by(beat)

    def key_of(self, device: str) -> str:
        """Return the public key of the host that sent the device's report."""
        return self._reports[device].key

    def is_numbered(self, device: str) -> bool:
        """True if the device worker sends pulses itself."""
        known = self._reports.get(device)
        return known is not None and known.is_numbered

    def put(self, beat: Beat) -> None:
        self.waiting[beat.device] = beat

    def take(self) -> tuple[list[tuple[Beat, AcknowledgedReport]], list[Beat]]:
        """Return the waiting pulses for one round, each with what is answered again; and those
        whose reports must be recorded once more.

        The latter are removed. The others wait until they are `renewed` or forgotten.
        """
        asked, others = list[tuple[Beat, AcknowledgedReport]](), list[Beat]()
        for beat in list(islice(self.waiting.values(), AT_ONCE)):
            if (report := self.report_of(beat)) is not None:
                asked.append((beat, report))
            else:
                others.append(self.waiting.pop(beat.device))
        return asked, others

    def recorded(self, alive: Alive) -> None:
        """Remember a report that was recorded and committed.

        A report that is remembered already was recorded once more because of a pulse: it keeps its
        number.
        """
        known = self._reports.get(alive.device)
        if known is None or known.incarnation != alive.incarnation:
            self._reports[alive.device] = RememberedReport.of(alive)

    def learn(self, reports: Mapping[str, AcknowledgedReport]) -> None:
        """Remember the answers to reports of these devices, which were committed."""
        self._answers.update(reports)

    def supersede(self, alive: Alive) -> bool:
        """Forget what a device said before this report.

        True if progress of an earlier process of the device has to be written first. Progress of
        the same process is in the report, too.
        """
        self._reports.pop(alive.device, None)
        self.forget_answer(alive.device)
        unwritten = self._unwritten.get(alive.device)
        if unwritten is None:
            return False
        if unwritten.beat.incarnation == alive.incarnation:
            del self._unwritten[alive.device]
            return False
        return True

    def forget_answer(self, device: str) -> None:
        """Let the report of the device be recorded once more, as its rows have changed."""
        self._answers.pop(device, None)
        self.waiting.pop(device, None)

    def forget_answers(self) -> None:
        """Let all reports be recorded once more, as others may have changed the rows."""
        self._answers.clear()

    def renewed(self, beat: Beat, txid: str) -> None:
        """Record that this transaction has renewed the device's lease: its progress counts."""
        self.waiting.pop(beat.device, None)
        self._answers[beat.device].txid = txid
        if beat.progress:
            before = self._unwritten.get(beat.device)
            since_s = beat.came_s if before is None else before.since_s
            self._unwritten[beat.device] = _UnwrittenProgress(beat, since_s)

    def due(self, *, now_s: float, every_s: float) -> list[Beat]:
        """Return the pulses of devices with progress that has waited for `every_s`.

        That is less than a lease: so the last progress of a device is written before it can be
        lost.
        """
        waiting = self._unwritten.values()
        return [one.beat for one in waiting if one.since_s + every_s <= now_s]

    def unwritten(self, devices: Iterable[str]) -> list[Beat]:
        """Return the newest pulses of these devices with progress that was not written."""
        return [self._unwritten[device].beat for device in devices if device in self._unwritten]

    def written(self, beats: Iterable[Beat]) -> None:
        for beat in beats:
            self._unwritten.pop(beat.device, None)
