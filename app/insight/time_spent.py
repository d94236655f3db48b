"""Time spent by tasks: each second from submission to end is in one of five classes.

    waited     on no device: queued, blocked or held
    switched   assigned to a device, and not yet running there
    moved      the same, on another device than before: its state had to travel; in a migration,
               from the end of its stay on the old device
    computed   holding the slot
    staged     holding the slot, but standing still because its state was copied

The five add up to the time since the submission, by construction: placements never overlap, each
instant of a placement is in one class, and all other time is `waited`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ARRAY,
    ColumnElement,
    SQLColumnExpression,
    Text,
    any_,
    case,
    cast,
    func,
    select,
)
from sqlalchemy.orm import InstrumentedAttribute, Session

from app.db.models import Placement, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpent:
    """Holds the seconds in each class; together they are the time that the task has existed."""

    waited_s: float
    switched_s: float
    moved_s: float
    computed_s: float
    staged_s: float


def time_spent(session: Session, tasks: Iterable[str]) -> dict[str, TimeSpent]:
    """Return the times of each task until its end, or until now; they are computed from its
    placements.
    """
    ids = cast([*tasks], ARRAY(Text))  # one statement, however many tasks
    before_ended = _of_stay_before(Placement.ended_at)
    migrates = _of_stay_before(Placement.end) == "moved"
    left_at = case((migrates, before_ended), else_=Placement.launched_at)
    until = func.coalesce(Placement.ended_at, func.now())
    seated = func.coalesce(Placement.started_at, until)
    stays = (
        select(
            Placement.task_id,
            _seconds(left_at, seated).label("to_seat_s"),
            _seconds(seated, until).label("seated_s"),
            (Placement.staged_us / 1e6).label("staged_s"),
            (_of_stay_before(Placement.device_id) != Placement.device_id).label("elsewhere"),
        )
        .where(Placement.task_id == any_(ids), ~Placement.guest)
        .subquery()
    )
    of = stays.c
    summed = (
        select(
            of.task_id,
            func.sum(of.to_seat_s).label("to_seat_s"),
            func.sum(of.to_seat_s).filter(of.elsewhere).label("moved_s"),
            func.sum(of.seated_s).label("seated_s"),
            func.sum(func.least(of.staged_s, of.seated_s)).label("staged_s"),
        )
        .group_by(of.task_id)
        .subquery()
    )
    whole_s = _seconds(Task.submitted_at, func.coalesce(Task.ended_at, func.now()))
    query = (
        select(Task.id, whole_s, *(func.coalesce(column, 0) for column in list(summed.c)[1:]))
        .outerjoin(summed, summed.c.task_id == Task.id)
        .where(Task.id == any_(ids))
    )
    return {id: _parted(*map(float, parts)) for id, *parts in session.execute(query)}


def _parted(
    whole_s: float, to_seat_s: float, moved_s: float, seated_s: float, staged_s: float
) -> TimeSpent:
    return TimeSpent(
        waited_s=max(0.0, whole_s - to_seat_s - seated_s),
        switched_s=to_seat_s - moved_s,
        moved_s=moved_s,
        computed_s=seated_s - staged_s,
        staged_s=staged_s,
    )


def _of_stay_before(column: InstrumentedAttribute[Any]) -> ColumnElement[Any]:
    """The column's value in the task's placement before."""
    return func.lag(column).over(partition_by=Placement.task_id, order_by=Placement.epoch)


def _seconds(
    since: SQLColumnExpression[Any], until: SQLColumnExpression[Any]
) -> ColumnElement[Any]:
    return func.extract("epoch", until - since)
