"""Budgets of tenants and users over HTTP; who may is in test_roles.py."""

from __future__ import annotations

import pytest

from app.core.fairness.budget import HOUR_US
from app.db.models import AuditEvent, Tenant
from app.db.transactions import transaction
from app.scheduling import ledger

BUDGET = {
    "device_hours": {"cuda": 10.0, "*": 20},
    "period": "week",
    "timezone": "Europe/Berlin",
    "at": {"80": "notify", "100": "pause"},
    "carry": 0.5,
    "to": [],
}


@pytest.fixture
def root(as_):
    return as_("root")


def change(root, path, **fields):
    version = root.get(path).headers["etag"]
    return root.patch(path, json=fields, headers={"If-Match": version})


@pytest.fixture(params=["/v1/tenants/ten_red", "/v1/users/usr_red.member"])
def owner(request):
    return request.param


def charge(hours, kind="cuda"):
    with transaction() as session:
        us = round(hours * HOUR_US)
        account = ("usr_red.member", "ten_red", kind)
        ledger.note_sums(session, account, us, us, over_us=1)
        ledger.book(session)


def test_budget_is_set_shown_and_removed(root, owner):
    answer = change(root, owner, budget=BUDGET)
    assert answer.status_code == 200, answer.text
    assert answer.json()["budget"] == {**BUDGET, "device_hours": {"cuda": 10.0, "*": 20.0}}
    shown = root.get(f"{owner}/budget").json()
    assert shown["budget"] == answer.json()["budget"]
    assert [(kind["kind"], kind["left_hours"]) for kind in shown["kinds"]] == [
        ("*", 20.0),
        ("cuda", 10.0),
    ]
    assert change(root, owner, budget=None).json()["budget"] is None
    none = {"budget": None, "is_default": False, "begins_at": None, "ends_at": None, "kinds": []}
    assert root.get(f"{owner}/budget").json() == none


def test_other_changes_leave_the_budget(root, owner):
    change(root, owner, budget=BUDGET)
    assert change(root, owner, weight=2.0).json()["budget"]["period"] == "week"


def test_new_tenant_and_user_may_have_a_budget(root):
    for path, body in (
        ("/v1/tenants", {"name": "green"}),
        ("/v1/users", {"name": "new", "tenant_id": "ten_red"}),
    ):
        made = root.post(path, json={**body, "budget": BUDGET})
        assert made.status_code == 201, made.text
        assert root.get(f"{path}/{made.json()['id']}/budget").status_code == 200


def test_used_budget_says_what_is_in_force_and_an_adjustment_ends_it(root, owner, as_):
    charge(9.0)
    change(root, owner, budget=BUDGET)
    charge(3.0)
    change(root, owner, budget={**BUDGET, "carry": 0.25})  # what is counted is kept
    _, cuda = root.get(f"{owner}/budget").json()["kinds"]
    assert (cuda["spent_hours"], cuda["left_hours"], cuda["in_force"]) == (12.0, -2.0, "pause")
    assert cuda["last_day_hours"] == 12.0
    assert cuda["runs_out_at"] is not None
    more = {"kind": "cuda", "device_hours": 3.0, "why": "a deadline"}
    answer = root.post(f"{owner}/budget/adjustments", json=more)
    assert answer.status_code == 201, answer.text
    _, cuda = answer.json()["kinds"]
    assert (cuda["adjusted_hours"], cuda["left_hours"], cuda["in_force"]) == (3.0, 1.0, None)
    [one] = cuda["adjustments"]
    assert (one["device_hours"], one["why"], one["by"]) == (3.0, "a deadline", "root")


def test_adjustment_is_in_the_audit_log(root, owner):
    change(root, owner, budget=BUDGET)
    more = {"kind": "*", "device_hours": -1, "why": "a mistake"}
    assert root.post(f"{owner}/budget/adjustments", json=more).status_code == 201
    events = root.get("/v1/audit-events").json()["items"]
    [event] = [one for one in events if one["target_kind"] == "budget"]
    assert event["after"]["adjustments"][0]["why"] == "a mistake"


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [
        ({"device_hours": {}}, "/budget/device_hours"),
        ({"device_hours": {"CUDA": 1}}, "/budget/device_hours/CUDA"),
        ({"device_hours": {"cuda": -1}}, "/budget/device_hours/cuda"),
        ({"device_hours": {"cuda": 1e300}}, "/budget/device_hours/cuda"),
        ({"timezone": "Europe/Berln"}, "/budget/timezone"),
        ({"timezone": "../../etc/passwd"}, "/budget/timezone"),
        ({"at": {"0": "pause"}}, "/budget/at/0"),
        ({"at": {"1001": "pause"}}, "/budget/at/1001"),
        ({"at": {"100": "kill"}}, "/budget/at/100"),
        ({"at": {}}, "/budget/at"),
        ({"carry": 1.5}, "/budget/carry"),
        ({"period": "year"}, "/budget/period"),
        ({"period": {"days": 0}}, "/budget/period"),
        ({"priod": "week"}, "/budget/priod"),
        ({"to": ["nowhere"]}, "/budget/to/0"),
    ],
)
def test_bad_budget_is_refused_with_its_place(root, owner, fields, pointer):
    answer = change(root, owner, budget={**BUDGET, **fields})
    assert answer.status_code == 422, answer.text
    assert any(one["pointer"].startswith(pointer) for one in answer.json()["errors"])
    assert root.get(owner).json()["budget"] is None


def test_unknown_kind_of_an_adjustment_is_refused_with_the_kinds_that_there_are(root, owner):
    change(root, owner, budget=BUDGET)
    more = {"kind": "tpu", "device_hours": 1, "why": "why not"}
    answer = root.post(f"{owner}/budget/adjustments", json=more)
    assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "/kind")
    assert "*, cuda" in answer.json()["detail"]


def test_adjustment_without_a_budget_is_a_conflict_that_says_what_to_do(root, owner):
    more = {"kind": "cuda", "device_hours": 1, "why": "why not"}
    answer = root.post(f"{owner}/budget/adjustments", json=more)
    assert answer.status_code == 409
    assert "set the field `budget`" in answer.json()["detail"]


def test_budget_of_each_user_is_set_with_the_other_limits(root):
    limits = {"max_running": 4, "budget": {"device_hours": {"cuda": 2}, "period": {"days": 7}}}
    answer = change(root, "/v1/tenants/ten_red", user_defaults=limits)
    assert answer.status_code == 200, answer.text
    shown = answer.json()["user_defaults"]
    assert (shown["max_running"], shown["budget"]["device_hours"]) == (4, {"cuda": 2.0})
    assert shown["budget"]["period"] == {"days": 7}
    her = "/v1/users/usr_red.member"
    charge(1.5)
    found = root.get(f"{her}/budget").json()
    assert (found["is_default"], found["kinds"][0]["left_hours"]) == (True, 0.5)
    assert root.get(her).json()["budget"] is None
    adjusted = {"kind": "cuda", "device_hours": 1, "why": "a deadline"}
    assert root.post(f"{her}/budget/adjustments", json=adjusted).status_code == 201
    change(root, her, budget={"device_hours": {"cuda": 8}})
    found = root.get(f"{her}/budget").json()
    assert (found["is_default"], found["kinds"][0]["granted_hours"]) == (False, 8.0)
    change(root, her, budget=None)
    again = change(root, "/v1/tenants/ten_red", user_defaults={"max_running": 4}).json()
    assert again["user_defaults"]["budget"] is None
    assert root.get(f"{her}/budget").json()["budget"] is None
    made = root.post("/v1/tenants", json={"name": "green", "user_defaults": limits}).json()
    assert made["user_defaults"]["budget"]["device_hours"] == {"cuda": 2.0}


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [
        ({"device_hours": {"CUDA!": 1}}, "device_hours/CUDA!"),
        ({"timezone": "Here/There"}, "timezone"),
        ({"to": ["nobody"]}, "to/0"),
        ({"carry": 2}, "carry"),
    ],
)
def test_bad_budget_of_each_user_is_refused_with_its_place(root, fields, pointer):
    default = {"device_hours": {"cuda": 1}, **fields}
    answer = change(root, "/v1/tenants/ten_red", user_defaults={"budget": default})
    pointer = f"/user_defaults/budget/{pointer}"
    assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, pointer)


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [
        ({"why": "a\x19b"}, "/why"),
        ({"why": ""}, "/why"),
        ({"why": "a\nb"}, "/why"),
        ({"device_hours": False}, "/device_hours"),
        ({"device_hours": 1e10}, "/device_hours"),
    ],
)
def test_bad_adjustment_is_refused(root, owner, fields, pointer):
    change(root, owner, budget=BUDGET)
    more = {"kind": "cuda", "device_hours": 1, "why": "why not", **fields}
    answer = root.post(f"{owner}/budget/adjustments", json=more)
    assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, pointer)


def test_member_sees_what_is_left_to_the_tenant(root, as_):
    change(root, "/v1/tenants/ten_red", budget=BUDGET)
    assert as_("red.viewer").get("/v1/tenants/ten_red/budget").status_code == 200
    assert as_("blue.member").get("/v1/tenants/ten_red/budget").status_code == 404


def test_tenant_admin_may_not_change_the_own_budget(root, as_):
    change(root, "/v1/tenants/ten_red", budget=BUDGET)
    admin = as_("red.tenant_admin")
    assert change(admin, "/v1/tenants/ten_red", budget=None).status_code == 403
    more = {"kind": "cuda", "device_hours": 1, "why": "why not"}
    assert admin.post("/v1/tenants/ten_red/budget/adjustments", json=more).status_code == 403


def test_tenant_with_a_budget_can_be_deleted(root, session):
    id = root.post("/v1/tenants", json={"name": "green", "budget": BUDGET}).json()["id"]
    assert root.delete(f"/v1/tenants/{id}").status_code == 204
    assert session.get(Tenant, id) is None
    assert session.query(AuditEvent).filter_by(target_id=id, action="removed").count() == 1
