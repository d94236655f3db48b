"""Graphs of several tenants share devices by weight, move between them, and keep their bits."""

from __future__ import annotations

import pytest

from tests.acceptance.graphs import SHARDS, done, graph, submit
from tests.acceptance.history import overlaps, runs

pytestmark = pytest.mark.acceptance

#: Nodes of a chain.  A graph whose gate is shut lasts one and a half minutes on its own device.
LENGTH, NAP_S = 400, 0.2
JUDGED_S = 24.0  # device time over which shares are judged


@pytest.fixture(scope="module")
def undisturbed(system):
    client, free = system.client("alpha"), graph(nap_s=0.0, length=LENGTH)
    return done(client, submit(client, "graph-alone", free))


@pytest.fixture
def gate(system):
    with system.gate() as gate:
        yield gate


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
    return system.client_with(made["key"])


def submit_with_data(client, name, gate):
    """Submit the graph as one task, with a node that makes its data; return the request's id."""
    data = {"name": "data", "function": "ops:data", "outputs": ["x"], "params": {"shards": SHARDS}}
    sent = graph(NAP_S, length=LENGTH, gate=gate.file)
    noisy, *others = sent["nodes"]
    whole = {**sent, "nodes": [data, {**noisy, "inputs": {"x": "data.x"}}, *others]}
    task = {"name": "graph", "run": {"graph": whole}, "outputs": ["merged"]}
    task |= {"mounts": gate.mounts, "checkpoint": {"every_s": 0.5, "keep": 2}}
    task |= {"retry": {"max": 1}}
    return client.submit({"name": name, "bundle": client.bundle, "tasks": [task]})["id"]


def task_of(client, id):
    return client.request(id)["tasks"][0]["id"]


def test_graphs_of_two_tenants_share_a_device_and_give_the_same_bits(
    system, undisturbed, one_device, gate
):
    """Each graph is one task: a function beside them would wait for the end of a slice."""
    admin, device = one_device
    clients = [newcomer(system, admin, name) for name in ("sharer-a", "sharer-b")]
    sent = {client: submit_with_data(client, "sharer", gate) for client in clients}
    tasks = {client: task_of(client, id) for client, id in sent.items()}

    def is_shared():
        return set(admin.get(f"/v1/devices/{device}")["tasks"]) == set(tasks.values())

    assert system.until(is_shared)
    for client, task in tasks.items():
        (mine,) = [each for each in client.items("/v1/devices") if each["id"] == device]
        assert (mine["busy"], mine["task_id"], mine["tasks"]) == (True, task, [task])
    told = [client.get(f"/v1/tasks/{task}/explain")["message"] for client, task in tasks.items()]
    assert all("with another graph" in message for message in told), told
    gate.open()
    for client, id in sent.items():
        task = done(client, id)
        assert task["result"] == undisturbed["result"]
        assert task["lost_steps"] == 0
    system.check_ledger()


HELD = """
    select tenant.name, sum(placement.held_us)::float / 1e6
    from placements placement join tenants tenant on tenant.id = placement.tenant_id
    where tenant.name = any(%s) group by 1
"""


def test_graphs_of_four_tenants_share_two_devices_by_weight_and_give_the_same_bits(
    system, undisturbed, gate
):
    admin = system.client("platform", "platform_admin")
    weights = {"one": 1, "two": 2, "four": 4, "eight": 8}
    clients = {name: newcomer(system, admin, name, weight) for name, weight in weights.items()}
    sent = [
        (client, submit_with_data(client, name, gate))
        for _ in range(2)
        for name, client in clients.items()
    ]
    tasks = {task_of(client, id) for client, id in sent}

    def on_devices():
        return set().union(*(device["tasks"] for device in admin.items("/v1/devices")))

    assert system.until(lambda: tasks <= on_devices()), on_devices()
    samples = []

    def parts():
        """Return the part of each tenant in the newest device time, or none of so much."""
        now = dict(system.sql(HELD, list(weights)))
        before = [old for old in samples if sum(now.values()) - sum(old.values()) >= JUDGED_S]
        samples.append(now)
        if not before:
            return {}
        held = {name: now[name] - before[-1][name] for name in weights}
        return {name: s / sum(held.values()) for name, s in held.items()}

    def are_fair():
        """Judge the newest time: the first graphs wait for the others to catch up."""
        found = parts()
        due = {name: weight / sum(weights.values()) for name, weight in weights.items()}
        return found and all(abs(found[name] - due[name]) <= 0.06 for name in due)

    assert system.until(are_fair), samples[-1]
    gate.open()
    for client, id in sent:
        task = done(client, id)
        assert task["result"] == undisturbed["result"]
        assert (task["lost_steps"], task["attempts"]) == (0, 0)
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
    system, undisturbed, gate
):
    admin = system.client("platform", "platform_admin")
    names = ["third-a", "third-b", "third-c"]
    clients = [newcomer(system, admin, name) for name in names]
    sent = [submit_with_data(client, "third", gate) for client in clients]
    tasks = [task_of(client, id) for client, id in zip(clients, sent, strict=True)]

    def moved():
        [(count,)] = system.sql(MOVES, tasks)
        return count >= 2

    def are_even():
        held = dict(system.sql(HELD, names))
        return max(held.values()) - min(held.values()) <= 8

    assert system.until(moved)
    assert system.until(are_even), system.sql(HELD, names)
    gate.open()
    for client, id in zip(clients, sent, strict=True):
        task = done(client, id)
        assert task["result"] == undisturbed["result"]
        assert (task["lost_steps"], task["attempts"]) == (0, 0)
    system.check_ledger()


@pytest.mark.parametrize("victim", ["device", "island"])
def test_graphs_end_right_whichever_process_is_killed_during_a_move(
    system, undisturbed, gate, victim
):
    """Kill the source device, or the scheduler, after a move was decided."""
    admin = system.client("platform", "platform_admin")
    clients = [newcomer(system, admin, f"killed-{victim}-{name}") for name in "abc"]
    sent = [submit_with_data(client, "killed", gate) for client in clients]
    tasks = [task_of(client, id) for client, id in zip(clients, sent, strict=True)]

    def moves():
        """Return the device that each of the graphs left, move by move."""
        return [device for (device,) in system.sql(MOVED, tasks)]

    before = moves()
    assert system.until(lambda: len(moves()) > len(before))
    number = moves()[-1].rpartition(".")[2]
    system.kill(f"device.{number}" if victim == "device" else victim)
    gate.open()
    for client, id in zip(clients, sent, strict=True):
        task = done(client, id)
        assert task["result"] == undisturbed["result"]
        assert overlaps(runs(client.log_text(task["id"]))) == []
    system.check_ledger()
