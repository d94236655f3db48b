"""Records what residents of a device report: progress, metrics, and that they are gone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from app.core.model.protocol.messages import Alive, ResidentView
from app.db import transactions
from app.db.models import Placement, Task
from app.scheduling import gang_tickets
from app.scheduling.journal import losses, rungs, task_writer
from app.scheduling.journal.device_rows import DeviceRows
from app.scheduling.journal.reports import outputs
from app.scheduling.round_notes import notes_of

# number of resends of a Launch to a live device that never shows the task; then it counts as lost
LAUNCHES_UNSEEN = 20
METRICS_KEPT = 2_000  # most metrics of a task whose last value is kept

JSON = dict[str, Any]


def confirm(session: Session, house: DeviceRows, view: ResidentView) -> bool:
    """Record a resident's progress; False if the device must drop the resident."""
    task = house.tasks.get(view.task)
    if task is None:
        return False
    if view.epoch != task.epoch:
        # The device does not know of the new launch yet: the paused resident is the one that will
        # resume.
        may = task.seat == house.device.id or _stands_by(task) or _gathers(session, task, house)
        return view.state == "paused" and may
    here = () if (task.id, task.epoch) in notes_of(session).closed else house.unanswered
    for order in here:
        if (order.task_id, order.epoch) == (task.id, task.epoch) and order.seq <= view.order_seq:
            order.answered_at = transactions.now(session)
    is_lent, is_seated = house.is_lent_to(view), task.seat == house.device.id
    is_paused = not is_lent and not is_seated and task.image_on == house.device.id
    if view.state == "ended" or is_paused:
        store_metrics(session, task, view)  # of its last steps
        return True  # the device drops an ended one when its last event is acknowledged
    if is_lent:
        return True  # its home device reports the progress
    if not is_seated:
        return view.state == "paused" and _stands_by(task)
    placement = house.placement(task)
    placement.last_step, placement.waits_for = view.step, view.waits_for
    task_writer.note_usage(session, task, placement, view)
    task.held_us = placement.held_us
    _note_peaks(task, view)
    if task.started_at is not None and view.step > task.step:
        task.step = view.step
    if task.behind != view.behind:
        task.behind = view.behind
        task_writer.note_change(session, task)
    outputs.note_refusal(session, task, view)
    store_metrics(session, task, view)
    return True


def _note_peaks(task: Task, view: ResidentView) -> None:
    """Keep the most that the task's processes held: what the kernel or the driver counted.

    Only a new peak changes the row, because islands must read each row that changes.
    """
    if view.memory_bytes > task.peak_device_bytes:
        task.peak_device_bytes = view.memory_bytes
    if view.host_bytes > task.peak_host_bytes:
        task.peak_host_bytes = view.host_bytes
    higher = {name: n for name, n in view.peaks.items() if n > task.peaks.get(name, 0)}
    if higher:
        task.peaks = {**task.peaks, **higher}


def _stands_by(task: Task) -> bool:
    """True if remote hosts may still hold parts of the paused image.

    The home device, from which alone the task can resume, may lack those parts.
    """
    return not task.saved and task.image_on is not None and task.seat in (None, task.image_on)


def _gathers(session: Session, task: Task, house: DeviceRows) -> bool:
    """True if the home device has its slot but still collects, before its first step, image parts
    of remote ranks.
    """
    if task.saved or not task.across_hosts:
        return False
    epoch = (Placement.task_id == task.id, Placement.epoch == task.epoch)
    home = session.scalar(select(Placement).where(*epoch, ~Placement.guest))
    return home is not None and home.first_step == task.step


def store_metrics(session: Session, task: Task, view: ResidentView) -> None:
    """Record rows of metrics, and the last value of each metric.

    A step that ran again, or that is reported again, has one row, with its newest values.
    """
    points = view.points
    if not points and not view.metrics.items() <= task.metrics.items():
        points = [[view.step, view.metrics]]  # of the executors of a graph, or of an older worker
    if not points:
        return
    rows: dict[int, JSON] = {}
    newest: JSON = {}
    for step, values in points:
        rows[step] = {**rows.get(step, {}), **values}
        newest |= values
    newest |= view.metrics
    _tell_not_finite(session, task, rows)
    others = {name: it for name, it in task.metrics.items() if name not in newest}
    task.metrics = dict([*others.items(), *newest.items()][-METRICS_KEPT:])
    told = [{"step": step, "values": values} for step, values in rows.items()]
    session.execute(_STORE_ROWS, {"task": task.id, "rows": json.dumps(told)})
    rungs.note_results(session, task, rows)


_STORE_ROWS = text(
    """
    insert into metrics (task_id, step, values)
    select :task, row.step, row.values
    from jsonb_to_recordset(cast(:rows as jsonb)) as row (step bigint, values jsonb)
    on conflict (task_id, step)
    do update set values = metrics.values || excluded.values, at = excluded.at
    where not metrics.values @> excluded.values
    """
)


def _tell_not_finite(session: Session, task: Task, rows: Mapping[int, JSON]) -> None:
    """Record which metrics are not finite numbers and were such numbers before."""
    before = _no_numbers(task.metrics)
    for step, values in sorted(rows.items()):
        if lost := sorted(_no_numbers(values) - before):
            told = f"Not a finite number at step {step:,}: {', '.join(lost[:5])}."
            task_writer.tell(session, task, "task.not_finite", told, step=step, metrics=lost[:5])
            return


def _no_numbers(metrics: Mapping[str, Any]) -> set[str]:
    """Return the names of metrics that are nan or infinite, which arrive as text."""
    return {name for name, value in metrics.items() if value in ("nan", "inf", "-inf")}


def lose_missing(session: Session, house: DeviceRows, alive: Alive) -> bool:
    """Record as lost what should be on the device but is not.  True if there was anything."""
    held = {(view.task, view.epoch) for view in alive.residents}
    told = {(event.task, event.epoch) for event in alive.events}
    on_the_way = {
        (order.task_id, order.epoch)
        for order in house.unanswered
        if order.kind == "Launch" and order.answered_at is None and order.sends < LAUNCHES_UNSEEN
    }
    gone = set()
    for place, placement in house.open.items():
        task = house.tasks[place[0]]
        if placement.ended_at is not None or gang_tickets.is_ticket(task):
            continue
        if place not in held | told | on_the_way:
            losses.lose(session, task, placement, f"{house.device.id} no longer has the task.")
            gone.add(place)
    for task in house.near:
        if task.image_on == house.device.id and (task.id, task.epoch) not in held:
            _lose_image(session, task)
            gone.add((task.id, task.epoch))
    return bool(gone)


def _lose_image(session: Session, task: Task) -> None:
    """Record that a paused process is gone.

    If its image is durable, nothing else is lost: the task still waits for the input without which
    it left, and no output has to be made again.
    """
    if task.saved:
        task.image_on = None
    else:
        task_writer.forget_image(session, task)
