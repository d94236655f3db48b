"""Writes the state of tasks and placements, and the events about it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, select, text, update
from sqlalchemy.orm import InstrumentedAttribute, Session

from app.core.model import lifecycle
from app.core.model.checkpoints.migration import ANYWHERE, MOVABLE
from app.core.model.protocol import messages
from app.core.model.provisions.artifacts import dropped_told
from app.core.model.rungs import RUNG_HOLDS
from app.core.model.snapshot import TIER_WINDOW_S
from app.core.placement import partitions
from app.core.scheduling.urgency import been_away
from app.db import lines, transactions
from app.db.models import Checkpoint, Need, Placement, Task
from app.messaging import outbox
from app.scheduling import gang_tickets, guest_placements, ledger
from app.scheduling.round_notes import notes_of, set_notes


def break_off(session: Session, task: Task, because: str) -> None:
    """Give up a task's move, which has failed.

    The task keeps its state and stays where it is.
    """
    to = task.move_to if task.move_to != ANYWHERE else "another device"
    told = f"Not moved to {to}: {because}."
    if task.cancel_asked_at is None:
        then = f"stays on {task.seat}" if task.seat else "resumes when its turn comes"
        told += f" No step is lost; the task {then}."
    tell(session, task, "task.move_failed", told, to=task.move_to)
    task.move_to = task.moving = None


def forget_image(session: Session, task: Task) -> None:
    """Forget the image in host memory: the task goes on from a checkpoint, or from its beginning.

    A command whose newest checkpoint has no processes begins again, so any device will do.

    Outputs that were not durable have to be made again before inputs that others make of them can
    arrive.  So inputs that may come late, and are still missing, may be late again.
    """
    task.image_on = None
    if task.goes_on_with and not _has_processes(session, task):
        task.goes_on_with = ""
        task.capabilities = [each for each in task.capabilities if each != MOVABLE]
    if late := partitions.late(task.descriptor["run"].get("part")):
        again = update(Need).where(Need.task_id == task.id, Need.port.in_(late), ~Need.late)
        lacking = again.where(Need.given.is_(None)).values(late=True)
        session.execute(lacking.execution_options(synchronize_session=False))


def _has_processes(session: Session, task: Task) -> bool:
    """True if a command's newest checkpoint has its processes."""
    kept = Checkpoint.task_id == task.id, Checkpoint.damaged_at.is_(None)
    query = select(Checkpoint.printed_epoch).where(*kept, Checkpoint.deleted_at.is_(None))
    newest = query.order_by(Checkpoint.step.desc(), Checkpoint.created_at.desc()).limit(1)
    return session.scalar(newest) is not None


def note_usage(
    session: Session,
    task: Task,
    placement: Placement,
    said: messages.Event | messages.ResidentView,
) -> None:
    before_us = placement.held_us
    note_held(session, task, placement, said.held_us)
    if placement.ended_at is not None:  # the total was written at the end, without this
        task.total_held_us += placement.held_us - before_us
    placement.staged_us = max(placement.staged_us, said.staged_us)


def note_held(session: Session, task: Task, placement: Placement, held_us: int) -> None:
    """Charge the placement for its time up to `held_us`, and the task's other devices for the same
    time.
    """
    before_us = placement.held_us
    ledger.note(session, placement, held_us)
    if placement.held_us > before_us and placement.epoch == task.epoch:
        guest_placements.charge(
            session, task, guest_placements.of_task(session, task), placement.held_us - before_us
        )


def locked_tasks(
    session: Session, which: ColumnElement[bool], *, wait: bool = True
) -> dict[str, Task]:
    """Lock and return the tasks in the order of their ids; without `wait`, skip tasks locked by
    others.
    """
    session.flush()  # the rows are read again and must include changes made here
    query = select(Task).where(which).order_by(Task.id)
    free = query.with_for_update(key_share=True, skip_locked=not wait)
    fresh = free.execution_options(populate_existing=True)
    return {task.id: task for task in session.scalars(fresh)}


def open_placements(
    session: Session, by: InstrumentedAttribute[str], ids: Sequence[str], *, guests: bool = False
) -> Sequence[Placement]:
    """The placements of these tasks or devices that have not ended."""
    if not ids:
        return []
    query = select(Placement).where(by.in_(ids), Placement.ended_at.is_(None))
    if not guests:
        query = query.where(~Placement.guest)
    return session.scalars(query.order_by(Placement.id)).all()


@contextmanager
def savepoint(session: Session) -> Iterator[None]:
    """Run the block in a savepoint: if it fails, its changes and its notes are undone."""
    notes = notes_of(session).copy()
    try:
        with transactions.savepoint(session):
            yield
    except BaseException:
        set_notes(session, notes)
        raise


def move_task(session: Session, task: Task, move: str) -> None:
    before, task.state = task.state, lifecycle.after(task.id, task.state, move)
    if "waiting" in (before, task.state) and before != task.state:
        _wait(session, task, begins=task.state == "waiting")
    if not gang_tickets.is_ticket(task):  # the gang, not its tickets, decides the request's state
        notes_of(session).moved.add(task.request_id)
    note_change(session, task)
    if task.lot_index is not None and task.state in lifecycle.ENDED:
        notes_of(session).members.append(task)
    if task.hold in RUNG_HOLDS and task.state == "waiting":
        transactions.after_commit(session, outbox.nudge_control)  # there is room for another member
    if task.gang_id:
        gang_tickets.nudge_others(session, task)


def _wait(session: Session, task: Task, *, begins: bool) -> None:
    """Record that a task enters or leaves its queue: its waiting time, and the number of waiting
    tasks.
    """
    now_s = transactions.now_s(session)
    if begins:
        task.waiting_since = transactions.now(session)
    elif task.waiting_since is not None:
        since_s = task.waiting_since.timestamp()
        task.waited_us += max(0, round((now_s - since_s) * 1e6))
        if task.epoch:
            away = tuple((from_s, to_s) for from_s, to_s in task.away)
            task.away = list(been_away(away, since_s, now_s, window_s=TIER_WINDOW_S))
        task.waiting_since = None
    count_waiting(session, task, 1 if begins else -1)


def count_waiting(session: Session, task: Task, change: int) -> None:
    """Note that `change` more tasks wait in the task's queue."""
    line = (*lines.key_of(task).values(), task.tenant_id)
    notes_of(session).waiting[line] += change


def close_stay(session: Session, task: Task, placement: Placement, end: str) -> None:
    """End the stay of a task: its held time is final, and no order waits for an answer any more."""
    placement.ended_at, placement.end = transactions.now(session), end
    guest_placements.end(session, guest_placements.of_task(session, task), end)
    task.total_held_us += placement.held_us
    task.unheard_us += placement.held_us if task.started_at is None else task.prepared_us
    task.held_us, task.seat, task.shares, task.behind = 0, None, False, ""
    task.started_at = task.resized_at = None
    notes_of(session).closed.add((task.id, task.epoch))


def end_task(session: Session, task: Task, type_: str, message: str, **data: Any) -> None:
    task.ended_at, task.image_on = transactions.now(session), None
    task.move_to = task.moving = None
    if task.state == "failed" and not (task.lot_id is not None and task.lot_index is None):
        note_news(session, task, "task.failed")
    _nudge_abroad(session, task)
    if dropped := dropped_told(task.dropped or {}):  # a new row has no default yet
        message, data = f"{message} {dropped}", {**data, "dropped": task.dropped}
    tell(session, task, type_, message, **data)


def _nudge_abroad(session: Session, task: Task) -> None:
    """Nudge the other islands with tasks that waited for this task's end, after the commit."""
    if not task.abroad:
        return
    query = select(Task.island).join(Need, Need.task_id == Task.id)
    query = query.where(Need.needs_id == task.id)
    islands = session.scalars(query.where(Task.island != task.island).distinct())
    for island in filter(None, islands):
        transactions.after_commit(session, partial(outbox.nudge_island, island))


def tell(session: Session, task: Task, type_: str, message: str, **data: Any) -> None:
    """Note an event of a task, for its owner and for open streams; `write_events` writes it."""
    told = {"type": type_, "message": message, "data": {"task": task.name, **data}}
    owner = {"tenant_id": task.tenant_id, "request_id": task.request_id, "task_id": task.id}
    notes_of(session).events.append({**owner, **told})
    note_change(session, task)


def note_news(session: Session, task: Task, type_: str) -> None:
    """Note what channels may want to tell of the task; `write_events` writes it."""
    if not gang_tickets.is_ticket(task):
        news = {"request_id": task.request_id, "type": type_, "task": task.name}
        notes_of(session).news.append(news)


def write_events(session: Session) -> None:
    """Write the events that were noted so far, and the news for channels, in one statement."""
    notes = notes_of(session)
    events, notes.events = notes.events, []
    news, notes.news = notes.news, []
    if events or news:
        session.execute(_WRITE_EVENTS, {"events": json.dumps(events), "news": json.dumps(news)})
        notes.written += events


_WRITE_EVENTS = text(
    """
    with written as (
        insert into events (tenant_id, request_id, task_id, type, message, data)
        select tenant_id, request_id, task_id, type, message, data
        from jsonb_populate_recordset(cast(null as events), cast(:events as jsonb))
    )
    insert into news (request_id, webhook_id, type, task)
    select c.request_id, c.webhook_id, n.type, n.task
    from jsonb_to_recordset(cast(:news as jsonb)) as n (request_id text, type text, task text)
    join request_channels c on c.request_id = n.request_id and jsonb_exists(c.events, n.type)
    order by c.request_id, c.webhook_id
    """
)


def note_change(session: Session, task: Task) -> None:
    notes_of(session).changed.add((task.tenant_id, task.request_id))
