"""Sessions that end because nobody types, and come back because somebody does."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import func, select, text, update
from sqlalchemy.event import listen, remove

from app.core.model.protocol.messages import ResidentView
from app.db.models import Device, RequestEvent, Task, Tenant, Tunnel
from app.intake import actions, sessions
from app.scheduling.journal import sessions as gives_way
from app.scheduling.journal.device_rows import DeviceRows
from app.scheduling.journal.sessions import silent_for_s


@pytest.fixture
def task(red, session):
    """A running session of red into which somebody last typed ten minutes ago."""
    wanted = {"name": "t", "run": {"command": ["sleep", "9"]}, "session": {"idle_s": 30}}
    session.execute(update(Device).values(facts={"sandbox": "off", "offers": ["session"]}))
    session.commit()
    id = red.post("/v1/requests", json={"tasks": [wanted]}).json()["tasks"][0]["id"]
    hour_ago, ago = (func.now() - timedelta(minutes=minutes) for minutes in (60, 10))
    now = {"state": "running", "epoch": 1, "seat": "h.0", "first_started_at": hour_ago}
    session.execute(update(Task).values(**now))
    session.add(
        Tunnel(
            id="tun_1", task_id=id, tenant_id="ten_red", kind="shell", ticket_sha256="x",
            expires_at=func.now(), opened_at=ago, active_at=ago,
        )
    )  # fmt: skip
    session.commit()
    return session.get_one(Task, id)


def events(session):
    query = (
        select(RequestEvent.type, RequestEvent.message)
        .where(RequestEvent.type.like("task.%"))
        .order_by(RequestEvent.id)
    )
    return [tuple(row) for row in session.execute(query)]


def limit(session, tenant, end_s):
    session.execute(update(Tenant).where(Tenant.id == tenant).values(session_end_s=end_s))
    session.commit()


@pytest.mark.parametrize("tenant", ["ten_red", "ten_root"])
def test_silent_session_is_warned_once_and_then_cancelled(session, task, tenant):
    limit(session, tenant, 700)
    for _ in range(2):
        sessions.end_silent(session)
        session.commit()
    [(type_, told)] = events(session)
    assert type_ == sessions.WARNED
    assert told == "Nobody has typed for 10m 00s: it ends after 11m 40s."
    assert task.cancel_asked_at is None
    limit(session, tenant, 590)
    sessions.end_silent(session)
    session.commit()
    session.refresh(task)
    assert task.cancel_asked_at is not None
    assert events(session)[-1][1] == f"Cancel requested by {sessions.BY}."


def test_session_that_is_used_and_tasks_that_are_none_stay(session, task):
    limit(session, "ten_red", 60)
    session.execute(text("update tunnels set active_at = now()"))
    sessions.end_silent(session)
    session.execute(text("update tunnels set active_at = now() - interval '1 day'"))
    session.execute(text("update tasks set descriptor = descriptor - 'session'"))
    sessions.end_silent(session)
    session.commit()
    session.refresh(task)
    assert task.cancel_asked_at is None


def test_turn_that_begins_is_no_input_but_a_resumption_is(session, task):
    session.execute(update(Task).values(launched_at=func.now(), started_at=func.now()))
    session.commit()
    assert 599 < silent_for_s(session, task) < 660
    task.hold = "idle"
    session.commit()
    actions.resume_task(session, task, by="ann", as_admin=False)
    session.commit()
    assert silent_for_s(session, task) < 60


def test_keystroke_wakes_only_a_session_that_was_idle(session, task):
    for hold, after in (("idle", ""), ("user", "user"), ("admin", "admin"), ("", "")):
        task.hold = hold
        session.commit()
        actions.wake_task(session, task, by="ann")
        session.commit()
        assert task.hold == after
    assert events(session) == [("task.woken", "It comes back: ann types.")]


def wait_for(session, task, idle_s):
    wanted = {**task.descriptor, "session": {"idle_s": idle_s}}
    session.execute(update(Task).values(descriptor=wanted))
    session.commit()


def is_idle(session, task, idle_s):
    """True if the session is paused when its device says that it computed nothing for so long."""
    device = session.get_one(Device, "h.0")
    house = DeviceRows(
        device=device, tasks={task.id: task}, near=[], open={}, lent_to=[], unanswered=[]
    )
    said = {"state": "running", "step": 0, "held_us": 0, "order_seq": 1, "memory_bytes": 0}
    view = ResidentView(task=task.id, epoch=1, idle_us=int(idle_s * 1e6), **said)
    return gives_way.take_in(session, house, [view])


@pytest.mark.parametrize(("above", "own"), [(100, 500), (500, 100), (100, None), (None, 100)])
def test_session_is_bounded_by_the_least_limit_above_it(session, task, above, own):
    wait_for(session, task, 400)
    for tenant, limit_s in (("ten_root", above), ("ten_red", own)):
        session.execute(update(Tenant).where(Tenant.id == tenant).values(idle_pause_s=limit_s))
    session.commit()
    assert not is_idle(session, task, 99)
    assert is_idle(session, task, 101)
    assert task.hold == "idle"


def test_session_that_computes_costs_no_look_for_input(session, task):
    wait_for(session, task, 100)
    asked = []

    def note(connection, cursor, statement, *more):
        asked.extend(name for name in ("tunnels", "events") if f"FROM {name}" in statement)

    engine = session.get_bind()
    listen(engine, "before_cursor_execute", note)
    try:
        assert not is_idle(session, task, 99)
        assert asked == []
        assert is_idle(session, task, 101)
        assert {*asked} == {"tunnels", "events"}
    finally:
        remove(engine, "before_cursor_execute", note)


def test_tenants_limit_is_set_shown_and_bounded(red, session, as_):
    admin = as_("root")
    path = "/v1/tenants/ten_red"
    etag = admin.get(path).headers["etag"]
    changed = admin.patch(path, json={"session_end_s": 3600}, headers={"If-Match": etag})
    assert changed.json()["session_end_s"] == 3600
    etag = changed.headers["etag"]
    refused = admin.patch(path, json={"session_end_s": 5}, headers={"If-Match": etag})
    assert refused.status_code == 422
    none = admin.patch(path, json={"session_end_s": None}, headers={"If-Match": etag})
    assert none.json()["session_end_s"] is None
