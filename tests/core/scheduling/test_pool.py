"""A task gets only devices that suit its choice, in any way to a device."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from app.core.fairness.fair_tree import lane
from app.core.model.device_choice import NO_TRAITS, DeviceTraits, choice_in
from app.core.model.snapshot import Plan, Policy, Snapshot
from app.core.scheduling.board import Board
from app.core.scheduling.cycle import cycle, decide
from app.core.scheduling.pool import Pool
from app.core.scheduling.reclaim.defragment import moves
from app.core.scheduling.record import as_json, from_json
from tests.core.pictures import NOW_S, codes, island, seats
from tests.thoroughness import over_seeds

NO_SPOT: dict[str, Any] = {"choice": "-spot"}


def labelled(drawn: Snapshot, **labels: str) -> Snapshot:
    """The same island; `d0="spot"` gives the device d0 that label."""
    devices = {
        id: replace(device, traits=DeviceTraits(labels=(labels[id],) if id in labels else ()))
        for id, device in drawn.devices.items()
    }
    return replace(drawn, devices=devices)


def plan(drawn: Snapshot) -> Plan:
    return decide(drawn, now_s=NOW_S)


def test_launch_on_a_free_device_passes_over_the_label() -> None:
    drawn = island(". .", queue="a b", tasks={"a": NO_SPOT})
    assert seats(plan(labelled(drawn, d0="spot"))) == "d0: b  d1: a"


def test_launch_without_a_device_that_fits_leaves_the_device_to_the_next_task() -> None:
    decided = plan(labelled(island(".", queue="a b", tasks={"a": NO_SPOT}), d0="spot"))
    assert seats(decided) == "d0: b"
    assert codes(decided, "a") == ["NO_DEVICE_UP"]
    assert decided.reasons["a"][0].message == "No cpu device without label spot is up (known: 0)."


def test_preemption_takes_only_a_device_without_the_label() -> None:
    drawn = island("b c", queue="a", used={"b": 90, "c": 10}, tasks={"a": NO_SPOT})
    assert seats(plan(drawn)) == "d0: b>a"
    assert seats(plan(labelled(drawn, d0="spot"))) == "d1: c>a"


def test_growth_of_an_elastic_task_stops_at_the_label() -> None:
    elastic = {**NO_SPOT, "width": 1, "width_max": 3, "across_hosts": True}
    policy = Policy(half_life_s=0.0, grow_after_s=0.0)
    drawn = island("a . .", tasks={"a": elastic}, policy=policy)
    assert [d.devices for d in plan(drawn).decisions] == [("d0", "d1", "d2")]
    assert [d.devices for d in plan(labelled(drawn, d1="spot")).decisions] == [("d0", "d2")]


def test_a_task_moves_to_the_labelled_device_for_one_that_avoids_it() -> None:
    tasks = {"a": {"movable": True}, "b": NO_SPOT}
    board = Board.of(
        labelled(island("a .", queue="b", used={"b": 100}, tasks=tasks), d1="spot"), now_s=NOW_S
    )
    cycle(board)
    assert moves(board) == [("a", "d1")]


def test_a_task_that_avoids_the_label_too_does_not_move_there() -> None:
    tasks = {"a": {**NO_SPOT, "movable": True}, "b": NO_SPOT}
    board = Board.of(
        labelled(island("a .", queue="b", used={"b": 100}, tasks=tasks), d1="spot"), now_s=NOW_S
    )
    cycle(board)
    assert moves(board) == []


def test_a_task_whose_image_is_on_a_device_goes_on_there_whatever_its_label() -> None:
    pinned = {**NO_SPOT, "image_on": "d0", "saved": False, "epoch": 1}
    drawn = labelled(island(".", queue="a", tasks={"a": pinned}), d0="spot")
    assert seats(plan(drawn)) == "d0: a"


def test_a_recorded_snapshot_keeps_labels() -> None:
    drawn = labelled(island(". .", queue="a", tasks={"a": NO_SPOT}), d0="spot")
    assert from_json(as_json(drawn)) == drawn


@over_seeds(range(50))
def test_counts_are_those_of_the_devices_that_suit(seed: int) -> None:
    dice = random.Random(seed)
    pool = Pool("cpu")
    for n in range(dice.randint(0, 8)):
        id, memory = f"d{n}", dice.choice([4, 8])
        pool.open[id], pool.hosts[id] = memory, dice.choice("hi")
        pool.sizes[memory] += 1
        if labels := [label for label in ("old", "spot") if dice.random() < 0.4]:
            pool.traits[id] = DeviceTraits(labels=tuple(labels))
        if dice.random() < 0.6:
            pool.add(id, leaving=dice.random() < 0.5)
    for choice in ["", "-spot", "-old,-spot", "+old", "+old,-spot"]:
        for host in (None, "h"):
            for memory in (0, 6):
                here = lane("cpu", 1, memory, host=host, choice=choice)
                assert pool.fitting(here) == sum(pool.takes(id, here) for id in pool.free)
                assert pool.size(here) == sum(pool.takes(id, here) for id in pool.open)
                every = lane("cpu", pool.fitting(here), memory, host=host, choice=choice)
                chosen = pool.best(every, None, frozenset())
                assert len({*chosen}) == pool.fitting(here)
                wanted = choice_in(choice)
                assert all(wanted.suits(pool.traits.get(id, NO_TRAITS)) for id in chosen)
