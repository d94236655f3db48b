"""Policies of tenants about the network, and the wishes of tasks that they bind."""

from __future__ import annotations

import pytest
from sqlalchemy import func, select

from app.core.model.provisions.network_policy import FIGURES
from app.db.models import AuditEvent, Device, Placement, Task, Tenant
from app.db.transactions import transaction
from tests.app.conftest import descriptor, problem

ALLOW = ["huggingface.co:443", "*.pypi.org:443"]


def wishing(*allow: str) -> dict[str, object]:
    tasks = [
        {"name": "a", "run": {"job": "train:Train"}},
        {"name": "train", "run": {"job": "train:Train"}, "network": {"allow": list(allow)}},
    ]
    return descriptor(tasks=tasks)


def set_policy(client, tenant, network):
    path = f"/v1/tenants/{tenant}"
    etag = client.get(path).headers["etag"]
    return client.patch(path, json={"network": network}, headers={"If-Match": etag})


@pytest.fixture
def root(as_):
    return as_("root")


@pytest.fixture
def reachable(session, world):
    """Lets the devices reach the network."""
    with transaction() as its:
        for device in its.scalars(select(Device)):
            device.facts = {**device.facts, "offers": ["egress"]}


def test_policy_is_kept_in_its_usual_spelling_and_audited(root, session):
    answer = set_policy(root, "ten_red", ["HuggingFace.co:443", "*.pypi.org:443", "hf.co.:443"])
    assert answer.json()["network"] == ["huggingface.co:443", "*.pypi.org:443", "hf.co:443"]
    changed = session.scalars(select(AuditEvent).order_by(AuditEvent.id.desc())).first()
    assert changed.before["network"] is None
    assert changed.after["network"] == ["huggingface.co:443", "*.pypi.org:443", "hf.co:443"]
    assert set_policy(root, "ten_red", None).json()["network"] is None
    assert set_policy(root, "ten_red", []).json()["network"] == []
    made = root.post("/v1/tenants", json={"name": "green", "network": ALLOW}).json()
    assert root.get(f"/v1/tenants/{made['id']}").json()["network"] == ALLOW


def test_other_change_of_a_tenant_keeps_its_policy(root):
    set_policy(root, "ten_red", ALLOW)
    etag = root.get("/v1/tenants/ten_red").headers["etag"]
    changed = root.patch("/v1/tenants/ten_red", json={"weight": 2.0}, headers={"If-Match": etag})
    assert changed.json()["network"] == ALLOW


@pytest.mark.parametrize("text", ["huggingface.co", "https://hf.co:443", "10.0.0.300:80", "*.:1"])
def test_policy_with_a_bad_destination_is_refused(text, root, rows):
    before = rows()
    problem(set_policy(root, "ten_red", ["hf.co:443", text]), 422, "validation-error", "/network/1")
    assert rows() == before


def test_tenant_admin_gives_only_what_its_tenant_may_reach(as_, root):
    admin = as_("red.tenant_admin")
    problem(
        admin.post("/v1/tenants", json={"name": "rose", "network": ["hf.co:443"]}),
        *(422, "validation-error", "/network/0"),
    )
    set_policy(root, "ten_red", ALLOW)
    wide = admin.post("/v1/tenants", json={"name": "rose", "network": ["*:443"]})
    told = problem(wide, 422, "validation-error", "/network/0")["errors"][0]["detail"]
    assert "red may reach huggingface.co:443, *.pypi.org:443" in told
    narrow = ["files.pypi.org:443"]
    rose = admin.post("/v1/tenants", json={"name": "rose", "network": narrow}).json()
    assert rose["network"] == narrow
    problem(set_policy(admin, "ten_red", []), 403, "insufficient-scope")
    problem(set_policy(admin, rose["id"], ["*.org:443"]), 422, "validation-error", "/network/0")


def test_member_cannot_change_a_policy_and_a_foreign_tenant_is_not_found(as_, root, rows):
    etag = root.get("/v1/tenants/ten_red").headers["etag"]
    before = rows()
    for speaker, tenant, status in (
        ("red.member", "ten_red", 403),
        ("blue.tenant_admin", "ten_red", 404),
        ("blue.tenant_admin", "ten_made_up", 404),
    ):
        answer = as_(speaker).patch(
            f"/v1/tenants/{tenant}", json={"network": ["*:443"]}, headers={"If-Match": etag}
        )
        assert answer.status_code == status
    assert rows() == before


@pytest.mark.usefixtures("reachable")
def test_task_wishes_nothing_without_a_policy(red):
    told = problem(
        red.post("/v1/requests", json=wishing("hf.co:443")),
        *(422, "validation-error", "/tasks/1/network/allow/0"),
    )
    assert "red may reach nothing" in told["detail"]


@pytest.mark.usefixtures("reachable")
def test_task_wishes_what_the_policy_of_its_tenant_allows(red, root, session):
    set_policy(root, "ten_red", ALLOW)
    answer = red.post("/v1/requests", json=wishing("HuggingFace.co:443", "files.pypi.org:443"))
    assert answer.status_code == 202, answer.text
    task = session.scalar(select(Task).where(Task.name == "train"))
    assert task.descriptor["network"] == {"allow": ["huggingface.co:443", "files.pypi.org:443"]}
    assert task.spec.devices.choice.needs == ("egress",)
    told = problem(
        red.post("/v1/requests", json=wishing("huggingface.co:443", "pypi.org:443")),
        *(422, "validation-error", "/tasks/1/network/allow/1"),
    )["errors"]
    assert [each["code"] for each in told] == ["network"]
    assert "red may reach huggingface.co:443, *.pypi.org:443" in told[0]["detail"]


@pytest.mark.usefixtures("reachable")
def test_task_shows_what_it_may_reach_and_what_it_used(red, as_, root, session):
    set_policy(root, "ten_red", ALLOW)
    submitted = red.post("/v1/requests", json=wishing("huggingface.co:443")).json()
    plain, asking = submitted["tasks"]
    assert plain["network"] is None
    unused = dict.fromkeys(FIGURES, 0)
    assert asking["network"] == {"allow": ["huggingface.co:443"], **unused}
    with transaction() as its:
        task = its.get_one(Task, asking["id"])
        for epoch in (1, 2):
            its.add(
                Placement(
                    task_id=task.id, epoch=epoch, device_id="h.0", tenant_id=task.tenant_id,
                    user_id=task.user_id, kind="cpu", cost_milli=1000, incarnation="p",
                    ended_at=func.now(), network={**unused, "connections": 3, "sent_bytes": 40},
                )
            )  # fmt: skip
    used = red.get(f"/v1/tasks/{asking['id']}").json()["network"]
    assert (used["connections"], used["sent_bytes"], used["refused"]) == (6, 80, 0)
    foreign = as_("blue.tenant_admin").get(f"/v1/tasks/{asking['id']}")
    assert foreign.status_code == 404


@pytest.mark.usefixtures("reachable")
def test_policy_of_a_tenant_above_binds_and_is_not_shown(red, root, session):
    with transaction() as its:
        its.get_one(Tenant, "ten_root").network = ["*.hf.co:443"]
    set_policy(root, "ten_red", ["*:443", "cdn.hf.co:443"])
    assert red.post("/v1/requests", json=wishing("cdn.hf.co:443")).status_code == 202
    told = problem(red.post("/v1/requests", json=wishing("pypi.org:443")), 422, "validation-error")
    assert "red may reach cdn.hf.co:443, *.hf.co:443;" in told["detail"]
    assert "platform" not in told["detail"]


def test_task_is_refused_where_no_device_reaches_the_network(red, root):
    set_policy(root, "ten_red", ALLOW)
    told = problem(
        red.post("/v1/requests", json=wishing("huggingface.co:443")),
        *(422, "unsatisfiable", "/tasks/1/network"),
    )
    assert "there is no cpu device that offers egress" in told["detail"]
