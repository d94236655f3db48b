"""Record a device's heartbeat, and build the answer to it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from app.core.model import codec
from app.core.model.checkpoints.migration import Moving
from app.core.model.protocol import messages
from app.core.model.protocol.messages import Alive, Answer, LogLines, ResidentView, key
from app.core.model.protocol.wellformed import SENTENCE_MOST
from app.core.model.provisions.mounts import FOLDER, IMAGE, digest
from app.core.scheduling.rounds.quiet_heartbeats import AcknowledgedReport
from app.db import transactions
from app.db.guarded_connection import refusal
from app.db.models import Device, Host, LogLine, Task
from app.scheduling import guest_placements, launch_order
from app.scheduling.island_pace import pace_of, told_us
from app.scheduling.journal import (
    device_rows,
    idle_tasks,
    losses,
    orders,
    packages_ahead,
    sessions,
    settlement,
    task_writer,
    tickets,
)
from app.scheduling.journal.device_rows import DeviceRows, LockedRows
from app.scheduling.journal.packages_ahead import PackagesAhead
from app.scheduling.journal.reports import device_health, events, network_use, residents
from app.scheduling.journal.reports.quiet import report_to_remember, written_by
from app.settings import settings

log = logging.getLogger(__name__)


Recorded = tuple[Answer, bool]


def record_all(
    session: Session,
    alives: Sequence[Alive],
    *,
    careful: bool,
    quiet: dict[str, AcknowledgedReport] | None = None,
) -> list[Recorded]:
    """Record each heartbeat; stale ones are left out.

    With `careful`, each heartbeat is written in a savepoint of its own, so that a bad one cannot
    spoil the others. Without it, any error is raised. For devices whose next heartbeats may say
    nothing new, `quiet` gets what `quiet.renew` needs to know; it is valid once the transaction is
    committed.
    """
    believed = device_rows.lock(session, alives)
    if not careful:
        _register_all(session, alives, believed)
    ahead = _PackagesByIsland(session, alives)
    found = [_record_apart(session, alive, believed, ahead, careful=careful) for alive in alives]
    if quiet is not None:
        quiet.update(_to_remember(session, alives, found, believed))
    return [one for one in found if one is not None]


def _to_remember(
    session: Session,
    alives: Sequence[Alive],
    found: Sequence[Recorded | None],
    believed: LockedRows,
) -> dict[str, AcknowledgedReport]:
    session.flush()
    txids, reports = written_by(session, believed.devices), dict[str, AcknowledgedReport]()
    for alive, recorded in zip(alives, found, strict=True):
        reports.pop(alive.device, None)  # of an earlier process
        if recorded is not None:
            house = device_rows.rows_of_device(believed.devices[alive.device], believed)
            report = report_to_remember(house, alive, recorded[0], txid=txids[alive.device])
            if report is not None:
                reports[alive.device] = report
    return reports


class _PackagesByIsland(dict[str, PackagesAhead]):
    """Caches, by island, for which packages its tasks wait, while some heartbeats are recorded."""

    def __init__(self, session: Session, alives: Sequence[Alive]) -> None:
        super().__init__()
        self.session, self.alives = session, alives

    def __missing__(self, island: str) -> PackagesAhead:
        found = self[island] = PackagesAhead(self.session, island, self.alives)
        return found


def _record_apart(
    session: Session, alive: Alive, believed: LockedRows, ahead: _PackagesByIsland, *, careful: bool
) -> Recorded | None:
    if not careful:
        return _record(session, alive, believed, ahead, careful=False)
    try:
        with task_writer.savepoint(session):
            found = _record(session, alive, believed, ahead, careful=True)
            settlement.write_down(session)
            return found
    except Exception as error:
        if refusal(error):
            raise  # the database went away: nothing is wrong with the heartbeat
        log.exception("the heartbeat of %s could not be recorded", alive.device)
        return None


def record(session: Session, alive: Alive) -> Recorded | None:
    """Record one heartbeat.  Returns (answer, whether anything changed), or None for a stale
    heartbeat.
    """
    believed = device_rows.lock(session, [alive])
    found = _record(session, alive, believed, _PackagesByIsland(session, [alive]), careful=True)
    settlement.write_down(session)
    return found


def _record(
    session: Session, alive: Alive, believed: LockedRows, ahead: _PackagesByIsland, *, careful: bool
) -> Recorded | None:
    with session.no_autoflush:
        if alive.facts.get("failed"):
            _note_failed(session, alive, believed)
            return None
        before = believed.devices.get(alive.device)
        changed = before is not None and packages_ahead.are_news(before.facts, alive.facts)
        unheard_us = losses.unheard_us_of_device(session, believed.devices.get(alive.device))
        device = _heard(session, alive, believed)
        if device is None:
            return None
        house = device_rows.rows_of_device(device, believed)
        is_new = device.incarnation != alive.incarnation
        changed |= is_new and losses.lose_all(session, house, unheard_us)
        changed |= losses.take_in_hung(session, house, alive)
        device.incarnation = alive.incarnation
        if is_new:
            orders.readdress_launches(session, house)
        fitness = device.fitness
        device_health.take_in(session, device, alive)
        heard: dict[str, int] = {}
        for event in sorted(alive.events, key=lambda event: (event.task, event.epoch, event.seq)):
            changed |= events.take_in(session, house, event, heard, careful=careful)
        changed |= device_health.act(session, house, fitness)
        keep: list[list[Any]] = []
        drop: list[list[Any]] = []
        for view in alive.residents:
            here = residents.confirm(session, house, view)
            if here and not (house.may_sit(view) and _may_begin(session, house, view)):
                continue  # it stays here, and gets the slot when the task placed before it has left
            (keep if here else drop).append([view.task, view.epoch])
        network_use.take_in(session, house, alive)
        tickets.charge_tickets(session, house)
        changed |= residents.lose_missing(session, house, alive)
        changed |= bool(device.health) and idle_tasks.take_in(session, house)
        changed |= sessions.take_in(session, house, alive.residents)
        changed |= _look_ahead(house, alive)
        changed |= ahead[device.island].end_hopeless(device)
        answer = Answer(
            device=device.id,
            incarnation=alive.incarnation,
            sent_us=alive.sent_us,
            lease_us=pace_of(session).lease_us,
            grace_us=device.grace_us,
            heard=heard,
            logged=store_logs(session, house, alive.logs),
            keep=keep,
            drop=drop,
            expect=launch_order.ahead(session, device, list(_coming(house))),
            given=_given(session, house, alive),
            check=int(device.fitness.get("check", 0)),
            mounts=_unknown(alive.facts.get("mounts"), believed.mounts.get(FOLDER, {})),
            images=_unknown(alive.facts.get("images"), believed.mounts.get(IMAGE, {})),
            environments=ahead[device.island].asked_of(device),
            beat_us=told_us(pace_of(session), is_paced=bool(alive.facts.get("paced"))),
            pulses=not careful and bool(alive.facts.get("pulses")),
        )
        return answer, changed


def _may_begin(session: Session, house: DeviceRows, view: ResidentView) -> bool:
    """True unless the resident belongs to a task whose other accelerators are not free yet."""
    return not guest_placements.awaits(session, house.tasks[view.task], house.device)


def _unknown(known: str | None, present: Mapping[str, str]) -> messages.JSON | None:
    """Return all mounts of a sort if the device knows an older list; None if it knows this list, or
    may show no mounts.
    """
    return None if known is None or known == digest(present) else dict(present)


def _note_failed(session: Session, alive: Alive, believed: LockedRows) -> None:
    """Record why its worker cannot serve the device.

    Nothing else changes: what the device held is lost when its lease ends.
    """
    device = believed.devices.get(alive.device)
    if device is None:
        believed.devices.update(_register(session, [alive]))
        device = believed.devices[alive.device]
        device.facts = alive.facts
    if alive.incarnation >= device.incarnation:
        device.facts = {**device.facts, "failed": str(alive.facts["failed"])[:SENTENCE_MOST]}


def _heard(session: Session, alive: Alive, believed: LockedRows) -> Device | None:
    """Renew the lease on the device's row.  None if this heartbeat is not the device's newest."""
    device, now = believed.devices.get(alive.device), transactions.now(session)
    if device is None:
        believed.devices.update(_register(session, [alive]))
        device = believed.devices[alive.device]
    if device.incarnation == alive.incarnation and alive.sent_us <= device.heard_us:
        return None
    if alive.incarnation < device.incarnation:
        return None  # a late or replayed heartbeat of a process that has been replaced
    device.heard_us = alive.sent_us
    device.seen_at = now
    is_leaving = bool(alive.facts.get("leaving"))
    device.lease_us = 0 if is_leaving else pace_of(session).lease_us
    device.lease_until = now + timedelta(microseconds=device.lease_us)
    device.grace_us = 0 if is_leaving else min(alive.grace_us, int(settings().step_grace_s * 1e6))
    device.kind = alive.facts["kind"]
    device.threads = int(alive.facts.get("threads", 1))
    device.memory_bytes = int(alive.facts.get("memory_bytes", 0))
    if device.facts != alive.facts:
        device.facts = alive.facts
    if (device.links, device.secret) != (alive.links, alive.secret):
        device.links, device.secret = alive.links, alive.secret
    return device


def _register_all(session: Session, alives: Sequence[Alive], believed: LockedRows) -> None:
    """Register at once the devices of a round that are unknown.

    If two processes of a device report, the first counts.
    """
    new = {alive.device: alive for alive in reversed(alives)}
    believed.devices.update(
        _register(session, [new[id] for id in sorted(new.keys() - believed.devices.keys())])
    )


def _register(session: Session, alives: Sequence[Alive]) -> dict[str, Device]:
    if not alives:
        return {}
    hosts = {alive.facts["host"]: alive.facts["island"] for alive in alives}
    rows = [{"name": name, "island": hosts[name]} for name in sorted(hosts)]
    session.execute(insert(Host).values(rows).on_conflict_do_nothing())
    devices = [
        Device(
            id=alive.device,
            host=alive.facts["host"],
            island=alive.facts["island"],
            kind=alive.facts["kind"],
            cost_milli=_usual_cost_milli(alive.facts["kind"]),
            incarnation=alive.incarnation,
            heard_us=-1,
        )
        for alive in alives
    ]
    session.add_all(devices)
    session.flush()
    return {device.id: device for device in devices}


def _usual_cost_milli(kind: str) -> int:
    """Return the cost of a new device: a tenant's idle CPUs must not cost it its accelerators."""
    return 1000 if kind == "cpu" else round(1000 * settings().accelerator_cost)


def _coming(house: DeviceRows) -> list[Task]:
    """The tasks that are being moved to this device."""
    here = house.device.id
    return [
        task
        for task in house.near
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
        before, image = codec.from_json(Moving, task.moving or {}), there[task.id]
        now = before.fetched(image["sha256"], int(image["bytes"]), int(image["us"]))
        if now != before:
            task.moving = codec.to_json(now, whole=True)
            changed = True
    return changed


def store_logs(session: Session, house: DeviceRows, logs: Iterable[LogLines]) -> dict[str, int]:
    logged = {}
    for chunk in logs:
        logged[key(chunk.task, chunk.epoch)] = chunk.first + len(chunk.lines)
        placement = device_rows.placement_of(session, house, chunk.task, chunk.epoch)
        if placement is None or not chunk.lines:
            continue  # a device may only write the logs of tasks that were placed on it
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
