"""The scheduler's round against real Postgres: who leads, what is recorded, what is sent."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
from sqlalchemy import func, select, text, update
from sqlalchemy.event import listen, remove

from app.core.model.lifecycle import Move
from app.core.model.protocol.messages import Alive, Finished, ResidentView, Started, decode
from app.core.model.snapshot import Plan, PlanDecision
from app.core.scheduling.cycle import cycle
from app.db import transactions
from app.db.models import (
    Account,
    Decision,
    Device,
    Island,
    Need,
    OutboxOrder,
    Placement,
    Request,
    Task,
    Tenant,
    Usage,
    User,
)
from app.identity import enrolment
from app.insight import counters
from app.intake import actions
from app.messaging import broker, outbox
from app.scheduling import journal
from app.scheduling.board_follower import Follower
from app.scheduling.journal import task_writer
from app.settings import settings
from tests.refusing_redis import NOPERM, OOM, READONLY, RefusingRedis
from workers.control import scheduler as control
from workers.control.scheduler import Scheduler

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
def sent(monkeypatch):
    """What is published: (message, queue, body).  The channel itself is Celery's and Redis'."""
    published = []

    def hint(message, queue, text=""):
        bodies = json.loads(text.split("\n", 2)[2])["news"] if text else []
        published.append((message, queue, *bodies))
        return True

    def post(texts):
        for name, sealed in texts:
            hint(broker.DEVICE_NEWS, broker.device_queue(name), sealed)
        return {name for name, _ in texts}

    monkeypatch.setattr(outbox, "hint", hint)
    monkeypatch.setattr(outbox, "post", post)
    return published


def stop_clocks(monkeypatch):
    """Let a slow round be no reason for what a scheduler does now and then.

    A microsecond passes from one reading of the clock to the next.
    """
    times_s = itertools.count(time.monotonic(), 1e-6)
    for module in (control, counters, enrolment):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(times_s)))


@pytest.fixture
def isle(session, sent, monkeypatch):
    """Two tenants' worth of rows on an island without devices."""
    stop_clocks(monkeypatch)
    session.add_all([Island(name="isle"), Tenant(id="ten_a", name="a")])
    session.flush()
    session.add(User(id="usr_a", tenant_id="ten_a", name="ann"))
    session.flush()
    return Scheduler("isle")


def add_task(session, name, *, island="isle", state="blocked", **more):
    owner = {"tenant_id": "ten_a", "user_id": "usr_a"}
    bundle = {"bundle": "sha256:" + "0" * 64}
    request = more.pop("request", f"req_{name}")
    if session.get(Request, request) is None:
        session.add(Request(id=request, name=name, descriptor=bundle, **owner))
        session.flush()
    session.add(
        Task(
            id=f"tsk_{name}",
            request_id=request,
            island=island,
            ordinal=0,
            name=name,
            type="train",
            state=state,
            **{"kind": "cpu", "descriptor": DESCRIPTOR, **owner, **more},
        )
    )
    session.flush()
    return session.get_one(Task, f"tsk_{name}")


def alive(device="h.0", *, residents=(), events=(), incarnation="p1", **facts):
    return Alive(
        device=device,
        incarnation=incarnation,
        sent_us=next(clock_us),
        facts={**FACTS, **facts},
        residents=list(residents),
        events=list(events),
        logs=[],
    )


def view(task, state="running", *, epoch=1, step=0, order_seq=1):
    return ResidentView(
        task=task,
        epoch=epoch,
        state=state,
        step=step,
        held_us=0,
        order_seq=order_seq,
        memory_bytes=0,
    )


def started(task, *, epoch=1):
    return Started(
        task=task,
        epoch=epoch,
        seq=1,
        step=0,
        held_us=0,
        preset={},
        capabilities=[],
        resumed="fresh",
    )


def hear(scheduler, *alives):
    for message in alives:
        scheduler.hear(message)
    scheduler.nudge()
    scheduler.look()


def state(session, name):
    session.expire_all()
    return session.get_one(Task, f"tsk_{name}").state


def news(sent):
    told = [(queue, bodies) for message, queue, *bodies in sent if message == "device.news"]
    return [(queue, body) for queue, bodies in told for body in bodies]


def orders(sent):
    answers = ("Answer", "LeaseRenewal", "ReportWanted")
    return [body["is"] for _, body in news(sent) if body["is"] not in answers]


def answers(sent):
    return [(queue, body) for queue, body in news(sent) if body["is"] == "Answer"]


def pass_time(session, table, column, seconds):
    """As if `seconds` had passed: `now()` stands still inside a test."""
    earlier = f"update {table} set {column} = {column} - interval '{seconds} s'"
    session.execute(text(earlier))
    session.expire_all()


def leases_end(session):
    pass_time(session, "devices", "lease_until", 3600)


@pytest.fixture
def running(session, isle, sent):
    """The task t runs on h.0 in epoch 1."""
    add_task(session, "t")
    hear(isle, alive())
    hear(isle, alive(residents=[view("tsk_t")], events=[started("tsk_t")]))
    assert state(session, "t") == "running"
    sent.clear()
    return isle


class TestRound:
    def test_one_heartbeat_of_an_idle_device_brings_the_launch_and_an_answer(
        self, session, isle, sent
    ):
        add_task(session, "t")
        hear(isle, alive())
        assert state(session, "t") == "starting"
        assert (orders(sent), len(answers(sent))) == (["Launch"], 1)
        assert [body["is"] for _, body in news(sent)] == ["Answer", "Launch"]
        assert len(sent) == 1

    def test_orders_are_sent_again_until_the_device_shows_them(self, session, isle, sent):
        add_task(session, "t")
        hear(isle, alive())
        hear(isle)
        assert orders(sent) == ["Launch"], "not before order_resend_s"
        pass_time(session, "orders", "sent_at", settings().order_resend_s + 1)
        isle.resend_s = 0.0  # that time is over by its clock, too
        hear(isle)
        assert orders(sent) == ["Launch", "Launch"]
        hear(isle, alive(residents=[view("tsk_t", "seating")]))
        pass_time(session, "orders", "sent_at", 3600)
        isle.resend_s = 0.0
        hear(isle)
        assert orders(sent) == ["Launch", "Launch"]
        assert session.scalars(select(OutboxOrder.sends)).all() == [2]

    def test_an_order_that_redis_did_not_take_is_sent_in_the_next_round(
        self, session, isle, sent, monkeypatch
    ):
        add_task(session, "t")
        with monkeypatch.context() as away:
            away.setattr(outbox, "post", lambda _: None)
            hear(isle, alive())
        assert (state(session, "t"), orders(sent)) == ("starting", [])
        hear(isle)
        assert orders(sent) == ["Launch"]

    def test_a_bad_heartbeat_spoils_no_other(self, session, isle, sent):
        bad = alive("h.9", threads="many")
        hear(isle, bad, alive("h.0"))
        assert [queue for queue, _ in answers(sent)] == ["device.h.0"]
        assert session.scalars(select(Device.id)).all() == ["h.0"]

    @pytest.mark.parametrize(
        "bad",
        [
            {"is": "Started", "preset": {}, "capabilities": [], "resumed": "fresh"},  # once more
            {"is": "Finished", "result": {"said": "\x00"}, "outputs": {}},  # Postgres takes no NUL
        ],
    )
    def test_nonsensical_event_ends_its_own_task_only(self, session, running, sent, bad):
        event = decode({"task": "tsk_t", "epoch": 1, "seq": 2, "step": 7, "held_us": 5, **bad})
        hear(running, alive("h.0", residents=[view("tsk_t")], events=[event]), alive("h.1"))
        assert [queue for queue, _ in answers(sent)] == ["device.h.0", "device.h.1"]
        assert state(session, "t") == "failed"
        failed = session.get_one(Task, "tsk_t")
        assert (failed.cause, failed.event_seq, failed.total_held_us) == ("exit", 2, 5)
        assert session.scalars(select(Account.total_us)).all() == [5]
        assert session.scalars(select(Usage.held_us)).all() == [5]

    def test_newest_of_many_heartbeats_of_a_process_is_taken(self, session, isle, sent):
        first, second, third = alive(threads=1), alive(threads=2), alive(threads=3)
        hear(isle, first, third, second)
        assert [body["sent_us"] for _, body in answers(sent)] == [third.sent_us]
        assert session.get_one(Device, "h.0").threads == 3

    def test_heartbeats_are_kept_while_the_database_is_away(self, session, isle, monkeypatch):
        with monkeypatch.context() as away:
            away.setattr(transactions, "_sessions", lambda: 1 / 0)
            for _ in range(50):
                isle.hear(alive())
                with pytest.raises(ZeroDivisionError):
                    isle.look()
        assert len(isle.backlog) == 1, "only the newest is of use"
        hear(isle)
        assert session.scalars(select(Device.id)).all() == ["h.0"]

    def test_later_process_of_an_unknown_device_is_the_one_that_counts(self, session, isle, sent):
        hear(isle, alive(incarnation="p2"), alive(), alive("h.1"))
        assert dict(session.execute(select(Device.id, Device.incarnation)).all()) == {
            "h.0": "p2",
            "h.1": "p1",
        }
        assert [body["incarnation"] for _, body in answers(sent)] == ["p1", "p2", "p1"]

    def test_round_takes_a_bounded_number_of_heartbeats(self, session, isle, sent):
        isle.backlog.bound = 2
        for n in range(3):
            isle.hear(alive(f"h.{n}"))
        assert isle.look() == 0.0
        assert [queue for queue, _ in answers(sent)] == ["device.h.0", "device.h.1"]
        assert isle.look() > 0.0
        assert [queue for queue, _ in answers(sent)][2:] == ["device.h.2"]

    @pytest.fixture
    def long_plan(self, session, isle, sent, monkeypatch):
        """Five tasks are launched on five devices, two in each round; the first round is over."""
        monkeypatch.setattr(control, "DECISIONS_A_ROUND", 7)  # five tasks are unlocked first
        for n in range(5):
            add_task(session, f"t{n}")
        hear(isle, *(alive(f"h.{n}") for n in range(5)))
        assert orders(sent) == ["Launch"] * 2
        monkeypatch.setattr(control, "DECISIONS_A_ROUND", 2)
        return isle

    def test_long_plan_is_written_in_several_rounds(self, session, long_plan, sent):
        assert long_plan.look() == 0.0
        assert orders(sent) == ["Launch"] * 4
        long_plan.look()
        assert orders(sent) == ["Launch"] * 5
        seats = {session.get_one(Task, f"tsk_t{n}").seat for n in range(5)}
        assert seats == {f"h.{n}" for n in range(5)}
        written = session.execute(select(func.count(), func.count(Decision.cycle_id.distinct())))
        assert written.one() == (5, 1)

    def test_devices_are_heard_between_the_parts_of_a_plan(self, session, long_plan, sent):
        task = session.scalars(select(Task).where(Task.seat == "h.0")).one()
        long_plan.hear(alive("h.0", residents=[view(task.id)], events=[started(task.id)]))
        sent.clear()
        long_plan.look()
        assert [queue for queue, _ in answers(sent)] == ["device.h.0"]
        assert (state(session, task.name), orders(sent)) == ("running", ["Launch"] * 2)

    def test_launches_wait_while_a_heartbeat_is_late(self, session, long_plan, sent):
        long_plan.backlog.bound = 1
        came_s = control.time.monotonic() - settings().lease_s / 2
        for n in range(3):
            long_plan.inbox.put((alive(f"h.{n}", labels=["new"]), came_s))
        sent.clear()
        assert (long_plan.look(), len(answers(sent)), orders(sent)) == (0.0, 1, [])
        assert (long_plan.look(), len(answers(sent)), orders(sent)) == (0.0, 3, ["Launch"] * 2)

    def test_plan_is_made_anew_if_a_task_has_moved_otherwise(self, session, long_plan, sent):
        task = session.scalars(select(Task).where(Task.state == "waiting")).first()
        task_writer.move_task(session, task, Move.GaveUp)
        task_writer.end_task(session, task, "task.failed", "It failed.")
        journal.settle(session)
        assert long_plan.look() > 0.0
        assert long_plan.follower.board is None
        long_plan.nudge()
        while long_plan.look() == 0.0:
            pass
        assert orders(sent) == ["Launch"] * 4
        states = Counter(session.scalars(select(Task.state)))
        assert states == {"starting": 4, "failed": 1}

    def test_rest_of_a_plan_goes_with_the_lead(self, session, long_plan, sent):
        long_plan.leave()
        other = Scheduler("isle")
        pass_time(session, "islands", "leader_until", 1)
        other.nudge()
        other.look()
        long_plan.look()
        assert long_plan.follower.unwritten is None
        while other.look() == 0.0:
            pass
        assert orders(sent) == ["Launch"] * 5

    @pytest.mark.parametrize(
        ("incarnation", "is_new", "came_ago_s", "epoch"),
        [
            ("p1", True, 0.0, 1),
            ("p1", True, 60.0, 2),
            ("p0", True, 0.0, 2),
            ("p2", True, 0.0, 2),
            ("p1", False, 0.0, 2),
        ],
    )
    def test_device_whose_heartbeat_waits_is_not_lost(
        self, session, running, sent, incarnation, is_new, came_ago_s, epoch
    ):
        """Unless the heartbeat came more than a lease ago, is of another process, or no newer than
        what was recorded; then the task is launched on the other device.
        """
        heard_us = session.get_one(Device, "h.0").heard_us
        leases_end(session)
        running.backlog.bound = 1
        waits = alive(residents=[view("tsk_t")], incarnation=incarnation)
        waits = waits if is_new else replace(waits, sent_us=heard_us)
        running.hear(alive("h.1"))
        running.inbox.put((waits, time.monotonic() - came_ago_s))
        running.planned_s -= settings().lease_s  # launches have waited long enough
        running.nudge()
        assert running.look() == 0.0
        assert [queue for queue, _ in answers(sent)] == ["device.h.1"]
        session.expire_all()
        assert session.get_one(Task, "tsk_t").epoch == epoch
        assert session.get_one(Device, "h.0").heard_us == heard_us

    def test_waiting_heartbeat_brings_no_earlier_epoch_back(self, session, running, sent):
        """The task was lost and is launched on h.1; h.0 comes back while it holds epoch 1."""
        leases_end(session)
        hear(running, alive("h.1"))
        assert session.get_one(Task, "tsk_t").epoch == 2
        sent.clear()
        running.backlog.bound = 1
        running.hear(alive("h.1"))
        running.hear(alive(residents=[view("tsk_t")]))
        assert running.look() == 0.0
        session.expire_all()
        task = session.get_one(Task, "tsk_t")
        assert (task.epoch, task.seat) == (2, "h.1")
        running.look()
        assert dict(answers(sent))["device.h.0"]["drop"] == [["tsk_t", 1]]
        session.expire_all()
        assert (task.epoch, task.seat) == (2, "h.1")

    def test_device_that_leaves_is_not_spared(self, session, running):
        leases_end(session)
        running.backlog.bound = 1
        running.hear(alive("h.1"))
        running.hear(alive(residents=[view("tsk_t")], leaving=True))
        running.nudge()
        running.look()
        session.expire_all()
        assert session.get_one(Task, "tsk_t").epoch == 2, "it was lost, and launched on h.1"

    def test_heartbeat_that_says_nothing_new_waits_for_others(self, isle):
        """Until something says more, or a nudge comes."""
        heartbeat = alive()
        isle.hear(heartbeat)
        isle._gather()
        for more in (lambda: isle.hear(alive("h.1")), isle.nudge):
            isle.gathers_until_s = isle.due_s = time.monotonic() + 3600
            isle.hear(replace(heartbeat, sent_us=next(clock_us)))
            waits = threading.Thread(target=isle._gather, daemon=True)
            waits.start()
            waits.join(0.2)
            assert waits.is_alive()
            more()
            waits.join(60)
            assert not waits.is_alive()

    def test_long_round_renews_its_own_lease_at_its_end(self, session, isle, monkeypatch):
        hear(isle)
        until = session.get_one(Island, "isle").leader_until
        cycle = Follower.cycle

        def long(*given):
            isle.began_s -= settings().leader_s
            return cycle(*given)

        monkeypatch.setattr(Follower, "cycle", long)
        hear(isle)
        session.expire_all()
        assert session.get_one(Island, "isle").leader_until > until

    def test_failed_plan_does_not_silence_the_devices(self, session, running, sent, monkeypatch):
        add_task(
            session, "poison", descriptor={}
        )  # it cannot be launched: nothing says what to run
        hear(running, alive("h.1"))
        assert [queue for queue, _ in answers(sent)] == ["device.h.1"]
        hear(running, alive("h.0", residents=[view("tsk_t", step=5)]))
        assert session.get_one(Task, "tsk_t").step == 5

    def test_plan_due_again_in_the_past_is_logged_and_waited_for(
        self, session, isle, sent, monkeypatch, caplog
    ):
        add_task(session, "t")

        def plan(follower, session, board):
            cycle(board)
            board.memory.in_the_way.add("tsk_t")
            return Plan(now_s=board.now_s, look_again_s=board.now_s - 1)

        monkeypatch.setattr(Follower, "cycle", plan)
        isle.hear(alive())
        wait_s = isle.look()
        assert "tsk_t  Launch F3(h.0) starting" in caplog.text
        assert wait_s == pytest.approx(settings().tick_s, rel=0.01)
        assert "asked to be repeated" in caplog.text

    def test_task_that_can_never_start_ends_its_request(self, session, isle, sent):
        add_task(session, "first", state="failed", request="req_r")
        add_task(session, "second", request="req_r")
        add_task(session, "third", request="req_r")
        session.add_all(
            [
                Need(task_id="tsk_second", needs_id="tsk_first"),
                Need(task_id="tsk_third", needs_id="tsk_second"),
            ]
        )
        session.flush()
        hear(isle)
        hear(isle)
        assert (state(session, "second"), state(session, "third")) == ("failed", "failed")
        assert session.get_one(Request, "req_r").state == "failed"

    def test_hold_of_a_starting_task_pauses_it_once_it_runs(self, session, isle, sent):
        task = add_task(session, "t")
        hear(isle, alive())
        task.hold = "user"
        session.flush()
        hear(isle, alive(residents=[view("tsk_t", "seating")]))
        assert state(session, "t") == "starting"
        hear(isle, alive(residents=[view("tsk_t")], events=[started("tsk_t")]))
        assert (state(session, "t"), orders(sent)) == ("pausing", ["Launch", "Pause"])

    def test_a_checkpoint_is_ordered_by_the_island_on_which_the_task_runs(
        self, session, running, sent
    ):
        session.get_one(Task, "tsk_t").save_asked = True
        session.flush()
        hear(Scheduler("other"))
        assert orders(sent) == []
        hear(running)
        assert orders(sent) == ["Save"]
        assert session.scalars(select(Task.save_asked)).all() == [False]

    def test_round_without_events_writes_nothing(self, session, running, sent):
        add_task(session, "waits")
        hear(running)
        before = _versions(session)
        hear(running)
        assert _versions(session) == before


def _versions(session):
    """Which version of each row there is: changes with every write to it."""
    tables = ("tasks", "devices", "islands", "placements", "orders", "requests", "accounts")
    return {
        table: session.execute(text(f"select ctid::text, xmin::text from {table}")).all()
        for table in tables
    }


class TestLeader:
    def test_a_second_scheduler_stands_by_and_takes_over_when_the_lease_ends(
        self, session, isle, sent
    ):
        hear(isle, alive())
        other = Scheduler("isle")
        add_task(session, "t")
        hear(other)
        assert state(session, "t") == "blocked"
        pass_time(session, "islands", "leader_until", settings().leader_s + 1)
        hear(other)
        island = session.get_one(Island, "isle")
        assert (state(session, "t"), island.leader, island.term) == ("starting", other.me, 2)

    def test_leader_that_leaves_lets_the_standby_lead_at_once(self, session, isle):
        hear(isle)
        isle.leave()
        other = Scheduler("isle")
        hear(other)
        session.expire_all()
        assert session.get_one(Island, "isle").leader == other.me

    def test_standby_records_and_answers_heartbeats_too(self, session, isle, sent):
        hear(isle)
        hear(Scheduler("isle"), alive())
        assert len(answers(sent)) == 1

    def test_a_new_leader_gives_devices_one_lease_to_be_heard(self, session, running):
        leases_end(session)
        pass_time(session, "islands", "leader_until", 60)
        hear(Scheduler("isle"))
        assert state(session, "t") == "running"

    def test_leader_that_was_away_gives_devices_one_lease_too(self, session, running):
        """Stopped for a minute, and the first round comes before the waiting heartbeats."""
        leases_end(session)
        pass_time(session, "islands", "leader_until", 60)
        hear(running)
        assert state(session, "t") == "running"

    def test_long_lease_is_not_renewed(self, session, isle):
        hear(isle)
        before = session.execute(text("select ctid::text from islands")).all()
        hear(isle)
        assert session.execute(text("select ctid::text from islands")).all() == before


class TestSilence:
    @pytest.fixture
    def redis(self, monkeypatch, tmp_path, servers):
        """Point the island to a Redis that is not there, or back to the real one."""

        def switch(*, away):
            url = f"unix://{tmp_path}/nobody.sock" if away else servers.redis_url
            monkeypatch.setitem(os.environ, "REDIS_URL", url)
            settings.cache_clear()
            outbox.celery.cache_clear()

        return switch

    def test_single_silent_device_is_lost(self, session, running):
        leases_end(session)
        hear(running)
        assert state(session, "t") == "waiting"

    def test_lost_task_is_charged_until_the_lease_ended(self, session, running):
        leases_end(session)
        pass_time(session, "devices", "seen_at", 3600)
        hear(running)
        (lost,) = session.scalars(select(Placement))
        held_us = settings().lease_s * 1e6
        assert (lost.end, lost.held_us, lost.charged_us) == ("lost", held_us, held_us)
        for sum_ in (Usage.charged_us, Account.total_us, Task.total_held_us, Task.unheard_us):
            assert session.scalars(select(sum_)).one() == held_us
        hear(running)
        assert session.scalars(select(Usage.charged_us)).one() == held_us

    def test_silence_means_nothing_while_redis_is_away(self, session, running, redis):
        redis(away=True)
        for _ in range(3):
            leases_end(session)
            hear(running)
            assert state(session, "t") == "running"

    @pytest.mark.parametrize("refusal", [READONLY, OOM, NOPERM], ids=lambda refusal: refusal.name)
    def test_silence_means_nothing_while_redis_takes_no_message(
        self, session, running, monkeypatch, servers, refusal
    ):
        with RefusingRedis(servers.redis_url) as proxy, proxy.refusing(refusal):
            monkeypatch.setitem(os.environ, "REDIS_URL", proxy.url)
            settings.cache_clear()
            for _ in range(2):
                leases_end(session)
                hear(running)
                assert state(session, "t") == "running"

    def test_devices_get_one_lease_after_redis_is_back(self, session, running, redis):
        redis(away=True)
        leases_end(session)
        hear(running)
        redis(away=False)
        leases_end(session)  # before the first heartbeat came through
        hear(running)
        assert state(session, "t") == "running"
        running.deaf_until_s = 0.0  # two leases later
        leases_end(session)
        hear(running)
        assert state(session, "t") == "waiting"


# --- several connections ------------------------------------------------------------------------


@pytest.fixture
def statements(committed, monkeypatch):
    """What the scheduler says to Postgres, begin and commit apart."""
    stop_clocks(monkeypatch)
    said = []

    def note(connection, cursor, statement, *_):
        said.append(" ".join(statement.split()))

    listen(transactions.engine(), "before_cursor_execute", note)
    yield said
    remove(transactions.engine(), "before_cursor_execute", note)


class TestCost:
    """Statements are what a round costs: each that comes back is paid by every island, for ever."""

    def test_idle_round_makes_two_statements_however_many_tasks_wait(self, shared, statements):
        with transactions.transaction() as session:
            for n in range(20):
                add_task(session, f"w{n:02}")
        isle = Scheduler("isle")
        with transactions.transaction() as session:
            _lead(session, isle)
        for _ in range(4):
            _let_others_end()
            hear(isle)
        _let_others_end()
        statements.clear()
        hear(isle)
        assert [said.split()[0] for said in statements] == ["SELECT", "select"]
        isle.resend_s = 0.0  # now and then a third: which orders are due again?
        hear(isle)
        assert [said.split()[0] for said in statements][2:] == ["SELECT", "select", "UPDATE"]

    def test_a_round_writes_each_row_of_a_task_once(self, shared, statements):
        """One task is done, and the next one is launched."""
        isle = Scheduler("isle")
        with transactions.transaction() as session:
            add_task(session, "next")
            _lead(session, isle)
        hear(isle)
        done = Finished(task="tsk_a", epoch=1, seq=2, step=9, held_us=7_000, result={}, outputs={})
        statements.clear()
        hear(isle, alive(shared["tsk_a"], residents=[view("tsk_a")], events=[done]))
        written = Counter(
            " ".join(said.split()[:3]) for said in statements if said.startswith("UPDATE tasks")
        )
        assert written == {"UPDATE tasks SET": 2}, "one that ended, one that starts"
        assert not [said for said in statements if said.startswith("SAVEPOINT")]
        with transactions.transaction() as session:
            found = dict(session.execute(select(Task.name, Task.state)).all())
        assert (found["a"], found["next"]) == ("done", "starting")


def _let_others_end():
    """Wait for what Postgres itself writes: rows since an older transaction are read again."""
    begun = "select pg_snapshot_xmax(pg_current_snapshot())::text"
    ended = text("select pg_snapshot_xmin(pg_current_snapshot()) >= cast(:newest as xid8)")
    with transactions.transaction() as session:
        newest, until_s = session.scalar(text(begun)), time.monotonic() + 60
        while not session.scalar(ended, {"newest": newest}):
            assert time.monotonic() < until_s, "an older transaction does not end"
            time.sleep(0.01)


def _lead(session, scheduler):
    until = func.now() + timedelta(hours=1)
    session.execute(update(Island).values(leader=scheduler.me, leader_until=until))


@pytest.fixture
def shared(committed, sent):
    """The tasks a and b of one request run on an island with two devices; where each of them is."""
    with transactions.transaction() as session:
        session.add_all([Island(name="isle"), Tenant(id="ten_a", name="a")])
        session.flush()
        session.add(User(id="usr_a", tenant_id="ten_a", name="ann"))
        session.flush()
        add_task(session, "a", request="req_r")
        add_task(session, "b", request="req_r")
    isle = Scheduler("isle")
    hear(isle, alive("h.0"), alive("h.1"))
    with transactions.transaction() as session:
        seats = {seat: id for seat, id in session.execute(select(Task.seat, Task.id))}
    both = [alive(d, residents=[view(t)], events=[started(t)]) for d, t in sorted(seats.items())]
    hear(isle, *both)
    return {task: device for device, task in seats.items()}


class TestRowLocks:
    def test_action_on_a_request_and_a_round_do_not_deadlock(self, shared):
        with transactions.transaction() as island, transactions.transaction() as api:
            # As a round of two heartbeats, b's first; then the wish, which gets a or waits for it.
            b, a = (alive(shared[t], residents=[view(t, step=9)]) for t in ("tsk_b", "tsk_a"))
            journal.lock(island, [b, a])
            wished = threading.Thread(target=_cancel_all, args=(api,))
            journal.record(island, b)
            wished.start()
            wished.join(0.3)  # it stands and waits for what the island has locked
            assert wished.is_alive()
            journal.record(island, a)
            island.commit()
            wished.join(60)
            assert not wished.is_alive()

    def test_plan_does_not_wait_for_an_action_being_written(self, shared):
        with transactions.transaction() as api:
            api.execute(select(Task).where(Task.id == "tsk_a").with_for_update()).all()
            pause = PlanDecision(task="tsk_a", move="Pause", rule="F3", because="for the test")
            with transactions.transaction() as island:
                island.execute(text("set local lock_timeout = '1s'"))
                assert not journal.store(island, Plan(decisions=(pause,)))
                island.rollback()
        with transactions.transaction() as island:
            assert journal.store(island, Plan(decisions=(pause,)))


def _cancel_all(session):
    request = session.get_one(Request, "req_r")
    actions.cancel_request(session, request, by="ann")


def test_events_and_duration_of_rounds_are_counted(session, isle):
    add_task(session, "a")
    hear(isle, alive())
    isle.tally._due_s = 0.0  # a second later
    hear(isle, alive())
    tally = session.scalars(select(Island.tally)).one()
    assert tally["told.task.launched"] == 1
    assert sum(count for key, count in tally.items() if key.startswith("rounds.")) == 1
    assert tally["rounds_us"] > 0
