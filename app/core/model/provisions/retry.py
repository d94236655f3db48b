"""Says what happens after a failed attempt of a task: the field `retry` of a descriptor.

`max` counts further attempts. The first of the `rules` that fits a failure decides; if none fits,
the task is retried where another attempt may help (`core.model.failure_causes`). `"never"` in place
of the object lets no attempt follow another, even if the device was lost.
`core.model.retry_decision` applies the field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from app.core.model.failure_causes import MOST_PATTERN, OF_RULES
from app.core.model.fields import Fields

JSON = dict[str, Any]

FIELD = "retry"
NEVER = "never"
NEVER_MAX = -1  # `max` of a task that may never start again
MOST_ATTEMPTS = 100
MOST_RULES = 16
MOST_EXITS = 32
MOST_PATTERNS = 4
MOST_BACKOFF_S = 86_400.0
MOST_GROWTH = 10.0
#: What a rule may do. Both "retry" and "elsewhere" use up an attempt. After "elsewhere" the task
#: rather waits than starts again on the device where it failed.
RETRY, FAIL, HOLD, ELSEWHERE = "retry", "fail", "hold", "elsewhere"
DOES = (RETRY, FAIL, HOLD, ELSEWHERE)
_PATTERN = re.compile(f".{{1,{MOST_PATTERN}}}")  # its syntax is checked where patterns are run
#: Amounts of a descriptor that may grow from one attempt to the next.
GROWABLE = (
    "devices.memory_bytes",
    "max_duration_s",
    "resources.disk_bytes",
    "resources.memory_bytes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRule:
    """Fits a failure if all that it names does; an empty field fits every failure."""

    exits: tuple[int, ...] = ()  # exit statuses, from 1 to 255
    cause: str = ""  # one of `failure_causes.OF_RULES`
    log: str = ""  # regular expression that a line of the log contains
    do: str = RETRY  # one of DOES
    grow: Mapping[str, float] = field(default_factory=dict)  # one of GROWABLE -> factor

    @property
    def retries(self) -> bool:
        return self.do in (RETRY, ELSEWHERE)

    def as_json(self) -> JSON:
        said: JSON = {
            "exit": [*self.exits],
            "cause": self.cause,
            "log": self.log,
            "do": self.do,
            "grow": dict(self.grow),
        }
        return {name: value for name, value in said.items() if value}


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryBackoff:
    """Says how long the first attempt after a failure waits; each further one waits twice as long,
    up to `most_s`.
    """

    first_s: float = 2.0
    most_s: float = 600.0

    def wait_s(self, attempts: int) -> float:
        """Return how long the task waits when it has used up so many attempts, at least one."""
        return float(min(self.most_s, self.first_s * 2 ** (attempts - 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """`max` is the most attempts after failures, or NEVER_MAX."""

    max: int = 0
    backoff: RetryBackoff = field(default_factory=RetryBackoff)
    rules: tuple[RetryRule, ...] = ()

    def as_json(self) -> JSON | str:
        if self.max == NEVER_MAX:
            return NEVER
        backoff = {"first_s": self.backoff.first_s, "most_s": self.backoff.most_s}
        rules = [rule.as_json() for rule in self.rules]
        return {"max": self.max, "backoff": backoff, "rules": rules}

    def to_wire(self) -> JSON | str:
        """Return the same without values at their default, which older devices do not know."""
        if self.max == NEVER_MAX:
            return NEVER
        said: Any = self.as_json()
        usual: Any = RetryPolicy().as_json()
        return {name: value for name, value in said.items() if value != usual[name]}


# --- from JSON ------------------------------------------------------------------------------------


def read_retry(fields: Fields) -> RetryPolicy:
    """Read the field `retry` of a task."""
    if fields.body.get(FIELD) == NEVER:
        fields.one_of(FIELD, (NEVER,), NEVER)
        return RetryPolicy(max=NEVER_MAX)
    inside = fields.inside(FIELD)
    if not inside.given:
        return RetryPolicy()
    policy = RetryPolicy(
        max=inside.integer("max", 0, least=0, most=MOST_ATTEMPTS),
        backoff=_backoff(inside.inside("backoff")),
        rules=_rules(inside),
    )
    inside.close()
    return policy


def _backoff(fields: Fields) -> RetryBackoff:
    if not fields.given:
        return RetryBackoff()
    backoff = RetryBackoff(
        first_s=fields.number("first_s", 2.0, above=0, most=MOST_BACKOFF_S),
        most_s=fields.number("most_s", 600.0, above=0, most=MOST_BACKOFF_S),
    )
    if backoff.most_s < backoff.first_s:
        told = f"must be at least first_s, which is {backoff.first_s:g}; got {backoff.most_s:g}"
        fields.fault("most_s", told, "range")
    fields.close()
    return backoff


def _rules(fields: Fields) -> tuple[RetryRule, ...]:
    found = fields.items("rules", least=0, most=MOST_RULES, is_required=False)
    rules = tuple(_rule(Fields(body, where, fields.faults)) for where, body in found)
    if (patterns := sum(bool(rule.log) for rule in rules)) > MOST_PATTERNS:
        told = f"at most {MOST_PATTERNS} rules may name log; got {patterns}; join patterns with |"
        fields.fault("rules", told, "range")
    return rules


def _rule(fields: Fields) -> RetryRule:
    fields.require("do")
    rule = RetryRule(
        exits=fields.integers("exit", least=1, most=255, at_most=MOST_EXITS),
        cause=fields.one_of("cause", OF_RULES, ""),
        log=fields.text("log", "", _PATTERN, f"1 to {MOST_PATTERN} characters"),
        do=fields.one_of("do", DOES, FAIL),
        grow=_growth(fields.inside("grow")),
    )
    if rule.grow and rule.do == FAIL:
        fields.fault("grow", "a task that fails has no further attempt; leave it out")
    fields.close()
    return rule


def _growth(fields: Fields) -> dict[str, float]:
    found = {name: fields.number(name, 1.0, above=1, most=MOST_GROWTH) for name in GROWABLE}
    fields.close()
    return {name: factor for name, factor in found.items() if factor > 1}


def check_rules(
    fields: Fields, policy: RetryPolicy, amounts: Mapping[str, float], *, islands: int
) -> None:
    """Report rules that can never apply. `amounts` are what the task asks for, by GROWABLE."""
    for n, rule in enumerate(policy.rules):
        where = f"{FIELD}/rules/{n}"
        if rule.retries and not policy.max:
            fields.fault(f"{FIELD}/max", f"must be at least 1, since rule {n + 1} retries", "range")
        is_last = n == len(policy.rules) - 1
        if not (rule.exits or rule.cause or rule.log or is_last):
            told = "fits every failure, so no later rule counts; name exit, cause or log"
            fields.fault(where, told)
        if rule.grow and islands > 1:
            told = "a task over several islands keeps what it asked for; set islands to 1"
            fields.fault(f"{where}/grow", told)
        for name in rule.grow:
            if not amounts[name]:
                told = f"the task does not set {name}, so nothing can grow; set it"
                fields.fault(f"{where}/grow/{name}", told)
