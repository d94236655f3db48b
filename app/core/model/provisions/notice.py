"""Says what notice a command gets before its processes are stopped for good.

A command with a `notice` may save its work and end by itself, with exit status AGAIN: it then goes
back to the queue and begins again in its working folder. A task that waits for the device also
waits for the notice, so an island limits its length (`notice_us`). The noticed task is charged
until it releases the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from app.core.model.decision_rule import DecisionRule
from app.core.model.fields import Fields

JSON = dict[str, Any]

AGAIN = 85  # the exit status of a command that asks to begin again
#: the need of a task with a notice, and the offer of a device that can give one
NEED = "notice"
NO_SIGNAL = "none"  # only the file of the notice is written
SIGNALS = ("SIGUSR1", "SIGUSR2", "SIGTERM", "SIGINT", "SIGHUP", "SIGCONT", NO_SIGNAL)
MOST_S = 300.0
#: in microseconds; if a task asks to begin again after less time on its device, that uses up an
#: attempt
AGAIN_AFTER_US = 60_000_000


class NoticeReason(StrEnum):
    """Names why a command is to be stopped."""

    DRAIN = "drain"
    MOVE = "move"
    RECLAIM = "reclaim"  # the device goes back to the tenant to which it is guaranteed
    SHUTDOWN = "shutdown"  # the worker of its device stops
    MAX_DURATION = "max_duration"


#: The rule of a pause -> the reason of its notice. A pause by any other rule only freezes a command
#: where it is, so the command needs no notice.
OF_RULE = {
    DecisionRule.DRAIN: NoticeReason.DRAIN,
    DecisionRule.MOVE: NoticeReason.MOVE,
    DecisionRule.RECLAIM: NoticeReason.RECLAIM,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """The signal that the command gets, and how many seconds before the stop."""

    signal: str = "SIGUSR1"
    seconds: float = 60.0

    def as_json(self) -> JSON:
        return {"signal": self.signal, "seconds": self.seconds}


def read_notice(fields: Fields, *, run_kind: str, max_duration_s: float) -> Notice | None:
    """Read the field `notice`; None if the task asks for none."""
    if not fields.given:
        return None
    notice = Notice(
        signal=fields.one_of("signal", SIGNALS, "SIGUSR1"),
        seconds=fields.number("seconds", 60.0, above=0, most=MOST_S),
    )
    fields.close()
    if run_kind != "command":
        told = f"only a command gets a notice: a {run_kind} is saved without one; leave it out"
        fields.fault("", told)
    elif notice.seconds >= max_duration_s:
        told = f"must be less than max_duration_s, which is {max_duration_s:g}"
        fields.fault("seconds", f"{told}; got {notice.seconds:g}", "range")
    return notice


def notice_us(notice: Notice | None, rule: DecisionRule, *, most_s: float, slice_s: float) -> int:
    """Return how long a task that is paused by this rule runs on after the order, in microseconds.

    If the device is owed to another tenant, that is at most one slice.
    """
    if notice is None or rule not in OF_RULE:
        return 0
    bounds = (notice.seconds, most_s, *([slice_s] if rule == DecisionRule.RECLAIM else ()))
    least_s: float = min(bounds)
    return round(max(0.0, least_s) * 1e6)


def is_free(noticed: str, held_us: int) -> bool:
    """True if beginning again uses up no attempt of the task.

    `noticed` is the reason of the notice that it got, or ""; `held_us` is how long it held its
    device. A notice because of the time limit does not count: a command could otherwise evade its
    limit by asking again and again.
    """
    if noticed == NoticeReason.MAX_DURATION:
        return False
    return bool(noticed) or held_us >= AGAIN_AFTER_US
