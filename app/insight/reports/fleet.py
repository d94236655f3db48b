"""Devices, and the tasks that hold them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import inf, isfinite
from typing import Any

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from app.core.model.device_choice import WHOLE_MILLI, DeviceTraits, traits_in
from app.core.model.device_fraction import told_fraction
from app.core.model.lifecycle import ON_A_DEVICE
from app.core.security.sandbox_layers import Sandbox
from app.db.models import Device, Host, Placement, Task, Tenant
from app.insight import phases
from app.insight.forecast import steps_to_make
from app.insight.reports.health import DeviceHealthView, device_failure, device_health
from app.insight.reports.queue import with_names
from app.insight.reports.shares import select_holders
from app.scheduling import guest_placements


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A task on its `devices`, its home device first.  `total_held_us` is the time that it has held
    slots, over all its launches.  `steps` is its parameter of that name, if that is a number that
    the task can still reach.
    """

    id: str
    request_id: str
    name: str
    request: str
    tenant: str
    user: str
    state: str
    phase: str
    devices: tuple[str, ...]
    step: int
    metrics: dict[str, Any]
    started_at: datetime | None
    total_held_us: int
    pauses: int
    lost_steps: int
    steps: int | None = None


def running(session: Session, tenant: str | None) -> list[Running]:
    query = with_names(select(Task), tenant).where(Task.state.in_(ON_A_DEVICE))
    rows = session.execute(query.order_by(Task.seat, Task.id)).all()
    held = held_devices(session, [row[0] for row in rows])
    return [
        Running(
            id=task.id,
            request_id=task.request_id,
            name=task.name,
            request=request,
            tenant=owner,
            user=user,
            state=task.state,
            phase=phases.of_task(task),
            devices=held[task.id],
            step=task.step,
            metrics=task.metrics,
            started_at=task.started_at,
            total_held_us=task.total_held_us + task.held_us,
            pauses=task.pauses,
            lost_steps=task.lost_steps,
            steps=steps_of(task),
        )
        for task, request, owner, user in rows
    ]


def steps_of(task: Task) -> int | None:
    """Return the number of steps that the task will make, if its parameter `steps` tells it."""
    return steps_to_make(task.descriptor.get("params", {}).get("steps"), task.step)


RATE_S = 20.0  # seconds over which steps per second are measured, at least
SHORTEST_RATE_S = 1.0  # the same for a task whose first row is younger


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Holds the newest values of each metric of a task, oldest first, and its steps per second."""

    rate: float | None
    metrics: dict[str, tuple[float, ...]]


def paces(session: Session, tasks: Sequence[str], *, rows: int = 40) -> dict[str, Pace]:
    """Return the pace of each task, from its last `rows` rows of metrics, and the rows before.

    Rows of the same report were recorded at the same time, so the steps per second are measured
    over RATE_S or longer.
    """
    found: dict[str, list[Any]] = defaultdict(list)
    for row in session.execute(
        _NEWEST_METRICS, {"tasks": list(tasks), "rows": rows, "rate_s": RATE_S}
    ):
        found[row.id].insert(0, row)
    return {id: _pace(rows) for id, rows in found.items()}


def _pace(rows: Sequence[Any]) -> Pace:
    metrics: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.told.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                metrics[name].append(_finite(value))
    newest = rows[-1]
    took_s = (newest.at - newest.then_at).total_seconds()
    rate = (newest.step - newest.then_step) / took_s if took_s >= SHORTEST_RATE_S else None
    lines = {name: tuple(filter(isfinite, line)) for name, line in metrics.items()}
    return Pace(rate=rate, metrics=lines)


def _finite(value: float) -> float:
    """Convert a number of a tenant to a float; an int that is too large becomes infinity."""
    try:
        return float(value)
    except OverflowError:
        return inf


_NEWEST_METRICS = text(
    """
    select t.id, m.step, m.at, m.told, coalesce(earlier.step, first.step) as then_step,
        coalesce(earlier.at, first.at) as then_at
    from unnest(cast(:tasks as text[])) as t (id)
    cross join lateral (
        select step, at, values as told from metrics
        where task_id = t.id order by step desc limit :rows
    ) m
    cross join lateral (
        select step, at from metrics where task_id = t.id order by step limit 1
    ) first
    left join lateral (
        select step, at from metrics
        where task_id = t.id and at < (
            select at from metrics where task_id = t.id order by step desc limit 1
        ) - cast(:rate_s as float8) * interval '1 second'
        order by step desc limit 1
    ) earlier on true
    order by t.id, m.step desc
    """
)


def held_devices(session: Session, tasks: Sequence[Task]) -> dict[str, tuple[str, ...]]:
    """Return all devices that each task holds."""
    lent = guest_placements.guests(
        session, [task.id for task in tasks if task.resized_at is not None]
    )
    return {
        task.id: (task.seat, *(guest.device_id for guest in lent[task.id])) if task.seat else ()
        for task in tasks
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class FractionView:
    """A task that holds a `fraction` of a device, such as "0.5"; `task` is None if it is not
    shown.
    """

    fraction: str
    holder: str
    task: Running | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceView:
    """Shows a device and the task that holds it.

    `state` is up, down, failed (`failure` says why), cordoned or stopping. `others` is the number
    of further tasks that take turns on it. `fractions` are the tasks that hold parts of it.

    `holder` is the tenant of that task; None while the device is free. A tenant that asks sees no
    name, and no other detail, of another tenant.
    """

    id: str
    host: str
    kind: str
    state: str
    failure: str
    memory_bytes: int
    traits: DeviceTraits
    location: str
    holder: str | None
    yours: bool
    task: Running | None
    since: datetime | None
    others: int
    fractions: tuple[FractionView, ...]
    sandbox: Sandbox
    health: DeviceHealthView


def devices(session: Session, tenant: str | None, now: datetime) -> list[DeviceView]:
    holders: dict[str, list[Placement]] = defaultdict(list)
    for placement in session.scalars(select_holders()):
        holders[placement.device_id].append(placement)
    names = {id: name for id, name in session.execute(select(Tenant.id, Tenant.name))}
    tasks = {task.id: task for task in running(session, tenant)}
    # HOST.2 before HOST.10
    order = (Device.host, func.length(Device.id), Device.id)
    query = select(Device, Host.cordoned).join(Host, Host.name == Device.host).order_by(*order)
    return [
        _device_view(
            device,
            state=_device_state(device, drained, now),
            placements=holders[device.id],
            tenant=tenant,
            names=names,
            tasks=tasks,
        )
        for device, drained in session.execute(query)
    ]


def _device_state(device: Device, drained: bool, now: datetime) -> str:
    if device.lease_until is None or device.lease_until <= now:
        return "failed" if device_failure(device) else "down"
    if device.cordoned or drained:
        return "cordoned"
    return "stopping" if device.facts.get("stopping") else "up"


def _fraction_view(
    placement: Placement, tenant: str | None, names: Mapping[str, str], tasks: Mapping[str, Running]
) -> FractionView:
    shown = tenant in (None, placement.tenant_id)
    return FractionView(
        fraction=told_fraction(placement.fraction_milli),
        holder=names[placement.tenant_id] if shown else "another tenant",
        task=tasks.get(placement.task_id) if shown else None,
    )


def _device_view(
    device: Device,
    *,
    state: str,
    placements: Sequence[Placement],
    tenant: str | None,
    names: Mapping[str, str],
    tasks: Mapping[str, Running],
) -> DeviceView:
    """Build the view of a device.

    If tasks share it, the asking tenant's own task is shown, if there is one.
    """
    sits = [each for each in placements if not each.leaving]
    mine = [each for each in sits if each.tenant_id == tenant]
    shared = mine if len(sits) > 1 and len(sits) == len(placements) else []
    placement = next(iter((*shared, *placements)), None)
    yours = placement is not None and placement.tenant_id == tenant
    shown = yours or (placement is not None and tenant is None)
    holder, facts = None, device.facts
    if placement is not None:
        holder = names[placement.tenant_id] if shown else "another tenant"
    return DeviceView(
        id=device.id,
        host=device.host,
        kind=device.kind,
        state=state,
        failure=device_failure(device) if state == "failed" else "",
        memory_bytes=device.memory_bytes,
        traits=traits_in(facts),
        location="/".join(
            [device.facts.get("rack") or "", *device.facts.get("location", ())]
        ).strip("/"),
        holder=holder,
        yours=yours,
        task=tasks.get(placement.task_id) if shown and placement is not None else None,
        since=(placement.started_at or placement.launched_at) if shown and placement else None,
        others=max(0, len(sits) - 1),
        fractions=tuple(
            _fraction_view(each, tenant, names, tasks)
            for each in placements
            if each.fraction_milli < WHOLE_MILLI
        ),
        sandbox=Sandbox.of(device.facts),
        health=device_health(device),
    )
