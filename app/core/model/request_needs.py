"""Decides whether a task may start that comes after other requests.

A need names a request, or one task of it whose output is taken, and what is awaited of it. Only
what is true now is looked at, so it does not matter what happened before the submission, or while
nobody looked. A need that can no longer come true is decided at once by its `otherwise`. One that
holds the task is looked at again, since the needed request may be retried; all other decisions are
final.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from app.core.model.lifecycle import ENDED, State

DONE, ENDED_, FAILED, STARTED = AWAITED = ("done", "ended", "failed", "started")
FAIL, HOLD, RUN = OTHERWISE = ("fail", "hold", "run")


class NeedOutcome(StrEnum):
    """Lists what may be decided about a need: `fail`, `hold` and `run` are its `otherwise`."""

    waits = ""
    met = "met"
    fail = "fail"
    hold = "hold"
    run = "run"
    waived = "waived"  # somebody resumed the task that it held


class RequestStanding(StrEnum):
    """Lists how a task may stand to the requests that it comes after, over all its needs."""

    free = ""
    waits = "waits"
    held = "held"
    never = "never"


@dataclass(frozen=True, slots=True)
class NeededState:
    """How far the needed request, or the needed task of it, is."""

    state: str
    has_started: bool


def is_met(awaited: str, needed: NeededState) -> bool | None:
    """Return whether what is awaited has happened; None while it may still happen.

    A request that was cancelled, or that failed, before any of it started has neither `ended` nor
    `failed` in this sense.
    """
    has_ended = needed.state in ENDED
    if awaited == STARTED:
        return True if needed.has_started else False if has_ended else None
    if not has_ended:
        return None
    if awaited == DONE:
        return needed.state == State.done
    return needed.has_started and (awaited == ENDED_ or needed.state == State.failed)


def decide(awaited: str, otherwise: str, needed: NeededState) -> NeedOutcome:
    """Decide about a need that waits, or that holds its task."""
    met = is_met(awaited, needed)
    if met is None:
        return NeedOutcome.waits
    return NeedOutcome.met if met else NeedOutcome(otherwise)


def standing(outcomes: Collection[str]) -> RequestStanding:
    """Return how a task with these outcomes stands: what ends it comes before what holds it, and
    this before what it still waits for.
    """
    if NeedOutcome.fail in outcomes:
        return RequestStanding.never
    if NeedOutcome.hold in outcomes:
        return RequestStanding.held
    return RequestStanding.waits if NeedOutcome.waits in outcomes else RequestStanding.free


def told(awaited: str) -> str:
    """Return what is awaited of a request, as a clause that follows its name."""
    return _TOLD[awaited]


_TOLD = {
    DONE: "is done",
    ENDED_: "has started and ended",
    FAILED: "has started and failed",
    STARTED: "has started",
}
