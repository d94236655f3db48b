"""A virtual clock and imaginary devices around the very `decide` that runs an island.

Imaginary devices obey as real ones do: a Launch prepares a task and seats it when the seat is free,
a Pause lets go at the next safe point and then saves the image.  Time jumps from one event to the
next, so an hour of an island takes a moment, and equal input gives an equal report.  After every
step `check` looks at what must hold; what does not is raised as Broken, with the story so far.

Devices stay up here, and nobody cancels or holds: losing and wishing are tested on `decide` itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from app.core import lifecycle
from app.core.decide import HOLDS_A_SEAT, decide, slice_us
from app.core.fairshare import faded
from app.core.island import (
    Conditions,
    Decision,
    Device,
    Plan,
    Policy,
    Snapshot,
    Task,
    Tenant,
    User,
)
from app.core.lifecycle import ENDED, ON_A_DEVICE, Move, State

STORY_LINES = 20  # of the timeline, told with what is broken
STANDSTILL_ROUNDS = 100  # at one instant


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A task that comes at `at_s` and needs a device for `work_s` seconds."""

    at_s: float
    task: str
    tenant: str
    user: str
    work_s: float
    kind: str = "cpu"
    memory_bytes: int = 0
    priority: int = 0
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """How long imaginary devices take: to prepare a task, to let go of one, to save its image."""

    start_s: float = 0.0
    pause_s: float = 0.0
    save_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One decision, and when it was made."""

    at_s: float
    decision: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """`device_s` is what each tenant held; `waits_s` runs from a task's arrival to its first start.

    `finished` maps each task that is done to when it was; the clock stopped at `until_s`.
    """

    device_s: Mapping[str, float]
    waits_s: Mapping[str, float]
    pauses: Mapping[str, int]
    finished: Mapping[str, float]
    timeline: tuple[Line, ...]
    until_s: float


class Broken(Exception):
    """What must always hold does not: what, when, and the decisions before it."""

    def __init__(self, what: str, *, at_s: float, timeline: Iterable[Line]) -> None:
        self.what, self.at_s = what, at_s
        told = [f"at {at_s:.6f} s: {what}"]
        for line in list(timeline)[-STORY_LINES:]:
            made = line.decision
            told.append(f"{line.at_s:.6f} {made.move} {made.task} {made.device or ''}")
        super().__init__("\n".join(told))


def simulate(
    arrivals: Iterable[Arrival],
    devices: Iterable[Device],
    tenants: Iterable[Tenant],
    policy: Policy,
    *,
    costs: Costs | None = None,
    until_s: float = math.inf,
) -> Report:
    """Run an island from 0 s until all is done or `until_s` has come; may raise Broken."""
    world = World(arrivals, devices, tenants, policy, costs or Costs())
    rounds_at: Counter[int] = Counter()
    while (at_us := world.next_us()) is not None and at_us <= until_s * 1e6:
        world.advance(at_us)
        rounds_at[at_us] += 1
        if rounds_at[at_us] > STANDSTILL_ROUNDS:
            raise Broken("the clock stands still", at_s=world.now_s, timeline=world.timeline)
        seen = world.snapshot()
        plan = decide(seen, now_s=world.now_s)
        world.obey(plan)
        check(world, seen, plan)
    if math.isfinite(until_s):
        world.advance(_us(until_s))
    return world.report()


# --- the world ----------------------------------------------------------------------------------


@dataclass(order=True, slots=True)
class _Event:
    """What a device will say; it counts if that epoch still holds then."""

    at_us: int
    seq: int
    says: str = field(compare=False)  # a Move, or "Saved"
    task: str = field(compare=False)
    epoch: int = field(compare=False)


class World:
    """Devices, tasks and the clock.  What the island believes is always what is true here."""

    def __init__(
        self,
        arrivals: Iterable[Arrival],
        devices: Iterable[Device],
        tenants: Iterable[Tenant],
        policy: Policy,
        costs: Costs,
    ) -> None:
        self.policy, self.costs = policy, costs
        self.arrivals = sorted(arrivals, key=lambda arrival: (arrival.at_s, arrival.task))
        self.devices = {d.id: replace(d, lease_until_s=math.inf) for d in devices}
        self.tenants = {tenant.id: tenant for tenant in tenants}
        self.users = {a.user: User(id=a.user, tenant=a.tenant) for a in self.arrivals}
        self.tasks: dict[str, Task] = {}
        self.now_us = 0
        self.timeline: list[Line] = []
        self.seated: dict[str, str] = {}  # device -> the task that holds its seat
        self._coming: dict[str, str] = {}  # device -> the task that is ready for its seat
        self._events: list[_Event] = []
        self._seq = 0
        self._came = 0
        self._look_again_us: int | None = None
        self._left_us = {a.task: _us(a.work_s) for a in self.arrivals}
        self._freed_us: dict[str, int] = {}
        self._device_us: Counter[str] = Counter()
        self._first_us: dict[str, int] = {}
        self._finished_us: dict[str, int] = {}

    @property
    def now_s(self) -> float:
        return self.now_us / 1e6

    # --- time passes ---

    def next_us(self) -> int | None:
        """When something happens next; None if nothing ever will."""
        instants = [event.at_us for event in self._events[:1]]
        instants += [_us(a.at_s) for a in self.arrivals[self._came : self._came + 1]]
        if self._look_again_us is not None:
            instants.append(self._look_again_us)
        return min(instants, default=None)

    def advance(self, at_us: int) -> None:
        """Let everyone hold their seats until `at_us`, and all happen that happens by then."""
        while self._events and self._events[0].at_us <= at_us:
            event = heappop(self._events)
            self._pass(event.at_us)
            self._happen(event)
        self._pass(at_us)
        while self._came < len(self.arrivals) and _us(self.arrivals[self._came].at_s) <= at_us:
            self._arrive(self.arrivals[self._came])
            self._came += 1

    def _pass(self, at_us: int) -> None:
        passed_us, self.now_us = at_us - self.now_us, at_us
        for id in self.seated.values():
            task = self.tasks[id]
            self._left_us[id] -= passed_us
            self._device_us[task.tenant] += passed_us
            self.tasks[id] = replace(
                task, held_us=task.held_us + passed_us, accrued_us=task.accrued_us + passed_us
            )

    def _arrive(self, arrival: Arrival) -> None:
        waits_for = tuple(id for id in arrival.after if id not in self._finished_us)
        self.tasks[arrival.task] = Task(
            id=arrival.task,
            request=arrival.task,
            tenant=arrival.tenant,
            user=arrival.user,
            state=State.blocked,
            epoch=0,
            kind=arrival.kind,
            memory_bytes=arrival.memory_bytes,
            priority=arrival.priority,
            submitted_s=arrival.at_s,
            conditions=Conditions(waits_for=waits_for),
        )

    # --- devices say what came true ---

    def _happen(self, event: _Event) -> None:
        task = self.tasks[event.task]
        if task.epoch != event.epoch or task.state in ENDED:
            return
        if event.says == "Saved":
            self.tasks[task.id] = replace(task, saved=True)
        elif event.says == "ready":
            self._coming[task.seat or ""] = task.id
            self._seat_next(task.seat or "")
        elif task.state in ON_A_DEVICE:
            self._let_go(task, event.says)

    def _seat_next(self, device: str) -> None:
        """Who is ready takes the seat, once it is free."""
        if device in self.seated or device not in self._coming:
            return
        task = self.tasks[self._coming.pop(device)]
        empty_us = self.now_us - max(self._freed_us.get(device, 0), _us(task.launched_s))
        self.seated[device] = task.id
        self._first_us.setdefault(task.id, self.now_us)
        self.tasks[task.id] = replace(
            task,
            state=lifecycle.after(task.id, task.state, Move.Started),
            started_s=self.now_s,
            switch_us=empty_us if task.epoch > 1 else 0,  # to start afresh is no switch
            image_on=None,
        )
        self._say(Move.Finished, task, self._left_us[task.id])

    def _let_go(self, task: Task, says: str) -> None:
        device = task.seat or ""
        del self.seated[device]
        self._freed_us[device] = self.now_us
        self._charge(task, self.devices[device])
        paused = says == Move.Paused
        self.tasks[task.id] = replace(
            task,
            state=lifecycle.after(task.id, task.state, says),
            seat=None,
            started_s=None,
            held_us=0,
            accrued_us=0,
            image_on=device if paused else None,
            saved=not paused,
        )
        if paused:
            self._say("Saved", task, _us(self.costs.save_s))
        else:
            self._finish(task)
        self._seat_next(device)

    def _charge(self, task: Task, device: Device) -> None:
        charge = faded(
            task.accrued_us * device.cost // 1000,
            at_s=self.now_s,
            since_s=self.policy.since_s,
            half_life_s=self.policy.half_life_s,
        )
        tenant, user = self.tenants[task.tenant], self.users[task.user]
        self.tenants[tenant.id] = replace(tenant, faded_us=tenant.faded_us + charge)
        self.users[user.id] = replace(user, faded_us=user.faded_us + charge)

    def _finish(self, done: Task) -> None:
        self._finished_us[done.id] = self.now_us
        for task in list(self.tasks.values()):
            if done.id in task.conditions.waits_for:
                left = tuple(id for id in task.conditions.waits_for if id != done.id)
                self.tasks[task.id] = replace(task, conditions=Conditions(waits_for=left))

    def _say(self, says: str, task: Task, in_us: int) -> None:
        self._seq += 1
        event = _Event(self.now_us + max(0, in_us), self._seq, says, task.id, task.epoch)
        heappush(self._events, event)

    # --- what the island sees, and does ---

    def snapshot(self) -> Snapshot:
        return Snapshot(
            island="imaginary",
            policy=self.policy,
            tenants=dict(self.tenants),
            users=dict(self.users),
            devices=dict(self.devices),
            tasks={id: task for id, task in self.tasks.items() if task.state not in ENDED},
        )

    def obey(self, plan: Plan) -> None:
        """Write the plan down, and let the devices begin what it orders."""
        for decision in plan.decisions:
            self.timeline.append(Line(at_s=self.now_s, decision=decision))
            task = self.tasks[decision.task]
            state = lifecycle.after(task.id, task.state, decision.move)
            self.tasks[task.id] = task = replace(task, state=state)
            if decision.move == Move.Launch:
                self._launch(task, decision.device or "")
            elif decision.move == Move.Pause:
                self._say(Move.Paused, task, _us(self.costs.pause_s))
        look_s = plan.look_again_s
        finite = look_s is not None and math.isfinite(look_s)
        self._look_again_us = math.ceil((look_s or 0.0) * 1e6) if finite else None

    def _launch(self, task: Task, device: str) -> None:
        task = replace(task, epoch=task.epoch + 1, seat=device, launched_s=self.now_s)
        resident = task.image_on == device
        self.tasks[task.id] = task
        self._say("ready", task, 0 if resident else _us(self.costs.start_s))

    def report(self) -> Report:
        pauses = Counter(
            line.decision.task for line in self.timeline if line.decision.move == Move.Pause
        )
        came_us = {a.task: _us(a.at_s) for a in self.arrivals}
        return Report(
            device_s={id: self._device_us[id] / 1e6 for id in self.tenants},
            waits_s={id: (at_us - came_us[id]) / 1e6 for id, at_us in self._first_us.items()},
            pauses=pauses,
            finished={id: at_us / 1e6 for id, at_us in self._finished_us.items()},
            timeline=tuple(self.timeline),
            until_s=self.now_s,
        )


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


# --- what must always hold ----------------------------------------------------------------------


def check(world: World, seen: Snapshot, plan: Plan) -> None:
    """Look at the world after it obeyed a plan made of what was `seen`; raises Broken."""
    for what in (*_doubled(world), *_idle(world), *_hasty(seen, plan), *_unexplained(world, plan)):
        raise Broken(what, at_s=world.now_s, timeline=world.timeline)


def _doubled(world: World) -> Iterable[str]:
    """A device gives its seat to one task at a time."""
    held = Counter(task.seat for task in world.tasks.values() if task.state in HOLDS_A_SEAT)
    return [f"{n} tasks were promised {device}" for device, n in held.items() if n > 1]


def _idle(world: World) -> Iterable[str]:
    """No device stands free while a task that could run there waits."""
    held = {task.seat for task in world.tasks.values() if task.state in ON_A_DEVICE}
    for task in world.tasks.values():
        if task.state != State.waiting:
            continue
        pin = None if task.saved else task.image_on
        for device in world.devices.values():
            could = device.kind == task.kind and device.memory_bytes >= task.memory_bytes
            if could and device.id not in held and not device.cordoned and pin in (None, device.id):
                yield f"{device.id} is free and {task.id} waits"


def _hasty(seen: Snapshot, plan: Plan) -> Iterable[str]:
    """Nobody is paused for another before one full slice."""
    for decision in plan.decisions:
        if decision.move == Move.Pause and decision.against is not None:
            victim, task = seen.tasks[decision.task], seen.tasks[decision.against]
            if victim.held_us < slice_us(seen.policy, victim, task):
                yield f"{victim.id} was paused after {victim.held_us} µs"


def _unexplained(world: World, plan: Plan) -> Iterable[str]:
    """Every task that waits is told why."""
    for task in world.tasks.values():
        if task.state in lifecycle.NOT_STARTED and not plan.reasons.get(task.id):
            yield f"{task.id} is {task.state} and not told why"
