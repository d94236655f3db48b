"""Finds the best member of a lot, whose outputs the tasks of other requests take.

A member is ranked by the last value of the metric that its lot names (`best_rule.objective_in`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Numeric, case, cast, func, select
from sqlalchemy.orm import Session

from app.core.model.lifecycle import State
from app.core.model.provisions.best_rule import objective_in
from app.db.models import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class BestMember:
    id: str
    name: str
    told: str  # its value, such as "loss 0.25"


def find_best(session: Session, lot_id: str) -> BestMember | None:
    """Return the best of the members that are done, of equal ones the first; None if none of them
    has a number as its metric.
    """
    objective = objective_in(session.get_one(Task, lot_id).descriptor)
    if objective is None:
        return None
    metric, goal = objective
    value = metric_value(metric)
    query = select(Task.id, Task.name, value.label("value"))
    mine = (Task.lot_id == lot_id, Task.lot_index.is_not(None), Task.state == State.done)
    order = value.asc() if goal == "min" else value.desc()
    ranked = query.where(*mine, value.is_not(None)).order_by(order, Task.lot_index).limit(1)
    row = session.execute(ranked).first()
    if row is None:
        return None
    return BestMember(id=row.id, name=row.name, told=f"{metric} {float(row.value):g}")


def metric_value(name: str) -> ColumnElement[Any]:
    """Return the last value of a task's metric, as a column; null if it is not a number."""
    value = Task.metrics[name]
    return case((func.jsonb_typeof(value) == "number", cast(value.astext, Numeric)))
