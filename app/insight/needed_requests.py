"""Says which other requests a task waits for, and when these are expected to be so far (rule F10).

The forecast of a request is that of its latest task. A task that waits for something that nobody
can forecast leaves its request without one; the reasons of that request say what it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from sqlalchemy import and_, select
from sqlalchemy.orm import Session

from app.core.explanation import waiting_reasons as says
from app.core.model import request_needs
from app.core.model.lifecycle import ENDED, NOT_STARTED
from app.core.model.request_needs import STARTED, NeedOutcome
from app.core.model.snapshot import Reason
from app.db import transactions
from app.db.models import Request, RequestNeed, Task
from app.insight import forecast, lot_counts
from app.insight.forecast import Learned, Start
from app.scheduling import gang_tickets, snapshot_reader
from app.scheduling.journal import request_needs as journal
from app.scheduling.journal.lots import IS_NO_MEMBER

DEEPEST = 8  # longest chain of requests that is forecast
TASKS_FORECAST = 50  # of a needed request with more tasks nothing is forecast
REASONS = 5  # most needed requests that are told one by one

#: By task: when it starts; None if that is not known. Told of tasks that wait.
StartsOf = Callable[[Sequence[Task]], Mapping[str, Start | None]]


def reasons(
    session: Session, tasks: Sequence[Task], starts_of: StartsOf, learned: Learned
) -> dict[str, tuple[Reason, ...]]:
    """Return for each of the tasks that comes after other requests what it awaits of them."""
    ids = [task.gang_id or task.id for task in tasks if task.standing and task.state in NOT_STARTED]
    if not ids:
        return {}
    open_ = RequestNeed.outcome.in_((NeedOutcome.waits, NeedOutcome.hold))
    query = select(RequestNeed).where(RequestNeed.task_id.in_(ids), open_)
    rows = session.scalars(query.order_by(RequestNeed.needs_request_id)).all()
    states = _states(session, {row.needs_request_id for row in rows})
    told, found = dict[tuple[str, str, bool], str](), defaultdict[str, list[Reason]](list)
    for row in rows:
        of = row.needs_request_id
        if row.outcome == NeedOutcome.hold:
            why = journal.missed(row, *journal.state_of(session, row))
            found[row.task_id].append(says.request_missed(why, of))
            continue
        if len(found[row.task_id]) >= REASONS:
            continue
        key = of, row.needs_task_id, row.awaited == STARTED
        if key not in told:
            told[key] = _forecast(session, row, states.get(of, ""), starts_of, learned)
        awaited = request_needs.told(row.awaited)
        reason = says.after_request(
            f"{row.name} ({of}) {awaited}. {told[key]}", f"{row.name} {awaited}", of
        )
        found[row.task_id].append(reason)
    return {task: tuple(those) for task, those in found.items()}


def _states(session: Session, ids: set[str]) -> dict[str, str]:
    rows = session.execute(select(Request.id, Request.state).where(Request.id.in_(ids)))
    return {row.id: row.state for row in rows}


def _forecast(
    session: Session, need: RequestNeed, state: str, starts_of: StartsOf, learned: Learned
) -> str:
    """Return when the request is expected to be so far, as a sentence without its full stop.

    The time is that of a clock, in whole minutes, so that it does not change while one reads.
    """
    at_s = _Forecasts(session, starts_of, learned).of_need(need)
    if at_s is None:
        return f"It is {state}, and there is no forecast of it yet"
    what = "start" if need.awaited == STARTED else "end"
    return f"It is {state}, and expected to {what} about {says.minute(at_s)}"


class _Forecasts:
    """Forecasts when needed requests start or end, in seconds since 1970; None if nobody knows."""

    def __init__(self, session: Session, starts_of: StartsOf, learned: Learned) -> None:
        self.session, self.starts_of, self.learned = session, starts_of, learned
        self.now_s = transactions.now_s(session)

    def of_need(self, need: RequestNeed, depth: int = 0) -> float | None:
        mine = and_(Task.request_id == need.needs_request_id, IS_NO_MEMBER, ~gang_tickets.IS_TICKET)
        if need.needs_task_id:
            mine = Task.id == need.needs_task_id
        query = select(Task).where(mine, Task.state.not_in(ENDED)).order_by(Task.id)
        tasks = self.session.scalars(query.limit(TASKS_FORECAST + 1)).all()
        if not tasks or len(tasks) > TASKS_FORECAST or depth > DEEPEST:
            return None
        starts = self._starts_s(tasks, depth)
        if need.awaited == STARTED:
            return min((at_s for at_s in starts.values() if at_s is not None), default=None)
        left_s = _left_s(self.session, tasks, self.learned)
        ends = [_sum(starts[task.id], left_s.get(task.id)) for task in tasks]
        known = [at_s for at_s in ends if at_s is not None]
        return max(known) if len(known) == len(ends) else None

    def _starts_s(self, tasks: Sequence[Task], depth: int) -> dict[str, float | None]:
        """Return when each task starts; those that have started, now."""
        waiting = [task for task in tasks if task.state in NOT_STARTED and task.lot_id is None]
        told = self.starts_of([task for task in waiting if not task.standing])
        found: dict[str, float | None] = {task.id: self.now_s for task in tasks}
        for task in waiting:
            start = told.get(task.id)
            found[task.id] = None if start is None else start.starts_at.timestamp()
        for task in tasks:
            if task.standing:
                found[task.id] = self._released_s(task, depth)
        return found

    def _released_s(self, task: Task, depth: int) -> float | None:
        """Return when the last request that the task itself awaits is so far."""
        open_ = RequestNeed.outcome.in_((NeedOutcome.waits, NeedOutcome.hold))
        needs = select(RequestNeed).where(RequestNeed.task_id == task.id, open_)
        times = [
            self.of_need(need, depth + 1) if need.outcome == NeedOutcome.waits else None
            for need in self.session.scalars(needs).all()
        ]
        known = [at_s for at_s in times if at_s is not None]
        return max(known) if known and len(known) == len(times) else None


def _sum(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


def _left_s(session: Session, tasks: Sequence[Task], learned: Learned) -> dict[str, float | None]:
    """Return how long each task still runs, once it does."""
    ids = [task.id for task in tasks]
    rows = session.execute(snapshot_reader.tasks(*forecast.COLUMNS).where(Task.id.in_(ids)))
    found = {row.id: forecast.left_s(row, learned) for row in rows}
    for id, state in lot_counts.lot_states(session, ids).items():
        found[id] = lot_counts.ends_in_s(session, id, state)
    return found
