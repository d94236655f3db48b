"""Reads the windows of reservations and maintenance that forecasts foresee."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.core.explanation.estimator import FURTHEST_S
from app.db import transactions
from app.db.models import Reservation, ReservationWindow

MOST = 100  # windows that are foreseen, by their begins


class WindowAhead(NamedTuple):
    """Says how many devices of each kind are reserved for a tenant or one of its users, from one
    instant up to another, in seconds since 1970.

    `owners` are the tenant and those above it. Without a tenant it is the maintenance of the
    devices in `ids`. `in_force` says whether islands know that it has begun.
    """

    begins_s: float
    ends_s: float
    in_force: bool
    owners: Sequence[str]
    user: str | None
    number_by_kind: Mapping[str, int]
    ids: Sequence[str]

    def is_for(self, path: Collection[str], user: str) -> bool:
        """True for a task of this user, whose tenant and those above it are the `path`."""
        return self.user == user if self.user else self.owners[0] in path


def windows_ahead(
    session: Session, island: str, path_of: Callable[[str], Iterable[str]]
) -> Sequence[WindowAhead]:
    """Return the island's windows that have not ended and that a forecast may reach, by begin.

    `path_of` gives a tenant and those above it.
    """
    now = transactions.now(session)
    columns = (
        ReservationWindow.begins_at, ReservationWindow.ends_at, ReservationWindow.in_force,
        Reservation.tenant_id, Reservation.user_id, Reservation.devices, Reservation.device_ids,
    )  # fmt: skip
    query = (
        select(*columns)
        .join(Reservation, Reservation.id == ReservationWindow.reservation_id)
        .where(
            Reservation.island == island,
            ReservationWindow.ends_at > now,
            ReservationWindow.begins_at < now + timedelta(seconds=FURTHEST_S),
        )
        .order_by(ReservationWindow.begins_at)
        .limit(MOST)
    )
    return [
        WindowAhead(
            begins_at.timestamp(),
            ends_at.timestamp(),
            in_force,
            tuple(path_of(tenant)) if tenant else (),
            user,
            devices,
            ids,
        )
        for begins_at, ends_at, in_force, tenant, user, devices, ids in session.execute(query)
    ]
