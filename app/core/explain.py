"""Rule F10: every task that waits has all its reasons, each with what would end it.

`core.decide` finds out what stands in the way; the sentences are written here.  They name numbers,
but nothing that counts down: a reason that reads the same is not written again.  Other tenants
appear only as "others": no tenant learns who they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from app.core.island import Reason, Task

#: Every code, and whose move it is: "wait", "change_request" or "ask_admin".
CODES = {
    "DEPENDENCY": "wait",
    "NOT_BEFORE": "wait",
    "HELD_BY_USER": "change_request",
    "HELD_BY_ADMIN": "ask_admin",
    "RETRY_BACKOFF": "wait",
    "NO_DEVICE_UP": "ask_admin",
    "DEVICE_DRAINED": "ask_admin",
    "IMAGE_BEING_SAVED": "wait",
    "WAITING_FOR_DEVICE": "wait",
    "TENANT_OVER_FAIR_SHARE": "wait",
    "USER_OVER_FAIR_SHARE": "wait",
    "HIGHER_PRIORITY_AHEAD": "wait",
    "EARLIER_TASK_AHEAD": "wait",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How well served two parties are, in device-seconds per weight: mine counts the next turn."""

    mine_s: float
    theirs_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacles:
    """What keeps an eligible task off the devices, as `core.decide` found it.

    `devices` are those of its kind with enough memory that are known, `up` and not `cordoned`
    counted of those; `busy` is how many are held or promised, `turn_s` how long a turn lasts there
    at least.  `tenant` and `user` are set if a holder there does not give way; `own` counts devices
    held by the same user's tasks of the same or a higher priority.
    """

    devices: int
    up: int
    open: int
    busy: int
    turn_s: float
    pinned_to: str | None = None
    tenant: Standing | None = None
    user: Standing | None = None
    own: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """How many waiting tasks of the same kind go before it, and why."""

    tenants: int = 0  # of tenants less served
    users: int = 0  # of users of the same tenant less served
    higher: int = 0  # of the same user, with a higher priority
    earlier: int = 0  # of the same user, as urgent but older


# --- start conditions ---------------------------------------------------------------------------


def unmet(task: Task, *, now_s: float) -> tuple[Reason, ...]:
    """Why the task may not start yet; empty if all its start conditions hold."""
    return tuple(_unmet(task, now_s))


def _unmet(task: Task, now_s: float) -> Iterator[Reason]:
    conditions = task.conditions
    if conditions.hold == "user":
        yield _reason("HELD_BY_USER", "It is held; release it to let it run.", "release")
    elif conditions.hold:
        yield _reason("HELD_BY_ADMIN", f"It is held by {conditions.hold}.", "release")
    if conditions.waits_for:
        names = ", ".join(conditions.waits_for[:5])
        more = len(conditions.waits_for) - 5
        told = f"It needs {names}{f' and {more} more' if more > 0 else ''} to be done."
        yield _reason("DEPENDENCY", told, f"{conditions.waits_for[0]} is done")
    if conditions.not_before_s is not None and conditions.not_before_s > now_s:
        at = clock(conditions.not_before_s)
        yield _reason("NOT_BEFORE", f"It is not to start before {at}.", f"it is {at}")


def backoff(task: Task, *, now_s: float) -> tuple[Reason, ...]:
    """Why a task that failed is not tried again yet."""
    if task.retry_at_s <= now_s:
        return ()
    at = clock(task.retry_at_s)
    told = f"Attempt {task.attempts} failed; the next of {task.retry_max + 1} is made at {at}."
    return (_reason("RETRY_BACKOFF", told, f"it is {at}"),)


# --- devices ------------------------------------------------------------------------------------


def waiting(task: Task, obstacles: Obstacles, ahead: Ahead) -> tuple[Reason, ...]:
    """Why a task that could start does not: devices first, then who goes before it."""
    return (*_devices(task, obstacles), *_fairness(obstacles, ahead), *_own(obstacles, ahead))


def _devices(task: Task, seen: Obstacles) -> Iterator[Reason]:
    what = _what(task)
    if seen.up == 0:
        told = f"No {what} is up; {seen.devices} are known."
        yield _reason("NO_DEVICE_UP", told, f"a {what} comes up")
    elif seen.open == 0:
        told = f"Every {what} that is up is being drained: {seen.up} of {seen.up}."
        yield _reason("DEVICE_DRAINED", told, f"a {what} takes work again")
    if seen.pinned_to is not None:
        told = (
            f"Its image lies in the memory of {seen.pinned_to} and is not durable yet: "
            "it goes on there, or anywhere once it is saved."
        )
        yield _reason("IMAGE_BEING_SAVED", told, f"its image is saved, or {seen.pinned_to} is free")
    if seen.open and seen.busy:
        taken = f"{seen.busy} of {seen.open} {_plural(what, seen.open)} taken"
        told = f"{taken}; a turn lasts {rounded(seen.turn_s)} s or longer."
        yield _reason("WAITING_FOR_DEVICE", told, f"a {what} becomes free")


def _fairness(seen: Obstacles, ahead: Ahead) -> Iterator[Reason]:
    for code, who, standing, others in (
        ("TENANT_OVER_FAIR_SHARE", "Your tenant", seen.tenant, ahead.tenants),
        ("USER_OVER_FAIR_SHARE", "You", seen.user, ahead.users),
    ):
        told = []
        if standing is not None:
            has = "has" if who == "Your tenant" else "have"
            told.append(f"{who} {has} used {_compared(standing)}.")
        if others:
            whose = "tenants" if who == "Your tenant" else "users of your tenant"
            told.append(f"{others} {_plural('task', others)} of less served {whose} go first.")
        if told:
            yield _reason(code, " ".join(told), "others use more, or your usage fades")


def _compared(standing: Standing) -> str:
    """Both sides, or how far apart they are at most where both would read the same."""
    mine, theirs = rounded(standing.mine_s), rounded(standing.theirs_s)
    if mine != theirs:
        return (
            f"{mine} device-seconds per weight with the next turn; "
            f"who holds a device has used no more than {theirs}"
        )
    more = f"{bound(standing.mine_s - standing.theirs_s):g}"
    return (
        f"up to {more} device-seconds per weight more, with the next turn, than who holds a device"
    )


def _own(seen: Obstacles, ahead: Ahead) -> Iterator[Reason]:
    if ahead.higher:
        told = f"{ahead.higher} of your own tasks with a higher priority go first."
        yield _reason("HIGHER_PRIORITY_AHEAD", told, "they have started, or priorities change")
    if ahead.earlier or seen.own:
        said = []
        if seen.own:
            said.append(f"{seen.own} of your own tasks, as urgent or more so, hold devices.")
        if ahead.earlier:
            said.append(f"{ahead.earlier} of your own tasks were submitted earlier.")
        yield _reason("EARLIER_TASK_AHEAD", " ".join(said), "they end, or priorities change")


# --- words --------------------------------------------------------------------------------------


def _reason(code: str, message: str, unblocked_by: str) -> Reason:
    return Reason(code=code, message=message, next_action=CODES[code], unblocked_by=unblocked_by)


def _what(task: Task) -> str:
    if task.memory_bytes == 0:
        return f"{task.kind} device"
    return f"{task.kind} device with {task.memory_bytes / 1e9:g} GB"


def _plural(what: str, n: int) -> str:
    head, *rest = what.split(" with ")
    return " with ".join([head if n == 1 else f"{head}s", *rest])


def rounded(seconds: float) -> str:
    """Two digits are enough for a comparison, and do not change with every second."""
    return f"{float(f'{seconds:.2g}'):g}"


def bound(seconds: float) -> float:
    """The next of 1, 2, 5, 10, 20, 50, ... : a difference that shrinks reads the same for long."""
    scale = 1.0
    while seconds > 5 * scale:
        scale *= 10
    return next(step * scale for step in (1, 2, 5) if seconds <= step * scale)


def clock(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
