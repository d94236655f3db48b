"""What a page shows, as far as no browser is needed for it."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient
from jinja2 import UndefinedError
from sqlalchemy import func, select, update
from sqlalchemy.exc import OperationalError

from app.api.access import auth
from app.core.fairness.budget import HOUR_US, Budget
from app.db.models import Checkpoint, Device, Task, Tenant
from app.db.transactions import transaction
from app.pages import views
from app.scheduling import budgets, ledger
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


AS_A_BROWSER = {"Accept": "text/html,application/xhtml+xml"}


@pytest.fixture
def browser(app, world):
    with transaction() as its:
        _, cookie = auth.sign_in(its, world.keys["red.member"])
    return TestClient(app, cookies={auth.COOKIE: cookie}, raise_server_exceptions=False)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ValueError("year 60020 is out of range"), 500, "Internal error. Try again"),
        (OperationalError("select 1", {}, Exception()), 503, "The database does not answer. Try"),
    ],
)
def test_browser_is_shown_a_page_for_an_error_of_the_service(
    browser, monkeypatch, error, status, said
):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(views.reports, "queue", fail)
    for path in ("/ui/", "/ui/queue"):
        shown = browser.get(path, headers=AS_A_BROWSER)
        assert (shown.status_code, shown.headers["content-type"]) == (
            status,
            "text/html; charset=utf-8",
        )
        assert said in shown.text
        assert shown.headers["x-request-id"] in shown.text
        assert "60020" not in shown.text
    told = browser.get("/v1/queue", headers=AS_A_BROWSER)
    assert told.headers["content-type"] == "application/problem+json"


def test_browser_without_a_session_is_shown_a_page_too(app, monkeypatch):
    def fail(*_, **__):
        raise OperationalError("select 1", {}, Exception())

    monkeypatch.setattr(views, "caller_of_cookie", fail)
    client = TestClient(app, cookies={auth.COOKIE: "x"}, raise_server_exceptions=False)
    shown = client.get("/ui/", headers=AS_A_BROWSER)
    assert (shown.status_code, shown.headers["retry-after"]) == (503, "2")
    assert "<h1>" in shown.text
    assert client.get("/ui/").headers["content-type"] == "application/problem+json"


def test_address_that_is_unknown_is_a_page_for_a_browser(browser):
    shown = browser.get("/ui/nowhere/at/all", headers=AS_A_BROWSER)
    assert (shown.status_code, "<h1>" in shown.text) == (404, True)


def test_overview_reads_all_its_figures_from_one_snapshot(browser, monkeypatch):
    asked = []
    monkeypatch.setattr(views.transactions, "see_one_snapshot", asked.append)
    assert browser.get("/ui/", headers=AS_A_BROWSER).status_code == 200
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("spent_hours", "said"),
    [
        (0, "lasts until the end of the period"),
        (9, "At the rate of the last day it is used on"),
        (11, "your tasks are paused until the next period"),
    ],
)
def test_overview_draws_what_is_left_of_a_budget(browser, session, spent_hours, said):
    grants_us = {"*": 10 * HOUR_US}
    budgets.set_budget(
        session,
        session.get_one(Tenant, "ten_red"),
        Budget(grants_us=grants_us, period=30, at={100: "pause"}),
    )
    if spent_hours:
        account = ("usr_red.member", "ten_red", "cpu")
        spent_us = spent_hours * HOUR_US
        ledger.note_sums(session, account, spent_us, spent_us, over_us=1)
        ledger.book(session)
        budgets.look(session)
    page = browser.get("/ui/", headers=AS_A_BROWSER).text
    assert said in page
    assert 'class="burn"' in page
    assert ("more than the" in page) == (spent_hours > 10)


def test_page_of_a_request_says_what_its_tasks_run_and_with_which_variables(
    app, red, world, session
):
    session.execute(update(Device).values(facts={"offers": ["env"]}))
    run = {"run": {"command": ["python", "train.py", "--name", "two words"]}}
    body = descriptor(tasks=[{"name": "train", **run, "env": {"EPOCHS": "3"}}])
    answer = red.post("/v1/requests", json=body)
    assert answer.is_success, answer.text
    made = answer.json()
    with transaction() as its:
        _, cookie = auth.sign_in(its, world.keys["red.member"])
        task = its.scalars(select(Task)).one()
        of_task = {"task_id": task.id, "tenant_id": task.tenant_id}
        sizes = {"sha256": "0" * 64, "size_bytes": 1, "took_us": 1, "pinned_at": func.now()}
        its.add(Checkpoint(id="ckp_" + "7" * 32, epoch=1, step=1, **of_task, **sizes))
        best = {"metric": "loss", "goal": "min", "keep": 1}
        task.descriptor = {**task.descriptor, "checkpoint": {"best": best}}
        ranked = {"best": True, "ranked_step": 2, "ranked_value": 0.03125, **of_task, **sizes}
        its.add(Checkpoint(id="ckp_" + "8" * 32, epoch=1, step=2, **ranked))
    page = TestClient(app, cookies={auth.COOKIE: cookie}).get(f"/ui/requests/{made['id']}").text
    assert "ckp_777" in page
    assert ", pinned</div>" in page
    assert ', best, pinned <span class="quiet">loss 0.03125</span></div>' in page
    assert "/safetensors" not in page, "a command's checkpoint has no tensors to download"
    assert "<code>python train.py --name &#39;two words&#39;</code>" in page
    assert "<code>EPOCHS</code></dt><dd><code>3</code>" in page


def test_lead_sees_the_quota_and_the_use_of_members_of_their_own_tenants_only(app, world):
    with transaction() as its:
        _, cookie = auth.sign_in(its, world.keys["red.tenant_admin"])
    page = TestClient(app, cookies={auth.COOKIE: cookie}).get("/ui/tenants")
    assert page.status_code == 200
    assert 'id="quota-ten_red"' in page.text
    assert "ten_blue" not in page.text
    assert "Use by member" in page.text


def test_template_with_a_wrong_name_is_an_error():
    """An empty place in a page would be found by nobody."""
    for text in ("{{ nothing }}", "{{ caller.nothing }}", "{% if caller.nothing %}x{% endif %}"):
        with pytest.raises(UndefinedError):
            views.templates.env.from_string(text).render(caller=object())


def test_page_of_a_request_draws_who_waits_for_whom(red, browser):
    def submit(name, *after):
        entries = [{"request": other, "on": "ended", "else": "hold"} for other in after]
        task = {"name": "t", "run": {"command": ["true"]}, "start": {"after_requests": entries}}
        return red.post("/v1/requests", json={"name": name, "tasks": [task]}).json()["id"]

    first = submit("first")
    assert "Who waits for whom" not in browser.get(f"/ui/requests/{first}").text
    second, third = submit("second", "first"), submit("third", "second")
    page = browser.get(f"/ui/requests/{second}").text
    assert "Who waits for whom" in page
    for other in (first, third):
        assert f'<a href="/ui/requests/{other}"><g class="box queued">' in page
    assert page.count('<path class="waits" d="M') == 3  # with the one of the key
    assert "first ended" in page
