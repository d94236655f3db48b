"""Webhooks: who is told of a request's end, that each message arrives, who may do what."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from unittest import mock

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import func, select, update
from standardwebhooks import Webhook as Verifier
from standardwebhooks import WebhookVerificationError

from app.core.webhooks.retries import WAITS_S, AttemptAnswer
from app.db import transactions
from app.db.models import AuditEvent, Delivery, Request, Task, Webhook
from app.db.transactions import transaction
from app.messaging import webhooks
from app.scheduling import housekeeping, journal
from app.scheduling.round_notes import notes_of
from app.settings import settings
from tests.app.conftest import descriptor, people, problem
from tests.app.receiver import receiver
from tests.scenery import until_somebody_waits_for
from workers.control import webhook_sender
from workers.control.webhook_sender import Deliverer

URL = "https://hooks.example.org/"


def hook(session, id="whk_1", tenant="ten_red", url=URL, events=("request.done",), **more):
    row = Webhook(id=id, tenant_id=tenant, url=url, events=list(events), **more)
    row.secret = row.secret or webhooks.new_secret()
    session.add(row)
    session.flush()
    return row


def ends(session, request_id, state):
    """As the journal does it when the last task of a request ends."""
    task = session.scalars(select(Task).where(Task.request_id == request_id)).one()
    task.state, task.message = state, "it broke"
    notes_of(session).moved.add(request_id)
    journal.settle(session)


def messages(session):
    return session.scalars(select(Delivery).order_by(Delivery.url)).all()


class TestAnnounced:
    def test_end_of_a_request_is_written_for_its_webhooks(self, session, submitted):
        hook(session)
        hook(session, "whk_2", url="https://b.example.org/", events=["request.failed"])
        hook(session, "whk_3", url="https://c.example.org/", disabled_at=func.now())
        hook(session, "whk_4", "ten_blue")
        ends(session, submitted["id"], "done")
        [found] = messages(session)
        assert (found.webhook_id, found.request_id) == ("whk_1", submitted["id"])
        assert (found.type, found.state, found.url) == ("request.done", "pending", URL)
        body = json.loads(found.body)
        assert body["type"] == "request.done"
        assert body["data"]["id"] == submitted["id"]
        assert body["data"]["state"] == "done"
        assert body["data"]["tasks"] == {"done": 1}

    def test_failure_is_reported(self, session, submitted):
        hook(session, events=["request.failed"])
        ends(session, submitted["id"], "failed")
        [found] = messages(session)
        failure = {"task": "train", "cause": None, "message": "it broke"}
        assert json.loads(found.body)["data"]["failure"] == failure

    def test_end_is_reported_once_however_often_it_is_summed_up(self, session, submitted):
        hook(session)
        ends(session, submitted["id"], "done")
        ends(session, submitted["id"], "done")
        assert len(messages(session)) == 1

    def test_end_that_is_rolled_back_is_not_reported(self, session, submitted):
        hook(session)
        session.commit()
        ends(session, submitted["id"], "done")
        session.rollback()
        assert messages(session) == []
        assert session.get_one(Request, submitted["id"]).state == "queued"

    def test_request_may_name_an_address_itself(self, session, red):
        own = {"webhook": "https://own.example.org/", "on": ["failed"]}
        submitted = [red.post("/v1/requests", json=descriptor(notify=own)).json() for _ in "ab"]
        ends(session, submitted[0]["id"], "failed")
        ends(session, submitted[1]["id"], "done")
        [found] = messages(session)
        assert (found.url, found.request_id) == (own["webhook"], submitted[0]["id"])
        [nameless] = session.scalars(select(Webhook))
        assert (nameless.url, nameless.tenant_id) == (None, "ten_red")
        assert found.webhook_id == nameless.id

    def test_submission_with_an_address_leaves_no_audit_record(self, session, red):
        notify = {"webhook": "https://own.example.org/"}
        assert red.post("/v1/requests", json=descriptor(notify=notify)).status_code == 202
        assert session.scalar(select(func.count()).select_from(AuditEvent)) == 0

    def test_internal_address_is_refused_at_once(self, red):
        notify = {"webhook": "http://10.0.0.1/"}
        answer = red.post("/v1/requests", json=descriptor(notify=notify))
        problem(answer, 422, "validation-error", "/notify/webhook")


def message(session, id="msg_1", hook_id="whk_1", tenant="ten_red", **more):
    whose = {"webhook_id": hook_id, "tenant_id": tenant, "url": URL}
    row = Delivery(id=id, type="request.done", body="{}", **(whose | more))
    session.add(row)
    session.flush()
    return row


def take(session, most=16):
    return webhooks.take(session, most, call_s=15.0)


def answered(status, error=""):
    return AttemptAnswer(status=status, error=error, took_us=1)


@pytest.mark.usefixtures("world")
class TestOnItsWay:
    def test_sender_holds_a_message_until_its_lease_ends(self, session):
        hook(session)
        message(session)
        [first] = take(session)
        assert (first.id, first.attempt) == ("msg_1", 1)
        assert take(session) == []
        session.execute(update(Delivery).values(taken_until=func.now()))
        [second] = take(session)
        assert (second.id, second.attempt) == ("msg_1", 2)

    def test_late_result_of_an_attempt_is_history_only(self, session):
        hook(session)
        message(session)
        [first] = take(session)
        session.execute(update(Delivery).values(taken_until=func.now()))
        [second] = take(session)
        webhooks.record(session, first, answered(200))
        assert session.get_one(Delivery, "msg_1").state == "pending"
        webhooks.record(session, second, answered(200))
        assert session.get_one(Delivery, "msg_1").state == "delivered"

    def test_message_is_retried_ever_later_until_it_is_given_up(self, session):
        hook(session)
        delivery = message(session)
        for n in range(1, len(WAITS_S) + 1):
            [taken] = take(session)
            webhooks.record(session, taken, answered(503))
            session.flush()
            session.refresh(delivery)
            if n < len(WAITS_S):
                waits_s = (delivery.due_at - transactions.now(session)).total_seconds()
                assert WAITS_S[n] <= waits_s <= 1.2 * WAITS_S[n]
                delivery.due_at = func.now()
                session.flush()
        assert (delivery.state, len(delivery.attempts)) == ("given_up", len(WAITS_S))
        assert delivery.attempts[-1]["status"] == 503
        assert take(session) == []

    def test_410_ends_all_messages_of_this_webhook(self, session):
        hook(session)
        message(session)
        message(session, "msg_2", due_at=func.now() + timedelta(hours=1))
        [taken] = take(session)
        webhooks.record(session, taken, answered(410))
        assert session.get_one(Webhook, "whk_1").disabled_at is not None
        session.expire_all()
        assert [row.state for row in messages(session)] == ["given_up", "given_up"]

    def test_410_of_an_address_in_a_request_affects_no_other(self, session):
        hook(session, url=None)
        message(session)
        message(session, "msg_2", due_at=func.now() + timedelta(hours=1))
        [taken] = take(session)
        webhooks.record(session, taken, answered(410))
        assert session.get_one(Webhook, "whk_1").disabled_at is None
        states = {row.id: row.state for row in messages(session)}
        assert states == {"msg_1": "given_up", "msg_2": "pending"}

    def test_tenant_with_many_messages_does_not_delay_the_others(self, session):
        for n in range(3):
            hook(session, f"whk_{n}", url=f"{URL}{n}")
        hook(session, "whk_blue", "ten_blue")
        for n in range(30):
            message(session, f"msg_{n:02}", f"whk_{n % 3}")
        message(session, "msg_blue", "whk_blue", "ten_blue")
        taken = {one.id for one in take(session, 4)}
        assert "msg_blue" in taken
        taken |= {one.id for one in take(session)}
        assert len(taken) == webhooks.PER_TENANT + 1
        assert take(session) == []

    def test_both_secrets_sign_during_a_rotation(self, session):
        row = hook(session)
        old, new = row.secret, webhooks.new_secret()
        row.old_secret, row.secret = old, new
        row.old_secret_until = func.now() + timedelta(hours=1)
        message(session)
        [taken] = take(session)
        for secret in (old, new):
            Verifier(secret).verify(taken.body, webhooks.headers(taken))
        session.execute(update(Webhook).values(old_secret_until=func.now()))
        session.execute(update(Delivery).values(taken_until=func.now()))
        [taken] = take(session)
        Verifier(new).verify(taken.body, webhooks.headers(taken))
        with pytest.raises(WebhookVerificationError):
            Verifier(old).verify(taken.body, webhooks.headers(taken))

    def test_old_messages_are_deleted(self, session):
        hook(session)
        long_ago = func.now() - timedelta(days=31)
        message(session, state="delivered", ended_at=long_ago)
        message(session, "msg_2", created_at=long_ago)
        housekeeping.tidy(session)
        assert [row.id for row in messages(session)] == ["msg_2"]


def test_webhook_that_is_deleted_while_its_test_waits_is_not_found(committed, app):
    with transaction() as session:
        key = people(session).keys["root"]
        id = hook(session, url="https://hooks.test/a").id
    root = TestClient(app, headers={"Authorization": f"Bearer {key}"})
    with ThreadPoolExecutor() as threads:
        with transaction() as first:
            first.delete(first.get_one(Webhook, id))
            first.flush()
            second = threads.submit(root.post, f"/v1/webhooks/{id}/test")
            until_somebody_waits_for(first)
        problem(second.result(timeout=90), 404, "not-found")


# --- really sent --------------------------------------------------------------------------------


@pytest.fixture
def other(committed):
    """A receiver on this machine, which this deployment allows to be called."""
    with mock.patch.dict(os.environ, {"ROUNDHOUSE_WEBHOOK_NETWORKS": "127.0.0.0/8"}):
        settings.cache_clear()
        with transaction() as session:
            people(session)
        with receiver() as found:
            yield found
    settings.cache_clear()


def sent_to(other, path):
    """A webhook there, and a message on its way to it."""
    with transaction() as session:
        url = f"{other.url}/{path}"
        row = hook(session, url=url)
        whose = {"webhook_id": row.id, "tenant_id": row.tenant_id, "url": url}
        body = '{"type":"request.done"}'
        session.add(Delivery(id="msg_1", type="request.done", body=body, **whose))
        return row.secret


def state():
    with transaction() as session:
        row = session.get_one(Delivery, "msg_1")
        return row.state, [each["status"] for each in row.attempts]


def deliver_one():
    with transaction() as session:
        [taken] = take(session)
    webhook_sender.deliver(taken)
    return taken


class TestSent:
    def test_message_arrives_and_its_receiver_can_verify_it(self, other):
        secret = sent_to(other, "ok")
        deliver_one()
        got = other.next()
        assert Verifier(secret).verify(got.body, got.headers) == {"type": "request.done"}
        assert got.headers["webhook-id"] == "msg_1"
        assert got.headers["content-type"] == "application/json"
        with pytest.raises(WebhookVerificationError):
            Verifier(secret).verify(got.body + " ", got.headers)
        assert state() == ("delivered", [204])

    def test_failed_message_is_sent_again_with_the_same_id(self, other):
        other.failures_left = 2
        sent_to(other, "flaky")
        for _ in range(3):
            deliver_one()
            with transaction() as session:
                session.execute(update(Delivery).values(due_at=func.now()))
        assert state() == ("delivered", [500, 500, 200])
        assert {other.next().headers["webhook-id"] for _ in range(3)} == {"msg_1"}

    def test_a_redirect_is_a_failure(self, other):
        sent_to(other, "redirect")
        deliver_one()
        assert state() == ("pending", [307])
        assert other.next().path == "/redirect"
        assert other.got.empty()

    def test_internal_address_is_called_only_if_allowed(self, other):
        sent_to(other, "ok")
        with mock.patch.dict(os.environ, {"ROUNDHOUSE_WEBHOOK_NETWORKS": ""}):
            settings.cache_clear()
            deliver_one()
        assert state() == ("pending", [None])
        assert other.got.empty()

    def test_due_messages_are_sent_while_one_receiver_hangs(self, other):
        sent_to(other, "hang")
        loop = Deliverer()
        loop.start()
        try:
            assert other.next().path == "/hang"
            with transaction() as session:
                url = f"{other.url}/ok"
                hook(session, "whk_2", "ten_blue", url)
                message(session, "msg_2", "whk_2", "ten_blue", url=url)
            loop.wake.set()
            assert other.next().path == "/ok"
        finally:
            other.release.set()
            loop.stop()
            for thread in threading.enumerate():
                if thread.name in ("msg_1", "msg_2"):
                    thread.join()

    @pytest.mark.slow
    def test_killed_sender_loses_no_message(self, other):
        """It dies while the receiver thinks; the next one sends the same message again."""
        secret = sent_to(other, "hang")
        words = "-m celery -A workers.control.controller worker"
        words += " --pool threads -c 2 -Q control -n a-test"
        process = subprocess.Popen([sys.executable, *words.split()], stderr=subprocess.DEVNULL)
        try:
            first = other.next()
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        assert state() == ("pending", [])
        with transaction() as session:
            assert take(session) == []  # the lease of who died still stands
            session.execute(update(Delivery).values(taken_until=func.now(), url=f"{other.url}/ok"))
        taken = deliver_one()
        second = other.next()
        assert taken.attempt == 2
        assert first.headers["webhook-id"] == second.headers["webhook-id"] == "msg_1"
        assert first.body == second.body
        Verifier(secret).verify(second.body, second.headers)
        assert state() == ("delivered", [204])

    def test_two_senders_do_not_take_the_same_message(self, other):
        sent_to(other, "ok")
        taken, start = [], threading.Barrier(4)

        def look():
            start.wait()
            with transaction() as session:
                taken.extend(take(session))

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [one.id for one in taken] == ["msg_1"]


# --- over HTTP ----------------------------------------------------------------------------------


@pytest.fixture
def admin(as_):
    return as_("red.tenant_admin")


@pytest.fixture
def made(admin):
    answer = admin.post("/v1/webhooks", json={"url": URL})
    assert answer.status_code == 201, answer.text
    return answer.json()


class TestRoutes:
    def test_the_secret_is_shown_once(self, admin, made):
        assert made["secret"].startswith("whsec_")
        assert made["events"] == [
            "request.cancelled",
            "request.done",
            "request.failed",
            "request.held",
        ]
        for path in ("/v1/webhooks", f"/v1/webhooks/{made['id']}", "/v1/audit-events"):
            answer = admin.get(path)
            assert answer.is_success
            assert "secret" not in answer.text

    @pytest.mark.parametrize(
        ("body", "pointer"),
        [
            ({"url": "http://127.0.0.1/"}, "/url"),
            ({"url": "http://[fd00::1]/"}, "/url"),
            ({"url": "file:///etc/passwd"}, "/url"),
            ({"url": URL, "events": ["request.started"]}, "/events/0"),
            ({"url": URL, "events": []}, "/events"),
            ({"url": URL, "tenant_id": "ten_blue"}, "/tenant_id"),
        ],
    )
    def test_invalid_webhook_is_refused(self, admin, body, pointer):
        problem(admin.post("/v1/webhooks", json=body), 422, "validation-error", pointer)

    def test_number_of_webhooks_of_a_tenant_is_limited(self, admin):
        for n in range(20):
            assert admin.post("/v1/webhooks", json={"url": f"{URL}{n}"}).status_code == 201
        problem(admin.post("/v1/webhooks", json={"url": URL}), 409, "conflict-state")

    def test_new_secret_signs_beside_the_old_one_for_a_while(self, admin, made, session):
        answer = admin.post(f"/v1/webhooks/{made['id']}/rotate", json={"overlap_s": 60}).json()
        assert answer["secret"] != made["secret"]
        until = datetime.fromisoformat(answer["overlap_until"])
        assert until == transactions.now(session) + timedelta(seconds=60)
        admin.post(f"/v1/webhooks/{made['id']}/test")
        [taken] = take(session)
        assert taken.secrets == (answer["secret"], made["secret"])

    def test_test_message_is_sent_like_any_other(self, admin, made, session):
        answer = admin.post(f"/v1/webhooks/{made['id']}/test")
        assert answer.status_code == 202
        place = answer.headers["location"]
        [taken] = take(session)
        assert json.loads(taken.body)["data"] == {"webhook_id": made["id"]}
        webhooks.record(session, taken, answered(None, "no answer within 15 s"))
        session.commit()
        shown = admin.get(place).json()
        assert (shown["type"], shown["state"]) == ("webhook.test", "pending")
        assert [a["error"] for a in shown["attempts"]] == ["no answer within 15 s"]
        listed = admin.get(f"/v1/webhooks/{made['id']}/deliveries?state=pending").json()["items"]
        assert listed == [shown]

    def test_abandoned_message_is_sent_again_with_all_its_attempts(self, admin, made, session):
        row = message(
            session, hook_id=made["id"], state="given_up", attempt=10, ended_at=func.now()
        )
        session.commit()
        answer = admin.post("/v1/deliveries/msg_1/redeliver").json()
        assert (answer["id"], answer["state"], answer["ended_at"]) == ("msg_1", "pending", None)
        [taken] = take(session)
        webhooks.record(session, taken, answered(500))
        session.flush()
        session.refresh(row)
        assert row.state == "pending"

    def test_disabled_webhook_gets_no_message(self, admin, made, session):
        message(session, hook_id=made["id"], state="delivered", ended_at=func.now())
        session.execute(update(Webhook).values(disabled_at=func.now()))
        session.commit()
        for path in (f"/v1/webhooks/{made['id']}/test", "/v1/deliveries/msg_1/redeliver"):
            problem(admin.post(path), 409, "conflict-state")

    def test_deleted_webhook_takes_its_messages_along(self, admin, made, session):
        message(session, hook_id=made["id"])
        session.commit()
        assert admin.delete(f"/v1/webhooks/{made['id']}").status_code == 204
        problem(admin.get(f"/v1/webhooks/{made['id']}"), 404, "not-found")
        session.expire_all()
        assert messages(session) == []

    def test_addresses_in_requests_are_listed(self, admin, red, session):
        """Their secret comes by rotating it, they cannot be deleted or tested, and whoever sees the
        request sees what was sent.
        """
        notify = {"webhook": "https://own.example.org/"}
        submitted = red.post("/v1/requests", json=descriptor(notify=notify)).json()
        ends(session, submitted["id"], "done")
        session.commit()
        [nameless] = admin.get("/v1/webhooks").json()["items"]
        assert nameless["url"] is None
        place = f"/v1/webhooks/{nameless['id']}"
        assert admin.post(f"{place}/rotate").json()["secret"].startswith("whsec_")
        problem(admin.delete(place), 409, "conflict-state")
        problem(admin.post(f"{place}/test"), 409, "conflict-state")
        [sent] = red.get(f"/v1/requests/{submitted['id']}/deliveries").json()["items"]
        assert (sent["url"], sent["type"]) == (notify["webhook"], "request.done")

    def test_address_of_a_webhook_is_not_shown_with_a_request(self, red, made, session, submitted):
        ends(session, submitted["id"], "done")
        session.commit()
        assert len(messages(session)) == 1
        assert red.get(f"/v1/requests/{submitted['id']}/deliveries").json()["items"] == []

    def test_changes_of_webhooks_are_in_the_audit_log(self, admin, made):
        admin.post(f"/v1/webhooks/{made['id']}/rotate")
        admin.delete(f"/v1/webhooks/{made['id']}")
        found = admin.get("/v1/audit-events").json()["items"][::-1]
        assert [(e["operation"], e["action"], e["target_kind"]) for e in found] == [
            ("createWebhook", "made", "webhook"),
            ("rotateWebhook", "changed", "webhook"),
            ("deleteWebhook", "removed", "webhook"),
        ]
