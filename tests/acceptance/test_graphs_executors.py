"""Graphs on two devices at once: executors pass blocks, and may be killed.

The gate of a graph is shut until the test has done what it does while the graph runs.
"""

from __future__ import annotations

import pytest

from tests.acceptance.graphs import COUNT, done, graph, submit
from tests.acceptance.history import overlaps, runs

pytestmark = pytest.mark.acceptance

NAP_S = 1.0  # of a node, until the gate opens


def gated(client, name, gate, **more):
    return submit(client, name, graph(NAP_S, gate=gate.file), mounts=gate.mounts, **more)


def until_held(client, id, devices):
    def is_held(request):
        task = request["tasks"][1]
        return task["state"] == "running" and 1 + len(task["lent"]) == devices

    return client.wait_until(id, is_held)["tasks"][1]


@pytest.fixture(scope="module")
def undisturbed(system):
    return done(client := system.client("alpha"), submit(client, "graph-alone", graph(nap_s=0.0)))


def test_a_graph_is_lent_a_second_device_and_gives_the_same_bits(system, undisturbed):
    client = system.client("beta")
    with system.gate() as gate:
        id = gated(client, "graph-wide", gate, devices={"max": 2})
        until_held(client, id, 2)
    task = done(client, id)
    assert task["result"] == undisturbed["result"]
    assert task["step"] == COUNT
    stays = client.items(f"/v1/tasks/{task['id']}/placements")
    assert len({stay["device_id"] for stay in stays}) == 2, stays
    (plan,) = client.get(f"/v1/requests/{id}/plan")["graphs"]
    assert plan["executors"] == 2
    assert {place["executor"] for place in plan["nodes"]} == {None, 0}
    ways = {(c["block"], c["source"], c["target"]): c["moved_bytes"] for c in plan["copies"]}
    assert ways.keys() == {("noisy.y", 1, 0)}
    assert plan["moved_bytes"] == sum(ways.values()) > 0
    system.check_ledger()


def test_a_graph_that_needs_two_devices_begins_on_both_at_once(system, undisturbed):
    """Check that the graph waits until both devices are free, and ends with the same bits."""
    client, other = system.client("beta"), system.client("alpha")
    with system.gate() as gate, system.gate() as before:
        params = {"steps": 40, "step_s": 1.0}
        first = other.submit_job("train:Train", name="before", params=params, gate=before)
        system.wait_running(other, first)
        id = gated(client, "graph-two", gate, devices={"min": 2, "max": 2})
        client.wait_until(id, lambda request: request["tasks"][0]["state"] == "done")
        before.open()
        task = until_held(client, id, 2)
        assert len({task["seat"], *task["lent"]}) == 2, task
    task_id = task["id"]
    task = done(client, id)
    assert task["result"] == undisturbed["result"]
    assert task["step"] == COUNT
    stays = [*client.items(f"/v1/tasks/{task_id}/placements")]
    assert len({stay["device_id"] for stay in stays if stay["epoch"] == 1}) == 2, stays
    (plan,) = client.get(f"/v1/requests/{id}/plan")["graphs"]
    assert plan["executors"] == 2
    assert plan["moved_bytes"] > 0
    assert other.wait(first)["state"] == "done"
    system.check_ledger()


def test_killed_executor_costs_the_work_since_the_last_checkpoint(system, undisturbed):
    client = system.client("gamma")

    def is_saved(request):
        task = request["tasks"][1]
        saved = [item["step"] for item in client.items(f"/v1/tasks/{task['id']}/checkpoints")]
        return saved and task["step"] > max(5, *saved)

    with system.gate() as gate:
        more = {"devices": {"max": 2}, "retry": {"max": 1}, "checkpoint": {"every_s": 2}}
        id = gated(client, "graph-executor-killed", gate, **more)
        client.wait_until(id, is_saved)
        system.kill("resident")
    task = done(client, id)
    assert task["result"] == undisturbed["result"]
    assert task["attempts"] == 1, task
    assert overlaps(runs(client.log_text(task["id"]))) == []
    system.check_ledger()


@pytest.mark.parametrize("victim", ["device.0", pytest.param("island", marks=pytest.mark.long)])
def test_graph_ends_right_and_leaves_no_memory_whichever_process_is_killed(
    victim, system, undisturbed
):
    client = system.client("alpha")
    with system.gate() as gate:
        id = gated(client, f"graph-{victim}-killed", gate, devices={"max": 2})
        until_held(client, id, 2)
        assert system.until(lambda: system.holders_of("gang-land"))
        system.kill(victim)
    task = done(client, id)
    assert task["result"] == undisturbed["result"]
    assert overlaps(runs(client.log_text(task["id"]))) == []
    system.check_ledger()
    assert system.until(lambda: not system.holders_of("gang-land")), system.holders_of("gang-land")
