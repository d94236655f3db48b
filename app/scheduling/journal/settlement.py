"""Write, once in a transaction, the sums that were noted during it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence

from sqlalchemy import select, text, update
from sqlalchemy.orm import Session

from app.core.model import lifecycle
from app.core.model.lifecycle import ENDED
from app.db import transactions
from app.db.lines import KEY
from app.db.models import Request
from app.messaging import outbox, webhooks
from app.scheduling import ledger
from app.scheduling.journal import lots, task_writer
from app.scheduling.round_notes import RoundNotes, notes_of, set_notes

CHANGES = "roundhouse"  # NOTIFY channel that wakes open streams when there is something to read


def write_down(session: Session) -> None:
    """Flush what was changed and charged so far, so that queries of this transaction see it."""
    session.flush()
    ledger.book(session)
    task_writer.write_events(session)


def settle(session: Session) -> None:
    """Make the next members of lots, write the queue counts, update requests after moves of tasks,
    wake open streams at the commit.
    """
    lots.replace_ended(session)
    write_down(session)
    notes = notes_of(session)
    set_notes(session, RoundNotes(orders=notes.orders, written=notes.written))
    waiting = sorted(line for line in notes.waiting.items() if line[1])
    if notes.closed or waiting or notes.changed:
        closed = [{"task_id": task, "epoch": epoch} for task, epoch in sorted(notes.closed)]
        counted = [dict(zip(_LINE, (*line, change), strict=True)) for line, change in waiting]
        said = [" ".join(one) for one in sorted(notes.changed)]
        sums = {"closed": json.dumps(closed), "lines": json.dumps(counted), "said": said}
        session.execute(_SUMS, {**sums, "channel": CHANGES})
    if notes.moved:
        _sum_up(session, sorted(notes.moved))


_LINE = (*KEY, "tenant_id", "waiting")


# Orders of ended stays need no answer. Lines are sorted, so that two islands cannot deadlock.
_SUMS = text(
    f"""
    with answered as (
        update orders set answered_at = now()
        from jsonb_to_recordset(cast(:closed as jsonb)) as closed (task_id text, epoch int)
        where orders.task_id = closed.task_id and orders.epoch = closed.epoch
            and answered_at is null
    ), counted as (
        insert into lines ({", ".join(_LINE)})
        select {", ".join(_LINE)}
        from jsonb_populate_recordset(cast(null as lines), cast(:lines as jsonb))
        on conflict on constraint pk_lines do update set waiting = lines.waiting + excluded.waiting
    )
    select pg_notify(:channel, said) from unnest(cast(:said as text[])) as said
    """
)


_HOW = {"done": "is done", "failed": "has failed", "cancelled": "was cancelled"}

_STATES = text(
    """
    select r.id, r.tenant_id, r.state, array_agg(distinct t.state) as tasks,
        bool_or(t.first_started_at is not null or t.lot_id = t.id and exists (select from tasks m
            where m.lot_id = t.id and m.lot_index is not null
                and m.first_started_at is not null)) as started,
        count(distinct coalesce(t.island, '')) > 1 as spread,
        exists (select from request_needs n where n.needs_request_id = r.id
            and n.outcome in ('', 'hold')) as is_awaited,
        exists (select from request_channels c where c.request_id = r.id) as has_channels
    from requests r join tasks t on t.request_id = r.id
    where r.id = any(:ids) and t.lot_index is null and (t.gang_id is null or t.gang_id = t.id)
    group by r.id order by r.id
    """
)


def _sum_up(session: Session, ids: Sequence[str]) -> None:
    """Update the states of these requests, now that some of their tasks have moved.

    For a request with tasks on several islands, only one transaction at a time does this, and it
    sees what the previous one did.  Otherwise two transactions that end the last two tasks could
    each leave the request open.
    """
    rows = session.execute(_STATES, {"ids": ids}).all()
    if spread := [row.id for row in rows if row.spread]:
        mine = select(Request.id).where(Request.id.in_(spread)).order_by(Request.id)
        session.execute(mine.with_for_update(key_share=True))
        rows = session.execute(_STATES, {"ids": ids}).all()
    if any(row.is_awaited for row in rows):
        transactions.after_commit(session, outbox.nudge_control)
    ended, changed = list[str](), defaultdict[str, list[str]](list)
    for row in rows:
        state = lifecycle.request_state(row.tasks, started=row.started)
        if row.state == state:
            continue
        changed[state].append(row.id)
        if row.has_channels:
            what = "started" if state == "running" else state
            news = {"request_id": row.id, "type": f"request.{what}", "task": ""}
            notes_of(session).news.append(news)
        if state in ENDED:
            ended.append(row.id)
            told = {"message": f"The request {_HOW[state]}.", "data": {}}
            owner = {"tenant_id": row.tenant_id, "request_id": row.id}
            notes_of(session).events.append({**owner, "type": f"request.{state}", **told})
    for state, those in changed.items():
        ended_at = transactions.now(session) if state in ENDED else None
        of_state = update(Request).where(Request.id.in_(those))
        session.execute(of_state.values(state=state, ended_at=ended_at))
    if ended:
        webhooks.announce(session, ended)
    task_writer.write_events(session)
