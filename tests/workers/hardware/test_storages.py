"""Storages that other code knows by address stay in place, whichever part of ours moves them."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
import torch

from workers.graph.spill import SpillBudget
from workers.hardware.accelerator import Accelerator
from workers.hardware.storages import (
    AT_ONCE,
    LAZILY,
    flat,
    follow_lending,
    may_leave,
    release_pages,
)
from workers.ranks.swap import RankOffload

MB = 2**20


def large() -> torch.Tensor:
    return torch.ones(MB)


KNOWN_BY_ADDRESS: dict[str, Callable[[torch.Tensor], object]] = {
    "viewed by numpy": lambda tensor: tensor.numpy(),
    "lent by DLPack": numpy.from_dlpack,
    "shared with processes": lambda tensor: tensor.share_memory_(),
}


@pytest.mark.parametrize("way", KNOWN_BY_ADDRESS)
def test_storage_known_by_its_address_may_not_leave(way: str) -> None:
    follow_lending()
    tensor = large()
    assert may_leave(tensor.untyped_storage())
    held = KNOWN_BY_ADDRESS[way](tensor)
    assert not may_leave(tensor.untyped_storage()), held


@pytest.mark.parametrize("way", KNOWN_BY_ADDRESS)
def test_rank_leaves_a_storage_known_by_its_address_in_place(way: str) -> None:
    offload, tensor, other = RankOffload(Accelerator("cpu")), large(), large()
    held = KNOWN_BY_ADDRESS[way](tensor)
    address = tensor.data_ptr()
    offload.has_looked = True
    offload.note([tensor, other])
    offload.leave([])
    assert other.untyped_storage().nbytes() == 0
    assert (tensor.data_ptr(), tensor.untyped_storage().nbytes()) == (address, 4 * MB)
    offload.enter()
    tensor[7] = 5
    assert numpy.asarray(held)[7] == 5
    assert torch.equal(other, large())


@pytest.mark.parametrize("way", KNOWN_BY_ADDRESS)
def test_graph_spills_no_block_known_by_its_address(way: str) -> None:
    follow_lending()
    budget, known, other = SpillBudget(6 * MB, 64 * MB, Accelerator("cpu")), large(), large()
    held = KNOWN_BY_ADDRESS[way](known)
    address = known.data_ptr()
    budget.make([], [(None, known), (None, other)], 4 * MB)
    assert budget.out_bytes == 4 * MB  # of the other one
    assert known.data_ptr() == address
    known[7] = 5
    assert numpy.asarray(held)[7] == 5


def test_freed_storage_leaves_no_mark_on_the_next_one_at_its_place() -> None:
    follow_lending()
    for _ in range(50):
        tensor = large()
        held = numpy.from_dlpack(tensor)
        assert not may_leave(tensor.untyped_storage())
        del tensor, held
        assert may_leave(large().untyped_storage())


@pytest.mark.parametrize("when", [LAZILY, AT_ONCE])
def test_released_pages_are_the_inner_ones_of_the_storage(when: int) -> None:
    """malloc keeps its own words before and after, and other storages lie there, too."""
    neighbours = [large() for _ in range(3)]
    release_pages(neighbours[1].untyped_storage(), when)
    assert flat(neighbours[1].untyped_storage()).numel() == 4 * MB
    assert torch.equal(neighbours[0], large())
    assert torch.equal(neighbours[2], large())
