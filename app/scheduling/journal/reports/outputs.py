"""Stores checkpoints and outputs of tasks, and nudges the tasks that waited for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

from sqlalchemy import delete, func, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session, aliased

from app.core.model.lifecycle import ENDED
from app.core.model.protocol import messages
from app.data import datablocks
from app.db import transactions
from app.db.ids import new_id
from app.db.models import Checkpoint, Device, LogLine, Need, Placement, Task
from app.messaging import outbox
from app.scheduling import launch_order
from app.scheduling.journal import task_writer
from app.scheduling.journal.reports import best_checkpoints


def keep_checkpoint(session: Session, task: Task, event: messages.Saved) -> None:
    ranks = best_checkpoints.rank(session, task, event)
    row = insert(Checkpoint).values(
        id=new_id("ckp"),
        task_id=task.id,
        tenant_id=task.tenant_id,
        epoch=event.epoch,
        step=event.step,
        sha256=event.sha256,
        size_bytes=event.size_bytes,
        new_bytes=event.new_bytes,
        took_us=event.took_us,
        host=func.coalesce(_of_writer(Device.host, event), ""),
        key=func.coalesce(_of_writer(Device.facts["key"].astext, event), ""),
        printed_epoch=event.printed[0] if event.printed else None,
        printed_lines=event.printed[1] if event.printed else None,
        **ranks,
    )
    # The same bytes were saved again at the same step: so they exist now, even if they were lost
    # before.
    there = {"damaged_at": None, "deleted_at": None, **ranks}
    same = [Checkpoint.task_id, Checkpoint.step, Checkpoint.sha256]
    session.execute(row.on_conflict_do_update(index_elements=same, set_=there))
    best_checkpoints.mark_best(session, task)


def hold_for_store(session: Session, task: Task, event: messages.Paused) -> None:
    """Let an ended task wait until the store takes its outputs; its device holds them."""
    task.unstored = event.unstored
    task.retry_at = transactions.now(session) + timedelta(microseconds=event.wait_us)
    told = f"It has ended, and its outputs wait for the store: {event.unstored} Its device is free."
    task_writer.tell(session, task, "task.unstored", told, wait_s=event.wait_us / 1e6)


def note_refusal(session: Session, task: Task, view: messages.ResidentView) -> None:
    """Record that the store refuses what a running task stores, or takes it again."""
    if bool(view.unstored) == bool(task.unstored) or view.state == "ended":
        return
    told = "The store takes its data again."
    if view.unstored:
        told = f"The store refuses its newest checkpoint or output: {view.unstored}"
        told += " It tries again until the store takes it; if its device is lost, it goes back to"
        told += " the checkpoint before."
    task.unstored = view.unstored
    kind = "task.unstored" if view.unstored else "task.stored"
    task_writer.tell(session, task, kind, told, step=view.step)


def withdraw_lines(session: Session, task: Task, step: int) -> int:
    """Delete what a command printed after the image of its processes was made; return the number of
    lines.

    The processes continue from the image, and print it again.
    """
    image = session.scalars(
        select(Checkpoint)
        .where(
            Checkpoint.task_id == task.id,
            Checkpoint.step == step,
            Checkpoint.printed_epoch.is_not(None),
        )
        .order_by(Checkpoint.created_at.desc(), Checkpoint.id.desc())
        .limit(1)
    ).first()
    if image is None:
        return 0
    since = tuple_(LogLine.epoch, LogLine.line) >= (image.printed_epoch, image.printed_lines)
    gone = delete(LogLine).where(LogLine.task_id == task.id, LogLine.epoch < task.epoch, since)
    return len(session.scalars(gone.returning(LogLine.id)).all())


def _of_writer(column: Any, event: messages.Saved) -> Any:
    """A column of the device that wrote a checkpoint, as a subquery."""
    wrote = (Placement.task_id == event.task, Placement.epoch == event.epoch, ~Placement.guest)
    query = select(column).join(Placement, Placement.device_id == Device.id).where(*wrote)
    return query.scalar_subquery()


def store_output(
    session: Session, task: Task, placement: Placement, event: messages.Stored
) -> None:
    """Record an output that a graph task reports while it runs; others may begin with it.

    The output is durable whatever becomes of the task.  A task that runs again makes the same bits,
    so the first report stays.
    """
    if task.state in ENDED or event.output in task.outputs:
        return
    task.outputs = {**task.outputs, event.output: event.kept}
    give_outputs(session, task, placement, {event.output: event.kept})


def give_outputs(
    session: Session, task: Task, placement: Placement, outputs: Mapping[str, messages.JSON]
) -> None:
    """Mark these outputs of a graph task as durable.

    After the commit, the tasks that take them are told.
    """
    takers = Need.needs_id == task.id, Need.port != "", Need.output.in_(outputs)
    given = update(Need).where(*takers, Task.id == Need.task_id)
    told = given.values(given=func.pg_current_xact_id()).returning(
        Need.task_id, Need.port, Need.output, Need.late, Task.epoch, Task.seat
    )
    maker = session.scalars(
        select(datablocks.reach(Device)).where(Device.id == placement.device_id)
    ).one()
    rows = session.execute(told.execution_options(synchronize_session=False)).all()
    for row in rows:
        if row.late and row.seat is not None:
            source = launch_order.source(outputs[row.output], maker)
            come = messages.Given(task=row.task_id, epoch=row.epoch, port=row.port, source=source)
            transactions.after_commit(session, partial(outbox.tell, row.seat, come))
    if waited_for := {row.output for row in rows if not row.late}:
        transactions.after_commit(session, partial(_nudge_who_can_start, task.id, waited_for))


def _nudge_who_can_start(task_id: str, outputs: Collection[str]) -> None:
    """Nudge the islands with tasks that waited for one of these outputs and for nothing else.

    They are looked up after the commit: if two tasks give the last two outputs at once, the later
    one sees both.
    """
    took, lacks, maker = aliased(Need), aliased(Need), aliased(Task)
    lacking = (
        select(lacks.task_id)
        .join(maker, maker.id == lacks.needs_id)
        .where(lacks.task_id == Task.id, lacks.given.is_(None), ~lacks.late, maker.state != "done")
    )
    able = (
        select(Task.island)
        .join(took, took.task_id == Task.id)
        .where(took.needs_id == task_id, took.port != "", took.output.in_(outputs))
        .where(Task.state == "blocked", ~lacking.exists())
        .distinct()
    )
    with transactions.transaction() as session:
        islands = session.scalars(able).all()
    for island in filter(None, islands):
        outbox.nudge_island(island)
