"""Two islands, each with a scheduler of its own and a standby: requests that run on both, and what
happens to them when a whole island is killed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from app.local import process_supervisor
from app.local.embedded_servers import temporary_home
from app.local.process_supervisor import Spec
from app.local.up import ROOT
from tests import warm_programs
from tests.acceptance.conftest import running_system
from tests.acceptance.history import overlaps, runs

pytestmark = pytest.mark.acceptance

STEPS = 150
#: Leases outlast a moment in which a process of a busy machine does not run: tasks that come while
#: an island has no leader go to the other one.  The lease of a device outlasts a change of leader.
SETTINGS = {
    "ROUNDHOUSE_ISLAND_LOST_S": "2",
    "ROUNDHOUSE_LEASE_S": "20",
    "ROUNDHOUSE_LEASE_MARGIN_S": "2",
    "ROUNDHOUSE_BEAT_S": "1",
    "ROUNDHOUSE_LEADER_S": "8",
}


class Processes:
    """Celery workers of an island, started by the test and never restarted automatically."""

    def __init__(self, handle, island, **more):
        self.handle, self.island, self.more = handle, island, more
        self.running = {}

    def start(self, *names):
        """Start processes, named "leader", "standby" or "device.N"."""
        for name in names:
            worker, sort = f"{self.island}.{name}", name.partition(".")[0]
            module = "workers.device.worker" if sort == "device" else "workers.control.scheduler"
            queue = f"device.{self.device(name)}" if sort == "device" else f"island.{self.island}"
            words = ("-m", "celery", "-A", module, "worker", "--pool", "threads", "-c", "2")
            named = ("-Q", queue, "-n", f"{worker}@test", "--without-gossip", "--without-mingle")
            spec = Spec(
                name=worker, command=(sys.executable, *words, *named), env=self._env(name),
                folder=ROOT,
            )  # fmt: skip
            log = (self.handle.wanted.home / "logs" / f"{worker}.log").open("ab")
            with log, warm_programs.forked_from_a_warm_process():
                self.running[name] = process_supervisor.start_leashed(spec, log)

    def device(self, name):
        return f"{self.island}.{name.partition('.')[2]}"

    def _env(self, name):
        facts = self.handle.facts
        env = {**os.environ, **SETTINGS, **self.more, "ROUNDHOUSE_ISLAND": self.island}
        env |= {"ROUNDHOUSE_HOME": facts["home"], "REDIS_URL": facts["redis_url"]}
        if name.startswith("device"):
            env.pop("DATABASE_URL", None)
            env["ROUNDHOUSE_STORE"] = f"{facts['home']}/store"
            env["ROUNDHOUSE_HOME"] = f"{facts['home']}/{self.island}"  # a disk of its own
            device, home = self.device(name), Path(env["ROUNDHOUSE_HOME"])
            env |= self.handle.enrol(device, home, self.island)
            return {**env, "ROUNDHOUSE_DEVICE": device}
        return {**env, "DATABASE_URL": facts["database_url"]}

    def kill(self, *names):
        """Send `kill -9`, to all of them at once if none are named."""
        killed = [self.running.pop(name) for name in names or [*self.running]]
        for process in killed:
            process.kill()
        for process in killed:
            process.wait()


@contextlib.contextmanager
def two_islands(*, devices, **more):
    """Run `local` and `east` with this number of devices each; yields the system and `east`'s
    processes.

    `more` are further settings.
    """
    with (
        temporary_home() as home,
        running_system(home, devices=devices, env={**SETTINGS, **more}) as system,
    ):
        more["ROUNDHOUSE_MOUNT_ROOTS"] = str(system.shared)
        east, client = Processes(system.handle, "east", **more), system.client("alpha")
        try:
            east.start("leader", *(f"device.{n}" for n in range(devices)))
            for n in range(devices):
                assert system.until(lambda n=n: is_up(client, f"east.{n}"))
            yield system, east
        finally:
            east.kill()


@pytest.fixture(scope="module")
def islands():
    """Run two islands with one device and a standby each."""
    with two_islands(devices=1) as (system, east):
        local = Processes(system.handle, "local")
        try:
            local.start("standby")
            east.start("standby")
            yield system, east
        finally:
            local.kill()


def is_up(client, device):
    return any(item["id"] == device and item["up"] for item in client.items("/v1/devices"))


def places(client, id):
    return {item["task"]: item["island"] for item in client.get(f"/v1/requests/{id}/plan")["tasks"]}


def test_request_as_wide_as_both_islands_runs_on_both(islands):
    system, _ = islands
    client = system.client("alpha")
    make = {"type": "train", "run": {"function": "train:make"}, "outputs": ["numbers"]}
    tasks = [
        {"name": "left", **make, "params": {"n": 4}},
        {"name": "right", **make, "params": {"n": 5}},
        {
            **{"name": "both", "type": "train", "run": {"function": "train:joined"}},
            "inputs": {"a": "left.numbers", "b": "right.numbers"},
        },
    ]
    id = client.submit({"name": "wide", "bundle": client.bundle, "tasks": tasks})["id"]
    done = client.wait(id)
    assert done["state"] == "done", done
    found = places(client, id)
    assert {found["left"], found["right"]} == {"local", "east"}
    (both,) = [task for task in done["tasks"] if task["name"] == "both"]
    assert both["result"] == {"total": 16}
    system.check_ledger()


def test_a_standby_takes_the_lead_of_its_island(islands):
    system, east = islands
    client = system.client("alpha")
    ids = [submit(client, f"led-{n}", steps=40) for n in range(2)]
    east.kill("leader")
    for id in ids:
        assert client.wait(id)["state"] == "done"
    east.start("leader")


def test_unfinished_tasks_of_a_killed_island_go_on_on_the_other(islands):
    system, east = islands
    client = system.client("alpha")
    undisturbed = client.wait(submit(client, "undisturbed"))
    right = undisturbed["tasks"][0]["result"]
    with system.gate() as gate:
        ids = [submit(client, f"killed-{n}", gate=gate) for n in range(4)]
        on_east = client_waits(system, client, ids)

        east.kill()

    for id in ids:
        request = client.wait(id)
        assert request["state"] == "done", request
        task = request["tasks"][0]
        assert task["result"] == right
        assert overlaps(runs(client.log_text(task["id"]))) == []
    assert set(places(client, on_east).values()) == {"local"}
    (told,) = client.get(f"/v1/requests/{on_east}/plan")["tasks"]
    assert "The island east is lost" in told["because"]
    ends = [
        item["end"] for item in client.items(f"/v1/tasks/{task_id(client, on_east)}/placements")
    ]
    assert sorted(ends)[:2] == ["finished", "lost"]
    system.check_ledger()

    # The island comes back: tasks that ended elsewhere do not run there, and it works again.
    east.start("leader", "standby", "device.0")
    assert system.until(lambda: is_up(client, "east.0"))
    with system.gate() as gate:  # none ends before all have a place
        more = [submit(client, f"after-{n}", steps=60, gate=gate) for n in range(3)]
        assert system.until(lambda: all(None not in places(client, id).values() for id in more))
    for id in more:
        assert client.wait(id)["state"] == "done"
    assert {place for id in more for place in places(client, id).values()} == {"local", "east"}
    system.check_ledger()


# --- one graph on both islands --------------------------------------------------------------------

ROUNDS = 4
GATED_NAPS = 4  # how many naps a node takes until the gate of the graph opens


def pipeline(nap_s, word=""):
    """Return two stages, one on each island if there are two: forward through both, and back.

    With another `word` its nodes have other names, and draw other numbers.
    """
    declared = {"h": {"dtype": "float32", "shape": [32, 32]}}
    work = {"function": "ops:stage", "outputs": ["h"], "tensors": declared}
    est = {"est": {"ms": nap_s * 1000}}
    nodes = []
    for lane in "ab":
        other = {"a": "b", "b": "a"}[lane]
        for n in range(ROUNDS):
            given = {"x": f"{word}{lane}{n - 1}.h", "y": f"{word}{other}{n - 1}.h"} if n else {}
            made = {"inputs": given, "params": {"nap_s": nap_s, "n": n}}
            nodes.append({"name": f"{word}{lane}{n}", **work, **est, **made})
    ends = {"a": f"{word}a{ROUNDS - 1}.h", "b": f"{word}b{ROUNDS - 1}.h"}
    end = {"name": "end", "function": "ops:summed", "inputs": ends, "outputs": ["parameters"]}
    return {"nodes": [*nodes, end], "outputs": {"parameters": "end.parameters"}}


def fork(nap_s):
    """Return a graph with `first` read by one node on its own island and one elsewhere."""
    work = {"function": "ops:stage", "outputs": ["h"]}
    first = {"name": "first", **work, "est": {"ms": 500}, "params": {"nap_s": nap_s / 24}}
    more = {**work, "est": {"ms": nap_s * 1000}, "inputs": {"x": "first.h"}}
    sides = [
        {"name": name, **more, "params": {"nap_s": nap_s, "n": n}} for n, name in enumerate("lr")
    ]
    ends = {"a": "l.h", "b": "r.h"}
    end = {"name": "end", "function": "ops:summed", "inputs": ends, "outputs": ["parameters"]}
    return {"nodes": [first, *sides, end], "outputs": {"parameters": "end.parameters"}}


def broad(nap_s, est_ms=1200):
    """Return four chains that are independent until the end."""
    nodes = []
    for lane in "abcd":
        for n in range(2):
            given = {"x": f"{lane}{n - 1}.h"} if n else {}
            made = {"inputs": given, "params": {"nap_s": nap_s, "n": "abcd".index(lane) + n}}
            node = {"name": f"{lane}{n}", "function": "ops:stage", "outputs": ["h"]}
            nodes.append({**node, **made, "est": {"ms": est_ms}})
    join = {"function": "ops:stage", "outputs": ["h"], "params": {"nap_s": 0}}
    nodes += [
        {"name": "ab", **join, "inputs": {"x": "a1.h", "y": "b1.h"}},
        {"name": "cd", **join, "inputs": {"x": "c1.h", "y": "d1.h"}},
    ]
    ends = {"a": "ab.h", "b": "cd.h"}
    end = {"name": "end", "function": "ops:summed", "inputs": ends, "outputs": ["parameters"]}
    return {"nodes": [*nodes, end], "outputs": {"parameters": "end.parameters"}}


def crossed(nap_s):
    """Return four chains, each of which reads the next: any two islands take from each other."""
    graph = broad(nap_s)
    for node in graph["nodes"]:
        if node["name"] in ("a1", "b1", "c1", "d1"):
            node["inputs"]["y"] = {"a": "b", "b": "c", "c": "d", "d": "a"}[node["name"][0]] + "0.h"
    return graph


def submit_graph(
    client,
    name,
    *,
    islands=2,
    nap_s=0.6,
    graph=pipeline,
    hold=False,
    devices=None,
    gate=None,
    **more,
):
    sent = graph(nap_s, **more)
    for node in sent["nodes"] if gate else ():
        if node["function"] == "ops:stage":
            slow = GATED_NAPS * node["params"]["nap_s"]
            node["params"] |= {"gate": gate.file, "nap_s": slow}
    task = {
        "devices": devices or {},
        "mounts": gate.mounts if gate else {},
        **{"name": "pipe", "run": {"graph": sent}, "islands": islands},
        **{"retry": {"max": 1}, "checkpoint": {"every_s": 0.5, "keep": 2}},
        "start": {"hold": hold},
    }
    return client.submit({"name": name, "bundle": client.bundle, "tasks": [task]})["id"]


def ended(client, id):
    request = client.wait(id)
    assert request["state"] == "done", request
    (last,) = [task for task in request["tasks"] if task["result"]]
    return last["result"]["parameters"]


@pytest.fixture(scope="module")
def whole(islands):
    """Return the result of the graph when it stays in one piece."""
    system, _ = islands
    client = system.client("alpha")
    id = submit_graph(client, "whole", islands=1, nap_s=0.01)
    assert len(client.request(id)["tasks"]) == 1
    return ended(client, id)


def test_graph_that_may_use_two_islands_gives_the_same_bits_on_both(islands):
    system, _ = islands
    client = system.client("alpha")
    whole = ended(client, submit_graph(client, "one", islands=1, nap_s=0.01, word="one-"))
    id = submit_graph(client, "on-both", word="one-")
    assert ended(client, id) == whole
    plan = client.get(f"/v1/requests/{id}/plan")
    assert {place["island"] for place in plan["tasks"]} == {"local", "east"}
    ways = {(one["source"], one["target"]) for one in plan["crossings"]}
    assert ways == {("local", "east"), ("east", "local")}
    for one in plan["crossings"]:
        assert one["moved_bytes"] == one["planned_bytes"] == 32 * 32 * 4
        assert 0 < one["head_bytes"] < 20_000
        assert one["ways"] == ["host"], (one, plan, ways_of(client, id))
    assert "store" not in ways_of(client, id)  # no reader had to look in the store
    # one partition per island; blocks of the other island arrive late
    assert len(plan["tasks"]) == 2
    system.check_ledger()


def test_datablock_is_copied_from_another_host_unchanged(islands, tmp_path):
    """The first reader reads the store; by then the other host is told where the block is."""
    system, _ = islands
    client, admin = system.client("alpha"), system.client("platform", "platform_admin")
    rows = torch.arange(100_000).reshape(100, 1000)
    save_file({"x": rows}, tmp_path / "rows")
    client.put_datablock("rows", tmp_path / "rows")
    taken, told = {"inputs": {"x": "datablock:rows"}, "outputs": ["sums"]}, []
    for away in ("local.0", "east.0"):
        admin.post(f"/v1/devices/{away}/cordon")
        id = client.submit_job("blocks:Total", name="rows", **taken)
        (task,) = client.wait(id)["tasks"]
        admin.post(f"/v1/devices/{away}/uncordon")
        assert (task["state"], task["result"]["total"]) == ("done", int(rows.sum())), task
        told += ways_of(client, id)
    assert told == ["store", "host"]


@pytest.mark.parametrize(
    "victim",
    [*(pytest.param(each, marks=pytest.mark.long) for each in ("executor", "scheduler")), "island"],
)
def test_graph_on_both_islands_gives_the_same_bits_whichever_process_is_killed(
    islands, whole, victim
):
    system, east = islands
    client = system.client("alpha")
    with system.gate() as gate:
        id = submit_graph(client, f"graph-{victim}", nap_s=1.5, gate=gate)

        client.wait_until(id, both_run)
        if victim == "executor":
            kill_executor(system)
        elif victim == "scheduler":
            east.kill("leader")
        else:
            east.kill()
    assert ended(client, id) == whole
    tasks = client.request(id)["tasks"]
    assert sum(task["attempts"] for task in tasks) == (victim == "executor")
    for task in tasks:
        assert overlaps(runs(client.log_text(task["id"]))) == []
    system.check_ledger()
    east.start(*{"leader", "standby", "device.0"} - east.running.keys())
    assert system.until(lambda: is_up(client, "east.0"))


def test_block_of_a_killed_maker_comes_from_the_store_unchanged(islands):
    system, east = islands
    client = system.client("alpha")
    whole = ended(client, submit_graph(client, "new", islands=1, nap_s=0.01, word="new-"))
    id = submit_graph(client, "maker-killed", nap_s=0.5, hold=True, word="new-")
    request = client.wait_until(id, all_placed)
    client.post(f"/v1/tasks/{on(request, 'east')['id']}/resume")
    client.wait_until(id, lambda _: "task.lacks" in told(client, id))
    # the waiting device is needed for nothing else
    assert told(client, id).count("task.lacks") == 1
    east.kill("device.0")
    client.post(f"/v1/tasks/{on(request, 'local')['id']}/resume")
    client.wait_until(id, lambda _: "store" in ways_of(client, id))
    east.start("device.0")
    assert ended(client, id) == whole
    system.check_ledger()
    assert system.until(lambda: is_up(client, "east.0"))


def all_placed(request):
    return {task["island"] for task in request["tasks"]} == {"local", "east"}


def told(client, id):
    return [event["type"] for event in client.items(f"/v1/requests/{id}/events")]


def both_run(request):
    return {t["island"] for t in request["tasks"] if t["state"] == "running"} == {"local", "east"}


def on(request, island):
    (task,) = [task for task in request["tasks"] if task["island"] == island]
    return task


def ways_of(client, id):
    """Return how each input arrived, over all launches."""
    return [
        way
        for task in client.request(id)["tasks"]
        for place in client.items(f"/v1/tasks/{task['id']}/placements")
        for way in place["ways"].values()
    ]


def test_partition_begins_while_the_maker_of_its_block_runs_on(islands):
    """Kill the maker meanwhile; everything must still end with the same bits."""
    system, east = islands
    client = system.client("alpha")
    alone = submit_graph(client, "fork-whole", islands=1, nap_s=0.01, graph=fork)
    right = ended(client, alone)
    with system.gate() as gate:
        id = submit_graph(client, "fork", nap_s=16.0, graph=fork, gate=gate)

        request = client.wait_until(id, both_run)
        maker = min(request["tasks"], key=lambda task: task["first_started_at"])
        if maker["island"] == "local":
            kill_executor(system)
        else:
            east.kill("device.0")
            east.start("device.0")
    assert ended(client, id) == right
    again = client.items(f"/v1/tasks/{maker['id']}/placements")
    ends = [item["end"] for item in again]
    assert {"lost", "failed"} & set(ends)
    assert ends.count("finished") == 1
    system.check_ledger()


def kill_executor(system):
    """Kill the executor of the partition on `local`, each process only once."""

    def killed():
        found = 0
        for process in system.residents():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                found += 1
        return found > 0

    assert system.until(killed)


def submit(client, name, steps=STEPS, gate=None):
    return client.submit_job(
        "train:Train",
        name=name,
        params={"steps": steps, "seed": 3, "step_s": 0.2 if gate else 0.02},
        gate=gate,
        checkpoint={"every_s": 0.5, "keep": 2},
    )


def client_waits(system, client, ids):
    """Return the request that runs on east, once it has a checkpoint there."""
    found = []

    def saved():
        for id in ids:
            task = client.request(id)["tasks"][0]
            on_east = task["island"] == "east" and task["state"] == "running"
            if on_east and list(client.items(f"/v1/tasks/{task['id']}/checkpoints")):
                found.append(id)
        return found

    assert system.until(saved)
    return found[0]


def task_id(client, id):
    return client.request(id)["tasks"][0]["id"]
