"""Kill one process after the other as three tenants work: nothing is lost, nothing runs twice.

Every request accepted before, between or after the kills must reach its right end with exactly the
parameters of an undisturbed run, no two processes may have run one task at once, and the ledger
must add up to the microsecond.
"""

from __future__ import annotations

import pytest

from tests.acceptance.history import overlaps, runs

pytestmark = pytest.mark.acceptance

STEPS = 120
VICTIMS = ["api", "control", "island", "device.0", "resident", "redis", "postgres"]


@pytest.fixture(scope="module")
def undisturbed(system):
    """Return the parameters with which this job ends when it runs undisturbed."""
    client = system.client("alpha")
    done = client.wait(submit(client, "undisturbed"), timeout_s=60)
    return done["tasks"][0]["result"]["parameters"]


def submit(client, name):
    # A killed resident counts as a crash of the job, which its owner must allow.
    return client.submit_job(
        "train:Train",
        name=name,
        params={"steps": STEPS, "seed": 3},
        retry={"max": 2},
        checkpoint={"every_s": 1.0, "keep": 2},
    )


def test_everything_accepted_ends_right_when_each_process_is_killed_in_turn(system, undisturbed):
    clients = [system.client(tenant) for tenant in ("alpha", "beta", "gamma")]
    ids = []
    for victim in VICTIMS:
        ids += [(client, submit(client, victim)) for client in clients]
        system.resident()  # a job computes, so the kill meets work
        system.kill(victim)

    for client, id in ids:
        request = client.wait(id, timeout_s=120)
        assert request["state"] == "done", request
        task = request["tasks"][0]
        assert task["result"] == {"done": STEPS, "parameters": undisturbed}
        assert overlaps(runs(client.log_text(task["id"]))) == []
    system.check_ledger()


def test_a_killed_device_costs_the_steps_since_the_last_checkpoint_and_no_more(system):
    client = system.client("alpha")
    id = client.submit_job(
        "train:Train",
        name="killed",
        params={"steps": 400, "seed": 3},
        checkpoint={"every_s": 1.0, "keep": 2},
    )
    task_id = client.wait_until(id, is_past_a_checkpoint(client), timeout_s=60)["tasks"][0]["id"]
    system.kill("device." + client.get(f"/v1/tasks/{task_id}")["seat"].rpartition(".")[2])

    task = client.wait(id, timeout_s=120)["tasks"][0]
    after, before = client.items(f"/v1/tasks/{task_id}/placements")
    assert (before["end"], after["end"]) == ("lost", "finished")
    saved = {item["step"] for item in client.items(f"/v1/tasks/{task_id}/checkpoints")}
    assert after["first_step"] in saved
    assert task["lost_steps"] == before["last_step"] - after["first_step"] > 0
    assert task["result"]["done"] == 400
    system.check_ledger()


def is_past_a_checkpoint(client):
    def is_past(request):
        task = request["tasks"][0]
        saved = [item["step"] for item in client.items(f"/v1/tasks/{task['id']}/checkpoints")]
        return saved and task["step"] > max(saved)

    return is_past
