"""One round of an island: look at the snapshot, decide on paper, say why.

`decide` is pure: the same snapshot at the same instant gives the same plan, in whatever order its
mappings were filled.  Its steps are numbered and always taken in this order.  Rules F1 to F10 are
those of docs/architecture.md; usage and order are `core.fairshare`'s, sentences `core.explain`'s.

What always holds (and is tested with random islands): nobody is paused by another before one full
slice; who is paused is, after the change, still strictly better served than who gains; no device
stands free while a task that could run there waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from app.core import explain, lifecycle
from app.core.explain import Ahead, Obstacles, Standing
from app.core.fairshare import FairQueue, Path, faded, score, unscored, usage_us
from app.core.island import Decision, Device, Plan, Policy, Reason, Snapshot, Task
from app.core.lifecycle import NOT_STARTED, ON_A_DEVICE, Move, State

USER_WEIGHT = 1000  # users of a tenant share alike

HOLDS_A_SEAT = frozenset({State.starting, State.running, State.splicing})
LEAVES_A_SEAT = frozenset({State.pausing, State.stopping})

LOOK_AHEAD_S = 60.0  # scores are not compared further into the future than this
LOOK_AHEAD_PAIRS = 500  # so many (who waits, who runs) pairs are looked at for it
RESOLUTION_S = 0.001  # of the instants that are found by halving

Lane = tuple[str, str, int, str | None]  # user, device kind, memory, the device it is pinned to
Score = Callable[[Path, int], int]  # how well served a branch is with so much faded usage more


def decide(snapshot: Snapshot, *, now_s: float) -> Plan:
    """What to do now, in order, and why the others wait."""
    cycle = Cycle(snapshot, now_s)
    # 1. Count the lost: their devices' leases have ended.
    _count_the_lost(cycle)
    # 2. End what was cancelled while it held no device, and what can never start.
    _end(cycle)
    # 3. Unlock those whose start conditions hold, lock those whose do not.
    _unlock_and_lock(cycle)
    # 4. Obey the wishes for tasks on devices, and empty the devices being drained.
    _obey(cycle)
    # 5. Rank the waiting by fair share.
    line = _rank(cycle)
    # 6. Seat them in that order, on free devices or 7. in the place of who had more.
    kept = _seat(cycle, line)
    # 8. Explain who still waits, and say when to look again.
    return Plan(
        decisions=tuple(cycle.decisions),
        reasons=_reasons(cycle, kept),
        places={task.id: place for place, task in enumerate(kept, start=1)},
        look_again_s=_look_again_s(cycle, kept),
    )


class Cycle:
    """The paper on which one round is worked out: the tasks as they will be, and the decisions."""

    def __init__(self, snapshot: Snapshot, now_s: float) -> None:
        self.policy: Policy = snapshot.policy
        self.tenants, self.users = snapshot.tenants, snapshot.users
        self.devices = {id: snapshot.devices[id] for id in sorted(snapshot.devices)}
        self.tasks = {id: snapshot.tasks[id] for id in sorted(snapshot.tasks)}
        self.now_s = now_s
        self.decisions: list[Decision] = []

    def move(self, task: Task, move: Move, rule: str, because: str, **details: str | None) -> Task:
        """Decide a move and see the task after it; raises IllegalMove for what cannot be."""
        state = lifecycle.after(task.id, task.state, move)
        self.decisions.append(
            Decision(task=task.id, move=move, rule=rule, because=because, **details)
        )
        self.tasks[task.id] = after = replace(task, state=state)
        return after

    def in_state(self, *states: str) -> list[Task]:
        return [task for task in self.tasks.values() if task.state in states]

    def alive(self, id: str | None) -> bool:
        """Is this a device whose lease has not ended?"""
        device = self.devices.get(id or "")
        return device is not None and device.up and device.lease_until_s > self.now_s

    def open(self, device: Device) -> bool:
        """May it be given new work?"""
        return not device.cordoned and self.alive(device.id)

    def pin(self, task: Task) -> str | None:
        """The only device that a task can go on from; None if any will do.

        If that device is lost meanwhile the task goes on from its last checkpoint, anywhere.
        """
        return task.image_on if not task.saved and self.alive(task.image_on) else None

    def suits(self, device: Device, task: Task) -> bool:
        return device.kind == task.kind and device.memory_bytes >= task.memory_bytes

    def within_reach(self, device: Device, task: Task) -> bool:
        """Could the task be seated there, were the device free?"""
        pin = self.pin(task)
        return self.suits(device, task) and self.open(device) and pin in (None, device.id)


# --- 1. lost ------------------------------------------------------------------------------------


def _count_the_lost(cycle: Cycle) -> None:
    for task in cycle.in_state(*ON_A_DEVICE):
        device = cycle.devices.get(task.seat or "")
        if device is None or device.lease_until_s + cycle.policy.lost_grace_s <= cycle.now_s:
            because = f"{task.seat} was not heard of until its lease ended."
            lost = cycle.move(task, Move.Lost, "lease", because)
            cycle.tasks[task.id] = replace(
                lost, seat=None, image_on=None, saved=True, held_us=0, accrued_us=0, started_s=None
            )


# --- 2. end -------------------------------------------------------------------------------------


def _end(cycle: Cycle) -> None:
    for task in cycle.in_state(*NOT_STARTED):
        broken = task.conditions.broken
        if task.cancel_asked:
            cycle.move(task, Move.Cancel, "cancel", "It was cancelled while it held no device.")
        elif broken:
            because = f"It needs {', '.join(broken)}, which did not succeed."
            cycle.move(task, Move.GaveUp, "needs", because)


# --- 3. start conditions ------------------------------------------------------------------------


def _unlock_and_lock(cycle: Cycle) -> None:
    for task in cycle.in_state(*NOT_STARTED):
        unmet = explain.unmet(task, now_s=cycle.now_s)
        if task.state == State.blocked and not unmet:
            cycle.move(task, Move.Unlocked, "start", "All its start conditions hold.")
        elif task.state == State.waiting and unmet:
            cycle.move(task, Move.Locked, "start", unmet[0].message)


# --- 4. wishes and drains -----------------------------------------------------------------------


def _obey(cycle: Cycle) -> None:
    for task in cycle.in_state(*ON_A_DEVICE - {State.stopping}):
        device = cycle.devices[task.seat or ""]
        if task.cancel_asked:
            cycle.move(task, Move.Cancel, "cancel", "It was cancelled.", device=device.id)
        elif task.state != State.running:
            continue  # it is paused when it has come so far
        elif task.conditions.hold:
            because = "It is held: paused, to go on when released."
            cycle.move(task, Move.Pause, "hold", because, device=device.id)
        elif device.cordoned:
            because = f"{device.id} is being drained; it goes on elsewhere."
            cycle.move(task, Move.Pause, "drain", because, device=device.id)


# --- 5. rank ------------------------------------------------------------------------------------


def _rank(cycle: Cycle) -> FairQueue[Task]:
    """The waiting tasks that may start, in the order of rule F3."""
    line: FairQueue[Task] = FairQueue()
    owed = _owed(cycle)
    for tenant in cycle.tenants.values():
        path: Path = (tenant.id,)
        line.add(path, weight=tenant.weight, faded=tenant.faded_us + owed[path])
    for user in cycle.users.values():
        path = (user.tenant, user.id)
        line.add(path, weight=USER_WEIGHT, faded=user.faded_us + owed[path])
    for task in cycle.in_state(State.waiting):
        if task.retry_at_s <= cycle.now_s:
            _push(line, task)
    return line


def _push(line: FairQueue[Task], task: Task) -> None:
    line.push(_path(task), task, id=task.id, priority=task.priority, submitted_s=task.submitted_s)


def _path(task: Task) -> Path:
    return (task.tenant, task.user)


def _books(cycle: Cycle, *, later_s: float = 0.0) -> Score:
    """How well served everyone is `later_s` from now, if all goes on as decided so far."""
    owed = _owed(cycle, later_s=later_s)

    def score_of(path: Path, extra: int) -> int:
        if len(path) == 1:
            tenant = cycle.tenants[path[0]]
            return score(tenant.faded_us + owed[path] + extra, tenant.weight)
        return score(cycle.users[path[1]].faded_us + owed[path] + extra, USER_WEIGHT)

    return score_of


def _owed(cycle: Cycle, *, later_s: float = 0.0) -> Counter[Path]:
    """Rule F1: what tasks on devices hold and the ledger has not booked yet, as faded usage."""
    owed: Counter[Path] = Counter()
    for task in cycle.in_state(*ON_A_DEVICE):
        owes = _faded(cycle, _owes_us(cycle, task, later_s), later_s=later_s)
        owed[(task.tenant,)] += owes
        owed[_path(task)] += owes
    return owed


def _owes_us(cycle: Cycle, task: Task, later_s: float) -> int:
    """What a task on a device will have held unbooked `later_s` from now, times the cost.

    Who takes a seat owes one full slice at once, so that it cannot be had for nothing by leaving
    early or by asking for many at a time.
    """
    owes = task.accrued_us + (0 if task.state == State.starting else int(later_s * 1e6))
    if task.state in HOLDS_A_SEAT:
        booked = task.held_us - task.accrued_us
        owes = max(owes, slice_us(cycle.policy, task) - booked)
    return owes * cycle.devices[task.seat or ""].cost // 1000


def slice_us(policy: Policy, *tasks: Task) -> int:
    """Rule F8: a turn is so long that taking turns costs no more than its share of the time."""
    switch_s = max(task.switch_us for task in tasks) / 1e6
    turn_s = switch_s / policy.switch_share
    return int(1e6 * min(max(turn_s, policy.slice_min_s), policy.slice_max_s))


def _faded(cycle: Cycle, charge_us: int, *, later_s: float = 0.0) -> int:
    return faded(
        charge_us,
        at_s=cycle.now_s + later_s,
        since_s=cycle.policy.since_s,
        half_life_s=cycle.policy.half_life_s,
    )


# --- 6. seat ------------------------------------------------------------------------------------


def _seat(cycle: Cycle, line: FairQueue[Task]) -> list[Task]:
    """Launch who can be, least served first; returns the others, as they stand in line now."""
    seats, runners = _Seats(cycle), _runners(cycle)
    shut: set[Lane] = set()  # for the first of these there was no seat, so none for the next
    left: list[Task] = []
    while (task := line.first()) is not None:
        lane = _lane(cycle, task)
        device = None
        if lane not in shut:
            device = _free_seat(cycle, seats, task) or _make_room(cycle, line, runners, task)
        if device is not None:
            line.take(_faded(cycle, slice_us(cycle.policy, task) * device.cost // 1000))
        else:
            shut.add(lane)
            left.append(line.take())
    return _in_line(cycle, line, left)


def _lane(cycle: Cycle, task: Task) -> Lane:
    return task.user, task.kind, task.memory_bytes, cycle.pin(task)


def _free_seat(cycle: Cycle, seats: _Seats, task: Task) -> Device | None:
    """The free device on which a task was launched; None if there is none for it."""
    device = seats.best(task)
    if device is not None:
        seats.take(device)
        because = "Its turn: a device is free, and nobody less served waits for it."
        _launch(cycle, task, device, "F3", because, against=None)
    return device


def _launch(
    cycle: Cycle, task: Task, device: Device, rule: str, because: str, *, against: str | None
) -> None:
    launched = cycle.move(task, Move.Launch, rule, because, device=device.id, against=against)
    cycle.tasks[task.id] = replace(
        launched, seat=device.id, launched_s=cycle.now_s, started_s=None, held_us=0, accrued_us=0
    )


class _Seats:
    """The devices that can be given away in this round.

    A device whose task is on its way out counts, unless another was already sent ahead to it.
    """

    def __init__(self, cycle: Cycle) -> None:
        self._cycle = cycle
        held = {task.seat for task in cycle.in_state(*HOLDS_A_SEAT)}
        self._free = {d.id: d for d in cycle.devices.values() if cycle.open(d) and d.id not in held}
        self._leaving = {task.seat for task in cycle.in_state(*LEAVES_A_SEAT)}
        self._pinned = Counter(cycle.pin(task) for task in cycle.in_state(State.waiting))

    def best(self, task: Task) -> Device | None:
        """An empty device before one being vacated; then the one where its image lies; then one
        that others need not wait for; then the smallest."""
        return min(
            (d for d in self._free.values() if self._cycle.within_reach(d, task)),
            key=lambda device: (
                device.id in self._leaving,
                device.id != task.image_on,
                self._pinned[device.id],
                device.memory_bytes,
                device.id,
            ),
            default=None,
        )

    def take(self, device: Device) -> None:
        del self._free[device.id]


# --- 7. make room -------------------------------------------------------------------------------


def _make_room(
    cycle: Cycle, line: FairQueue[Task], runners: dict[str, Task], task: Task
) -> Device | None:
    """The device that was taken from the most over-served for this task; None if nobody is."""
    victim = _victim(cycle, line.score, runners.values(), task)
    if victim is None:
        return None
    del runners[victim.id]
    device = cycle.devices[victim.seat or ""]
    told = "Its slice is over, and who goes next has had less; it goes on when its turn comes."
    cycle.move(victim, Move.Pause, "F6/F8", told, device=device.id, against=task.id)
    because = "Its turn: who held the device has had more, and a full slice of it."
    _launch(cycle, task, device, "F6/F8", because, against=victim.id)
    return device


def _runners(cycle: Cycle) -> dict[str, Task]:
    """Who runs where others could."""
    running = cycle.in_state(State.running)
    return {task.id: task for task in running if cycle.open(cycle.devices[task.seat or ""])}


def _victim(
    cycle: Cycle, score_of: Score, runners: Iterable[Task], task: Task, *, later_s: float = 0.0
) -> Task | None:
    """Who gives way to `task`, `later_s` from now: where its image lies, else who had most."""
    giving_way = [v for v in runners if _gives_way(cycle, score_of, v, task, later_s)]
    return max(
        giving_way,
        key=lambda victim: (
            victim.seat == task.image_on,
            score_of((victim.tenant,), 0),
            score_of(_path(victim), 0),
            -victim.priority,
            victim.id,
        ),
        default=None,
    )


def _gives_way(
    cycle: Cycle, score_of: Score, victim: Task, task: Task, later_s: float = 0.0
) -> bool:
    """Rule F6: after a full slice, to who is still less served once the next turn is charged."""
    device = cycle.devices[victim.seat or ""]
    turn_us = slice_us(cycle.policy, victim, task)
    if victim.held_us + later_s * 1e6 < turn_us or not cycle.within_reach(device, task):
        return False
    fee = _faded(cycle, turn_us * device.cost // 1000, later_s=later_s)
    return _better_served(score_of, victim, task, fee)


def _better_served(score_of: Score, victim: Task, task: Task, fee: int) -> bool:
    """Strictly: equals stay where they are, or they would pause each other for ever."""
    if victim.user == task.user:
        return victim.priority < task.priority
    mine, theirs = _rivals(task, victim)
    return score_of(theirs, 0) > score_of(mine, fee)


def _rivals(task: Task, other: Task) -> tuple[Path, Path]:
    """The branches at which two tasks of different users part: (the task's, the other's)."""
    if task.tenant != other.tenant:
        return (task.tenant,), (other.tenant,)
    return _path(task), _path(other)


def _in_line(cycle: Cycle, line: FairQueue[Task], left: list[Task]) -> list[Task]:
    """Those without a seat, as they would be picked if one device after another became free."""
    cost = {device.kind: device.cost for device in cycle.devices.values()}
    for kept in left:
        _push(line, kept)
    order: list[Task] = []
    while (task := line.first()) is not None:
        fee_us = slice_us(cycle.policy, task) * cost.get(task.kind, 1000) // 1000
        order.append(line.take(_faded(cycle, fee_us)))
    return order


# --- 8. explain ---------------------------------------------------------------------------------


def _reasons(cycle: Cycle, kept: list[Task]) -> dict[str, tuple[Reason, ...]]:
    """All reasons of every task that waits or is blocked."""
    reasons = {
        task.id: explain.unmet(task, now_s=cycle.now_s) + explain.backoff(task, now_s=cycle.now_s)
        for task in cycle.in_state(*NOT_STARTED)
    }
    holders = {task.seat: task for task in cycle.in_state(*LEAVES_A_SEAT)}
    holders |= {task.seat: task for task in cycle.in_state(*HOLDS_A_SEAT)}
    score_of = _books(cycle)
    seen: dict[tuple[Lane, int], Obstacles] = {}
    for task, ahead in _ahead(kept):
        alike = (_lane(cycle, task), task.priority)
        if alike not in seen:
            seen[alike] = _obstacles(cycle, score_of, holders, task)
        reasons[task.id] += explain.waiting(task, seen[alike], ahead)
    return reasons


def _ahead(kept: list[Task]) -> Iterator[tuple[Task, Ahead]]:
    """Each task in line with the count of those before it that want the same kind of device."""
    count: Counter[tuple[object, ...]] = Counter()
    for task in kept:
        groups: list[tuple[object, ...]] = [
            (task.kind,),
            (task.kind, task.tenant),
            (task.kind, task.tenant, task.user),
            (task.kind, task.tenant, task.user, task.priority),
        ]
        everyone, tenant, user, equal = (count[group] for group in groups)
        yield (
            task,
            Ahead(
                tenants=everyone - tenant,
                users=tenant - user,
                higher=user - equal,
                earlier=equal,
            ),
        )
        count.update(groups)


def _obstacles(
    cycle: Cycle, score_of: Score, holders: dict[str | None, Task], task: Task
) -> Obstacles:
    fitting = [device for device in cycle.devices.values() if cycle.suits(device, task)]
    open_ = [device for device in fitting if cycle.open(device)]
    busy = [holders[device.id] for device in open_ if device.id in holders]
    staying = [h for h in busy if not _better_served(score_of, h, task, _fee(cycle, h, task))]
    return Obstacles(
        devices=len(fitting),
        up=sum(cycle.alive(device.id) for device in fitting),
        open=len(open_),
        busy=len(busy),
        turn_s=slice_us(cycle.policy, task) / 1e6,
        pinned_to=cycle.pin(task),
        tenant=_standing(cycle, score_of, task, [h for h in staying if h.tenant != task.tenant]),
        user=_standing(
            cycle,
            score_of,
            task,
            [h for h in staying if h.tenant == task.tenant and h.user != task.user],
        ),
        own=sum(h.user == task.user for h in staying),
    )


def _fee(cycle: Cycle, holder: Task, task: Task) -> int:
    cost = cycle.devices[holder.seat or ""].cost
    return _faded(cycle, slice_us(cycle.policy, holder, task) * cost // 1000)


def _standing(cycle: Cycle, score_of: Score, task: Task, staying: list[Task]) -> Standing | None:
    """The task's side against the best served of those who stay; None if nobody does."""
    if not staying:
        return None
    best = max(staying, key=lambda holder: (score_of(_rivals(task, holder)[1], 0), holder.id))
    mine, theirs = _rivals(task, best)
    return Standing(
        mine_s=_seconds(cycle, score_of(mine, _fee(cycle, best, task))),
        theirs_s=_seconds(cycle, score_of(theirs, 0)),
    )


def _seconds(cycle: Cycle, score: int) -> float:
    """A score as device-seconds for a weight of 1.0."""
    used_us = usage_us(
        unscored(score, 1000),
        now_s=cycle.now_s,
        since_s=cycle.policy.since_s,
        half_life_s=cycle.policy.half_life_s,
    )
    return used_us / 1e6


# --- when to look again -------------------------------------------------------------------------


def _look_again_s(cycle: Cycle, kept: list[Task]) -> float | None:
    """The first instant at which something may change because time passes."""
    instants = [at_s for at_s in _instants(cycle) if at_s > cycle.now_s]
    turn_s = _next_turn_s(cycle, kept)
    if turn_s is not None:
        instants.append(cycle.now_s + turn_s)
    return min(instants, default=None)


def _instants(cycle: Cycle) -> Iterator[float]:
    for task in cycle.in_state(*NOT_STARTED):
        yield task.conditions.not_before_s or 0.0
        yield task.retry_at_s
    for device in cycle.devices.values():
        yield device.lease_until_s
        yield device.lease_until_s + cycle.policy.lost_grace_s


def _next_turn_s(cycle: Cycle, kept: list[Task]) -> float | None:
    """In how many seconds somebody in line may take a runner's seat, by rules F6 and F8.

    Both the end of a slice and the crossing of two scores stay true once they are, so halving finds
    the instant, by the very rule that will then decide.
    """
    runners = list(_runners(cycle).values())
    first: dict[Lane, Task] = {}
    for task in kept:
        first.setdefault(_lane(cycle, task), task)
    heads = list(first.values())[: LOOK_AHEAD_PAIRS // max(1, len(runners))]

    def turns(later_s: float) -> bool:
        score_of = _books(cycle, later_s=later_s)
        return any(_victim(cycle, score_of, runners, task, later_s=later_s) for task in heads)

    if not runners or not heads:
        return None
    if not turns(LOOK_AHEAD_S):
        return LOOK_AHEAD_S
    no_s, yes_s = 0.0, LOOK_AHEAD_S
    while yes_s - no_s > RESOLUTION_S:
        middle_s = (no_s + yes_s) / 2
        no_s, yes_s = (no_s, middle_s) if turns(middle_s) else (middle_s, yes_s)
    return yes_s
