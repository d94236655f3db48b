"""Measure how much slower a training pipeline is on two islands than on one with the same devices.

    python -m benchmarks.two_islands [--quick]

A network of two stages is trained for some steps of several micro-batches: forward through both
stages and back, then each stage's weights are changed. All of it is one graph of torch functions.
On one island the graph is a task with two executors, which has both devices almost from its
beginning (by default a task that runs grows after 5 s). On two islands, of one device each, the
graph is cut into partitions, with blocks that cross from host to host. Each island has a disk of
its own, and the device workers send blocks to each other by TCP at 10 Gb/s at most
(`ROUNDHOUSE_BLOCK_BYTES_PER_S`). Both systems run at once and take turns, so that both have the
same machine; both must end with the same bits.

The bound is that of Pathways: 97 % of one island's throughput. It is measured twice: with nodes
that compute, and with nodes that wait as long as they would compute. With waiting nodes the cores
are free for all else, as on a host with accelerators. With computing nodes two devices use all
cores of a machine with two, and all other work takes time from them. The sending rate of a device
worker is measured first, and reported too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from app.cli.bundling import bundle_folder
from app.cli.client import Client
from app.local.embedded_servers import temporary_home
from app.local.process_supervisor import Spec, leashed
from app.local.up import ROOT, Handle, running
from benchmarks import Target, quick, report
from workers.transfer.host_cache import Cache, Draft
from workers.transfer.peer_blocks import Giver

JSON = dict[str, Any]

STEPS, BATCHES = (2, 2) if quick() else (6, 4)
REPEATS = 1 if quick() else 3
LAYERS, WIDTH, BATCH = 8, 512, 4096
LINK_BYTES_PER_S = 1_250_000_000  # 10 Gb/s
SENT_BYTES = 256 << 20
LINK = {"ROUNDHOUSE_BLOCK_BYTES_PER_S": str(LINK_BYTES_PER_S)}
#: A task begins on one device, and has the second one as soon as it runs.
AT_ONCE = {"ROUNDHOUSE_GROW_AFTER_S": "0", "ROUNDHOUSE_SLICE_MIN_S": "0"}
TIMEOUT_S = 600.0
ASK_S = 2.0  # polling costs time of the cores; the system itself reports begin and end

FUNCTIONS = """
import torch
from torch.nn.functional import relu

def weights(ctx, *, layers, width, run=0):
    # Others in each run: else it would find the blocks of the one before.
    size = (1 + run / 1000) / width**0.5
    return {"w": torch.stack([torch.randn(width, width) * size for _ in range(layers)])}

def batch(ctx, *, size, width):
    return {"x": torch.randn(size, width)}

def through(x, w):
    for layer in w:
        x = relu(x @ layer)
    return x

def forward(ctx, w, x):
    return {"h": through(x, w)}

def last(ctx, w, x):
    w, x = w.clone().requires_grad_(), x.clone().requires_grad_()
    through(x, w).square().mean().backward()
    return {"g": w.grad, "gx": x.grad}

def back(ctx, w, x, gx):
    w = w.clone().requires_grad_()
    through(x, w).backward(gx)
    return {"g": w.grad}

def change(ctx, w, g):
    return {"w": w - 0.01 * sum(g)}

def norms(ctx, a, b):
    return {"norms": [float(a.double().norm()), float(b.double().norm())]}
"""


#: The same, of the same sizes, as if computed by an accelerator that leaves the cores alone.
WAITING = """
import time
import torch

def weights(ctx, *, layers, width, run=0, ms):
    time.sleep(ms / 1e3)
    return {"w": torch.full((layers, width, width), float(run))}

def batch(ctx, *, size, width, ms):
    time.sleep(ms / 1e3)
    return {"x": torch.randn(size, width)}

def forward(ctx, w, x, *, ms):
    time.sleep(ms / 1e3)
    return {"h": x.clone()}

def last(ctx, w, x, *, ms):
    time.sleep(ms / 1e3)
    return {"g": w.clone(), "gx": x.clone()}

def back(ctx, w, x, gx, *, ms):
    time.sleep(ms / 1e3)
    return {"g": w.clone()}

def change(ctx, w, g, *, ms):
    time.sleep(ms / 1e3)
    return {"w": w + 1}

def norms(ctx, a, b, *, ms):
    time.sleep(ms / 1e3)
    return {"norms": [float(a[0, 0, 0]), float(b[0, 0, 0])]}
"""


def pipeline(ms: dict[str, float], run: int = 0, *, waits: bool = False) -> JSON:
    def node(
        name: str, function: str, inputs: JSON, params: JSON | None = None, **more: Any
    ) -> JSON:
        took = ms[function]
        if waits:
            params = {**(params or {}), "ms": took}
        return {
            "name": name,
            "function": f"{'waiting' if waits else 'ops'}:{function}",
            "inputs": inputs,
            "params": params or {},
            "est": {"ms": took},
            **more,
        }

    def tensor(*shape: int) -> JSON:
        return {"dtype": "float32", "shape": list(shape)}

    state, rows = tensor(LAYERS, WIDTH, WIDTH), tensor(BATCH, WIDTH)
    sizes = {"layers": LAYERS, "width": WIDTH, "run": run}
    weights: JSON = {"outputs": ["w"], "tensors": {"w": state}}
    nodes = [node(f"w{s}.0", "weights", {}, params=sizes, **weights) for s in "ab"]
    for m in range(BATCHES):
        made: JSON = {
            "outputs": ["x"],
            "tensors": {"x": rows},
            "params": {"size": BATCH, "width": WIDTH},
        }
        nodes.append(node(f"x.{m}", "batch", {}, **made))
    for k in range(STEPS):
        a, b = f"wa.{k}.w", f"wb.{k}.w"
        for m in range(BATCHES):
            id, x = f"{k}.{m}", f"x.{m}.x"
            forward: JSON = {"outputs": ["h"], "tensors": {"h": rows}}
            last: JSON = {"outputs": ["g", "gx"], "tensors": {"g": state, "gx": rows}}
            back: JSON = {"outputs": ["g"], "tensors": {"g": state}}
            nodes += [
                node(f"fa.{id}", "forward", {"w": a, "x": x}, **forward),
                node(f"b.{id}", "last", {"w": b, "x": f"fa.{id}.h"}, **last),
                node(f"ba.{id}", "back", {"w": a, "x": x, "gx": f"b.{id}.gx"}, **back),
            ]
        for s, w, grads in (("a", a, "ba"), ("b", b, "b")):
            given = {"w": w, "g": [f"{grads}.{k}.{m}.g" for m in range(BATCHES)]}
            nodes.append(node(f"w{s}.{k + 1}", "change", given, **weights))
    ends = {"a": f"wa.{STEPS}.w", "b": f"wb.{STEPS}.w"}
    nodes.append(node("end", "norms", ends, outputs=["norms"]))
    return {"nodes": nodes, "outputs": {"norms": "end.norms"}}


def main() -> int:
    with contextlib.ExitStack() as stack:
        code = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (code / "ops.py").write_text(FUNCTIONS)
        (code / "waiting.py").write_text(WAITING)
        ms = _measured(code)
        bundle = bundle_folder(code)
        link_bytes_per_s = _given(code)
        one = _System(stack, bundle, devices=2, env=AT_ONCE)
        two = _System(stack, bundle, devices=1, env=LINK)
        stack.enter_context(_island(two.handle, "east"))
        two.wait_for("east.0")
        runs, waiting = (_pairs(one, two, ms, waits=waits) for waits in (False, True))
    return _report(runs, waiting, ms, link_bytes_per_s)


Pairs = list[tuple[JSON, JSON]]  # of one island and of two


def _pairs(one: _System, two: _System, ms: dict[str, float], *, waits: bool) -> Pairs:
    pairs = []
    for run in range(REPEATS):
        graph = pipeline(ms, run, waits=waits)
        pair = one.run(graph, devices={"max": 2}), two.run(graph, islands=2)
        if pair[0]["norms"] != pair[1]["norms"]:
            raise RuntimeError(f"the two did not end with the same bits: {pair}")
        pairs.append(pair)
    return pairs


def _ratio(pairs: Pairs) -> float:
    """Return the ratio of the medians, in percent."""
    single, both = (float(statistics.median(pair[n]["took_s"] for pair in pairs)) for n in (0, 1))
    return round(100 * single / both, 1)


def _report(runs: Pairs, waiting: Pairs, ms: dict[str, float], link_bytes_per_s: float) -> int:
    single, both = ([pair[n]["took_s"] for pair in runs] for n in (0, 1))
    work_s = sum(node["est"]["ms"] for node in pipeline(ms)["nodes"]) / 1e3
    crossed = runs[0][1]["crossed_bytes"]
    targets = [
        Target(
            name=f"throughput on two islands, of one island with the same devices{where}",
            value=_ratio(pairs),
            unit="%",
            op=">=",
            bound=97.0,
        )
        for where, pairs in (("", runs), (", where nodes wait instead of computing", waiting))
    ]
    peers = {
        "one island of two devices, s": [round(s, 2) for s in single],
        "two islands of one device, s": [round(s, 2) for s in both],
        "each pair, %": [_ratio([pair]) for pair in runs],
        "each pair where nodes wait, %": [_ratio([pair]) for pair in waiting],
        "half of all work alone on the machine, s": round(work_s / 2, 2),
        "a node, ms": {name: round(took, 1) for name, took in ms.items()},
        "nodes": len(pipeline(ms)["nodes"]),
        "partitions": runs[0][1]["tasks"],
        "islands that ran them": runs[0][1]["islands"],
        "crossed, MB": round(crossed / 1e6, 1),
        "crossed as planned, MB": round(runs[0][1]["planned_bytes"] / 1e6, 1),
        "crossed from host to host, of all crossings": [both["ways"] for _, both in runs],
        "crossed at 10 Gb/s takes, s": round(crossed / LINK_BYTES_PER_S, 3),
        "a device worker gives, Gb/s": round(link_bytes_per_s * 8 / 1e9, 2),
        "load (1 min)": round(os.getloadavg()[0], 1),
    }
    return report("two_islands", targets, peers)


def _measured(code: Path) -> dict[str, float]:
    """Return the milliseconds of each function on one thread, in a process of its own."""
    program = f"""
import json, sys, time, torch
sys.path.insert(0, {str(code)!r})
import ops
torch.set_num_threads(1)
w = ops.weights(None, layers={LAYERS}, width={WIDTH})["w"]
x = ops.batch(None, size={BATCH}, width={WIDTH})["x"]
calls = {{
    "weights": lambda: ops.weights(None, layers={LAYERS}, width={WIDTH}),
    "batch": lambda: ops.batch(None, size={BATCH}, width={WIDTH}),
    "forward": lambda: ops.forward(None, w, x),
    "last": lambda: ops.last(None, w, x),
    "back": lambda: ops.back(None, w, x, x),
    "change": lambda: ops.change(None, w, [w] * {BATCHES}),
    "norms": lambda: ops.norms(None, w, w),
}}
found = {{}}
for name, call in calls.items():
    call()
    began = time.perf_counter()
    call()
    found[name] = max(0.1, (time.perf_counter() - began) * 1e3)
print(json.dumps(found))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _given(folder: Path) -> float:
    """Return the bytes per second that a device worker of the two islands sends over loopback."""
    cache = Cache(folder / "cache", 2 * SENT_BYTES)
    giver = Giver(cache, LINK_BYTES_PER_S)
    body = os.urandom(SENT_BYTES)
    sha256 = hashlib.sha256(body).hexdigest()
    with Draft(cache) as draft:
        draft.write(body)
        draft.keep(sha256)
    with socket.create_server(("127.0.0.1", 0)) as server:
        taker = socket.create_connection(server.getsockname())
        giver.serve(server.accept()[0], sha256)
    with taker:
        into = bytearray(1 << 20)
        taker.recv_into(into)
        began = time.perf_counter()
        while taker.recv_into(into):
            pass
        took_s = time.perf_counter() - began
    giver.close()
    shutil.rmtree(cache.folder)
    return SENT_BYTES / took_s


class _System:
    def __init__(
        self,
        stack: contextlib.ExitStack,
        bundle: Any,
        *,
        devices: int,
        env: Mapping[str, str] | None = None,
    ) -> None:
        home = stack.enter_context(temporary_home())
        self.handle = stack.enter_context(running(home, devices=devices, env=env))
        key = self.handle.keys["alpha"]["member"]
        self.client = stack.enter_context(Client(self.handle.url, key))
        self.client.upload(bundle.sha256, bundle.body)
        self.bundle = f"sha256:{bundle.sha256}"

    def wait_for(self, device: str) -> None:
        until_s = time.monotonic() + TIMEOUT_S
        while not any(d["id"] == device and d["up"] for d in self.client.items("/v1/devices")):
            if time.monotonic() > until_s:
                raise TimeoutError(f"{device} is not up within {TIMEOUT_S} s")
            time.sleep(0.1)

    def run(self, graph: JSON, **task: Any) -> JSON:
        """Run one training; its time is from its first start to its end."""
        pipe = {"name": "pipe", "type": "train", "run": {"graph": graph}, **task}
        id = self.client.submit({"name": "pipe", "bundle": self.bundle, "tasks": [pipe]})["id"]
        until_s = time.monotonic() + TIMEOUT_S
        while (request := self.client.get(f"/v1/requests/{id}"))["ended_at"] is None:
            if time.monotonic() > until_s:
                raise TimeoutError(f"not ended within {TIMEOUT_S} s: {request}")
            time.sleep(ASK_S)
        if request["state"] != "done":
            raise RuntimeError(f"it has {request['state']}: {request}")
        tasks = [self.client.get(f"/v1/tasks/{task['id']}") for task in request["tasks"]]
        began = min(datetime.fromisoformat(task["first_started_at"]) for task in tasks)
        plan = self.client.get(f"/v1/requests/{id}/plan")
        (norms,) = [task["result"]["norms"] for task in tasks if task["result"]]
        return {
            "took_s": (datetime.fromisoformat(request["ended_at"]) - began).total_seconds(),
            "norms": norms,
            "tasks": len(tasks),
            "islands": sorted({place["island"] for place in plan["tasks"]}),
            "crossed_bytes": sum(one["moved_bytes"] for one in plan["crossings"]),
            "ways": Counter("+".join(one["ways"]) or "here" for one in plan["crossings"]),
            "planned_bytes": sum(one["planned_bytes"] for one in plan["crossings"]),
        }


@contextlib.contextmanager
def _island(handle: Handle, island: str) -> Iterator[None]:
    """Run a scheduler and one more device, as an island of their own with a disk of its own."""
    facts, started = handle.facts, list[subprocess.Popen[bytes]]()
    env = {**os.environ, "ROUNDHOUSE_HOME": facts["home"], "REDIS_URL": facts["redis_url"]}
    env |= {"ROUNDHOUSE_ISLAND": island, "ROUNDHOUSE_SANDBOX": "preferred"}
    device = {**env, **LINK, "ROUNDHOUSE_DEVICE": f"{island}.0"}
    device["ROUNDHOUSE_STORE"] = f"{facts['home']}/store"
    device["ROUNDHOUSE_HOME"] = f"{facts['home']}/{island}"
    device |= handle.enrol(f"{island}.0", Path(device["ROUNDHOUSE_HOME"]), island)
    device.pop("DATABASE_URL", None)
    scheduler = {**env, "DATABASE_URL": facts["database_url"]}
    workers = [
        ("workers.control.scheduler", f"island.{island}", scheduler),
        ("workers.device.worker", f"device.{island}.0", device),
    ]
    for module, queue, given in workers:
        words = ["-m", "celery", "-A", module, "worker", "--pool", "threads", "-c", "2"]
        words += ["-Q", queue, "-n", f"{queue}@bench", "-l", "WARNING"]
        words += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        spec = Spec(name=queue, command=(sys.executable, *words), env=given)
        started.append(
            subprocess.Popen(
                leashed(spec), env=given, cwd=ROOT, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
        )  # fmt: skip
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
