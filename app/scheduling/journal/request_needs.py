"""Decides about tasks that come after other requests (`core.model.request_needs`).

Control decides, at each look, by what is true of the needed requests at that moment. So nothing is
lost if a process dies between the end of a request and the release of those that wait for it: the
next look finds them. The transaction that ends a request only nudges control. It could not release
the others itself: it holds locks of tasks, and those of another request, perhaps on another island,
come before them in the order of locks.

A task that takes an output of the best member of a lot needs the lot; once the lot is done, its
input is bound to the member.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, partial

from sqlalchemy import case, or_, select, text, update
from sqlalchemy.orm import Session

from app.core.model import request_needs
from app.core.model.lifecycle import ENDED, State
from app.core.model.provisions.best_rule import OF_BEST
from app.core.model.request_needs import NeededState, NeedOutcome, RequestStanding
from app.db import transactions
from app.db.models import Need, Request, RequestNeed, Task
from app.db.transactions import AnyRow
from app.messaging import outbox
from app.scheduling.journal import task_writer
from app.scheduling.journal.best_members import BestMember, find_best

TASKS_AT_ONCE = 500  # that one transaction of control decides about


def decide_needs(session: Session) -> bool:
    """Decide what can be decided now; True if there may be more."""
    best = cache(partial(find_best, session))
    rows = session.execute(_UNDECIDED).all()
    found = [row for row in rows if _outcome(row, best) != row.outcome]
    ids = [*dict.fromkeys(row.task_id for row in found)][:TASKS_AT_ONCE]
    if not ids:
        return False
    members = or_(Task.id.in_(ids), Task.gang_id.in_(ids))
    tasks = task_writer.locked_tasks(session, members)
    needs = _needs_of(session, ids)
    # read again: until the tasks were locked, others may have decided, or a request gone on
    for row in session.execute(_UNDECIDED).all():
        need = needs.get((row.task_id, row.needs_request_id, row.needs_task_id))
        if need is None or need.outcome != row.outcome or _outcome(row, best) == row.outcome:
            continue
        _decide(session, tasks[row.task_id], need, row, best)
    by_task = defaultdict[str, list[str]](list)
    for need in needs.values():
        by_task[need.task_id].append(need.outcome)
    for task in tasks.values():
        _stand(session, task, request_needs.standing(by_task[task.gang_id or task.id]))
    return len(ids) == TASKS_AT_ONCE


#: The best member of a lot, which is done, by the lot's id.
_BestOf = Callable[[str], BestMember | None]

# The needed request is missing only if it was deleted after the task had ended, which a user then
# let start again.
_UNDECIDED = text(
    """
    select n.task_id, n.needs_request_id, n.needs_task_id, n.awaited, n.otherwise, n.outcome,
        coalesce(t.state, r.state, 'cancelled') as state,
        t.first_started_at is not null or n.needs_task_id = '' and exists (
            select from tasks m where m.request_id = r.id and m.first_started_at is not null
        ) as has_started,
        t.lot_id = t.id and t.state = 'done' as is_done_lot
    from request_needs n
    left join requests r on r.id = n.needs_request_id
    left join tasks t on t.id = n.needs_task_id
    where n.outcome in ('', 'hold')
        -- a lot without a best member has none until it ends again
        and (n.outcome = '' or t.lot_id is null or t.lot_id <> t.id or t.state <> 'done'
            or t.ended_at > n.decided_at) and (
        n.outcome = 'hold' or n.awaited = 'started'
        or coalesce(t.state, r.state, 'cancelled') in ('done', 'failed', 'cancelled'))
    order by n.task_id, n.needs_request_id, n.needs_task_id
    """
)


def _outcome(row: AnyRow, best: _BestOf) -> NeedOutcome:
    if row.is_done_lot and best(row.needs_task_id) is None:
        return NeedOutcome(row.otherwise)
    needed = NeededState(row.state, row.has_started)
    return request_needs.decide(row.awaited, row.otherwise, needed)


def _needs_of(session: Session, ids: Sequence[str]) -> dict[tuple[str, str, str], RequestNeed]:
    query = select(RequestNeed).where(RequestNeed.task_id.in_(ids))
    fresh = query.execution_options(populate_existing=True)
    return {
        (need.task_id, need.needs_request_id, need.needs_task_id): need
        for need in session.scalars(fresh)
    }


def _decide(session: Session, task: Task, need: RequestNeed, row: AnyRow, best: _BestOf) -> None:
    need.outcome = _outcome(row, best)
    need.decided_at = transactions.now(session) if need.outcome else None
    if task.state in ENDED:
        return
    named = f"{need.name} ({need.needs_request_id})"
    if need.outcome == NeedOutcome.waits:
        told = f"{named} runs again, and the task waits for it again."
    elif need.outcome == NeedOutcome.met:
        told = f"{named} {request_needs.told(need.awaited)}, which the task waited for."
        if row.is_done_lot and (member := best(row.needs_task_id)) is not None:
            _bind(session, task, row.needs_task_id, member)
            told = f"{named} is {member.name}, with {member.told}."
    else:
        told = f"{missed(need, row.state, row.has_started)}: {_CONSEQUENCES[need.outcome]}."
    data = {"request": need.needs_request_id, "on": need.awaited, "outcome": need.outcome}
    task_writer.tell(session, task, "task.after_request", told, **data)


def _bind(session: Session, task: Task, lot_id: str, member: BestMember) -> None:
    """Let the task, and the members of its gang, take the lot's outputs from this member."""
    takers = select(Task.id).where(or_(Task.id == task.id, Task.gang_id == task.id))
    inputs = update(Need).where(Need.task_id.in_(takers), Need.needs_id == lot_id, Need.port != "")
    bound = inputs.values(needs_id=member.id).execution_options(synchronize_session=False)
    session.execute(bound)


_CONSEQUENCES = {
    NeedOutcome.fail: "it fails",
    NeedOutcome.hold: "it is held until that request is retried, or somebody resumes it",
    NeedOutcome.run: "it may start all the same",
}


def missed(need: RequestNeed, state: str, has_started: bool) -> str:
    """Return why what is awaited can no longer happen, as a sentence without its full stop."""
    is_of_lot = need.name.endswith(OF_BEST)
    named = f"{need.name.removesuffix(OF_BEST)} ({need.needs_request_id})"
    if state == State.done and is_of_lot:
        return (
            f"{named} is done, but none of its members has a number as its metric, so none is best"
        )
    how = {"done": "is done", "failed": "has failed"}.get(state, "was cancelled")
    how += "" if has_started or is_of_lot else " before it started"  # only members of a lot start
    awaited = request_needs.told(need.awaited)
    return f"{named} {how}, and this task starts only when it {awaited}"


def _stand(session: Session, task: Task, standing: RequestStanding) -> None:
    if task.standing == standing:
        return
    task.standing = standing
    task_writer.note_change(session, task)
    if task.island is not None and task.state not in ENDED:
        transactions.after_commit(session, partial(outbox.nudge_island, task.island))


# --- for others -----------------------------------------------------------------------------------


def why_never(session: Session, task: Task) -> str | None:
    """Return the sentence of a task that ends because another request went otherwise."""
    query = select(RequestNeed).where(
        RequestNeed.task_id == (task.gang_id or task.id), RequestNeed.outcome == NeedOutcome.fail
    )
    need = session.scalars(query.order_by(RequestNeed.needs_request_id)).first()
    if need is None:
        return None
    return f"Not started: {missed(need, *state_of(session, need))}."


def state_of(session: Session, need: RequestNeed) -> tuple[str, bool]:
    """Return the state of what is needed, and whether it has ever started."""
    if need.needs_task_id:
        row = select(Task.state, Task.first_started_at.is_not(None))
        found = session.execute(row.where(Task.id == need.needs_task_id)).first()
    else:
        of_request = select(Task.id).where(
            Task.request_id == Request.id, Task.first_started_at.is_not(None)
        )
        row = select(Request.state, of_request.exists())
        found = session.execute(row.where(Request.id == need.needs_request_id)).first()
    return ("cancelled", False) if found is None else (found[0], found[1])


def waive(session: Session, task: Task) -> bool:
    """Let the task go if another request holds it, as somebody resumed it; False if none does.

    One that lacks the output of a best member fails then, as if the member had failed.
    """
    if task.standing != RequestStanding.held:
        return False
    which = update(RequestNeed).where(
        RequestNeed.task_id == (task.gang_id or task.id), RequestNeed.outcome == NeedOutcome.hold
    )
    lacks = RequestNeed.name.endswith(OF_BEST, autoescape=True)
    outcome = case((lacks, NeedOutcome.fail), else_=NeedOutcome.waived)
    waived = which.values(outcome=outcome, decided_at=transactions.now(session))
    session.execute(waived.execution_options(synchronize_session=False))
    _stand_anew(session, task)
    return True


def look_again(session: Session, task: Task) -> None:
    """Let control decide anew about what ended the task, which starts again."""
    which = update(RequestNeed).where(
        RequestNeed.task_id == task.id, RequestNeed.outcome == NeedOutcome.fail
    )
    anew = which.values(outcome=NeedOutcome.waits, decided_at=None)
    session.execute(anew.execution_options(synchronize_session=False))
    _stand_anew(session, task)


def _stand_anew(session: Session, task: Task) -> None:
    needs = _needs_of(session, [task.gang_id or task.id])
    _stand(session, task, request_needs.standing([need.outcome for need in needs.values()]))
