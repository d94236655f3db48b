"""Sweeps in the simulator: losers rest at their rungs, and go on when they are among the best."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.model.lifecycle import Move
from app.core.model.provisions.stop_rule import StopRule
from app.core.model.rungs import HELD_AT_RUNG, RungValue, Standings
from app.core.model.snapshot import Policy
from app.core.scheduling.cycle import cycle
from app.core.simulation.replayed_lot import LotRule, RungMark
from app.core.simulation.simulator import Arrival, Costs, World, check, simulate
from tests.core.simulation.test_simulator import REAL, devices, tenants
from tests.thoroughness import examples

POLICY = Policy(half_life_s=0)


def rule(rungs: int = 1, *, keep: float = 0.33, goal: str = "min") -> StopRule:
    return StopRule(metric="loss", goal=goal, rungs=(*range(1, rungs + 1),), keep=keep)


def member(name: str, *values: float | None, work_s: float = 30.0, lot: str = "l") -> Arrival:
    """Return a member that reaches a rung with each of the values, 10 s of work apart."""
    marks = tuple(RungMark(work_s=10.0 * n, value=value) for n, value in enumerate(values, 1))
    who = {"tenant": "a", "user": "a1", "request": lot, "lot": lot}
    return Arrival(at_s=0.0, task=name, work_s=work_s, rungs=marks, **who)


def test_losers_leave_their_devices_at_the_rung_and_end_with_the_lot() -> None:
    members = [member("m0", 0.1), member("m1", 0.2), member("m2", 0.3)]
    lots = {"l": LotRule(stop=rule())}
    report = simulate(members, devices(3), tenants(a=1), POLICY, lots=lots)
    assert report.finished == {"m0": 30.0, "m1": 10.0, "m2": 10.0}
    assert report.device_s == {"a": 50.0}
    assert report.pauses == {"m1": 1, "m2": 1}
    assert report.lost_s == {"m0": 0.0, "m1": 0.0, "m2": 0.0}


def test_loser_goes_on_when_enough_worse_results_are_in_before_new_members_begin() -> None:
    """One at a time: the sixth result lets a second one pass, before the seventh member begins."""
    losses = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
    members = [member(f"m{n}", loss) for n, loss in enumerate(losses)]
    lots = {"l": LotRule(stop=rule(), at_once=1)}
    report = simulate(members, devices(3), tenants(a=1), POLICY, lots=lots)
    assert report.finished["m0"] == 30.0
    assert report.finished["m1"] == 30.0 + 5 * 10.0 + 20.0
    assert report.finished["m6"] == 110.0
    launches = [line for line in report.timeline if line.decision.move == Move.Launch]
    order = [line.decision.task for line in launches]
    assert order == ["m0", "m1", "m2", "m3", "m4", "m5", "m1", "m6"]
    assert report.device_s == {"a": 110.0}


def test_what_comes_after_a_loser_waits_for_the_end_of_the_lot() -> None:
    members = [member("m0", 0.1), member("m1", 0.2)]
    then = Arrival(at_s=0.0, task="z", tenant="a", user="a1", work_s=1.0, after=("m0", "m1"))
    lots = {"l": LotRule(stop=rule())}
    report = simulate([*members, then], devices(2), tenants(a=1), POLICY, lots=lots)
    assert (report.finished["z"], report.waits_s["z"]) == (31.0, 30.0)


def test_members_that_report_nothing_run_to_their_end() -> None:
    lots = {"l": LotRule(stop=rule(), at_once=2)}
    members = [member(f"m{n}") for n in range(4)]
    report = simulate(members, devices(4), tenants(a=1), POLICY, lots=lots)
    assert sorted(report.finished.values()) == [30.0, 30.0, 60.0, 60.0]


def holders(world: World) -> set[str]:
    """Return the members of lots that are on the board and do not rest."""
    return {
        task.id
        for task in world.tasks.values()
        if world.runs[task.id].arrival.lot
        and not (task.conditions.hold == HELD_AT_RUNG and not task.holds)
    }


@settings(max_examples=examples(40), deadline=None)
@given(dice=st.randoms(use_true_random=False))
def test_random_sweeps_beside_others_end_as_their_rule_says(dice: random.Random) -> None:
    """Under turns, switches and other tenants: no invariant breaks, and nothing is left over."""
    at_once, rungs = dice.randint(0, 4), dice.randint(1, 3)
    stop = rule(rungs, keep=dice.choice([0.33, 0.5]), goal=dice.choice(["min", "max"]))
    lots = {"l": LotRule(stop=stop, at_once=at_once)}
    values = [None, *(dice.choice([0.1, dice.random()]) for _ in range(20))]
    members = [
        replace(
            member(
                f"m{n:02}",
                *(dice.choice(values) for _ in range(dice.choice([0, rungs, rungs]))),
                work_s=dice.choice([5.0, 10.0, 25.0, 40.0]),
            ),
            at_s=dice.choice([0.0, 0.0, dice.uniform(0, 50)]),
        )
        for n in range(dice.randint(1, 12))
    ]
    others = [
        Arrival(at_s=dice.uniform(0, 60), task=f"o{n}", tenant="b", user="b1", work_s=20.0)
        for n in range(dice.randint(0, 4))
    ]
    costs = dice.choice([Costs(), REAL, Costs(pause_s=0.5, image_s=0.5, resume_s=1)])
    policy = replace(POLICY, slice_min_s=1, turns=dice.choice([True, True, False]))
    some = devices(dice.randint(1, 3))
    world = World([*members, *others], some, tenants(a=1, b=1), policy, costs, lots=lots)
    reached = list[RungValue]()

    while (at_us := world.next_us()) is not None:
        before = {id: world.runs[id].rung for id in world.runs}
        world.advance(at_us)
        reached += [
            RungValue(member=id, rung=k, value=run.arrival.rungs[k].value)
            for id, run in world.runs.items()
            for k in range(before.get(id, 0), run.rung)
        ]
        seen = world.snapshot()
        plan = cycle(world.board)
        world.obey(plan)
        check(world, replace(seen, lifts=tuple(world.board.lifts.values())), plan)
        assert not at_once or len(holders(world)) <= at_once
    assert not world.tasks
    report = world.report()
    assert set(report.finished) == {arrival.task for arrival in [*members, *others]}
    ranks = Standings.of(stop, reached)
    stopped = {one.task for one in members if world.runs[one.task].left_us}
    assert stopped <= {one.task for one in members if ranks.lost_at(one.task) is not None}
    if costs == Costs():
        done_s = sum(run.arrival.work_s - run.left_us / 1e6 for run in world.runs.values())
        assert sum(report.device_s.values()) == pytest.approx(done_s, abs=1e-3)
