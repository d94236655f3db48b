"""Gangs get devices near each other, and nothing else about a round changes by that."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from app.core.fairness.fair_tree import lane
from app.core.model.lifecycle import Move
from app.core.model.snapshot import Plan, Policy, Snapshot
from app.core.scheduling.cycle import decide
from app.core.scheduling.gangs.nearness import Location, common, nearest, told
from app.core.scheduling.pool import Pool
from app.core.scheduling.record import as_json, from_json
from tests.core.pictures import NOW_S, island
from tests.thoroughness import over_seeds

WIDE: dict[str, Any] = {"width": 2, "across_hosts": True}


def placed(drawn: Snapshot, *locations: str) -> Snapshot:
    """The same island; a location is RACK/HOST/..., in the order of the devices."""
    devices = {}
    for device, location in zip(drawn.devices.values(), locations, strict=True):
        rack, host, *inside = location.split("/")
        devices[device.id] = replace(device, rack=rack, host=host, inside=tuple(inside))
    return replace(drawn, devices=devices)


def launches(plan: Plan) -> dict[str, tuple[str, ...]]:
    return {d.task: d.devices for d in plan.decisions if d.move == Move.Launch}


def decided(drawn: Snapshot) -> Plan:
    return decide(drawn, now_s=NOW_S)


# --- examples -------------------------------------------------------------------------------------


def test_gang_gets_two_devices_of_one_switch() -> None:
    drawn = placed(
        island(". . . .", queue="a", tasks={"a": {"width": 2, "one_host": True}}),
        "r1/h/numa0/s1", "r1/h/numa0/s2", "r1/h/numa1/s3", "r1/h/numa1/s3",
    )  # fmt: skip
    plan = decided(drawn)
    assert launches(plan) == {"a": ("d2", "d3")}
    assert plan.decisions[0].because == (
        "Started: a device was free and this task was next. "
        "Its 2 devices are near each other: numa1/s3 of h."
    )


def test_one_host_gang_goes_to_the_host_with_nearer_devices() -> None:
    drawn = placed(
        island(". . . .", queue="a", tasks={"a": {"width": 2, "one_host": True}}),
        "r/g/n0", "r/g/n1", "r/h/n0", "r/h/n0",
    )  # fmt: skip
    assert launches(decided(drawn)) == {"a": ("d2", "d3")}


def test_one_host_gang_does_not_wait_for_the_host_with_nearer_devices() -> None:
    drawn = placed(
        island(". . . b", queue="a", tasks={"a": {"width": 2, "one_host": True}}),
        "r/g/n0", "r/g/n1", "r/h/n0", "r/h/n0",
    )  # fmt: skip
    assert launches(decided(drawn)) == {"a": ("d0", "d1")}


def test_gang_over_hosts_stays_in_a_rack() -> None:
    drawn = placed(island(". . .", queue="a", tasks={"a": WIDE}), "r1/h1", "r2/h2", "r1/h3")
    plan = decided(drawn)
    assert launches(plan) == {"a": ("d0", "d2")}
    assert plan.decisions[0].because.endswith("Its 2 devices are on 2 hosts of rack r1.")


def test_the_smallest_location_that_is_large_enough_is_taken() -> None:
    """So that the larger one stays whole for a wider gang."""
    drawn = placed(
        island(". . . . .", queue="a b", tasks={"a": WIDE, "b": {**WIDE, "width": 3}}),
        "r/h/n0", "r/h/n0", "r/h/n0", "r/h/n1", "r/h/n1",
    )  # fmt: skip
    assert launches(decided(drawn)) == {"a": ("d3", "d4"), "b": ("d0", "d1", "d2")}


def test_gang_does_not_wait_for_devices_that_are_near() -> None:
    drawn = placed(island(". b .", queue="a", tasks={"a": WIDE}), "r1/h1/n0", "r1/h1/n0", "r2/h2")
    assert launches(decided(drawn)) == {"a": ("d0", "d2")}


def test_smaller_devices_come_before_nearer_ones() -> None:
    drawn = placed(island(". . . .", queue="a", tasks={"a": WIDE}), *["r/h/n0", "r/h/n1"] * 2)
    devices = {
        id: replace(one, memory_bytes=4 if id in ("d0", "d1") else 8)
        for id, one in drawn.devices.items()
    }
    assert launches(decided(replace(drawn, devices=devices))) == {"a": ("d0", "d1")}


def test_an_elastic_task_grows_near_its_devices() -> None:
    elastic = {"width": 1, "width_max": 2, "across_hosts": True}
    drawn = placed(
        island(". a .", tasks={"a": elastic}, policy=Policy(half_life_s=0.0, grow_after_s=0.0)),
        "r/h/n0", "r/h/n1", "r/h/n1",
    )  # fmt: skip
    assert [d.devices for d in decided(drawn).decisions] == [("d1", "d2")]


def test_without_locations_nothing_is_said_and_the_first_devices_are_taken() -> None:
    drawn = island(". . .", queue="a", tasks={"a": WIDE})
    plan = decided(drawn)
    assert launches(plan) == {"a": ("d0", "d1")}
    assert plan.decisions[0].because == "Started: a device was free and this task was next."


def test_a_recorded_snapshot_keeps_locations() -> None:
    drawn = placed(island(". .", queue="a", tasks={"a": WIDE}), "r1/h1/n0", "/h2")
    assert from_json(as_json(drawn)) == drawn


@pytest.mark.parametrize(
    ("locations", "sentence"),
    [
        ([("r", "h", "n0"), ("r", "h", "n1")], "Its 2 devices are on h, in different parts of it."),
        ([("r", "h"), ("q", "g"), ("q", "g")], "Its 3 devices are on 2 hosts."),
        ([("", "h"), ("", "g")], ""),
        ([("r", "h", "n0")], ""),
    ],
)
def test_how_near_devices_are_is_said_in_a_sentence(
    locations: list[Location], sentence: str
) -> None:
    assert told(locations) == sentence


# --- properties -----------------------------------------------------------------------------------


def drawn_locations(dice: random.Random, n: int) -> dict[str, Location]:
    def one() -> Location:
        whole = tuple(f"{level}{dice.randint(0, 2)}" for level in "rhns")
        return whole[: dice.randint(2, 4)]

    return {f"d{i}": one() for i in range(n)}


@over_seeds(range(60))
def test_chosen_devices_are_as_near_as_any_and_in_as_few_parts(seed: int) -> None:
    dice = random.Random(seed)
    locations = drawn_locations(dice, dice.randint(2, 8))
    ids = sorted(locations)
    count = dice.randint(1, len(ids))

    def quality(some: tuple[str, ...]) -> tuple[int, int]:
        shared = len(common(locations[id] for id in some))
        return shared, -len({locations[id][: shared + 1] for id in some})

    chosen = nearest(ids, count, (), locations)
    assert len({*chosen}) == count
    assert chosen == sorted(chosen)
    assert quality(tuple(chosen)) == max(map(quality, combinations(ids, count)))


@over_seeds(range(40))
def test_devices_beside_others_share_the_most_with_them(seed: int) -> None:
    dice = random.Random(seed)
    locations = drawn_locations(dice, 8)
    ids = sorted(locations)
    beside, rest = ids[:2], ids[2:]

    def shared(id: str) -> int:
        return max(len(common([locations[id], locations[other]])) for other in beside)

    chosen = nearest(rest, 3, beside, locations)
    others = [shared(id) for id in rest if id not in chosen]
    assert min(map(shared, chosen)) >= max(others)


@over_seeds(range(60))
def test_a_gang_takes_devices_of_the_same_classes_with_locations_as_without(seed: int) -> None:
    """Of the same memory, leaving or not, waited for or not: what is left for others is equal."""
    dice = random.Random(seed)
    flat, near = Pool("cpu"), Pool("cpu")
    locations = drawn_locations(dice, dice.randint(1, 9))
    for id, location in locations.items():
        memory, leaving = dice.choice([4, 8]), dice.random() < 0.4
        for pool in (flat, near):
            pool.open[id], pool.hosts[id] = memory, "h"
            pool.lies_at(id, location if pool is near else ("", "h"))
            pool.add(id, leaving=leaving)
    pinned = [id for id in locations if dice.random() < 0.3]
    for width in range(1, len(locations) + 2):
        here = lane("cpu", width, dice.choice([0, 8]))
        classes = [
            Counter((pool.free[id], id in pinned, pool.open[id]) for id in chosen)
            for pool in (flat, near)
            for chosen in [pool.best(here, None, pinned)]
        ]
        assert classes[0] == classes[1]
        assert near.best(here, None, pinned) == near.best(here, None, pinned), "it takes nothing"


@over_seeds(range(40))
def test_the_same_tasks_start_in_the_same_order_with_locations_as_without(seed: int) -> None:
    dice = random.Random(seed)
    cells = " ".join(dice.choice([".", ".", "a", "b'", "c"]) for _ in range(8))
    queue = " ".join(dice.choice("abcde") for _ in range(6))
    names = {f"{who}.{n}" if n > 1 else who for who in "abcde" for n in range(1, 8)}
    tasks: dict[str, dict[str, Any]] = {name: {"across_hosts": True} for name in names}
    drawn = island(cells, queue=queue, used={w: dice.randint(0, 50) for w in "abc"}, tasks=tasks)
    widths = {id: dice.randint(1, 3) for id, t in drawn.tasks.items() if t.state == "waiting"}
    wide = {id: replace(drawn.tasks[id], width=width) for id, width in widths.items()}
    drawn = replace(drawn, tasks={**drawn.tasks, **wide})
    hosts = ["/".join(location) for location in drawn_locations(dice, 8).values()]

    def moved(plan: Plan) -> list[tuple[str, str, str, int]]:
        return [
            (d.task, str(d.move), d.rule, len(d.devices))
            for d in plan.decisions
            if d.move != Move.Splice
        ]

    plain, near = decided(drawn), decided(placed(drawn, *hosts))
    assert moved(plain) == moved(near)
    assert plain.places == near.places
