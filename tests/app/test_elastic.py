"""Where a live task becomes elastic."""

from __future__ import annotations

import pytest

from app import db, snapshot
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
