"""What the stories of machines tell, and that a failed test prints them."""

from __future__ import annotations

import pytest

from app.core.device.device_events import (
    AnswerCame,
    DeadlinesDue,
    KillAsked,
    OrderCame,
    ProcessBegan,
    ProcessExited,
    ProcessPrepared,
    ProcessProgressed,
    SlotDue,
    StayForgotten,
    TaskUnable,
)
from app.core.device.device_machine import DeviceMachine
from app.core.model.protocol.messages import Cancel
from app.core.model.story import KEPT, Story
from app.core.scheduling.board import Board
from app.core.scheduling.cycle import cycle
from tests import stories
from tests.core.device.orders import GRACE_US, MARGIN_US, MINE, answer_to, launch_order
from tests.core.pictures import NOW_S, island

SECRET = "what only the tenant may read"


@pytest.fixture
def machine():
    return DeviceMachine("h.0", MINE, lease_margin_us=MARGIN_US, stop_grace_us=GRACE_US)


def test_story_keeps_the_last_events_and_tells_those_of_one_task():
    story = Story()
    for number in range(KEPT + 2):
        story.note(number, "ab"[number % 2], number)
    assert story.tasks() == ["a", "b"]
    assert len(story.of("a")) == len(story.of("b")) == KEPT // 2
    assert story.of("b")[0] == "0.000003 s  b  3"
    assert story.of("c") == []


def run_task(machine: DeviceMachine) -> None:
    """Launch the task t, let it run, and kill it."""
    launch = launch_order("t", 1, params={"note": SECRET})
    events = [
        OrderCame(order=launch),
        AnswerCame(answer=answer_to(1, keep=[["t", 1]])),
        ProcessBegan(process=7, stay=("t", 1)),
        ProcessPrepared(process=7, step=0),
        SlotDue(),
        ProcessProgressed(process=7, step=4),
        KillAsked(process=7, reason="host_memory"),
        DeadlinesDue(),
        ProcessExited(process=7),
        OrderCame(order=Cancel(task="t", epoch=1, seq=2)),
        StayForgotten(stay=("t", 1)),
    ]
    for at_s, event in enumerate(events, start=1):
        machine.handle(event, at_s * 1_000_000)


def test_story_of_a_device_tells_events_states_and_instructions_of_a_task(machine):
    run_task(machine)
    assert machine.story.of("t") == [
        "1.000000 s  t  1 Launch seating ExpectHosts FetchInputs",
        "2.000000 s  t  1 AnswerCame confirmed",
        "3.000000 s  t  1 ProcessBegan seating",
        "4.000000 s  t  1 ProcessPrepared(0) seating",
        "5.000000 s  t  1 SlotDue running GiveSlot(7)",
        "7.000000 s  t  1 KillAsked(host_memory) running KillProcess(host_memory)",
        "9.000000 s  t  1 ProcessExited ended TellVerdict",
        "10.000000 s  t  1 Cancel ended",
        "11.000000 s  t  1 StayForgotten forgotten ForgetStay",
    ]


def test_instruction_for_another_task_is_a_line_of_that_task(machine):
    machine.handle(OrderCame(order=launch_order("t", 1)), 1)
    machine.handle(OrderCame(order=launch_order("u", 1)), 2)
    machine.handle(AnswerCame(answer=answer_to(1, drop=[["t", 1]])), 3)
    assert machine.story.of("t")[1:] == [
        "0.000003 s  t  1 AnswerCame forgotten DropStay ForgetStay"
    ]
    assert len(machine.story.of("u")) == 1


def test_story_of_a_device_has_nothing_that_a_tenant_wrote(machine):
    run_task(machine)
    machine.handle(OrderCame(order=launch_order("u", 1)), 20)
    machine.handle(TaskUnable(stay=("u", 1), cause="code", told=SECRET, reason="damaged"), 21)
    told = machine.story.of("t") + machine.story.of("u")
    assert told[-1].endswith("u  1 TaskUnable(code) ended TellIsland(Failed)")
    assert SECRET not in "\n".join(told)


def test_story_of_a_board_tells_what_was_decided_for_a_task():
    board = Board.of(island("a", queue="b", used={"a": 9000}), now_s=NOW_S)
    cycle(board)
    paused, launched = board.story.of("a")[-1], board.story.of("b")[-1]
    assert paused.endswith("a  Pause F6/F8(d0) pausing b"), paused
    assert launched.endswith("b  Launch F6/F8(d0) starting a"), launched


def test_failed_test_prints_the_story_of_the_tasks_that_it_names(machine):
    stories.forget()
    for task in "tu":
        machine = DeviceMachine("h.0", MINE, lease_margin_us=MARGIN_US, stop_grace_us=GRACE_US)
        machine.handle(OrderCame(order=launch_order(task, 1)), 1)
    for told, printed in (('assert view("t") == 1', "t"), ("assert 1 == 2", "tu"), ("", "")):
        outcome = "failed" if told else "passed"
        report = pytest.TestReport("test", ("", 0, ""), {}, outcome, told or None, "call")
        stories.add_to(report)
        lines = [line for _, lines in report.sections for line in lines.splitlines()]
        assert [line.split()[2] for line in lines] == [*printed]
