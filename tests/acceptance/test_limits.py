"""A task asks for limits through HTTP: refused where none keeps them, told which it reached."""

from __future__ import annotations

import pytest

from app.cli.client import ApiProblem

pytestmark = pytest.mark.acceptance

EATS = "held = [bytes([n]) * 2**24 for n in range(200)]"
FITS = "held = b'1' * (100 * 2**20); import time; time.sleep(3)"


def submit(client, text, **resources):
    run = {"command": ["python", "-c", text]}
    task = {"name": "t", "run": run, "resources": resources}
    return client.submit({"name": "limited", "tasks": [task]})["id"]


def test_task_that_exceeds_its_memory_is_told_and_the_next_one_knows_what_to_ask_for(system):
    client, root = system.client("beta"), system.client("platform", "platform_admin")
    devices = root.items("/v1/devices")
    if not all({"memory", "processes"} <= {*device["facts"]["gives"]} for device in devices):
        pytest.skip("this machine has no control groups")
    limits = {"memory_bytes": 256 * 2**20, "processes": 50}
    ended = client.wait(submit(client, EATS, **limits))["tasks"][0]
    assert (ended["state"], ended["cause"]) == ("failed", "memory")
    assert "of 256.0 MiB of host memory (its limit, resources.memory_bytes)" in ended["message"]

    done = client.wait(submit(client, FITS, **limits))["tasks"][0]
    assert done["state"] == "done"
    told = client.get(f"/v1/tasks/{done['id']}")
    peak, asked = told["peak_resources"], told["resources_to_request"]
    assert 100 * 2**20 < peak["memory_bytes"] < asked["memory_bytes"] <= 256 * 2**20
    assert 0 < peak["processes"] < asked["processes"] <= 50


def test_task_that_asks_for_more_than_any_device_gives_is_refused_with_its_field(system):
    with pytest.raises(ApiProblem) as refused:
        submit(system.client("beta"), FITS, memory_bytes=1e15)
    (error,) = refused.value.errors
    assert error["pointer"] == "/tasks/0/resources/memory_bytes"
    assert "are requested, but no cpu device gives a task more than" in error["detail"]
