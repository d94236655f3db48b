"""Simulate how control assigns 1,000,000 tasks to 100 islands of 10,000 devices.

    python -m benchmarks.many_islands [--quick]

The islands, their devices and the requests are values in memory.
`app.intake.island_assignment.AssignmentScene` decides each request, as control does. The request
then counts as queued work for the requests after it. Most requests have one task. Others are
sweeps, gangs, graphs whose tasks pass data on, and gangs wider than any island. A quarter of the
islands has another model of device, for which some tasks ask. Rows, commits and messages are left
out: `benchmarks.message_costs` measures those.

Then the island with the most work is lost, and its tasks are assigned anew. Last, requests arrive
at a steady rate, and then all at once. Control takes the waiting requests page by page. Each page
lasts as long as its decisions took and its statements would take. --quick has 10 islands and 10,000
tasks.
"""

from __future__ import annotations

import gc
import math
import os
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from app.core.model.device_choice import DeviceTraits
from app.core.model.graphs.dependencies import Alike, Offer
from app.core.model.snapshot import BoardTenant
from app.core.placement.capacity import Stock
from app.db.transactions import AnyRow
from app.intake.island_assignment import NEW_PAGE, AssignmentScene, RequestWork, Seats
from benchmarks import Target, quick, report

KIND, HOST_DEVICES = "cuda", 8
TENANTS = 1_000
LONGEST_S = 12 * 3600
RATE_S = 100.0  # requests that arrive in a second, in the last part
LOOK_S_EACH = 1e-6  # what a page costs Postgres for each device; see message_costs
KEPT = 10_000  # requests after which those so far count as lasting

#: of 1,000 requests: how many are of each shape
SHAPES = {"task": 800, "sweep of 20": 130, "gang of 64": 50, "graph of 10": 18, "sweep of 1,000": 1}
SHAPES |= {"gang over islands": 1}


def main() -> int:
    islands, devices, tasks = (10, 1_000, 10_000) if quick() else (100, 10_000, 1_000_000)
    if words := [int(word) for word in sys.argv[1:] if word.isdigit()]:  # other sizes, by hand
        islands, devices, tasks = words
    draw, scene = random.Random(27), _scene(islands, devices)
    ran = _Run()
    for n, request in enumerate(_requests(draw, tasks, devices)):
        if not n % KEPT:
            gc.collect()
            gc.freeze()  # control keeps no such heap of requests, which garbage collection walks
        ran.decide(scene, request)
    spread = _spread(scene)
    lost = max(scene.up, key=lambda name: scene.up[name][KIND].total_ns)
    again = _lose(scene, ran, lost)
    look_s = LOOK_S_EACH * islands * devices
    waits_s = sorted(_waits_s(draw, ran.all_cpu_s, look_s, RATE_S))
    burst_s = sorted(_waits_s(draw, ran.all_cpu_s, look_s, math.inf))
    mean_ms = 1e3 * sum(ran.all_cpu_s) / ran.tasks
    targets = [
        _at_most("control decides, mean CPU ms for a task", mean_ms, "ms", 1.0),
        _at_most(
            "a request of one task, p99 CPU ms", 1e3 * _part(ran.cpu_s["task"], 0.99), "ms", 5
        ),
        _at_most("any request, longest CPU s", max(ran.all_cpu_s), "s", 5),
        _at_most("work of the fullest island to the mean", spread, "times", 1.05),
        _at_most("a request waits for its island, p99 s", _part(waits_s, 0.99), "s", 5),
        _at_most("tasks of a lost island have islands again, s", again.pop("s"), "s", 60),
        _at_most(
            "work of the fullest island to the mean, after the loss", _spread(scene), "times", 1.05
        ),
    ]
    beside: dict[str, Any] = {"islands": islands, "devices of each": devices, "tasks": ran.tasks}
    beside |= {"requests": len(ran.all_cpu_s), "without an island": ran.nowhere}
    for shape, took in ran.cpu_s.items():
        ms = {part: round(1e3 * _part(took, at), 2) for part, at in _PARTS.items()}
        beside[f"a {shape}, CPU ms"] = {"requests": len(took), **ms}
    beside["all decisions"] = {"CPU s": round(sum(ran.all_cpu_s), 1), "s": round(ran.wall_s, 1)}
    beside["a request waits for its island, s"] = {
        part: round(_part(waits_s, at), 2) for part, at in _PARTS.items()
    }
    beside["all at once: a request waits for its island, s"] = {
        part: round(_part(burst_s, at), 1) for part, at in _PARTS.items()
    }
    beside["the lost island"] = again
    beside["load"] = [round(one, 1) for one in os.getloadavg()]
    return report("many_islands", targets, beside)


_PARTS = {"p50": 0.5, "p99": 0.99, "longest": 1.0}


def _part(values: list[float], part: float) -> float:
    """Return the value below which this part of all values lies."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def _at_most(name: str, value: float, unit: str, bound: float) -> Target:
    return Target(name=name, value=round(value, 3), unit=unit, op="<=", bound=bound)


# --- the islands and the requests -----------------------------------------------------------------


def _scene(islands: int, devices: int) -> AssignmentScene:
    """Return islands without work; every fourth has devices of another model."""
    names = [f"i{n:03}" for n in range(islands)]
    tenants = {"root": BoardTenant(id="root", name="root", weight=1000)}
    for n in range(TENANTS):
        weight = 1000 * (1 + n % 4)
        tenants[f"t{n}"] = BoardTenant(id=f"t{n}", name=f"t{n}", weight=weight, parent="root")
    return AssignmentScene(
        up={name: {KIND: Stock(kind=KIND, devices=devices)} for name in names},
        all={name: {KIND: Stock(kind=KIND, devices=devices)} for name in names},
        offers={(name, KIND): _offer(name, n, devices) for n, name in enumerate(names)},
        tenants=tenants,
    )


def _offer(island: str, n: int, devices: int) -> Offer:
    traits = DeviceTraits(model="H100" if n % 4 else "H200")
    return Offer(
        (Alike(island, f"{island}.0", 80 * 10**9, HOST_DEVICES, traits, devices // HOST_DEVICES),)
    )


@dataclass(slots=True, kw_only=True)
class _Task:
    """Has the columns of a task's row that an assignment reads."""

    id: str
    tenant_id: str
    kind: str = KIND
    island: str | None = None
    state: str = "waiting"
    gang_id: str | None = None
    devices_min: int = 1
    across_hosts: bool = False
    may_span: bool = False
    islands: int = 1
    memory_bytes: int = 10**9
    device_choice: str = ""
    part: None = None
    outputs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Need:
    needs_id: str
    port: str = "x"
    output: str = "x"
    late: bool = False


@dataclass(frozen=True, slots=True)
class _Request:
    shape: str
    work: RequestWork


def _requests(draw: random.Random, tasks: int, devices: int) -> Iterator[_Request]:
    """Yield requests until they have this many tasks; tenants differ in how much they submit."""
    shapes, odds = list(SHAPES), list(SHAPES.values())
    made = 0
    while made < tasks:
        (shape,) = draw.choices(shapes, odds)
        work = _work(draw, shape, f"r{made}", devices)
        made += len(work.tasks)
        yield _Request(shape, work)


def _work(draw: random.Random, shape: str, id: str, devices: int) -> RequestWork:
    tenant = f"t{int(TENANTS * draw.random() ** 2)}"
    count = {"sweep of 20": 20, "graph of 10": 10, "sweep of 1,000": 1_000}.get(shape, 1)
    choice = "=H200" if draw.random() < 0.1 and shape != "gang over islands" else ""
    tasks = [_Task(id=f"{id}.{n}", tenant_id=tenant, device_choice=choice) for n in range(count)]
    if shape == "gang of 64":
        tasks = [replace(one, devices_min=64, across_hosts=True) for one in tasks]
    if shape == "gang over islands":
        width = devices * 6 // 5
        tasks = [
            replace(one, devices_min=width, across_hosts=True, may_span=True, islands=4)
            for one in tasks
        ]
    needs = {}
    if shape == "graph of 10":
        needs = {
            task.id: [_Need(tasks[draw.randrange(n)].id) for _ in range(min(n, 2))]
            for n, task in enumerate(tasks)
            if n
        }
        needs = {id: list({one.needs_id: one for one in of}.values()) for id, of in needs.items()}
    time_ns = int(draw.uniform(60, LONGEST_S) * 1e9)
    return RequestWork(
        tasks=cast(Sequence[AnyRow], tasks),
        needs=cast(Mapping[str, Sequence[AnyRow]], needs),
        time_ns={task.id: time_ns for task in tasks},
    )


# --- decisions ------------------------------------------------------------------------------------


@dataclass
class _Run:
    """Keeps all decisions so far: their cost, and the requests of each island."""

    cpu_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    on: dict[str, list[_Request]] = field(default_factory=lambda: defaultdict(list))
    tasks: int = 0
    nowhere: int = 0
    wall_s: float = 0.0

    @property
    def all_cpu_s(self) -> list[float]:
        return [one for took in self.cpu_s.values() for one in took]

    def decide(self, scene: AssignmentScene, request: _Request) -> None:
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        found = _decided(scene, request.work)
        self.cpu_s[request.shape].append(time.process_time() - began_cpu_s)
        self.wall_s += time.perf_counter() - began_s
        self.tasks += len(request.work.tasks)
        self.nowhere += found is None
        for island in {island for island, _ in (found or {}).values()}:
            self.on[island].append(request)


def _decided(scene: AssignmentScene, work: RequestWork, *, lost: str = "") -> Seats | None:
    found = scene.decided(work, lost=lost)
    if found is not None:
        scene.add(work, found)
        for task in work.tasks:
            if task.id in found:
                task.island = found[task.id][0]
    return found


def _spread(scene: AssignmentScene) -> float:
    """Return the factor by which the island with the most work exceeds the mean of all islands."""
    work = [stocks[KIND].total_ns for stocks in scene.up.values()]
    return max(work) * len(work) / sum(work)


def _lose(scene: AssignmentScene, ran: _Run, lost: str) -> dict[str, Any]:
    """Assign the tasks of a lost island to the others; gangs over several islands wait for it."""
    del scene.up[lost], scene.all[lost]
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    moved, to = 0, Counter[str]()
    for request in ran.on[lost]:
        if request.shape == "gang over islands":
            continue
        found = _decided(scene, request.work, lost=lost) or {}
        moved += len(found)
        to.update(island for island, _ in found.values())
    return {
        "s": time.perf_counter() - began_s,
        "CPU s": round(time.process_time() - began_cpu_s, 1),
        "tasks": moved,
        "islands that got some": len(to),
    }


def _waits_s(
    draw: random.Random, took: list[float], look_s: float, rate_s: float
) -> Iterator[float]:
    """Yield how long each request waits for its island, if `rate_s` of them arrive in a second.

    Each page takes `look_s` and the time of its decisions.
    """
    took = draw.sample(took, len(took))
    arrives_s, now_s, n = list[float](), 0.0, 0
    for _ in took:
        arrives_s.append(
            (arrives_s[-1] if arrives_s else 0.0)
            + (draw.expovariate(rate_s) if rate_s < math.inf else 0.0)
        )
    while n < len(took):
        now_s, first = max(now_s, arrives_s[n]), n
        while n < min(len(took), first + NEW_PAGE) and arrives_s[n] <= now_s:
            n += 1
        now_s += look_s + sum(took[first:n])
        yield from (now_s - arrives_s[one] for one in range(first, n))


if __name__ == "__main__":
    sys.exit(main())
