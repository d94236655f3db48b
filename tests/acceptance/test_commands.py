"""An unmodified script through HTTP alone: paused, killed, restarted in its working folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance import scripts

pytestmark = pytest.mark.acceptance

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SCRIPT, TORCHRUN = EXAMPLES / "script", EXAMPLES / "torchrun"
ARGS = ["train.py", "--steps", "6000"]


def test_plain_script_that_is_paused_and_killed_prints_the_same_as_alone(system, tmp_path):
    alone = subprocess.run(
        [sys.executable, str(SCRIPT / "train.py"), *ARGS[1:]],
        env={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    ).stdout.splitlines()
    client = system.client("alpha")
    bundle = scripts.upload(client, SCRIPT / "train.py", tmp_path / "script")

    def task():
        return client.get(f"/v1/tasks/{task_id}")

    def has_come_to(step):
        """Wait until the script has reported this many steps; returns the task's own step then."""
        client.wait_until(id, lambda _: task()["metrics"].get("step", 0) >= step)
        return task()["step"]

    def is_kept(_):
        items = client.get(f"/v1/tasks/{task_id}/checkpoints")["items"]
        return items and items[0]["step"] > at

    with system.gate() as gate:
        wanted = {"name": "t", "checkpoint": {"every_s": 1}, "retry": {"max": 1}}
        wanted |= scripts.slowed(gate, 1.0, *ARGS)
        id = client.submit({"name": "script", "bundle": bundle, "tasks": [wanted]})["id"]
        task_id = client.request(id)["tasks"][0]["id"]
        has_come_to(100)
        assert task()["capabilities"] == ["pause", "restart"]
        client.post(f"/v1/tasks/{task_id}/pause")
        client.wait_until(id, lambda request: request["tasks"][0]["state"] == "blocked")
        client.post(f"/v1/tasks/{task_id}/resume")
        at = has_come_to(task()["metrics"]["step"] + 100)
        client.wait_until(id, is_kept)
        system.kill("resident")
    ended = client.wait(id)["tasks"][0]
    assert (ended["state"], ended["result"]) == ("done", {"exit_status": 0})
    assert (ended["attempts"], ended["pauses"]) == (1, 1)
    lines = client.log_text(task_id)
    assert lines[-1] == alone[-1]
    begun = [line for line in lines if line.startswith("begins after")]
    # started from scratch, then in the kept folder; the pause started nothing
    assert len(begun) == 2
    assert begun[1] != "begins after step 0"


def test_command_needs_no_bundle_and_its_last_output_is_shown(system):
    client = system.client("beta")
    run = {"command": ["bash", "-c", "echo so far; echo no such luck >&2; exit 3"]}
    id = client.submit({"name": "short", "tasks": [{"name": "t", "run": run}]})["id"]
    task = client.wait(id)["tasks"][0]
    assert (task["state"], task["cause"]) == ("failed", "exit")
    assert task["message"] == "It ended with exit status 3."
    assert task["detail"] == "no such luck"
    assert "so far" in client.log_text(task["id"])


def test_script_for_torchrun_gives_the_bits_of_torchrun_on_one_device(system, tmp_path):
    """Compare two ranks under stock gloo, with a process each, with two ranks that take turns."""
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    said = subprocess.run(
        [torchrun, "--standalone", "--nproc-per-node", "2", str(TORCHRUN / "train.py")],
        env={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    ).stdout.splitlines()
    client = system.client("alpha")
    bundle = scripts.upload(client, TORCHRUN / "train.py", tmp_path / "script")

    def has_begun(_):
        return client.get(f"/v1/tasks/{task_id}")["metrics"].get("step", 0) >= 20

    with system.gate() as gate:
        wanted = {"name": "t", "world_size": 2, **scripts.slowed(gate, 3.0, "train.py")}
        id = client.submit({"name": "ranks", "bundle": bundle, "tasks": [wanted]})["id"]
        task_id = client.request(id)["tasks"][0]["id"]
        client.wait_until(id, has_begun)
        client.post(f"/v1/tasks/{task_id}/pause")
        client.wait_until(id, lambda request: request["tasks"][0]["state"] == "blocked")
        client.post(f"/v1/tasks/{task_id}/resume")
    ended = client.wait(id)["tasks"][0]
    assert (ended["state"], ended["pauses"]) == ("done", 1)
    assert client.log_text(task_id)[-1] == said[-1]
