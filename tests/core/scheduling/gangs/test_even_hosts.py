"""A gang on even hosts has as many devices on each of exactly as many hosts as it names."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import combinations
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from app.core.model.device_choice import DeviceChoice, text_of
from app.core.model.lifecycle import Move
from app.core.model.snapshot import BoardDevice, BoardTenant, Plan, Policy, Snapshot
from app.core.scheduling.cycle import decide
from app.core.scheduling.gangs.even_hosts import DeviceOffer, chosen_evenly
from app.core.scheduling.stays import NEVER
from app.core.simulation.simulator import Arrival, Costs, Report, simulate
from tests.core.pictures import NOW_S, codes, island
from tests.thoroughness import over_seeds

COSTS = Costs(start_s=0.05, pause_s=0.01, image_s=0.02, resume_s=0.02)


def on_hosts(hosts: int, width: int, **more: Any) -> dict[str, Any]:
    choice = text_of(DeviceChoice(hosts=hosts))
    return {"width": width, "choice": choice, "across_hosts": True, **more}


def placed(drawn: Snapshot, hosts: str) -> Snapshot:
    """The same island; `hosts` are RACK/HOST or HOST, in the order of the devices."""
    devices = {}
    for device, place in zip(drawn.devices.values(), hosts.split(), strict=True):
        rack, _, host = place.rpartition("/")
        devices[device.id] = replace(device, rack=rack, host=host)
    return replace(drawn, devices=devices)


def decided(drawn: Snapshot) -> Plan:
    return decide(drawn, now_s=NOW_S)


def launched(plan: Plan) -> dict[str, tuple[str, ...]]:
    return {d.task: d.devices for d in plan.decisions if d.move == Move.Launch}


def paused(plan: Plan) -> set[str]:
    return {d.task for d in plan.decisions if d.move == Move.Pause}


# --- the choice -----------------------------------------------------------------------------------

_HOSTS = st.lists(
    st.lists(st.tuples(st.sampled_from([0.0, 5.0, NEVER]), st.integers(0, 4)), max_size=5),
    max_size=6,
)


def _chosen(
    offers: list[DeviceOffer], locations: dict[str, Any], hosts: int, share: int
) -> tuple[str, ...]:
    sizes = Counter(location[1] for location in locations.values())
    return chosen_evenly(offers, hosts=hosts, width=hosts * share, sizes=sizes, locations=locations)


def _offered(drawn: list[list[tuple[float, int]]]) -> tuple[list[DeviceOffer], dict[str, Any]]:
    offers, locations = list[DeviceOffer](), dict[str, Any]()
    for h, there in enumerate(drawn):
        for n, (at_s, cost) in enumerate(there):
            id = f"h{h}.{n}"
            offers.append(DeviceOffer(at_s, cost, (float(n % 2),), id, is_idle=cost == 0))
            locations[id] = (f"r{h % 2}", f"h{h}", f"s{n % 2}")
    return offers, locations


@given(_HOSTS, st.integers(2, 3), st.integers(1, 3), st.randoms(use_true_random=False))
def test_choice_has_equal_parts_wherever_an_oracle_finds_some(
    drawn: list[list[tuple[float, int]]], hosts: int, share: int, dice: random.Random
) -> None:
    offers, locations = _offered(drawn)
    dice.shuffle(offers)
    chosen = _chosen(offers, locations, hosts, share)
    by_id = {offer.id: offer for offer in offers}
    could = [
        max(at_s for part in parts for at_s in part)
        for parts in combinations(
            [sorted(at_s for at_s, _ in there)[:share] for there in drawn if len(there) >= share],
            hosts,
        )
    ]
    assert bool(chosen) == bool(could)
    if chosen:
        counts = Counter(locations[id][1] for id in chosen)
        assert len({*chosen}) == hosts * share
        assert set(counts.values()) == {share}
        assert len(counts) == hosts
        assert max(by_id[id].at_s for id in chosen) == min(could)  # no later than it could be


@given(_HOSTS, st.integers(2, 3), st.integers(1, 3), st.randoms(use_true_random=False))
def test_choice_does_not_depend_on_the_order_of_the_offers(
    drawn: list[list[tuple[float, int]]], hosts: int, share: int, dice: random.Random
) -> None:
    offers, locations = _offered(drawn)
    first = _chosen(offers, locations, hosts, share)
    dice.shuffle(offers)
    assert _chosen(offers, locations, hosts, share) == first


@given(st.lists(st.integers(0, 5), max_size=6), st.integers(2, 3), st.integers(1, 3))
def test_choice_among_idle_devices_breaks_up_as_few_as_possible(
    sizes: list[int], hosts: int, share: int
) -> None:
    offers, locations = _offered([[(0.0, 0)] * size for size in sizes])
    chosen = _chosen(offers, locations, hosts, share)
    used = {locations[id][1] for id in chosen}
    left = sum(sizes[int(host[1:])] - share for host in used)
    fits = sorted(size - share for size in sizes if size >= share)
    assert not chosen or left == sum(fits[:hosts])


# --- a round --------------------------------------------------------------------------------------


def test_gang_takes_as_many_devices_on_each_of_its_hosts() -> None:
    drawn = placed(island(". . . . .", queue="a", tasks={"a": on_hosts(2, 4)}), "g g g h h")
    assert launched(decided(drawn)) == {"a": ("d0", "d1", "d3", "d4")}


def test_gang_does_not_start_with_three_devices_on_one_host_and_one_on_another() -> None:
    drawn = placed(island(". . . b' .", queue="a", tasks={"a": on_hosts(2, 4)}), "g g g h h")
    plan = decided(drawn)
    assert launched(plan) == {}
    reason = next(one for one in plan.reasons["a"] if one.code == "GANG_NEEDS_MORE_DEVICES")
    assert reason.message == "Needs 2 hosts with 2 free cpu devices each; 1 has them."
    assert (reason.change.action, reason.change.value) == ("free_devices", 1)


def test_gang_is_told_that_too_few_hosts_have_enough_devices_that_take_work() -> None:
    drawn = placed(island(". . . # .", queue="a", tasks={"a": on_hosts(2, 4)}), "g g g h h")
    plan = decided(drawn)
    reason = next(one for one in plan.reasons["a"] if one.code == "TOO_FEW_DEVICES")
    assert reason.message == "Needs 2 hosts with 2 cpu devices each that take work; 1 has them."
    assert (reason.change.action, reason.change.value) == ("open_devices", 1)
    assert "DEVICE_FREE" not in codes(plan, "a")


def test_gang_takes_hosts_with_exactly_enough_idle_devices_and_leaves_a_whole_host() -> None:
    drawn = placed(
        island(". . . . . b' . .", queue="a", tasks={"a": on_hosts(2, 4)}), "f f f g g g h h"
    )
    assert launched(decided(drawn)) == {"a": ("d3", "d4", "d6", "d7")}


def test_gang_takes_a_host_that_it_fills_before_one_where_others_run() -> None:
    drawn = placed(
        island(". . b' . . . .", queue="a", tasks={"a": on_hosts(2, 4)}), "f f f g g h h"
    )
    assert launched(decided(drawn)) == {"a": ("d3", "d4", "d5", "d6")}


def test_gang_takes_equal_hosts_of_one_rack() -> None:
    drawn = placed(
        island(". . . . . .", queue="a", tasks={"a": on_hosts(2, 4)}),
        "r1/f r1/f r2/g r2/g r1/h r1/h",
    )
    assert launched(decided(drawn)) == {"a": ("d0", "d1", "d4", "d5")}


def test_gang_pauses_tasks_only_where_that_gives_it_equal_parts() -> None:
    """Three devices would be free on g after two pauses there; one pause on h is enough."""
    drawn = placed(
        island(
            ". . b b2 . b3",
            queue="a",
            tasks={"a": on_hosts(2, 4)},
            used={"b": 9000.0},
            policy=Policy(half_life_s=0.0, slice_min_s=1.0, slice_max_s=5.0),
        ),
        "g g g g h h",
    )
    plan = decided(drawn)
    assert paused(plan) == {"b3"}
    assert launched(plan) == {"a": ("d0", "d1", "d4", "d5")}


def test_gang_pauses_the_best_served_of_those_that_give_way_on_a_host() -> None:
    drawn = placed(
        island(
            "b c . .",
            queue="a",
            tasks={"a": on_hosts(2, 2)},
            used={"b": 500.0, "c": 9000.0},
            policy=Policy(half_life_s=0.0, slice_min_s=1.0, slice_max_s=5.0),
        ),
        "g g h h",
    )
    plan = decided(drawn)
    assert paused(plan) == {"c"}
    assert launched(plan) == {"a": ("d1", "d2")}


def test_devices_kept_for_a_gang_are_equal_parts_and_the_others_go_to_singles() -> None:
    """It needs 2 of each: one of g's four idle devices more would be kept in vain."""
    tasks = {"a": on_hosts(2, 4), "c": {}, "c.2": {}, "c.3": {}}
    drawn = placed(
        island(
            ". . . . . b'",
            queue="a c c c",
            tasks=tasks,
            used={"b": 9000.0, "c": 9000.0},
            policy=Policy(half_life_s=0.0, slice_min_s=1.0, slice_max_s=5.0, waits_from=0.3),
        ),
        "g g g g h h",
    )
    plan = decided(drawn)
    assert set(launched(plan)) == {"c", "c.2"}
    assert {id for ids in launched(plan).values() for id in ids} == {"d2", "d3"}


def test_two_gangs_on_even_hosts_do_not_take_each_others_devices() -> None:
    tasks = {"a": on_hosts(2, 4), "b": on_hosts(2, 4)}
    drawn = placed(island(". . . . . . . .", queue="a b", tasks=tasks), "g g g g h h h h")
    found = launched(decided(drawn))
    assert sorted(len({*ids}) for ids in found.values()) == [4, 4]
    assert len({id for ids in found.values() for id in ids}) == 8


def test_elastic_task_returns_devices_where_the_gang_needs_them() -> None:
    lends = {"width": 1, "width_max": 4, "across_hosts": True, "seats": ("d0", "d1", "d2", "d3")}
    drawn = island("b . . . . .", queue="a", tasks={"a": on_hosts(2, 4), "b": lends})
    plan = decided(placed(drawn, "g g g g h h"))
    assert launched(plan) == {"a": ("d1", "d2", "d4", "d5")}


def test_reserved_devices_are_taken_as_many_on_each_host() -> None:
    """All of g and h is reserved for a; b's task leaves one of h's three devices."""
    drawn = placed(island(". . . b . b'", queue="a", tasks={"a": on_hosts(2, 4)}), "g g g h h h")
    devices = {id: replace(one, reserved_for="a") for id, one in drawn.devices.items()}
    tenants = {**drawn.tenants, "a": replace(drawn.tenants["a"], guarantee={"cpu": 6})}
    plan = decided(replace(drawn, devices=devices, tenants=tenants))
    assert paused(plan) == {"b"}
    assert len({*launched(plan)["a"]} & {"d0", "d1", "d2"}) == 2
    assert {"d3", "d4"} < {*launched(plan)["a"]}


# --- an hour --------------------------------------------------------------------------------------


def hosts(*sizes: int) -> list[BoardDevice]:
    return [
        BoardDevice(id=f"h{h}.{n}", host=f"h{h}", kind="cpu", lease_until_s=NEVER)
        for h, size in enumerate(sizes)
        for n in range(size)
    ]


def tenants(*names: str) -> list[BoardTenant]:
    return [BoardTenant(id=name, name=name, weight=1000) for name in names]


def held_s(report: Report, task: str, until_s: float) -> float:
    """For how long the task held its devices."""
    since_s, total_s = None, 0.0
    for line in report.timeline:
        if line.decision.task == task and line.at_s <= until_s:
            if line.decision.move == Move.Launch:
                since_s = line.at_s
            elif line.decision.move in (Move.Pause, Move.Finished) and since_s is not None:
                total_s, since_s = total_s + line.at_s - since_s, None
    return total_s + (until_s - since_s if since_s is not None else 0.0)


def _singles(dice: random.Random, *, until_s: float, devices: int) -> list[Arrival]:
    """Short tasks of another tenant, more than the devices can take."""
    count = int(until_s * devices / 25)
    return [
        Arrival(
            at_s=dice.uniform(0, until_s),
            task=f"s{i:04}",
            tenant="b",
            user=f"b{i % 3}",
            work_s=dice.uniform(20, 40),
        )
        for i in range(count)
    ]


def _gang(task: str, width: int, hosts: int, *, at_s: float, work_s: float) -> Arrival:
    choice = text_of(DeviceChoice(hosts=hosts))
    return Arrival(
        at_s=at_s, task=task, tenant="a", user="a1", work_s=work_s, width=width, choice=choice
    )


def test_gang_of_two_by_two_does_not_starve_beside_singles() -> None:
    """It is owed half of the eight devices, and needs four of them at once (F7)."""
    until_s = 900.0
    work = _singles(random.Random(7), until_s=until_s, devices=8)
    work.append(_gang("gang", 4, 2, at_s=1.0, work_s=4 * until_s))
    report = simulate(
        work, hosts(4, 4), tenants("a", "b"), Policy(half_life_s=0), costs=COSTS, checked=False
    )
    assert held_s(report, "gang", until_s) >= 0.9 * until_s


def _with_guarantees(dice: random.Random) -> list[BoardTenant]:
    guarantees = [dice.choice([{}, {"cpu": dice.randint(1, 3)}]) for _ in "abc"]
    parties = zip(tenants("a", "b", "c"), guarantees, strict=True)
    return [replace(tenant, guarantee=guarantee) for tenant, guarantee in parties]


@over_seeds(range(12))
def test_random_islands_keep_gangs_on_even_hosts(seed: int) -> None:
    """The simulator checks after each round that parts are equal, and all tasks end."""
    dice = random.Random(seed)
    sizes = [dice.randint(1, 4) for _ in range(dice.randint(2, 4))] + [2, 2]
    work = _singles(dice, until_s=120.0, devices=4)
    for i in range(6):
        width = dice.choice([2, 4])
        at_s, work_s = dice.uniform(0, 100), dice.uniform(10, 90)
        work.append(_gang(f"g{i}", width, 2, at_s=at_s, work_s=work_s))
    for i in range(3):  # tasks that grow where nobody waits
        grows = {"width_max": dice.randint(2, 5), "tenant": "c", "user": "c1"}
        at_s, work_s = dice.uniform(0, 100), dice.uniform(10, 60)
        work.append(Arrival(at_s=at_s, task=f"e{i}", work_s=work_s, **grows))
    policy = Policy(
        half_life_s=0,
        slice_min_s=dice.choice([2.0, 10.0]),
        grow_after_s=2.0,
        turns=dice.random() < 0.7,
        backfill=dice.choice(["easy", "strict"]),
        patience_s=dice.choice([20.0, 36000.0]),
    )
    report = simulate(work, hosts(*sizes), _with_guarantees(dice), policy, costs=COSTS)
    assert {arrival.task for arrival in work} == set(report.finished)
