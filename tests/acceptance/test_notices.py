"""A script with its own handler is moved, drained, reclaimed and out of time; it loses nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance import scripts
from tests.acceptance.test_migration import told
from tests.acceptance.test_reclaim import quota, submit

pytestmark = pytest.mark.acceptance

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "requeue" / "train.py"
STEPS = 800


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the last line of the script when nothing stops it."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--steps", str(STEPS)],
        env={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path_factory.mktemp("alone"),
    )
    return done.stdout.splitlines()[-1]


@pytest.fixture
def bundle(system, tmp_path):
    return scripts.upload(system.client("alpha"), SCRIPT, tmp_path / "script")


def sent(client, bundle, name, gate, **more):
    """Submit the script; return the ids of its request and its task."""
    words = [SCRIPT.name, "--steps", str(STEPS)]
    task = {"name": "t", "notice": {"seconds": 15}, **scripts.slowed(gate, 0.1, *words), **more}
    id = client.submit({"name": name, "bundle": bundle, "tasks": [task]})["id"]
    return id, client.request(id)["tasks"][0]["id"]


def works(client, id, task_id, epoch=1):
    def does(_):
        task = client.get(f"/v1/tasks/{task_id}")
        return task["epoch"] >= epoch and task["state"] == "running" and task["step"] > 10

    client.wait_until(id, does)


def steps_of(client, task_id):
    """Return (steps after which it saved, steps after which it began), from its log."""
    lines = client.log_text(task_id)
    saved = [line.split()[3].rstrip(":") for line in lines if line.startswith("saved after")]
    begun = [line.split()[3] for line in lines if line.startswith("begins after")]
    return saved, begun


def test_script_that_is_moved_and_drained_computes_the_same(system, bundle, alone):
    client, root = system.client("alpha"), system.client("platform", "platform_admin")
    with system.gate() as gate:
        id, task_id = sent(client, bundle, "told", gate)
        works(client, id, task_id)
        first = client.get(f"/v1/tasks/{task_id}")
        assert "notice" in first["capabilities"]

        client.post(f"/v1/tasks/{task_id}/migrate")
        moved = told(client, id, "task.moved")
        assert moved["data"]["source"] == first["seat"]
        works(client, id, task_id, epoch=2)

        source = client.get(f"/v1/tasks/{task_id}")["seat"]
        root.post(f"/v1/devices/{source}/cordon")
        try:
            works(client, id, task_id, epoch=3)
            assert client.get(f"/v1/tasks/{task_id}")["seat"] == first["seat"]
        finally:
            root.post(f"/v1/devices/{source}/uncordon")

    done = client.wait(id)["tasks"][0]
    assert (done["state"], done["epoch"], done["attempts"]) == ("done", 3, 0), done
    check_log(client, task_id, ["move", "drain"], alone)
    system.check_ledger()


# Long, as it waits for most of its 36 s. Its halves are the worker's
# `test_command_gets_its_notice_before_max_duration_s` and the journal's
# `test_its_time_begins_anew_after_max_duration_and_takes_an_attempt`.
@pytest.mark.long
def test_script_that_is_out_of_time_begins_again_at_the_saved_step(system, bundle, alone):
    client = system.client("alpha")
    with system.gate() as gate:
        more = {"notice": {"seconds": 12}, "max_duration_s": 36, "retry": {"max": 5}}
        id, task_id = sent(client, bundle, "late", gate, **more)
        works(client, id, task_id, epoch=2)
    done = client.wait(id)["tasks"][0]
    assert (done["state"], done["epoch"]) == ("done", 1 + done["attempts"]), done
    assert done["attempts"] > 0
    check_log(client, task_id, ["max_duration"] * done["attempts"], alone)
    system.check_ledger()


def check_log(client, task_id, reasons, alone):
    """Assert why the script saved, that it ran no step twice, and what it computed."""
    lines = client.log_text(task_id)
    assert [line.split()[-1] for line in lines if line.startswith("saved")] == reasons
    saved, begun = steps_of(client, task_id)
    assert begun == ["0", *saved]
    assert lines[-1] == alone


def test_script_whose_device_is_reclaimed_continues_at_the_saved_step(system, bundle, alone):
    admin = system.client("platform", "platform_admin")
    greedy, idle = system.client("alpha"), system.client("beta")
    with quota(admin, "beta", guarantee={"cpu": 1}):
        with system.gate() as gate:
            mine = [sent(greedy, bundle, f"lent-{n}", gate) for n in range(2)]
            for id, task_id in mine:
                works(greedy, id, task_id)
            owner = submit(idle, "guaranteed", steps=30)
            assert idle.wait(owner)["state"] == "done"
        for id, task_id in mine:
            done = greedy.wait(id)["tasks"][0]
            assert (done["state"], done["attempts"]) == ("done", 0)
            saved, begun = steps_of(greedy, task_id)
            assert begun == ["0", *saved]
            assert greedy.log_text(task_id)[-1] == alone
        told_why = [line for _, t in mine for line in greedy.log_text(t) if "reclaim" in line]
        assert any(line.startswith("saved after") for line in told_why)
    system.check_ledger()
