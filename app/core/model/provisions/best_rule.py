"""Reads `checkpoint.best`, the rule by which a task keeps its best checkpoints.

`core.model.checkpoints.best` chooses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from app.core.model.fields import Fields
from app.core.model.provisions.stop_rule import (
    GOALS,
    METRIC,
    METRIC_RULE,
    as_number,
    badness,
)

JSON = dict[str, Any]

MOST_BEST = 100  # best checkpoints of a task
# after the name of a request: its best checkpoint; after that of a lot in an input: its best member
OF_BEST = "@best"


@dataclass(frozen=True, slots=True, kw_only=True)
class BestRule:
    """Lets a task keep its `keep` checkpoints with the lowest `metric`, or with the goal `max` the
    highest.
    """

    metric: str
    goal: str
    keep: int

    def badness(self, value: float | None) -> float:
        """Return the value as a number of which lower is better; None, or not finite, is worst."""
        return badness(self.goal, value)

    def ranked(self, step: int, values: Mapping[str, Any]) -> JSON | None:
        """Return the value with which this row of metrics ranks the checkpoints from its step on.

        None if the row says nothing of the metric. A value that is not finite is null.
        """
        value = as_number(values.get(self.metric))
        if value is None:
            return None
        return {"step": step, "value": value if isfinite(value) else None}

    def as_json(self) -> JSON:
        return {"metric": self.metric, "goal": self.goal, "keep": self.keep}


def read_best(checkpoint: Fields, *, run_kind: str) -> BestRule | None:
    inside = checkpoint.inside("best")
    if not inside.given:
        return None
    inside.require("metric")
    if run_kind not in ("job", "command"):
        told = f"only jobs and commands have checkpoints, not a {run_kind}; leave it out"
        checkpoint.fault("best", told)
    rule = BestRule(
        metric=inside.text("metric", "loss", METRIC, METRIC_RULE),
        goal=inside.one_of("goal", GOALS, "min"),
        keep=inside.integer("keep", 1, least=1, most=MOST_BEST),
    )
    inside.close()
    return rule


def best_rule_in(descriptor: Mapping[str, Any]) -> BestRule | None:
    """Return the rule in a task's stored descriptor."""
    stored = (descriptor.get("checkpoint") or {}).get("best")
    return BestRule(**stored) if stored else None


def objective_in(descriptor: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the metric and the goal by which a lot's members are compared, from its stored
    descriptor: those of `stop`, or else of `checkpoint.best`; None without either.
    """
    stored = descriptor.get("stop") or (descriptor.get("checkpoint") or {}).get("best")
    return (stored["metric"], stored["goal"]) if stored else None
