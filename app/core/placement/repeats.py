"""Short nodes of a cut graph that each portion runs for itself, instead of waiting for their block.

A node that takes a millisecond, as the change of weights after a step, costs the portions that read
its block a launch where it runs, and the way of the block from there.  So each of them may run it
too: its random numbers depend on its name alone, and all make the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from app.core.model.task_graph import Binding, Node, TaskGraph

MARK = "~"  # in no name of a node


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """A graph with a node more for each time that one is repeated, called NAME~PORTION; `planned`
    are the nodes of each portion in the order of the plan, by the portion that `seats` says.
    """

    graph: TaskGraph
    seats: Mapping[str, int]
    planned: Mapping[str, Sequence[str]]


def repeated(
    graph: TaskGraph,
    seats: Mapping[str, int],
    planned: Mapping[str, Sequence[str]],
    short: frozenset[str],
) -> Repeated:
    """Of the nodes of these names, each is run by every portion that reads what it makes; one that
    nobody reads where it was seated stays alone, as does one that writes to what it is given.
    """
    readers: dict[str, set[int]] = {}
    for node in graph.nodes:
        for block in node.reads:
            readers.setdefault(block, set()).add(seats[node.name])
    given, more = {*graph.outputs.values()}, dict[tuple[str, int], Node]()
    for node in graph.nodes:
        home = seats[node.name]
        read = {portion for block in node.writes for portion in readers.get(block, ())}
        if node.name in short and not node.inout and (home in read or given & {*node.writes}):
            for portion in read - {home}:
                more[node.name, portion] = replace(node, name=f"{node.name}{MARK}{portion}")
    instead = {
        (original(block), portion): block
        for (_, portion), again in more.items()
        for block in again.writes
    }
    all_seats = {**seats, **{again.name: portion for (_, portion), again in more.items()}}
    nodes = tuple(
        _reading(node, all_seats[node.name], instead) for node in (*graph.nodes, *more.values())
    )
    by_name = {node.name: node for node in nodes}
    return Repeated(
        graph=replace(graph, nodes=nodes),
        seats=all_seats,
        planned={key: _with(names, by_name, all_seats) for key, names in planned.items()},
    )


def original(name: str) -> str:
    """Of a node, or of one of its blocks ("NODE.OUTPUT"), as the graph has it."""
    node, mark, rest = name.partition(MARK)
    return f"{node}{rest[len(rest.partition('.')[0]) :]}" if mark else name


def _reading(node: Node, portion: int, instead: Mapping[tuple[str, int], str]) -> Node:
    def bound(taken: Binding) -> Binding:
        sources = tuple(instead.get((one, portion), one) for one in taken.sources)
        return replace(taken, sources=sources)

    return replace(node, inputs={port: bound(taken) for port, taken in node.inputs.items()})


def _with(
    names: Sequence[str], nodes: Mapping[str, Node], seats: Mapping[str, int]
) -> tuple[str, ...]:
    """Each that is repeated here stands before the first that reads it."""
    maker = {block: node.name for node in nodes.values() for block in node.writes}
    found = dict[str, None]()

    def add(name: str) -> None:
        for block in nodes[name].reads:
            before = maker.get(block, "")
            if MARK in before and before not in found and seats[before] == seats[name]:
                add(before)
        found[name] = None

    for name in names:
        add(name)
    return tuple(found)
