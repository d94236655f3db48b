"""Holds a request to the limits of its user, which an administrator sets (`app.db.user_limits`).

The islands hold running tasks to `limit` and `max_running`. Here a task is refused that could never
run within them, and so is a request that would exceed the queue or the sessions of its user.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from app.core.model.descriptor import Descriptor
from app.core.model.fields import Fault
from app.core.model.lifecycle import ENDED
from app.core.units import counted, duration
from app.db.models import Task, User
from app.db.tenant_tree import ALL
from app.errors import QueueFull, QuotaExceeded
from app.scheduling import gang_tickets
from app.scheduling.journal.lots import IS_NO_MEMBER

JSON = dict[str, Any]
Limits = Mapping[str, Any]

ASK = "ask an administrator to raise it"


def faults(descriptor: Descriptor, limits: Limits) -> Iterator[Fault]:
    """Yield a fault for each task that asks for more than its user may ever have."""
    of_kind = limits.get("limit", {})
    longest_s = limits.get("max_duration_s")
    for n, task in enumerate(descriptor.tasks):
        for kind in (task.devices.kind, ALL):
            if task.devices.min > (most := of_kind.get(kind, task.devices.min)):
                what = "device" if kind == ALL else f"{kind} device"
                told = f"your own limit is {counted(most, what)}; got {task.devices.min}; {ASK}"
                yield Fault(f"/tasks/{n}/devices/min", told, "user-limit")
        if longest_s is not None and task.max_duration_s > longest_s:
            told = f"your own limit is {duration(longest_s)}; got {duration(task.max_duration_s)}"
            yield Fault(f"/tasks/{n}/max_duration_s", f"{told}; {ASK}", "user-limit")


def with_usual_durations(descriptor: Descriptor, body: JSON, limits: Limits) -> Descriptor:
    """Return the request with the user's longest duration where the body names none."""
    if (longest_s := limits.get("max_duration_s")) is None:
        return descriptor
    tasks = (
        replace(task, max_duration_s=min(task.max_duration_s, longest_s))
        if said.get("max_duration_s") is None
        else task
        for task, said in zip(descriptor.tasks, body["tasks"], strict=True)
    )
    return replace(descriptor, tasks=tuple(tasks))


def check_room(
    session: Session, tenant_id: str, user_id: str, descriptor: Descriptor, limits: Limits
) -> None:
    """Raise QueueFull or QuotaExceeded if the request exceeds the user's queue or sessions.

    The user is locked until the commit, so of two requests for the last place the second counts the
    first. Without such a limit there is no lock.
    """
    queued, sessions = limits.get("max_queued"), limits.get("max_sessions")
    new_sessions = sum(task.session is not None for task in descriptor.tasks)
    bounded = queued is not None or (sessions is not None and new_sessions)
    if not bounded:
        return
    session.execute(select(User.id).where(User.id == user_id).with_for_update(key_share=True))
    mine = (Task.tenant_id == tenant_id, Task.user_id == user_id, ~gang_tickets.IS_TICKET)
    if queued is not None:
        waits = (Task.state.in_(("blocked", "waiting")), IS_NO_MEMBER)
        _check(session, (*mine, *waits), len(descriptor.tasks), queued, "queued task", QueueFull)
    if sessions is not None and new_sessions:
        open_ = (Task.state.not_in(ENDED), Task.descriptor["session"].astext.is_not(None))
        _check(session, (*mine, *open_), new_sessions, sessions, "session", QuotaExceeded)


def _check(
    session: Session,
    which: tuple[ColumnElement[bool], ...],
    wanted: int,
    most: int,
    what: str,
    error: type[QueueFull | QuotaExceeded],
) -> None:
    there = session.scalar(select(func.count()).select_from(Task).where(*which)) or 0
    if there + wanted > most:
        told = f"you have {counted(there, what)} of at most {most}; this request has {wanted}"
        raise error(f"{told}: wait until some have ended, cancel some, or {ASK}")
