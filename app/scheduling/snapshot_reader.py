"""Reads rows into values of `core.model.snapshot`: the only reader for scheduling.

Rows are read in the island's transaction, after the island's row was locked. So nothing that only
the island writes can change between the read and the write of the plan. `load` reads all that is
alive; `app.scheduling.board_follower` reads what changed.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Text, and_, cast, func, select
from sqlalchemy.orm import Session, aliased

from app.core.fairness.reservation import owed
from app.core.model.checkpoints.migration import MOVABLE
from app.core.model.device_choice import NOW, TRAITS, traits_now
from app.core.model.lifecycle import ENDED, ON_A_DEVICE, State
from app.core.model.retry_decision import avoided_in
from app.core.model.snapshot import (
    RESTARTS,
    BoardDevice,
    BoardTask,
    BoardTenant,
    BoardUser,
    Conditions,
    IdleCreditFloor,
    Policy,
    Snapshot,
    Terms,
)
from app.core.scheduling.stays import LEAVES_A_SEAT
from app.db.models import Account, Host, LedgerBase, Need, Placement, Reservation
from app.db.models import Device as DeviceRow
from app.db.models import Lift as LiftRow
from app.db.models import Task as TaskRow
from app.db.models import Tenant as TenantRow
from app.db.models import User as UserRow
from app.db.transactions import AnyRow, AnySelect
from app.db.user_limits import bound_of
from app.scheduling import gang_tickets, guest_placements, ledger
from app.settings import settings

_BROKEN = ("failed", "cancelled")


def load(session: Session, island: str, *, now_s: float) -> Snapshot:
    """Read all that is alive on an island.

    Use it only for tests and what-ifs, since a million tasks may wait.
    """
    rows = session.execute(tasks().where(TaskRow.island == island, TaskRow.state.not_in(ENDED)))
    return _snapshot(session, island, rows.all(), now_s=now_s)


def without_line(session: Session, island: str, *, now_s: float) -> Snapshot:
    """Read all that is alive, without the tasks that wait or are blocked."""
    on_a_device = tasks().where(TaskRow.island == island, TaskRow.state.in_(ON_A_DEVICE))
    return _snapshot(session, island, session.execute(on_a_device).all(), now_s=now_s)


def _snapshot(session: Session, island: str, rows: Sequence[AnyRow], *, now_s: float) -> Snapshot:
    return Snapshot(
        island=island,
        policy=policy(ledger.base(session)),
        users=users(session, island),
        tenants=tenants(session, island),
        devices=devices(session, island),
        tasks=tasks_of(session, rows, now_s=now_s),
        lifts=lifts(session, island),
    )


def policy(base: LedgerBase) -> Policy:
    return Policy(
        half_life_s=base.half_life_s,
        since_s=base.since_s,
        idle_credit_s=settings().idle_credit_s,
        slice_min_s=settings().slice_min_s,
        slice_max_s=settings().slice_max_s,
        wait_share=settings().wait_share,
        grow_after_s=settings().grow_after_s,
        sharers_max=settings().sharers_max,
        homebound=True,
    )


def users(
    session: Session, island: str, where: ColumnElement[bool] | None = None
) -> dict[str, BoardUser]:
    whose = (UserRow.id, UserRow.tenant_id, UserRow.weight_milli, UserRow.carried)
    bounds = (UserRow.limit, UserRow.max_running, TenantRow.user_defaults)
    spent = (UserRow.exhausted, UserRow.budget_ends_at)
    reserved = UserRow.reserved[island].label("reserved")
    query = select(*whose, *bounds, *spent, reserved, Account.faded)
    query = query.join(TenantRow, TenantRow.id == UserRow.tenant_id)
    query = query.outerjoin(Account, Account.user_id == UserRow.id)
    rows = session.execute(query if where is None else query.where(where))
    return {
        row.id: BoardUser(
            id=row.id,
            tenant=row.tenant_id,
            weight=row.weight_milli,
            faded_us=int(row.faded or 0),
            carried_us=int(row.carried),
            guarantee=row.reserved or {},
            limit=bound_of(row, "limit") or {},
            most_running=bound_of(row, "max_running"),
            exhausted=row.exhausted,
            budget_ends_s=_seconds(row.budget_ends_at) or 0.0,
        )
        for row in rows
    }


def lifts(session: Session, island: str) -> tuple[IdleCreditFloor, ...]:
    query = select(LiftRow.tenant_id, LiftRow.user_id, LiftRow.kind, LiftRow.faded)
    return tuple(
        IdleCreditFloor(tenant=tenant, user=user, kind=kind, faded_us=int(faded))
        for tenant, user, kind, faded in session.execute(query.where(LiftRow.island == island))
    )


def tenants(session: Session, island: str) -> dict[str, BoardTenant]:
    """Read the tenants; what is reserved for them now counts as guaranteed.

    The root is read as a sibling of its children: it owns no share, but its users may ask for
    devices.
    """
    rows = session.scalars(select(TenantRow)).all()
    root = {row.id for row in rows if row.parent_id is None}
    return {
        row.id: BoardTenant(
            id=row.id,
            name=row.name,
            weight=row.weight_milli,
            parent=None if row.parent_id in root else row.parent_id,
            guarantee=owed(row.guarantee, row.reserved.get(island, {})),
            limit=row.limit,
            most_running=row.max_running,
            carried_us=int(row.carried),
            exhausted=row.exhausted,
            budget_ends_s=_seconds(row.budget_ends_at) or 0.0,
        )
        for row in rows
    }


def devices(
    session: Session, island: str, where: ColumnElement[bool] | None = None
) -> dict[str, BoardDevice]:
    query = (
        select(*_DEVICE, Host.cordoned.label("drained"))
        .join(Host, Host.name == DeviceRow.host)
        .outerjoin(Reservation, Reservation.id == DeviceRow.reserved_by)
        .where(DeviceRow.island == island)
    )
    rows = session.execute(query if where is None else query.where(where))
    return {row.id: _device(row) for row in rows}


_DEVICE = (
    DeviceRow.id, DeviceRow.host, DeviceRow.kind, DeviceRow.lease_until, DeviceRow.cordoned,
    DeviceRow.memory_bytes, DeviceRow.cost_milli, DeviceRow.grace_us,
    func.coalesce(
        DeviceRow.facts["failed"].astext,
        DeviceRow.fitness["cordon"]["reason"].astext,
        func.nullif(DeviceRow.maintenance, ""),
    ).label("unfit"),
    DeviceRow.facts["stopping"].label("stopping"),
    func.coalesce(Reservation.user_id, Reservation.tenant_id).label("reserved_for"),
    DeviceRow.reserved_by,
    *(DeviceRow.facts[name].label(name) for name in (*TRAITS, *NOW, "rack", "location")),
)  # fmt: skip


def _device(row: AnyRow) -> BoardDevice:
    return BoardDevice(
        id=row.id,
        host=row.host,
        kind=row.kind,
        up=row.lease_until is not None,
        cordoned=row.cordoned or row.drained,
        stopping=bool(row.stopping),
        unfit=row.unfit or "",
        memory_bytes=row.memory_bytes,
        cost=row.cost_milli,
        lease_until_s=_seconds(row.lease_until) or 0.0,
        grace_s=row.grace_us / 1e6,
        traits=replace(traits_now(row._mapping), kept_for=row.reserved_by),
        rack=row.rack or "",
        inside=tuple(row.location or ()),
        reserved_for=row.reserved_for or "",
    )


_COLUMNS = (
    TaskRow.id, TaskRow.request_id, TaskRow.tenant_id, TaskRow.user_id, TaskRow.state,
    TaskRow.epoch, TaskRow.kind, TaskRow.memory_bytes, TaskRow.priority, TaskRow.submitted_at,
    TaskRow.hold, TaskRow.not_before, TaskRow.seat, TaskRow.launched_at, TaskRow.started_at,
    TaskRow.resized_at, TaskRow.held_us, TaskRow.total_held_us, TaskRow.unheard_us,
    TaskRow.prepared_us,
    TaskRow.image_on, TaskRow.saved, TaskRow.switch_us, TaskRow.cancel_asked_at,
    TaskRow.attempts, TaskRow.retry_max, TaskRow.retry_at, TaskRow.tier, TaskRow.devices_min,
    TaskRow.devices_max, TaskRow.across_hosts, TaskRow.device_choice, TaskRow.island,
    TaskRow.waiting_since, TaskRow.waited_us, TaskRow.cost_milli, TaskRow.move_to, TaskRow.moving,
    cast(TaskRow.away, Text).label("away"), TaskRow.capabilities, TaskRow.shares, TaskRow.gang_id,
    TaskRow.goes_on_with, TaskRow.unstored, TaskRow.standing, TaskRow.reservation_state,
    cast(TaskRow.avoids, Text).label("avoids"),
    and_(
        TaskRow.descriptor["run"].has_key("graph"),
        func.coalesce(TaskRow.descriptor["world_size"].as_integer(), 1) == 1,
    ).label("graph"),
    TaskRow.descriptor["run"].has_key("part").label("part"),
    TaskRow.descriptor["run"].has_key("function").label("function"),
)  # fmt: skip


_TASKS = select(*_COLUMNS)  # built once, because every round uses it


def tasks(*more: Any) -> AnySelect:
    """Select the columns that `tasks_of` needs of each task, and `more` columns."""
    return _TASKS.add_columns(*more)


def tasks_of(session: Session, rows: Sequence[AnyRow], *, now_s: float) -> dict[str, BoardTask]:
    """Turn rows of `tasks` into values, with what blocked tasks wait for."""
    waits_for, broken = _needs(session, {row.id: row for row in rows if row.state == "blocked"})
    parts = [row.id for row in rows if row.part and row.state not in (State.blocked, *ENDED)]
    broken = {**broken, **_never_given(session, parts)}
    splicing = _splicing(session, rows)
    spread = [row.id for row in rows if row.resized_at is not None]
    guests = guest_placements.guests(session, spread)
    frozen = guest_placements.of_last_epoch(session, [row.id for row in rows if _is_frozen(row)])
    terms = gang_tickets.terms(session, rows)
    return {
        row.id: _task(
            row,
            waits_for.get(row.id, ()),
            broken.get(row.id, ()),
            elastic=(row.island, row.kind) in splicing,
            guests=guests.get(row.id, ()),
            frozen_with=frozen.get(row.id, ()),
            terms=terms.get(row.id, gang_tickets.NO_TERMS),
            now_s=now_s,
        )
        for row in rows
    }


def _splicing(session: Session, rows: Sequence[AnyRow]) -> frozenset[tuple[str, str]]:
    """Return each (island, kind) in which every device's facts say that ranks can share it
    ("splice").

    Only this decides whether tasks are elastic, that is, may get more devices than they need.
    """
    if all(row.devices_max <= row.devices_min and row.resized_at is None for row in rows):
        return frozenset()
    can = func.coalesce(DeviceRow.facts["splice"].astext == "true", False)
    query = select(DeviceRow.island, DeviceRow.kind).group_by(DeviceRow.island, DeviceRow.kind)
    return frozenset(
        (island, kind) for island, kind in session.execute(query.having(func.bool_and(can)))
    )


def _task(
    row: AnyRow,
    waits_for: Sequence[str],
    broken: Sequence[str],
    *,
    elastic: bool,
    guests: Sequence[Placement],
    frozen_with: Sequence[str],
    terms: Terms,
    now_s: float,
) -> BoardTask:
    started_s = _seconds(row.started_at) if row.state in ON_A_DEVICE else None
    resized_s = None if started_s is None else _seconds(row.resized_at)
    accrued_us, held_us = 0, row.held_us
    if started_s is not None:
        # The next heartbeat charges what the task has held since the last one.
        if not row.shares:
            accrued_us = max(0, int((now_s - started_s) * 1e6) + row.prepared_us - row.held_us)
        held_us = row.held_us + accrued_us
    if resized_s is not None:
        held_us = min(held_us, max(0, int((now_s - resized_s) * 1e6)))
        accrued_us = min(held_us, accrued_us)
    lets_go = row.state in LEAVES_A_SEAT  # it releases all its devices at once
    seats = [each.device_id for each in guests if lets_go or not each.leaving]
    leaves = [each.device_id for each in guests if each.device_id not in seats]
    return BoardTask(
        id=row.id,
        request=row.request_id,
        tenant=row.tenant_id,
        user=row.user_id,
        state=row.state,
        epoch=row.epoch,
        kind=row.kind,
        memory_bytes=row.memory_bytes,
        priority=row.priority,
        submitted_s=_seconds(row.submitted_at) or 0.0,
        conditions=_conditions(row, waits_for, broken, terms),
        waiting_since_s=_seconds(row.waiting_since),
        waited_s=row.waited_us / 1e6,
        away=() if row.away == "[]" else tuple(tuple(one) for one in json.loads(row.away)),
        width=row.devices_min,
        width_max=row.devices_max if elastic else 0,
        across_hosts=row.across_hosts,
        one_host=row.devices_min > 1 and not row.across_hosts,
        choice=row.device_choice,
        tier=row.tier,
        movable=MOVABLE in row.capabilities,
        moves_to=_moves_to(row),
        stops=row.moving is not None and row.moving["stopping"],
        seats=(row.seat, *seats) if row.seat is not None else (),
        leaves=tuple(leaves),
        launched_s=_seconds(row.launched_at) or 0.0,
        started_s=started_s,
        resized_s=resized_s,
        prepared_us=0 if started_s is None else row.prepared_us,
        accrued_us=accrued_us,
        held_us=held_us,
        had_us=max(0, row.total_held_us - row.unheard_us),
        image_on=row.image_on,
        image_with=tuple(frozen_with),
        saved=row.saved,
        restarts=RESTARTS in row.capabilities,
        goes_on_with=row.goes_on_with,
        switch_us=row.switch_us,
        graph=row.graph,
        function=row.function,
        gang=row.gang_id or "",
        ticket=gang_tickets.is_ticket(row),
        shares=row.shares,
        cost=row.cost_milli,
        cancel_asked=row.cancel_asked_at is not None,
        attempts=row.attempts,
        retry_max=row.retry_max,
        retry_at_s=_seconds(row.retry_at) or 0.0,
        avoids=() if row.avoids == "[]" else tuple(avoided_in(json.loads(row.avoids))),
        unstored=row.unstored,
    )


def _is_frozen(row: AnyRow) -> bool:
    """True if the processes of a command are frozen on several devices."""
    lies = row.image_on is not None and row.state not in ON_A_DEVICE
    return lies and row.devices_min > 1 and RESTARTS in row.capabilities


def _moves_to(row: AnyRow) -> str | None:
    if row.move_to is None:
        return None
    return row.moving["to"] if row.moving is not None else ""


_FREE = Conditions()


def _conditions(
    row: AnyRow, waits_for: Sequence[str], broken: Sequence[str], terms: Terms
) -> Conditions:
    other = row.standing or row.hold or row.not_before or row.gang_id or row.reservation_state
    if not (waits_for or broken or other):
        return _FREE
    return Conditions(
        waits_for=tuple(waits_for),
        broken=tuple(broken),
        standing=row.standing,
        not_before_s=_seconds(row.not_before),
        reservation=row.reservation_state,
        hold=row.hold,
        terms=terms,
    )


def _needs(
    session: Session, blocked: Mapping[str, AnyRow]
) -> tuple[Mapping[str, list[str]], Mapping[str, list[str]]]:
    """Return the tasks for which each task waits, and which of these failed or were cancelled.

    Those of other requests are left out while the task's `standing` says that it waits for them.
    """
    waits_for: dict[str, list[str]] = defaultdict(list)
    broken: dict[str, list[str]] = defaultdict(list)
    if not blocked:
        return waits_for, broken
    needed = aliased(TaskRow)
    query = (
        select(Need.task_id, needed.id, needed.state, needed.request_id)
        .join(needed, needed.id == Need.needs_id)
        .where(Need.task_id == func.any(list(blocked)), needed.state != "done")
        .where((Need.given.is_(None) & ~Need.late) | needed.state.in_(_BROKEN))
        .group_by(Need.task_id, needed.id, needed.state, needed.request_id)
        .order_by(Need.task_id, func.min(needed.ordinal))
    )
    for task_id, needs_id, state, request_id in session.execute(query):
        task = blocked[task_id]
        if task.standing and task.request_id != request_id:
            continue
        (broken if state in _BROKEN else waits_for)[task_id].append(needs_id)
    return waits_for, broken


def _never_given(session: Session, parts: Sequence[str]) -> Mapping[str, list[str]]:
    """Return for each partition the tasks that failed or were cancelled before they made its input.
    Such a partition has begun, or may begin, without the input.
    """
    broken: dict[str, list[str]] = defaultdict(list)
    if not parts:
        return broken
    maker = aliased(TaskRow)
    query = (
        select(Need.task_id, maker.id)
        .join(maker, maker.id == Need.needs_id)
        .where(Need.task_id == func.any(list(parts)), Need.given.is_(None))
        .where(maker.state.in_(_BROKEN))
        .group_by(Need.task_id, maker.id)
        .order_by(Need.task_id, func.min(maker.ordinal))
    )
    for task_id, maker_id in session.execute(query):
        broken[task_id].append(maker_id)
    return broken


def _seconds(at: datetime | None) -> float | None:
    return at.timestamp() if at is not None else None
