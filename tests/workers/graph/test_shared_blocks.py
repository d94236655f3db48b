"""Blocks that pass between executors: mapped where they lie, and their land used again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from workers.capture.capture import Surroundings
from workers.graph.shared_blocks import _HEAD_BYTES, LARGE_BYTES, BlockTable
from workers.hardware.accelerator import Accelerator
from workers.ranks import turns
from workers.ranks.shared_memory import STORED_LAND_BYTES, Arena, close, make
from workers.ranks.turns import GangFailed, Turns

BLOCKS = 8
LARGE = LARGE_BYTES // 4


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    """Return the kind of device of both sides: the CPU, unless a test names another."""
    return getattr(request, "param", "cpu")


@pytest.fixture
def both(kind: str) -> Iterator[tuple[BlockTable, BlockTable]]:
    """The two sides of a table, here in one process."""
    # small: the garbage collector unmaps them late, and a process has room for 31 of full size
    handles = make(2, land_bytes=STORED_LAND_BYTES)
    turns.seat_all(Arena(handles), 2)
    around = Surroundings(code=Path("/nowhere"), scratch=Path("/nowhere"), ctx=None)
    sides = (Turns(Arena(handles), rank, apart=True) for rank in range(2))
    one, other = (BlockTable(side, BLOCKS, around, Accelerator(kind)) for side in sides)
    yield one, other
    close(handles)


TYPES = ("bool", "uint8", "int64", "uint16", "uint64", "float16", "bfloat16", "complex128")


on_sim = pytest.mark.parametrize(
    "kind", [pytest.param("sim", marks=pytest.mark.sim)], indirect=True
)
each_kind = pytest.mark.parametrize(
    "kind", ["cpu", pytest.param("sim", marks=pytest.mark.sim)], indirect=True
)
FORMS = (
    torch.arange(6.0).view(2, 3),
    torch.tensor(True),
    torch.empty(0, 5, dtype=torch.int16),
    torch.randn(LARGE),
    torch.randn(4, 4).T,
    torch.randn(2, 1, 1, 1, 3),
    torch.randn(3, dtype=torch.complex64).conj(),
    torch.randn(5).bfloat16(),
)


@pytest.mark.parametrize(
    "tensor", [*(torch.tensor([[0, 1, 2]]).to(getattr(torch, dtype)) for dtype in TYPES), *FORMS]
)
def test_tensor_arrives_unchanged(tensor: torch.Tensor, both: Any) -> None:
    one, other = both
    assert not other.is_there((3, 0))
    here = one.post(3, tensor, (1,))
    assert other.is_there((3, 0))
    there = other.take((3, 0))
    for seen in (here, there):
        assert (seen.dtype, seen.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(seen, tensor)


@on_sim
def test_tensors_of_an_accelerator_arrive_there_unchanged(both: Any) -> None:
    one, other = both
    given = [form.to("sim") for form in FORMS]
    for number, tensor in enumerate(given):
        one.post(number, tensor.clone(), (1,))  # whose last work need not have run
    for number, tensor in enumerate(given):
        seen = other.take((number, 0))
        assert (seen.dtype, seen.shape) == (tensor.dtype, tensor.shape)
        assert seen.device == tensor.device
        assert torch.equal(seen, tensor)


def test_block_written_by_another_version_is_refused(both: Any) -> None:
    one, other = both
    one.post(3, torch.arange(4.0), (1,))
    offset = other.words[other._entry((3, 0))]
    one.arena.write(offset + _HEAD_BYTES - 8, bytes(8))
    with pytest.raises(GangFailed, match="another version"):
        other.take((3, 0))


@each_kind
def test_other_object_arrives_with_its_shared_references(both: Any, kind: str) -> None:
    one, other = both
    model = torch.nn.Linear(3, 3).to(kind)
    one.post(0, {"model": model, "row": model.weight.detach()[1], "n": [1, "two"]}, (1,))
    there = other.take((0, 0))
    assert there["n"] == [1, "two"]
    assert torch.equal(there["model"].weight, model.weight)
    with torch.no_grad():
        there["model"].weight[1] += 1
    assert torch.equal(there["row"], model.weight[1] + 1)


def test_large_block_is_stored_once_and_not_copied_if_made_in_place(both: Any) -> None:
    one, other = both
    made = one.empty((LARGE,), torch.float32)
    made.fill_(7)
    here = one.post(0, made, (1,))
    assert here.data_ptr() == made.data_ptr()
    there = other.take((0, 0))
    made[0] = 8  # nobody does: it shows that there is one memory
    assert (here[0], there[0]) == (8, 8)


def test_memory_is_used_again_when_no_process_sees_it_any_more(both: Any) -> None:
    one, other = both
    one.post(0, torch.zeros(LARGE), (1,))
    first = one.posted[0].offset
    part = other.take((0, 0))[5:]  # somebody keeps a view, and the block itself is let go of
    other.drop((0, 0))
    one.drop((0, 0))
    other.reclaim()
    one.post(1, torch.ones(LARGE), (1,))
    assert one.posted[1].offset != first
    assert torch.equal(part, torch.zeros(LARGE - 5))
    del part
    other.reclaim()
    one.post(2, torch.ones(LARGE), (1,))
    assert one.posted[2].offset == first


def test_finished_small_blocks_make_room_for_others(both: Any) -> None:
    one, other = both
    kept = []  # views that somebody holds for ever
    for n in range(BLOCKS):
        one.post(n, torch.full((3,), float(n)), (1,))
        if n % 4 == 0:
            kept.append(other.take((n, 0))[1:])
        else:
            assert other.take((n, 0)).tolist() == [n] * 3
        other.drop((n, 0))
        one.drop((n, 0))
        assert len(one.dropping) + len(other.dropping) <= 2 * len(kept) + 2
    assert [view.tolist() for view in kept] == [[0.0] * 2, [4.0] * 2]
    assert len({posted.offset for posted in one.posted.values()}) == len(one.posted)


def test_requested_but_unused_memory_is_free_again(both: Any) -> None:
    one, _ = both
    first = one.empty((LARGE,), torch.float32).data_ptr()
    one.reclaim()
    assert one.empty((LARGE,), torch.float32).data_ptr() == first


def test_executor_about_to_sleep_is_woken_or_sees_the_block(both: Any) -> None:
    """Posted between two looks of whoever waits, before it was said that it sleeps."""
    one, other = both
    other.turns.words[other.turns.me + turns.STATE] = turns.RankState.RUNNING
    looked = []

    def is_there() -> bool:
        found = other.is_there((0, 1 - other.me))
        if not looked:
            looked.append(found)
            one.post(0, torch.ones(3), (1,))
        return found

    other.turns.wait(
        turns.Wait.BLOCK, number=other._entry((0, 0)), until=is_there, text="it", timeout_s=0.0
    )
    assert looked == [False]
    assert other.take((0, 0)).tolist() == [1.0] * 3


def test_lock_is_taken_only_for_waiting_executors(
    both: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = both
    locked = []
    board = one.turns.board
    monkeypatch.setattr(one.turns, "board", lambda: locked.append(1) or board())
    one.post(0, torch.ones(3), (1,))
    assert not locked
    words, me = other.turns.words, other.turns.me
    words[me + turns.STATE], words[me + turns.KIND] = turns.RankState.WAITING, turns.Wait.BLOCK
    words[me + turns.NUMBER] = other._entry((1, 0))
    one.post(1, torch.ones(3), (1,))
    assert locked
    assert words[me + turns.STATE] == turns.RankState.RUNNING


def test_executor_that_was_not_woken_finds_the_block_by_itself(both: Any) -> None:
    """It only takes longer."""
    one, other = both
    other.turns.join()
    maker = threading.Timer(0.1, lambda: one.words.__setitem__(one._entry((0, 0)), 1))
    maker.start()
    other.wait((0, 0), lambda: other.is_there((0, 0)), "it")
    maker.join()
    assert other.turns.words[other.turns.me + turns.STATE] == turns.RankState.RUNNING


def test_first_end_in_the_order_of_nodes_counts(both: Any) -> None:
    one, other = both
    assert one.early is None
    one.end_early(5)
    other.end_early(3)
    one.end_early(4)
    assert one.early == other.early == (3, 1)


def test_block_made_in_place_stays_while_another_value_is_a_view_of_it(both: Any) -> None:
    one, other = both
    made = one.empty((LARGE,), torch.float32).fill_(7)
    part = made[:10]  # as of a node with two outputs
    one.post(0, made, (1,))
    first = one.posted[0].offset
    del made
    other.take((0, 0))
    for side in (other, one):
        side.drop((0, 0))
        side.reclaim()
    one.post(1, torch.zeros(LARGE), (1,))
    assert one.posted[1].offset != first
    assert part.tolist() == [7.0] * 10


def test_part_of_a_block_made_in_place_is_copied_and_the_rest_freed(both: Any) -> None:
    one, other = both
    made = one.empty((LARGE,), torch.float32).fill_(7)
    address = made.data_ptr()
    one.post(0, made[:10], (1,))
    assert other.take((0, 0)).tolist() == [7.0] * 10
    del made
    one.reclaim()
    assert one.empty((LARGE,), torch.float32).data_ptr() == address
