"""Submitting a request once more, from its page, without a browser."""

from __future__ import annotations

import html
import json
import re

import pytest

from tests.app.conftest import descriptor

TASK = {"name": "train", "params": {"steps": 5}, "run": {"job": "train:Train"}}


@pytest.fixture
def made(red):
    body = descriptor(name="first", labels={"sort": "trial"}, tasks=[TASK])
    answer = red.post("/v1/requests", json=body)
    assert answer.status_code == 202, answer.text
    return answer.json()["id"], body


def descriptor_of(client, answer):
    assert answer.status_code == 303, answer.text
    id = answer.headers["location"].rpartition("/")[2]
    return client.get(f"/v1/requests/{id}/descriptor").json()["descriptor"]


def test_a_request_runs_again_as_it_was_submitted(browse, made, red):
    id, body = made
    assert (
        f'action="/ui/requests/{id}/again"' in browse("red.member").look(f"/ui/requests/{id}").text
    )
    answer = browse("red.member").send(f"/ui/requests/{id}/again")
    assert answer.headers["location"] != f"/ui/requests/{id}"
    assert descriptor_of(red, answer) == body


def test_a_request_runs_again_with_what_was_changed(browse, made, red):
    id, body = made
    shown = browse("red.member").look(f"/ui/requests/{id}/again").text
    text = html.unescape(re.search(r"<textarea[^>]*>(.*?)</textarea>", shown, re.DOTALL)[1])
    assert json.loads(text) == body
    changed = {**body, "tasks": [{**TASK, "params": {"steps": 7}}]}
    answer = browse("red.member").send(f"/ui/requests/{id}/again", descriptor=json.dumps(changed))
    assert descriptor_of(red, answer) == changed


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is not JSON"),
        ("[]", "must be an object"),
        ('{"name": "x", "name": "y"}', "duplicate key"),
        ("[" * 5000, "nested too deeply"),
        ('{"tasks": [], "nam": 1}', "nam"),
    ],
)
def test_a_wrong_descriptor_is_refused_with_its_fault(browse, made, text, told):
    answer = browse("red.member").send(f"/ui/requests/{made[0]}/again", descriptor=text)
    assert 400 <= answer.status_code < 500, answer.text
    page = html.unescape(answer.text)
    assert told in page, page[page.index("<main") :][:2000]


@pytest.mark.parametrize(
    ("text", "place"),
    [("{", True), ('{"name": "x", "name": "y"}', False), ('{"name": NaN}', False)],
)
def test_a_place_is_told_only_where_it_is_known(browse, made, text, place):
    answer = browse("red.member").send(f"/ui/requests/{made[0]}/again", descriptor=text)
    assert ("line 1 column" in answer.text) == place


def test_an_emptied_descriptor_is_not_sent(browse, made):
    page = browse("red.member").look(f"/ui/requests/{made[0]}/again").text
    assert re.search(r'<textarea name="descriptor"[^>]* required>', page)


def test_only_those_who_may_submit_can_run_a_request_again(browse, made):
    viewer, page = browse("red.viewer"), f"/ui/requests/{made[0]}/again"
    assert "Run again" not in viewer.look(f"/ui/requests/{made[0]}").text
    assert "textarea" not in viewer.look(page).text
    assert viewer.send(page).status_code == 403


def test_the_url_that_is_called_is_shown_only_to_its_user(as_, red):
    url = "https://hooks.example.com/T0/secret"
    body = descriptor(name="told", notify={"webhook": url}, tasks=[TASK])
    id = red.post("/v1/requests", json=body).json()["id"]
    assert red.get(f"/v1/requests/{id}/descriptor").json()["descriptor"] == body
    other = as_("red.tenant_admin").get(f"/v1/requests/{id}/descriptor").json()
    assert other["descriptor"] == {name: body[name] for name in body if name != "notify"}
