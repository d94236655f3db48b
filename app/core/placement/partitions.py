"""Cuts the graph of a task that may use several islands into partitions, each of which is a task.

`cut` gives every node to a partition, one for each island (`islands.apportion`, islands alike): few
bytes cross at a makespan near the best.  An island schedules a partition with one message.
Whatever holds for tasks holds for partitions: they are paused, moved, begun again, charged and
fenced.

* A partition runs its nodes in the order of the plan.  It begins when the inputs of its first node
  are there.  Its other inputs from other partitions may come **late**, while it runs.
* So no partitions wait for each other in a circle before they begin, even if blocks cross the cut
  in both directions.  While they run, a node of one may wait for a node of another that waits for
  an earlier node of the first.  All go on, because all run their nodes in the order of one plan.
* A partition that waits for long leaves its device, and comes back when the block is there.
* The graph is not cut if it is expected to take as long in parts as on one island.

The name of a block has the partition and the node that made it.  A lost block is made again by the
same nodes, with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import Any

from app.core.model.descriptor import MAX_TASKS, Descriptor, RunSpec, Source, TaskDescriptor
from app.core.model.fields import Fault
from app.core.model.graphs import task_graph
from app.core.model.graphs.task_graph import (
    INPUT,
    USUAL_BYTES,
    Binding,
    Node,
    TaskGraph,
    declared,
    known_bytes,
    timed,
    waits,
)
from app.core.placement import planner
from app.core.placement.islands import KindCapacity, PlacementIsland, apportion
from app.core.placement.local_search import Effort
from app.core.placement.planner import PlannedLink

JSON = dict[str, Any]

MAX_NODES = 2000  # most nodes of a graph that is cut, as cutting takes a few seconds
MAX_NAME = 50  # longest name of its task, since partitions are called NAME.NUMBER
LAUNCH_MS = 100.0  # assumed time from a free slot until a partition runs there
GIVE_MS = 50.0  # assumed time from the end of a node until the store is known to have its output
USUAL_MS = 1.0  # as in core.placement.executors
EFFORT = Effort(guard=1050, search=60_000, exact=30_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Describes some nodes of a graph, which one task runs."""

    number: int
    nodes: tuple[str, ...]  # in the order of the plan
    ports: tuple[str, ...]  # inputs of the task that these nodes read
    takes: Mapping[str, str]  # further input -> block of another partition
    # Inputs of `takes` that may arrive while the partition runs, in the order in which it needs
    # them.
    late: tuple[str, ...]
    gives: Mapping[str, str]  # output -> block that other partitions take
    ends: Mapping[str, str]  # output -> output of the graph that is made here
    ms: float  # in ms: how long the partition runs, including its waits
    bytes: Mapping[str, int]  # sizes of the outputs, known or usual
    # by output: after how many ms of running other partitions can take it
    after_ms: Mapping[str, float]

    def as_json(self) -> JSON:
        """Return what a launch says of the partition, in addition to the graph."""
        return {
            "nodes": list(self.nodes),
            "takes": dict(self.takes),
            "late": list(self.late),
            "gives": {**self.gives, **self.ends},
            "ms": self.ms,
            "bytes": dict(self.bytes),
            "after_ms": dict(self.after_ms),
        }


def part(graph: TaskGraph, said: JSON | None) -> TaskGraph:
    """Return the part of the graph that a partition runs; the whole graph if nothing is `said`."""
    if said is None:
        return graph
    chosen, sizes = set(said["nodes"]), declared(graph)
    port = {block: f"{INPUT}{name}" for name, block in said["takes"].items()}

    def bound(taken: Binding) -> Binding:
        return replace(taken, sources=tuple(port.get(s, s) for s in taken.sources))

    known = {name: sizes[block] for name, block in said["takes"].items() if block in sizes}
    made = graph.made_bytes
    return replace(
        graph,
        nodes=tuple(
            replace(node, inputs={name: bound(taken) for name, taken in node.inputs.items()})
            for node in graph.nodes
            if node.name in chosen
        ),
        outputs=said["gives"],
        inputs={
            **graph.inputs,
            **{n: tensor for n, (tensor, listed) in known.items() if not listed},
        },
        made_bytes={**made, **{port[block]: made[block] for block in port if block in made}},
    )


def of_run(graph: TaskGraph, run: RunSpec) -> TaskGraph:
    """Return what a launch runs of its graph, to be planned."""
    known = replace(timed(graph, run.took_ms), made_bytes=run.made_bytes)
    return part(known, run.part)


def late(said: JSON | None) -> tuple[str, ...]:
    """Return the inputs that may come while a partition runs, in the order in which it needs them.

    `said` is the partition (`RunSpec.part`); for None the result is ().
    """
    return tuple((said or {}).get("late", ()))


def order(said: JSON | None) -> tuple[str, ...]:
    """Return the order in which a partition has to run its nodes; () if `said` is None.

    Other partitions wait for the nodes in this order.
    """
    return tuple((said or {}).get("nodes", ()))


# --- the cut --------------------------------------------------------------------------------------


def cut(
    graph: TaskGraph,
    islands: int,
    executors: int,
    *,
    bytes_per_s: int,
    launch_ms: float = LAUNCH_MS,
) -> tuple[Partition, ...]:
    """Return the partitions of a graph for at most so many islands.

    They are in the order in which they begin: each comes after those from which it takes inputs,
    except late ones. If several islands would not be faster, there is only one partition.
    """
    names = [str(n) for n in range(islands)]
    room = {"any": KindCapacity(devices=executors, share=executors)}
    links = [
        PlannedLink(source=a, target=b, bytes_per_s=bytes_per_s)
        for a in names
        for b in names
        if a != b
    ]
    alike = [PlacementIsland(id=name, rooms=room) for name in names]
    found = apportion(_to_place(graph), alike, links, EFFORT)
    planned = {int(name): nodes for name, nodes in found.portions.items() if nodes}
    several = _Cut(graph, planned, executors, launch_ms)
    whole_ms = launch_ms + sum(several.ms.values())
    if len(planned) > 1 and several.ends_ms >= whole_ms:
        return _Cut(graph, {0: task_graph.order(graph)}, executors, launch_ms).found()
    return several.found()


def _to_place(graph: TaskGraph) -> planner.PlannedGraph:
    """Return the graph for the planner.

    The task's inputs lie in the store, which is equally near to all islands.
    """
    sizes = known_bytes(graph)
    nodes = tuple(
        planner.PlannedNode(
            id=node.name,
            time_ns={"any": int(_ms(node) * 1e6)},
            reads=tuple(block for block in node.reads if not block.startswith(INPUT)),
            writes=node.writes,
        )
        for node in graph.nodes
    )
    blocks = (block for node in graph.nodes for block in node.writes)
    return planner.PlannedGraph(
        nodes=nodes,
        blocks=tuple(planner.PlannedBlock(id=one, bytes=_bytes(one, sizes)) for one in blocks),
    )


def _ms(node: Node) -> float:
    listed = [len(node.inputs[port].sources) for port in node.map if node.inputs[port].is_list]
    return (node.est_ms or USUAL_MS) * max([1, *listed])


def _bytes(block: str, sizes: Mapping[str, int]) -> int:
    return sizes.get(block, USUAL_BYTES)


@dataclass(slots=True)
class _Played:
    """Tells when a partition begins, and when its nodes have run.

    All times are in ms from now, except those of `ran_ms`.
    """

    begins_ms: float
    free_ms: float
    # node -> time from the launch of its partition
    ran_ms: dict[str, float] = field(default_factory=dict)


class _Cut:
    """Simulates the nodes of the partitions as the islands will run them.

    `planned` has the nodes of each partition in the order of one plan, so that no partitions wait
    for each other in a circle.
    """

    def __init__(
        self,
        graph: TaskGraph,
        planned: Mapping[int, Sequence[str]],
        executors: int = 1,
        launch_ms: float = LAUNCH_MS,
    ) -> None:
        self.graph, self.planned, self.launch_ms = graph, planned, launch_ms
        self.nodes = {node.name: node for node in graph.nodes}
        self.maker = {block: node.name for node in graph.nodes for block in node.writes}
        self.seats = {name: number for number, names in planned.items() for name in names}
        self.ms = {name: _ms(node) / executors for name, node in self.nodes.items()}
        self.needs = waits(graph)
        self.there_ms = dict[str, float]()  # node -> when other partitions have its blocks
        self.played = dict[int, _Played]()
        for name in TopologicalSorter(self._waits()).static_order():
            self._run(name)
        self.ends_ms = max((one.free_ms for one in self.played.values()), default=0.0)

    def _waits(self) -> dict[str, set[str]]:
        """Return the nodes for which each node waits: those it needs, and the one before it in its
        partition.
        """
        waits = {name: {*self.needs[name]} for name in self.seats}
        for names in self.planned.values():
            for before, name in pairwise(names):
                waits[name].add(before)
        return waits

    def _run(self, name: str) -> None:
        there_ms = max((self.there_ms[other] for other in self._across(name)), default=0.0)
        mine = self.played.get(self.seats[name])
        if mine is None:
            mine = _Played(begins_ms=there_ms, free_ms=there_ms + self.launch_ms)
            self.played[self.seats[name]] = mine
        mine.free_ms = max(mine.free_ms, there_ms) + self.ms[name]
        mine.ran_ms[name] = mine.free_ms - mine.begins_ms - self.launch_ms
        self.there_ms[name] = mine.free_ms + GIVE_MS

    def _across(self, name: str) -> Iterator[str]:
        """Yield the nodes of other partitions that this partition needs."""
        return (other for other in self.needs[name] if self.seats[other] != self.seats[name])

    def found(self) -> tuple[Partition, ...]:
        wanted = {
            block
            for node in self.graph.nodes
            for block in node.reads
            if block in self.maker and self.seats[self.maker[block]] != self.seats[node.name]
        }
        word = _unused("b", {*self.graph.ports, *self.graph.outputs})
        ports = {block: f"{word}{n}" for n, block in enumerate(sorted(wanted))}
        begun = sorted(self.played, key=lambda number: (self.played[number].begins_ms, number))
        return tuple(self._partition(number, ports) for number in begun)

    def _partition(self, number: int, ports: Mapping[str, str]) -> Partition:
        played, sizes = self.played[number], known_bytes(self.graph)
        nodes = [self.nodes[name] for name in self.planned[number]]
        reads = dict.fromkeys(block for node in nodes for block in node.reads)
        writes = {block for node in nodes for block in node.writes}
        gives = {ports[block]: block for block in ports if block in writes}
        ends = {o: block for o, block in self.graph.outputs.items() if block in writes}
        taken = [block for block in reads if block in ports and block not in writes]
        begins_ms = played.begins_ms
        return Partition(
            number=number,
            nodes=tuple(self.planned[number]),
            ports=tuple(one.removeprefix(INPUT) for one in reads if one.startswith(INPUT)),
            takes={ports[block]: block for block in taken},
            late=tuple(ports[one] for one in taken if self.there_ms[self.maker[one]] > begins_ms),
            gives=gives,
            ends=ends,
            ms=played.free_ms - begins_ms - self.launch_ms,
            bytes={o: _bytes(block, sizes) for o, block in {**gives, **ends}.items()},
            after_ms={o: played.ran_ms[self.maker[one]] + GIVE_MS for o, one in gives.items()},
        )


def _unused(word: str, taken: set[str]) -> str:
    """Return the word with so many "_" appended that, with any number, it equals none of the taken
    names.
    """
    while any(name.startswith(word) and name[len(word) :].isdigit() for name in taken):
        word += "_"
    return word


# --- partitions as tasks --------------------------------------------------------------------------


def expanded(
    descriptor: Descriptor, cuts: Mapping[str, Sequence[Partition]]
) -> tuple[Descriptor, list[Fault]]:
    """Return the descriptor with the partitions in place of these tasks, and the faults of that.

    A task that takes an output of such a task then takes it from the partition that makes it. A
    task that starts after such a task starts after all of its partitions.
    """
    named = {name: [f"{name}.{one.number}" for one in mine] for name, mine in cuts.items()}
    giver = {
        (name, output): f"{name}.{one.number}"
        for name, mine in cuts.items()
        for one in mine
        for output in (*one.gives, *one.ends)
    }
    tasks, faults = list[TaskDescriptor](), list[Fault]()
    taken = {task.name for task in descriptor.tasks}
    for n, task in enumerate(descriptor.tasks):
        task = _pointed(task, named, giver)
        if task.name not in cuts:
            tasks.append(task)
            continue
        if len(task.name) > MAX_NAME:
            told = (
                f"must have at most {MAX_NAME} characters, because numbered parts of the task get "
                "this name"
            )
            faults.append(Fault(f"/tasks/{n}/name", told, "range"))
        for name in sorted(taken & {*named[task.name]}):
            told = f"a part of {task.name!r} gets the name {name!r}, which another task already has"
            faults.append(Fault(f"/tasks/{n}/name", told, "twice"))
        for name, one in zip(named[task.name], cuts[task.name], strict=True):
            tasks.append(_as_task(task, name, one, giver))
    if len(tasks) > MAX_TASKS:
        told = (
            f"must have at most {MAX_TASKS} tasks, including the parts of graphs; got {len(tasks)}"
        )
        faults.append(Fault("/tasks", told, "range"))
    return replace(descriptor, tasks=tuple(tasks)), faults


def _pointed(
    task: TaskDescriptor,
    named: Mapping[str, Sequence[str]],
    giver: Mapping[tuple[str, str], str],
) -> TaskDescriptor:
    """Return the task with its edges changed: from tasks that were cut, to their partitions."""
    inputs = {
        port: replace(source, name=giver.get((source.name, source.output), source.name))
        if source.kind == "task"
        else source
        for port, source in task.inputs.items()
    }
    after = tuple(one for name in task.start.after for one in named.get(name, (name,)))
    return replace(task, inputs=inputs, start=replace(task.start, after=after))


def _took_ms(mine: Partition, known: Mapping[str, float]) -> dict[str, float]:
    return {name: known[name] for name in mine.nodes if name in known}


def _made_bytes(mine: Partition, known: Mapping[str, int]) -> dict[str, int]:
    """Return the known sizes of the blocks that the partition makes, and of those that it takes."""
    makers, taken = {*mine.nodes}, {*mine.takes.values()}
    return {
        block: size
        for block, size in known.items()
        if block in taken or block.rpartition(".")[0] in makers
    }


def _as_task(
    task: TaskDescriptor, name: str, mine: Partition, giver: Mapping[tuple[str, str], str]
) -> TaskDescriptor:
    taken = {
        port: Source(kind="task", name=giver[task.name, port], output=port) for port in mine.takes
    }
    run = replace(
        task.run,
        part=mine.as_json(),
        took_ms=_took_ms(mine, task.run.took_ms),
        made_bytes=_made_bytes(mine, task.run.made_bytes),
    )
    return replace(
        task,
        name=name,
        run=run,
        inputs={**{port: task.inputs[port] for port in mine.ports}, **taken},
        outputs=(*mine.gives, *(output for output in task.outputs if output in mine.ends)),
        publish={output: block for output, block in task.publish.items() if output in mine.ends},
        islands=1,
    )
