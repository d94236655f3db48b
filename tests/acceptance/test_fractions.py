"""Tasks with fractions have a device at once; kills and a greedy neighbour change none of their
bits."""

from __future__ import annotations

import pytest

from tests.acceptance.history import overlaps, runs

pytestmark = pytest.mark.acceptance

PARAMS = {"steps": 800, "seed": 3, "step_s": 0.0}
SLOW = {**PARAMS, "step_s": 0.2}
HALF = {"devices": {"fraction": 0.5}, "checkpoint": {"every_s": 1.0, "keep": 2}}


def _task(client, id):
    return client.request(id)["tasks"][0]


def test_two_halves_share_a_device_and_end_right_though_it_is_killed(system):
    clients = [system.client("alpha"), system.client("beta")]
    with system.gate() as gate:
        ids = [client.submit_job("train:Train", name="half", params=SLOW, gate=gate, **HALF)
               for client in clients]  # fmt: skip
        for client, id in zip(clients, ids, strict=True):
            client.wait_until(id, lambda request: request["tasks"][0]["step"] > 10)
        tasks = [_task(client, id) for client, id in zip(clients, ids, strict=True)]
        assert {task["state"] for task in tasks} == {"running"}
        [seat] = {task["seat"] for task in tasks}
        shown = system.client("platform", "platform_admin").get(f"/v1/devices/{seat}")
        assert {*shown["tasks"]} == {task["id"] for task in tasks}

        system.kill("device." + seat.rpartition(".")[2])
    greedy = clients[1].submit_job(
        "greedy:Eat", name="greedy", devices={"fraction": 0.1, "memory_bytes": 64 * 2**20}
    )
    failed = clients[1].wait(greedy)["tasks"][0]
    assert failed["state"] == "failed"
    assert "more memory than its part of the device" in failed["message"]
    ended = [client.wait(id)["tasks"][0] for client, id in zip(clients, ids, strict=True)]
    whole = clients[0].submit_job("train:Train", name="undisturbed", params=PARAMS)
    expected = clients[0].wait(whole)["tasks"][0]["result"]
    for client, task in zip(clients, ended, strict=True):
        assert (task["state"], task["result"]) == ("done", expected), task
        assert overlaps(runs(client.log_text(task["id"]))) == []
    rows = system.sql(
        "select held_us, charged_us, fraction_milli from placements where task_id = any(%s)",
        [task["id"] for task in ended],
    )
    assert len(rows) >= 4  # both were lost with the device, and began again
    for held_us, charged_us, milli in rows:
        assert (charged_us, milli) == (held_us // 2, 500)
    system.check_ledger()
