"""Graphs of functions through HTTP: run by name, and finished whatever process is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.cli.bundling import bundle_folder
from examples import programs
from tests.acceptance.graphs import COUNT, LENGTH, SHARDS, done, graph, submit
from tests.acceptance.history import overlaps, runs
from tests.examples import test_programs as plain

pytestmark = pytest.mark.acceptance


@pytest.fixture(scope="module")
def undisturbed(system):
    return done(client := system.client("alpha"), submit(client, "graph-alone", graph()))


@pytest.fixture(scope="module")
def sha256(system, undisturbed):
    """The name of the undisturbed graph; other files send graphs to this system, too."""
    stored = "select descriptor -> 'run' ->> 'graph' from tasks where id = %s"
    [(name,)] = system.sql(stored, undisturbed["id"])
    return name.removeprefix("sha256:")


def test_node_times_of_a_graph_are_known_at_its_next_run(system, sha256):
    [(took_ms,)] = system.sql("select took_ms from graphs where sha256 = %s", sha256)
    assert len(took_ms["cpu"]) == LENGTH + 4
    assert took_ms["cpu"]["noisy"] >= 30
    assert took_ms["cpu"]["train-1"] >= 30
    [(made_bytes,)] = system.sql("select made_bytes from graphs where sha256 = %s", sha256)
    assert made_bytes["merge.y"] > 0


def test_stored_graph_runs_by_its_name(system, undisturbed, sha256):
    client = system.client("alpha")
    (sent,) = [g for g in client.items("/v1/graphs") if g["sha256"] == sha256]
    assert sent["nodes"] == LENGTH + 4
    again = done(client, submit(client, "graph-by-name", f"sha256:{sha256}"))
    assert again["result"] == undisturbed["result"]
    assert again["step"] == undisturbed["step"] == COUNT


def test_killed_device_costs_a_graph_the_work_since_its_last_checkpoint(system, undisturbed):
    client = system.client("beta")
    with system.gate() as gate:
        id = submit(
            client,
            "graph-killed",
            graph(0.3, gate=gate.file),
            mounts=gate.mounts,
            checkpoint={"every_s": 1000.0},
        )

        def is_in_the_middle(request):
            return request["tasks"][1]["step"] > SHARDS + 5

        task_id = client.wait_until(id, is_in_the_middle)["tasks"][1]["id"]
        client.post(f"/v1/tasks/{task_id}/checkpoint")

        def is_past_its_checkpoint(request):
            found = [item["step"] for item in client.items(f"/v1/tasks/{task_id}/checkpoints")]
            return found and request["tasks"][1]["step"] > max(found)

        client.wait_until(id, is_past_its_checkpoint)
        system.kill("device." + client.get(f"/v1/tasks/{task_id}")["seat"].rpartition(".")[2])

    task = done(client, id)
    assert task["result"] == undisturbed["result"]
    after, before = client.items(f"/v1/tasks/{task_id}/placements")
    assert (before["end"], after["end"]) == ("lost", "finished")
    assert 0 < after["first_step"] < before["last_step"]
    assert task["lost_steps"] == before["last_step"] - after["first_step"]
    ran = runs(client.log_text(task_id))
    assert overlaps(ran) == []
    assert {run.step for run in ran} == set(range(LENGTH))
    assert task["held_us"] == before["held_us"] + after["held_us"]
    system.check_ledger()


def test_a_graph_that_is_moved_ends_with_the_same_bits(system, undisturbed):
    client = system.client("gamma")
    with system.gate() as gate:
        id = submit(client, "graph-moved", graph(0.3, gate=gate.file), mounts=gate.mounts)

        def is_under_way(request):
            return request["tasks"][1]["state"] == "running" and request["tasks"][1]["step"] > 5

        task_id = client.wait_until(id, is_under_way)["tasks"][1]["id"]
        client.post(f"/v1/tasks/{task_id}/migrate")
        assert system.until(lambda: client.get(f"/v1/tasks/{task_id}")["move_to"] is None)
    task = done(client, id)
    assert task["result"] == undisturbed["result"]
    assert task["lost_steps"] == 0
    after, before = client.items(f"/v1/tasks/{task_id}/placements")
    assert after["device_id"] != before["device_id"]
    assert after["first_step"] == before["last_step"]


@pytest.mark.parametrize("name", ["ensemble", "k-means"])
def test_example_gives_what_plain_code_gives(name, system):
    client = system.client("alpha")
    found = bundle_folder(Path(programs.__file__).parent / "graphs")
    client.upload(found.sha256, found.body)
    request = {**programs.request(name), "bundle": f"sha256:{found.sha256}"}
    task = client.wait(client.submit(request)["id"])["tasks"][0]
    assert task["state"] == "done", task
    for key, value in getattr(plain, name.replace("-", "_"))().items():
        assert task["result"][key] == pytest.approx(value, rel=1e-6)
