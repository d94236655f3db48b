"""Where a live task becomes elastic, and what is told of it."""

from __future__ import annotations

import pytest

from app import db, lending, reports, snapshot, why
from app.models import Device
from tests.scenery import Scenery


@pytest.fixture
def scenery(session):
    return Scenery(session)


def test_a_live_task_is_elastic_only_where_every_device_says_that_ranks_can_share_it(
    session, scenery
):
    first, second = scenery.device("d0"), scenery.device("d1")
    task = scenery.task(scenery.tenant("red"), devices_min=1, devices_max=3)

    def width_max() -> int:
        session.flush()
        return snapshot.load(session, "isle", now_s=db.now_s(session)).tasks[task.id].width_max

    assert width_max() == 0
    first.facts = {**first.facts, "splice": True}
    assert width_max() == 0
    second.facts = {**second.facts, "splice": True}
    assert width_max() == 3


def test_all_that_it_holds_is_told(session, scenery):
    for id in ("d0", "d1"):
        scenery.device(id, facts={"splice": True})
    red = scenery.tenant("red")
    task = scenery.task(red, "running", seat="d0", devices_min=1, devices_max=3)
    assert why.breadth(session, task) == (
        "It holds the 1 that it needs, and uses up to 3 while nobody asks for them."
    )
    task.resized_at = db.now(session)
    lending.lend(session, task, [session.get_one(Device, "d1")], 1000)
    session.flush()
    assert why.breadth(session, task) == (
        "It holds 2 of the 3 devices that it can use, 1 of them until somebody asks for them: "
        "it needs 1."
    )
    [running] = reports.running(session, None)
    assert running.devices == ("d0", "d1")
    held = {view.id: view.holder for view in reports.devices(session, None, db.now(session))}
    assert held == {"d0": "red", "d1": "red"}
    assert [stay.guest for stay in reports.stays(session, task.request_id)] == [False, True]
