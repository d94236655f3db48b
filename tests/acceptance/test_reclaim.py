"""Quotas in the whole system: a guarantee is there when it is wanted, a limit is never exceeded.

Two tenants and two devices. All compared times were written by the database, so nothing here
depends on the speed of the machine or of this test.
"""

from __future__ import annotations

import contextlib
from datetime import datetime

import pytest

from app.settings import settings

pytestmark = pytest.mark.acceptance

STEPS = 300


@pytest.fixture
def admin(system):
    return system.client("platform", "platform_admin")


@pytest.fixture
def greedy(system):
    return system.client("alpha")


@pytest.fixture
def idle(system):
    return system.client("beta")


@contextlib.contextmanager
def quota(admin, name, **wanted):
    """Set a tenant's quotas until the context ends."""
    tenant = next(tenant for tenant in admin.items("/v1/tenants") if tenant["name"] == name)
    before = {field: tenant[field] for field in wanted}
    change(admin, tenant["id"], wanted)
    try:
        yield
    finally:
        change(admin, tenant["id"], before)


def change(admin, id, wanted):
    version = admin.get(f"/v1/tenants/{id}")["version"]
    admin.patch(f"/v1/tenants/{id}", wanted, version=version)


def submit(client, name, *, steps=STEPS, gate=None):
    params = {"steps": steps, "seed": 7, "step_s": 0.2 if gate else 0.02}
    return client.submit_job("train:Train", name=name, params=params, gate=gate)


def task_of(client, id):
    return client.request(id)["tasks"][0]


def ended(client, id):
    request = client.wait(id)
    assert request["state"] == "done", request
    return request["tasks"][0]


def both_ran_a_slice(system, greedy, ids):
    """Wait until two of its tasks hold the devices, and each has had a full turn."""

    def did():
        running = [task for id in ids if (task := task_of(greedy, id))["state"] == "running"]
        return len([t for t in running if t["held_us"] > settings().slice_min_s * 1e6]) == 2

    assert system.until(did)


def story(admin, task_id):
    """Return the decisions about a task, oldest first: [(move, rule, against which task, when)]."""
    mine = [one for one in admin.items("/v1/decisions", limit=200) if one["task_id"] == task_id]
    rounds = [admin.get(f"/v1/decisions/{one['id']}") for one in reversed(mine)]
    return [_told(found["decision"], found["now_s"]) for found in rounds]


def _told(decision, now_s):
    against = decision["against"] and decision["against"]["task_id"]
    return decision["move"], decision["rule"], against, now_s


def seconds(at):
    return datetime.fromisoformat(at).timestamp()


def test_idle_tenant_has_its_guarantee_within_a_slice_and_no_step_is_lost(
    system, admin, greedy, idle
):
    undisturbed = ended(greedy, submit(greedy, "undisturbed"))["result"]
    with quota(admin, "beta", guarantee={"cpu": 1}), system.gate() as gate:
        ids = [submit(greedy, f"greedy-{n}", gate=gate) for n in range(3)]
        both_ran_a_slice(system, greedy, ids)

        mine = ended(idle, submit(idle, "guaranteed", steps=30))

        # From submission to decision it waited no longer than a slice may last.
        launch = next(one for one in story(admin, mine["id"]) if one[0] == "Launch")
        _, rule, victim, decided_s = launch
        assert decided_s - seconds(mine["submitted_at"]) <= settings().slice_max_s
        # The story: which task's device it was, by which rule it went, and to which task.
        assert rule == "F5"
        greedy_tasks = {task_of(greedy, id)["id"]: id for id in ids}
        assert victim in greedy_tasks
        given_up = [one for one in story(admin, victim) if one[0] == "Pause"]
        assert ("Pause", "F5", mine["id"], decided_s) in given_up
        # The victim's owner sees the rule, and of the other task only that it is another tenant's.
        told = [one for one in greedy.items("/v1/decisions") if one["task_id"] == victim]
        assert [one["against"]["task_id"] for one in told if one["rule"] == "F5"] == [None]
        # F6: the victim had held its device for a full slice.
        held = [p for p in greedy.items(f"/v1/tasks/{victim}/placements") if p["end"] == "paused"]
        assert min(p["held_us"] for p in held) >= settings().slice_min_s * 1e6

        gate.open()
        # And nothing is lost: every task of the victim's tenant ends as if nothing had happened.
        for id in ids:
            task = ended(greedy, id)
            assert task["result"] == undisturbed
            assert task["lost_steps"] == 0
        assert task_of(greedy, greedy_tasks[victim])["pauses"] >= 1
    system.check_ledger()


@pytest.mark.parametrize(
    ("wanted", "code"),
    [
        pytest.param({"limit": {"*": 1}}, "TENANT_LIMIT", marks=pytest.mark.long),
        ({"limit": {"cpu": 1}}, "TENANT_LIMIT"),
        pytest.param({"max_running": 1}, "TENANT_RUNNING_LIMIT", marks=pytest.mark.long),
    ],
)
def test_limit_is_kept_although_a_device_is_free(system, admin, greedy, wanted, code):
    with quota(admin, "alpha", **wanted), system.gate() as gate:
        ids = [submit(greedy, f"limited-{n}", gate=gate) for n in range(2)]
        system.wait_running(greedy, ids[0])
        explain = f"/v1/tasks/{task_of(greedy, ids[1])['id']}/explain"

        def is_told():  # from a picture that may be a second old
            return code in [reason["code"] for reason in greedy.get(explain)["reasons"]]

        assert system.until(is_told)
        assert not all(device["busy"] for device in admin.items("/v1/devices"))
        gate.open()
        tasks = [ended(greedy, id) for id in ids]
    (first,), (second,) = (
        list(greedy.items(f"/v1/tasks/{task['id']}/placements")) for task in tasks
    )
    assert seconds(first["ended_at"]) <= seconds(second["launched_at"])


def test_task_is_paused_when_its_budget_is_used_and_goes_on_with_more_without_losing_a_step(
    system, admin, greedy
):
    undisturbed = ended(greedy, submit(greedy, "undisturbed"))["result"]
    tenant = next(one for one in admin.items("/v1/tenants") if one["name"] == "alpha")["id"]
    with system.gate() as gate:
        id = submit(greedy, "budgeted", gate=gate)
        system.wait_running(greedy, id)
        with quota(admin, "alpha", budget={"device_hours": {"cpu": 0.0}}):
            explain = f"/v1/tasks/{task_of(greedy, id)['id']}/explain"

            def is_paused():
                told = [reason["code"] for reason in greedy.get(explain)["reasons"]]
                return task_of(greedy, id)["state"] == "waiting" and "BUDGET_EXHAUSTED" in told

            assert system.until(is_paused)
            assert not any(device["busy"] for device in admin.items("/v1/devices"))
            [used] = greedy.get(f"/v1/tenants/{tenant}/budget")["kinds"]
            assert used["in_force"] == "pause"
            more = {"kind": "cpu", "device_hours": 1.0, "why": "a test"}
            admin.post(f"/v1/tenants/{tenant}/budget/adjustments", more)
            gate.open()
            task = ended(greedy, id)
            [left] = greedy.get(f"/v1/tenants/{tenant}/budget")["kinds"]
    assert (task["result"], task["lost_steps"]) == (undisturbed, 0)
    assert ("Pause", "F4") in [one[:2] for one in story(admin, task["id"])]
    assert left["spent_hours"] > used["spent_hours"]
    assert left["spent_hours"] + left["left_hours"] == pytest.approx(1.0)
    system.check_ledger()
