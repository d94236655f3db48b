"""Reports which requests come after which, around one of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.orm import Session

from app.core.model.request_needs import NeedOutcome
from app.insight.reports.work import request_lines

MOST_REQUESTS = 40  # in one picture; the nearest ones are taken
DELETED = "deleted"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestNode:
    id: str
    name: str
    phase: str  # or DELETED


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEdge:
    """Says that tasks of `dependant` come after `needed`: `on` what, and how that went: "waits",
    "met" or "never".
    """

    needed: str
    dependant: str
    on: Sequence[str]
    went: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestGraph:
    """Holds the picture; `is_cut` if there are more requests than it shows."""

    nodes: Sequence[RequestNode]
    edges: Sequence[RequestEdge]
    is_cut: bool = False


def request_graph(session: Session, id: str) -> RequestGraph:
    """Return all that the request comes after, and all that comes after it, over any number of
    steps.

    Each step reads the neighbours of the requests that the one before it found.
    """
    names, edges = dict[str, str](), dict[tuple[str, str], RequestEdge]()
    seen, fresh, is_cut = {id}, {id}, False
    while fresh:
        found = _edges(session, fresh, names)
        edges |= found
        near = {end for pair in found for end in pair} - seen
        room = MOST_REQUESTS - len(seen)
        is_cut |= len(near) > room
        fresh = {*sorted(near, reverse=True)[:room]}
        seen |= fresh
    shown = [edge for pair, edge in edges.items() if seen.issuperset(pair)]
    nodes = _nodes(session, seen, names) if shown else []
    return RequestGraph(nodes=nodes, edges=shown, is_cut=is_cut)


_EDGES = text(
    """
    select t.request_id, n.needs_request_id, n.name,
        array_agg(distinct n.awaited) as awaited, array_agg(distinct n.outcome) as outcomes
    from request_needs n join tasks t on t.id = n.task_id
    where t.request_id = any(:ids) or n.needs_request_id = any(:ids)
    group by t.request_id, n.needs_request_id, n.name
    order by t.request_id, n.needs_request_id, n.name
    """
)


def _edges(
    session: Session, ids: Collection[str], names: dict[str, str]
) -> dict[tuple[str, str], RequestEdge]:
    """Read the edges at these requests, and note the names of the needed ones."""
    found = dict[tuple[str, str], RequestEdge]()
    for row in session.execute(_EDGES, {"ids": [*ids]}):
        pair = row.needs_request_id, row.request_id
        names[row.needs_request_id] = row.name.partition("/")[0]
        before = found.get(pair)
        on = {*row.awaited, *(before.on if before else ())}
        went = _went(row.outcomes)
        if before is not None and _ORDER.index(before.went) < _ORDER.index(went):
            went = before.went
        found[pair] = RequestEdge(needed=pair[0], dependant=pair[1], on=sorted(on), went=went)
    return found


_ORDER = ("never", "waits", "met")


def _went(outcomes: Sequence[str]) -> str:
    if not {*outcomes}.isdisjoint((NeedOutcome.fail, NeedOutcome.hold, NeedOutcome.run)):
        return "never"
    return "waits" if NeedOutcome.waits in outcomes else "met"


def _nodes(session: Session, ids: Collection[str], names: Mapping[str, str]) -> list[RequestNode]:
    lines = {line.id: line for line in request_lines(session, sorted(ids))}
    return [
        RequestNode(id=id, name=lines[id].name, phase=lines[id].phase)
        if id in lines
        else RequestNode(id=id, name=names.get(id, id), phase=DELETED)
        for id in sorted(ids)
    ]
