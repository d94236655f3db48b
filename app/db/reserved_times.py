"""Reads which devices reservations may have."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import cached_property

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from app.core.fairness.budget import time_us
from app.core.fairness.reservation import ReservedTime
from app.core.fairness.reserved_devices import Demand
from app.core.model.device_choice import DeviceChoice, DeviceTraits
from app.db import transactions
from app.db.models import Device, Reservation

SEEN = timedelta(days=7)  # a device that has not reported for longer cannot be reserved


def is_known(session: Session) -> ColumnElement[bool]:
    """Return a condition: the device has reported lately, so that it can be reserved."""
    return Device.seen_at > transactions.now(session) - SEEN


class ReservedTimes:
    """Says of windows which devices they take, as these are now."""

    def __init__(self, session: Session, island: str) -> None:
        self._session, self._island = session, island
        self._named: dict[str, Mapping[str, Demand]] = {}

    def __call__(self, it: Reservation, begins_at: datetime, ends_at: datetime) -> ReservedTime:
        """Return a window with its devices, in the form that is counted."""
        if it.id not in self._named:
            self._named[it.id] = self.named(it)
        times = time_us(begins_at), time_us(ends_at)
        return ReservedTime(*times, it.devices, self._named[it.id])

    def named(self, it: Reservation) -> dict[str, Demand]:
        """Return by kind which devices the reservation may have; {} if any of the kind will do."""
        if not (it.device_ids or it.labels):
            return {}
        choice = DeviceChoice(labels=tuple(it.labels))
        return {
            kind: Demand(
                it.id,
                number,
                frozenset(
                    id
                    for id, (its_kind, traits) in self._devices.items()
                    if its_kind == kind and choice.suits(traits)
                    if not it.device_ids or id in it.device_ids
                ),
            )
            for kind, number in it.devices.items()
        }

    @cached_property
    def _devices(self) -> dict[str, tuple[str, DeviceTraits]]:
        columns = Device.id, Device.kind, Device.facts["labels"]
        here = Device.island == self._island, is_known(self._session)
        rows = self._session.execute(select(*columns).where(*here))
        return {id: (kind, DeviceTraits(labels=tuple(labels or ()))) for id, kind, labels in rows}
