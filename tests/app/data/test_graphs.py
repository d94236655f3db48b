"""Graphs: sent with a request or before it, checked as a whole, run by their name."""

from __future__ import annotations

import copy
import hashlib

import pytest
from sqlalchemy import select, update

from app.core.model.graphs import task_graph
from app.data import graphs
from app.db.models import Device, Graph, Host, Island, Task
from app.scheduling import housekeeping
from app.settings import settings
from app.storage.store import Store, blob
from tests.app.conftest import BUNDLE, problem, sha256, zipped

CODE = """
def split(ctx, raw): ...
def work(ctx, part): ...
def vote(ctx, parts): ...
class Job:
    def step(self, ctx): ...
"""
FUNCTIONS = zipped(ops=CODE)
GRAPH = {
    "nodes": [
        {
            "name": "split",
            "function": "ops:split",
            "inputs": {"raw": "input:raw"},
            "outputs": ["p"],
        },
        {
            "name": "work",
            "function": "ops:work",
            "inputs": {"part": "split.p"},
            "outputs": ["r"],
            "map": "part",
        },
        {"name": "vote", "function": "ops:vote", "inputs": {"parts": "work.r"}, "outputs": ["y"]},
    ],
    "outputs": {"y": "vote.y"},
}


def named(graph):
    return hashlib.sha256(task_graph.canonical(graph)).hexdigest()


def request(graph, **task):
    """A task that makes what the graph reads, and one that runs the graph."""
    make = {"name": "make", "run": {"function": "ops:split"}, "outputs": ["raw"]}
    whole = {
        "name": "whole",
        "run": {"graph": graph},
        "inputs": {"raw": "make.raw"},
        "outputs": ["y"],
        **task,
    }
    return {"tasks": [make, whole], "bundle": f"sha256:{sha256(FUNCTIONS)}"}


@pytest.fixture
def client(as_):
    client = as_("red.member")
    client.put(f"/v1/bundles/{sha256(FUNCTIONS)}", content=FUNCTIONS)
    return client


def put(client, graph, name=None):
    return client.put(f"/v1/graphs/{name or named(graph)}", json=graph)


class TestPut:
    def test_graph_is_stored_for_its_tenant_and_for_devices(self, client, as_):
        answer = put(client, GRAPH)
        assert answer.status_code == 201, answer.text
        assert (answer.json()["nodes"], answer.json()["body"]) == (3, GRAPH)
        address = f"/v1/graphs/{named(GRAPH)}"
        assert as_("red.viewer").get(address).json() == answer.json()
        problem(as_("blue.member").get(address), 404, "not-found")
        with Store.at(settings().store_address).open(named(GRAPH)) as kept:
            assert kept.read() == task_graph.canonical(GRAPH)

    def test_sending_a_graph_twice_in_any_form_is_no_error(self, client):
        assert put(client, GRAPH).status_code == 201
        backwards = dict(reversed(GRAPH.items()))
        assert put(client, backwards).status_code == 200
        (found,) = client.get("/v1/graphs").json()["items"]
        assert (found["sha256"], found["nodes"]) == (named(GRAPH), 3)

    def test_graph_under_a_wrong_hash_is_refused_with_the_right_one(self, client):
        found = problem(put(client, GRAPH, "0" * 64), 422, "validation-error", "{sha256}")
        assert named(GRAPH) in found["detail"]

    def test_invalid_graph_is_refused_with_its_place(self, client):
        wrong = copy.deepcopy(GRAPH)
        wrong["nodes"][1]["inputs"]["part"] = "split.q"
        problem(put(client, wrong), 422, "validation-error", "/nodes/1/inputs/part")


class TestSubmit:
    def test_inline_graph_is_named_and_stored(self, client, session):
        answer = client.post("/v1/requests", json=request(GRAPH))
        assert answer.status_code == 202, answer.text
        rows = session.scalars(select(Task).where(Task.name == "whole"))
        assert [row.descriptor["run"] for row in rows] == [{"graph": f"sha256:{named(GRAPH)}"}]
        assert client.get(f"/v1/graphs/{named(GRAPH)}").status_code == 200

    def test_stored_graph_is_submitted_by_its_name(self, client):
        client.post("/v1/requests", json=request(GRAPH))
        again = client.post("/v1/requests", json=request(f"sha256:{named(GRAPH)}"))
        assert again.status_code == 202, again.text

    def test_next_run_is_planned_with_the_measured_times(self, client, session):
        ran = client.post("/v1/requests", json=request(GRAPH)).json()
        task = session.get(Task, ran["tasks"][1]["id"])
        for took_ms in ({"split": 2.0, "work": 30.0}, {"work": 36.0, "vote": 4.0}, {"vote": 9.0}):
            graphs.learn(session, task, took_ms, {})
        session.commit()
        sent = request(f"sha256:{named(GRAPH)}")
        again = client.post("/v1/requests", json=sent).json()
        task = session.get(Task, again["tasks"][1]["id"])
        assert task.descriptor["run"]["took_ms"] == {"split": 2.0, "work": 30.0, "vote": 9.0}
        row = session.get(Graph, (task.tenant_id, named(GRAPH)))
        assert row.took_ms == {task.kind: task.descriptor["run"]["took_ms"]}

    def test_next_run_is_planned_with_the_measured_sizes(self, client, session):
        """On several devices; what is about as large as it was known is not written down again."""
        sent = request(GRAPH)
        sent["tasks"][1]["devices"] = {"max": 2}
        ran = client.post("/v1/requests", json=sent).json()
        task = session.get(Task, ran["tasks"][1]["id"])
        names = [f"{node['name']}.{node['outputs'][0]}" for node in GRAPH["nodes"]]
        for sizes in ((800, 600), (810, 6000)):
            graphs.learn(session, task, {}, dict(zip(names, sizes, strict=False)) | {"gone.y": 7})
        session.commit()
        known = {names[0]: 800, names[1]: 6000}

        again = client.post("/v1/requests", json=sent).json()
        task = session.get(Task, again["tasks"][1]["id"])
        assert task.descriptor["run"]["made_bytes"] == known
        (plan,) = client.get(f"/v1/requests/{again['id']}/plan").json()["graphs"]
        shown = {copy["block"]: copy["planned_bytes"] for copy in plan["copies"]}
        assert shown
        assert shown.items() <= {names[0]: 800, names[1]: 6000 // 2, names[2]: None}.items()
        (before,) = client.get(f"/v1/requests/{ran['id']}/plan").json()["graphs"]
        assert {copy["planned_bytes"] for copy in before["copies"]} == {None}

    def test_reported_block_sizes_are_bounded(self, client, session):
        ran = client.post("/v1/requests", json=request(GRAPH)).json()
        task = session.get(Task, ran["tasks"][1]["id"])
        for n in range(12):
            graphs.learn(session, task, {}, {f"n{n}.{k}": 1 for k in range(1000)})
        row = session.get(Graph, (task.tenant_id, named(GRAPH)))
        assert len(row.made_bytes) == graphs.MAX_KNOWN

    def test_validating_keeps_nothing(self, client):
        answer = client.post("/v1/requests:validate", json=request(GRAPH))
        shown = answer.json()["tasks"][1]["descriptor"]["run"]
        assert shown == {"graph": f"sha256:{named(GRAPH)}"}
        assert client.get("/v1/graphs").json()["items"] == []

    def test_graph_of_another_tenant_is_unknown(self, client, as_):
        put(client, GRAPH)
        blue = as_("blue.member")
        blue.put(f"/v1/bundles/{sha256(FUNCTIONS)}", content=FUNCTIONS)
        answer = blue.post("/v1/requests", json=request(f"sha256:{named(GRAPH)}"))
        problem(answer, 422, "validation-error", "/tasks/1/run/graph")

    @pytest.mark.parametrize(
        ("change", "pointer", "code"),
        [
            ({"inputs": {}}, "/tasks/1/inputs", "unbound"),
            ({"inputs": {"raw": "make.raw", "row": "make.raw"}}, "/tasks/1/inputs/row", "unbound"),
            ({"outputs": ["y", "z"]}, "/tasks/1/outputs/1", "unbound"),
            ({"run": {"graph": {}}}, "/tasks/1/run/graph/nodes", "missing"),
            ({"run": {"graph": "sha256:0"}}, "/tasks/1/run/graph", "invalid"),
            ({"devices": {"min": 3, "max": 3}}, "/tasks/1/devices/min", "unsatisfiable"),
        ],
    )
    def test_graph_that_does_not_fit_its_task_is_refused(self, change, pointer, code, client):
        answer = client.post("/v1/requests", json=request(GRAPH, **change))
        assert answer.status_code == 422
        assert (pointer, code) in [(e["pointer"], e["code"]) for e in answer.json()["errors"]]

    @pytest.mark.parametrize("function", ["ops:slpit", "ops:Job", "other:split"])
    def test_unknown_function_of_the_bundle_is_refused(self, function, client):
        wrong = copy.deepcopy(GRAPH)
        wrong["nodes"][0]["function"] = function
        put(client, wrong)
        for graph in (wrong, f"sha256:{named(wrong)}"):
            answer = client.post("/v1/requests", json=request(graph))
            found = problem(answer, 422, "validation-error", "/tasks/1/run/graph/nodes/0/function")
            assert "ops:split, ops:vote, ops:work" in found["detail"]

    def test_a_node_that_fits_no_device_is_refused(self, client):
        large = copy.deepcopy(GRAPH)
        large["nodes"][0]["tensors"] = {"raw": {"dtype": "float32", "shape": [2**20, 300]}}
        answer = client.post("/v1/requests", json=request(large))
        found = problem(answer, 422, "unsatisfiable", "/tasks/1/run/graph")
        assert "the node split needs at least 1258291200 bytes" in found["detail"]
        answer = client.post("/v1/requests", json=request(large, devices={"memory_bytes": 2**20}))
        problem(answer, 422, "validation-error", "/tasks/1/devices/memory_bytes")

    def test_graph_without_a_bundle_is_refused(self, client):
        body = {**request(GRAPH), "bundle": None}
        problem(client.post("/v1/requests", json=body), 422, "validation-error", "/bundle")


def wide(length=2, sides="lr"):
    """Chains of nodes that take long, and one that joins them."""
    est = {"function": "ops:work", "outputs": ["r"], "est": {"ms": 5000}}
    nodes = [
        {
            "name": f"{side}{n}",
            "inputs": {"part": f"{side}{n - 1}.r" if n else "input:raw"},
            **est,
        }
        for side in sides
        for n in range(length)
    ]
    ends = {"parts": [f"{side}{length - 1}.r" for side in sides]}
    vote = {"name": "vote", "function": "ops:vote", "inputs": ends, "outputs": ["y"]}
    return {"nodes": [*nodes, vote], "outputs": {"y": "vote.y"}}


class TestSeveralIslands:
    @pytest.fixture
    def west(self, session, world):
        session.add(Island(name="west"))
        session.flush()
        session.add(Host(name="w", island="west"))
        session.flush()
        session.add(Device(id="w.0", host="w", island="west", kind="cpu", memory_bytes=2**30))
        session.commit()

    def test_graph_is_cut_into_partitions_that_take_its_place(self, west, client, session):
        sent = request(wide(), islands=2)
        sent["tasks"].append(
            {"name": "use", "run": {"function": "ops:vote"}, "inputs": {"parts": "whole.y"}}
        )
        answer = client.post("/v1/requests", json=sent)
        assert answer.status_code == 202, answer.text
        tasks = {task["name"]: task for task in answer.json()["tasks"]}
        parts = {name for name in tasks if name.startswith("whole.")}
        assert {*tasks} == {"make", "use", *parts}
        assert len(parts) == 2
        (last,) = [need["task"] for need in tasks["use"]["needs"]]
        assert last in parts
        runs = session.scalars(select(Task.descriptor["run"]).where(Task.name.in_(parts))).all()
        assert {run["graph"] for run in runs} == {f"sha256:{named(wide())}"}
        ran = sorted(name for run in runs for name in run["part"]["nodes"])
        assert ran == ["l0", "l1", "r0", "r1", "vote"]
        plan = client.get(f"/v1/requests/{answer.json()['id']}/plan").json()
        assert sorted(p["node"] for g in plan["graphs"] for p in g["nodes"]) == ran

    def test_graph_is_not_cut_for_an_island_without_a_host_of_enough_devices(
        self, west, client, session
    ):
        sent = request(wide(sides="klmr"), islands=2, devices={"min": 2, "max": 2})
        tasks = client.post("/v1/requests", json=sent).json()["tasks"]
        assert [task["name"] for task in tasks] == ["make", "whole"]
        session.add(Device(id="w.1", host="w", island="west", kind="cpu", memory_bytes=2**30))
        session.commit()
        sent = request(wide(sides="klmr"), islands=2, devices={"min": 2, "max": 2})
        tasks = client.post("/v1/requests", json=sent).json()["tasks"]
        parts = [task for task in tasks if task["name"].startswith("whole.")]
        assert len({task["name"].split(".")[1] for task in parts}) == 2

    def test_graph_over_several_hosts_counts_all_devices_of_an_island(self, west, client, session):
        session.add(Host(name="w2", island="west"))
        session.flush()
        session.add(Device(id="w2.0", host="w2", island="west", kind="cpu", memory_bytes=2**30))
        session.commit()
        cut = {}
        for apart in (False, True):
            devices = {"min": 2, "max": 2, "across_hosts": apart}
            sent = request(wide(sides="klmr"), islands=2, devices=devices)
            tasks = client.post("/v1/requests", json=sent).json()["tasks"]
            cut[apart] = any(task["name"].startswith("whole.") for task in tasks)
        assert cut == {False: False, True: True}

    def test_graph_is_not_cut_for_an_island_with_too_small_devices(self, west, client, session):
        session.get(Device, "w.0").memory_bytes = 1000
        session.execute(update(Device).where(Device.island != "west").values(memory_bytes=2000))
        session.commit()
        parts = {}
        for needed in (1001, 1000):
            sent = request(wide(), islands=2, devices={"memory_bytes": needed})
            tasks = client.post("/v1/requests", json=sent).json()["tasks"]
            parts[needed] = [task["name"] for task in tasks if task["name"].startswith("whole.")]
        assert (len(parts[1001]), len(parts[1000])) == (0, 2)

    def test_graph_that_needs_more_devices_than_a_host_has_is_refused(self, west, client, session):
        """There are four in all, and at most three lie on one host."""
        for n in (1, 2):
            session.add(Device(id=f"w.{n}", host="w", island="west", kind="cpu"))
        session.commit()
        sent = request(wide(), devices={"min": 4, "max": 4})
        answer = client.post("/v1/requests", json=sent)
        problem(answer, 422, "unsatisfiable", "/tasks/1/devices/min")
        sent = request(wide(), devices={"min": 3, "max": 3})
        assert client.post("/v1/requests", json=sent).status_code == 202

    def test_a_job_is_never_cut(self, west, client):
        devices = {"min": 1, "max": 2, "across_hosts": True}
        job = {"name": "job", "run": {"job": "ops:Job"}, "world_size": 2, "devices": devices}
        sent = {**request(wide()), "tasks": [{**job, "islands": 2}]}
        answer = client.post("/v1/requests", json=sent)
        assert answer.status_code == 202, answer.text

    def test_graph_stays_whole_on_the_only_island(self, client):
        tasks = client.post("/v1/requests", json=request(wide(), islands=2)).json()["tasks"]
        assert [task["name"] for task in tasks] == ["make", "whole"]

    def test_graph_with_too_many_nodes_is_refused(self, west, client, monkeypatch):
        monkeypatch.setattr("app.data.graphs.MAX_NODES", 4)
        answer = client.post("/v1/requests", json=request(wide(), islands=2))
        problem(answer, 422, "validation-error", "/tasks/1/islands")

    def test_partition_cannot_be_submitted_by_a_user(self, client):
        sent = request(wide())
        sent["tasks"][1]["run"]["part"] = {"nodes": ["l0"]}
        answer = client.post("/v1/requests", json=sent)
        problem(answer, 422, "validation-error", "/tasks/1/run/part")


def test_stored_graph_stays_as_long_as_its_row(client, session):
    put(client, GRAPH)
    name = blob(named(GRAPH))
    assert housekeeping.named(session, [name, blob(sha256(BUNDLE))]) == {name}
    session.delete(session.get_one(Graph, ("ten_red", named(GRAPH))))
    session.flush()
    assert not housekeeping.named(session, [name])
