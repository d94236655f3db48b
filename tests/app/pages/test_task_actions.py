"""Which actions a page offers follows from the task's row."""

from __future__ import annotations

import pytest

from app.db.models import Task
from app.insight import reports
from app.pages.task_actions import _of_task, _widths


@pytest.mark.parametrize(
    ("descriptor", "widths"),
    [
        ({"run": {"job": "train:Train"}, "world_size": 4}, [2, 3, 4]),
        ({"run": {"job": "m:J"}, "world_size": 4, "devices": {"hosts": None}}, [2, 3, 4]),
        ({"run": {"job": "m:J"}, "world_size": 4, "devices": {"hosts": 2}}, []),
        ({"run": {"command": ["x"]}, "world_size": 4}, []),
        ({"run": {"ticket": "gang"}, "world_size": 4}, []),
        ({}, []),
    ],
)
def test_only_a_job_of_ranks_without_a_number_of_hosts_has_widths(descriptor, widths) -> None:
    assert list(_widths(Task(devices_min=2, descriptor=descriptor))) == widths


@pytest.mark.parametrize(
    ("run", "capabilities", "state", "offered"),
    [
        ("job", ["move"], "running", True),
        ("job", [], "starting", True),
        ("function", [], "starting", False),
        ("command", [], "starting", True),
        ("command", ["shell"], "starting", False),
        ("command", ["shell"], "running", False),
        ("command", ["shell", "notice"], "running", True),
        ("command", ["shell", "move"], "running", True),
    ],
)
def test_move_is_offered_only_where_the_page_says_that_the_task_can_move(
    run, capabilities, state, offered
) -> None:
    task = Task(
        descriptor={"run": {run: "x"}},
        capabilities=capabilities,
        state=state,
        hold="",
        devices_min=1,
        devices_max=1,
        bound_because="",
    )
    assert _of_task(task, False).move is offered
    assert not (offered and reports.movement_of(task).startswith("It cannot move"))
