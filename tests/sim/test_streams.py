"""Orders work on streams: what a program waits for is right in every mode, what it forgets is not.

The tests of forgotten waits run in mode `lazy`, where the fault shows every time.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.sim import orders

pytestmark = pytest.mark.sim

SIZE = 1000
POISON = 0xDB


@pytest.fixture(params=orders.several(5))
def order(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test in every order in which streams may run."""
    orders.choose(request.param)
    yield request.param
    orders.choose()


def _sevens() -> torch.Tensor:
    return torch.full((SIZE,), 7, dtype=torch.uint8, device="sim")


def _pinned(value: int = 0) -> torch.Tensor:
    return torch.full((SIZE,), value, dtype=torch.uint8).pin_memory()


def test_waiting_stream_sees_what_was_written_before(order: str) -> None:
    side, tensor = torch.Stream("sim"), _sevens()
    side.wait_stream(torch.sim.current_stream())
    with side:
        copied = tensor.clone()
    side.synchronize()
    with side:
        assert copied.tolist() == [7] * SIZE


def test_event_orders_two_streams(order: str) -> None:
    side, written = torch.Stream("sim"), torch.Event("sim")
    with side:
        tensor = _sevens()
        written.record(side)
    torch.sim.current_stream().wait_event(written)
    tensor.record_stream(torch.sim.current_stream())
    assert (tensor + 1).tolist() == [8] * SIZE


def test_forgotten_wait_for_a_stream_gives_wrong_bytes(lazy: None) -> None:
    side, tensor = torch.Stream("sim"), _sevens()
    torch.sim.synchronize()
    tensor.add_(1)
    with side:
        copied = tensor.clone()  # does not wait for the addition
        found = copied.tolist()
    assert found == [7] * SIZE


def test_forgotten_wait_of_the_host_gives_wrong_bytes(lazy: None) -> None:
    tensor, host = _sevens(), _pinned()
    host.copy_(tensor, non_blocking=True)
    assert host.tolist() == [0] * SIZE
    torch.sim.synchronize()
    assert host.tolist() == [7] * SIZE


def test_host_memory_changed_too_early_gives_wrong_bytes(lazy: None) -> None:
    host, tensor = _pinned(7), torch.empty(SIZE, dtype=torch.uint8, device="sim")
    tensor.copy_(host, non_blocking=True)
    host.fill_(9)
    assert tensor.tolist() == [9] * SIZE


def test_forgotten_record_stream_gives_poison(lazy: None) -> None:
    assert _read_after_free(recorded=False) == [POISON] * SIZE


def test_block_that_is_used_again_after_a_wait_need_not_be_recorded(lazy: None) -> None:
    """FSDP2 lets memory go early, and waits before its stream uses the memory again."""
    side, host, tensor = torch.Stream("sim"), _pinned(), _sevens()
    side.wait_stream(torch.sim.current_stream())
    with side:
        host.copy_(tensor, non_blocking=True)
    del tensor
    torch.sim.current_stream().wait_stream(side)
    torch.empty(SIZE, dtype=torch.uint8, device="sim")
    torch.sim.current_stream().synchronize()
    assert host.tolist() == [7] * SIZE


def test_recorded_stream_keeps_a_freed_block(order: str) -> None:
    assert _read_after_free(recorded=True) == [7] * SIZE


def _read_after_free(*, recorded: bool) -> list[int]:
    side, host, tensor = torch.Stream("sim"), _pinned(), _sevens()
    side.wait_stream(torch.sim.current_stream())
    with side:
        host.copy_(tensor, non_blocking=True)
    if recorded:
        tensor.record_stream(side)
    del tensor
    torch.empty(SIZE, dtype=torch.uint8, device="sim")  # may get the block
    torch.sim.current_stream().synchronize()
    side.synchronize()
    return host.tolist()


@pytest.mark.parametrize("direction", ["to the device", "from the device"])
def test_pageable_memory_makes_the_host_wait(lazy: None, direction: str) -> None:
    if direction == "from the device":
        host = torch.zeros(SIZE, dtype=torch.uint8)
        host.copy_(_sevens(), non_blocking=True)
        assert host.tolist() == [7] * SIZE
    else:
        host = torch.full((SIZE,), 7, dtype=torch.uint8)
        tensor = host.to("sim", non_blocking=True)
        host.fill_(9)
        assert tensor.tolist() == [7] * SIZE


def test_conversion_makes_the_host_wait(lazy: None) -> None:
    host = torch.zeros(SIZE).pin_memory()
    host.copy_(_sevens(), non_blocking=True)
    assert host.tolist() == [7.0] * SIZE


def test_pinned_block_stays_until_its_copy_has_run(lazy: None) -> None:
    tensor = torch.empty(SIZE, dtype=torch.uint8, device="sim")
    tensor.copy_(_pinned(7), non_blocking=True)
    others = [_pinned(9) for _ in range(8)]  # would take the freed block's place
    assert tensor.tolist() == [7] * SIZE
    assert others


def test_registered_memory_counts_as_pinned(lazy: None) -> None:
    memory = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    host = torch.frombuffer(memory, dtype=torch.uint8, count=SIZE)
    assert not host.is_pinned()
    torch.sim.host_register(address, len(memory))
    assert host.is_pinned()
    host.copy_(_sevens(), non_blocking=True)
    assert host.tolist() == [0] * SIZE
    torch.sim.host_unregister(address)  # waits for what may still reach the memory
    assert host.tolist() == [7] * SIZE
    with pytest.raises(RuntimeError, match="not registered"):
        torch.sim.host_unregister(address)


def test_event_tells_time_and_whether_it_was_reached(lazy: None) -> None:
    begin, end = torch.Event("sim", enable_timing=True), torch.Event("sim", enable_timing=True)
    begin.record()
    torch.randn(50, 50, device="sim") @ torch.randn(50, 50, device="sim")
    end.record()
    assert not end.query()
    with pytest.raises(RuntimeError, match="must be completed"):
        begin.elapsed_time(end)
    end.synchronize()
    assert end.query()
    assert begin.elapsed_time(end) > 0


def test_host_that_asks_again_and_again_sees_an_event_reached(lazy: None) -> None:
    event = torch.Event("sim")
    _sevens().add_(1).mul_(2)
    event.record()
    asked = 0
    while not event.query():
        asked += 1
        assert asked < 100
    assert asked > 0


def test_gradients_on_a_side_stream_are_right(order: str) -> None:
    side = torch.Stream("sim")
    weight = torch.ones(8, device="sim", requires_grad=True)
    side.wait_stream(torch.sim.current_stream())
    with side:
        (weight * 3).sum().backward()
    torch.sim.current_stream().wait_stream(side)
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0] * 8


def test_failing_kernel_tells_whoever_waits(lazy: None) -> None:
    tensor = torch.zeros(4, device="sim")
    tensor.index_fill_(0, torch.tensor([9], device="sim"), 1.0)
    with pytest.raises(IndexError):
        torch.sim.synchronize()
    assert tensor.tolist() == [0.0] * 4


@pytest.mark.parametrize("workers", [0, 1])
def test_data_loader_pins_what_goes_to_the_device(lazy: None, workers: int) -> None:
    loader = DataLoader(
        TensorDataset(torch.arange(12.0)), batch_size=4, pin_memory=True, num_workers=workers
    )
    batches = [(batch, batch.to("sim", non_blocking=True)) for (batch,) in loader]
    assert all(batch.is_pinned() for batch, _ in batches)
    assert torch.cat([there for _, there in batches]).tolist() == list(range(12))
