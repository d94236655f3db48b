"""Idle credit is bounded: who was away is ahead of those who stayed by a while, not by ages.

One device that costs 1 a second, so its whole capacity in a second is one device-second; credit is
parted by weight among those who want it.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.fairness.usage_decay import FIXED_POINT_BITS, carried_over
from app.core.model.snapshot import (
    BoardDevice,
    BoardTask,
    BoardTenant,
    BoardUser,
    Conditions,
    Plan,
    Policy,
)
from app.core.scheduling.board import Board
from app.core.scheduling.cycle import cycle, decide
from app.core.scheduling.idle_credit import CarriedLevels, recall, welcome
from app.core.scheduling.record import as_json, from_json, seen_by
from app.core.simulation.simulator import Arrival, Report, simulate
from tests.core.pictures import NOW_S, SECOND, island, moves
from tests.thoroughness import examples

POLICY = Policy(half_life_s=0.0, idle_credit_s=1000.0)


def board_of(cells: str, policy: Policy = POLICY, **drawn: object) -> Board:
    """With tenants a to d, whoever of them has tasks."""
    board = Board.of(island(cells, policy=policy, **drawn), now_s=NOW_S)  # type: ignore[arg-type]
    for name in "abcd":
        if name not in board.tenants:
            board.set_tenant(BoardTenant(id=name, name=name, weight=1000))
            board.set_user(BoardUser(id=f"{name}1", tenant=name))
    return board


def come(board: Board, tenant: str, name: str = "", kind: str = "cpu") -> None:
    name = name or tenant
    board.set_task(
        BoardTask(id=name, request=name, tenant=tenant, user=f"{tenant}1", state="waiting", epoch=0,
             kind=kind, submitted_s=NOW_S)
    )  # fmt: skip


def lifts_s(plan: Plan) -> dict[str, Fraction]:
    """Of each tenant, in device-seconds; users of these tests are alone in their tenants."""
    assert not [lift for lift in plan.lifts if lift.user]
    unit = 1000 * SECOND << FIXED_POINT_BITS
    return {lift.tenant: Fraction(lift.faded_us, unit) for lift in plan.lifts}


def score_s(board: Board, tenant: str) -> Fraction:
    """Device-seconds for a weight of 1, with its lift."""
    score = board.tree.score(board.tree.branches[(tenant,)], kind="cpu")
    return Fraction(score, 1 << 128) / (SECOND << FIXED_POINT_BITS)


def test_newcomer_begins_at_the_level_of_those_who_wait_less_its_credit() -> None:
    board = board_of("b", queue="b", used={"b": 99_990})  # and the 10 s that it holds the device
    come(board, "a")
    plan = cycle(board)
    assert lifts_s(plan) == {"a": 100_000 - 1000 / 2}
    assert moves(plan) == [("b", "Pause"), ("a", "Launch")]


def test_decision_about_a_snapshot_raises_no_floor_beyond_those_in_it() -> None:
    """a's task comes in this very round, as nothing holds it back any more."""
    came = {"a": {"state": "blocked"}}
    drawn = island("b", queue="b a", policy=POLICY, used={"b": 99_990}, tasks=came)
    assert cycle(Board.of(drawn, now_s=NOW_S)).lifts != ()
    assert decide(drawn, now_s=NOW_S).lifts == ()


def test_idle_credit_is_divided_by_weight() -> None:
    board = board_of("b", queue="b", used={"b": 99_990})
    board.set_tenant(BoardTenant(id="a", name="a", weight=3000))
    come(board, "a")
    # Three quarters of 1000 s are a's; b's level is 100,000 s for a weight of 1, a's thrice it.
    assert lifts_s(cycle(board)) == {"a": 3 * 100_000 - 750}


def test_tenant_behind_by_less_than_its_credit_gets_no_idle_credit() -> None:
    board = board_of("b", queue="b", used={"b": 490, "a": 0})
    come(board, "a")
    assert cycle(board).lifts == ()


def test_tenants_that_come_one_after_the_other_begin_level_and_tie() -> None:
    board = board_of("b", queue="b", used={"b": 99_990})
    board.set_tenant(BoardTenant(id="c", name="c", weight=7000))
    come(board, "a")
    assert lifts_s(cycle(board)) == {"a": 99_500}
    # a is now the lowest of those who wait or hold: the level stays at b's.
    board.at(NOW_S + 100)
    come(board, "c")
    assert set(lifts_s(cycle(board))) == {"c"}
    assert 100_000 - 1000 < score_s(board, "c") < 100_100
    come(board, "d")
    cycle(board)
    assert score_s(board, "d") >= score_s(board, "c")  # its part is of more who want the device


def test_two_tenants_of_any_weights_that_come_at_once_tie_exactly() -> None:
    board = board_of("b", queue="b", used={"b": 99_990})
    board.set_tenant(BoardTenant(id="c", name="c", weight=7001))
    come(board, "a", "a.1")
    come(board, "c", "c.1")
    tree = board.tree
    plan = cycle(board)
    assert {lift.tenant for lift in plan.lifts} == {"a", "c"}
    a, c = (plan.lifts[n].faded_us for n in (0, 1))
    assert Fraction(a, 1000) == Fraction(c, 7001)
    assert moves(plan)[-1] == ("a.1", "Launch")  # of equal scores and ages the lower name
    assert tree.score(tree.branches[("c",)], kind="cpu") == (a << 128) // 1000


@pytest.mark.parametrize("weight", [1, 3000, 7001])
def test_a_changed_weight_leaves_a_branch_with_a_floor_where_it_stood(weight: int) -> None:
    board = board_of("b", queue="b", used={"b": 99_990, "a": 10})
    come(board, "a", "a.1")
    welcome(board)
    before, (user,) = score_s(board, "a"), [board.users["a1"]]
    carried_us = carried_over(user.faded_us, 0, weight=1000, new_weight=weight)
    board.set_tenant(BoardTenant(id="a", name="a", weight=weight, carried_us=carried_us))
    assert float(score_s(board, "a")) == pytest.approx(float(before), rel=1e-9)
    (lift,) = (
        lift for lift in cycle(board).lifts if not lift.user
    )  # written again, so that a new board has it
    assert lift == board.lifts["a", "", "cpu"]
    board.set_user(replace(user, weight=2000, carried_us=user.faded_us))
    leaf, tenant = board.tree.branches["a", "a1"], board.tree.branches["a",]
    assert board.tree.usage(leaf) - leaf.carried == board.tree.usage(tenant) - tenant.carried


def test_waiting_until_the_others_are_done_gains_nothing() -> None:
    board = board_of("b", used={"b": 99_990})
    cycle(board)
    board.drop_task("b")
    cycle(board)
    come(board, "a")
    assert lifts_s(cycle(board)) == {"a": 100_000 - 1000}  # nobody else wants it: all is its part


def test_running_tenant_sets_the_level_if_no_tenant_waits() -> None:
    board = board_of("b c", used={"b": 99_990, "c": 70_000})
    come(board, "a")
    # Two devices give 2000 s in 1000 s; a third of it is a's.
    level = 100_000 - Fraction(2000, 3)
    assert lifts_s(cycle(board))["a"] == pytest.approx(level, abs=1e-6)


def test_idle_credit_floor_is_never_above_a_tenant_that_waits() -> None:
    board = board_of("b c", queue="c", used={"b": 99_990, "c": 69_980})
    come(board, "a")
    assert lifts_s(cycle(board))["a"] == pytest.approx(70_000 - 2000 / 3 - 10, abs=11)


def test_kind_that_no_other_tenant_wants_gives_no_idle_credit() -> None:
    board = board_of("b", queue="b", used={"b": 99_990})
    come(board, "a", kind="cuda")
    assert cycle(board).lifts == ()


def test_idle_credit_floor_for_one_kind_does_not_count_for_another() -> None:
    board = board_of("b", queue="b", used={"b": 99_990})
    come(board, "a")
    cycle(board)
    a = board.tree.branches[("a",)]
    assert board.tree.score(a) == board.tree.score(a, kind="cuda") < board.tree.score(a, kind="cpu")


def test_tenant_that_stays_in_line_gets_no_idle_credit() -> None:
    board = board_of("b", queue="b", used={"b": 99_990})
    board.set_tenant(BoardTenant(id="a", name="a", weight=1000, limit={"cpu": 0}))
    board.policy = replace(POLICY, idle_credit_s=1e9)
    come(board, "a")
    assert cycle(board).lifts == ()
    board.policy = POLICY
    board.at(NOW_S + 500)
    board.set_task(replace(board.tasks["a"], priority=5))  # its row was written again
    assert cycle(board).lifts == ()


def test_preempted_tenant_gets_no_idle_credit_when_it_waits_again() -> None:
    board = board_of("a b", queue="b", used={"b": 99_990})
    cycle(board)
    board.set_task(replace(board.tasks["a"], state="waiting", seats=()))
    assert cycle(board).lifts == ()


def test_tenant_that_held_its_task_for_long_gets_idle_credit_on_release() -> None:
    board = board_of("a b", queue="b", used={"b": 99_990})
    held = Conditions(hold="user")
    board.set_task(replace(board.tasks["a"], state="blocked", seats=(), conditions=held))
    cycle(board)
    board.set_task(replace(board.tasks["a"], conditions=Conditions()))
    assert set(lifts_s(cycle(board))) == {"a"}


def test_tenant_with_its_next_task_before_the_next_round_never_left() -> None:
    board = board_of(". b", queue="a", used={"b": 99_990})
    assert moves(cycle(board)) == [("a", "Launch")]
    come(board, "a", "a.next")
    assert cycle(board).lifts == ()


def test_idle_credit_floor_never_falls() -> None:
    board = board_of("b", queue="b", used={"b": 99_990})
    come(board, "a")
    first = lifts_s(cycle(board))["a"]
    board.drop_task("a")
    cycle(board)
    come(board, "a", "a.again")
    assert lifts_s(cycle(board)).get("a", first) >= first


# --- the next board, and the record ---------------------------------------------------------------


def test_round_that_was_not_committed_sets_the_idle_credit_floor_again() -> None:
    drawn = island("b", queue="b", used={"b": 99_990}, policy=POLICY)
    board = board_of("b", queue="b", used={"b": 99_990})
    cycle(board)
    board.memory.written_down()
    come(board, "a")
    lost = cycle(board)
    anew = Board.of(drawn, now_s=NOW_S)
    anew.set_tenant(BoardTenant(id="a", name="a", weight=1000))
    anew.set_user(BoardUser(id="a1", tenant="a"))
    come(anew, "a")
    recall(anew, CarriedLevels.of(board))
    assert cycle(anew).lifts == lost.lifts != ()


def test_next_board_takes_no_known_tenant_for_a_newcomer() -> None:
    board = board_of("b", queue="b", used={"b": 99_990}, policy=replace(POLICY, idle_credit_s=1e9))
    come(board, "a")
    cycle(board)
    board.memory.written_down()
    anew = board_of("b", queue="b", used={"b": 99_990})
    come(anew, "a")
    recall(anew, CarriedLevels.of(board))
    assert cycle(anew).lifts == ()


def test_round_with_idle_credit_floors_is_repeated_from_its_record() -> None:
    board = board_of("b", queue="b", used={"b": 99_990})
    come(board, "a")
    plan = cycle(board)
    kept = from_json(as_json(seen_by(board, plan, plan.before, island="isle")))
    assert kept.lifts == plan.lifts
    assert decide(kept, now_s=NOW_S).decisions == plan.decisions


# --- in the long run ------------------------------------------------------------------------------

AWAY = 50_000.0  # and more, as hypothesis likes
CREDIT_S, WINDOW_S = 120.0, 600.0


def run(arrivals: list[Arrival], *, until_s: float, tenants: str = "ab", **policy: float) -> Report:
    return simulate(
        arrivals,
        [BoardDevice(id="d0", host="h", kind="cpu")],
        [BoardTenant(id=name, name=name, weight=1000) for name in tenants],
        Policy(**{"half_life_s": 0.0, "idle_credit_s": CREDIT_S, **policy}),  # type: ignore[arg-type]
        until_s=until_s,
        checked=False,
        keep_timeline=False,
    )


def long(tenant: str, at_s: float) -> Arrival:
    return Arrival(at_s=at_s, task=f"{tenant}.{at_s}", tenant=tenant, user=f"{tenant}1",
                   work_s=1e7, tier="basic")  # fmt: skip


@settings(max_examples=examples(10), deadline=None)
@given(
    idle_s=st.integers(1, 30 * 86_400),
    half_life_s=st.sampled_from([0.0, 3600.0, 7 * 86_400.0]),
)
def test_tenant_back_from_any_idle_time_leads_by_its_credit_and_one_slice(
    idle_s: int, half_life_s: float
) -> None:
    report = run(
        [long("a", 0), long("b", idle_s)], until_s=idle_s + WINDOW_S, half_life_s=half_life_s
    )
    a, b = report.device_s["a"] - idle_s, report.device_s["b"]
    # a begins a turn ahead of nobody; b's part of the credit is half of it.
    assert b - a <= CREDIT_S / 2 + 2 * 1.0
    assert b >= WINDOW_S / 2 - 2 * 1.0


def test_without_idle_credit_a_returning_tenant_keeps_the_device_for_long() -> None:
    arrivals = [long("a", 0), long("b", AWAY)]
    report = run(arrivals, until_s=AWAY + WINDOW_S, idle_credit_s=1e12)
    assert report.device_s["b"] >= WINDOW_S - 2.0


@settings(max_examples=examples(6), deadline=None)
@given(away_s=st.integers(10, 1_000))
@pytest.mark.slow
def test_leaving_and_coming_back_gains_nothing(away_s: int) -> None:
    until_s = 300.0 + away_s + WINDOW_S
    stays = run([long("a", 0), long("b", 0)], until_s=until_s)
    done = replace(long("b", 0), work_s=150.0)
    leaves = run([long("a", 0), done, long("b", 300.0 + away_s)], until_s=until_s)
    assert leaves.device_s["b"] <= stays.device_s["b"] + 1.0


def test_many_returning_tenants_delay_the_others_by_the_credit_at_most() -> None:
    names = "abcdefgh"
    arrivals = [long("a", 0), *(long(name, AWAY) for name in names[1:])]
    report = run(arrivals, until_s=AWAY + CREDIT_S + 50.0, tenants=names)
    assert report.device_s["a"] - AWAY >= 1.0
