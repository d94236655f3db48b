"""Finds the reservations that tasks name, and keeps what these tasks show of them true.

A task that names a reservation runs in its windows alone. `_WRITE` of `app.intake.intake` writes
the reservation of a new task; control calls `mark` every few seconds, so that it does not matter
what happened meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from sqlalchemy import case, exists, func, or_, select, update
from sqlalchemy.orm import Session

from app.core.model.descriptor import Descriptor, TaskDescriptor
from app.core.model.fields import Fault
from app.core.model.lifecycle import ENDED
from app.core.model.reserved_task import ReservationStanding
from app.core.units import counted
from app.db import transactions
from app.db.models import Reservation, ReservationWindow, Task

AT_ONCE = 1000  # most tasks of a reservation that one look marks


def faults(
    session: Session, descriptor: Descriptor, *, path: Collection[str], user: str
) -> Iterator[Fault]:
    """Yield a fault for each reservation that a task cannot use: there is none of the name for the
    tenants in `path` or this user, it is over, or it has too few such devices.

    Those that are found cannot be removed before the tasks are written.
    """
    names = {task.reservation for task in descriptor.tasks if task.reservation}
    if not names:
        return
    ahead = ReservationWindow.ends_at > transactions.now(session)
    has_more = exists().where(ReservationWindow.reservation_id == Reservation.id, ahead)
    query = select(Reservation, has_more).where(Reservation.name.in_(names))
    theirs = Reservation.tenant_id.in_(path), func.coalesce(Reservation.user_id, user) == user
    rows = query.where(*theirs).with_for_update(read=True, key_share=True, of=Reservation)
    found = {it.name: (it, more) for it, more in session.execute(rows)}
    for n, task in enumerate(descriptor.tasks):
        if task.reservation is None:
            continue
        it, more = found.get(task.reservation, (None, False))
        if told := _fault(task, it, has_more=more):
            yield Fault(f"/tasks/{n}/reservation", told, "reservation")


def _fault(task: TaskDescriptor, it: Reservation | None, *, has_more: bool) -> str:
    if it is None:
        told = f"nothing is reserved for you under the name {task.reservation}"
        return f"{told}; `roundhouse reservation list` shows what is"
    if not has_more:
        return f"{it.name} is over; an administrator can give it another window"
    number = it.devices.get(task.devices.kind, 0)
    if number < task.devices.min:
        has = counted(number, f"{task.devices.kind} device")
        return f"{it.name} has {has}; the task needs {task.devices.min}"
    return ""


def mark(session: Session) -> bool:
    """Let unfinished tasks show how they stand to their reservations now; True if any changed."""
    now, window = transactions.now(session), ReservationWindow
    mine = window.reservation_id == Reservation.id
    now_is = case(
        (exists().where(mine, window.in_force), ReservationStanding.free),
        (exists().where(mine, window.ends_at > now), ReservationStanding.planned),
        else_=ReservationStanding.ended,
    )
    # the first and the last of these are at the ends of the index
    shown = select(Task.reservation_state).where(
        Task.reservation_id == Reservation.id, Task.state.not_in(ENDED)
    )
    first, last = (
        shown.order_by(order).limit(1).scalar_subquery()
        for order in (Task.reservation_state, Task.reservation_state.desc())
    )
    is_named = first.is_not(None), Reservation.tenant_id.is_not(None)
    query = select(Reservation.id, now_is).where(*is_named, or_(first != now_is, last != now_is))
    changed = False
    for id, state in session.execute(query.order_by(Reservation.id)).all():
        changed = True
        _mark(session, id, ReservationStanding(state))
    return changed


def _mark(session: Session, reservation: str, standing: ReservationStanding) -> None:
    others = [each for each in ReservationStanding if each != standing]
    mine = Task.reservation_id == reservation, Task.state.not_in(ENDED)
    query = select(Task.id).where(*mine, Task.reservation_state.in_(others)).order_by(Task.id)
    ids = session.scalars(query.limit(AT_ONCE).with_for_update(key_share=True)).all()
    shown = update(Task).where(Task.id.in_(ids)).values(reservation_state=standing)
    session.execute(shown, execution_options={"synchronize_session": False})


def confine(session: Session, it: Reservation) -> None:
    """Let unfinished tasks of a reservation of certain devices start on these alone, and those of
    another one on any.
    """
    mark = f"@{it.id}" if it.device_ids or it.labels else None
    mine = Task.reservation_id == it.id, Task.state.not_in(ENDED)
    query = select(Task.id).where(*mine).order_by(Task.id).with_for_update(key_share=True)
    ids = session.scalars(query).all()
    # `device_choice.text_of` writes the reservation last
    others = func.regexp_replace(Task.device_choice, "(^|,)@[^,]*$", "")
    choice = func.concat_ws(",", func.nullif(others, ""), mark)
    written = update(Task).where(Task.id.in_(ids)).values(device_choice=choice)
    session.execute(written, execution_options={"synchronize_session": False})


def bereave(session: Session, reservation: str) -> None:
    """Let the unfinished tasks of a removed reservation show that it will not come back."""
    mine = Task.reservation_id == reservation, Task.state.not_in(ENDED)
    query = select(Task.id).where(*mine).order_by(Task.id).with_for_update(key_share=True)
    ids = session.scalars(query).all()
    shown = update(Task).where(Task.id.in_(ids))
    ended = shown.values(reservation_state=ReservationStanding.ended)
    session.execute(ended, execution_options={"synchronize_session": False})
