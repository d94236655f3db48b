"""Graphs: programs of many small functions, stored under the SHA-256 of their JSON."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path, Response
from sqlalchemy import select

from app.api.access.auth import Authed, Submitter
from app.api.cursors import Paged
from app.api.descriptor_schema import GraphIn
from app.api.middleware import v1_router
from app.api.problems import declared
from app.api.schemas.base import Page
from app.api.schemas.data import GraphOut, GraphSummary
from app.core.model.descriptor import BadDescriptor
from app.data import graphs
from app.db.models import Graph
from app.db.transactions import Db
from app.errors import BadInput, NotFound

router = v1_router("graphs")

Sha256 = Annotated[
    str,
    Path(
        pattern="^[0-9a-f]{64}$",
        description="SHA-256 of its JSON (sorted keys, no spaces, UTF-8), in hexadecimal.",
    ),
]


@router.put(
    "/graphs/{sha256}",
    response_model=GraphOut,
    status_code=201,
    summary="Upload a graph",
    responses={
        200: {"model": GraphOut, "description": "The graph already existed."},
        **declared(403, 413),
    },
)
def put_graph(
    response: Response, sha256: Sha256, body: GraphIn, caller: Submitter, session: Db
) -> Graph:
    """Stores the graph, so that a task can run it by its name: `run: {graph: "sha256:…"}`.

    A graph that is sent within a request is stored in the same way.  Its functions are looked up
    when a request names the bundle.
    """
    try:
        sent = graphs.read(body)
    except BadDescriptor as error:
        first = error.faults[0]
        told = f"{first.pointer or 'the body'}: {first.detail}"
        raise BadInput(told, errors=error.faults) from error
    if sent.sha256 != sha256:
        told = (
            f"the graph's JSON with sorted keys and no spaces must hash to {sha256}; got "
            f"{sent.sha256}"
        )
        raise BadInput.at("{sha256}", told, "digest")
    response.status_code = 201 if graphs.keep(session, caller.tenant_id, [sent]) else 200
    return session.get_one(Graph, (caller.tenant_id, sha256))


@router.get(
    "/graphs/{sha256}", response_model=GraphOut, summary="Show a graph", responses=declared(404)
)
def get_graph(sha256: Sha256, caller: Authed, session: Db) -> Graph:
    """Shows the graph as it was sent."""
    found = session.get(Graph, (caller.tenant_id, sha256))
    if found is None:
        raise NotFound("graph", sha256)
    return found


@router.get("/graphs", response_model=Page[GraphSummary], summary="List your tenant's graphs")
def list_graphs(paging: Paged, caller: Authed, session: Db) -> dict[str, Any]:
    """Lists the graphs in the order of their SHA-256."""
    query = select(Graph).where(Graph.tenant_id == caller.tenant_id)
    return paging.read(session, query, by=Graph.sha256).page()
