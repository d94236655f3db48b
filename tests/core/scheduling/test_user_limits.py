"""A user's own limits hold as a tenant's do, one level lower (rule F4)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.core.model.snapshot import Plan, Policy, Snapshot
from app.core.scheduling.board import Board
from app.core.scheduling.cycle import cycle, decide
from tests.core.pictures import NOW_S, codes, island, moves, seats

LIMITS: list[dict[str, Any]] = [
    {"limit": {"cpu": 1}},
    {"limit": {"*": 1}},
    {"most_running": 1},
]
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
