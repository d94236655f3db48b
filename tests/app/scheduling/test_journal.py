"""The journal against real Postgres: what was decided, what devices say, and what is history."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import event as events
from sqlalchemy import func, select, update
from sqlalchemy.exc import IntegrityError

from app.core.model.lifecycle import IllegalMove
from app.core.model.messages import (
    Alive,
    Failed,
    Finished,
    LogLines,
    Paused,
    ResidentView,
    Resized,
    Saved,
    Started,
    Stopped,
    decode,
)
from app.core.model.snapshot import Plan, PlanDecision
from app.db import transactions
from app.db.models import (
    Account,
    Checkpoint,
    Datablock,
    DatablockPlace,
    Device,
    Event,
    Island,
    LogLine,
    Metric,
    Order,
    Placement,
    Request,
    Task,
    Tenant,
    Usage,
    User,
)
from app.scheduling import journal, ledger, snapshot_reader
from app.settings import settings

FACTS = {"host": "h", "island": "isle", "kind": "cpu", "threads": 1, "memory_bytes": 2**30}
DESCRIPTOR = {
    "run": {"job": "train:Train"},
    "max_duration_s": 100.0,
    "checkpoint": {"every_s": 60.0, "keep": 3},
}
clock_us = itertools.count(1)


@pytest.fixture
def task(session):
    session.add_all([Island(name="isle"), Tenant(id="ten_a", name="a")])
    session.flush()
    session.add(User(id="usr_a", tenant_id="ten_a", name="ann"))
    session.flush()
    session.add(
        Request(
            id="req_a",
            tenant_id="ten_a",
            user_id="usr_a",
            name="r",
            descriptor={"bundle": "sha256:" + "0" * 64},
        )
    )
    session.flush()
    task = Task(
        id="tsk_a",
        request_id="req_a",
        tenant_id="ten_a",
        user_id="usr_a",
        island="isle",
        ordinal=0,
        name="t",
        type="train",
        kind="cpu",
        descriptor=DESCRIPTOR,
        state="waiting",
    )
    session.add(task)
    session.flush()
    return task


def hear(
    session,
    *,
    device="h.0",
    residents=(),
    events=(),
    logs=(),
    incarnation="p1",
    links=(),
    hung=(),
    **facts,
):
    recorded = journal.record(
        session,
        Alive(
            device=device,
            incarnation=incarnation,
            sent_us=next(clock_us),
            facts={**FACTS, **facts},
            residents=list(residents),
            events=list(events),
            logs=list(logs),
            links=list(links),
            hung=list(hung),
        ),
    )
    journal.settle(session)
    return recorded[0] if recorded else None


def view(task, state, *, epoch=1, step=0, held_us=0, order_seq=1):
    return ResidentView(
        task=task.id,
        epoch=epoch,
        state=state,
        step=step,
        held_us=held_us,
        order_seq=order_seq,
        memory_bytes=0,
    )


def event(kind, task, seq, *, epoch=1, step=0, held_us=0, **more):
    return kind(task=task.id, epoch=epoch, seq=seq, step=step, held_us=held_us, **more)


def started(task, *, seq=1, epoch=1, step=0, resumed="fresh"):
    return event(
        Started, task, seq, epoch=epoch, step=step, preset={}, capabilities=[], resumed=resumed
    )


def lose(session, task, **more):
    home = (Placement.task_id == task.id) & ~Placement.guest
    seated = select(Placement).where(home, Placement.ended_at.is_(None))
    journal.lose(session, task, session.scalars(seated).one(), "test", **more)


def decide(session, task, move, **more):
    decision = PlanDecision(task=task.id, move=move, rule="F3", because="for the test", **more)
    journal.store(session, Plan(decisions=(decision,)))
    journal.settle(session)
    session.refresh(task)


@pytest.fixture
def running(session, task):
    """The task runs on h.0 in epoch 1."""
    hear(session)
    decide(session, task, "Launch", devices=("h.0",))
    hear(session, residents=[view(task, "running")], events=[started(task)])
    assert task.state == "running"
    return task


class TestLaunch:
    def test_raises_the_epoch_opens_a_placement_and_writes_one_order(self, session, task):
        hear(session)
        decide(session, task, "Launch", devices=("h.0",))
        assert (task.state, task.epoch, task.seat) == ("starting", 1, "h.0")
        order = session.scalars(select(Order)).one()
        assert (order.kind, order.seq, order.body["run"]) == ("Launch", 1, {"job": "train:Train"})
        assert order.body["budget_us"] == 100_000_000
        assert session.scalars(select(Placement)).one().ended_at is None

    def test_the_order_counts_as_answered_when_the_device_shows_the_resident(self, session, task):
        hear(session)
        decide(session, task, "Launch", devices=("h.0",))
        hear(session, residents=[view(task, "seating")])
        assert session.scalars(select(Order)).one().answered_at is not None

    def test_a_seat_is_given_to_one_task_at_a_time(self, session, running):
        twin = {c.name: getattr(running, c.name) for c in Task.__table__.columns}
        session.add(Task(**{**twin, "id": "tsk_b", "name": "u", "state": "waiting", "epoch": 0}))
        session.flush()
        with pytest.raises(Exception, match="uq_placements_open_seat"):
            decide(session, session.get_one(Task, "tsk_b"), "Launch", devices=("h.0",))

    def test_a_launch_that_the_device_never_shows_is_given_up_at_last(self, session, task):
        """Its resident died before any report that named it arrived: it can be sent for ever."""
        hear(session)
        decide(session, task, "Launch", devices=("h.0",))
        order = session.scalars(select(Order)).one()
        order.sends = journal.LAUNCHES_UNSEEN - 1
        hear(session)
        assert task.state == "starting"
        order.sends = journal.LAUNCHES_UNSEEN
        hear(session)
        assert (task.state, task.seat) == ("waiting", None)

    def test_cancelling_what_the_device_never_took_in_ends_too(self, session, task):
        hear(session)
        decide(session, task, "Launch", devices=("h.0",))
        decide(session, task, "Cancel")
        for order in session.scalars(select(Order)):
            order.sends = journal.LAUNCHES_UNSEEN
        hear(session)
        assert task.state == "cancelled"
        assert session.scalar(select(func.count()).where(Order.answered_at.is_(None))) == 0


@pytest.fixture
def beside(session, running):
    """A graph that takes turns on h.0 with the task that runs there."""
    of = {c.name: getattr(running, c.name) for c in Task.__table__.columns}
    graph = {**DESCRIPTOR, "run": {"graph": "sha256:" + "0" * 64}}
    fresh = {"id": "tsk_b", "name": "u", "state": "waiting", "epoch": 0, "seat": None}
    session.add(Task(**{**of, **fresh, "descriptor": graph, "started_at": None, "event_seq": 0}))
    session.flush()
    other = session.get_one(Task, "tsk_b")
    decide(session, running, "Share", shares=True)
    decide(session, other, "Launch", devices=("h.0",), shares=True)
    both = [view(running, "running"), view(other, "running")]
    hear(session, residents=both, events=[started(other)])
    assert (running.state, other.state) == ("running", "running")
    return other


class TestSharing:
    def test_each_is_charged_for_its_own_turns_to_the_microsecond(self, session, running, beside):
        for turn in range(1, 4):
            mine, other = 7_001 * turn, 20_003 * turn
            views = [
                view(running, "running", held_us=mine, step=turn),
                view(beside, "running", held_us=other, step=2 * turn),
            ]
            hear(session, residents=views)
            assert (running.held_us, beside.held_us) == (mine, other)
            sums = [
                session.scalar(select(func.sum(column)))
                for column in (Placement.charged_us, Usage.charged_us, Account.total_us)
            ]
            assert sums == [mine + other] * 3

    def test_the_order_says_that_others_stay(self, session, running, beside):
        bodies = {
            order.task_id: decode(order.body).beside
            for order in session.scalars(select(Order).where(Order.kind == "Launch"))
        }
        assert bodies == {running.id: False, beside.id: True}

    def test_the_island_sees_what_was_booked_and_nothing_more(self, session, running, beside):
        views = [view(running, "running", held_us=5), view(beside, "running", held_us=6)]
        hear(session, residents=views)
        seen = snapshot_reader.load(
            session, "isle", now_s=transactions.now_s(session) + 100.0
        ).tasks
        held = {
            id: (one.shares, one.graph, one.held_us - one.accrued_us) for id, one in seen.items()
        }
        assert held == {running.id: (True, False, 5), beside.id: (True, True, 6)}
        assert all(one.accrued_us == 0 for one in seen.values())

    def test_either_may_end_and_the_other_goes_on(self, session, running, beside):
        done = event(Finished, running, 2, held_us=9, result={}, outputs={})
        hear(session, residents=[view(running, "ended"), view(beside, "running")], events=[done])
        assert (running.state, beside.state, running.shares) == ("done", "running", False)
        hear(session)
        assert (beside.state, beside.shares, beside.seat) == ("waiting", False, None)

    def test_its_owner_is_told(self, session, running, beside):
        told = session.scalars(select(Event).where(Event.type == "task.shares")).one()
        assert (told.task_id, told.data["device"]) == (running.id, "h.0")


class TestNonsense:
    """Whatever one task's events say, its device goes on being heard."""

    def test_an_event_that_cannot_be_fails_its_own_task_only(self, session, running):
        running.retry_max = 1
        stopped = event(Stopped, running, 2, step=3)  # nobody cancelled it
        answer = hear(session, residents=[view(running, "ended")], events=[stopped])
        assert answer.heard == {"tsk_a/1": 2}
        assert (running.state, running.cause, running.attempts) == ("waiting", "exit", 1)
        decide(session, running, "Launch", devices=("h.0",))
        again = [started(running, epoch=2), event(Stopped, running, 2, epoch=2)]
        hear(session, residents=[view(running, "ended", epoch=2)], events=again)
        assert running.state == "failed"

    def test_what_postgres_does_not_take_fails_its_own_task_only(self, session, running):
        done = event(Finished, running, 2, held_us=7, result={"text": "\0"}, outputs={})
        answer = hear(session, residents=[view(running, "ended")], events=[done])
        assert answer.heard == {"tsk_a/1": 2}
        assert running.state == "failed"
        assert session.scalars(select(Account.total_us)).one() == 7

    def test_done_without_a_declared_output_is_failed(self, session, running):
        """Else who needs the output could never be launched, nor anybody after it."""
        running.descriptor = {**DESCRIPTOR, "outputs": ["model"]}
        done = event(Finished, running, 2, result={}, outputs={})
        hear(session, residents=[view(running, "ended")], events=[done])
        assert (running.state, running.cause) == ("failed", "exception")
        assert "model" in running.message


class TestFence:
    def test_an_event_heard_twice_counts_once(self, session, running):
        paused = event(Paused, running, 2, step=7, held_us=50)
        hear(session, residents=[view(running, "paused", step=7)], events=[paused])
        answer = hear(session, residents=[view(running, "paused", step=7)], events=[paused])
        assert (running.state, running.pauses) == ("waiting", 1)
        assert answer.heard == {"tsk_a/1": 2}

    def test_an_event_before_its_turn_waits_for_the_one_before_it(self, session, running):
        done = event(Finished, running, 3, result={}, outputs={})
        answer = hear(session, residents=[view(running, "running")], events=[done])
        assert (running.state, answer.heard) == ("running", {"tsk_a/1": 1})

    def test_an_event_of_an_older_epoch_is_acknowledged_and_changes_nothing(self, session, running):
        lose(session, running)
        decide(session, running, "Launch", devices=("h.0",))
        done = event(Finished, running, 2, epoch=1, result={}, outputs={})
        answer = hear(session, residents=[view(running, "seating", epoch=2)], events=[done])
        assert (running.state, answer.heard) == ("starting", {"tsk_a/1": 2})

    def test_a_resident_of_an_older_epoch_must_be_dropped(self, session, running):
        lose(session, running)
        answer = hear(session, residents=[view(running, "running")])
        assert answer.drop == [["tsk_a", 1]]

    def test_a_paused_resident_is_kept_while_its_next_launch_is_on_the_way(self, session, running):
        parked = view(running, "paused", step=7)
        hear(session, residents=[parked], events=[event(Paused, running, 2, step=7)])
        decide(session, running, "Launch", devices=("h.0",))
        answer = hear(session, residents=[parked])  # sent before the order came
        assert (answer.keep, answer.drop) == ([["tsk_a", 1]], [])

    def test_a_paused_resident_is_dropped_once_its_task_is_launched_elsewhere(
        self, session, running
    ):
        hear(session, device="h.1")
        parked = view(running, "paused", step=7)
        hear(session, residents=[parked], events=[event(Paused, running, 2, step=7)])
        decide(session, running, "Launch", devices=("h.1",))
        assert hear(session, residents=[parked]).drop == [["tsk_a", 1]]

    def test_another_device_cannot_speak_for_the_task(self, session, running):
        done = event(Finished, running, 2, result={}, outputs={})
        hear(session, device="h.1", residents=[view(running, "running")], events=[done])
        assert running.state == "running"

    def test_a_heartbeat_older_than_the_last_one_is_ignored(self, session, running):
        late = Alive(
            device="h.0",
            incarnation="p1",
            sent_us=0,
            facts=FACTS,
            residents=[],
            events=[],
            logs=[],
        )
        assert journal.record(session, late) is None
        assert running.state == "running"

    def test_a_device_that_became_another_kind_is_known_as_that(self, session, task):
        hear(session)
        hear(session, incarnation="p2", kind="cuda")
        assert session.get_one(Device, "h.0").kind == "cuda"


class TestLost:
    def test_a_new_process_on_the_device_means_an_empty_house(self, session, running):
        hear(session, incarnation="p2")
        assert (running.state, running.seat) == ("waiting", None)
        assert session.scalars(select(Placement)).one().end == "lost"

    def test_a_late_word_of_the_replaced_process_changes_nothing(self, session, running):
        hear(session, incarnation="p2")
        assert hear(session, incarnation="p1", residents=[view(running, "running")]) is None

    def test_a_resident_that_the_device_no_longer_names_is_lost(self, session, running):
        hear(session, residents=[])
        assert running.state == "waiting"

    def test_a_launch_that_the_device_has_not_taken_in_is_not_lost(self, session, task):
        hear(session)
        decide(session, task, "Launch", devices=("h.0",))
        hear(session, residents=[])
        assert task.state == "starting"

    def test_steps_to_run_again_are_counted_when_it_starts_from_its_checkpoint(
        self, session, running
    ):
        hear(session, residents=[view(running, "running", step=30)])
        hear(session, incarnation="p2")
        decide(session, running, "Launch", devices=("h.0",))
        again = started(running, epoch=2, step=20, resumed="image")
        hear(
            session, incarnation="p2", residents=[view(running, "running", epoch=2)], events=[again]
        )
        assert (running.lost_steps, running.step) == (10, 20)


def silence(session, ago_s, *, device="h.0"):
    """As if the device had been heard so long ago: the clock of a transaction stands still."""
    row, now = session.get_one(Device, device), transactions.now(session)
    row.seen_at = now - timedelta(seconds=ago_s)
    row.lease_until = row.seen_at + timedelta(seconds=settings().lease_s)
    session.flush()


def booked_us(session):
    """What was charged, as the four places say it that must agree."""
    sums = (Placement.held_us, Placement.charged_us, Usage.charged_us, Account.total_us)
    (found,) = {session.scalar(select(func.sum(column))) or 0 for column in sums}
    return found


class TestUnheard:
    """Rule F1: what is lost is charged until the lease ended or another process came."""

    def test_task_whose_worker_is_replaced_is_charged_until_then(self, session, running):
        hear(session, residents=[view(running, "running", held_us=400)])
        silence(session, 3)
        hear(session, incarnation="p2")
        assert booked_us(session) == 3_000_400
        assert (running.total_held_us, running.unheard_us) == (3_000_400, 3_000_000)
        hear(session, incarnation="p2")
        hear(session, incarnation="p1", residents=[view(running, "running", held_us=9_000_000)])
        assert booked_us(session) == 3_000_400

    def test_task_is_never_charged_beyond_the_lease(self, session, running):
        silence(session, 3600)
        hear(session, incarnation="p2")
        assert booked_us(session) == settings().lease_s * 1e6

    def test_lease_that_was_made_longer_meanwhile_charges_no_more(self, session, running):
        silence(session, 3600)
        session.get_one(Device, "h.0").lease_until = transactions.now(session) + timedelta(
            seconds=60
        )
        hear(session, incarnation="p2")
        assert booked_us(session) == settings().lease_s * 1e6

    def test_device_that_said_goodbye_charges_nothing_more(self, session, running):
        hear(session, residents=[view(running, "running", held_us=400)], leaving=True)
        row = session.get_one(Device, "h.0")
        row.seen_at = row.lease_until = transactions.now(session) - timedelta(seconds=5)
        hear(session, incarnation="p2")
        assert booked_us(session) == 400

    def test_task_that_had_not_started_is_not_charged(self, session, task):
        hear(session)
        decide(session, task, "Launch", devices=("h.0",))
        silence(session, 3)
        hear(session, incarnation="p2")
        assert (task.state, booked_us(session)) == ("waiting", 0)

    def test_tasks_that_take_turns_share_what_was_held(self, session, running, beside):
        silence(session, 3)
        hear(session, incarnation="p2")
        assert (running.total_held_us, beside.total_held_us) == (1_500_000, 1_500_000)
        assert booked_us(session) == 3_000_000

    def test_devices_lent_to_the_task_are_charged_too(self, session, grown):
        long_ago(session)
        silence(session, 3)
        hear(session, incarnation="p2")
        assert (grown.total_held_us, grown.guest_held_us) == (3_000_000, 3_000_000)
        assert booked_us(session) == 6_000_000

    def test_late_word_of_what_was_held_is_charged_once(self, session, running):
        """Its device was silent for longer than its lease, and goes on with the same process."""
        silence(session, 3)
        lose(session, running, unheard_us=3_000_000)
        saved = {"sha256": "a" * 64, "size_bytes": 10, "took_us": 5}
        for seq, held_us, charged_us in ((2, 2_000_000, 3_000_000), (3, 3_500_000, 3_500_000)):
            hear(session, events=[event(Saved, running, seq, step=9, held_us=held_us, **saved)])
            assert booked_us(session) == running.total_held_us == charged_us

    def test_unheard_time_does_not_count_for_max_duration(self, session, running):
        hear(session, residents=[view(running, "running", held_us=400)])
        silence(session, 3)
        hear(session, incarnation="p2")
        decide(session, running, "Launch", devices=("h.0",))
        newest = select(Order.body).order_by(Order.id.desc()).limit(1)
        assert session.scalar(newest)["budget_us"] == 100_000_000 - 400


class TestHung:
    """A device worker says at its start what the one before it was busy with when it hung."""

    def runs_on(self, session, task, device, epoch):
        hear(session, device=device)
        decide(session, task, "Launch", devices=(device,))
        on_it = [view(task, "running", epoch=epoch)]
        hear(session, device=device, residents=on_it, events=[started(task, epoch=epoch)])
        assert (task.state, task.seat) == ("running", device)

    def test_task_that_made_one_device_hang_goes_on_without_an_attempt(self, session, running):
        for _ in range(2):  # it is told until it is answered
            hear(session, incarnation="p2", hung=[["tsk_a", 1]])
            assert (running.state, running.attempts, running.cause) == ("waiting", 0, None)
        assert session.scalars(select(Placement.end)).one() == "hung"
        told = session.scalars(select(Event.message).where(Event.type == "task.hung")).one()
        assert told.startswith("h.0 stopped working while this task ran on it.")

    def test_task_that_made_two_devices_hang_fails(self, session, running):
        running.retry_max = 5
        hear(session, incarnation="p2", hung=[["tsk_a", 1]])
        self.runs_on(session, running, "h.1", 2)
        hear(session, device="h.1", incarnation="p2", hung=[["tsk_a", 2]])
        assert (running.state, running.cause, running.seat) == ("failed", "hung", None)
        begins = (
            "The devices h.0 and h.1 stopped working while this task ran on them, so it is not "
        )
        assert running.message.startswith(begins + "started again.")
        assert session.scalars(select(Request.state)).one() == "failed"

    def test_same_device_twice_is_one_device(self, session, running):
        hear(session, incarnation="p2", hung=[["tsk_a", 1]])
        decide(session, running, "Launch", devices=("h.0",))
        again = [started(running, epoch=2)]
        hear(session, incarnation="p2", residents=[view(running, "running", epoch=2)], events=again)
        hear(session, incarnation="p3", hung=[["tsk_a", 2]])
        assert running.state == "waiting"

    def test_device_that_comes_back_after_its_lease_takes_the_task_off_the_next(
        self, session, running
    ):
        hear(session, incarnation="p2", hung=[["tsk_a", 1]])
        self.runs_on(session, running, "h.1", 2)
        lose(session, running)  # the lease ended
        self.runs_on(session, running, "h.2", 3)
        hear(session, device="h.1", incarnation="p2", hung=[["tsk_a", 2]])
        assert (running.state, running.cause) == ("failed", "hung")
        answer = hear(session, device="h.2", residents=[view(running, "running", epoch=3)])
        assert answer.drop == [["tsk_a", 3]]

    def test_killed_workers_fail_no_task(self, session, running):
        for epoch in range(2, 6):
            hear(session, device=running.seat, incarnation=f"p{epoch}")
            assert (running.state, running.attempts) == ("waiting", 0)
            self.runs_on(session, running, f"h.{epoch}", epoch)

    def test_another_device_cannot_blame_a_task(self, session, running):
        hear(session, device="h.1", hung=[["tsk_a", 1]])
        hear(session, device="h.2", hung=[["tsk_a", 1], ["tsk_none", 1]])
        assert running.state == "running"
        hear(session, hung=[["tsk_a", 1]])  # nor a device that still holds it: nothing was lost
        assert session.scalars(select(Placement.end)).one() != "hung"


class TestPause:
    def test_leaves_an_image_on_the_device_that_is_saved_later(self, session, running):
        decide(session, running, "Pause")
        assert running.state == "pausing"
        resident = view(running, "paused", step=9, order_seq=2)
        hear(session, residents=[resident], events=[event(Paused, running, 2, step=9)])
        assert (running.state, running.image_on, running.saved) == ("waiting", "h.0", False)
        saved = event(Saved, running, 3, step=9, sha256="ab" * 32, size_bytes=5, took_us=1)
        hear(session, residents=[resident], events=[saved])
        assert running.saved
        assert session.scalars(select(Checkpoint)).one().step == 9

    def test_an_image_that_is_gone_is_forgotten(self, session, running):
        hear(
            session,
            residents=[view(running, "paused", step=9)],
            events=[event(Paused, running, 2, step=9)],
        )
        hear(session, residents=[])
        assert running.image_on is None

    def test_a_checkpoint_that_became_durable_late_is_still_kept(self, session, running):
        paused = [view(running, "paused", step=9)]
        hear(session, residents=paused, events=[event(Paused, running, 2, step=9)])
        decide(session, running, "Launch", devices=("h.0",))
        saved = event(Saved, running, 3, epoch=1, step=9, sha256="ab" * 32, size_bytes=5, took_us=1)
        hear(session, residents=[view(running, "seating", epoch=2)], events=[saved])
        assert session.scalars(select(Checkpoint)).one().sha256 == "ab" * 32

    def test_nobody_is_told_whose_task_takes_the_device(self, session, running):
        decide(session, running, "Pause", against="tsk_of_another_tenant")
        told = session.scalars(select(Event).where(Event.type == "task.pausing")).one()
        assert "tsk_of_another_tenant" not in f"{told.message} {told.data}"

    def test_a_checkpoint_made_again_counts_again(self, session, running):
        saved = {"step": 9, "sha256": "ab" * 32, "size_bytes": 5, "took_us": 1}
        hear(
            session,
            residents=[view(running, "running")],
            events=[event(Saved, running, 2, **saved)],
        )
        old = session.scalars(select(Checkpoint)).one()
        old.damaged_at = old.deleted_at = func.now()
        session.flush()
        hear(
            session,
            residents=[view(running, "running")],
            events=[event(Saved, running, 3, **saved)],
        )
        session.refresh(old)
        assert (old.damaged_at, old.deleted_at) == (None, None)


class TestEnd:
    def test_finished_keeps_the_result_and_ends_the_request(self, session, running):
        done = event(Finished, running, 2, step=10, result={"loss": 1}, outputs={})
        hear(session, residents=[view(running, "ended", step=10)], events=[done])
        assert (running.state, running.result) == ("done", {"loss": 1})
        assert session.get_one(Request, "req_a").state == "done"
        assert "request.done" in session.scalars(select(Event.type)).all()

    def test_a_crash_is_tried_again_while_attempts_are_left(self, session, running):
        running.retry_max = 1
        crash = event(Failed, running, 2, cause="exception", message="boom", detail="trace")
        hear(session, residents=[view(running, "ended")], events=[crash])
        assert (running.state, running.attempts, running.detail) == ("waiting", 1, "trace")
        decide(session, running, "Launch", devices=("h.0",))
        again = [
            started(running, epoch=2),
            event(Failed, running, 2, epoch=2, cause="exception", message="boom"),
        ]
        hear(session, residents=[view(running, "ended", epoch=2)], events=again)
        assert (running.state, running.attempts) == ("failed", 1)

    def test_what_a_failed_command_left_is_kept_until_it_is_tried_again(self, session, running):
        running.retry_max = 1
        left = {"artifacts.zip": {"sha256": "0" * 64, "size_bytes": 9}}
        crash = event(Failed, running, 2, cause="exit", message="boom", outputs=left)
        hear(session, residents=[view(running, "ended")], events=[crash])
        assert (running.state, running.outputs) == ("waiting", left)
        decide(session, running, "Launch", devices=("h.0",))
        done = event(Finished, running, 2, epoch=2, step=10, result={}, outputs={})
        events = [started(running, epoch=2), done]
        hear(session, residents=[view(running, "ended", epoch=2, step=10)], events=events)
        assert (running.state, running.outputs) == ("done", {})

    def test_what_is_done_in_the_end_has_no_cause_of_failure(self, session, running):
        running.retry_max = 1
        crash = event(Failed, running, 2, cause="exception", message="boom", detail="trace")
        hear(session, residents=[view(running, "ended")], events=[crash])
        decide(session, running, "Launch", devices=("h.0",))
        again = [
            started(running, epoch=2),
            event(Finished, running, 2, epoch=2, result={}, outputs={}),
        ]
        hear(session, residents=[view(running, "ended", epoch=2)], events=again)
        assert (running.state, running.cause, running.detail) == ("done", None, None)

    def test_what_can_never_succeed_is_not_tried_again(self, session, running):
        running.retry_max = 5
        hang = event(Failed, running, 2, cause="max_duration", message="too long")
        hear(session, residents=[view(running, "ended")], events=[hang])
        assert running.state == "failed"

    @pytest.fixture
    def restoring(self, session, running):
        """Lost after its checkpoint at step 9, and launched again from it, in epoch 2."""
        saved = event(Saved, running, 2, step=9, sha256="ab" * 32, size_bytes=5, took_us=1)
        hear(session, residents=[view(running, "running")], events=[saved])
        lose(session, running)
        decide(session, running, "Launch", devices=("h.0",))
        return running

    def test_a_damaged_checkpoint_is_passed_over(self, session, restoring):
        broken = event(Failed, restoring, 1, epoch=2, cause="image", message="does not match")
        hear(session, residents=[view(restoring, "ended", epoch=2)], events=[broken])
        assert (restoring.state, restoring.attempts) == ("waiting", 0)
        assert session.scalars(select(Checkpoint)).one().damaged_at is not None

    def test_the_checkpoint_that_was_restored_is_the_damaged_one(self, session, restoring):
        late = event(
            Saved, restoring, 3, epoch=1, step=12, sha256="cd" * 32, size_bytes=5, took_us=1
        )
        hear(session, residents=[view(restoring, "seating", epoch=2)], events=[late])
        broken = event(Failed, restoring, 1, epoch=2, cause="image", message="does not match")
        hear(session, residents=[view(restoring, "ended", epoch=2)], events=[broken])
        damaged = select(Checkpoint.sha256).where(Checkpoint.damaged_at.is_not(None))
        assert session.scalars(damaged).all() == ["ab" * 32]

    def test_a_bad_image_where_there_was_none_counts_as_an_attempt(self, session, running):
        """Else a job that says so each time is launched for ever, without a pause."""
        broken = event(Failed, running, 2, cause="image", message="so it says")
        hear(session, residents=[view(running, "ended")], events=[broken])
        assert running.state == "failed"

    def test_a_store_that_is_away_damages_nothing_and_uses_up_no_attempt(self, session, restoring):
        away = event(Failed, restoring, 1, epoch=2, cause="store", message="no answer")
        hear(session, residents=[view(restoring, "ended", epoch=2)], events=[away])
        assert (restoring.state, restoring.attempts) == ("waiting", 0)
        assert session.scalars(select(Checkpoint)).one().damaged_at is None
        later = Task.retry_at - func.now() == timedelta(seconds=journal.STORE_AGAIN_S)
        assert session.scalars(select(later)).one()

    def test_a_checkpoint_says_who_signed_it_and_what_it_added(self, session, running):
        saved = {"sha256": "ab" * 32, "size_bytes": 5, "took_us": 1, "new_bytes": 3}
        events = [event(Saved, running, 2, step=9, **saved)]
        hear(session, residents=[view(running, "running")], key="1f" * 32)
        hear(session, residents=[view(running, "running")], events=events, key="1f" * 32)
        row = session.scalars(select(Checkpoint)).one()
        assert (row.host, row.key, row.new_bytes) == ("h", "1f" * 32, 3)

    def test_the_hundredth_attempt_still_has_a_date(self, session, running):
        running.retry_max, running.attempts = 100, 90
        crash = event(Failed, running, 2, cause="exception", message="boom")
        hear(session, residents=[view(running, "ended")], events=[crash])
        wait = Task.retry_at - func.now() <= timedelta(seconds=journal.RETRY_LONGEST_S)
        assert session.scalars(select(wait)).one()

    def test_cancel_waits_for_the_device_and_survives_a_pause_under_way(self, session, running):
        decide(session, running, "Pause")
        decide(session, running, "Cancel")
        assert running.state == "stopping"
        both = [event(Paused, running, 2, step=4), event(Stopped, running, 3, step=4)]
        hear(session, residents=[view(running, "ended")], events=both)
        assert running.state == "cancelled"

    def test_no_move_leads_out_of_an_end(self, session, running):
        done = event(Finished, running, 2, result={}, outputs={})
        hear(session, residents=[view(running, "ended")], events=[done])
        with pytest.raises(IllegalMove, match="is done, got Launch, expected nothing more"):
            decide(session, running, "Launch", devices=("h.0",))


class TestLedger:
    def test_three_sums_agree_and_follow_the_cost(self, session, running):
        session.get_one(Device, "h.0").cost_milli = 1000
        placement = session.scalars(select(Placement)).one()
        placement.cost_milli = 2500
        for held_us in (1_000_003, 1_000_003, 999, 2_000_001):  # doubled and late reports
            ledger.charge(session, placement, held_us)
        session.flush()
        booked = session.scalar(select(func.sum(Usage.charged_us)))
        assert booked == placement.charged_us == 2_000_001 * 2500 // 1000
        assert session.scalar(select(func.sum(Usage.held_us))) == 2_000_001
        assert session.scalars(select(Account.total_us)).one() == booked

    def test_rebuilding_from_the_buckets_gives_the_same_total(self, session, running):
        ledger.charge(session, session.scalars(select(Placement)).one(), 5_000_000)
        before = session.scalars(select(Account.total_us)).one()
        ledger.rebuild(session)
        session.flush()
        assert session.scalars(select(Account.total_us)).one() == before

    def test_a_heartbeat_charges_what_was_held_since_the_last(self, session, running):
        hear(session, residents=[view(running, "running", held_us=400)])
        hear(session, residents=[view(running, "running", held_us=900)])
        assert session.scalars(select(Account.total_us)).one() == 900


@pytest.fixture
def grown(session, running):
    """The task runs on h.0, and h.1 is lent to it."""
    hear(session, device="h.1")
    running.devices_max = 3
    decide(session, running, "Splice", devices=("h.0", "h.1"))
    assert running.state == "splicing"
    hear(session, events=[event(Resized, running, 2, seats=[2], step=4)])
    assert running.state == "running"
    return running


def guests(session):
    query = select(Placement).where(Placement.guest).order_by(Placement.id)
    return session.scalars(query.execution_options(populate_existing=True)).all()


def long_ago(session):
    """Clocks of this transaction stand still: what is open began a while ago."""
    session.execute(update(Placement).values(launched_at=func.now() - timedelta(seconds=60)))


class TestLending:
    def test_growing_orders_a_resize_and_takes_the_seat(self, session, grown):
        order = session.scalars(select(Order).where(Order.kind == "Resize")).one()
        assert (order.device_id, order.body["seats"], order.seq) == ("h.0", [2], 2)
        (guest,) = guests(session)
        assert (guest.device_id, guest.epoch, guest.ended_at) == ("h.1", 1, None)
        other = copy_of(session, grown)
        with pytest.raises(IntegrityError), session.begin_nested():
            decide(session, other, "Launch", devices=("h.1",))

    def test_a_guest_is_charged_for_what_its_home_held_meanwhile(self, session, grown):
        hear(session, residents=[view(grown, "running", held_us=1000, order_seq=2)])
        assert guests(session)[0].held_us == 0  # it was lent at this instant
        long_ago(session)
        hear(session, residents=[view(grown, "running", held_us=1400, order_seq=2)])
        hear(session, residents=[view(grown, "running", held_us=1400, order_seq=2)])
        assert guests(session)[0].held_us == grown.guest_held_us == 400
        assert session.scalars(select(Account.total_us)).one() == 1800
        assert session.scalar(select(func.sum(Usage.charged_us))) == 1800
        assert grown.held_us == 1400

    def test_the_device_worker_that_lends_has_nothing_to_show(self, session, grown):
        hear(session, device="h.1")
        hear(session, device="h.1", incarnation="p2")
        assert grown.state == "running"
        assert guests(session)[0].ended_at is None

    def test_giving_back_frees_the_seat_when_the_ranks_have_left_it(self, session, grown):
        other = copy_of(session, grown)
        decide(session, grown, "Splice", devices=("h.0",))
        decide(session, other, "Launch", devices=("h.1",))
        launch = session.scalars(select(Order).where(Order.task_id == other.id)).one()
        assert decode(launch.body).surely_until_us == 0
        ready = [view(other, "seating")]
        answer = hear(session, device="h.1", residents=ready)
        assert (answer.keep, answer.drop) == ([], [])
        grown.devices_max = 1
        hear(session, events=[event(Resized, grown, 3, seats=[1], step=9)])
        assert [guest.end for guest in guests(session)] == ["resized"]
        answer = hear(session, device="h.1", residents=ready)
        assert answer.keep == [[other.id, 1]]

    def test_who_is_paused_lets_go_of_all_and_names_a_successor_for_its_own_seat_only(
        self, session, grown
    ):
        decide(session, grown, "Pause", against="tsk_b")
        pause = session.scalars(select(Order).where(Order.kind == "Pause")).one()
        assert decode(pause.body).successor == ""
        assert all(guest.leaving for guest in guests(session))
        hear(session, events=[event(Paused, grown, 3, step=9)])
        assert [guest.end for guest in guests(session)] == ["paused"]
        assert (grown.state, grown.resized_at) == ("waiting", None)

    def test_all_ends_with_the_home(self, session, grown):
        lose(session, grown)
        assert [guest.end for guest in guests(session)] == ["lost"]

    def test_a_resize_that_was_cancelled_meanwhile_changes_nothing(self, session, grown):
        decide(session, grown, "Splice", devices=("h.0",))
        decide(session, grown, "Cancel")
        hear(session, events=[event(Resized, grown, 3, seats=[1])])
        assert grown.state == "stopping"
        hear(session, events=[event(Stopped, grown, 4)])
        assert (grown.state, [g.end for g in guests(session)]) == ("cancelled", ["stopped"])

    def test_the_island_sees_what_it_holds(self, session, grown):
        for id in ("h.0", "h.1"):
            device = session.get_one(Device, id)
            device.facts = {**device.facts, "splice": True}

        def seen():
            session.flush()
            return snapshot_reader.load(session, "isle", now_s=transactions.now_s(session)).tasks[
                grown.id
            ]

        assert (seen().seats, seen().leaves, seen().width_max) == (("h.0", "h.1"), (), 3)
        decide(session, grown, "Splice", devices=("h.0",))
        assert (seen().seats, seen().leaves) == (("h.0",), ("h.1",))
        grown.devices_max = 1  # as its owner may wish at any time
        assert (seen().seats, seen().leaves, seen().width_max) == (("h.0",), ("h.1",), 1)
        decide(session, grown, "Cancel")
        assert (seen().seats, seen().leaves) == (("h.0", "h.1"), ())


LINKS = ["10.0.0.1", 7000]


@pytest.fixture
def apart(session, running):
    """The task runs on h.0 and is to go on on far.0 of another host too."""
    hear(session, residents=[view(running, "running")], links=LINKS)
    hear(session, device="far.0", host="far")
    running.devices_max, running.across_hosts = 3, True
    decide(session, running, "Splice", devices=("h.0", "far.0"))
    return running


def orders(session, device):
    query = select(Order).where(Order.device_id == device, Order.answered_at.is_(None))
    return session.scalars(query.order_by(Order.id)).all()


class TestHosts:
    def test_each_host_gets_an_order_and_the_same_secret(self, session, apart):
        (home,), (far,) = orders(session, "h.0")[-1:], orders(session, "far.0")
        assert (home.kind, home.seq, home.body["seats"]) == ("Resize", 2, [1, 1])
        assert (far.kind, far.seq, far.body["seats"], far.body["host"]) == ("Launch", 2, [1, 1], 1)
        secret = home.body["links"]["secret"]
        assert far.body["links"] == {"secret": secret, "home": LINKS}
        assert (far.body["images"], far.body["outputs"]) == ([], [])

    def test_an_outpost_is_kept_while_its_device_is_lent_and_changes_nothing(self, session, apart):
        there = [view(apart, "running", held_us=5000, order_seq=2)]
        answer = hear(session, device="far.0", host="far", residents=there)
        assert (answer.keep, answer.drop) == ([[apart.id, 1]], [])
        assert orders(session, "far.0") == []
        assert (apart.held_us, guests(session)[0].held_us) == (0, 0)
        hear(session, events=[event(Resized, apart, 2, seats=[1, 1], step=4)])
        assert (apart.state, guests(session)[0].ended_at) == ("running", None)
        lose(session, apart)
        answer = hear(session, device="far.0", host="far", residents=there)
        assert (answer.keep, answer.drop) == ([], [[apart.id, 1]])

    def test_the_outpost_of_a_paused_gang_stays_until_its_image_is_durable(self, session, apart):
        hear(session, events=[event(Resized, apart, 2, seats=[1, 1])])
        decide(session, apart, "Pause")
        paused = {"step": 7, "held_us": 100}
        hear(session, residents=[view(apart, "paused")], events=[event(Paused, apart, 3, **paused)])
        assert apart.image_on == "h.0"
        there = {
            "device": "far.0",
            "host": "far",
            "residents": [view(apart, "paused", order_seq=2)],
        }
        assert hear(session, **there).keep == [[apart.id, 1]]
        saved = event(Saved, apart, 4, step=7, sha256="a" * 64, size_bytes=1, took_us=1)
        hear(session, residents=[view(apart, "paused")], events=[saved])
        assert hear(session, **there).drop == [[apart.id, 1]]

    def test_it_also_stays_while_its_home_gets_ready_to_go_on(self, session, apart):
        hear(session, events=[event(Resized, apart, 2, seats=[1, 1])])
        decide(session, apart, "Pause")
        hear(session, residents=[view(apart, "paused")], events=[event(Paused, apart, 3)])
        there = {
            "device": "far.0",
            "host": "far",
            "residents": [view(apart, "paused", order_seq=2)],
        }
        decide(session, apart, "Launch", devices=("h.0",))
        assert hear(session, **there).keep == [[apart.id, 1]]
        again = started(apart, epoch=2, resumed="resident")
        hear(session, residents=[view(apart, "running", epoch=2)], events=[again])
        assert hear(session, **there).keep == [[apart.id, 1]]  # it may gather parts of the image
        hear(session, residents=[view(apart, "running", epoch=2, step=1)])
        assert hear(session, **there).drop == [[apart.id, 1]]

    def test_a_change_of_hosts_has_a_secret_of_its_own(self, session, apart):
        hear(session, events=[event(Resized, apart, 2, seats=[1, 1])], links=LINKS)
        hear(session, device="far.1", host="far")
        decide(session, apart, "Splice", devices=("h.0", "far.0", "far.1"))
        first, second = orders(session, "far.0")
        assert second.seq > first.seq
        assert second.body["seats"] == [1, 2]
        assert second.body["links"]["secret"] != first.body["links"]["secret"]
        assert orders(session, "far.1") == []  # one device of each host holds the outpost

    def test_a_host_that_cannot_be_reached_is_given_back(self, session, apart):
        hear(session, events=[event(Resized, apart, 2, seats=[1], step=4)])
        assert (apart.state, [guest.end for guest in guests(session)]) == ("running", ["unreached"])

    def test_who_cannot_leave_what_was_promised_goes_back_to_its_line(self, session, apart):
        hear(session, events=[event(Resized, apart, 2, seats=[1, 1])])
        decide(session, apart, "Splice", devices=("h.0",))
        hear(session, events=[event(Resized, apart, 3, seats=[1, 1])])
        assert (apart.state, [guest.end for guest in guests(session)]) == ("waiting", ["lost"])

    def test_a_lost_host_is_no_attempt(self, session, apart):
        lost = {"cause": "host", "message": "the connection to its host 1 is lost"}
        hear(session, events=[event(Failed, apart, 2, **lost)])
        assert (apart.state, apart.attempts, apart.retry_max) == ("waiting", 0, 0)

    def test_a_gang_of_several_devices_begins_on_all_of_them(self, session, task):
        for device, host in (("h.0", "h"), ("far.0", "far"), ("h.1", "h")):
            hear(session, device=device, host=host, links=LINKS)
        task.devices_min = task.devices_max = 3
        task.across_hosts = True
        decide(session, task, "Launch", devices=("h.0", "far.0", "h.1"))
        (home,), (far,) = orders(session, "h.0"), orders(session, "far.0")
        assert (home.body["seats"], far.body["host"]) == ([2, 1], 1)
        hear(session, residents=[view(task, "running")], events=[started(task)])
        assert (task.state, task.resized_at) == ("running", task.started_at)
        long_ago(session)
        hear(session, residents=[view(task, "running", held_us=300)])
        assert [guest.held_us for guest in guests(session)] == [300, 300]
        assert session.scalar(select(func.sum(Usage.charged_us))) == 900


def copy_of(session, task):
    """Another task like it, that waits."""
    names = ("request_id", "tenant_id", "user_id", "island", "type", "kind", "descriptor")
    values = {name: getattr(task, name) for name in names}
    other = Task(id="tsk_b", ordinal=1, name="other", state="waiting", **values)
    session.add(other)
    session.flush()
    return other


class TestLogs:
    def test_lines_sent_again_are_kept_once_and_in_order(self, session, running):
        here = [view(running, "running")]
        lines = [["out", "one"], ["out", "two"]]
        first = LogLines(task=running.id, epoch=1, first=0, lines=lines)
        more = LogLines(task=running.id, epoch=1, first=1, lines=[["out", "two"], ["err", "three"]])
        hear(session, residents=here, logs=[first])
        answer = hear(session, residents=here, logs=[more])
        assert session.scalars(select(LogLine.text).order_by(LogLine.id)).all() == [
            "one",
            "two",
            "three",
        ]
        assert answer.logged == {"tsk_a/1": 3}

    def test_a_device_cannot_write_into_the_log_of_a_task_it_never_had(self, session, running):
        forged = LogLines(task=running.id, epoch=1, first=0, lines=[["out", "forged"]])
        hear(session, device="h.1", logs=[forged])
        assert session.scalars(select(LogLine)).all() == []


class TestCost:
    """A heartbeat comes twice a second for each talkative job."""

    def test_a_heartbeat_with_log_lines_needs_few_statements(self, session, running):
        here = [view(running, "running", step=1, held_us=5)]
        lines = LogLines(task=running.id, epoch=1, first=0, lines=[["out", "one"]])
        hear(session, residents=here, logs=[lines])
        said = []
        engine = session.connection().engine
        events.listen(engine, "before_cursor_execute", lambda *a: said.append(a[2]))
        here = [view(running, "running", step=2, held_us=9)]
        session.expire_all()
        hear(session, residents=here, logs=[replace(lines, first=1)])
        assert len(said) <= 18, "\n".join(said)
        assert not [s for s in said if "requests" in s], "log lines move no request"


class TestPublish:
    """Outputs that become datablocks, in the transaction in which the task is done."""

    @pytest.fixture
    def publishing(self, session, running):
        publish = {"outputs": ["tokens", "log"], "publish": {"tokens": "corpus-tokens"}}
        running.descriptor = {**DESCRIPTOR, **publish}
        session.flush()
        return running

    def done(self, task, seq=2, *, epoch=1, **tokens):
        kept = {"sha256": "a" * 64, "size_bytes": 90, "format": "safetensors"}
        listed = [{"name": "ids", "dtype": "int64", "shape": [4]}]
        kept |= {"tensors": listed, "tensor_count": 1, **tokens}
        outputs = {"tokens": kept, "log": {"sha256": "b" * 64, "size_bytes": 9}}
        return event(Finished, task, seq, epoch=epoch, result={}, outputs=outputs)

    def versions(self, session):
        rows = session.scalars(select(Datablock).order_by(Datablock.version)).all()
        return [(row.name, row.version, row.sha256[0]) for row in rows]

    def test_it_is_the_next_version_with_who_made_it(self, session, publishing):
        hear(session, events=[self.done(publishing)])
        [row] = session.scalars(select(Datablock)).all()
        assert (row.name, row.version, row.format) == ("corpus-tokens", 1, "safetensors")
        assert (row.tenant_id, row.user_id) == ("ten_a", "usr_a")
        assert (row.task_id, row.output, row.size_bytes) == ("tsk_a", "tokens", 90)
        assert row.tensors == [{"name": "ids", "dtype": "int64", "shape": [4]}]
        [place] = session.scalars(select(DatablockPlace)).all()
        assert (place.datablock_id, place.device_id) == (row.id, "h.0")
        assert publishing.outputs == {
            "tokens": {
                "sha256": "a" * 64,
                "size_bytes": 90,
                "format": "safetensors",
                "datablock": "corpus-tokens@1",
            },
            "log": {"sha256": "b" * 64, "size_bytes": 9},
        }
        told = session.scalars(select(Event.message).where(Event.type == "task.published")).one()
        assert told == "Published tokens as datablock corpus-tokens@1 (90 bytes)."

    def test_heard_again_it_is_none(self, session, publishing):
        for _ in range(2):
            hear(session, events=[self.done(publishing)])
        assert self.versions(session) == [("corpus-tokens", 1, "a")]

    def test_of_an_epoch_that_is_over_it_is_none(self, session, publishing):
        lose(session, publishing)
        hear(session, events=[self.done(publishing)])
        assert self.versions(session) == []
        decide(session, publishing, "Launch", devices=("h.0",))
        again = [started(publishing, epoch=2), self.done(publishing, 2, epoch=2, sha256="c" * 64)]
        hear(session, residents=[view(publishing, "running", epoch=2)], events=again)
        assert self.versions(session) == [("corpus-tokens", 1, "c")]

    def test_equal_bytes_of_another_task_are_a_version_of_their_own(self, session, publishing):
        hear(session, events=[self.done(publishing)])
        twin = {c.name: getattr(publishing, c.name) for c in Task.__table__.columns}
        fresh = {"id": "tsk_b", "name": "u", "state": "waiting", "epoch": 0, "outputs": {}}
        session.add(Task(**{**twin, **fresh}))
        session.flush()
        other = session.get_one(Task, "tsk_b")
        decide(session, other, "Launch", devices=("h.0",))
        hear(session, events=[started(other), self.done(other)])
        assert self.versions(session) == [("corpus-tokens", 1, "a"), ("corpus-tokens", 2, "a")]

    def test_a_device_that_does_not_know_how_fails_the_task(self, session, publishing):
        outputs = {name: {"sha256": "a" * 64, "size_bytes": 9} for name in ("tokens", "log")}
        finished = event(Finished, publishing, 2, result={}, outputs=outputs)
        hear(session, events=[finished])
        assert publishing.state == "failed"
        assert publishing.message == "It ended without its declared outputs tokens."

    def test_what_makes_no_sense_fails_its_own_task_only(self, session, publishing):
        hear(session, events=[self.done(publishing, tensors=[{"name": "\0"}])])
        assert publishing.state == "failed"
        assert self.versions(session) == []
        assert hear(session) is not None


def test_metrics_of_steps_in_between_are_kept_once(session, running):
    for step, points in ((3, [[1, {"loss": 4}], [2, {"loss": 2}]]), (3, [[1, {"loss": 4}]])):
        seen = replace(view(running, "running", step=step), metrics={"loss": 1}, points=points)
        hear(session, residents=[seen])
    later = replace(
        view(running, "running", step=4), metrics={"loss": 0}, points=[[9, {"loss": 8}]]
    )
    hear(session, residents=[later])
    rows = session.execute(select(Metric.step, Metric.values).order_by(Metric.step)).all()
    assert [(step, values["loss"]) for step, values in rows] == [(1, 4), (2, 2), (3, 1), (4, 0)]


def test_a_metric_that_is_no_finite_number_is_told_when_it_becomes_so(session, running):

    for step, loss in ((5, 0.5), (6, "nan"), (7, "nan"), (8, 0.25)):
        seen = replace(view(running, "running", step=step), metrics={"loss": loss})
        hear(session, residents=[seen])
    told = session.scalars(select(Event.message).where(Event.type == "task.not_finite")).all()
    assert told == ["Not a finite number at step 6: loss."]
