"""Says when an interactive command gives its device to other tasks, and when it ends for good.

A person uses a command with a `session`. While the command computes nothing and the person does not
type, it only keeps others from its device. So it gives the device back, and gets one again at the
next keystroke, with all its processes as they were. It computes nothing while its processes
together use less than `LEAST_SHARE` of one processor.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from app.core.model.fields import Fields

JSON = dict[str, Any]

#: the need of a task with a session, and the offer of a device that can tell if it is idle
NEED = "session"
HOLD = "idle"  # the hold of a session that gave its device back; a keystroke releases it
USUAL_IDLE_S = 300.0
LEAST_IDLE_S, MOST_IDLE_S = 5.0, 86_400.0
# in seconds: the lowest limit that a tenant can set for idle tasks and for silent sessions
LEAST_PAUSE_S = 60
LEAST_SHARE = 0.05  # number of processors: a session that uses less processor time counts as idle
WARN_AT = 0.8  # a warning is sent when this part of the time to a session's end has passed


class SessionEnd(StrEnum):
    """Names what happens to a session into which nobody typed for long."""

    WARN = "warned"
    END = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class InteractiveSession:
    """After `idle_s` without computing and without input, the device is given back."""

    idle_s: float = USUAL_IDLE_S

    def as_json(self) -> JSON:
        return {"idle_s": self.idle_s}


def read_session(fields: Fields, *, run_kind: str, world_size: int) -> InteractiveSession | None:
    """Read the field `session`; None if the task is none."""
    if not fields.given:
        return None
    idle_s = fields.number("idle_s", USUAL_IDLE_S, above=0, most=MOST_IDLE_S)
    fields.close()
    if run_kind != "command":
        fields.fault("", f"only a command can be used by a person, not a {run_kind}; leave it out")
    elif world_size > 1:
        fields.fault("", f"a session has one rank; this task has {world_size}")
    elif idle_s < LEAST_IDLE_S:
        fields.fault("idle_s", f"must be at least {LEAST_IDLE_S:g}; got {idle_s:g}", "range")
    return InteractiveSession(idle_s=idle_s)


def idle_limit_s(idle_s: float, most_s: float | None) -> float:
    """Return the time after which a session is idle; `most_s` is the lowest limit of its
    tenants.
    """
    return idle_s if most_s is None else min(idle_s, most_s)


def gives_way(idle_s: float, *, computed_nothing_s: float, silent_s: float) -> bool:
    """True if the session's device is given back now."""
    return computed_nothing_s >= idle_s and silent_s >= idle_s


def judge_silence(silent_s: float, end_s: float | None, *, is_warned: bool) -> SessionEnd | None:
    """Judge a session in which the person has not typed for `silent_s`; `end_s` is its tenant's
    limit.
    """
    if end_s is None:
        return None
    if silent_s >= end_s:
        return SessionEnd.END
    return SessionEnd.WARN if silent_s >= WARN_AT * end_s and not is_warned else None
