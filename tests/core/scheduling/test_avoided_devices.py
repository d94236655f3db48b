"""A task that failed on a device starts elsewhere, if there is an elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.core.model.provisions.retry import RetryPolicy
from app.core.model.retry_decision import (
    AVOIDED_S,
    AttemptFailure,
    AvoidedDevice,
    decide,
    with_avoided,
)
from app.core.model.snapshot import BoardTask, Plan, Snapshot
from app.core.scheduling import cycle as rounds
from app.core.scheduling.board import Board
from app.core.scheduling.cycle import cycle
from tests.core.pictures import NOW_S, codes, island, moves, seats

ONE = (AvoidedDevice("d0", NOW_S + 60.0),)
STRICT = (AvoidedDevice("d0", NOW_S + 60.0, True),)


def plan(snapshot: Snapshot) -> Plan:
    return rounds.decide(snapshot, now_s=NOW_S)


def waiting(cells: str, avoids: tuple[AvoidedDevice, ...], **more: object) -> Snapshot:
    return island(cells, queue="a", tasks={"a": {"avoids": avoids, **more}})


def test_task_starts_on_a_device_on_which_it_did_not_fail() -> None:
    assert seats(plan(waiting(". .", ()))) == "d0: a"
    assert seats(plan(waiting(". .", ONE))) == "d1: a"


def test_task_rather_waits_for_another_device_and_says_why() -> None:
    decided = plan(waiting(". b'", ONE))
    assert moves(decided) == []
    assert {"AVOIDS_DEVICE", "WAITING_FOR_DEVICE"} <= {*codes(decided, "a")}
    [why] = [each for each in decided.reasons["a"] if each.code == "AVOIDS_DEVICE"]
    assert why.message == "It failed on d0, and avoids it for some minutes."
    assert (why.change.action, why.change.value) == ("wait_until", NOW_S + 60.0)


def test_device_is_let_in_again_by_time_alone() -> None:
    board = Board.of(waiting(". b'", ONE), now_s=NOW_S)
    assert moves(cycle(board)) == []
    assert board.next_s() <= NOW_S + 60.0
    board.set_device(replace(board.devices["d0"], lease_until_s=NOW_S + 100.0))
    board.at(NOW_S + 60.0)
    assert seats(cycle(board)) == "d0: a"


@pytest.mark.parametrize("cells", [".", ". x", ". #"])
def test_only_device_that_takes_work_gets_the_task_unless_a_rule_forbids_it(cells: str) -> None:
    assert seats(plan(waiting(cells, ONE))) == "d0: a"
    strict = plan(waiting(cells, STRICT))
    assert moves(strict) == []
    assert "AVOIDS_DEVICE" in codes(strict, "a")
    assert not {"NO_DEVICE_UP", "DEVICE_DRAINED"} & {*codes(strict, "a")}


def test_task_goes_back_when_the_other_device_stops_taking_work() -> None:
    board = Board.of(waiting(". b'", ONE), now_s=NOW_S)
    assert moves(cycle(board)) == []
    board.set_device(replace(board.devices["d1"], cordoned=True))
    assert "d0: a" in seats(cycle(board))


def test_device_that_comes_up_is_preferred_at_once() -> None:
    board = Board.of(waiting(". x", STRICT), now_s=NOW_S)
    assert moves(cycle(board)) == []
    board.set_device(replace(board.devices["d1"], up=True, lease_until_s=NOW_S + 100.0))
    assert seats(cycle(board)) == "d1: a"


def test_time_from_which_enough_devices_are_let_in_is_known() -> None:
    both = (*STRICT, AvoidedDevice("d1", NOW_S + 30.0, True))
    for cells, avoids, at_s in (
        (". .", STRICT, 0.0),
        (".", STRICT, NOW_S + 60.0),
        (". .", both, NOW_S + 30.0),
        ("x", STRICT, 0.0),
        (".", ONE, 0.0),
    ):
        board = Board.of(waiting(cells, avoids), now_s=NOW_S)
        assert board.let_in_s(board.tasks["a"]) == at_s, (cells, avoids)
    wide = Board.of(waiting(". .", both, width=2, width_max=0), now_s=NOW_S)
    assert wide.let_in_s(wide.tasks["a"]) == NOW_S + 60.0


def test_device_without_what_the_task_needs_is_no_elsewhere() -> None:
    drawn = waiting(". .", ONE, memory_bytes=5)
    small = replace(drawn.devices["d1"], memory_bytes=4)
    assert seats(plan(replace(drawn, devices={**drawn.devices, "d1": small}))) == "d0: a"


def test_gang_avoids_devices_only_if_enough_others_take_work() -> None:
    wide = {"width": 2, "width_max": 0}
    [others] = plan(waiting(". . .", ONE, **wide)).decisions
    assert {*others.devices} == {"d1", "d2"}
    [both] = plan(waiting(". .", ONE, **wide)).decisions
    assert {*both.devices} == {"d0", "d1"}


def done_of_100(*, avoids: bool) -> int:
    """Run 100 tasks with two further attempts on three devices, of which d0 fails every launch."""
    policy, now_s, done = RetryPolicy(max=2), NOW_S, 0
    drawn = island(". . .", queue=" ".join(["a"] * 100))
    devices = {id: replace(d, lease_until_s=NOW_S + 1e6) for id, d in drawn.devices.items()}
    board = Board.of(replace(drawn, devices=devices), now_s=now_s)
    for _ in range(1000):
        launched = [d for d in cycle(board).decisions if d.move == "Launch"]
        for decision in launched:
            task = board.tasks[decision.task]
            if decision.device != "d0":
                done += 1
                board.drop_task(task.id)
                continue
            found = decide(policy, AttemptFailure(cause="exit", attempts=task.attempts))
            board.drop_task(task.id)
            if not found.gives_up:
                board.set_task(failed(task, now_s, found.attempts, found.wait_s, avoids))
        now_s += 1.0
        board.at(now_s)
        if not board.tasks:
            break
    return done


def failed(task: BoardTask, now_s: float, attempts: int, wait_s: float, avoids: bool) -> BoardTask:
    avoided = with_avoided(task.avoids, ["d0"], is_strict=False, now_s=now_s) if avoids else ()
    return replace(
        task,
        state="waiting",
        epoch=task.epoch + 1,
        seats=(),
        attempts=attempts,
        retry_at_s=now_s + wait_s,
        avoids=avoided,
    )


def test_100_of_100_tasks_are_done_beside_a_device_that_fails_every_launch() -> None:
    assert done_of_100(avoids=True) == 100
    assert done_of_100(avoids=False) < 100, "else the test shows nothing"
    assert AVOIDED_S > 0
