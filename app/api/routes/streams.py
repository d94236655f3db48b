"""Gives events of a request and output of its jobs: as pages, and live as server-sent events.

Between two reads a stream holds no database connection and no thread. It sleeps until
`app.messaging.live_updates` reports a change of the request, or for 15 s. Then it reads on after
its cursor, which is the id of the last event sent. So a client that reconnects with `Last-Event-ID`
misses nothing and sees nothing twice. The last event is `end`, sent when the request has ended and
all is read.

Events are read in the order (transaction, id), and only below the oldest transaction still running,
because a row with a smaller id may be committed later. Later rows are looked for again soon. Log
lines need no such bound: one island writes the lines of a request, one transaction at a time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import Header, Query
from fastapi.responses import StreamingResponse
from fastapi.sse import format_sse_event
from pydantic import BaseModel
from sqlalchemy import (
    ARRAY,
    ColumnElement,
    Select,
    Text,
    bindparam,
    cast,
    func,
    literal_column,
    or_,
    select,
    true,
    tuple_,
)
from sqlalchemy.orm import Session, aliased

from app.api import cursors
from app.api.access.auth import Authed
from app.api.access.caller import Caller
from app.api.access.gate import in_thread
from app.api.access.visibility import visible_request
from app.api.cursors import Cursor, PagedByItem
from app.api.event_stream import EventStream
from app.api.middleware import v1_router
from app.api.schemas.base import Page
from app.api.schemas.tasks import EventOut, LogLineOut
from app.core.model.lifecycle import ENDED
from app.db.models import LogLine, Request, RequestEvent, Task, Xid8
from app.db.transactions import Db, transaction
from app.errors import NotFound, Unavailable
from app.messaging.live_updates import LONGEST_WAIT_S, Subscription, changes
from app.scheduling.journal.lots import IS_LOT, IS_NO_MEMBER

READ_AT_ONCE = 500  # rows per read of a stream
# seconds until a stream looks again for rows of transactions that had not ended
SOONEST_S, LATEST_S = 0.05, 1.0
MAX_TAIL = 10_000  # lines
MEMBERS_READ = 1000  # members of a request's lots whose lines are read together
RETRY_MS = 1000  # milliseconds until a browser reconnects
PATIENT_S = 60.0  # seconds that an open stream may wait for its turn to read

router = v1_router("requests", 404)

LastEventId = Annotated[
    str | None,
    Header(alias="Last-Event-ID", max_length=200, description="Continue after this event."),
]
_EVENT_STREAM = {
    "text/event-stream": {
        "schema": {"type": "string"},
        "example": 'retry: 1000\n\nid: MTIzLjQ1\nevent: task.paused\ndata: {"type": …}\n\n',
    }
}
_STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"description": "Server-sent events", "content": _EVENT_STREAM}
}
_PLAIN = {"text/plain": {"schema": {"type": "string"}, "example": "loss 0.31\nloss 0.30\n"}}
_ALSO_STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": _EVENT_STREAM}}


@dataclass(frozen=True, slots=True)
class Read:
    """Holds the rows that one look found for a stream, in order.

    `after` is the cursor of the last row, and `more` says that there may be further rows.
    `settled` is False if there may be rows that cannot be sent yet.
    """

    items: list[Any]
    after: str | None
    more: bool = False
    settled: bool = True


# --- events -------------------------------------------------------------------------------------


@router.get(
    "/requests/{id}/events",
    response_model=Page[EventOut],
    summary="Events of a request, oldest first",
    responses=_ALSO_STREAMED,
)
def list_events(
    id: str,
    paging: PagedByItem,
    caller: Authed,
    session: Db,
    last_event_id: LastEventId = None,
) -> Any:
    """Lists the events.  With `Accept: text/event-stream` it is the same as `…/events/stream`."""
    visible_request(session, caller, id)
    if "text/event-stream" in paging.http.headers.get("accept", ""):
        return _event_stream(caller, id, _last_seen(last_event_id, 2) or paging.cursor)
    found = read_events(session, id, paging.cursor, paging.most).items
    return paging.cut(found, [item.cursor for item in found]).page()


@router.get(
    "/requests/{id}/events/stream",
    summary="Stream the events of a request",
    response_class=StreamingResponse,
    responses=_STREAMED,
)
def stream_events(
    id: str, caller: Authed, session: Db, last_event_id: LastEventId = None, cursor: Cursor = None
) -> EventStream:
    """Sends events named by their `type`, from the first on, or after `Last-Event-ID`."""
    visible_request(session, caller, id)
    return _event_stream(caller, id, _last_seen(last_event_id, 2) or cursor)


def _event_stream(caller: Caller, request_id: str, after: str | None) -> EventStream:
    if after is not None:
        _event_key(after)
    return _stream(caller, request_id, after, read_events, lambda item: item.type)


def read_events(session: Session, request_id: str, after: str | None, limit: int) -> Read:
    query = _events_above(request_id).limit(limit)
    if after is not None:
        txid, id = _event_key(after)
        key = tuple_(RequestEvent.txid, RequestEvent.id)
        query = query.where(key > tuple_(_xid8(txid), bindparam("after_id", id)))
    rows = session.execute(query).all()
    items = [
        EventOut(
            cursor=cursors.seal(row.txid, row.RequestEvent.id),
            at=row.RequestEvent.at,
            type=row.RequestEvent.type,
            task_id=row.RequestEvent.task_id,
            message=row.RequestEvent.message,
            data=row.RequestEvent.data,
        )
        for row in rows
        if row.settled
    ]
    last = items[-1].cursor if items else after
    return Read(items, last, more=len(items) == limit, settled=len(items) == len(rows))


def _events_above(request_id: str) -> Any:
    line = func.pg_snapshot_xmin(func.pg_current_snapshot())
    settled = (RequestEvent.txid < line).label("settled")
    return (
        select(RequestEvent, cast(RequestEvent.txid, Text).label("txid"), settled)
        .where(RequestEvent.request_id == request_id)
        .order_by(RequestEvent.txid, RequestEvent.id)
    )


def _xid8(txid: int) -> Any:
    return cast(literal_column(f"'{txid:d}'"), Xid8)


def _event_key(cursor: str) -> list[int]:
    return cursors.opened_numbers(cursor, 2)


# --- logs ---------------------------------------------------------------------------------------

OfTask = Annotated[str | None, Query(alias="task", description="Only this task: its name or id.")]
Tail = Annotated[
    int | None, Query(ge=1, le=MAX_TAIL, description="Only the last lines; their number.")
]
Grep = Annotated[str, Query(max_length=500, description="Only lines that contain this exact text.")]


@dataclass(frozen=True, slots=True)
class Lines:
    """Selects lines of a request: those of these tasks (id -> name) that contain `text`."""

    tasks: dict[str, str]
    text: str = ""

    def after(self, last: int | None, limit: int) -> Select[LogLine]:
        """Select `limit` lines after the line `last`, oldest first."""
        above = [LogLine.id > last] if last is not None else []
        return self._some(limit, False, *above)

    def newest(self, limit: int) -> Select[LogLine]:
        return self._some(limit, True)

    def _some(self, limit: int, newest: bool, *above: ColumnElement[bool]) -> Select[LogLine]:
        """Select the first or the newest `limit` lines; at most `limit` lines of each task are
        read.

        Without a limit for each task, Postgres may read the lines of all requests by their ids.
        """
        ids = func.unnest(cast(list(self.tasks), ARRAY(Text)))
        tasks = ids.table_valued("id", name="of_task").render_derived()
        of_task = select(LogLine).where(LogLine.task_id == tasks.c.id, *above)
        if self.text:
            of_task = of_task.where(func.strpos(LogLine.text, self.text) > 0)
        order = LogLine.id.desc() if newest else LogLine.id
        line = aliased(LogLine, of_task.order_by(order).limit(limit).lateral())
        found = select(line).select_from(tasks.join(line, true()))
        return found.order_by(line.id.desc() if newest else line.id).limit(limit)

    def shown(self, line: LogLine) -> LogLineOut:
        return LogLineOut(
            cursor=cursors.seal(line.id),
            at=line.at,
            task_id=line.task_id,
            task=self.tasks[line.task_id],
            epoch=line.epoch,
            stream=line.stream,
            text=line.text,
        )


@router.get(
    "/requests/{id}/logs",
    response_model=Page[LogLineOut],
    summary="Read the log of the jobs, oldest first",
    responses=_ALSO_STREAMED,
)
def list_logs(
    id: str,
    paging: PagedByItem,
    caller: Authed,
    session: Db,
    task: OfTask = None,
    grep: Grep = "",
    tail: Tail = None,
    last_event_id: LastEventId = None,
) -> Any:
    """Lists the lines of all launches, on whatever device.  The first page begins `tail` lines
    before the end, counted after `grep`.

    With `Accept: text/event-stream` it is the same as `…/logs/stream`.
    """
    visible_request(session, caller, id)
    lines = Lines(_tasks(session, id, task), grep)
    if "text/event-stream" in paging.http.headers.get("accept", ""):
        after = _last_seen(last_event_id) or paging.cursor or _before(session, lines, tail)
        return _log_stream(caller, id, lines, after)
    if tail is not None and paging.cursor is None:
        first, limit = _before(session, lines, tail), min(tail, cursors.MAX_LIMIT)
        paging = replace(paging, given=first, limit=limit)
    found = _list_lines(session, lines, paging.cursor, paging.most)
    return paging.cut(found, [item.cursor for item in found]).page()


@router.get(
    "/requests/{id}/logs/text",
    summary="Download the whole log of the jobs as a file",
    response_class=StreamingResponse,
    responses={200: {"description": "The log lines as they were printed.", "content": _PLAIN}},
)
def download_logs(
    id: str, caller: Authed, session: Db, task: OfTask = None, grep: Grep = ""
) -> StreamingResponse:
    """Sends the lines of all launches, on whatever device, oldest first."""
    request = visible_request(session, caller, id)
    lines = Lines(_tasks(session, id, task), grep)
    name = f'attachment; filename="{request.name}.log"'
    return StreamingResponse(
        _printed(caller, lines), media_type="text/plain", headers={"Content-Disposition": name}
    )


async def _printed(caller: Caller, lines: Lines) -> AsyncIterator[str]:
    """Yield the lines in batches; no connection is held while the caller reads."""
    after = None
    while True:
        found = await in_thread(caller.tenant_id, _batch, lines, after, wait_s=PATIENT_S)
        yield "".join(f"{line.text}\n" for line in found)
        if len(found) < READ_AT_ONCE:
            return
        after = found[-1].cursor


def _batch(lines: Lines, after: str | None) -> list[LogLineOut]:
    with transaction() as session:
        return _list_lines(session, lines, after, READ_AT_ONCE)


@router.get(
    "/requests/{id}/logs/stream",
    summary="Stream the log of the jobs",
    response_class=StreamingResponse,
    responses=_STREAMED,
)
def stream_logs(
    id: str,
    caller: Authed,
    session: Db,
    task: OfTask = None,
    grep: Grep = "",
    tail: Tail = None,
    last_event_id: LastEventId = None,
    cursor: Cursor = None,
) -> EventStream:
    """Sends events named `log`, from the first line on, or only the last lines with `tail`."""
    visible_request(session, caller, id)
    lines = Lines(_tasks(session, id, task), grep)
    after = _last_seen(last_event_id) or cursor or _before(session, lines, tail)
    return _log_stream(caller, id, lines, after)


def _log_stream(caller: Caller, request_id: str, lines: Lines, after: str | None) -> EventStream:
    if after is not None:
        cursors.opened_numbers(after)

    def read(session: Session, _: str, after: str | None, limit: int) -> Read:
        return _read_lines(session, lines, after, limit)

    return _stream(caller, request_id, after, read, lambda _: "log")


def _tasks(session: Session, request_id: str, wanted: str | None) -> dict[str, str]:
    """Return id -> name of the request's tasks, or of the task `wanted`; raises NotFound.

    `wanted` is a name or an id. Without it, of the members of lots only the newest are among them.
    """
    query = select(Task.id, Task.name).where(Task.request_id == request_id)
    if wanted is not None:
        found = query.where(or_(Task.id == wanted, Task.name == wanted))
        if not (names := {id: name for id, name in session.execute(found)}):
            raise NotFound("task", wanted)
        return names
    names = {id: name for id, name in session.execute(query.where(IS_NO_MEMBER))}
    lot = select(Task.id).where(Task.request_id == request_id, IS_LOT)
    newest = select(Task.id, Task.name).where(Task.lot_id.in_(lot), Task.lot_index.is_not(None))
    newest = newest.order_by(Task.id.desc()).limit(MEMBERS_READ)
    return names | {id: name for id, name in session.execute(newest)}


def _before(session: Session, lines: Lines, tail: int | None) -> str | None:
    """Return the cursor after which the last `tail` lines lie."""
    if tail is None:
        return None
    newest = lines.newest(tail + 1).subquery()
    last = session.scalar(select(newest.c.id).order_by(newest.c.id.desc()).offset(tail))
    return None if last is None else cursors.seal(last)


def _list_lines(session: Session, lines: Lines, after: str | None, limit: int) -> list[LogLineOut]:
    query = lines.after(_line(after), limit)
    return [lines.shown(line) for line in session.scalars(query)]


def _read_lines(session: Session, lines: Lines, after: str | None, limit: int) -> Read:
    """Read lines for a stream.

    The cursor moves past every line that was read, even if none matches.
    """
    query = replace(lines, text="").after(_line(after), limit)
    rows = session.scalars(query).all()
    items = [lines.shown(line) for line in rows if lines.text in line.text]
    last = cursors.seal(rows[-1].id) if rows else after
    return Read(items, last, more=len(rows) == limit)


def _line(after: str | None) -> int | None:
    return None if after is None else cursors.opened_numbers(after)[0]


def _last_seen(event_id: str | None, parts: int = 1) -> str | None:
    """Return the event id as a cursor; raises BadInput that points at the header."""
    if event_id:
        cursors.opened_numbers(event_id, parts, where="Last-Event-ID:")
    return event_id


# --- how a stream runs --------------------------------------------------------------------------

Reader = Callable[[Session, str, str | None, int], Read]


def _stream(
    caller: Caller,
    request_id: str,
    after: str | None,
    read: Reader,
    type_of: Callable[[Any], str],
) -> EventStream:
    return EventStream(_events(caller, request_id, after, read, type_of), caller)


async def _events(
    caller: Caller,
    request_id: str,
    after: str | None,
    read: Reader,
    type_of: Callable[[Any], str],
) -> AsyncIterator[bytes]:
    yield format_sse_event(comment="roundhouse", retry=RETRY_MS)
    soon_s = SOONEST_S
    with changes.subscribe(request_id) as news:
        while not changes.closing:
            try:
                state, found = await in_thread(
                    caller.tenant_id, _read, request_id, after, read, wait_s=PATIENT_S
                )
            except Unavailable:
                return  # the client reconnects with the id of the last event
            for item in found.items:
                yield _event(type_of(item), item, item.cursor)
            after = found.after
            if found.more:
                continue
            if found.settled and state in ENDED:
                yield format_sse_event(event="end", data_str=f'{{"state": "{state}"}}')
                return
            soon_s = SOONEST_S if found.settled else min(2 * soon_s, LATEST_S)
            if not await _rest(news, LONGEST_WAIT_S if found.settled else soon_s):
                yield format_sse_event(comment="still here")


async def _rest(news: Subscription, longest_s: float) -> bool:
    """Wait for news; False if the stream has been silent for the longest allowed time."""
    return await news.wait(longest_s) or longest_s < LONGEST_WAIT_S


def _read(request_id: str, after: str | None, read: Reader) -> tuple[str, Read]:
    """Read the state first, then the rows: if the state is an end, the rows are complete."""
    with transaction() as session:
        state = session.scalar(select(Request.state).where(Request.id == request_id))
        return str(state), read(session, request_id, after, READ_AT_ONCE)


def _event(type_: str, item: BaseModel, cursor: str) -> bytes:
    return format_sse_event(event=type_, data_str=item.model_dump_json(), id=cursor)
