"""Simulate an island: a virtual clock and imaginary devices around the real `cycle`.

Imaginary devices obey like real ones.  A Launch prepares a task and seats it when its devices are
free.  A Pause releases the devices at the next safe point and then saves the image.  Time jumps
from one event to the next, so an hour of an island takes a moment.  Equal input gives an equal
report.

With `checked` every step is checked: a broken invariant raises Broken, with the latest decisions.
The updated board must also make the same decisions as a board built anew.  Without `checked`, a
step costs what changes in it, so years of a cluster take seconds.

In a simulation devices stay up, and no person cancels or holds a task: the tests of `decide` cover
lost devices and requested actions. Members of a lot with a rule `stop` are held at its rungs, and
budgets are counted on the virtual clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from types import MappingProxyType

from app.core.fairness.budget import ALL, STOPS, Budget, Period
from app.core.fairness.fair_tree import lane
from app.core.fairness.reservation import owed
from app.core.fairness.usage_decay import faded, rebase
from app.core.model import lifecycle
from app.core.model.device_choice import WHOLE_MILLI, choice_in, with_reservation
from app.core.model.lifecycle import NOT_STARTED, ON_A_DEVICE, Move, State
from app.core.model.reserved_task import ReservationStanding
from app.core.model.rungs import HELD_AT_RUNG
from app.core.model.snapshot import (
    BoardDevice,
    BoardTask,
    BoardTenant,
    BoardUser,
    Conditions,
    Plan,
    PlanDecision,
    Policy,
    Snapshot,
    changed,
)
from app.core.scheduling.board import Board
from app.core.scheduling.cycle import cycle, decide
from app.core.scheduling.pool import part_bytes
from app.core.scheduling.reclaim.preemption import shut_by
from app.core.scheduling.stays import HOLDS_A_SEAT, slice_us
from app.core.scheduling.urgency import been_away
from app.core.simulation.device_meter import Interval, Meter
from app.core.simulation.replayed_budgets import Charged, Rate, ReplayedBudgets
from app.core.simulation.replayed_lot import LotRule, ReplayedLot, RungMark
from app.core.simulation.replayed_reservations import (
    Maintained,
    ReplayedReservations,
    ReservedFor,
)

STORY_LINES = 20  # most lines of the timeline that Broken shows
# most rounds at one instant, or in a row that ask for another round at once
STANDSTILL_ROUNDS = 100
_NO_LOTS: Mapping[str, LotRule] = MappingProxyType({})
_NO_BUDGETS: Mapping[str, Budget] = MappingProxyType({})
TOLD_TASKS = 5  # most tasks that are named when the clock stands still
# T0 moves on after so many half-lives, so that numbers do not grow with the time replayed
REBASE_HALF_LIVES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A task that arrives at `at_s` and needs `width` devices for `work_s` seconds."""

    at_s: float
    task: str
    tenant: str
    user: str
    work_s: float  # time on `width_max` devices, if the task is elastic
    width: int = 1
    # Most devices of an elastic task. On k of them it steps at k / `width_max` of the speed. 0: it
    # uses `width`.
    width_max: int = 0
    kind: str = "cpu"
    memory_bytes: int = 0
    choice: str = ""
    priority: int = 0
    tier: str = "standard"
    after: tuple[str, ...] = ()
    # what the scheduler believes of the work beforehand; None if unknown
    expected_s: float | None = None
    # name under which the report counts the task, if that is not its tenant
    owner: str | None = None
    request: str = ""  # tasks of one request finish one after the other; "": a request of its own
    reservation: str = ""  # in whose windows alone it runs; "": at any time
    lot: str = ""  # the lot with a rule `stop` of which it is a member
    rungs: tuple[RungMark, ...] = ()

    @property
    def counted_for(self) -> tuple[str, str]:
        """(owner, kind of device)"""
        return self.owner or self.tenant, self.kind

    @property
    def ranks(self) -> int:
        """The number of devices at which the task is fastest."""
        return max(self.width, self.width_max)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Says how long each action takes on imaginary devices."""

    # to prepare a task; its devices may still be held by another task meanwhile
    start_s: float = 0.0
    pause_s: float = 0.0  # until the next safe point
    image_s: float = 0.0  # after the safe point, until the devices are free
    resume_s: float = 0.0  # of a paused task on its devices, before it steps again
    save_s: float = 0.0  # until the image of a paused task is durable
    # After the safe point, on all devices of before and after. None: (`image_s` + `resume_s`) / 2.
    resize_s: float | None = None

    @property
    def resizing_s(self) -> float:
        return (self.image_s + self.resume_s) / 2 if self.resize_s is None else self.resize_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StoryLine:
    """A decision, and when it was made."""

    at_s: float
    decision: PlanDecision


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a simulation."""

    device_s: Mapping[str, float]  # device-seconds that each owner held
    waits_s: Mapping[str, float]  # by task: from its arrival to its first start
    # by task: all the time between arrival and end in which it did not step: waits, pauses,
    # switches, and what it lost as an elastic task with fewer devices than it can use
    lost_s: Mapping[str, float]
    pauses: Mapping[str, int]
    resizes: Mapping[str, int]  # by task: how often it was made larger or smaller
    finished: Mapping[str, float]  # by task: when it ended
    timeline: tuple[StoryLine, ...]  # empty unless it was kept
    until_s: float  # when the clock stopped
    intervals: tuple[Interval, ...] = ()  # what was held and wanted over time
    # what was charged of each budget: (tenant or user, kind, period) -> micro-device-seconds
    spent_us: Mapping[tuple[str, str, Period], int] = field(default_factory=dict)


class InvariantBroken(Exception):
    """Raised for a broken invariant; says which one, when, and the decisions before."""

    def __init__(self, what: str, *, at_s: float, timeline: Iterable[StoryLine]) -> None:
        self.what, self.at_s = what, at_s
        told = [f"at {at_s:.6f} s: {what}"]
        for line in list(timeline)[-STORY_LINES:]:
            made = line.decision
            told.append(f"{line.at_s:.6f} {made.move} {made.task} {' '.join(made.devices)}")
        super().__init__("\n".join(told))


class SimulationStopped(Exception):
    """Raised when `go_on` returned False, at `at_s`, with `done` tasks finished."""

    def __init__(self, *, at_s: float, done: int) -> None:
        self.at_s, self.done = at_s, done
        super().__init__(f"stopped at {at_s:.0f} s with {done} tasks done")


def simulate(
    arrivals: Iterable[Arrival],
    devices: Iterable[BoardDevice],
    tenants: Iterable[BoardTenant],
    policy: Policy,
    *,
    costs: Costs | None = None,
    until_s: float = math.inf,
    checked: bool = True,
    keep_timeline: bool = True,
    users: Iterable[BoardUser] = (),
    lots: Mapping[str, LotRule] = _NO_LOTS,
    budgets: Mapping[str, Budget] = _NO_BUDGETS,
    reserved: Sequence[ReservedFor] = (),
    maintained: Sequence[Maintained] = (),
    begins_us: int = 0,
    go_on: Callable[[], bool] = lambda: True,
) -> Report:
    """Run an island from 0 s until all tasks are done or `until_s` is reached.

    `users` need only hold users with a weight other than 1.  `budgets` are those of tenants and
    users by id; their periods follow the clock, which is at 0 s at `begins_us` (µs since 1970), and
    so do the windows of reservations and maintenance.
    `go_on` is called in each round.  Raises Broken if an invariant does not hold, and Stopped if
    `go_on` returns False.
    """
    world = World(
        arrivals,
        devices,
        tenants,
        policy,
        costs or Costs(),
        users=users,
        lots=lots,
        budgets=budgets,
        reserved=reserved,
        maintained=maintained,
        begins_us=begins_us,
    )
    world.keep_timeline = checked or keep_timeline
    rounds_at_us, rounds, at_once = -1, 0, 0
    while (at_us := world.next_us()) is not None and at_us <= until_s * 1e6:
        world.advance(at_us)
        rounds = rounds + 1 if at_us == rounds_at_us else 1
        rounds_at_us = at_us
        if not go_on():
            raise SimulationStopped(at_s=world.now_s, done=world.done)
        seen = world.snapshot() if checked else None
        plan = cycle(world.board)
        at_once = at_once + 1 if is_hurried(plan) else 0
        if max(rounds, at_once) > STANDSTILL_ROUNDS:
            raise InvariantBroken(_standstill(world), at_s=world.now_s, timeline=world.timeline)
        world.obey(plan)
        if seen is not None:
            check(world, replace(seen, lifts=tuple(world.board.lifts.values())), plan)
    if math.isfinite(until_s):
        world.advance(_us(until_s))
    return world.report()


def is_hurried(plan: Plan) -> bool:
    """True if a plan asks for another round no later than its own time; no plan should."""
    return plan.look_again_s is not None and plan.look_again_s <= plan.now_s


def _standstill(world: World) -> str:
    """Name the waiting tasks, beginning with the ones looked at just now."""
    board = world.board
    waiting = [task.id for task in board.tasks.values() if task.state == State.waiting]
    looked_at = sorted((board.memory.tried.keys() | board.memory.in_the_way).intersection(waiting))
    named = looked_at + [id for id in sorted(waiting) if id not in looked_at]
    more = f" and {len(named) - TOLD_TASKS} more" if len(named) > TOLD_TASKS else ""
    told = ", ".join(named[:TOLD_TASKS]) + more if named else "none"
    return f"the clock stands still; tasks that wait: {told}"


# --- the world ----------------------------------------------------------------------------------


#: A future report of a device: (time in µs, order, a Move or "Saved", "ready" or "rung", task,
#: epoch).  The report counts only if the epoch still holds then.
_Event = tuple[int, int, str, str, int]


@dataclass(slots=True)
class _Run:
    """Facts about a task beyond what the island sees.

    Work is in device-microseconds, so it is a whole number on any number of devices.
    """

    arrival: Arrival
    left_us: int
    speed: int = 0  # devices on which the task steps, in this stay
    steps_from_us: int = 0  # when the task begins to step, in this stay
    safe_us: float = math.inf  # when the task stops stepping, if it was told to pause or to resize
    ends_us: int = -1  # when the task will be done if nothing changes
    first_us: int | None = None
    finished_us: int | None = None
    pauses: int = 0
    resizes: int = 0
    cost: int = 0  # cost of a second once the task has been made smaller
    ready: bool = False
    # since when the task has held exactly its present devices: from its launch, or from when the
    # task before it has left
    held_from_us: int | None = None
    booked_us: int = 0  # how long it held them before that at another cost
    counted_us: int = 0  # how long of what it holds now is counted in budgets
    rung: int = 0  # rungs that it has reached
    rung_us: int = -1  # when it will reach the next one if nothing changes
    rested_us: int = 0  # when it last came to rest at a rung

    def step(self, until_us: int) -> None:
        """Count the work done until `until_us`."""
        stepped_us = max(0, until_us - self.steps_from_us) * self.speed
        self.left_us -= min(stepped_us, self.left_us)

    def reaches_us(self) -> int:
        """Return when it reaches its next rung in this stay."""
        arrival = self.arrival
        after_us = min(_us(arrival.rungs[self.rung].work_s), _us(arrival.work_s)) * arrival.ranks
        more_us = self.left_us - (_us(arrival.work_s) * arrival.ranks - after_us)
        return self.steps_from_us + -(-max(0, more_us) // self.speed)


class World:
    """Devices, tasks and the clock.  The island's beliefs always match this world."""

    def __init__(
        self,
        arrivals: Iterable[Arrival],
        devices: Iterable[BoardDevice],
        tenants: Iterable[BoardTenant],
        policy: Policy,
        costs: Costs,
        *,
        users: Iterable[BoardUser] = (),
        lots: Mapping[str, LotRule] = _NO_LOTS,
        budgets: Mapping[str, Budget] = _NO_BUDGETS,
        reserved: Sequence[ReservedFor] = (),
        maintained: Sequence[Maintained] = (),
        begins_us: int = 0,
    ) -> None:
        self.policy, self.costs = policy, costs
        self.arrivals = sorted(arrivals, key=lambda arrival: (arrival.at_s, arrival.task))
        self._comes_us = [_us(arrival.at_s) for arrival in self.arrivals]
        self.tenants = {tenant.id: tenant for tenant in tenants}
        self.users = {a.user: BoardUser(id=a.user, tenant=a.tenant) for a in self.arrivals}
        self.users |= {user.id: user for user in users if user.id in self.users}
        self.devices = {d.id: replace(d, lease_until_s=math.inf) for d in devices}
        self._faded = {id: user.faded_us for id, user in self.users.items()}
        self.board = Board.of(self._seen({}), now_s=0.0)
        self.now_us = 0
        self.timeline: list[StoryLine] = []
        self.keep_timeline = True
        self.done = 0
        self.seated: dict[str, dict[str, int]] = {}  # device -> tasks on it, with thousandths
        self.runs: dict[str, _Run] = {}
        self._events: list[_Event] = []
        self._seq = 0
        self._came = 0
        self._look_again_us: int | None = None
        self._device_us: Counter[str] = Counter()
        self._meter = Meter()
        self._waited_for: dict[str, list[str]] = {}
        members = Counter(arrival.lot for arrival in self.arrivals)
        self.lots = {id: ReplayedLot(rule, coming=members[id]) for id, rule in lots.items()}
        self._unmade: dict[str, Arrival] = {}  # members of lots that have arrived
        parents = {id: tenant.parent for id, tenant in self.tenants.items()}
        self.budgets = ReplayedBudgets(budgets, parents, begins_us)
        self._budgets_us: int | None = None  # when a budget changes what is in force
        # kinds of which a budget lets nothing start, by tenant or user, and what waits for that
        self._stops: dict[str, set[str]] = {}
        self._barred: Counter[tuple[str, str]] = Counter()  # as for the meter
        self.reservations = ReplayedReservations(reserved, maintained, begins_us)
        # reservation -> how tasks that name it stood when it was looked at last
        named = {arrival.reservation for arrival in self.arrivals} - {""}
        self._standing = dict.fromkeys(named, ReservationStanding.free)
        self._confining = named  # those whose tasks may have their devices alone
        self._turns_us: float = 0  # when that may have changed
        # what is guaranteed for ever
        self._guaranteed = {id: tenant.guarantee for id, tenant in self.tenants.items()}

    @property
    def now_s(self) -> float:
        return self.now_us / 1e6

    @property
    def tasks(self) -> dict[str, BoardTask]:
        return self.board.tasks

    # --- time passes ---

    def next_us(self) -> int | None:
        """Return when something happens next; None if nothing ever will."""
        while self._events and self._outdated(self._events[0]):
            heappop(self._events)
        at_us = self._look_again_us if self.tasks else None
        if self._events and (at_us is None or self._events[0][0] < at_us):
            at_us = self._events[0][0]
        if self._came < len(self.arrivals):
            comes_us = self._comes_us[self._came]
            at_us = comes_us if at_us is None else min(at_us, comes_us)
        if self._budgets_us is not None and self.tasks:
            at_us = self._budgets_us if at_us is None else min(at_us, self._budgets_us)
        if self.tasks and (self.reservations.windows or self.reservations.maintained):
            reserved_us = self.reservations.next_us(self.now_us)
            if reserved_us is not None:
                at_us = reserved_us if at_us is None else min(at_us, reserved_us)
        return at_us

    def advance(self, at_us: int) -> None:
        """Process everything that happens until `at_us`."""
        while self._events and self._events[0][0] <= at_us:
            event = heappop(self._events)
            self._let_it_be(event[0])
            self._happen(event)
        self._let_it_be(at_us)
        while self._came < len(self.arrivals) and self._comes_us[self._came] <= at_us:
            arrival = self.arrivals[self._came]
            self._came += 1
            if (lot := self.lots.get(arrival.lot)) is None:
                self._arrive(arrival)
            else:
                self._unmade[arrival.task] = arrival
                lot.arrive(arrival.task)
                self._admit(lot)
        if self.budgets.budgets:
            self._look_at_budgets()
        for owner, devices in self.reservations.look(self.now_us):
            self._reserve(owner, devices)
        if any(each.time.named for each in self.reservations.windows):
            self._keep(self.reservations.kept_for(self.now_us))
        self._open_and_close()
        if self.reservations.maintained:
            self._drain(self.reservations.drained(self.now_us))

    def _let_it_be(self, at_us: int) -> None:
        if at_us != self.now_us:
            self._rebase(at_us / 1e6)
            self.now_us = at_us
            self.board.at(self.now_s)

    def _rebase(self, at_s: float) -> None:
        """Move T0 on by whole half-lives before `at_s`, as an island's ledger does."""
        since_s, half_life_s = self.policy.since_s, self.policy.half_life_s
        halvings = int((at_s - since_s) // half_life_s) if half_life_s else 0
        if halvings < REBASE_HALF_LIVES:
            return
        self._faded = {id: rebase(sum_, halvings) for id, sum_ in self._faded.items()}
        lifts = tuple(
            replace(lift, faded_us=rebase(lift.faded_us, halvings))
            for lift in self.board.lifts.values()
        )
        self.policy = replace(self.policy, since_s=since_s + halvings * half_life_s)
        self.board = Board.of(replace(self.snapshot(), lifts=lifts), now_s=self.now_s)

    def _arrive(self, arrival: Arrival) -> None:
        self.runs[arrival.task] = _Run(arrival, _us(arrival.work_s) * arrival.ranks)
        milli = choice_in(arrival.choice).fraction_milli
        waits_for = tuple(id for id in arrival.after if not self._finished(id))
        for id in waits_for:
            self._waited_for.setdefault(id, []).append(arrival.task)
        conditions = self._conditions(arrival, waits_for)
        if not conditions.reservation:
            self._meter.want(self.now_us, arrival.counted_for, arrival.width, milli)
        self.board.set_task(
            BoardTask(
                id=arrival.task,
                request=arrival.request or arrival.task,
                tenant=arrival.tenant,
                user=arrival.user,
                state=State.waiting if conditions == _FREE else State.blocked,
                epoch=0,
                kind=arrival.kind,
                width=arrival.width,
                width_max=arrival.width_max,
                memory_bytes=arrival.memory_bytes,
                choice=self._choice(arrival),
                priority=arrival.priority,
                tier=arrival.tier,
                submitted_s=arrival.at_s,
                expected_s=_slowed(arrival.expected_s, arrival, arrival.width),
                conditions=conditions,
            )
        )

    def _conditions(self, arrival: Arrival, waits_for: tuple[str, ...] = ()) -> Conditions:
        """Return the start conditions of a task now."""
        if arrival.reservation:
            standing = self.reservations.standing(arrival.reservation, self.now_us)
            return Conditions(waits_for=waits_for, reservation=standing)
        return Conditions(waits_for=waits_for) if waits_for else _FREE

    def _choice(self, arrival: Arrival) -> str:
        """Return which devices a task may have now."""
        named = arrival.reservation
        if not named or self.reservations.is_confining(named, self.now_us):
            return arrival.choice
        return with_reservation(arrival.choice, "")

    def _finished(self, id: str) -> bool:
        run = self.runs.get(id)
        return run is not None and run.finished_us is not None

    # --- devices say what came true ---

    def _happen(self, event: _Event) -> None:
        if self._outdated(event):
            return
        _, _, says, id, _ = event
        task = self.tasks[id]
        if says == "Saved":
            self.board.set_task(changed(task, saved=True))
        elif says == "ready":
            self.runs[id].ready = True
            self._take_seats(task)
        elif says == Move.Spliced:
            self._spliced(task)
        elif says == "rung":
            self._reach_rung(task)
        else:
            self._let_go(task, says)

    def _outdated(self, event: _Event) -> bool:
        """True if the event will not happen: the task has left its devices, or stops stepping
        before its end, or was resized and ends at another time.
        """
        at_us, _, says, id, epoch = event
        task = self.tasks.get(id)
        if task is None or task.epoch != epoch:
            return True
        if says != Move.Finished:
            return False
        run = self.runs[id]
        return task.state not in ON_A_DEVICE or at_us > run.safe_us or at_us != run.ends_us

    def _take_seats(self, task: BoardTask) -> None:
        """Give a prepared task its devices once all of them are free."""
        run = self.runs[task.id]
        if not all(self._has_room(device, task) for device in task.seats):
            return
        if run.held_from_us is None:
            run.held_from_us = self.now_us
            self._meter.hold(self.now_us, run.arrival.counted_for, len(task.seats), _milli(task))
        if not run.ready:
            return
        run.ready = False
        for device in task.seats:
            self._seat(device, task)
        prepared_us = self.now_us - run.held_from_us
        resume_us = _us(self.costs.resume_s) if task.epoch > 1 else 0
        switch_us = prepared_us + resume_us + _us(self.costs.image_s)
        if run.first_us is None:
            run.first_us = self.now_us
        run.steps_from_us, run.safe_us = self.now_us + resume_us, math.inf
        run.speed = len(task.seats)
        started = changed(
            task,
            state=lifecycle.after(task.id, task.state, Move.Started),
            started_s=self.now_s,
            prepared_us=prepared_us,
            switch_us=switch_us if task.epoch > 1 else 0,  # a first start is no switch
            image_on=None,
        )
        self.board.set_task(started)
        self._plan_end(started, resume_us)

    def _has_room(self, device: str, task: BoardTask) -> bool:
        return sum(self.seated.get(device, {}).values()) + _milli(task) <= WHOLE_MILLI

    def _seat(self, device: str, task: BoardTask) -> None:
        self.seated.setdefault(device, {})[task.id] = _milli(task)

    def _plan_end(self, task: BoardTask, begins_in_us: int) -> None:
        """Set when the task ends, if it goes on in `begins_in_us` on all its devices."""
        run = self.runs[task.id]
        lasts_us = begins_in_us + -(-run.left_us // run.speed)
        run.ends_us = self.now_us + lasts_us
        self._plan_rung(task)
        self._say(Move.Finished, task, lasts_us)

    def _let_go(self, task: BoardTask, says: str) -> None:
        run = self.runs[task.id]
        paused = says == Move.Paused
        run.step(self.now_us - (_us(self.costs.image_s) if paused else 0))
        if run.held_from_us is not None:
            self._charge(task)
        run.held_from_us, run.booked_us = None, 0
        if paused:
            self._park(task)
        else:
            self._finish(task)
        if task.started_s is None:  # only the ledger knows what the start has held
            user = self.users[task.user]
            self.board.set_user(replace(user, faded_us=self._faded[task.user]))
        self._free(task.id, task.holds)

    def _free(self, task: str, devices: Iterable[str]) -> None:
        """Release devices, so that tasks that wait for them may take them."""
        for device in devices:
            self.seated.get(device, {}).pop(task, None)  # it is not there while it starts
        for device in devices:
            for follower in self.board.group(device):
                self._take_seats(follower.task)

    def _park(self, task: BoardTask) -> None:
        if task.elastic and len(task.seats) > task.width:
            wanted = self.runs[task.id].arrival.counted_for
            self._meter.want(self.now_us, wanted, task.width - len(task.seats))
        waiting = changed(
            task,
            state=lifecycle.after(task.id, task.state, Move.Paused),
            seats=(),
            leaves=(),
            resized_s=None,
            started_s=None,
            prepared_us=0,
            waiting_since_s=self.now_s,
            had_us=task.had_us + self.now_us - _us(task.started_s or 0.0),
            image_on=task.seat if len(task.seats) == 1 else None,
            saved=not self.costs.save_s or len(task.seats) > 1,
            expected_s=_left_s(task, self.runs[task.id], task.width),
        )
        self.board.set_task(waiting)
        if waiting.conditions.reservation:  # it wants no device before the next window
            wanted = self.runs[task.id].arrival.counted_for
            self._meter.want(self.now_us, wanted, -task.width, _milli(task))
        if not waiting.saved:
            self._say("Saved", waiting, _us(self.costs.save_s))
        self._rest(waiting)

    def _recharge(self, before: BoardTask) -> None:
        """Book what a task has held since it started, before its cost changes."""
        run, held_us = self.runs[before.id], self._held_us(before)
        if before.started_s is not None:
            self._charge(before)
            self._meter.hold(
                self.now_us, run.arrival.counted_for, len(before.seats), _milli(before)
            )
            run.booked_us += held_us
            now = self.tasks[before.id]
            self.board.set_task(changed(now, held_us=run.booked_us, accrued_us=0))

    def _splice(self, before: BoardTask, task: BoardTask, cost: int) -> None:
        """Have the task stop at a safe point and go on with its new devices."""
        run, more = self.runs[task.id], len(task.seats) - len(before.seats)
        run.resizes += 1
        run.safe_us, run.cost = self.now_us + _us(self.costs.pause_s), cost
        if more > 0:  # the new devices are held from now on
            self._charge(before)
            for device in task.seats[-more:]:
                self._seat(device, task)
            self._meter.hold(self.now_us, run.arrival.counted_for, len(task.seats))
            self._meter.want(self.now_us, run.arrival.counted_for, more)
        self._say(Move.Spliced, task, _us(self.costs.pause_s) + _us(self.costs.resizing_s))

    def _spliced(self, task: BoardTask) -> None:
        run, left = self.runs[task.id], task.leaves
        run.step(int(run.safe_us))
        run.steps_from_us, run.safe_us, run.speed = self.now_us, math.inf, len(task.seats)
        after: dict[str, object] = {}
        if left:
            self._charge(task)
            self._meter.hold(self.now_us, run.arrival.counted_for, len(task.seats))
            self._meter.want(self.now_us, run.arrival.counted_for, -len(left))
            after = {"leaves": (), "resized_s": self.now_s, "held_us": 0, "accrued_us": 0}
            after["cost"] = run.cost
        left_s = _left_s(task, run, len(task.seats))
        if left_s is not None:
            after["expected_s"] = self.now_s - (task.started_s or 0.0) + left_s
        state = lifecycle.after(task.id, task.state, Move.Spliced)
        resized = changed(task, state=state, **after)
        self.board.set_task(resized)
        self._plan_end(resized, 0)
        self._free(task.id, left)

    def _charge(self, task: BoardTask) -> None:
        """Book what the task has held since it was seated or resized."""
        run, held_us = self.runs[task.id], self._held_us(task)
        if self.budgets.budgets:
            self._spend(task)
            run.counted_us = 0
        counted_for, run.held_from_us = run.arrival.counted_for, self.now_us
        self._device_us[counted_for[0]] += held_us * len(task.holds) * _milli(task) // WHOLE_MILLI
        self._meter.hold(self.now_us, counted_for, -len(task.holds), _milli(task))
        self._faded[task.user] += faded(
            self._charged_us(task, held_us),
            at_s=self.now_s,
            since_s=self.policy.since_s,
            half_life_s=self.policy.half_life_s,
        )

    # --- reservations and budgets ---

    def _reserve(self, owner: str, devices: Mapping[str, int]) -> None:
        """Let the devices that are reserved for a tenant or user now count as guaranteed."""
        if owner in self.tenants:
            guarantee = owed(self._guaranteed[owner], devices)
            self.tenants[owner] = replace(self.tenants[owner], guarantee=guarantee)
            self.board.set_tenant(self.tenants[owner])
        elif owner in self.users:
            user = self.users[owner] = replace(self.users[owner], guarantee=devices)
            self.board.set_user(replace(user, faded_us=self.board.users[owner].faded_us))

    def _open_and_close(self) -> None:
        """Let tasks that name a reservation wait outside its windows, and go on inside."""
        if not self._standing or self.now_us < self._turns_us:
            return
        next_us = self.reservations.next_us(self.now_us)
        self._turns_us = math.inf if next_us is None else next_us
        turned = dict[str, ReservationStanding]()
        for id, before in self._standing.items():
            if (now := self.reservations.standing(id, self.now_us)) != before:
                self._standing[id] = turned[id] = now
        confining = {
            id for id in self._confining if self.reservations.is_confining(id, self.now_us)
        }
        freed, self._confining = self._confining - confining, confining
        for task in [*self.tasks.values()] if turned or freed else ():
            arrival = self.runs[task.id].arrival
            if arrival.reservation in freed:
                task = changed(task, choice=self._choice(arrival))
                self.board.set_task(task)
            standing = turned.get(arrival.reservation, task.conditions.reservation)
            if standing == task.conditions.reservation:
                continue
            if task.state not in ON_A_DEVICE:
                change = -task.width if standing else task.width
                self._meter.want(self.now_us, arrival.counted_for, change, _milli(task))
            conditions = replace(task.conditions, reservation=standing)
            self.board.set_task(changed(task, conditions=conditions))

    def _keep(self, whose: Mapping[str, tuple[str, str]]) -> None:
        """Let exactly these devices be reserved by name: by device, for which tenant or user, and
        by which reservation.
        """
        for id, device in self.devices.items():
            owner, reservation = whose.get(id, ("", ""))
            if (device.reserved_for, device.traits.kept_for) != (owner, reservation):
                traits = replace(device.traits, kept_for=reservation)
                self.devices[id] = replace(device, reserved_for=owner, traits=traits)
                self.board.set_device(self.devices[id])

    def _drain(self, drained: set[str]) -> None:
        """Let exactly these devices take no work."""
        for id, device in self.devices.items():
            if device.cordoned != (id in drained):
                self.devices[id] = replace(device, cordoned=id in drained)
                self.board.set_device(self.devices[id])

    def _look_at_budgets(self) -> None:
        """Count what runs in the budgets, and put in force what is reached."""
        for task in self.tasks.values():
            self._spend(task)
        for owner, actions, ends_s in self.budgets.look(self.now_us):
            if owner in self.tenants:
                tenant = replace(self.tenants[owner], exhausted=actions, budget_ends_s=ends_s)
                self.tenants[owner] = tenant
                self.board.set_tenant(tenant)
            elif owner in self.users:
                user = replace(self.users[owner], exhausted=actions, budget_ends_s=ends_s)
                self.users[owner] = user
                self.board.set_user(replace(user, faded_us=self.board.users[owner].faded_us))
            self._stops[owner] = {kind for kind, action in actions.items() if action in STOPS}
        if any(self._stops.values()) or self._barred:
            self._measure_barred()

    def _measure_barred(self) -> None:
        """Tell the meter what waiting tasks want and budgets keep from them."""
        barred = Counter[tuple[str, str]]()
        for task in self.tasks.values():
            if not task.holds and not task.conditions.hold and self._is_barred(task):
                barred[self.runs[task.id].arrival.counted_for] += task.width * _milli(task)
        for key in {*barred, *self._barred}:
            self._meter.bar(self.now_us, key, barred[key] - self._barred[key])
        self._barred = +barred

    def _is_barred(self, task: BoardTask) -> bool:
        owners = self.budgets.owners(task.user, task.tenant)
        return any(self._stops.get(owner, set()) & {task.kind, ALL} for owner in owners)

    def _spend(self, task: BoardTask) -> None:
        """Count in the budgets what the task has held since it was counted last."""
        run, held_us = self.runs[task.id], self._held_us(task)
        if over_us := held_us - run.counted_us:
            before_us = self._charged_us(task, run.counted_us)
            charged_us = self._charged_us(task, held_us) - before_us
            charged = Charged(task.user, task.tenant, task.kind, over_us, charged_us)
            self.budgets.spend(charged, self.now_us)
            run.counted_us = held_us

    def _charged_us(self, task: BoardTask, held_us: int) -> int:
        return held_us * self._cost(task) // 1000

    def _cost(self, task: BoardTask) -> int:
        return task.cost or sum(self.devices[device].cost for device in task.holds)

    def _rates(self) -> Iterator[Rate]:
        for task in self.tasks.values():
            if self.runs[task.id].held_from_us is not None:
                yield Rate(task.user, task.tenant, task.kind, self._cost(task))

    def _finish(self, done: BoardTask) -> None:
        run = self.runs[done.id]
        run.finished_us = self.now_us
        self.done += 1
        wanted = max(done.width, len(done.holds)) if done.elastic else done.width
        self._meter.want(self.now_us, run.arrival.counted_for, -wanted, _milli(done))
        self._drop(done.id)
        if (lot := self.lots.get(run.arrival.lot)) is not None:
            while run.rung < len(run.arrival.rungs):  # those at its very end
                self._report_rung(lot, run)
            lot.end(done.id)
            self._admit(lot)

    def _drop(self, done: str) -> None:
        """Take an ended task off the board, and let those start that waited for its end."""
        self.board.drop_task(done)
        for id in self._waited_for.pop(done, ()):
            task = self.tasks[id]
            left = tuple(needed for needed in task.conditions.waits_for if needed != done)
            conditions = self._conditions(self.runs[id].arrival, left)
            self.board.set_task(changed(task, conditions=conditions))

    # --- members of lots at their rungs ---

    def _admit(self, lot: ReplayedLot) -> None:
        """Let members begin, or go on past a rung, while there is room; else stop the losers."""
        for id in lot.admit():
            if (arrival := self._unmade.pop(id, None)) is not None:
                self._arrive(arrival)
                continue
            task, arrival = self.tasks[id], self.runs[id].arrival
            self._meter.want(self.now_us, arrival.counted_for, task.width, _milli(task))
            conditions = self._conditions(arrival)
            self.board.set_task(changed(task, conditions=conditions, waiting_since_s=self.now_s))
        for id in lot.stop_losers():
            self.runs[id].finished_us = self.runs[id].rested_us
            self.done += 1
            self._drop(id)

    def _plan_rung(self, task: BoardTask) -> None:
        """Set when a task reaches its next rung, if it goes on as it does."""
        run = self.runs[task.id]
        if run.rung < len(run.arrival.rungs):
            run.rung_us = max(self.now_us, run.reaches_us())
            self._say("rung", task, run.rung_us - self.now_us)

    def _reach_rung(self, task: BoardTask) -> None:
        run = self.runs[task.id]
        if task.state not in ON_A_DEVICE or self.now_us != run.rung_us or self.now_us > run.safe_us:
            return  # it was resized since, or does not step
        lot = self.lots[run.arrival.lot]
        self._report_rung(lot, run)
        if lot.has_lost(task.id):
            self.board.set_task(changed(self.tasks[task.id], conditions=_AT_RUNG))
        self._plan_rung(task)
        self._admit(lot)

    def _report_rung(self, lot: ReplayedLot, run: _Run) -> None:
        mark = run.arrival.rungs[run.rung]
        run.rung += 1
        for id in lot.reach(run.arrival.task, mark.value):
            if id in self.tasks:
                conditions = self._conditions(self.runs[id].arrival)
                self.board.set_task(changed(self.tasks[id], conditions=conditions))

    def _rest(self, task: BoardTask) -> None:
        """Let a member that has lost rest, now that it has left its devices."""
        run = self.runs[task.id]
        lot = self.lots.get(run.arrival.lot)
        if lot is not None and lot.has_lost(task.id):
            run.rested_us = self.now_us
            self._meter.want(self.now_us, run.arrival.counted_for, -task.width, _milli(task))
            lot.rest(task.id)
            self._admit(lot)

    def _say(self, says: str, task: BoardTask, in_us: int) -> None:
        self._seq += 1
        event = (self.now_us + max(0, in_us), self._seq, says, task.id, task.epoch)
        heappush(self._events, event)

    # --- what the island sees, and does ---

    def snapshot(self) -> Snapshot:
        """Return what a ledger and heartbeats would show: nothing that runs is booked yet."""
        seen = self._seen({id: self._measured(task) for id, task in self.tasks.items()})
        return replace(seen, waits=tuple(self.board.waits.values()))

    def _seen(self, tasks: Mapping[str, BoardTask]) -> Snapshot:
        return Snapshot(
            island="imaginary",
            policy=self.policy,
            tenants=dict(self.tenants),
            users={id: replace(u, faded_us=self._faded[id]) for id, u in self.users.items()},
            devices=dict(self.devices),
            tasks=tasks,
        )

    def _measured(self, task: BoardTask) -> BoardTask:
        if task.started_s is None:
            return task
        accrued_us = self._held_us(task)
        held_us = self.runs[task.id].booked_us + accrued_us
        return changed(task, held_us=held_us, accrued_us=accrued_us)

    def _held_us(self, task: BoardTask) -> int:
        """Return how long the task has held exactly these devices at its cost, in µs."""
        from_us = self.runs[task.id].held_from_us
        return 0 if from_us is None else self.now_us - from_us

    def obey(self, plan: Plan) -> None:
        """Make the devices begin what the plan orders; the board already contains the plan."""
        for decision in plan.decisions:
            if self.keep_timeline:
                self.timeline.append(StoryLine(at_s=self.now_s, decision=decision))
            if decision.move == Move.Launch:
                self._launch(self.tasks[decision.task])
            elif decision.move == Move.Pause:
                self._pause(self.tasks[decision.task])
            elif decision.move == Move.Charge:
                self._recharge(plan.before[decision.task])
            elif decision.move == Move.Splice:
                before = plan.before[decision.task]
                self._splice(before, self.tasks[decision.task], decision.cost)
        # A task that took its devices just now changes what happens next.
        again_s = min(
            self.board.next_s(), math.inf if plan.look_again_s is None else plan.look_again_s
        )
        finite = math.isfinite(again_s)
        self._look_again_us = max(math.ceil(again_s * 1e6), self.now_us + 1) if finite else None
        if self.budgets.budgets:
            due_us = self.budgets.next_us(self.now_us, self._rates())
            self._budgets_us = None if due_us is None else max(due_us, self.now_us + 1)

    def _launch(self, task: BoardTask) -> None:
        if task.waiting_since_s is not None:
            window_s = self.policy.tier_window_s
            away = been_away(task.away, task.waiting_since_s, self.now_s, window_s=window_s)
            task = changed(task, away=away)
            self.board.set_task(task)
        resident = task.image_on is not None and task.image_on == task.seat
        prepared_us = 0 if resident else _us(self.costs.start_s)
        if prepared_us:
            self._say("ready", task, prepared_us)
        self.runs[task.id].ready = not prepared_us
        self._take_seats(task)

    def _pause(self, task: BoardTask) -> None:
        run, comes_us = self.runs[task.id], _us(self.costs.pause_s)
        run.pauses += 1
        run.safe_us = self.now_us + comes_us
        self._say(Move.Paused, task, comes_us + _us(self.costs.image_s))

    def report(self) -> Report:
        device_us = self._device_us.copy()
        for task in self.tasks.values():
            owner, _ = self.runs[task.id].arrival.counted_for
            held_us = self._held_us(task) * len(task.holds)
            device_us[owner] += held_us * _milli(task) // WHOLE_MILLI
        ran = [run for run in self.runs.values() if run.first_us is not None]
        done = [run for run in ran if run.finished_us is not None]
        return Report(
            device_s={id: device_us[id] / 1e6 for id in {**self.tenants, **device_us}},
            waits_s={r.arrival.task: _since(r.arrival, r.first_us) for r in ran},
            lost_s={r.arrival.task: _lost_s(r) for r in done},
            pauses={id: run.pauses for id, run in self.runs.items() if run.pauses},
            resizes={id: run.resizes for id, run in self.runs.items() if run.resizes},
            finished={r.arrival.task: (r.finished_us or 0) / 1e6 for r in done},
            timeline=tuple(self.timeline),
            until_s=self.now_s,
            intervals=self._meter.intervals(self.now_us),
            spent_us=dict(self.budgets.spent_us),
        )


_FREE, _AT_RUNG = Conditions(), Conditions(hold=HELD_AT_RUNG)


def _left_s(task: BoardTask, run: _Run, devices: int) -> float | None:
    """Return the expected work that is left, in s on so many devices; always above 0."""
    arrival = run.arrival
    if task.expected_s is None:
        return None
    stepped_s = arrival.work_s - run.left_us / arrival.ranks / 1e6
    return _slowed(max(1.0, (arrival.expected_s or 0.0) - stepped_s), arrival, devices)


def _slowed(seconds: float | None, arrival: Arrival, devices: int) -> float | None:
    """Return how long work takes on fewer devices than the task can use."""
    if seconds is None or devices == arrival.ranks:
        return seconds
    return seconds * arrival.ranks / devices


def _milli(task: BoardTask) -> int:
    return choice_in(task.choice).fraction_milli


def _since(arrival: Arrival, at_us: int | None) -> float:
    return ((at_us or 0) - _us(arrival.at_s)) / 1e6


def _lost_s(run: _Run) -> float:
    left_s = run.left_us / run.arrival.ranks / 1e6  # of a member that was stopped at a rung
    return _since(run.arrival, run.finished_us) - (run.arrival.work_s - left_s)


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


# --- invariants ---------------------------------------------------------------------------------


def check(world: World, seen: Snapshot, plan: Plan) -> None:
    """Check the world after it obeyed a plan made of the snapshot `seen`; raises Broken."""
    anew = decide(seen, now_s=world.now_s)
    for what in (
        *_hurried(plan),
        *_doubled(world),
        *_idle(world),
        *_hasty(seen, plan, now_us=world.now_us),
        *_missized(world),
        *_uneven(world),
        *_unexplained(seen, anew),
        *_different(seen, plan, anew),
    ):
        raise InvariantBroken(what, at_s=world.now_s, timeline=world.timeline)


def _hurried(plan: Plan) -> Iterable[str]:
    """A next round must be later than the round that asks for it."""
    if is_hurried(plan):
        yield f"the round at {plan.now_s} s is to be made again at {plan.look_again_s} s"


def _doubled(world: World) -> Iterable[str]:
    """No more of a device may be promised than there is, in thousandths and in bytes."""
    milli, memory_bytes = Counter[str](), Counter[str]()
    for task in world.tasks.values():
        for device in task.seats if task.state in HOLDS_A_SEAT else ():
            here = lane(task.kind, memory_bytes=task.memory_bytes, choice=task.choice)
            milli[device] += here.milli
            memory_bytes[device] += part_bytes(here, world.devices[device].memory_bytes)
    for device, held in milli.items():
        if held > WHOLE_MILLI:
            yield f"{held} thousandths of {device} were promised"
        if memory_bytes[device] > world.devices[device].memory_bytes:
            yield f"{memory_bytes[device]} bytes of {device} were promised"
    for device, tasks in world.seated.items():
        if sum(tasks.values()) > WHOLE_MILLI:
            yield f"{device} is held by {tasks}"


def _idle(world: World) -> Iterable[str]:
    """No device may be free while a task that could run on it waits, if no gang waits.

    The rest of a device that a fraction holds may be kept for an urgent task (F7, F9), which does
    not fit there before the fraction's slice has ended. An empty device is kept for no task.
    """
    held = {d for task in world.tasks.values() if task.state in ON_A_DEVICE for d in task.holds}
    waiting = [task for task in world.tasks.values() if task.state == State.waiting]
    for task in waiting:
        is_kept = task.kind in world.board.memory.kept
        gangs = any(other.kind == task.kind and other.width > 1 for other in waiting)
        if gangs or shut_by(world.board, task) is not None:
            continue
        pin, choice = None if task.saved else task.image_on, choice_in(task.choice)
        for device in world.devices.values():
            large = device.kind == task.kind and device.memory_bytes >= task.memory_bytes
            could = large and choice.suits(device.traits) and device.takes_work
            has_part = not is_kept and _has_part(world, device, task)
            is_free = device.id not in held or has_part
            if could and is_free and pin in (None, device.id):
                yield f"{device.id} is free and {task.id} waits"


def _has_part(world: World, device: BoardDevice, task: BoardTask) -> bool:
    """True if a fraction fits beside others on a device that is not being emptied."""
    here = lane(task.kind, memory_bytes=task.memory_bytes, choice=task.choice)
    return here.is_fraction and world.board.pools[device.kind].fits_beside(device.id, here)


def _hasty(seen: Snapshot, plan: Plan, *, now_us: int) -> Iterable[str]:
    """No task may be paused for another before one full slice."""
    for decision in plan.decisions:
        if decision.move == Move.Pause and decision.against is not None:
            victim, task = seen.tasks[decision.task], seen.tasks[decision.against]
            stepped_us = now_us - _us(victim.started_s or 0.0)
            if stepped_us < slice_us(seen.policy, victim, task):
                yield f"{victim.id} was paused after {stepped_us} µs"


def _missized(world: World) -> Iterable[str]:
    """A task on devices must have at least what it needs and at most what it can use."""
    for task in world.tasks.values():
        most = max(task.width, task.width_max)
        if task.seats and not task.width <= len(task.seats) <= most:
            yield f"{task.id} is on {task.seats}, and not on {task.width} to {most}"


def _uneven(world: World) -> Iterable[str]:
    """A task on even hosts must have as many devices on each of as many hosts as it names."""
    for task in world.tasks.values():
        on = Counter(world.devices[device].host for device in task.seats)
        if task.hosts and on and (len(on) != task.hosts or len({*on.values()}) > 1):
            yield f"{task.id} is on {dict(on)}, and not evenly on {task.hosts} hosts"


def _unexplained(seen: Snapshot, anew: Plan) -> Iterable[str]:
    """Every task that still waits must have a reason."""
    moved = {decision.task for decision in anew.decisions if decision.move == Move.Launch}
    for task in seen.tasks.values():
        if task.state in NOT_STARTED and task.id not in moved and not anew.reasons.get(task.id):
            yield f"{task.id} is {task.state} and not told why"


def _different(seen: Snapshot, plan: Plan, anew: Plan) -> Iterable[str]:
    """Yield the difference if the updated board decides otherwise than a board built anew.

    The check is made only if usage never fades.  With fading the two differ rightly: the simulator
    charges a stay once, when it ends, while the board charges it continuously.
    """
    if seen.policy.half_life_s == 0 and plan.decisions != anew.decisions:
        yield f"kept up to date it decides {plan.decisions}, made anew {anew.decisions}"
