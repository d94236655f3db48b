"""Short functions through HTTP: they share processes and messages, and nothing else."""

from __future__ import annotations

from collections import Counter

import pytest

pytestmark = pytest.mark.acceptance


def _submit(client, runs, **more):
    """Submit one function for each run; a run is a name of the module `short`."""
    tasks = [
        {"name": f"f{n}", "run": {"function": f"short:{run}"}, **more} for n, run in enumerate(runs)
    ]
    return client.submit({"name": "short", "bundle": client.bundle, "tasks": tasks})["id"]


def _processes(request):
    return Counter(task["result"]["process"] for task in request["tasks"] if task["result"])


def test_functions_of_a_tenant_share_processes_and_each_is_shown_as_a_task(system):
    client = system.client("alpha")
    request = client.wait(_submit(client, 40 * ["look"]))
    assert request["state"] == "done"
    assert len(_processes(request)) < 20
    for task in request["tasks"]:
        assert task["result"] | {"process": ""} == {
            "process": "", "left": 0, "variable": None, "files": []
        }  # fmt: skip
        assert client.log_text(task["id"]) == ["looks"]
        told = client.get(f"/v1/tasks/{task['id']}")
        assert told["held_us"] > 0
    system.check_ledger()


def test_two_tenants_never_share_a_process(system):
    clients = [system.client(tenant) for tenant in ("alpha", "beta")]
    ids = [(client, _submit(client, 30 * ["look"])) for client in clients for _ in range(2)]
    used = [(client, _processes(client.wait(id))) for client, id in ids]
    mine = {process for client, found in used if client is clients[0] for process in found}
    theirs = {process for client, found in used if client is clients[1] for process in found}
    assert mine
    assert theirs
    assert not mine & theirs


def test_function_that_asks_for_it_has_a_process_of_its_own(system):
    client = system.client("alpha")
    request = client.wait(_submit(client, 6 * ["look"], isolation="process"))
    assert len(_processes(request)) == 6


def test_functions_that_spoil_or_end_their_process_disturb_no_other(system):
    client = system.client("alpha")
    request = client.wait(_submit(client, 8 * ["look", "spoil", "look", "die"]))
    states = Counter((task["state"], task["cause"]) for task in request["tasks"])
    assert states == {("done", None): 24, ("failed", "exit"): 8}
    looks = [task["result"] for task in request["tasks"] if "left" in (task["result"] or {})]
    assert {(each["left"], each["variable"], *each["files"]) for each in looks} == {(0, None)}


def test_batch_gives_way_to_another_tenant_and_loses_nothing(system):
    """Functions that slow down wait behind each other for two seconds at most."""
    client, other = system.client("alpha"), system.client("beta")
    client.wait(_submit(client, 60 * ["look"]))
    slow = _submit(client, 60 * ["look"], params={"nap_s": 0.7})
    client.wait_until(slow, lambda request: request["state"] == "running")
    quick = other.wait(_submit(other, ["look"]))
    assert quick["state"] == "done"
    assert client.request(slow)["state"] == "running"
    request = client.wait(slow)
    assert Counter(task["state"] for task in request["tasks"]) == {"done": 60}
