"""A user's own limits hold as a tenant's do, one level lower (rule F4)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.core.model.lifecycle import Move
from app.core.model.snapshot import Plan, Policy, Snapshot
from app.core.scheduling.board import Board
from app.core.scheduling.cycle import cycle, decide
from tests.core.pictures import NOW_S, codes, island, moves, seats

LIMITS: list[dict[str, Any]] = [
    {"limit": {"cpu": 1}},
    {"limit": {"*": 1}},
    {"most_running": 1},
]
LARGE = 8_000_000_000
GRAPHS = {
    "policy": Policy(half_life_s=0.0, sharers_max=4, tier_share={}),
    "tasks": {name: {"graph": True} for name in ("a", "a.2", "a2", "b")},
}


def limited(drawn: Snapshot, user: str, **limits: Any) -> Snapshot:
    users = {**drawn.users, user: replace(drawn.users[user], **limits)}
    return replace(drawn, users=users)


def plan(drawn: Snapshot) -> Plan:
    return decide(drawn, now_s=NOW_S)


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_user_at_a_limit_leaves_a_device_to_others_and_is_told(limits: dict[str, Any]) -> None:
    drawn = limited(island("a . .", queue="a a2"), user_of("a"), **limits)
    decided = plan(drawn)
    assert seats(decided) == "d1: a2"
    code = "USER_RUNNING_LIMIT" if "most_running" in limits else "USER_LIMIT"
    assert code in codes(decided, "a.2")
    assert "TENANT_LIMIT" not in codes(decided, "a.2")


def user_of(task: str) -> str:
    return island("a", queue="a a2").tasks[task].user


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_lowered_limit_takes_back_after_a_slice(limits: dict[str, Any]) -> None:
    drawn = island("a a .", queue="")
    board = Board.of(drawn, now_s=NOW_S)
    assert moves(cycle(board)) == []
    board.set_user(replace(board.users[user_of("a")], **limits))
    [(task, move)] = moves(cycle(board))
    assert (task in ("a", "a.2"), move) == (True, "Pause")


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_raised_limit_lets_the_next_task_start(limits: dict[str, Any]) -> None:
    board = Board.of(limited(island("a .", queue="a"), user_of("a"), **limits), now_s=NOW_S)
    assert moves(cycle(board)) == []
    board.set_user(replace(board.users[user_of("a")], limit={}, most_running=None))
    assert seats(cycle(board)) == "d1: a.2"


def test_gang_of_a_user_needs_room_for_all_its_devices() -> None:
    wide = {"a": {"width": 2, "width_max": 0}}
    drawn = island(". .", queue="a", tasks=wide)
    assert seats(plan(limited(drawn, user_of("a"), limit={"cpu": 2}))) != ""
    assert seats(plan(limited(drawn, user_of("a"), limit={"cpu": 1}))) == ""


def test_graphs_of_a_user_with_a_limit_share_devices_as_before() -> None:
    """A cap made its user no plain branch, so its graphs stopped sharing."""
    drawn = island("b'", queue="a", **GRAPHS)
    free = plan(drawn)
    assert ("a", "Launch") in moves(free)
    assert moves(plan(limited(drawn, user_of("a"), limit={"cpu": 2}))) == moves(free)


def test_graph_beyond_the_limit_of_its_user_joins_no_other() -> None:
    drawn = island("b'", queue="a", **GRAPHS)
    assert ("a", "Launch") not in moves(plan(limited(drawn, user_of("a"), limit={"cpu": 0})))


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("cells", ["a/ .", "a! .", "a ."])
def test_task_takes_the_place_of_one_that_is_leaving_if_both_exceed_the_limit(
    cells: str, limits: dict[str, Any]
) -> None:
    """The pausing task holds its device until it is gone; with the free one a would hold two."""
    drawn = island(cells, queue="a")
    if cells == "a .":  # the second user of the tenant takes a turn
        drawn = island(cells, queue="a2")
        drawn = replace(drawn, tenants={"a": replace(drawn.tenants["a"], **limits)})
    else:
        drawn = limited(drawn, user_of("a"), **limits)
    [launch] = [one for one in plan(drawn).decisions if one.move == Move.Launch]
    assert launch.devices == ("d0",)


def test_task_takes_the_free_device_if_the_limit_has_room_for_both() -> None:
    drawn = limited(island("a/ .", queue="a"), user_of("a"), limit={"cpu": 2})
    assert seats(plan(drawn)) == "d1: a.2"


def test_larger_device_that_is_being_left_stays_for_a_task_that_needs_it() -> None:
    drawn = island("a .", queue="a2 b", used={"b": 1000.0}, tasks={"b": {"memory_bytes": LARGE}})
    small = replace(drawn.devices["d1"], memory_bytes=LARGE // 2)
    drawn = replace(drawn, devices={**drawn.devices, "d1": small})
    drawn.tenants["a"] = replace(drawn.tenants["a"], limit={"cpu": 1})
    assert seats(plan(drawn)) == "d0: b  d1: a>a2"
