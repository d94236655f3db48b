"""Blocks of a graph leave an accelerator and come back while their work is still queued."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.sim import orders
from workers.graph.spill import NoRoom, SpillBudget
from workers.hardware.accelerator import Accelerator

pytestmark = pytest.mark.sim

MB = 1 << 20
SIZE = MB // 4  # floats of a block


@pytest.fixture(params=orders.several(2), autouse=True)
def order(request: pytest.FixtureRequest) -> Iterator[None]:
    orders.choose(request.param)
    yield
    orders.choose()
    gc.collect()


def _block(number: int) -> torch.Tensor:
    """Return a block whose last work need not have run."""
    return torch.full((SIZE,), float(number), device="sim").mul_(2).add_(1)


def _room(blocks: int) -> SpillBudget:
    return SpillBudget(blocks * MB, 64 * MB, Accelerator("sim"))


def _is_aside(room: SpillBudget, block: torch.Tensor) -> bool:
    return room._is_aside(block.untyped_storage())


def test_spilled_block_frees_its_memory_and_comes_back_with_its_bytes() -> None:
    room, before = _room(3), torch.sim.memory_allocated()
    blocks = [_block(number) for number in range(3)]
    held = list(zip((30, 20, 10), blocks, strict=True))
    room.make([blocks[2]], held, MB)
    torch.sim.synchronize()
    assert torch.sim.memory_allocated() - before == 2 * MB
    assert [_is_aside(room, block) for block in blocks] == [True, False, False]
    fourth = _block(3)
    room.make([blocks[0]], [(10, blocks[0]), (20, fourth), (40, blocks[1]), (50, blocks[2])], 0)
    assert not _is_aside(room, blocks[0])
    assert torch.equal(blocks[0], torch.full((SIZE,), 1.0, device="sim"))
    assert fourth[0].item() == 7.0


def test_views_of_a_spilled_block_see_what_came_back() -> None:
    room, block, other = _room(2), _block(4), _block(5)
    view = block[10:20]
    room.make([other], [(20, block), (10, other)], MB)
    assert _is_aside(room, block)
    room.make([block], [(10, block), (20, other)], 0)
    assert view.tolist() == [9.0] * 10


def test_node_that_needs_more_than_the_budget_is_told() -> None:
    room, blocks = _room(2), [_block(number) for number in range(3)]
    with pytest.raises(NoRoom, match="it takes 3145728 bytes at once"):
        room.make(blocks, list(zip((1, 2, 3), blocks, strict=True)), 0)
