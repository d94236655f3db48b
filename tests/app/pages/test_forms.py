"""The forms of the pages, as any browser sends them: whose they are, what they do, what is told."""

from __future__ import annotations

import html
import re
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from app.api.access import auth
from app.db.models import AuditEvent, Cycle, Decision, Delivery, Device, Secret, Task
from app.pages import forms
from tests.app.conftest import descriptor
from tests.app.pages.conftest import TOLD, Browser, words_of


@pytest.fixture
def page(submitted: dict[str, Any]) -> str:
    return f"/ui/requests/{submitted['id']}"


@pytest.fixture
def task(session: Session, submitted: dict[str, Any]) -> Task:
    found = session.get_one(Task, submitted["tasks"][0]["id"])
    return found


class TestWhoseFormItIs:
    def test_form_without_the_sessions_token_changes_nothing(self, browse, page, task, session):
        member = browse("red.member")
        for token in ("", "0" * 64, forms.token("another session")):
            assert member.send(page, do="cancel", token=token).status_code == 403
        session.refresh(task)
        assert task.cancel_asked_at is None

    def test_form_of_another_site_has_no_token(self, browse, page, task, session):
        elsewhere = {"Sec-Fetch-Site": "cross-site"}
        assert browse("red.member").send(page, do="cancel", headers=elsewhere).status_code == 403
        session.refresh(task)
        assert task.cancel_asked_at is None

    def test_caller_without_a_session_is_led_to_the_sign_in(self, app, page):
        answer = TestClient(app, follow_redirects=False).post(page, data={"do": "cancel"})
        assert (answer.status_code, answer.headers["location"][:9]) == (303, "/ui/login")

    def test_token_on_the_page_is_that_of_the_session(self, browse, page):
        member = browse("red.member")
        tokens = set(re.findall(r'name="token" value="(\w+)"', member.look(page).text))
        assert tokens == {forms.token(member.cookie)}

    def test_no_other_site_can_put_text_on_a_page(self, browse, page):
        member = browse("red.member")
        for sealed in ("", "x", "x.!", forms.sealed("another session", "Send us your key.")):
            member.client.cookies.set(forms.TOLD, sealed)
            assert member.told(page) == ""


class TestWishes:
    @pytest.mark.parametrize(
        ("do", "field", "value", "words"),
        [
            ("hold", "hold", "user", "Pausing"),
            ("cancel", "cancel_asked", True, "Cancelling"),
        ],
    )
    def test_request_is_paused_resumed_and_cancelled(
        self, browse, page, submitted, red, do, field, value, words
    ):
        member = browse("red.member")
        answer = member.send(page, do=do)
        assert (answer.status_code, answer.headers["location"]) == (303, page)
        assert words in member.told(page)
        assert member.told(page) == ""  # once
        [told] = red.get(f"/v1/requests/{submitted['id']}").json()["tasks"]
        assert told[field] == value

    def test_task_is_paused_resumed_and_cancelled(self, browse, page, task, session):
        member = browse("red.member")
        for do, hold in (("pause", "user"), ("resume", "")):
            member.send(page, do=do, task=task.id)
            session.refresh(task)
            assert task.hold == hold
        assert "train resumed" in member.told(page)

    def test_answer_with_htmx_is_the_page_with_a_message(self, browse, page, task):
        answer = browse("red.member").send(page, hx=True, do="pause", task=task.id)
        assert answer.status_code == 200
        assert "<html" not in answer.text
        said = words_of(answer, '<div id="told" hx-swap-oob="innerHTML">')
        assert said.startswith("Pausing train at its next safe point")
        assert 'value="release"' in answer.text

    def test_refusal_is_a_page_and_with_htmx_a_message(self, browse, page, task, session):
        session.execute(update(Task).values(hold="admin"))
        member = browse("red.member")
        answer = member.send(page, do="resume", task=task.id)
        assert answer.status_code == 403
        assert "An administrator of the platform paused the task" in answer.text
        assert f'href="{page}"' in answer.text
        answer = member.send(page, hx=True, do="resume", task=task.id)
        assert (answer.status_code, answer.headers["hx-retarget"]) == (403, "#told")
        assert "<main" not in answer.text

    def test_number_of_devices_of_a_gang_is_changed(self, browse, red, session):
        run = {"job": "train:Train"}
        gang = {"name": "wide", "run": run, "world_size": 2, "devices": {"min": 1, "max": 2}}
        made = red.post("/v1/requests", json=descriptor(tasks=[gang])).json()
        task = session.get_one(Task, made["tasks"][0]["id"])
        page, member = f"/ui/requests/{made['id']}", browse("red.member")
        assert "Devices at most" in member.look(page).text
        assert member.send(page, do="resize", task=task.id, devices_max="1").status_code == 303
        session.refresh(task)
        assert task.devices_max == 1
        for bad in ("", "0", "3", "-1", "two", "²", "9" * 5000):
            answer = member.send(page, do="resize", task=task.id, devices_max=bad)
            assert answer.status_code == 422, bad
            assert "/devices_max" in answer.text or "for 2 ranks" in answer.text

    @pytest.mark.parametrize("do", ["", "explode", "pause"])
    def test_unknown_action_on_a_request_is_refused(self, browse, page, do):
        assert browse("red.member").send(page, do=do).status_code == 422

    def test_a_task_of_another_request_is_not_found(self, browse, page, red):
        other = red.post("/v1/requests", json=descriptor()).json()["tasks"][0]["id"]
        assert browse("red.member").send(page, do="cancel", task=other).status_code == 404

    def test_ended_request_offers_only_its_deletion(self, browse, page, task, session):
        session.execute(update(Task).values(state="done"))
        answer = browse("red.member").send(page, do="cancel", task=task.id)
        assert answer.status_code == 303
        shown = browse("red.member").look(page).text
        assert re.findall(r'<button name="do" value="(\w+)"', shown) == ["delete"]
        assert browse("red.member").send(page, do="pause", task=task.id).status_code == 409


class TestWhoMay:
    @pytest.mark.parametrize("who", ["red.viewer", "red.other"])
    def test_user_without_the_right_sees_no_button_and_is_refused(
        self, browse, page, task, session, who
    ):
        looker = browse(who)
        shown = looker.look(page)
        assert shown.status_code == 200
        assert 'name="do"' not in shown.text
        for fields in ({"do": "cancel"}, {"do": "pause", "task": task.id}):
            assert looker.send(page, **fields).status_code == 403
        session.refresh(task)
        assert (task.cancel_asked_at, task.hold) == (None, "")

    @pytest.mark.parametrize("who", ["blue.member", "blue.tenant_admin"])
    def test_other_tenant_finds_nothing(self, browse, page, task, who):
        for fields in ({"do": "cancel"}, {"do": "pause", "task": task.id}):
            assert browse(who).send(page, **fields).status_code == 404

    def test_action_of_an_administrator_is_in_the_audit_log(self, browse, page, task, session):
        browse("red.tenant_admin").send(page, do="cancel")
        browse("root").send(page, do="pause", task=task.id)
        rows = session.scalars(select(AuditEvent).order_by(AuditEvent.id))
        found = [(row.user, row.operation, row.action, row.target_kind) for row in rows]
        assert ("red.tenant_admin", "cancelRequest", "asked", "request") in found
        assert ("root", "pauseTask", "asked", "task") in found


class TestMembersAndKeys:
    def test_a_member_is_added_and_given_a_key_that_is_shown_once(self, browse, app, world):
        admin = browse("red.tenant_admin")
        added = admin.send("/ui/members", name="ada")
        page = added.headers["location"]
        assert admin.told(page).startswith("ada added")
        made = admin.send(page, do="make", name="laptop", role="member", days="90")
        [key] = re.findall(r"rh_\w+", words_of(made, TOLD))
        assert (made.status_code, made.headers["cache-control"]) == (200, "no-store")
        assert key not in admin.look(page).text
        me = TestClient(app).get("/v1/me", headers={"Authorization": f"Bearer {key}"}).json()
        assert (me["user"], me["role"], me["scopes"]) == ("ada", "member", None)

    def test_a_service_account_with_scopes(self, browse, app, as_):
        admin = browse("red.tenant_admin")
        page = admin.send("/ui/members", name="bot", service="yes").headers["location"]
        scopes = ["usage:read", "work:read"]
        made = admin.send(page, do="make", name="ci", role="viewer", scopes=scopes)
        [key] = re.findall(r"rh_\w+", words_of(made, TOLD))
        me = TestClient(app).get("/v1/me", headers={"Authorization": f"Bearer {key}"}).json()
        assert me["scopes"] == scopes
        bots = as_("red.tenant_admin").get("/v1/users", params={"service": True}).json()["items"]
        assert [bot["name"] for bot in bots] == ["bot"]

    def test_rotating_leaves_the_old_key_for_a_while_and_revoking_does_not(
        self, browse, app, world, as_
    ):
        admin, page = browse("red.tenant_admin"), "/ui/members/usr_red.member"
        old = world.keys["red.member"]
        id = auth.id_of(old)
        made = admin.send(page, do="rotate", key=id, overlap_s="3600")
        [new] = re.findall(r"rh_\w+", words_of(made, TOLD))
        for key in (old, new):
            opened = TestClient(app).get("/v1/me", headers={"Authorization": f"Bearer {key}"})
            assert opened.status_code == 200
        assert f"replaced by {auth.id_of(new)}" in admin.look(page).text
        assert admin.send(page, do="rotate", key=id).status_code == 409
        assert admin.send(page, do="revoke", key=id).status_code == 303
        assert "revoked" in admin.told(page)
        assert as_("red.member").get("/v1/me").status_code == 401

    def test_invalid_input_is_refused(self, browse):
        admin, page = browse("red.tenant_admin"), "/ui/members/usr_red.member"
        bad = (
            {"do": "make", "name": "", "role": "member"},
            {"do": "make", "name": "x", "role": "emperor"},
            {"do": "make", "name": "x", "role": "member", "scopes": ["everything"]},
            {"do": "make", "name": "x", "role": "member", "days": "1e9"},
            {"do": "make", "name": "x\0", "role": "member"},
            {"do": "rotate", "key": "x", "overlap_s": "-1"},
            {"do": "rotate", "key": "\0", "overlap_s": "1"},
            {"do": "explode"},
        )
        for fields in bad:
            answer = admin.send(page, **fields)
            assert answer.status_code == 422, fields
            assert "text/html" in answer.headers["content-type"]
        answer = admin.send(page, do="make", name="x", role="platform_admin")
        assert answer.status_code == 403
        assert admin.send(page, do="revoke", key="nobody").status_code == 404
        assert admin.send("/ui/members", name="red.member").status_code == 409
        for address in (
            "/ui/members?cursor=x",
            "/ui/audit?since=x",
            "/ui/audit?until=9999-12-31",
            "/ui/audit?target_id=%00",
        ):
            assert admin.look(address).status_code == 422, address


class TestWebhooks:
    def test_webhook_is_registered_tested_and_deleted(self, browse, as_):
        admin = browse("red.tenant_admin")
        made = admin.send(
            "/ui/webhooks", url="https://hooks.example.org/a", events=["request.done"]
        )
        assert "whsec_" in words_of(made, TOLD)
        assert "whsec_" not in admin.look("/ui/webhooks").text
        [hook] = as_("red.tenant_admin").get("/v1/webhooks").json()["items"]
        page = f"/ui/webhooks/{hook['id']}"
        assert admin.send(page, do="test").status_code == 303
        shown = admin.look(page).text
        assert "webhook.test" in shown
        assert "none yet" in shown
        rotated = admin.send(page, do="rotate", overlap_s="3600")
        assert "whsec_" in words_of(rotated, TOLD)
        deleted = admin.send(page, do="delete")
        assert deleted.headers["location"] == "/ui/webhooks"
        assert "are deleted" in admin.told("/ui/webhooks")
        assert admin.look(page).status_code == 404

    def test_abandoned_message_is_shown_with_its_attempts_and_sent_again(
        self, browse, as_, session
    ):
        admin, api = browse("red.tenant_admin"), as_("red.tenant_admin")
        hook = api.post("/v1/webhooks", json={"url": "https://hooks.example.org/a"}).json()
        sent = api.post(f"/v1/webhooks/{hook['id']}/test").json()["id"]
        tried = {"at": "2026-11-21T12:00:00+00:00", "status": 503, "error": "", "took_us": 41_000}
        session.execute(update(Delivery).values(state="given_up", attempts=[tried], attempt=1))
        page = f"/ui/webhooks/{hook['id']}"
        assert "21 Nov 12:00:00 UTC: 503" in admin.look(page).text
        assert admin.send(page, do="send", delivery=sent).status_code == 303
        assert api.get(f"/v1/deliveries/{sent}").json()["state"] == "pending"
        assert "Nothing is given up." in admin.look(f"{page}?state=given_up").text

    def test_internal_address_is_refused(self, browse):
        answer = browse("red.tenant_admin").send(
            "/ui/webhooks", url="http://127.0.0.1/", events=["request.done"]
        )
        assert answer.status_code == 422
        assert "Back to the page" in answer.text


class TestChannels:
    ADDRESS = "https://hooks.example.org/services/T0/S3CR3T"

    def add(self, admin: Browser, **more: str) -> Any:
        given = {"name": "ml-alerts", "kind": "slack", "address": self.ADDRESS, **more}
        return admin.send("/ui/channels", do="add", **given)

    def test_channel_is_added_tested_and_removed_and_its_address_never_shown(
        self, browse, as_, session
    ):
        admin, api = browse("red.tenant_admin"), as_("red.tenant_admin")
        assert self.add(admin).status_code == 303
        assert "ml-alerts is added" in admin.told("/ui/channels")
        [channel] = api.get("/v1/channels").json()["items"]
        assert "none yet" in admin.look("/ui/channels").text
        admin.send("/ui/channels", do="test", channel=channel["id"])
        assert "on its way" in admin.told("/ui/channels")
        tried = {"at": "2026-11-21T12:00:00+00:00", "status": 503, "error": "", "took_us": 41_000}
        session.execute(update(Delivery).values(state="given_up", attempts=[tried], attempt=1))
        admin.send("/ui/channels", do="test", channel=channel["id"])
        shown = admin.look("/ui/channels").text
        assert "pending" in shown, "the newest message counts"
        assert "given up" not in shown
        session.execute(update(Delivery).values(state="given_up", attempts=[tried], attempt=1))
        shown = admin.look("/ui/channels").text
        assert "given up" in shown
        assert "answered 503" in shown
        assert "S3CR3T" not in shown
        admin.send("/ui/channels", do="remove", channel=channel["id"])
        assert "No channel yet." in admin.look("/ui/channels").text
        assert api.get("/v1/channels").json()["items"] == []
        actions = [row.operation for row in session.scalars(select(AuditEvent))]
        assert {"createChannel", "testChannel", "deleteChannel"} <= set(actions)
        told = [f"{row.before}{row.after}" for row in session.scalars(select(AuditEvent))]
        assert not [words for words in told if "S3CR3T" in words]

    def test_only_a_webhook_shows_its_signing_secret_and_once(self, browse):
        admin = browse("red.tenant_admin")
        made = self.add(admin, kind="webhook")
        assert "whsec_" in words_of(made, TOLD)
        for answer in (admin.look("/ui/channels"), self.add(admin, name="chat")):
            assert "whsec_" not in answer.text

    @pytest.mark.parametrize(
        ("bad", "named"),
        [
            ({"address": "http://127.0.0.1/"}, "public address"),
            ({"kind": "mail", "address": "a@b.org"}, "sends no mail"),
            ({"name": "No Name"}, "name"),
        ],
    )
    def test_bad_field_is_refused_with_its_name(self, browse, bad, named):
        answer = self.add(browse("red.tenant_admin"), **bad)
        assert answer.status_code == 422
        assert named in answer.text

    def test_channel_of_another_tenant_is_not_found(self, browse, as_):
        self.add(browse("red.tenant_admin"), name="of-red")
        [channel] = as_("red.tenant_admin").get("/v1/channels").json()["items"]
        stranger = browse("blue.tenant_admin")
        assert "of-red" not in stranger.look("/ui/channels").text
        for do in ("test", "remove"):
            given = {"do": do, "channel": channel["id"]}
            assert stranger.send("/ui/channels", **given).status_code == 404
        assert "of-red" in browse("root").look("/ui/channels").text


class TestReservations:
    @pytest.fixture
    def soon(self, session):
        session.execute(update(Device).values(seen_at=func.now()))
        session.commit()
        begins = datetime.now(UTC) + timedelta(days=1)
        written = (at.strftime("%Y-%m-%dT%H:%M") for at in (begins, begins + timedelta(hours=8)))
        return dict(zip(("begins", "ends"), written, strict=True))

    def test_reservation_is_added_shown_to_its_tenant_only_and_removed(self, browse, as_, soon):
        root = browse("root")
        given = {"name": "workshop", "tenant_id": "ten_red", "number": "2", "kind": "cpu", **soon}
        assert root.send("/ui/reservations", do="reserve", **given).status_code == 303
        assert "workshop is added" in root.told("/ui/reservations")
        shown = browse("red.member").look("/ui/reservations").text
        assert "workshop" in shown
        assert "Remove" not in shown
        assert "Change" not in shown
        of_others = browse("blue.member").look("/ui/reservations").text
        assert "workshop" not in of_others
        assert "<strong>2</strong> of 2" in of_others, "what is taken is seen, not by whom"
        [made] = as_("root").get("/v1/reservations").json()["items"]
        root.send("/ui/reservations", do="remove", reservation=made["id"])
        assert "Nothing is reserved" in root.look("/ui/reservations").text

    def test_reservation_is_changed_and_keeps_what_is_not_given(self, browse, as_, soon):
        root = browse("root")
        given = {"name": "workshop", "tenant_id": "ten_red", "number": "1", "kind": "cpu", **soon}
        root.send("/ui/reservations", do="reserve", rule="FREQ=DAILY;COUNT=2", **given)
        [made] = as_("root").get("/v1/reservations").json()["items"]
        kept = {"timezone": made["timezone"], "rule": made["rule"]}
        changes = {"reservation": made["id"], "devices": "cpu=2", "note": "for guests", **kept}
        assert root.send("/ui/reservations", do="change", **changes).status_code == 303
        assert "workshop is changed" in root.told("/ui/reservations")
        [changed] = as_("root").get("/v1/reservations").json()["items"]
        assert changed["windows"] == made["windows"]
        assert (changed["devices"], changed["note"]) == ({"cpu": 2}, "for guests")
        answer = root.send("/ui/reservations", do="change", **{**changes, "devices": "cpu=9"})
        assert (answer.status_code, "can be reserved" in answer.text) == (409, True)

    def test_certain_devices_are_reserved_and_changed_to_a_number(self, browse, as_, soon):
        root = browse("root")
        given = {"name": "pair", "tenant_id": "ten_red", "device_ids": "h.0, h.1", **soon}
        assert root.send("/ui/reservations", do="reserve", kind="cpu", **given).status_code == 303
        assert "2 cpu: h.0, h.1" in browse("red.member").look("/ui/reservations").text
        [made] = as_("root").get("/v1/reservations").json()["items"]
        shown = {"reservation": made["id"], "timezone": "UTC"}
        named = {**shown, "device_ids": "h.0, h.1", "labels": "fast"}
        answer = root.send("/ui/reservations", do="change", **named)
        assert (answer.status_code, "device_ids" in answer.text) == (422, True)
        root.send("/ui/reservations", do="change", devices="cpu=2", **shown)
        [changed] = as_("root").get("/v1/reservations").json()["items"]
        assert (changed["devices"], changed["device_ids"]) == ({"cpu": 2}, [])
        answer = root.send("/ui/reservations", do="change", labels="fast", **shown)
        assert (answer.status_code, "with label fast only 0" in answer.text) == (409, True)

    def test_maintenance_is_planned_and_everybody_sees_it(self, browse, soon):
        root = browse("root")
        given = {"name": "disks", "device_ids": "h.0, h.1", "note": "new disks", **soon}
        assert root.send("/ui/reservations", do="maintain", **given).status_code == 303
        assert "maintenance of h.0, h.1" in browse("blue.viewer").look("/ui/reservations").text

    @pytest.mark.parametrize(
        ("bad", "status", "named"),
        [
            ({"number": "many"}, 422, "number of devices"),
            ({"number": "9"}, 409, "can be reserved"),
            ({"begins": "soon"}, 422, "a time such as"),
            ({"timezone": "Mars"}, 422, "time zone"),
            ({"rule": "FREQ=NEVER"}, 422, "FREQ must be"),
        ],
    )
    def test_bad_field_is_refused_with_its_reason(self, browse, soon, bad, status, named):
        given = {"name": "workshop", "tenant_id": "ten_red", "number": "1", "kind": "cpu", **soon}
        answer = browse("root").send("/ui/reservations", do="reserve", **{**given, **bad})
        assert answer.status_code == status
        assert named in answer.text

    @pytest.mark.parametrize("who", ["red.tenant_admin", "red.member"])
    def test_only_platform_admins_reserve(self, browse, who, soon):
        answer = browse(who).send("/ui/reservations", do="reserve", name="mine", **soon)
        assert answer.status_code == 403


class TestAuditLog:
    def test_audit_log_shows_what_forms_did_and_is_filtered(self, browse, world):
        admin = browse("red.tenant_admin")
        admin.send("/ui/members", name="ada")
        admin.send("/ui/webhooks", url="https://hooks.example.org/a", events=["request.done"])
        shown = admin.look("/ui/audit").text
        assert "createUser" in shown
        assert "createWebhook" in shown
        narrowed = admin.look("/ui/audit?target_kind=user").text
        assert "createUser" in narrowed
        assert "createWebhook" not in narrowed
        for empty in ("action=read", "operation=nothing", "until=2020-01-01", "target_id=x"):
            assert "No entry matches." in admin.look(f"/ui/audit?{empty}").text

    def test_older_records_are_behind_a_link(self, browse, as_):
        api, admin = as_("red.tenant_admin"), browse("red.tenant_admin")
        for n in range(52):
            assert api.post("/v1/users", json={"name": f"u{n}"}).status_code == 201
        first = admin.look("/ui/audit?action=made").text
        [link] = re.findall(r'<a href="([^"]*cursor=[^"]*)">More', first)
        second = admin.look(f"/ui/audit{html.unescape(link)}").text
        ids = [re.findall(r'<tr id="(audit-\d+)"', page) for page in (first, second)]
        assert len(ids[0]) == 50
        assert len(ids[1]) >= 2
        assert not set(ids[0]) & set(ids[1])


ADMINS_PAGES = (
    "/ui/members",
    "/ui/members/usr_red.member",
    "/ui/channels",
    "/ui/webhooks",
    "/ui/audit",
)


class TestWhoAdministers:
    @pytest.mark.parametrize("who", ["red.member", "red.viewer"])
    def test_members_without_the_right_see_no_link_and_are_refused(self, browse, who):
        other = browse(who)
        home = other.look("/ui/").text
        for page in ADMINS_PAGES:
            assert f'href="{page}"' not in home
            answer = other.look(page)
            assert answer.status_code == 403
            assert "text/html" in answer.headers["content-type"]
            if page != "/ui/audit":
                assert other.send(page, do="make", name="x", role="member").status_code == 403

    def test_members_of_another_tenant_are_not_found(self, browse, as_):
        hook = as_("red.tenant_admin").post(
            "/v1/webhooks", json={"url": "https://hooks.example.org/a"}
        )
        stranger = browse("blue.tenant_admin")
        for page in ("/ui/members/usr_red.member", f"/ui/webhooks/{hook.json()['id']}"):
            assert stranger.look(page).status_code == 404
            for do in ("make", "rotate", "delete"):
                assert stranger.send(page, do=do, name="x", role="member").status_code in (404, 422)
        for page in ADMINS_PAGES:
            shown = stranger.look(page).text.replace("usr_red.member", "")
            assert not re.search(r"\bred\b", shown), page

    def test_a_platform_admin_sees_all_and_chooses_a_tenant(self, browse, as_):
        root = browse("root")
        for name in ("red.member", "blue.member", 'value="ten_blue"'):
            assert name in root.look("/ui/members").text
        added = root.send("/ui/members", name="eve", tenant_id="ten_blue")
        assert "blue" in root.look(added.headers["location"]).text


class TestOperating:
    def test_a_platform_admin_drains_a_host_and_a_device(self, browse, as_):
        root, page, api = browse("root"), "/ui/devices", as_("root")
        for do, of, words in (("cordon", "h.1", "takes no new work"), ("drain", "h", "is drained")):
            assert root.send(page, do=do, of=of).status_code == 303
            assert words in root.told(page)
        assert api.get("/v1/devices/h.1").json()["cordoned"]
        for do, of in (("uncordon", "h.1"), ("open", "h")):
            assert root.send(page, do=do, of=of).status_code == 303
        assert not api.get("/v1/devices/h.1").json()["cordoned"]
        log = api.get("/v1/audit-events").json()["items"]
        operations = [one["operation"] for one in log if one["user"] == "root"]
        assert operations[:4] == ["uncordonHost", "uncordonDevice", "drainHost", "cordonDevice"]

    def test_device_that_failed_is_shown_with_its_reason(self, browse, session):
        device = session.get_one(Device, "h.1")
        device.lease_until, device.facts = None, {"failed": "the GPU fell off the bus."}
        session.commit()
        page = browse("root").look("/ui/devices").text
        row = page[page.index('id="device-h.1"') :].partition("</tr>")[0]
        assert '<span class="chip failed">failed</span>' in row
        assert "the GPU fell off the bus." in row

    def test_the_health_of_a_device_is_shown_and_it_is_checked_before_it_serves(
        self, browse, session
    ):
        root, page = browse("root"), "/ui/devices"
        reading = {"temperature_c": 61, "power_w": 312.4, "utilisation_percent": 80}
        session.get_one(Device, "h.0").health = {"checked": 0, "reading": reading}
        device = session.get_one(Device, "h.1")
        device.facts = {"model": "NVIDIA H100", "compute_capability": "9.0", "labels": ["spot"]}
        why = {"rule": "xid", "reason": "Xid 48 (double-bit ECC error).", "effect": "move"}
        device.health, device.cordoned = {"checked": 0}, True
        device.fitness = {"cordon": {**why, "at_s": time.time(), "returns": False}}
        session.flush()
        shown = root.look(page).text
        model = 'NVIDIA H100, compute capability 9.0</span><br><span class="quiet">spot'
        for told in ("80 % 61 °C 312 W", "Xid 48 (double-bit ECC error).", model):
            assert told in " ".join(shown.split())
        assert root.send(page, do="uncordon", of="h.1").status_code == 303
        shown = root.look(page).text
        assert "is being checked" in shown
        assert "root lets it serve; it is checked first." in shown
        assert 'id="history-h.1"' in shown

    def test_unknown_device_is_not_found(self, browse):
        for fields, status in (({"do": "cordon", "of": "x"}, 404), ({"do": "x", "of": "h.1"}, 422)):
            assert browse("root").send("/ui/devices", **fields).status_code == status

    @pytest.mark.parametrize("who", ["red.tenant_admin", "red.member"])
    def test_other_users_cannot_drain(self, browse, as_, who):
        other = browse(who)
        assert 'href="/ui/devices"' not in other.look("/ui/").text
        assert other.look("/ui/devices").status_code == 403
        assert other.send("/ui/devices", do="cordon", of="h.1").status_code == 403
        assert not as_("root").get("/v1/devices/h.1").json()["cordoned"]

    def test_decisions_are_shown_to_those_who_see_the_task(self, browse, session, task):
        session.add(Cycle(id=1, island="isle", now_s=0.0, snapshot={}))
        session.flush()
        what = {"move": "launch", "rule": "F3", "because": "because it was next"}
        session.add(Decision(cycle_id=1, tenant_id="ten_red", task_id=task.id, **what))
        session.flush()
        assert "because it was next" in browse("red.viewer").look("/ui/decisions").text
        assert "because it was next" in browse("root").look("/ui/decisions").text
        shown = browse("blue.tenant_admin").look("/ui/decisions").text
        assert "No decisions yet." in shown


# --- secrets ------------------------------------------------------------------------------------

VALUE = "hf_correct-horse"


def test_secret_is_set_listed_and_removed_on_its_page(browse, session):
    browser = browse("red.member")
    answer = browser.send("/ui/secrets", do="set", name=" HF_TOKEN ", value=VALUE)
    assert answer.status_code == 303, answer.text
    assert browser.told("/ui/secrets").startswith("HF_TOKEN is set.")
    page = browser.look("/ui/secrets").text
    assert "<code>HF_TOKEN</code>" in page
    assert "your tasks" in page
    assert VALUE not in page + answer.text + str(answer.headers)
    row = session.scalars(select(Secret)).one()
    assert (row.tenant_id, row.user_id) == ("ten_red", "usr_red.member")
    assert browser.send("/ui/secrets", do="remove", name="HF_TOKEN").status_code == 303
    assert "<code>HF_TOKEN</code>" not in browser.look("/ui/secrets").text
    operations = session.scalars(select(AuditEvent.operation).order_by(AuditEvent.id)).all()
    assert operations[-2:] == ["setSecret", "removeSecret"]


def test_secret_of_a_tenant_is_set_by_its_administrator_only(browse, session):
    wide = {"do": "set", "name": "WIDE", "value": VALUE, "whose": "tenant"}
    assert browse("red.member").send("/ui/secrets", **wide).status_code == 403
    assert browse("red.tenant_admin").send("/ui/secrets", **wide).status_code == 303
    member = browse("red.member").look("/ui/secrets").text
    assert "all users of red" in member
    assert "Remove WIDE" not in member
    assert "Remove WIDE" in browse("red.tenant_admin").look("/ui/secrets").text
    assert "WIDE" not in browse("blue.tenant_admin").look("/ui/secrets").text


def test_viewer_sees_names_and_sets_nothing(browse, session):
    browse("red.tenant_admin").send(
        "/ui/secrets", do="set", name="WIDE", value=VALUE, whose="tenant"
    )
    viewer = browse("red.viewer")
    page = viewer.look("/ui/secrets").text
    assert "<code>WIDE</code>" in page
    assert "Set a secret" not in page
    answer = viewer.send("/ui/secrets", do="set", name="MINE", value=VALUE)
    assert answer.status_code == 403
    assert VALUE not in answer.text


def test_refused_secret_is_told_without_its_value(browse, session):
    for fields in ({"name": "HF_TOKEN", "value": "q7$zz"}, {"name": "PATH", "value": VALUE}):
        answer = browse("red.member").send("/ui/secrets", do="set", **fields)
        assert answer.status_code == 422
        assert fields["value"] not in html.unescape(answer.text)
    assert session.scalars(select(Secret)).all() == []
