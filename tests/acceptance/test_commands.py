"""An unmodified script through HTTP alone: paused, killed, restarted in its working folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from app.cli.bundling import bundle_folder

pytestmark = pytest.mark.acceptance

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SCRIPT, TORCHRUN = EXAMPLES / "script", EXAMPLES / "torchrun"
ARGS = ["train.py", "--steps", "20000"]


def test_a_plain_script_that_is_paused_and_killed_prints_what_it_prints_alone(system, tmp_path):
    alone = subprocess.run(
        [sys.executable, str(SCRIPT / "train.py"), *ARGS[1:]],
        env={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    ).stdout.splitlines()
    client, found = system.client("alpha"), bundle_folder(SCRIPT)
    client.upload(found.sha256, found.body)
    wanted = {
        "name": "t",
        "run": {"command": ["python", *ARGS]},
        "checkpoint": {"every_s": 1},
        "retry": {"max": 1},
    }
    body = {"name": "script", "bundle": f"sha256:{found.sha256}", "tasks": [wanted]}
    id = client.submit(body)["id"]
    task_id = client.request(id)["tasks"][0]["id"]

    def task():
        return client.get(f"/v1/tasks/{task_id}")

    def has_come_to(step):
        """Wait until the script has reported this many steps; returns the task's own step then."""
        client.wait_until(id, lambda _: task()["metrics"].get("step", 0) >= step, timeout_s=60)
        return task()["step"]

    has_come_to(100)
    assert task()["capabilities"] == ["pause", "restart"]
    client.post(f"/v1/tasks/{task_id}/pause")
    client.wait_until(id, lambda request: request["tasks"][0]["state"] == "blocked", timeout_s=30)
    client.post(f"/v1/tasks/{task_id}/resume")

    at = has_come_to(task()["metrics"]["step"] + 100)

    def is_kept(_):
        items = client.get(f"/v1/tasks/{task_id}/checkpoints")["items"]
        return items and items[0]["step"] > at

    client.wait_until(id, is_kept, timeout_s=60)
    system.kill("resident")
    ended = client.wait(id, timeout_s=120)["tasks"][0]
    assert (ended["state"], ended["result"]) == ("done", {"exit_status": 0})
    assert (ended["attempts"], ended["pauses"]) == (1, 1)
    lines = client.log_text(task_id)
    assert lines[-1] == alone[-1]
    begun = [line for line in lines if line.startswith("begins after")]
    # started from scratch, then in the kept folder; the pause started nothing
    assert len(begun) == 2
    assert begun[1] != "begins after step 0"


def test_a_command_needs_no_bundle_and_its_last_words_are_told(system):
    client = system.client("beta")
    run = {"command": ["bash", "-c", "echo so far; echo no such luck >&2; exit 3"]}
    id = client.submit({"name": "short", "tasks": [{"name": "t", "run": run}]})["id"]
    task = client.wait(id, timeout_s=60)["tasks"][0]
    assert (task["state"], task["cause"]) == ("failed", "exit")
    assert task["message"] == "It ended with exit status 3."
    assert task["detail"] == "no such luck"
    assert "so far" in client.log_text(task["id"])


def test_a_script_for_torchrun_ends_with_torchruns_bits_on_one_device_though_it_is_paused(
    system, tmp_path
):
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
    client, found = system.client("alpha"), bundle_folder(TORCHRUN)
    client.upload(found.sha256, found.body)
    wanted = {"name": "t", "run": {"command": ["python", "train.py"]}, "world_size": 2}
    body = {"name": "ranks", "bundle": f"sha256:{found.sha256}", "tasks": [wanted]}
    id = client.submit(body)["id"]
    task_id = client.request(id)["tasks"][0]["id"]

    def has_begun(_):
        return client.get(f"/v1/tasks/{task_id}")["metrics"].get("step", 0) >= 20

    client.wait_until(id, has_begun, timeout_s=120)
    client.post(f"/v1/tasks/{task_id}/pause")
    client.wait_until(id, lambda request: request["tasks"][0]["state"] == "blocked", timeout_s=30)
    client.post(f"/v1/tasks/{task_id}/resume")
    ended = client.wait(id, timeout_s=120)["tasks"][0]
    assert (ended["state"], ended["pauses"]) == ("done", 1)
    assert client.log_text(task_id)[-1] == said[-1]
