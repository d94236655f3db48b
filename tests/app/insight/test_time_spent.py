"""Where a task's time went, from placements as the journal leaves them."""

from __future__ import annotations

from dataclasses import astuple
from datetime import timedelta

import pytest
from sqlalchemy import func, select

from app.db.models import Placement
from app.insight.time_spent import TimeSpent, time_spent
from tests.scenery import Scenery


@pytest.fixture
def scenery(session):
    made = Scenery(session)
    for device in ("d0", "d1"):
        made.device(device)
    return made


@pytest.fixture
def task(session, scenery):
    """Submitted 100 s ago."""
    ago = session.scalar(select(func.now())) - timedelta(seconds=100)
    return scenery.task(scenery.tenant("a"), submitted_at=ago)


def stay(scenery, task, epoch, device, launched, started, ended, staged_s=0.0, end=None):
    """Seconds since the task was submitted; None: not yet."""

    def at(second):
        return None if second is None else task.submitted_at + timedelta(seconds=second)

    scenery.add(
        Placement(
            task_id=task.id,
            epoch=epoch,
            device_id=device,
            tenant_id=task.tenant_id,
            user_id=task.user_id,
            kind="cpu",
            cost_milli=1000,
            incarnation="i",
            launched_at=at(launched),
            started_at=at(started),
            ended_at=at(ended),
            end=end,
            staged_us=int(staged_s * 1e6),
        )
    )


def spent(session, task):
    return time_spent(session, [task.id])[task.id]


def test_task_that_was_never_launched_only_waited(session, task):
    assert spent(session, task) == TimeSpent(
        waited_s=100, switched_s=0, moved_s=0, computed_s=0, staged_s=0
    )


def test_each_second_counts_for_one_of_five_activities(session, scenery, task):
    stay(scenery, task, 1, "d0", 10, 11, 31, staged_s=0.5)
    stay(scenery, task, 2, "d0", 40, 42, 50)  # the same device again
    stay(scenery, task, 3, "d1", 60, 67, None, staged_s=1.5)  # another one, and still there
    assert spent(session, task) == TimeSpent(
        waited_s=10 + 9 + 10, switched_s=1 + 2, moved_s=7, computed_s=20 + 8 + 33 - 2, staged_s=2
    )


def test_launch_that_no_device_took_is_no_time_on_a_device(session, scenery, task):
    stay(scenery, task, 1, "d0", 10, None, 30)
    stay(scenery, task, 2, "d1", 90, None, None)
    assert spent(session, task) == TimeSpent(
        waited_s=70, switched_s=20, moved_s=10, computed_s=0, staged_s=0
    )


def test_migration_lasts_from_the_last_step_there_to_the_first_here(session, scenery, task):
    stay(scenery, task, 1, "d0", 0, 0, 50, end="moved")
    stay(scenery, task, 2, "d1", 52, 53, None)
    assert spent(session, task) == TimeSpent(
        waited_s=0, switched_s=0, moved_s=3, computed_s=50 + 47, staged_s=0
    )


def test_time_stops_when_the_task_ends(session, scenery, task):
    stay(scenery, task, 1, "d0", 10, 10, 60)
    task.ended_at = task.submitted_at + timedelta(seconds=60)
    session.flush()
    assert sum(astuple(spent(session, task))) == 60
    assert spent(session, task).computed_s == 50


def test_time_stood_still_is_at_most_the_time_on_the_device(session, scenery, task):
    stay(scenery, task, 1, "d0", 10, 10, 20, staged_s=50)
    assert (spent(session, task).staged_s, spent(session, task).computed_s) == (10, 0)


def test_several_tasks_are_reported_at_once(session, scenery, task):
    other = scenery.task(scenery.tenant("b"))
    assert set(time_spent(session, [task.id, other.id])) == {task.id, other.id}
    assert time_spent(session, []) == {}
