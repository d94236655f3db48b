"""Ranks the checkpoints of a task by a metric, and marks the best (`core.model.checkpoints.best`).

Whoever deletes checkpoints for their age spares those that are marked.
"""

from __future__ import annotations

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from app.core.model.checkpoints.best import RankedCheckpoint, best_checkpoints
from app.core.model.protocol import messages
from app.core.model.provisions.best_rule import BestRule, best_rule_in
from app.db.models import Checkpoint, Metric, Task

JSON = messages.JSON


def rank(session: Session, task: Task, event: messages.Saved) -> JSON:
    """Return the value and the step by which a new checkpoint is ranked, as columns.

    The process tells the value with the image. If it has not reported any since it began, the
    newest that is known counts: of an older checkpoint, or of a job's row of metrics. A command's
    rows have steps of their own, which say nothing of its checkpoints.
    """
    rule = best_rule_in(task.descriptor)
    if rule is None:
        return {}
    ranked = event.ranked or _newest_known(session, task, rule, event.step)
    return {"ranked_value": ranked.get("value"), "ranked_step": ranked.get("step")}


def _newest_known(session: Session, task: Task, rule: BestRule, step: int) -> JSON:
    before = (Checkpoint.task_id == task.id, Checkpoint.step <= step)
    kept = select(Checkpoint.ranked_step.label("step"), Checkpoint.ranked_value.label("value"))
    kept = kept.where(*before, Checkpoint.ranked_step.is_not(None))
    newest = session.execute(kept.order_by(Checkpoint.step.desc()).limit(1)).first()
    found = [] if newest is None else [{"step": newest.step, "value": newest.value}]
    if task.spec.run.kind == "command":
        return found[0] if found else {}
    rows = (Metric.task_id == task.id, Metric.step <= step, Metric.values.has_key(rule.metric))
    reported = select(Metric.step, Metric.values).where(*rows).order_by(Metric.step.desc()).limit(1)
    for at, values in session.execute(reported):
        if (ranked := rule.ranked(at, values)) is not None:
            found.append(ranked)
    return max(found, key=lambda each: each["step"], default={})


def mark_best(session: Session, task: Task) -> None:
    """Mark which of the task's checkpoints are its best now; damaged ones are not."""
    rule = best_rule_in(task.descriptor)
    if rule is None:
        return
    whole = Checkpoint.damaged_at.is_(None), Checkpoint.deleted_at.is_(None)
    query = select(Checkpoint.id, Checkpoint.step, Checkpoint.ranked_value)
    rows = session.execute(query.where(Checkpoint.task_id == task.id, *whole)).all()
    ranks = (RankedCheckpoint(id=id, step=step, value=value) for id, step, value in rows)
    is_best = Checkpoint.id.in_(best_checkpoints(rule, ranks))
    changed = update(Checkpoint).where(Checkpoint.task_id == task.id, Checkpoint.best != is_best)
    session.execute(changed.values(best=is_best).execution_options(synchronize_session=False))
