"""Lays out the picture of requests that come after each other.

A request stands below all that it comes after, so that the lines run down. All functions are pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean

from app.insight.reports.request_graph import RequestEdge, RequestGraph, RequestNode

WIDTH, HEIGHT = 152, 48  # of a box; two beside each other fit onto a phone
GAP, DROP = 14, 44  # between boxes beside and below each other
PASSAGE = 12  # of a line between boxes
NAME_SHOWN = 18  # characters of a name that fit into a box


@dataclass(frozen=True, slots=True)
class RequestBox:
    node: RequestNode
    x: int
    y: int
    width: int = WIDTH
    height: int = HEIGHT

    @property
    def label(self) -> str:
        name = self.node.name
        return name if len(name) <= NAME_SHOWN else f"{name[: NAME_SHOWN - 1]}…"


@dataclass(frozen=True, slots=True)
class RequestLink:
    """A line down from the needed request; `words` say what is awaited, unless it is the usual."""

    edge: RequestEdge
    path: str
    words: str
    x: int
    y: int


@dataclass(frozen=True, slots=True)
class RequestChart:
    width: int
    height: int
    boxes: Sequence[RequestBox]
    links: Sequence[RequestLink]
    is_cut: bool


def request_chart(graph: RequestGraph) -> RequestChart | None:
    """Return the picture; None if no request comes after another."""
    if not graph.edges:
        return None
    depths = _depths(graph)
    rows = _rows(graph, depths)
    width = max(_width(row) for row in rows)
    centres = _centres(rows, width)
    boxes = [
        RequestBox(node, centres[node.id] - WIDTH // 2, depths[node.id] * (HEIGHT + DROP))
        for node in graph.nodes
    ]
    return RequestChart(
        width=width,
        height=len(rows) * (HEIGHT + DROP) - DROP,
        boxes=boxes,
        links=[_link(edge, depths, centres) for edge in graph.edges],
        is_cut=graph.is_cut,
    )


def _depths(graph: RequestGraph) -> dict[str, int]:
    """Return in which row each request stands.

    Ids grow with time, and a request names only earlier ones: so each edge comes after those on
    which the depth of its needed request rests.
    """
    depths = {node.id: 0 for node in graph.nodes}
    for edge in sorted(graph.edges, key=lambda edge: (edge.dependant, edge.needed)):
        depths[edge.dependant] = max(depths[edge.dependant], depths[edge.needed] + 1)
    return depths


Place = str | tuple[str, str, int]  # a request, or where a line passes through a row


def _through(edge: RequestEdge, depths: Mapping[str, int]) -> list[Place]:
    """Return the places of the edge, from the needed request down to the dependant."""
    rows = range(depths[edge.needed] + 1, depths[edge.dependant])
    return [edge.needed, *((edge.needed, edge.dependant, row) for row in rows), edge.dependant]


def _rows(graph: RequestGraph, depths: Mapping[str, int]) -> list[list[Place]]:
    """Return what stands in each row, each near the middle of what it hangs on."""
    rows: list[list[Place]] = [[] for _ in range(max(depths.values()) + 1)]
    for node in graph.nodes:
        rows[depths[node.id]].append(node.id)
    above = defaultdict[Place, list[Place]](list)
    for edge in graph.edges:
        places = _through(edge, depths)
        for upper, lower in pairwise(places):
            above[lower].append(upper)
        for place in places[1:-1]:
            rows[place[2]].append(place)  # type: ignore[index]
    at = {place: n for n, place in enumerate(rows[0])}
    for row in rows[1:]:
        row.sort(key=lambda place: (mean([at[upper] for upper in above[place]]), str(place)))
        at |= {place: n for n, place in enumerate(row)}
    return rows


def _width(row: Sequence[Place]) -> int:
    return sum(map(_width_of, row)) + (len(row) - 1) * GAP


def _width_of(place: Place) -> int:
    return WIDTH if isinstance(place, str) else PASSAGE


def _centres(rows: Sequence[Sequence[Place]], width: int) -> dict[Place, int]:
    """Return the middle of each place, with the rows in the middle of the picture."""
    found = dict[Place, int]()
    for row in rows:
        x = (width - _width(row)) // 2
        for place in row:
            found[place] = x + _width_of(place) // 2
            x += _width_of(place) + GAP
    return found


def _link(
    edge: RequestEdge, depths: Mapping[str, int], centres: Mapping[Place, int]
) -> RequestLink:
    """Draw the line, which goes straight down where it passes through a row."""
    xs = [centres[place] for place in _through(edge, depths)]
    y = depths[edge.needed] * (HEIGHT + DROP) + HEIGHT
    path = f"M{xs[0]} {y}"
    for n, (x1, x2) in enumerate(pairwise(xs)):
        top = y + n * (HEIGHT + DROP)
        path += f" C{x1} {top + DROP // 2} {x2} {top + DROP // 2} {x2} {top + DROP}"
        path += f" V{top + DROP + HEIGHT}" if n < len(xs) - 2 else ""
    words = "" if edge.on == ["done"] else ", ".join(edge.on)
    return RequestLink(edge, path, words, (xs[0] + xs[1]) // 2, y + DROP // 2)
