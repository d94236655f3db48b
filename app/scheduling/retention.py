"""Delete ended requests with all that belongs to them: those that users delete, and old ones.

A request is deleted a piece at a time, so that each transaction is short: first what its tasks
left, then the tasks, then its events, then the request itself.  A reader sees less and less of it.
What was deleted stays charged, because the ledger's accounts and buckets refer to no task.

The audit log stays.  So do datablocks that a task published, and webhooks that are to be sent; they
do not name the deleted any more.  Bytes in the store that no row refers to are collected as ever
(`app.storage.garbage_collector`).  An archive keeps the rows (`app.scheduling.archive`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, TextClause, and_, false, func, or_, select, text
from sqlalchemy.orm import InstrumentedAttribute, Session

from app.core.model.lifecycle import ENDED
from app.db.models import Checkpoint, Placement, Request, RequestNeed, Task
from app.db.transactions import now
from app.scheduling.archive import Archive
from app.settings import settings

REQUESTS_AT_ONCE = 100
TASKS_AT_ONCE = 250
ROWS_AT_ONCE = 1000  # per table
#: Characters of rows for the archive: a tenant decides how long a row is, and control holds copies.
TOLD_AT_ONCE = 16 * 2**20
FETCHED_AT_ONCE = 25  # most rows that come from Postgres before their length is known
#: By then all islands have read the ends of the tasks, and no order about them is on its way.
SETTLED = timedelta(minutes=10)
DELETING = 0x526F756E65  # key of the advisory lock that lets one control delete at a time


def is_over(
    at: InstrumentedAttribute[datetime | None] | InstrumentedAttribute[datetime], kept_days: float
) -> ColumnElement[bool]:
    """Return the condition that `at` is longer than `kept_days` ago; never true if `kept_days` is
    0.
    """
    return at < func.now() - timedelta(days=kept_days) if kept_days else false()


@dataclass(frozen=True, slots=True)
class _OwnedTable:
    """Describes a table whose rows belong to requests or tasks: `owners` are the columns that name
    these.

    Rows that are not `archived` are messages and tickets, which mean nothing later.  `last` is a
    condition: such rows are deleted after the others, which refer to them.
    """

    name: str
    owners: tuple[str, ...]
    archived: bool = True
    last: str = ""

    def select(self, *, told: bool) -> TextClause:
        owned = " or ".join(f"{owner} = any(:ids)" for owner in self.owners)
        order = f"order by {self.last}" if self.last else ""
        row = "row_to_json(it)::text" if told and self.archived else "null"
        return text(
            f"select ctid::text, xmin::text, array[{', '.join(self.owners)}], {row}"
            f" from {self.name} it where {owned} {order} limit :at_once"
        )

    def delete(self) -> TextClause:
        return text(
            f"delete from {self.name} it"
            " using unnest(cast(:places as tid[]), cast(:versions as xid[])) found (place, version)"
            " where it.ctid = found.place and it.xmin = found.version"
        )


_OF_TASKS = (
    _OwnedTable("logs", ("task_id",)),
    _OwnedTable("metrics", ("task_id",)),
    _OwnedTable("rung_results", ("task_id",)),
    _OwnedTable("progress_marks", ("task_id",), archived=False),
    _OwnedTable("decisions", ("task_id",)),
    _OwnedTable("orders", ("task_id",), archived=False),
    _OwnedTable("checkpoints", ("task_id",)),
    _OwnedTable("placements", ("task_id",)),
    _OwnedTable("tunnels", ("task_id",), archived=False),
    _OwnedTable("datablock_uses", ("task_id",)),
    _OwnedTable("needs", ("task_id", "needs_id")),
    _OwnedTable("request_needs", ("task_id",)),
    _OwnedTable("lots", ("id",)),
)
_TASKS = _OwnedTable(
    "tasks", ("id",), last="gang_id is not distinct from id or lot_id is not distinct from id"
)
_EVENTS = _OwnedTable("events", ("request_id",))
_REQUESTS = _OwnedTable("requests", ("id",))


@dataclass(frozen=True, slots=True)
class _RowVersion:
    """Identifies a version of a row: where it lies, and the transaction that wrote it."""

    place: str
    version: str
    owners: Sequence[str]
    told: str | None


@dataclass(slots=True)
class _Piece:
    """Holds the rows that are deleted at once, by table, in the order of deletion.

    `tasks` maps each task to its request.
    """

    requests: Sequence[str]
    tasks: Mapping[str, str]
    rows: dict[_OwnedTable, list[_RowVersion]] = field(default_factory=dict)
    told_length: int = 0

    def take(self, table: _OwnedTable, found: Iterable[_RowVersion]) -> bool:
        """Take rows of the table until the piece is large enough; True if those are all."""
        rows = self.rows[table] = []
        for row in found:
            rows.append(row)
            self.told_length += len(row.told or "")
            if self.told_length >= TOLD_AT_ONCE:
                return False
        return len(rows) < ROWS_AT_ONCE

    def told(self) -> dict[str, list[str]]:
        found = {
            table.name: [row.told for row in rows if row.told is not None]
            for table, rows in self.rows.items()
        }
        return {name: lines for name, lines in found.items() if lines}


def delete_some(session: Session, archive: Archive | None = None) -> bool:
    """Delete some rows of requests that are due, after `archive` has them; True if it did.

    Only versions of rows that were read are deleted.  The transaction writes nothing until the
    archive is durable: event streams wait for each transaction that has written something.
    Raises CannotArchive.
    """
    if not session.scalar(select(func.pg_try_advisory_xact_lock(DELETING))):
        return False  # another control is at it
    # With stale statistics Postgres might read a whole table to find a few rows.
    session.execute(text("set local enable_seqscan = off"))
    piece = _piece(session, told=archive is not None)
    if piece is None:
        return False
    if archive is not None and (told := piece.told()):
        archive.keep(told, now(session))
    return _delete(session, piece)


def _piece(session: Session, *, told: bool) -> _Piece | None:
    requests = _due(session)
    if not requests:
        return None
    tasks, are_all = _tasks(session, requests)
    piece = _Piece(requests, tasks)

    def read(table: _OwnedTable, ids: Collection[str]) -> bool:
        """Add some rows of the table; True if those are all."""
        if piece.told_length >= TOLD_AT_ONCE:
            return False
        given = {"ids": list(ids), "at_once": ROWS_AT_ONCE}
        options = {"stream_results": told, "max_row_buffer": FETCHED_AT_ONCE}
        with session.execute(table.select(told=told), given, execution_options=options) as rows:
            return piece.take(table, (_RowVersion(*row) for row in rows))

    if all([read(table, tasks) for table in _OF_TASKS]):
        read(_TASKS, tasks)
        if are_all and read(_EVENTS, requests):
            read(_REQUESTS, requests)
    return piece


def _due(session: Session) -> Sequence[str]:
    """Find requests that must be deleted: first those that users want to delete, then the
    oldest.
    """
    for due, at in ((_is_asked(), Request.delete_asked_at), (_is_old(), Request.ended_at)):
        query = select(Request.id).where(_has_ended(), due).order_by(at).limit(REQUESTS_AT_ONCE)
        if found := session.scalars(query).all():
            return found
    return ()


def _is_asked() -> ColumnElement[bool]:
    return Request.delete_asked_at.is_not(None)


def _is_old() -> ColumnElement[bool]:
    is_free = and_(~Request.keep, ~_has_pinned())
    return and_(is_over(Request.ended_at, settings().requests_kept_days), is_free)


def _has_pinned() -> ColumnElement[bool]:
    """Return the condition that a checkpoint of the request is pinned."""
    mine = (Task.request_id == Request.id, Checkpoint.pinned_at.is_not(None))
    found: ColumnElement[bool] = (
        select(Checkpoint.id).join(Task, Task.id == Checkpoint.task_id).where(*mine).exists()
    )
    return found


def _has_ended() -> ColumnElement[bool]:
    """Return a condition: the request ended a while ago, none of its tasks still runs on any
    island, and no unfinished task comes after it.
    """
    live = select(Task.id).where(Task.request_id == Request.id, Task.state.not_in(ENDED))
    open_ = select(Task.request_id).join(Placement, Placement.task_id == Task.id)
    needed = select(RequestNeed.task_id).join(Task, Task.id == RequestNeed.task_id)
    needed = needed.where(RequestNeed.needs_request_id == Request.id, Task.state.not_in(ENDED))
    return and_(
        Request.ended_at < func.now() - SETTLED,
        ~live.exists(),
        ~needed.exists(),
        Request.id.not_in(open_.where(Placement.ended_at.is_(None))),
    )


def _tasks(session: Session, requests: Sequence[str]) -> tuple[dict[str, str], bool]:
    """Find some tasks of these requests, and whether those are all.

    With a gang over several islands, its tickets are found, too.
    """
    # a lot goes with the last of its members
    some = select(Task.id).where(Task.request_id.in_(requests)).order_by(Task.lot_index.is_(None))
    picked = session.scalars(some.limit(TASKS_AT_ONCE)).all()
    with_tickets = or_(Task.id.in_(picked), Task.gang_id.in_(picked))
    found = session.execute(select(Task.id, Task.request_id).where(with_tickets))
    return {id: request for id, request in found}, len(picked) < TASKS_AT_ONCE


def _delete(session: Session, piece: _Piece) -> bool:
    """Delete the rows of the piece that are still due, and not locked by other work; True if there
    were any.
    """
    due = and_(_has_ended(), or_(_is_asked(), _is_old()))
    requests = _locked(session, Request.id, piece.requests, due)
    tasks = _locked(session, Task.id, piece.tasks)
    requests -= {request for task, request in piece.tasks.items() if task not in tasks}
    owners = requests | {task for task in tasks if piece.tasks[task] in requests}
    deleted = 0
    for table, found in piece.rows.items():
        rows = [row for row in found if not owners.isdisjoint(row.owners)]
        given = {"places": [r.place for r in rows], "versions": [r.version for r in rows]}
        done: Any = session.execute(table.delete(), given)
        deleted += done.rowcount
        if done.rowcount < len(rows):
            # a row has changed since it was read: it is deleted next time, and then what it belongs
            # to
            break
    return deleted > 0


def _locked(
    session: Session,
    id: InstrumentedAttribute[str],
    ids: Collection[str],
    *only: ColumnElement[bool],
) -> set[str]:
    """Lock these rows, except rows that another transaction holds."""
    query = select(id).where(id.in_(ids), *only).order_by(id)
    return set(session.scalars(query.with_for_update(skip_locked=True)))
