"""What a page shows, as far as no browser is needed for it."""

from __future__ import annotations

from fastapi.testclient import TestClient

from app.api.access import auth
from app.db.transactions import transaction
from app.pages import views
from tests.app.conftest import descriptor


def test_page_of_a_request_with_many_tasks_says_how_many_are_left_out(app, red, world, monkeypatch):
    monkeypatch.setattr(views, "TASKS_SHOWN", 2)
    run = {"run": {"job": "train:Train"}}
    tasks = [{"name": f"train-{n}", **run} for n in range(5)]
    made = red.post("/v1/requests", json=descriptor(tasks=tasks)).json()
    with transaction() as its:
        _, cookie = auth.sign_in(its, world.keys["red.member"])
    page = TestClient(app, cookies={auth.COOKIE: cookie}).get(f"/ui/requests/{made['id']}").text
    assert "and 3 more" in page
    assert f'href="/v1/tasks?request_id={made["id"]}"' in page
    assert ">train-1 <" in page
    assert ">train-2 <" not in page
