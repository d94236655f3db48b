"""Where portions are cut into legs, by when all would end."""

from __future__ import annotations

import random
import statistics
from collections.abc import Set
from dataclasses import replace
from itertools import combinations, pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import settings as Profile
from hypothesis import strategies as st

from app.core.placement.pieces import WORTH, Piece, Work, cut, patient, timed
from tests.thoroughness import examples

LAUNCH_MS = 100.0


def work(
    portions: dict[int, list[str]], ms: float = 1000.0, give_ms: float | None = None, **needs: str
) -> Work:
    """`needs` are names with blanks between; a name ending in "s" is short."""
    names = [name for names in portions.values() for name in names]
    return Work(
        portions=portions,
        needs={name: {*needs.get(name, "").split()} for name in names},
        ms={name: 0.5 if name.endswith("s") else ms for name in names},
        launch_ms=LAUNCH_MS,
        give_ms=give_ms,
    )


def test_a_portion_that_nobody_waits_for_is_one_piece() -> None:
    alone = work({0: ["a", "b"], 1: ["c", "d"]}, b="a", d="c")
    assert set(cut(alone).pieces) == {("a", "b"), ("c", "d")}
    assert cut(alone).ends_ms == 2100


def test_a_short_node_that_another_portion_waits_for_is_a_piece_of_its_own() -> None:
    """As the new weights of a step are: both islands go on with them."""
    step = work({0: ["change_s", "a"], 1: ["b"]}, a="change_s", b="change_s")
    found = cut(step)
    assert sorted(found.pieces) == [("a",), ("b",), ("change_s",)]
    assert found.ends_ms == 0.5 + 1000 + 2 * LAUNCH_MS


def test_who_waits_little_for_a_block_is_not_cut_for_it() -> None:
    soon = work({0: ["a_s", "b_s"], 1: ["c"]}, c="a_s")
    assert cut(soon).pieces == (("a_s", "b_s"), ("c",))


def test_what_waits_for_another_portion_late_begins_early() -> None:
    """c needs what takes long; a does not wait for that."""
    late = work({0: ["a", "c"], 1: ["b"]}, c="b")
    assert cut(late).pieces[:2] == (("a",), ("b",))


@pytest.mark.parametrize("give_ms", [None, 10.0])
def test_pieces_in_a_ring_never_end(give_ms: float | None) -> None:
    crossed = work({0: ["a", "d"], 1: ["b", "c"]}, give_ms=give_ms, b="a", c="b", d="c")
    assert timed(crossed, [("a", "d"), ("b", "c")]).ends_ms == inf
    assert cut(crossed).pieces == (("a",), ("b", "c"), ("d",))


def test_what_is_given_when_its_node_has_run_needs_no_cut() -> None:
    """b begins when a is there, while c runs on in the piece of a."""
    both = work({0: ["a", "c"], 1: ["b"]}, give_ms=10.0, b="a")
    found = cut(both)
    assert found.pieces == (("a", "c"), ("b",))
    assert found.ends_ms == LAUNCH_MS + 1000 + 10 + LAUNCH_MS + 1000


def test_a_piece_begins_when_the_last_is_there_that_it_needs_of_another() -> None:
    late = work({0: ["a", "b", "c"], 1: ["d", "e"]}, give_ms=10.0, d="a", e="b")
    assert timed(late, [("a", "b", "c"), ("d", "e")]).ends_ms == 2 * LAUNCH_MS + 4000 + 10
    assert timed(late, [("a", "b", "c"), ("d",), ("e",)]).ends_ms == 3 * LAUNCH_MS + 3000 + 10


def random_work(seed: int, nodes: int, give_ms: float | None = None, *, portions: int = 2) -> Work:
    draw = random.Random(seed)
    names = [f"n{n}" for n in range(nodes)]
    seats = {name: draw.randrange(portions) for name in names}
    seats |= {f"n{portion}": portion for portion in range(portions)}
    return Work(
        portions={p: [n for n in names if seats[n] == p] for p in range(portions)},
        needs={
            name: {*draw.sample(names[:n], min(n, draw.randint(0, 2)))}
            for n, name in enumerate(names)
        },
        ms={name: draw.choice((1.0, 200.0, 900.0)) for name in names},
        launch_ms=LAUNCH_MS,
        give_ms=give_ms,
    )


GIVE_MS = st.sampled_from([None, 10.0])


@given(st.integers(0, 10**6), GIVE_MS)
@Profile(max_examples=examples(60), deadline=None)
def test_of_few_nodes_it_finds_the_best_of_all_ways(seed: int, give_ms: float | None) -> None:
    drawn = random_work(seed, 7, give_ms)
    assert cut(drawn).cost_ms == min(timed(drawn, way).cost_ms for way in all_ways(drawn))


@pytest.mark.parametrize("give_ms", [None, 10.0])
def test_where_not_all_ways_are_looked_at_it_costs_little_more(give_ms: float | None) -> None:
    times = []
    for seed in range(300):
        drawn = random_work(seed, 7, give_ms)
        best = min(timed(drawn, way).cost_ms for way in all_ways(drawn))
        times.append(cut(drawn, effort=7 * 16).cost_ms / best)
    assert 1 <= statistics.mean(times) <= 1.05


def all_ways(drawn: Work) -> list[list[tuple[str, ...]]]:
    ways: list[list[tuple[str, ...]]] = [[]]
    for names in drawn.portions.values():
        places = range(1, len(names))
        mine = []
        for many in range(len(names)):
            for cuts in combinations(places, many):
                ends = [0, *cuts, len(names)]
                mine.append([tuple(names[a:b]) for a, b in pairwise(ends)])
        ways = [way + more for way in ways for more in mine]
    return ways


@given(st.integers(0, 10**6), st.integers(2, 40), st.sampled_from([0, 200, 10**6]), GIVE_MS)
@Profile(max_examples=examples(100), deadline=None)
def test_however_little_is_looked_at_all_nodes_run_once_and_end(
    seed: int, nodes: int, effort: int, give_ms: float | None
) -> None:
    drawn = random_work(seed, nodes, give_ms)
    found = cut(drawn, effort=effort)
    assert sorted(n for piece in found.pieces for n in piece) == sorted(drawn.ms)
    busiest = max(sum(drawn.ms[n] for n in names) for names in drawn.portions.values())
    assert busiest + LAUNCH_MS <= found.ends_ms < inf
    assert found.cost_ms == found.ends_ms + WORTH * LAUNCH_MS * len(found.pieces)


# --- pieces that wait within ----------------------------------------------------------------------


def crossed_twice() -> Work:
    """d is ready to run 120 ms before what it needs of the other portion is there."""
    return work({0: ["a", "c", "d"], 1: ["b"]}, give_ms=10.0, b="a", d="b")


def test_a_portion_waits_for_a_moment_within_its_piece() -> None:
    found = patient(crossed_twice(), 250)
    assert found.pieces == (("a", "c", "d"), ("b",))
    assert found.late == {("a", "c", "d"): {"b"}}
    assert found.waits_ms == {"d": LAUNCH_MS + 20}
    assert found.ends_ms == 2 * LAUNCH_MS + 3000 + 20
    assert found.cost_ms == found.ends_ms + WORTH * LAUNCH_MS * 2


def test_who_would_wait_for_longer_begins_a_piece_when_all_is_there() -> None:
    found = patient(crossed_twice(), 100)
    assert found.pieces == (("a", "c"), ("b",), ("d",))
    assert (found.late, found.waits_ms) == ({}, {})
    assert found.ends_ms == 3 * LAUNCH_MS + 3000 + 20


def test_what_was_there_before_the_launch_is_not_late() -> None:
    """c waits for what b gives; what a gave was there before the piece of b and d began."""
    both = work({0: ["a", "x_s", "c"], 1: ["b", "d"]}, give_ms=10.0, b="x_s", c="b", d="a")
    assert patient(both, 2000).late == {("a", "x_s", "c"): {"b"}}


def test_portions_whose_orders_wait_for_each_other_never_end() -> None:
    crossed = work({0: ["d", "a"], 1: ["b", "c"]}, give_ms=10.0, b="a", d="c")
    assert patient(crossed, 250).ends_ms == inf
    assert patient(crossed, 250).cost_ms == inf


def test_several_executors_never_wait_within_a_piece() -> None:
    with pytest.raises(ValueError, match="several executors"):
        patient(work({0: ["a"], 1: ["b"]}), 250)


PATIENCE_MS = st.sampled_from([0.0, 150.0, 250.0, 1000.0, 10.0**6])


@given(st.integers(0, 10**6), st.integers(4, 24), st.integers(2, 4), PATIENCE_MS)
@Profile(max_examples=examples(150), deadline=None)
def test_patient_pieces_are_those_of_whoever_cuts_and_plays_again_by_hand(
    seed: int, nodes: int, portions: int, patience_ms: float
) -> None:
    drawn = random_work(seed, nodes, 10.0, portions=portions)
    found = patient(drawn, patience_ms)
    pieces, ends_ms = cut_by_hand(drawn, patience_ms)
    assert sorted(found.pieces) == sorted(pieces)
    assert found.ends_ms == ends_ms
    assert all(0 < ms <= patience_ms for ms in found.waits_ms.values())
    for portion, names in drawn.portions.items():
        mine = [piece for piece in found.pieces if drawn.seats[piece[0]] == portion]
        assert [name for piece in mine for name in piece] == names


@given(st.integers(0, 10**6), st.integers(4, 60), st.integers(2, 4), PATIENCE_MS)
@Profile(max_examples=examples(150), deadline=None)
def test_what_is_not_late_comes_of_pieces_that_began_before(
    seed: int, nodes: int, portions: int, patience_ms: float
) -> None:
    """So pieces never wait for each other in a ring before they begin."""
    drawn = random_work(seed, nodes, 10.0, portions=portions)
    found = patient(drawn, patience_ms)
    place = {name: n for n, piece in enumerate(found.pieces) for name in piece}
    for n, piece in enumerate(found.pieces):
        late = found.late.get(piece, frozenset())
        needed = {other for name in piece for other in drawn.needs[name]} - {*piece}
        assert late <= needed
        assert not late & drawn.needs[piece[0]]
        assert all(drawn.seats[other] != drawn.seats[piece[0]] for other in late)
        assert all(place[other] < n for other in needed - late)


def test_to_wait_for_whatever_time_is_never_later_than_to_leave() -> None:
    """Where a portion may wait for as long as it likes, each is one piece."""
    for seed in range(50):
        drawn = random_work(seed, 12, 10.0)
        found = patient(drawn, inf)
        assert len(found.pieces) == 2
        assert found.ends_ms <= patient(drawn, 250).ends_ms


def test_large_graphs_are_played_through_once() -> None:
    drawn = random_work(1, 2000, 10.0, portions=4)
    looked_at = Counted(drawn.needs)
    found = patient(replace(drawn, needs=looked_at), 250)
    assert found.ends_ms < inf
    assert looked_at.count < 10 * 2000


class Counted(dict[str, Set[str]]):
    """How often what a node needs was looked up."""

    count = 0

    def __getitem__(self, name: str) -> Set[str]:
        self.count += 1
        return super().__getitem__(name)


def cut_by_hand(drawn: Work, patience_ms: float) -> tuple[list[Piece], float]:
    """The first node, in time, that would wait for longer is cut off from those before it, until
    there is none.
    """
    first = {names[0] for names in drawn.portions.values()}
    while True:
        ends_ms, waits_ms = played_by_hand(drawn, first)
        long = [name for name in drawn.ms if name not in first and waits_ms[name] > patience_ms]
        if not long:
            return by_first(drawn, first), max(ends_ms.values())
        first.add(min(long, key=lambda name: ends_ms[name] - drawn.ms[name]))


def played_by_hand(drawn: Work, first: set[str]) -> tuple[dict[str, float], dict[str, float]]:
    """When each node has run, and how long it waited: found by moving all until nothing moves."""
    assert drawn.give_ms is not None
    ends_ms, waits_ms = dict.fromkeys(drawn.ms, 0.0), dict.fromkeys(drawn.ms, 0.0)
    while True:
        before = dict(ends_ms)
        for names in drawn.portions.values():
            free_ms = 0.0
            for name in names:
                others = [o for o in drawn.needs[name] if o not in names]
                there_ms = max([free_ms, *(ends_ms[o] + drawn.give_ms for o in others)])
                waits_ms[name] = there_ms - free_ms
                launch_ms = LAUNCH_MS if name in first else 0
                free_ms = ends_ms[name] = there_ms + launch_ms + drawn.ms[name]
        if ends_ms == before:
            return ends_ms, waits_ms


def by_first(drawn: Work, first: set[str]) -> list[Piece]:
    pieces = list[list[str]]()
    for names in drawn.portions.values():
        for name in names:
            if name in first:
                pieces.append([])
            pieces[-1].append(name)
    return [tuple(piece) for piece in pieces]
