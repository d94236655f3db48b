"""The field `retry` decides in the journal: attempts, holds, growth, and devices to avoid."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest
from sqlalchemy import func, select

from app.core.model import descriptor as descriptors
from app.core.model.device_choice import choice_in, with_reservation
from app.core.model.protocol.messages import Alive, Failed, ResidentView
from app.core.model.retry_decision import AVOIDED_S
from app.db import transactions
from app.db.models import Placement, RequestEvent, Task
from app.insight import explain
from app.scheduling import journal, snapshot_reader
from tests.scenery import Scenery

clock_us = itertools.count(1)
GIVES = {"gives": {"memory": 2 * 10**9}, "offers": ["limit:memory"]}


@pytest.fixture
def scenery(session):
    return Scenery(session)


@pytest.fixture
def run(session, scenery):
    """Make a task with this field `retry`, which runs on h.0."""
    device = scenery.device("h.0", incarnation="p1", facts=GIVES)
    tenant = scenery.tenant("red")

    def make(retry, **more):
        body = {"name": "t", "run": {"command": ["true"]}, "retry": retry, **more}
        spec = descriptors.parse({"tasks": [body]}).tasks[0]
        return scenery.task(
            tenant,
            "running",
            seat=device.id,
            descriptor=descriptors.as_json(spec),
            retry_max=spec.retry.max,
            memory_bytes=spec.devices.memory_bytes,
            device_choice=descriptors.choice_text(spec),
        )

    return make


def fail(session, task, cause="exit", **more):
    """Let the task's device report that it failed."""
    told = {"cause": cause, "message": "It ended.", **more}
    event = Failed(
        task=task.id, epoch=task.epoch, seq=task.event_seq + 1, step=0, held_us=10, **told
    )
    view = ResidentView(
        task=task.id,
        epoch=task.epoch,
        state="ended",
        step=0,
        held_us=10,
        order_seq=1,
        memory_bytes=0,
    )
    facts = {"host": "host", "island": "isle", "kind": "cpu", **GIVES}
    alive = Alive(
        device="h.0",
        incarnation="p1",
        sent_us=next(clock_us),
        facts=facts,
        residents=[view],
        events=[event],
        logs=[],
    )
    journal.record(session, alive)
    journal.settle(session)
    session.flush()


def last_event(session):
    of_tasks = select(RequestEvent).where(RequestEvent.task_id.is_not(None))
    return session.scalars(of_tasks.order_by(RequestEvent.id.desc())).first()


def test_event_names_exit_status_rule_attempt_and_line(session, run):
    rules = [{"exit": [3], "do": "fail"}, {"exit": [75], "log": "NCCL.*out", "do": "elsewhere"}]
    task = run({"max": 3, "rules": rules})
    fail(session, task, exit_status=75, matched={"NCCL.*out": "NCCL timed out"})
    told = last_event(session)
    assert (task.state, task.attempts, told.type) == ("waiting", 1, "task.retry")
    wanted = {"cause": "exit", "exit_status": 75, "rule": 2, "attempt": 1, "line": "NCCL timed out"}
    assert {name: told.data[name] for name in wanted} == wanted
    assert told.message == (
        "It ended. It is retried on another device (1 of 3) by rule 2, which found: NCCL timed out."
    )


def test_rule_that_fails_leaves_no_attempt(session, run):
    task = run({"max": 3, "rules": [{"exit": [3], "do": "fail"}]})
    fail(session, task, exit_status=3)
    told = last_event(session)
    assert (task.state, told.type, told.data["rule"]) == ("failed", "task.failed", 1)
    assert told.message == "It ended. It is not retried by rule 1."
    assert task.message == "It ended."


def test_waits_are_those_of_the_backoff(session, run):
    task = run({"max": 9, "backoff": {"first_s": 5, "most_s": 7}})
    task.attempts = 1
    fail(session, task)
    wait = Task.retry_at - func.now() == timedelta(seconds=7)
    assert session.scalars(select(wait).where(Task.id == task.id)).one()


def test_rule_holds_the_task_until_somebody_resumes_it(session, run):
    task = run({"rules": [{"do": "hold"}]})
    fail(session, task)
    assert (task.state, task.hold, task.attempts, task.retry_at) == ("waiting", "rule", 0, None)
    assert last_event(session).type == "task.held"
    reasons = explain.explain(session, [task])[task.id].reasons
    assert "HELD_BY_RULE" in [reason["code"] for reason in reasons]


@pytest.mark.parametrize("cause", ["device", "host", "store"])
def test_fault_of_a_device_uses_up_no_attempt_whatever_the_rules_say(session, run, cause):
    task = run({"max": 1, "rules": [{"do": "fail"}]})
    fail(session, task, cause)
    assert (task.state, task.attempts) == ("waiting", 0)
    assert bool(task.avoids) == (cause == "device")


class TestNever:
    @pytest.mark.parametrize("cause", ["exit", "device", "host", "store"])
    def test_no_attempt_follows_a_failure(self, session, run, cause):
        task = run("never")
        fail(session, task, cause)
        assert task.state == "failed"
        assert last_event(session).message.endswith("It is never started again (retry: never).")

    def test_task_fails_with_its_device(self, session, run):
        task = run("never")
        placement = session.scalars(select(Placement).where(Placement.task_id == task.id)).one()
        journal.lose(session, task, placement, "Its device is gone.")
        journal.settle(session)
        assert (task.state, task.cause, task.message) == ("failed", "lost", "Its device is gone.")
        assert last_event(session).type == "task.failed"

    def test_other_tasks_go_back_to_the_queue(self, session, run):
        task = run({"max": 0})
        placement = session.scalars(select(Placement).where(Placement.task_id == task.id)).one()
        journal.lose(session, task, placement, "Its device is gone.")
        assert task.state == "waiting"


class TestAvoidedDevices:
    @pytest.mark.parametrize(("do", "is_strict"), [("retry", False), ("elsewhere", True)])
    def test_island_sees_the_device_on_which_the_task_failed(self, session, run, do, is_strict):
        task = run({"max": 3, "rules": [{"do": do}]})
        fail(session, task)
        now_s = transactions.now_s(session)
        [each] = snapshot_reader.load(session, "isle", now_s=now_s).tasks[task.id].avoids
        assert (each.device, each.is_strict) == ("h.0", is_strict)
        assert each.until_s == pytest.approx(now_s + AVOIDED_S, abs=1)

    @pytest.mark.parametrize("cause", ["bundle", "environment", "max_duration"])
    def test_failure_that_no_other_device_mends_avoids_none(self, session, run, cause):
        task = run({"max": 3, "rules": [{"do": "retry"}]})
        fail(session, task, cause)
        assert (task.state, task.avoids) == ("waiting", [])


class TestGrowth:
    RULE = {"cause": "memory", "do": "retry", "grow": {"resources.memory_bytes": 1.5}}

    def test_next_attempt_asks_for_more(self, session, run):
        task = run({"max": 3, "rules": [self.RULE]}, resources={"memory_bytes": 10**9})
        fail(session, task, "memory")
        assert task.spec.resources.memory_bytes == 1_500_000_000
        assert choice_in(task.device_choice).resources == (("memory", 1_500_000_000),)
        told = "Then resources.memory_bytes grows from 953.7 MiB to 1.4 GiB."
        assert last_event(session).message.endswith(told)

    def test_task_that_grows_stays_confined_to_its_reservation(self, session, run):
        task = run({"max": 3, "rules": [self.RULE]}, resources={"memory_bytes": 10**9})
        task.device_choice = with_reservation(task.device_choice, "rsv_1")
        fail(session, task, "memory")
        assert choice_in(task.device_choice).reservation == "rsv_1"
        assert choice_in(task.device_choice).resources == (("memory", 1_500_000_000),)

    def test_nothing_grows_beyond_what_a_device_gives(self, session, run):
        task = run({"max": 3, "rules": [self.RULE]}, resources={"memory_bytes": 1_900_000_000})
        fail(session, task, "memory")
        assert task.spec.resources.memory_bytes == 2 * 10**9

    def test_task_that_cannot_grow_has_failed(self, session, run):
        task = run({"max": 3, "rules": [self.RULE]}, resources={"memory_bytes": 2 * 10**9})
        fail(session, task, "memory")
        assert (task.state, task.attempts) == ("failed", 0)
        told = "It is not retried: resources.memory_bytes cannot grow beyond 1.9 GiB."
        assert last_event(session).message.endswith(told)

    def test_time_limit_that_a_rule_retries_begins_anew(self, session, run):
        rule = {"cause": "max_duration", "do": "retry", "grow": {"max_duration_s": 2}}
        task = run({"max": 1, "rules": [rule]}, max_duration_s=100)
        fail(session, task, "max_duration")
        assert (task.state, task.spec.max_duration_s) == ("waiting", 200.0)
        assert task.unheard_us == task.total_held_us > 0
