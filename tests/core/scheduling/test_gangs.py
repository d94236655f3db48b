"""Rule F7: gangs are seated all or nothing, and none starves, behind singles or behind gangs.

EASY's promise is held against the same run without those who went before: a gang for which devices
are kept starts no later for them.  The bounds are those that docs/internals/fair_share.md states.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from app.core.model.lifecycle import Move
from app.core.model.snapshot import BoardDevice, BoardTenant, Policy
from app.core.simulation.simulator import Arrival, Costs, Report, simulate
from tests.thoroughness import rest_long

COSTS = Costs(start_s=0.05, pause_s=0.01, image_s=0.02, resume_s=0.02)


def devices(n: int, **details: Any) -> list[BoardDevice]:
    return [BoardDevice(id=f"d{i:02}", host="h", kind="cpu", **details) for i in range(n)]


def tenants(*names: str) -> list[BoardTenant]:
    return [BoardTenant(id=name, name=name, weight=1000) for name in names]


def started_s(report: Report, task: str) -> float:
    return next(
        line.at_s
        for line in report.timeline
        if line.decision.task == task and line.decision.move == Move.Launch
    )


# --- EASY ---------------------------------------------------------------------------------------


def _easy(seed: int) -> tuple[list[Arrival], list[Arrival], int]:
    """(what runs and the gang that waits for it, who comes behind the gang, devices)."""
    dice, n = random.Random(seed), 8
    before = [_known(f"r{i}", at_s=0.0, work_s=dice.uniform(5, 60), width=1) for i in range(n)]
    gang = _known("gang", at_s=1.0, work_s=20.0, width=dice.randint(2, n))
    behind = [
        _known(
            f"s{i:02}",
            at_s=dice.uniform(1.1, 60),
            work_s=dice.choice([1.0, 5.0, dice.uniform(1, 80)]),
            width=dice.choice([1, 1, 1, 2, 3]),
        )
        for i in range(25)
    ]
    return [*before, gang], behind, n


def _known(task: str, *, at_s: float, work_s: float, width: int) -> Arrival:
    return Arrival(
        at_s=at_s, task=task, tenant="a", user="a1", work_s=work_s, width=width, expected_s=work_s
    )


@pytest.mark.parametrize("first", rest_long(range(0, 150, 75)))
def test_task_backfilled_before_a_gang_does_not_delay_it(first: int) -> None:
    policy, passed = Policy(half_life_s=0, turns=False, backfill="easy"), 0
    for seed in range(first, first + 75):
        base, behind, n = _easy(seed)
        alone = simulate(base, devices(n), tenants("a"), policy, checked=False)
        among = simulate([*base, *behind], devices(n), tenants("a"), policy, checked=False)
        starts_s = started_s(among, "gang")
        assert starts_s <= started_s(alone, "gang") + 1e-6, f"seed {seed}"
        passed += sum(started_s(among, task.task) < starts_s for task in behind)
    assert passed > 150  # the devices kept did not stand idle meanwhile


def test_single_tasks_pass_a_gang_without_end_if_nothing_is_reserved() -> None:
    stream = [_known(f"s{i:03}", at_s=2.0 * i, work_s=9.0, width=1) for i in range(60)]
    work = [*stream, _known("gang", at_s=1.0, work_s=20.0, width=4)]
    starts_s = {
        backfill: started_s(
            simulate(
                work,
                devices(4),
                tenants("a"),
                Policy(half_life_s=0, turns=False, backfill=backfill),
                checked=False,
            ),
            "gang",
        )
        for backfill in ("strict", "easy", "greedy")
    }
    assert starts_s["strict"] == starts_s["easy"] == pytest.approx(9.0)
    assert starts_s["greedy"] > 120


def test_a_device_too_small_for_the_gang_is_not_kept_for_it() -> None:
    policy = Policy(half_life_s=0, turns=False)
    some = [
        *devices(2, memory_bytes=8),
        BoardDevice(id="small", host="h", kind="cpu", memory_bytes=4),
    ]
    work = [
        Arrival(at_s=0, task="r", tenant="a", user="a1", work_s=50, memory_bytes=8, expected_s=50),
        Arrival(at_s=1, task="gang", tenant="a", user="a1", work_s=5, width=2, memory_bytes=8),
        Arrival(at_s=2, task="long", tenant="a", user="a1", work_s=500, memory_bytes=2),
    ]
    report = simulate(work, some, tenants("a"), policy, checked=False)
    assert report.waits_s["long"] == 0
    assert started_s(report, "gang") == pytest.approx(50)


# --- patience -----------------------------------------------------------------------------------


def _stream(dice: random.Random, *, work_s: tuple[float, float], until_s: float) -> list[Arrival]:
    """Singles of other tenants, of unknown length, more than there are devices for."""
    return [
        Arrival(
            at_s=dice.uniform(0, until_s),
            task=f"s{i:04}",
            tenant="bcd"[i % 3],
            user=f"{'bcd'[i % 3]}1",
            work_s=dice.uniform(*work_s),
            tier="basic",
        )
        for i in range(int(1.5 * 4 * until_s / (sum(work_s) / 2)))
    ]


@pytest.mark.parametrize("work_s", [(0.2, 0.9), (1.0, 8.0)], ids=["short", "long"])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.slow
def test_a_gang_starts_soon_after_its_patience_ends(
    width: int, work_s: tuple[float, float]
) -> None:
    """Bound: patience + the longest slice + one switch.  The shorts are never there for a slice."""
    policy = Policy(half_life_s=0, patience_s=20.0, slice_min_s=1.0, slice_max_s=4.0)
    for seed in range(6):
        dice = random.Random(seed)
        gang = Arrival(at_s=5, task="gang", tenant="a", user="a1", work_s=10, width=width)
        work = [*_stream(dice, work_s=work_s, until_s=60), gang]
        report = simulate(
            work, devices(4), tenants(*"abcd"), policy, costs=COSTS, until_s=60, checked=False
        )
        switch_s = COSTS.start_s + COSTS.pause_s + COSTS.image_s
        assert started_s(report, "gang") - 5 <= policy.patience_s + policy.slice_max_s + switch_s


def test_gangs_with_ended_patience_stay_within_their_share_of_devices() -> None:
    """Bound for the k-th: patience + the longest slice + what those before it hold, in turns.

    Six gangs of two on eight devices; half of these are for such gangs, so two sit at a time and
    the k-th waits for floor((k - 1) / 2) rounds of ten seconds, and a slice and switch for each.
    """
    policy = Policy(half_life_s=0, patience_s=20.0, slice_max_s=4.0, aged_share=0.5)
    short = _stream(random.Random(1), work_s=(0.2, 0.9), until_s=120)
    twice = [*short, *(_again(task) for task in short)]
    gangs = [
        Arrival(at_s=5, task=f"g{k}", tenant="a", user=f"a{k}", work_s=10, width=2, tier="basic")
        for k in range(6)
    ]
    report = simulate(
        [*twice, *gangs],
        devices(8),
        tenants(*"abcd"),
        policy,
        costs=COSTS,
        until_s=120,
        checked=False,
    )
    waits_s = sorted(report.waits_s[gang.task] for gang in gangs)
    for k, wait_s in enumerate(waits_s):
        rounds = math.floor(k / 2)
        assert wait_s <= 20.0 + (rounds + 1) * (policy.slice_max_s + 0.1) + rounds * 10


def _again(task: Arrival) -> Arrival:
    return Arrival(
        at_s=task.at_s, task=f"{task.task}x", tenant=task.tenant, user=task.user,
        work_s=task.work_s, tier=task.tier,
    )  # fmt: skip


def test_gang_as_wide_as_the_island_gets_a_turn_and_gives_it_back() -> None:
    """It is more than aged gangs may hold: it starts all the same, but is not left alone."""
    policy = Policy(half_life_s=0, patience_s=20.0, slice_max_s=4.0)
    gang = Arrival(at_s=5, task="gang", tenant="a", user="a1", work_s=1e6, width=4, tier="basic")
    work = [*_stream(random.Random(3), work_s=(0.2, 0.9), until_s=200), gang]
    report = simulate(
        work, devices(4), tenants(*"abcd"), policy, costs=COSTS, until_s=200, checked=False
    )
    assert started_s(report, "gang") - 5 <= 20.0 + 4.0 + 0.1
    assert report.pauses["gang"] >= 2
    others_s = sum(held_s for tenant, held_s in report.device_s.items() if tenant != "a")
    assert others_s > 0.5 * 4 * 200  # it has a quarter by its weight, and so have they


def test_gang_gets_all_its_devices_at_once_or_none() -> None:
    dice = random.Random(7)
    work = _stream(dice, work_s=(1.0, 8.0), until_s=40)
    work += [
        Arrival(at_s=dice.uniform(0, 40), task=f"g{n}", tenant="a", user="a1", work_s=5, width=n)
        for n in (2, 3, 4)
    ]
    report = simulate(work, devices(4), tenants(*"abcd"), Policy(half_life_s=0), costs=COSTS)
    launches = [line.decision for line in report.timeline if line.decision.move == Move.Launch]
    widths = {task.task: task.width for task in work}
    assert all(len(set(launch.devices)) == widths[launch.task] for launch in launches)


# --- nobody starves -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("first", rest_long(range(0, 40, 20)))
def test_the_first_task_of_every_user_starts_within_the_bound(first: int) -> None:
    """The bound, for N tenants of weights w on D devices with slices of q, all new at one instant.

    Tenant i starts its first task within q * (sum over the others of (w_j / w_min + g_j)) / D + 2q:
    each of the others may use so much more before the lightest is strictly the least served even
    with its first turn charged (q * w_j / w_min; i may stand behind it in line), and be in one more
    turn of its widest task (q * g_j) just then; one slice more until a seat may be asked for, and
    one for the rounding of turns.
    """
    for seed in range(first, first + 20):
        dice = random.Random(seed)
        names = "abcdefgh"[: dice.randint(2, 8)]
        weights = {name: dice.choice([1, 1, 2, 4, 8]) for name in names}
        n = dice.randint(1, 4)
        everyone = [BoardTenant(id=id, name=id, weight=1000 * w) for id, w in weights.items()]
        work = [
            Arrival(at_s=0, task=f"{id}{k}", tenant=id, user=f"{id}1", work_s=1e5, tier="basic")
            for id in names
            for k in range(n)
        ]
        report = simulate(
            work, devices(n), everyone, Policy(half_life_s=0), until_s=200, checked=False
        )
        for id in names:
            lightest = min(weights.values())
            beside = sum(weights[j] / lightest + 1 for j in names if j != id)
            assert report.waits_s[f"{id}0"] <= beside / n + 2, f"seed {seed}: {id} of {weights}"
