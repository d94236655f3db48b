"""Tasks move between devices while they run: the bits stay, and no kill at any stage does harm."""

from __future__ import annotations

import time
from functools import cache

import pytest

from tests.acceptance.conftest import SETTLE_S
from tests.acceptance.history import overlaps, runs

pytestmark = pytest.mark.acceptance

GATED_STEP_S = 0.2  # until its gate opens
STEPS_A_MOVE = 150
KILLED = 240  # steps of a job that is killed during its move
ENDED = ("done", "failed", "cancelled")


@pytest.fixture(scope="module")
def undisturbed(system):
    """Return a function: number of steps -> parameters at the end of the undisturbed job."""
    client = system.client("alpha")

    def parameters(steps):
        done = client.wait(submit(client, "undisturbed", steps, step_s=0.0))
        return done["tasks"][0]["result"]["parameters"]

    return cache(parameters)


def submit(client, name, steps, *, step_s=GATED_STEP_S, **task):
    params = {"steps": steps, "seed": 3, "step_s": step_s}
    return client.submit_job("train:Train", name=name, params=params, **task)


def started(system, client, name, steps, **task):
    """Submit a job and wait until it runs; returns the ids of the request and its task."""
    id = submit(client, name, steps, **task)
    system.wait_running(client, id)
    return id, client.request(id)["tasks"][0]["id"]


def events(client, id, type_):
    return [one for one in client.items(f"/v1/requests/{id}/events") if one["type"] == type_]


def told(client, id, type_):
    """Wait for an event of this type; returns the newest, or None if the request has ended."""
    until_s = time.monotonic() + SETTLE_S
    while time.monotonic() < until_s:
        if found := events(client, id, type_):
            return found[-1]
        if client.request(id)["state"] in ENDED:
            return None
        time.sleep(0.02)
    raise TimeoutError(f"no {type_} within {SETTLE_S} s")


@pytest.mark.parametrize("moves", [3, pytest.param(10, marks=pytest.mark.long)])
def test_several_moves_in_a_row_change_no_bit(system, undisturbed, moves):
    client, steps = system.client("alpha"), moves * STEPS_A_MOVE
    with system.gate() as gate:
        id, task = started(system, client, f"chain-{moves}", steps, gate=gate)
        for n in range(1, moves + 1):
            system.wait_running(client, id)
            assert client.post(f"/v1/tasks/{task}/migrate")["move_to"] == "*"
            assert system.until(lambda: client.get(f"/v1/tasks/{task}")["move_to"] is None)
            assert len(events(client, id, "task.moved")) == n, events(
                client, id, "task.move_failed"
            )
    done = client.wait(id)["tasks"][0]
    assert done["result"] == {"done": steps, "parameters": undisturbed(steps)}
    assert (done["lost_steps"], done["epoch"]) == (0, moves + 1)
    assert overlaps(runs(client.log_text(task))) == []
    system.check_ledger()


STAGES = ("task.moving", "task.pausing", "task.launched")
VICTIMS = ("source", "target", "island")


#: Each stage and each victim once; all nine in the long tests.
KILLS = [
    pytest.param(stage, victim, marks=() if v == s else pytest.mark.long)
    for v, victim in enumerate(VICTIMS)
    for s, stage in enumerate(STAGES)
]


@pytest.mark.parametrize(("stage", "victim"), KILLS)
def test_move_killed_at_any_stage_leaves_the_task_right(system, undisturbed, stage, victim):
    client = system.client("alpha")
    wants = {"checkpoint": {"every_s": 1.0, "keep": 2}, "retry": {"max": 2}}
    with system.gate() as gate:
        id, task = started(system, client, f"{victim}-{stage[5:]}", KILLED, gate=gate, **wants)
        source = client.get(f"/v1/tasks/{task}")["seat"]
        launches = len(events(client, id, "task.launched"))
        client.post(f"/v1/tasks/{task}/migrate")
        told(client, id, "task.moving")
        if stage == "task.launched":
            assert system.until(lambda: len(events(client, id, stage)) > launches)
        told(client, id, stage)
        target = next(name for name in system.handle.facts["devices"] if name != source)
        named = {"island": "island", "source": device(source), "target": device(target)}

        system.kill(named[victim])

    done = client.wait(id)["tasks"][0]
    assert done["state"] == "done", done
    assert done["result"] == {"done": KILLED, "parameters": undisturbed(KILLED)}
    assert done["move_to"] is None
    assert overlaps(runs(client.log_text(task))) == []
    system.check_ledger()


def device(name):
    return "device." + name.rpartition(".")[2]


def test_drained_device_is_emptied_by_moves(system):
    client, root = system.client("alpha"), system.client("platform", "platform_admin")
    with system.gate() as gate:
        id, task = started(system, client, "drained", 200, gate=gate)
        source = client.get(f"/v1/tasks/{task}")["seat"]
        root.post(f"/v1/devices/{source}/cordon")
        try:
            moved = told(client, id, "task.moved")
            assert (moved["data"]["source"], moved["data"]["lost_steps"]) == (source, 0)
            assert not root.get(f"/v1/devices/{source}")["busy"]
        finally:
            root.post(f"/v1/devices/{source}/uncordon")
    assert client.wait(id)["state"] == "done"
