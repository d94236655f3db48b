"""Strategies: what a tenant gains by asking otherwise for the same work.

Three tenants of equal weight want more than the four devices there are.  Tenant a tries something;
b and c stay honest.  Compared is a's device time with that of the honest run.  Switches are free
here: what a strategy costs by switching more often is the tenant's own loss, and no part of this.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from app.core.model.lifecycle import Move
from app.core.model.snapshot import BoardDevice, BoardTenant, Conditions, Policy
from app.core.scheduling.cycle import cycle
from app.core.simulation.simulator import Arrival, Costs, Report, World, simulate
from tests.thoroughness import rest_long

UNTIL_S = 800.0
DEVICES = [BoardDevice(id=f"d{n}", host="h", kind="cpu") for n in range(4)]
POLICY = Policy(half_life_s=600.0)
TOLD = 0.01  # less than a hundredth


def tenants(*names: str, parent: str | None = None) -> list[BoardTenant]:
    return [BoardTenant(id=name, name=name, weight=1000, parent=parent) for name in names]


def work(tenant: str, tasks: int, *, work_s: float = 1e6, **details: Any) -> list[Arrival]:
    user = str(details.pop("user", f"{tenant}1"))
    return [
        Arrival(at_s=0, task=f"{user}.{n:05}", tenant=tenant, user=user, work_s=work_s,
                **{"tier": "basic", **details})
        for n in range(tasks)
    ]  # fmt: skip


OTHERS = [*work("b", 4), *work("c", 4)]


def run(mine: Iterable[Arrival], everyone: Iterable[BoardTenant] | None = None) -> Report:
    some = tenants("a", "b", "c") if everyone is None else everyone
    return simulate([*mine, *OTHERS], DEVICES, some, POLICY, until_s=UNTIL_S, checked=False)


@cache
def honest_s() -> float:
    return run(work("a", 4)).device_s["a"]


def gain(report: Report, *names: str) -> float:
    return sum(report.device_s[name] for name in names or ("a",)) / honest_s() - 1


def test_the_honest_tenant_has_a_third() -> None:
    assert pytest.approx(4 * UNTIL_S / 3, rel=0.005) == honest_s()


STRATEGIES = {
    "one job split into forty": work("a", 40),
    "tiny tasks of a quarter of a slice": work("a", 5000, work_s=0.25),
    "tasks that end just before their slice": work("a", 3000, work_s=0.95),
    "tasks that end with their slice": work("a", 3000, work_s=1.0),
    "tasks that end just after their slice": work("a", 3000, work_s=1.05),
    "cancelled after three slices and submitted again": work("a", 1000, work_s=3.0),
    "twice the width": work("a", 4, width=2),
    "all devices at once": work("a", 2, width=4),
    "the highest priority": work("a", 4, priority=100),
    "work that claims to be nearly done": work("a", 4, expected_s=0.01),
    "four users": [task for n in range(4) for task in work("a", 2, user=f"a{n}")],
}


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.slow
def test_a_strategy_changes_device_time_by_less_than_a_hundredth(strategy: list[Arrival]) -> None:
    assert abs(gain(run(strategy))) < TOLD


def test_starts_count_as_device_time() -> None:
    """What is short beside its start holds the device for its start (rule F1)."""
    mine, costs = work("a", 5000, work_s=0.05), Costs(start_s=3.0)
    some = tenants("a", "b", "c")
    report = simulate(
        [*mine, *OTHERS], DEVICES, some, POLICY, costs=costs, until_s=UNTIL_S, checked=False
    )
    assert 0.9 * honest_s() < report.device_s["a"] < 1.02 * honest_s()
    assert len(report.finished) * 3.05 == pytest.approx(report.device_s["a"], rel=0.02)


def test_random_job_sizes_gain_nothing_either() -> None:
    dice = random.Random(5)
    works_s, widths = [0.1, 0.5, 1.0, 2.5, 30.0], [1, 1, 2, 3]
    mixed = [
        replace(task, work_s=dice.choice(works_s), width=dice.choice(widths))
        for task in work("a", 3000)
    ]
    assert abs(gain(run(mixed))) < TOLD


def test_tenants_below_a_tenant_share_what_it_has() -> None:
    below = [*tenants("d", "e", "f", parent="a"), *tenants("a", "b", "c")]
    report = run([task for name in "def" for task in work(name, 4)], below)
    assert abs(gain(report, "d", "e", "f")) < TOLD


# --- hold and resume, cancel and submit again ---------------------------------------------------


class Cheat(World):
    """A world in which tenant a interferes with its tasks, `each_s` after they were launched."""

    def __init__(self, mine: Iterable[Arrival], *, costs: Costs, each_s: float, how: str) -> None:
        self.each_us, self.how, self.again = round(each_s * 1e6), how, list[tuple[int, str]]()
        super().__init__([*mine, *OTHERS], DEVICES, tenants("a", "b", "c"), POLICY, costs)

    def play(self) -> Report:
        while (at_us := self._soonest_us()) <= UNTIL_S * 1e6:
            self.advance(at_us)
            self._interfere()
            self.obey(cycle(self.board))
        self.advance(round(UNTIL_S * 1e6))
        return self.report()

    def _soonest_us(self) -> int:
        soonest = self.next_us()
        mine = [at_us for at_us, _ in self.again if at_us > self.now_us]
        return min([*mine, *([] if soonest is None else [soonest])])

    def obey(self, plan) -> None:  # type: ignore[no-untyped-def]
        super().obey(plan)
        for decision in plan.decisions:
            task = decision.task
            if decision.move == Move.Launch and self.tasks[task].tenant == "a":
                self.again.append((self.now_us + self.each_us, task))
            elif decision.move == Move.Cancel and decision.devices:
                self._say(Move.Stopped, self.tasks[task], 0)

    def _interfere(self) -> None:
        due = [task for at_us, task in self.again if at_us <= self.now_us]
        self.again = [(at_us, task) for at_us, task in self.again if at_us > self.now_us]
        for id in due:
            task = self.tasks.get(id)
            if task is not None and task.state in ("starting", "running"):
                getattr(self, f"_{self.how}")(task)
        for task in list(self.tasks.values()):
            if task.conditions.hold and task.state in ("waiting", "blocked"):
                self.board.set_task(replace(task, conditions=Conditions()))  # resumed at once

    def _hold(self, task) -> None:  # type: ignore[no-untyped-def]
        self.board.set_task(replace(task, conditions=Conditions(hold="user")))

    def _cancel(self, task) -> None:  # type: ignore[no-untyped-def]
        self.board.set_task(replace(task, cancel_asked=True))
        fresh = replace(self.runs[task.id].arrival, at_s=self.now_s, task=f"{task.id}'")
        self._arrive(fresh)


@pytest.mark.parametrize("each_s", rest_long([0.99, 7.0, 0.3, 1.5], keep=2))
@pytest.mark.parametrize("how", ["hold", "cancel"])
@pytest.mark.slow
def test_holding_or_cancelling_and_resubmitting_gains_nothing(how: str, each_s: float) -> None:
    report = Cheat(work("a", 4), costs=Costs(), each_s=each_s, how=how).play()
    assert report.until_s == UNTIL_S
    moves = [line.decision.move for line in report.timeline if line.decision.task[0] == "a"]
    assert len(moves) > 100  # it did interfere
    assert abs(gain(report)) < TOLD


def test_cancelling_while_it_starts_gains_nothing() -> None:
    """What a start has held stays charged, though the task never had a turn (rule F1)."""
    report = Cheat(work("a", 4), costs=Costs(start_s=2.0), each_s=1.9, how="cancel").play()
    cancels = [line for line in report.timeline if line.decision.move == Move.Cancel]
    assert len(cancels) > 100
    assert gain(report) < 0.02
