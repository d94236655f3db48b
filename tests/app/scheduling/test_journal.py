"""The journal against real Postgres: what was decided, what devices say, and what is history."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import delete, func, select, update
from sqlalchemy import event as events
from sqlalchemy.exc import IntegrityError

from app.core.model.lifecycle import IllegalMove
from app.core.model.protocol.messages import (
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
    encode,
)
from app.core.model.provisions.mounts import digest
from app.core.model.provisions.retry import RetryBackoff
from app.core.model.snapshot import Plan, PlanDecision
from app.core.scheduling.rounds.pace import HeartbeatPace
from app.db import transactions
from app.db.models import (
    Account,
    Checkpoint,
    Datablock,
    DatablockPlace,
    Device,
    Island,
    LogLine,
    Metric,
    Mount,
    Need,
    OutboxOrder,
    Placement,
    Request,
    RequestEvent,
    Task,
    Tenant,
    Usage,
    User,
)
from app.insight import explain, reports
from app.scheduling import island_pace, journal, ledger, snapshot_reader
from app.settings import settings

FACTS = {
    "host": "h", "island": "isle", "kind": "cpu", "threads": 1, "memory_bytes": 2**30,
}  # fmt: skip
DESCRIPTOR = {
    "name": "train",
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
    grace_us=0,
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
            grace_us=grace_us,
        ),
    )
    journal.settle(session)
    return recorded[0] if recorded else None


def view(task, state, *, epoch=1, step=0, held_us=0, order_seq=1, memory_bytes=0, host_bytes=0):
    return ResidentView(
        task=task.id,
        epoch=epoch,
        state=state,
        step=step,
        held_us=held_us,
        order_seq=order_seq,
        memory_bytes=memory_bytes,
        host_bytes=host_bytes,
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


@pytest.mark.parametrize(("kind", "cost_milli"), [("cpu", 1000), ("cuda", 10_000)])
def test_new_device_has_the_cost_of_its_kind_and_keeps_it(session, task, kind, cost_milli):
    hear(session, kind=kind)
    assert session.get_one(Device, "h.0").cost_milli == cost_milli
    session.get_one(Device, "h.0").cost_milli = 7
    hear(session, kind=kind)
    assert session.get_one(Device, "h.0").cost_milli == 7


class TestLaunch:
    def test_launch_raises_the_epoch_opens_a_placement_and_writes_one_order(self, session, task):
        hear(session)
        decide(session, task, "Launch", devices=("h.0",))
        assert (task.state, task.epoch, task.seat) == ("starting", 1, "h.0")
        order = session.scalars(select(OutboxOrder)).one()
        assert (order.kind, order.seq) == ("Launch", 1)
        assert order.body["spec"]["run"] == {"job": "train:Train"}
        assert order.body["budget_us"] == 100_000_000
        assert session.scalars(select(Placement)).one().ended_at is None

    def test_start_is_charged_as_it_lasts_and_uses_up_no_time_limit(self, session, task):
        hear(session)
        decide(session, task, "Launch", devices=("h.0",))
        hear(session, residents=[view(task, "seating", held_us=2_000_000)])
        assert (task.held_us, booked_us(session)) == (2_000_000, 2_000_000)
        began = started(task)
        hear(session, events=[replace(began, held_us=3_000_000)], residents=[view(task, "running")])
        now_s = transactions.now_s(session)
        seen = snapshot_reader.load(session, "isle", now_s=now_s + 5).tasks[task.id]
        assert (seen.prepared_us, seen.accrued_us, seen.held_us) == (3_000_000, 5e6, 8e6)
        lose(session, task)
        assert (task.total_held_us, task.unheard_us) == (3_000_000, 3_000_000)
        assert snapshot_reader.load(session, "isle", now_s=now_s).tasks[task.id].had_us == 0

    def test_start_that_never_ends_is_charged_all_the_same(self, session, task):
        hear(session)
        decide(session, task, "Launch", devices=("h.0",))
        hear(session, residents=[view(task, "seating", held_us=2_000_000)])
        told = event(Failed, task, 1, held_us=4_000_000, cause="slow", message="It was slow.")
        hear(session, events=[told])
        assert booked_us(session) == 4_000_000
        assert (task.total_held_us, task.unheard_us) == (4_000_000, 4_000_000)

    def test_task_waits_from_the_loss_of_its_device_to_its_next_launch(self, session, running):
        lose(session, running)
        assert running.waiting_since == transactions.now(session)
        decide(session, running, "Launch", devices=("h.0",))
        assert running.waiting_since is None

    @pytest.mark.parametrize(("takes", "named"), [(True, "usr_a"), (False, ""), (None, "")])
    def test_launch_names_its_user_to_devices_that_take_it(self, session, task, takes, named):
        hear(session, user=takes)
        decide(session, task, "Launch", devices=("h.0",))
        order = session.scalars(select(OutboxOrder)).one()
        assert order.body.get("user", "") == named

    def test_order_counts_as_taken_when_the_device_shows_the_resident(self, session, task):
        hear(session)
        decide(session, task, "Launch", devices=("h.0",))
        hear(session, residents=[view(task, "seating")])
        assert session.scalars(select(OutboxOrder)).one().answered_at is not None

    def test_slot_is_given_to_one_task_at_a_time(self, session, running):
        twin = {c.name: getattr(running, c.name) for c in Task.__table__.columns}
        session.add(Task(**{**twin, "id": "tsk_b", "name": "u", "state": "waiting", "epoch": 0}))
        session.flush()
        with pytest.raises(Exception, match="uq_placements_open_seat"):
            decide(session, session.get_one(Task, "tsk_b"), "Launch", devices=("h.0",))

    def test_launch_that_the_device_never_shows_is_abandoned(self, session, task):
        """Its resident died before any report that named it arrived: it can be sent for ever."""
        hear(session)
        decide(session, task, "Launch", devices=("h.0",))
        order = session.scalars(select(OutboxOrder)).one()
        order.sends = journal.LAUNCHES_UNSEEN - 1
        hear(session)
        assert task.state == "starting"
        order.sends = journal.LAUNCHES_UNSEEN
        hear(session)
        assert (task.state, task.seat) == ("waiting", None)

    def test_cancelling_a_launch_that_was_never_taken_in_ends_it_too(self, session, task):
        hear(session)
        decide(session, task, "Launch", devices=("h.0",))
        decide(session, task, "Cancel")
        for order in session.scalars(select(OutboxOrder)):
            order.sends = journal.LAUNCHES_UNSEEN
        hear(session)
        assert task.state == "cancelled"
        assert session.scalar(select(func.count()).where(OutboxOrder.answered_at.is_(None))) == 0


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


@pytest.fixture
def batch(session, task):
    """Three functions on h.0: tsk_a leads, the others wait behind it."""
    task.descriptor = {**DESCRIPTOR, "run": {"function": "ops:f"}}
    session.flush()
    of = {c.name: getattr(task, c.name) for c in Task.__table__.columns}
    more = [Task(**{**of, "id": f"tsk_{name}", "name": name}) for name in "bc"]
    session.add_all(more)
    session.flush()
    hear(session)
    tasks = [task, *more]
    decisions = tuple(
        PlanDecision(
            task=each.id, move="Launch", rule="F3", because="", devices=("h.0",), shares=n > 0
        )
        for n, each in enumerate(tasks)
    )
    assert journal.store(session, Plan(decisions=decisions))
    journal.settle(session)
    return tasks


class TestBatches:
    def test_each_function_of_a_batch_has_its_own_epoch_order_and_placement(self, session, batch):
        assert [(task.state, task.epoch, task.seat) for task in batch] == 3 * [
            ("starting", 1, "h.0")
        ]
        orders = session.scalars(select(OutboxOrder).order_by(OutboxOrder.id)).all()
        assert [(order.task_id, order.kind) for order in orders] == [
            (task.id, "Launch") for task in batch
        ]
        assert [order.body.get("beside", False) for order in orders] == [False, True, True]

    def test_ends_of_a_batch_in_one_heartbeat_end_and_charge_each_function(self, session, batch):
        told = []
        for n, task in enumerate(batch, 1):
            told.append(started(task))
            held_us = 1001 * n
            told.append(event(Finished, task, 2, step=1, held_us=held_us, result={}, outputs={}))
        ended = [view(task, "ended", step=1) for task in batch]
        answer = hear(session, residents=ended, events=told)
        assert answer.heard == {f"{task.id}/1": 2 for task in batch}
        for task in batch:
            session.refresh(task)
        assert [(task.state, task.total_held_us) for task in batch] == [
            ("done", 1001), ("done", 2002), ("done", 3003),
        ]  # fmt: skip
        assert session.scalar(select(Request.state)) == "done"
        assert session.scalar(select(Usage.held_us)) == 6006
        assert booked_us(session) == 6006

    def test_function_that_is_given_back_waits_again_and_has_lost_nothing(self, session, batch):
        lead, second, third = batch
        views = [view(lead, "running"), view(second, "seating"), view(third, "seating")]
        hear(session, residents=views, events=[started(lead)])
        hear(session, residents=[views[0]], events=[event(Paused, each, 1) for each in batch[1:]])
        for task in batch:
            session.refresh(task)
        assert [task.state for task in batch] == ["running", "waiting", "waiting"]
        assert (second.seat, second.image_on, second.attempts, second.pauses) == (None, None, 0, 0)
        told = session.scalars(select(RequestEvent.type).where(RequestEvent.task_id == second.id))
        assert "task.returned" in told.all()
        decide(session, second, "Launch", devices=("h.0",), shares=True)
        assert (second.state, second.epoch) == ("starting", 2)

    def test_function_of_a_batch_that_waits_for_the_store_is_not_given_back(self, session, batch):
        lead, second, _ = batch
        held = event(Paused, second, 1, unstored="No space left on device.", wait_us=5_000_000)
        views = [view(lead, "running"), view(second, "paused")]
        hear(session, residents=views, events=[started(lead), held])
        session.refresh(second)
        assert (second.state, second.image_on) == ("waiting", "h.0")
        assert second.unstored == "No space left on device."

    def test_head_of_a_batch_that_another_function_overtook_waits_again(self, session, batch):
        lead, second, _ = batch
        hear(session, residents=[view(second, "running")], events=[started(second)])
        hear(session, residents=[view(second, "running")], events=[event(Paused, lead, 1)])
        session.refresh(lead)
        assert (lead.state, lead.seat, lead.image_on, lead.pauses) == ("waiting", None, None, 0)
        told = session.scalars(select(RequestEvent.type).where(RequestEvent.task_id == lead.id))
        assert "task.returned" in told.all()

    def test_lost_device_loses_only_functions_without_an_end(self, session, batch):
        lead, second, third = batch
        done = event(Finished, lead, 2, step=1, held_us=7, result={}, outputs={})
        views = [view(lead, "ended"), view(second, "running"), view(third, "seating")]
        hear(session, residents=views, events=[started(lead), done, started(second)])
        hear(session, incarnation="p2")  # kill -9 of the device worker, and a new one
        for task in batch:
            session.refresh(task)
        assert [task.state for task in batch] == ["done", "waiting", "waiting"]


class TestFailedDevice:
    """A worker that cannot serve a device says why, and nothing else follows from that."""

    def failed(self, session, **more):
        before = session.get_one(Device, "h.0")
        lease = before.lease_until, before.incarnation
        known = {"incarnation": "p2", "failed": "the GPU fell off the bus.", "leaving": True}
        assert hear(session, **{**known, **more}) is None  # no answer
        after = session.get_one(Device, "h.0")
        assert (after.lease_until, after.incarnation) == lease
        return after

    def test_reason_is_kept_and_no_lease_or_task_changes(self, session, running):
        hear(session, residents=[view(running, "running")])
        device = self.failed(session)
        assert device.facts["failed"] == "the GPU fell off the bus."
        assert device.facts["kind"] == FACTS["kind"]
        session.refresh(running)
        assert (running.state, running.seat) == ("running", "h.0")

    def test_next_report_of_the_device_ends_it(self, session, running):
        self.failed(session)
        hear(session, incarnation="p3")
        assert "failed" not in session.get_one(Device, "h.0").facts

    def test_late_reason_of_a_replaced_process_counts_for_nothing(self, session, running):
        hear(session, incarnation="p3")
        assert "failed" not in self.failed(session, incarnation="p2").facts

    def test_device_that_was_never_up_is_known_with_its_reason(self, session, running):
        assert hear(session, device="h.9", failed="no driver.", leaving=True) is None
        device = session.get_one(Device, "h.9")
        assert (device.facts["failed"], device.lease_until) == ("no driver.", None)


class TestSharing:
    def test_each_sharer_is_charged_for_its_own_turns_to_the_microsecond(
        self, session, running, beside
    ):
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

    def test_order_says_that_the_other_tasks_stay(self, session, running, beside):
        bodies = {
            order.task_id: decode(order.body).beside
            for order in session.scalars(select(OutboxOrder).where(OutboxOrder.kind == "Launch"))
        }
        assert bodies == {running.id: False, beside.id: True}

    def test_board_shows_what_was_booked_and_nothing_more(self, session, running, beside):
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

    def test_each_of_two_sharers_may_end_and_the_other_goes_on(self, session, running, beside):
        done = event(Finished, running, 2, held_us=9, result={}, outputs={})
        hear(session, residents=[view(running, "ended"), view(beside, "running")], events=[done])
        assert (running.state, beside.state, running.shares) == ("done", "running", False)
        hear(session)
        assert (beside.state, beside.shares, beside.seat) == ("waiting", False, None)

    def test_owner_is_told_that_the_task_shares(self, session, running, beside):
        told = session.scalars(select(RequestEvent).where(RequestEvent.type == "task.shares")).one()
        assert (told.task_id, told.data["device"]) == (running.id, "h.0")


class TestNonsense:
    """Whatever one task's events say, its device goes on being heard."""

    def test_impossible_event_fails_its_own_task_only(self, session, running):
        running.retry_max = 1
        stopped = event(Stopped, running, 2, step=3)  # nobody cancelled it
        answer = hear(session, residents=[view(running, "ended")], events=[stopped])
        assert answer.heard == {"tsk_a/1": 2}
        assert (running.state, running.cause, running.attempts) == ("waiting", "exit", 1)
        decide(session, running, "Launch", devices=("h.0",))
        again = [started(running, epoch=2), event(Stopped, running, 2, epoch=2)]
        hear(session, residents=[view(running, "ended", epoch=2)], events=again)
        assert running.state == "failed"

    def test_text_that_postgres_refuses_fails_its_own_task_only(self, session, running):
        done = event(Finished, running, 2, held_us=7, result={"text": "\0"}, outputs={})
        answer = hear(session, residents=[view(running, "ended")], events=[done])
        assert answer.heard == {"tsk_a/1": 2}
        assert running.state == "failed"
        assert session.scalars(select(Account.total_us)).one() == 7

    def test_finished_task_without_a_declared_output_has_failed(self, session, running):
        """Else who needs the output could never be launched, nor anybody after it."""
        running.descriptor = {**DESCRIPTOR, "outputs": ["model"]}
        done = event(Finished, running, 2, result={}, outputs={})
        hear(session, residents=[view(running, "ended")], events=[done])
        assert (running.state, running.cause) == ("failed", "exception")
        assert "model" in running.message


class TestFence:
    def test_repeated_event_counts_once(self, session, running):
        paused = event(Paused, running, 2, step=7, held_us=50)
        hear(session, residents=[view(running, "paused", step=7)], events=[paused])
        answer = hear(session, residents=[view(running, "paused", step=7)], events=[paused])
        assert (running.state, running.pauses) == ("waiting", 1)
        assert answer.heard == {"tsk_a/1": 2}

    def test_early_event_waits_for_the_event_before_it(self, session, running):
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

    def test_device_is_told_the_mounts_until_it_knows_them(self, session, task):
        """A device that may show no mounts has no such fact, and is never told one."""
        hear(session)
        assert "mounts" not in encode(hear(session))
        assert hear(session, mounts=digest({})).mounts is None
        session.add(Mount(name="pictures", path="/data/pictures", tenants=["ten_x"]))
        session.flush()
        session.add(Mount(name="debian", path="/images/debian", sort="image", tenants=None))
        session.flush()
        assert hear(session, mounts=digest({})).images is None  # of an older version
        told = hear(session, mounts=digest({}), images=digest({}))
        assert told.images == {"debian": "/images/debian"}
        known = {"pictures": "/data/pictures"}
        for _ in range(2):
            assert hear(session, mounts=digest({})).mounts == known
        assert hear(session, mounts=digest(known)).mounts is None
        session.execute(delete(Mount))
        assert hear(session, mounts=digest(known)).mounts == {}
        assert decode(encode(hear(session, mounts=digest(known)))).mounts == {}

    def test_grace_of_the_newest_heartbeat_is_kept_up_to_the_limit(self, session, running):
        device = session.get_one(Device, "h.0")
        for asked_us, granted_us in ((8_000_000, 8_000_000), (1 << 40, 60_000_000), (0, 0)):
            answer = hear(session, grace_us=asked_us)
            assert (answer.grace_us, device.grace_us) == (granted_us, granted_us)
        hear(session, grace_us=8_000_000)
        hear(session, grace_us=8_000_000, leaving=True)  # no step runs there any more
        assert device.grace_us == 0

    def test_device_that_changed_its_kind_has_the_new_kind(self, session, task):
        hear(session)
        hear(session, incarnation="p2", kind="cuda")
        assert session.get_one(Device, "h.0").kind == "cuda"


class TestLost:
    def test_new_process_on_a_device_means_that_all_residents_are_lost(self, session, running):
        hear(session, incarnation="p2")
        assert (running.state, running.seat) == ("waiting", None)
        assert session.scalars(select(Placement)).one().end == "lost"

    def test_late_event_of_a_replaced_process_changes_nothing(self, session, running):
        hear(session, incarnation="p2")
        assert hear(session, incarnation="p1", residents=[view(running, "running")]) is None

    def test_resident_no_longer_reported_by_its_device_is_lost(self, session, running):
        hear(session, residents=[])
        assert running.state == "waiting"

    def test_launch_not_yet_taken_in_is_not_lost(self, session, task):
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

    def test_device_of_a_large_island_is_charged_until_its_longer_lease_ended(
        self, session, running
    ):
        island_pace.it_is(session, HeartbeatPace(beat_s=26.0, lease_s=82.0))
        hear(session, residents=[view(running, "running")])
        row = session.get_one(Device, "h.0")
        row.seen_at -= timedelta(hours=1)
        hear(session, incarnation="p2")
        assert booked_us(session) == 82_000_000

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
        newest = select(OutboxOrder.body).order_by(OutboxOrder.id.desc()).limit(1)
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
        told = session.scalars(
            select(RequestEvent.message).where(RequestEvent.type == "task.hung")
        ).one()
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
    def test_paused_task_leaves_an_image_on_the_device_that_is_saved_later(self, session, running):
        decide(session, running, "Pause")
        assert running.state == "pausing"
        resident = view(running, "paused", step=9, order_seq=2)
        hear(session, residents=[resident], events=[event(Paused, running, 2, step=9)])
        assert (running.state, running.image_on, running.saved) == ("waiting", "h.0", False)
        saved = event(Saved, running, 3, step=9, sha256="ab" * 32, size_bytes=5, took_us=1)
        hear(session, residents=[resident], events=[saved])
        assert running.saved
        assert session.scalars(select(Checkpoint)).one().step == 9

    def test_lost_image_is_forgotten(self, session, running):
        hear(
            session,
            residents=[view(running, "paused", step=9)],
            events=[event(Paused, running, 2, step=9)],
        )
        hear(session, residents=[])
        assert running.image_on is None

    @pytest.mark.parametrize("is_saved", [True, False])
    def test_partition_without_its_process_waits_for_its_input_if_its_image_is_durable(
        self, session, running, is_saved
    ):
        part = {"nodes": [], "takes": {"b0": "a.y"}, "gives": {}, "late": ["b0"]}
        running.descriptor = {**running.descriptor, "run": {"graph": "sha256:0", "part": part}}
        of = {c.name: getattr(running, c.name) for c in Task.__table__.columns}
        fresh = {"id": "tsk_maker", "name": "maker", "state": "blocked", "seat": None}
        session.add(Task(**{**of, **fresh, "started_at": None}))
        session.flush()
        need = Need(task_id=running.id, needs_id="tsk_maker", port="b0", output="b0", late=True)
        session.add(need)
        session.flush()
        told = [event(Paused, running, 2, step=9, lacks="b0")]
        if is_saved:
            told.append(event(Saved, running, 3, step=9, sha256="ab" * 32, size_bytes=5, took_us=1))
        hear(session, residents=[view(running, "paused", step=9)], events=told)
        hear(session, residents=[])
        session.refresh(need)
        assert (running.state, running.image_on) == ("blocked", None)
        assert need.late is not is_saved  # else what it made has to be made again first

    def test_checkpoint_that_became_durable_late_is_kept(self, session, running):
        paused = [view(running, "paused", step=9)]
        hear(session, residents=paused, events=[event(Paused, running, 2, step=9)])
        decide(session, running, "Launch", devices=("h.0",))
        saved = event(Saved, running, 3, epoch=1, step=9, sha256="ab" * 32, size_bytes=5, took_us=1)
        hear(session, residents=[view(running, "seating", epoch=2)], events=[saved])
        assert session.scalars(select(Checkpoint)).one().sha256 == "ab" * 32

    def test_owner_is_not_told_which_task_takes_the_device(self, session, running):
        decide(session, running, "Pause", against="tsk_of_another_tenant")
        told = session.scalars(
            select(RequestEvent).where(RequestEvent.type == "task.pausing")
        ).one()
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


class TestBestCheckpoints:
    @pytest.fixture
    def ranked(self, session, running):
        best = {"metric": "loss", "goal": "min", "keep": 2}
        running.descriptor = {**DESCRIPTOR, "checkpoint": {"every_s": 1, "keep": 1, "best": best}}
        session.flush()
        return running

    def save(self, session, task, seq, step, ranked=None, *, sha256=""):
        """Report a checkpoint with the value that the process told."""
        more = {"sha256": sha256 or f"{step:064}", "size_bytes": 5, "took_us": 1}
        saved = event(Saved, task, seq, step=step, ranked=ranked or {}, **more)
        hear(session, residents=[view(task, "running", step=step)], events=[saved])
        session.expire_all()

    def best(self, session):
        rows = session.scalars(select(Checkpoint).where(Checkpoint.best).order_by(Checkpoint.step))
        return [(row.step, row.ranked_step, row.ranked_value) for row in rows]

    def test_best_are_marked_by_the_value_that_came_with_them(self, session, ranked):
        for seq, (step, value) in enumerate([(1, 3.0), (2, 1.0), (3, None), (4, 2.0)], 2):
            self.save(session, ranked, seq, step, {"step": step, "value": value})
        assert self.best(session) == [(2, 2, 1.0), (4, 4, 2.0)]
        values = select(Checkpoint.ranked_value).order_by(Checkpoint.step)
        assert session.scalars(values).all() == [3.0, 1.0, None, 2.0]

    def test_value_that_the_process_does_not_know_is_the_newest_before(self, session, ranked):
        self.save(session, ranked, 2, 4)
        assert self.best(session) == []
        self.save(session, ranked, 3, 6, {"step": 5, "value": 0.5})
        self.save(session, ranked, 4, 7)  # as of a new process that began at step 6
        rows = [[8, {"loss": 0.25}], [9, {"acc": 1.0}], [12, {"loss": 0.125}]]
        hear(session, residents=[replace(view(ranked, "running", step=12), points=rows)])
        self.save(session, ranked, 5, 11)
        self.save(session, ranked, 6, 11, sha256="ab" * 32)
        assert self.best(session) == [(11, 8, 0.25), (11, 8, 0.25)]
        query = select(Checkpoint.ranked_step, Checkpoint.ranked_value).order_by(Checkpoint.step)
        assert session.execute(query).all()[:3] == [(None, None), (5, 0.5), (5, 0.5)]

    def test_value_of_a_command_is_never_guessed_from_rows_whose_steps_are_its_own(
        self, session, ranked
    ):
        ranked.descriptor = {**ranked.descriptor, "run": {"command": ["true"]}}
        rows = [[1, {"loss": 0.1}], [2, {"loss": 0.2}]]
        hear(session, residents=[replace(view(ranked, "running", step=1), points=rows)])
        self.save(session, ranked, 2, 4)
        assert self.best(session) == []
        self.save(session, ranked, 3, 6, {"step": 9000, "value": 0.5})
        self.save(session, ranked, 4, 8, {"step": 3, "value": 0.25})  # it began again
        self.save(session, ranked, 5, 9)
        assert self.best(session) == [(8, 3, 0.25), (9, 3, 0.25)]

    def test_damaged_checkpoint_is_never_best_until_it_is_made_again(self, session, ranked):
        for seq, (step, value) in enumerate([(1, 3.0), (2, 2.0), (3, 1.0)], 2):
            self.save(session, ranked, seq, step, {"step": step, "value": value})
        lose(session, ranked)
        decide(session, ranked, "Launch", devices=("h.0",))
        broken = event(Failed, ranked, 1, epoch=2, cause="image", message="does not match")
        hear(session, residents=[view(ranked, "ended", epoch=2)], events=[broken])
        session.expire_all()
        assert self.best(session) == [(1, 1, 3.0), (2, 2, 2.0)]
        decide(session, ranked, "Launch", devices=("h.0",))
        again = {"sha256": f"{3:064}", "size_bytes": 5, "took_us": 1}
        saved = event(Saved, ranked, 1, epoch=3, step=3, **again)
        hear(session, residents=[view(ranked, "running", epoch=3, step=3)], events=[saved])
        session.expire_all()
        assert self.best(session) == [(2, 2, 2.0), (3, 3, 1.0)]

    def test_task_without_a_rule_ranks_nothing(self, session, running):
        self.save(session, running, 2, 4, {"step": 4, "value": 1.0})
        assert session.scalars(select(Checkpoint.ranked_step)).all() == [None]
        assert self.best(session) == []


class TestEnd:
    def test_finished_task_keeps_its_result_and_ends_the_request(self, session, running):
        done = event(Finished, running, 2, step=10, result={"loss": 1}, outputs={})
        hear(session, residents=[view(running, "ended", step=10)], events=[done])
        assert (running.state, running.result) == ("done", {"loss": 1})
        assert session.get_one(Request, "req_a").state == "done"
        assert "request.done" in session.scalars(select(RequestEvent.type)).all()

    def test_crashed_task_is_retried_while_attempts_are_left(self, session, running):
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

    def test_output_of_a_failed_command_is_kept_until_its_retry(self, session, running):
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

    def test_cancelled_command_keeps_its_files_and_names_those_that_are_gone(
        self, session, running
    ):
        running.cancel_asked_at = running.started_at
        decide(session, running, "Cancel")
        left = {"artifacts.zip": {"sha256": "0" * 64, "size_bytes": 9}}
        dropped = {"files": 7, "bytes": 12_000, "first": ["model.pt", "log"]}
        stopped = event(Stopped, running, 2, outputs=left, dropped=dropped)
        hear(session, residents=[view(running, "ended")], events=[stopped])
        assert (running.state, running.outputs, running.dropped) == ("cancelled", left, dropped)
        ended = select(RequestEvent.message).where(RequestEvent.type == "task.cancelled")
        assert session.scalars(ended).one() == (
            "Cancelled after 0 steps. Not kept: 7 files (12,000 bytes): model.pt, log and 5 more. "
            "To keep such files, name their folders in `artifacts`."
        )

    def test_ended_task_gives_its_device_back_while_the_store_refuses(self, session, running):
        held = event(Paused, running, 2, unstored="No space left on device.", wait_us=5_000_000)
        hear(session, residents=[view(running, "paused")], events=[held])
        assert (running.state, running.image_on, running.attempts) == ("waiting", "h.0", 0)
        assert running.unstored == "No space left on device."
        assert running.retry_at is not None
        reasons = explain.explain(session, [running])[running.id].reasons
        [why] = [reason for reason in reasons if reason["code"] == "STORE_REFUSES"]
        assert why["change"]["action"] == "wait_until"
        assert "No space left on device." in why["message"]
        decide(session, running, "Launch", devices=("h.0",))
        done = event(Finished, running, 2, epoch=2, result={}, outputs={})
        events = [started(running, epoch=2, resumed="resident"), done]
        hear(session, residents=[view(running, "ended", epoch=2)], events=events)
        assert (running.state, running.unstored) == ("done", "")

    def test_refused_checkpoint_is_told_once_and_so_is_its_end(self, session, running):
        for why in ("No space left on device.", "Disk quota exceeded.", "", ""):
            refused = replace(view(running, "running"), unstored=why)
            hear(session, residents=[refused])
        kinds = select(RequestEvent.type).where(RequestEvent.type.like("task.%stored"))
        assert session.scalars(kinds.order_by(RequestEvent.id)).all() == [
            "task.unstored",
            "task.stored",
        ]
        assert running.unstored == ""

    def test_rank_that_is_behind_is_kept_until_its_gang_moves_or_leaves(self, session, running):
        who = "Rank 0 waits in barrier, to which rank 1 has not come: rank 1 has ended."
        for told in (who, "", who):
            hear(session, residents=[replace(view(running, "running"), behind=told)])
            assert running.behind == told
        decide(session, running, "Pause")
        hear(session, residents=[view(running, "paused")], events=[event(Paused, running, 2)])
        assert (running.state, running.behind) == ("waiting", "")

    def test_finished_task_has_no_cause_of_failure(self, session, running):
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

    def test_task_that_can_never_succeed_is_not_retried(self, session, running):
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

    def test_damaged_checkpoint_is_skipped(self, session, restoring):
        broken = event(Failed, restoring, 1, epoch=2, cause="image", message="does not match")
        hear(session, residents=[view(restoring, "ended", epoch=2)], events=[broken])
        assert (restoring.state, restoring.attempts) == ("waiting", 0)
        assert session.scalars(select(Checkpoint)).one().damaged_at is not None

    def test_checkpoint_that_was_restored_counts_as_the_damaged_one(self, session, restoring):
        late = event(
            Saved, restoring, 3, epoch=1, step=12, sha256="cd" * 32, size_bytes=5, took_us=1
        )
        hear(session, residents=[view(restoring, "seating", epoch=2)], events=[late])
        broken = event(Failed, restoring, 1, epoch=2, cause="image", message="does not match")
        hear(session, residents=[view(restoring, "ended", epoch=2)], events=[broken])
        damaged = select(Checkpoint.sha256).where(Checkpoint.damaged_at.is_not(None))
        assert session.scalars(damaged).all() == ["ab" * 32]

    def test_bad_image_without_a_checkpoint_uses_up_an_attempt(self, session, running):
        """Else a job that says so each time is launched for ever, without a pause."""
        broken = event(Failed, running, 2, cause="image", message="so it says")
        hear(session, residents=[view(running, "ended")], events=[broken])
        assert running.state == "failed"

    def test_store_failure_damages_nothing_and_uses_up_no_attempt(self, session, restoring):
        away = event(Failed, restoring, 1, epoch=2, cause="store", message="no answer")
        hear(session, residents=[view(restoring, "ended", epoch=2)], events=[away])
        assert (restoring.state, restoring.attempts) == ("waiting", 0)
        assert session.scalars(select(Checkpoint)).one().damaged_at is None
        later = Task.retry_at - func.now() == timedelta(seconds=journal.STORE_AGAIN_S)
        assert session.scalars(select(later)).one()

    def test_checkpoint_says_who_signed_it_and_what_it_added(self, session, running):
        saved = {"sha256": "ab" * 32, "size_bytes": 5, "took_us": 1, "new_bytes": 3}
        events = [event(Saved, running, 2, step=9, **saved)]
        hear(session, residents=[view(running, "running")], key="1f" * 32)
        hear(session, residents=[view(running, "running")], events=events, key="1f" * 32)
        row = session.scalars(select(Checkpoint)).one()
        assert (row.host, row.key, row.new_bytes) == ("h", "1f" * 32, 3)

    def test_hundredth_attempt_still_has_a_date(self, session, running):
        running.retry_max, running.attempts = 100, 90
        crash = event(Failed, running, 2, cause="exception", message="boom")
        hear(session, residents=[view(running, "ended")], events=[crash])
        wait = Task.retry_at - func.now() <= timedelta(seconds=RetryBackoff().most_s)
        assert session.scalars(select(wait)).one()

    def test_cancel_waits_for_the_device_even_during_a_pause(self, session, running):
        decide(session, running, "Pause")
        decide(session, running, "Cancel")
        assert running.state == "stopping"
        both = [event(Paused, running, 2, step=4), event(Stopped, running, 3, step=4)]
        hear(session, residents=[view(running, "ended")], events=both)
        assert running.state == "cancelled"

    def test_ended_task_never_moves_again(self, session, running):
        done = event(Finished, running, 2, result={}, outputs={})
        hear(session, residents=[view(running, "ended")], events=[done])
        with pytest.raises(IllegalMove, match="is done, got Launch, expected Again"):
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

    def test_total_of_a_user_goes_beyond_64_bits(self, session, running):
        user, tenant = running.user_id, running.tenant_id
        session.merge(Account(user_id=user, tenant_id=tenant, total_us=2**63 - 1))
        hear(session, residents=[view(running, "running", held_us=400)])
        assert session.scalars(select(Account.total_us)).one() == 2**63 - 1 + 400

    def test_rebuilding_from_the_buckets_gives_the_same_total(self, session, running):
        ledger.charge(session, session.scalars(select(Placement)).one(), 5_000_000)
        before = session.scalars(select(Account.total_us)).one()
        ledger.rebuild(session)
        session.flush()
        assert session.scalars(select(Account.total_us)).one() == before

    def test_what_a_changed_weight_carries_over_moves_with_the_base(self, session, running):
        ledger.charge(session, session.scalars(select(Placement)).one(), 5_000_000)
        tenant, account = session.get_one(Tenant, "ten_a"), session.scalars(select(Account)).one()
        ledger.reweigh(session, tenant, 3 * tenant.weight_milli, past=False)
        assert tenant.carried == 2 * account.faded
        halvings = ledger.REBASE_HALF_LIVES + 1
        before = int(tenant.carried) << 2 * halvings  # as if it had been used so much later
        session.info["ledger"].since_s -= halvings * settings().half_life_s
        tenant.carried = before
        session.flush()
        ledger.base(session)
        assert tenant.carried == before >> halvings
        ledger.reweigh(session, tenant, tenant.weight_milli, past=True)
        assert tenant.carried == 0

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
    def test_growing_orders_a_resize_and_takes_the_slot(self, session, grown):
        order = session.scalars(select(OutboxOrder).where(OutboxOrder.kind == "Resize")).one()
        assert (order.device_id, order.body["seats"], order.seq) == ("h.0", [2], 2)
        (guest,) = guests(session)
        assert (guest.device_id, guest.epoch, guest.ended_at) == ("h.1", 1, None)
        other = copy_of(session, grown)
        with pytest.raises(IntegrityError), session.begin_nested():
            decide(session, other, "Launch", devices=("h.1",))

    def test_guest_device_is_charged_for_what_its_home_held(self, session, grown):
        hear(session, residents=[view(grown, "running", held_us=1000, order_seq=2)])
        assert guests(session)[0].held_us == 0  # it was lent at this instant
        long_ago(session)
        hear(session, residents=[view(grown, "running", held_us=1400, order_seq=2)])
        hear(session, residents=[view(grown, "running", held_us=1400, order_seq=2)])
        assert guests(session)[0].held_us == grown.guest_held_us == 400
        assert session.scalars(select(Account.total_us)).one() == 1800
        assert session.scalar(select(func.sum(Usage.charged_us))) == 1800
        assert grown.held_us == 1400

    def test_worker_of_a_lent_device_reports_nothing_for_it(self, session, grown):
        hear(session, device="h.1")
        hear(session, device="h.1", incarnation="p2")
        assert grown.state == "running"
        assert guests(session)[0].ended_at is None

    def test_returned_slot_is_free_when_the_ranks_have_left_it(self, session, grown):
        other = copy_of(session, grown)
        decide(session, grown, "Splice", devices=("h.0",))
        decide(session, other, "Launch", devices=("h.1",))
        launch = session.scalars(select(OutboxOrder).where(OutboxOrder.task_id == other.id)).one()
        assert decode(launch.body).surely_until_us == 0
        ready = [view(other, "seating")]
        answer = hear(session, device="h.1", residents=ready)
        assert (answer.keep, answer.drop) == ([], [])
        grown.devices_max = 1
        hear(session, events=[event(Resized, grown, 3, seats=[1], step=9)])
        assert [guest.end for guest in guests(session)] == ["resized"]
        answer = hear(session, device="h.1", residents=ready)
        assert answer.keep == [[other.id, 1]]

    def test_paused_task_releases_all_devices_and_has_a_successor_at_home_only(
        self, session, grown
    ):
        decide(session, grown, "Pause", against="tsk_b")
        pause = session.scalars(select(OutboxOrder).where(OutboxOrder.kind == "Pause")).one()
        assert decode(pause.body).successor == ""
        assert all(guest.leaving for guest in guests(session))
        hear(session, events=[event(Paused, grown, 3, step=9)])
        assert [guest.end for guest in guests(session)] == ["paused"]
        assert (grown.state, grown.resized_at) == ("waiting", None)

    def test_all_guest_devices_end_with_the_home(self, session, grown):
        lose(session, grown)
        assert [guest.end for guest in guests(session)] == ["lost"]

    def test_cancelled_resize_changes_nothing(self, session, grown):
        decide(session, grown, "Splice", devices=("h.0",))
        decide(session, grown, "Cancel")
        hear(session, events=[event(Resized, grown, 3, seats=[1])])
        assert grown.state == "stopping"
        hear(session, events=[event(Stopped, grown, 4)])
        assert (grown.state, [g.end for g in guests(session)]) == ("cancelled", ["stopped"])

    def test_board_shows_all_devices_of_the_task(self, session, grown):
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


@pytest.fixture
def wide(session, task):
    """The task needs a device of each of two hosts, and was launched on h.0 and far.0."""
    hear(session, links=LINKS)
    hear(session, device="far.0", host="far")
    task.devices_min = task.devices_max = 2
    task.across_hosts = True
    decide(session, task, "Launch", devices=("h.0", "far.0"))
    return task


def orders(session, device):
    query = select(OutboxOrder).where(
        OutboxOrder.device_id == device, OutboxOrder.answered_at.is_(None)
    )
    return session.scalars(query.order_by(OutboxOrder.id)).all()


class TestAccelerators:
    @pytest.fixture
    def alone(self, session, running):
        """h.0 and h.1 are accelerators of one host; the task runs on the first."""
        for id in ("h.0", "h.1"):
            hear(session, device=id, kind="sim", links=LINKS, residents=_of(running, id))
            session.get_one(Device, id).kind = "sim"
        running.devices_max = 2
        return running

    def test_the_task_is_told_which_accelerators_of_its_host_it_has(self, session, alone):
        decide(session, alone, "Splice", devices=("h.0", "h.1"))
        (home,) = orders(session, "h.0")[-1:]
        assert (home.kind, home.body["seats"], home.body["guests"]) == ("Resize", [2], ["h.1"])
        assert orders(session, "h.1") == []
        hear(session, events=[event(Resized, alone, 2, seats=[2], step=4)])
        assert alone.state == "running"
        resized = select(RequestEvent.message).where(RequestEvent.type == "task.resized")
        assert session.scalars(resized).one() == "Resized after step 4: it runs on 2 devices."

    def test_ranks_come_back_to_the_home_device(self, session, alone):
        decide(session, alone, "Splice", devices=("h.0", "h.1"))
        hear(session, events=[event(Resized, alone, 2, seats=[2], step=4)])
        decide(session, alone, "Splice", devices=("h.0",))
        last = orders(session, "h.0")[-1].body
        assert (last["seats"], "guests" in last) == ([1], False)
        hear(session, events=[event(Resized, alone, 3, seats=[1], step=9)])
        assert [guest.end for guest in guests(session)] == ["resized"]

    def test_a_worker_of_an_older_version_gets_no_names_that_it_would_refuse(self, session, alone):
        home = session.get_one(Device, "h.0")
        home.facts = {**home.facts, "ranks_apart": True}
        decide(session, alone, "Splice", devices=("h.0", "h.1"))
        assert "guests" not in orders(session, "h.0")[-1].body


def _of(task, device):
    return [view(task, "running")] if task.seat == device else []


class TestHosts:
    def test_each_host_gets_an_order_and_the_same_secret(self, session, apart):
        (home,), (far,) = orders(session, "h.0")[-1:], orders(session, "far.0")
        assert (home.kind, home.seq, home.body["seats"]) == ("Resize", 2, [1, 1])
        assert (far.kind, far.seq, far.body["seats"], far.body["host"]) == ("Launch", 2, [1, 1], 1)
        secret = home.body["links"]["secret"]
        assert far.body["links"] == {"secret": secret, "home": LINKS}
        assert (far.body["images"], "outputs" in far.body["spec"]) == ([], False)

    def test_remote_ranks_are_kept_while_their_device_is_lent(self, session, apart):
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

    def test_remote_ranks_of_a_paused_gang_stay_until_its_image_is_durable(self, session, apart):
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

    def test_remote_ranks_stay_while_their_home_prepares_to_go_on(self, session, apart):
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

    def test_change_of_hosts_has_a_secret_of_its_own(self, session, apart):
        hear(session, events=[event(Resized, apart, 2, seats=[1, 1])], links=LINKS)
        hear(session, device="far.1", host="far")
        decide(session, apart, "Splice", devices=("h.0", "far.0", "far.1"))
        first, second = orders(session, "far.0")
        assert second.seq > first.seq
        assert second.body["seats"] == [1, 2]
        assert second.body["links"]["secret"] != first.body["links"]["secret"]
        assert orders(session, "far.1") == []  # one device of each host holds the outpost

    def test_unreachable_host_is_given_back(self, session, apart):
        hear(session, events=[event(Resized, apart, 2, seats=[1], step=4)])
        assert (apart.state, [guest.end for guest in guests(session)]) == ("running", ["unreached"])

    def test_task_that_cannot_release_promised_devices_queues_again(self, session, apart):
        hear(session, events=[event(Resized, apart, 2, seats=[1, 1])])
        decide(session, apart, "Splice", devices=("h.0",))
        hear(session, events=[event(Resized, apart, 3, seats=[1, 1])])
        assert (apart.state, [guest.end for guest in guests(session)]) == ("waiting", ["lost"])

    def test_lost_host_uses_up_no_attempt(self, session, apart):
        lost = {"cause": "host", "message": "the connection to its host 1 is lost"}
        hear(session, events=[event(Failed, apart, 2, **lost)])
        assert (apart.state, apart.attempts, apart.retry_max) == ("waiting", 0, 0)

    @pytest.mark.parametrize("is_taken", [False, True])
    @pytest.mark.parametrize("gang", ["wide", "apart"])
    def test_launch_that_a_home_waits_for_is_sent_to_the_new_worker_of_its_device(
        self, session, request, gang, is_taken
    ):
        task = request.getfixturevalue(gang)
        state, far = task.state, {"device": "far.0", "host": "far"}
        (launch,) = orders(session, "far.0")
        before = dict(launch.body)
        if is_taken:
            hear(session, **far, residents=[view(task, "seating", order_seq=launch.seq)])
            assert launch.answered_at is not None
        journal.ordered(session)
        hear(session, **far, incarnation="p2")
        assert journal.ordered(session) == orders(session, "far.0") == [launch]
        assert (before["incarnation"], launch.sends) == ("p1", 2)
        assert launch.body == {**before, "incarnation": "p2"}
        assert (task.state, guests(session)[0].ended_at) == (state, None)

    def test_gang_that_runs_has_no_launch_for_the_new_worker_of_its_ranks(self, session, wide):
        """Its home device reports what it lost."""
        there = {"residents": [view(wide, "running")]}
        hear(session, device="far.0", host="far", **there)
        hear(session, **there, events=[started(wide)])
        hear(session, device="far.0", host="far", incarnation="p2")
        assert (wide.state, guests(session)[0].ended_at) == ("running", None)
        assert orders(session, "far.0") == []

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


class TestCommandsOfSeveralDevices:
    def test_its_device_is_told_of_the_others_and_it_goes_on_only_on_all_of_them(
        self, session, task
    ):
        for device in ("h.0", "h.1", "h.2"):
            hear(session, device=device, kind="sim")
        _as_command(task)
        decide(session, task, "Launch", devices=("h.0", "h.2"))
        (home,) = orders(session, "h.0")
        assert (home.body["seats"], home.body["guests"]) == ([2], ["h.2"])
        assert orders(session, "h.2") == []
        begun = replace(started(task), capabilities=["pause", "restart"])
        hear(session, residents=[view(task, "running")], events=[begun])
        decide(session, task, "Pause")
        hear(session, residents=[view(task, "paused")], events=[event(Paused, task, 2)])
        session.flush()
        seen = snapshot_reader.load(session, "isle", now_s=transactions.now_s(session))
        waits = seen.tasks[task.id]
        assert (waits.image_on, waits.image_with) == ("h.0", ("h.2",))

    def test_devices_of_a_cpu_need_no_names(self, session, task):
        for device in ("h.0", "h.1"):
            hear(session, device=device)
        _as_command(task)
        decide(session, task, "Launch", devices=("h.0", "h.1"))
        (home,) = orders(session, "h.0")
        assert home.body["seats"] == [2]
        assert "guests" not in home.body

    @pytest.mark.parametrize("run", [{"command": ["x"]}, {"job": "m:Job"}], ids=["command", "job"])
    def test_it_begins_only_when_the_task_before_it_has_left_its_further_device(
        self, session, running, run
    ):
        command = copy_of(session, running)
        for device in ("h.0", "h.1"):
            here = [view(running, "running")] if device == "h.0" else []
            hear(session, device=device, residents=here, kind="sim")
            session.get_one(Device, device).kind = "sim"
        _as_command(command, run=run)
        decide(session, running, "Pause")
        decide(session, command, "Launch", devices=("h.1", "h.0"))
        assert "surely_until_us" not in orders(session, "h.1")[-1].body
        ready = {"device": "h.1", "residents": [view(command, "ready")], "kind": "sim"}
        answer = hear(session, **ready)
        assert (answer.keep, answer.drop) == ([], [])
        left = [event(Paused, running, 2)]
        hear(session, residents=[view(running, "paused")], events=left, kind="sim")
        assert hear(session, **ready).keep == [[command.id, 1]]


class TestCommandsThatMove:
    HOST = {"offers": ["command-images", "command-images:aa11"]}
    IMAGE = {"sha256": "5" * 64, "size_bytes": 9, "took_us": 1}

    @pytest.fixture
    def paused(self, session, task):
        """A command that could be stored runs on h.0 and is paused there."""
        hear(session, **self.HOST)
        task.descriptor = {**task.descriptor, "run": {"command": ["x"]}}
        decide(session, task, "Launch", devices=("h.0",))
        begun = replace(started(task), capabilities=["pause", "restart", "move"])
        hear(session, residents=[view(task, "running")], events=[begun], **self.HOST)
        decide(session, task, "Pause")
        frozen = event(Paused, task, 2, step=1)
        hear(session, residents=[view(task, "paused", step=1)], events=[frozen], **self.HOST)
        return task

    def heard(self, session, task, **saved):
        kept = event(Saved, task, 3, step=1, **self.IMAGE, **saved)
        hear(session, residents=[view(task, "paused", step=1)], events=[kept], **self.HOST)
        session.flush()
        seen = snapshot_reader.load(session, "isle", now_s=transactions.now_s(session))
        return seen.tasks[task.id]

    def test_stored_command_may_go_on_on_devices_with_the_mark_of_its_own(self, session, paused):
        seen = self.heard(session, paused, has_processes=True)
        assert (seen.saved, seen.movable, seen.goes_on_with) == (True, True, "command-images:aa11")
        assert "It can move" in reports.movement_of(paused)

    def test_command_that_its_pause_could_not_store_is_bound_and_says_why(self, session, paused):
        seen = self.heard(session, paused, bound_because="kept.db is an open database")
        assert (seen.saved, seen.is_bound, seen.goes_on_with) == (True, True, "")
        assert reports.movement_of(paused).endswith("folder: kept.db is an open database.")

    def test_lines_after_the_image_are_withdrawn_where_its_processes_go_on(self, session, paused):
        lines = [["stdout", text] for text in "abcd"]
        said = LogLines(task=paused.id, epoch=1, first=0, lines=lines)
        hear(session, residents=[view(paused, "paused", step=1)], logs=[said], **self.HOST)
        self.heard(session, paused, has_processes=True, printed=[1, 3])
        decide(session, paused, "Launch", devices=("h.0",))
        begun = replace(
            started(paused, epoch=2, step=1, resumed="image"),
            capabilities=["pause", "restart", "move"],
        )
        hear(session, residents=[view(paused, "running", epoch=2)], events=[begun], **self.HOST)
        kept = session.scalars(select(LogLine.text).where(LogLine.task_id == paused.id)).all()
        assert kept == ["a", "b", "c"]
        told = session.scalars(
            select(RequestEvent.message).where(RequestEvent.type == "task.started")
        ).all()
        assert told[-1].endswith("from its saved state; without 1 line printed after it.")

    def test_image_of_the_folder_alone_changes_nothing(self, session, paused):
        assert self.heard(session, paused).movable

    @pytest.mark.parametrize(
        ("saved", "goes_on_with"),
        [
            ({}, ""),
            ({"has_processes": True, "printed": [1, 0]}, "command-images:aa11"),
        ],
    )
    def test_lost_command_goes_on_only_with_an_image_of_its_processes(
        self, session, paused, saved, goes_on_with
    ):
        self.heard(session, paused, **saved)
        hear(session, incarnation="p2", **self.HOST)
        session.flush()
        seen = snapshot_reader.load(session, "isle", now_s=transactions.now_s(session))
        found = seen.tasks[paused.id]
        assert (found.image_on, found.goes_on_with) == (None, goes_on_with)
        assert found.movable is bool(goes_on_with)

    def test_late_image_of_an_earlier_launch_says_nothing_of_the_present_one(self, session, paused):
        decide(session, paused, "Launch", devices=("h.0",))
        self.heard(session, paused, bound_because="kept.db is an open database")
        assert (paused.epoch, paused.bound_because) == (2, "")


def _as_command(task, *, run=None):
    """Let the task be a command, or what `run` says, on two devices."""
    task.devices_min = task.devices_max = 2
    task.descriptor = {**task.descriptor, "run": run or {"command": ["x"]}}


def copy_of(session, task):
    """Another task like it, that waits."""
    names = ("request_id", "tenant_id", "user_id", "island", "type", "kind", "descriptor")
    values = {name: getattr(task, name) for name in names}
    other = Task(id="tsk_b", ordinal=1, name="other", state="waiting", **values)
    session.add(other)
    session.flush()
    return other


class TestLogs:
    def test_repeated_log_lines_are_kept_once_and_in_order(self, session, running):
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

    def test_published_output_is_the_next_version_with_its_maker(self, session, publishing):
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
        told = session.scalars(
            select(RequestEvent.message).where(RequestEvent.type == "task.published")
        ).one()
        assert told == "Published tokens as datablock corpus-tokens@1 (90 bytes)."

    def test_repeated_publication_makes_no_version(self, session, publishing):
        for _ in range(2):
            hear(session, events=[self.done(publishing)])
        assert self.versions(session) == [("corpus-tokens", 1, "a")]

    def test_publication_of_an_ended_epoch_makes_no_version(self, session, publishing):
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

    def test_device_that_cannot_publish_fails_the_task(self, session, publishing):
        outputs = {name: {"sha256": "a" * 64, "size_bytes": 9} for name in ("tokens", "log")}
        finished = event(Finished, publishing, 2, result={}, outputs=outputs)
        hear(session, events=[finished])
        assert publishing.state == "failed"
        assert publishing.message == "It ended without its declared outputs tokens."

    def test_nonsensical_publication_fails_its_own_task_only(self, session, publishing):
        hear(session, events=[self.done(publishing, tensors=[{"name": "\0"}])])
        assert publishing.state == "failed"
        assert self.versions(session) == []
        assert hear(session) is not None


def test_peaks_of_a_tasks_memory_are_kept(session, running):
    for memory_bytes, host_bytes in ((10, 3), (30, 2), (20, 5)):
        hear(
            session,
            residents=[view(running, "running", memory_bytes=memory_bytes, host_bytes=host_bytes)],
        )
    assert (running.peak_device_bytes, running.peak_host_bytes) == (30, 5)


def test_peaks_of_what_a_task_takes_of_its_host_are_kept(session, running):
    for peaks in ({"memory": 10, "cpus": 900}, {"memory": 30}, {"memory": 20, "processes": 4}):
        hear(session, residents=[replace(view(running, "running"), peaks=peaks)])
    assert running.peaks == {"memory": 30, "cpus": 900, "processes": 4}


class TestNetworkUse:
    USED = {"connections": 2, "refused": 1, "sent_bytes": 300, "received_bytes": 4000}

    def hear(self, session, task, state="running", *, epoch=1, device="h.0", events=(), **used):
        seen = replace(view(task, state, epoch=epoch), network={**self.USED, **used})
        hear(session, device=device, residents=[seen], events=events)

    def figures(self, session):
        rows = session.scalars(select(Placement).order_by(Placement.id))
        return [row.network for row in rows]

    def test_use_of_the_network_is_kept_and_never_shrinks(self, session, running):
        self.hear(session, running)
        self.hear(session, running, sent_bytes=500, refused=0, more=7)
        assert self.figures(session) == [{**self.USED, "sent_bytes": 500}]

    def test_last_figures_come_with_the_end_of_the_task(self, session, running):
        done = event(Finished, running, 2, result={}, outputs={})
        self.hear(session, running, "ended", events=[done])
        assert running.state == "done"
        assert self.figures(session) == [self.USED]

    def test_device_speaks_only_of_tasks_that_were_placed_on_it(self, session, running):
        self.hear(session, running, device="h.1")
        self.hear(session, running, epoch=2)
        assert self.figures(session) == [None]

    def test_use_is_summed_over_epochs_and_counted(self, session, running):
        running.descriptor = {**DESCRIPTOR, "network": {"allow": ["hf.co:443"]}}
        self.hear(session, running)
        lose(session, running)
        running.state = "waiting"
        decide(session, running, "Launch", devices=("h.0",))
        self.hear(session, running, epoch=2, events=[started(running, epoch=2)])
        used = reports.network_use(session, [running])[running.id]
        assert used.allow == ["hf.co:443"]
        assert (used.connections, used.refused) == (4, 2)
        assert (used.sent_bytes, used.received_bytes) == (600, 8000)
        told = session.info["told"]
        assert told["network.connections"] == 4
        assert told["network.received_bytes"] == 8000

    def test_launch_names_what_the_tenant_may_not_reach_any_more(self, session, task):
        allow = ["hf.co:443", "files.pypi.org:443"]
        task.descriptor = {**DESCRIPTOR, "network": {"allow": allow}}
        session.get_one(Tenant, "ten_a").network = ["*:443"]
        hear(session)
        decide(session, task, "Launch", devices=("h.0",))
        first = session.scalars(select(OutboxOrder)).one()
        assert "withdrawn" not in first.body
        assert first.body["spec"]["network"] == {"allow": allow}
        lose(session, task)
        task.state = "waiting"
        session.get_one(Tenant, "ten_a").network = ["*.pypi.org:443"]
        decide(session, task, "Launch", devices=("h.0",))
        second = session.scalars(select(OutboxOrder).order_by(OutboxOrder.id.desc())).first()
        assert decode(second.body).withdrawn == ["hf.co:443"]


def test_metrics_of_steps_in_between_are_kept_once(session, running):
    for step, points in ((3, [[1, {"loss": 4}], [2, {"loss": 2}]]), (3, [[1, {"loss": 4}]])):
        seen = replace(view(running, "running", step=step), metrics={"loss": 1}, points=points)
        hear(session, residents=[seen])
    later = replace(
        view(running, "running", step=4), metrics={"loss": 0}, points=[[9, {"loss": 8}]]
    )
    hear(session, residents=[later])
    rows = session.execute(select(Metric.step, Metric.values).order_by(Metric.step)).all()
    assert [(step, values["loss"]) for step, values in rows] == [(1, 4), (2, 2), (9, 8)]


def test_metrics_of_the_last_steps_before_a_pause_are_kept(session, running):
    """They may come with the report that the task is paused, or after it."""
    decide(session, running, "Pause")
    still = replace(view(running, "paused", step=7), metrics={"loss": 3})
    paused = replace(still, points=[[6, {"loss": 4}]])
    hear(session, residents=[paused], events=[event(Paused, running, 2, step=7)])
    hear(session, residents=[replace(still, points=[[7, {"loss": 3}]])])
    rows = session.execute(select(Metric.step, Metric.values).order_by(Metric.step)).all()
    assert rows == [(6, {"loss": 4}), (7, {"loss": 3})]


def test_metrics_of_a_step_that_ran_again_have_one_row(session, running):
    for points in (
        [[5, {"loss": 4, "lr": 1}], [6, {"loss": 2}], [6, {"acc": 1}]],
        [[5, {"loss": 3}]],
    ):
        newest = points[-1][1]
        hear(session, residents=[replace(view(running, "running"), metrics=newest, points=points)])
    rows = session.execute(select(Metric.step, Metric.values).order_by(Metric.step)).all()
    assert rows == [(5, {"loss": 3, "lr": 1}), (6, {"loss": 2, "acc": 1})]
    session.refresh(running)
    assert running.metrics == {"loss": 3, "lr": 1, "acc": 1}


def test_metrics_without_rows_are_kept_at_the_step_of_their_report(session, running):
    for step, loss in ((3, 1), (4, 1), (5, 0)):
        hear(
            session,
            residents=[replace(view(running, "running", step=step), metrics={"loss": loss})],
        )
    rows = session.execute(select(Metric.step, Metric.values).order_by(Metric.step)).all()
    assert rows == [(3, {"loss": 1}), (5, {"loss": 0})]


def test_metric_that_was_no_number_between_two_reports_is_told(session, running):
    points = [[5, {"loss": 1}], [6, {"loss": "nan"}], [7, {"loss": 1}]]
    hear(session, residents=[replace(view(running, "running"), metrics={"loss": 1}, points=points)])
    told = session.scalars(
        select(RequestEvent.message).where(RequestEvent.type == "task.not_finite")
    ).all()
    assert told == ["Not a finite number at step 6: loss."]


def test_non_finite_metric_is_reported_when_it_appears(session, running):

    for step, loss in ((5, 0.5), (6, "nan"), (7, "nan"), (8, 0.25)):
        seen = replace(view(running, "running", step=step), metrics={"loss": loss})
        hear(session, residents=[seen])
    told = session.scalars(
        select(RequestEvent.message).where(RequestEvent.type == "task.not_finite")
    ).all()
    assert told == ["Not a finite number at step 6: loss."]


class TestNotice:
    """A command is told before a stop, and begins again when it asks for that."""

    @pytest.fixture
    def command(self, session, running):
        run = {"command": ["python", "train.py"]}
        notice = {"signal": "SIGUSR1", "seconds": 90.0}
        running.descriptor = {**DESCRIPTOR, "run": run, "notice": notice}
        session.flush()
        return running

    def pause(self, session, task, rule):
        decision = PlanDecision(task=task.id, move="Pause", rule=rule, because="It leaves.")
        journal.store(session, Plan(decisions=(decision,)))
        session.refresh(task)
        orders = session.scalars(select(OutboxOrder).where(OutboxOrder.kind == "Pause")).all()
        return decode(orders[-1].body)

    def ask(self, session, task, noticed, *, held_us=5, epoch=1, seq=2):
        again = event(
            *(Failed, task, seq),
            epoch=epoch, step=7, held_us=held_us, cause="again", message="It asked.",
            noticed=noticed,
        )  # fmt: skip
        hear(session, residents=[view(task, "ended", epoch=epoch)], events=[again])

    @pytest.mark.parametrize(
        ("rule", "why", "seconds"),
        [
            ("drain", "drain", 90),
            ("move", "move", 90),
            ("F5", "reclaim", 60),  # the longest slice at most: the device is owed to another
            ("F6/F8", "", 0),  # it is frozen where it is
            ("F7", "", 0),
            ("hold", "", 0),
        ],
    )
    def test_pause_after_which_processes_are_lost_has_a_notice(
        self, session, command, rule, why, seconds, monkeypatch
    ):
        short = settings().model_copy(update={"slice_max_s": 60.0})
        monkeypatch.setattr("app.scheduling.journal.decisions.settings", lambda: short)
        order = self.pause(session, command, rule)
        assert (order.why, order.notice_us) == (why, seconds * 1_000_000)
        journal.write_down(session)
        told = session.scalars(
            select(RequestEvent).where(RequestEvent.type == "task.pausing")
        ).one()
        suffix = f" It is told, and has {seconds} s." if why else ""
        assert told.message == f"It leaves.{suffix}"

    def test_administrator_bounds_every_notice(self, session, command, monkeypatch):
        bounded = settings().model_copy(update={"notice_max_s": 5.0})
        monkeypatch.setattr("app.scheduling.journal.decisions.settings", lambda: bounded)
        assert self.pause(session, command, "drain").notice_us == 5_000_000

    def test_task_without_a_notice_gets_the_order_as_before(self, session, running):
        order = self.pause(session, running, "drain")
        assert "notice_us" not in encode(order)
        assert "why" not in encode(order)

    @pytest.mark.parametrize("noticed", ["drain", "move", "reclaim", "shutdown"])
    def test_command_that_was_told_begins_again_at_once_and_for_free(
        self, session, command, noticed
    ):
        saved = event(Saved, command, 2, step=7, sha256="ab" * 32, size_bytes=5, took_us=1)
        hear(session, residents=[view(command, "running")], events=[saved])
        self.pause(session, command, "drain")
        self.ask(session, command, noticed, seq=3)
        assert (command.state, command.attempts, command.retry_at) == ("waiting", 0, None)
        assert session.scalars(select(Placement.end)).one() == "again"
        decide(session, command, "Launch", devices=("h.0",))
        launch = decode(
            session.scalars(select(OutboxOrder).where(OutboxOrder.epoch == 2)).one().body
        )
        assert [image.step for image in launch.images] == [7]
        assert launch.budget_us == 100_000_000 - 5

    def test_its_time_begins_anew_after_max_duration_and_takes_an_attempt(self, session, command):
        command.retry_max = 1
        self.ask(session, command, "max_duration", held_us=99_000_000)
        assert (command.state, command.attempts) == ("waiting", 1)
        decide(session, command, "Launch", devices=("h.0",))
        launch = decode(
            session.scalars(select(OutboxOrder).where(OutboxOrder.epoch == 2)).one().body
        )
        assert launch.budget_us == 100_000_000
        hear(
            session,
            residents=[view(command, "running", epoch=2)],
            events=[started(command, epoch=2)],
        )
        self.ask(session, command, "max_duration", held_us=99_000_000, epoch=2)
        assert (command.state, command.cause) == ("failed", "max_duration")
        assert command.message.endswith(
            "at the end of max_duration_s, which takes an attempt, and none is left."
        )
        assert session.scalars(select(Account.total_us)).one() == 2 * 99_000_000  # all is charged

    def test_command_that_begins_again_by_itself_must_have_worked(self, session, command):
        self.ask(session, command, "", held_us=60_000_000)
        assert (command.state, command.attempts) == ("waiting", 0)
        decide(session, command, "Launch", devices=("h.0",))
        hear(
            session,
            residents=[view(command, "running", epoch=2)],
            events=[started(command, epoch=2)],
        )
        self.ask(session, command, "", held_us=59_999_999, epoch=2)
        assert (command.state, command.cause) == ("failed", "exit")
        assert "after less than 60 s on its device" in command.message

    def test_command_that_loops_uses_up_its_attempts(self, session, command):
        command.retry_max = 2
        for epoch in (1, 2, 3):
            self.ask(session, command, "", epoch=epoch)
            if epoch < 3:
                assert (command.state, command.attempts) == ("waiting", epoch)
                decide(session, command, "Launch", devices=("h.0",))
                views = [view(command, "running", epoch=epoch + 1)]
                hear(session, residents=views, events=[started(command, epoch=epoch + 1)])
        assert command.state == "failed"

    def test_cancelled_command_that_asks_to_begin_again_is_cancelled(self, session, command):
        decide(session, command, "Cancel")
        self.ask(session, command, "drain")
        assert (command.state, command.attempts) == ("cancelled", 0)
