"""Graphs of functions through HTTP: run by name, and finished whatever process is killed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from app.cli.bundling import bundle_folder
from examples import programs
from tests.acceptance.conftest import TenantClient
from tests.acceptance.history import overlaps, runs
from tests.examples import test_programs as plain

pytestmark = pytest.mark.acceptance

SHARDS, LENGTH = 40, 90
COUNT = SHARDS + LENGTH + 3


def graph(nap_s=0.03):
    """Return a graph of shards that draw numbers, then a chain that trains.

    Each node sleeps a little.
    """
    before = ["begin", *(f"train-{n}" for n in range(LENGTH))]
    chain = [
        {
            "name": f"train-{n}",
            "function": "ops:train",
            "inputs": {"state": f"{before[n]}.state", "x": "merge.y"},
            "outputs": ["state"],
            "inout": ["state"],
            "params": {"n": n, "nap_s": nap_s},
        }
        for n in range(LENGTH)
    ]
    shards = {
        "name": "noisy",
        "function": "ops:noisy",
        "inputs": {"x": "input:data"},
        "outputs": ["y"],
        "map": "x",
        "params": {"nap_s": nap_s},
    }
    merge = {"name": "merge", "function": "ops:merge", "inputs": {"xs": "noisy.y"}}
    finish = {
        "name": "finish",
        "function": "ops:finish",
        "inputs": {"state": f"{before[-1]}.state"},
    }
    nodes = [
        shards,
        {**merge, "outputs": ["y"]},
        {"name": "begin", "function": "ops:begin", "outputs": ["state"]},
        *chain,
        {**finish, "outputs": ["parameters"]},
    ]
    return {"nodes": nodes, "outputs": {"parameters": "finish.parameters", "merged": "merge.y"}}


def submit(client, name, sent, **more):
    """Submit a function that makes the data, and the graph that works on it."""
    tasks = [
        {
            "name": "data",
            "run": {"function": "ops:data"},
            "params": {"shards": SHARDS},
            "outputs": ["x"],
        },
        {
            "name": "graph",
            "run": {"graph": sent},
            "inputs": {"data": "data.x"},
            "outputs": ["merged"],
            "checkpoint": {"every_s": 0.5, "keep": 2},
            **more,
        },
    ]
    return client.submit({"name": name, "bundle": client.bundle, "tasks": tasks})["id"]


def done(client, id):
    request = client.wait(id, timeout_s=120)
    assert request["state"] == "done", request
    return request["tasks"][-1]


@pytest.fixture(scope="module")
def undisturbed(system):
    return done(client := system.client("alpha"), submit(client, "graph-alone", graph()))


def test_how_long_its_nodes_took_is_known_when_it_comes_again(system, undisturbed):
    [(took_ms,)] = system.sql("select took_ms from graphs where nodes = %s", LENGTH + 4)
    assert len(took_ms["cpu"]) == LENGTH + 4
    assert took_ms["cpu"]["noisy"] >= 30
    assert took_ms["cpu"]["train-1"] >= 30
    [(made_bytes,)] = system.sql("select made_bytes from graphs where nodes = %s", LENGTH + 4)
    assert made_bytes["merge.y"] > 0


def test_a_graph_runs_by_its_name_once_it_was_sent(system, undisturbed):
    client = system.client("alpha")
    (sent,) = [g for g in client.items("/v1/graphs") if g["nodes"] == LENGTH + 4]
    again = done(client, submit(client, "graph-by-name", f"sha256:{sent['sha256']}"))
    assert again["result"] == undisturbed["result"]
    assert again["step"] == undisturbed["step"] == COUNT


def test_a_killed_device_costs_a_graph_what_ran_since_the_last_checkpoint(system, undisturbed):
    client = system.client("beta")
    id = submit(client, "graph-killed", graph())

    def is_in_the_middle(request):
        task = request["tasks"][1]
        saved = [item["step"] for item in client.items(f"/v1/tasks/{task['id']}/checkpoints")]
        return saved and task["step"] > max(SHARDS + 5, *saved)

    task_id = client.wait_until(id, is_in_the_middle, timeout_s=60)["tasks"][1]["id"]
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
    id = submit(client, "graph-moved", graph(nap_s=0.1))

    def is_under_way(request):
        return request["tasks"][1]["state"] == "running" and request["tasks"][1]["step"] > 5

    task_id = client.wait_until(id, is_under_way, timeout_s=60)["tasks"][1]["id"]
    client.post(f"/v1/tasks/{task_id}/migrate")
    task = done(client, id)
    assert task["result"] == undisturbed["result"]
    assert task["lost_steps"] == 0
    after, before = client.items(f"/v1/tasks/{task_id}/placements")
    assert after["device_id"] != before["device_id"]
    assert after["first_step"] == before["last_step"]


@pytest.fixture
def one_device(system):
    """Leave one device uncordoned; yields it with an admin's client that sees all tasks."""
    admin = system.client("platform", "platform_admin")
    first, *others = [device["id"] for device in admin.items("/v1/devices")]
    for device in others:
        admin.post(f"/v1/devices/{device}/cordon")
    yield admin, first
    for device in others:
        admin.post(f"/v1/devices/{device}/uncordon")


def newcomer(system, admin, name, weight=1):
    """Return a client of a new tenant without guarantee and usage."""
    tenant = admin.post("/v1/tenants", {"name": name, "weight": weight})["id"]
    user = admin.post("/v1/users", {"tenant_id": tenant, "name": "ann"})["id"]
    made = admin.post("/v1/keys", {"user_id": user, "role": "member", "name": "for the test"})
    return TenantClient(system.url, made["key"])


def test_graphs_of_two_tenants_share_a_device_and_give_the_same_bits(
    system, undisturbed, one_device
):
    admin, device = one_device
    sent = {}
    for name in ("sharer-a", "sharer-b"):
        client = newcomer(system, admin, name)
        sent[client] = submit(client, name, graph(nap_s=0.06))
    tasks = {client: client.request(id)["tasks"][1]["id"] for client, id in sent.items()}

    def is_shared():
        return set(admin.get(f"/v1/devices/{device}")["tasks"]) == set(tasks.values())

    assert system.until(is_shared)
    for client, task in tasks.items():
        (mine,) = [each for each in client.items("/v1/devices") if each["id"] == device]
        assert (mine["busy"], mine["task_id"], mine["tasks"]) == (True, task, [task])
    told = [client.get(f"/v1/tasks/{task}/explain")["message"] for client, task in tasks.items()]
    assert all("with another graph" in message for message in told), told
    for client, id in sent.items():
        task = done(client, id)
        assert task["result"] == undisturbed["result"]
        assert task["lost_steps"] == 0
        client.close()
    system.check_ledger()


HELD = """
    select tenant.name, sum(placement.held_us)::float / 1e6
    from placements placement join tenants tenant on tenant.id = placement.tenant_id
    where tenant.name = any(%s) group by 1
"""


def with_data(sent):
    """Return the graph with a node that makes its data."""
    data = {"name": "data", "function": "ops:data", "outputs": ["x"], "params": {"shards": SHARDS}}
    noisy, *others = sent["nodes"]
    return {**sent, "nodes": [data, {**noisy, "inputs": {"x": "data.x"}}, *others]}


def test_graphs_of_four_tenants_share_two_devices_by_weight_and_give_the_same_bits(
    system, undisturbed
):
    admin = system.client("platform", "platform_admin")
    weights = {"one": 1, "two": 2, "four": 4, "eight": 8}
    clients = {name: newcomer(system, admin, name, weight) for name, weight in weights.items()}
    task = {"name": "graph", "run": {"graph": with_data(graph(nap_s=0.18))}, "outputs": ["merged"]}
    sent = [
        (client, client.submit({"name": name, "bundle": client.bundle, "tasks": [task]})["id"])
        for _ in range(2)
        for name, client in clients.items()
    ]
    tasks = {client.request(id)["tasks"][0]["id"] for client, id in sent}

    def on_devices():
        return set().union(*(device["tasks"] for device in admin.items("/v1/devices")))

    assert system.until(lambda: tasks <= on_devices()), on_devices()
    time.sleep(6)  # until the first ones have waited for the others
    before = dict(system.sql(HELD, list(weights)))
    time.sleep(12)  # the judged time
    held = {name: s - before[name] for name, s in system.sql(HELD, list(weights))}
    for name, weight in weights.items():
        part = held[name] / sum(held.values())
        assert abs(part - weight / sum(weights.values())) <= 0.06, held
    for client, id in sent:
        task = done(client, id)
        assert task["result"] == undisturbed["result"]
        assert (task["lost_steps"], task["attempts"]) == (0, 0)
    for client in clients.values():
        client.close()
    system.check_ledger()


MOVES = """
    select count(*) from decisions
    where rule = 'regroup' and task_id = any(%s)
"""


MOVED = """
    select (
        select device_id from placements
        where placements.task_id = decisions.task_id and launched_at < at
        order by launched_at desc limit 1
    ) from decisions where rule = 'regroup' and task_id = any(%s) order by id
"""


def test_three_graphs_on_two_devices_move_between_them_and_have_two_thirds_each(
    system, undisturbed
):
    admin = system.client("platform", "platform_admin")
    names = ["third-a", "third-b", "third-c"]
    clients = [newcomer(system, admin, name) for name in names]
    sent = [submit(client, "third", graph(nap_s=0.2)) for client in clients]
    tasks = [client.request(id)["tasks"][1]["id"] for client, id in zip(clients, sent, strict=True)]

    def moved():
        [(count,)] = system.sql(MOVES, tasks)
        return count >= 2

    assert system.until(moved)
    held = dict(system.sql(HELD, names))
    assert max(held.values()) - min(held.values()) <= 8, held
    for client, id in zip(clients, sent, strict=True):
        task = done(client, id)
        assert task["result"] == undisturbed["result"]
        assert (task["lost_steps"], task["attempts"]) == (0, 0)
        client.close()
    system.check_ledger()


def test_whoever_is_killed_just_as_a_graph_moves_between_devices_all_end_right(system, undisturbed):
    """Kill the scheduler after it decided a move, and after another move the source device."""
    admin = system.client("platform", "platform_admin")
    clients = [newcomer(system, admin, f"killed-{name}") for name in "abc"]
    sent = [submit(client, "killed", graph(nap_s=0.3), retry={"max": 1}) for client in clients]
    tasks = [client.request(id)["tasks"][1]["id"] for client, id in zip(clients, sent, strict=True)]

    def moves():
        """Return the device that each of the graphs left, move by move."""
        return [device for (device,) in system.sql(MOVED, tasks)]

    for victim in ("island", "device"):
        before = moves()
        assert system.until(lambda before=before: len(moves()) > len(before))
        number = moves()[-1].rpartition(".")[2]
        system.kill(f"device.{number}" if victim == "device" else victim)
    for client, id in zip(clients, sent, strict=True):
        task = done(client, id)
        assert task["result"] == undisturbed["result"]
        assert overlaps(runs(client.log_text(task["id"]))) == []
        client.close()
    system.check_ledger()


def test_a_graph_is_lent_a_second_device_and_gives_the_same_bits(system, undisturbed):
    client = system.client("beta")
    id = submit(client, "graph-wide", graph(nap_s=0.06), devices={"max": 2})
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
    first = other.submit_job("train:Train", name="before", params={"steps": 40})
    system.wait_running(other, first)
    id = submit(client, "graph-two", graph(), devices={"min": 2, "max": 2})
    client.wait_until(id, lambda request: request["tasks"][1]["state"] == "running", timeout_s=60)
    task_id = client.request(id)["tasks"][1]["id"]
    task = client.get(f"/v1/tasks/{task_id}")
    assert len({task["seat"], *task["lent"]}) == 2, task
    task = done(client, id)
    assert task["result"] == undisturbed["result"]
    assert task["step"] == COUNT
    stays = [*client.items(f"/v1/tasks/{task_id}/placements")]
    assert len({stay["device_id"] for stay in stays if stay["epoch"] == 1}) == 2, stays
    (plan,) = client.get(f"/v1/requests/{id}/plan")["graphs"]
    assert plan["executors"] == 2
    assert plan["moved_bytes"] > 0
    assert other.wait(first, timeout_s=60)["state"] == "done"
    system.check_ledger()


def test_a_killed_executor_costs_what_ran_since_the_last_checkpoint(system, undisturbed):
    client = system.client("gamma")
    more = {"devices": {"max": 2}, "retry": {"max": 1}}
    id = submit(client, "graph-executor-killed", graph(nap_s=0.06), **more)

    def is_saved(request):
        task = request["tasks"][1]
        saved = [item["step"] for item in client.items(f"/v1/tasks/{task['id']}/checkpoints")]
        return saved and task["step"] > max(5, *saved)

    client.wait_until(id, is_saved, timeout_s=60)
    system.kill("resident")
    task = done(client, id)
    assert task["result"] == undisturbed["result"]
    assert task["attempts"] == 1, task
    assert overlaps(runs(client.log_text(task["id"]))) == []
    system.check_ledger()


@pytest.mark.parametrize("victim", ["device.0", "island"])
def test_whoever_is_killed_it_ends_right_and_leaves_no_memory(victim, system, undisturbed):
    client = system.client("alpha")
    id = submit(client, f"graph-{victim}-killed", graph(nap_s=0.06), devices={"max": 2})
    client.wait_until(id, lambda request: request["tasks"][1]["step"] > 5, timeout_s=60)
    assert system.holders_of("gang-land")
    system.kill(victim)
    task = done(client, id)
    assert task["result"] == undisturbed["result"]
    assert overlaps(runs(client.log_text(task["id"]))) == []
    system.check_ledger()
    assert system.until(lambda: not system.holders_of("gang-land")), system.holders_of("gang-land")


@pytest.mark.parametrize("name", ["ensemble", "k-means"])
def test_an_example_gives_what_plain_code_gives(name, system):
    client = system.client("alpha")
    found = bundle_folder(Path(programs.__file__).parent / "graphs")
    client.upload(found.sha256, found.body)
    request = {**programs.request(name), "bundle": f"sha256:{found.sha256}"}
    task = client.wait(client.submit(request)["id"], timeout_s=60)["tasks"][0]
    assert task["state"] == "done", task
    for key, value in getattr(plain, name.replace("-", "_"))().items():
        assert task["result"][key] == pytest.approx(value, rel=1e-6)
