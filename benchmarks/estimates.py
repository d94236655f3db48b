"""Measure how well runtimes and waits are predicted, on a real cluster's job list (rule F10).

    python -m benchmarks.estimates [--quick] [--full] [TRACE]

The list is replayed by the island's own scheduler, as in `benchmarks.philly`: equal weights, usage
fades in 7 days, a pause and a resume cost 60 s each, slices are 6,000 s. The scheduler is told of
each job what the history expects. From day 30 on some tasks ask at submission when they will
start, by the very code that answers `GET /v1/queue`, so that the calibration learns. From day 60
on, the answers for tasks that then waited over a minute are compared with the truth. Learning goes
on all the time, as on an island. `--full` adds 512 devices, `--quick` asks fewer tasks.

There is one peer: the same model with the tenant's 90th percentile as the limit of all jobs, as
users of EASY give them.

The list names no requests. So jobs of one tenant count as one request if they are for equally many
devices and have gaps of two minutes at most.
"""

from __future__ import annotations

import gzip
import math
import os
import sys
import time
from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from app.core.explanation.estimator import Estimate, History, RuntimeCurve, Unknown
from app.core.fairness.fair_tree import above
from app.core.model.lifecycle import Move, State
from app.core.model.snapshot import BoardDevice, BoardTask, BoardTenant, Plan, Policy
from app.core.scheduling import blockers
from app.core.scheduling.board import Board
from app.core.scheduling.cycle import cycle
from app.core.simulation.simulator import Arrival, Costs, World
from app.core.simulation.trace import read
from app.insight import forecast
from benchmarks import Target, quick, report

TRACE = Path(__file__).parent / "traces" / "philly_82k_vc.csv.gz"
DAY_S = 86_400.0
LEARN_FROM_S, TRAIN_S = 30 * DAY_S, 60 * DAY_S
REQUEST_GAP_S = 120.0
WAITED_S = 60.0  # tasks with shorter waits are not counted
ENOUGH = 20  # samples before the plain peer uses a key
SWITCH_S = 60.0
SLICE_S = 2 * SWITCH_S / 0.02

Who = tuple[Any, ...]


# --- the list and its replay --------------------------------------------------------------------


def load(path: Path) -> tuple[list[Arrival], dict[str, str]]:
    """Return the jobs, and the name of each job's request."""
    with gzip.open(path, "rt", newline="") as lines:
        arrivals = list(read(lines, expected=False).arrivals)
    last: dict[tuple[str, int], tuple[float, int]] = {}
    requests = {}
    for one in arrivals:
        before_s, request = last.get((one.tenant, one.width), (one.at_s, 0))
        request += one.at_s - before_s > REQUEST_GAP_S
        last[one.tenant, one.width] = (one.at_s, request)
        requests[one.task] = str(request)
    return arrivals, requests


def replay(arrivals: Sequence[Arrival], devices: int, watch: Watch) -> World:
    """Replay the jobs; the watch sees what comes, starts and ends, and never a duration before."""
    tenants = sorted({one.tenant for one in arrivals})
    world = watch.world = World(
        arrivals,
        [BoardDevice(id=f"d{n:03}", host="h", kind="cuda") for n in range(devices)],
        [BoardTenant(id=name, name=name, weight=1000) for name in tenants],
        Policy(slice_min_s=SLICE_S, slice_max_s=SLICE_S),
        Costs(image_s=SWITCH_S, resume_s=SWITCH_S),
    )
    world.keep_timeline = False
    came, running = 0, dict[str, Arrival]()
    while (at_us := world.next_us()) is not None:
        first = came
        while came < len(arrivals) and arrivals[came].at_s * 1e6 <= at_us:
            expected_s = watch.history.median_s(watch.who(arrivals[came]))
            world.arrivals[came] = replace(arrivals[came], expected_s=expected_s)
            came += 1
        done = world.done
        world.advance(at_us)
        if world.done > done:
            ended = [id for id in running if world.runs[id].finished_us is not None]
            watch.ended([running.pop(id) for id in ended])
        plan = cycle(world.board)
        world.obey(plan)
        running |= {one.task: one for one in arrivals[first:came]}
        watch.started(plan)
        watch.came(arrivals[first:came])
    return world


# --- peers --------------------------------------------------------------------------------------


class Fixed(RuntimeCurve):
    """Represents a known runtime; a job that outlasts it is expected to run half as long again."""

    def __init__(self, runtime_s: float) -> None:
        super().__init__([])
        self.runtime_s = runtime_s

    def draw(self, elapsed_s: float, share: float) -> float:
        return self.runtime_s if self.runtime_s > elapsed_s else elapsed_s * 1.5


class Limits:
    """Computes the limits that users would give to EASY: the 90th percentile of their tenant's
    ended jobs.
    """

    def __init__(self) -> None:
        self.ended: dict[str, list[float]] = defaultdict(list)

    def add(self, who: Who, runtime_s: float) -> None:
        insort(self.ended[who[-2][0]], runtime_s)

    def curve(self, who: Who) -> RuntimeCurve:
        ended = self.ended.get(who[-2][0]) or [3600.0]
        return Fixed(ended[int(0.9 * (len(ended) - 1))])

    def known(self, who: Who) -> float:
        return 0.0


class Plain:
    """Gives quantiles of all ended jobs that have the most specific key with enough of them."""

    def __init__(self) -> None:
        self.ended: dict[Any, list[float]] = defaultdict(list)

    def add(self, who: Who, runtime_s: float) -> None:
        for key in who:
            insort(self.ended[key], runtime_s)

    def quantiles(self, who: Who) -> tuple[float, float, float]:
        ended = next(
            (found for key in who if len(found := self.ended.get(key, [])) >= ENOUGH), [3600.0]
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

    world: World

    def __init__(self, requests: dict[str, str], *, learn_every: int, ask_every: int) -> None:
        self.requests, self.every = requests, (learn_every, ask_every)
        self.learned = forecast.Learned()
        self.limits, self.plain = Limits(), Plain()
        self.waits: dict[str, Answers] = defaultdict(Answers)
        self.runtimes: dict[str, Answers] = defaultdict(Answers)
        self.unknown = 0
        self._open: dict[str, tuple[float, dict[str, Estimate]]] = {}
        self._running: dict[str, dict[str, tuple[float, ...]]] = {}
        self._number = 0

    @property
    def history(self) -> History:
        return self.learned.history

    def who(self, one: Arrival | BoardTask) -> Who:
        id = one.task if isinstance(one, Arrival) else one.id
        tenant, width = one.tenant, one.width
        return (tenant, one.user, self.requests[id], width), (tenant, width), (tenant,), ()

    def came(self, arrivals: Iterable[Arrival]) -> None:
        board, now_s = self.world.board, self.world.now_s
        for one in arrivals:
            task = board.tasks.get(one.task)
            if now_s < LEARN_FROM_S or task is None or task.state != State.waiting:
                continue
            self._number += 1
            if self._number % self.every[now_s >= TRAIN_S]:
                continue
            told = {"roundhouse": self._told(task, "roundhouse", self.learned)}
            if now_s >= TRAIN_S:
                told["not calibrated"] = plain(told["roundhouse"])
                peer = forecast.Learned(history=self.limits)  # type: ignore[arg-type]
                told["tenant's p90 as limit"] = self._told(task, "tenant's p90 as limit", peer)
            self._open[task.id] = now_s, told

    def _told(self, task: BoardTask, name: str, learned: forecast.Learned) -> Estimate:
        board = self.world.board
        own, crowd = before(board, task)
        rows = [self._row(stay.task) for stay in board.stays.values()]
        began = time.thread_time()
        told = forecast.start(
            board,
            task,
            asked=self._row(task),
            on_devices=rows,
            own=own,
            crowd=crowd,
            unit=blockers.fee(board, task.kind, 1, 1),
            learned=learned,
            gang=kept_for(board, task),
        )
        if self.world.now_s >= TRAIN_S:
            self.waits[name].took_s.append(time.thread_time() - began)
        found, _ = learned.told.pop(task.id, (None, 0.0))
        if found is None:
            raise RuntimeError(f"{task.id}: {told}")
        if isinstance(told, Unknown) and name == "roundhouse":
            self.unknown += 1
        return found

    def _row(self, task: BoardTask) -> Any:
        """Return the task as a row of the database."""
        now_us = (
            0 if task.held_since_s is None else int((self.world.now_s - task.held_since_s) * 1e6)
        )
        return SimpleNamespace(
            id=task.id,
            tenant_id=task.tenant,
            user_id=task.user,
            name=self.requests[task.id],
            devices_min=task.width,
            total_held_us=(task.had_us + max(0, now_us)) * task.width,
            guest_held_us=0,
            unheard_us=0,
            held_us=0,
            max_duration_s=None,
        )

    def started(self, plan: Plan) -> None:
        for decision in plan.decisions:
            if decision.move == Move.Launch and self.world.tasks[decision.task].epoch == 1:
                self._starts(self.world.tasks[decision.task])

    def _starts(self, task: BoardTask) -> None:
        if self.world.now_s >= TRAIN_S:
            self._ask_runtime(task)
        at_s, told = self._open.pop(task.id, (0.0, {}))
        if not told:
            return
        waited_s = self.world.now_s - at_s
        self.learned.calibration.learn(told["roundhouse"], waited_s)
        if at_s >= TRAIN_S and waited_s > WAITED_S:
            for name, said in told.items():
                self.waits[name].rows.append((said.p10_s, said.p50_s, said.p90_s, waited_s))

    def _ask_runtime(self, task: BoardTask) -> None:
        began = time.thread_time()
        told = self.history.remaining(self.who(task))
        self.runtimes["roundhouse"].took_s.append(time.thread_time() - began)
        if told is not None:
            said = {"roundhouse": told, "plain": self.plain.quantiles(self.who(task))}
            self._running[task.id] = said

    def ended(self, arrivals: Iterable[Arrival]) -> None:
        for one in arrivals:
            for name, (p10, p50, p90) in self._running.pop(one.task, {}).items():
                self.runtimes[name].rows.append((p10, p50, p90, one.work_s))
            for kept in (self.history, self.limits, self.plain):
                kept.add(self.who(one), one.work_s)


def before(board: Board, task: BoardTask) -> tuple[int, blockers.WaitingBefore]:
    """Return how many tasks of the tenant go first, and those of each other tenant."""
    waiting = [other for other in board.tasks.values() if other.id in board.tree]
    counts, leaf = blockers.WaitingCounts(board, waiting), board.leaf(task)
    key = (task.submitted_s, task.id)
    k = own = sum(board.leaf(one) is leaf and (one.submitted_s, one.id) < key for one in waiting)
    crowd: blockers.WaitingBefore = ([], [])
    for branch in above(leaf):
        if branch.parent is not None:
            crowd = blockers.before(counts.party(branch), k, counts.siblings(branch))
            own, k = k, k + sum(crowd[1])
    return own, crowd


def kept_for(board: Board, task: BoardTask) -> int:
    """Return the width of the gang that free devices are kept for; 0 if they are not."""
    if board.pools[task.kind].fitting(board.lane(task)) < task.width:
        return 0
    return max(other.width for other in board.tasks.values() if other.id in board.tree)


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


# --- the program --------------------------------------------------------------------------------


def main() -> int:
    at_640 = measure(640, learn_every=20, ask_every=10 if quick() else 2)
    peers: dict[str, Any] = {"640 devices": at_640}
    if "--full" in sys.argv[1:]:
        peers["512 devices"] = measure(512, learn_every=200, ask_every=40)
    return report("estimates", targets(at_640), peers)


def trace() -> Path:
    given = [word for word in sys.argv[1:] if not word.startswith("--")]
    path = Path(given[0] if given else os.environ.get("PHILLY_TRACE", TRACE))
    if not path.exists():
        raise SystemExit(f"no trace at {path}: give its path, or set PHILLY_TRACE")
    return path


def measure(devices: int, *, learn_every: int, ask_every: int) -> dict[str, Any]:
    arrivals, requests = load(trace())
    watch = Watch(requests, learn_every=learn_every, ask_every=ask_every)
    world = replay(arrivals, devices, watch)
    waits_s = world.report().waits_s.values()
    return {
        "mean_wait_h": round(sum(waits_s) / len(waits_s) / 3600, 2),
        "unknown": watch.unknown,
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
