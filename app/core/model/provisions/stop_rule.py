"""Reads `stop`, the rule by which the members of a lot that do worse are paused early.

`core.model.rungs` decides by it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import inf, isfinite, nan
from typing import Any

from app.core.model.fields import Fields

JSON = dict[str, Any]

GOALS = ("min", "max")
MOST_RUNGS = 16
MOST_STEP = 2**53
MOST_STOPPED = 1000  # members of a lot with a rule: control reads all their results at once
USUAL_KEEP, MOST_KEEP = 0.33, 0.9
METRIC = re.compile(r"[^\0-\x1f]{1,100}")
METRIC_RULE = "a name of 1 to 100 characters"
_SHARES = 10  # 0.33 means a third: so do shares near fractions with a denominator up to this
_NEAR = Fraction(1, 200)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """Lets the best `keep` of the members that reached a step of `rungs` go on; the others pause.

    The best have the lowest `metric`, or with the goal `max` the highest.
    """

    metric: str
    goal: str
    rungs: tuple[int, ...]
    keep: float

    def passing(self, results: int) -> int:
        """Return how many of so many results pass: at least one."""
        exact = Fraction(str(self.keep))  # of the digits that were written
        simple = exact.limit_denominator(_SHARES)
        share = simple if abs(simple - exact) < _NEAR else exact
        return max(1, int(results * share))

    def badness(self, value: float | None) -> float:
        """Return the value as a number of which lower is better; None, or not finite, is worst."""
        return badness(self.goal, value)

    def reached(self, rows: Iterable[tuple[int, JSON]]) -> dict[int, tuple[int, float | None]]:
        """Return the step and the value with which these rows reach rungs, by rung.

        A rung has the first value that was reported at its step or after it.
        """
        found: dict[int, tuple[int, float | None]] = {}
        for step, values in sorted(rows, key=lambda row: row[0]):
            if (value := as_number(values.get(self.metric))) is None:
                continue
            for rung, at in enumerate(self.rungs):
                if step >= at and rung not in found:
                    found[rung] = step, value if isfinite(value) else None
        return found

    def as_json(self) -> JSON:
        named = {"metric": self.metric, "goal": self.goal}
        return {**named, "rungs": [*self.rungs], "keep": self.keep}


def badness(goal: str, value: float | None) -> float:
    """Return the value as a number of which lower is better; None, or not finite, is worst."""
    if value is None or not isfinite(value):
        return inf
    return value if goal == "min" else -value


def as_number(value: object) -> float | None:
    """Return a reported value as a number, None if it is none.

    A value that is not finite, which comes as text, is nan, and so is one beyond all floats.
    """
    if value in ("nan", "inf", "-inf"):
        return nan
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:  # a whole number of any size
        return nan


def read_stop(fields: Fields, *, run_kind: str) -> StopRule | None:
    inside = fields.inside("stop")
    if not inside.given:
        return None
    inside.require("metric", "rungs")
    if run_kind not in ("job", "command", ""):
        told = f"only jobs and commands report metrics by step, not a {run_kind}; leave it out"
        fields.fault("stop", told)
    rungs = inside.integers("rungs", least=1, most=MOST_STEP, at_most=MOST_RUNGS)
    if not rungs and inside.body.get("rungs") == []:
        inside.fault("rungs", "must have at least one step, such as [1000, 3000, 9000]", "range")
    if list(rungs) != sorted(rungs):
        inside.fault("rungs", "must rise from step to step, such as [1000, 3000, 9000]", "range")
    rule = StopRule(
        metric=inside.text("metric", "loss", METRIC, METRIC_RULE),
        goal=inside.one_of("goal", GOALS, "min"),
        rungs=rungs,
        keep=inside.number("keep", USUAL_KEEP, above=0, most=MOST_KEEP),
    )
    inside.close()
    return rule


def rule_in(descriptor: Mapping[str, Any]) -> StopRule | None:
    """Return the rule in a task's stored descriptor."""
    stored = descriptor.get("stop")
    return None if not stored else StopRule(**{**stored, "rungs": tuple(stored["rungs"])})
