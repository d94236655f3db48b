"""Where a live task becomes elastic, and what is told of it."""

from __future__ import annotations

import pytest
from sqlalchemy import select

from app.core.explanation.estimator import History
from app.db import transactions
from app.db.models import Device, Placement
from app.insight import explain, forecast, reports
from app.scheduling import guest_placements, snapshot_reader
from tests.scenery import Scenery


@pytest.fixture
def scenery(session):
    return Scenery(session)


def test_running_task_is_elastic_only_where_every_device_can_share_ranks(session, scenery):
    first, second = scenery.device("d0"), scenery.device("d1")
    task = scenery.task(scenery.tenant("red"), devices_min=1, devices_max=3)

    def width_max() -> int:
        session.flush()
        return (
            snapshot_reader.load(session, "isle", now_s=transactions.now_s(session))
            .tasks[task.id]
            .width_max
        )

    assert width_max() == 0
    first.facts = {**first.facts, "splice": True}
    assert width_max() == 0
    second.facts = {**second.facts, "splice": True}
    assert width_max() == 3


def test_all_devices_of_a_task_are_shown(session, scenery):
    for id in ("d0", "d1"):
        scenery.device(id, facts={"splice": True})
    red = scenery.tenant("red")
    task = scenery.task(red, "running", seat="d0", devices_min=1, devices_max=3)
    assert explain.breadth(session, task) == (
        "It holds the 1 that it needs, and uses up to 3 while nobody asks for them."
    )
    task.resized_at = transactions.now(session)
    guest_placements.lend(session, task, [session.get_one(Device, "d1")], 1000)
    session.flush()
    assert explain.breadth(session, task) == (
        "It holds 2 of the 3 devices that it can use, 1 of them until somebody asks for them: "
        "it needs 1."
    )
    [running] = reports.running(session, None)
    assert running.devices == ("d0", "d1")
    held = {
        view.id: view.holder for view in reports.devices(session, None, transactions.now(session))
    }
    assert held == {"d0": "red", "d1": "red"}
    assert [stay.guest for stay in reports.stays(session, task.request_id)] == [False, True]


def test_work_on_lent_devices_counts_as_done(session, scenery):
    """60 s at home, and 40 s of a second device: as much as 100 s of one."""
    scenery.device("d0")
    red = scenery.tenant("red")
    ended = scenery.task(red, "running", seat="d0", devices_min=1, devices_max=3)
    placement = session.scalars(select(Placement).where(Placement.task_id == ended.id)).one()
    placement.end, placement.ended_at = "finished", transactions.now(session)
    scenery.move(ended, "done")
    ended.total_held_us, ended.guest_held_us = 60_000_000, 40_000_000
    session.flush()
    who = ((red.id, ended.user_id, ended.name, 1), (red.id, 1), (red.id,), ())
    expected = History()
    expected.add(who, 100.0)
    learned = forecast.Learned().refreshed(session)
    assert learned.history.remaining(who) == expected.remaining(who)
