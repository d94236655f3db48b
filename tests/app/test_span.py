"""Gangs that span islands, on real rows: schedulers are real, devices say what the test wants."""

from __future__ import annotations

import time

import pytest
from sqlalchemy import select, update

from app import assign, db, journal
from app.follow import Follower
from app.models import Account, Need, Order, Placement, Request, Task, Tenant, User
from tests.app.test_assign import (
    DESCRIPTOR,
    Played,
    add_island,
    add_task,
    paused,
    people,
    seen,
    sent,
    started,
    told,
    view,
)

__all__ = ["people", "sent"]  # fixtures

WIDE = {**DESCRIPTOR, "world_size": 2, "islands": 2}
SPANS = {"descriptor": WIDE, "devices_min": 2, "devices_max": 2, "across_hosts": True}


class TestAssigned:
    def test_a_gang_that_no_island_can_hold_gets_tickets(self, session, people):
        add_island(session, "east", cpu=1)
        add_island(session, "west", cpu=2)
        add_task(session, "prep")
        add_task(session, "wide", **{**SPANS, "devices_min": 3, "devices_max": 3}, after=["prep"])
        assert assign.assign_new(session) == {"east", "west"}
        rows = {task.name: task for task in session.scalars(select(Task))}
        gang, ticket = rows["wide"], rows["wide.east"]
        assert (gang.island, gang.devices_min, gang.gang_id) == ("west", 2, gang.id)
        assert (ticket.island, ticket.devices_min, ticket.gang_id) == ("east", 1, gang.id)
        assert ticket.descriptor["run"] == {"ticket": "wide"}
        assert ticket.ordinal > gang.ordinal
        assert "spans 1 of east and 2 of west" in told(session, "wide")["because"]
        needs = select(Need.needs_id).where(Need.task_id == ticket.id)
        assert session.scalars(needs).all() == ["tsk_prep"]  # it starts when its gang may
        assert rows["prep"].abroad

    @pytest.mark.parametrize(
        ("devices", "more"),
        [({"east": 1, "west": 2}, {}), ({"east": 1, "west": 1}, {"across_hosts": False})],
    )
    def test_no_other_does(self, session, people, devices, more):
        for name, n in devices.items():
            add_island(session, name, cpu=n)
        add_task(session, "wide", **{**SPANS, **more})
        assign.assign_new(session)
        assert session.scalars(select(Task.gang_id)).all() == [None]


@pytest.fixture
def both(committed, sent):
    """East and west have a device each, and a gang wants both."""
    with db.transaction() as session:
        session.add(Tenant(id="ten_a", name="a"))
        session.flush()
        session.add(User(id="usr_a", tenant_id="ten_a", name="a"))
    east, west = Played("east"), Played("west")
    for island in (east, west):
        island.facts["links"] = [f"{island.device}.test", 7]
        island.hear()
    with db.transaction() as session:
        add_task(session, "wide", **SPANS)
    with db.transaction() as session:
        assert assign.assign_new(session) == {"east", "west"}
    return east, west


def row(name):
    with db.transaction() as session:
        return session.scalars(select(Task).where(Task.name == name)).one()


def orders():
    with db.transaction() as session:
        query = select(Order.device_id, Order.kind, Order.body).order_by(Order.id)
        return session.execute(query).all()


def launched(east, west):
    east.look()
    assert seen()["wide"] == ("blocked", "west", 0)
    assert orders() == []  # a ticket is no order
    west.look()


class TestLive:
    def test_the_ticket_is_taken_first_and_the_gang_launched_on_both(self, both):
        launched(*both)
        assert seen()["wide.east"] == ("running", "east", 1)
        assert seen()["wide"] == ("starting", "west", 1)
        home, outpost = orders()
        assert (home.device_id, home.body["seats"]) == ("west.0", [1, 1])
        assert (outpost.device_id, outpost.body["task"]) == ("east.0", "tsk_wide")
        assert outpost.body["links"] == {**home.body["links"], "home": ["west.0.test", 7]}
        assert (row("wide.east").good_for, row("wide").epoch) == (1, 1)

    def test_what_a_ticket_keeps_is_charged_as_its_device_is_heard(self, both):
        east, west = both
        launched(east, west)
        held = []
        for _ in range(2):
            time.sleep(0.01)
            east.hear(residents=[view("wide")])
            held.append(row("wide.east").held_us)
        assert 0 < held[0] < held[1]
        with db.transaction() as session:
            ticket = select(Placement).where(Placement.device_id == "east.0")
            placement = session.scalars(ticket).one()
            assert session.scalar(select(Account.total_us)) == placement.charged_us == held[1]

    def test_a_gang_is_not_launched_with_a_ticket_that_has_just_gone(self, both):
        """Home has decided; before it writes that down, the other island takes its ticket back."""
        east, _ = both
        east.look()
        follower = Follower("west")
        with db.transaction() as session:
            plan = follower.cycle(session, follower.look(session, now_s=db.now_s(session)))
            assert [one.move for one in plan.decisions] == ["Unlocked", "Launch"]
            with db.transaction() as other:
                gone = update(Task).where(Task.name == "wide.east").values(state="pausing")
                other.execute(gone)
            assert not journal.store(session, plan)
        assert orders() == []

    def test_a_ticket_that_is_asked_back_has_its_gang_paused_and_then_lets_go(self, both):
        east, west = both
        launched(east, west)
        west.hear(started("wide"))
        with db.transaction() as session:
            session.execute(update(Task).where(Task.name == "wide.east").values(hold="user"))
        east.look()
        assert seen()["wide.east"][0] == "pausing"
        west.look()
        assert seen()["wide"][0] == "pausing"
        assert orders()[-1][:2] == ("west.0", "Pause")
        east.look()
        assert seen()["wide.east"][0] == "pausing"  # ranks may still be there
        west.hear(paused("wide"), residents=[view("wide", "paused")])
        east.look()
        assert seen()["wide.east"][0] == "blocked"
        assert seen()["wide"][0] == "blocked"
        assert row("wide").image_on == "west.0"

    def test_a_worker_that_was_replaced_has_lost_the_ticket(self, both):
        east, west = both
        launched(east, west)
        west.hear(started("wide"))
        east.hear(incarnation="p2")
        assert seen()["wide.east"][0] == "blocked"  # its gang has not left its seats yet
        west.look()
        assert orders()[-1][:2] == ("west.0", "Pause")

    def test_its_request_is_what_the_gang_is(self, both):
        east, west = both
        east.look()
        with db.transaction() as session:
            assert session.scalar(select(Request.state)) == "queued"  # only its ticket is held
        west.look()
        with db.transaction() as session:
            assert session.scalar(select(Request.state)) == "running"

    def test_the_ticket_is_over_with_its_gang(self, both):
        east, west = both
        launched(east, west)
        with db.transaction() as session:
            cancelled = update(Task).values(cancel_asked_at=db.now(session))
            session.execute(cancelled)
        east.look()
        assert seen()["wide.east"][0] == "running"
        west.look()
        with db.transaction() as session:
            lost = session.scalars(select(Task).where(Task.name == "wide")).one()
            placement = session.scalars(select(Placement).where(Placement.task_id == lost.id)).one()
            journal.lose(session, lost, placement, "It is gone.")
            journal.settle(session)
        east.look()
        assert (seen()["wide"][0], seen()["wide.east"][0]) == ("cancelled", "done")
        with db.transaction() as session:
            assert session.scalar(select(Request.state)) == "cancelled"
