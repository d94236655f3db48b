"""Rows become one `core.island.Snapshot`: the only reader for scheduling.

It is read in the island's transaction, after the island's row was locked, so nothing that only the
island writes can change between looking and writing the plan down.
"""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session, aliased

from app import ledger
from app.core.island import Conditions, Device, Policy, Snapshot, Task, Tenant, User
from app.core.lifecycle import ENDED, NOT_STARTED, ON_A_DEVICE
from app.models import Account, Host, LedgerBase, Need
from app.models import Device as DeviceRow
from app.models import Task as TaskRow
from app.models import Tenant as TenantRow
from app.models import User as UserRow
from app.settings import settings

_BROKEN = ("failed", "cancelled")


def load(session: Session, island: str, *, now_s: float) -> Snapshot:
    base = ledger.base(session)
    users = _users(session)
    return Snapshot(
        island=island,
        policy=policy(base),
        users=users,
        tenants=_tenants(session, users),
        devices=_devices(session, island),
        tasks=_tasks(session, island, now_s=now_s),
    )


def policy(base: LedgerBase) -> Policy:
    return Policy(
        half_life_s=base.half_life_s,
        since_s=base.since_s,
        slice_min_s=settings().slice_min_s,
        slice_max_s=settings().slice_max_s,
    )


def _users(session: Session) -> dict[str, User]:
    query = select(UserRow.id, UserRow.tenant_id, Account.faded)
    rows = session.execute(query.outerjoin(Account, Account.user_id == UserRow.id))
    return {
        id: User(id=id, tenant=tenant_id, faded_us=int(faded or 0)) for id, tenant_id, faded in rows
    }


def _tenants(session: Session, users: dict[str, User]) -> dict[str, Tenant]:
    """Decay is linear: what a tenant used is the sum of what its users used."""
    faded: dict[str, int] = defaultdict(int)
    for user in users.values():
        faded[user.tenant] += user.faded_us
    rows = session.execute(select(TenantRow.id, TenantRow.name, TenantRow.weight_milli))
    return {
        id: Tenant(id=id, name=name, weight=weight, faded_us=faded[id]) for id, name, weight in rows
    }


def _devices(session: Session, island: str) -> dict[str, Device]:
    query = (
        select(DeviceRow, Host.cordoned)
        .join(Host, Host.name == DeviceRow.host)
        .where(DeviceRow.island == island)
    )
    return {row.id: _device(row, drained) for row, drained in session.execute(query)}


def _device(row: DeviceRow, drained: bool) -> Device:
    return Device(
        id=row.id,
        host=row.host,
        kind=row.kind,
        up=row.lease_until is not None,
        cordoned=row.cordoned or drained,
        memory_bytes=row.memory_bytes,
        cost=row.cost_milli,
        lease_until_s=_seconds(row.lease_until) or 0.0,
    )


_COLUMNS = (
    TaskRow.id, TaskRow.request_id, TaskRow.tenant_id, TaskRow.user_id, TaskRow.state,
    TaskRow.epoch, TaskRow.kind, TaskRow.memory_bytes, TaskRow.priority, TaskRow.submitted_at,
    TaskRow.hold, TaskRow.not_before, TaskRow.seat, TaskRow.launched_at, TaskRow.started_at,
    TaskRow.held_us, TaskRow.image_on, TaskRow.saved, TaskRow.switch_us, TaskRow.cancel_asked_at,
    TaskRow.attempts, TaskRow.retry_max, TaskRow.retry_at,
)  # fmt: skip


def _tasks(session: Session, island: str, *, now_s: float) -> dict[str, Task]:
    query = select(*_COLUMNS).where(TaskRow.island == island, TaskRow.state.not_in(ENDED))
    waits_for, broken = _needs(session, island)
    return {
        row.id: _task(row, waits_for[row.id], broken[row.id], now_s=now_s)
        for row in session.execute(query)
    }


def _task(row: TaskRow, waits_for: list[str], broken: list[str], *, now_s: float) -> Task:
    started_s = _seconds(row.started_at) if row.state in ON_A_DEVICE else None
    accrued_us = 0
    if started_s is not None:
        # What it has held since the last heartbeat is charged with the next one.
        accrued_us = max(0, int((now_s - started_s) * 1e6) - row.held_us)
    return Task(
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
        conditions=Conditions(
            waits_for=tuple(waits_for),
            broken=tuple(broken),
            not_before_s=_seconds(row.not_before),
            hold=row.hold,
        ),
        seat=row.seat,
        launched_s=_seconds(row.launched_at) or 0.0,
        started_s=started_s,
        accrued_us=accrued_us,
        held_us=row.held_us + accrued_us,
        image_on=row.image_on,
        saved=row.saved,
        switch_us=row.switch_us,
        cancel_asked=row.cancel_asked_at is not None,
        attempts=row.attempts,
        retry_max=row.retry_max,
        retry_at_s=_seconds(row.retry_at) or 0.0,
    )


def _needs(session: Session, island: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """For each task that has not started: what it waits for, and what of that will never come."""
    needed = aliased(TaskRow)
    query = (
        select(Need.task_id, needed.id, needed.state)
        .join(TaskRow, TaskRow.id == Need.task_id)
        .join(needed, needed.id == Need.needs_id)
        .where(TaskRow.island == island, TaskRow.state.in_(NOT_STARTED), needed.state != "done")
        .group_by(Need.task_id, needed.id, needed.state)
        .order_by(Need.task_id, func.min(needed.ordinal))
    )
    waits_for: dict[str, list[str]] = defaultdict(list)
    broken: dict[str, list[str]] = defaultdict(list)
    for task_id, needs_id, state in session.execute(query):
        (broken if state in _BROKEN else waits_for)[task_id].append(needs_id)
    return waits_for, broken


def _seconds(at: datetime | None) -> float | None:
    return at.timestamp() if at is not None else None
