"""Kill one process after the other as three tenants work: nothing is lost, nothing runs twice.

Every request accepted before, between or after the kills must reach its right end with exactly the
parameters of an undisturbed run, no two processes may have run one task at once, and the ledger
must add up to the microsecond.
"""

from __future__ import annotations

import pytest

from app.local.embedded_servers import temporary_home
from tests.acceptance.conftest import running_system
from tests.acceptance.history import overlaps, runs

pytestmark = pytest.mark.acceptance

STEPS = 120
VICTIMS = ["api", "control", "island", "device.0", "resident", "redis", "postgres"]


@pytest.fixture(scope="module")
def undisturbed(system):
    """Return the parameters with which this job ends when it runs undisturbed."""
    client = system.client("alpha")
    done = client.wait(submit(client, "undisturbed"))
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


def test_every_accepted_task_ends_right_when_each_process_is_killed_in_turn(system, undisturbed):
    clients = [system.client(tenant) for tenant in ("alpha", "beta", "gamma")]
    ids = []
    for victim in VICTIMS:
        ids += [(client, submit(client, victim)) for client in clients]
        system.resident()  # a job computes, so the kill meets work
        system.kill(victim)

    for client, id in ids:
        request = client.wait(id)
        assert request["state"] == "done", request
        task = request["tasks"][0]
        assert task["result"] == {"done": STEPS, "parameters": undisturbed}
        assert overlaps(runs(client.log_text(task["id"]))) == []
    system.check_ledger()


def test_killed_device_costs_only_the_steps_since_the_last_checkpoint(system):
    client = system.client("alpha")
    with system.gate() as gate:
        id = client.submit_job(
            "train:Train",
            name="killed",
            params={"steps": 400, "seed": 3, "step_s": 0.1},
            gate=gate,
            checkpoint={"every_s": 1000.0},
        )
        system.wait_running(client, id)
        task_id = client.request(id)["tasks"][0]["id"]
        client.post(f"/v1/tasks/{task_id}/checkpoint")
        client.wait_until(id, is_past_a_checkpoint(client))
        system.kill("device." + client.get(f"/v1/tasks/{task_id}")["seat"].rpartition(".")[2])

    task = client.wait(id)["tasks"][0]
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


@pytest.mark.long
def test_kill_of_a_host_worker_costs_each_of_eight_tasks_the_steps_since_its_checkpoint():
    """All tasks of the host die with its worker, and each goes on from its own checkpoint."""
    with temporary_home() as home, running_system(home, env={}, devices=8) as system:
        clients = [system.client(tenant) for tenant in ("alpha", "beta", "gamma")] * 3
        with system.gate() as gate:
            ids = [(each, submit_slow(each, n, gate)) for n, each in enumerate(clients[:8])]
            for client, id in ids:
                system.wait_running(client, id)
            for client, id in ids:
                client.wait_until(id, is_past_a_checkpoint(client))
            system.kill("device.0")
        for client, id in ids:
            task = client.wait(id)["tasks"][0]
            assert (task["state"], task["result"]["done"]) == ("done", STEPS)
            after, before = client.items(f"/v1/tasks/{task['id']}/placements")
            assert (before["end"], after["end"]) == ("lost", "finished")
            saved = {item["step"] for item in client.items(f"/v1/tasks/{task['id']}/checkpoints")}
            assert after["first_step"] in saved
            assert task["lost_steps"] == before["last_step"] - after["first_step"] >= 0
        system.check_ledger()


def submit_slow(client, n, gate):
    params = {"steps": STEPS, "seed": n, "step_s": 0.1}
    checkpoint = {"every_s": 5.0, "keep": 5}
    return client.submit_job(
        "train:Train", name=f"k{n}", params=params, gate=gate, checkpoint=checkpoint
    )
