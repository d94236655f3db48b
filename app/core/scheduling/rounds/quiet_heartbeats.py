"""Recognises heartbeats that say nothing new, before they are decoded.

A heartbeat is the whole truth of its device. While a device continues as before, only few numbers
differ from one heartbeat to the next: its time, the steps and held time of its tasks, and their
memory. So the island keeps a digest of all the rest, of what it recorded and answered last. A
heartbeat with the same digest only renews the lease, as long as the island's own rows are as they
were (`app.scheduling.journal.reports.quiet`). Its steps and held time wait for the next bulk write.
Its figures, such as heat and memory, wait for minutes, as nothing is decided by them.
A heartbeat that differs is decoded and recorded in full, and so is every heartbeat of a device of
which nothing is remembered.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from app.core.model.protocol.messages import JSON, Alive, Answer, encode

#: What moves in a resident while nothing happens.
MOVING = frozenset(
    ("step", "held_us", "staged_us", "memory_bytes", "on_device_bytes", "host_bytes")
)
PEAKS = ("memory_bytes", "host_bytes")  # of these, the most so far is kept
_MEMORY = ("memory_bytes", "on_device_bytes", "host_bytes")
LARGEST = 2**53  # of a moving number; the island computes with products of it
AT_ONCE = 4096  # most leases that one round renews, so that the round stays short
FIGURES_EVERY_S = 240.0  # how often changed figures of a device are recorded, such as its heat
#: How often a heartbeat is recorded in full, whatever it says. To record one costs as much as to
#: renew some twenty leases.
WHOLE_EVERY_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """Describes a heartbeat with the recorded digest; `came_s` is by the island's monotonic
    clock.
    """

    device: str
    incarnation: str
    sent_us: int
    came_s: float
    body: JSON

    def residents(self) -> list[JSON]:
        return list(self.body.get("residents", ()))


@dataclass(slots=True, kw_only=True)
class AcknowledgedReport:
    """Keeps what was recorded of a device's last full heartbeat, and what was answered.

    `digest` and `figures` are what `standing_digest` and `figures_of` return. `txid` is the
    transaction that wrote the device's row last, and `held` the stays on the device, as
    `stays_told` names them. `mounts` are the digests of the mounts that the device knows, if it
    may show any. `builds` is True if its host may have to install packages.
    """

    answer: Answer
    digest: bytes
    figures: tuple[Any, ...]
    txid: str
    held: str
    peaks: Mapping[str, tuple[int, ...]]
    mounts: tuple[str | None, str | None]
    builds: bool


def standing_digest(body: JSON) -> bytes:
    """Return the digest of all that a heartbeat says, except what changes while nothing happens."""
    said = {name: value for name, value in body.items() if name != "sent_us"}
    facts = said["facts"]
    if "held_bytes" in facts:
        said["facts"] = {name: value for name, value in facts.items() if name != "held_bytes"}
    said["residents"] = [
        {name: value for name, value in view.items() if name not in MOVING}
        for view in said.get("residents", ())
    ]
    if health := said.get("health"):
        said["health"] = {name: value for name, value in health.items() if name != "reading"}
    return hashlib.sha256(json.dumps(said, separators=(",", ":")).encode()).digest()


def figures_of(body: JSON) -> tuple[Any, ...]:
    """Return what the digest leaves out and no bulk write has: readings, and memory in use."""
    memory = [[view.get(name) for name in _MEMORY] for view in body.get("residents", ())]
    reading = (body.get("health") or {}).get("reading")
    return reading, body["facts"].get("held_bytes"), memory


def stays_told(stays: Iterable[tuple[str, int]]) -> str:
    """Name stays, which are (task, epoch), in one text."""
    return " ".join(sorted(f"{task}/{epoch}" for task, epoch in stays))


def acknowledged(alive: Alive, answer: Answer, *, txid: str) -> AcknowledgedReport:
    """Remember a heartbeat whose residents all run where the island believes them."""
    body, facts = encode(alive), alive.facts
    return AcknowledgedReport(
        answer=answer,
        digest=standing_digest(body),
        figures=figures_of(body),
        txid=txid,
        held=stays_told((view.task, view.epoch) for view in alive.residents),
        peaks={view.task: (view.memory_bytes, view.host_bytes) for view in alive.residents},
        mounts=(facts.get("mounts"), facts.get("images")),
        builds="builds" in facts,
    )


@dataclass(slots=True)
class _KnownReport:
    """Holds an acknowledged report, and the times from which a heartbeat is recorded in full: with
    other figures, and in any case.
    """

    report: AcknowledgedReport
    figures_from_s: float
    whole_from_s: float


@dataclass(slots=True)
class _UnwrittenProgress:
    """Holds the newest heartbeat whose progress is not written, and since when there is such
    progress.
    """

    beat: Beat
    since_s: float


@dataclass
class QuietHeartbeats:
    """Remembers acknowledged reports, the heartbeats that repeat them, and unwritten progress.

    `recognise` may run in another thread than all other methods.
    """

    # by device: heartbeats whose lease is to be renewed
    waiting: dict[str, Beat] = field(default_factory=dict)
    _known: dict[str, _KnownReport] = field(default_factory=dict)
    _unwritten: dict[str, _UnwrittenProgress] = field(default_factory=dict)

    def recognise(self, body: JSON, *, now_s: float) -> Beat | None:
        """Return a heartbeat that repeats what was acknowledged; None if it does not repeat it."""
        device, sent_us = body.get("device"), body.get("sent_us", -1)
        known = self._known.get(device) if isinstance(device, str) else None
        if known is None or now_s >= known.whole_from_s or not _is_count(sent_us):
            return None
        report = known.report
        try:
            if standing_digest(body) != report.digest:
                return None
            if now_s >= known.figures_from_s and figures_of(body) != report.figures:
                return None
            if not all(_goes_on(view, report) for view in body.get("residents", ())):
                return None
        except (AttributeError, KeyError, TypeError):
            return None  # it is decoded, and refused there
        return Beat(
            device=report.answer.device,
            incarnation=report.answer.incarnation,
            sent_us=sent_us,
            came_s=now_s,
            body=body,
        )

    def put(self, beat: Beat) -> None:
        self.waiting[beat.device] = beat

    def take(self) -> tuple[list[tuple[Beat, AcknowledgedReport]], list[Beat]]:
        """Return the waiting heartbeats for one round, each with what it repeats; and those that no
        longer repeat anything.

        The latter are removed. The others wait until they are `renewed` or forgotten.
        """
        asked, others = list[tuple[Beat, AcknowledgedReport]](), list[Beat]()
        for beat in list(islice(self.waiting.values(), AT_ONCE)):
            if (report := self.report_of(beat)) is not None:
                asked.append((beat, report))
            else:
                others.append(self.waiting.pop(beat.device))
        return asked, others

    def report_of(self, beat: Beat) -> AcknowledgedReport | None:
        """Return what the heartbeat repeats; None if that was forgotten meanwhile."""
        known = self._known.get(beat.device)
        if known is None or known.report.answer.incarnation != beat.incarnation:
            return None
        return known.report

    def learn(self, reports: Mapping[str, AcknowledgedReport], *, now_s: float) -> None:
        """Remember what was recorded and committed of these devices."""
        for device, report in reports.items():
            # Spread over time, so that few devices are recorded in full at once.
            part = 0.5 + (zlib.crc32(device.encode()) % 1024) / 1024
            figures_from_s, whole_from_s = (
                now_s + every_s * part for every_s in (FIGURES_EVERY_S, WHOLE_EVERY_S)
            )
            self._known[device] = _KnownReport(report, figures_from_s, whole_from_s)

    def supersede(self, alive: Alive) -> bool:
        """Forget what a device said before this heartbeat, which is recorded in full.

        True if progress of an earlier process of the device has to be written first. Progress of
        the same process is in the heartbeat, too.
        """
        self.forget(alive.device)
        unwritten = self._unwritten.get(alive.device)
        if unwritten is None:
            return False
        if unwritten.beat.incarnation == alive.incarnation:
            del self._unwritten[alive.device]
            return False
        return True

    def forget(self, device: str) -> None:
        self._known.pop(device, None)
        self.waiting.pop(device, None)

    def forget_all(self) -> None:
        """Forget all reports, as others may have changed what they rest on."""
        self._known.clear()

    def renewed(self, beat: Beat, txid: str) -> None:
        """Record that this transaction has renewed the device's lease: its progress counts."""
        self.waiting.pop(beat.device, None)
        self._known[beat.device].report.txid = txid
        if beat.residents():
            before = self._unwritten.get(beat.device)
            since_s = beat.came_s if before is None else before.since_s
            self._unwritten[beat.device] = _UnwrittenProgress(beat, since_s)

    def due(self, *, now_s: float, every_s: float) -> list[Beat]:
        """Return the heartbeats of devices with progress that has waited for `every_s`.

        That is less than a lease: so the last progress of a device is written before it can be
        lost.
        """
        waiting = self._unwritten.values()
        return [one.beat for one in waiting if one.since_s + every_s <= now_s]

    def unwritten(self, devices: Iterable[str]) -> list[Beat]:
        """Return the newest heartbeats of these devices with progress that was not written."""
        return [self._unwritten[device].beat for device in devices if device in self._unwritten]

    def written(self, beats: Iterable[Beat]) -> None:
        for beat in beats:
            self._unwritten.pop(beat.device, None)


def _goes_on(view: Mapping[str, Any], report: AcknowledgedReport) -> bool:
    """True if the numbers that change are well formed, and no peak of the resident is higher than
    before.
    """
    if not all(_is_count(view[name]) for name in {"step", "held_us", *(MOVING & view.keys())}):
        return False
    peaks = report.peaks[view["task"]]
    return all(view.get(name, 0) <= peak for name, peak in zip(PEAKS, peaks, strict=True))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST
