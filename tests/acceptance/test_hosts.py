"""Jobs and graphs that may use devices of two hosts: their ranks or executors spread over both.

The bits must never depend on it. Through HTTP alone; each of two device workers plays a host, and
their ranks communicate by TCP only.
"""

from __future__ import annotations

import contextlib

import pytest

from app.local.embedded_servers import temporary_home
from app.local.up import running
from tests.acceptance import test_graphs
from tests.acceptance.conftest import System
from tests.acceptance.history import overlaps, runs
from tests.acceptance.test_graphs import COUNT
from tests.acceptance.test_islands import Processes, crossed, ended, is_up, submit_graph
from tests.acceptance.test_splicing import RANKS, REST_S, ended_right, train, until_held

pytestmark = pytest.mark.acceptance

APART = {"across_hosts": True}


@pytest.fixture(scope="module")
def hosts():
    with (
        temporary_home() as home,
        running(home, devices=2, hosts=2) as handle,
        contextlib.closing(System(handle)) as system,
    ):
        yield system


@pytest.fixture(scope="module")
def undisturbed(hosts):
    client = hosts.client("alpha")
    return client.wait(train(client, "alone", step_s=0.0), timeout_s=REST_S)["tasks"][0]


def events(client, id):
    return [event["message"] for event in client.items(f"/v1/requests/{id}/events", limit=200)]


def is_right(hosts, client, id, undisturbed):
    task = ended_right(client, id, undisturbed)
    steps = [row["step"] for row in client.items(f"/v1/tasks/{task['id']}/metrics", limit=200)]
    assert len(steps) == len(set(steps))
    hosts.check_ledger()
    return task


def test_it_grows_onto_another_host_and_gives_way_without_a_pause(hosts, undisturbed):
    client, other = hosts.client("alpha"), hosts.client("beta")
    id = train(client, "parts", devices={"max": RANKS, **APART})
    task = until_held(client, id, 2)["tasks"][0]
    assert {task["seat"], *task["lent"]} == {"local.0", "local-2.1"}
    comes = other.submit_job("train:Train", name="comes", params={"steps": 30})
    until_held(client, id, 1)
    assert other.wait(comes, timeout_s=REST_S)["state"] == "done"
    task = is_right(hosts, client, id, undisturbed)
    assert (task["pauses"], task["epoch"], task["lost_steps"]) == (0, 1, 0), events(client, id)
    assert any(told.endswith("on 2 devices of 2 hosts.") for told in events(client, id))
    stays = list(client.items(f"/v1/tasks/{task['id']}/placements"))
    assert all(stay["held_us"] > 0 for stay in stays if stay["end"] == "resized")


def test_it_stays_on_its_host_if_nothing_else_is_said(hosts, undisturbed):
    client = hosts.client("alpha")
    id = train(client, "stays")
    task = is_right(hosts, client, id, undisturbed)
    assert len(list(client.items(f"/v1/tasks/{task['id']}/placements"))) == 1


def test_a_gang_that_needs_two_devices_begins_on_two_hosts_and_is_paused_as_any_other(
    hosts, undisturbed
):
    client = hosts.client("alpha")
    id = train(client, "wide", devices={"min": 2, "max": 2, **APART})
    hosts.wait_running(client, id)
    assert len(client.request(id)["tasks"][0]["lent"]) == 1
    for _ in range(6):  # at any time, also while its images are being kept
        client.post(f"/v1/requests/{id}/hold")
        client.wait_until(id, lambda it: it["tasks"][0]["state"] != "running", timeout_s=REST_S)
        client.wait_until(id, lambda it: not it["tasks"][0]["seat"], timeout_s=REST_S)
        client.post(f"/v1/requests/{id}/release")
        hosts.wait_running(client, id)
    task = is_right(hosts, client, id, undisturbed)
    assert task["lost_steps"] == 0, events(client, id)


@pytest.mark.parametrize("victim", ["home", "other"])
def test_the_worker_of_a_host_is_killed_and_it_goes_on_from_its_checkpoint(
    hosts, undisturbed, victim
):
    client = hosts.client("alpha")
    id = train(client, f"killed-{victim}", devices={"max": 2, **APART}, retry={"max": 1})
    task = until_held(client, id, 2)["tasks"][0]
    device = task["seat"] if victim == "home" else task["lent"][0]
    hosts.kill(f"device.{device.rpartition('.')[2]}")
    task = is_right(hosts, client, id, undisturbed)
    assert (task["epoch"], task["attempts"]) == (2, 0), events(client, id)


# --- graphs ---------------------------------------------------------------------------------------

BOTH = {"min": 2, "max": 2, **APART}
NAP_S = 0.1


def submit(client, name, *, nap_s=NAP_S, **task):
    return test_graphs.submit(client, name, test_graphs.graph(nap_s), **task)


def graph_of(request):
    return request["tasks"][1]


def until_executors_hold(client, id, devices):
    def held(request):
        task = graph_of(request)
        return task["state"] == "running" and 1 + len(task["lent"]) == devices

    return graph_of(client.wait_until(id, held, timeout_s=REST_S))


@pytest.fixture(scope="module")
def alone(hosts):
    """Return the graph's result on one device, and the blocks its two executors passed."""
    client = hosts.client("alpha")
    task = test_graphs.done(client, submit(client, "graph-alone", nap_s=0.0))
    id = submit(client, "graph-of-two", nap_s=0.0, world_size=2)
    assert test_graphs.done(client, id)["result"] == task["result"]
    return task["result"], passed(client, id)


def passed(client, id):
    """Assert that blocks passed as planned, with sizes of the earlier run; return them."""
    (plan,) = client.get(f"/v1/requests/{id}/plan")["graphs"]
    assert plan["moved_bytes"] == plan["planned_bytes"] > 0
    return {(c["block"], c["source"], c["target"]): c["moved_bytes"] for c in plan["copies"]}


def graph_is_right(hosts, client, id, alone):
    task = test_graphs.done(client, id)
    assert (task["result"], task["step"]) == (alone[0], COUNT), events(client, id)
    ran = runs(client.log_text(task["id"]))
    assert overlaps(ran) == []
    hosts.check_ledger()
    return task


def test_a_graph_grows_onto_another_host_and_gives_way_without_a_pause(hosts, alone):
    client, other = hosts.client("alpha"), hosts.client("beta")
    id = submit(client, "graph-parts", devices={"max": 2, **APART})
    task = until_executors_hold(client, id, 2)
    assert {task["seat"], *task["lent"]} == {"local.0", "local-2.1"}
    comes = other.submit_job("train:Train", name="comes", params={"steps": 30})
    until_executors_hold(client, id, 1)
    assert other.wait(comes, timeout_s=REST_S)["state"] == "done"
    task = graph_is_right(hosts, client, id, alone)
    assert (task["pauses"], task["epoch"], task["lost_steps"]) == (0, 1, 0), events(client, id)
    assert any(told.endswith("on 2 devices of 2 hosts.") for told in events(client, id))


def test_blocks_that_executors_of_two_hosts_need_are_those_that_pass_on_one(hosts, alone):
    client = hosts.client("alpha")
    id = submit(client, "graph-both", nap_s=0.0, devices=BOTH)
    task = graph_is_right(hosts, client, id, alone)
    stays = [*client.items(f"/v1/tasks/{task['id']}/placements")]
    assert {stay["device_id"] for stay in stays} == {"local.0", "local-2.1"}
    assert passed(client, id) == alone[1]


def test_a_graph_on_two_hosts_is_paused_at_any_moment_and_goes_on(hosts, alone):
    client = hosts.client("alpha")
    id = submit(client, "graph-held", devices=BOTH)
    until_executors_hold(client, id, 2)
    for _ in range(4):
        client.post(f"/v1/requests/{id}/hold")
        client.wait_until(id, lambda it: graph_of(it)["state"] != "running", timeout_s=REST_S)
        client.wait_until(id, lambda it: not graph_of(it)["seat"], timeout_s=REST_S)
        client.post(f"/v1/requests/{id}/release")
        until_executors_hold(client, id, 2)
    task = graph_is_right(hosts, client, id, alone)
    assert task["lost_steps"] == 0, events(client, id)


@pytest.mark.parametrize("victim", ["home", "other"])
def test_the_worker_of_a_host_is_killed_and_its_graph_goes_on_from_its_checkpoint(
    hosts, alone, victim
):
    client = hosts.client("alpha")
    devices = {"max": 2, **APART}
    id = submit(client, f"graph-{victim}", devices=devices, retry={"max": 1})
    task = until_executors_hold(client, id, 2)
    device = task["seat"] if victim == "home" else task["lent"][0]
    hosts.kill(f"device.{device.rpartition('.')[2]}")
    task = graph_is_right(hosts, client, id, alone)
    assert (task["epoch"], task["attempts"]) == (2, 0), events(client, id)
    assert hosts.until(lambda: not hosts.holders_of("gang-land")), hosts.holders_of("gang-land")


def test_a_graph_on_two_hosts_is_cancelled_and_leaves_nothing(hosts, alone):
    client = hosts.client("alpha")
    id = submit(client, "graph-cancelled", devices=BOTH)
    until_executors_hold(client, id, 2)
    client.post(f"/v1/requests/{id}/cancel")
    assert client.wait(id, timeout_s=REST_S)["state"] == "cancelled"
    assert hosts.until(lambda: not hosts.holders_of("gang-land")), hosts.holders_of("gang-land")
    hosts.check_ledger()


class OnHosts(Processes):
    """The processes of an island with each device on a host of its own."""

    def device(self, name):
        number = name.partition(".")[2]
        return f"{self.island}-{number}.{number}"


def test_partitions_of_a_graph_on_two_islands_have_executors_on_two_hosts_each(hosts):
    """Runs last, because the other island is removed again."""
    client = hosts.client("alpha")
    whole = ended(client, submit_graph(client, "whole", islands=1, nap_s=0.0, graph=crossed))
    east = OnHosts(hosts.handle, "east")
    try:
        east.start("leader", "device.0", "device.1")
        for number in range(2):
            assert hosts.until(lambda n=number: is_up(client, f"east-{n}.{n}"))
        id = submit_graph(client, "parted", nap_s=0.3, graph=crossed, devices=BOTH)
        assert ended(client, id) == whole
    finally:
        east.kill()
    parts = client.request(id)["tasks"]
    assert {part["island"] for part in parts} == {"local", "east"}
    for part in parts:
        stays = client.items(f"/v1/tasks/{part['id']}/placements")
        assert len({stay["device_id"].partition(".")[0] for stay in stays}) == 2
    hosts.check_ledger()
