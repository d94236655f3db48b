"""Reservations on the virtual clock: who gets the devices of a window, how soon, and what idles."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from app.core.fairness.budget import HOUR_US, Budget
from app.core.fairness.reservation import ReservedTime
from app.core.fairness.reserved_devices import Demand
from app.core.model.device_choice import DeviceTraits, with_reservation
from app.core.model.lifecycle import Move
from app.core.model.snapshot import BoardDevice, BoardTenant, BoardUser, Policy
from app.core.simulation.replayed_reservations import (
    Maintained,
    ReplayedReservations,
    ReservedFor,
)
from app.core.simulation.simulator import Arrival, Costs, Report, simulate
from app.core.simulation.what_if import Setup, run
from tests.thoroughness import rest_long

HOUR_S = 3600.0
SLICE_S = 300.0
POLICY = Policy(half_life_s=0.0, tier_share={}, slice_min_s=SLICE_S, slice_max_s=SLICE_S)
COSTS = Costs(start_s=1.0, pause_s=2.0, image_s=3.0, resume_s=1.0)
RECLAIM_S = SLICE_S + COSTS.pause_s + COSTS.image_s  # the bound of a reclaim (F5)


def tenant(id: str, parent: str | None = None) -> BoardTenant:
    return BoardTenant(id=id, name=id, weight=1000, parent=parent)


def arrival(task: str, work_s: float, at_s: float = 0.0, of: str = "a", user: str = "1") -> Arrival:
    owner = f"{of}/{user}"
    return Arrival(at_s=at_s, task=task, tenant=of, user=owner, owner=owner, work_s=work_s)


def window(begins_s: float, ends_s: float, devices: int, *owners: str) -> ReservedFor:
    time = ReservedTime(round(begins_s * 1e6), round(ends_s * 1e6), {"cpu": devices})
    return ReservedFor(owners, time)


def named(it: ReservedFor, *among: str) -> ReservedFor:
    """Let a window take certain devices only."""
    id, number = f"{it.owners}{it.time.begins_us}", it.time.devices["cpu"]
    demand = Demand(id, number, frozenset(among))
    return it._replace(time=it.time._replace(named={"cpu": demand}))


def maintained(begins_s: float, lasts_s: float, *devices: str) -> Maintained:
    return Maintained(devices, round(begins_s * 1e6), round((begins_s + lasts_s) * 1e6))


def replay(arrivals: list[Arrival], *reserved: ReservedFor, devices: int = 4) -> Report:
    tenants = [tenant("a"), tenant("b"), tenant("c"), tenant("a.x", "a")]
    boards = [BoardDevice(id=f"d{n}", host="h", kind="cpu") for n in range(devices)]
    return simulate(arrivals, boards, tenants, POLICY, costs=COSTS, reserved=reserved)


def crowd(tasks: int = 12) -> list[Arrival]:
    return [arrival(f"b{n}", 6 * HOUR_S, of="b") for n in range(tasks)]


def test_before_its_window_a_reservation_changes_nothing() -> None:
    mine = [arrival("mine", HOUR_S, at_s=30 * HOUR_S)]
    plain = replay([*crowd(), *mine])
    reserved = replay([*crowd(), *mine], window(29 * HOUR_S, 60 * HOUR_S, 4, "a"))
    ended = {id: at_s for id, at_s in plain.finished.items() if at_s < 29 * HOUR_S}
    assert ended
    assert {id: reserved.finished[id] for id in ended} == ended


@pytest.mark.parametrize("owners", [("a",), ("a", "a.x"), ("a", "a/1")])
def test_whoever_holds_the_devices_gives_them_back_within_a_slice(owners: tuple[str, ...]) -> None:
    of = "a.x" if "a.x" in owners else "a"
    used_before = arrival("old", 4 * HOUR_S, of="a")
    mine = [arrival(f"mine{n}", HOUR_S, at_s=10 * HOUR_S, of=of) for n in range(4)]
    others = [arrival(f"c{n}", 9 * HOUR_S, at_s=5 * HOUR_S, of="c") for n in range(8)]
    report = replay(
        [used_before, *crowd(), *others, *mine], window(10 * HOUR_S, 14 * HOUR_S, 4, *owners)
    )
    for n in range(4):
        assert report.waits_s[f"mine{n}"] <= RECLAIM_S
        assert report.finished[f"mine{n}"] <= 11 * HOUR_S + RECLAIM_S + COSTS.start_s


def test_what_nobody_wants_of_a_window_is_lent() -> None:
    report = replay(crowd(), window(0.0, 1000 * HOUR_S, 4, "a"))
    assert max(report.finished.values()) <= 12 * 6 * HOUR_S / 4 + 60


def test_after_its_window_a_task_goes_on_as_any_other() -> None:
    mine = [arrival("mine", 8 * HOUR_S, at_s=HOUR_S)]
    report = replay([*mine, *crowd(3)], window(HOUR_S, 2 * HOUR_S, 4, "a"))
    assert report.finished["mine"] <= 9 * HOUR_S + RECLAIM_S
    assert not report.pauses.get("mine")


@pytest.mark.parametrize("owner", ["a", "a/1"])
def test_named_devices_go_to_their_owner_alone(owner: str) -> None:
    """Half of the devices are fast, and c holds them within a guarantee of its own."""
    boards = [
        BoardDevice(
            id=f"d{n}", host="h", kind="cpu", traits=DeviceTraits(labels=("fast",) * (n > 1))
        )
        for n in range(4)
    ]
    tenants = [tenant("a"), replace(tenant("c"), guarantee={"cpu": 2})]
    fast = [replace(arrival(f"c{n}", 9 * HOUR_S, of="c"), choice="+fast") for n in range(2)]
    mine = replace(arrival("mine", 2 * HOUR_S, at_s=3 * HOUR_S), choice="+fast", width=2)
    others = [arrival(f"a{n}", 20 * HOUR_S, user="2") for n in range(3)]
    it = named(window(2 * HOUR_S, 9 * HOUR_S, 2, *{"a": 0, owner: 0}), "d2", "d3")
    arrivals = [*fast, *others, mine]
    report = simulate(arrivals, boards, tenants, POLICY, costs=COSTS, reserved=[it])
    assert report.waits_s["mine"] <= RECLAIM_S
    assert report.finished["mine"] <= 5 * HOUR_S + RECLAIM_S + COSTS.start_s
    assert report.finished.keys() == {one.task for one in arrivals}


def test_device_in_maintenance_is_replaced_by_another_one_of_the_reservation() -> None:
    windows = [named(window(HOUR_S, 9 * HOUR_S, 1, "a"), "d0", "d1")]
    cut = maintained(2 * HOUR_S, HOUR_S, "d0")
    it = ReplayedReservations(windows, [cut])
    kept = [it.kept_for(round(hours * HOUR_S * 1e6)) for hours in (0, 1, 2, 4, 9)]
    mine = "a", ""
    assert kept == [{}, {"d0": mine}, {"d1": mine}, {"d1": mine}, {}]


def gated(task: str, work_s: float, at_s: float = 0.0) -> Arrival:
    return replace(arrival(task, work_s, at_s), reservation="r")


def gate(begins_s: float, ends_s: float, devices: int = 1) -> ReservedFor:
    return window(begins_s, ends_s, devices, "a")._replace(reservation="r")


def test_task_that_names_a_reservation_runs_in_its_windows_alone() -> None:
    mine = [gated("mine", 3 * HOUR_S), arrival("free", HOUR_S)]
    report = replay(mine, gate(2 * HOUR_S, 4 * HOUR_S), gate(10 * HOUR_S, 12 * HOUR_S))
    assert report.waits_s["mine"] == pytest.approx(2 * HOUR_S, abs=COSTS.start_s)
    assert report.waits_s["free"] == pytest.approx(0.0, abs=COSTS.start_s)
    assert report.pauses["mine"] == 1
    assert report.finished["mine"] == pytest.approx(11 * HOUR_S, abs=10)
    # outside its windows it wants no device: nothing is owed to it
    outside = [(HOUR_S + 60, 2 * HOUR_S), (4 * HOUR_S + 60, 10 * HOUR_S)]
    wanted = [
        each.wanted.get(("a/1", "cpu"), 0.0)
        for each in report.intervals
        for from_s, to_s in outside
        if from_s <= each.from_s and each.from_s + each.lasts_s <= to_s
    ]
    assert len(wanted) > 10
    assert not any(wanted)


def test_task_goes_on_after_the_last_window_of_a_replay() -> None:
    report = replay([gated("mine", 3 * HOUR_S)], gate(HOUR_S, 2 * HOUR_S))
    assert not report.pauses
    assert report.finished["mine"] == pytest.approx(4 * HOUR_S, abs=10)


def test_task_that_comes_inside_a_window_starts_at_once() -> None:
    report = replay([gated("mine", HOUR_S, at_s=HOUR_S)], gate(HOUR_S, 3 * HOUR_S))
    assert report.waits_s["mine"] <= COSTS.start_s


def test_task_waits_for_its_window_and_for_what_it_needs() -> None:
    first = gated("first", HOUR_S)
    then = replace(gated("then", HOUR_S), after=("first",))
    last = replace(arrival("last", HOUR_S), after=("first",), reservation="s")
    report = replay(
        [first, then, last], gate(0.0, 2 * HOUR_S), gate(5 * HOUR_S, 9 * HOUR_S),
        window(7 * HOUR_S, 9 * HOUR_S, 1, "a")._replace(reservation="s"),
    )  # fmt: skip
    assert report.finished["then"] == pytest.approx(2 * HOUR_S, abs=20)
    assert report.waits_s["last"] == pytest.approx(7 * HOUR_S, abs=COSTS.start_s)


@pytest.mark.parametrize("named", ["fair", "fifo"])
def test_window_of_a_task_holds_under_every_policy(named: str) -> None:
    setup = Setup(
        arrivals=[replace(gated("mine", HOUR_S), owner="a")],
        devices=[BoardDevice(id="d0", host="h", kind="cpu")],
        tenants=[tenant("a")],
        policy=POLICY,
        reserved=[gate(2 * HOUR_S, 4 * HOUR_S)],
        named=named,
    )
    assert run(setup)[0].finished["mine"] == pytest.approx(3 * HOUR_S, abs=1)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_month_keeps_what_reservations_budgets_limits_and_maintenance_say(seed: int) -> None:
    """Eight of twelve tenants keep all devices busy. Ten have a window, in which work arrives at
    once; two have budgets, one user a limit, and devices are maintained.
    """
    chance = random.Random(seed)
    month_s, day_s = 30 * 24 * HOUR_S, 24 * HOUR_S
    boards = [BoardDevice(id=f"d{n}", host="h", kind="cpu") for n in range(8)]
    tenants = [tenant(f"t{n}") for n in range(12)]
    limited = BoardUser(id="t9/many", tenant="t9", limit={"cpu": 2})
    hours = Budget(grants_us={"cpu": 20 * HOUR_US}, period="week", at={100: "pause"})
    others = [
        *(arrival(f"busy{n}", month_s, of=f"t{n}", user="busy") for n in range(8)),
        *(arrival(f"many{n}", 4 * HOUR_S, day_s, of="t9", user="many") for n in range(4)),
        *(arrival(f"spent{n}", 30 * HOUR_S, of=f"t{n}", user="all") for n in (10, 11)),
    ]
    windows, owed_s, mine = list[ReservedFor](), 0.0, list[Arrival]()
    for n in range(10):
        begins_s = (2 + 2 * n) * day_s + chance.randrange(0, 20) * HOUR_S
        number, lasts_s = chance.randint(1, 4), 12 * HOUR_S
        it = window(begins_s, begins_s + lasts_s, number, f"t{n}")
        among = chance.sample(boards, chance.randint(number, 8))
        windows.append(named(it, *(device.id for device in among)) if n % 2 else it)
        owed_s += number * lasts_s
        mine += [
            arrival(f"mine{n}-{k}", lasts_s, at_s=begins_s, of=f"t{n}", user="mine")
            for k in range(number)
        ]
    cuts = [maintained(5 * day_s, 6 * HOUR_S, "d6", "d7"), maintained(25 * day_s, day_s, "d0")]
    seen: dict[str, Any] = {
        "costs": COSTS, "reserved": windows, "maintained": cuts, "users": [limited],
        "budgets": {"t10": hours, "t11": hours}, "checked": False, "keep_timeline": False,
    }  # fmt: skip
    report = simulate([*others, *mine], boards, tenants, POLICY, **seen)
    assert report.finished.keys() == {one.task for one in [*others, *mine]}
    # no window is missed by more than a reclaim
    assert max(report.waits_s[one.task] for one in mine) <= RECLAIM_S
    late_s = sum(report.finished[one.task] - one.at_s - one.work_s for one in mine)
    assert late_s <= 0.01 * owed_s
    # nobody is above a limit, and what budgets count is what was held
    held = [each.held.get(("t9/many", "cpu"), 0.0) for each in report.intervals]
    assert 0 < max(held) <= 2
    for owner in ("t10", "t11"):
        spent = [us for (whose, _, _), us in report.spent_us.items() if whose == owner]
        assert len(spent) > 1
        assert sum(spent) == round(report.device_s[f"{owner}/all"] * 1e6)
        assert max(spent) <= hours.grants_us["cpu"] + round(RECLAIM_S * 1e6)
    # before and inside the windows no device stands idle, but for those in maintenance
    month = simulate([*others, *mine], boards, tenants, POLICY, **seen, until_s=month_s)
    cut_s = sum(len(one.devices) * (one.ends_us - one.begins_us) / 1e6 for one in cuts)
    assert sum(month.device_s.values()) >= 0.999 * (len(boards) * month_s - cut_s)
    assert sum(month.device_s.values()) <= len(boards) * month_s - cut_s + 3 * RECLAIM_S


def test_devices_in_maintenance_are_empty_and_serve_again() -> None:
    cut = maintained(2 * HOUR_S, HOUR_S, "d0", "d1", "d2", "d3")
    boards = [BoardDevice(id=f"d{n}", host="h", kind="cpu") for n in range(4)]
    report = simulate(
        crowd(4), boards, [tenant("b")], POLICY, costs=COSTS, maintained=[cut], keep_timeline=False
    )
    assert set(report.pauses.values()) == {1}
    assert all(7 * HOUR_S <= at_s <= 7 * HOUR_S + 10 for at_s in report.finished.values())


#: Seeds in which a task was paused on a reserved device before the turn of the one that waited.
ONCE_HASTY = (48, 106)


class Island(NamedTuple):
    """A small island, what comes, and windows of certain devices."""

    arrivals: list[Arrival]
    boards: list[BoardDevice]
    tenants: list[BoardTenant]
    policy: Policy
    windows: list[ReservedFor]

    def replay(self) -> Report:
        return simulate(*self[:4], costs=COSTS, reserved=self.windows)


def island_of(seed: int) -> Island:
    chance = random.Random(seed)
    number = chance.randint(3, 8)
    boards = [
        BoardDevice(
            id=f"d{n}", host=f"h{n // 4}", kind="cpu",
            traits=DeviceTraits(labels=("fast",) * (n % 2)),
        )
        for n in range(number)
    ]  # fmt: skip
    tenants = [
        replace(tenant(id), guarantee={"cpu": 1} if chance.random() < 0.3 else {}) for id in "abcd"
    ]
    arrivals = list[Arrival]()
    for n in range(chance.randint(6, 25)):
        of, work_s = chance.choice("abcd"), chance.choice([20.0, 300.0, 900.0, 4000.0])
        plain = arrival(f"t{n}", work_s, chance.uniform(0, 6000), of, chance.choice("12"))
        more: dict[str, Any] = {
            "choice": chance.choice(["", "", "+fast"]), "width": chance.choice([1, 1, 1, 2]),
            "priority": chance.choice([0, 0, 5]), "tier": chance.choice(["basic", "standard"]),
            "expected_s": chance.choice([None, 500.0]),
        }  # fmt: skip
        if sum(n % 2 or not more["choice"] for n in range(number)) >= more["width"]:
            arrivals.append(replace(plain, **more))
    windows = list[ReservedFor]()
    for n in range(chance.randint(1, 3)):
        of, begins_s, width = chance.choice("ab"), chance.uniform(0, 5000), chance.randint(1, 2)
        owners = (of,) if chance.random() < 0.6 else (f"{of}/1", of)
        among = chance.sample(boards, chance.randint(width, number))
        it = window(begins_s, begins_s + chance.uniform(500, 5000), width, *owners)
        windows.append(named(it, *(device.id for device in among))._replace(reservation=f"r{n}"))
    policy = replace(
        POLICY,
        slice_min_s=chance.choice([5.0, 60.0]),
        tier_share=chance.choice([{}, {"standard": 0.5}]),
        backfill=chance.choice(["easy", "greedy"]),
    )
    return Island(arrivals, boards, tenants, policy, windows)


@pytest.mark.parametrize("seed", rest_long([*ONCE_HASTY, *range(8)], keep=4))
def test_random_windows_of_certain_devices_obey_the_rules(seed: int) -> None:
    """`simulate` checks each step: seats, slices, idle devices, reasons, the board made anew."""
    it = island_of(seed)
    assert it.replay().finished.keys() == {one.task for one in it.arrivals}


@pytest.mark.parametrize("seed", rest_long(range(40), keep=4))
def test_tasks_of_a_reservation_of_certain_devices_start_on_these_alone(seed: int) -> None:
    it = island_of(seed)
    chance, named_by = random.Random(seed), dict[str, ReservedFor]()
    for n, each in enumerate(it.arrivals):
        theirs = [one for one in it.windows if one.owners[0] in (each.user, each.tenant)]
        if theirs and chance.random() < 0.8:
            its = named_by[each.task] = chance.choice(theirs)
            choice = with_reservation(each.choice, its.reservation)
            it.arrivals[n] = replace(each, reservation=its.reservation, choice=choice)
    report = it.replay()
    assert report.finished.keys() == {one.task for one in it.arrivals}
    for line in report.timeline:
        it_takes = named_by.get(line.decision.task)
        if it_takes and line.decision.move == Move.Launch:
            begins_us, ends_us, _, named_ = it_takes.time
            at_us = round(line.at_s * 1e6)
            assert begins_us <= at_us
            assert at_us >= ends_us or {*line.decision.devices} <= named_["cpu"].among
