"""Usage fades exactly, scores compare exactly, and the queue picks what a naive scan picks."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.fairshare import (
    FIXED_POINT_BITS,
    FairQueue,
    faded,
    rebase,
    score,
    unscored,
    usage_us,
)

DAY = 86400.0
charges = st.integers(min_value=0, max_value=10**15)
weights = st.integers(min_value=1, max_value=2**63)
sums = st.integers(min_value=0, max_value=2**300)


# --- F2: usage fades ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("days", "left_us"),
    [(0, 10_000_000), (1, 5_000_000), (2, 2_500_000), (10, 9_766)],  # 10 s / 2 ** days
)
def test_usage_halves_with_each_half_life(days: float, left_us: int) -> None:
    booked = faded(10_000_000, at_s=5.0, since_s=0.0, half_life_s=DAY)
    now_s = 5.0 + days * DAY
    assert usage_us(booked, now_s=now_s, since_s=0.0, half_life_s=DAY) == left_us


def test_one_hundred_cores_for_two_days_give_the_priority_of_the_htcondor_manual() -> None:
    # RUP = usage * ln 2 / half-life (fair_share.md, 2.2): 75 of 100 after two half-lives.
    minute_us = 60 * 1_000_000
    booked = sum(
        faded(100 * minute_us, at_s=60.0 * n, since_s=0.0, half_life_s=DAY) for n in range(2880)
    )
    used_s = usage_us(booked, now_s=2 * DAY, since_s=0.0, half_life_s=DAY) / 1e6
    assert used_s * 0.693147 / DAY == pytest.approx(75, rel=1e-3)


@given(charge=charges, at_s=st.floats(0, 1e9))
def test_without_a_half_life_nothing_fades(charge: int, at_s: float) -> None:
    booked = faded(charge, at_s=at_s, since_s=0.0, half_life_s=0)
    assert usage_us(booked, now_s=1e9, since_s=0.0, half_life_s=0) == charge


@given(charge=charges, at_s=st.floats(0, 100 * DAY), since_s=st.floats(-100 * DAY, 0))
def test_a_charge_reads_back_to_the_microsecond_when_it_is_made(
    charge: int, at_s: float, since_s: float
) -> None:
    booked = faded(charge, at_s=at_s, since_s=since_s, half_life_s=DAY)
    assert usage_us(booked, now_s=at_s, since_s=since_s, half_life_s=DAY) == charge


def test_what_was_charged_before_the_sums_began_has_faded_by_then() -> None:
    # The ledger rebuilds its sums from old buckets: T0 is now, the charges lie before it.
    booked = faded(8_000_000, at_s=-3 * DAY, since_s=0.0, half_life_s=DAY)
    assert usage_us(booked, now_s=0.0, since_s=0.0, half_life_s=DAY) == 1_000_000
    assert usage_us(booked, now_s=-3 * DAY, since_s=0.0, half_life_s=DAY) == 8_000_000


@given(one=charges, two=charges, at_s=st.floats(0, 100 * DAY))
def test_two_charges_at_one_instant_are_one_charge(one: int, two: int, at_s: float) -> None:
    def booked(charge: int) -> int:
        return faded(charge, at_s=at_s, since_s=0.0, half_life_s=DAY)

    assert booked(one) + booked(two) == booked(one + two)


@given(charge=charges, at_s=st.floats(0, 100 * DAY), halvings=st.integers(0, 500))
def test_rebasing_changes_no_usage(charge: int, at_s: float, halvings: int) -> None:
    booked = faded(charge, at_s=at_s, since_s=0.0, half_life_s=DAY)
    now_s = max(at_s, halvings * DAY)
    before = usage_us(booked, now_s=now_s, since_s=0.0, half_life_s=DAY)
    moved = rebase(booked, halvings)
    after = usage_us(moved, now_s=now_s, since_s=halvings * DAY, half_life_s=DAY)
    assert abs(before - after) <= 1


@given(one=sums, two=sums, halvings=st.integers(0, 500))
def test_rebasing_swaps_no_two_sums(one: int, two: int, halvings: int) -> None:
    assert (one <= two) <= (rebase(one, halvings) <= rebase(two, halvings))


# --- F3: scores compare exactly -----------------------------------------------------------------


@given(one=sums, two=sums, v=weights, w=weights)
def test_scores_order_as_cross_multiplication_does(one: int, two: int, v: int, w: int) -> None:
    assert (score(one, v) < score(two, w)) == (one * w < two * v)
    assert (score(one, v) == score(two, w)) == (one * w == two * v)


@given(used=sums, factor=st.integers(1, 2**31), weight=st.integers(1, 2**31))
def test_equal_shares_tie_exactly(used: int, factor: int, weight: int) -> None:
    assert score(used, weight) == score(used * factor, weight * factor)


def test_fractions_that_floats_cannot_tell_apart_do_not_tie() -> None:
    assert score(10**30 + 1, 3) > score(10**30, 3)


@given(used=sums, weight=weights)
def test_a_score_reads_back_as_usage(used: int, weight: int) -> None:
    assert 0 <= used - unscored(score(used, weight), weight) <= 1


# --- the queue ----------------------------------------------------------------------------------

Waiting = tuple[str, str, int, int, int]  # tenant, user, priority, submitted, number


class Naive:
    """The same rules by looking at everything each time."""

    def __init__(self, weight: dict[str, int], used: dict[tuple[str, ...], int]) -> None:
        self.weight, self.used = weight, dict(used)
        self.waiting: list[Waiting] = []

    def pick(self, fee: int) -> Waiting:
        tenant = min({task[0] for task in self.waiting}, key=self._rank_of_tenant)
        mine = [task for task in self.waiting if task[0] == tenant]
        user = min({task[1] for task in mine}, key=lambda user: self._rank_of_user(tenant, user))
        task = self._first([task for task in mine if task[1] == user])
        self.waiting.remove(task)
        self.used[(tenant,)] += fee
        self.used[(tenant, user)] += fee
        return task

    def _rank_of_tenant(self, tenant: str) -> tuple[Fraction, int, str]:
        mine = [task for task in self.waiting if task[0] == tenant]
        user = min({task[1] for task in mine}, key=lambda user: self._rank_of_user(tenant, user))
        head = self._first([task for task in mine if task[1] == user])
        return Fraction(self.used[(tenant,)], self.weight[tenant]), head[3], tenant

    def _rank_of_user(self, tenant: str, user: str) -> tuple[int, int, str]:
        head = self._first([task for task in self.waiting if task[:2] == (tenant, user)])
        return self.used[(tenant, user)], head[3], user

    def _first(self, tasks: list[Waiting]) -> Waiting:
        return min(tasks, key=lambda task: (-task[2], task[3], f"{task[4]:06}"))


@settings(max_examples=150, deadline=None)
@given(dice=st.randoms(use_true_random=False))
def test_the_queue_picks_what_a_scan_of_everything_picks(dice: random.Random) -> None:
    tenants = [f"t{n}" for n in range(dice.randint(1, 5))]
    weight = {tenant: dice.choice([1, 2, 3, 1000]) for tenant in tenants}
    paths: list[tuple[str, ...]] = [(tenant,) for tenant in tenants]
    paths += [(tenant, f"{tenant}u{n}") for tenant in tenants for n in range(dice.randint(1, 3))]
    used = {path: dice.randint(0, 6) for path in paths}
    queue, naive = FairQueue[Waiting](), Naive(weight, used)
    for path in paths:
        queue.add(path, weight=weight[path[0]] if len(path) == 1 else 1, faded=used[path])

    for n in range(60):
        if naive.waiting and dice.random() < 0.45:
            fee = dice.choice([0, 1, 2, 5])
            assert queue.first() == naive.pick(fee) == queue.take(fee)
        elif dice.random() < 0.2:
            path = dice.choice(paths)
            queue.charge(path, 3)
            for branch in {path[:1], path}:
                naive.used[branch] += 3
        else:
            tenant, user = dice.choice([path for path in paths if len(path) == 2])
            task = (tenant, user, dice.randint(-1, 1), dice.randint(0, 3), n)
            naive.waiting.append(task)
            queue.push(
                (tenant, user), task, id=f"{n:06}", priority=task[2], submitted_s=float(task[3])
            )
        assert len(queue) == len(naive.waiting)
    while naive.waiting:
        assert queue.take(1) == naive.pick(1)
    assert queue.first() is None


def test_nobody_is_ever_more_than_one_charge_ahead_of_anybody() -> None:
    # The bound of stride scheduling: service / weight differs by one charge at most.
    queue = FairQueue[str]()
    weight = {"a": 100, "b": 50, "c": 250}
    for name in weight:
        queue.add((name,), weight=weight[name])
        queue.add((name, "u"))
        for n in range(400):
            queue.push((name, "u"), name, id=f"{n:03}", priority=0, submitted_s=0.0)
    got = dict.fromkeys(weight, 0)
    for _ in range(400):
        got[queue.take(1)] += 1
        for one, other in permutations(weight, 2):
            assert got[one] * weight[other] - got[other] * weight[one] <= weight[other]
    assert got == weight


def test_ten_thousand_tenants_and_many_tasks_are_picked_without_a_sweep() -> None:
    """No stopwatch: it counts how many branches a pick touches, whatever their number."""
    queue = FairQueue[int]()
    for n in range(10_000):
        queue.add((f"t{n}",), weight=1 + n % 7, faded=n << FIXED_POINT_BITS)
        queue.add((f"t{n}", f"u{n}"))
        for m in range(3):
            queue.push((f"t{n}", f"u{n}"), n, id=str(m), priority=0, submitted_s=float(n))
    sizes = [len(queue._root.heap)]
    for _ in range(5_000):
        queue.take(1 << FIXED_POINT_BITS)
        sizes.append(len(queue._root.heap))
    assert len(queue) == 25_000
    assert max(sizes) == 10_000  # no stale entries pile up


def test_many_tasks_of_one_user_leave_no_stale_entries() -> None:
    queue = FairQueue[int]()
    queue.add(("t",))
    queue.add(("t", "u"))
    for n in range(1000):
        queue.push(("t", "u"), n, id=f"{n:04}", priority=0, submitted_s=float(n))
    assert len(queue._root.heap) == 1
    assert [queue.take() for _ in range(1000)] == list(range(1000))
