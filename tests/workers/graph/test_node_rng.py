"""What a node draws depends on its number alone, whatever ran before it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from workers.graph.node_rng import NodeRandom, seed_of
from workers.hardware.accelerator import Accelerator


def one_normal() -> Any:
    """Of each generator, which keeps a second one for the next call."""
    return torch.randn(1).item(), float(numpy.random.randn()), random.gauss()


DRAWS: list[Callable[[], Any]] = [
    lambda: torch.rand(3).tolist(),
    lambda: numpy.random.rand(700).tolist(),
    lambda: [random.random() for _ in range(400)],
    lambda: (torch.initial_seed(), torch.get_rng_state().tolist()),
    lambda: torch.default_generator.get_state().tolist(),
    one_normal,
]


@pytest.mark.parametrize("seed", range(20))
def test_numbers_after_any_draws_are_those_of_the_seed(seed: int) -> None:
    dice, generators = random.Random(seed), NodeRandom(Accelerator("cpu"))
    for _ in range(20):
        draw, number = dice.choice(DRAWS), dice.randrange(2**63)
        generators.seed(number)
        expected = draw()
        for before in dice.choices(DRAWS, k=dice.randrange(3)):
            before()
        generators.seed(number)
        assert draw() == expected


def test_numbers_of_torch_are_those_of_its_own_seeding() -> None:
    NodeRandom(Accelerator("cpu")).seed(7)
    drawn = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(3))


def test_seed_of_two_names_differs_and_fits_63_bits() -> None:
    seeds = {seed_of(f"n{n}") for n in range(1000)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 1 << 63 for seed in seeds)
