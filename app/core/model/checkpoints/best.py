"""Chooses the best checkpoints of a task, or of all members of a lot, by a metric.

What was not chosen may be deleted, so the choice never comes back to it: one of the best of all
checkpoints is among the best of any of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from app.core.model.provisions.best_rule import BestRule


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedCheckpoint:
    """Holds the value of the metric at a checkpoint's step, or last before it.

    None: it was never reported, or was no finite number. Such a checkpoint is never best.
    """

    id: str
    step: int
    value: float | None


def best_checkpoints(rule: BestRule, checkpoints: Iterable[RankedCheckpoint]) -> list[str]:
    """Return the ids of the best `rule.keep`, the best first; of equal ones the earliest."""
    ranks = ((rule.badness(each.value), each.step, each.id) for each in checkpoints)
    return [id for badness, _, id in sorted(ranks)[: rule.keep] if badness < inf]
