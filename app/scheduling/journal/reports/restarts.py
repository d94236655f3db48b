"""Lets a command begin again that asked for it, or ends it if it asked too often.

See `provisions.notice`: exit status 85 is not a crash. But if the platform gave no reason to begin
again, each time uses up an attempt.
"""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy.orm import Session

from app.core.model.lifecycle import ENDED, Move
from app.core.model.protocol import messages
from app.core.model.provisions.notice import AGAIN_AFTER_US, NoticeReason, is_free
from app.db import transactions
from app.db.models import Placement, Task
from app.scheduling.journal import task_writer

CAUSE = "again"  # `messages.Failed.cause` of a command that asks to begin again


def begin_again(
    session: Session,
    task: Task,
    placement: Placement,
    event: messages.Failed,
    *,
    wait_s: float,
) -> None:
    """Put the task back into the queue; `wait_s` is the delay if this uses up an attempt."""
    moves = task.moving is not None and task.moving["stopping"]
    task_writer.close_stay(session, task, placement, "moved" if moves else "again")
    task.step = max(task.step, event.step)
    free = is_free(event.noticed, event.held_us)
    may = free or task.attempts < task.retry_max
    task_writer.move_task(session, task, Move.Failed if may else Move.GaveUp)
    task_writer.forget_image(session, task)
    if task.state in ENDED:
        _end(session, task, event)
        return
    if event.noticed == NoticeReason.MAX_DURATION:  # its time counts from here on
        task.unheard_us = task.total_held_us
    told = f"{event.message} It does, in its working folder; this does not count as an attempt."
    if not free:
        task.attempts += 1
        task.retry_at = transactions.now(session) + timedelta(seconds=wait_s)
        told = f"{event.message} It does; this is attempt {task.attempts} of {task.retry_max}."
    task_writer.tell(session, task, "task.again", told, noticed=event.noticed, step=task.step)


def _end(session: Session, task: Task, event: messages.Failed) -> None:
    """Say why the task does not begin again: it was cancelled, or it has no attempt left."""
    after_s = AGAIN_AFTER_US // 1_000_000
    why = f"after less than {after_s} s on its device"
    task.cause = "exit"
    if event.noticed == NoticeReason.MAX_DURATION:
        why, task.cause = "at the end of max_duration_s", "max_duration"
    task.detail, task.outputs, task.dropped = None, event.outputs, event.dropped
    task.message = f"{event.message} That was {why}, which takes an attempt, and none is left."
    task_writer.end_task(session, task, f"task.{task.state}", task.message, cause=task.cause)
