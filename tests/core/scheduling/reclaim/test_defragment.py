"""Who moves so that one who needs a larger device can be launched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from app.core.model.snapshot import Snapshot
from app.core.scheduling.board import Board
from app.core.scheduling.cycle import cycle
from app.core.scheduling.reclaim.defragment import moves
from tests.core.pictures import NOW_S, island

GB = 2**30
BIG = {"memory_bytes": 6 * GB}


def sized(drawn: Snapshot, *gigabytes: int) -> Snapshot:
    """The devices d0, d1, ... with so much memory each."""
    devices = {
        f"d{n}": replace(drawn.devices[f"d{n}"], memory_bytes=size * GB)
        for n, size in enumerate(gigabytes)
    }
    return replace(drawn, devices=devices)


def wished(cells: str, queue: str, *gigabytes: int, **tasks: dict[str, Any]) -> list[Any]:
    """The moves after a round; who holds a device could be moved, and has used least."""
    holders = {cell.strip("'"): {"movable": True} for cell in cells.split() if cell[0].isalpha()}
    changed = {name: {**holders.get(name, {}), **tasks.get(name, {})} for name in holders | tasks}
    drawn = island(cells, queue=queue, tasks=changed, used={cell: 100 for cell in queue.split()})
    board = Board.of(sized(drawn, *gigabytes), now_s=NOW_S)
    cycle(board)
    return moves(board)


def test_small_task_leaves_a_large_device_for_a_task_that_needs_it() -> None:
    assert wished("a .", "b", 8, 4, b=BIG) == [("a", "d1")]


def test_task_that_fits_nowhere_else_is_not_moved() -> None:
    assert wished("a .", "b", 8, 4, a={"memory_bytes": 5 * GB}, b=BIG) == []


def test_no_task_is_moved_while_a_large_device_is_free() -> None:
    assert wished("a . .", "b", 8, 4, 8, b=BIG) == []


def test_task_that_cannot_move_or_is_in_its_first_slice_stays() -> None:
    assert wished("a .", "b", 8, 4, a={"movable": False}, b=BIG) == []
    assert wished("a' .", "b", 8, 4, b=BIG) == []


def test_smallest_sufficient_task_moves_to_the_smallest_sufficient_device() -> None:
    sizes = {"a": {"memory_bytes": 3 * GB}, "c": {"memory_bytes": 1 * GB}}
    assert wished("a c . .", "b", 8, 8, 4, 2, b=BIG, **sizes) == [("c", "d3")]


def test_all_tasks_in_the_way_of_a_gang_move_or_none() -> None:
    gang = {**BIG, "width": 2}
    assert wished("a c . .", "b", 8, 8, 4, 4, b=gang) == [("a", "d2"), ("c", "d3")]
    assert wished("a c . .", "b", 8, 8, 4, 4, b=gang, c={"movable": False}) == []
    assert wished("a . .", "b", 8, 8, 4, b=gang) == [("a", "d2")]


def test_only_one_move_at_a_time_for_each_kind() -> None:
    moving = {"c": {"moves_to": "d2"}}
    assert wished("a c . .", "b", 8, 8, 4, 4, b=BIG, **moving) == []


def test_task_kept_out_by_a_limit_makes_no_task_move() -> None:
    drawn = island("a .", queue="b", tasks={"a": {"movable": True}, "b": BIG}, used={"b": 100})
    tenants = {**drawn.tenants, "b": replace(drawn.tenants["b"], limit={"cpu": 0})}
    board = Board.of(sized(replace(drawn, tenants=tenants), 8, 4), now_s=NOW_S)
    cycle(board)
    assert moves(board) == []
