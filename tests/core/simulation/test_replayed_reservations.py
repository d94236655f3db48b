"""Reservations on the virtual clock: who gets the devices of a window, how soon, and what idles."""

from __future__ import annotations

import random

import pytest

from app.core.fairness.reservation import ReservedTime
from app.core.model.snapshot import BoardDevice, BoardTenant, Policy
from app.core.simulation.replayed_reservations import ReservedFor
from app.core.simulation.simulator import Arrival, Costs, Report, simulate

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


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_month_with_windows_keeps_what_is_promised(seed: int) -> None:
    """Eight tenants keep all devices busy, and twelve have a window, in which work arrives at once.

    Nobody waits longer there than a reclaim, and what is held in a window is what is owed, but for
    the reclaim.
    """
    chance = random.Random(seed)
    tenants = [tenant(f"t{n}") for n in range(12)]
    devices, month_s = 8, 30 * 24 * HOUR_S
    arrivals = [arrival(f"busy{n}", month_s, of=f"t{n}", user="busy") for n in range(devices)]
    windows, owed_s, mine = list[ReservedFor](), 0.0, list[Arrival]()
    for n in range(12):
        begins_s = (2 + 2 * n) * 24 * HOUR_S + chance.randrange(0, 20) * HOUR_S
        number, lasts_s = chance.randint(1, 4), 12 * HOUR_S
        windows.append(window(begins_s, begins_s + lasts_s, number, f"t{n}"))
        owed_s += number * lasts_s
        mine += [
            arrival(f"mine{n}-{k}", lasts_s, at_s=begins_s, of=f"t{n}", user="mine")
            for k in range(number)
        ]
    boards = [BoardDevice(id=f"d{n}", host="h", kind="cpu") for n in range(devices)]
    report = simulate(
        [*arrivals, *mine], boards, tenants, POLICY, costs=COSTS, reserved=windows,
        checked=False, keep_timeline=False,
    )  # fmt: skip
    assert all(report.waits_s[one.task] <= RECLAIM_S for one in mine)
    late_s = sum(report.finished[one.task] - one.at_s - one.work_s for one in mine)
    assert late_s <= 0.01 * owed_s
    # before, between and inside the windows no device stood idle
    until = simulate(
        [*arrivals, *mine], boards, tenants, POLICY, costs=COSTS, reserved=windows,
        checked=False, keep_timeline=False, until_s=month_s,
    )  # fmt: skip
    assert sum(until.device_s.values()) >= 0.999 * devices * month_s
