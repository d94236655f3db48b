"""The page that compares runs, without a browser."""

from __future__ import annotations

import csv
import io

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select, update

from app.api.access import auth
from app.db.models import Metric, Task
from app.db.transactions import transaction
from tests.app.conftest import descriptor

RUN = {"run": {"job": "train:Train"}}


@pytest.fixture
def look(app, world):
    """Return the page of these runs as a user sees it."""

    def look(*ids, who="red.member", **more):
        with transaction() as its:
            _, cookie = auth.sign_in(its, world.keys[who])
        browser = TestClient(app, cookies={auth.COOKIE: cookie})
        return browser.get("/ui/compare", params={"run": ids, **more})

    return look


@pytest.fixture
def made(red, session):
    """Two requests of one task each, whose runs reported a loss."""
    ids = []
    for name, steps in (("one", 2), ("two", 4)):
        task = {"name": "train", "params": {"steps": steps}, **RUN}
        answer = red.post("/v1/requests", json=descriptor(name=name, tasks=[task]))
        assert answer.status_code == 202, answer.text
        ids.append(answer.json()["id"])
        mine = session.scalars(select(Task).where(Task.request_id == ids[-1])).one()
        session.add_all(
            Metric(task_id=mine.id, step=step, values={"loss": 1 / steps / step}) for step in (1, 2)
        )
        session.execute(
            update(Task).where(Task.id == mine.id).values(metrics={"loss": 0.5 / steps})
        )
    session.commit()
    return ids


def test_fields_that_differ_are_shown_with_the_metrics_of_each_run(look, made):
    page = look(*made).text
    assert "Comparison of 2 runs" in page
    assert "params.steps" in page
    assert "checkpoint.keep" not in page
    assert 'data-y="loss"' in page
    for words in ("one/train", "two/train", 'data-value="0.125"', 'data-value="0.5"'):
        assert words in page, words
    assert "checkpoint.keep" in look(*made, alike="yes").text


def test_lot_stands_for_its_members(look, red, session):
    tasks = [{"name": name, **RUN} for name in ("many", "first", "second")]
    made = red.post("/v1/requests", json=descriptor(tasks=tasks)).json()
    lot, *members = [task["id"] for task in made["tasks"]]
    for index, id in enumerate((lot, *members), start=-1):
        place = None if id == lot else index
        session.execute(update(Task).where(Task.id == id).values(lot_id=lot, lot_index=place))
    session.commit()
    for run in (lot, made["id"]):
        page = look(run, alike="yes").text
        assert "Comparison of 2 runs" in page
        assert page.index("/first<") < page.index("/second<")


def test_comparison_is_sent_as_csv(look, made):
    answer = look(*made, form="csv")
    assert answer.headers["content-disposition"] == 'attachment; filename="comparison.csv"'
    assert list(csv.reader(io.StringIO(answer.text))) == [
        ["field", "one/train", "two/train"],
        ["params.steps", "2", "4"],
        ["metrics.loss", "0.25", "0.125"],
    ]


def test_runs_of_others_and_too_few_or_too_many_are_refused(look, made):
    assert look(*made, who="blue.member").status_code == 404
    for ids in ((), made[:1], [made[0]] * 21):
        assert look(*ids).status_code == 422, ids
