"""Measure how well runtimes and waits are predicted, on a real cluster's job list (rule F10).

    python -m benchmarks.estimates [--quick] [--full] [TRACE]

The list is replayed under fair share with EASY reservations. A history is learned from tasks that
ended. From day 30 on some tasks ask at submission when they will start, so that the calibration
learns. From day 60 on, the answers for tasks that then waited over a minute are compared with the
truth. Learning goes on all the time, as on an island. `--full` adds 512 devices, `--quick` asks
fewer tasks.

There are two peers. One is the same model with the tenant's 90th percentile as the limit of all
jobs, as users of EASY give them. The other knows all durations.

The list names no requests. So jobs of one tenant count as one request if they are for equally many
devices and have gaps of two minutes at most.
"""

from __future__ import annotations

import csv
import gzip
import math
import os
import sys
import time
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from app.core.explanation.estimator import (
    Calibration,
    Estimate,
    Held,
    History,
    RuntimeCurve,
    Runtimes,
    Scene,
    TenantLine,
    Unknown,
    WaitingTask,
    starts_in,
)
from benchmarks import Target, quick, report

TRACE = Path(__file__).parent / "traces" / "philly_82k_vc.csv.gz"
DAY_S = 86_400.0
HALF_LIFE_S = 7 * DAY_S
LEARN_FROM_S, TRAIN_S = 30 * DAY_S, 60 * DAY_S
REQUEST_GAP_S = 120.0
WAITED_S = 60.0  # tasks with shorter waits are not counted
ENOUGH = 20  # samples before the plain peer uses a key


# --- the list and its replay --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    at_s: float
    runtime_s: float
    width: int
    tenant: str
    who: tuple[Any, ...]


def load(path: Path) -> list[Job]:
    with gzip.open(path, "rt") as file:
        rows = [
            (
                datetime.fromisoformat(row["timestamp"]).timestamp(),
                float(row["duration"]),
                int(row["num_gpus"]),
                row["cluster"],
            )
            for row in csv.DictReader(file)
        ]
    rows.sort(key=lambda row: row[0])
    last: dict[tuple[str, int], tuple[float, int]] = {}
    jobs = []
    for at_s, runtime_s, width, tenant in rows:
        before_s, request = last.get((tenant, width), (at_s, 0))
        request += at_s - before_s > REQUEST_GAP_S
        last[tenant, width] = (at_s, request)
        who = ((tenant, width, request), (tenant, width), (tenant,), ())
        at_s -= rows[0][0]
        jobs.append(Job(at_s=at_s, runtime_s=runtime_s, width=width, tenant=tenant, who=who))
    return jobs


@dataclass(slots=True, kw_only=True)
class World:
    """Keeps the island's state in the replay; `score` is usage, scaled to the start of the list."""

    jobs: list[Job]
    free: int
    now_s: float = 0.0
    queues: dict[str, deque[int]] = field(default_factory=lambda: defaultdict(deque))
    score: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    running: dict[int, float] = field(default_factory=dict)  # job -> when it started
    started: dict[int, float] = field(default_factory=dict)
    ends: list[tuple[float, int]] = field(default_factory=list)  # sorted

    def start(self, job: int) -> None:
        one = self.jobs[job]
        self.queues[one.tenant].popleft()
        self.free -= one.width
        self.score[one.tenant] += one.runtime_s * one.width * 2 ** (self.now_s / HALF_LIFE_S)
        self.running[job] = self.started[job] = self.now_s
        insort(self.ends, (self.now_s + one.runtime_s, job))

    def heads(self) -> list[int]:
        """Return each tenant's first job, the least served tenant's job first."""
        waiting = [tenant for tenant, queue in self.queues.items() if queue]
        return [self.queues[t][0] for t in sorted(waiting, key=lambda t: (self.score[t], t))]


def replay(
    jobs: list[Job],
    devices: int,
    *,
    asked: Callable[[World, int], None],
    started: Callable[[World, int], None],
    ended: Callable[[World, int], None],
) -> World:
    """Replay fair share (usage fades in 7 days, charged at the start) with one EASY reservation.

    The loop knows all durations; the callbacks must not use them. `asked` is called for a submitted
    job that has to wait, `started` and `ended` when the job starts and ends.
    """
    world = World(jobs=jobs, free=devices)
    came = 0
    while came < len(jobs) or world.ends:
        submitted_s = jobs[came].at_s if came < len(jobs) else float("inf")
        world.now_s = min([submitted_s, *(end_s for end_s, _ in world.ends[:1])])
        while world.ends and world.ends[0][0] <= world.now_s:
            _, job = world.ends.pop(0)
            del world.running[job]
            world.free += jobs[job].width
            ended(world, job)
        comes = submitted_s == world.now_s
        if comes:
            world.queues[jobs[came].tenant].append(came)
            came += 1
        for job in fill(world):
            started(world, job)
        if comes and came - 1 not in world.started:
            asked(world, came - 1)
    return world


def fill(world: World) -> list[int]:
    """Start all jobs that may start now, in fair order, then around the first job's reservation."""
    seated = []
    while (heads := world.heads()) and world.jobs[heads[0]].width <= world.free:
        world.start(heads[0])
        seated.append(heads[0])
    if not heads or world.free == 0:
        return seated
    shadow_s, spare = reservation(world, world.jobs[heads[0]].width)
    while (job := filler(world, shadow_s, spare)) is not None:
        if world.now_s + world.jobs[job].runtime_s > shadow_s:
            spare -= world.jobs[job].width
        world.start(job)
        seated.append(job)
    return seated


def reservation(world: World, width: int) -> tuple[float, int]:
    free = world.free
    for end_s, job in world.ends:
        free += world.jobs[job].width
        if free >= width:
            return end_s, free - width
    return float("inf"), 0


def filler(world: World, shadow_s: float, spare: int) -> int | None:
    for job in world.heads()[1:]:
        one = world.jobs[job]
        in_time = world.now_s + one.runtime_s <= shadow_s
        if one.width <= world.free and (in_time or one.width <= spare):
            return job
    return None


# --- peers --------------------------------------------------------------------------------------


class Fixed(RuntimeCurve):
    """Represents a known runtime; a job that outlasts it is expected to run half as long again."""

    def __init__(self, runtime_s: float) -> None:
        super().__init__([])
        self.runtime_s = runtime_s

    def draw(self, elapsed_s: float, share: float) -> float:
        return self.runtime_s if self.runtime_s > elapsed_s else elapsed_s * 1.5


class Known:
    """Gives runtimes with the runtime itself as the only key."""

    def curve(self, who: tuple[Any, ...]) -> RuntimeCurve:
        return Fixed(who[-1])

    def known(self, who: tuple[Any, ...]) -> float:
        return 0.0


class Limits:
    """Computes the limits that users would give to EASY: the 90th percentile of their tenant's
    ended jobs.
    """

    def __init__(self) -> None:
        self.ended: dict[str, list[float]] = defaultdict(list)

    def add(self, job: Job) -> None:
        insort(self.ended[job.tenant], job.runtime_s)

    def curve(self, who: tuple[Any, ...]) -> RuntimeCurve:
        ended = self.ended.get(who[-2][0]) or [3600.0]
        return Fixed(ended[int(0.9 * (len(ended) - 1))])

    def known(self, who: tuple[Any, ...]) -> float:
        return 0.0


class Plain:
    """Gives quantiles of all ended jobs that have the most specific key with enough of them."""

    def __init__(self) -> None:
        self.ended: dict[Any, list[float]] = defaultdict(list)

    def add(self, job: Job) -> None:
        for key in job.who:
            insort(self.ended[key], job.runtime_s)

    def quantiles(self, job: Job) -> tuple[float, float, float]:
        ended = next(
            (found for key in job.who if len(found := self.ended.get(key, [])) >= ENOUGH), [3600.0]
        )
        low, middle, high = (ended[int(share * (len(ended) - 1))] for share in (0.1, 0.5, 0.9))
        return low, middle, high


# --- questions and the truth --------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Answers:
    """Holds the answers as (p10, p50, p90, truth) in seconds, and the CPU seconds of each
    answer.
    """

    rows: list[tuple[float, float, float, float]] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        errors = sorted(abs(p50 - true) / true for _, p50, _, true in self.rows)
        inside = sum(p10 <= true <= p90 for p10, _, p90, true in self.rows)
        took = sorted(self.took_s) or [0.0]
        return {
            "asked": len(errors),
            "median_relative_error": round(errors[len(errors) // 2], 3),
            "covered": round(inside / len(errors), 3),
            "p99_ms": round(took[int(0.99 * (len(took) - 1))] * 1e3, 3),
        }


class Watch:
    """Asks while the list is replayed, and records the answers when the truth is known."""

    def __init__(self, jobs: list[Job], *, learn_every: int, ask_every: int) -> None:
        self.jobs = jobs
        self.every = (learn_every, ask_every)
        self.history, self.calibration = History(), Calibration()
        self.limits, self.plain, self.known = Limits(), Plain(), Known()
        self.waits: dict[str, Answers] = defaultdict(Answers)
        self.runtimes: dict[str, Answers] = defaultdict(Answers)
        self._open: dict[int, dict[str, Estimate]] = {}
        self._running: dict[int, dict[str, tuple[float, ...]]] = {}
        self._came = 0

    def asked(self, world: World, job: int) -> None:
        if world.now_s < LEARN_FROM_S:
            return
        self._came += 1
        tested = world.now_s >= TRAIN_S
        if self._came % self.every[tested]:
            return
        told = {"roundhouse": self._told(world, job, "roundhouse", self.history, self.calibration)}
        if tested:
            told["not calibrated"] = plain(told["roundhouse"])
            told["tenant's p90 as limit"] = self._told(
                world, job, "tenant's p90 as limit", self.limits
            )
            told["durations known"] = self._told(world, job, "durations known", self.known)
        self._open[job] = told

    def _told(
        self,
        world: World,
        job: int,
        name: str,
        runtimes: Runtimes,
        calibration: Calibration | None = None,
    ) -> Estimate:
        seen, one = scene(world, known=name == "durations known"), self.jobs[job]
        place = len(world.queues[one.tenant]) - 1
        began = time.thread_time()
        told = starts_in(seen, one.tenant, place, runtimes, calibration=calibration)
        if world.now_s >= TRAIN_S:
            self.waits[name].took_s.append(time.thread_time() - began)
        if isinstance(told, Unknown):
            raise RuntimeError(f"job {job}: {told.message}")
        return told

    def started(self, world: World, job: int) -> None:
        if world.now_s >= TRAIN_S:
            self._ask_runtime(job)
        told = self._open.pop(job, None)
        if told is None:
            return
        one = self.jobs[job]
        waited_s = world.now_s - one.at_s
        self.calibration.learn(told["roundhouse"], waited_s)
        if one.at_s >= TRAIN_S and waited_s > WAITED_S:
            for name, said in told.items():
                self.waits[name].rows.append((said.p10_s, said.p50_s, said.p90_s, waited_s))

    def _ask_runtime(self, job: int) -> None:
        began = time.thread_time()
        told = self.history.remaining(self.jobs[job].who)
        self.runtimes["roundhouse"].took_s.append(time.thread_time() - began)
        if told is not None:
            self._running[job] = {"roundhouse": told, "plain": self.plain.quantiles(self.jobs[job])}

    def ended(self, world: World, job: int) -> None:
        one = self.jobs[job]
        for name, (p10, p50, p90) in self._running.pop(job, {}).items():
            self.runtimes[name].rows.append((p10, p50, p90, one.runtime_s))
        self.history.add(one.who, one.runtime_s)
        self.limits.add(one)
        self.plain.add(one)


def plain(told: Estimate) -> Estimate:
    """Return the answer without calibration: log-normal 10th and 90th percentiles."""
    away = math.exp(1.2816 * told.model_spread)
    return Estimate(
        p10_s=told.model_s / away,
        p50_s=told.model_s,
        p90_s=told.model_s * away,
        model_s=told.model_s,
        model_spread=told.model_spread,
    )


def scene(world: World, *, known: bool) -> Scene:
    """Return what an island knows at this moment; with `known`, it also knows each job's
    runtime.
    """
    jobs, faded = world.jobs, 2 ** (-world.now_s / HALF_LIFE_S)

    def who(job: int) -> tuple[Any, ...]:
        return (jobs[job].runtime_s,) if known else jobs[job].who

    return Scene(
        free=world.free,
        held=[
            Held(
                tenant=jobs[job].tenant,
                who=who(job),
                width=jobs[job].width,
                elapsed_s=world.now_s - at_s,
            )
            for job, at_s in world.running.items()
        ],
        lines={
            tenant: TenantLine(
                score_s=world.score[tenant] * faded,
                tasks=[WaitingTask(who=who(job), width=jobs[job].width) for job in queue],
            )
            for tenant, queue in world.queues.items()
        },
        half_life_s=HALF_LIFE_S,
    )


# --- the program --------------------------------------------------------------------------------


def main() -> int:
    jobs = load(trace())
    at_640 = measure(jobs, 640, learn_every=40, ask_every=10 if quick() else 2)
    peers: dict[str, Any] = {"640 devices": at_640}
    if "--full" in sys.argv[1:]:
        peers["512 devices"] = measure(jobs, 512, learn_every=200, ask_every=40)
    return report("estimates", targets(at_640), peers)


def trace() -> Path:
    given = [word for word in sys.argv[1:] if not word.startswith("--")]
    path = Path(given[0] if given else os.environ.get("PHILLY_TRACE", TRACE))
    if not path.exists():
        raise SystemExit(f"no trace at {path}: give its path, or set PHILLY_TRACE")
    return path


def measure(jobs: list[Job], devices: int, *, learn_every: int, ask_every: int) -> dict[str, Any]:
    watch = Watch(jobs, learn_every=learn_every, ask_every=ask_every)
    world = replay(jobs, devices, asked=watch.asked, started=watch.started, ended=watch.ended)
    waits_s = [world.started[job] - one.at_s for job, one in enumerate(jobs)]
    return {
        "mean_wait_h": round(sum(waits_s) / len(waits_s) / 3600, 2),
        "waits": {name: answers.figures() for name, answers in watch.waits.items() if answers.rows},
        "runtimes": {name: answers.figures() for name, answers in watch.runtimes.items()},
    }


def targets(figures: dict[str, Any]) -> list[Target]:
    waits, runtimes = figures["waits"]["roundhouse"], figures["runtimes"]["roundhouse"]
    rows = [
        ("wait, median error", waits["median_relative_error"], "of the wait", "<=", 0.25),
        ("wait, 80 % interval covers at least", waits["covered"], "of the tasks", ">=", 0.75),
        ("wait, 80 % interval covers at most", waits["covered"], "of the tasks", "<=", 0.85),
        ("wait, p99 of an answer", waits["p99_ms"], "ms of one core", "<=", 50.0),
        ("runtime, 80 % interval covers at least", runtimes["covered"], "of the tasks", ">=", 0.75),
        ("runtime, 80 % interval covers at most", runtimes["covered"], "of the tasks", "<=", 0.85),
        ("runtime, p99 of an answer", runtimes["p99_ms"], "ms of one core", "<=", 0.05),
    ]
    return [
        Target(name=name, value=value, unit=unit, op=op, bound=bound)
        for name, value, unit, op, bound in rows
    ]


if __name__ == "__main__":
    sys.exit(main())
