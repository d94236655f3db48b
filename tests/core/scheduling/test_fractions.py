"""Check where tasks with a fraction of a device start, what gives way, and that none starves.

`simulate` itself checks after every round that no device is promised beyond its thousandths and its
bytes, that no task is paused before a full slice, that no room stays free while a task could use
it, and that a board kept up to date decides like one made anew.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from app.core.fairness.fair_tree import lane
from app.core.model.device_choice import DeviceChoice, choice_in, text_of
from app.core.model.snapshot import BoardDevice, BoardTenant, Plan, Policy, Snapshot
from app.core.scheduling.board import Board
from app.core.scheduling.cycle import cycle, decide
from app.core.scheduling.pool import FreePart, Pool
from app.core.simulation.simulator import Arrival, Costs, Report, simulate
from tests.core.pictures import NOW_S, island, seats
from tests.thoroughness import rest_long, seeds

HALF: dict[str, Any] = {"choice": "%500"}
REAL = Costs(start_s=0.05, pause_s=0.01, save_s=0.5)
GIB = 2**30


def fraction(milli: int, **more: Any) -> dict[str, Any]:
    return {"choice": f"%{milli}", **more}


def plan(drawn: Snapshot) -> Plan:
    return decide(drawn, now_s=NOW_S)


def with_memory(drawn: Snapshot, memory_bytes: int, **more: Any) -> Snapshot:
    devices = {
        id: replace(device, memory_bytes=memory_bytes, **more)
        for id, device in drawn.devices.items()
    }
    return replace(drawn, devices=devices)


# --- the value ----------------------------------------------------------------------------------


def test_a_fraction_is_a_part_of_the_choice_and_of_its_text() -> None:
    choice = DeviceChoice(labels=("fast",), fraction_milli=250)
    assert text_of(choice) == "+fast,%250"
    assert choice_in("+fast,%250") == choice
    assert text_of(DeviceChoice()) == ""
    assert choice_in("").fraction_milli == 1000


def test_a_lane_knows_its_thousandths() -> None:
    assert (lane("cpu").milli, lane("cpu").is_fraction) == (1000, False)
    assert (lane("cpu", choice="%500").milli, lane("cpu", choice="%500").is_fraction) == (500, True)


# --- who starts where -----------------------------------------------------------------------------


def test_two_halves_start_on_one_device() -> None:
    drawn = island(". .", queue="a b", tasks={"a": HALF, "b": HALF})
    assert seats(plan(drawn)) == "d0: a  d0: b"


def test_a_whole_task_needs_an_empty_device() -> None:
    drawn = island("a' .", queue="b c", tasks={"a": HALF})
    assert seats(plan(drawn)) == "d1: b"


def test_a_fraction_goes_to_the_fullest_device_on_which_it_fits() -> None:
    tasks = {"a": fraction(300), "b": fraction(600), "c": fraction(800), "d": fraction(400)}
    drawn = island("a' b' c' .", queue="d", tasks=tasks)
    assert seats(plan(drawn)) == "d1: d"


def test_a_fraction_that_fits_nowhere_waits() -> None:
    drawn = island("a'", queue="b", tasks={"a": fraction(600), "b": HALF})
    assert seats(plan(drawn)) == ""


def test_memory_bounds_what_fits_beside() -> None:
    small = fraction(200, memory_bytes=7)
    drawn = island("a'", queue="b", tasks={"a": small, "b": fraction(200)})
    assert seats(plan(with_memory(drawn, 8))) == "d0: b"  # 200 of 1000 of 8 bytes is 1
    drawn = island("a'", queue="b", tasks={"a": small, "b": fraction(200, memory_bytes=2)})
    assert seats(plan(with_memory(drawn, 8))) == ""


def test_a_cordoned_device_takes_no_fraction() -> None:
    drawn = island("a#", queue="b", tasks={"a": HALF, "b": HALF})
    assert not any(d.move == "Launch" for d in plan(drawn).decisions)


def test_a_fraction_starts_where_another_one_is_leaving() -> None:
    drawn = island("a/ b'", queue="c", tasks={"a": HALF, "b": fraction(900), "c": HALF})
    assert seats(plan(drawn)) == "d0: c"


# --- what it costs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("milli", "memory_bytes", "cost"),
    [(500, 0, 500), (333, 0, 333), (250, 6, 750), (250, 1, 250), (1, 0, 1)],
)
def test_the_charge_is_the_larger_of_fraction_and_memory_share(
    milli: int, memory_bytes: int, cost: int
) -> None:
    drawn = island(".", queue="a", tasks={"a": fraction(milli, memory_bytes=memory_bytes)})
    [launch] = plan(with_memory(drawn, 8)).decisions
    assert launch.cost == cost
    [launch] = plan(with_memory(drawn, 8, cost=3000)).decisions
    assert launch.cost == 3 * cost


def test_a_part_is_never_free_of_charge() -> None:
    drawn = island(".", queue="a", tasks={"a": fraction(1)})
    [launch] = plan(with_memory(drawn, 8, cost=1)).decisions
    assert launch.cost == 1


# --- who gives way --------------------------------------------------------------------------------


def test_a_whole_task_takes_the_place_of_all_fractions_of_a_device() -> None:
    drawn = island("a", queue="c", used={"a": 90, "b": 80}, tasks={"a": HALF})
    beside = replace(drawn.tasks["a"], id="b", request="b", tenant="a", user="a1")
    both = replace(drawn, tasks={**drawn.tasks, "b": beside})
    decided = plan(both)
    assert [(d.task, d.move) for d in decided.decisions] == [
        ("a", "Pause"),
        ("b", "Pause"),
        ("c", "Launch"),
    ]


def test_a_whole_task_waits_until_all_fractions_of_a_device_had_a_slice() -> None:
    drawn = island("a", queue="c", used={"a": 90}, tasks={"a": {**HALF, "cost": 500}})
    fresh = replace(
        drawn.tasks["a"], id="b", request="b", started_s=NOW_S - 0.1, launched_s=NOW_S - 0.1
    )
    decided = plan(replace(drawn, tasks={**drawn.tasks, "b": fresh}))
    assert decided.decisions == ()


def test_a_fraction_takes_the_place_of_as_few_fractions_as_it_needs() -> None:
    drawn = island("a", queue="c", used={"a": 90}, tasks={"a": fraction(300), "c": fraction(600)})
    more = {
        id: replace(drawn.tasks["a"], id=id, request=id, started_s=NOW_S - age_s)
        for id, age_s in (("a8", 8.0), ("a9", 9.0))
    }
    decided = plan(replace(drawn, tasks={**drawn.tasks, **more}))
    paused = sorted(d.task for d in decided.decisions if d.move == "Pause")
    assert len(paused) == 2
    assert seats(decided).startswith("d0: ")


def test_a_device_is_emptied_for_a_whole_task_that_is_due() -> None:
    """A stream of fractions must not pass a whole task that only waits for their slices to end."""
    drawn = island("a'", queue="c a", used={"a": 90}, tasks={"a": HALF, "a.2": HALF})
    assert plan(drawn).decisions == ()
    without = island("a'", queue="a", used={"a": 90}, tasks={"a": HALF, "a.2": HALF})
    assert seats(plan(without)) == "d0: a.2"


# --- minutes of an island -----------------------------------------------------------------------


def devices(n: int, **details: Any) -> list[BoardDevice]:
    return [BoardDevice(id=f"d{i}", host="h", kind="cpu", **details) for i in range(n)]


def tenants(**weights: float) -> list[BoardTenant]:
    return [BoardTenant(id=id, name=id, weight=int(1000 * w)) for id, w in weights.items()]


def stream(tenant: str, *, choice: str, work_s: float, every_s: float, until_s: float) -> list:
    return [
        Arrival(
            at_s=n * every_s,
            task=f"{tenant}{n:04}",
            tenant=tenant,
            user=f"{tenant}1",
            work_s=work_s,
            choice=choice,
        )
        for n in range(int(until_s / every_s))
    ]


def long(tenant: str, choice: str = "", n: int = 1) -> list[Arrival]:
    return [
        Arrival(
            at_s=5.0, task=f"{tenant}{i}", tenant=tenant, user=f"{tenant}1", work_s=1e6,
            choice=choice,
        )
        for i in range(n)
    ]  # fmt: skip


def play(work: list[Arrival], n: int, policy: Policy, until_s: float) -> Report:
    """Play without a check of each step: random islands with fractions are checked below."""
    both = tenants(a=1, b=1)
    return simulate(work, devices(n), both, policy, costs=REAL, until_s=until_s, checked=False)


PLAIN = Policy(half_life_s=0.0, tier_share={})


@pytest.mark.parametrize("work_s", [0.3, 0.7, 3.0])
@pytest.mark.parametrize("choice", ["%500", "%300", "%900"])
def test_a_whole_task_gets_its_share_beside_a_stream_of_fractions(
    work_s: float, choice: str
) -> None:
    """The stream would fill the device all the time, and its tasks end before their slices do."""
    every_s = work_s * choice_in(choice).fraction_milli / 1000 / 1.2  # a fifth more than fits
    work = stream("a", choice=choice, work_s=work_s, every_s=every_s, until_s=30)
    report = play([*work, *long("b")], 1, PLAIN, 30)
    assert report.device_s["b"] >= 0.3 * 30


def test_a_whole_task_of_the_same_user_is_not_passed_for_ever() -> None:
    stream_ = stream("a", choice="%500", work_s=0.7, every_s=0.2, until_s=30)
    whole = Arrival(at_s=5.0, task="whole", tenant="a", user="a1", work_s=5.0)
    report = play([*stream_, whole], 1, PLAIN, 30)
    assert report.finished["whole"] < 28


@pytest.mark.parametrize(("choice", "filled"), [("%500", 1.0), ("%100", 0.4), ("%900", 0.9)])
def test_fractions_get_their_share_beside_whole_tasks(choice: str, filled: float) -> None:
    """Fractions pay for the part of the device that the whole tasks cannot use meanwhile."""
    report = play([*long("b", n=3), *long("a", choice, n=4)], 1, PLAIN, 120)
    waits = [report.waits_s[task] for task in report.waits_s if task.startswith("a")]
    assert len(waits) >= 1
    assert min(waits) < 5.0
    assert report.device_s["a"] == pytest.approx(filled * report.device_s["b"], rel=0.35)


def test_fractions_without_turns_let_a_whole_task_start() -> None:
    policy = replace(PLAIN, turns=False)
    stream_ = stream("a", choice="%500", work_s=1.0, every_s=0.25, until_s=30)
    whole = Arrival(at_s=5.0, task="whole", tenant="b", user="b1", work_s=5.0)
    report = play([*stream_, whole], 1, policy, 30)
    assert report.waits_s["whole"] < 5.0


def _drawn(dice: random.Random, number: int, devices: int) -> Arrival:
    """A task of any sort: a fraction, a whole one, a gang, or an elastic one."""
    tenant = dice.choice("ab")
    choice = dice.choice(["", "%500", "%300", "%250", "%700"])
    width = 1 if choice else min(devices, dice.choice([1, 1, 1, 2]))
    most = dice.choice([0, 0, 0, min(devices, 3)])
    return Arrival(
        at_s=dice.choice([0.0, dice.uniform(0, 20)]),
        task=f"t{number:02}",
        tenant=tenant,
        user=f"{tenant}{dice.choice('12')}",
        work_s=dice.choice([0.2, 1.5, 6.0]),
        choice=choice,
        memory_bytes=dice.choice([0, 0, 2, 5]) * GIB,
        priority=dice.choice([0, 0, 1]),
        tier=dice.choice(["basic", "standard", "premium"]),
        width=width,
        width_max=most if most > width and not choice else 0,
    )


@pytest.mark.parametrize("seed", rest_long(seeds(range(40)), keep=15))
def test_random_islands_with_fractions_keep_all_rules(seed: int) -> None:
    dice = random.Random(seed)
    there = devices(dice.randint(1, 3), memory_bytes=8 * GIB)
    work = [_drawn(dice, number, len(there)) for number in range(dice.randint(2, 24))]
    both = tenants(a=1, b=2)
    both[0] = replace(both[0], guarantee=dice.choice([{}, {"cpu": 1}]))
    tier_share = dice.choice([{}, {"premium": 0.95, "standard": 0.7, "basic": 0.0}])
    policy = replace(PLAIN, tier_share=tier_share, tier_window_s=60.0, grow_after_s=5.0)
    costs = dice.choice([Costs(), REAL])
    report = simulate(work, there, both, policy, costs=costs, until_s=600)
    assert len(report.finished) == len(work)


# --- the board ------------------------------------------------------------------------------------


def test_the_free_part_follows_every_change() -> None:
    drawn = with_memory(island("a' .", queue="b", tasks={"a": HALF, "b": fraction(300)}), 10)
    board = Board.of(drawn, now_s=NOW_S)
    pool = board.pools["cpu"]
    assert pool.parts == {"d0": FreePart(500, 5)}
    cycle(board)
    assert pool.parts == {"d0": FreePart(200, 2)}
    assert board.group("d0") == [board.stays["a"], board.stays["b"]]
    board.drop_task("a")
    assert pool.parts == {"d0": FreePart(700, 7)}
    assert board.seated == {"d0": "b"}
    board.drop_task("b")
    assert pool.parts == {}
    assert (board.seated, board.fractions) == ({}, {})
    assert sorted(pool.free) == ["d0", "d1"]


def test_a_pool_without_fractions_has_no_parts() -> None:
    assert Pool("cpu").parts == {}
