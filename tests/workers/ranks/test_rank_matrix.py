"""Every kind of job, for every number of ranks, over every number of seats: the same bits.

`make test` runs each job once for each number of ranks, with seats that change at random; the
matrix itself is marked `long`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from tests.thoroughness import in_rotation
from tests.workers.gangs import JSON, Gangs, bits

STEPS = 6
RANKS = (2, 3, 4, 5, 8)
JOBS: dict[str, tuple[str, JSON]] = {
    "transformer": ("jobs:Transformer", {}),
    "batch norm": ("jobs:Conv", {}),
    "accumulation": ("jobs:Accumulating", {}),
    "no_sync": ("jobs:Accumulating", {"no_sync": True}),
    "two backward passes": ("jobs:TwoPasses", {}),
    "two passes, bucket views": ("jobs:TwoPasses", {"views": True}),
    "a hook's own tensor": ("jobs:LooksAtItsBucket", {}),
    "Join, uneven inputs": ("jobs:Joined", {}),
    "FSDP2": ("jobs:Sharded", {}),
    "collectives by hand": ("jobs:ByHand", {}),
    "rank-dependent control flow": ("jobs:Flow", {}),
}


class Matrix(Gangs):
    """Gangs of these jobs; the run with a seat for each rank is made once."""

    def __init__(self) -> None:
        super().__init__(warm=("torch.distributed.fsdp",))
        self.spread = cache(self._spread)

    def of(self, job: str, ranks: int, **more: Any) -> list[JSON]:
        entry, params = JOBS[job]
        return self.right(entry, ranks=ranks, steps=STEPS, params=params, **more)

    def _spread(self, job: str, ranks: int) -> list[JSON]:
        return self.of(job, ranks, seats=ranks)


@pytest.fixture(scope="module")
def matrix() -> Iterator[Matrix]:
    host = Matrix()
    yield host
    host.close()


def at_random(ranks: int, seed: int) -> JSON:
    """Seats to begin with, and others before about half of the steps."""
    dice = random.Random(seed)
    steps = [step for step in range(2, STEPS + 1) if dice.random() < 0.6] or [3]
    resize = {step: dice.randint(1, ranks) for step in steps}
    return {"seats": dice.randint(1, ranks), "resize": resize}


@pytest.mark.parametrize(("job", "ranks"), in_rotation([*JOBS], RANKS))
def test_slots_that_change_at_random_change_no_bit(matrix: Matrix, job: str, ranks: int) -> None:
    found = matrix.of(job, ranks, **at_random(ranks, seed=ranks))
    assert bits(found) == bits(matrix.spread(job, ranks))


@pytest.mark.long
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("job", JOBS)
def test_any_number_of_slots_gives_the_same_bits(matrix: Matrix, job: str, ranks: int) -> None:
    ways: list[JSON] = [{"seats": seats} for seats in range(1, ranks)]
    ways += [at_random(ranks, seed) for seed in range(100, 103)]
    ways += [{**at_random(ranks, 103), "swap": True}, {**at_random(ranks, 104), "squash": False}]
    for way in ways:
        assert bits(matrix.of(job, ranks, **way)) == bits(matrix.spread(job, ranks)), way


@pytest.mark.parametrize("job", JOBS)
def test_two_ranks_train_to_the_bits_of_gloo(matrix: Matrix, job: str) -> None:
    """Two contributions have only one order."""
    assert bits(matrix.spread(job, 2)) == bits(matrix.of(job, 2, peers=True))


@pytest.mark.parametrize(
    "ranks", [3, *(pytest.param(n, marks=pytest.mark.long) for n in (4, 5, 8))]
)
@pytest.mark.parametrize("job", JOBS)
def test_more_ranks_differ_from_gloo_only_by_the_order_of_sums(
    matrix: Matrix, job: str, ranks: int
) -> None:
    theirs = matrix.of(job, ranks, peers=True)
    for ours, other in zip(matrix.spread(job, ranks), theirs, strict=True):
        assert _numbers(ours["losses"]) == pytest.approx(_numbers(other["losses"]), rel=1e-3)


def _numbers(told: Any) -> list[float]:
    if isinstance(told, dict):
        told = list(told.values())
    return [n for part in told for n in _numbers(part)] if isinstance(told, list) else [told]


@pytest.mark.parametrize("seats", [1, 2])
def test_sync_batch_norm_is_refused_as_torch_refuses_it_on_a_cpu(
    matrix: Matrix, seats: int
) -> None:
    errors = matrix.errors("jobs:SyncNorm", ranks=2, seats=seats, steps=1)
    assert all("SyncBatchNorm layers only work with GPU modules" in error for error in errors)
    peers = matrix.errors("jobs:SyncNorm", ranks=2, steps=1, peers=True)
    assert "SyncBatchNorm layers only work with GPU modules" in peers[0]
