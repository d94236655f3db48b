"""Decides what follows a failed attempt of a task, and which devices its next attempt avoids.

`provisions.retry` describes the field of the descriptor. Devices find the lines that its patterns
match (`app.log_patterns`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from app.core.model.failure_causes import CAUSES
from app.core.model.provisions.retry import (
    ELSEWHERE,
    FAIL,
    HOLD,
    NEVER_MAX,
    RETRY,
    RetryPolicy,
    RetryRule,
)

AVOIDED_MOST = 8  # most devices that a task avoids; the one that it has avoided longest goes first
AVOIDED_S = 600.0  # how long a task avoids a device on which it failed
HELD_BY_RULE = "rule"  # the hold of a task that a rule holds until somebody resumes it


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailure:
    """Describes a failed attempt. `lines` are patterns of rules, each with the newest line of the
    log that it matches.
    """

    cause: str
    exit_status: int | None = None
    lines: Mapping[str, str] = field(default_factory=dict)
    attempts: int = 0  # attempts that earlier failures used up
    is_excused: bool = False  # True: the platform is to blame, not the task


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryDecision:
    """Says what happens to the task. `number` is that of the rule that fits, from 1; 0 for none."""

    do: str  # one of `provisions.retry.DOES`
    told: str = ""  # why, in a sentence for the task's owner
    number: int = 0
    rule: RetryRule | None = None
    line: str = ""  # line of the log that the rule's pattern matched
    attempts: int = 0  # attempts that are used up now
    wait_s: float = 0.0  # until the next attempt

    @property
    def gives_up(self) -> bool:
        return self.do == FAIL

    @property
    def is_held(self) -> bool:
        return self.do == HOLD


def decide(policy: RetryPolicy, failure: AttemptFailure) -> RetryDecision:
    """Return what the field `retry` says about a failure; the first rule that fits wins."""
    attempts = failure.attempts
    if policy.max == NEVER_MAX:
        told = "It is never started again (retry: never)."
        return RetryDecision(do=FAIL, told=told, attempts=attempts)
    if failure.is_excused:
        told = "It restarts soon; this does not count as an attempt."
        return RetryDecision(do=RETRY, told=told, attempts=attempts)
    fit = _first_that_fits(policy, failure)
    if fit.do == HOLD:
        return replace(fit, told=f"It is held{_by(fit)}; somebody has to resume it.")
    if fit.do == FAIL:
        return replace(fit, told=f"It is not retried{_by(fit)}." if fit.rule is not None else "")
    if attempts >= policy.max:
        told = f"No attempt is left ({attempts} of {policy.max})." if policy.max else ""
        return replace(fit, do=FAIL, told=told)
    where = " on another device" if fit.do == ELSEWHERE else ""
    told = f"It is retried{where} ({attempts + 1} of {policy.max}){_by(fit)}."
    wait_s = policy.backoff.wait_s(attempts + 1)
    return replace(fit, told=told, attempts=attempts + 1, wait_s=wait_s)


def _first_that_fits(policy: RetryPolicy, failure: AttemptFailure) -> RetryDecision:
    for number, rule in enumerate(policy.rules, 1):
        if rule.exits and failure.exit_status not in rule.exits:
            continue
        if rule.cause not in ("", failure.cause):
            continue
        line = failure.lines.get(rule.log, "")
        if line or not rule.log:
            return RetryDecision(
                do=rule.do, number=number, rule=rule, line=line, attempts=failure.attempts
            )
    return RetryDecision(do=RETRY if CAUSES[failure.cause] else FAIL, attempts=failure.attempts)


def _by(fit: RetryDecision) -> str:
    """Return which rule decided, to be put behind a clause."""
    if fit.rule is None:
        return ""
    return f" by rule {fit.number}" + (f", which found: {fit.line}" if fit.line else "")


# --- devices to avoid -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AvoidedDevice:
    """Names a device on which a task failed. With `is_strict` the task never starts there before
    `until_s`; else it does if too few other devices take work.
    """

    device: str
    until_s: float
    is_strict: bool = False


def avoided_in(rows: Iterable[Sequence[Any]]) -> Iterator[AvoidedDevice]:
    """Read devices from the JSON lists in which tables hold them."""
    return (AvoidedDevice(*row) for row in rows)


def avoided_now(avoided: Iterable[AvoidedDevice], *, now_s: float) -> tuple[AvoidedDevice, ...]:
    """Return the devices that the task still avoids."""
    return tuple(each for each in avoided if each.until_s > now_s)


def with_avoided(
    avoided: Iterable[AvoidedDevice], devices: Sequence[str], *, is_strict: bool, now_s: float
) -> tuple[AvoidedDevice, ...]:
    """Add the devices of a failed attempt; the oldest ones beyond AVOIDED_MOST are let in again."""
    new = [AvoidedDevice(id, now_s + AVOIDED_S, is_strict) for id in devices]
    kept = [each for each in avoided_now(avoided, now_s=now_s) if each.device not in devices]
    return tuple([*kept, *new][-AVOIDED_MOST:])
