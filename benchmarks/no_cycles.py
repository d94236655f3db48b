"""Play up to a million random islands, and check that tasks never pause each other for ever.

    python -m benchmarks.no_cycles [--quick]

Each seed makes an island: a tree of tenants one to three deep, with weights, guarantees and limits;
devices; tasks that run and wait, with gangs, tiers and priorities. Rounds follow each other at one
instant until nothing moves any more. `judge` checks each decision against the rules by plain
arithmetic on plain tables, and shares no code with the scheduler.

Half of the islands are *timeless*: a slice has no length, nothing costs anything, and a task may be
asked again at once. There a cycle that slices would only slow down is visible, as the same tasks
would run again that ran before. (Two tasks may pause each other once. For a gang that straddles its
guarantee more gives way than was asked for, and some of it is claimed back.) In the other half a
slice has its length. There no task is paused twice at an instant, nor, as the clock goes on, twice
within a slice.

A sixth of all islands, from seed TIGHT on, are *tight*: they have one kind of device, and most
tenants have guarantees, often for more than there is. These are most likely to break a rule. In
another sixth, from seed ELASTIC on, many tasks are *elastic*, on loose islands and on tight ones:
they can use more devices than they need, and some hold them already. From BOUND on, islands are
like the elastic ones, and gangs stay on one of two hosts.

tests/core/scheduling/test_no_cycles.py runs the same function, `judge(seed)`, for some thousand
seeds.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise

from app.core.fairness.usage_decay import FIXED_POINT_BITS
from app.core.model.lifecycle import Move
from app.core.model.snapshot import (
    BoardDevice,
    BoardTask,
    BoardTenant,
    BoardUser,
    Plan,
    PlanDecision,
    Policy,
    Snapshot,
)
from app.core.scheduling.board import Board
from app.core.scheduling.cycle import cycle, decide
from app.core.scheduling.urgency import been_away
from benchmarks import Target, quick, report

SCENARIOS, QUICK = 1_000_000, 20_000
TIGHT, ELASTIC, BOUND = 1 << 32, 1 << 33, 1 << 34
CHUNK = 1000
NOW_S = 10_000.0
ROUNDS = 40  # limit at one instant; more means no standstill
STEP_S = 0.5
SECOND = 1_000_000
MINUTE_US = 60 * SECOND
PATIENCE_S = 500.0
GROW_AFTER_S = 2.0


class Unruly(Exception):
    """Raised if a round broke a rule; the message has the seed and the fault."""

    def __init__(self, seed: int, what: str) -> None:
        super().__init__(f"seed {seed}: {what}")


# --- random islands -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Odds:
    """Lists the probabilities with which an island is drawn.

    They are: kinds of devices, the fractions of tenants with a guarantee, a limit and a limit of
    running tasks, and the fraction of tasks that are elastic.
    """

    kinds: tuple[str, ...]
    guaranteed: float
    limited: float
    counted: float
    elastic: float = 0.0


LOOSELY = Odds(("cpu", "cpu", "cpu", "cuda"), 0.4, 0.3, 0.2)
TIGHTLY = Odds(("cpu",), 0.7, 0.2, 0.3)


def _odds(seed: int) -> Odds:
    if seed < ELASTIC:
        return TIGHTLY if seed >= TIGHT else LOOSELY
    return replace(TIGHTLY if seed % 4 > 1 else LOOSELY, elastic=0.6)


def island(seed: int, *, timeless: bool) -> Snapshot:
    """Return the island of a seed; at first no tenant is above a limit."""
    dice, odds = random.Random(seed), _odds(seed)
    tenants, leaves = _tenants(dice, odds)
    users = {
        id: BoardUser(
            id=id,
            tenant=id.split(":")[0],
            weight=dice.choice([1000, 1000, 2000]),
            faded_us=(dice.randint(0, 30) * SECOND) << FIXED_POINT_BITS,
        )
        for leaf in leaves
        for id in (f"{leaf}:u", f"{leaf}:v")
    }
    devices = {
        f"d{n}": BoardDevice(
            id=f"d{n}",
            host="g" if n == 2 else "h",
            kind=dice.choice(odds.kinds) if n else "cpu",
            memory_bytes=dice.choice([4, 8, 8]),
            cost=1000,
            lease_until_s=NOW_S + 1e6,
        )
        for n in range(dice.randint(1, 6))
    }
    policy = Policy(
        half_life_s=0.0,
        slice_min_s=0.0 if timeless else 1.0,
        slice_max_s=0.0 if timeless else 3.0,
        patience_s=PATIENCE_S,
        grow_after_s=0.0 if timeless else GROW_AFTER_S,
        homebound=seed % 8 > 3,
    )
    snapshot = Snapshot(
        island="random", policy=policy, tenants=tenants, users=users, devices=devices, tasks={}
    )
    drawn = replace(snapshot, tasks=_tasks(dice, odds, snapshot))
    return drawn if seed < BOUND else _bound(drawn)


def _bound(drawn: Snapshot) -> Snapshot:
    """Split the devices over two hosts; bind gangs to one host unless they run on both."""
    devices = {
        id: replace(device, host="gh"[n % 2])
        for n, (id, device) in enumerate(sorted(drawn.devices.items()))
    }
    tasks = {
        id: replace(
            task, one_host=task.width > 1 and len({devices[one].host for one in task.seats}) < 2
        )
        for id, task in drawn.tasks.items()
    }
    return replace(drawn, devices=devices, tasks=tasks)


def _tenants(dice: random.Random, odds: Odds) -> tuple[dict[str, BoardTenant], list[str]]:
    """Return a tree of tenants one to three deep, and the tenants without children."""
    tenants: dict[str, BoardTenant] = {}
    level: list[str | None] = [None]
    ends: list[str] = []
    for depth in range(dice.randint(1, 3)):
        below: list[str | None] = []
        for parent in level:
            if depth and dice.random() < 0.3:
                ends.append(parent or "")
                continue
            for n in range(dice.randint(1, 3)):
                tenant = _tenant(dice, odds, f"{parent or ''}{'abc'[n]}", parent)
                tenants[tenant.id] = tenant
                below.append(tenant.id)
        level = below
    return tenants, sorted(ends + [end for end in level if end is not None])


def _tenant(dice: random.Random, odds: Odds, id: str, parent: str | None) -> BoardTenant:
    guarantee = {"cpu": dice.randint(1, 3)} if dice.random() < odds.guaranteed else {}
    limit = {}
    if dice.random() < odds.limited:
        kind = dice.choice(["cpu", "*"])
        limit[kind] = guarantee.get("cpu", 0) + dice.randint(0 if guarantee else 1, 3)
    return BoardTenant(
        id=id,
        name=id,
        parent=parent,
        weight=dice.choice([500, 1000, 1000, 3000]),
        guarantee=guarantee,
        limit=limit,
        most_running=dice.randint(1, 3) if dice.random() < odds.counted else None,
    )


def _tasks(dice: random.Random, odds: Odds, snapshot: Snapshot) -> dict[str, BoardTask]:
    free = sorted(snapshot.devices)
    tables = Tables(snapshot)
    tasks: dict[str, BoardTask] = {}
    for n in range(dice.randint(2, 12)):
        task = _task(dice, odds, f"t{n:02}", dice.choice(sorted(snapshot.users)))
        fitting = [id for id in free if fits(snapshot.devices[id], task)]
        if dice.random() < 0.6 and len(fitting) >= task.width and not tables.over(task):
            seats = tuple(fitting[: _seats(dice, tables, task)])
            free = [id for id in free if id not in seats]
            task = _seated(dice, task, seats)
            tables.hold(task, 1)
        tasks[task.id] = task
    return tasks


def _seats(dice: random.Random, tables: Tables, task: BoardTask) -> int:
    """Return a number of devices for a task.

    Elastic tasks get more than they need, within limits.
    """
    if not task.elastic:
        return task.width
    more = dice.randint(0, task.width_max - task.width)
    while more and tables.over(task, grown=more):
        more -= 1
    return task.width + more


def _task(dice: random.Random, odds: Odds, id: str, user: str) -> BoardTask:
    ran = dice.random() < 0.4
    task = BoardTask(
        id=id,
        request=id,
        tenant=user.split(":")[0],
        user=user,
        state="waiting",
        epoch=int(ran),
        kind=dice.choice(odds.kinds),
        memory_bytes=dice.choice([0, 0, 8]),
        width=dice.choice([1, 1, 1, 2, 3]),
        tier=dice.choice(["basic", "standard", "standard", "premium"]),
        priority=dice.choice([0, 0, 0, 1]),
        submitted_s=NOW_S - dice.choice([1, 100, 100, 600]),
        waited_s=dice.choice([0, 0, 0, 600]),
        away=((NOW_S - 2000, NOW_S - 2000 + dice.choice([10, 1200])),) if ran else (),
        waiting_since_s=NOW_S - dice.choice([1, 5]) if ran else None,
        switch_us=dice.choice([0, 0, 40_000]),
    )
    if ran and task.switch_us:  # some of the tasks that ran have had their first minute
        task = replace(task, had_us=90 * SECOND)
    if odds.elastic and dice.random() < odds.elastic:
        task = replace(task, width_max=task.width + dice.choice([1, 2, 6]))
    return task


def _seated(dice: random.Random, task: BoardTask, seats: tuple[str, ...]) -> BoardTask:
    held_us = dice.choice([SECOND // 2, 10 * SECOND, 100 * SECOND])
    return replace(
        task,
        state="running",
        epoch=1,
        seats=seats,
        held_us=held_us,
        accrued_us=held_us,
        started_s=NOW_S - held_us / SECOND,
        resized_s=NOW_S - held_us / SECOND if len(seats) > task.width else None,
    )


def fits(device: BoardDevice, task: BoardTask) -> bool:
    return device.kind == task.kind and device.memory_bytes >= task.memory_bytes


# --- effects of a plan on the devices -----------------------------------------------------------


class Shop:
    """Simulates an island with devices that obey at once: a paused task waits, a launched task
    runs.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.users, self.tasks = dict(snapshot.users), dict(snapshot.tasks)
        self.first, self.now_s = snapshot, NOW_S
        self.board = Board.of(snapshot, now_s=NOW_S)

    def snapshot(self) -> Snapshot:
        tasks = {id: self._measured(task) for id, task in self.tasks.items()}
        waits = tuple(self.board.waits.values())
        return replace(self.first, users=dict(self.users), tasks=tasks, waits=waits)

    def _measured(self, task: BoardTask) -> BoardTask:
        if task.started_s is None:
            return task
        held_us = round((self.now_s - (task.held_since_s or 0.0)) * SECOND)
        return replace(task, held_us=held_us, accrued_us=held_us)

    def later(self, by_s: float) -> None:
        self.now_s += by_s
        self.board.at(self.now_s)

    def obey(self, plan: Plan) -> None:
        """Carry out a plan: first all pauses and splices, then all launches, as over time."""
        for decision in plan.decisions:
            if decision.move == Move.Pause:
                self._pause(self._measured(self.tasks[decision.task]))
            elif decision.move == Move.Splice:
                self._splice(self._measured(self.tasks[decision.task]), decision)
        for decision in plan.decisions:
            if decision.move == Move.Launch:
                self._start(self.board.tasks[decision.task])

    def _start(self, task: BoardTask) -> None:
        away, window_s = task.away, self.first.policy.tier_window_s
        if task.waiting_since_s is not None:
            away = been_away(away, task.waiting_since_s, self.now_s, window_s=window_s)
        self._tell(replace(task, state="running", started_s=self.now_s, away=away))

    def _charge(self, task: BoardTask) -> None:
        user, rate = self.users[task.user], task.cost or 1000 * len(task.seats)
        charge = (task.accrued_us * rate << FIXED_POINT_BITS) // 1000
        self.users[user.id] = replace(user, faded_us=user.faded_us + charge)

    def _splice(self, task: BoardTask, decision: PlanDecision) -> None:
        self._charge(task)
        self._tell(
            replace(
                task,
                seats=decision.devices,
                cost=decision.cost,
                resized_s=self.now_s,
                held_us=0,
                accrued_us=0,
            )
        )

    def _pause(self, task: BoardTask) -> None:
        self._charge(task)
        self._tell(
            replace(
                task,
                state="waiting",
                seats=(),
                started_s=None,
                resized_s=None,
                held_us=0,
                accrued_us=0,
                waiting_since_s=self.now_s,
            )
        )

    def _tell(self, task: BoardTask) -> None:
        self.tasks[task.id] = task
        self.board.set_task(task)


# --- the rules, on plain tables -----------------------------------------------------------------


@dataclass(slots=True)
class Tables:
    """Counts what is held now, by id: (tenant, kind) -> devices, and tenant -> running tasks.

    `held` are devices that tasks need, `grown` devices that elastic tasks hold beyond that.
    """

    snapshot: Snapshot
    held: Counter[tuple[str, str]] = field(default_factory=Counter)
    grown: Counter[tuple[str, str]] = field(default_factory=Counter)
    running: Counter[str] = field(default_factory=Counter)

    def above(self, tenant: str) -> list[str]:
        """Return the tenant and its ancestors, upwards."""
        found, at = [], self.snapshot.tenants.get(tenant)
        while at is not None:
            found.append(at.id)
            at = self.snapshot.tenants.get(at.parent or "")
        return found

    def hold(self, task: BoardTask, sign: int) -> None:
        for tenant in self.above(task.tenant):
            self.held[tenant, task.kind] += sign * task.width
            self.held[tenant, "*"] += sign * task.width
            self.running[tenant] += sign
            for kind in (task.kind, "*"):
                self.grown[tenant, kind] += sign * beyond(task)

    def over(self, task: BoardTask, more: int = 1, *, grown: int = 0) -> str | None:
        """Return the lowest tenant with a limit that `more` such tasks would exceed, or None.

        `grown` is the number of further devices that this task holds beyond what it needs.
        """
        for id in self.above(task.tenant):
            tenant = self.snapshot.tenants[id]
            most = tenant.most_running
            if most is not None and self.running[id] + more > most:
                return id
            for kind in (task.kind, "*"):
                most = tenant.limit.get(kind)
                held = self.held[id, kind] + self.grown[id, kind] + grown
                if most is not None and held + more * task.width > most:
                    return id
        return None

    def lends(self, id: str, kind: str, width: int = 1) -> bool:
        """True if the tenant holds at least `width` devices more than its guarantee."""
        guarantee = self.snapshot.tenants[id].guarantee
        return not guarantee or self.held[id, kind] - width >= guarantee.get(kind, 0)

    def spares(self, id: str, kind: str) -> bool:
        """True if the tenant holds more than its guarantee, with devices beyond tasks' need."""
        guarantee = self.snapshot.tenants[id].guarantee
        held = self.held[id, kind] + self.grown[id, kind]
        return not guarantee or held > guarantee.get(kind, 0)

    def owed(self, id: str, task: BoardTask) -> bool:
        """True if the tenant would be within its guarantee with the task."""
        guarantee = self.snapshot.tenants[id].guarantee
        return bool(guarantee) and self.held[id, task.kind] + task.width <= guarantee.get(
            task.kind, 0
        )

    def fits(self, id: str, kind: str) -> bool:
        """True if there are enough devices for the guarantees of the tenant and its siblings."""
        tenants, devices = self.snapshot.tenants, self.snapshot.devices.values()
        beside = [t for t in tenants.values() if t.parent == tenants[id].parent]
        promised = sum(tenant.guarantee.get(kind, 0) for tenant in beside)
        return promised <= sum(device.kind == kind for device in devices)

    def part(self, task: BoardTask, other: BoardTask) -> tuple[list[str], list[str]]:
        """Return for both tasks the tenants that are not common ancestors, upwards."""
        mine, theirs = self.above(task.tenant), self.above(other.tenant)
        return [id for id in mine if id not in theirs], [id for id in theirs if id not in mine]


def beyond(task: BoardTask) -> int:
    """Return the number of devices that the task holds beyond its need."""
    return len(task.seats) - task.width if task.elastic and task.seats else 0


def judge(seed: int) -> Counter[str]:
    """Play the island of a seed until nothing moves, and count events; raises Unruly."""
    timeless = seed % 2 == 0
    shop = Shop(island(seed, timeless=timeless))
    count: Counter[str] = Counter(islands=1)
    pauses = _stand_still(seed, shop, count)
    if timeless:
        pairs = set(pauses)
        count["for each other, without slices"] += sum((b, a) in pairs for a, b in pairs) // 2
        _nothing_is_owed(seed, shop)
    else:
        _go_on(seed, shop, count, pauses)
    return count


def _stand_still(seed: int, shop: Shop, count: Counter[str]) -> list[tuple[str, str]]:
    """Run rounds at one instant until nothing moves.

    Returns (paused task, for which task) pairs.
    """
    pauses, ran = list[tuple[str, str]](), set[frozenset[str]]()
    sizes = set[frozenset[tuple[str, int]]]()
    for n in range(ROUNDS):
        before = shop.snapshot()
        plan = cycle(shop.board)
        if n < 2 and seed % 4 < 2 and plan.decisions != decide(before, now_s=shop.now_s).decisions:
            raise Unruly(seed, f"the board made anew decides otherwise than {plan.decisions}")
        for what in _broken(before, plan):
            raise Unruly(seed, f"{what}, in {[(d.task, d.move) for d in plan.decisions]}")
        if not plan.decisions:
            _nothing_is_idle(seed, shop)
            return pauses
        count["rounds"] += 1
        mine = [(d.task, d.against) for d in plan.decisions if d.move == Move.Pause and d.against]
        count.update(d.rule for d in plan.decisions if d.move == Move.Pause)
        for one in plan.decisions:
            if one.move == Move.Splice:
                count["made smaller" if one.against else "grown"] += 1
        pauses += mine
        shop.obey(plan)
        if any(decision.rule in ("F7", "F9") for decision in plan.decisions):
            ran.clear()  # urgent tasks begin to wait anew, so running again is no cycle
            sizes.clear()
        runs = frozenset(task.id for task in shop.tasks.values() if task.seats)
        if runs in ran and mine:
            raise Unruly(seed, f"these run again, so this is a cycle: {sorted(runs)}, {pauses}")
        ran.add(runs)
        held = frozenset((task.id, len(task.seats)) for task in shop.tasks.values() if task.seats)
        if held in sizes:
            raise Unruly(seed, f"these hold as much again, so this is a cycle: {sorted(held)}")
        sizes.add(held)
    raise Unruly(seed, f"no standstill after {ROUNDS} rounds: {pauses[-12:]}")


def _go_on(seed: int, shop: Shop, count: Counter[str], first: list[tuple[str, str]]) -> None:
    """Play some more seconds, in which no task may be paused twice within a slice."""
    paused_s = {task: [shop.now_s] for task, _ in first}
    if len(paused_s) < len(first):
        raise Unruly(seed, f"somebody was paused twice at one instant: {first}")
    for _ in range(6):
        shop.later(STEP_S)
        for task, _ in _stand_still(seed, shop, count):
            paused_s.setdefault(task, []).append(shop.now_s)
    for task, instants in paused_s.items():
        for sooner, later in pairwise(instants):
            if later - sooner < shop.first.policy.slice_min_s:
                raise Unruly(seed, f"{task} was paused at {sooner} and again at {later}")


def _broken(before: Snapshot, plan: Plan) -> Iterator[str]:
    """Yield the violations of F4 to F6 by a round's decisions, taken in their order."""
    tables = Tables(before)
    holding = {id: task for id, task in before.tasks.items() if task.seats}
    for task in holding.values():
        tables.hold(task, 1)
    asked, grown = list[BoardTask](), False
    for decision in plan.decisions:
        task = before.tasks[decision.task]
        if decision.move == Move.Pause:
            gains = before.tasks[decision.against or ""]
            yield from _wronged(tables, task, gains, decision.rule)
            yield from _not_needed(tables, holding, task, gains, asked)
            asked.append(holding[task.id])
            tables.hold(holding.pop(task.id), -1)
        elif decision.move == Move.Splice:
            now = replace(holding[task.id], seats=decision.devices)
            if decision.against is None:
                grown = True
                yield from _overgrown(before, tables, holding, now)
            else:
                yield from _cut(tables, holding, now, before.tasks[decision.against])
                asked.append(holding[task.id])
            tables.hold(holding[task.id], -1)
            holding[task.id] = now
            tables.hold(now, 1)
        elif decision.move == Move.Launch:
            over = tables.over(task)
            if over is not None:
                yield f"{task.id} exceeds a limit of {over}"
            if _most(before, task, decision.devices) != task.width or grown:
                yield f"{task.id} got {decision.devices}"
            if asked:
                yield from _spared(tables, holding, asked, task, decision.devices)
            asked = []
            now = replace(task, seats=decision.devices)
            holding[task.id] = now
            tables.hold(now, 1)


def _goes_before(gains: BoardTask, victim: BoardTask) -> bool:
    """True if, by F8, `gains` goes before `victim`, a task of the same user.

    Higher priority goes first; after a minute, the fresh or the older task does.
    """
    if gains.priority != victim.priority:
        return gains.priority > victim.priority
    is_older = (gains.submitted_s, gains.id) < (victim.submitted_s, victim.id)
    held_us = (
        round(1e6 * (NOW_S - (victim.started_s or NOW_S))) if victim.resized_s else victim.held_us
    )
    return held_us >= MINUTE_US and (gains.had_us < MINUTE_US or is_older)


def _wronged(tables: Tables, victim: BoardTask, gains: BoardTask, rule: str) -> Iterator[str]:
    """Yield faults if the victim may not be asked at all before it gives way (F4, F5)."""
    if victim.user == gains.user:
        if rule not in ("F7", "F9") and not _goes_before(gains, victim):
            yield f"{victim.id} gave way to {gains.id}, which does not go before it"
        return
    mine, theirs = tables.part(gains, victim)
    lent = all(tables.lends(id, gains.kind) for id in theirs)
    owed = bool(mine) and tables.owed(mine[-1], gains)
    if not owed and not all(tables.lends(id, gains.kind, victim.width) for id in theirs):
        yield f"{victim.id} was within a guarantee and gave way to {gains.id}, who was not"
    if rule == "F5" and not (lent and owed):
        yield f"{victim.id} gave way to {gains.id} by F5, lent {lent}, owed {owed}"


def _spared(
    tables: Tables,
    holding: dict[str, BoardTask],
    asked: list[BoardTask],
    task: BoardTask,
    seats: Sequence[str],
) -> Iterator[str]:
    """Yield a fault for each victim without which the task would have fit, too; on its host if
    bound (F5).
    """
    devices = tables.snapshot.devices
    if task.one_host:
        host = devices[seats[0]].host
        devices = {id: device for id, device in devices.items() if device.host == host}
    held = {id for other in holding.values() for id in other.seats}
    for spared in asked:
        now = holding.get(spared.id)
        could = [spared] if now is None else _one_more(spared, now)
        for kept in could:
            free = [id for id in devices if id not in held and id not in kept.seats]
            if sum(fits(devices[id], task) for id in free) < task.width:
                continue
            _swap(tables, now, kept)
            if tables.over(task) is None:
                yield f"{spared.id} could have kept {kept.seats}: {task.id} needs less"
            _swap(tables, kept, now)


def _one_more(had: BoardTask, now: BoardTask) -> list[BoardTask]:
    """Return the task with one more of the devices that it gave back, for each of them."""
    gone = [id for id in had.seats if id not in now.seats]
    return [replace(now, seats=(*now.seats, id)) for id in gone]


def _swap(tables: Tables, now: BoardTask | None, then: BoardTask | None) -> None:
    for task, sign in ((now, -1), (then, 1)):
        if task is not None:
            tables.hold(task, sign)


def _cut(
    tables: Tables, holding: dict[str, BoardTask], now: BoardTask, gains: BoardTask
) -> Iterator[str]:
    """Yield faults of a shrink: an elastic task gives back only devices beyond its need, and to
    borrowers only lent ones.
    """
    had = holding[now.id]
    if not set(now.seats) < set(had.seats) or len(now.seats) < now.width:
        yield f"{now.id} was on {had.seats}, is on {now.seats}, and needs {now.width}"
    if _home(tables) and now.seats[0] != had.seats[0]:
        yield f"{now.id} gave its home back"
    mine, theirs = tables.part(gains, now)
    if now.user == gains.user:
        return
    spare = _spare(tables, theirs, now.kind)
    if len(had.seats) - len(now.seats) > spare and not (mine and tables.owed(mine[-1], gains)):
        yield f"{now.id} gave back what is guaranteed to {theirs}, to {gains.id}, who borrows"


def _home(tables: Tables) -> int:
    """Return the number of devices beyond its need that an elastic task never gives back."""
    return int(tables.snapshot.policy.homebound)


def _spare(tables: Tables, tenants: list[str], kind: str) -> int:
    """Return the number of devices that each of these tenants holds beyond its guarantee."""
    spare = len(tables.snapshot.devices)
    for id in tenants:
        if guarantee := tables.snapshot.tenants[id].guarantee:
            held = tables.held[id, kind] + tables.grown[id, kind]
            spare = min(spare, held - guarantee.get(kind, 0))
    return spare


def _not_needed(
    tables: Tables,
    holding: dict[str, BoardTask],
    victim: BoardTask,
    gains: BoardTask,
    asked: list[BoardTask],
) -> Iterator[str]:
    """Check that no task is paused where tasks with more than they need could have given enough.

    Elastic tasks are checked one after the other, each for what is lent; so the check sees slightly
    less than there is. For a gang bound to one host only previously free devices are checked.
    """
    devices = tables.snapshot.devices
    held = {id for other in holding.values() for id in other.seats}
    if gains.one_host and asked:
        return
    if gains.one_host:
        free = [id for id in devices if id not in held and fits(devices[id], gains)]
        if _most(tables.snapshot, gains, free) >= gains.width and tables.over(gains) is None:
            yield f"{victim.id} was paused for {gains.id}, who could have had {free}"
        return
    have = sum(fits(device, gains) for id, device in devices.items() if id not in held)
    after = [task for task in holding.values() if beyond(task) and task.kind == gains.kind]
    best, cut = 0, list[tuple[BoardTask, BoardTask]]()
    for task in after:
        _, theirs = tables.part(gains, task)
        spare = beyond(task) if task.user == gains.user else _spare(tables, theirs, task.kind)
        suit = sum(fits(devices[id], gains) for id in task.seats[_home(tables) :])
        given = max(0, min(spare, suit, beyond(task)))
        cut.append((task, replace(task, seats=task.seats[: len(task.seats) - given])))
        _swap(tables, *cut[-1])
        best += given
    if have + best >= gains.width and tables.over(gains) is None:
        yield f"{victim.id} was paused for {gains.id}, who could have had {best} that were lent"
    for task, smaller in cut:
        _swap(tables, smaller, task)


def _overgrown(
    before: Snapshot, tables: Tables, holding: dict[str, BoardTask], now: BoardTask
) -> Iterator[str]:
    """Yield faults of growing: it takes only free devices, keeps to limits, and never comes before
    waiting tasks.
    """
    had, devices = holding[now.id], before.devices
    held = {id for other in holding.values() for id in other.seats}
    new = set(now.seats) - set(had.seats)
    if not set(had.seats) < set(now.seats) or len(now.seats) > now.width_max or new & held:
        yield f"{now.id} was on {had.seats}, is on {now.seats}, of at most {now.width_max}"
    if not all(fits(devices[id], now) and _near(before, had, id) for id in new):
        yield f"{now.id} grew from {had.seats} onto {new}, which do not fit"
    if (over := tables.over(now, 0, grown=len(new))) is not None:
        yield f"{now.id} grew beyond a limit of {over}"
    for task in before.tasks.values():
        if task.state != "waiting" or task.id in holding or tables.over(task) is not None:
            continue
        free = [id for id in devices if id not in held and fits(devices[id], task)]
        if task.kind == now.kind and _most(before, task, free) >= task.width:
            yield f"{now.id} grew while {task.id} waited, who could have had {free}"


def _most(snapshot: Snapshot, task: BoardTask, ids: Sequence[str]) -> int:
    """Return how many of these devices the task could have at once; on one host if the task is
    bound.
    """
    hosts = Counter(snapshot.devices[id].host for id in ids)
    return max(hosts.values(), default=0) if task.one_host else len(ids)


def _near(snapshot: Snapshot, task: BoardTask, id: str) -> bool:
    """True if the task may grow onto this device, by the device's host."""
    devices = snapshot.devices
    return not snapshot.policy.homebound or devices[id].host == devices[task.seats[0]].host


def _nothing_is_idle(seed: int, shop: Shop) -> None:
    """Check that no task waits that has quota and devices, unless devices are kept for a gang."""
    snapshot = shop.snapshot()
    tables, waiting, held = _standing(snapshot)
    gangs = {task.kind for task in waiting if task.width > 1}
    for task in waiting:
        free = [d for d in snapshot.devices.values() if d.id not in held and fits(d, task)]
        if task.kind not in gangs and len(free) >= task.width and tables.over(task) is None:
            raise Unruly(seed, f"{task.id} waits and {free[0].id} is free")
    if seed % 2 == 0:
        _nothing_is_left(seed, snapshot, tables, held)


def _nothing_is_left(seed: int, snapshot: Snapshot, tables: Tables, held: set[str]) -> None:
    """Check that no device stays free that an elastic task could use at once."""
    wanted = {task.kind for task in snapshot.tasks.values() if task.state == "waiting"}
    for task in snapshot.tasks.values():
        could = task.seats and len(task.seats) < task.width_max and task.kind not in wanted
        free = [d.id for d in snapshot.devices.values() if d.id not in held and fits(d, task)]
        if (
            could
            and any(_near(snapshot, task, id) for id in free)
            and tables.over(task, 0, grown=1) is None
        ):
            raise Unruly(seed, f"{task.id} is on {task.seats}, and {free} are free")


def _standing(snapshot: Snapshot) -> tuple[Tables, list[BoardTask], set[str]]:
    tables = Tables(snapshot)
    running = [task for task in snapshot.tasks.values() if task.seats]
    for task in running:
        tables.hold(task, 1)
    waiting = [task for task in snapshot.tasks.values() if task.state == "waiting"]
    return tables, waiting, {id for task in running for id in task.seats}


def _nothing_is_owed(seed: int, shop: Shop) -> None:
    """Check by F5 that no task waits, at the standstill, within a guarantee for a device that is
    only lent.

    Only single tasks are checked, and only tenants with a guarantee at every level below the common
    ancestor. A victim that its tier (F9) or its patience (F7) protects does not count. Nor does a
    gang that is lent in part, where guarantees exceed the devices.
    """
    tables, waiting, _ = _standing(shop.snapshot())
    devices = shop.first.devices
    if any(
        shop.board.urgency.patience.total_s(task) <= shop.board.policy.patience_s
        for task in waiting
    ):
        return
    for task in waiting:
        if task.width > 1 or tables.over(task) is not None:
            continue
        for victim in tables.snapshot.tasks.values():
            if not victim.seats or victim.kind != task.kind or victim.tier != "basic":
                continue
            mine, theirs = tables.part(task, victim)
            if victim.waited_s >= PATIENCE_S and victim.width > 1:
                continue
            if not any(fits(devices[id], task) for id in victim.seats) or not mine:
                continue
            lent = theirs and all(tables.lends(id, task.kind) for id in theirs)
            whole = all(tables.lends(id, task.kind, victim.width) for id in theirs)
            if lent and not whole and not tables.fits(theirs[-1], task.kind):
                continue
            if lent and all(tables.owed(id, task) for id in mine):
                raise Unruly(seed, f"{task.id} waits within a guarantee, {victim.id} borrows")


# --- many ---------------------------------------------------------------------------------------


def _judge_many(first: int) -> tuple[Counter[str], list[str]]:
    count, broken = Counter[str](), list[str]()
    for seed in range(first, first + CHUNK):
        try:
            count += judge(seed)
        except Unruly as unruly:
            count["islands"] += 1
            broken.append(str(unruly))
    return count, broken


def main() -> int:
    loose = QUICK if quick() else SCENARIOS
    tight = elastic = loose // 4
    islands = loose + tight + elastic
    began_s, count = time.perf_counter(), Counter[str]()
    broken = list[str]()
    first = (
        *range(0, loose, CHUNK),
        *range(TIGHT, TIGHT + tight, CHUNK),
        *range(ELASTIC, ELASTIC + elastic, CHUNK),
    )
    with ProcessPoolExecutor(2) as pool:
        for done, unruly in pool.map(_judge_many, first):
            count += done
            broken += unruly
    peers = {**count, "seconds": round(time.perf_counter() - began_s, 1)}
    targets = [
        Target(
            name="random islands judged", value=count["islands"], unit="", op=">=", bound=islands
        ),
        Target(name="islands that broke a rule", value=len(broken), unit="", op="<=", bound=0),
    ]
    return report("no_cycles", targets, peers | {"broken": broken[:20]})


if __name__ == "__main__":
    sys.exit(main())
