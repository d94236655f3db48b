"""The phase of tasks and requests (`core.model.phase`), from rows and in SQL."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Boolean, ColumnElement, and_, case, literal, literal_column, or_, select

from app.core.model.lifecycle import ENDED, NOT_STARTED, State
from app.core.model.phase import MOST_ADVANCED, OF_STATE, Phase, task_phase
from app.db.models import Request, Task


def of_task(task: Task) -> Phase:
    return task_phase(
        task.state,
        hold=task.hold,
        begun=task.first_started_at is not None,
        retries=task.retry_at is not None,
        has_image=task.image_on is not None,
    )


_OF_STATE = {state.value: phase.value for state, phase in OF_STATE.items()}

#: The result of `of_task`, as a column.
TASK_PHASE: ColumnElement[str] = case(
    (Task.state.not_in(NOT_STARTED), case(_OF_STATE, value=Task.state)),
    (Task.hold != "", Phase.paused.value),
    (
        and_(
            Task.first_started_at.is_not(None),
            or_(Task.image_on.is_not(None), Task.retry_at.is_(None)),
        ),
        Phase.preempted.value,
    ),
    else_=literal(Phase.queued.value),
)

# Literal, as in the indexes ix_tasks_live, ix_requests_live and ix_requests_failed: Postgres cannot
# use these indexes if the states are parameters.
IS_LIVE_TASK = literal_column("tasks.state not in ('done', 'failed', 'cancelled')", Boolean)
IS_LIVE_REQUEST = literal_column("requests.state not in ('done', 'failed', 'cancelled')", Boolean)
IS_FAILED_REQUEST = literal_column("requests.state in ('failed', 'cancelled')", Boolean)

#: Excludes tickets, which only keep devices for a gang: the gang itself decides the request's
#: phase.
IS_NO_TICKET: ColumnElement[bool] = or_(Task.gang_id.is_(None), Task.gang_id == Task.id)


def is_in(phases: Collection[str]) -> ColumnElement[bool]:
    """Return the condition that a request is in one of these phases."""
    ends = [phase for phase in phases if phase in ENDED]
    found = [_leads(phase) for phase in MOST_ADVANCED if phase in phases]
    return or_(*found, *([has_state(ends)] if ends else []))


def has_state(states: Collection[str]) -> ColumnElement[bool]:
    """Return the condition that a request is in one of these states."""
    found = Request.state.in_(states)
    if not ENDED.intersection(states):
        return and_(found, IS_LIVE_REQUEST)
    return and_(found, IS_FAILED_REQUEST) if ENDED - {State.done} >= {*states} else found


def has_task_in(phases: Collection[str]) -> ColumnElement[bool]:
    """Return the condition that a task is in one of these phases."""
    is_in_one = TASK_PHASE.in_(phases)
    return is_in_one if {*phases} & ENDED else and_(is_in_one, IS_LIVE_TASK)


def states_in(phases: Collection[str]) -> frozenset[str]:
    """Return the states that a task in one of these phases may have."""
    found = {state for state, phase in OF_STATE.items() if phase in phases}
    return frozenset(found if set(phases) <= {*OF_STATE.values()} else found | NOT_STARTED)


def _leads(phase: Phase) -> ColumnElement[bool]:
    """Return a condition: at least one task of the request is in this phase, and none is in a
    further one.
    """
    further = [each.value for each in MOST_ADVANCED[: MOST_ADVANCED.index(phase)]]
    live = select(Task.request_id).where(IS_LIVE_TASK, IS_NO_TICKET)
    return and_(
        IS_LIVE_REQUEST,
        Request.id.in_(live.where(TASK_PHASE.in_([phase.value]))),
        Request.id.not_in(live.where(TASK_PHASE.in_(further))),
    )
