"""Reads and writes rows of gangs over several islands, and of their tickets;
`core.scheduling.gangs.island_gangs` defines what they mean.

A gang's `gang_id` is its own id; the `gang_id` of its tickets is the gang's id. All members of a
gang are in one request, each on another island.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, and_, func, select, text
from sqlalchemy.orm import Session

from app.core.model.lifecycle import NOT_STARTED
from app.core.model.snapshot import Terms
from app.core.scheduling.gangs import island_gangs
from app.core.scheduling.gangs.island_gangs import GangMember
from app.db import transactions
from app.db.ids import new_id
from app.db.models import Device, Placement, Task
from app.db.transactions import AnyRow
from app.messaging import outbox

NO_TERMS = Terms()

IS_TICKET = and_(Task.gang_id.is_not(None), Task.gang_id != Task.id)

Rows = Iterable[Task | AnyRow]


def is_ticket(task: Task | AnyRow) -> bool:
    return task.gang_id is not None and task.gang_id != task.id


def is_of_ticket() -> ColumnElement[bool]:
    """Return the condition that the placement's slot is kept for a gang."""
    of = (Task.id == Placement.task_id, IS_TICKET)
    return select(Task.id).where(*of).exists()


def terms(session: Session, rows: Rows) -> dict[str, Terms]:
    """Return the conditions of the tasks that are members of gangs, from the present state of each
    gang.
    """
    return terms_among(of_gangs(session, {row.gang_id for row in rows if row.gang_id}))


def of_gangs(session: Session, gangs: Collection[str]) -> Sequence[AnyRow]:
    if not gangs:
        return ()
    columns = (Task.id, Task.gang_id, Task.island, Task.state, Task.epoch, Task.good_for)
    query = select(*columns, Task.hold, Task.cancel_asked_at, Task.retry_at)
    return session.execute(query.where(Task.gang_id.in_(gangs))).all()


def terms_among(rows: Rows) -> dict[str, Terms]:
    """Return the conditions of all gangs in `rows`; all members of each gang must be among them."""
    gangs = defaultdict[str, list[Any]](list)
    for row in rows:
        gangs[str(row.gang_id)].append(row)
    found = dict[str, Terms]()
    for id, members in gangs.items():
        gang = next(_member(row) for row in members if row.id == id)
        tickets = sorted((row for row in members if row.id != id), key=lambda row: row.island)
        said = [_member(row) for row in tickets]
        found[id] = island_gangs.of_gang(gang, said)
        found |= {row.id: island_gangs.of_ticket(n, gang, said) for n, row in enumerate(tickets)}
    return found


def _member(row: Task | AnyRow) -> GangMember:
    return GangMember(
        island=str(row.island),
        state=row.state,
        epoch=row.epoch,
        good_for=row.good_for,
        willing=not row.hold and row.cancel_asked_at is None and row.retry_at is None,
    )


def try_again(session: Session) -> set[str]:
    """Clear the retry time of failed gangs when it has come; return the islands of their members.

    Tickets have no retry time of their own: they see the cleared time in the gang's row.
    """
    query = select(Task).where(
        Task.gang_id.is_not(None), Task.retry_at <= func.now(), Task.state.in_(NOT_STARTED)
    )
    gangs = session.scalars(query.order_by(Task.id).with_for_update(key_share=True)).all()
    for gang in gangs:
        gang.retry_at = None
    theirs = select(Task.island).where(Task.gang_id.in_([gang.id for gang in gangs]))
    return set(session.scalars(theirs.distinct())) if gangs else set()


def kept(session: Session, gang: Task) -> list[Device]:
    """Return the devices on which tickets keep slots for the gang, those of an island together."""
    there = (Task.gang_id == gang.id, Task.id != gang.id, Placement.ended_at.is_(None))
    query = select(Device).join(Placement, Placement.device_id == Device.id)
    query = query.join(Task, Task.id == Placement.task_id).where(*there)
    return list(session.scalars(query.order_by(Task.island, Placement.id)))


def nudge_others(session: Session, task: Task) -> None:
    """Nudge the islands of the gang's other members, after the commit."""
    transactions.after_commit(session, partial(_nudge, str(task.gang_id), task.island))


def _nudge(gang: str, island: str | None) -> None:
    with transactions.transaction() as session:
        others = select(Task.island).where(Task.gang_id == gang, Task.island != island)
        found = session.scalars(others.distinct()).all()
    for other in found:
        outbox.nudge_island(str(other))


def issue(session: Session, parts: Mapping[str, Mapping[str, int]]) -> None:
    """Create the tickets of gangs, which then use several islands. `parts` is gang -> island -> its
    slots there.

    Each gang has been assigned to the last of its islands. A ticket starts when its gang may start.
    """
    given = [
        {"gang": gang, "island": island, "width": width, "home": island == max(of)}
        for gang, of in parts.items()
        for island, width in of.items()
    ]
    for one in given:
        session.execute(_GANG if one["home"] else _TICKET, {**one, "id": new_id("tsk")})


_GANG = text(
    """
    update tasks set gang_id = id, devices_min = :width, devices_max = :width, abroad = true
    where id = :gang and island = :island
    """
)

_TICKET = text(
    """
    with needed as (
        insert into needs (task_id, needs_id, port, output)
        select distinct cast(:id as text), needs_id, '', '' from needs where task_id = :gang
        returning needs_id
    ),
    waited_for as (
        update tasks set abroad = true where id in (select needs_id from needed)
    )
    insert into tasks (id, request_id, tenant_id, user_id, island, assigned, gang_id, ordinal, name,
        type, kind, descriptor, memory_bytes, devices_min, devices_max, across_hosts,
        device_choice, tier, priority, hold, standing, not_before, submitted_at)
    select :id, request_id, tenant_id, user_id, cast(:island as text), assigned,
        id, (select max(ordinal) + 1 from tasks as all_ where all_.request_id = tasks.request_id),
        name || '@' || :island, type, kind,
        descriptor || jsonb_build_object('run', jsonb_build_object('ticket', name),
            'inputs', '{}'::jsonb, 'outputs', '[]'::jsonb, 'publish', '{}'::jsonb),
        memory_bytes, :width, :width, true, device_choice, tier, priority, hold,
        standing, not_before, submitted_at
    from tasks where id = :gang
    """
)
