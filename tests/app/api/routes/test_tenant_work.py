"""/v1/tenants/{id}/cancel, /hold and /release; who may is in test_roles.py."""

from __future__ import annotations

import pytest
from sqlalchemy import select, update

from app.db.models import Request, RequestEvent, Task, Tenant
from app.intake import tenant_work
from tests.app.conftest import descriptor, problem

URL = "/v1/tenants/ten_red"


@pytest.fixture
def three(red, submitted):
    """Ids of three requests of red, in their order."""
    more = [red.post("/v1/requests", json=descriptor()).json()["id"] for _ in range(2)]
    return [submitted["id"], *more]


@pytest.fixture
def root(as_):
    return as_("root")


def taken(client, action, url=URL):
    answer = client.post(f"{url}/{action}")
    assert answer.status_code == 202, answer.text
    return answer.json()["requests"], answer.json()["more"]


def holds(session, id):
    session.expire_all()
    return set(session.scalars(select(Task.hold).where(Task.request_id == id)))


def test_all_work_is_paused_resumed_and_cancelled(as_, three, session):
    admin = as_("red.tenant_admin")
    assert taken(admin, "hold") == (3, False)
    assert taken(admin, "hold") == (0, False)
    assert [holds(session, id) for id in three] == [{"user"}] * 3
    assert taken(admin, "release") == (3, False)
    assert taken(admin, "release") == (0, False)
    assert [holds(session, id) for id in three] == [{""}] * 3
    assert taken(admin, "cancel") == (3, False)
    assert taken(admin, "cancel") == (0, False)
    session.expire_all()
    assert all(session.scalars(select(Task.cancel_asked_at)))


def test_a_call_takes_a_bounded_number_of_requests(as_, three, monkeypatch, session):
    monkeypatch.setattr(tenant_work, "AT_ONCE", 2)
    for action in ("hold", "release", "cancel"):
        assert taken(as_("red.tenant_admin"), action) == (2, True)
        assert taken(as_("red.tenant_admin"), action) == (1, False)


def test_ended_requests_and_those_of_other_tenants_stay(as_, root, three, session):
    session.execute(update(Task).where(Task.request_id == three[0]).values(state="done"))
    session.execute(update(Request).where(Request.id == three[0]).values(state="done"))
    session.commit()
    assert taken(root, "hold", "/v1/tenants/ten_blue") == (0, False)
    assert taken(root, "hold") == (2, False)
    assert holds(session, three[0]) == {""}


def test_work_of_tenants_below_is_taken_too(root, three, session):
    session.add(Tenant(id="ten_rose", name="rose", parent_id="ten_red"))
    session.flush()
    for model, id in ((Request, Request.id), (Task, Task.request_id)):
        session.execute(update(model).where(id == three[2]).values(tenant_id="ten_rose"))
    session.commit()
    assert taken(root, "hold", "/v1/tenants/ten_rose") == (1, False)
    assert taken(root, "hold") == (2, False)
    assert taken(root, "release", "/v1/tenants/ten_root") == (3, False)


def test_only_a_platform_admin_resumes_what_one_paused(as_, root, red, three, session):
    admin = as_("red.tenant_admin")
    assert root.post(f"/v1/requests/{three[0]}/hold").is_success
    assert red.post(f"/v1/requests/{three[1]}/hold").is_success
    assert taken(admin, "hold") == (1, False)
    assert taken(admin, "release") == (2, False)
    assert holds(session, three[0]) == {"admin"}
    assert taken(root, "release") == (1, False)


def test_each_request_tells_who_asked_and_the_audit_log_has_it(as_, root, three, session):
    assert taken(as_("red.tenant_admin"), "hold") == (3, False)
    for id in three:
        told = select(RequestEvent.message).where(RequestEvent.request_id == id)
        assert "Paused by red.tenant_admin." in session.scalars(told).all()
    found = root.get("/v1/audit-events", params={"operation": "holdTenantWork"}).json()["items"]
    assert {(one["action"], one["target_kind"]) for one in found} == {("asked", "request")}
    assert {one["target_id"] for one in found} == {*three}


def test_foreign_or_unknown_tenant_is_not_found(as_, three, rows):
    before = rows()
    for who, url in (("blue.tenant_admin", URL), ("root", "/v1/tenants/ten_none")):
        for action in ("cancel", "hold", "release"):
            problem(as_(who).post(f"{url}/{action}"), 404, "not-found")
    assert rows() == before
