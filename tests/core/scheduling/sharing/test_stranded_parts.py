"""Check that fractions pay for the part of a device that they make unusable (rule F1)."""

from __future__ import annotations

import random
from typing import Any

import pytest

from app.core.model.device_choice import DeviceTraits
from app.core.model.lifecycle import Move
from app.core.model.snapshot import BoardDevice, BoardTenant, Policy
from app.core.scheduling.board import Board
from app.core.scheduling.cycle import cycle, decide
from app.core.scheduling.sharing.stranded_parts import split
from app.core.simulation.simulator import Arrival, Costs, Report, simulate
from tests.core.pictures import NOW_S, island
from tests.thoroughness import seeds

UNTIL_S = 300.0
ENDLESS_S = 1e6
TINY: dict[str, Any] = {"choice": "%100", "cost": 100}


def costs(drawn: Any) -> dict[str, int]:
    decisions = decide(drawn, now_s=NOW_S).decisions
    return {one.task: one.cost for one in decisions if one.move == Move.Charge}


def test_fraction_pays_for_the_device_while_anothers_whole_task_waits() -> None:
    assert costs(island("a'", queue="b", tasks={"a": TINY})) == {"a": 1000}
    assert costs(island("a'", queue="", tasks={"a": TINY})) == {}


def test_fraction_that_paid_for_the_device_pays_for_its_part_when_nobody_waits() -> None:
    assert costs(island("a'", queue="", tasks={"a": {**TINY, "cost": 1000}})) == {"a": 100}


def test_fraction_pays_for_its_part_while_others_wait_for_another_kind() -> None:
    tasks = {"a": TINY, "b": {"kind": "cuda"}}
    assert costs(island("a'", queue="b", tasks=tasks)) == {}


def test_costs_stay_as_they_are_until_all_waiting_tasks_are_known() -> None:
    drawn = island("a'", queue="b", tasks={"a": TINY})
    board = Board.of(drawn, now_s=NOW_S)
    [line] = board.tree.lanes
    board.short.add((board.leaf(drawn.tasks["b"]), line))
    assert [one.task for one in cycle(board).decisions if one.move == Move.Charge] == []


def test_cost_is_divided_exactly_and_in_proportion() -> None:
    assert split(1000, [1, 1, 1]) == [333, 333, 334]
    assert split(1000, [100, 300]) == [250, 750]
    dice = random.Random(3)
    for _ in range(100):
        parts = [dice.randint(1, 400) for _ in range(dice.randint(1, 9))]
        assert sum(split(whole := dice.randint(1, 9999), parts)) == whole


def work(
    tenant: str, tasks: int, *, choices: tuple[str, ...] = ("",), **more: Any
) -> list[Arrival]:
    return [
        Arrival(at_s=0, task=f"{tenant}{n:04}", tenant=tenant, user=f"{tenant}1", tier="basic",
                choice=choices[n % len(choices)], **{"work_s": ENDLESS_S, **more})
        for n in range(tasks)
    ]  # fmt: skip


def play(arrivals: list[Arrival], devices: int, *, checked: bool, **more: Any) -> Report:
    tenants = sorted({arrival.tenant for arrival in arrivals})
    return simulate(
        arrivals,
        [
            BoardDevice(id=f"d{n}", host="h", kind="cpu", memory_bytes=80,
                        traits=DeviceTraits(labels=(f"n{n}",)))
            for n in range(devices)
        ],
        [BoardTenant(id=name, name=name, weight=1000) for name in tenants],
        Policy(half_life_s=0.0),
        until_s=UNTIL_S,
        checked=checked,
        **more,
    )  # fmt: skip


LABELLED = tuple(f"+n{n},%1" for n in range(4))
STRATEGIES: dict[str, tuple[list[Arrival], int, float]] = {
    # what a tries on so many devices, and the part of them that the honest tenant b is owed
    "a tenth of the device": (work("a", 1, choices=("%100",)), 1, 0.5),
    "a thousandth of the device": (work("a", 1, choices=("%1",)), 1, 0.5),
    "a thousandth of each device, by its label": (work("a", 4, choices=LABELLED), 4, 0.5),
    "half of it and a little": (work("a", 8, choices=("%501",)), 4, 0.5),
    "a little of it, and almost all memory": (
        work("a", 4, choices=("%1",), memory_bytes=79), 4, 0.5,
    ),
    "a stream of short tenths": (work("a", 2500, choices=("%100",), work_s=1.5), 2, 0.5),
}  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_fractions_take_no_more_devices_from_whole_tasks_than_they_pay_for(
    strategy: tuple[list[Arrival], int, float],
) -> None:
    mine, devices, owed = strategy
    report = play([*mine, *work("b", 2 * devices)], devices, checked=False)
    assert report.device_s["b"] == pytest.approx(owed * devices * UNTIL_S, rel=0.03)


@pytest.mark.parametrize("seed", seeds(range(6)))
def test_changed_costs_are_the_same_on_a_board_that_is_built_anew(seed: int) -> None:
    """Checked at every step: the updated board decides as a new one does."""
    dice = random.Random(seed)
    choices = ("", "%1", "%100", "%501", "%300")
    tasks = [
        Arrival(at_s=dice.uniform(0, 20), task=f"t{n:02}", tenant=(name := dice.choice("abc")),
                user=name + dice.choice("12"), work_s=dice.choice([0.5, 3.0, 20.0]),
                choice=dice.choice(choices), tier="basic")
        for n in range(25)
    ]  # fmt: skip
    play(tasks, 2, checked=True, costs=Costs(start_s=dice.choice([0.0, 0.5]), pause_s=0.01))
