"""Tasks move so that a task that can use only their devices is launched."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from app.core.model.lifecycle import Move, State
from app.core.model.snapshot import BoardTask, Policy, Snapshot, changed
from app.core.scheduling.board import Board
from app.core.scheduling.cycle import cycle
from app.core.scheduling.reclaim.defragment import moves
from tests.core.pictures import NOW_S, island
from tests.thoroughness import over_seeds

GB = 2**30
BIG = {"memory_bytes": 6 * GB}
PART = "%100"  # the choice of a tenth of a device


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


def test_task_leaves_the_host_where_a_gang_needs_as_many_devices_as_elsewhere() -> None:
    """On h a task that cannot move holds one device, and either of the others would do."""
    gang = {"width": 4, "choice": "#2", "across_hosts": True}
    for cells in ("c a . . . .", "a c . . . ."):
        holders = {"a": {"movable": True}, "c": {"movable": False}}
        used = {"b": 100.0}
        drawn = island(cells, queue="b", tasks={**holders, "b": gang}, used=used)
        hosts = dict(zip(drawn.devices, "hhhggg", strict=True))
        devices = {id: replace(one, host=hosts[id]) for id, one in drawn.devices.items()}
        board = Board.of(replace(drawn, devices=devices), now_s=NOW_S)
        assert cycle(board).decisions == ()
        assert moves(board) == [("a", "d5")]  # the gang takes d3 and d4


def test_only_one_move_at_a_time_for_each_kind() -> None:
    moving = {"c": {"moves_to": "d2"}}
    assert wished("a c . .", "b", 8, 8, 4, 4, b=BIG, **moving) == []


def test_task_kept_out_by_a_limit_makes_no_task_move() -> None:
    drawn = island("a .", queue="b", tasks={"a": {"movable": True}, "b": BIG}, used={"b": 100})
    tenants = {**drawn.tenants, "b": replace(drawn.tenants["b"], limit={"cpu": 0})}
    board = Board.of(sized(replace(drawn, tenants=tenants), 8, 4), now_s=NOW_S)
    cycle(board)
    assert moves(board) == []


# --- tasks that can go on on one device only ------------------------------------------------------

FROZEN: dict[str, Any] = {"epoch": 1, "had_us": 10, "image_on": "d0", "restarts": True}


def helped(cells: str, queue: str, **tasks: dict[str, Any]) -> list[Any]:
    """The moves after a round on equal devices; the waiting tasks have used most, so that none of
    the others gives way to them.
    """
    changed = {name: {"movable": True} | tasks.get(name, {}) for name in _names(cells)}
    drawn = island(cells, queue=queue, tasks=changed | tasks, used={c: 100 for c in queue.split()})
    board = Board.of(drawn, now_s=NOW_S)
    cycle(board)
    return moves(board)


def _names(cells: str) -> list[str]:
    return [cell.strip("'") for cell in cells.split() if cell[0].isalpha()]


def test_job_leaves_the_device_of_a_frozen_command_for_a_free_one() -> None:
    assert helped("a .", "b", b=FROZEN) == [("a", "d1")]


def test_job_leaves_the_device_of_an_image_that_is_not_durable_yet() -> None:
    here = {"epoch": 1, "had_us": 10, "image_on": "d0"}
    assert helped("a .", "b", b={**here, "saved": False}) == [("a", "d1")]
    assert helped("a .", "b", b=here) == []  # it was launched on d1


def test_command_that_would_begin_again_elsewhere_is_not_moved() -> None:
    assert helped("a .", "b", a={"movable": False, "restarts": True}, b=FROZEN) == []


def test_holder_in_its_first_slice_or_under_way_stays() -> None:
    assert helped("a' .", "b", b=FROZEN) == []
    assert helped("a .", "b", a={"cancel_asked": True}, b=FROZEN) == []


def test_holder_does_not_move_to_a_device_where_another_task_is_frozen() -> None:
    limited = island(
        "a .",
        queue="b c",
        tasks={"a": {"movable": True}, "b": FROZEN, "c": {**FROZEN, "image_on": "d1"}},
        used={"b": 100, "c": 100},
    )
    shut = {**limited.tenants, "c": replace(limited.tenants["c"], limit={"cpu": 0})}
    board = Board.of(replace(limited, tenants=shut), now_s=NOW_S)
    cycle(board)
    assert moves(board) == []


def test_second_frozen_command_is_helped_if_the_first_cannot_be() -> None:
    stuck = {"movable": False}
    assert helped("a c .", "b e", a=stuck, b=FROZEN, e={**FROZEN, "image_on": "d1"}) == [
        ("c", "d2")
    ]


def test_all_holders_of_the_devices_of_a_frozen_gang_move_or_none() -> None:
    gang = {**FROZEN, "width": 2, "image_with": ("d1",)}
    assert helped("a c . .", "b", b=gang) == [("a", "d2"), ("c", "d3")]
    assert helped("a c . .", "b", b=gang, c={"movable": False}) == []


def test_fractions_leave_the_device_that_a_frozen_whole_task_needs() -> None:
    part = {"choice": PART, "movable": True}
    assert helped("a . .", "b", a=part, b=FROZEN) == [("a", "d1")]


def test_task_on_another_host_leaves_room_for_a_gang_of_one_host() -> None:
    drawn = island(
        "a . . c",
        queue="b",
        tasks={
            "a": {"movable": True},
            "c": {"movable": False},
            "b": {"width": 2, "one_host": True},
        },
        used={"b": 100},
    )
    hosts = {"d0": "h0", "d1": "h0", "d2": "h1", "d3": "h1"}
    devices = {id: replace(device, host=hosts[id]) for id, device in drawn.devices.items()}
    board = Board.of(replace(drawn, devices=devices), now_s=NOW_S)
    cycle(board)
    assert moves(board) == [("a", "d2")]


def test_nothing_moves_to_devices_that_are_kept_for_a_gang() -> None:
    drawn = island(
        "a' . .",
        queue="b g",
        tasks={"a": {"movable": True}, "b": FROZEN, "g": {"width": 3, "tier": "basic"}},
        used={"b": 100, "a": 50},
        policy=Policy(half_life_s=0.0, slice_min_s=20.0, slice_max_s=60.0),
    )
    board = Board.of(drawn, now_s=NOW_S)
    plan = cycle(board)
    assert not plan.decisions
    assert board.memory.kept == {"cpu"}
    board.at(NOW_S + 25)
    assert moves(board) == []


# --- where tasks start ----------------------------------------------------------------------------


def launched(
    cells: str, queue: str, limited: str, **tasks: dict[str, Any]
) -> dict[str, str | None]:
    """The launches by task; a tenant of `limited` may hold nothing, so its task waits."""
    drawn = island(cells, queue=queue, tasks=tasks)
    tenants = {
        id: replace(tenant, limit={"cpu": 0} if id in limited else {})
        for id, tenant in drawn.tenants.items()
    }
    plan = cycle(Board.of(replace(drawn, tenants=tenants), now_s=NOW_S))
    return {one.task: one.device for one in plan.decisions if one.move == Move.Launch}


def test_task_does_not_start_where_another_is_frozen_while_a_device_is_free() -> None:
    assert launched(". .", "b c", "b", b=FROZEN) == {"c": "d1"}
    assert launched(".", "b c", "b", b=FROZEN) == {"c": "d0"}


def test_task_with_a_durable_image_does_not_go_back_to_where_another_is_frozen() -> None:
    image = {"epoch": 1, "had_us": 10, "image_on": "d0"}
    assert launched(". .", "b c", "b", b=FROZEN, c=image) == {"c": "d1"}
    assert launched(". .", "c", "", c=image) == {"c": "d0"}


def test_fraction_does_not_go_beside_a_fraction_where_a_whole_task_is_frozen() -> None:
    part = {"choice": PART}
    assert launched("a .", "b c", "b", a=part, b=FROZEN, c=part) == {"c": "d1"}
    assert launched("a .", "c", "", a=part, c=part) == {"c": "d0"}


def test_task_that_can_go_on_elsewhere_gives_way_before_one_that_begins_again() -> None:
    bound = {"restarts": True, "started_s": NOW_S - 50}
    drawn = island("a a", queue="b", tasks={"a.2": bound}, used={"a": 1000})
    plan = cycle(Board.of(drawn, now_s=NOW_S))
    assert [one.task for one in plan.decisions if one.move == Move.Pause] == ["a"]
    drawn = island("a a", queue="b", tasks={"a": {"restarts": True}}, used={"a": 1000})
    plan = cycle(Board.of(drawn, now_s=NOW_S))
    assert [one.task for one in plan.decisions if one.move == Move.Pause] == ["a.2"]


# --- random islands -------------------------------------------------------------------------------

NO_SLICES = Policy(half_life_s=0.0, slice_min_s=0.0, slice_max_s=0.0, fresh_s=0.0)


@over_seeds(range(300))
def test_moves_make_no_cycle_and_leave_no_device_idle_beside_a_frozen_task(seed: int) -> None:
    """Slices have no length, so that a cycle would show at one instant."""
    dice = random.Random(seed)
    drawn, states = _random_island(dice), set[tuple[Any, ...]]()
    while True:
        board = Board.of(drawn, now_s=NOW_S)
        free = {id for id, leaving in board.pools["cpu"].free.items() if not leaving}
        plan = cycle(board)
        moved = moves(board)
        assert not moved or {to for _, to in moved} <= free
        assert all(board.stays[id].task.movable and board.stays[id].ripe for id, _ in moved)
        if not plan.decisions and not moved:
            break
        state = tuple(sorted((t.id, t.state, t.seats) for t in drawn.tasks.values()))
        assert state not in states, "a state came back"
        states.add(state)
        drawn = replace(drawn, tasks=_obeyed(board, dict(moved)))
    if not board.memory.kept:
        assert not list(_idle_beside(board))


def _random_island(dice: random.Random) -> Snapshot:
    cells = [dice.choice([*"abc", "."]) for _ in range(dice.randint(2, 6))]
    queue = [dice.choice("defg") for _ in range(dice.randint(1, 4))]
    drawn = island(" ".join(cells), queue=" ".join(queue), policy=NO_SLICES)
    tasks = {task.id: _random_task(task, dice, len(cells)) for task in drawn.tasks.values()}
    faded = {
        id: replace(user, faded_us=dice.randint(0, 50) << 60) for id, user in drawn.users.items()
    }
    return replace(drawn, tasks=tasks, users=faded)


def _random_task(task: BoardTask, dice: random.Random, devices: int) -> BoardTask:
    choice = PART if dice.random() < 0.2 else ""
    kind = {"movable": dice.random() < 0.7, "restarts": dice.random() < 0.4, "choice": choice}
    if task.state != State.waiting or dice.random() < 0.2:
        return changed(task, **kind)
    on = [f"d{n}" for n in dice.sample(range(devices), k=devices)]
    width = 2 if dice.random() < 0.2 and devices > 2 and not choice else 1
    here = {"image_on": on[0], "image_with": tuple(on[1:width]), "width": width}
    here |= {"epoch": 1, "had_us": 10}
    frozen = {"movable": False, "restarts": True}
    return changed(task, **kind | here | (frozen if width > 1 else {"saved": dice.random() < 0.5}))


def _obeyed(board: Board, moved: dict[str, str]) -> dict[str, BoardTask]:
    """Return the tasks once their devices have done what was decided."""
    return {task.id: _obeying(task, moved.get(task.id)) for task in board.tasks.values()}


def _obeying(task: BoardTask, to: str | None) -> BoardTask:
    if to is not None:
        return changed(task, seats=(to,), epoch=task.epoch + 1, started_s=NOW_S)
    if task.state == State.pausing:
        on = {"image_on": task.seats[0], "image_with": task.seats[1:], "had_us": 10}
        return changed(task, state=State.waiting, seats=(), started_s=None, held_us=0, **on)
    if task.state == State.starting:
        return changed(task, state=State.running, started_s=NOW_S, image_on=None, image_with=())
    return task


def _idle_beside(board: Board) -> Iterator[str]:
    """Yield tasks that are kept off their device by one that could move to a free device."""
    frozen = board.pinned()
    free = [id for id, leaving in board.pools["cpu"].free.items() if not leaving]
    free = [id for id in free if id not in frozen]
    for task in [task for task in board.tasks.values() if task.id in board.tree]:
        held = [id for id in board.pins(task) if id not in free]
        stays = [stay for id in held for stay in board.group(id)]
        able = [s.task.movable and s.ripe and len(s.devices) == 1 for s in stays]
        if stays and all(able) and len(stays) <= len(free) and all(map(board.group, held)):
            yield task.id
