"""Every list, read an item at a time, gives what it gives at once.

Events are in test_streams.py, since those of an open transaction are not told; what comes from
`app.insight.reports` is in test_shares.py.
"""

from __future__ import annotations

import pytest
from sqlalchemy import update

from app.db.models import Bundle, Checkpoint, Host, Island, LogLine, Metric, Placement, Task
from tests.app.conftest import descriptor, problem

LISTS = (
    "/v1/requests",
    "/v1/requests?state=queued",
    "/v1/requests/{req}/logs",
    "/v1/tasks",
    "/v1/tasks/{tsk}/metrics",
    "/v1/tasks/{tsk}/checkpoints",
    "/v1/tasks/{tsk}/placements",
    "/v1/bundles",
    "/v1/tenants",
    "/v1/users",
    "/v1/keys",
    "/v1/islands",
    "/v1/hosts",
    "/v1/devices",
)


@pytest.fixture
def path(red, session):
    """Fills every list with at least two items; then the address of one."""
    made = [red.post("/v1/requests", json=descriptor()).json() for _ in range(3)][-1]
    red.patch(f"/v1/requests/{made['id']}", json={"priority": 7})  # a second event
    task = made["tasks"][0]["id"]
    session.add_all(
        [Island(name="isle2"), Bundle(tenant_id="ten_red", sha256="0" * 64, size_bytes=1)]
    )
    session.flush()
    session.add(Host(name="h2", island="isle2"))
    for n in (2, 10, 100):  # as texts they would come in another order
        session.add_all(
            [
                Metric(task_id=task, step=n, values={}),
                LogLine(task_id=task, epoch=1, line=n, stream="stdout", text=str(n)),
                Checkpoint(
                    id=f"ckp_{n:03}", task_id=task, tenant_id="ten_red", epoch=1, step=n,
                    sha256="0" * 64, size_bytes=1, took_us=1,
                ),
                Placement(
                    task_id=task, epoch=n, device_id="h.0", tenant_id="ten_red",
                    user_id="usr_red.member", kind="cpu", cost_milli=1000, incarnation="i",
                    ended_at=made["submitted_at"],
                ),
            ]
        )  # fmt: skip
    session.execute(update(Task).values(state="waiting"))
    session.commit()
    return lambda template: template.format(req=made["id"], tsk=task)


def walked(client, url):
    items = []
    while url:
        answer = client.get(url)
        assert answer.status_code == 200, answer.text
        items += answer.json()["items"]
        assert ("next" in answer.links) == (answer.json()["next_cursor"] is not None)
        url = answer.links.get("next", {}).get("url")
    return items


@pytest.mark.parametrize("template", LISTS)
def test_reading_a_list_one_by_one_gives_the_same_as_at_once(template, path, as_):
    url = path(template)
    client = as_("red.tenant_admin" if "bundles" in url else "root")
    at_once = client.get(url).json()["items"]
    assert len(at_once) >= 2
    assert walked(client, f"{url}{'&' if '?' in url else '?'}limit=1") == at_once


def test_numbers_are_ordered_as_numbers(path, as_):
    root = as_("root")
    steps = [item["step"] for item in walked(root, path("/v1/tasks/{tsk}/metrics?limit=2"))]
    assert steps == [2, 10, 100]
    epochs = [item["epoch"] for item in walked(root, path("/v1/tasks/{tsk}/placements?limit=2"))]
    assert epochs == [100, 10, 2]


def test_a_cursor_of_another_list_is_refused(path, as_):
    root = as_("root")
    cursor = root.get("/v1/tenants?limit=1").json()["next_cursor"]
    for other in ("/v1/tasks/{tsk}/metrics", "/v1/requests", "/v1/tasks", "/v1/users", "/v1/queue"):
        answer = root.get(path(other), params={"cursor": cursor})
        problem(answer, 422, "validation-error", "?cursor")
