"""Makes the members of lots, and ends lots (`core.model.lot_members`).

A lot is a task that no island has. Its members become tasks when they may start, so that what
stands on an island does not grow with the lot. The end of a member and the making of the next are
one transaction, and the next takes the island of the one that ended. Control makes the first
members, and whatever a change by a user allows.

Locks are taken in this order: tasks, the row in `lots`. The lot's own task is only read while it is
locked against changes, and if somebody changes it just now, control makes the members afterwards.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from typing import Any

from sqlalchemy import Boolean, ColumnElement, Select, and_, func, literal_column, or_, select, text
from sqlalchemy.orm import Session, aliased

from app.core.model import descriptor as descriptors
from app.core.model import lot_members
from app.core.model.descriptor import TaskDescriptor
from app.core.model.lifecycle import ENDED, NOT_STARTED, Move, State
from app.core.model.lot_members import LotCounts
from app.core.model.provisions.lot_values import Scalar
from app.core.model.request_needs import RequestStanding
from app.core.model.reserved_task import ReservationStanding
from app.core.model.rungs import PROMOTED
from app.core.units import counted
from app.db import transactions
from app.db.ids import new_id
from app.db.models import Lot, Need, Task
from app.messaging import outbox, webhooks
from app.scheduling.journal import request_needs, rungs, task_writer
from app.scheduling.journal.proposals import propose
from app.scheduling.round_notes import notes_of

JSON = dict[str, Any]

IS_LOT = and_(Task.lot_id.is_not(None), Task.lot_index.is_(None))
IS_NO_MEMBER: ColumnElement[bool] = literal_column(
    "tasks.lot_index is null", Boolean
)  # as in the indexes
_IS_FAILED_MEMBER: ColumnElement[bool] = literal_column(
    "tasks.lot_index is not null and tasks.state in ('failed', 'cancelled')", Boolean
)
LOTS_AT_ONCE = 50  # lots that one transaction of control looks at
MEMBERS_AT_ONCE = 1000  # most members that it makes
PROPOSALS_AT_ONCE, PROPOSALS_OF_A_LOT = 4, 2  # most of these that it proposes (`proposals`)
_DESCRIPTIONS = 64  # lots whose descriptions are kept in memory
_COUNTS = [each.name for each in fields(LotCounts)]


def counts_of(lot: Any) -> LotCounts:
    return LotCounts(**{name: getattr(lot, name) for name in _COUNTS})


def replace_ended(session: Session) -> None:
    """Count the members that ended in this transaction, and make the next ones in their place."""
    ended = defaultdict[str, list[Task]](list)
    for task in notes_of(session).members:
        ended[str(task.lot_id)].append(task)
    notes_of(session).members.clear()
    if ended:
        session.flush()
    for id in sorted(ended):
        lot = session.get_one(Lot, id, with_for_update=True, populate_existing=True)
        was_held = counts_of(lot).has_failed_too_often
        for task in ended[id]:
            setattr(lot, task.state, getattr(lot, task.state) + 1)
            lot.stopped += rungs.is_stopped(task)
            lot.live -= 1
            _add_up(lot, task, 1)
        if counts_of(lot).has_failed_too_often and not was_held:
            _tell_held(session, lot, ended[id][0])
        islands = [task.island for task in ended[id]]
        _make(session, lot, islands, Allowance(members=len(islands)))
        if lot.live == 0:
            transactions.after_commit(session, outbox.nudge_control)


# --- control --------------------------------------------------------------------------------------


def look_at_lots(session: Session) -> bool:
    """Do what users asked of ended tasks, make members that may start, and end lots without any.

    Returns whether something was done: then there may be more. Lots that an island changes at this
    moment are left to it.
    """
    restarted = _restart_asked(session) | rungs.decide(session)
    lots = session.scalars(_lots_to_look_at()).all()
    left, ended = Allowance(members=MEMBERS_AT_ONCE, proposals=PROPOSALS_AT_ONCE), False
    for lot in lots:
        _make(session, lot, [], left)
        if counts_of(lot).has_only_losers_left:
            rungs.stop_losers(session, lot.id)
        if lot.live == 0:
            _end(session, lot)
            ended |= not lot.is_open
    return restarted or ended or left.members < MEMBERS_AT_ONCE


@cache
def _lots_to_look_at() -> Select[Lot]:
    """Return the query for lots that have room or are over.

    It is built once, since control asks every second.
    """
    has_room = and_(
        Lot.live - Lot.resting < Lot.at_once,
        or_(Lot.made < Lot.count, Lot.again > 0, Lot.promoted > 0),
        or_(Lot.failures_allowed.is_(None), Lot.failed <= Lot.failures_allowed),
        *_may_start(),
    )
    is_over = and_(Lot.made == Lot.count, Lot.again == 0)
    ends = and_(Lot.live == 0, or_(is_over, Task.cancel_asked_at.is_not(None), *_is_never()))
    has_lost = and_(is_over, Task.hold == "", Lot.live > 0, Lot.live == Lot.resting)
    query = select(Lot).join(Task, Task.id == Lot.id).where(Lot.is_open)
    # whatever else ended the lot's task, such as packages that cannot be locked
    is_given_up = and_(Task.state.in_(ENDED), ~Task.again_asked)
    waits = and_(Task.state == State.blocked, or_(has_room, ends, has_lost & (Lot.promoted == 0)))
    query = query.where(or_(waits, is_given_up)).order_by(Lot.id)
    locked = query.limit(LOTS_AT_ONCE).with_for_update(of=Lot, skip_locked=True)
    return locked.execution_options(populate_existing=True)


def _restart_asked(session: Session) -> bool:
    """Let ended tasks start again whose users asked for it, lots included; True if there were some.

    Members wait for their lot. The tasks of a request start again together, since one may need
    another.
    """
    request = session.scalar(_AGAIN_ASKED)
    if request is None:
        return False
    which = and_(Task.request_id == request, Task.again_asked, IS_NO_MEMBER)
    for task in task_writer.locked_tasks(session, which).values():
        if task.state in ENDED:
            _restart(session, task, None)
    return True


_AGAIN_ASKED = (
    select(Task.request_id)
    .where(Task.again_asked, IS_NO_MEMBER, Task.state.in_(ENDED))
    .order_by(Task.id)
    .limit(1)
)


def _end(session: Session, lot: Lot) -> None:
    """End the lot if it is over: all members have ended, or its owner or what it needs ended it."""
    row = task_writer.locked_tasks(session, Task.id == lot.id, wait=False).get(lot.id)
    if row is None:
        return
    if row.state in ENDED:
        lot.is_open = False
        return
    counts = counts_of(lot)
    is_never = session.scalar(select(or_(*_is_never())).where(Task.id == lot.id))
    told = f"{counted(counts.done, 'member')} done, {counts.failed} failed"
    told += f", {counts.stopped} stopped early" if counts.stopped else ""
    cancelled = counts.cancelled - counts.stopped
    told += f", {cancelled} cancelled." if cancelled else "."
    told += rungs.silent_told(session, row)
    if row.cancel_asked_at is not None:
        move, told = Move.Cancel, f"Cancelled: {told}"
    elif is_never:
        move, told = Move.GaveUp, "Not started: a task that it needs did not succeed."
        told = request_needs.why_never(session, row) or told
        row.cause, row.message = "needs", told
    elif counts.end is None:
        return
    else:
        move = _MOVES[counts.end]
        row.message = told if counts.end == State.failed else None
    lot.is_open = False
    task_writer.move_task(session, row, move)
    task_writer.end_task(session, row, f"task.{row.state}", told)


_MOVES = {State.done: Move.Gathered, State.failed: Move.GaveUp, State.cancelled: Move.Cancel}


# --- members --------------------------------------------------------------------------------------


def _needs(which: Any) -> ColumnElement[bool]:
    """Return the condition that a lot needs a task of which `which` holds."""
    needed = aliased(Task)
    query = select(Need.task_id).join(needed, needed.id == Need.needs_id)
    return query.where(Need.task_id == Task.id, which(needed)).correlate(Task).exists()


def _is_broken(needed: Any) -> ColumnElement[bool]:
    """Return the condition; what failed in another request is decided with the lot's standing."""
    is_free = Task.standing == RequestStanding.free
    counts = or_(is_free, needed.request_id == Task.request_id)
    return and_(needed.state.in_((State.failed, State.cancelled)), counts)


def _is_never() -> tuple[ColumnElement[bool], ...]:
    """Return conditions of which each ends a lot: what it awaits can no longer happen."""
    return Task.standing == RequestStanding.never, _needs(_is_broken)


def _may_start() -> tuple[ColumnElement[bool], ...]:
    """Return the start conditions of a lot, which are those of its members."""
    lock = Task.descriptor["environment"]["lock"].astext
    return (
        Task.state == State.blocked,
        Task.hold == "",
        Task.standing == RequestStanding.free,
        Task.reservation_state == ReservationStanding.free,
        Task.cancel_asked_at.is_(None),
        or_(Task.not_before.is_(None), Task.not_before <= func.now()),
        func.coalesce(lock != "", True),
        ~_needs(lambda needed: needed.state != State.done),
    )


def _tell_held(session: Session, lot: Lot, member: Task) -> None:
    """Note, once, that the lot of this member is held."""
    allowed = lot.failures_allowed
    told = f"{counted(lot.failed, 'member')} failed, more than max_failures allows ({allowed}): no"
    told += " other member starts. Resume it, or retry the failed ones."
    owner = {"tenant_id": member.tenant_id, "request_id": member.request_id, "task_id": lot.id}
    data = {"task": member.name.rpartition(".")[0]}
    event = {**owner, "type": "task.held", "message": told, "data": data}
    notes_of(session).events.append(event)
    news = {"request_id": member.request_id, "type": "request.held", "task": ""}
    notes_of(session).news.append(news)
    webhooks.announce_held(session, member.request_id, f"{data['task']}: {told}")
    task_writer.note_change(session, member)


def _add_up(lot: Lot, task: Task, sign: int) -> None:
    lot.held_us += sign * task.total_held_us
    lot.pauses += sign * task.pauses
    lot.lost_steps += sign * task.lost_steps


@dataclass(slots=True, kw_only=True)
class Allowance:
    """Counts how many members a transaction may still make, and how many of these it proposes."""

    members: int
    proposals: int = 0


def _make(session: Session, lot: Lot, places: Sequence[str | None], left: Allowance) -> None:
    """Make as many members as the lot has room for, and `left` allows, the first ones on the
    islands in `places`.

    Members that go on past a rung go first, then those that start again. Control alone makes those
    whose values are proposed.
    """
    room = min(counts_of(lot).room, left.members)
    if not room:
        return
    mine = select(Task.descriptor, Task.retry_max).where(Task.id == lot.id, *_may_start())
    found = session.execute(mine.with_for_update(read=True, of=Task, skip_locked=True)).first()
    if found is None:
        return
    promoted = _promoted(session, lot, room) if lot.promoted else ()
    for task in promoted:
        rungs.go_on(session, task)
    islands = [*places, *[None] * room][: room - len(promoted)]
    for task in _asked_again(session, lot, len(islands)) if lot.again else ():
        _add_up(lot, task, -1)
        _restart(session, task, islands.pop(0))
        lot.again, lot.live = lot.again - 1, lot.live + 1
    left.members -= room - len(islands)
    spec, values_of = _description(json.dumps(found.descriptor, sort_keys=True))
    first, number = lot.made, len(islands)
    search = spec.search if spec.search is not None and spec.search.learns else None
    if search is not None:
        number = min(number, left.proposals, PROPOSALS_OF_A_LOT)
    indices = range(first, min(lot.count, first + number))
    if search is not None and number:
        proposed = propose(session, lot.id, search, indices)
        values_of = dict(zip(indices, proposed, strict=True)).__getitem__
        left.proposals -= len(indices)
    elif search is not None and indices.start < lot.count and islands:
        transactions.after_commit(session, outbox.nudge_control)
    lot.made, lot.live = indices.stop, lot.live + len(indices)
    left.members -= len(indices)
    session.flush()
    _write(session, lot.id, spec, values_of, indices, islands)


def _promoted(session: Session, lot: Lot, room: int) -> Sequence[Task]:
    """Return members that may go on past a rung, those with the lowest indices."""
    mine = (Task.lot_id == lot.id, Task.hold == PROMOTED, Task.state.in_(NOT_STARTED))
    query = select(Task).where(*mine, Task.cancel_asked_at.is_(None)).order_by(Task.lot_index)
    free = query.limit(room).with_for_update(key_share=True, skip_locked=True)
    return session.scalars(free.execution_options(populate_existing=True)).all()


def _asked_again(session: Session, lot: Lot, room: int) -> Sequence[Task]:
    """Return ended members that are to start again, those with the lowest indices."""
    mine = (Task.lot_id == lot.id, _IS_FAILED_MEMBER, Task.state.in_(lot.again_states))
    query = select(Task).where(*mine, Task.ended_at < lot.again_before).order_by(Task.lot_index)
    free = query.limit(min(room, lot.again)).with_for_update(key_share=True, skip_locked=True)
    return session.scalars(free.execution_options(populate_existing=True)).all()


def _restart(session: Session, task: Task, island: str | None) -> None:
    task_writer.move_task(session, task, Move.Again)
    task.again_asked, task.island = False, island
    task.cause = task.message = task.detail = task.ended_at = task.cancel_asked_at = None
    task.retry_at = transactions.now(session)  # it is queued after a failure, not preempted
    task.hold, task.attempts, task.avoids = "", 0, []
    if task.reservation_id is not None:  # control looks whether it is inside a window now
        task.reservation_state = ReservationStanding.planned
    if task.standing == RequestStanding.never:
        request_needs.look_again(session, task)
    if task.descriptor.get("stop"):
        rungs.let_pass(session, task)  # else it would pause again at once
    task_writer.tell(session, task, "task.again", "It starts again.")


@lru_cache(maxsize=_DESCRIPTIONS)
def _description(descriptor: str) -> tuple[TaskDescriptor, Callable[[int], dict[str, Scalar]]]:
    """Return what a lot is, and the function that gives the values of a member; {} of an array."""
    task = descriptors.from_json(json.loads(descriptor))
    return task, (lambda _: {}) if task.drawn_from is None else task.drawn_from.by_index()


def _write(
    session: Session,
    lot: str,
    task: TaskDescriptor,
    values_of: Callable[[int], dict[str, Scalar]],
    indices: range,
    islands: Sequence[str | None],
) -> None:
    if not indices:
        return
    rows = []
    for index, island in zip(indices, islands, strict=False):
        values = values_of(index)
        member = lot_members.member(task, index, values)
        row = {
            "id": new_id("tsk"),
            "index": index,
            "name": member.name,
            "island": island,
            "spec": descriptors.as_json(member),
            "choice": descriptors.choice_text(member),
            "member_values": values or None,
        }
        rows.append(row)
    session.execute(_MEMBERS, {"lot": lot, "members": json.dumps(rows)})


# What a lot has, each of its members gets: its needs, its datablocks, the checkpoint from which it
# starts.
_MEMBERS = text(
    """
    with member as (
        select * from json_to_recordset(cast(:members as json)) as m
            (id text, index int, name text, island text, spec jsonb, choice text,
             member_values jsonb)
    ),
    made as (
        insert into tasks (id, request_id, tenant_id, user_id, island, lot_id, lot_index,
            lot_values, ordinal, name, type, kind, descriptor, memory_bytes, devices_min,
            devices_max, across_hosts, device_choice, tier, priority, retry_max, step,
            reservation_id, reservation_state, submitted_at)
        select m.id, lot.request_id, lot.tenant_id, lot.user_id, m.island, lot.id, m.index,
            m.member_values, lot.ordinal, m.name, lot.type, lot.kind, m.spec, lot.memory_bytes,
            lot.devices_min, lot.devices_max, lot.across_hosts,
            concat_ws(',', nullif(m.choice, ''), substring(lot.device_choice, '(@[^,]*)$')),
            lot.tier, lot.priority, lot.retry_max, lot.step, lot.reservation_id,
            lot.reservation_state, lot.submitted_at
        from tasks lot, member m where lot.id = :lot
    ),
    needed as (
        insert into needs (task_id, needs_id, port, output, late)
        select m.id, n.needs_id, n.port, n.output, n.late from needs n, member m
        where n.task_id = :lot
    ),
    used as (
        insert into datablock_uses (task_id, port, datablock_id)
        select m.id, u.port, u.datablock_id from datablock_uses u, member m where u.task_id = :lot
    )
    insert into checkpoints (id, task_id, tenant_id, epoch, step, sha256, size_bytes, took_us,
        host, key, printed_epoch, printed_lines)
    select 'ckp_' || replace(cast(gen_random_uuid() as text), '-', ''), m.id, c.tenant_id, c.epoch,
        c.step, c.sha256, c.size_bytes, c.took_us, c.host, c.key, c.printed_epoch, c.printed_lines
    from checkpoints c, member m where c.task_id = :lot and c.deleted_at is null
    """
)
