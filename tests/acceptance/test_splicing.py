"""A job of several ranks borrows idle devices and gives them back; its bits never depend on it.

Through HTTP alone, on two CPU devices.
"""

from __future__ import annotations

import contextlib

import pytest

pytestmark = pytest.mark.acceptance

RANKS, STEPS, STEP_S = 4, 60, 0.2
GATED_STEP_S = 0.5  # until the gate of the job opens


@pytest.fixture(scope="module")
def undisturbed(system):
    """Return the finished job on one device, without sleeps in its steps."""
    client = system.client("alpha")
    return client.wait(train(client, "splice-alone", step_s=0.0))["tasks"][0]


def train(client, name, *, step_s=None, **task):
    if step_s is None:
        step_s = GATED_STEP_S if "gate" in task else STEP_S
    params = {"steps": STEPS, "step_s": step_s}
    every = {"every_s": 1.0, "keep": 2}
    task = {"world_size": RANKS, "checkpoint": every, "params": params, **task}
    return client.submit_job("train:Ranks", name=name, **task)


def held(request):
    task = request["tasks"][0]
    return task["state"] == "running" and 1 + len(task["lent"])


def until_held(client, id, devices):
    return client.wait_until(id, lambda request: held(request) == devices)


def ended_right(client, id, undisturbed):
    """Assert that the job is done with the bits of the undisturbed job; returns its task."""
    request = client.wait(id)
    task = request["tasks"][0]
    assert (request["state"], task["result"]) == ("done", undisturbed["result"]), task
    return task


@contextlib.contextmanager
def comes(system, client, **task):
    """Submit a job that runs, and holds its device, at the end of the context; wait for its end."""
    with system.gate() as gate:
        params = {"steps": 30, "step_s": 0.5}
        id = client.submit_job("train:Train", name="comes", params=params, gate=gate, **task)
        yield
        system.wait_running(client, id)
    assert client.wait(id)["state"] == "done"


def test_gang_grows_gives_way_without_a_pause_and_grows_again(system, undisturbed):
    client, other = system.client("alpha"), system.client("beta")
    with system.gate() as gate:
        id = train(client, "splice", gate=gate)
        until_held(client, id, 2)
        with comes(system, other):
            until_held(client, id, 1)
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


def test_owner_sets_how_many_devices_a_gang_may_hold(system, undisturbed):
    client = system.client("alpha")
    with system.gate() as gate:
        id = train(client, "splice-asked", gate=gate, devices={"max": 1})
        url = f"/v1/tasks/{client.request(id)['tasks'][0]['id']}"
        system.wait_running(client, id)
        client.post(f"{url}/resize", {"devices_max": RANKS})
        until_held(client, id, 2)
        client.post(f"{url}/resize", {"devices_max": 1})
        until_held(client, id, 1)
    assert ended_right(client, id, undisturbed)["pauses"] == 0


def test_gang_that_needs_two_devices_begins_on_both_and_is_paused(system, undisturbed):
    client, other = system.client("alpha"), system.client("beta")
    with system.gate() as gate, system.gate() as before:
        params = {"steps": 30, "step_s": 0.5}
        first = other.submit_job("train:Train", name="splice-first", params=params, gate=before)
        system.wait_running(other, first)
        id = train(client, "splice-both", gate=gate, devices={"min": 2, "max": 2})
        before.open()
        until_held(client, id, 2)
        client.post(f"/v1/requests/{id}/hold")
        client.wait_until(id, lambda it: not it["tasks"][0]["seat"])
        client.post(f"/v1/requests/{id}/release")
    task = ended_right(client, id, undisturbed)
    assert (task["epoch"] >= 2, task["lost_steps"]) == (True, 0)
    stays = list(client.items(f"/v1/tasks/{task['id']}/placements"))
    epochs = [stay["epoch"] for stay in stays]
    assert all(epochs.count(epoch) == 2 for epoch in epochs)
    system.check_ledger()


def test_gang_resumes_from_its_checkpoint_after_the_worker_of_its_host_is_killed(
    system, undisturbed
):
    client = system.client("alpha")
    with system.gate() as gate:
        id = train(client, "splice-killed", gate=gate, retry={"max": 2})
        seat = until_held(client, id, 2)["tasks"][0]["seat"]
        system.kill(f"device.{seat.rpartition('.')[2]}")
    task = ended_right(client, id, undisturbed)
    assert (task["epoch"], task["attempts"]) == (2, 0)
    steps = [row["step"] for row in client.items(f"/v1/tasks/{task['id']}/metrics", limit=200)]
    assert len(steps) == len(set(steps))
    system.check_ledger()
