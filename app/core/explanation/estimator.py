"""Estimates how long tasks run and when a waiting task starts, from earlier tasks (rule F10).

`History` remembers runtimes as fading histograms of log time. There is one histogram for each key
of a path from the most specific key to the widest, and a question may be about a task that has
already run for a while. `starts_in` simulates an island a few times with runtimes drawn from the
history. `Calibration` corrects such answers by what came true, so that an 80 % interval holds 80 %.
Equal input gives equal answers.

Nothing here decides what runs. The simulated island is a model: it has one kind of device, tenants
side by side and no new arrivals. Tasks give way as rules F6 and F8 say, and no task starts before a
gang whose turn it is, since backfilling changes hardly any answer. Devices of a reservation are
taken to be used by its tenant from the begin of the window on. Because it is only a model, floats
are used here, and no amount that is charged or compared exactly may come from here.
"""

from __future__ import annotations

import math
import random
from array import array
from bisect import bisect_left, insort
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, count
from operator import itemgetter, mul
from statistics import fmean, median
from typing import Protocol

from app.core import units

#: A task's keys from the most specific to the widest: ((tenant, user, name, width), (tenant,
#: width), (tenant,), ()).  A key is always followed by the same wider keys.
Who = tuple[Hashable, ...]

# width of a bin in log time: each bin ends 16 % later than the previous bin
STEP = 0.15
BINS = 112  # from 1 s to 231 days; shorter runtimes count in the first bin, longer ones in the last
# share that passes a bin if half of the tasks double their age: a Pareto tail with index 1
TAIL = math.exp(-STEP)

# Each tuple has values by distance from the widest key; the last value holds for all further keys.
# MEMORY: how many runtimes a key remembers; the weight of a runtime fades by 1/e per that many.
# TRUST: how many runtimes of its own the next wider key counts for. The values were chosen on the
# Philly trace; half or twice of each changes little.
MEMORY = (2000.0, 500.0, 30.0, 100.0)
TRUST = (2.0, 5.0, 10.0, 3.0)
# part of the remembered runtimes that must be new before a curve is rebuilt
NEWS = (0.3, 0.3, 0.1, 0.1)
# weights of new runtimes grow instead of old ones shrinking; above this, all are scaled down
REBASE = 1e100


# --- runtimes -----------------------------------------------------------------------------------


class RuntimeCurve:
    """Holds a distribution of runtimes: for each bin, the share of the tasks that reached it and
    ran longer.
    """

    __slots__ = ("_minus_longer", "past")

    def __init__(self, past: list[float]) -> None:
        self.past = past
        # minus the share of tasks that reaches each bin: in ascending order, so that bisect can
        # find a share
        self._minus_longer = list(accumulate(past, mul, initial=-1.0))

    def longer(self, runtime_s: float) -> float:
        """Return the share of tasks that run longer than `runtime_s`."""
        if runtime_s <= 1.0:
            return 1.0
        place = min(math.log(runtime_s) / STEP, BINS - 1e-9)
        bin = int(place)
        low, high = self._minus_longer[bin], self._minus_longer[bin + 1]
        return -(low + (high - low) * (place - bin))

    def draw(self, elapsed_s: float, share: float) -> float:
        """Return a quantile: of the tasks that ran for `elapsed_s`, the part `share` runs longer
        than this.
        """
        wanted = -share * (self.longer(elapsed_s) if elapsed_s > 1.0 else 1.0)
        above = bisect_left(self._minus_longer, wanted)
        if above == 0:
            return max(1.0, elapsed_s)
        if above > BINS:
            return max(math.exp(BINS * STEP), elapsed_s)
        low, high = self._minus_longer[above - 1], self._minus_longer[above]
        part = (wanted - low) / (high - low) if high > low else 0.5
        return max(math.exp((above - 1 + part) * STEP), elapsed_s)


class Runtimes(Protocol):
    """Gives runtimes to `starts_in`: a `History`, or an alternative to compare with it."""

    def curve(self, who: Who) -> RuntimeCurve | None: ...

    def known(self, who: Who) -> float: ...


class _Key:
    """Remembers the runtimes of one key: a weight for each bin; `unit` is the weight of a runtime
    added now.
    """

    __slots__ = ("curve", "ended", "ended_then", "prior", "unit", "weights")

    def __init__(self) -> None:
        self.weights = array("d", bytes(8 * BINS))
        self.unit = 1.0
        self.ended = 0
        self.curve: RuntimeCurve | None = None
        self.prior: RuntimeCurve | None = None
        self.ended_then = 0

    def add(self, bin: int, memory: float) -> None:
        self.unit *= 1 + 1 / memory
        if self.unit > REBASE:
            self.weights = array("d", (weight / self.unit for weight in self.weights))
            self.unit = 1.0
        self.weights[bin] += self.unit
        self.ended += 1

    def is_fresh(self, prior: RuntimeCurve | None, memory: float, news: float) -> bool:
        same = self.curve is not None and self.prior is prior
        return same and self.ended - self.ended_then < max(1.0, min(self.ended, memory) * news)

    def refresh(self, prior: RuntimeCurve | None, trust: float) -> RuntimeCurve:
        """Return for each bin the share of tasks that run longer, drawn towards the prior.

        The prior counts as `trust` more tasks. The curve is the posterior mean of a beta process
        (Hjort 1990) with the wider key's curve as its mean.
        """
        reached = list(accumulate(reversed(self.weights), initial=0.0))[::-1]
        more = trust * self.unit
        before = prior.past if prior is not None else [TAIL] * BINS
        past = [
            (got_past + more * share) / (got_there + more)
            for got_there, got_past, share in zip(reached, reached[1:], before, strict=False)
        ]
        self.curve = RuntimeCurve(past)
        self.prior, self.ended_then = prior, self.ended
        return self.curve


class History:
    """Remembers runtimes of ended tasks, and gives quantiles of the time that a running task has
    left.

    Adding costs O(keys of the path). Asking costs a bisection, and now and then a new curve (112
    bins). A key takes 1 kB, and 8 kB once it was asked. The `keys_max` keys that ended last are
    kept.
    """

    def __init__(self, *, keys_max: int = 20_000) -> None:
        self._keys: OrderedDict[Hashable, _Key] = OrderedDict()
        self._keys_max = keys_max

    def add(self, who: Who, runtime_s: float) -> None:
        """Add a task that ended after it had held its devices for `runtime_s` in total.

        Add only tasks that ended by themselves: a cancelled task says little about its runtime.
        """
        if not who:
            raise ValueError("a task needs at least one key, the widest: pass ((),)")
        bin = _bin(runtime_s)
        for depth, name in enumerate(reversed(who)):
            key = self._keys.get(name)
            if key is None:
                key = self._keys[name] = _Key()
            self._keys.move_to_end(name)
            key.add(bin, _at(MEMORY, depth))
        while len(self._keys) > self._keys_max:
            self._keys.popitem(last=False)

    def curve(self, who: Who) -> RuntimeCurve | None:
        """Return the distribution, in which each key is drawn towards the next wider one; None
        without history.
        """
        found: RuntimeCurve | None = None
        for depth, name in enumerate(reversed(who)):
            key = self._keys.get(name)
            if key is None:
                # A key without data of its own uses the curve of the wider key.
                continue
            if not key.is_fresh(found, _at(MEMORY, depth), _at(NEWS, depth)):
                key.refresh(found, _at(TRUST, depth))
            found = key.curve
        return found

    def known(self, who: Who) -> float:
        """Return how many runtimes of the most specific key are remembered, faded."""
        key = self._keys.get(who[0])
        return sum(key.weights) / key.unit if key is not None else 0.0

    def remaining(
        self,
        who: Who,
        *,
        elapsed_s: float = 0.0,
        quantiles: Sequence[float] = (0.1, 0.5, 0.9),
    ) -> tuple[float, ...] | None:
        """Return how long a task still runs after `elapsed_s`: seconds for each quantile; None if
        unknown.
        """
        curve = self.curve(who)
        if curve is None:
            return None
        return tuple(curve.draw(elapsed_s, 1 - q) - elapsed_s for q in quantiles)

    def median_s(self, who: Who) -> float | None:
        """Return one figure for a reservation (rule F7): the median runtime.

        The few longest tasks dominate the mean, so reservations by the mean would always be too
        late.
        """
        found = self.remaining(who, quantiles=(0.5,))
        return None if found is None else found[0]


def _bin(runtime_s: float) -> int:
    return min(BINS - 1, int(math.log(runtime_s) / STEP)) if runtime_s > 1.0 else 0


def _at(values: tuple[float, ...], depth: int) -> float:
    return values[min(depth, len(values) - 1)]


# --- the simulated island -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Describes a task that holds `width` devices. `elapsed_s` is its time in all turns, `turn_s`
    that in this turn, which lasts for `slice_s` or the scene's `slice_s`, whichever is longer.

    An elastic task that holds more devices than it needs works faster: in one second it does the
    work of `speed` seconds on the devices that it needs. `elapsed_s`, `left_s` and `max_duration_s`
    count the latter seconds.  `left_s` is how long it still works, if the task tells that itself.
    """

    tenant: str
    who: Who
    width: int
    elapsed_s: float
    left_s: float | None = None
    turn_s: float = 0.0
    slice_s: float = 0.0
    max_duration_s: float | None = None
    speed: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingTask:
    """Describes a task that waits for `width` devices; `elapsed_s` is how long it ran before its
    pause.
    """

    who: Who
    width: int
    elapsed_s: float = 0.0
    max_duration_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLine:
    """Lists a tenant's waiting tasks in the order in which the tenant would start them.

    `score_s` is the tenant's usage in device-seconds over its weight, running tasks included, faded
    to now.
    """

    score_s: float
    tasks: Sequence[WaitingTask]
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WithheldDevices:
    """Describes `number` devices that only the tasks of `tenant` may have from `begins_s` up to
    `ends_s`, in seconds from now. A name that no line has is for devices out of service.
    """

    tenant: str
    number: int
    begins_s: float
    ends_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Describes devices of one kind, the tasks that hold them and the tasks that wait for them.

    With `slice_s` tasks take turns of at least that length (rule F8); without it they run to their
    end. A task that held its devices for `fresh_s` gives way to its tenant's fresh tasks, too.
    `start_s` is the time from a launch to the first step. `half_life_s` is the half-life of usage
    (rule F2; 0: it never fades).
    """

    free: int
    held: Sequence[Held]
    lines: Mapping[str, TenantLine]
    slice_s: float = math.inf
    fresh_s: float = 0.0
    start_s: float = 0.0
    half_life_s: float = 0.0
    withheld: Sequence[WithheldDevices] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Gives seconds from now to the start: 80 % of such tasks start between `p10_s` and `p90_s`.

    `model_s` and `model_spread` are the model's answer alone (a median, and a deviation of its
    log). Keep them until the task has started, for `Calibration.learn`.
    """

    p10_s: float
    p50_s: float
    p90_s: float
    model_s: float
    model_spread: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """Says why there is no estimate: `code` is BLOCKED, TOO_WIDE, NO_HISTORY or TOO_FAR."""

    code: str
    message: str


# --- start times --------------------------------------------------------------------------------

# most tasks considered for one answer: as many as fit into half of the allowed 50 ms
EVENTS = 9_000
STARTS = 2_500  # most starts simulated in one run; after that the average speed so far is assumed
RUNS = 25
GROWN_AFTER = 64  # starts after which simulated turns are twice as long
LEAST_STEP_S = 1e-3  # so that time passes
SEED = 7
LEAST_SPREAD = 0.25  # in log time: even equal runs do not make the model certain
LONE_SPREAD = 0.5  # the spread if so many tasks are ahead that there was time for only one run
DAY_S = 86_400.0
FURTHEST_S = 30 * DAY_S  # latest end of an interval: later ones say too little to be told
WIDEST = 100.0  # an interval that ends this many times later than its median says too little, too
SHORT_S = 60.0  # as if the median were at least this
LARGEST_LOG = 500.0  # keeps `math.exp` in the range of a float


def starts_in(
    scene: Scene,
    tenant: str,
    place: int,
    history: Runtimes,
    *,
    calibration: Calibration | None = None,
    events: int = EVENTS,
) -> Estimate | Unknown:
    """Estimate when `scene.lines[tenant].tasks[place]` gets its next turn, in seconds from now.

    Each run draws a runtime for every task, and starts the tasks of the least served tenant first,
    as the island does. About `events` tasks are considered in all.
    """
    task = scene.lines[tenant].tasks[place]
    if task.width > _devices(scene):
        said = f"It needs {task.width} devices; {_devices(scene)} are there."
        return Unknown(code="TOO_WIDE", message=said)
    try:
        waits = _waits(_Cast(scene, tenant, place, history), events)
    except KeyError:
        return Unknown(
            code="NO_HISTORY", message="No task has ended by itself here yet to learn from."
        )
    logs = [math.log(max(1.0, wait)) for wait in waits]
    # A round of the island may take a second.
    told = _interval(max(1.0, median(waits)), math.hypot(LEAST_SPREAD, _deviation(logs)))
    return told if calibration is None else calibration.corrected(told)


def _waits(cast: _Cast, events: int) -> list[float]:
    waiting = sum(len(tasks) for tasks in cast.lines.values())
    runs = max(1, min(RUNS, events // (len(cast.held) + waiting)))
    chance = random.Random(SEED)
    return [_SimulatedRun(cast, chance).wait_s() for _ in range(runs)]


def _devices(scene: Scene) -> int:
    return scene.free + sum(held.width for held in scene.held)


def _deviation(logs: Sequence[float]) -> float:
    if len(logs) == 1:
        return LONE_SPREAD
    mean = fmean(logs)
    return math.sqrt(math.fsum((log - mean) ** 2 for log in logs) / (len(logs) - 1))


def _interval(
    model_s: float, spread: float, z: tuple[float, float, float] | None = None
) -> Estimate:
    # 10th, 50th and 90th percentile of a normal distribution
    low, middle, high = z if z is not None else (-1.2816, 0.0, 1.2816)
    p10_s, p50_s, p90_s = (
        model_s * math.exp(min(spread * part, LARGEST_LOG)) for part in (low, middle, high)
    )
    p10_s = p10_s if p10_s >= 1.0 else 0.0
    return Estimate(p10_s=p10_s, p50_s=p50_s, p90_s=p90_s, model_s=model_s, model_spread=spread)


def bounded(told: Estimate) -> Estimate | Unknown:
    """Return the estimate, or why it is unknown: no answer goes beyond `FURTHEST_S` or `WIDEST`."""
    latest_s = min(FURTHEST_S, WIDEST * max(SHORT_S, told.p50_s))
    if told.p90_s <= latest_s:
        return told
    if told.p50_s > FURTHEST_S:
        days = round(FURTHEST_S / DAY_S)
        return Unknown(code="TOO_FAR", message=f"Expected to wait longer than {days} days.")
    half, long = units.duration(told.p50_s), units.duration(latest_s)
    message = (
        "Earlier tasks ran for too different times: half of such tasks start within "
        f"{half}, but more than one in ten waits longer than {long}."
    )
    return Unknown(code="TOO_FAR", message=message)


def in_order(values: Sequence[float]) -> list[float]:
    """Return the closest values that never fall: each falling part becomes its geometric mean.

    This is isotonic regression of the logarithms, by pooling adjacent violators.
    """
    pools: list[tuple[float, int]] = []  # mean logarithm, number of values
    for value in values:
        mean, size = math.log(max(value, 1e-3)), 1
        while pools and pools[-1][0] > mean:
            before, more = pools.pop()
            mean, size = (mean * size + before * more) / (size + more), size + more
        pools.append((mean, size))
    found = [math.exp(mean) for mean, size in pools for _ in range(size)]
    return [
        value if _is_same(value, new) else new for value, new in zip(values, found, strict=True)
    ]


def _is_same(value: float, new: float) -> bool:
    return math.isclose(max(value, 1e-3), new, rel_tol=1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Holds what tasks of the same keys have in common: their curve, and how many runtimes are
    `known`.

    `known` counts those of the most specific key, which `peers` numbers. `peers` is None if the
    path is so short that tasks of that key are not alike.
    """

    curve: RuntimeCurve
    known: float
    peers: int | None


class _Cast:
    """Holds data that is the same in all runs. A curve is looked up when a run first needs it."""

    def __init__(self, scene: Scene, tenant: str, place: int, history: Runtimes) -> None:
        self.scene, self.tenant, self.ahead = scene, tenant, place
        self.devices = _devices(scene)
        self.scores = {name: line.score_s for name, line in scene.lines.items()}
        self.weights = {name: line.weight for name, line in scene.lines.items()}
        self.lines = {name: line.tasks for name, line in scene.lines.items() if line.tasks}
        self.lines[tenant] = self.lines[tenant][: place + 1]  # without the tasks behind the target
        self._history = history
        self._kinds: dict[Who, _Kind] = {}
        self._numbers: dict[Hashable, int] = {}
        self.held = [(held, self.kind(held.who).curve) for held in scene.held]
        changes = [(each.begins_s, each.tenant, each.number) for each in scene.withheld]
        changes += [(each.ends_s, each.tenant, -each.number) for each in scene.withheld]
        self.changes = sorted(changes, key=itemgetter(0))  # of what is withheld

    def kind(self, who: Who) -> _Kind:
        """Return the kind of tasks with these keys; raises KeyError if there is no history at
        all.
        """
        found = self._kinds.get(who)
        if found is None:
            curve = self._history.curve(who)
            if curve is None:
                raise KeyError(who)
            alike = len(who) >= len(TRUST)
            peers = self._numbers.setdefault(who[0], len(self._numbers)) if alike else None
            known = self._history.known(who) if alike else 0.0
            found = self._kinds[who] = _Kind(curve=curve, known=known, peers=peers)
        return found


@dataclass(slots=True, eq=False)
class _Stay:
    """A task on devices in a run: when its turn began and when it ends."""

    tenant: str
    width: int
    began_s: float
    ends_s: float
    ripe: bool = False  # its turn is over: it may be paused, and pays for each second
    gone: bool = False


@dataclass(frozen=True, slots=True)
class _Rest:
    """A paused task, with `left_s` to run."""

    width: int
    left_s: float


class _SimulatedTenant:
    """A tenant in a run: what waits, what may be paused, and its usage at `at_s`.

    Tasks that have not run go before paused ones, as fresh tasks do (rule F8).
    """

    __slots__ = ("at_s", "name", "pace", "paused", "ripe", "score_s", "waiting", "weight")

    def __init__(
        self, name: str, score_s: float, weight: float, waiting: Sequence[WaitingTask]
    ) -> None:
        self.name, self.score_s, self.weight, self.at_s = name, score_s, weight, 0.0
        self.pace = 0.0  # device-seconds over weight, for each second
        self.waiting = deque(waiting)
        self.paused = deque[_Rest]()
        self.ripe: list[_Stay] = []  # the latest last

    def head(self) -> WaitingTask | _Rest | None:
        if self.waiting:
            return self.waiting[0]
        return self.paused[0] if self.paused else None

    def take(self) -> WaitingTask | _Rest:
        return self.waiting.popleft() if self.waiting else self.paused.popleft()

    def accrue(self, now_s: float, half_life_s: float) -> None:
        if self.pace:
            charged_s = _charged_s(now_s, half_life_s) - _charged_s(self.at_s, half_life_s)
            self.score_s += self.pace * charged_s
        self.at_s = now_s


class _SimulatedRun:
    """Simulates one run from now on. Devices are counted and have no names.

    A turn is charged when it begins, and what is held beyond it as time passes, as on the island.
    Turns double every `GROWN_AFTER` starts: the further ahead, the coarser.
    """

    def __init__(self, cast: _Cast, chance: random.Random) -> None:
        self.cast, self.random = cast, chance.random
        self.now_s, self.free, self.starts = 0.0, cast.scene.free, 0
        self.slice_s = cast.scene.slice_s
        names = cast.scores.keys() | {held.tenant for held, _ in cast.held}
        self.sides = {
            name: _SimulatedTenant(
                name,
                cast.scores.get(name, math.inf),
                cast.weights.get(name, 1.0),
                cast.lines.get(name, ()),
            )
            for name in sorted(names)
        }
        self.before = cast.ahead  # tasks of the target's tenant that go before the target
        self.peers: dict[int, list[float]] = {}
        # when a stay ends or its turn does, and a tie breaker
        self.events: list[tuple[float, int, _Stay]] = []
        self.number = count()
        self.held = Counter[str]()  # devices by tenant
        self.withheld = Counter[str]()  # devices by the tenant that alone may have them
        self.changes = deque(cast.changes)  # of `withheld`, which are ahead
        for held, curve in cast.held:
            self._hold(held, curve)
        self._withhold()

    def wait_s(self) -> float:
        """Return when the target starts.

        If the run takes too long, the rest is extrapolated.
        """
        while not self._seat():
            if self.starts >= STARTS:
                return self.now_s * (1 + self._left_to_start() / self.starts)
            self._advance()
        return self.now_s

    def _left_to_start(self) -> float:
        """Estimate how many tasks still go before the target, if each is charged as much as those
        so far.
        """
        charged = sum(self.sides[name].score_s - score for name, score in self.cast.scores.items())
        charge = max(charged / self.starts, 1e-6)
        goal = self.sides[self.cast.tenant].score_s + self.before * charge
        others = (
            min(len(side.waiting), max(0.0, (goal - side.score_s) / charge))
            for name, side in self.sides.items()
            if name != self.cast.tenant
        )
        return self.before + sum(others)

    def _hold(self, held: Held, curve: RuntimeCurve) -> None:
        if held.left_s is None:
            runtime_s = curve.draw(held.elapsed_s, self.random())
        else:
            runtime_s = held.elapsed_s + held.left_s
        if held.max_duration_s is not None:
            runtime_s = max(held.elapsed_s, min(runtime_s, held.max_duration_s))
        left_s = (runtime_s - held.elapsed_s) / held.speed
        slice_s = max(self.slice_s, held.slice_s)
        self._sit(_Stay(held.tenant, held.width, -held.turn_s, left_s), slice_s)

    def _sit(self, stay: _Stay, slice_s: float) -> None:
        self.held[stay.tenant] += stay.width
        heappush(self.events, (stay.ends_s, next(self.number), stay))
        for lasts_s in {slice_s, max(slice_s, self.cast.scene.fresh_s)}:
            at_s = max(self.now_s, stay.began_s + lasts_s)
            if at_s < stay.ends_s:
                heappush(self.events, (at_s, next(self.number), stay))

    # --- time passes ---

    def _advance(self) -> None:
        """Go on to the next instant at which a stay ends, may be paused, or has to give way."""
        ends_s = self.events[0][0] if self.events else math.inf
        turns_s = self.changes[0][0] if self.changes else math.inf
        at_s = min(ends_s, turns_s, self._crossing_s())
        for side in self.sides.values():
            side.accrue(at_s, self.cast.scene.half_life_s)
        self.now_s = at_s
        while self.events and self.events[0][0] <= at_s:
            stay = heappop(self.events)[2]
            if stay.gone:
                continue
            if stay.ends_s <= at_s:
                self._let_go(stay)
            elif not stay.ripe:
                stay.ripe = True
                side = self.sides[stay.tenant]
                side.ripe.append(stay)
                side.pace += stay.width / side.weight
        self._withhold()

    def _withhold(self) -> None:
        """Change what is withheld as of now, and let others give up what then is too much."""
        while self.changes and self.changes[0][0] <= self.now_s:
            _, tenant, more = self.changes.popleft()
            self.withheld[tenant] += more
        if not self.withheld or self._room("") >= 0:
            return
        stays = {id(stay): stay for *_, stay in self.events if not stay.gone}
        for stay in sorted(stays.values(), key=self._pause_order):
            if self._room("") >= 0:
                return
            if self.held[stay.tenant] > self.withheld[stay.tenant]:
                self._pause(stay)

    def _pause_order(self, stay: _Stay) -> tuple[float, float, float]:
        """Return a key by which the best served and latest come first (rule F6)."""
        return -self.sides[stay.tenant].score_s, -stay.began_s, -stay.ends_s

    def _room(self, tenant: str) -> int:
        """Return how many free devices are not withheld from the tenant; below 0: too few are
        free.
        """
        if not self.withheld:
            return self.free
        others = (
            max(0, number - self.held[name])
            for name, number in self.withheld.items()
            if name != tenant
        )
        return self.free - sum(others)

    def _let_go(self, stay: _Stay) -> None:
        stay.gone = True
        self.free += stay.width
        self.held[stay.tenant] -= stay.width
        if stay.ripe:
            side = self.sides[stay.tenant]
            side.ripe.remove(stay)
            side.pace -= stay.width / side.weight

    def _crossing_s(self) -> float:
        """Return when usage gives the first waiting tenant the right to another tenant's device."""
        first = self._first()
        if first is None:
            return math.inf
        level_s = first.score_s + self._fee_s(first)
        gaps = (
            (level_s - side.score_s) / (side.pace - first.pace)
            for side in self.sides.values()
            if side.ripe and side.pace > first.pace and side.score_s <= level_s
        )
        gap_s = min(gaps, default=math.inf)
        half_life_s = self.cast.scene.half_life_s
        at_s = _charged_at_s(_charged_s(self.now_s, half_life_s) + gap_s, half_life_s)
        return max(at_s, self.now_s + LEAST_STEP_S)

    def _grown(self) -> float:
        return _grown(self.now_s, self.cast.scene.half_life_s)

    # --- starts ---

    def _first(self) -> _SimulatedTenant | None:
        """Return the least served tenant with a task that waits, of those first for which devices
        are withheld.
        """
        sides = [side for side in self.sides.values() if side.waiting or side.paused]
        if self.withheld:
            owed = [each for each in sides if self.held[each.name] < self.withheld[each.name]]
            sides = owed or sides
        return min(sides, key=lambda side: side.score_s, default=None)

    def _fee_s(self, side: _SimulatedTenant) -> float:
        """Return what the next turn of the tenant's first task adds to its usage."""
        head = side.head()
        assert head is not None
        return self.slice_s * head.width / side.weight * self._grown()

    def _seat(self) -> bool:
        """Start all tasks that may start now; True once the target has started."""
        while (first := self._first()) is not None:
            head = first.head()
            assert head is not None
            if head.width > self.cast.devices:
                self._pass_over(first)
            elif head.width <= self._room(first.name) or self._make_room(first, head.width):
                if self._start(first):
                    return True
            else:
                break
        return any(self._relieve(side) for side in self.sides.values() if side.waiting)

    def _pass_over(self, side: _SimulatedTenant) -> None:
        """Drop a task that can never fit, so that it blocks no other task."""
        side.take()
        self.before -= side is self.sides[self.cast.tenant]

    def _make_room(self, first: _SimulatedTenant, width: int) -> bool:
        """Pause tasks of better served tenants, the best served and latest first (rule F6)."""
        if self.slice_s == math.inf:
            return False
        level_s = first.score_s + self._fee_s(first)
        better = [s for s in self.sides.values() if s.ripe and s.score_s > level_s]
        better.sort(key=lambda side: -side.score_s)
        stays = [stay for side in better if side is not first for stay in self._lent(side)]
        if self._room(first.name) + sum(stay.width for stay in stays) < width:
            return False
        for stay in stays:
            if self._room(first.name) >= width:
                break
            self._pause(stay)
        return True

    def _lent(self, side: _SimulatedTenant) -> Iterator[_Stay]:
        """Yield what others may take from a tenant whose turns are over, the latest first."""
        most = self.held[side.name] - self.withheld[side.name]
        for stay in reversed(side.ripe):
            if (most := most - stay.width) < 0:
                return
            yield stay

    def _relieve(self, side: _SimulatedTenant) -> bool:
        """Let fresh tasks take the places of the tenant's own tasks that have had theirs (F8)."""
        settled_s = self.now_s - self.cast.scene.fresh_s
        while side.waiting:
            lacking = side.waiting[0].width - self._room(side.name)
            stay = next(
                (s for s in side.ripe if s.began_s <= settled_s and s.width >= lacking),
                None,
            )
            if stay is None:
                return False
            self._pause(stay)
            if self._start(side):
                return True
        return False

    def _pause(self, stay: _Stay) -> None:
        self._let_go(stay)
        rest = _Rest(stay.width, stay.ends_s - self.now_s)
        self.sides[stay.tenant].paused.append(rest)

    def _drawn_s(self, task: WaitingTask) -> float:
        """Draw a runtime for a task: from the curve, or the same as another task of its keys has.

        Tasks of one key are alike (Polya's urn). The less is known about the most specific key, the
        more its tasks depend on the first draw. So the runs differ as much as the answer is
        uncertain.
        """
        kind, random = self.cast.kind(task.who), self.random
        runtime_s = kind.curve.draw(task.elapsed_s, random())
        if kind.peers is not None:
            peers = self.peers.setdefault(kind.peers, [])
            if peers and random() * (len(peers) + TRUST[-1] + kind.known) < len(peers):
                runtime_s = peers[int(random() * len(peers))]
            peers.append(runtime_s)
        if task.max_duration_s is not None:
            runtime_s = min(runtime_s, task.max_duration_s)
        return max(0.0, runtime_s - task.elapsed_s)

    def _start(self, side: _SimulatedTenant) -> bool:
        """Start the tenant's first task and charge its turn; True if it is the target."""
        task = side.take()
        if side is self.sides[self.cast.tenant] and isinstance(task, WaitingTask):
            if self.before == 0:
                return True
            self.before -= 1
        left_s = task.left_s if isinstance(task, _Rest) else self._drawn_s(task)
        self.free -= task.width
        self.starts += 1
        if self.starts % GROWN_AFTER == 0:
            self.slice_s *= 2
        began_s = self.now_s + self.cast.scene.start_s
        self._sit(_Stay(side.name, task.width, began_s, began_s + left_s), self.slice_s)
        side.score_s += min(left_s, self.slice_s) * task.width / side.weight * self._grown()
        return False


def _grown(now_s: float, half_life_s: float) -> float:
    """Return how much more usage at `now_s` counts than usage of today, because older usage fades
    (rule F2).
    """
    return float(2 ** min(now_s / half_life_s, 500.0)) if half_life_s > 0 else 1.0


def _charged_s(until_s: float, half_life_s: float) -> float:
    """Return what a device that is held until then adds to usage, as usage of today."""
    if half_life_s <= 0:
        return until_s
    return (_grown(until_s, half_life_s) - 1) * half_life_s / math.log(2)


def _charged_at_s(charged_s: float, half_life_s: float) -> float:
    """Return until when a device has to be held to add so much to usage."""
    if half_life_s <= 0:
        return charged_s
    return half_life_s * math.log2(1 + charged_s * math.log(2) / half_life_s)


# --- calibration --------------------------------------------------------------------------------

# most answers remembered for each class: enough for several bursts, since errors in a burst are
# alike
WINDOW = 2_000
UNPROVEN_SPREAD = 1.2  # least spread, in log time, until enough answers have come true
ENOUGH = 30  # number of answers from which on a class is used
COVERAGE = 0.8
LESSON = 0.005  # by how much one miss moves the level
LEVELS = (0.01, 0.6)  # bounds of the level: the share of answers that may be missed


class _Window:
    """Keeps the errors of the latest answers, in spreads of the model; the oldest ones are
    dropped.
    """

    __slots__ = ("missed", "ordered", "recent")

    def __init__(self) -> None:
        self.recent: deque[float] = deque()
        self.ordered: list[float] = []
        self.missed = 1 - COVERAGE

    def add(self, off: float, hit: bool) -> None:
        if len(self.recent) == WINDOW:
            del self.ordered[bisect_left(self.ordered, self.recent.popleft())]
        self.recent.append(off)
        insort(self.ordered, off)
        # Adaptive conformal inference (Gibbs and Candes 2021): too many misses widen the interval.
        wanted = self.missed + LESSON * ((1 - COVERAGE) - (not hit))
        self.missed = min(max(wanted, LEVELS[0]), LEVELS[1])

    def quantile(self, share: float) -> float:
        place = share * (len(self.ordered) - 1)
        low = int(place)
        high = min(low + 1, len(self.ordered) - 1)
        return self.ordered[low] + (self.ordered[high] - self.ordered[low]) * (place - low)


class Calibration:
    """Corrects answers by the errors of earlier ones (conformal, online).

    It keeps the last WINDOW log ratios of the real to the modelled time, in units of the model's
    spread. One window is for all answers, the others for answers of about the same length (a factor
    of e); a window is used once it has ENOUGH. Classes by tenant or width did no better on the
    Philly trace.
    """

    def __init__(self) -> None:
        self._all = _Window()
        self._alike: dict[int, _Window] = {}

    def learn(self, told: Estimate, waited_s: float) -> None:
        """Learn that a task with this estimate waited `waited_s` from then on."""
        off = math.log(max(1.0, waited_s) / max(1.0, told.model_s)) / told.model_spread
        hit = told.p10_s <= waited_s <= told.p90_s
        for window in (self._all, self._alike.setdefault(_class(told), _Window())):
            window.add(off, hit)

    def corrected(self, told: Estimate) -> Estimate:
        """Return the model's answer, moved and made wider or narrower by the errors so far."""
        for window in (self._alike.get(_class(told)), self._all):
            if window is not None and len(window.ordered) >= ENOUGH:
                low, high = window.missed / 2, 1 - window.missed / 2
                z = (window.quantile(low), window.quantile(0.5), window.quantile(high))
                return _interval(told.model_s, told.model_spread, z)
        wide = 1.2816 * max(1.0, UNPROVEN_SPREAD / told.model_spread)
        return _interval(told.model_s, told.model_spread, (-wide, 0.0, wide))


def _class(told: Estimate) -> int:
    return int(math.log(told.model_s + 1))
