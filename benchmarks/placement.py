"""Compare the bytes that a placement copies with the minimum, and with plain rules.

    python -m benchmarks.placement [--quick]

There are 1,000 random graphs of seven families, on 2 and 3 devices, small enough that every
placement can be tried. On 20 graphs shaped like real programs the peers are compared with each
other. The minimum is found by trying all assignments, in the order by upward rank and in those of
the plans. Among those with a makespan of at most 1.03 times the best one, the fewest bytes count.
This search is a plain walk over all assignments, and shares with the planner only the cost of one
placement.

The planner is shown twice: complete (`place`, which searches graphs of this size exhaustively), and
its local search alone, as used for larger graphs. Peers are measured by the same cost, and may
prefetch like the plan does.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from app.core.placement.cost_model import PlacementProblem, Timeline
from app.core.placement.heuristics import Solution, dmda, heft, idle_rule, least_bytes, ranks
from app.core.placement.local_search import Effort
from app.core.placement.planner import (
    GraphPlacement,
    Numbers,
    PlannedBlock,
    PlannedDevice,
    PlannedGraph,
    PlannedLink,
    PlannedNode,
    Topology,
    place,
)
from benchmarks import Target, quick, report

GRAPHS, QUICK = 1000, 84
MB, MS = 10**6, 10**6
GUARD = 1.03
# of the random graphs, for the local search alone: it takes ten times as long as `place`
ALONE_EVERY = 3
SEARCH_ALONE, LONG = Effort(exact=0), Effort(search=1_000_000, exact=300_000)


# --- rules to compare with ----------------------------------------------------------------------


def first_available(problem: PlacementProblem) -> Solution:
    """Give the first idle device to the task that became ready first."""
    return idle_rule(problem, lambda task, waited, since: -since, lambda line, task, choice: 0)


RULES: dict[str, Callable[[PlacementProblem], Solution]] = {
    "first-available": first_available,
    "least-bytes": least_bytes,
    "dmda": dmda,
    "heft": heft,
}


def place_by_rule(graph: PlannedGraph, topology: Topology, rule: str) -> GraphPlacement:
    """Return the plan of one of the `RULES`; raises Unplaceable."""
    numbers = Numbers(graph, topology)
    found = RULES[rule](numbers.problem)
    return numbers.placement(replace(found, least_makespan_ns=found.makespan_ns))


# --- machines -----------------------------------------------------------------------------------


def machine(devices: int, *, peers: bool) -> Topology:
    """Return devices of one host at 12 GB/s each way.

    With `peers` they also copy to each other directly.
    """
    ids = [f"d{n}" for n in range(devices)]
    ways = [(id, "host") for id in ids] + [("host", id) for id in ids]
    if peers:
        ways += [(a, b) for a in ids for b in ids if a != b]
    return Topology(
        devices=tuple(PlannedDevice(id=id, host="host", kind="cuda") for id in ids),
        links=tuple(
            PlannedLink(source=a, target=b, bytes_per_s=12 * 10**9, latency_ns=10_000)
            for a, b in ways
        ),
    )


# --- random graphs ------------------------------------------------------------------------------


class Sketch:
    """Collects the tasks and edges of a graph; draws sizes and times."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.nodes: list[PlannedNode] = []
        self.blocks: list[PlannedBlock] = []

    def source(self, bytes_: int | None = None) -> str:
        """Add a block on the host; returns its name."""
        size = bytes_ or self.draw.choice((16, 64, 256)) * MB
        self.blocks.append(PlannedBlock(id=f"in{len(self.blocks)}", bytes=size, at=("host",)))
        return self.blocks[-1].id

    def task(self, reads: Sequence[str], bytes_: int | None = None, ms: float | None = None) -> str:
        """Add a task with one output; returns the output's name."""
        size = bytes_ if bytes_ is not None else self.draw.choice((1, 4, 16, 64, 256)) * MB
        time_ns = int((ms if ms is not None else self.draw.uniform(5, 40)) * MS)
        id = f"t{len(self.nodes)}"
        self.blocks.append(PlannedBlock(id=f"{id}.out", bytes=size))
        self.nodes.append(
            PlannedNode(
                id=id,
                time_ns={"cuda": time_ns},
                reads=tuple(dict.fromkeys(reads)),
                writes=(f"{id}.out",),
            )
        )
        return f"{id}.out"

    def graph(self) -> PlannedGraph:
        """Return the graph with max(2, n/4) more inputs, each read by one to three tasks."""
        for _ in range(max(2, len(self.nodes) // 4)):
            block = self.source()
            for n in self.draw.sample(range(len(self.nodes)), self.draw.randint(1, 3)):
                node = self.nodes[n]
                self.nodes[n] = replace(node, reads=(*node.reads, block))
        return PlannedGraph(nodes=tuple(self.nodes), blocks=tuple(self.blocks))


def layered(draw: random.Random, size: int) -> PlannedGraph:
    sketch, layers = Sketch(draw), list[list[str]]()
    while sum(map(len, layers)) < size:
        width = min(draw.randint(2, max(2, size // 4)), size - sum(map(len, layers)))
        above = layers[-1] if layers else []
        layers.append(
            [
                sketch.task(draw.sample(above, min(len(above), draw.randint(1, 3))))
                for _ in range(width)
            ]
        )
    return sketch.graph()


def fork_join(draw: random.Random, size: int) -> PlannedGraph:
    sketch, at = Sketch(draw), list[str]()
    while len(sketch.nodes) < size - 1:
        fork = sketch.task(at)
        at = [
            sketch.task([fork])
            for _ in range(min(draw.randint(2, 4), size - 1 - len(sketch.nodes)))
        ] or [fork]
    sketch.task(at)
    return sketch.graph()


def tree(draw: random.Random, size: int) -> PlannedGraph:
    sketch = Sketch(draw)
    out = [sketch.task([])]
    for n in range(1, size):
        out.append(sketch.task([out[(n - 1) // 2]]))
    return sketch.graph()


def in_tree(draw: random.Random, size: int) -> PlannedGraph:
    sketch = Sketch(draw)
    open_ = [sketch.task([]) for _ in range((size + 1) // 2)]
    while len(open_) > 1 and len(sketch.nodes) < size:
        few = [open_.pop(0) for _ in range(2)]
        open_.append(sketch.task(few))
    return sketch.graph()


def fft(draw: random.Random, size: int) -> PlannedGraph:
    """Butterflies: each task reads two outputs of the stage before it."""
    width = 4 if size < 24 else 8
    sketch = Sketch(draw)
    stage, stride = [sketch.task([]) for _ in range(width)], 1
    while stride < width and len(sketch.nodes) + width <= max(size, 8):
        stage = [sketch.task([stage[n], stage[n ^ stride]]) for n in range(width)]
        stride *= 2
    return sketch.graph()


def cholesky(draw: random.Random, size: int) -> PlannedGraph:
    """Tiles of one size: potrf, trsm, syrk and gemm, as far as the size allows."""
    tiles = next(n for n in range(2, 30) if n * (n + 1) * (n + 2) // 6 >= size or n == 29)
    sketch, tile_bytes = Sketch(draw), draw.choice((16, 64, 256)) * MB
    at = {(i, j): sketch.source(tile_bytes) for i in range(tiles) for j in range(i + 1)}

    def step(out: tuple[int, int], *reads: tuple[int, int], ms: float) -> None:
        if len(sketch.nodes) < size:
            at[out] = sketch.task([at[out], *(at[one] for one in reads)], tile_bytes, ms)

    for k in range(tiles):
        step((k, k), ms=8)
        for i in range(k + 1, tiles):
            step((i, k), (k, k), ms=12)
        for i in range(k + 1, tiles):
            step((i, i), (i, k), ms=12)
            for j in range(k + 1, i):
                step((i, j), (i, k), (j, k), ms=20)
    return PlannedGraph(nodes=tuple(sketch.nodes), blocks=tuple(sketch.blocks))


def dag(draw: random.Random, size: int) -> PlannedGraph:
    sketch, out = Sketch(draw), list[str]()
    for _ in range(size):
        out.append(sketch.task([one for one in out if draw.random() < 2 / size][:4]))
    return sketch.graph()


FAMILIES: dict[str, Callable[[random.Random, int], PlannedGraph]] = {
    "layered": layered,
    "fork-join": fork_join,
    "tree": tree,
    "in-tree": in_tree,
    "fft": fft,
    "cholesky": cholesky,
    "dag": dag,
}


def random_graph(seed: int, size: int | None = None) -> tuple[str, PlannedGraph, Topology]:
    draw = random.Random(seed)
    names = list(FAMILIES)
    family, devices = names[seed % len(names)], 2 + seed // len(names) % 2
    graph = FAMILIES[family](draw, size or (12 if devices == 2 else 9))
    return family, graph, machine(devices, peers=seed // (2 * len(names)) % 2 == 0)


# --- graphs shaped like real programs -----------------------------------------------------------


def ensemble(sketch: Sketch, members: int = 5) -> None:
    """Digits: preprocess, augment, train an ensemble, evaluate, vote."""
    data = sketch.task([sketch.source(60 * MB)], 45 * MB, 4)
    test = sketch.task([sketch.source(10 * MB)], 8 * MB, 1)
    votes = []
    for _ in range(members):
        model = sketch.task([sketch.task([data], 45 * MB, 6)], 5 * MB, 60)
        votes.append(sketch.task([model, test], 1 * MB, 3))
    sketch.task(votes, 1 * MB, 1)


def text(sketch: Sketch, shards: int = 6) -> None:
    """Text: tokenize shards, train on each, merge."""
    tokens = [sketch.task([sketch.source(80 * MB)], 30 * MB, 10) for _ in range(shards)]
    start = sketch.source(20 * MB)
    models = [sketch.task([shard, start], 20 * MB, 50) for shard in tokens]
    while len(models) > 1:
        models = [sketch.task(models[n : n + 2], 20 * MB, 2) for n in range(0, len(models), 2)]


def sweep(sketch: Sketch, arms: int = 8) -> None:
    """Hyper-parameter search with early stopping: train all arms a little, keep half, and again."""
    data, left = sketch.source(200 * MB), list[str]()
    left = [sketch.task([data], 40 * MB, 20) for _ in range(arms)]
    while len(left) > 1:
        scores = [sketch.task([model, data], 1 * MB, 2) for model in left]
        best = sketch.task(scores, 1 * MB, 1)
        left = [sketch.task([model, data, best], 40 * MB, 20) for model in left[: len(left) // 2]]


def folds(sketch: Sketch, k: int = 5) -> None:
    """k-fold: k slices; train on all but one, test on that slice."""
    slices = [sketch.source(40 * MB) for _ in range(k)]
    scores = []
    for n in range(k):
        model = sketch.task([one for m, one in enumerate(slices) if m != n], 10 * MB, 50)
        scores.append(sketch.task([model, slices[n]], 1 * MB, 5))
    sketch.task(scores, 1 * MB, 1)


def map_reduce(sketch: Sketch, parts: int = 12, reducers: int = 3) -> None:
    """Map-reduce: compute features of every part by one model, then reduce them."""
    model = sketch.source(100 * MB)
    mapped = [sketch.task([sketch.source(64 * MB), model], 24 * MB, 15) for _ in range(parts)]
    reduced = [sketch.task(mapped, 8 * MB, 12) for _ in range(reducers)]
    sketch.task(reduced, 8 * MB, 2)


def pipeline(sketch: Sketch, stages: int = 3, batches: int = 4) -> None:
    """A training step in stages and micro-batches: forward, backward, update in place."""
    weights = [sketch.source(120 * MB) for _ in range(stages)]
    kept, grads = dict[tuple[int, int], str](), list[list[str]]([] for _ in range(stages))
    for b in range(batches):
        at = sketch.source(8 * MB)
        for s in range(stages):
            at = kept[s, b] = sketch.task([at, weights[s]], 16 * MB, 8)
    for b in range(batches):
        at = sketch.task([kept[stages - 1, b]], 1 * MB, 1)
        for s in reversed(range(stages)):
            grads[s].append(sketch.task([kept[s, b], weights[s], at], 120 * MB, 12))
            at = sketch.task([grads[s][-1]], 16 * MB, 4)
    for s in range(stages):
        sketch.task([weights[s], *grads[s]], 120 * MB, 6)


def attention(sketch: Sketch, layers: int = 2, heads: int = 4) -> None:
    """Layers of attention by head, each followed by a feed-forward task."""
    at = sketch.source(32 * MB)
    for _ in range(layers):
        weights = sketch.source(48 * MB)
        out = []
        for _ in range(heads):
            qkv = [sketch.task([at, weights], 8 * MB, 4) for _ in range(3)]
            out.append(sketch.task([sketch.task(qkv[:2], 16 * MB, 6), qkv[2]], 8 * MB, 5))
        joined = sketch.task([*out, at], 32 * MB, 4)
        at = sketch.task([joined, sketch.source(64 * MB)], 32 * MB, 14)


def data_parallel(sketch: Sketch, ranks: int = 4, steps: int = 2) -> None:
    """Data parallel training: gradients on shards, one sum, one update, again."""
    weights = sketch.source(80 * MB)
    shards = [sketch.source(30 * MB) for _ in range(ranks)]
    for _ in range(steps):
        grads = [sketch.task([weights, shard], 80 * MB, 30) for shard in shards]
        while len(grads) > 1:
            grads = [sketch.task(grads[n : n + 2], 80 * MB, 2) for n in range(0, len(grads), 2)]
        weights = sketch.task([weights, *grads], 80 * MB, 4)


def matmul(sketch: Sketch, tiles: int = 3) -> None:
    """Blocked matrix product: every tile of the product sums products of tiles."""
    a = {(i, k): sketch.source(32 * MB) for i in range(tiles) for k in range(tiles)}
    b = {(k, j): sketch.source(32 * MB) for k in range(tiles) for j in range(tiles)}
    for i in range(tiles):
        for j in range(tiles):
            at = sketch.task([a[i, 0], b[0, j]], 32 * MB, 10)
            for k in range(1, tiles):
                at = sketch.task([a[i, k], b[k, j], at], 32 * MB, 10)


def experts(sketch: Sketch, count: int = 6) -> None:
    """A mixture of experts: route, run, gather, twice."""
    at = sketch.source(48 * MB)
    for _ in range(2):
        routed = sketch.task([at], 48 * MB, 3)
        out = [sketch.task([routed, sketch.source(150 * MB)], 8 * MB, 12) for _ in range(count)]
        at = sketch.task(out, 48 * MB, 3)


def wavefront(sketch: Sketch, rows: int = 5, columns: int = 5) -> None:
    """Each cell needs the cells above and before it, like a recurrent network in layers."""
    cells = dict[tuple[int, int], str]()
    for i in range(rows):
        weights = sketch.source(40 * MB)
        for j in range(columns):
            near = [cells[at] for at in ((i - 1, j), (i, j - 1)) if at in cells]
            cells[i, j] = sketch.task([*near, weights], 16 * MB, 9)


def stencil(sketch: Sketch, parts: int = 4, steps: int = 5) -> None:
    """Parts of a field; each step reads its own and the neighbours' previous parts."""
    field = [sketch.source(64 * MB) for _ in range(parts)]
    for _ in range(steps):
        field = [sketch.task(field[max(0, n - 1) : n + 2], 64 * MB, 15) for n in range(parts)]


def distil(sketch: Sketch, batches: int = 6) -> None:
    """Distillation: a large model labels every batch, a small one learns from them in turn."""
    teacher, student = sketch.source(400 * MB), sketch.source(30 * MB)
    for _ in range(batches):
        batch = sketch.source(24 * MB)
        labels = sketch.task([batch, teacher], 12 * MB, 30)
        student = sketch.task([batch, labels, student], 30 * MB, 20)


PROGRAMS: dict[str, Callable[[Sketch], None]] = {
    "digits ensemble": ensemble,
    "large ensemble": lambda sketch: ensemble(sketch, 9),
    "text shards": text,
    "sweep with early stop": sweep,
    "small sweep": lambda sketch: sweep(sketch, 4),
    "5-fold": folds,
    "10-fold": lambda sketch: folds(sketch, 10),
    "map-reduce": map_reduce,
    "wide map-reduce": lambda sketch: map_reduce(sketch, 40, 6),
    "training pipeline": pipeline,
    "deep training pipeline": lambda sketch: pipeline(sketch, 6, 8),
    "attention": attention,
    "attention, 6 layers": lambda sketch: attention(sketch, 6, 8),
    "data parallel": data_parallel,
    "blocked matmul": matmul,
    "blocked matmul, 5 tiles": lambda sketch: matmul(sketch, 5),
    "experts": experts,
    "wavefront": wavefront,
    "stencil": stencil,
    "distillation": distil,
}


def program(name: str) -> PlannedGraph:
    sketch = Sketch(random.Random(0))
    PROGRAMS[name](sketch)
    return PlannedGraph(nodes=tuple(sketch.nodes), blocks=tuple(sketch.blocks))


# --- the minimum --------------------------------------------------------------------------------


def least(
    graph: PlannedGraph, topology: Topology, orders: Sequence[Sequence[int]]
) -> tuple[int, int]:
    """Return the best makespan, and the fewest bytes at up to 1.03 times that, over all
    assignments.

    All devices are alike and all inputs are on the host, so the first task may stay on the first
    device.
    """
    problem, found = Numbers(graph, topology).problem, dict[int, int]()
    for order in orders:
        _walk(problem, order, Timeline(problem), found)
    best_ns = min(found.values())
    return best_ns, min(b for b, makespan in found.items() if makespan <= GUARD * best_ns)


def _walk(
    problem: PlacementProblem,
    order: Sequence[int],
    line: Timeline,
    found: dict[int, int],
    n: int = 0,
) -> None:
    """Try every placement of the order from its n-th task on.

    `found`: bytes -> their best makespan.
    """
    if n == len(order):
        found[line.bytes] = min(line.makespan_ns, found.get(line.bytes, line.makespan_ns))
        return
    for choice in problem.options[order[n]][: 1 if n == 0 else None]:
        mark = len(line.log)
        line.place(order[n], choice)
        _walk(problem, order, line, found, n + 1)
        line.undo(mark)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Holds the result for one graph: each planner's bytes and makespan over the best, and the
    time.
    """

    family: str
    ratios: dict[str, tuple[float, float]]
    seconds: float


def judge(seed: int) -> Row:
    """Compare the planners on a random graph with the minimum."""
    family, graph, topology = random_graph(seed)
    began_s = time.process_time()
    plan = place(graph, topology)
    seconds = time.process_time() - began_s
    problem, number = Numbers(graph, topology).problem, {n.id: i for i, n in enumerate(graph.nodes)}
    plans = {"place": plan}
    if seed % ALONE_EVERY == 0:
        plans["search alone"] = place(graph, topology, SEARCH_ALONE)
    orders = {tuple(problem.sorted_by(ranks(problem).__getitem__))}
    orders |= {tuple(number[id] for id in one.order) for one in plans.values()}
    best_ns, fewest = least(graph, topology, sorted(orders))
    plans |= {rule: place_by_rule(graph, topology, rule) for rule in RULES}
    return Row(
        family=family,
        ratios={
            name: (one.bytes / fewest, one.makespan_ns / best_ns) for name, one in plans.items()
        },
        seconds=seconds,
    )


def judge_program(name_and_devices: tuple[str, int]) -> Row:
    """Compare planners on a program's graph with the best of their plans; one has seven times the
    effort.
    """
    name, devices = name_and_devices
    graph, topology = program(name), machine(devices, peers=True)
    began_s = time.process_time()
    plans = {"place": place(graph, topology)}
    seconds = time.process_time() - began_s
    longer = place(graph, topology, LONG)
    plans |= {rule: place_by_rule(graph, topology, rule) for rule in RULES}
    all_ = [longer, *plans.values()]
    best_ns = min(one.least_makespan_ns for one in all_)
    fewest = min(one.bytes for one in all_ if one.makespan_ns <= GUARD * best_ns)
    return Row(
        family=f"{name}, {devices} devices",
        ratios={
            name: (one.bytes / fewest, one.makespan_ns / best_ns) for name, one in plans.items()
        },
        seconds=seconds,
    )


def planner_seconds() -> dict[str, float]:
    """Return the CPU seconds of planning a large random graph, by size; the slowest of four."""
    found = {}
    for size in (100, 300, 1000):
        seconds = []
        for seed in (0, 5, 6, 7):
            _, graph, topology = random_graph(seed, size)
            began_s = time.process_time()
            place(graph, topology)
            seconds.append(time.process_time() - began_s)
        found[f"{size} nodes"] = round(max(seconds), 2)
    return found


def summary(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return the figures of each planner, over the graphs on which it was tried."""
    found = {}
    for name in dict.fromkeys(name for row in rows for name in row.ratios):
        pairs = [row.ratios[name] for row in rows if name in row.ratios]
        bytes_, makespans = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        found[name] = {
            "graphs": len(pairs),
            "bytes, mean": round(statistics.mean(bytes_), 4),
            "bytes, p95": round(p95(bytes_), 4),
            "makespan, mean": round(statistics.mean(makespans), 4),
            "makespan, p95": round(p95(makespans), 4),
            "makespan within 1.03": round(statistics.mean(m <= GUARD for m in makespans), 4),
        }
    return found


def p95(values: Sequence[float]) -> float:
    return sorted(values)[max(0, -(-95 * len(values) // 100) - 1)]


def main() -> int:
    graphs, programs = GRAPHS, [(name, devices) for name in PROGRAMS for devices in (2, 3)]
    if quick():
        graphs, programs = QUICK, programs[::5]
    with ProcessPoolExecutor(2) as pool:
        rows = list(pool.map(judge, range(graphs), chunksize=4))
        real = list(pool.map(judge_program, programs))
    random_, shaped, times = summary(rows), summary(real), planner_seconds()
    targets = [Target(name="random graphs", value=len(rows), unit="", op=">=", bound=graphs)]
    for what, table, name in (
        ("random", random_, "place"),
        ("random, search alone", random_, "search alone"),
        ("program", shaped, "place"),
    ):
        for figure, bound in (
            ("bytes, mean", 1.05),
            ("bytes, p95", 1.25),
            ("makespan, mean", 1.03),
        ):
            said = f"{what}: {figure} over the least"
            value = table[name][figure]
            targets.append(Target(name=said, value=value, unit="x", op="<=", bound=bound))
    peers = {
        "random": random_,
        "programs": shaped,
        "seconds, random (mean)": round(statistics.mean(row.seconds for row in rows), 4),
        "seconds of a plan": times,
        "each program": {
            row.family: {name: [round(x, 3) for x in pair] for name, pair in row.ratios.items()}
            for row in real
        },
    }
    return report("placement", targets, peers)


if __name__ == "__main__":
    sys.exit(main())
