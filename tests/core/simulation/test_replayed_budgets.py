"""Budgets on the virtual clock: what is charged, and what follows, over months in a moment."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from typing import Any

import pytest

from app.core.fairness.budget import ALL, HOUR_US, Budget
from app.core.model.snapshot import BoardDevice, BoardTenant, BoardUser, Policy
from app.core.simulation.simulator import Arrival, Costs, Report, simulate

DAY_S = 86400.0
BEGINS = datetime(2026, 3, 1, tzinfo=UTC)  # the clock of Berlin is moved on the 29th
NO_TIERS = Policy(half_life_s=0.0, tier_share={}, slice_min_s=10.0, slice_max_s=60.0)
FREE = Costs()


def devices(count: int) -> list[BoardDevice]:
    return [BoardDevice(id=f"d{n}", host="h", kind="cpu") for n in range(count)]


def tenant(id: str, parent: str | None = None) -> BoardTenant:
    return BoardTenant(id=id, name=id, weight=1000, parent=parent)


def arrival(task: str, work_s: float, at_s: float = 0.0, of: str = "a") -> Arrival:
    return Arrival(at_s=at_s, task=task, tenant=of, user=f"{of}/1", work_s=work_s)


def replay(arrivals: list[Arrival], budgets: dict[str, Budget], **more: Any) -> Report:
    given: dict[str, Any] = {"costs": FREE, **more}
    begins_us = round(BEGINS.timestamp()) * 1_000_000
    tenants = [tenant("a"), tenant("b")]
    given = {"devices": devices(1), "tenants": tenants, "policy": NO_TIERS, **given}
    return simulate(arrivals, budgets=budgets, begins_us=begins_us, **given)


def minutes(count: float, **more: Any) -> Budget:
    values: dict[str, Any] = {"period": 1, "at": {100: "pause"}, **more}
    return Budget(grants_us={"cpu": round(count * 60e6)}, **values)


@pytest.mark.parametrize("owner", ["a", "a/1"])
def test_task_runs_on_in_each_period_until_its_budget_is_used(owner: str) -> None:
    report = replay([arrival("t", 150.0)], {owner: minutes(1)})
    assert report.finished == {"t": 2 * DAY_S + 30.0}
    assert report.pauses == {"t": 2}
    assert sorted(report.spent_us.values()) == [30_000_000, 60_000_000, 60_000_000]


def test_what_is_left_is_carried_to_the_next_period() -> None:
    tasks = [arrival("t", 30.0), arrival("u", 80.0, DAY_S)]
    report = replay(tasks, {"a": minutes(1, carry_milli=1000)})
    assert report.finished == {"t": 30.0, "u": DAY_S + 80.0}


def test_held_task_runs_on_and_a_new_one_waits_for_the_next_period() -> None:
    tasks = [arrival("t", 150.0), arrival("u", 10.0, 1.0)]
    report = replay(tasks, {"a": minutes(1, at={100: "hold"})}, devices=devices(1))
    assert report.finished["t"] == 150.0
    assert report.finished["u"] == DAY_S + 10.0


def test_demoted_tenant_uses_what_nobody_else_wants() -> None:
    tasks = [arrival("t", 1000.0), arrival("u", 600.0, 10.0, of="b")]
    report = replay(tasks, {"a": minutes(1, at={100: "demote"})})
    assert report.finished["u"] < report.finished["t"] == 1600.0
    alone = replay([arrival("t", 1000.0)], {"a": minutes(1, at={100: "demote"})})
    assert alone.finished == {"t": 1000.0}


def test_budget_for_another_kind_changes_nothing() -> None:
    report = replay([arrival("t", 150.0)], {"a": Budget(grants_us={"cuda": 0}, at={100: "pause"})})
    assert (report.finished, report.spent_us) == ({"t": 150.0}, {})


@pytest.mark.parametrize(
    ("seed", "days", "tasks"),
    [
        (0, 4, 20),
        (1, 30, 80),
        pytest.param(2, 30, 150, marks=pytest.mark.long),
        pytest.param(3, 30, 150, marks=pytest.mark.long),
    ],
)
def test_month_of_twelve_tenants_sums_up_to_what_was_held(seed: int, days: int, tasks: int) -> None:
    """Each charge is in each budget above it, and no budget is exceeded by more than pauses take.

    A user has a limit besides. The short replay checks all invariants of the simulator.
    """
    chance = random.Random(seed)
    parents = [tenant(f"p{n}") for n in range(3)]
    tenants = [*parents, *(tenant(f"t{n}", f"p{n % 3}") for n in range(9))]
    costs = Costs(start_s=1.0, pause_s=2.0, image_s=3.0, resume_s=1.0)
    leaves = [each.id for each in tenants if each.parent]
    limited = BoardUser(id="t1/0", tenant="t1", limit={"cpu": 1})
    arrivals = []
    for n in range(tasks):
        of = chance.choice(leaves)
        user = f"{of}/{chance.randint(0, 1)}"
        arrivals.append(
            Arrival(
                at_s=chance.uniform(0, days * DAY_S),
                task=f"task{n:03}",
                tenant=of,
                user=user,
                owner=user,
                work_s=round(chance.uniform(600, 20_000)),
                width=1 if user == limited.id else chance.choice([1, 1, 2]),
            )
        )
    budgets = {
        owner: Budget(
            grants_us={chance.choice(["cpu", ALL]): round(chance.uniform(2, 30) * HOUR_US)},
            period=chance.choice(["month", "week", 1, 5]),
            timezone=chance.choice(["UTC", "Europe/Berlin", "Asia/Kathmandu"]),
            at={80: "notify", 100: "pause"},
        )
        for owner in ["p0", "p1", "t0", "t4", "t2/0", "t5/1"]
    }
    policy = Policy(half_life_s=0.0, tier_share={}, slice_min_s=300.0, slice_max_s=3600.0)
    report = replay(
        arrivals, budgets, devices=devices(4), tenants=tenants, users=[limited], policy=policy,
        costs=costs, checked=days < 5, keep_timeline=False,
    )  # fmt: skip
    assert report.pauses
    assert report.finished.keys() == {one.task for one in arrivals}
    parent_of = {each.id: each.parent for each in tenants}
    late_us = round(4 * (costs.start_s + costs.pause_s + costs.image_s) * 1e6)
    for owner, it in budgets.items():
        mine = {
            one.user for one in arrivals if owner in (one.user, one.tenant, parent_of[one.tenant])
        }
        spent = [us for (whose, _, _), us in report.spent_us.items() if whose == owner]
        assert sum(spent) == sum(round(report.device_s[user] * 1e6) for user in mine)
        [granted_us] = it.grants_us.values()
        assert max(spent, default=0) <= granted_us + late_us
