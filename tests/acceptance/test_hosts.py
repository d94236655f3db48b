"""A job whose ranks may part: it lives on devices of two hosts, and its bits never show it.

Through HTTP alone; two device workers play a host each, and their ranks meet by TCP only.
"""

from __future__ import annotations

import contextlib

import pytest

from app.embedded import temporary_home
from app.up import running
from tests.acceptance.conftest import System
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
    for _ in range(6):  # at any time: also while its images are being kept
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
