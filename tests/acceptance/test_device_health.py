"""Devices that fail under a running job: the island cordons them, and the job loses no bit.

Device workers and island are real; what fails is what the devices' monitors say.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from app.local.embedded_servers import temporary_home
from tests.acceptance.conftest import System, running_system
from tests.acceptance.history import overlaps, runs
from tests.acceptance.test_migration import events, started, submit, told
from tests.workers.device.test_monitors import write

pytestmark = pytest.mark.acceptance

WELL = {"temperature_c": 60, "temperature_limit_c": 90, "power_w": 100.0}
HOT = {**WELL, "temperature_c": 95}
PATIENCE_S = 5.0  # a busy machine reads a monitor within it
SOON_S = 60.0  # a reading, a heartbeat and a round, on a busy machine
STEPS = 240


class Watched(System):
    """The whole system, with devices whose figures a test says."""

    folder: Path

    def say(self, device: str, **said: object) -> None:
        write(self.folder / f"{device}.json", **said)

    def device(self, name: str):
        return self.client("platform", "platform_admin").get(f"/v1/devices/{name}")

    def is_cordoned(self, name: str) -> bool:
        return bool(self.device(name)["cordoned"])

    def undrain(self, name: str) -> None:
        self.client("platform", "platform_admin").post(f"/v1/devices/{name}/uncordon")


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    with temporary_home() as home:
        folder = home / "monitors"
        folder.mkdir()
        for n in (0, 1):
            write(folder / f"local.{n}.json", **WELL)
        env = {
            "ROUNDHOUSE_DEVICE_MONITOR": f"file:{folder}",
            "ROUNDHOUSE_HEALTH_EVERY_S": "0.3",
            "ROUNDHOUSE_HEALTH_PATIENCE_S": str(PATIENCE_S),
        }
        with running_system(home, Watched, env=env) as system:
            system.folder = folder
            yield system


@pytest.fixture
def repaired(watched: Watched) -> Iterator[None]:
    """After the test both devices serve again, each after its health check."""
    yield
    for name in watched.handle.facts["devices"]:
        watched.say(name, **WELL)
        watched.undrain(name)
        assert watched.until(lambda name=name: not watched.is_cordoned(name)), watched.device(name)


@pytest.fixture(scope="module")
def undisturbed(watched):
    client = watched.client("alpha")

    @cache
    def parameters(steps):
        done = client.wait(submit(client, "undisturbed", steps, step_s=0.0))
        return done["tasks"][0]["result"]["parameters"]

    return parameters


def begin(watched, name, **task):
    client = watched.client("alpha")
    id, task_id = started(watched, client, name, STEPS, **task)
    return client, id, task_id, client.get(f"/v1/tasks/{task_id}")["seat"]


def check_end(watched, client, id, task_id, result):
    done = client.wait(id)["tasks"][0]
    assert done["state"] == "done", done
    assert done["result"] == result
    assert overlaps(runs(client.log_text(task_id))) == []
    watched.check_ledger()
    return done


@pytest.mark.parametrize(
    ("name", "fault", "rule", "within_s"),
    [
        ("xid", {**WELL, "xids": [48]}, "xid", SOON_S),
        pytest.param("heat", HOT, "temperature", PATIENCE_S + SOON_S, marks=pytest.mark.long),
        ("hang", {"fault": "hang"}, "hang", PATIENCE_S + SOON_S),
        pytest.param(
            "gone", {"humidity": 1}, "monitor", PATIENCE_S + SOON_S, marks=pytest.mark.long
        ),
    ],
)
def test_a_job_moves_off_a_device_that_fails_without_losing_a_step(
    watched, repaired, undisturbed, name, fault, rule, within_s
):
    with watched.gate() as gate:
        client, id, task, source = begin(watched, name, gate=gate)
        began_s = time.monotonic()
        watched.say(source, **fault)
        assert watched.until(lambda: watched.is_cordoned(source))
        assert time.monotonic() - began_s < within_s
        assert watched.device(source)["health"]["cordon_rule"] == rule
        moved = told(client, id, "task.moved")
        assert (moved["data"]["source"], moved["data"]["lost_steps"]) == (source, 0)
        [asked] = events(client, id, "task.move_asked")
        assert asked["message"].startswith(f"{source} is cordoned. ")
    result = {"done": STEPS, "parameters": undisturbed(STEPS)}
    done = check_end(watched, client, id, task, result)
    assert (done["lost_steps"], done["epoch"]) == (0, 2)


def test_a_job_on_a_device_that_fell_off_the_bus_resumes_from_its_checkpoint(
    watched, repaired, undisturbed
):
    with watched.gate() as gate:
        client, id, task, source = begin(
            watched, "lost", gate=gate, checkpoint={"every_s": 1.0, "keep": 2}
        )
        told(client, id, "task.saved")
        watched.say(source, fault="lost")
        lost = told(client, id, "task.lost")
        assert "fell off the bus" in lost["message"]
    result = {"done": STEPS, "parameters": undisturbed(STEPS)}
    done = check_end(watched, client, id, task, result)
    assert (done["attempts"], done["epoch"]) == (0, 2)
    assert events(client, id, "task.started")[-1]["data"]["device"] != source


def test_a_repaired_device_is_checked_and_then_gets_work(watched, repaired):
    first, second = watched.handle.facts["devices"]
    for name in (first, second):
        watched.say(name, **WELL, xids=[48])
    assert watched.until(lambda: watched.is_cordoned(first) and watched.is_cordoned(second))
    client = watched.client("alpha")
    id = submit(client, "waits", 5, step_s=0.0)
    [task] = client.request(id)["tasks"]

    def reasons():
        found = client.get(f"/v1/tasks/{task['id']}/explain")["reasons"]
        return " ".join(reason["message"] for reason in found)

    assert watched.until(lambda: f"{first}: Xid 48 (double-bit ECC error)." in reasons())
    watched.say(first, **HOT, xids=[48])
    watched.undrain(first)
    assert watched.until(
        lambda: "did not pass" in (watched.device(first)["health"]["cordon_reason"] or "")
    )
    watched.say(first, **WELL, xids=[48])
    watched.undrain(first)
    assert client.wait(id)["state"] == "done"
    assert not watched.is_cordoned(first)


def test_a_device_that_was_too_hot_serves_again_when_it_is_cool(watched, repaired):
    name = watched.handle.facts["devices"][0]
    watched.say(name, **HOT)
    assert watched.until(lambda: watched.is_cordoned(name))
    watched.say(name, **WELL)
    assert watched.until(lambda: not watched.is_cordoned(name))
    assert watched.device(name)["health"]["notes"][0]["told"] == (
        "Takes work again: It is well again."
    )


def test_a_job_that_computes_nothing_is_paused_and_loses_no_step_when_it_is_resumed(
    watched, repaired, undisturbed
):
    parameters = undisturbed(STEPS)
    client = watched.client("alpha")
    with watched.gate() as gate:
        id, task = started(watched, client, "idle", STEPS, gate=gate)
        policy = "update tenants set idle_pause_s = {} where name = 'alpha' returning id"
        assert watched.sql(policy.format(3))
        try:
            device = client.get(f"/v1/tasks/{task}")["seat"]
            watched.say(device, **WELL, utilisation_percent=0)
            assert told(client, id, "task.idle_paused")
            assert "no step lost" in told(client, id, "task.paused")["message"]
        finally:
            watched.sql(policy.format("null"))
    assert events(client, id, "task.idle_warned")
    client.post(f"/v1/tasks/{task}/resume")
    done = check_end(watched, client, id, task, {"done": STEPS, "parameters": parameters})
    assert (done["lost_steps"], done["pauses"]) == (0, 1)
