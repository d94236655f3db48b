"""What a node draws depends on its number alone; to seed what nobody draws from is left out."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy
import pytest
import torch

from workers.graph import node_rng as chances
from workers.graph.node_rng import NodeRandom, seed_of
from workers.hardware.accelerator import Accelerator


@pytest.fixture(params=["watched", "not watched"])
def chance(request, monkeypatch):
    if request.param == "not watched":
        monkeypatch.setattr(chances, "_moves_are_seen", lambda positions: False)
    return NodeRandom(Accelerator("cpu"))


def quiet(x):
    return x


def by_torch(x):
    return torch.rand(1).item()


def by_all(x):
    return torch.rand(1).item(), float(numpy.random.rand()), random.random()


def by_torch_apart(x):
    """What it draws leaves no trace behind, but that it was put back."""
    with torch.random.fork_rng(devices=()):
        return torch.rand(1).item()


def one_normal(x):
    """Of torch, which keeps a second one for the next."""
    return torch.randn(1).item()


def state_of_torch(x):
    return hash(torch.get_rng_state().numpy().tobytes()), torch.initial_seed()


def told_seed(x):
    return torch.initial_seed()


def normal(x):
    """Of the two that are made at once, one is left over."""
    return float(numpy.random.randn()), random.gauss()


ALL = [quiet, by_torch, by_torch_apart, one_normal, state_of_torch, told_seed, by_all, normal]


class Sometimes:
    """Draws in some calls only, and counts them."""

    def __init__(self, *which, draw=by_all):
        self.which, self.calls, self.draw = which, [], draw

    def __call__(self, x):
        self.calls.append(x)
        return self.draw(x) if x in self.which else None


def called(chance, function, number, may_repeat, x):
    """As a graph does it."""
    while True:
        guessed = chance.before(function, number, may_repeat)
        got = function(x)
        if chance.after(function, guessed):
            return got


def drawn(function, number, x=0):
    """Alone, in a world that was just seeded."""
    fresh = NodeRandom(Accelerator("cpu"))
    fresh.seed(number)
    return function(x)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_ran_before_the_numbers_are_the_same(seed, chance):
    dice = random.Random(seed)
    for _ in range(60):
        function = dice.choice(ALL)
        number = dice.randrange(2**63)
        expected = drawn(function, number)
        chance.seed(dice.randrange(9))
        for _ in range(dice.randrange(3)):
            before = dice.choice(ALL)
            called(chance, before, dice.randrange(2**63), True, 0)
        if dice.random() < 0.5:  # there was time; perhaps for another call, which did not come
            chance.seed_ahead(function, dice.choice([number, number + 1]))
        assert called(chance, function, number, True, 0) == expected


def test_who_draws_for_the_first_time_later_is_called_again():
    chance, some = NodeRandom(Accelerator("cpu")), Sometimes(3)
    got = [called(chance, some, 7, True, x) for x in range(6)]
    assert some.calls == [0, 1, 2, 3, 3, 4, 5]
    assert got == [None, None, None, drawn(by_all, 7), None, None]


@pytest.mark.parametrize("seed", range(20))
def test_a_graph_calls_as_is_said_here(seed, chance):
    """The short way of those that draw nothing, among others."""
    dice, ended = random.Random(seed), SimpleNamespace(result=None)
    for n in range(100):
        function, number = dice.choice([quiet, quiet, *ALL]), dice.randrange(2**63)
        if dice.random() < 0.1:
            chance.seed_ahead(function, number)
        expected = drawn(function, number, n)
        chance.seed(dice.randrange(9))
        found = chance.called(in_a_graph[function], number, dice.random() < 0.9, ended, {"x": n})
        assert found == expected


in_a_graph = {function: lambda ctx, x, function=function: function(x) for function in ALL}


@pytest.mark.parametrize("draw", [by_torch, by_torch_apart, one_normal, state_of_torch])
def test_who_draws_from_torch_for_the_first_time_later_is_called_again_once(draw):
    """And is seeded from then on, as it may draw any time."""
    chance, some = NodeRandom(Accelerator("cpu")), Sometimes(3, 4, 6, draw=draw)
    got = [called(chance, some, 7, True, x) for x in range(8)]
    assert some.calls == [0, 1, 2, 3, 3, 4, 5, 6, 7]
    assert got == [drawn(draw, 7) if x in (3, 4, 6) else None for x in range(8)]


@pytest.mark.parametrize("draw", [by_torch, by_all])
def test_what_ends_a_graph_in_vain_or_fails_in_vain_does_not_count(draw):
    """It drew what was not seeded; here nothing but the right numbers will do."""
    right = drawn(draw, 7)

    def some(ctx, x):
        if x < 3:
            return x
        if (got := draw(x)) == right:
            return got
        if x == 3:
            raise ValueError(got)
        ctx.result = {}

    for last in (3, 4):
        chance, ctx = NodeRandom(Accelerator("cpu")), SimpleNamespace(result=None)
        got = [chance.called(some, 7, True, ctx, {"x": x}) for x in (0, 1, last)]
        assert got == [0, 1, right]
        assert ctx.result is None


def test_who_fails_with_the_right_numbers_fails():
    chance, calls = NodeRandom(Accelerator("cpu")), []

    def some(ctx, x):
        calls.append(x)
        return 1 // x

    for x in (2, 1):
        chance.called(some, 7, True, None, {"x": x})
    with pytest.raises(ZeroDivisionError):
        chance.called(some, 7, True, None, {"x": 0})
    assert calls == [2, 1, 0]


def test_torch_is_not_seeded_for_who_draws_nothing_and_says_that_it_is(monkeypatch):
    chance = NodeRandom(Accelerator("cpu"))
    seeded = []
    monkeypatch.setattr(chance, "_torch", [seeded.append])
    told = [called(chance, told_seed, 2**62 + n, True, 0) for n in range(9)]
    assert told[2:] == [2**62 + n for n in range(2, 9)]
    assert seeded == [2**62, 0], "the first time, and once for all that follow"


def test_where_torch_is_not_as_we_think_it_is_seeded_each_time(monkeypatch):
    monkeypatch.setattr(chances, "_SEARCHED_BYTES", 8)
    chance = NodeRandom(Accelerator("cpu"))
    assert chance._engine is None
    for n in range(3):
        assert called(chance, told_seed, n, True, 0) == n
        assert called(chance, by_torch, n, True, 0) == drawn(by_torch, n)


def test_what_was_seeded_ahead_and_forgotten_is_seeded_again():
    chance = NodeRandom(Accelerator("cpu"))
    called(chance, by_torch, 1, True, 0)
    chance.seed_ahead(by_torch, 7)
    chance.forget()
    torch.rand(3)  # the world went on
    assert called(chance, by_torch, 7, True, 0) == drawn(by_torch, 7)


@pytest.mark.parametrize("function", [quiet, by_torch])
def test_who_draws_between_does_not_change_what_was_seeded_ahead(function):
    """As a block may that is unpickled meanwhile."""
    chance = NodeRandom(Accelerator("cpu"))
    called(chance, function, 1, True, 0)
    chance.seed_ahead(function, 7)
    torch.rand(3)
    assert called(chance, function, 7, True, 0) == drawn(function, 7)


def test_who_may_not_be_called_twice_is_seeded_each_time():
    chance, some = NodeRandom(Accelerator("cpu")), Sometimes(3)
    got = [called(chance, some, 7, False, x) for x in range(6)]
    assert some.calls == list(range(6))
    assert got[3] == drawn(by_all, 7)


@pytest.mark.parametrize("draws", [1, 2, 3, 311, 312, 313, 623, 624, 625, 1248])
@pytest.mark.parametrize("draw", [random.random, numpy.random.rand, lambda: random.getrandbits(32)])
def test_a_move_is_seen_however_far(draws, draw):
    chance = NodeRandom(Accelerator("cpu"))
    assert chance._is_watched
    for number in (0, 5):
        chance.seed(number)
        assert not chance.moved()
        for _ in range(draws):
            draw()
        assert chance.moved()


def test_trying_out_leaves_the_world_as_it_was():
    numpy.random.seed(1)
    random.seed(1)
    expected = float(numpy.random.rand()), random.random()
    numpy.random.seed(1)
    random.seed(1)
    assert chances._moves_are_seen(chances._positions())
    assert (float(numpy.random.rand()), random.random()) == expected


def test_seeds_are_of_63_bits_and_differ():
    seeds = {seed_of(f"node#{n}") for n in range(1000)}
    assert len(seeds) == 1000
    assert max(seeds) < 2**63
