"""Simulates: replays an island's history, or invented arrivals, with other settings.

The history is every task that held a device and ended within the window. In the replay each task
arrives when it was submitted, needs as many devices for as long as it held them, and waits for the
same tasks. Members of a lot with a rule `stop` reach its rungs with the values that they had, and
pause or go on as the rule says. The history is replayed twice by the scheduler's own code: with the
island as it is, and with the changes. Neither run knows usage from before the window, and neither
uses cordoned devices. Both hold to the budgets of today, of which nothing is spent at first.

Nothing is written. A replay is limited in arrivals and in time, and each process runs one at a
time.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from statistics import median
from threading import Lock
from typing import Any

from sqlalchemy import ColumnElement, func, select, true
from sqlalchemy.orm import Session

from app.core.fairness.budget import Budget, budget_of, time_us
from app.core.model.device_choice import with_packages
from app.core.model.fields import escaped
from app.core.model.lifecycle import ENDED
from app.core.model.provisions.stop_rule import rule_in
from app.core.model.request_needs import STARTED
from app.core.model.snapshot import BoardDevice, BoardTenant, Policy, Snapshot
from app.core.simulation.replayed_lot import LotRule, RungMark
from app.core.simulation.replayed_reservations import Maintained, ReservedFor
from app.core.simulation.simulator import Arrival, Costs, SimulationStopped
from app.core.simulation.what_if import Setup, run
from app.db import tenant_tree, transactions
from app.db.models import (
    Island,
    Lot,
    Need,
    RequestNeed,
    Reservation,
    ReservationWindow,
    RungResult,
    Task,
    Tenant,
)
from app.db.reserved_times import ReservedTimes
from app.errors import BadInput, Conflict
from app.scheduling import budgets, ledger, snapshot_reader

MOST_ARRIVALS = 20_000
MOST_DEVICES = 10_000
BUDGET_S = 20.0  # time limit for both replays together
WINDOW = timedelta(days=7)

_one_at_a_time = Lock()

ByTenant = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Lists the changes to try; None or an empty mapping means no change. Tenants are named by
    name, devices by kind.
    """

    policy: str = "fair"
    devices: Mapping[str, int] | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    guarantees: ByTenant = field(default_factory=dict)
    limits: ByTenant = field(default_factory=dict)
    half_life_s: float | None = None
    slice_min_s: float | None = None
    slice_max_s: float | None = None
    grow_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """Describes an invented arrival; `tenant` is a name, known or new.

    It needs `width` devices and can use `width_max`; `work_s` is its time on `width_max` devices
    (on `width` if it cannot grow).
    """

    at_s: float
    tenant: str
    work_s: float
    user: str = "all"
    width: int = 1
    width_max: int = 0
    kind: str = "cpu"
    memory_bytes: int = 0
    priority: int = 0
    tier: str = "standard"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayInput:
    """Holds the input of a replay: the island and the arrivals. `left_out` tasks ended without a
    device.
    """

    as_is: Snapshot
    arrivals: Sequence[Arrival]
    lots: Mapping[str, LotRule] = field(default_factory=dict)
    budgets: Mapping[str, Budget] = field(default_factory=dict)  # of tenants and users, by id
    reserved: Sequence[ReservedFor] = ()
    maintained: Sequence[Maintained] = ()
    begins_us: int = 0  # when its clock is at 0, in µs since 1970
    resume_s: float = 0.0
    left_out: int = 0


def _still(session: Session, island: str) -> Snapshot:
    """Return the island without its tasks; raises BadInput if there is none."""
    if session.get(Island, island) is None:
        known = ", ".join(sorted(session.scalars(select(Island.name)))) or "none"
        raise BadInput.at("/island", f"must be one of {known}; got {island!r}")
    return Snapshot(
        island=island,
        policy=snapshot_reader.policy(ledger.base(session)),
        users=snapshot_reader.users(session, ""),
        tenants=_told_apart(snapshot_reader.tenants(session, "")),
        devices=snapshot_reader.devices(session, island),
        tasks={},
    )


def _reserved(session: Session, island: str) -> tuple[ReservedFor, ...]:
    """Return the windows of the island's reservations that are known still, by begin."""
    owners, found = dict[str, tuple[str, ...]](), []
    time_of = ReservedTimes(session, island)
    for window, it in _windows(session, island, Reservation.tenant_id.is_not(None)):
        if it.id not in owners:
            path = tuple(each.id for each in tenant_tree.path(session, str(it.tenant_id)))
            owners[it.id] = (it.user_id, *path) if it.user_id else path
        time = time_of(it, window.begins_at, window.ends_at)
        found.append(ReservedFor(owners[it.id], time, it.id))
    return tuple(found)


def _maintained(session: Session, island: str) -> tuple[Maintained, ...]:
    """Return the windows of the island's maintenance that are known still, by begin."""
    return tuple(
        Maintained(tuple(it.device_ids), time_us(window.begins_at), time_us(window.ends_at))
        for window, it in _windows(session, island, Reservation.tenant_id.is_(None))
    )


def _windows(session: Session, island: str, which: ColumnElement[bool]) -> Iterable[Any]:
    mine = Reservation.id == ReservationWindow.reservation_id, Reservation.island == island
    query = select(ReservationWindow, Reservation).where(*mine, which)
    return session.execute(query.order_by(ReservationWindow.begins_at)).all()


def _budgets(session: Session) -> dict[str, Budget]:
    """Return the budgets of tenants and users, by id."""
    rows = [
        *session.execute(select(Tenant.id, Tenant.budget).where(Tenant.budget.is_not(None))),
        *budgets.of_users(session, true()).items(),
    ]
    return {id: budget_of(stored) for id, stored in rows}


def _told_apart(tenants: Mapping[str, BoardTenant]) -> dict[str, BoardTenant]:
    """Add the id to the name of each tenant that shares its name with others."""
    times = Counter(tenant.name for tenant in tenants.values())
    return {
        id: replace(tenant, name=f"{tenant.name} ({id})") if times[tenant.name] > 1 else tenant
        for id, tenant in tenants.items()
    }


# --- arrivals -----------------------------------------------------------------------------------


def of_history(
    session: Session,
    island: str,
    *,
    since: datetime | None,
    until: datetime | None,
    durations_known: bool,
) -> tuple[ReplayInput, datetime, datetime]:
    """Read the tasks that ended on an island from `since` up to, not including, `until`; default:
    the last week.

    Raises BadInput for an unknown island, an empty window, or too many tasks in it.
    """
    as_is = _still(session, island)
    until = until or session.scalar(select(func.now()))
    assert until is not None
    since = since or until - WINDOW
    if since >= until:
        raise BadInput.at("/since", "must be before `until`", "order")
    rows = _ended(session, island, since, until)
    ran = [row for row in rows if row.total_held_us > 0]
    lots = _lots_with_rules(session, ran)
    others = [row for row in ran if row.lot_id not in lots]
    needs = _needs(session, {row.id for row in ran}) | _earlier_members(session, others)
    rungs = _rung_marks(session, {row.id: row for row in ran if row.lot_id in lots})
    awaited = _tasks_of_needed_requests(session, {row.id: row.lot_id for row in ran})
    needs |= {id: (*needs.get(id, ()), *those) for id, those in awaited.items()}
    began_s = min((_arrived_s(row) for row in ran), default=0.0)
    switches = [row.switch_us / 1e6 for row in ran if row.pauses and row.switch_us]
    scene = ReplayInput(
        as_is=as_is,
        arrivals=[
            replace(
                _arrival(row, began_s, needs.get(row.id, ()), known=durations_known),
                lot=row.lot_id if row.lot_id in lots else "",
                rungs=rungs.get(row.id, ()),
            )
            for row in ran
        ],
        lots=lots,
        budgets=_budgets(session),
        reserved=_reserved(session, island),
        maintained=_maintained(session, island),
        begins_us=round(began_s * 1e6),
        resume_s=median(switches) if switches else 0.0,
        left_out=len(rows) - len(ran),
    )
    return scene, since, until


_COLUMNS = (
    Task.id, Task.tenant_id, Task.user_id, Task.kind, Task.devices_min, Task.memory_bytes,
    Task.device_choice, Task.priority, Task.tier, Task.submitted_at, Task.not_before,
    Task.total_held_us, Task.pauses, Task.switch_us, Task.lot_id, Task.lot_index, Task.step,
    Task.reservation_id,
)  # fmt: skip


def _ended(session: Session, island: str, since: datetime, until: datetime) -> list[Any]:
    query = (
        select(*_COLUMNS)
        .where(Task.island == island, Task.state.in_(ENDED))
        .where(Task.ended_at >= since, Task.ended_at < until)
        .order_by(Task.ended_at.desc(), Task.id)
        .limit(MOST_ARRIVALS + 1)
    )
    rows = list(session.execute(query))
    if len(rows) > MOST_ARRIVALS:
        told = f"more than {MOST_ARRIVALS} tasks ended in that time; choose a shorter time"
        raise BadInput.at("/since", told, "too-many")
    return rows


def _needs(session: Session, ids: set[str]) -> dict[str, tuple[str, ...]]:
    """Return for each task the other tasks of the list that it needed."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for task_id, needs_id in session.execute(
        select(Need.task_id, Need.needs_id)
        .where(Need.task_id.in_(ids), ~Need.late)
        .order_by(Need.needs_id)
    ):
        if needs_id in ids:
            found[task_id][needs_id] = None
    return {task_id: tuple(needed) for task_id, needed in found.items()}


def _tasks_of_needed_requests(
    session: Session, ran: Mapping[str, str | None]
) -> dict[str, tuple[str, ...]]:
    """Return for each task, which are given with their lots, the tasks of the list that belong to
    requests whose end it awaited.

    A start that was awaited had happened when such a task started; the replay does not know it.
    """
    whose = defaultdict[str, list[str]](list)
    for id, lot in ran.items():
        whose[lot or id].append(id)
    query = select(RequestNeed.task_id, Task.id).join(
        Task, Task.request_id == RequestNeed.needs_request_id
    )
    ends = (RequestNeed.awaited != STARTED, RequestNeed.needs_task_id.in_(("", Task.id)))
    rows = session.execute(query.where(RequestNeed.task_id.in_(whose), *ends).order_by(Task.id))
    found = defaultdict[str, list[str]](list)
    for task_id, needed in rows:
        if needed in ran:
            for id in whose[task_id]:
                found[id].append(needed)
    return {id: tuple(those) for id, those in found.items()}


def _earlier_members(session: Session, rows: Sequence[Any]) -> dict[str, tuple[str, ...]]:
    """Return for each member of a lot the member in whose place it came, by the lot's `at_once`.

    What members need was done before the first of them was made.
    """
    lots = {row.lot_id for row in rows if row.lot_index is not None}
    query = select(Lot.id, Lot.at_once).where(Lot.id.in_(lots), Lot.at_once > 0)
    widths = {id: at_once for id, at_once in session.execute(query)} if lots else {}
    members = {(row.lot_id, row.lot_index): row.id for row in rows if row.lot_id in widths}
    found = dict[str, tuple[str, ...]]()
    for (lot, index), id in members.items():
        if (lot, index - widths[lot]) in members:
            found[id] = (members[lot, index - widths[lot]],)
    return found


def _lots_with_rules(session: Session, rows: Sequence[Any]) -> dict[str, LotRule]:
    """Return the lots of these members that have a rule `stop`."""
    lots = {row.lot_id for row in rows if row.lot_index is not None}
    query = select(Lot.id, Lot.at_once, Task.descriptor["stop"]).join(Task, Task.id == Lot.id)
    found = session.execute(query.where(Lot.id.in_(lots))) if lots else ()
    rules = ((id, at_once, rule_in({"stop": stored})) for id, at_once, stored in found)
    return {id: LotRule(stop=rule, at_once=at_once) for id, at_once, rule in rules if rule}


def _rung_marks(session: Session, members: Mapping[str, Any]) -> dict[str, tuple[RungMark, ...]]:
    """Return after how much of its work each member reached its rungs, if its steps were alike."""
    found = defaultdict[str, list[RungMark]](list)
    query = select(RungResult).where(RungResult.task_id.in_(members))
    for row in session.scalars(query.order_by(RungResult.task_id, RungResult.rung)):
        member = members[row.task_id]
        if row.rung == len(found[row.task_id]):
            part = min(1.0, row.step / member.step) if member.step else 1.0
            mark = RungMark(work_s=part * member.total_held_us / 1e6, value=row.value)
            found[row.task_id].append(mark)
    return {id: tuple(marks) for id, marks in found.items()}


def _arrived_s(row: Any) -> float:
    at: datetime = max(filter(None, (row.submitted_at, row.not_before)))
    return at.timestamp()


def _arrival(row: Any, began_s: float, after: tuple[str, ...], *, known: bool) -> Arrival:
    work_s = row.total_held_us / 1e6
    return Arrival(
        at_s=_arrived_s(row) - began_s,
        task=row.id,
        tenant=row.tenant_id,
        user=row.user_id,
        work_s=work_s,
        width=row.devices_min,
        kind=row.kind,
        memory_bytes=row.memory_bytes,
        choice=with_packages(row.device_choice, ""),  # as if they were ready
        priority=row.priority,
        tier=row.tier,
        after=after,
        expected_s=work_s if known else None,
        reservation=row.reservation_id or "",
    )


def of_made(
    session: Session, island: str, made: Sequence[Made], *, durations_known: bool
) -> ReplayInput:
    """Place invented arrivals on the island as it is; new names are tenants of weight 1."""
    as_is = _still(session, island)
    ids = {tenant.name: tenant.id for tenant in as_is.tenants.values()}
    strangers = {one.tenant: f"new {one.tenant}" for one in made if one.tenant not in ids}
    new = {id: BoardTenant(id=id, name=name, weight=1000) for name, id in strangers.items()}
    ids |= strangers
    arrivals = [
        Arrival(
            at_s=one.at_s,
            task=f"a{n:05}",
            tenant=ids[one.tenant],
            user=f"{ids[one.tenant]}/{one.user}",
            work_s=one.work_s,
            width=one.width,
            width_max=one.width_max if one.width_max > one.width else 0,
            kind=one.kind,
            memory_bytes=one.memory_bytes,
            priority=one.priority,
            tier=one.tier,
            expected_s=one.work_s if durations_known else None,
        )
        for n, one in enumerate(made)
    ]
    return ReplayInput(
        as_is=replace(as_is, tenants={**as_is.tenants, **new}),
        arrivals=arrivals,
        budgets=_budgets(session),
        reserved=_reserved(session, island),
        maintained=_maintained(session, island),
        begins_us=round(transactions.now_s(session) * 1e6),
    )


# --- what if ------------------------------------------------------------------------------------


def compare(scene: ReplayInput, what_if: WhatIf, costs: Costs) -> list[dict[str, Any]]:
    """Return the reports of both replays, with `run` "as is" and "what if".

    Raises BadInput for unknown names, or if it takes too long; Conflict while another simulation
    runs.
    """
    as_is = _setup(scene, costs)
    changed = _changed(as_is, what_if)
    if not _one_at_a_time.acquire(blocking=False):
        raise Conflict("another simulation is running here; try again when it is done")
    try:
        ends_at_s = time.monotonic() + BUDGET_S
        return [
            {"run": name, **_within(setup, ends_at_s)}
            for name, setup in (("as is", as_is), ("what if", changed))
        ]
    finally:
        _one_at_a_time.release()


def _within(setup: Setup, ends_at_s: float) -> dict[str, Any]:
    try:
        return run(setup, go_on=lambda: time.monotonic() < ends_at_s)[1]
    except SimulationStopped as stopped:
        told = (
            f"the simulation was not done within {BUDGET_S:.0f} s: {stopped.done} of "
            f"{len(setup.arrivals)} tasks ended; choose a shorter window, fewer arrivals or a "
            "larger slice_min_s"
        )
        raise BadInput.at("", told, "too-long") from None


def _setup(scene: ReplayInput, costs: Costs) -> Setup:
    as_is = scene.as_is
    return Setup(
        arrivals=scene.arrivals,
        lots=scene.lots,
        budgets=scene.budgets,
        reserved=scene.reserved,
        maintained=scene.maintained,
        begins_us=scene.begins_us,
        devices=[_unreserved(device) for device in as_is.devices.values() if device.takes_work],
        tenants=[replace(tenant, carried_us=0, exhausted={}) for tenant in as_is.tenants.values()],
        users=[
            replace(user, faded_us=0, carried_us=0, exhausted={}) for user in as_is.users.values()
        ],
        policy=replace(as_is.policy, since_s=0.0),  # its clock begins with the first arrival
        costs=costs,
    )


def _unreserved(device: BoardDevice) -> BoardDevice:
    """Return a device that serves; the replay itself says for what it is reserved when."""
    traits = replace(device.traits, kept_for=None)
    return replace(device, up=True, reserved_for="", traits=traits)


def _changed(as_is: Setup, what_if: WhatIf) -> Setup:
    devices = as_is.devices
    if what_if.devices is not None:
        devices = _imagined(as_is.devices, what_if.devices)
    return replace(
        as_is,
        devices=devices,
        tenants=_tenants(as_is.tenants, what_if),
        policy=_policy(as_is.policy, what_if),
        named=what_if.policy,
    )


def _policy(policy: Policy, what_if: WhatIf) -> Policy:
    numbers = {
        name: value
        for name in ("half_life_s", "slice_min_s", "slice_max_s", "grow_after_s")
        if (value := getattr(what_if, name)) is not None
    }
    changed = replace(policy, **numbers)
    if changed.slice_min_s > changed.slice_max_s:
        told = f"must be at most slice_max_s, which is {changed.slice_max_s:g}"
        raise BadInput.at("/slice_min_s", told, "order")
    return changed


def _imagined(devices: Sequence[BoardDevice], counts: Mapping[str, int]) -> list[BoardDevice]:
    """Return that many devices of each kind, each a copy of the largest existing device of its
    kind.
    """
    if sum(counts.values()) > MOST_DEVICES:
        raise BadInput.at("/devices", f"must be at most {MOST_DEVICES} devices", "too-many")
    found = []
    for kind, count in counts.items():
        models = [device for device in devices if device.kind == kind]
        any_ = BoardDevice(id="", host="imaginary", kind=kind, memory_bytes=1 << 60)
        model = max(models, key=lambda device: device.memory_bytes, default=any_)
        found += [replace(model, id=f"{kind}.{n:05}") for n in range(count)]
    return found


def _tenants(tenants: Sequence[BoardTenant], what_if: WhatIf) -> list[BoardTenant]:
    names = {tenant.name for tenant in tenants}
    for where in ("weights", "guarantees", "limits"):
        for name in getattr(what_if, where):
            if name not in names:
                told = f"unknown tenant {name!r}"
                raise BadInput.at(f"/{where}/{escaped(name)}", told, "unknown")
    return [_tenant(tenant, what_if) for tenant in tenants]


def _tenant(tenant: BoardTenant, what_if: WhatIf) -> BoardTenant:
    name = tenant.name
    weight = what_if.weights.get(name, tenant.weight / 1000)
    guarantee = what_if.guarantees.get(name, tenant.guarantee)
    limit = what_if.limits.get(name, tenant.limit)
    for kind, devices in guarantee.items():
        if devices > limit.get(kind, math.inf):
            where = "limits" if name in what_if.limits else "guarantees"
            told = f"the guarantee of {devices} must be at most the limit of {limit[kind]}"
            raise BadInput.at(f"/{where}/{escaped(name)}/{escaped(kind)}", told, "order")
    return replace(tenant, weight=round(weight * 1000), guarantee=guarantee, limit=limit)
