"""Where portions are cut into legs, by when all would end."""

from __future__ import annotations

import random
import statistics
from itertools import combinations, pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import settings as Profile
from hypothesis import strategies as st

from app.core.pieces import WORTH, Work, cut, timed

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


def random_work(seed: int, nodes: int, give_ms: float | None = None) -> Work:
    draw = random.Random(seed)
    names = [f"n{n}" for n in range(nodes)]
    seats = {name: draw.randrange(2) for name in names}
    seats |= {"n0": 0, "n1": 1}
    return Work(
        portions={portion: [n for n in names if seats[n] == portion] for portion in (0, 1)},
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
@Profile(max_examples=60, deadline=None)
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
@Profile(max_examples=100, deadline=None)
def test_however_little_is_looked_at_all_nodes_run_once_and_end(
    seed: int, nodes: int, effort: int, give_ms: float | None
) -> None:
    drawn = random_work(seed, nodes, give_ms)
    found = cut(drawn, effort=effort)
    assert sorted(n for piece in found.pieces for n in piece) == sorted(drawn.ms)
    busiest = max(sum(drawn.ms[n] for n in names) for names in drawn.portions.values())
    assert busiest + LAUNCH_MS <= found.ends_ms < inf
    assert found.cost_ms == found.ends_ms + WORTH * LAUNCH_MS * len(found.pieces)
