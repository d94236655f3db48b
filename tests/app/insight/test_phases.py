"""A phase is the same word in Python and in SQL, for every way a row can stand."""

from __future__ import annotations

import itertools

import pytest
from sqlalchemy import func, select

from app.core.model.lifecycle import State
from app.core.model.phase import request_phase
from app.db.models import Request, Task
from app.insight import phases
from tests.scenery import Scenery


@pytest.fixture
def tasks(session):
    scenery = Scenery(session)
    a = scenery.tenant("a")
    on_devices = ("starting", "running", "splicing", "pausing", "stopping")
    for name in ("d0", *on_devices):
        scenery.device(name)
    flags = itertools.product((False, True), repeat=3)
    ways = itertools.product(State, ("", "user", "admin"), flags)
    return [
        scenery.task(
            a,
            state,
            hold=hold,
            first_started_at=func.now() if begun else None,
            retry_at=func.now() if retries else None,
            image_on="d0" if kept else None,
        )
        for state, hold, (begun, retries, kept) in ways
        if state not in on_devices
    ] + [scenery.task(a, state, seat=state) for state in on_devices]


def test_sql_and_python_say_the_same_of_every_task(session, tasks):
    session.expire_all()
    rows = session.execute(select(Task, phases.TASK_PHASE)).all()
    assert len(rows) == len(tasks)
    assert [phases.of_task(task) for task, _ in rows] == [told for _, told in rows]


def test_request_is_found_by_the_phase_it_is_shown_with(session, tasks):
    session.expire_all()
    for request in session.scalars(select(Request)):
        (task,) = session.scalars(select(Task).where(Task.request_id == request.id))
        request.state = task.state if task.state in ("done", "failed", "cancelled") else "running"
        told = request_phase(request.state, [phases.of_task(task)])
        session.flush()
        query = select(Request.id).where(Request.id == request.id)
        assert session.scalar(query.where(phases.is_in([told]))) == request.id
        others = [phase for phase in phases.Phase if phase != told]
        assert session.scalar(query.where(phases.is_in(others))) is None
