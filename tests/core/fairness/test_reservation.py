"""What is reserved when: by random sets of windows, beside a count of each instant."""

from __future__ import annotations

import random

import pytest

from app.core.fairness.reservation import (
    LEAD_LEAST_S,
    LEAD_MOST_S,
    Reserved,
    ReservedTime,
    lead_s,
    owed,
)
from tests.thoroughness import over_seeds

INSTANTS = range(60)


def taken_at(times, kind, at):
    return sum(each.devices.get(kind, 0) for each in times if each.begins_us <= at < each.ends_us)


def a_request(chance):
    """Return the windows of one reservation; they do not overlap."""
    first, kind = chance.randrange(30), chance.choice(["cpu", "cuda"])
    return [
        ReservedTime(first + 7 * n, first + 7 * n + chance.randrange(1, 8), {kind: number})
        for number in [chance.randrange(1, 5)]
        for n in range(chance.randrange(1, 4))
    ]


def booked(chance, has):
    """Return what was accepted of random reservations, and what was refused beside what it met."""
    accepted, refused = [], []
    for _ in range(chance.randrange(12)):
        wanted = a_request(chance)
        if Reserved.of(accepted).shortage(wanted, has) is None:
            accepted += wanted
        else:
            refused.append((list(accepted), wanted))
    return accepted, refused


@pytest.mark.parametrize(
    "sets", [2000, pytest.param(100_000, marks=pytest.mark.long)], ids=["some", "100000"]
)
def test_never_more_is_reserved_than_there_is_and_nothing_that_fits_is_refused(sets):
    for seed in range(sets):
        chance = random.Random(seed)
        has = {"cpu": chance.randrange(1, 6), "cuda": chance.randrange(9)}
        accepted, refused = booked(chance, has)
        for kind, number in has.items():
            assert all(taken_at(accepted, kind, at) <= number for at in INSTANTS)
        for before, wanted in refused:
            assert any(
                taken_at([*before, *wanted], kind, at) > number
                for kind, number in has.items()
                for at in INSTANTS
            )


def test_a_shortage_names_the_first_window_that_does_not_fit():
    there = Reserved.of([ReservedTime(10, 20, {"cuda": 3})])
    wanted = [ReservedTime(0, 5, {"cuda": 2}), ReservedTime(19, 30, {"cuda": 2})]
    assert there.shortage(wanted, {"cuda": 4}) == ("cuda", 19, 30, 1, 2)
    assert there.shortage(wanted[:1], {"cuda": 4}) is None
    assert there.shortage(wanted[:1], {}) == ("cuda", 0, 5, 0, 2)


@over_seeds(range(200))
def test_free_times_are_all_that_are_long_enough(seed):
    chance = random.Random(seed)
    has = {"cpu": chance.randrange(1, 6), "cuda": 8}
    accepted, _ = booked(chance, has)
    lasting = chance.randrange(1, 9)
    free = [at for at in range(3, 50) if taken_at(accepted, "cpu", at) + 2 <= has["cpu"]]
    expected = [
        (first, last + 1)
        for first in free
        if first - 1 not in free
        for last in [next(at for at in range(first, 50) if at + 1 not in free)]
        if last + 1 - first >= lasting
    ]
    wanted = ReservedTime(3, 50, {"cpu": 2})
    found = Reserved.of(accepted).free_times(wanted, has, lasting_us=lasting)
    assert list(found) == expected


def test_what_is_reserved_is_added_to_what_is_guaranteed():
    assert owed({"cuda": 2}, {"cuda": 3, "cpu": 1}) == {"cuda": 5, "cpu": 1}
    assert owed({"cuda": 2}) == {"cuda": 2}


def test_maintenance_begins_to_drain_by_the_longest_pause():
    assert lead_s([]) == LEAD_LEAST_S
    assert lead_s([1.0, 40.0]) == 80.0
    assert lead_s([1e9]) == LEAD_MOST_S
