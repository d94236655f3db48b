"""Records what devices report about their health, and acts on it: cordons them, moves tasks away,
lets them return.

`core.device.health_cordons` decides. This module keeps what it remembers in the device's row.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.core.device import health_cordons
from app.core.device.health_cordons import Fitness, HealthReport, TaskFailure
from app.core.device.health_findings import Effect
from app.core.model import failure_causes
from app.core.model.checkpoints.migration import ANYWHERE
from app.core.model.lifecycle import State
from app.core.model.protocol.messages import Alive, Failed
from app.db import transactions
from app.db.models import Device, Host, Placement, Task
from app.scheduling.journal import losses, task_writer
from app.scheduling.journal.device_rows import DeviceRows

log = logging.getLogger(__name__)


def take_in(session: Session, device: Device, alive: Alive) -> None:
    """Record a device's health, and decide whether it takes work."""
    if device.health != alive.health:
        device.health = alive.health
    if not device.fitness and not alive.health.get("findings"):
        return  # nothing is wrong, and nothing was
    after = health_cordons.heard(
        Fitness.of(device.fitness),
        HealthReport.of(alive.health),
        now_s=transactions.now_s(session),
        is_cordoned=device.cordoned,
    )
    keep(device, after)


def act(session: Session, house: DeviceRows, before: Mapping[str, Any]) -> bool:
    """Take the tasks off a device if a rule has cordoned it since its fitness was `before`.

    True if the island must make a new plan because of it.
    """
    device = house.device
    if not device.fitness:
        return False
    was, now = Fitness.of(before).cordon, Fitness.of(device.fitness).cordon
    if now is None:
        return was is not None
    told = f"{device.id} is cordoned. {now.reason}"
    if now.effect == Effect.RESTART:
        return _give_up(session, house, told)
    if was is None and now.effect == Effect.MOVE:
        _ask_to_move(session, house, told)
    return was is None


def keep(device: Device, after: Fitness) -> None:
    """Write down the fitness, and with it whether the device takes work."""
    before = Fitness.of(device.fitness)
    if after == before:
        return
    device.fitness = after.as_json()
    if (after.cordon is None) != (before.cordon is None):
        device.cordoned = after.cordon is not None
        device.version += 1
        log.warning("%s: %s", device.id, after.notes[-1].told)


def _held(house: DeviceRows) -> list[Task]:
    """Return the tasks that hold the device, and are no guests there."""
    here = house.device.id
    return [task for task in house.near if task.seat == here]


def _give_up(session: Session, house: DeviceRows, told: str) -> bool:
    """Let the tasks resume on other devices from their checkpoints, because their state cannot
    leave this device.
    """
    held = _held(house)
    for task in held:
        losses.lose(session, task, house.placement(task), told)
    return bool(held)


def _ask_to_move(session: Session, house: DeviceRows, told: str) -> None:
    """Request moves for the tasks while they run; the island pauses those that cannot be moved."""
    for task in filter(_may_move, _held(house)):
        task.move_to, task.move_asked_at = ANYWHERE, transactions.now(session)
        told_it = f"{told} The task moves to another device if one is free."
        task_writer.tell(session, task, "task.move_asked", told_it, drains=house.device.id)


def _may_move(task: Task) -> bool:
    """True if a move may be requested for the task, as when a person drains the device."""
    is_alone = task.devices_min == 1 and task.gang_id is None
    is_there = task.state in (State.starting, State.running)
    return is_alone and is_there and task.move_to is None


# --- how tasks end on a device --------------------------------------------------------------------


def note_failure(session: Session, placement: Placement, event: Failed) -> None:
    """Record that a task failed on a watched device, if the device may be the cause."""
    device = session.get_one(Device, placement.device_id)
    if not device.health or event.cause not in failure_causes.SUSPECT:
        return
    at_s = transactions.now_s(session)
    after = health_cordons.task_failed(
        Fitness.of(device.fitness),
        TaskFailure(at_s=at_s, tenant=placement.tenant_id, task=placement.task_id),
        others_serve=_others_serve(session, device),
        is_cordoned=device.cordoned,
    )
    keep(device, after)


def note_fault(session: Session, placement: Placement) -> None:
    """Record that a device could not set up a task's process."""
    device = session.get_one(Device, placement.device_id)
    now_s = transactions.now_s(session)
    before = Fitness.of(device.fitness)
    keep(device, health_cordons.device_failed(before, now_s=now_s, is_cordoned=device.cordoned))


def note_success(session: Session, placement: Placement) -> None:
    """Record that a task ended well, or was paused, on a device."""
    device = session.get_one(Device, placement.device_id)
    if device.fitness:
        keep(device, health_cordons.task_went_well(Fitness.of(device.fitness)))


def excuses(session: Session, placement: Placement) -> bool:
    """True if the device, not the task, is to blame for a failure there."""
    device = session.get_one(Device, placement.device_id)
    return bool(device.fitness) and health_cordons.excuses(Fitness.of(device.fitness))


def _others_serve(session: Session, device: Device) -> bool:
    """True if another device of the kind takes work on this island."""
    others = select(Device.id).join(Host, Host.name == Device.host)
    alike = others.where(
        Device.island == device.island,
        Device.kind == device.kind,
        Device.id != device.id,
        Device.lease_until > transactions.now(session),
        ~Device.cordoned,
        ~Host.cordoned,
    )
    return session.scalar(alike.limit(1)) is not None
