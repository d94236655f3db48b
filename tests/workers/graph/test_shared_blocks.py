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
from workers.ranks.shared_memory import Ground, close, make
from workers.ranks.turns import GangFailed, Turns

BLOCKS = 8
LARGE = LARGE_BYTES // 4


@pytest.fixture
def both() -> Iterator[tuple[BlockTable, BlockTable]]:
    """The two sides of a table, here in one process."""
    handles = make(2)
    turns.seat_all(Ground(handles), 2)
    around = Surroundings(code=Path("/nowhere"), scratch=Path("/nowhere"), ctx=None)
    sides = (Turns(Ground(handles), rank, apart=True) for rank in range(2))
    one, other = (BlockTable(side, BLOCKS, around, Accelerator("cpu")) for side in sides)
    yield one, other
    close(handles)


KINDS = ("bool", "uint8", "int64", "uint16", "uint64", "float16", "bfloat16", "complex128")


@pytest.mark.parametrize(
    "tensor",
    [
        *(torch.tensor([[0, 1, 2]]).to(getattr(torch, kind)) for kind in KINDS),
        torch.arange(6.0).view(2, 3),
        torch.tensor(True),
        torch.empty(0, 5, dtype=torch.int16),
        torch.randn(LARGE),
        torch.randn(4, 4).T,
        torch.randn(2, 1, 1, 1, 3),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(5).bfloat16(),
    ],
)
def test_a_tensor_arrives_as_it_was(tensor: torch.Tensor, both: Any) -> None:
    one, other = both
    assert not other.is_there((3, 0))
    here = one.post(3, tensor, (1,))
    assert other.is_there((3, 0))
    there = other.take((3, 0))
    for seen in (here, there):
        assert (seen.dtype, seen.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(seen, tensor)


def test_a_block_that_another_version_wrote_is_not_guessed_at(both: Any) -> None:
    one, other = both
    one.post(3, torch.arange(4.0), (1,))
    offset = other.words[other._entry((3, 0))]
    one.ground.write(offset + _HEAD_BYTES - 8, bytes(8))
    with pytest.raises(GangFailed, match="another version"):
        other.take((3, 0))


def test_what_is_no_tensor_arrives_with_its_ties(both: Any) -> None:
    one, other = both
    model = torch.nn.Linear(3, 3)
    one.post(0, {"model": model, "row": model.weight.detach()[1], "n": [1, "two"]}, (1,))
    there = other.take((0, 0))
    assert there["n"] == [1, "two"]
    assert torch.equal(there["model"].weight, model.weight)
    with torch.no_grad():
        there["model"].weight[1] += 1
    assert torch.equal(there["row"], model.weight[1] + 1)


def test_a_large_block_lies_once_and_what_was_made_there_is_not_copied(both: Any) -> None:
    one, other = both
    made = one.empty((LARGE,), torch.float32)
    made.fill_(7)
    here = one.post(0, made, (1,))
    assert here.data_ptr() == made.data_ptr()
    there = other.take((0, 0))
    made[0] = 8  # nobody does: it shows that there is one memory
    assert (here[0], there[0]) == (8, 8)


def test_land_is_used_again_when_nobody_sees_it_any_more(both: Any) -> None:
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


def test_small_blocks_that_are_done_with_make_room_for_others_as_they_go(both: Any) -> None:
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


def test_memory_that_was_asked_for_and_not_used_is_free_again(both: Any) -> None:
    one, _ = both
    first = one.empty((LARGE,), torch.float32).data_ptr()
    one.reclaim()
    assert one.empty((LARGE,), torch.float32).data_ptr() == first


def test_who_is_about_to_sleep_is_seen_or_sees_the_block(both: Any) -> None:
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


def test_the_lock_is_taken_only_for_who_waits(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_who_was_not_told_finds_it_by_itself(both: Any) -> None:
    """It only takes longer."""
    one, other = both
    other.turns.join()
    maker = threading.Timer(0.1, lambda: one.words.__setitem__(one._entry((0, 0)), 1))
    maker.start()
    other.wait((0, 0), lambda: other.is_there((0, 0)), "it")
    maker.join()
    assert other.turns.words[other.turns.me + turns.STATE] == turns.RankState.RUNNING


def test_the_first_end_in_the_order_counts(both: Any) -> None:
    one, other = both
    assert one.early is None
    one.end_early(5)
    other.end_early(3)
    one.end_early(4)
    assert one.early == other.early == (3, 1)


def test_what_was_made_there_stays_while_another_value_is_a_view_of_it(both: Any) -> None:
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


def test_a_part_of_what_was_made_there_is_copied_and_the_rest_is_free_again(both: Any) -> None:
    one, other = both
    made = one.empty((LARGE,), torch.float32).fill_(7)
    address = made.data_ptr()
    one.post(0, made[:10], (1,))
    assert other.take((0, 0)).tolist() == [7.0] * 10
    del made
    one.reclaim()
    assert one.empty((LARGE,), torch.float32).data_ptr() == address
