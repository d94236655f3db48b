"""Reads what people are told of the reservations that tasks name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sqlalchemy import exists, func, select
from sqlalchemy.orm import Session

from app.core.model.reserved_task import NamedReservation
from app.core.model.snapshot import BoardTask
from app.db import transactions
from app.db.models import Reservation, ReservationWindow, Task


def named_reservations(
    session: Session, tasks: Iterable[BoardTask]
) -> Mapping[str, NamedReservation]:
    """Return, by task, the reservation in whose windows alone it runs, of those that wait for
    one.
    """
    ids = [task.id for task in tasks if task.conditions.reservation]
    if not ids:
        return {}
    ahead = ReservationWindow.ends_at > transactions.now(session)
    mine = ReservationWindow.reservation_id == Task.reservation_id
    opens_at = select(func.min(ReservationWindow.begins_at)).where(mine, ahead).scalar_subquery()
    is_known = exists().where(Reservation.id == Task.reservation_id)
    query = select(Task.id, Task.descriptor["reservation"].astext, opens_at, is_known)
    rows = session.execute(query.where(Task.id.in_(ids)))
    return {
        id: NamedReservation(name, at.timestamp() if at else None, is_removed=not known)
        for id, name, at, known in rows
    }
