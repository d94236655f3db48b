"""Checkpoints through HTTP alone, on a system with a bucket as store, so without shared folders."""

from __future__ import annotations

import contextlib

import pytest
from safetensors.torch import load_file

from app.cli.client import ApiProblem
from app.local.embedded_servers import temporary_home
from tests.acceptance.conftest import running_system
from tests.s3 import serving

pytestmark = pytest.mark.acceptance

STEPS = 150


@pytest.fixture(scope="module")
def on_s3():
    with contextlib.ExitStack() as stack:
        s3, home = stack.enter_context(serving()), stack.enter_context(temporary_home())
        env = {**s3.environment, "ROUNDHOUSE_STORE": s3.new_bucket()}
        yield stack.enter_context(running_system(home, devices=1, env=env))
        assert not (home / "store").exists()


def checkpoint_of(client, request_id):
    """Save a checkpoint of the request's only task and return the newest one."""
    task_id = client.request(request_id)["tasks"][0]["id"]
    client.post(f"/v1/tasks/{task_id}/checkpoint")

    def is_saved(_):
        return client.get(f"/v1/tasks/{task_id}/checkpoints")["items"]

    client.wait_until(request_id, is_saved)
    return is_saved(None)[0]


def test_run_resumes_after_a_kill_and_from_a_checkpoint_and_shows_its_tensors(on_s3, tmp_path):
    client = on_s3.client("alpha")
    params = {"steps": STEPS, "seed": 9, "step_s": 0.0}
    slow = {**params, "step_s": 0.3}
    alone = client.wait(client.submit_job("train:Train", name="alone", params=params))
    wanted = alone["tasks"][0]["result"]

    with on_s3.gate() as gate:
        id = client.submit_job(
            "train:Train", name="killed", params=slow, gate=gate, retry={"max": 1}
        )
        on_s3.wait_running(client, id)
        saved = checkpoint_of(client, id)
        on_s3.kill("resident")
    task = client.wait(id)["tasks"][0]
    assert (task["state"], task["result"], task["attempts"]) == ("done", wanted, 1)
    assert 0 < saved["step"] <= STEPS
    (device,) = client.items("/v1/devices")
    assert saved["host"] == device["host"]
    assert len(saved["key"]) == 64

    # A fork, in a request of its own, ends with the same bits; it ran only the rest.
    more = {"mounts": gate.mounts, "from_checkpoint": saved["id"]}  # the gate is open
    fork = client.submit_job("train:Train", name="fork", **more)
    task = client.wait(fork)["tasks"][0]
    assert (task["state"], task["result"], task["step"]) == ("done", wanted, STEPS)
    (placement,) = client.items(f"/v1/tasks/{task['id']}/placements")
    assert placement["first_step"] == saved["step"]

    # Its tensors can be downloaded.
    file = tmp_path / "model.safetensors"
    assert client.download(f"/v1/checkpoints/{saved['id']}/safetensors", file) > 1000
    shapes = {tuple(tensor.shape) for tensor in load_file(file).values()}
    assert {(32, 16), (32,), (4, 32), (4,)} <= shapes

    # Another tenant cannot use them.
    with pytest.raises(ApiProblem, match="no checkpoint"):
        on_s3.client("beta").get(f"/v1/checkpoints/{saved['id']}/tensors")
    with pytest.raises(ApiProblem, match="no such checkpoint"):
        on_s3.client("beta").submit_job("train:Train", name="thief", from_checkpoint=saved["id"])
