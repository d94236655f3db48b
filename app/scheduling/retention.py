"""Delete ended requests with all that belongs to them: those that users delete, and old ones.

A request is deleted a piece at a time, so that each transaction is short: first what its tasks
left, then the tasks, then its events, then the request itself.  A reader sees less and less of it.
What was deleted stays charged, because the ledger's accounts and buckets refer to no task.

The audit log stays.  So do datablocks that a task published, and webhooks that are to be sent; they
do not name the deleted any more.  Bytes in the store that no row refers to are collected as ever
(`app.storage.garbage_collector`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Select, TextClause, false, func, or_, select, text
from sqlalchemy.orm import InstrumentedAttribute, Session

from app.core.model.lifecycle import ENDED
from app.db.models import Placement, Request, Task
from app.settings import settings

REQUESTS_AT_ONCE = 100
TASKS_AT_ONCE = 500
ROWS_AT_ONCE = 2000  # of each table
#: By then all islands have read the ends of the tasks, and no order about them is on its way.
SETTLED = timedelta(minutes=10)


def is_over(
    at: InstrumentedAttribute[datetime | None] | InstrumentedAttribute[datetime], kept_days: float
) -> ColumnElement[bool]:
    """Condition: `at` is longer ago than `kept_days`; never, if these are 0."""
    return at < func.now() - timedelta(days=kept_days) if kept_days else false()


def delete_some(session: Session) -> bool:
    """Delete some rows of requests that are due; True if there may be more."""
    # With stale statistics, a table may look as if the few rows were found fastest by reading all.
    session.execute(text("set local enable_seqscan = off"))
    requests = _due(session)
    if not requests:
        return False
    tasks = _tasks(session, requests)
    if all([_delete(session, statement, tasks) for statement in _OF_TASKS]):
        session.execute(_TASKS, {"ids": tasks})
        if len(tasks) < TASKS_AT_ONCE and _delete(session, _EVENTS, requests):
            session.execute(_REQUESTS, {"ids": requests})
    return True


def _due(session: Session) -> Sequence[str]:
    """Lock requests that are to be deleted: those first of which users say so, then the oldest."""
    asked = _ended().where(Request.delete_asked_at.is_not(None))
    found = session.scalars(asked.order_by(Request.delete_asked_at)).all()
    if found:
        return found
    old = _ended().where(~Request.keep)
    old = old.where(is_over(Request.ended_at, settings().requests_kept_days))
    return session.scalars(old.order_by(Request.ended_at)).all()


def _ended() -> Select[str]:
    """Select requests that ended a while ago, and of which nothing goes on in any island."""
    live = select(Task.id).where(Task.request_id == Request.id, Task.state.not_in(ENDED))
    open_ = select(Task.request_id).join(Placement, Placement.task_id == Task.id)
    return (
        select(Request.id)
        .where(Request.ended_at < func.now() - SETTLED)
        .where(~live.exists(), Request.id.not_in(open_.where(Placement.ended_at.is_(None))))
        .limit(REQUESTS_AT_ONCE)
        .with_for_update(skip_locked=True)
    )


def _tasks(session: Session, requests: Sequence[str]) -> Sequence[str]:
    """Lock some tasks of these requests; with a gang that spans islands also its tickets."""
    some = select(Task.id).where(Task.request_id.in_(requests)).limit(TASKS_AT_ONCE)
    picked = session.scalars(some).all()
    with_tickets = select(Task.id).where(or_(Task.id.in_(picked), Task.gang_id.in_(picked)))
    locked = with_tickets.order_by(Task.id).with_for_update(skip_locked=True)
    return session.scalars(locked).all()


def _delete(session: Session, statement: TextClause, ids: Sequence[str]) -> bool:
    """Delete some rows; True if those were all."""
    done: Any = session.execute(statement, {"ids": ids, "at_once": ROWS_AT_ONCE})
    return bool(done.rowcount < ROWS_AT_ONCE)


def _some_of(table: str, column: str) -> TextClause:
    rows = f"select ctid from {table} where {column} = any(:ids) limit :at_once"
    return text(f"delete from {table} where ctid = any(array({rows}))")


_OF_TASKS = (
    _some_of("logs", "task_id"),
    _some_of("metrics", "task_id"),
    _some_of("decisions", "task_id"),
    _some_of("orders", "task_id"),
    _some_of("checkpoints", "task_id"),
    _some_of("placements", "task_id"),
    _some_of("tunnels", "task_id"),
    _some_of("datablock_uses", "task_id"),
    _some_of("needs", "task_id"),
    _some_of("needs", "needs_id"),
)
_EVENTS = _some_of("events", "request_id")
_TASKS = text("delete from tasks where id = any(:ids)")
# A task that a device reports on at this moment was left out above.
_REQUESTS = text(
    "delete from requests where id = any(:ids)"
    " and not exists (select from tasks where request_id = requests.id)"
)
