"""A budget's periods have no gaps, and every charge is in the periods in which it was made."""

from __future__ import annotations

from datetime import UTC, date, datetime
from itertools import pairwise
from zoneinfo import available_timezones

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.fairness import budget
from app.core.fairness.budget import HOUR_US, Budget, Period, Spending, budget_of

ZONES = sorted(available_timezones())
DAY_US = 24 * HOUR_US
TIMES_US = st.integers(1_300_000_000_000_000, 2_000_000_000_000_000)  # 2011 to 2033
PERIODS = st.one_of(st.just("month"), st.just("week"), st.integers(1, budget.MOST_DAYS))
ACTIONS = st.dictionaries(st.integers(1, 200), st.sampled_from(budget.ACTIONS), max_size=4)
BUDGETS = st.builds(
    Budget,
    grants_us=st.dictionaries(st.sampled_from(["cuda", "cpu", "*"]), st.integers(0, 10**13)),
    period=PERIODS,
    timezone=st.sampled_from(ZONES),
    at=ACTIONS,
    carry_milli=st.integers(0, 1000),
    since=st.dates(date(2010, 1, 1), date(2030, 1, 1)),
    to=st.lists(st.text(), max_size=2).map(tuple),
)
SPENDINGS = st.builds(
    Spending,
    granted_us=st.integers(0, 10**13),
    carried_us=st.integers(0, 10**13),
    adjusted_us=st.integers(-(10**13), 10**13),
    spent_us=st.integers(0, 10**14),
)


def us(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1e6)


def shown(period: Period) -> tuple[str, str]:
    begins, ends = (datetime.fromtimestamp(at_us / 1e6, UTC) for at_us in period)
    return begins.isoformat(" ", "minutes")[:16], ends.isoformat(" ", "minutes")[:16]


@given(BUDGETS, TIMES_US)
def test_each_instant_is_in_one_period_and_the_next_begins_where_it_ends(
    it: Budget, at_us: int
) -> None:
    period = it.period_at(at_us)
    assert period.begins_us <= at_us < period.ends_us
    assert it.period_at(period.begins_us) == period
    assert it.period_at(period.ends_us - 1) == period
    assert it.period_at(period.ends_us).begins_us == period.ends_us


@pytest.mark.parametrize(
    ("period", "zone", "at", "expected"),
    [
        ("month", "UTC", "2026-02-28T23:59:59Z", ("2026-02-01 00:00", "2026-03-01 00:00")),
        ("month", "UTC", "2026-12-31T23:59:59Z", ("2026-12-01 00:00", "2027-01-01 00:00")),
        # summer time begins: the month has one hour less
        ("month", "Europe/Berlin", "2026-03-15T12:00Z", ("2026-02-28 23:00", "2026-03-31 22:00")),
        ("week", "Europe/Berlin", "2026-10-25T12:00Z", ("2026-10-18 22:00", "2026-10-25 23:00")),
        # on this day the clock of Cairo goes from 00:00 to 01:00
        (1, "Africa/Cairo", "2024-04-26T12:00Z", ("2024-04-25 22:00", "2024-04-26 21:00")),
        # Samoa had no 30 December 2011
        (1, "Pacific/Apia", "2011-12-30T09:00Z", ("2011-12-29 10:00", "2011-12-30 10:00")),
        (10, "UTC", "2026-01-15T00:00Z", ("2026-01-11 00:00", "2026-01-21 00:00")),
        (10, "UTC", "2025-12-31T00:00Z", ("2025-12-22 00:00", "2026-01-01 00:00")),
    ],
)
def test_periods_follow_the_clock_of_their_zone(
    period: str | int, zone: str, at: str, expected: tuple[str, str]
) -> None:
    it = Budget(grants_us={}, period=period, timezone=zone, since=date(2026, 1, 1))
    assert shown(it.period_at(us(at))) == expected


@given(BUDGETS, TIMES_US, st.integers(1, 100 * DAY_US), st.integers(0, 10**15))
def test_parts_of_a_charge_sum_up_and_each_is_in_its_period(
    it: Budget, now_us: int, held_us: int, charged_us: int
) -> None:
    parts = list(it.shares(held_us, charged_us, now_us))
    assert sum(part_us for _, part_us in parts) == charged_us
    assert all(part_us >= 0 for _, part_us in parts)
    assert parts[0][0].begins_us <= now_us - held_us < parts[0][0].ends_us
    assert parts[-1][0].begins_us < now_us <= parts[-1][0].ends_us
    assert all(one[0].ends_us == next_[0].begins_us for one, next_ in pairwise(parts))
    for period, part_us in parts:
        within_us = min(now_us, period.ends_us) - max(now_us - held_us, period.begins_us)
        assert abs(part_us - charged_us * within_us / held_us) <= max(2, charged_us * 1e-9)


def test_charge_over_midnight_is_split_at_the_microsecond() -> None:
    it = Budget(grants_us={}, period=1)
    parts = it.shares(10_000_000, 10_000_000, us("2026-11-02T00:00:03+00:00") + 7)
    assert [part_us for _, part_us in parts] == [6_999_993, 3_000_007]


@given(SPENDINGS, st.integers(1, 200))
def test_what_is_spent_and_what_is_left_is_the_whole(spending: Spending, percent: int) -> None:
    whole_us = spending.granted_us + spending.carried_us + spending.adjusted_us
    assert spending.spent_us + spending.left_us == whole_us
    missing_us = spending.until_us(percent)
    more = Spending(granted_us=whole_us, spent_us=spending.spent_us + missing_us)
    assert more.has_reached(percent)
    if missing_us:
        less = Spending(granted_us=whole_us, spent_us=more.spent_us - 1)
        assert not less.has_reached(percent)


@given(BUDGETS, SPENDINGS)
def test_next_period_takes_over_no_more_than_is_left(it: Budget, before: Spending) -> None:
    carried_us = budget.carried_us(it, before)
    assert 0 <= carried_us <= max(0, before.left_us)
    if it.carry_milli == 1000:
        assert carried_us == max(0, before.left_us)


@pytest.mark.parametrize(
    ("spent", "expected"),
    [
        (79, {}),
        (80, {}),
        (90, {"cuda": "demote"}),
        (100, {"cuda": "hold"}),
        (119, {"cuda": "hold"}),
        (120, {"cuda": "pause"}),
    ],
)
def test_strictest_action_that_is_reached_is_in_force(spent: int, expected: dict[str, str]) -> None:
    it = Budget(grants_us={"cuda": 100}, at={80: "notify", 90: "demote", 100: "hold", 120: "pause"})
    spendings = {"cuda": Spending(granted_us=100, spent_us=spent), "cpu": Spending(granted_us=1)}
    assert budget.actions(it, spendings) == expected


def test_grant_of_nothing_is_used_from_the_beginning() -> None:
    it = Budget(grants_us={"*": 0}, at={100: "pause"})
    assert budget.actions(it, {"*": Spending(granted_us=0)}) == {"*": "pause"}


@given(BUDGETS)
def test_budget_is_read_as_it_was_written(it: Budget) -> None:
    assert budget_of(it.as_json()) == it
