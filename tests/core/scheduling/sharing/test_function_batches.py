"""Batches of functions: how many go behind one that is launched, and which never do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.core.model.device_choice import DeviceChoice, DeviceTraits, text_of
from app.core.model.snapshot import (
    BATCH_MOST,
    BATCH_US,
    BatchSize,
    BoardDevice,
    BoardTask,
    BoardTenant,
    BoardUser,
    Policy,
    Snapshot,
)
from app.core.scheduling import record
from app.core.scheduling.board import Board
from app.core.scheduling.cycle import cycle, decide
from app.core.scheduling.sharing.function_batches import APART_MOST

NOW_S = 1000.0
NEW = DeviceTraits(offers=("isolation",))
EIGHT = (BatchSize(user="ann", kind="cpu", size=8),)


def _device(id: str) -> BoardDevice:
    return BoardDevice(id=id, host="h", kind="cpu", lease_until_s=NOW_S + 60, traits=NEW)


def _task(n: int, user: str = "ann", **more: object) -> BoardTask:
    return BoardTask(
        id=f"t{n:02}", request="r", tenant=user, user=user, kind="cpu",
        submitted_s=float(n), **{"state": "waiting", "epoch": 0, "function": True, **more},
    )  # fmt: skip


def _snapshot(*tasks: BoardTask, devices: int = 1, **more: object) -> Snapshot:
    tenants = {user: BoardTenant(id=user, name=user, weight=1000) for user in ("ann", "bob")}
    return Snapshot(**{
        "island": "isle",
        "policy": Policy(),
        "tenants": tenants,
        "users": {user: BoardUser(id=user, tenant=user) for user in tenants},
        "devices": {f"d{n}": _device(f"d{n}") for n in range(devices)},
        "tasks": {one.id: one for one in tasks},
        "batches": EIGHT,
        **more,
    })  # fmt: skip


def _launched(snapshot: Snapshot) -> dict[str, list[str]]:
    """Return by device the tasks that are launched there, in their order."""
    found: dict[str, list[str]] = {}
    for decision in decide(snapshot, now_s=NOW_S).decisions:
        if decision.move == "Launch":
            found.setdefault(str(decision.device), []).append(decision.task)
    return found


def test_functions_are_launched_behind_the_first_one():
    plan = decide(_snapshot(*map(_task, range(20))), now_s=NOW_S)
    assert [decision.task for decision in plan.decisions] == [f"t{n:02}" for n in range(8)]
    assert [decision.shares for decision in plan.decisions] == [False] + 7 * [True]


def test_devices_get_their_functions_in_turn():
    assert _launched(_snapshot(*map(_task, range(5)), devices=2)) == {
        "d0": ["t00", "t02", "t04"],
        "d1": ["t01", "t03"],
    }


def test_first_function_of_a_user_is_launched_alone():
    assert _launched(_snapshot(*map(_task, range(5)), batches=())) == {"d0": ["t00"]}


def test_nothing_goes_behind_a_job_and_no_job_behind_a_function():
    job = _task(0, function=False)
    assert _launched(_snapshot(job, *map(_task, range(1, 5)))) == {"d0": ["t00"]}
    job = _task(2, function=False)
    assert _launched(_snapshot(_task(0), _task(1), job, _task(3))) == {"d0": ["t00", "t01"]}


def test_only_functions_of_the_same_user_go_behind_one_another():
    others = [_task(n, user="bob") for n in range(2, 9)]
    assert _launched(_snapshot(_task(0), _task(1), *others)) == {"d0": ["t00", "t01"]}


def test_functions_with_a_process_of_their_own_go_behind_one_another_alone():
    own = {"choice": text_of(DeviceChoice(needs=("isolation",)))}
    many = (BatchSize(user="ann", kind="cpu", size=BATCH_MOST),)
    launched = _launched(_snapshot(*(_task(n, **own) for n in range(20)), batches=many))
    assert len(launched["d0"]) == APART_MOST
    assert _launched(_snapshot(*(_task(n, **own) for n in range(3)), _task(3))) == {
        "d0": ["t00", "t01", "t02"]
    }


@pytest.mark.parametrize("need", ["secrets", "egress"])
def test_functions_with_other_needs_are_launched_one_by_one(need):
    choice = text_of(DeviceChoice(needs=(need,)))
    device = replace(_device("d0"), traits=DeviceTraits(offers=("isolation", need)))
    tasks = [_task(n, choice=choice) for n in range(5)]
    assert _launched(replace(_snapshot(*tasks), devices={"d0": device})) == {"d0": ["t00"]}


@pytest.mark.parametrize("bound", [{"guarantee": {"cpu": 1}}, {"limit": {"cpu": 1}}])
def test_functions_under_a_guarantee_or_a_limit_are_launched_one_by_one(bound):
    snapshot = _snapshot(*map(_task, range(5)))
    ann = replace(snapshot.tenants["ann"], **bound)
    snapshot = replace(snapshot, tenants={**snapshot.tenants, "ann": ann})
    assert _launched(snapshot) == {"d0": ["t00"]}


def test_a_batch_keeps_its_device_until_its_last_function_has_left():
    board = Board.of(_snapshot(*map(_task, range(12))), now_s=NOW_S)
    cycle(board)
    for n in range(7):
        board.set_task(replace(board.tasks[f"t{n:02}"], state="done", seats=(), had_us=1000))
        assert not cycle(board).decisions
        assert board.seated["d0"] == f"t{n + 1:02}"
    board.set_task(replace(board.tasks["t07"], state="done", seats=(), had_us=1000))
    assert [decision.task for decision in cycle(board).decisions] == ["t08", "t09", "t10", "t11"]


def test_size_doubles_with_short_functions_and_falls_with_long_ones():
    size = BatchSize(user="ann", kind="cpu")
    grown = [size := size.after(1000) for _ in range(7)]
    assert [each.size for each in grown] == [2, 4, 8, 16, 32, BATCH_MOST, BATCH_MOST]
    assert size.after(BATCH_US // 10).size == 10
    assert size.after(10 * BATCH_US).size == 1


@pytest.mark.parametrize(("after", "size"), [({"state": "done", "had_us": 1000}, 16), ({}, 1)])
def test_board_learns_the_size_from_functions_that_end_or_come_back(after, size):
    board = Board.of(_snapshot(*map(_task, range(8))), now_s=NOW_S)
    cycle(board)
    left = {"state": "waiting", "seats": (), "shares": False, **after}
    board.set_task(replace(board.tasks["t03"], **left))
    assert board.batch_of(board.tasks["t02"]).size == size


def test_function_is_charged_for_a_turn_only_when_it_leads():
    board = Board.of(_snapshot(*map(_task, range(8))), now_s=NOW_S)
    cycle(board)
    assert board.stays["t00"].rate > 0
    assert {board.stays[f"t{n:02}"].rate for n in range(1, 8)} == {0}


def test_round_with_batches_is_decided_again_from_its_record():
    job = _task(3, function=False)
    board = Board.of(_snapshot(*map(_task, range(3)), job, *map(_task, range(4, 8))), now_s=NOW_S)
    plan = cycle(board)
    seen = record.seen_by(board, plan, plan.before, island="isle")
    again = decide(record.from_json(record.as_json(seen)), now_s=NOW_S)
    assert again.decisions == plan.decisions
    assert [decision.task for decision in plan.decisions] == ["t00", "t01", "t02"]


def test_board_that_is_read_in_the_middle_of_a_batch_keeps_the_device_for_all_of_it():
    on = {"state": "starting", "epoch": 1, "seats": ("d0",)}
    behind = [_task(n, **on, shares=True) for n in (1, 3)]
    board = Board.of(_snapshot(*behind, _task(2, **on), _task(4)), now_s=NOW_S)
    assert board.seated["d0"] == "t02"
    for n, next_ in ((2, "t01"), (1, "t03")):
        board.set_task(replace(board.tasks[f"t{n:02}"], state="done", seats=()))
        assert board.seated["d0"] == next_
        assert not cycle(board).decisions
    board.set_task(replace(board.tasks["t03"], state="done", seats=()))
    assert [decision.task for decision in cycle(board).decisions] == ["t04"]


def test_worker_of_an_older_version_gets_one_function_at_a_time():
    snapshot = _snapshot(*map(_task, range(5)))
    older = replace(snapshot.devices["d0"], traits=DeviceTraits())
    assert _launched(replace(snapshot, devices={"d0": older})) == {"d0": ["t00"]}
