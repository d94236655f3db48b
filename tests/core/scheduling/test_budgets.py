"""What an exhausted budget does to tasks: nothing starts, it is paused, or others go first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.core.model.snapshot import BoardTenant, BoardUser, Snapshot
from app.core.scheduling.board import Board
from app.core.scheduling.cycle import cycle, decide
from tests.core.pictures import NOW_S, codes, island, moves, seats

KINDS = ("cpu", "*")
SUBJECTS = ("tenant", "user")
ENDS_S = NOW_S + 86400.0


def exhausted(drawn: Snapshot, subject: str, **actions: str) -> Snapshot:
    """Return the picture in which the budget of a, or of its user, has put actions in force."""
    board = Board.of(drawn, now_s=NOW_S)
    spend(board, subject, {kind.replace("all", "*"): action for kind, action in actions.items()})
    return replace(drawn, tenants=dict(board.tenants), users=dict(board.users))


def spend(board: Board, subject: str, actions: dict[str, str]) -> None:
    values: dict[str, Any] = {"exhausted": actions, "budget_ends_s": ENDS_S if actions else 0.0}
    if subject == "tenant":
        tenant: BoardTenant = replace(board.tenants["a"], **values)
        board.set_tenant(tenant)
    else:
        user: BoardUser = next(one for one in board.users.values() if one.tenant == "a")
        board.set_user(replace(user, **values))


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("action", ["hold", "pause"])
def test_nothing_starts_and_the_reason_names_the_budget(
    subject: str, kind: str, action: str
) -> None:
    drawn = island(". .", queue="a b")
    board = Board.of(drawn, now_s=NOW_S)
    spend(board, subject, {kind: action})
    decided = cycle(board)
    assert seats(decided) == "d0: b"
    drawn = replace(drawn, tenants=dict(board.tenants), users=dict(board.users))
    assert "BUDGET_EXHAUSTED" in codes(decide(drawn, now_s=NOW_S), "a")


@pytest.mark.parametrize("subject", SUBJECTS)
def test_budget_for_another_kind_stops_nothing(subject: str) -> None:
    drawn = exhausted(island(".", queue="a"), subject, cuda="pause")
    assert seats(decide(drawn, now_s=NOW_S)) == "d0: a"


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("kind", KINDS)
def test_pause_takes_everything_back_before_a_slice_is_over(subject: str, kind: str) -> None:
    board = Board.of(island("a' a' b'", queue=""), now_s=NOW_S)
    spend(board, subject, {kind: "pause"})
    assert sorted(moves(cycle(board))) == [("a", "Pause"), ("a.2", "Pause")]


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("kind", KINDS)
def test_hold_lets_what_runs_go_on_and_new_work_wait(subject: str, kind: str) -> None:
    board = Board.of(island("a a b .", queue="a"), now_s=NOW_S)
    spend(board, subject, {kind: "hold"})
    assert moves(cycle(board)) == []


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("action", ["hold", "pause", "demote"])
def test_next_period_lets_the_task_start(subject: str, action: str) -> None:
    drawn = island(".", queue="a" if action != "demote" else "a b", used={"b": 1000.0})
    board = Board.of(exhausted(drawn, subject, cpu=action), now_s=NOW_S)
    if subject == "tenant" or action != "demote":
        assert seats(cycle(Board.of(exhausted(drawn, subject, cpu=action), now_s=NOW_S))) != "d0: a"
    spend(board, subject, {})
    assert seats(cycle(board)) == "d0: a"


@pytest.mark.parametrize("kind", KINDS)
def test_demoted_tenant_goes_after_one_that_used_far_more(kind: str) -> None:
    drawn = island(". .", queue="a b b", used={"b": 1e9})
    board = Board.of(drawn, now_s=NOW_S)
    spend(board, "tenant", {kind: "demote"})
    assert seats(cycle(board)) == "d0: b  d1: b.2"


def test_demoted_user_goes_after_the_other_users_of_its_tenant() -> None:
    drawn = exhausted(island(".", queue="a a2", used={"a2": 1e6}), "user", cpu="demote")
    assert seats(decide(drawn, now_s=NOW_S)) == "d0: a2"


def test_demoted_tenant_gets_a_device_that_nobody_else_wants() -> None:
    drawn = exhausted(island(". .", queue="a b"), "tenant", cpu="demote")
    assert sorted(moves(decide(drawn, now_s=NOW_S))) == [("a", "Launch"), ("b", "Launch")]


def test_demoted_holder_gives_way_though_it_has_used_less() -> None:
    drawn = exhausted(island("a", queue="b", used={"b": 1e9}), "tenant", cpu="demote")
    assert ("a", "Pause") in moves(decide(drawn, now_s=NOW_S))


def test_demoted_tenant_has_no_guarantee() -> None:
    drawn = island("a", queue="b", used={"b": 1e9})
    drawn.tenants["a"] = replace(drawn.tenants["a"], guarantee={"cpu": 1})
    assert moves(decide(drawn, now_s=NOW_S)) == []
    demoted = exhausted(drawn, "tenant", cpu="demote")
    assert ("a", "Pause") in moves(decide(demoted, now_s=NOW_S))


def test_demoted_task_is_told_so() -> None:
    drawn = exhausted(island("b", queue="a"), "tenant", cpu="demote")
    assert "BUDGET_DEMOTED" in codes(decide(drawn, now_s=NOW_S), "a")


def test_tenant_that_arrives_is_not_set_back_behind_a_demoted_one() -> None:
    """Idle credit begins at the level of siblings; the place of a demoted one is no level."""
    board = Board.of(exhausted(island("a .", queue=""), "tenant", cpu="demote"), now_s=NOW_S)
    cycle(board)
    arrived = island("a .", queue="b")
    board.set_tenant(arrived.tenants["b"])
    for user in arrived.users.values():
        if user.tenant == "b":
            board.set_user(user)
    board.set_task(arrived.tasks["b"])
    cycle(board)
    assert all(lift.faded_us < 1 << 200 for lift in board.lifts.values())
