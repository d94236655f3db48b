"""Usage fades exactly, scores compare exactly, and the tree picks what a look at all picks."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.fairness import fair_tree, usage_decay
from app.core.fairness.fair_tree import ALL, FairTree, Lane, Path, lane
from app.core.fairness.usage_decay import (
    FIXED_POINT_BITS,
    carried_over,
    faded,
    rebase,
    score,
    unscored,
    usage_us,
)
from tests.thoroughness import examples

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


def test_charge_before_the_base_time_has_faded_by_then() -> None:
    # The ledger rebuilds its sums from old buckets: T0 is now, the charges lie before it.
    booked = faded(8_000_000, at_s=-3 * DAY, since_s=0.0, half_life_s=DAY)
    assert usage_us(booked, now_s=0.0, since_s=0.0, half_life_s=DAY) == 1_000_000


@pytest.mark.parametrize("half_life_s", [1.0, 600.0, DAY, 0.0])
def test_clock_that_jumps_back_makes_no_usage_larger(half_life_s: float) -> None:
    booked = faded(8_000_000, at_s=0.0, since_s=0.0, half_life_s=half_life_s)
    for back_s in (1.0, 1e6, 1e9):
        left_us = usage_us(booked, now_s=-back_s, since_s=0.0, half_life_s=half_life_s)
        assert left_us == 8_000_000


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
    assert abs(before - after) <= 1 + (before >> FIXED_POINT_BITS - 1)  # mantissas are rounded


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


@given(used=sums, more=sums, changes=st.lists(weights, min_size=2, max_size=5))
def test_a_changed_weight_leaves_the_score_and_counts_for_what_follows(
    used: int, more: int, changes: list[int]
) -> None:
    stands, carried = Fraction(used, changes[0]), 0
    for old, new in pairwise(changes):
        carried = carried_over(used, carried, weight=old, new_weight=new)
        before = stands
        stands = Fraction(used + carried, new)
        assert before - Fraction(1, new) < stands <= before  # rounded down, by less than one unit
        assert used + carried >= 0
    assert Fraction(used + more + carried, changes[-1]) - stands == Fraction(more, changes[-1])


@given(used=sums, weight=weights)
def test_a_score_reads_back_as_usage(used: int, weight: int) -> None:
    assert 0 <= used - unscored(score(used, weight), weight) <= 1


# --- the tree against a look at all of it -------------------------------------------------------

CPU, GPU = lane("cpu"), lane("gpu")
FRESH = lane("gpu", fresh=True)
LANES = (CPU, GPU, FRESH, lane("gpu", 2), lane("gpu", 1, 8), lane("cpu", 1, 0, "d1"))
SECOND = 1_000_000 << FIXED_POINT_BITS  # of one device, as it is added to a sum at T0


@dataclass(frozen=True, slots=True)
class Waiting:
    id: str
    path: Path
    lane: Lane
    priority: int
    submitted_s: float


def age(one: Waiting) -> tuple[int, float, str]:
    return -one.priority, one.submitted_s, one.id


def fresh_first(fresh: Waiting, older: Waiting) -> bool:
    """Say yes to about half of all pairs."""
    return (int(fresh.id) + int(older.id)) % 2 == 0


@dataclass(slots=True)
class Node:
    """A branch as the rules speak of it."""

    weight: int = 1
    guarantee: dict[str, int] = field(default_factory=dict)
    limit: dict[str, int] = field(default_factory=dict)
    most_running: int | None = None
    booked: int = 0
    carried: int = 0  # the part of `booked` that is this node's alone
    lifts: dict[str, int] = field(default_factory=dict)
    rates: list[tuple[int, float]] = field(default_factory=list)  # µs a µs, since when
    runs: list[Lane] = field(default_factory=list)

    def held(self, kind: str) -> int:
        return sum(lane.width for lane in self.runs if kind in (lane.kind, ALL))

    def room(self, lane: Lane) -> bool:
        if self.most_running is not None and len(self.runs) + 1 > self.most_running:
            return False
        kinds = [kind for kind in (lane.kind, ALL) if kind in self.limit]
        return all(self.held(kind) + lane.width <= self.limit[kind] for kind in kinds)

    def borrows(self, lane: Lane) -> bool:
        return self.held(lane.kind) + lane.width > self.guarantee.get(lane.kind, 0)


class Naive:
    """Rules F3 and F4 by looking at everything each time, with fractions."""

    def __init__(self, half_life_s: float) -> None:
        self.half_life_s, self.now_s = half_life_s, 0.0
        self.nodes: dict[Path, Node] = {(): Node()}
        self.waiting: dict[str, Waiting] = {}

    def above(self, path: Path) -> list[Node]:
        return [self.nodes[path[:depth]] for depth in range(len(path) + 1)]

    def children(self, path: Path) -> list[Path]:
        return [one for one in self.nodes if one[:-1] == path and one != path]

    def score(self, path: Path) -> Fraction:
        node = self.nodes[path]
        runs = sum(rate * self._integral(since_s) for rate, since_s in node.rates)
        return Fraction(node.booked + runs, node.weight)

    def _integral(self, since_s: float) -> int:
        """Of one device from then to now."""
        until, since = (
            usage_decay.integral_over(at_s, self.half_life_s) for at_s in (self.now_s, since_s)
        )
        return until - since

    def first(self, lanes: Collection[Lane], path: Path = ()) -> Waiting | None:
        children = self.children(path)
        if not children:
            return self.first_of_user(path, lanes)
        ranked = [
            (self.key(child, lane, found), child)
            for lane in lanes
            for child in children
            if self.nodes[child].room(lane) and (found := self.first((lane,), child)) is not None
        ]
        if not ranked:
            return None
        (borrows, *_), child = min(ranked)
        node = self.nodes[child]
        inside = [one for one in lanes if node.room(one) and node.borrows(one) == borrows]
        return self.first(inside, child)

    def first_of_user(self, path: Path, lanes: Collection[Lane]) -> Waiting | None:
        firsts: dict[Lane, Waiting] = {}
        for one in sorted(self.waiting.values(), key=age):
            if one.path == path and one.lane in lanes:
                firsts.setdefault(one.lane, one)
        oldest = min(firsts.values(), key=age, default=None)
        if oldest is None or oldest.lane is FRESH:
            return oldest
        fresh = firsts.get(FRESH)
        if fresh and fresh.priority == oldest.priority and fresh_first(fresh, oldest):
            return fresh
        return oldest

    def key(self, path: Path, lane: Lane, found: Waiting) -> tuple[bool, Fraction, float, str]:
        node = self.nodes[path]
        lifted = self.score(path) + Fraction(node.lifts.get(lane.kind, 0), node.weight)
        return node.borrows(lane), lifted, found.submitted_s, path[-1]

    def heads(self, path: Path, lane: Lane) -> Iterator[Waiting]:
        ranked = [
            (self.key(child, lane, found), child, found)
            for child in self.children(path)
            if self.nodes[child].room(lane) and (found := self.first((lane,), child)) is not None
        ]
        for _, child, found in sorted(ranked, key=lambda each: each[0]):
            yield found
            if not sum(rate for rate, _ in self.nodes[child].rates):
                return


class Both:
    """Every operation on the tree and on the naive one, and the question whether they agree."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        half_life_s = dice.choice([0.0, 0.0, 8.0])
        self.tree: FairTree[Waiting] = FairTree(half_life_s=half_life_s, fresh_first=fresh_first)
        self.naive = Naive(half_life_s)
        self.leaves: list[Path] = []
        self.fees = [0, 1, 1, 1, 2, -1] if dice.random() < 0.6 else [0]  # without: all is ties
        self.count = 0
        self.runs: list[tuple[Path, Lane]] = []
        self._grow((), dice.randint(1, 4))
        self.lanes = dice.sample(LANES, dice.randint(1, len(LANES)))

    def _grow(self, path: Path, depth: int) -> None:
        for n in range(self.dice.randint(1, 2 if depth > 2 else 4)):
            child = (*path, f"{'/'.join(path)}{n}")
            self.naive.nodes[child] = Node()
            self._rank(child)
            node = self.naive.nodes[child]
            self.tree.add(
                child,
                weight=node.weight,
                guarantee=node.guarantee,
                limit=node.limit,
                most_running=node.most_running,
            )
            self._charge(child, self.dice.choice([0, 0, *self.fees]) * SECOND)
            if depth > 1 and self.dice.random() < 0.8:
                self._grow(child, depth - 1)
            else:
                self.leaves.append(child)

    def _rank(self, path: Path) -> None:
        node, dice = self.naive.nodes[path], self.dice
        node.weight = dice.choice([1, 1, 2, 3, 1000, 2**40 + 1])
        narrow = dice.random() < 0.4
        node.guarantee = {"gpu": dice.randint(0, 2)} if narrow and dice.random() < 0.7 else {}
        node.limit = {dice.choice(["gpu", "cpu", ALL]): dice.randint(1, 4)} if narrow else {}
        node.most_running = dice.choice([None, 2]) if narrow else None

    def _charge(self, path: Path, faded: int) -> None:
        for node in self.naive.above(path):
            node.booked += faded
        self.tree.charge(self.tree.branches[path], faded)

    # the operations

    def push(self) -> None:
        path, dice, self.count = self.dice.choice(self.leaves), self.dice, self.count + 1
        self._push(
            Waiting(
                f"{self.count:04}",
                path,
                dice.choice(self.lanes),
                dice.choice([0, 0, 0, 1, 2]),
                float(dice.choice([self.count, dice.randint(0, 9)])),
            )
        )

    def _push(self, one: Waiting) -> None:
        self.naive.waiting[one.id] = one
        self.tree.push(
            one.path,
            one,
            lane=one.lane,
            id=one.id,
            priority=one.priority,
            submitted_s=one.submitted_s,
        )

    def push_again(self) -> None:
        """It leaves the line and comes back as it was, so that a stale entry has an equal key."""
        if self.naive.waiting:
            one = self.naive.waiting[self.dice.choice(sorted(self.naive.waiting))]
            self.tree.drop(one.id)
            self._push(one)

    def drop(self) -> None:
        id = self.dice.choice([*sorted(self.naive.waiting), "unknown"])
        assert self.tree.drop(id) == self.naive.waiting.pop(id, None)
        assert id not in self.tree

    def take(self) -> None:
        """The pick: who goes first goes, and its turn is charged."""
        lanes = self.dice.sample(self.lanes, self.dice.randint(1, len(self.lanes)))
        one = self.naive.first(lanes)
        if one is not None and self.dice.random() < 0.2:
            one = self.dice.choice(list(self.naive.waiting.values()))
        if one is not None:
            fee = self.dice.choice(self.fees) * SECOND
            assert self.tree.take(one.id, fee) is one
            del self.naive.waiting[one.id]
            for node in self.naive.above(one.path):
                node.booked += fee

    def charge(self) -> None:
        path = self.dice.choice(sorted(self.naive.nodes))
        self._charge(path, self.dice.choice([3, *self.fees]) * SECOND)

    def lift(self) -> None:
        path = self.dice.choice([path for path in self.naive.nodes if path])
        node = self.naive.nodes[path]
        kind = self.dice.choice([CPU.kind, GPU.kind])
        node.lifts[kind] = node.lifts.get(kind, 0) + self.dice.choice([1, 2]) * SECOND
        self.tree.lift(self.tree.branches[path], kind, node.lifts[kind])

    def run(self) -> None:
        """One holds devices and uses them, or lets go of them."""
        if self.runs and self.dice.random() < 0.5:
            (path, lane), sign = self.runs.pop(self.dice.randrange(len(self.runs))), -1
        else:
            path, lane, sign = self.dice.choice(self.leaves), self.dice.choice(self.lanes), 1
            self.runs.append((path, lane))
        since_s = self.naive.now_s - self.dice.choice([0, 0, 2]) * (sign == 1)
        since_s = max(0.0, since_s)
        for node in self.naive.above(path):
            node.rates.append((sign * lane.width, since_s))
            node.runs.append(lane) if sign == 1 else node.runs.remove(lane)
        leaf = self.tree.branches[path]
        self.tree.hold(leaf, lane, sign)
        self.tree.accrue(leaf, sign * lane.width, from_s=since_s)

    def wait(self) -> None:
        self.naive.now_s += self.dice.choice([1, 1, 2, 5])
        self.tree.at(self.naive.now_s)

    def rank(self) -> None:
        """An admin changes its figures."""
        path = self.dice.choice([path for path in self.naive.nodes if path])
        self._rank(path)
        node, branch = self.naive.nodes[path], self.tree.branches[path]
        branch.weight, branch.guarantee, branch.limit = node.weight, node.guarantee, node.limit
        branch.most_running = node.most_running
        node.booked -= node.carried
        node.carried = self.dice.choice([0, -1, 3]) * SECOND
        node.booked += node.carried
        self.tree.carry(branch, node.carried)

    def agree(self) -> None:
        tree, naive, dice = self.tree, self.naive, self.dice
        lanes = dice.sample(LANES, dice.randint(1, len(LANES)))
        path = dice.choice([(), (), *sorted(naive.nodes)])
        found = tree.first_below(tree.branches[path], lanes)
        one = naive.first(lanes, path)
        assert (found and found[2]) == one
        if found is not None and one is not None:
            assert (found[0].path, found[1]) == (one.path, one.lane)
        if not path:
            assert tree.first(dict.fromkeys(lanes)) == found
        if tree.branches[path].inner:
            asked = dice.choice(LANES)
            heads = [found[2] for found in tree.heads(tree.branches[path], asked)]
            assert heads == list(naive.heads(path, asked))
        branch = tree.branches[path]
        in_line = {w.lane for w in naive.waiting.values() if w.path[: len(path)] == path}
        assert branch.lines.keys() == in_line
        assert Fraction(tree.usage(branch), branch.weight) == naive.score(path)
        assert len(tree) == len(naive.waiting)
        assert tree.lanes == {one.lane for one in naive.waiting.values()}


@settings(max_examples=examples(100), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_tree_picks_what_a_look_at_everything_picks(seed: int) -> None:
    dice = random.Random(seed)
    both = Both(dice)
    operations = (
        [both.push] * 5 + [both.take] * 4 + [both.drop] * 2 + [both.push_again, both.charge]
    )
    operations += [both.run, both.run, both.wait, both.wait, both.rank]
    operations += [both.lift] * dice.choice([0, 1])
    for _ in range(dice.choice([10, 50, 120])):
        dice.choice(operations)()
        if dice.random() < 0.7:
            both.agree()
    while (found := both.tree.first(both.lanes)) is not None:
        assert both.naive.first(both.lanes) is found[2]
        assert both.tree.take(found[2].id, SECOND) is found[2]
        del both.naive.waiting[found[2].id]
        for node in both.naive.above(found[0].path):
            node.booked += SECOND
    assert both.naive.first(both.lanes) is None


# --- who goes next, by hand ---------------------------------------------------------------------


def _tree(**weight: int) -> FairTree[str]:
    """Tenants with two users each, "u" and "v"."""
    tree = FairTree[str]()
    for name in weight:
        tree.add((name,), weight=weight[name])
        for user in "uv":
            tree.add((name, user))
    return tree


def _push(
    tree: FairTree[str], path: str, id: str, *, submitted_s: float = 0.0, priority: int = 0
) -> None:
    tree.push(
        tuple(path.split("/")), id, lane=CPU, id=id, priority=priority, submitted_s=submitted_s
    )


def _first(tree: FairTree[str]) -> str | None:
    found = tree.first((CPU,))
    return found[2] if found else None


def test_branch_moves_forward_when_its_first_task_left_and_the_next_is_older() -> None:
    tree = _tree(a=1, b=1)
    _push(tree, "a/u", "urgent", submitted_s=20, priority=1)
    _push(tree, "a/u", "oldest", submitted_s=1)
    _push(tree, "b/u", "other", submitted_s=10)
    assert _first(tree) == "other"
    tree.drop("urgent")
    assert _first(tree) == "oldest"


def test_branch_moves_forward_when_its_first_user_left_and_the_next_came_earlier() -> None:
    tree = _tree(a=1, b=1)
    tree.charge(tree.branches["a", "v"], 5)
    tree.charge(tree.branches["b", "v"], 5)
    _push(tree, "a/u", "least served", submitted_s=20)
    _push(tree, "a/v", "oldest", submitted_s=1)
    _push(tree, "b/u", "other", submitted_s=10)
    assert _first(tree) == "other"
    tree.drop("least served")
    assert _first(tree) == "oldest"


def test_branch_is_ordered_by_its_next_user_when_the_first_may_hold_no_more() -> None:
    tree = _tree(a=1, b=1)
    tree.branches["a", "u"].most_running = 1
    tree.charge(tree.branches["a", "v"], 5)
    tree.charge(tree.branches["b", "v"], 5)
    _push(tree, "a/u", "least served", submitted_s=20)
    _push(tree, "a/v", "oldest", submitted_s=1)
    _push(tree, "b/u", "other", submitted_s=10)
    assert _first(tree) == "other"
    tree.hold(tree.branches["a", "u"], CPU)
    assert _first(tree) == "oldest"
    tree.hold(tree.branches["a", "u"], CPU, -1)
    assert _first(tree) == "other"


def test_guarantee_puts_a_tenant_first_only_with_what_is_guaranteed() -> None:
    # Of "a" both tasks wait, and its user's older one is for a device of a kind that it borrows.
    tree = FairTree[str]()
    tree.add(("a",), guarantee={"gpu": 1}, faded=5)
    tree.add(("a", "u"))
    tree.add(("b",))
    tree.add(("b", "u"))
    tree.push(("a", "u"), "borrows", lane=CPU, id="1", priority=9, submitted_s=0.0)
    tree.push(("a", "u"), "is owed", lane=GPU, id="2", priority=0, submitted_s=1.0)
    tree.push(("b", "u"), "less served", lane=CPU, id="3", priority=0, submitted_s=2.0)
    order = []
    while (found := tree.first((CPU, GPU))) is not None:
        order.append(found[2])
        tree.drop({"borrows": "1", "is owed": "2", "less served": "3"}[found[2]])
    assert order == ["is owed", "less served", "borrows"]


def test_queue_class_without_room_does_not_go_in_place_of_another() -> None:
    tree = FairTree[str]()
    tree.add(("a",), limit={"gpu": 0})
    tree.add(("b",), faded=5)
    tree.push(("a",), "over the limit", lane=GPU, id="1", priority=9, submitted_s=0.0)
    tree.push(("a",), "fits", lane=CPU, id="2", priority=0, submitted_s=1.0)
    tree.push(("b",), "later", lane=GPU, id="3", priority=0, submitted_s=2.0)
    found = tree.first((GPU, CPU))
    assert found is not None
    assert found[2] == "fits"


def test_task_without_room_can_still_be_taken_by_name() -> None:
    tree = FairTree[str]()
    tree.add(("a",), limit={"cpu": 0})
    for id in "xy":
        _push(tree, "a", id)
    assert _first(tree) is None
    assert tree.take("x", 7) == "x"
    assert tree.usage(tree.branches["a",]) == 7
    assert (_first(tree), len(tree)) == (None, 1)


def test_true_ties_go_to_the_oldest_then_by_name() -> None:
    tree = _tree(b=2, a=3, c=1)
    for name, used in {"a": 3 * 7, "b": 2 * 7, "c": 7}.items():  # 7 for a weight of one
        tree.charge(tree.branches[name, "u"], used)
    _push(tree, "b/u", "b1", submitted_s=1)
    _push(tree, "a/u", "a1", submitted_s=1)
    _push(tree, "c/u", "c0", submitted_s=0)
    assert [tree.take(_first(tree) or "", 0) for _ in range(3)] == ["c0", "a1", "b1"]


def test_scores_that_differ_by_1e_30_are_told_apart() -> None:
    tree = _tree(a=3, b=3)
    tree.charge(tree.branches["a", "u"], 10**30 + 1)
    tree.charge(tree.branches["b", "u"], 10**30)
    _push(tree, "a/u", "older", submitted_s=0)
    _push(tree, "b/u", "less served", submitted_s=9)
    assert _first(tree) == "less served"


def test_no_branch_is_ever_ahead_by_more_than_one_charge() -> None:
    # The bound of stride scheduling: service / weight differs by one charge at most.
    weight = {"a": 100, "b": 50, "c": 250}
    tree = _tree(**weight)
    for name in weight:
        for n in range(400):
            _push(tree, f"{name}/u", f"{name}{n:03}", submitted_s=float(n))
    got = dict.fromkeys(weight, 0)
    for _ in range(400):
        got[(tree.take(_first(tree) or "", 1) or "")[0]] += 1
        for one, other in permutations(weight, 2):
            assert got[one] * weight[other] - got[other] * weight[one] <= weight[other]
    assert got == weight


def test_a_tripled_weight_gives_three_of_four_from_now_on_whatever_was_used() -> None:
    tree = _tree(a=1000, b=1000)
    for name in "ab":
        tree.charge(tree.branches[name, "u"], 10**6)
        for n in range(400):
            _push(tree, f"{name}/u", f"{name}{n:03}", submitted_s=float(n))
    a = tree.branches["a",]
    a.weight = 3000
    tree.carry(a, carried_over(10**6, 0, weight=1000, new_weight=3000))
    got = Counter((tree.take(_first(tree) or "", 1) or "")[0] for _ in range(100))
    assert got == {"a": 75, "b": 25}
    assert tree.usage(a) - a.carried == tree.usage(tree.branches["a", "u"]) == 10**6 + 75


def test_path_to_a_task_is_pushed_and_dropped_once() -> None:
    tree = _tree(a=1)
    _push(tree, "a/u", "x")
    assert "x" in tree
    assert (len(tree), tree.lanes) == (1, {CPU})
    assert tree.branches["a",].lines.keys() == {CPU}
    assert (tree.drop("x"), tree.drop("x"), tree.take("x", 1)) == ("x", None, None)
    assert tree.usage(tree.root) == 0
    assert (len(tree), tree.lanes, _first(tree)) == (0, set(), None)
    assert not tree.root.lines  # nothing is left behind by a lane that nobody waits in


# --- time ---------------------------------------------------------------------------------------

HOUR = 3600.0


def test_running_tasks_are_charged_as_they_run() -> None:
    # One device for one half-life fades to (1 - 1/2) / ln 2 of that half-life's device time.
    tree = FairTree[str](half_life_s=HOUR)
    leaf = tree.add(("a",))
    tree.accrue(leaf, 1)
    tree.at(HOUR)
    used_us = usage_us(tree.usage(leaf), now_s=HOUR, since_s=0.0, half_life_s=HOUR)
    assert used_us == pytest.approx(0.5 / 0.69314718056 * HOUR * 1e6, rel=1e-9)
    tree.accrue(leaf, -1)
    tree.at(2 * HOUR)
    left_us = usage_us(tree.usage(leaf), now_s=2 * HOUR, since_s=0.0, half_life_s=HOUR)
    assert abs(left_us - used_us / 2) <= 1


def test_runtime_before_the_first_look_is_charged_too() -> None:
    early, late = FairTree[str](half_life_s=HOUR), FairTree[str](half_life_s=HOUR)
    one, other = early.add(("a",)), late.add(("a",))
    early.at(100.0)
    early.accrue(one, 3)
    early.at(900.0)
    late.at(900.0)
    late.accrue(other, 3, from_s=100.0)
    assert early.usage(one) == late.usage(other) > 0


@given(
    used=st.tuples(st.integers(0, 20_000), st.integers(0, 20_000)),
    rates=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    weights=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    fee_s=st.integers(0, 2000),
    half_life_s=st.sampled_from([0.0, HOUR]),
)
def test_one_branch_overtakes_another_at_the_computed_time(
    used: tuple[int, int],
    rates: tuple[int, int],
    weights: tuple[int, int],
    fee_s: int,
    half_life_s: float,
) -> None:
    tree = FairTree[str](half_life_s=half_life_s)
    one, other = (
        tree.add((name,), weight=weights[n], faded=tree.faded(used[n] * 10**6))
        for n, name in enumerate("ab")
    )
    for branch, rate in zip((one, other), rates, strict=True):
        tree.accrue(branch, rate)
    tree.at(5.0)
    foretold_s = tree.overtakes_s(one, other, fee_s * 10**6)

    def is_higher(at_s: float) -> bool:
        tree.at(at_s)
        return tree.score(one) > tree.score(other, tree.faded(fee_s * 10**6))

    from_s, to_s = 5.0, 30 * HOUR  # by then what was used at first has faded
    if is_higher(from_s):
        assert foretold_s == from_s
        return
    if not is_higher(to_s):
        assert foretold_s > to_s * (1 - 1e-6)
        return
    while to_s - from_s > 1e-4:
        middle_s = (from_s + to_s) / 2
        from_s, to_s = (from_s, middle_s) if is_higher(middle_s) else (middle_s, to_s)
    assert foretold_s == pytest.approx(to_s, abs=0.01)


def test_years_of_sums_give_the_order_that_rebased_sums_give() -> None:
    # Twenty years at a half-life of a week are 1043 doublings: no float could hold them.
    week_s, dice = 7 * DAY, random.Random(3)
    tree, moved_s = FairTree[str](half_life_s=week_s), 1000 * week_s
    moved = FairTree[str](half_life_s=week_s, since_s=moved_s)
    for name in "abcdefgh":
        tree.add((name,))
        for _ in range(20):
            tree.at(moved_s + dice.uniform(0, 43) * week_s)
            tree.charge(tree.branches[name,], tree.faded(dice.randint(1, 10**12)))
        moved.add((name,), faded=rebase(tree.branches[name,].faded, 1000))
    for now in (tree, moved):
        now.at(moved_s + 43 * week_s)
        for name in "abcdefgh":
            _push(now, name, name)
    for _ in range(8):
        assert _first(tree) == _first(moved)
        tree.take(_first(tree) or "", 0)
        moved.take(_first(moved) or "", 0)


# --- what a pick costs --------------------------------------------------------------------------


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each heap operation was done, and how often a key was worked out."""
    count = Counter[str]()

    def counted(owner: object, name: str) -> None:
        real = getattr(owner, name)

        def wrapped(*args: object) -> object:
            count[name] += 1
            return real(*args)

        monkeypatch.setattr(owner, name, wrapped)

    for name in ("heappush", "heappop", "heappushpop", "heapify"):
        counted(fair_tree, name)
    for name in ("_key", "_top", "_place"):
        counted(FairTree, name)
    return count


def _picks(tree: FairTree[str], picks: int, steps: Counter[str]) -> tuple[list[str], Counter[str]]:
    steps.clear()
    order = [tree.take(_first(tree) or "", SECOND) or "" for _ in range(picks)]
    return order, Counter(steps)


def _crowd(tenants: int, tasks: int) -> FairTree[str]:
    """Tenants that wait, each with other usage than its neighbours."""
    tree = _tree(**{f"t{n:05}": 1 + n % 7 for n in range(tenants)})
    for n in range(tenants):
        tree.charge(tree.branches[f"t{n:05}", "u"], n * SECOND)
        for m in range(tasks):
            _push(tree, f"t{n:05}/u", f"t{n:05}.{m}", submitted_s=float(m))
    return tree


def test_a_flood_by_one_tenant_costs_the_others_nothing(steps: Counter[str]) -> None:
    calm, flooded = _crowd(50, 20), _crowd(50, 20)
    for n in range(100_000):
        _push(flooded, "t00049/v", f"flood{n:06}", submitted_s=100.0 + n)
    assert steps["heappush"] + steps["heappop"] < 1000  # what comes in order is not sorted again
    for tree in (calm, flooded):
        tree.drop("t00049.0")  # from here on each looks at its keys anew
    usual, cost = _picks(calm, 500, steps)
    others, cost_in_flood = _picks(flooded, 500, steps)
    assert others == usual
    assert cost_in_flood == cost


@pytest.mark.parametrize("tenants", [10, 10_000])
def test_pick_takes_as_many_steps_for_ten_tenants_as_for_ten_thousand(
    tenants: int, steps: Counter[str]
) -> None:
    tree = _crowd(tenants, 20)
    _picks(tree, 1, steps)
    _, cost = _picks(tree, 9, steps)
    # `first` looks at the top, `take` gives the tenant its new key; its user waits alone.
    assert cost == {"_top": 9, "heappushpop": 9}


def test_stale_heap_entries_do_not_pile_up() -> None:
    tree = _tree(a=1, b=1)
    for name in ("a/u", "b/u", "b/v"):
        for n in range(10):
            _push(tree, name, f"{name}{n}", submitted_s=float(n))
    for _ in range(1000):
        tree.drop("a/u5")  # not the first: it is found later that it does not wait
        _push(tree, "a/u", "a/u5", submitted_s=5.0)
        tree.charge(tree.branches["b", "v"], 9 * SECOND)
        tree.first_below(tree.branches["b",], (CPU,))  # it has its new key now,
        tree.charge(tree.branches["b", "v"], -9 * SECOND)  # which is left behind by a lower one
    lines = [line for branch in tree.branches.values() for line in branch.lines.values()]
    sizes = [len(line.heap or ()) + len(line.queue or ()) for line in lines]
    assert max(sizes) < 100


# --- half-lives at their bounds -----------------------------------------------------------------


@pytest.mark.parametrize("half_lives", [0, 999, 1100, 5000])
def test_a_crossing_is_computed_after_any_number_of_half_lives(half_lives: int) -> None:
    tree = FairTree[str](half_life_s=HOUR)
    one, other = tree.add(("one",), weight=1000), tree.add(("other",), weight=1000)
    tree.at(half_lives * HOUR)
    tree.accrue(one, 1000)
    tree.charge(other, tree.faded(1_000_000 * 1000))
    crossing_s = tree.overtakes_s(one, other, 0)
    assert crossing_s == pytest.approx(tree.now_s + 1.0, rel=0, abs=0.001)
    assert tree.accrued_s(tree.faded(1_000_000)) == pytest.approx(
        tree.now_s + 1.0, rel=0, abs=0.001
    )


def test_usage_is_added_in_real_time_without_a_half_life() -> None:
    tree: FairTree[str] = FairTree(half_life_s=0)
    tree.at(100.0)
    assert tree.accrued_s(tree.faded(2_500_000)) == 102.5


def test_usage_that_has_faded_to_nothing_counts_as_nothing() -> None:
    tree = FairTree[str](half_life_s=HOUR)
    one, other = tree.add(("one",), weight=1000), tree.add(("other",), weight=1000)
    tree.charge(other, tree.faded(1_000_000 * 1000))
    tree.at(5000 * HOUR)
    tree.accrue(one, 1000)
    assert tree.overtakes_s(one, other, 1000) == pytest.approx(tree.now_s, rel=0, abs=0.001)


@pytest.mark.parametrize("half_life_s", [-1.0, 0.5, 1e300, math.inf, math.nan])
def test_a_half_life_out_of_bounds_is_refused_with_its_bounds(half_life_s: float) -> None:
    with pytest.raises(ValueError, match=r"must be 0 .* or from 1 s to"):
        FairTree[str](half_life_s=half_life_s)


@pytest.mark.parametrize(
    ("now_s", "lease_ends_s", "held_s"),
    [(103.0, 115.0, 3.0), (200.0, 115.0, 15.0), (200.0, 160.0, 15.0), (200.0, 100.0, 0.0)],
    ids=["replaced", "lease ended", "lease made longer", "said goodbye"],
)
def test_unheard_time_ends_with_the_lease_or_the_next_process(now_s, lease_ends_s, held_s):
    found = usage_decay.unheard_us(
        now_s=now_s, heard_s=100.0, lease_ends_s=lease_ends_s, lease_s=15.0
    )
    assert found == held_s * 1e6


def test_unheard_time_is_never_negative():
    clock = {"now_s": 99.0, "heard_s": 100.0, "lease_ends_s": 115.0}
    assert usage_decay.unheard_us(**clock, lease_s=15.0) == 0


@pytest.mark.parametrize("half_life_s", [1.0, 600.0, 604_800.0])
@pytest.mark.parametrize("back_s", [1e6, 1e8])
def test_clock_that_is_set_back_by_many_half_lives_overflows_nothing(
    half_life_s: float, back_s: float
) -> None:
    tree: FairTree[str] = FairTree(half_life_s=half_life_s, since_s=2e9)
    for name in ("a", "b"):
        tree.add((name,))
    one, other = tree.branches["a",], tree.branches["b",]
    tree.at(2e9 + 100)
    tree.charge(one, tree.faded(10**9))
    tree.accrue(one, 1000)
    tree.at(2e9 - back_s)
    for each in (tree.overtakes_s(one, other, 10**9), tree.overtakes_s(other, one, 10**9)):
        assert not math.isnan(each)
    assert tree.accrued_s(one.faded) >= tree.now_s
