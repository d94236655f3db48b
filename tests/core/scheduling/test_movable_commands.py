"""Commands whose processes are stored: where they may go on, and when they begin again instead."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from app.core.model.device_choice import PACKAGES, DeviceTraits, with_packages
from app.core.model.lifecycle import Move
from app.core.model.provisions.process_images import choice_where_it_goes_on, marked, movement
from app.core.model.snapshot import BoardDevice, BoardTask, Plan, Snapshot
from app.core.scheduling.board import Board
from app.core.scheduling.cycle import cycle, decide
from app.core.scheduling.reclaim.defragment import moves
from tests.core.pictures import NOW_S, codes, island, seats

ONE, OTHER = marked("aa11"), marked("bb22")
STORED = {"image_on": "d0", "movable": True, "restarts": True, "goes_on_with": ONE, "epoch": 1}


def plan(snapshot: Snapshot) -> Plan:
    return decide(snapshot, now_s=NOW_S)


def offering(drawn: Snapshot, *offers: str) -> Snapshot:
    """The devices d0, d1, ... with these offers."""
    devices = {
        f"d{n}": replace(drawn.devices[f"d{n}"], traits=DeviceTraits(offers=(offer,)))
        for n, offer in enumerate(offers)
    }
    return replace(drawn, devices={**drawn.devices, **devices})


def test_stored_command_goes_on_on_any_device_like_its_own() -> None:
    drawn = island("b' . .", queue="a", tasks={"a": STORED})
    assert seats(plan(offering(drawn, ONE, OTHER, ONE))) == "d2: a"


def test_stored_command_goes_back_to_its_own_device_if_that_is_free() -> None:
    drawn = island(". . .", queue="a", tasks={"a": {**STORED, "image_on": "d1"}})
    assert seats(plan(offering(drawn, ONE, ONE, ONE))) == "d1: a"


def test_stored_command_waits_rather_than_begin_again_on_another_kind_of_host() -> None:
    drawn = offering(island("b' .", queue="a", tasks={"a": STORED}), ONE, OTHER)
    assert seats(plan(drawn)) == ""
    told = {reason.code: reason.message for reason in plan(drawn).reasons["a"]}
    assert "go on only on d0:" in told["FROZEN_ON_DEVICE"]


def test_stored_command_says_nothing_of_hosts_where_all_are_alike() -> None:
    drawn = offering(island("b' c'", queue="a", tasks={"a": STORED}), ONE, ONE)
    assert "FROZEN_ON_DEVICE" not in codes(plan(drawn), "a")


@pytest.mark.parametrize("row", ["x .", "# ."])
def test_stored_command_begins_again_where_no_device_like_its_own_takes_work(row) -> None:
    drawn = offering(island(row, queue="a", tasks={"a": STORED}), ONE, OTHER)
    assert seats(plan(drawn)) == "d1: a"


def test_stored_command_waits_for_packages_on_a_host_like_its_own() -> None:
    lock = "5" * 64
    tasks = {"a": {**STORED, "choice": with_packages("", lock)}}
    drawn = offering(island("x . .", queue="a", tasks=tasks), ONE, ONE, OTHER)
    for ready, found in (("d2", ""), ("d1", "d1: a")):
        devices = {id: _building(one) for id, one in drawn.devices.items()}
        has = (*devices[ready].traits.offers, PACKAGES + lock)
        traits = replace(devices[ready].traits, offers=has)
        devices[ready] = replace(devices[ready], host=ready, traits=traits)
        decided = plan(replace(drawn, devices=devices))
        assert seats(decided) == found
        assert found or "PACKAGES_INSTALLING" in codes(decided, "a")


def _building(device: BoardDevice) -> BoardDevice:
    return replace(device, traits=replace(device.traits, builds=()))


def test_stored_gang_of_one_host_begins_again_where_no_host_like_its_own_is_wide_enough() -> None:
    gang = {**STORED, "width": 2, "one_host": True}
    drawn = offering(island("# . . . .", queue="a", tasks={"a": gang}), ONE, ONE, ONE, OTHER, OTHER)
    for hosts, goes_on in (("00112", False), ("01122", True), ("00122", False)):
        devices = {id: replace(one, host=hosts[int(id[1])]) for id, one in drawn.devices.items()}
        board = Board.of(replace(drawn, devices=devices), now_s=NOW_S)
        assert (ONE in board.choice_of(board.tasks["a"])) is goes_on


def test_stored_command_stays_until_its_image_is_durable() -> None:
    drawn = island("b' .", queue="a", tasks={"a": {**STORED, "saved": False}})
    assert seats(plan(offering(drawn, ONE, ONE))) == ""


def test_command_whose_pause_could_not_store_it_waits_for_its_device() -> None:
    bound = {**STORED, "movable": False, "goes_on_with": ""}
    drawn = offering(island("b' .", queue="a", tasks={"a": bound}), ONE, ONE)
    assert (seats(plan(drawn)), codes(plan(drawn), "a")[0]) == ("", "FROZEN_ON_DEVICE")


def test_command_is_moved_out_of_the_way_only_to_a_device_like_its_own() -> None:
    sizes = {"d0": 8, "d1": 4, "d2": 4}
    wide = {"memory_bytes": 6 * 2**30}
    running = {"movable": True, "restarts": True, "goes_on_with": ONE}
    drawn = island("a . .", queue="b", tasks={"a": running, "b": wide}, used={"b": 100})
    for offers, found in (
        ((ONE, OTHER, ONE), [("a", "d2")]),
        ((ONE, OTHER, OTHER), []),
    ):
        devices = offering(drawn, *offers).devices
        sized = {id: replace(d, memory_bytes=sizes[id] * 2**30) for id, d in devices.items()}
        board = Board.of(replace(drawn, devices=sized), now_s=NOW_S)
        cycle(board)
        assert moves(board) == found


def _drawn(dice: random.Random) -> Snapshot:
    """An island with stored commands, of hosts of two kinds, some of them drained or down."""
    cells = " ".join(dice.choice([".", ".", "x", "#", "a'", "b"]) for _ in range(6))
    queue = " ".join(dice.choice("abc") for _ in range(5))
    drawn = island(cells, queue=queue, used={name: dice.randrange(9) for name in "abc"})
    tasks = {
        id: replace(
            task,
            epoch=1,
            image_on=dice.choice([None, *drawn.devices]),
            goes_on_with=dice.choice([ONE, OTHER]),
            movable=True,
            restarts=True,
            saved=dice.random() < 0.8,
        )
        if task.state == "waiting" and dice.random() < 0.7
        else task
        for id, task in drawn.tasks.items()
    }
    return offering(replace(drawn, tasks=tasks), *(dice.choice([ONE, OTHER]) for _ in range(6)))


def _may_take(device: BoardDevice, task: BoardTask) -> bool:
    is_like = task.goes_on_with in device.traits.offers
    return device.up and not device.cordoned and is_like


def test_stored_command_begins_again_only_if_no_device_like_its_own_takes_work() -> None:
    went_on = began_again = 0
    for seed in range(400):
        drawn = _drawn(random.Random(seed))
        for decision in plan(drawn).decisions:
            task = drawn.tasks[decision.task]
            if decision.move != Move.Launch or not task.goes_on_with:
                continue
            if decision.device == task.image_on:
                went_on += 1
            elif _may_take(drawn.devices[str(decision.device)], task):
                assert task.saved or task.image_on is None or not drawn.devices[task.image_on].up
                went_on += 1
            else:
                assert not any(_may_take(d, task) for d in drawn.devices.values()), seed
                began_again += 1
    assert min(went_on, began_again) > 20


def test_board_that_follows_changes_of_devices_decides_as_a_new_one_does() -> None:
    launched = 0
    for seed in range(300):
        dice = random.Random(seed)
        drawn, after = _drawn(dice), _drawn(dice).devices
        board = Board.of(drawn, now_s=NOW_S)
        held = {id for task in drawn.tasks.values() for id in task.seats}
        devices = {id: after[id] if id not in held else d for id, d in drawn.devices.items()}
        for device in devices.values():
            board.set_device(device)
        decided = cycle(board).decisions
        assert decided == plan(replace(drawn, devices=devices)).decisions, seed
        launched += sum(decision.move == Move.Launch for decision in decided)
    assert launched > 300


def test_choice_keeps_what_the_task_asked_for() -> None:
    assert choice_where_it_goes_on("+big,!mount:data", ONE) == f"+big,!{ONE},!mount:data"


@pytest.mark.parametrize(
    ("run_kind", "capabilities", "because", "told"),
    [
        ("job", [], "", ""),
        ("command", [], "", ""),
        ("job", ["pause", "save", "move"], "", "between two steps"),
        ("graph", ["pause", "save", "move"], "", "between two nodes"),
        ("command", ["pause", "restart", "move"], "", "go on elsewhere where they stood"),
        ("command", ["pause", "restart"], "it may use the network", "folder: it may use the net"),
        ("function", [], "", "It cannot move"),
    ],
)
def test_movement_is_told_in_a_sentence(run_kind, capabilities, because, told) -> None:
    said = movement(run_kind, capabilities, because)
    assert told in said
    assert bool(told) == bool(said)
