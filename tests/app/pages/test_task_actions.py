"""Which actions a page offers follows from the task's row."""

from __future__ import annotations

import pytest

from app.db.models import Task
from app.pages.task_actions import _widths


@pytest.mark.parametrize(
    ("descriptor", "widths"),
    [
        ({"run": {"job": "train:Train"}, "world_size": 4}, [2, 3, 4]),
        ({"run": {"command": ["x"]}, "world_size": 4}, []),
        ({"run": {"ticket": "gang"}, "world_size": 4}, []),
        ({}, []),
    ],
)
def test_widths_of_a_task_that_is_no_job_of_ranks_are_none(descriptor, widths) -> None:
    assert list(_widths(Task(devices_min=2, descriptor=descriptor))) == widths
