"""A step may outlast its lease as long as no other device may have its task, and no longer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from app.core.device.device_events import (
    AnswerCame,
    DeadlinesDue,
    DeviceEvent,
    GiveSlot,
    KillProcess,
    OrderCame,
    ProcessBegan,
    ProcessExited,
    ProcessPrepared,
    ProcessProgressed,
    ProcessStood,
    ReportDue,
    SlotDue,
)
from app.core.device.device_machine import DeviceMachine
from app.core.device.lease import GRACE_MAX_US, SHORT_STEP_US, Lease, grace_for
from app.core.model.protocol.messages import Answer
from tests.core.device.orders import GRACE_US, LEASE_US, MARGIN_US, MINE, answer_to, launch_order

S = 1_000_000
LIMIT_US = 60 * S  # of the island
LONG_US = 1 << 50


def test_grace_is_at_least_twice_a_long_step_and_seldom_another() -> None:
    assert grace_for(SHORT_STEP_US) == 0
    for step_us in (SHORT_STEP_US + 1, 3 * S, 30 * S, 200 * S):
        assert 2 * step_us <= grace_for(step_us) < 4 * step_us
    assert grace_for(LONG_US) == GRACE_MAX_US
    assert len({grace_for(step_us) for step_us in range(0, 60 * S, S // 10)}) == 7


def _answer(lease: Lease, sent_us: int, grace_us: int) -> Lease:
    return lease.after(answer_to(sent_us, grace_us=grace_us), margin_us=MARGIN_US)


def test_device_counts_on_the_least_grace_that_the_island_may_know_of() -> None:
    lease = Lease().asking(40, 100)
    assert lease.grace_us == 0  # no answer yet
    lease = _answer(lease, 110, 40)
    assert lease.grace_us == 40
    lowered = lease.asking(8, 200)
    assert lowered.grace_us == 8  # the report that says so may have arrived
    assert _answer(lowered, 150, 40).grace_us == 8  # as before: it answers an earlier report
    assert _answer(lowered, 210, 8).grace_us == 8
    assert _answer(lowered.asking(32, 300), 150, 40).grace_us == 8  # a report of 200 to 300 may be
    raised = _answer(lowered, 210, 8).asking(32, 300)
    assert raised.grace_us == 8
    assert _answer(raised, 310, 32).grace_us == 32
    assert _answer(raised, 310, 20).grace_us == 20  # the limit of the island
    assert _answer(raised, 310, 32).asked == ((300, 32),)


# --- one long step --------------------------------------------------------------------------------


class Steps:
    """A device with one task that has the slot, and an island that can be away."""

    def __init__(self, *, is_command: bool = False, **more: Any) -> None:
        self.machine = DeviceMachine("h.0", MINE, lease_margin_us=MARGIN_US, stop_grace_us=GRACE_US)
        self.now_us, self.step = 1 * S, 0
        self.killed = ""
        self.answer()
        fresh = {"incarnation": MINE, "surely_until_us": self.now_us + 1}
        order = launch_order("t1", 1, **fresh, budget_us=LONG_US, **more)
        self.give(OrderCame(order=order))
        self.give(ProcessBegan(process=1, stay=("t1", 1), is_command=is_command))
        self.give(ProcessPrepared(process=1, step=0))
        self.give(SlotDue())
        assert self.machine.slot.holder is not None

    def give(self, event: DeviceEvent) -> None:
        for one in self.machine.handle(event, self.now_us):
            if isinstance(one, KillProcess):
                self.killed = one.reason

    def answer(self) -> None:
        self.give(ReportDue())
        asked_us = self.machine.lease.asked_us
        self.now_us += 1
        answer = answer_to(self.now_us, keep=[["t1", 1]], grace_us=min(asked_us, LIMIT_US))
        self.give(AnswerCame(answer=answer))

    def run_step(self, length_us: int, *, island_is_away: bool = False) -> None:
        self.let_run(length_us, island_is_away=island_is_away)
        self.step += 1
        self.give(ProcessProgressed(process=1, step=self.step))

    def let_run(self, length_us: int, *, island_is_away: bool) -> None:
        """Make a report each second, which is answered while the island is there."""
        for _ in range(length_us // S):
            self.now_us += S
            self.give(ReportDue())
            self.give(DeadlinesDue())
            if not island_is_away:
                self.answer()


@pytest.mark.parametrize("length_s", [5, 15, 30])
def test_step_as_long_as_those_before_outlasts_an_island_that_is_away(length_s: int) -> None:
    device = Steps()
    device.run_step(length_s * S)
    device.now_us += LEASE_US - MARGIN_US - 1  # as late as a step may begin
    device.run_step(length_s * S, island_is_away=True)
    assert device.killed == ""
    assert device.now_us > device.machine.lease.trusted_until_us
    device.give(ProcessStood(process=1, is_still=True))
    device.now_us += 3600 * S  # however long the island is away
    device.give(DeadlinesDue())
    assert device.killed == ""


def test_first_step_counts_as_long_as_it_has_lasted() -> None:
    device = Steps()
    device.let_run(10 * S, island_is_away=False)
    device.run_step(20 * S, island_is_away=True)
    assert device.killed == ""


def test_step_much_longer_than_those_before_is_killed_when_its_task_may_run_elsewhere() -> None:
    device = Steps()
    device.run_step(4 * S)
    ends_us = device.machine.lease.work_ends_us
    assert ends_us == device.machine.lease.ends_us + grace_for(4 * S)
    device.now_us = ends_us - 1
    device.give(DeadlinesDue())
    assert device.killed == ""
    assert device.machine.due_us(device.now_us) == ends_us
    device.now_us += 1
    device.give(DeadlinesDue())
    assert device.killed == "lease"


@pytest.mark.parametrize(("more", "is_command"), [({}, True), ({"host": 1}, False)])
def test_command_and_remote_ranks_ask_for_no_grace(more: dict[str, int], is_command: bool) -> None:
    """One is frozen at any moment; the others tell no steps, and would ask for ever more."""
    device = Steps(is_command=is_command, **more)
    device.let_run(30 * S, island_is_away=False)
    assert device.machine.lease.asked_us == 0


def test_short_steps_ask_for_no_grace() -> None:
    device = Steps()
    device.run_step(30 * S)
    for _ in range(40):  # the longest step of late is forgotten after a while
        device.now_us += S // 100
        device.run_step(0)
    device.answer()
    assert device.machine.lease.grace_us == 0


# --- whatever is lost or late ---------------------------------------------------------------------


class LeaseUnderRandomMessages(RuleBasedStateMachine):
    """A device and its island: reports and answers are lost, late, and overtaken."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = DeviceMachine("h.0", MINE, lease_margin_us=MARGIN_US, stop_grace_us=GRACE_US)
        self.now_us = 1 * S
        self.reports: list[tuple[int, int]] = []  # (sent, grace)
        self.answers: list[Answer] = []
        self.recorded_us = self.lost_us = 0  # of the island: its newest report, its patience
        self.process = self.step = 0
        self.runs = self.still = False

    def give(self, event: DeviceEvent) -> None:
        for one in self.machine.handle(event, self.now_us):
            if isinstance(one, GiveSlot):
                assert self.now_us < self.lost_us
                self.runs, self.still = True, False
            elif isinstance(one, KillProcess):
                self.runs = False

    @rule(
        step_us=st.sampled_from([0, 2 * S, 30 * S]),
        fate=st.sampled_from(["lost", "recorded", "heard"]),
        later_us=st.sampled_from([0, 1, 50_000]),
    )
    def exchange(self, step_us: int, fate: str, later_us: int) -> None:
        """After steps of this length a report is made and, a little later, sent."""
        self.run_a_task()
        if self.runs and not self.still:
            self.end_step()
            self.machine.processes[self.process].step_us = step_us
        self.give(ReportDue())
        grace_us = self.machine.lease.asked_us
        self.now_us += later_us + 1
        self.reports.append((self.now_us, grace_us))
        if fate != "lost":
            self.record(self.reports[-1])
        if fate == "heard":
            self.hear(self.answers[-1])

    def run_a_task(self) -> None:
        """Let a task run, if trust lasts and none does."""
        if self.process in self.machine.processes:
            if self.machine.processes[self.process].kill_reason:
                self.give(ProcessExited(process=self.process))
            self.give(SlotDue())
            return
        self.process += 1
        self.step = 0
        more = {"surely_until_us": self.now_us + 1, "budget_us": LONG_US}
        key = ("t1", self.process)
        self.give(OrderCame(order=launch_order(*key, incarnation=MINE, **more)))
        self.give(ProcessBegan(process=self.process, stay=key))
        self.give(ProcessPrepared(process=self.process, step=0))
        self.give(SlotDue())

    def end_step(self) -> None:
        """The next step begins, or the process stands still past the trust deadline."""
        self.step += 1
        self.give(ProcessProgressed(process=self.process, step=self.step))
        self.still = self.now_us >= self.machine.lease.trusted_until_us
        if self.still:
            self.give(ProcessStood(process=self.process, is_still=True))

    @precondition(lambda self: self.answers)
    @rule(which=st.integers(1, 4), is_recorded=st.booleans())
    def hear_late(self, which: int, is_recorded: bool) -> None:
        """A report or an answer comes late, or again."""
        if is_recorded:
            self.record(self.reports[-min(which, len(self.reports))])
        else:
            self.hear(self.answers[-min(which, len(self.answers))])

    def record(self, report: tuple[int, int]) -> None:
        """The island records a report, unless it has recorded a newer one."""
        sent_us, grace_us = report
        if sent_us <= self.recorded_us:
            return
        granted_us = min(grace_us, LIMIT_US)
        self.recorded_us, self.lost_us = sent_us, self.now_us + LEASE_US + granted_us
        keep = [["t1", self.process]]
        self.answers.append(answer_to(sent_us, keep=keep, grace_us=granted_us))

    def hear(self, answer: Answer) -> None:
        self.give(AnswerCame(answer=answer))
        if self.runs and self.still and self.now_us < self.machine.lease.trusted_until_us:
            self.still = False
            self.give(ProcessStood(process=self.process, is_still=False))

    @rule(passed_us=st.sampled_from([1, S, 3 * S, 9 * S, 25 * S]))
    def let_time_pass(self, passed_us: int) -> None:
        """Deadlines are applied when they are due, as the supervisor does."""
        until_us = self.now_us + passed_us
        while (due_us := self.machine.due_us(self.now_us)) is not None and due_us <= until_us:
            self.now_us = max(self.now_us, due_us)
            self.give(DeadlinesDue())
            if self.machine.due_us(self.now_us) == due_us:
                break  # the end of a turn: only a round changes that
        self.now_us = until_us
        self.give(DeadlinesDue())

    @invariant()
    def no_step_runs_while_its_task_may_run_elsewhere(self) -> None:
        assert not self.runs or self.still or self.now_us < self.lost_us

    @invariant()
    def little_is_remembered(self) -> None:
        assert len(self.machine.lease.asked) < 64


TestLeaseUnderRandomMessages = LeaseUnderRandomMessages.TestCase
TestLeaseUnderRandomMessages.settings = settings(
    max_examples=200, stateful_step_count=60, deadline=None
)
