"""End tasks that no island has yet."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.orm import Session

from app.core.model.lifecycle import ENDED, Move
from app.db.models import Task
from app.scheduling.journal import task_writer


def give_up(session: Session, ids: Sequence[str], cause: str, message: str, detail: str) -> None:
    """Fail the tasks, before they were queued anywhere."""
    for task in _unassigned(session, ids):
        task_writer.move_task(session, task, Move.GaveUp)
        task.cause, task.message, task.detail = cause, message, detail
        task_writer.end_task(session, task, f"task.{task.state}", message, cause=cause)


def cancel(session: Session, ids: Sequence[str], message: str) -> None:
    """End the tasks, as their owners asked."""
    for task in _unassigned(session, ids):
        task_writer.move_task(session, task, Move.Cancel)
        task_writer.end_task(session, task, "task.cancelled", message)


def _unassigned(session: Session, ids: Sequence[str]) -> list[Task]:
    rows = task_writer.locked_tasks(session, Task.id.in_(ids)).values()
    return [task for task in rows if task.island is None and task.state not in ENDED]
