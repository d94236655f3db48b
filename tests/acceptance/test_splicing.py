"""A job of several ranks borrows idle devices and gives them back; its bits never depend on it.

Through HTTP alone, on two CPU devices.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.acceptance

RANKS, STEPS, STEP_S = 4, 150, 0.1
REST_S = 60.0


@pytest.fixture(scope="module")
def undisturbed(system):
    """Return the finished job on one device, without sleeps in its steps."""
    client = system.client("alpha")
    return client.wait(train(client, "splice-alone", step_s=0.0), timeout_s=REST_S)["tasks"][0]


def train(client, name, *, step_s=STEP_S, **task):
    params = {"steps": STEPS, "step_s": step_s}
    every = {"every_s": 1.0, "keep": 2}
    task = {"world_size": RANKS, "checkpoint": every, "params": params, **task}
    return client.submit_job("train:Ranks", name=name, **task)


def held(request):
    task = request["tasks"][0]
    return task["state"] == "running" and 1 + len(task["lent"])


def until_held(client, id, devices):
    return client.wait_until(id, lambda request: held(request) == devices, timeout_s=REST_S)


def ended_right(client, id, undisturbed):
    """Assert that the job is done with the bits of the undisturbed job; returns its task."""
    request = client.wait(id, timeout_s=2 * REST_S)
    task = request["tasks"][0]
    assert (request["state"], task["result"]) == ("done", undisturbed["result"]), task
    return task


def test_it_grows_gives_way_without_a_pause_and_grows_again(system, undisturbed):
    client, other = system.client("alpha"), system.client("beta")
    id = train(client, "splice")
    until_held(client, id, 2)
    comes = other.submit_job("train:Train", name="comes", params={"steps": 30})
    until_held(client, id, 1)
    system.wait_running(other, comes)
    assert other.wait(comes, timeout_s=REST_S)["state"] == "done"
    until_held(client, id, 2)
    task = ended_right(client, id, undisturbed)
    assert (task["pauses"], task["epoch"], task["lost_steps"]) == (0, 1, 0)
    stays = list(client.items(f"/v1/tasks/{task['id']}/placements"))
    assert [(stay["guest"], stay["end"]) for stay in stays][::-1] == [
        (False, "finished"),
        (True, "resized"),
        (True, "finished"),
    ]
    assert all(stay["held_us"] > 0 for stay in stays)
    told = [event["message"] for event in client.items(f"/v1/requests/{id}/events", limit=200)]
    assert any(each.startswith("Resized after step ") for each in told)
    system.check_ledger()


def test_its_owner_says_how_many_it_may_hold(system, undisturbed):
    client = system.client("alpha")
    id = train(client, "splice-asked", devices={"max": 1})
    url = f"/v1/tasks/{client.request(id)['tasks'][0]['id']}"
    system.wait_running(client, id)
    client.post(f"{url}/resize", {"devices_max": RANKS})
    until_held(client, id, 2)
    client.post(f"{url}/resize", {"devices_max": 1})
    until_held(client, id, 1)
    assert ended_right(client, id, undisturbed)["pauses"] == 0


def test_one_that_needs_two_of_a_host_begins_on_both_and_is_paused_as_any_other(
    system, undisturbed
):
    client, other = system.client("alpha"), system.client("beta")
    first = other.submit_job("train:Train", name="splice-first", params={"steps": 30})
    system.wait_running(other, first)
    id = train(client, "splice-both", devices={"min": 2, "max": 2})
    until_held(client, id, 2)
    client.post(f"/v1/requests/{id}/hold")
    client.wait_until(id, lambda it: not it["tasks"][0]["seat"], timeout_s=REST_S)
    client.post(f"/v1/requests/{id}/release")
    task = ended_right(client, id, undisturbed)
    assert (task["epoch"] >= 2, task["lost_steps"]) == (True, 0)
    stays = list(client.items(f"/v1/tasks/{task['id']}/placements"))
    epochs = [stay["epoch"] for stay in stays]
    assert all(epochs.count(epoch) == 2 for epoch in epochs)
    system.check_ledger()


@pytest.mark.parametrize("victim", ["lent", "home"])
def test_it_goes_on_with_one_device_when_the_worker_of_the_other_is_killed(
    system, undisturbed, victim
):
    client = system.client("alpha")
    id = train(client, f"splice-{victim}", retry={"max": 2})
    task = until_held(client, id, 2)["tasks"][0]
    device = task["seat"] if victim == "home" else task["lent"][0]
    system.kill(f"device.{device.rpartition('.')[2]}")
    task = ended_right(client, id, undisturbed)
    told = [event["message"] for event in client.items(f"/v1/requests/{id}/events", limit=200)]
    assert (task["epoch"] == 1) == (victim == "lent"), told
    assert (task["lost_steps"] == 0) >= (victim == "lent")
    steps = [row["step"] for row in client.items(f"/v1/tasks/{task['id']}/metrics", limit=200)]
    assert len(steps) == len(set(steps))
    system.check_ledger()
