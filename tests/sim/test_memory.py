"""Allocates on the simulated accelerator: segments, budget, and storages that come and go."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

pytestmark = pytest.mark.sim

KB, MB = 2**10, 2**20


@pytest.fixture(autouse=True)
def empty_device() -> Iterator[None]:
    """Start with nothing cached and no room in a segment, and leave nothing allocated behind.

    An earlier test of this process may have left a small tensor, which keeps its whole segment.
    """
    gc.collect()
    gc.freeze()  # what is left is no garbage, and the collection at the end need not scan it
    torch.sim.empty_cache()
    filling, reserved = list[torch.Tensor](), torch.sim.memory_reserved()
    while torch.sim.memory_reserved() == reserved:
        filling.append(_bytes(1))
    filling.pop()
    torch.sim.empty_cache()
    before = torch.sim.memory_allocated()
    yield
    gc.collect()
    torch.sim.synchronize()
    assert torch.sim.memory_allocated() == before


def _bytes(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device="sim")


@pytest.mark.parametrize(
    ("asked", "reserved"),
    [(1, 2 * MB), (MB, 2 * MB), (MB + 1, 20 * MB), (10 * MB, 10 * MB), (21 * MB - 1, 22 * MB)],
)
def test_request_reserves_a_segment_as_cuda_does(asked: int, reserved: int) -> None:
    before = torch.sim.memory_reserved()
    kept = _bytes(asked)
    assert torch.sim.memory_reserved() - before == reserved
    del kept
    torch.sim.empty_cache()
    assert torch.sim.memory_reserved() == before


def test_small_block_that_stays_keeps_its_whole_segment() -> None:
    before = torch.sim.memory_reserved()
    blocks = [_bytes(512 * KB) for _ in range(4)]
    assert torch.sim.memory_reserved() - before == 2 * MB
    kept = blocks.pop()
    blocks.clear()
    torch.sim.empty_cache()
    assert torch.sim.memory_reserved() - before == 2 * MB
    del kept


def test_freed_neighbours_join_to_one_block() -> None:
    before = torch.sim.memory_reserved()
    blocks = [_bytes(5 * MB) for _ in range(4)]
    assert torch.sim.memory_reserved() - before == 20 * MB
    del blocks[1:3]
    joined = _bytes(9 * MB)
    assert torch.sim.memory_reserved() - before == 20 * MB
    del joined


def test_freed_block_is_used_again_at_once_by_the_same_stream() -> None:
    first = _bytes(3 * KB)
    address = first.data_ptr()
    del first
    again = _bytes(3 * KB)
    assert again.data_ptr() == address


def test_memory_not_written_holds_poison(mode: str) -> None:
    torch.full((700,), 7, dtype=torch.uint8, device="sim")
    assert set(_bytes(700).cpu().tolist()) == {0xDB}


def test_more_than_there_is_raises_out_of_memory_and_the_rest_goes_on() -> None:
    free, total = torch.accelerator.get_memory_info()
    assert free <= total
    with pytest.raises(torch.OutOfMemoryError, match="sim out of memory"):
        _bytes(free + 2 * MB)
    assert _bytes(MB).numel() == MB
    assert torch.sim.memory_stats()["num_ooms"] >= 1


@pytest.fixture
def cap() -> Iterator[int]:
    """Let the process hold a sixty-fourth of the memory, which takes little time to fill."""
    _, total = torch.accelerator.get_memory_info()
    torch.sim.set_per_process_memory_fraction(1 / 64)
    yield total // 64
    torch.sim.set_per_process_memory_fraction(1.0)


def test_cache_is_given_back_before_out_of_memory_is_raised(cap: int) -> None:
    half = cap * 5 // 8 // MB * MB
    del_me = _bytes(half)
    del del_me
    assert torch.sim.memory_reserved() >= half
    other = _bytes(half + 2 * MB)  # no cached block is as large, and there is no room beside it
    del other


def test_cap_of_the_process_bounds_what_it_holds(cap: int) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        _bytes(2 * cap)
    torch.sim.set_per_process_memory_fraction(1.0)
    kept = _bytes(2 * cap)
    del kept


def test_storage_leaves_and_comes_back_under_its_views(mode: str) -> None:
    tensor = torch.arange(1000, dtype=torch.float32, device="sim")
    view, storage = tensor[10:20], tensor.untyped_storage()
    kept, size = tensor.cpu(), storage.nbytes()
    storage.resize_(0)
    with pytest.raises(RuntimeError, match="a tensor reaches over 80 bytes of a storage of 0"):
        view.sum().item()
    storage.resize_(size)
    tensor.copy_(kept)
    assert torch.equal(view.cpu(), kept[10:20])


def test_resize_of_a_storage_keeps_what_fits(mode: str) -> None:
    tensor = torch.arange(8, dtype=torch.uint8, device="sim")
    tensor.untyped_storage().resize_(4096)
    tensor.resize_(2, 2048)
    assert tensor.flatten()[:8].tolist() == list(range(8))


def test_set_points_a_tensor_at_another_storage(mode: str) -> None:
    source, tensor = torch.arange(6.0, device="sim"), torch.empty(0, device="sim")
    tensor.set_(source.untyped_storage(), 2, (2, 2))
    source.add_(10)
    assert tensor.tolist() == [[12.0, 13.0], [14.0, 15.0]]
    tensor.set_()
    assert tensor.numel() == 0


def test_swapped_tensors_change_places(mode: str) -> None:
    a, b = torch.ones(3, device="sim"), torch.zeros(5, device="sim")
    torch.utils.swap_tensors(a, b)
    assert (a.tolist(), b.tolist()) == ([0.0] * 5, [1.0] * 3)


def test_data_moves_between_host_and_device_under_the_same_tensor(mode: str) -> None:
    tensor = torch.nn.Parameter(torch.arange(4.0))
    tensor.data = tensor.data.to("sim")
    assert tensor.device.type == "sim"
    tensor.data = tensor.data.cpu()
    assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_out_argument_that_is_empty_gets_the_size_of_the_result(mode: str) -> None:
    out = torch.empty(0, device="sim")
    torch.add(torch.ones(3, device="sim"), 1, out=out)
    assert out.tolist() == [2.0] * 3


def test_numbers_of_the_allocator_return_to_zero() -> None:
    stats = torch.accelerator.memory_stats()
    before = {name: stats[name] for name in stats if name.endswith(".current")}
    kept = [_bytes(size) for size in (1, 600, MB, 3 * MB, 30 * MB)]
    del kept
    torch.sim.empty_cache()
    stats = torch.accelerator.memory_stats()
    assert {name: stats[name] for name in before} == before
