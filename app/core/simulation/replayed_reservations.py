"""Replays reservations: says what is guaranteed to whom, and what is drained, on the virtual
clock.

Control looks every two seconds; here a window begins and ends at the very µs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from app.core.fairness.reservation import ReservedTime
from app.core.fairness.reserved_devices import kept
from app.core.model.reserved_task import ReservationStanding


class ReservedFor(NamedTuple):
    """Says which tenants or users are promised the devices of a window.

    `owners` are the user that it is for, if it is for one, the tenant, and all tenants above it.
    `reservation` is named by tasks that run in its windows alone.
    """

    owners: tuple[str, ...]
    time: ReservedTime
    reservation: str = ""


class Maintained(NamedTuple):
    """Says which devices take no work from one instant up to another, in µs since 1970."""

    devices: tuple[str, ...]
    begins_us: int
    ends_us: int


@dataclass(slots=True)
class ReplayedReservations:
    """Knows all windows; the virtual clock is at 0 at `begins_us`, in µs since 1970."""

    windows: Sequence[ReservedFor]
    maintained: Sequence[Maintained] = ()
    begins_us: int = 0
    _now: dict[str, Mapping[str, int]] = field(default_factory=dict)
    _kept: dict[str, str] = field(default_factory=dict)  # device -> demand of a reservation

    def look(self, now_us: int) -> Iterator[tuple[str, Mapping[str, int]]]:
        """Yield (tenant or user, devices by kind) of each for which that has changed."""
        found, at_us = defaultdict[str, Counter[str]](Counter), self.begins_us + now_us
        for owners, (begins_us, ends_us, devices, _), _ in self.windows:
            if begins_us <= at_us < ends_us:
                for owner in owners:
                    found[owner].update(devices)
        for owner in sorted({*found, *self._now}):
            now = dict(found.get(owner, {}))
            if now != self._now.get(owner, {}):
                self._now[owner] = now
                yield owner, now

    def kept_for(self, now_us: int) -> dict[str, tuple[str, str]]:
        """Return, by device that is reserved by name now, for which tenant or user, and by which
        reservation.
        """
        at_us = self.begins_us + now_us
        now = [
            ((owners[0] if owners else "", id), kind, demand)
            for owners, (begins_us, ends_us, _, named), id in self.windows
            if begins_us <= at_us < ends_us
            for kind, demand in named.items()
        ]
        demands = ((kind, demand) for _, kind, demand in now)
        self._kept = kept(demands, self._kept, but=self.drained(now_us))
        whose = {demand.id: owner_and_id for owner_and_id, _, demand in now}
        return {device: whose[id] for device, id in self._kept.items()}

    def standing(self, reservation: str, now_us: int) -> ReservationStanding:
        """Return how tasks stand that name the reservation.

        After its last window they go on: they did their work in its windows, and are only later.
        """
        at_us = self.begins_us + now_us
        ahead = self._ahead(reservation, now_us)
        is_later = min((window.begins_us for window in ahead), default=at_us) > at_us
        return ReservationStanding.planned if is_later else ReservationStanding.free

    def is_confining(self, reservation: str, now_us: int) -> bool:
        """True if its tasks may have its devices alone.

        After its last window they go on anywhere, and so they do if none of its devices is there.
        """
        named = (window.named.values() for window in self._ahead(reservation, now_us))
        return any(demand.among for demands in named for demand in demands)

    def _ahead(self, reservation: str, now_us: int) -> list[ReservedTime]:
        """Return its windows that have not ended."""
        at_us = self.begins_us + now_us
        mine = (each.time for each in self.windows if each.reservation == reservation)
        return [time for time in mine if time.ends_us > at_us]

    def drained(self, now_us: int) -> set[str]:
        """Return the devices that are maintained now."""
        at_us = self.begins_us + now_us
        return {
            id
            for devices, begins_us, ends_us in self.maintained
            if begins_us <= at_us < ends_us
            for id in devices
        }

    def next_us(self, now_us: int) -> int | None:
        """Return when a window begins or ends next; None if none does."""
        at_us = self.begins_us + now_us
        times = [one.time[:2] for one in self.windows] + [one[1:] for one in self.maintained]
        due = [us for time in times for us in time if us > at_us]
        return min(due) - self.begins_us if due else None
