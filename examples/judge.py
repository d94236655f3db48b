"""Judge the demo by what the API reports afterwards: pure functions, no network, no clock.

A `Life` is one job's whole story. Each judge returns a `Verdict`: a promise, the verdict on it, and
the numbers behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

JSON = dict[str, Any]

# largest difference of a tenant's share from its weight's, as a fraction of all device time
TOLERANCE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    promise: str
    held: bool
    numbers: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """The worker of these devices got `kill -9` at `at`."""

    devices: Sequence[str]
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """A task as GET /v1/tasks/{id} shows it, with its placements and checkpoints, oldest first."""

    tenant: str
    name: str
    task: JSON
    placements: Sequence[JSON]
    checkpoints: Sequence[JSON]

    @property
    def stays(self) -> list[JSON]:
        """The placements that got their slot."""
        return [stay for stay in self.placements if stay["first_step"] is not None]

    @property
    def moved(self) -> bool:
        return len({stay["device_id"] for stay in self.stays}) > 1

    @property
    def killed(self) -> bool:
        return any(placement["end"] == "lost" for placement in self.placements)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The usage of each tenant at one instant, and the number of its unfinished jobs."""

    at_s: float
    used_us: Mapping[str, int]
    unfinished: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The time in which every tenant had more work than it could hold devices for."""

    seconds: float
    used_us: Mapping[str, int]

    def share(self, tenant: str) -> float:
        return self.used_us[tenant] / max(1, sum(self.used_us.values()))


def saturated(samples: Sequence[Sample]) -> Window:
    """Return the window between samples with two unfinished jobs or more of each tenant."""
    full = [s for s in samples if all(count >= 2 for count in s.unfinished.values())]
    if not full:
        return Window(seconds=0.0, used_us={})
    first, last = full[0], full[-1]
    used = {tenant: last.used_us[tenant] - first.used_us[tenant] for tenant in last.used_us}
    return Window(seconds=last.at_s - first.at_s, used_us=used)


def shares_follow_weights(
    window: Window, weights: Mapping[str, float], *, least_s: float
) -> Verdict:
    total = sum(weights.values())
    wanted = {tenant: weight / total for tenant, weight in weights.items()}
    told = ", ".join(
        f"{tenant} {window.share(tenant):.1%} for {wanted[tenant]:.0%}" for tenant in wanted
    )
    close = all(abs(window.share(t) - wanted[t]) <= TOLERANCE for t in wanted)
    return Verdict(
        promise=f"shares follow weights, within {TOLERANCE:.0%} of all device time",
        held=close and window.seconds >= least_s,
        numbers=f"{told}; over {window.seconds:.0f} s with work waiting everywhere",
    )


def all_done(lives: Sequence[Life]) -> Verdict:
    not_done = [f"{life.name} {life.task['state']}" for life in lives if not _is_done(life)]
    return Verdict(
        promise="every accepted request is done",
        held=not not_done,
        numbers=", ".join(not_done) or f"{len(lives)} of {len(lives)}",
    )


def ledger_adds_up(lives: Sequence[Life], usage: Mapping[str, int]) -> Verdict:
    """The held time of placements must be equal to `usage`, the booked microseconds by tenant."""
    held = {tenant: 0 for tenant in usage}
    for life in lives:
        held[life.tenant] += sum(placement["held_us"] for placement in life.placements)
    return Verdict(
        promise="the ledger adds up, to the microsecond",
        held=held == dict(usage),
        numbers=f"booked {sum(usage.values())} µs, held {sum(held.values())} µs",
    )


def pauses_lose_nothing(lives: Sequence[Life], kill: Kill | None) -> Verdict:
    """A planned pause loses no step, unless the kill destroyed the image in host memory."""
    planned = [
        (life.name, before, after)
        for life in lives
        for before, after in pairwise(life.stays)
        if before["end"] in ("paused", "moved") and not _struck(before, after, kill)
    ]
    lost = [f"{name}: {_lost(b, a)}" for name, b, a in planned if _lost(b, a)]
    return Verdict(
        promise="a planned pause loses no step",
        held=not lost and bool(planned),
        numbers=", ".join(lost) or f"{len(planned)} pauses, 0 steps lost",
    )


def kill_costs_little(lives: Sequence[Life], kill: Kill) -> Verdict:
    """Jobs on the devices must go on from their newest checkpoint or from something newer."""
    struck = [
        (life, before, after)
        for life in lives
        for before, after in pairwise(life.stays)
        if _struck(before, after, kill)
    ]
    worse = [
        f"{life.name} went on after step {after['first_step']}"
        for life, _, after in struck
        if after["first_step"] < _newest_step(life, kill)
    ]
    lost = sum(_lost(before, after) for _, before, after in struck)
    return Verdict(
        promise=f"kill -9 of the worker of {' and '.join(kill.devices)} costs at most the steps"
        " since the last checkpoint",
        held=not worse and bool(struck),
        numbers=", ".join(worse) or f"{len(struck)} jobs hit, {lost} steps run again",
    )


def same_bits(life: Life, alone: JSON) -> Verdict:
    """The job must end with the bits of `alone`, the result of the same job run undisturbed."""
    here = (life.task["result"] or {}).get("parameters", "none")
    story = f"paused {life.task['pauses']} times"
    story += ", moved" if life.moved else ""
    story += ", survived the kill" if life.killed else ""
    return Verdict(
        promise=f"{life.name} ({story}) ends with the bits of the same job run alone",
        held=here == alone.get("parameters"),
        numbers=f"{here[:16]}… and {str(alone.get('parameters'))[:16]}…",
    )


def spliced(life: Life, enough: JSON) -> Verdict:
    """The job must end with the bits of `enough`, its result with a device for each rank."""
    here = (life.task["result"] or {}).get("parameters", "none")
    lent = [stay for stay in life.placements if stay["guest"]]
    ends = [stay["end"] for stay in lent]
    again = ends[:1] == ["resized"] and len(ends) > 1
    return Verdict(
        promise=f"{life.name} has a second device while nobody asks, gives it back without a pause,"
        " and ends with the bits of a device for each rank",
        held=again and not life.task["pauses"] and here == enough.get("parameters"),
        numbers=f"lent {len(lent)} times, {life.task['pauses']} pauses, "
        f"{here[:16]}… and {str(enough.get('parameters'))[:16]}…",
    )


def most_disturbed(lives: Sequence[Life]) -> Life:
    """Return the job with the strongest proof: it survived the kill, moved, or paused most."""
    done = [life for life in lives if _is_done(life)] or list(lives)
    return max(done, key=lambda life: (life.killed, life.moved, life.task["pauses"]))


def _is_done(life: Life) -> bool:
    return bool(life.task["state"] == "done")


def _lost(before: JSON, after: JSON) -> int:
    return max(0, (before["last_step"] or 0) - (after["first_step"] or 0))


def _struck(before: JSON, after: JSON, kill: Kill | None) -> bool:
    """True if the kill hit a task between the launches of these two placements."""
    if kill is None:
        return False
    launched, again = _when(before["launched_at"]), _when(after["launched_at"])
    return before["device_id"] in kill.devices and launched <= kill.at <= again


def _newest_step(life: Life, kill: Kill) -> int:
    before = [c["step"] for c in life.checkpoints if _when(c["created_at"]) <= kill.at]
    return max(before, default=0)


def _when(text: str) -> datetime:
    return datetime.fromisoformat(text)
