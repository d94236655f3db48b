"""The phase of a task or a request: the one word for its state that the API, pages and CLI show.

A task's `state` is the scheduler's own word, finer than a person needs (`core.model.lifecycle`).
The phases of a task are:

    queued     waits for a device, an input, a time or a retry
    starting   has a device, and does not run there yet
    running    runs on a device
    paused     a person paused it: it waits until it is resumed
    preempted  has run, and gave its device up to others: it resumes by itself
    done, failed, cancelled

A request's phase is that of its most advanced task that has not ended.  `app.insight.phases`
computes the same in SQL.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from app.core.model.lifecycle import ENDED, NOT_STARTED, State


class Phase(StrEnum):
    queued = "queued"
    starting = "starting"
    running = "running"
    paused = "paused"
    preempted = "preempted"
    done = "done"
    failed = "failed"
    cancelled = "cancelled"


#: The phases that follow from the state alone.
OF_STATE = {
    State.starting: Phase.starting,
    State.running: Phase.running,
    State.splicing: Phase.running,
    State.pausing: Phase.running,
    State.stopping: Phase.running,
    State.done: Phase.done,
    State.failed: Phase.failed,
    State.cancelled: Phase.cancelled,
}

#: A request has the first of these phases that any of its tasks has; they are tried in this order.
MOST_ADVANCED = (Phase.running, Phase.starting, Phase.preempted, Phase.queued, Phase.paused)


def task_phase(state: str, *, hold: str, begun: bool, retries: bool, has_image: bool) -> Phase:
    """Return the phase of a task.

    `hold`: "user" or "admin" if it is held, else ""; `begun`: it has run; `retries`: an attempt
    failed. `has_image`: a device holds its state, so it left its last device without a failure.
    """
    if state not in NOT_STARTED:
        return OF_STATE[State(state)]
    if hold:
        return Phase.paused
    if begun and (has_image or not retries):
        return Phase.preempted
    return Phase.queued


def request_phase(state: str, phases: Iterable[str]) -> Phase:
    """Return a request's phase; `phases` are those of its tasks, without tickets."""
    if state in ENDED:
        return Phase(state)
    found = set(phases)
    return next((phase for phase in MOST_ADVANCED if phase in found), Phase.queued)
