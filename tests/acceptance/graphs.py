"""The graph of the acceptance tests: shards that draw numbers, then a chain that trains."""

from __future__ import annotations

SHARDS, LENGTH = 40, 90
COUNT = SHARDS + LENGTH + 3


def graph(nap_s=0.03, *, length=LENGTH, gate=""):
    """Return a graph of shards that draw numbers, then a chain that trains.

    Each node sleeps a little, until the file `gate` is there.
    """
    before = ["begin", *(f"train-{n}" for n in range(length))]
    pace = {"nap_s": nap_s, **({"gate": gate} if gate else {})}
    chain = [
        {
            "name": f"train-{n}",
            "function": "ops:train",
            "inputs": {"state": f"{before[n]}.state", "x": "merge.y"},
            "outputs": ["state"],
            "inout": ["state"],
            "params": {"n": n, **pace},
        }
        for n in range(length)
    ]
    shards = {
        "name": "noisy",
        "function": "ops:noisy",
        "inputs": {"x": "input:data"},
        "outputs": ["y"],
        "map": "x",
        "params": pace,
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
    kind = more.get("devices", {}).get("kind", "cpu")
    tasks = [
        {
            "name": "data",
            "run": {"function": "ops:data"},
            "params": {"shards": SHARDS},
            "outputs": ["x"],
            "devices": {"kind": kind},
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
    request = client.wait(id)
    assert request["state"] == "done", request
    return request["tasks"][-1]
