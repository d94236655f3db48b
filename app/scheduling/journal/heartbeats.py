"""Record a device's heartbeat, and build the answer to it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.orm import Session

from app.core.model import messages, migration
from app.core.model.messages import Alive, Answer, LogLines, key
from app.db import transactions
from app.db.models import Device, Host, LogLine, Task
from app.scheduling import launch_order
from app.scheduling.journal import (
    device_rows,
    events,
    losses,
    residents,
    sums,
    task_writer,
    tickets,
)
from app.scheduling.journal.device_rows import DeviceRows, LockedRows
from app.settings import settings

log = logging.getLogger(__name__)


Recorded = tuple[Answer, bool]


def record_all(session: Session, alives: Sequence[Alive], *, careful: bool) -> list[Recorded]:
    """Record each heartbeat; stale ones are left out.

    With `careful`, each heartbeat is written in a savepoint of its own, so that a bad one cannot
    spoil the others.  Without it, any error is raised.
    """
    believed = device_rows.lock(session, alives)
    found = [_record_apart(session, alive, believed, careful=careful) for alive in alives]
    return [one for one in found if one is not None]


def _record_apart(
    session: Session, alive: Alive, believed: LockedRows, *, careful: bool
) -> Recorded | None:
    if not careful:
        return _record(session, alive, believed, careful=False)
    try:
        with task_writer.savepoint(session):
            found = _record(session, alive, believed, careful=True)
            sums.write_down(session)
            return found
    except (OperationalError, InterfaceError):
        raise  # the database went away: nothing is wrong with the heartbeat
    except Exception:
        log.exception("the heartbeat of %s could not be recorded", alive.device)
        return None


def record(session: Session, alive: Alive) -> Recorded | None:
    """Record one heartbeat.  Returns (answer, whether anything changed), or None for a stale
    heartbeat.
    """
    found = _record(session, alive, device_rows.lock(session, [alive]), careful=True)
    sums.write_down(session)
    return found


def _record(
    session: Session, alive: Alive, believed: LockedRows, *, careful: bool
) -> Recorded | None:
    with session.no_autoflush:
        unheard_us = losses.unheard_us_of_device(session, believed.devices.get(alive.device))
        device = _heard(session, alive, believed)
        if device is None:
            return None
        house = device_rows.rows_of_device(device, believed)
        is_new = device.incarnation != alive.incarnation
        changed = is_new and losses.lose_all(session, house, unheard_us)
        changed |= losses.take_in_hung(session, house, alive)
        device.incarnation = alive.incarnation
        heard: dict[str, int] = {}
        for event in sorted(alive.events, key=lambda event: (event.task, event.epoch, event.seq)):
            changed |= events.take_in(session, house, event, heard, careful=careful)
        keep: list[list[Any]] = []
        drop: list[list[Any]] = []
        for view in alive.residents:
            here = residents.confirm(session, house, view)
            if here and not house.may_sit(view):
                continue  # it stays, and gets the slot when the task before it has left
            (keep if here else drop).append([view.task, view.epoch])
        tickets.charge_tickets(session, house)
        changed |= residents.lose_missing(session, house, alive)
        changed |= _look_ahead(house, alive)
        answer = Answer(
            device=device.id,
            incarnation=alive.incarnation,
            sent_us=alive.sent_us,
            lease_us=int(settings().lease_s * 1e6),
            heard=heard,
            logged=store_logs(session, house, alive.logs),
            keep=keep,
            drop=drop,
            expect=launch_order.ahead(session, list(_coming(house))),
            given=_given(session, house, alive),
        )
        return answer, changed


def _heard(session: Session, alive: Alive, believed: LockedRows) -> Device | None:
    """Renew the lease on the device's row.  None if this heartbeat is not the device's newest."""
    device, now = believed.devices.get(alive.device), transactions.now(session)
    if device is None:
        device = believed.devices[alive.device] = _register(session, alive)
    if device.incarnation == alive.incarnation and alive.sent_us <= device.heard_us:
        return None
    if alive.incarnation < device.incarnation:
        return None  # a late or replayed heartbeat of a process that has been replaced
    device.heard_us = alive.sent_us
    device.seen_at = now
    lease_s = 0.0 if alive.facts.get("leaving") else settings().lease_s
    device.lease_until = now + timedelta(seconds=lease_s)
    device.kind = alive.facts["kind"]
    device.threads = int(alive.facts.get("threads", 1))
    device.memory_bytes = int(alive.facts.get("memory_bytes", 0))
    if device.facts != alive.facts:
        device.facts = alive.facts
    if (device.links, device.secret) != (alive.links, alive.secret):
        device.links, device.secret = alive.links, alive.secret
    return device


def _register(session: Session, alive: Alive) -> Device:
    facts = alive.facts
    host = insert(Host).values(name=facts["host"], island=facts["island"])
    session.execute(host.on_conflict_do_nothing())
    device = Device(
        id=alive.device,
        host=facts["host"],
        island=facts["island"],
        kind=facts["kind"],
        incarnation=alive.incarnation,
        heard_us=-1,
    )
    session.add(device)
    session.flush()
    return device


def _coming(house: DeviceRows) -> list[Task]:
    """The tasks that are being moved to this device."""
    here = house.device.id
    return [
        task
        for task in house.tasks.values()
        if task.move_to == here and task.moving is not None and task.seat != here
    ]


def _given(session: Session, house: DeviceRows, alive: Alive) -> list[messages.Given]:
    """The inputs that residents lack and that are available now."""
    lacking = {view.task: view for view in alive.residents if view.lacks}
    tasks = [house.tasks[id] for id in lacking if id in house.tasks]
    return [
        messages.Given(task=id, epoch=lacking[id].epoch, port=port, source=source)
        for id, inputs in launch_order.inputs(session, tasks).items()
        for port, source in inputs.items()
        if port in lacking[id].lacks
    ]


def _look_ahead(house: DeviceRows, alive: Alive) -> bool:
    """Record how much the device has prefetched of tasks that are being moved here."""
    there = {image["task"]: image for image in alive.ahead}
    changed = False
    for task in _coming(house):
        if task.id not in there:
            continue
        before, image = migration.from_json(task.moving or {}), there[task.id]
        now = before.fetched(image["sha256"], int(image["bytes"]), int(image["us"]))
        if now != before:
            task.moving = migration.as_json(now)
            changed = True
    return changed


def store_logs(session: Session, house: DeviceRows, logs: Iterable[LogLines]) -> dict[str, int]:
    logged = {}
    for chunk in logs:
        logged[key(chunk.task, chunk.epoch)] = chunk.first + len(chunk.lines)
        placement = device_rows.placement_of(session, house, chunk.task, chunk.epoch)
        if placement is None or not chunk.lines:
            continue  # a device may write only the logs of tasks that were placed on it
        rows = [
            {
                "task_id": chunk.task,
                "epoch": chunk.epoch,
                "line": chunk.first + n,
                "stream": stream,
                "text": said.replace("\x00", "�"),
            }
            for n, (stream, said) in enumerate(chunk.lines)
        ]
        session.execute(insert(LogLine).values(rows).on_conflict_do_nothing())
        task = session.get_one(Task, chunk.task)
        task_writer.note_change(session, task)
    return logged
