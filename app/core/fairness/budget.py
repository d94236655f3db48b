"""Bounds what a tenant or user may be charged in a period: device-hours by kind of device.

A budget never rejects work. When a part of it is used, one of these follows (`ACTIONS`):

* notify: an event tells it;
* demote: the work goes after everybody else's, and only uses devices that nobody else wants;
* hold: nothing new starts, and running tasks go on until they give way to others;
* pause: running tasks are paused, too, and continue in the next period.

A period is a month, a week from Monday on, or a number of days, in a time zone. It begins at
midnight of the zone's own clock, so one with a change of the clock is an hour longer or shorter.
Charges are integer micro-device-seconds, as in the ledger. Kueue's issue 28 asks for such budgets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from functools import cache
from typing import Any, Literal, NamedTuple, get_args
from zoneinfo import ZoneInfo, available_timezones

ALL = "*"  # key of a grant on devices of all kinds together
Action = Literal["notify", "demote", "hold", "pause"]
ACTIONS: tuple[Action, ...] = get_args(Action)  # the mildest first
STOPS = ("hold", "pause")  # actions after which nothing new starts

HOUR_US = 3_600_000_000
MOST_HOURS = 1e9  # device-hours of a grant; more devices than exist, for a century
MOST_DAYS = 366
MOST_PERCENT = 1000
#: Faded usage that puts a branch behind all others in comparisons, whatever they have used.
DEMOTED = 1 << 320


class Period(NamedTuple):
    """Bounds the time in which a grant may be used; `ends_us` is the beginning of the next one.

    Both are µs since 1970.
    """

    begins_us: int
    ends_us: int

    @property
    def begins_at(self) -> datetime:
        return time_at(self.begins_us)

    @property
    def ends_at(self) -> datetime:
        return time_at(self.ends_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Holds what may be charged in each period, and what follows.

    `grants_us` is by kind of device; under "*" of all kinds together. `period` is "month", "week",
    or a number of days that are counted from the day `since`. `at` gives an action for each
    percentage of the grant. `carry_milli` thousandths of what is left go to the next period. `to`
    names the channels that are told of each percentage.
    """

    grants_us: Mapping[str, int]
    period: str | int = "month"
    timezone: str = "UTC"
    at: Mapping[int, Action] = field(default_factory=dict)
    carry_milli: int = 0
    since: date = date(1970, 1, 1)
    to: tuple[str, ...] = ()

    def period_at(self, at_us: int) -> Period:
        """Return the period in which a time lies."""
        zone = ZoneInfo(self.timezone)
        day = datetime.fromtimestamp(at_us // 1_000_000, zone).date()
        first = self._first_day(day)
        return Period(_midnight_us(first, zone), _midnight_us(self._next(first), zone))

    def _first_day(self, day: date) -> date:
        if self.period == "month":
            return day.replace(day=1)
        if self.period == "week":
            return day - timedelta(days=day.weekday())
        return day - timedelta(days=(day - self.since).days % int(self.period))

    def _next(self, first: date) -> date:
        if self.period == "month":
            return (first + timedelta(days=31)).replace(day=1)
        return first + timedelta(days=7 if self.period == "week" else int(self.period))

    def shares(self, held_us: int, charged_us: int, now_us: int) -> Iterator[tuple[Period, int]]:
        """Split a charge for the last `held_us` among the periods in which they lie, the oldest
        first.

        The parts sum up to the charge. Each is rounded down to a µs, up to the end of its period.
        """
        begins_us, booked_us = now_us - held_us, 0
        period = self.period_at(begins_us)
        while period.ends_us < now_us:
            upto_us = charged_us * (period.ends_us - begins_us) // held_us
            yield period, upto_us - booked_us
            booked_us, period = upto_us, self.period_at(period.ends_us)
        yield period, charged_us - booked_us

    def as_json(self) -> dict[str, Any]:
        """Return the form in which rows hold a budget; `budget_of` reads it."""
        return {
            "grants_us": dict(self.grants_us),
            "period": self.period,
            "timezone": self.timezone,
            "at": {str(percent): action for percent, action in sorted(self.at.items())},
            "carry_milli": self.carry_milli,
            "since": self.since.isoformat(),
            "to": list(self.to),
        }


def budget_of(row: Mapping[str, Any]) -> Budget:
    """Return the budget from its form in a row."""
    at = {int(percent): action for percent, action in row["at"].items()}
    since = date.fromisoformat(row["since"])
    return Budget(**{**row, "at": at, "since": since, "to": tuple(row["to"])})


def time_at(at_us: int) -> datetime:
    """Return a time in µs since 1970 as a datetime, to the µs."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=at_us)


def time_us(at: datetime) -> int:
    """Return a time as µs since 1970."""
    return (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def _midnight_us(day: date, zone: ZoneInfo) -> int:
    """Return when a day begins; where midnight comes twice, the first, and where never, the
    instant at which the clock jumps.
    """
    local = datetime(day.year, day.month, day.day, tzinfo=zone)
    return round(local.astimezone(UTC).timestamp()) * 1_000_000


@cache
def timezones() -> frozenset[str]:
    """Return the names of the zones of the IANA database, such as Europe/Berlin."""
    return frozenset(available_timezones() | {"UTC"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """Counts one kind in one period of a budget, in micro-device-seconds."""

    granted_us: int
    carried_us: int = 0  # what the period before left
    adjusted_us: int = 0  # what administrators added; below 0, what they took away
    spent_us: int = 0

    @property
    def total_us(self) -> int:
        return self.granted_us + self.carried_us + self.adjusted_us

    @property
    def left_us(self) -> int:
        """Return what may still be charged; below 0 if more was charged than there was."""
        return self.total_us - self.spent_us

    def has_reached(self, percent: int) -> bool:
        """True if so much of the whole is spent."""
        return self.spent_us * 100 >= self.total_us * percent

    def until_us(self, percent: int) -> int:
        """Return what must be charged before the percentage is reached; 0 if it is."""
        return max(0, -(-self.total_us * percent // 100) - self.spent_us)


def carried_us(budget: Budget, before: Spending) -> int:
    """Return what a period takes over from the one before."""
    return max(0, before.left_us) * budget.carry_milli // 1000


def reached(budget: Budget, spending: Spending) -> list[int]:
    """Return the percentages with an action that are reached, the lowest first."""
    return [percent for percent in sorted(budget.at) if spending.has_reached(percent)]


def actions(budget: Budget, spendings: Mapping[str, Spending]) -> dict[str, Action]:
    """Return what is in force by kind: the strictest action whose percentage is reached."""
    found: dict[str, Action] = {}
    for kind, spending in spendings.items():
        due = [budget.at[percent] for percent in reached(budget, spending)]
        if due and (strictest := max(due, key=ACTIONS.index)) != "notify":
            found[kind] = strictest
    return found


def bounds(limit: Mapping[str, int], in_force: Mapping[str, str]) -> dict[str, int]:
    """Return the limits of a branch (rule F4) with those that its budget sets."""
    return {**limit, **{kind: 0 for kind, action in in_force.items() if action in STOPS}}


def promises(guarantee: Mapping[str, int], in_force: Mapping[str, str]) -> Mapping[str, int]:
    """Return the guarantees of a branch (rule F4); one that is demoted has none for that kind."""
    demoted = {kind for kind, action in in_force.items() if action == "demote"}
    if ALL in demoted:
        return {}
    return {kind: most for kind, most in guarantee.items() if kind not in demoted}
