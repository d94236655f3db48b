"""The table of requests: what is found, which columns it has, how it is sorted."""

from __future__ import annotations

import html
import re

import pytest
from sqlalchemy import update

from app.db.models import Task
from app.insight import reports
from app.pages import request_list
from tests.app.conftest import descriptor

JOB = {"run": {"job": "train:Train"}}
PROGRAM = {"run": {"command": ["true"]}}  # it may have any parameters
MADE = (
    ("digits-a", "vision", 10, 0.5),
    ("digits-b", "vision", 9, None),
    ("words_1", "text", 100, 0.25),
)


@pytest.fixture
def made(red, session):
    ids = {}
    for name, team, steps, loss in MADE:
        task = {"name": "train", "params": {"steps": steps}, **JOB}
        body = descriptor(name=name, labels={"team": team}, tasks=[task])
        answer = red.post("/v1/requests", json=body)
        assert answer.status_code == 202, answer.text
        ids[name] = answer.json()["id"]
        if loss is not None:
            its = update(Task).where(Task.request_id == ids[name])
            session.execute(its.values(metrics={"loss": loss}, total_held_us=steps))
    session.commit()
    return ids


@pytest.fixture
def names(browse):
    """Return the names in the table, from the top."""

    def names(who="red.member", **asked):
        page = browse(who).client.get("/ui/requests", params=asked)
        assert page.status_code == 200, page.text
        return re.findall(r'data-label="Request"><div><a href="[^"]+">([^<]+)', page.text)

    return names


@pytest.mark.parametrize(
    ("q", "found"),
    [
        ("", ["words_1", "digits-b", "digits-a"]),
        ("DIGITS", ["digits-b", "digits-a"]),
        ("digits b", ["digits-b"]),
        ("team:vision", ["digits-b", "digits-a"]),
        ("team:vision user:red.member -a", ["digits-a"]),
        ("user:red.other", []),
        ("team:visio", []),
        ("s_1", ["words_1"]),
        ("s%1", []),
        ("a:b:c", []),
        (":x", ["words_1", "digits-b", "digits-a"]),
    ],
)
def test_requests_are_found_by_name_user_and_label(made, names, q, found):
    assert names(q=q) == found


@pytest.mark.parametrize(
    ("sort", "first"),
    [
        ("params.steps", ["digits-b", "digits-a", "words_1"]),
        ("-params.steps", ["words_1", "digits-a", "digits-b"]),
        ("metrics.loss", ["words_1", "digits-a", "digits-b"]),
        ("-metrics.loss", ["digits-a", "words_1", "digits-b"]),
        ("label.team", ["words_1", "digits-b", "digits-a"]),
        ("-device time", ["words_1", "digits-a", "digits-b"]),
        ("nothing", ["words_1", "digits-b", "digits-a"]),
    ],
)
def test_requests_are_sorted_by_a_column_and_those_without_it_come_last(made, names, sort, first):
    assert names(sort=sort) == first


def test_chosen_columns_are_shown_and_all_others_are_offered(browse, made):
    shown = {"show": ["metrics.loss", "label.team"], "q": "digits"}
    page = html.unescape(browse("red.member").client.get("/ui/requests", params=shown).text)
    assert 'data-label="loss"><div>0.5</div>' in page
    assert 'data-label="team"><div>vision</div>' in page
    assert re.search(r'value="params.steps" id="show-\d+" >', page)
    assert re.search(r'value="metrics.loss" id="show-\d+" checked>', page)
    kept = "show=metrics.loss&show=label.team&sort=metrics.loss"
    assert f"?q=digits&{kept}" in page


def test_words_of_others_find_nothing_of_theirs(made, names):
    assert names("blue.member", q="digits") == []


def test_too_many_columns_and_too_long_words_are_refused(browse, made):
    client = browse("red.member").client
    for wrong in ({"show": [f"params.{n}" for n in range(13)]}, {"q": "x" * 301}):
        answer = client.get("/ui/requests", params=wrong)
        assert answer.status_code == 422
        if "show" in wrong:
            assert "Choose 12 columns at most; 13 are chosen" in answer.text


def submit(client, **params):
    body = descriptor(name="wide", tasks=[{"name": "train", "params": params, **PROGRAM}])
    answer = client.post("/v1/requests", json=body)
    assert answer.status_code == 202, answer.text
    return answer.json()["id"]


def test_long_parameters_are_not_read_and_a_long_value_is_cut(browse, red, session):
    long, wide = submit(red, text="x" * 9000, steps=1), submit(red, text="y" * 1000, steps=2)
    values = reports.run_values(session, [long, wide])
    assert values[long] == {"command": "true"}
    assert values[wide] == {"params.text": "y" * 1000, "params.steps": 2, "command": "true"}
    page = browse("red.member").client.get("/ui/requests", params={"show": "params.text"}).text
    assert f"<div>{'y' * 199}…</div>" in page


def test_a_bounded_number_of_columns_is_offered(browse, red):
    submit(red, **{f"p{n}": n for n in range(request_list.OFFERED_MOST + 5)})
    shown = {"show": ["params.p99", "params.zz"]}  # the last one by name, and one of no request
    page = browse("red.member").client.get("/ui/requests", params=shown).text
    assert page.count('name="show"') == request_list.OFFERED_MOST + 2
    assert "5 more are not offered" in page


def test_numbers_come_before_texts_and_truth_is_a_text():
    values = {"a": {"x": "7"}, "b": {"x": 3}, "c": {}, "d": {"x": True}, "e": {"x": 2.5}}
    assert reports.in_order("abcde", values, "x") == ["e", "b", "a", "d", "c"]
    assert reports.in_order("abcde", values, "-x") == ["b", "e", "d", "a", "c"]
