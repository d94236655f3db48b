"""A script without any checkpoint is moved and drained, over HTTP alone, and loses nothing."""

from __future__ import annotations

import hashlib
import os

import pytest

from app.core.model.provisions.process_images import OFFER
from app.local.embedded_servers import temporary_home
from tests.acceptance.conftest import running_system
from tests.workers.criu.prefixes import prefix_that_works
from workers.process.isolation.sandbox import WALLS

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may store processes"),
]

#: It prints every 50th step, and ends there once the file `gate` is there.
COUNTS = """
import hashlib, itertools, os, sys, time
found = "0"
print("begins", flush=True)
for step in itertools.count(1):
    found = hashlib.sha256(f"{found} {step}".encode()).hexdigest()
    time.sleep(0.02)
    if step % 50 == 0:
        print(step, flush=True)
        if os.path.exists(sys.argv[1]): break
print("sum", found, flush=True)
"""


@pytest.fixture(scope="module")
def moving(tmp_path_factory):
    """A system whose devices store the processes of commands."""
    criu = prefix_that_works(tmp_path_factory)
    with (
        temporary_home() as home,
        running_system(home, env={"ROUNDHOUSE_CRIU": str(criu)}) as system,
    ):
        yield system


def facts_of(root):
    return [device["facts"] for device in root.get("/v1/devices")["items"]]


@pytest.fixture
def stores(moving):
    """Skip a test where devices cannot store processes; they know when they are up."""
    root = moving.client("platform", "platform_admin")
    if any(len(facts["sandbox"]) < len(WALLS) for facts in facts_of(root)):
        pytest.skip("the sandbox lacks layers here")
    assert all(OFFER in facts["offers"] for facts in facts_of(root))


def events_of(client, id, type_):
    found = client.items(f"/v1/requests/{id}/events", limit=200)
    return [event for event in found if event["type"] == type_]


def begin(client, name, gate, **more):
    """Submit a script that counts until the gate opens; returns the ids of request and task."""
    command = {"command": ["python", "-c", COUNTS, gate.file]}
    task = {"name": "t", "run": command, "mounts": gate.mounts, **more}
    id = client.submit({"name": name, "tasks": [task]})["id"]
    return id, client.request(id)["tasks"][0]["id"]


def check_lines(lines):
    """Assert that a script printed what an undisturbed run prints that ends after as many steps."""
    found, steps = "0", int(lines[-2])
    for step in range(1, steps + 1):
        found = hashlib.sha256(f"{found} {step}".encode()).hexdigest()
    assert lines == ["begins", *map(str, range(50, steps + 1, 50)), f"sum {found}"]


def test_script_that_is_moved_and_then_drained_goes_on_where_it_stood(moving, stores):
    client, root = moving.client("alpha"), moving.client("platform", "platform_admin")

    def now():
        return client.get(f"/v1/tasks/{task_id}")

    def is_on(epoch, lines):
        def does(_):
            task = now()
            has_said = len(client.log_text(task_id)) >= lines
            return task["epoch"] >= epoch and task["state"] == "running" and has_said

        client.wait_until(id, does)

    with moving.gate() as gate:
        id, task_id = begin(client, "counts", gate)
        is_on(1, 3)
        first = now()["seat"]
        assert "move" in now()["capabilities"]
        movement = client.get(f"/v1/tasks/{task_id}/explain")["movement"]
        assert movement.startswith("It can move")
        client.post(f"/v1/tasks/{task_id}/migrate")
        is_on(2, 5)
        second = now()["seat"]
        assert second != first
        root.post(f"/v1/devices/{second}/cordon")
        try:
            is_on(3, 7)
            assert now()["seat"] != second
        finally:
            root.post(f"/v1/devices/{second}/uncordon")
    done = client.wait(id)["tasks"][0]
    assert (done["state"], done["attempts"]) == ("done", 0)
    moved = events_of(client, id, "task.moved")
    assert [event["data"]["lost_steps"] for event in moved] == [0, 0]
    check_lines(client.log_text(task_id))
    moving.check_ledger()


def test_script_goes_on_from_its_last_image_after_a_kill_of_its_device_worker(moving, stores):
    client = moving.client("alpha")
    with moving.gate() as gate:
        id, task_id = begin(client, "killed", gate, checkpoint={"every_s": 1000})
        assert moving.until(lambda: client.log_text(task_id))
        client.post(f"/v1/tasks/{task_id}/checkpoint")
        assert moving.until(lambda: list(client.items(f"/v1/tasks/{task_id}/checkpoints")))
        printed = len(client.log_text(task_id))
        # it prints lines after the image, and there is no second one
        assert moving.until(lambda: len(client.log_text(task_id)) > printed + 1)
        moving.kill("device." + client.get(f"/v1/tasks/{task_id}")["seat"].rpartition(".")[2])
    done = client.wait(id)["tasks"][0]
    assert (done["state"], done["attempts"]) == ("done", 0)
    check_lines(client.log_text(task_id))
    first, again = [event["data"] for event in events_of(client, id, "task.started")]
    assert (first["lines_withdrawn"], again["lines_withdrawn"] > 0) == (0, True)


def _is_at(stage, task, epoch):
    """Say whether a move that began in this epoch is seen at a stage."""
    match stage:
        case "dump":  # of the order at least; an island that was told so soon repeats it
            return task["epoch"] >= epoch
        case "upload":
            return task["epoch"] > epoch or task["state"] != "running"
        case "restore":
            return task["epoch"] > epoch
        case _:
            return task["epoch"] > epoch and task["state"] == "running"


@pytest.mark.parametrize(
    "stages", [("dump",), pytest.param(("upload", "restore", "thaw"), marks=pytest.mark.long)]
)
def test_script_moves_on_though_its_island_is_killed_at_each_stage(moving, stores, stages):
    client, printed = moving.client("alpha"), 0

    def now():
        return client.get(f"/v1/tasks/{task_id}")

    def goes_on(epoch):
        task = now()
        more = len(client.log_text(task_id)) > printed
        return task["state"] == "running" and task["epoch"] > epoch and more

    with moving.gate() as gate:
        id, task_id = begin(client, f"island-{stages[0]}", gate)
        assert moving.until(lambda: goes_on(0))
        for stage in stages:
            epoch, printed = now()["epoch"], len(client.log_text(task_id))
            client.post(f"/v1/tasks/{task_id}/migrate")
            assert moving.until(lambda stage=stage, epoch=epoch: _is_at(stage, now(), epoch))
            moving.kill("island")
            assert moving.until(lambda epoch=epoch: goes_on(epoch))
    done = client.wait(id)["tasks"][0]
    assert (done["state"], done["attempts"]) == ("done", 0)
    check_lines(client.log_text(task_id))
    moved = [event["data"]["lost_steps"] for event in events_of(client, id, "task.moved")]
    assert moved == [0] * len(stages)
    moving.check_ledger()
