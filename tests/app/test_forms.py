"""The forms of the pages, as any browser sends them: whose they are, what they do, what is told."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from app.api import auth
from app.db import transaction
from app.models import AuditEvent, Task
from app.pages import forms
from tests.app.conftest import descriptor

TOLD = '<div id="told" role="status">'
OURS = {"Sec-Fetch-Site": "same-origin"}


class Browser:
    """Signed in as somebody; without script unless a call says `hx`."""

    def __init__(self, client: TestClient, cookie: str) -> None:
        self.client, self.cookie = client, cookie

    def look(self, path: str) -> Any:
        return self.client.get(path)

    def send(self, path: str, *, hx: bool = False, headers: Any = OURS, **fields: Any) -> Any:
        given = {"token": forms.token(self.cookie), **fields}
        asked_by = {"HX-Request": "true"} if hx else {}
        return self.client.post(path, data=given, headers={**headers, **asked_by})

    def told(self, path: str) -> str:
        """What the next page tells above itself."""
        return words_of(self.look(path), TOLD)


def words_of(answer: Any, element: str) -> str:
    inner = answer.text.partition(element)[2].partition("</div>")[0]
    return " ".join(html.unescape(re.sub("<[^>]+>", " ", inner)).split())


@pytest.fixture
def browse(app: Any, world: Any, session: Session) -> Callable[[str], Browser]:
    def signed_in(who: str) -> Browser:
        with transaction() as its:
            _, cookie = auth.sign_in(its, world.keys[who])
        cookies = {auth.COOKIE: cookie}
        return Browser(TestClient(app, follow_redirects=False, cookies=cookies), cookie)

    return signed_in


@pytest.fixture
def page(submitted: dict[str, Any]) -> str:
    return f"/ui/requests/{submitted['id']}"


@pytest.fixture
def task(session: Session, submitted: dict[str, Any]) -> Task:
    found = session.get_one(Task, submitted["tasks"][0]["id"])
    return found


class TestWhoseFormItIs:
    def test_without_the_sessions_token_nothing_is_done(self, browse, page, task, session):
        member = browse("red.member")
        for token in ("", "0" * 64, forms.token("another session")):
            assert member.send(page, do="cancel", token=token).status_code == 403
        session.refresh(task)
        assert task.cancel_asked_at is None

    def test_a_page_of_another_site_sends_none(self, browse, page, task, session):
        elsewhere = {"Sec-Fetch-Site": "cross-site"}
        assert browse("red.member").send(page, do="cancel", headers=elsewhere).status_code == 403
        session.refresh(task)
        assert task.cancel_asked_at is None

    def test_who_is_not_signed_in_is_led_to_the_door(self, app, page):
        answer = TestClient(app, follow_redirects=False).post(page, data={"do": "cancel"})
        assert (answer.status_code, answer.headers["location"][:9]) == (303, "/ui/login")

    def test_the_token_on_the_page_is_the_sessions(self, browse, page):
        member = browse("red.member")
        tokens = set(re.findall(r'name="token" value="(\w+)"', member.look(page).text))
        assert tokens == {forms.token(member.cookie)}

    def test_nobody_else_puts_words_above_a_page(self, browse, page):
        member = browse("red.member")
        for sealed in ("", "x", "x.!", forms.sealed("another session", "Send us your key.")):
            member.client.cookies.set(forms.TOLD, sealed)
            assert member.told(page) == ""


class TestWishes:
    @pytest.mark.parametrize(
        ("do", "field", "value", "words"),
        [
            ("hold", "hold", "user", "is held"),
            ("cancel", "cancel_asked", True, "is to end"),
        ],
    )
    def test_of_a_request(self, browse, page, submitted, red, do, field, value, words):
        member = browse("red.member")
        answer = member.send(page, do=do)
        assert (answer.status_code, answer.headers["location"]) == (303, page)
        assert words in member.told(page)
        assert member.told(page) == ""  # once
        [told] = red.get(f"/v1/requests/{submitted['id']}").json()["tasks"]
        assert told[field] == value

    def test_of_a_task(self, browse, page, task, session):
        member = browse("red.member")
        for do, hold in (("pause", "user"), ("resume", "")):
            member.send(page, do=do, task=task.id)
            session.refresh(task)
            assert task.hold == hold
        assert "train may go on" in member.told(page)

    def test_with_htmx_the_answer_is_the_page_with_the_words(self, browse, page, task):
        answer = browse("red.member").send(page, hx=True, do="pause", task=task.id)
        assert answer.status_code == 200
        assert "<html" not in answer.text
        said = words_of(answer, '<div id="told" hx-swap-oob="innerHTML">')
        assert said.startswith("train is to pause at its next safe point")
        assert 'value="resume"' in answer.text

    def test_a_refusal_is_a_page_and_with_htmx_words_above_it(self, browse, page, task, session):
        session.execute(update(Task).values(hold="admin"))
        member = browse("red.member")
        answer = member.send(page, do="resume", task=task.id)
        assert answer.status_code == 403
        assert "An administrator of the platform holds it" in answer.text
        assert f'href="{page}"' in answer.text
        answer = member.send(page, hx=True, do="resume", task=task.id)
        assert (answer.status_code, answer.headers["hx-retarget"]) == (403, "#told")
        assert "<main" not in answer.text

    def test_the_width_of_a_gang(self, browse, red, session):
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
            assert "/devices_max" in answer.text or "2 ranks take" in answer.text

    @pytest.mark.parametrize("do", ["", "explode", "pause"])
    def test_an_unknown_wish_of_a_request(self, browse, page, do):
        assert browse("red.member").send(page, do=do).status_code == 422

    def test_a_task_of_another_request_is_not_found(self, browse, page, red):
        other = red.post("/v1/requests", json=descriptor()).json()["tasks"][0]["id"]
        assert browse("red.member").send(page, do="cancel", task=other).status_code == 404

    def test_what_has_ended(self, browse, page, task, session):
        session.execute(update(Task).values(state="done"))
        answer = browse("red.member").send(page, do="cancel", task=task.id)
        assert answer.status_code == 303
        assert '<button name="do"' not in browse("red.member").look(page).text
        assert browse("red.member").send(page, do="pause", task=task.id).status_code == 409


class TestWhoMay:
    @pytest.mark.parametrize("who", ["red.viewer", "red.other"])
    def test_who_may_not_act_sees_no_button_and_is_refused(self, browse, page, task, session, who):
        looker = browse(who)
        shown = looker.look(page)
        assert shown.status_code == 200
        assert 'name="do"' not in shown.text
        for fields in ({"do": "cancel"}, {"do": "pause", "task": task.id}):
            assert looker.send(page, **fields).status_code == 403
        session.refresh(task)
        assert (task.cancel_asked_at, task.hold) == (None, "")

    @pytest.mark.parametrize("who", ["blue.member", "blue.tenant_admin"])
    def test_a_stranger_finds_nothing(self, browse, page, task, who):
        for fields in ({"do": "cancel"}, {"do": "pause", "task": task.id}):
            assert browse(who).send(page, **fields).status_code == 404

    def test_what_an_administrator_asks_is_in_the_audit_log(self, browse, page, task, session):
        browse("red.tenant_admin").send(page, do="cancel")
        browse("root").send(page, do="pause", task=task.id)
        rows = session.scalars(select(AuditEvent).order_by(AuditEvent.id))
        found = [(row.user, row.operation, row.action, row.target_kind) for row in rows]
        assert ("red.tenant_admin", "cancelRequest", "asked", "request") in found
        assert ("root", "pauseTask", "asked", "task") in found
