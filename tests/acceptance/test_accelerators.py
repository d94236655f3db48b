"""Ranks and executors on two simulated accelerators of one host, through HTTP alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.local.embedded_servers import temporary_home
from app.local.up import WantedDevice
from tests.acceptance import scripts
from tests.acceptance.conftest import running_system
from tests.acceptance.graphs import COUNT, done, graph, submit
from tests.acceptance.test_splicing import comes, ended_right, train, until_held

pytestmark = [pytest.mark.acceptance, pytest.mark.sim]

SIM = {"kind": "sim"}
DEVICES = [WantedDevice(kind="sim", which=str(n)) for n in range(2)]


@pytest.fixture(scope="module")
def accelerators(tmp_path_factory):
    home = Path(tmp_path_factory.mktemp("accelerators"))
    node = home / "budget"  # in the place of a device node
    for path, mode in ((home.parent, 0o755), (home, 0o755), (node, 0o666)):
        path.touch()
        path.chmod(mode)
    env = {
        "ROUNDHOUSE_DEVICE_NODES": str(node),
        "SIM_DEVICES": "2",
        "SIM_MODE": "lazy",
        "SIM_HOME": str(home),
    }
    with (
        temporary_home() as system_home,
        running_system(system_home, devices=DEVICES, env=env) as system,
    ):
        yield system


@pytest.fixture(scope="module")
def undisturbed(accelerators):
    """Return the finished job on one device, without sleeps in its steps."""
    client = accelerators.client("alpha")
    id = train(client, "alone", step_s=0.0, devices={**SIM, "max": 1})
    return client.wait(id)["tasks"][0]


def test_gang_grows_onto_the_other_accelerator_and_gives_it_back(accelerators, undisturbed):
    client, other = accelerators.client("alpha"), accelerators.client("beta")
    with accelerators.gate() as gate:
        id = train(client, "grows", gate=gate, devices=SIM)
        until_held(client, id, 2)
        with comes(accelerators, other, devices=SIM):
            until_held(client, id, 1)
        until_held(client, id, 2)
    task = ended_right(client, id, undisturbed)
    assert (task["pauses"], task["epoch"], task["lost_steps"]) == (0, 1, 0)
    accelerators.check_ledger()


def test_gang_with_an_accelerator_for_each_rank_is_paused_and_resumed(accelerators, undisturbed):
    client = accelerators.client("alpha")
    with accelerators.gate() as gate:
        id = train(client, "both", gate=gate, devices={**SIM, "min": 2, "max": 2})
        until_held(client, id, 2)
        client.post(f"/v1/requests/{id}/hold")
        client.wait_until(id, lambda it: not it["tasks"][0]["seat"])
        client.post(f"/v1/requests/{id}/release")
    task = ended_right(client, id, undisturbed)
    assert (task["epoch"] >= 2, task["lost_steps"]) == (True, 0)
    accelerators.check_ledger()


def test_gang_goes_on_from_its_checkpoint_after_its_worker_is_killed(accelerators, undisturbed):
    client = accelerators.client("alpha")
    with accelerators.gate() as gate:
        id = train(client, "loses", gate=gate, retry={"max": 2}, devices=SIM)
        task = until_held(client, id, 2)["tasks"][0]
        accelerators.kill(f"device.{task['lent'][0].rpartition('.')[2]}")
    ended_right(client, id, undisturbed)
    ends = {stay["end"] for stay in client.items(f"/v1/tasks/{task['id']}/placements")}
    assert ends & {"lost", "failed"}
    accelerators.check_ledger()


STEPS = 100
SCRIPT = Path(__file__).parent.parent / "workers" / "bundle" / "ddp.py"


def script(client, bundle, name, gate):
    """Submit a script of torchrun with a rank on each accelerator; returns (request, task)."""
    words = [SCRIPT.name, "--kind", "sim", "--steps", str(STEPS)]
    task = {"name": "t", "checkpoint": {"every_s": 1}, **scripts.slowed(gate, 1.0, *words)}
    task |= {"world_size": 2, "devices": {**SIM, "min": 2}}
    id = client.submit({"name": name, "bundle": bundle, "tasks": [task]})["id"]
    return id, client.request(id)["tasks"][0]["id"]


def said(client, task_id, word):
    """Return what the script said behind this word."""
    lines = [line for line in client.log_text(task_id) if line.startswith(word)]
    return [line.removeprefix(f"{word} ") for line in lines]


def test_script_on_both_accelerators_is_frozen_as_one_and_each_is_charged(accelerators, tmp_path):
    client, admin = accelerators.client("alpha"), accelerators.client("platform", "platform_admin")
    assert accelerators.until(
        lambda: sum(device["up"] for device in admin.items("/v1/devices")) == 2
    )
    bundle = scripts.upload(client, SCRIPT, tmp_path / "script")
    with accelerators.gate() as gate:
        gate.open()
        alone, alone_task = script(client, bundle, "script-alone", gate)
    assert client.wait(alone)["state"] == "done"

    def task():
        return client.get(f"/v1/tasks/{task_id}")

    with accelerators.gate() as gate:
        id, task_id = script(client, bundle, "script", gate)
        client.wait_until(id, lambda _: task()["metrics"].get("step", 0) >= 5)
        guest = task()["lent"][0]
        admin.post(f"/v1/devices/{guest}/cordon")  # one of two is enough: all ranks stop
        client.wait_until(id, lambda it: not it["tasks"][0]["seat"])
        admin.post(f"/v1/devices/{guest}/uncordon")
    assert client.wait(id)["state"] == "done"
    assert said(client, task_id, "parameters") == said(client, alone_task, "parameters")
    assert said(client, task_id, "begins after") == ["0 restarts 0"]  # once: it was thawed
    stays = list(client.items(f"/v1/tasks/{task_id}/placements"))
    assert sorted(stay["guest"] for stay in stays) == [False, False, True, True]
    assert all(stay["held_us"] > 0 for stay in stays)
    accelerators.check_ledger()


def test_graph_on_both_accelerators_gives_the_bits_of_one(accelerators):
    client = accelerators.client("gamma")
    one = done(client, submit(client, "one", graph(nap_s=0.0), devices={**SIM, "max": 1}))
    id = submit(client, "two", graph(), devices={**SIM, "min": 2, "max": 2})
    task = done(client, id)
    assert (task["result"], task["step"]) == (one["result"], COUNT)
    stays = client.items(f"/v1/tasks/{task['id']}/placements")
    assert len({stay["device_id"] for stay in stays}) == 2
    accelerators.check_ledger()
