"""Warns and pauses tasks that compute nothing, as their tenants want it.

`core.device.idleness` decides. Only a task that has its device to itself is judged: no other task
can then be the one that computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sqlalchemy.orm import Session

from app.core.device.health_cordons import Fitness, HealthReport
from app.core.device.idleness import IdleStep, judge_idleness
from app.core.model.lifecycle import State
from app.core.model.provisions import session as session_model
from app.core.units import duration
from app.db import transactions
from app.db.models import Device, Task, Tenant
from app.scheduling.journal import task_writer
from app.scheduling.journal.device_rows import DeviceRows
from app.scheduling.journal.reports import device_health

HOLD = "user"  # its members may resume it


def take_in(session: Session, house: DeviceRows) -> bool:
    """Judge the task on a device after its report; True if the task must be paused."""
    device = house.device
    if not device.health.get("idle") and "idle" not in device.fitness:
        return False
    report, fitness = HealthReport.of(device.health), Fitness.of(device.fitness)
    task = _only_task(house) if report is not None and report.idle else None
    pause_s = None if task is None else most_idle_s(session, task)
    if task is None or pause_s is None:
        if fitness.idle is not None:
            device_health.keep(device, replace(fitness, idle=None))
        return False
    idle, step = judge_idleness(
        fitness.idle,
        task=task.id,
        epoch=task.epoch,
        now_s=transactions.now_s(session),
        pause_s=pause_s,
    )
    device_health.keep(device, replace(fitness, idle=idle))
    if step is not None:
        _tell(session, device, task, step, pause_s)
    if step == IdleStep.PAUSE:
        task.hold = HOLD if task.spec.session is None else session_model.HOLD
    return step == IdleStep.PAUSE


def _only_task(house: DeviceRows) -> Task | None:
    """Return the task that has the device, and no other device, to itself."""
    held = [house.tasks[id] for id, _ in house.open if id in house.tasks]
    if len(held) != 1 or house.lent_to:
        return None
    [task] = held
    is_alone = task.devices_min == 1 and task.gang_id is None and task.resized_at is None
    runs = task.state == State.running and task.seat == house.device.id and not task.hold
    return task if is_alone and runs else None


def most_idle_s(session: Session, task: Task) -> int | None:
    """Return the limit that the task's tenant sets, or the nearest tenant above that sets one."""
    return next(idle_limits_s(session, task), None)


def idle_limits_s(session: Session, task: Task) -> Iterator[int]:
    """Yield the limits that the task's tenant and the tenants above it set, the nearest first."""
    above: str | None = task.tenant_id
    while above is not None:
        tenant = session.get_one(Tenant, above)
        if tenant.idle_pause_s is not None:
            yield tenant.idle_pause_s
        above = tenant.parent_id


def _tell(session: Session, device: Device, task: Task, step: IdleStep, pause_s: int) -> None:
    if step == IdleStep.WARN:
        told = (
            f"It has computed nothing on {device.id} for {duration(pause_s / 2)}. It is paused "
            f"after {duration(pause_s)}."
        )
    else:
        told = (
            f"It has computed nothing on {device.id} for {duration(pause_s)}, and is paused as its "
            "tenant wants it. Resume it when it has work."
        )
    task_writer.tell(session, task, f"task.idle_{step.value}", told, device=device.id)
