"""Plans a graph over several executors: which one runs which node, and which blocks pass between
them.

The executors of a graph are the ranks of its gang. `spread` assigns the nodes ahead of time; the
planner (`planner`) weighs bytes against time. `executor_plans` returns what each executor runs, in
an order common to all, and which blocks it takes from other executors, gives to them and frees.
Both are pure functions. So every executor knows the whole plan, and need not ask another one
between two nodes.

* A mapped node has one shard per item. Executor `e` of `n` runs the items from `total
* e // n` to `total
* (e + 1) // n`. What it writes stays there as a part of the list.
* The task's inputs lie everywhere. Late inputs come to the first executor, which passes them on.
  The graph's outputs end at the first executor.
* Each executor runs its nodes strictly in the order, which is a linear extension of the
  dependencies. So the first node that has not ended waits for no other, and there is no deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from app.core.model.graphs.task_graph import (
    INPUT,
    USUAL_BYTES,
    Node,
    Program,
    TaskGraph,
    Unit,
    declared,
    known_bytes,
    program,
    waits,
)
from app.core.placement import planner
from app.core.placement.local_search import Effort
from app.core.placement.planner import PlannedBlock, PlannedDevice, PlannedLink, Topology

USUAL_NS = 1_000_000  # nanoseconds assumed for a node without an estimate
RATE = 4 * 10**9  # bytes per second between two executors: one copy in host memory
EFFORT = Effort(search=60_000, exact=30_000)
EVERYBODY = -1  # the seat of a mapped node, which every executor runs
_HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorSpread:
    """The order of all nodes, and the executor of each, or EVERYBODY."""

    executors: int
    order: tuple[str, ...]
    seats: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Describes a block, or one executor's part of a list, that passes once to another executor.

    `bytes` is None if the size is unknown. For a part of a list it is an equal part of all items.
    """

    block: str
    source: int
    target: int
    bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Describes a unit in the plan of an executor; blocks are named by number."""

    at: int
    # (block, maker) that the unit reads and other executors make
    takes: tuple[tuple[int, int], ...] = ()
    gives: tuple[int, ...] = ()  # blocks that the unit makes and other executors read
    frees: tuple[int, ...] = ()  # own blocks that no executor needs after the unit
    # (block, maker) that this executor no longer needs: blocks of others, and own blocks that
    # others may still need
    drops: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorPlan:
    """Lists all that one executor runs. `takes` are blocks of others that the graph's outputs need.

    `readers` maps each block that it gives to its readers, each with the last unit that reads it.
    """

    executor: int
    stops: tuple[Stop, ...]
    takes: tuple[tuple[int, int], ...] = ()
    readers: Mapping[int, Mapping[int, int]] = field(default_factory=dict)


# --- assignment -----------------------------------------------------------------------------------


def spread(
    graph: TaskGraph, executors: int, effort: Effort = EFFORT, *, order: Sequence[str] = ()
) -> ExecutorSpread:
    """Return the executor of each node, and the order of the nodes; if no order is given, one is
    computed.
    """
    if executors == 1:
        names = tuple(order) or program(graph).order
        return ExecutorSpread(executors=1, order=names, seats=dict.fromkeys(names, 0))
    plan = planner.place(_to_place(graph, executors), _topology(executors), effort)
    seats = {
        node.name: EVERYBODY if node.map else int(plan.seats[node.name][0]) for node in graph.nodes
    }
    first = dict[str, int]()
    for n, name in enumerate(plan.order):
        first.setdefault(name.partition("#")[0], n)
    found = tuple(order) or _in_order(graph, first)
    return ExecutorSpread(executors=executors, order=found, seats=seats)


def _in_order(graph: TaskGraph, first: Mapping[str, int]) -> tuple[str, ...]:
    """Return the planned order of the nodes, with the shards of each node close together."""
    needed, followers = waits(graph), defaultdict[str, list[str]](list)
    for name, others in needed.items():
        for other in others:
            followers[other].append(name)
    left = {name: len(others) for name, others in needed.items()}
    heap = sorted((first[name], name) for name, count in left.items() if not count)
    found = list[str]()
    while heap:
        _, name = heappop(heap)
        found.append(name)
        for follower in followers[name]:
            left[follower] -= 1
            if not left[follower]:
                heappush(heap, (first[follower], follower))
    return tuple(found)


def _topology(executors: int) -> Topology:
    names = [str(e) for e in range(executors)]
    pairs = [(a, b) for a in (*names, _HOST) for b in (*names, _HOST) if a != b]
    return Topology(
        devices=tuple(PlannedDevice(id=name, host=_HOST, kind="any") for name in names),
        links=tuple(PlannedLink(source=a, target=b, bytes_per_s=RATE) for a, b in pairs),
    )


def _to_place(graph: TaskGraph, executors: int) -> planner.PlannedGraph:
    """Convert the graph for the planner: a mapped node becomes one node per executor, and a list
    its parts.
    """
    known, items = known_bytes(graph), _declared_items(graph)
    mapping = {node.name for node in graph.nodes if node.map}
    nodes, blocks = list[planner.PlannedNode](), dict[str, PlannedBlock]()
    ends = set(graph.outputs.values())
    for port in graph.ports:
        name = f"{INPUT}{port}"
        blocks[name] = PlannedBlock(id=name, bytes=known.get(name, USUAL_BYTES), at=(_HOST,))
    for node in graph.nodes:
        for e in range(executors) if node.map else (EVERYBODY,):
            suffix = f"#{e}" if node.map else ""
            writes = tuple(f"{block}{suffix}" for block in node.writes)
            for block, id in zip(node.writes, writes, strict=True):
                to = ("0",) if block in ends else ()
                size = known.get(block, USUAL_BYTES)
                if node.map:
                    size = known.get(block, items.get(block, USUAL_BYTES) * executors) // executors
                blocks[id] = PlannedBlock(id=id, bytes=size, to=to)
            nodes.append(
                planner.PlannedNode(
                    id=f"{node.name}{suffix}",
                    time_ns={"any": _time_ns(node, e, executors)},
                    reads=tuple(_parts_read(node, e, executors, mapping)),
                    writes=writes,
                    devices=(str(e),) if node.map else (),
                )
            )
    return planner.PlannedGraph(nodes=tuple(nodes), blocks=tuple(blocks.values()))


def _parts_read(node: Node, executor: int, executors: int, mapping: set[str]) -> Iterator[str]:
    for block in _needed(node, executor, executors):
        if _maker(block) not in mapping:
            yield block
        elif block in _own_parts(node):
            yield f"{block}#{executor}"
        else:
            yield from (f"{block}#{e}" for e in range(executors))


def _time_ns(node: Node, executor: int, executors: int) -> int:
    one_ns = int(node.est_ms * 1e6) or USUAL_NS
    listed = [len(node.inputs[port].sources) for port in node.map if node.inputs[port].is_list]
    return one_ns * max(1, len(part(listed[0], executor, executors))) if listed else one_ns


def _declared_items(graph: TaskGraph) -> dict[str, int]:
    """Return the declared size of one item, by list."""
    return {
        block: tensor.bytes
        for block, (tensor, is_list) in declared(graph).items()
        if is_list and tensor.bytes is not None
    }


# --- what passes ----------------------------------------------------------------------------------


def executor_plans(
    graph: TaskGraph, spread: ExecutorSpread, program: Program, late: Collection[str] = ()
) -> tuple[ExecutorPlan, ...]:
    """Return what each executor runs of a program that is in the order of `spread`.

    Inputs named in `late` arrive while the graph runs.
    """
    return _PlanFinder(graph, spread, program, late).found()


class _PlanFinder:
    def __init__(
        self, graph: TaskGraph, spread: ExecutorSpread, program: Program, late: Collection[str]
    ) -> None:
        self.spread, self.program, self.n = spread, program, spread.executors
        self.number = {name: n for n, name in enumerate(program.blocks)}
        self.late = {self.number[f"{INPUT}{port}"] for port in late}
        self.nodes = {node.name: node for node in graph.nodes}
        self.outputs = sorted({*program.outputs.values()})
        self.maker = {n: at for at, unit in enumerate(program.units) for _, n in unit.outputs}
        #: executor -> unit -> what it reads there, (block, maker)
        self.reads = [
            {at: tuple(self._reads(unit, e)) for at, unit in self._units(e)} for e in range(self.n)
        ]
        self.reads[0][len(program.units)] = tuple(
            (n, e) for n in self.outputs for e in self._holders(n)
        )
        #: (block, maker) -> executor -> the last unit there that reads it
        self.last = defaultdict[tuple[int, int], dict[int, int]](dict)
        for e, units in enumerate(self.reads):
            for at, read in units.items():
                for held in read:
                    self.last[held][e] = at

    def found(self) -> tuple[ExecutorPlan, ...]:
        end = len(self.program.units)
        return tuple(
            ExecutorPlan(
                executor=e,
                stops=tuple(self._stop(e, at, unit) for at, unit in self._units(e)),
                takes=tuple(h for h in self.reads[e].get(end, ()) if h[1] != e),
                readers={
                    n: {other: at for other, at in who.items() if other != e}
                    for (n, whose), who in self.last.items()
                    if whose == e and who.keys() - {e}
                },
            )
            for e in range(self.n)
        )

    def _units(self, executor: int) -> Iterator[tuple[int, Unit]]:
        for at, unit in enumerate(self.program.units):
            if self.spread.seats[unit.name] in (executor, EVERYBODY):
                yield at, unit

    def _holders(self, block: int) -> Sequence[int]:
        if block in self.late:
            return (0,)
        seat = self.spread.seats[self.program.units[self.maker[block]].name]
        return range(self.n) if seat == EVERYBODY else (seat,)

    def _reads(self, unit: Unit, executor: int) -> Iterator[tuple[int, int]]:
        node = self.nodes[unit.name]
        own = _own_parts(node)
        for block in _needed(node, executor, self.n):
            n = self.number[block]
            is_here = block.startswith(INPUT) and n not in self.late
            holders = (executor,) if is_here else self._holders(n)
            yield from (
                (n, e) for e in holders if len(holders) == 1 or e == executor or block not in own
            )

    def _stop(self, executor: int, at: int, unit: Unit) -> Stop:
        read = self.reads[executor][at]
        made = [(n, executor) for _, n in unit.outputs]
        over = [
            held
            for held in dict.fromkeys((*read, *made))
            if self.last[held].get(executor, at) == at
        ]
        given = {held for held in (*read, *made) if self._is_given(held)}
        return Stop(
            at=at,
            takes=tuple(held for held in read if held[1] != executor),
            gives=tuple(n for n, e in made if (n, e) in given),
            frees=tuple(n for n, e in over if e == executor and (n, e) not in given),
            drops=tuple(held for held in over if held[1] != executor or held in given),
        )

    def _is_given(self, held: tuple[int, int]) -> bool:
        return bool(self.last[held].keys() - {held[1]})


def copies(
    graph: TaskGraph, spread: ExecutorSpread, late: Collection[str] = ()
) -> tuple[Copy, ...]:
    """Return all copies between executors, by target and then in the order of the nodes."""
    made, known = program(graph, spread.order), known_bytes(graph)
    found = list[Copy]()
    for plan in executor_plans(graph, spread, made, late):
        taken = dict.fromkeys((*(h for stop in plan.stops for h in stop.takes), *plan.takes))
        for n, source in taken:
            name = made.blocks[n]
            size = known.get(name)
            if size is not None and spread.seats.get(_maker(name)) == EVERYBODY:
                size //= spread.executors
            found.append(Copy(block=name, source=source, target=plan.executor, bytes=size))
    return tuple(found)


def _needed(node: Node, executor: int, executors: int) -> tuple[str, ...]:
    """Return the blocks that this executor's part of the node reads.

    If the node maps over a list of blocks, only the executor's own items count.
    """
    found = list[str]()
    for port, taken in node.inputs.items():
        if port in node.map and taken.is_list:
            own = part(len(taken.sources), executor, executors)
            found += taken.sources[own.start : own.stop]
        else:
            found += taken.sources
    return tuple(dict.fromkeys(found))


def _own_parts(node: Node) -> set[str]:
    """Return the lists that the node only maps over; each executor already has its part of such a
    list.
    """
    mapped = {
        taken.sources[0] for p, taken in node.inputs.items() if p in node.map and not taken.is_list
    }
    whole = {s for p, t in node.inputs.items() if p not in node.map or t.is_list for s in t.sources}
    return mapped - whole


def _maker(block: str) -> str:
    return "" if block.startswith(INPUT) else block.rpartition(".")[0]


# --- dealing out ---------------------------------------------------------------------------------


def part(total: int, executor: int, executors: int) -> range:
    """Return the items of a list whose shards the executor runs."""
    return range(total * executor // executors, total * (executor + 1) // executors)
