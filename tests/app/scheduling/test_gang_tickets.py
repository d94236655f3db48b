"""Gangs that span islands, on real rows: schedulers are real, devices say what the test wants."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import func, select, update

from app.core.model.fields import NAME
from app.core.model.protocol.messages import Failed
from app.db import transactions
from app.db.models import (
    Account,
    Device,
    Island,
    Need,
    OutboxOrder,
    Placement,
    Request,
    Task,
)
from app.errors import Conflict
from app.insight import reports
from app.intake import actions, island_assignment
from app.scheduling import gang_tickets, journal
from app.scheduling.board_follower import Follower
from tests.app.intake.test_island_assignment import (
    DESCRIPTOR,
    Played,
    add_island,
    add_task,
    add_user,
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
    def test_gang_that_fits_no_island_gets_tickets(self, session, people):
        add_island(session, "east", cpu=1)
        add_island(session, "west", cpu=2)
        add_task(session, "prep")
        add_task(session, "wide", **{**SPANS, "devices_min": 3, "devices_max": 3}, after=["prep"])
        assert island_assignment.assign_new(session) == ({"east", "west"}, None)
        rows = {task.name: task for task in session.scalars(select(Task))}
        gang, ticket = rows["wide"], rows["wide@east"]
        assert (gang.island, gang.devices_min, gang.gang_id) == ("west", 2, gang.id)
        assert (ticket.island, ticket.devices_min, ticket.gang_id) == ("east", 1, gang.id)
        assert ticket.descriptor["run"] == {"ticket": "wide"}
        assert ticket.ordinal > gang.ordinal
        assert "spans 1 of east and 2 of west" in told(session, "wide")["because"]
        needs = select(Need.needs_id).where(Need.task_id == ticket.id)
        assert session.scalars(needs).all() == ["tsk_prep"]  # it starts when its gang may
        assert rows["prep"].abroad

    def test_task_named_like_a_ticket_stops_no_gang(self, session, people):
        add_island(session, "east", cpu=1)
        add_island(session, "west", cpu=1)
        add_task(session, "wide", **SPANS)
        add_task(session, "wide.east")
        island_assignment.assign_new(session)
        names = session.scalars(select(Task.name).order_by(Task.name)).all()
        assert names == ["wide", "wide.east", "wide@east"]
        assert not NAME.fullmatch("wide@east")

    def test_gang_that_fits_when_all_devices_are_up_gets_no_tickets(self, session, people):
        add_island(session, "east", cpu=1)
        add_island(session, "west", cpu=2)
        session.execute(update(Device).where(Device.id == "west.cpu0").values(cordoned=True))
        add_task(session, "wide", **SPANS)
        assert island_assignment.assign_new(session) == ({"west"}, None)
        assert session.scalars(select(Task.gang_id)).all() == [None]

    def test_only_large_enough_devices_count_for_tickets(self, session, people):
        add_island(session, "east", cpu=2)
        add_island(session, "west", cpu=2)
        session.execute(update(Device).where(Device.id == "east.cpu0").values(memory_bytes=1))
        add_task(
            session, "wide", **{**SPANS, "devices_min": 3, "devices_max": 3, "memory_bytes": 9}
        )
        island_assignment.assign_new(session)
        query = select(Task.name, Task.devices_min).order_by(Task.name)
        assert [tuple(row) for row in session.execute(query)] == [("wide", 2), ("wide@east", 1)]

    @pytest.mark.parametrize(
        ("devices", "more"),
        [({"east": 1, "west": 2}, {}), ({"east": 1, "west": 1}, {"across_hosts": False})],
    )
    def test_task_that_is_no_gang_gets_no_tickets(self, session, people, devices, more):
        for name, n in devices.items():
            add_island(session, name, cpu=n)
        add_task(session, "wide", **{**SPANS, **more})
        island_assignment.assign_new(session)
        assert session.scalars(select(Task.gang_id)).all() == [None]


@pytest.fixture
def both(committed, sent):
    """East and west have a device each, and a gang wants both."""
    add_user()
    east, west = Played("east"), Played("west")
    for island in (east, west):
        island.links = [f"{island.device}.test", 7]
        island.hear()
    with transactions.transaction() as session:
        add_task(session, "wide", **SPANS)
    with transactions.transaction() as session:
        assert island_assignment.assign_new(session) == ({"east", "west"}, None)
    return east, west


def row(name):
    with transactions.transaction() as session:
        return session.scalars(select(Task).where(Task.name == name)).one()


def orders():
    with transactions.transaction() as session:
        query = select(OutboxOrder.device_id, OutboxOrder.kind, OutboxOrder.body).order_by(
            OutboxOrder.id
        )
        return session.execute(query).all()


def launched(east, west):
    before = orders()
    east.look()
    assert seen()["wide"][:2] == ("blocked", "west")
    assert orders() == before  # a ticket is no order
    west.look()


def lose(island):
    """Nobody leads it, and no device of it is heard, for long enough."""
    with transactions.transaction() as session:
        gone = func.now() - timedelta(minutes=1)
        session.execute(update(Island).where(Island.name == island).values(leader_until=gone))
        session.execute(update(Device).where(Device.island == island).values(lease_until=gone))
    with transactions.transaction() as session:
        island_assignment.take_over(session, island)


def failed(task):
    return Failed(
        task=f"tsk_{task}", epoch=1, seq=2, step=1, held_us=0, cause="exception", message="no",
        detail="",
    )  # fmt: skip


class TestLive:
    def test_ticket_is_taken_first_and_then_the_gang_launched_on_both_islands(self, both):
        launched(*both)
        assert seen()["wide@east"] == ("running", "east", 1)
        assert seen()["wide"] == ("starting", "west", 1)
        home, outpost = orders()
        assert (home.device_id, home.body["seats"]) == ("west.0", [1, 1])
        assert (outpost.device_id, outpost.body["task"]) == ("east.0", "tsk_wide")
        assert outpost.body["links"] == {**home.body["links"], "home": ["west.0.test", 7]}
        assert (row("wide@east").good_for, row("wide").epoch) == (1, 1)

    def test_devices_of_a_ticket_are_charged_at_their_heartbeats(self, both):
        east, west = both
        launched(east, west)
        held = []
        for _ in range(2):
            time.sleep(0.01)  # what is held is time that passes
            east.hear(residents=[view("wide")])
            held.append(row("wide@east").held_us)
        assert 0 < held[0] < held[1]
        with transactions.transaction() as session:
            ticket = select(Placement).where(Placement.device_id == "east.0")
            placement = session.scalars(ticket).one()
            assert session.scalar(select(Account.total_us)) == placement.charged_us == held[1]

    def test_use_of_the_network_counts_on_both_islands(self, both):
        east, west = both
        launched(east, west)
        for island, sent_bytes in ((east, 30), (west, 12)):
            used = {"connections": 1, "sent_bytes": sent_bytes}
            island.hear(residents=[replace(view("wide"), network=used)])
        gang = row("wide")
        gang.descriptor = {"network": {"allow": ["hf.co:443"]}}
        with transactions.transaction() as session:
            used = reports.network_use(session, [gang])["tsk_wide"]
        assert (used.connections, used.sent_bytes) == (2, 42)

    def test_a_gang_is_not_launched_with_a_ticket_that_has_just_gone(self, both):
        """Home has decided; before it writes that down, the other island takes its ticket back."""
        east, _ = both
        east.look()
        follower = Follower("west")
        with transactions.transaction() as session:
            plan = follower.cycle(
                session, follower.look(session, now_s=transactions.now_s(session))
            )
            assert [one.move for one in plan.decisions] == ["Unlocked", "Launch"]
            with transactions.transaction() as other:
                gone = update(Task).where(Task.name == "wide@east").values(state="pausing")
                other.execute(gone)
            assert not journal.store(session, plan)
        assert orders() == []

    def test_ticket_asked_back_pauses_its_gang_and_then_releases(self, both):
        east, west = both
        launched(east, west)
        west.hear(started("wide"))
        with transactions.transaction() as session:
            session.execute(update(Task).where(Task.name == "wide@east").values(hold="user"))
        east.look()
        assert seen()["wide@east"][0] == "pausing"
        west.look()
        assert seen()["wide"][0] == "pausing"
        assert orders()[-1][:2] == ("west.0", "Pause")
        east.look()
        assert seen()["wide@east"][0] == "pausing"  # ranks may still be there
        west.hear(paused("wide"), residents=[view("wide", "paused")])
        east.look()
        assert seen()["wide@east"][0] == "blocked"
        assert seen()["wide"][0] == "blocked"
        assert row("wide").image_on == "west.0"

    def test_replaced_worker_has_lost_the_ticket(self, both):
        east, west = both
        launched(east, west)
        west.hear(started("wide"))
        east.hear(incarnation="p2")
        assert seen()["wide@east"][0] == "blocked"  # its gang has not left its seats yet
        west.look()
        assert orders()[-1][:2] == ("west.0", "Pause")

    def test_loss_of_the_home_island_releases_devices_of_the_others(self, both):
        """For who else is there; it waits for its home, and is cancelled without it."""
        east, west = both
        launched(east, west)
        west.hear(started("wide"))
        lose("west")
        east.look()
        assert seen()["wide"] == ("waiting", "west", 1)
        assert seen()["wide@east"][0] in ("blocked", "running")
        assert row("wide@east").good_for in (1, 2)
        with transactions.transaction() as session:
            session.execute(update(Task).values(cancel_asked_at=transactions.now(session)))
        lose("west")
        east.look()
        assert seen()["wide"][0] == "cancelled"
        assert seen()["wide@east"][0] in ("cancelled", "done")

    def test_other_tasks_of_a_lost_island_are_taken_over_without_the_gang(self, both):
        east, west = both
        with transactions.transaction() as session:
            add_task(session, "alone", island="west")
        launched(east, west)
        lose("west")
        assert seen()["alone"][1] == "east"
        assert (seen()["wide"][1], seen()["wide@east"][1]) == ("west", "east")
        assert row("wide").devices_min == 1

    def test_no_devices_are_kept_after_a_failure_until_the_next_attempt(self, both):
        east, west = both
        launched(east, west)
        west.hear(started("wide"))
        with transactions.transaction() as session:
            session.execute(update(Task).where(Task.name == "wide").values(retry_max=1))
        west.hear(failed("wide"))
        east.look()
        assert (seen()["wide"][0], seen()["wide@east"][0]) == ("blocked", "blocked")
        with transactions.transaction() as session:
            assert gang_tickets.try_again(session) == set()
            session.execute(update(Task).where(Task.name == "wide").values(retry_at=func.now()))
        with transactions.transaction() as session:
            assert gang_tickets.try_again(session) == {"east", "west"}
        launched(east, west)
        assert seen()["wide"] == ("starting", "west", 2)

    def test_resuming_a_gang_resumes_its_tickets(self, both):
        east, west = both
        with transactions.transaction() as session:
            request = session.get_one(Request, "req_r")
            actions.hold_request(session, request, by="x", as_admin=False)
        east.look()
        assert seen()["wide@east"][0] == "blocked"
        with transactions.transaction() as session:
            task = session.get_one(Task, "tsk_wide")
            actions.resume_task(session, task, by="x", as_admin=False)
        launched(east, west)
        assert seen()["wide"][0] == "starting"

    @pytest.mark.parametrize("wish", [actions.cancel_task, actions.save_task])
    def test_ticket_cannot_be_acted_on_without_its_gang(self, both, wish):
        launched(*both)
        with transactions.transaction() as session:
            ticket = session.scalars(select(Task).where(Task.name == "wide@east")).one()
            with pytest.raises(Conflict, match="the task holds devices for the task tsk_wide"):
                wish(session, ticket, by="x")

    def test_ticket_is_charged_from_when_the_device_is_free_until_its_release(self, both):
        east, _ = both
        with transactions.transaction() as session:
            session.execute(update(Task).values(hold="user"))
            add_task(session, "first", request="req_f", tenant="a", island="east")
        east.look()
        east.hear(started("first"), residents=[view("first")])
        with transactions.transaction() as session:
            session.execute(update(Task).where(Task.name != "first").values(hold=""))
            session.execute(update(Task).where(Task.name == "first").values(hold="user"))
        east.look()
        assert (seen()["first"][0], seen()["wide@east"][0]) == ("pausing", "running")
        east.hear(residents=[view("first")])
        assert row("wide@east").started_at is None  # who was there before saves its state
        east.hear(paused("first"), residents=[view("first", "paused")])
        assert row("wide@east").started_at is not None
        time.sleep(0.05)
        with transactions.transaction() as session:
            session.execute(update(Task).where(Task.name == "wide").values(hold="user"))
        east.look()
        kept = row("wide@east")
        assert kept.state == "blocked"
        assert kept.total_held_us >= 50_000
        with transactions.transaction() as session:
            placed = select(Placement.held_us).where(Placement.task_id == kept.id)
            assert session.scalars(placed).all() == [kept.total_held_us]

    def test_request_shows_the_state_of_the_gang(self, both):
        east, west = both
        east.look()
        with transactions.transaction() as session:
            assert session.scalar(select(Request.state)) == "queued"  # only its ticket is held
        west.look()
        with transactions.transaction() as session:
            assert session.scalar(select(Request.state)) == "running"

    def test_ticket_ends_with_its_gang(self, both):
        east, west = both
        launched(east, west)
        with transactions.transaction() as session:
            cancelled = update(Task).values(cancel_asked_at=transactions.now(session))
            session.execute(cancelled)
        east.look()
        assert seen()["wide@east"][0] == "running"
        west.look()
        with transactions.transaction() as session:
            lost = session.scalars(select(Task).where(Task.name == "wide")).one()
            placement = session.scalars(select(Placement).where(Placement.task_id == lost.id)).one()
            journal.lose(session, lost, placement, "It is gone.")
            journal.settle(session)
        east.look()
        assert (seen()["wide"][0], seen()["wide@east"][0]) == ("cancelled", "done")
        with transactions.transaction() as session:
            assert session.scalar(select(Request.state)) == "cancelled"
