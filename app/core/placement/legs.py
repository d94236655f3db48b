"""A task whose graph may use several islands: its portions, and the legs of each.

`cut` gives every node to a portion, one for each island (`islands.apportion`, islands alike): few
bytes cross at a makespan near the best.  On its device a portion waits for another one only for a
moment, as a launch costs as much: where it would wait for a block for longer, it ends and leaves
its place, and goes on as its next **leg**, a task that starts when the block is there, whether the
leg that makes it has ended or runs on.  So a leg is what an island schedules, one message to it,
and everything that holds of tasks holds of legs: they are paused, moved, begun again, charged, and
fenced.

* A leg has nodes of one portion that are neighbours in the plan.  Where one ends is weighed
  (`pieces`): what needs blocks begins the earlier, and every leg costs a launch.
* Large graphs, for which that takes too long, are cut by rule as well, and what is expected to end
  sooner is taken.  There nodes have a level: how often what they need has crossed between portions.
  A leg has nodes of one portion and one level; what it needs of its own portion was made by legs
  before it, and what it needs of others has a lower level.  It is cut shorter where it needs one
  block more, if its nodes take `LEG_MS` at least; and where it has given something to another
  portion, if several executors run it, as these give all at its end.
* Where a single executor runs a leg, it may begin before all that it takes is there, and what comes
  **late** is waited for while it runs, each for `PATIENCE_MS` at most as expected; it is cut where
  that would be longer.  Such legs are few, and taken unless others end sooner.  Their nodes have to
  run in the order of the plan.  Several executors never wait: their leg begins when all is there.
* So legs never wait for each other in a ring before they begin, in however many directions the cut
  is crossed.  While they run, one may wait for a node of another that waits for one of its own, and
  all go on in the order of the plan.
* A short node whose block several portions read is run by each of them, where that is quicker
  (`repeats`): it needs no launch of its own then, and nobody waits for its block.
* Where all that is expected to take as long as on one island, it stays whole.

A block is known by the leg and the node that made it; what is lost is made again by the same nodes
with the same bits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import add
from typing import Any

from app.core.model import task_graph
from app.core.model.descriptor import MAX_TASKS, Descriptor, Fault, Source, TaskDescriptor
from app.core.model.task_graph import (
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
from app.core.placement.islands import Island, Room, apportion
from app.core.placement.local_search import Effort
from app.core.placement.pieces import Piece, Timed, Work, patient
from app.core.placement.pieces import cut as weighed
from app.core.placement.pieces import timed as played
from app.core.placement.planner import Link
from app.core.placement.repeats import original, repeated

JSON = dict[str, Any]

MAX_NODES = 2000  # of a graph that is cut: a few seconds
MAX_NAME = 50  # of its task, since legs are called NAME.PORTION.LEG
LEG_MS = 500.0  # by rule a leg of several nodes takes so long at least, if it was cut to be short
LAUNCH_MS = 100.0  # from when its place is free until a leg runs there
GIVE_MS = 50.0  # from when a node has run until what it made lies in the store, and that is known
PATIENCE_MS = 250.0  # so long a leg that runs waits for a block, as expected: launches are dear
SHORT = 0.5  # of a launch: what takes no longer may be run by each portion that needs it
USUAL_MS = 1.0  # as in core.placement.executors
EFFORT = Effort(guard=1050, search=60_000, exact=30_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """Some `nodes` of a portion, in the order of the plan.

    `ports` are the inputs of the task that they read, `takes` maps further inputs to the blocks of
    other legs that they are; those of `late` may come while it runs, from legs that need not have
    begun before it.  `gives` maps outputs to blocks that other legs take, `ends` those of the graph
    that are made here.  `bytes` of these is what is known, or usual.  It runs for `ms`, with
    what it waits within.  `after_ms` are those that other portions take while it runs on, and when
    they can.
    """

    portion: int
    nodes: tuple[str, ...]
    ports: tuple[str, ...]
    takes: Mapping[str, str]
    late: tuple[str, ...]
    gives: Mapping[str, str]
    ends: Mapping[str, str]
    ms: float
    bytes: Mapping[str, int]
    after_ms: Mapping[str, float]

    def as_json(self, *, is_last: bool = True) -> JSON:
        """What a launch says of it, beside the graph; whether it is the last one of its portion."""
        return {
            "nodes": list(self.nodes),
            "takes": dict(self.takes),
            "late": list(self.late),
            "gives": {**self.gives, **self.ends},
            "ms": self.ms,
            "bytes": dict(self.bytes),
            "after_ms": dict(self.after_ms),
            "is_last": is_last,
        }


def part(graph: TaskGraph, said: JSON | None) -> TaskGraph:
    """What a leg runs of its graph; all of it where nothing is `said`."""
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


def of_run(graph: TaskGraph, run: JSON) -> TaskGraph:
    """What a launch runs of its graph, as `run` of a descriptor says it, to be planned."""
    known = replace(timed(graph, run.get("took_ms", {})), made_bytes=run.get("made_bytes", {}))
    return part(known, run.get("part"))


def another_follows(run: JSON) -> bool:
    """What has this `run` is a leg, and not the last one of its portion."""
    return not run.get("part", {}).get("is_last", True)


def late(run: JSON) -> tuple[str, ...]:
    """The inputs that may come while what has this `run` runs, in the order in which it needs them;
    none if it is no leg.
    """
    return tuple(run.get("part", {}).get("late", ()))


def order(run: JSON) -> tuple[str, ...]:
    """In which its nodes have to run: where some input comes late, that of the plan, since others
    wait for it in that order; else any, and this is empty.
    """
    return tuple(run["part"]["nodes"]) if late(run) else ()


# --- the cut --------------------------------------------------------------------------------------


def cut(
    graph: TaskGraph,
    islands: int,
    executors: int,
    *,
    bytes_per_s: int,
    launch_ms: float = LAUNCH_MS,
) -> tuple[Leg, ...]:
    """The legs of a graph on so many islands by when they begin, each behind those that it takes
    from, but for what comes late; a single one where several islands would be no quicker.
    """
    names = [str(n) for n in range(islands)]
    room = {"any": Room(devices=executors, share=executors)}
    links = [
        Link(source=a, target=b, bytes_per_s=bytes_per_s) for a in names for b in names if a != b
    ]
    alike = [Island(id=name, rooms=room) for name in names]
    found = apportion(_to_place(graph), alike, links, EFFORT)
    seats = {name: int(island) for name, island in found.seats.items()}
    ways = [_Legs(graph, seats, found.portions, executors, launch_ms)]
    if short := _short(graph, bytes_per_s, launch_ms):
        again = repeated(graph, seats, found.portions, short)
        ways.append(_Legs(again.graph, again.seats, again.planned, executors, launch_ms))
    legs = min(ways, key=lambda way: way.cost_ms)
    if len(found.portions) > 1 and legs.ends_ms >= legs.whole_ms:
        nodes = task_graph.order(graph)
        return _Legs(graph, dict.fromkeys(nodes, 0), {"0": nodes}, executors, launch_ms).found()
    return legs.found()


def _short(graph: TaskGraph, bytes_per_s: int, launch_ms: float) -> frozenset[str]:
    """Nodes that take, with the way of what they read, so much less than a launch that portions
    that need their blocks do better to run them too.
    """
    sizes = known_bytes(graph)

    def ms(node: Node) -> float:
        read = sum(_bytes(block, sizes) for block in node.reads if not block.startswith(INPUT))
        return _ms(node) + 1e3 * read / bytes_per_s

    return frozenset(node.name for node in graph.nodes if ms(node) < SHORT * launch_ms)


def _to_place(graph: TaskGraph) -> planner.Graph:
    """What the task is given lies in the store, as near to one island as to the other."""
    sizes = known_bytes(graph)
    nodes = tuple(
        planner.Node(
            id=node.name,
            time_ns={"any": int(_ms(node) * 1e6)},
            reads=tuple(block for block in node.reads if not block.startswith(INPUT)),
            writes=node.writes,
        )
        for node in graph.nodes
    )
    blocks = (block for node in graph.nodes for block in node.writes)
    return planner.Graph(
        nodes=nodes,
        blocks=tuple(planner.Block(id=one, bytes=_bytes(one, sizes)) for one in blocks),
    )


def _ms(node: Node) -> float:
    listed = [len(node.inputs[port].sources) for port in node.map if node.inputs[port].is_list]
    return (node.est_ms or USUAL_MS) * max([1, *listed])


def _bytes(block: str, sizes: Mapping[str, int]) -> int:
    return sizes.get(original(block), USUAL_BYTES)


class _Legs:
    """`planned` has the nodes of each portion in the order of a plan; all end after `ends_ms`, and
    a single executor more or less would take `whole_ms` on one.
    """

    def __init__(
        self,
        graph: TaskGraph,
        seats: Mapping[str, int],
        planned: Mapping[str, Sequence[str]],
        executors: int = 1,
        launch_ms: float = LAUNCH_MS,
    ) -> None:
        self.graph, self.seats = graph, seats
        self.nodes = {node.name: node for node in graph.nodes}
        self.maker = {block: node.name for node in graph.nodes for block in node.writes}
        self.sizes, self.needed = known_bytes(graph), waits(graph)
        self.level = self._levels()
        self.crossing = {
            block
            for node in graph.nodes
            for block in node.reads
            if block in self.maker and seats[self.maker[block]] != seats[node.name]
        }
        self.planned = planned
        ms = {name: _ms(node) / executors for name, node in self.nodes.items()}
        self.work = Work(
            portions={seats[names[0]]: names for names in planned.values() if names},
            needs={name: set(others) for name, others in self.needed.items()},
            ms=ms,
            launch_ms=launch_ms,
            give_ms=GIVE_MS if executors == 1 else None,
        )
        self.best = min(self._ways(), key=lambda way: (way.cost_ms, len(way.pieces)))
        self.pieces, self.ends_ms = self.best.pieces, self.best.ends_ms
        self.cost_ms = self.best.cost_ms
        self.whole_ms = launch_ms + sum(ms.values())

    def _ways(self) -> Iterator[Timed]:
        if self.work.give_ms is not None:
            yield patient(self.work, PATIENCE_MS)
        yield weighed(self.work)
        yield played(self.work, self._by_rule())

    def _by_rule(self) -> list[Piece]:
        groups = defaultdict[tuple[int, int], list[str]](list)
        for names in self.planned.values():
            for name in names:
                groups[self.level[name], self.seats[name]].append(name)
        return [piece for _, names in sorted(groups.items()) for piece in self._pieces(names)]

    def found(self) -> tuple[Leg, ...]:
        home = {name: n for n, piece in enumerate(self.pieces) for name in piece}
        wanted = {
            block
            for node in self.graph.nodes
            for block in node.reads
            if block in self.maker and home[self.maker[block]] != home[node.name]
        }
        word = _unused("b", {*self.graph.ports, *self.graph.outputs})
        number = {block: f"{word}{n}" for n, block in enumerate(sorted(wanted))}
        return tuple(self._leg(piece, number) for piece in self.pieces)

    def _levels(self) -> dict[str, int]:
        level = dict[str, int]()
        for name in task_graph.order(self.graph):
            crossed = (level[o] + (self.seats[o] != self.seats[name]) for o in self.needed[name])
            level[name] = max(crossed, default=0)
        return level

    def _pieces(self, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """Of one portion and level: where one may end, and what it has done is worth a launch."""
        piece, ms, taken = list[str](), 0.0, set[str]()
        for name in names:
            across = self.work.across(name)
            ends = bool(piece) and (piece[-1] in self.work.at_ends or bool(across - taken))
            if ends and ms >= LEG_MS:
                yield tuple(piece)
                piece, ms, taken = [], 0.0, set()
            piece.append(name)
            ms += _ms(self.nodes[name])
            taken |= across
        yield tuple(piece)

    def _leg(self, piece: tuple[str, ...], number: Mapping[str, str]) -> Leg:
        nodes = [self.nodes[name] for name in piece]
        reads = dict.fromkeys(block for node in nodes for block in node.reads)
        writes = {block for node in nodes for block in node.writes}
        gives = {number[block]: block for block in number if block in writes}
        ends = {o: block for o, block in self.graph.outputs.items() if block in writes}
        waits_ms = (self.best.waits_ms.get(name, 0.0) for name in piece)
        runs_ms = list(map(add, map(_ms, nodes), waits_ms))
        ran_ms = dict(zip(piece, accumulate(runs_ms), strict=True))
        taken = [block for block in reads if block in number and block not in writes]
        late = self.best.late.get(piece, frozenset())
        give_ms = self.work.give_ms
        after_ms = {
            output: ran_ms[self.maker[block]] + give_ms
            for output, block in gives.items()
            if give_ms is not None and block in self.crossing
        }
        return Leg(
            portion=self.seats[piece[0]],
            nodes=tuple(map(original, piece)),
            ports=tuple(one.removeprefix(INPUT) for one in reads if one.startswith(INPUT)),
            takes={number[block]: original(block) for block in taken},
            late=tuple(number[block] for block in taken if self.maker[block] in late),
            gives={output: original(block) for output, block in gives.items()},
            ends=ends,
            ms=sum(runs_ms),
            bytes={o: _bytes(block, self.sizes) for o, block in {**gives, **ends}.items()},
            after_ms=after_ms,
        )


def _unused(word: str, taken: set[str]) -> str:
    """The word, with as many "_" behind it as keep its numbers apart from these."""
    while any(name.startswith(word) and name[len(word) :].isdigit() for name in taken):
        word += "_"
    return word


# --- legs as tasks --------------------------------------------------------------------------------


def expanded(
    descriptor: Descriptor, legs: Mapping[str, Sequence[Leg]]
) -> tuple[Descriptor, list[Fault]]:
    """The descriptor with the legs of these tasks in their place, and what stands against that.

    Whoever takes an output of such a task takes it from the leg that makes it, and who starts after
    it starts after all of them.
    """
    named = {name: _names(name, mine) for name, mine in legs.items()}
    giver = {
        (name, output): one
        for name, mine in legs.items()
        for one, leg in zip(named[name], mine, strict=True)
        for output in (*leg.gives, *leg.ends)
    }
    tasks, faults = list[TaskDescriptor](), list[Fault]()
    taken = {task.name for task in descriptor.tasks}
    for n, task in enumerate(descriptor.tasks):
        task = _pointed(task, named, giver)
        if task.name not in legs:
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
        last = {leg.portion: leg for leg in legs[task.name]}
        for name, leg in zip(named[task.name], legs[task.name], strict=True):
            part = leg.as_json(is_last=last[leg.portion] is leg)
            tasks.append(_as_task(task, name, leg, part, giver))
    if len(tasks) > MAX_TASKS:
        told = (
            f"must have at most {MAX_TASKS} tasks, including the parts of graphs; got {len(tasks)}"
        )
        faults.append(Fault("/tasks", told, "range"))
    return replace(descriptor, tasks=tuple(tasks)), faults


def _names(name: str, legs: Sequence[Leg]) -> list[str]:
    """NAME.PORTION.LEG, legs counted from 0 in each portion."""
    seen, names = Counter[int](), list[str]()
    for leg in legs:
        names.append(f"{name}.{leg.portion}.{seen[leg.portion]}")
        seen[leg.portion] += 1
    return names


def _pointed(
    task: TaskDescriptor,
    named: Mapping[str, Sequence[str]],
    giver: Mapping[tuple[str, str], str],
) -> TaskDescriptor:
    """With edges to legs instead of to the task that they are of."""
    inputs = {
        port: replace(source, name=giver.get((source.name, source.output), source.name))
        if source.kind == "task"
        else source
        for port, source in task.inputs.items()
    }
    after = tuple(one for name in task.start.after for one in named.get(name, (name,)))
    return replace(task, inputs=inputs, start=replace(task.start, after=after))


def _took_ms(leg: Leg, known: Mapping[str, float]) -> dict[str, float]:
    return {name: known[name] for name in leg.nodes if name in known}


def _made_bytes(leg: Leg, known: Mapping[str, int]) -> dict[str, int]:
    """Of the blocks that it makes, and that it takes from others."""
    makers, taken = {*leg.nodes}, {*leg.takes.values()}
    return {
        block: size
        for block, size in known.items()
        if block in taken or block.rpartition(".")[0] in makers
    }


def _as_task(
    task: TaskDescriptor, name: str, leg: Leg, part: JSON, giver: Mapping[tuple[str, str], str]
) -> TaskDescriptor:
    taken = {
        port: Source(kind="task", name=giver[task.name, port], output=port) for port in leg.takes
    }
    run = replace(
        task.run,
        part=part,
        took_ms=_took_ms(leg, task.run.took_ms),
        made_bytes=_made_bytes(leg, task.run.made_bytes),
    )
    return replace(
        task,
        name=name,
        run=run,
        inputs={**{port: task.inputs[port] for port in leg.ports}, **taken},
        outputs=(*leg.gives, *(output for output in task.outputs if output in leg.ends)),
        publish={output: block for output, block in task.publish.items() if output in leg.ends},
        islands=1,
    )
