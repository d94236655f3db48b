"""Pauses members of lots at the rungs of their rule `stop`, and lets them go on.

An island writes each value with which a member reaches a rung. Control decides from all values of
the lot (`core.model.rungs`): the losers get a hold, as a pause by a user does. Who passes later is
promoted, and goes on as soon as `at_once` leaves room (`journal.lots`). All of it is in rows, so a
process that is killed changes nothing but the time of a decision.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from sqlalchemy import Select, func, select, text, update
from sqlalchemy.orm import Session

from app.core.model.lifecycle import ENDED, NOT_STARTED, State
from app.core.model.provisions.stop_rule import StopRule, rule_in
from app.core.model.rungs import HELD_AT_RUNG, PROMOTED, RungValue, Standings
from app.core.units import counted
from app.db import transactions
from app.db.models import Lot, RungResult, Task
from app.messaging import outbox
from app.scheduling.journal import task_writer

JSON = dict[str, Any]
LOTS_AT_ONCE = 10  # lots that one transaction of control decides about


def note_results(session: Session, task: Task, rows: Mapping[int, JSON]) -> None:
    """Write with which values these rows of metrics reach rungs; the first value of each counts."""
    rule = rule_in(task.descriptor)
    if rule is None or not (found := rule.reached(rows.items())):
        return
    told = [{"rung": rung, "step": step, "value": v} for rung, (step, v) in found.items()]
    which = {"task": task.id, "lot": task.lot_id, "rows": json.dumps(told)}
    if session.execute(_STORE, which).all():
        transactions.after_commit(session, outbox.nudge_control)


_STORE = text(
    """
    insert into rung_results (task_id, lot_id, rung, step, value)
    select :task, :lot, r.rung, r.step, r.value
    from json_to_recordset(cast(:rows as json)) as r (rung int, step bigint, value float)
    on conflict do nothing
    returning rung
    """
)


def let_pass(session: Session, task: Task) -> None:
    """Let a member pass the rungs that it has reached, as a person asked."""
    mine = update(RungResult).where(RungResult.task_id == task.id)
    session.execute(mine.values(passed=True).execution_options(synchronize_session=False))


def decide_anew(session: Session, lot: str) -> None:
    """Let control look again at all results of a lot, whose rule has changed."""
    mine = update(RungResult).where(RungResult.lot_id == lot)
    session.execute(mine.values(is_decided=False).execution_options(synchronize_session=False))


def places_told(session: Session, tasks: Iterable[Task]) -> dict[str, str]:
    """Say why these members rest at their rungs, by id."""
    by_lot, found = defaultdict[str, list[Task]](list), {}
    for task in tasks:
        by_lot[str(task.lot_id)].append(task)
    for lot, members in by_lot.items():
        rule, results = _rule_of(session, lot), _results(session, lot)
        ranks = Standings.of(rule, map(_value, results))
        at = {(row.task_id, row.rung): row for row in results}
        for task in members:
            if (lost := ranks.lost_at(task.id)) is not None:
                what = "Stopped" if task.state in ENDED else "Paused"
                found[task.id] = f"{what} {reached(ranks, at[task.id, lost])}"
    return found


def _rule_of(session: Session, lot: str) -> StopRule:
    """Return the rule of a lot; that of a member may be older."""
    rule = rule_in(session.scalars(select(Task.descriptor).where(Task.id == lot)).one())
    assert rule is not None, lot
    return rule


def _results(session: Session, lot: str) -> Sequence[RungResult]:
    """Return the results of a lot in the order in which they came."""
    order = (RungResult.at, RungResult.task_id, RungResult.rung)
    query = select(RungResult).where(RungResult.lot_id == lot).order_by(*order)
    return session.scalars(query.execution_options(populate_existing=True)).all()


def _value(row: RungResult) -> RungValue:
    return RungValue(member=row.task_id, rung=row.rung, value=row.value, passed=row.passed)


# --- control --------------------------------------------------------------------------------------


def decide(session: Session) -> bool:
    """Decide about members that reached a rung; True if there may be more to decide at once.

    The row of a lot is locked, and then its members as far as they are free: whoever has one is
    waited for at the next look.
    """
    lots = session.scalars(_lots_to_decide()).all()
    return sum([_decide(session, lot.id) for lot in lots]) == LOTS_AT_ONCE


@cache
def _lots_to_decide() -> Select[Lot]:
    """Return the query for lots with new results, built once, as control asks every second."""
    new = select(RungResult.lot_id).where(~RungResult.is_decided)
    query = select(Lot).where(Lot.id.in_(new)).order_by(Lot.id).limit(LOTS_AT_ONCE)
    return query.with_for_update(of=Lot, skip_locked=True)


def _decide(session: Session, lot: str) -> bool:
    """Decide about the new results of a lot; False if some of its members are locked."""
    rule = _rule_of(session, lot)
    rows = defaultdict[str, list[RungResult]](list)
    results = _results(session, lot)
    for row in results:
        rows[row.task_id].append(row)
    ranks = Standings.of(rule, map(_value, results))
    changed = [
        id
        for id, mine in rows.items()
        if any(not row.is_decided or ((id, row.rung) in ranks.passed) != row.passed for row in mine)
    ]
    free = task_writer.locked_tasks(session, Task.id.in_(changed), wait=False)
    for id, task in free.items():
        for row in rows[id]:
            row.passed, row.is_decided = (id, row.rung) in ranks.passed, True
        if task.state not in ENDED and task.cancel_asked_at is None:
            _hold_or_let_go(session, task, rows[id], ranks)
    return len(free) == len(changed)


def _hold_or_let_go(
    session: Session, task: Task, results: Sequence[RungResult], ranks: Standings
) -> None:
    """Pause the member at the rung that it lost, or let it go on."""
    lost = ranks.lost_at(task.id)
    rung = results[-1].rung if lost is None else lost
    told = reached(ranks, next(row for row in results if row.rung == rung))
    if lost is not None and task.hold == "":
        task.hold = HELD_AT_RUNG
        task_writer.tell(session, task, "task.rung_lost", f"Pauses {told}", rung=rung)
    elif lost is None and task.hold == HELD_AT_RUNG:
        task.hold = PROMOTED if task.state in NOT_STARTED else ""
        task_writer.tell(session, task, "task.rung_won", f"Goes on {told}", rung=rung)
    else:
        return
    if task.island is not None:
        transactions.after_commit(session, partial(outbox.nudge_island, task.island))


def reached(ranks: Standings, result: RungResult) -> str:
    """Say with what value a member reached a rung, and its place there."""
    rule, rung = ranks.rule, result.rung
    value = "no finite number" if result.value is None else f"{result.value:.6g}"
    told = f"at step {rule.rungs[rung]:,}, with {rule.metric} {value}"
    if (place := ranks.place(result.task_id, rung)) is None:
        return f"{told}."
    of = ranks.results(rung)
    return f"{told}: place {place} of {of}, of which the best {rule.passing(of)} go on."


def go_on(session: Session, task: Task) -> None:
    """Let a promoted member run again, now that there is room for it."""
    task.hold = ""
    if task.island is not None:
        transactions.after_commit(session, partial(outbox.nudge_island, task.island))


def stop_losers(session: Session, lot: str) -> None:
    """Ask for the end of the members that lost, since no other member is left."""
    lost = (Task.lot_id == lot, Task.hold == HELD_AT_RUNG, Task.state.in_(NOT_STARTED))
    query = select(Task).where(*lost, Task.cancel_asked_at.is_(None)).order_by(Task.id)
    free = query.with_for_update(key_share=True, skip_locked=True)
    told = "Stopped: all other members have ended, and it was not among the best at its rung."
    for task in session.scalars(free.execution_options(populate_existing=True)):
        task.cancel_asked_at = transactions.now(session)
        task_writer.tell(session, task, "task.stopped_early", told)
        if task.island is not None:
            transactions.after_commit(session, partial(outbox.nudge_island, task.island))


def silent_told(session: Session, lot: Task) -> str:
    """Say how many members of a lot were never compared, since they did not report the metric."""
    if (rule := rule_in(lot.descriptor)) is None:
        return ""
    reported = select(RungResult.task_id).where(RungResult.task_id == Task.id).exists()
    mine = (Task.lot_id == lot.id, Task.lot_index.is_not(None), Task.state == State.done)
    silent = session.scalar(select(func.count()).where(*mine, ~reported))
    if not silent:
        return ""
    told = f"{counted(silent, 'member')} ended without {rule.metric} at step {rule.rungs[0]:,}"
    return f" {told} or later, and so never paused."


def is_stopped(task: Task) -> bool:
    """True if an ended member was cancelled while it rested at a rung."""
    return task.state == State.cancelled and task.hold == HELD_AT_RUNG
