"""Channels: what a request tells where, that it arrives, and what never does."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import func, select, text, update

from app.core.model.protocol.messages import Alive, Failed, Finished, Paused, ResidentView, Started
from app.core.webhooks.grouping import AT_ONCE
from app.core.webhooks.retries import AttemptAnswer
from app.db.models import (
    AuditEvent,
    Delivery,
    Device,
    LogLine,
    Metric,
    NewsItem,
    Placement,
    ProgressMark,
    Request,
    RequestChannel,
    RequestEvent,
    Task,
    Webhook,
)
from app.db.transactions import transaction
from app.messaging import channels, notifications, webhooks
from app.scheduling import journal
from app.scheduling.journal import task_writer
from app.scheduling.round_notes import notes_of
from app.settings import settings
from app.storage.sealing import Keyring
from tests.app.conftest import descriptor, people, problem
from tests.app.mail_server import mail_server
from tests.app.receiver import receiver
from workers.control import webhook_sender

ADDRESS = "https://hooks.example.org/services/T0/S3CR3T"
SECRET = "hf_abcdefgh0123456789"
ALL = ["started", "preempted", "resumed", "moved", "retrying", "failed", "done", "cancelled"]
FACTS = {"host": "h", "sandbox": "off", "island": "isle", "kind": "cpu"}
clock_us = itertools.count(1)


@contextmanager
def set_up(**variables: str):
    """Set ROUNDHOUSE_ variables for this process."""
    given = {f"ROUNDHOUSE_{name.upper()}": value for name, value in variables.items()}
    with mock.patch.dict(os.environ, given):
        settings.cache_clear()
        yield
    settings.cache_clear()


@pytest.fixture
def admin(as_) -> TestClient:
    return as_("red.tenant_admin")


@pytest.fixture
def channel(admin):
    return made(admin)


def made(admin, name="ml-alerts", kind="slack", address=ADDRESS):
    answer = admin.post("/v1/channels", json={"name": name, "kind": kind, "address": address})
    assert answer.status_code == 201, answer.text
    return answer.json()


@pytest.fixture
def submit(red, channel, session):
    """Submit a request that tells the channel; return its only task."""

    def submitted(*on: str, **more) -> Task:
        notify = [{"to": "ml-alerts", "on": list(on or ALL)}]
        answer = red.post("/v1/requests", json=descriptor(notify=notify, **more))
        assert answer.status_code == 202, answer.text
        return session.scalars(select(Task).where(Task.request_id == answer.json()["id"])).one()

    session.execute(update(Device).values(incarnation="p1", facts=FACTS))
    return submitted


def report(session, task: Task, event) -> None:
    """Record what the task's device reports, as the island does."""
    view = ResidentView(
        task=task.id, epoch=task.epoch, state="ended", step=0, held_us=10, order_seq=1,
        memory_bytes=0,
    )  # fmt: skip
    alive = Alive(
        device="h.0", incarnation="p1", sent_us=next(clock_us), facts=FACTS, residents=[view],
        events=[event], logs=[],
    )  # fmt: skip
    task.event_seq = 0
    session.flush()
    journal.record(session, alive)
    journal.settle(session)
    session.commit()
    session.refresh(task)


def launch(session, task: Task) -> dict[str, object]:
    """Put the task on a device; return the fields of events about it."""
    task.state, task.seat, task.epoch, task.island = "starting", "h.0", task.epoch + 1, "isle"
    session.add(
        Placement(
            task_id=task.id, epoch=task.epoch, device_id="h.0", tenant_id=task.tenant_id,
            user_id=task.user_id, kind="cpu", cost_milli=1000, incarnation="p1",
        )
    )  # fmt: skip
    session.flush()
    return {"task": task.id, "epoch": task.epoch, "seq": 1, "step": 0, "held_us": 10}


def start(session, task: Task, resumed: str = "fresh") -> dict[str, object]:
    which = launch(session, task)
    report(session, task, Started(**which, preset={}, capabilities=[], resumed=resumed))
    return which


def messages(session) -> list[Delivery]:
    """Let control make messages; return all, in their order."""
    while notifications.write_messages(session):
        pass
    session.commit()
    session.expire_all()
    return list(session.scalars(select(Delivery).order_by(Delivery.id)))


def types(session) -> list[str]:
    return [message.type for message in messages(session)]


def texts(session) -> list[str]:
    return [json.loads(message.body)["text"] for message in messages(session)]


def let_time_pass(session, seconds: float) -> None:
    """Make everything older, and what waits due by as much."""
    ago = timedelta(seconds=seconds)
    session.execute(update(NewsItem).values(due_at=NewsItem.due_at - ago, at=NewsItem.at - ago))
    for row in session.scalars(select(Delivery)):
        row.created_at -= ago
        at_ms = int(row.id[4:16], 16) - int(seconds * 1000)
        row.id = f"msg_{at_ms:012x}{row.id[16:]}"
    for row in session.scalars(select(RequestChannel)):
        row.told = {type_: at_s - seconds for type_, at_s in row.told.items()}
    session.commit()


class TestTold:
    def test_life_of_a_task_is_told(self, session, submit):
        task = submit()
        task.retry_max = 1
        start(session, task)
        report(session, task, Paused(**{**launched(task), "step": 3}))
        start(session, task, "image")
        report(session, task, Failed(**launched(task), cause="exit", message=f"token {SECRET}"))
        assert task.state == "waiting", "it has attempts left"
        start(session, task)
        report(session, task, Finished(**launched(task), result=None, outputs={}))
        found = {message.type: json.loads(message.body)["text"] for message in messages(session)}
        name = session.get_one(Request, task.request_id).name
        assert found == {
            "request.started": f"{name} has started.",
            "task.preempted": f"{name}: train was preempted.",
            "task.resumed": f"{name}: train goes on.",
            "task.retrying": f"{name}: train failed or lost its device, and starts again.",
            "request.done": f"{name} is done (1 done).",
        }

    def test_move_is_told_as_a_move(self, session, submit):
        task = submit("moved", "resumed")
        task.moving = {"source": "h.1", "to": "h.0", "epoch": 1, "until_s": 9e9, "stopping": True}
        start(session, task, "image")
        assert types(session) == ["task.moved"]

    def test_only_what_is_wanted_is_told(self, session, submit):
        task = submit("failed")
        start(session, task)
        report(session, task, Finished(**launched(task), result=None, outputs={}))
        assert types(session) == []
        assert session.scalars(select(NewsItem)).all() == []

    def test_failure_of_the_last_task_is_told_once_with_the_end(self, session, submit):
        task = submit("failed")
        task.retry_max = 0
        start(session, task)
        report(session, task, Failed(**launched(task), cause="exit", message="No."))
        assert (task.state, types(session)) == ("failed", ["request.failed"])

    def test_what_is_rolled_back_is_not_told(self, session, submit):
        task = submit("done")
        session.commit()
        notes_of(session).news.append(news(task, "request.done"))
        task_writer.write_events(session)
        session.rollback()
        assert types(session) == []

    def test_secret_of_a_failure_never_arrives(self, session, submit, admin):
        for kind in ("webhook", "teams"):
            made(admin, kind, kind, f"{ADDRESS}/{kind}")
        task = submit("failed", "retrying")
        for row in session.scalars(select(Webhook).where(Webhook.name.in_(["webhook", "teams"]))):
            types_ = ["task.failed", "request.failed", "task.retrying"]
            session.add(
                RequestChannel(request_id=task.request_id, webhook_id=row.id, events=types_)
            )
        session.commit()
        start(session, task)
        for attempts_left in (True, False):
            task.retry_max = 9 if attempts_left else 0
            failure = {"cause": "exception", "message": f"ValueError: {SECRET}", "detail": SECRET}
            report(session, task, Failed(**launched(task), **failure))
            if attempts_left:
                start(session, task)
        told = session.scalars(
            select(RequestEvent.message).where(RequestEvent.request_id == task.request_id)
        )
        assert any(SECRET in message for message in told), "the owner reads it"
        sent = messages(session)
        assert len(sent) == 6
        assert not [message.body for message in sent if SECRET in message.body]

    def test_links_lead_to_the_pages(self, session, submit):
        task = submit("started")
        with set_up(public_url="https://rh.example.org/"):
            start(session, task)
            [message] = messages(session)
        assert f"<https://rh.example.org/ui/requests/{task.request_id}|" in message.body


def look(session, task: Task, *, held_s: float, **more) -> list[str]:
    """Let control look at a task that has held a device for so long; return what was told."""
    session.refresh(task)
    task.held_us = round(held_s * 1e6)
    for name, value in more.items():
        setattr(task, name, value)
    session.flush()
    journal.tell_stalled(session)
    journal.settle(session)
    session.commit()
    return [each for each in texts(session) if "no progress" in each]


class TestStalled:
    @pytest.fixture
    def running(self, session, submit):
        task = submit("stalled")
        start(session, task)
        return task

    def test_task_without_progress_is_told_once_with_an_event(self, session, running):
        assert look(session, running, held_s=60) == []
        assert look(session, running, held_s=1859) == []
        name = session.get_one(Request, running.request_id).name
        told = [f"{name}: train holds a device and makes no progress."]
        assert look(session, running, held_s=1860) == told
        assert look(session, running, held_s=9000) == told
        events = select(RequestEvent).where(RequestEvent.type == "task.stalled")
        [event] = session.scalars(events)
        assert event.task_id == running.id
        assert "for 30m 00s without a new step" in event.message

    @pytest.mark.parametrize("progress", ["step", "line", "row"])
    def test_task_that_went_on_may_be_told_again(self, session, running, progress):
        look(session, running, held_s=60)
        assert len(look(session, running, held_s=1900)) == 1
        if progress == "line":
            line = {"epoch": running.epoch, "line": 0, "stream": "stdout", "text": SECRET}
            session.add(LogLine(task_id=running.id, **line))
        elif progress == "row":
            session.add(Metric(task_id=running.id, step=7, values={"loss": 1.0}))
        step = 7 if progress == "step" else 0
        look(session, running, held_s=2000, step=step)
        let_time_pass(session, 601)  # so that the next message need not wait for this one
        assert len(look(session, running, held_s=3799, step=step)) == 1
        assert len(look(session, running, held_s=3800, step=step)) == 2

    def test_pause_neither_counts_nor_makes_it_go_on(self, session, running):
        look(session, running, held_s=60)
        assert look(session, running, held_s=0, total_held_us=10**10, state="waiting") == []
        assert len(look(session, running, held_s=0, state="running")) == 1
        look(session, running, held_s=0, state="waiting", epoch=5)
        assert len(look(session, running, held_s=9000, state="running")) == 1

    def test_checkpoints_of_a_command_are_no_progress(self, session, running):
        running.descriptor = {**running.descriptor, "run": {"command": ["python", "quiet.py"]}}
        session.flush()
        for n in range(30):
            assert look(session, running, held_s=60 * n, step=n) == []
        assert len(look(session, running, held_s=1800, step=31)) == 1

    def test_only_watched_tasks_have_marks_and_none_after_their_end(self, session, submit):
        quiet, watched = submit("failed"), submit("stalled")
        talk = submit("stalled")
        for task in (quiet, watched, talk):
            task.state = "running"
        talk.descriptor = {**talk.descriptor, "session": {"idle_s": 900}}
        session.flush()
        look(session, watched, held_s=60)
        assert session.scalars(select(ProgressMark.task_id)).all() == [watched.id]
        look(session, watched, held_s=60, state="done")
        assert session.scalars(select(ProgressMark.task_id)).all() == []


def launched(task: Task) -> dict[str, object]:
    return {"task": task.id, "epoch": task.epoch, "seq": 1, "step": 0, "held_us": 20}


def news(task: Task, type_: str, name: str = "") -> dict[str, str]:
    return {"request_id": task.request_id, "type": type_, "task": name}


def happens(session, task: Task, type_: str, names=("train",)) -> None:
    notes_of(session).news.extend(news(task, type_, name) for name in names)
    task_writer.write_events(session)
    session.commit()


class TestGrouped:
    def test_preempted_often_is_a_message_in_ten_minutes_with_a_count(self, session, submit):
        task = submit("preempted")
        for _ in range(40):  # within an hour
            happens(session, task, "task.preempted")
            messages(session)
            let_time_pass(session, 90)
        let_time_pass(session, 600)
        found = texts(session)
        assert len(found) == 7
        times = [re.search(r"(\d+) times", text) for text in found]
        assert sum(1 if each is None else int(each[1]) for each in times) == 40
        assert session.scalars(select(NewsItem)).all() == []

    def test_ten_thousand_failures_of_a_lot_are_its_first_one_and_its_end(self, session, submit):
        task = submit("failed")
        for n in range(20):
            names = [f"train.{500 * n + m}" for m in range(500)]
            happens(session, task, "task.failed", names)
            messages(session)
        task.state = "failed"
        notes_of(session).moved.add(task.request_id)
        journal.settle(session)
        session.commit()
        assert types(session) == ["task.failed", "request.failed"]
        assert "500 times a task has failed (train.0, train.1," in texts(session)[0]
        assert session.scalars(select(NewsItem)).all() == []

    def test_backlog_of_a_control_that_was_away_is_taken_in(self, session, submit):
        task = submit("preempted")
        [wish] = session.scalars(select(RequestChannel))
        backlog = (
            "insert into news (request_id, webhook_id, type, task) select :request, :channel,"
            " 'task.preempted', 'train' from generate_series(1, 70000)"
        )
        given = {"request": task.request_id, "channel": wish.webhook_id}
        session.execute(text(backlog), given)
        [told] = texts(session)
        assert "train was preempted 70,000 times" in told

    def test_many_requests_of_a_user_are_told_together(self, session, submit):
        tasks = [submit("cancelled") for _ in range(AT_ONCE + 5)]
        for task in tasks:
            happens(session, task, "request.cancelled", [""])
        [message] = messages(session)
        assert json.loads(message.body)["text"].startswith(f"{len(tasks)} requests were cancelled")

    def test_failure_after_a_retry_is_told_anew(self, session, submit):
        task = submit("failed")
        happens(session, task, "task.failed")
        messages(session)
        happens(session, task, "request.failed", [""])
        messages(session)
        let_time_pass(session, 700)
        happens(session, task, "task.failed")
        assert types(session) == ["task.failed", "request.failed", "task.failed"]

    def test_two_controls_make_no_message_twice(self, committed, app):
        with transaction() as session:
            key = people(session).keys["red.tenant_admin"]
        admin = TestClient(app, headers={"Authorization": f"Bearer {key}"})
        made(admin)
        body = {"tasks": [{"name": "a", "run": {"command": ["true"]}}], "notify": ON_DONE}
        id = admin.post("/v1/requests", json=body).json()["id"]
        with transaction() as session:
            happened = {"request_id": id, "type": "request.done", "task": ""}
            notes_of(session).news.append(happened)
            task_writer.write_events(session)
        with transaction() as first:
            notifications.write_messages(first)
            with transaction() as second:
                assert not notifications.write_messages(second)
                assert second.scalars(select(Delivery)).all() == []
        with transaction() as session:
            notifications.write_messages(session)
            assert len(session.scalars(select(Delivery)).all()) == 1


ON_DONE = [{"to": "ml-alerts", "on": ["done"]}]


class TestNotify:
    def test_unknown_channel_is_refused_with_the_known_ones(self, red, channel):
        notify = [{"to": "ml-alerts"}, {"to": "ml-alarms"}]
        answer = red.post("/v1/requests", json=descriptor(notify=notify))
        found = problem(answer, 422, "validation-error", "/notify/1/to")
        assert "it has: ml-alerts" in found["detail"]

    def test_channel_of_another_tenant_is_unknown(self, as_, channel):
        body = {"tasks": [{"name": "a", "run": {"command": ["true"]}}], "notify": ON_DONE}
        problem(
            as_("blue.member").post("/v1/requests", json=body), 422, "validation-error",
            "/notify/0/to",
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("notify", "pointer"),
        [
            ([{"to": "ml-alerts", "on": ["finished"]}], "/notify/0/on/0"),
            ([{"on": ["done"]}], "/notify/0/to"),
            ([{"to": "ml-alerts"}, {"to": "ml-alerts"}], "/notify/1/to"),
            ([{"to": "ml-alerts", "url": "x"}], "/notify/0/url"),
            ([7], "/notify/0"),
            ([{"to": "ml-alerts"}] * 21, "/notify"),
        ],
    )
    def test_wrong_notify_is_refused(self, red, channel, notify, pointer):
        answer = red.post("/v1/requests", json=descriptor(notify=notify))
        problem(answer, 422, "validation-error", pointer)

    def test_channel_is_told_of_the_ends_by_default(self, session, red, channel):
        body = descriptor(notify=[{"to": "ml-alerts"}])
        assert red.post("/v1/requests", json=body).status_code == 202
        [wish] = session.scalars(select(RequestChannel))
        assert wish.events == [
            "request.done", "task.failed", "request.failed", "request.cancelled",
        ]  # fmt: skip

    def test_submit_takes_no_lock_of_the_audit_log(self, session, submit):
        before = session.scalar(select(func.count()).select_from(AuditEvent))
        submit()
        assert session.scalar(select(func.count()).select_from(AuditEvent)) == before

    def test_tenant_webhook_and_channel_do_not_mix(self, session, submit, admin):
        admin.post("/v1/webhooks", json={"url": "https://tenant.example.org/"})
        task = submit("done")
        task.state = "done"
        notes_of(session).moved.add(task.request_id)
        journal.settle(session)
        sent = {message.url: message.type for message in messages(session)}
        assert sent == {
            "https://tenant.example.org/": "request.done", "channel:ml-alerts": "request.done",
        }  # fmt: skip


class TestUsual:
    def test_requests_that_name_no_channel_tell_the_usual_ones(self, session, red, channel):
        usual = {"notify": [{"to": "ml-alerts", "on": ["failed", "started"]}]}
        assert red.get("/v1/me/notifications").json() == {"notify": []}
        assert red.put("/v1/me/notifications", json=usual).json() == usual
        assert red.get("/v1/me/notifications").json() == usual
        assert red.post("/v1/requests", json=descriptor()).status_code == 202
        [wish] = session.scalars(select(RequestChannel))
        assert wish.events == ["task.failed", "request.failed", "request.started"]
        for own in ([], {"webhook": "https://own.example.org/"}):
            assert red.post("/v1/requests", json=descriptor(notify=own)).status_code == 202
        assert len(session.scalars(select(RequestChannel)).all()) == 1

    def test_usual_channel_that_is_removed_is_passed_over(self, session, red, admin, channel):
        red.put("/v1/me/notifications", json={"notify": [{"to": "ml-alerts"}]})
        admin.delete(f"/v1/channels/{channel['id']}")
        assert red.post("/v1/requests", json=descriptor()).status_code == 202
        assert session.scalars(select(RequestChannel)).all() == []

    @pytest.mark.parametrize(
        ("notify", "pointer"),
        [
            ([{"to": "ml-alarms"}], "/notify/0/to"),
            ([{"to": "ml-alerts"}, {"to": "ml-alerts"}], "/notify/1/to"),
            ([{"to": "ml-alerts", "on": ["x"]}], "/notify/0/on/0"),
        ],
    )
    def test_wrong_wish_is_refused(self, red, channel, notify, pointer):
        answer = red.put("/v1/me/notifications", json={"notify": notify})
        problem(answer, 422, "validation-error", pointer)


class TestRoutes:
    def test_address_is_never_shown_and_lies_encrypted(self, session, admin, red, channel):
        assert "address" not in channel
        [row] = session.scalars(select(Webhook))
        assert ADDRESS not in str(vars(row))
        assert channels.sealed(row).opened() == ADDRESS
        for client in (admin, red):
            listed = client.get("/v1/channels")
            assert listed.json()["items"][0]["name"] == "ml-alerts"
            assert "S3CR3T" not in listed.text
            assert "secret" not in listed.text
        assert "S3CR3T" not in admin.get("/v1/audit-events").text

    def test_members_make_and_remove_none(self, red, channel):
        body = {"name": "x", "kind": "slack", "address": ADDRESS}
        problem(red.post("/v1/channels", json=body), 403, "insufficient-scope")
        problem(red.delete(f"/v1/channels/{channel['id']}"), 403, "insufficient-scope")

    @pytest.mark.parametrize(
        ("change", "pointer"),
        [
            ({"address": "http://127.0.0.1/hook"}, "/address"),
            ({"address": "ftp://example.org/"}, "/address"),
            ({"name": "Not A Name"}, "/name"),
            ({"kind": "pager"}, "/kind"),
            ({"tenant_id": "ten_blue"}, "/tenant_id"),
        ],
    )
    def test_invalid_channel_is_refused(self, admin, change, pointer):
        body = {"name": "x", "kind": "slack", "address": ADDRESS} | change
        answer = admin.post("/v1/channels", json=body)
        problem(answer, 422, "validation-error", pointer)
        assert "127.0.0.1/hook" not in answer.text

    def test_name_is_taken_once(self, admin, channel):
        body = {"name": "ml-alerts", "kind": "teams", "address": ADDRESS}
        problem(admin.post("/v1/channels", json=body), 409, "conflict-state")

    def test_mail_needs_a_server_and_an_address(self, admin):
        body = {"name": "x", "kind": "mail", "address": "team@example.org"}
        problem(admin.post("/v1/channels", json=body), 422, "validation-error", "/kind")
        with set_up(smtp_url="smtp://127.0.0.1:25", mail_from="rh@example.org"):
            assert admin.post("/v1/channels", json=body).status_code == 201
            wrong = {**body, "name": "y", "address": "a@b.c\r\nBcc: x@y.z"}
            problem(admin.post("/v1/channels", json=wrong), 422, "validation-error", "/address")

    def test_removed_channel_gets_nothing_and_its_requests_go_on(self, session, admin, submit):
        task = submit()
        [row] = session.scalars(select(Webhook))
        happens(session, task, "request.started", [""])
        assert admin.delete(f"/v1/channels/{row.id}").status_code == 204
        start(session, task)
        assert (types(session), task.state) == ([], "running")

    def test_channel_is_no_webhook(self, admin, channel):
        assert admin.get("/v1/webhooks").json()["items"] == []
        problem(admin.get(f"/v1/webhooks/{channel['id']}"), 404, "not-found")

    def test_changes_are_in_the_audit_log(self, admin, channel):
        admin.post(f"/v1/channels/{channel['id']}/test")
        admin.delete(f"/v1/channels/{channel['id']}")
        found = admin.get("/v1/audit-events").json()["items"][::-1]
        assert [(e["operation"], e["action"], e["target_kind"]) for e in found] == [
            ("createChannel", "made", "channel"),
            ("testChannel", "asked", "channel"),
            ("deleteChannel", "removed", "channel"),
        ]

    def test_new_key_opens_addresses_after_they_are_encrypted_again(
        self, session, channel, tmp_path
    ):
        path = tmp_path / "secrets.key"
        path.write_bytes(settings().secrets_key_file.read_bytes())
        Keyring.add(path)
        with set_up(secrets_key=str(path)):
            assert channels.encrypt_again(session) == 1
            assert channels.encrypt_again(session) == 0
            path.write_text(path.read_text().split()[0])
            [row] = session.scalars(select(Webhook))
            assert channels.sealed(row).opened() == ADDRESS


# --- really sent --------------------------------------------------------------------------------


@pytest.fixture
def world_outside(committed):
    """A receiver and a mail server on this machine, which this deployment may call."""
    with receiver() as http, mail_server() as smtp:
        variables = {"smtp_url": smtp.url, "mail_from": "rh@example.org"}
        with set_up(webhook_networks="127.0.0.0/8", **variables):
            yield http, smtp


@pytest.fixture
def key(world_outside) -> str:
    with transaction() as session:
        return people(session).keys["red.tenant_admin"]


def try_out(app, key, kind, address):
    """Make a channel, and send a test message there; return both, and a client."""
    admin = TestClient(app, headers={"Authorization": f"Bearer {key}"})
    channel = made(admin, kind, kind, address)
    sent = admin.post(f"/v1/channels/{channel['id']}/test").json()
    with transaction() as session:
        [taken] = webhooks.take(session, 16, call_s=15.0)
    webhook_sender.deliver(taken)
    return admin, channel, admin.get(f"/v1/deliveries/{sent['id']}").json()


class TestSent:
    def test_chat_gets_its_own_form(self, app, world_outside, key):
        http, _ = world_outside
        _, _, sent = try_out(app, key, "slack", f"{http.url}/ok")
        got = http.next()
        assert json.loads(got.body)["text"] == "This is a test message of Roundhouse."
        assert got.headers["webhook-id"] == sent["id"]
        assert (sent["state"], sent["url"]) == ("delivered", "channel:slack")

    def test_mail_arrives(self, app, world_outside, key):
        _, smtp = world_outside
        _, _, sent = try_out(app, key, "mail", "team@example.org")
        mail = smtp.got.get(timeout=60)
        assert (mail["To"], mail["From"]) == ("team@example.org", "rh@example.org")
        assert mail["Message-ID"] == f"<{sent['id']}@example.org>"
        assert "This is a test message of Roundhouse." in mail.get_content()
        assert [each["status"] for each in sent["attempts"]] == [250]

    def test_refused_mail_is_tried_again_and_its_address_is_not_told(self, app, world_outside, key):
        _, smtp = world_outside
        _, _, sent = try_out(app, key, "mail", "refused@example.org")
        [tried] = sent["attempts"]
        assert (sent["state"], tried["status"]) == ("pending", 550)
        assert "refused@" not in json.dumps(sent)
        assert smtp.got.empty()

    def test_mail_server_that_is_away_is_tried_again(self, app, world_outside, key):
        with set_up(smtp_url="smtp://127.0.0.1:1"):
            _, _, sent = try_out(app, key, "mail", "team@example.org")
        [tried] = sent["attempts"]
        assert (sent["state"], tried["status"]) == ("pending", None)
        assert tried["error"] == "the mail server cannot be used: ConnectionRefusedError"

    def test_failure_of_a_chat_tells_nothing_of_its_address(self, app, world_outside, key):
        with set_up(webhook_networks="127.0.0.0/8"):
            _, _, sent = try_out(app, key, "slack", "http://127.0.0.1:1/S3CR3T")
        [tried] = sent["attempts"]
        assert tried["error"] == webhook_sender.CHANNEL_FAILED

    @pytest.mark.slow
    def test_kill_between_state_and_send_sends_the_same_message_at_most_twice(
        self, app, world_outside, key
    ):
        """Control dies while the receiver thinks; what happened is told again, by the same id."""
        http, _ = world_outside
        admin = TestClient(app, headers={"Authorization": f"Bearer {key}"})
        made(admin, address=f"{http.url}/hang")
        body = {"tasks": [{"name": "a", "run": {"command": ["true"]}}], "notify": ON_DONE}
        id = admin.post("/v1/requests", json=body).json()["id"]
        with transaction() as session:
            task = session.scalars(select(Task).where(Task.request_id == id)).one()
            task.state = "done"
            notes_of(session).moved.add(id)
            journal.settle(session)
        words = "-m celery -A workers.control.controller worker"
        words += " --pool threads -c 2 -Q control -n a-test"
        process = subprocess.Popen([sys.executable, *words.split()], stderr=subprocess.DEVNULL)
        try:
            first = http.next()
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        with transaction() as session:
            assert not notifications.write_messages(session), "it is a message already"
            session.execute(update(Delivery).values(taken_until=func.now()))
            [taken] = webhooks.take(session, 16, call_s=15.0)
            webhooks.record(session, taken, AttemptAnswer(status=200, error="", took_us=1))
        assert taken.id == first.headers["webhook-id"]
        with transaction() as session:
            [only] = session.scalars(select(Delivery))
            assert (only.id, only.state, only.attempt) == (taken.id, "delivered", 2)
