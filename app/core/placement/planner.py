"""Plans which device runs which node of a graph, and in what order, so that few bytes are copied.

`place` plans ahead.  Of all placements whose makespan is at most 1.03 times the best one known, it
chooses the one that copies the fewest bytes to and from devices and between hosts.  Small graphs
are searched exhaustively, large ones locally (`app.core.placement.local_search`).

Invariants: the plan's order is one total order.  Each device runs its nodes, and each link carries
its transfers, in that order.  The bytes of the plan are the sum of its transfers.  The same input
gives the same plan.

Times are nanoseconds from now, sizes bytes.  This module knows no requests or rows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from app.core.placement.cost_model import Hop, Option, PlacementProblem, Timeline, Trip, option
from app.core.placement.heuristics import Solution
from app.core.placement.local_search import Effort, solve

# routes with equally many hops are compared by the time for a copy of this size
TYPICAL_BYTES = 1 << 20


# --- the values ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBlock:
    """Describes a datablock of a graph: `at` are the places where it is now, none if a node writes
    it.

    `to` are places where it must be at the end. Places are ids of devices and hosts.
    """

    id: str
    bytes: int
    at: tuple[str, ...] = ()
    to: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedNode:
    """Describes an accelerator task of a graph.

    `time_ns` is its measured or expected time by device kind; it can run on those kinds only. If
    `devices` is not empty, it can run on those only. On an island it needs `width` devices of one
    kind at once (`app.core.placement.islands`). Nodes in `after` must end first but pass no data.
    """

    id: str
    time_ns: Mapping[str, int]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    width: int = 1
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGraph:
    nodes: tuple[PlannedNode, ...]
    blocks: tuple[PlannedBlock, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDevice:
    id: str
    host: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLink:
    """Describes one direction between two places: a device and its host, two hosts, or two
    devices.
    """

    source: str
    target: str
    bytes_per_s: int
    latency_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Lists devices and links. Copies travel over links, through hosts if needed, and leave a copy
    there.
    """

    devices: tuple[PlannedDevice, ...]
    links: tuple[PlannedLink, ...]

    @property
    def places(self) -> tuple[str, ...]:
        """The devices as given, then the hosts by name."""
        hosts = {device.host for device in self.devices}
        for link in self.links:
            hosts.update((link.source, link.target))
        devices = [device.id for device in self.devices]
        return (*devices, *sorted(hosts - set(devices)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Describes one copy over one link, for `node` ("" at the end of the graph)."""

    block: str
    source: str
    target: str
    bytes: int
    start_ns: int
    end_ns: int
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPlacement:
    """Holds a plan: the devices of each node, one order for all, and every copy made.

    `least_makespan_ns` is the best makespan that the search saw. `least_bytes` is a lower bound for
    all placements. `exact`: in this order no placement within the guard moves fewer bytes.
    """

    seats: Mapping[str, tuple[str, ...]]
    order: tuple[str, ...]
    transfers: tuple[Transfer, ...]
    starts_ns: Mapping[str, int]
    ends_ns: Mapping[str, int]
    makespan_ns: int
    bytes: int
    least_makespan_ns: int
    least_bytes: int
    exact: bool


class Unplaceable(ValueError):
    """A graph that cannot be placed: which node or block, and why."""

    def __init__(self, what: str, why: str) -> None:
        self.what, self.why = what, why
        super().__init__(f"{what}: {why}")


# --- the functions ------------------------------------------------------------------------------


def place(graph: PlannedGraph, topology: Topology, effort: Effort | None = None) -> GraphPlacement:
    """Return the plan with the fewest bytes within the guard; raises Unplaceable."""
    numbers = Numbers(graph, topology)
    return numbers.placement(solve(numbers.problem, effort or Effort()))


def remaining(
    graph: PlannedGraph, done: Iterable[str], at: Mapping[str, tuple[str, ...]]
) -> PlannedGraph:
    """Return the rest of the graph, if the nodes `done` have ended and whole copies are `at` those
    places.

    If copies were lost, first take the nodes of `datablock.cone` out of `done`.
    """
    ended = set(done)
    nodes = tuple(
        replace(node, after=tuple(other for other in node.after if other not in ended))
        for node in graph.nodes
        if node.id not in ended
    )
    made = {block for node in nodes for block in node.writes}
    wanted = {block for node in nodes for block in node.reads} | made
    blocks = tuple(
        replace(block, at=() if block.id in made else tuple(at.get(block.id, ())))
        for block in graph.blocks
        if block.id in wanted or block.to
    )
    return PlannedGraph(nodes=nodes, blocks=blocks)


# --- numbers and back ---------------------------------------------------------------------------


class Numbers:
    """Converts a graph on a topology to a numbered problem, and results back to names."""

    def __init__(self, graph: PlannedGraph, topology: Topology) -> None:
        self.graph = graph
        self.places = topology.places
        place = {id: n for n, id in enumerate(self.places)}
        check(graph, place)
        links, ways = ways_between(topology, place)
        options = [_options(node, topology) for node in graph.nodes]
        self.problem = problem_of(
            graph,
            options,
            place=place,
            lanes=[(0,) for _ in topology.devices],
            links=links,
            ways=ways,
        )

    def placement(self, found: Solution) -> GraphPlacement:
        line = Timeline(self.problem)
        line.trips = []
        line.run(found.order, found.seats)
        nodes, problem = self.graph.nodes, self.problem
        order = [task for task in found.order if task < len(nodes)]
        return GraphPlacement(
            seats={
                node.id: tuple(self.places[p] for p in problem.options[n][found.seats[n]].places)
                for n, node in enumerate(nodes)
            },
            order=tuple(nodes[task].id for task in order),
            transfers=tuple(self._transfer(trip) for trip in line.trips),
            starts_ns={nodes[task].id: line.begin[task] for task in order},
            ends_ns={nodes[task].id: line.end[task] for task in order},
            makespan_ns=line.makespan_ns,
            bytes=line.bytes,
            least_makespan_ns=found.least_makespan_ns,
            least_bytes=found.least_bytes,
            exact=found.exact,
        )

    def _transfer(self, trip: Trip) -> Transfer:
        nodes = self.graph.nodes
        return Transfer(
            block=self.graph.blocks[trip.block].id,
            source=self.places[trip.source],
            target=self.places[trip.to],
            bytes=trip.bytes,
            start_ns=trip.start_ns,
            end_ns=trip.end_ns,
            node=nodes[trip.task].id if trip.task < len(nodes) else "",
        )


def problem_of(
    graph: PlannedGraph,
    options: list[tuple[Option, ...]],
    *,
    place: Mapping[str, int],
    lanes: list[tuple[int, ...]],
    links: list[tuple[int, int]],
    ways: list[list[tuple[Hop, ...]]],
) -> PlacementProblem:
    """Return the problem of a checked graph.

    A block that must lie at a place in the end is read there by a task that takes no time.
    """
    block = {one.id: n for n, one in enumerate(graph.blocks)}
    number = {one.id: n for n, one in enumerate(graph.nodes)}
    maker = {id: node.id for node in graph.nodes for id in node.writes}
    reads = [tuple(block[id] for id in dict.fromkeys(node.reads)) for node in graph.nodes]
    writes = [tuple(block[id] for id in node.writes) for node in graph.nodes]
    after = [
        {*(number[other] for other in node.after)}
        | {number[maker[id]] for id in node.reads if id in maker}
        for node in graph.nodes
    ]
    options = list(options)
    for one in graph.blocks:
        for at in one.to:
            options.append((option((place[at],), (), 0),))
            reads.append((block[one.id],))
            writes.append(())
            after.append({number[maker[one.id]]} if one.id in maker else set())
    return PlacementProblem(
        options=options,
        reads=reads,
        writes=writes,
        after=[tuple(sorted(before)) for before in after],
        size=[one.bytes for one in graph.blocks],
        at=[sum(1 << place[at] for at in one.at) for one in graph.blocks],
        lanes=lanes,
        links=links,
        ways=ways,
        places=len(place),
    )


def check(graph: PlannedGraph, places: Mapping[str, int]) -> None:
    """Raise Unplaceable if the graph has repeated names, unknown names or a cycle."""
    _named_once("node", [node.id for node in graph.nodes], "two nodes have this name")
    _named_once("datablock", [one.id for one in graph.blocks], "two datablocks have this name")
    written = [id for node in graph.nodes for id in node.writes]
    _named_once("datablock", written, "two nodes write it, or one does twice")
    nodes, blocks = {node.id for node in graph.nodes}, {one.id for one in graph.blocks}
    for node in graph.nodes:
        _check_node(node, nodes, blocks)
    for one in graph.blocks:
        _check_block(one, set(written), places)
    _acyclic(graph)


def _named_once(what: str, names: list[str], why: str) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise Unplaceable(f"{what} {name}", why)


def _check_node(node: PlannedNode, nodes: set[str], blocks: set[str]) -> None:
    def fault(why: str) -> Unplaceable:
        return Unplaceable(f"node {node.id}", why)

    for id in sorted({*node.reads, *node.writes} - blocks):
        raise fault(f"the graph has no datablock {id}")
    for id in sorted(set(node.after) - nodes):
        raise fault(f"the graph has no node {id}")
    if node.width < 1 or min(node.time_ns.values(), default=0) < 0:
        raise fault("its width is below 1, or its time is negative")


def _check_block(one: PlannedBlock, written: set[str], places: Mapping[str, int]) -> None:
    if bool(one.at) == (one.id in written):
        why = (
            "it has a copy, and a node writes it"
            if one.at
            else "it has no copy, and no node writes it"
        )
        raise Unplaceable(f"datablock {one.id}", why)
    for at in sorted({*one.at, *one.to} - set(places)):
        raise Unplaceable(f"datablock {one.id}", f"there is no place {at}")
    if one.bytes < 0:
        raise Unplaceable(f"datablock {one.id}", "its size is negative")


def _acyclic(graph: PlannedGraph) -> None:
    maker = {id: node.id for node in graph.nodes for id in node.writes}
    waits = {
        node.id: {*node.after, *(maker[id] for id in node.reads if id in maker)}
        for node in graph.nodes
    }
    followers = defaultdict[str, list[str]](list)
    for id, others in waits.items():
        for other in others:
            followers[other].append(id)
    left = {id: len(others) for id, others in waits.items()}
    ready = [id for id, count in left.items() if not count]
    for id in ready:  # grows during the iteration
        for other in followers[id]:
            left[other] -= 1
            if not left[other]:
                ready.append(other)
    for id in sorted(set(waits) - set(ready)):
        raise Unplaceable(f"node {id}", "it depends on itself, through a cycle")


def _options(node: PlannedNode, topology: Topology) -> tuple[Option, ...]:
    """Return the devices that can run the node."""
    able, told = list[Option](), list[str]()
    for n, device in enumerate(topology.devices):
        if (why := _refused(node, device)) is None:
            able.append(option((n,), (n,), node.time_ns[device.kind]))
        else:
            told.append(f"{device.id} {why}")
    if not able:
        because = "; ".join(told) or "there are no devices"
        raise Unplaceable(f"node {node.id}", f"it needs a device: {because}")
    return tuple(able)


def _refused(node: PlannedNode, device: PlannedDevice) -> str | None:
    if node.width > 1:
        return f"is one device, {node.width} are wanted"
    if device.kind not in node.time_ns:
        return f"is of kind {device.kind}"
    if node.devices and device.id not in node.devices:
        return "is not among those that it names"
    return None


def ways_between(
    topology: Topology, place: Mapping[str, int]
) -> tuple[list[tuple[int, int]], list[list[tuple[Hop, ...]]]]:
    """Return the links, and the route from each place to each other: fewest hops, then fastest.

    Routes pass through hosts only.
    """
    devices = {device.id for device in topology.devices}
    out = defaultdict[int, list[tuple[int, int, int]]](list)
    links = [(link.latency_ns, link.bytes_per_s) for link in topology.links]
    for n, link in enumerate(topology.links):
        took = link.latency_ns + TYPICAL_BYTES * 10**9 // link.bytes_per_s
        out[place[link.source]].append((n, place[link.target], took))
    names = list(place)
    ways = []
    for source in range(len(names)):
        found: dict[int, tuple[Hop, ...]] = {source: ()}
        # for the places that are equally many hops away: the time to get there, and the route
        level: dict[int, tuple[int, tuple[Hop, ...]]] = {source: (0, ())}
        while level and len(found) < len(names):
            beyond: dict[int, tuple[int, tuple[Hop, ...]]] = {}
            for at, (took, way) in level.items():
                if at != source and names[at] in devices:
                    continue
                for n, to, more in out[at]:
                    if to not in found:
                        this = (took + more, (*way, Hop(n, to)))
                        beyond[to] = min(beyond.get(to, this), this)
            found |= {to: way for to, (_, way) in beyond.items()}
            level = beyond
        for to in set(range(len(names))) - set(found):
            raise Unplaceable(f"place {names[to]}", f"no links lead there from {names[source]}")
        ways.append([found[to] for to in range(len(names))])
    return links, ways
