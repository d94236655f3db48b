"""Decides when an island cordons a device for its health, and when the device serves again.

The device worker reports findings (`core.device.health_findings`). A finding with the verdict
`cordon` takes the device out of service. The device serves again

* by itself when the finding is gone, if it was one that passes: heat, silence, no monitor;
* otherwise after an administrator lets it serve: the device is checked, and serves if it passes.

A device that could not set up a task's process takes no work for FAULT_S, so that the task goes
elsewhere.

Two rules need memory. A device that is cordoned too often no longer returns by itself. A device on
which tasks of several tenants fail one after another is cordoned too, unless no other device of its
kind would be left: then the tasks are the likelier cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from app.core.device.health_findings import (
    PASSING,
    Effect,
    Finding,
    HealthRule,
    HealthVerdict,
    cordon,
)
from app.core.device.idleness import Idleness

JSON = dict[str, Any]

DAY_S = 86_400.0
FLAPPING_MOST = 3  # after this many cordons within a day a device no longer returns by itself
FAILURES_WINDOW_S = 3_600.0
FAILURES_TASKS = 3  # tasks that failed one after another
FAILURES_TENANTS = 2  # consecutive failed tasks must belong to so many tenants
FAULT_S = 60.0  # how long a device takes no work after it could not set up a task's process
NOTES_KEPT = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthReport:
    """Holds a device's report of its health.

    `checked` is the number of its last finished check, -1 during a check. `idle`: it computes
    nothing.
    """

    checked: int
    idle: bool = False
    findings: tuple[Finding, ...] = ()

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> HealthReport | None:
        """Read the health report in a heartbeat; None if no monitor watches the device."""
        if not told:
            return None
        found = (_finding(one) for one in told.get("findings", ()))
        known = tuple(finding for finding in found if finding is not None)
        idle = bool(told.get("idle", False))
        return cls(checked=told.get("checked", -1), idle=idle, findings=known)

    @property
    def worst(self) -> Finding | None:
        """The gravest finding that cordons."""
        return next((finding for finding in self.findings if finding.cordons), None)


def _finding(told: Mapping[str, Any]) -> Finding | None:
    """Read a finding; None if it comes from a newer device worker and this island does not know its
    rule.
    """
    try:
        return Finding(
            rule=HealthRule(told["rule"]),
            verdict=HealthVerdict(told["verdict"]),
            effect=Effect(told["effect"]),
            reason=str(told["reason"]),
        )
    except (KeyError, ValueError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCordon:
    """Says why a rule cordoned a device. `returns`: the device serves again when the finding is
    gone.
    """

    rule: HealthRule
    reason: str
    effect: Effect
    at_s: float
    returns: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFailure:
    """A task that failed on the device, the last time at `at_s`."""

    at_s: float
    tenant: str
    task: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthNote:
    """A line of a device's history of health."""

    at_s: float
    told: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitness:
    """Holds what an island remembers of a device's health.

    `cordons_s` are the times at which rules cordoned it, since an administrator last let it serve.
    `failures` are tasks that failed one after another.  `check` is the number of the last check
    that was asked for.  `idle` is the task that computes nothing.
    """

    cordon: HealthCordon | None = None
    cordons_s: tuple[float, ...] = ()
    failures: tuple[TaskFailure, ...] = ()
    check: int = 0
    is_checking: bool = False
    notes: tuple[HealthNote, ...] = ()
    idle: Idleness | None = None

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Fitness:
        """Read what `as_json` made."""
        if not stored:
            return cls()
        why = stored.get("cordon")
        return cls(
            cordon=None
            if why is None
            else HealthCordon(
                **{**why, "rule": HealthRule(why["rule"]), "effect": Effect(why["effect"])}
            ),
            cordons_s=tuple(stored.get("cordons_s", ())),
            failures=tuple(TaskFailure(**one) for one in stored.get("failures", ())),
            check=stored.get("check", 0),
            is_checking=stored.get("is_checking", False),
            notes=tuple(HealthNote(**one) for one in stored.get("notes", ())),
            idle=Idleness(**stored["idle"]) if "idle" in stored else None,
        )

    def as_json(self) -> JSON:
        return {name: value for name, value in asdict(self).items() if value}

    @property
    def suspicion(self) -> str:
        """A warning about failures that are too few for a cordon; "" if there are none."""
        tenants = {failure.tenant for failure in self.failures}
        if self.cordon is not None or len(tenants) < FAILURES_TENANTS:
            return ""
        return f"{len(self.failures)} tasks of {len(tenants)} tenants failed one after another."


def heard(
    fitness: Fitness, report: HealthReport | None, *, now_s: float, is_cordoned: bool
) -> Fitness:
    """Take in a device's report. `is_cordoned`: the device takes no work now, for whatever
    reason.
    """
    why = fitness.cordon
    is_fault = why is not None and why.rule == HealthRule.FAULT
    if is_fault and why is not None and why.returns and now_s - why.at_s >= FAULT_S:
        fitness = _let_serve(fitness, now_s, "It is tried again.")
    if report is None:  # nothing watches the device: no fault can be found or checked
        return _let_serve(fitness, now_s, "It has no monitor.") if fitness.is_checking else fitness
    if report.checked < 0:
        return fitness
    worst = report.worst
    if fitness.is_checking:
        return _conclude(fitness, report, worst, now_s)
    if fitness.cordon is None:
        return fitness if worst is None else _begin(fitness, worst, now_s, by_hand=is_cordoned)
    if worst is None:
        gone = "It is well again."
        ends = fitness.cordon.returns and not is_fault  # no monitor finds what was at fault
        return _let_serve(fitness, now_s, gone) if ends else fitness
    return _worsen(fitness, fitness.cordon, worst, now_s)


def _conclude(
    fitness: Fitness, report: HealthReport, worst: Finding | None, now_s: float
) -> Fitness:
    """End a check, once the device has made it."""
    if report.checked < fitness.check:
        return fitness  # the report is older than the check
    if worst is None:
        return _let_serve(fitness, now_s, "It passed its check.")
    failed = replace(worst, reason=f"It did not pass its check. {worst.reason}")
    return replace(_begin(fitness, failed, now_s, by_hand=False), is_checking=False)


def _begin(fitness: Fitness, worst: Finding, now_s: float, *, by_hand: bool) -> Fitness:
    """Cordon a device because of a finding."""
    cordons_s = (*(at_s for at_s in fitness.cordons_s if now_s - at_s < DAY_S), now_s)
    passes = worst.rule in PASSING | {HealthRule.FAULT}
    rule, reason = worst.rule, worst.reason
    if passes and len(cordons_s) >= FLAPPING_MOST:
        rule = HealthRule.FLAPPING
        reason = f"Cordoned {FLAPPING_MOST} times within a day, now because: {reason}"
    why = HealthCordon(
        rule=rule,
        reason=reason,
        effect=worst.effect,
        at_s=now_s,
        returns=passes and rule != HealthRule.FLAPPING and not by_hand,
    )
    begun = replace(fitness, cordon=why, cordons_s=cordons_s[-FLAPPING_MOST:], failures=())
    return _noted(begun, now_s, f"Cordoned: {reason}")


def _worsen(fitness: Fitness, why: HealthCordon, worst: Finding, now_s: float) -> Fitness:
    """Replace the reason of a cordon if the new one is worse: it does not pass by itself, or costs
    steps.

    It stays one cordon, so that the device does not count as flapping.
    """
    lasts = why.returns and worst.rule not in PASSING
    costs = worst.effect == Effect.RESTART != why.effect
    if not lasts and not costs:
        return fitness
    returns = why.returns and not lasts
    graver = replace(
        why, rule=worst.rule, reason=worst.reason, effect=worst.effect, returns=returns
    )
    return _noted(replace(fitness, cordon=graver), now_s, f"Still cordoned: {worst.reason}")


def _let_serve(fitness: Fitness, now_s: float, told: str) -> Fitness:
    ended = replace(fitness, cordon=None, is_checking=False)
    return _noted(ended, now_s, f"Takes work again: {told}")


def _noted(fitness: Fitness, now_s: float, told: str) -> Fitness:
    notes = (*fitness.notes, HealthNote(at_s=now_s, told=told))
    return replace(fitness, notes=notes[-NOTES_KEPT:])


# --- failures of tasks ----------------------------------------------------------------------------


def task_failed(
    fitness: Fitness, failure: TaskFailure, *, others_serve: bool, is_cordoned: bool
) -> Fitness:
    """Count a task that failed on the device. `others_serve`: other devices of the same kind
    serve.
    """
    if fitness.cordon is not None:
        return fitness
    recent = (
        one
        for one in fitness.failures
        if failure.at_s - one.at_s < FAILURES_WINDOW_S and one.task != failure.task
    )
    failures = (*recent, failure)[-2 * FAILURES_TASKS :]
    tenants = {one.tenant for one in failures}
    fitness = replace(fitness, failures=failures)
    too_many = len(failures) >= FAILURES_TASKS and len(tenants) >= FAILURES_TENANTS
    if not too_many or not others_serve:
        return fitness
    told = f"{len(failures)} tasks of {len(tenants)} tenants failed on it one after another."
    return _begin(fitness, cordon(HealthRule.FAILURES, told), failure.at_s, by_hand=is_cordoned)


def device_failed(fitness: Fitness, *, now_s: float, is_cordoned: bool) -> Fitness:
    """Cordon a device that could not set up a task's process; after FLAPPING_MOST such cordons
    within a day it no longer returns by itself.
    """
    if fitness.cordon is not None:
        return fitness
    told = "It could not set up a task's process; its worker's log says why."
    found = cordon(HealthRule.FAULT, told, Effect.STAY)
    return _begin(fitness, found, now_s, by_hand=is_cordoned)


def task_went_well(fitness: Fitness) -> Fitness:
    """Return the fitness after a task ended well or was paused on the device, so the device can
    work.
    """
    return replace(fitness, failures=()) if fitness.failures else fitness


def excuses(fitness: Fitness) -> bool:
    """True if a task that fails on the device must not be blamed for it."""
    return fitness.cordon is not None


# --- what administrators ask ----------------------------------------------------------------------


def let_serve_asked(fitness: Fitness, *, by: str, now_s: float) -> Fitness:
    """Let a device serve again because an administrator asked.

    After a cordon by a rule the device is checked first.
    """
    if fitness.cordon is None:
        return replace(fitness, failures=(), cordons_s=())
    asked = replace(fitness, check=fitness.check + 1, is_checking=True, failures=(), cordons_s=())
    return _noted(asked, now_s, f"{by} lets it serve; it is checked first.")


def cordon_asked(fitness: Fitness) -> Fitness:
    """Cordon the device because an administrator asked: it then does not return by itself."""
    if fitness.cordon is None:
        return fitness
    return replace(fitness, cordon=replace(fitness.cordon, returns=False), is_checking=False)
