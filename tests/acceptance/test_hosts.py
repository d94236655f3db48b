"""Jobs and graphs that may use devices of two hosts: their ranks or executors spread over both.

The bits must never depend on it. Through HTTP alone; each of two device workers plays a host, and
their ranks communicate by TCP only.
"""

from __future__ import annotations

import pytest

from app.local.embedded_servers import temporary_home
from tests.acceptance import graphs
from tests.acceptance.conftest import running_system
from tests.acceptance.graphs import COUNT
from tests.acceptance.history import overlaps, runs
from tests.acceptance.test_islands import (
    Processes,
    all_placed,
    both_run,
    crossed,
    ended,
    is_up,
    on,
    submit_graph,
    told,
)
from tests.acceptance.test_splicing import RANKS, comes, ended_right, train, until_held

pytestmark = pytest.mark.acceptance

APART = {"across_hosts": True}
SHORT_STEP_S = 0.08  # for a job that only has to run until it could have grown


@pytest.fixture(scope="module")
def hosts():
    env = {"ROUNDHOUSE_ISLAND_LOST_S": "5"}
    with temporary_home() as home, running_system(home, devices=2, hosts=2, env=env) as system:
        yield system


@pytest.fixture(scope="module")
def undisturbed(hosts):
    client = hosts.client("alpha")
    return client.wait(train(client, "alone", step_s=0.0))["tasks"][0]


def events(client, id):
    return [event["message"] for event in client.items(f"/v1/requests/{id}/events", limit=200)]


def is_right(hosts, client, id, undisturbed):
    task = ended_right(client, id, undisturbed)
    steps = [row["step"] for row in client.items(f"/v1/tasks/{task['id']}/metrics", limit=200)]
    assert len(steps) == len(set(steps))
    hosts.check_ledger()
    return task


def test_gang_grows_onto_another_host_and_gives_way_without_a_pause(hosts, undisturbed):
    client, other = hosts.client("alpha"), hosts.client("beta")
    with hosts.gate() as gate:
        id = train(client, "parts", gate=gate, devices={"max": RANKS, **APART})
        task = until_held(client, id, 2)["tasks"][0]
        assert {task["seat"], *task["lent"]} == {"local.0", "local-2.1"}
        with comes(hosts, other):
            until_held(client, id, 1)
    task = is_right(hosts, client, id, undisturbed)
    assert (task["pauses"], task["epoch"], task["lost_steps"]) == (0, 1, 0), events(client, id)
    assert any(told.endswith("on 2 devices of 2 hosts.") for told in events(client, id))
    stays = list(client.items(f"/v1/tasks/{task['id']}/placements"))
    assert all(stay["held_us"] > 0 for stay in stays if stay["end"] == "resized")


def test_gang_stays_on_its_host_by_default(hosts, undisturbed):
    client = hosts.client("alpha")
    id = train(client, "stays", step_s=SHORT_STEP_S)
    task = is_right(hosts, client, id, undisturbed)
    assert len(list(client.items(f"/v1/tasks/{task['id']}/placements"))) == 1


def test_gang_that_needs_two_devices_begins_on_two_hosts_and_is_paused(hosts, undisturbed):
    client = hosts.client("alpha")
    with hosts.gate() as gate:
        id = train(client, "wide", gate=gate, devices={"min": 2, "max": 2, **APART})
        hosts.wait_running(client, id)
        assert len(client.request(id)["tasks"][0]["lent"]) == 1
        for _ in range(3):  # at any time, also while its images are being kept
            client.post(f"/v1/requests/{id}/hold")
            client.wait_until(id, lambda it: it["tasks"][0]["state"] != "running")
            client.wait_until(id, lambda it: not it["tasks"][0]["seat"])
            client.post(f"/v1/requests/{id}/release")
            hosts.wait_running(client, id)
    task = is_right(hosts, client, id, undisturbed)
    assert task["lost_steps"] == 0, events(client, id)


def test_gang_on_a_number_of_hosts_has_as_many_devices_on_each(hosts, undisturbed):
    client = hosts.client("alpha")
    with hosts.gate() as gate:
        id = train(client, "even", gate=gate, devices={"min": 2, "hosts": 2})
        hosts.wait_running(client, id)
        task = client.request(id)["tasks"][0]
        assert {task["seat"], *task["lent"]} == {"local.0", "local-2.1"}
        assert (task["hosts"], task["across_hosts"]) == (2, True)
    is_right(hosts, client, id, undisturbed)


@pytest.mark.parametrize("victim", ["home", pytest.param("other", marks=pytest.mark.long)])
def test_gang_resumes_from_its_checkpoint_after_the_worker_of_a_host_is_killed(
    hosts, undisturbed, victim
):
    client = hosts.client("alpha")
    wide = {"devices": {"max": 2, **APART}, "retry": {"max": 1}}
    with hosts.gate() as gate:
        id = train(client, f"killed-{victim}", gate=gate, **wide)
        task = until_held(client, id, 2)["tasks"][0]
        device = task["seat"] if victim == "home" else task["lent"][0]
        hosts.kill(f"device.{device.rpartition('.')[2]}")
    task = is_right(hosts, client, id, undisturbed)
    assert (task["epoch"], task["attempts"]) == (2, 0), events(client, id)


# --- graphs ---------------------------------------------------------------------------------------

BOTH = {"min": 2, "max": 2, **APART}
NAP_S = 0.6  # until the gate of the graph opens
EST_MS = 1.0  # declared for each node, as a measured time would change the plan from run to run


def submit(client, name, *, gate=None, **task):
    if gate is None:
        sent = graphs.graph(nap_s=0.0)
        timed = [{**node, "est": {"ms": EST_MS}} for node in sent["nodes"]]
        return graphs.submit(client, name, {**sent, "nodes": timed}, **task)
    slow = graphs.graph(NAP_S, gate=gate.file)
    return graphs.submit(client, name, slow, mounts=gate.mounts, **task)


def graph_of(request):
    return request["tasks"][1]


def until_executors_hold(client, id, devices):
    def held(request):
        task = graph_of(request)
        return task["state"] == "running" and 1 + len(task["lent"]) == devices

    return graph_of(client.wait_until(id, held))


@pytest.fixture(scope="module")
def alone(hosts):
    """Return the graph's result on one device, and the blocks its two executors passed."""
    client = hosts.client("alpha")
    task = graphs.done(client, submit(client, "graph-alone"))
    id = submit(client, "graph-of-two", world_size=2)
    assert graphs.done(client, id)["result"] == task["result"]
    return task["result"], passed(client, id)


def passed(client, id):
    """Assert that blocks passed as planned, with sizes of the earlier run; return them."""
    (plan,) = client.get(f"/v1/requests/{id}/plan")["graphs"]
    assert plan["moved_bytes"] == plan["planned_bytes"] > 0
    return {(c["block"], c["source"], c["target"]): c["moved_bytes"] for c in plan["copies"]}


def graph_is_right(hosts, client, id, alone):
    task = graphs.done(client, id)
    assert (task["result"], task["step"]) == (alone[0], COUNT), events(client, id)
    ran = runs(client.log_text(task["id"]))
    assert overlaps(ran) == []
    hosts.check_ledger()
    return task


def test_a_graph_grows_onto_another_host_and_gives_way_without_a_pause(hosts, alone):
    client, other = hosts.client("alpha"), hosts.client("beta")
    with hosts.gate() as gate:
        id = submit(client, "graph-parts", gate=gate, devices={"max": 2, **APART})
        task = until_executors_hold(client, id, 2)
        assert {task["seat"], *task["lent"]} == {"local.0", "local-2.1"}
        with comes(hosts, other):
            until_executors_hold(client, id, 1)
    task = graph_is_right(hosts, client, id, alone)
    assert (task["pauses"], task["epoch"], task["lost_steps"]) == (0, 1, 0), events(client, id)
    assert any(told.endswith("on 2 devices of 2 hosts.") for told in events(client, id))


def test_only_blocks_that_both_hosts_need_are_sent(hosts, alone):
    client = hosts.client("alpha")
    id = submit(client, "graph-both", devices=BOTH)
    task = graph_is_right(hosts, client, id, alone)
    stays = [*client.items(f"/v1/tasks/{task['id']}/placements")]
    assert {stay["device_id"] for stay in stays} == {"local.0", "local-2.1"}
    assert passed(client, id) == alone[1]


def test_a_graph_on_two_hosts_is_paused_at_any_moment_and_goes_on(hosts, alone):
    client = hosts.client("alpha")
    with hosts.gate() as gate:
        id = submit(client, "graph-held", gate=gate, devices=BOTH)
        until_executors_hold(client, id, 2)
        for _ in range(2):
            client.post(f"/v1/requests/{id}/hold")
            client.wait_until(id, lambda it: graph_of(it)["state"] != "running")
            client.wait_until(id, lambda it: not graph_of(it)["seat"])
            client.post(f"/v1/requests/{id}/release")
            until_executors_hold(client, id, 2)
    task = graph_is_right(hosts, client, id, alone)
    assert task["lost_steps"] == 0, events(client, id)


@pytest.mark.parametrize("victim", ["other", pytest.param("home", marks=pytest.mark.long)])
def test_graph_resumes_from_its_checkpoint_after_the_worker_of_a_host_is_killed(
    hosts, alone, victim
):
    client = hosts.client("alpha")
    devices = {"max": 2, **APART}
    with hosts.gate() as gate:
        id = submit(client, f"graph-{victim}", gate=gate, devices=devices, retry={"max": 1})
        task = until_executors_hold(client, id, 2)
        device = task["seat"] if victim == "home" else task["lent"][0]
        hosts.kill(f"device.{device.rpartition('.')[2]}")
    task = graph_is_right(hosts, client, id, alone)
    assert (task["epoch"], task["attempts"]) == (2, 0), events(client, id)
    assert hosts.until(lambda: not hosts.holders_of("gang-land")), hosts.holders_of("gang-land")


def test_a_graph_on_two_hosts_is_cancelled_and_leaves_nothing(hosts, alone):
    client = hosts.client("alpha")
    with hosts.gate() as gate:
        id = submit(client, "graph-cancelled", gate=gate, devices=BOTH)
        until_executors_hold(client, id, 2)
        client.post(f"/v1/requests/{id}/cancel")
        assert client.wait(id)["state"] == "cancelled"
    assert hosts.until(lambda: not hosts.holders_of("gang-land")), hosts.holders_of("gang-land")
    hosts.check_ledger()


class OnHosts(Processes):
    """The processes of an island with each device on a host of its own."""

    def device(self, name):
        number = name.partition(".")[2]
        return f"{self.island}-{number}.{number}"


@pytest.fixture(scope="module")
def east(hosts):
    """Run an island with two hosts more; set up last, because it is removed again."""
    client = hosts.client("alpha")
    island = OnHosts(hosts.handle, "east", ROUNDHOUSE_MOUNT_ROOTS=str(hosts.shared))
    try:
        island.start("leader", "device.0", "device.1")
        for number in range(2):
            assert hosts.until(lambda n=number: is_up(client, f"east-{n}.{n}"))
        yield island
    finally:
        island.kill()


@pytest.fixture(scope="module")
def whole(hosts):
    """Return the result of a graph of two partitions when it stays in one piece."""
    client = hosts.client("alpha")
    return ended(client, submit_graph(client, "whole", islands=1, nap_s=0.0, graph=crossed))


def hosts_of(client, task):
    stays = client.items(f"/v1/tasks/{task['id']}/placements")
    return {stay["device_id"].partition(".")[0] for stay in stays}


def test_partitions_on_two_islands_have_executors_on_two_hosts_each(hosts, whole, east):
    client = hosts.client("alpha")
    id = submit_graph(client, "parted", nap_s=0.3, graph=crossed, devices=BOTH)
    assert ended(client, id) == whole
    parts = client.request(id)["tasks"]
    assert {part["island"] for part in parts} == {"local", "east"}
    for part in parts:
        assert len(hosts_of(client, part)) == 2
    hosts.check_ledger()


def test_partition_on_two_hosts_leaves_them_for_an_input_and_ends_with_its_maker(hosts, east):
    client = hosts.client("alpha")
    id = submit_graph(client, "lacking", nap_s=0.3, graph=crossed, devices=BOTH, hold=True)
    request = client.wait_until(id, all_placed)
    client.post(f"/v1/tasks/{on(request, 'east')['id']}/resume")
    client.wait_until(id, lambda _: "task.lacks" in told(client, id))
    lacking = on(client.request(id), "east")
    assert (lacking["seat"], len(hosts_of(client, lacking))) == (None, 2)
    client.post(f"/v1/tasks/{on(request, 'local')['id']}/cancel")
    assert client.wait(id)["state"] == "failed"
    lacking = on(client.request(id), "east")
    assert (lacking["state"], lacking["cause"]) == ("failed", "needs")
    hosts.check_ledger()


def test_partitions_on_the_hosts_of_one_island_take_turns_with_their_blocks(hosts, whole, east):
    """Each needs all slots of the island, and blocks that the other makes. Removes the island."""
    client = hosts.client("alpha")
    with hosts.gate() as gate:
        # no block is made before the island is killed
        id = submit_graph(client, "turns", nap_s=30.0, graph=crossed, devices=BOTH, gate=gate)
        client.wait_until(id, both_run)
        east.kill()
    assert ended(client, id) == whole
    assert {task["island"] for task in client.request(id)["tasks"]} == {"local"}
    assert "task.lacks" in told(client, id)
    hosts.check_ledger()
