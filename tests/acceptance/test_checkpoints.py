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


LOW = 4  # the step of `train:Valley` with the lowest loss


def saved_steps(client, request_id):
    """Return the steps of all checkpoints that were ever saved."""
    told = client.items(f"/v1/requests/{request_id}/events")
    return {event["data"]["step"] for event in told if event["type"] == "task.saved"}


def test_run_resumes_after_a_kill_and_from_its_best_checkpoint_and_shows_its_tensors(
    on_s3, tmp_path
):
    client = on_s3.client("alpha")
    params = {"steps": STEPS, "seed": 9, "step_s": 0.0}
    slow = {**params, "step_s": 0.3}
    alone = client.wait(client.submit_job("train:Train", name="alone", params=params))
    wanted = alone["tasks"][0]["result"]

    with on_s3.gate() as gate:
        id = client.submit_job(
            "train:Valley",
            name="killed",
            params=slow,
            gate=gate,
            checkpoint={"every_s": 0.05, "keep": 1, "best": {"metric": "loss"}},
        )
        client.wait_until(id, lambda _: max(saved_steps(client, id), default=0) > LOW + 1)
        on_s3.kill("device.0")
    task = client.wait(id)["tasks"][0]
    assert (task["state"], task["result"]) == ("done", wanted)

    # The best of all that were ever saved is left, and was saved before the kill.
    listed = [*client.items(f"/v1/tasks/{task['id']}/checkpoints")]
    (saved,) = [each for each in listed if each["best"]]
    assert saved["deleted_at"] is None
    assert saved["ranked_value"] == min(abs(step - LOW) for step in saved_steps(client, id))
    assert (saved["ranked_value"], saved["epoch"]) == (abs(saved["step"] - LOW), 1)
    assert saved["ranked_step"] == saved["step"] < max(each["step"] for each in listed)
    (device,) = client.items("/v1/devices")
    assert saved["host"] == device["host"]
    assert len(saved["key"]) == 64

    # A fork, in a request of its own, ends with the same bits; it ran only the rest.
    more = {"mounts": gate.mounts, "from_checkpoint": "killed@best"}  # the gate is open
    fork = client.submit_job("train:Valley", name="fork", **more)
    task = client.wait(fork)["tasks"][0]
    assert task["from_checkpoint"] == saved["id"]
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
        on_s3.client("beta").submit_job("train:Valley", name="thief", from_checkpoint=saved["id"])
    with pytest.raises(ApiProblem, match="no request 'killed'"):
        on_s3.client("beta").submit_job("train:Valley", name="thief", from_checkpoint="killed@best")
