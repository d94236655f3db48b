"""Decides which island runs which partition of a workload.

Islands are places with lanes, and the workload is placed on them like a graph on devices
(`app.core.placement.planner`): the fewest bytes between islands, at a makespan of at most 1.05
times the best one known. A block that several islands hold or need crosses once to each of them:
this is the cut of its hypergraph. A tenant can count on its fair share of the devices of an island,
and waits for work that others queued there earlier.

A request of a single task is a graph with one node. When an island dies, its nodes are assigned
again, with the nodes that must run again because their blocks died with it; all others stay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from app.core.model.graphs.datablock import cone
from app.core.placement.cost_model import Hop, Option, PlacementProblem, Timeline, option
from app.core.placement.heuristics import Solution, listed
from app.core.placement.local_search import Effort, solve
from app.core.placement.planner import (
    PlannedGraph,
    PlannedLink,
    PlannedNode,
    Topology,
    Unplaceable,
    check,
    problem_of,
    remaining,
    ways_between,
)

EFFORT = Effort(guard=1050)
FEWEST = 8  # at least so many islands are compared for each node


@dataclass(frozen=True, slots=True, kw_only=True)
class KindCapacity:
    """Describes an island's capacity of one device kind.

    `devices` limits the width of a gang. `share` is how many of them the tenant may count on, at
    least one. The devices become free `busy_ns` from now.
    """

    devices: int
    share: int = 1
    busy_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementIsland:
    """Describes an island with its capacity by kind; blocks on its devices and hosts (`places`) are
    on it.
    """

    id: str
    rooms: Mapping[str, KindCapacity]
    places: frozenset[str] = frozenset()


def is_led(left_s: float | None, *, lease_s: float) -> bool:
    """True if an island counts as led: until one lease after the lease of its leader.

    A standby takes over within that time, so a change of leaders sends no work to other islands.
    `left_s` are the seconds left of the leader's lease, below 0 after its end; None: it never had
    a leader.
    """
    return left_s is not None and left_s > -lease_s


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandCrossing:
    block: str
    source: str
    target: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Portions:
    """Holds the island of each node; `portions` lists each island's nodes in the order of the
    plan.
    """

    seats: Mapping[str, str]
    portions: Mapping[str, tuple[str, ...]]
    crossings: tuple[IslandCrossing, ...]
    makespan_ns: int
    least_makespan_ns: int
    exact: bool
    again: tuple[str, ...] = field(default=())  # nodes that had ended and must run again

    @property
    def bytes(self) -> int:
        return sum(crossing.bytes for crossing in self.crossings)


def apportion(
    graph: PlannedGraph,
    islands: Iterable[PlacementIsland],
    links: Iterable[PlannedLink],
    effort: Effort = EFFORT,
) -> Portions:
    """Assign an island to every node; raises Unplaceable.

    `links` are between islands, one for each direction.
    """
    return _assign(graph, tuple(islands), tuple(links), {}, effort)


def reassign(
    graph: PlannedGraph,
    islands: Iterable[PlacementIsland],
    links: Iterable[PlannedLink],
    *,
    before: Mapping[str, str],
    done: Iterable[str],
    at: Mapping[str, tuple[str, ...]],
    effort: Effort = EFFORT,
) -> Portions:
    """Assign again after an island died; `islands` are those that live.

    `before` is the island of each node so far, `done` are the nodes that have ended, and `at` the
    living places of each whole block. Nodes on living islands stay there. Raises
    datablock.BlockGone if a needed block cannot be made again.
    """
    living, ended = tuple(islands), set(done)
    again = _again(graph, ended, frozenset(block for block, places in at.items() if places))
    left = remaining(graph, ended - set(again), at)
    alive = {island.id for island in living}
    stay = {id: island for id, island in before.items() if island in alive and id not in ended}
    return replace(_assign(left, living, tuple(links), stay, effort), again=again)


def _again(graph: PlannedGraph, ended: set[str], whole: frozenset[str]) -> tuple[str, ...]:
    """Return ended nodes whose blocks are needed and exist nowhere any more."""
    maker = {block: node.id for node in graph.nodes for block in node.writes}
    wanted = {block for node in graph.nodes if node.id not in ended for block in node.reads}
    wanted |= {block.id for block in graph.blocks if block.to}
    lost = {
        block for block in wanted - whole if maker.get(block, "") in ended or block not in maker
    }
    reads = {node.id: node.reads for node in graph.nodes}
    return cone(sorted(lost), whole=whole, maker=maker, reads=reads).tasks


def _assign(
    graph: PlannedGraph,
    islands: tuple[PlacementIsland, ...],
    links: tuple[PlannedLink, ...],
    stay: Mapping[str, str],
    effort: Effort,
) -> Portions:
    graph = _from_above(graph, islands)
    check(graph, {island.id: n for n, island in enumerate(islands)})
    graph, islands = _narrowed(graph, islands, {*stay.values()})
    place = {island.id: n for n, island in enumerate(islands)}
    line = {
        (n, kind): number
        for number, (n, kind) in enumerate(
            (n, kind) for n, island in enumerate(islands) for kind in sorted(island.rooms)
        )
    }
    most = sum(node.width for node in graph.nodes)  # further lanes would stay empty
    speeds, ways = _routes(graph, links, place)
    problem = problem_of(
        graph,
        [_options(node, islands, line, stay.get(node.id)) for node in graph.nodes],
        place=place,
        lanes=[
            (islands[n].rooms[kind].busy_ns,) * max(1, min(most, islands[n].rooms[kind].share))
            for n, kind in line
        ],
        links=speeds,
        ways=ways,
    )
    return _named(graph, islands, problem, _found(problem, effort))


def _narrowed(
    graph: PlannedGraph,
    islands: tuple[PlacementIsland, ...],
    keep: Collection[str],
) -> tuple[PlannedGraph, tuple[PlacementIsland, ...]]:
    """Leave out islands that cannot make the plan better, so that more islands hardly cost more
    time.

    Nodes with equal needs keep the islands where one of them would end first: as many as have a
    lane for each of them, and at least `FEWEST`. Islands with blocks stay too.
    """
    if len(islands) <= FEWEST:
        return graph, islands
    kept = {*keep, *(at for one in graph.blocks for at in (*one.at[:FEWEST], *one.to))}
    alike = defaultdict[tuple[Hashable, ...], list[PlannedNode]](list)
    for node in graph.nodes:
        kinds = frozenset(node.time_ns)
        alike[kinds, node.width, node.devices].append(node)
    for nodes in alike.values():
        soonest = set(_soonest(nodes, islands))
        if not soonest:
            return graph, islands  # no island takes the node; each has a reason
        kept |= soonest
    near = tuple(island for island in islands if island.id in kept)
    blocks = (replace(one, at=tuple(id for id in one.at if id in kept)) for one in graph.blocks)
    return replace(graph, blocks=tuple(blocks)), near


def _soonest(nodes: Sequence[PlannedNode], islands: tuple[PlacementIsland, ...]) -> Iterator[str]:
    """Yield the islands, first the one where the first of `nodes` would end soonest. All nodes need
    the same.
    """
    node, ends = nodes[0], list[tuple[int, int, int]]()
    for n, island in enumerate(islands):
        for kind, room in island.rooms.items():
            if _refused(node, island, kind) is None:
                alone = _lanes(node, n, 0, room, kind)
                ends.append((room.busy_ns + alone.time_ns, n, room.share))
    lanes = 0
    for count, (_, n, share) in enumerate(sorted(ends)):
        if count >= FEWEST and lanes >= node.width * len(nodes):
            return
        lanes += share
        yield islands[n].id


def _routes(
    graph: PlannedGraph, links: tuple[PlannedLink, ...], place: Mapping[str, int]
) -> tuple[list[tuple[int, int]], list[list[tuple[Hop, ...]]]]:
    """Return the links between these places, and the routes; for a graph without blocks there are
    none.
    """
    if not graph.blocks:
        return [], [[()] * len(place)] * len(place)
    between = tuple(one for one in links if one.source in place and one.target in place)
    return ways_between(Topology(devices=(), links=between), place)


def _found(problem: PlacementProblem, effort: Effort) -> Solution:
    """Solve the problem. If there is no choice, as on a single island, return the only
    placement.
    """
    if any(len(options) > 1 for options in problem.options):
        return solve(problem, effort)
    found = listed(problem, 1)
    return replace(found, least_makespan_ns=found.makespan_ns, exact=True)


def _from_above(graph: PlannedGraph, islands: tuple[PlacementIsland, ...]) -> PlannedGraph:
    """Return the graph with its blocks on islands instead of devices and hosts."""
    island = {place: one.id for one in islands for place in (*one.places, one.id)}

    def up(places: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(island.get(place, place) for place in places))

    blocks = tuple(replace(one, at=up(one.at), to=up(one.to)) for one in graph.blocks)
    return replace(graph, blocks=blocks)


def _options(
    node: PlannedNode,
    islands: tuple[PlacementIsland, ...],
    line: Mapping[tuple[int, str], int],
    stays: str | None,
) -> tuple[Option, ...]:
    able, refused = list[Option](), list[str]()
    for (n, kind), number in line.items():
        room = islands[n].rooms[kind]
        why = _refused(node, islands[n], kind)
        if why is None and stays in (None, islands[n].id):
            able.append(_lanes(node, n, number, room, kind))
        elif why is not None:
            refused.append(f"{kind} of island {islands[n].id}: {why}")
    if not able:
        raise Unplaceable(f"node {node.id}", "; ".join(refused) or "there is no island")
    return tuple(able)


def _lanes(node: PlannedNode, place: int, line: int, room: KindCapacity, kind: str) -> Option:
    """Return the node's option.

    A gang that is wider than the share takes the whole share, and longer.
    """
    lanes = max(1, min(node.width, room.share))
    return option((place,), (line,), -(-node.time_ns[kind] * node.width // lanes), lanes)


def _refused(node: PlannedNode, island: PlacementIsland, kind: str) -> str | None:
    room = island.rooms[kind]
    if kind not in node.time_ns:
        return "not of a kind that can run it"
    if node.width > room.devices:
        return f"{room.devices} devices, {node.width} are wanted"
    if node.devices and not island.places & {*node.devices}:
        return "not among the devices that it names"
    return None


def _named(
    graph: PlannedGraph,
    islands: tuple[PlacementIsland, ...],
    problem: PlacementProblem,
    found: Solution,
) -> Portions:
    line = Timeline(problem)
    line.trips = []
    line.run(found.order, found.seats)
    seats = {
        node.id: islands[problem.options[n][found.seats[n]].places[0]].id
        for n, node in enumerate(graph.nodes)
    }
    portions = defaultdict[str, list[str]](list)
    for task in found.order:
        if task < len(graph.nodes):
            id = graph.nodes[task].id
            portions[seats[id]].append(id)
    return Portions(
        seats=seats,
        portions={island: tuple(nodes) for island, nodes in portions.items()},
        crossings=tuple(
            IslandCrossing(
                block=graph.blocks[trip.block].id,
                source=islands[trip.source].id,
                target=islands[trip.to].id,
                bytes=trip.bytes,
            )
            for trip in line.trips
        ),
        makespan_ns=found.makespan_ns,
        least_makespan_ns=found.least_makespan_ns,
        exact=found.exact,
    )
