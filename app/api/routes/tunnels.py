"""Tunnels into running tasks: a ticket by HTTP, then the bytes over a WebSocket.

    POST /v1/tasks/{id}/tunnels   checks who may, and makes a ticket
    WS   /v1/tunnels              the first message is the ticket; then frames (`provisions.tunnel`)

The ticket is the only credential of the WebSocket: it is good once and for half a minute, and no
cookie counts, so a page of another origin opens nothing.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Request, WebSocket, WebSocketDisconnect
from pydantic import Field, StringConstraints, model_validator

from app.api.access.auth import Authed, call_of
from app.api.access.caller import Caller
from app.api.access.gate import in_thread
from app.api.access.tunnel_access import why_secret
from app.api.access.visibility import task_to_act_on
from app.api.event_stream import open_streams
from app.api.middleware import v1_router
from app.api.problems import declared
from app.api.schemas.base import In, Out, example
from app.api.tunnel_relay import TRY_LATER, VIOLATION, TunnelRelay
from app.core.model.provisions.tunnel import SIDE_MAX, WORD_CHARACTERS, WORDS_MAX, TunnelKind
from app.db.transactions import Db, commit, transaction
from app.errors import AppError, Forbidden
from app.identity import audit
from app.intake import tunnels
from app.intake.tunnels import NO_TICKET, TakenTunnel

TICKET_WITHIN_S = 10.0
UNKNOWN_MAX = 200  # WebSockets of this process that have not sent a ticket

router = v1_router("tasks", 403, 404)
sockets = APIRouter(prefix="/v1")

Word = Annotated[str, StringConstraints(min_length=1, max_length=WORD_CHARACTERS)]
Term = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9+._-]{0,62}$")]
Side = Annotated[int, Field(ge=1, le=SIDE_MAX)]


class TunnelIn(In):
    model_config = example(kind="shell", rows=40, columns=120)
    kind: Literal["shell", "forward"]
    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        None, description="The port to forward, on the loopback address of the task."
    )
    words: list[Word] = Field(
        [], max_length=WORDS_MAX, description="The program of a shell; empty: its usual shell."
    )
    term: Term = Field("xterm", description="The type of the user's terminal (`TERM`).")
    rows: Side = 24
    columns: Side = 80

    @model_validator(mode="after")
    def _fits(self) -> TunnelIn:
        is_shell = self.kind == "shell"
        if is_shell and self.port is not None:
            raise ValueError("a shell has no port; use the kind forward")
        if not is_shell and self.port is None:
            raise ValueError("a forward needs a port")
        if not is_shell and self.model_fields_set & {"words", "term", "rows", "columns"}:
            raise ValueError("a forward has a port, and neither words nor a terminal")
        return self


class TunnelOut(Out):
    model_config = example(
        id="tun_0192f0c1b7e97d3e9a4c5b6d7e8f9a0d",
        ticket="kZ0T3f9JvG1mHq2Xb7cW5yL8dR4sN6aE0uPiQoVtMx",
        path="/v1/tunnels",
        expires_at="2026-11-21T12:00:30Z",
    )
    id: str
    ticket: str = Field(description="The first message on the WebSocket; good once, and not long.")
    path: str = Field(description="The address of the WebSocket, on this service.")
    expires_at: str


@router.post(
    "/tasks/{id}/tunnels",
    status_code=201,
    response_model=TunnelOut,
    summary="Open a shell or a port of a running task",
    responses=declared(409),
)
def open_tunnel(
    id: str, body: TunnelIn, request: Request, caller: Authed, session: Db
) -> TunnelOut:
    """Makes a ticket for one tunnel into the task, for its owner and for administrators.

    A task with secrets opens for its owner only, since a shell reads their values.

    Connect a WebSocket to `path` and send the ticket as its first message, as text.  Then each
    binary message is a frame, in both directions; text messages tell what happens to the task.
    """
    call = call_of(request, caller, "openTunnel")
    try:
        task = task_to_act_on(session, caller, id)
        if why := why_secret(caller, task.user_id, task.spec.secrets):
            raise Forbidden(why)
    except Forbidden as error:
        _record_refusal(session, call, caller, id, error)
        raise
    asked = {"port": body.port or 0, "words": list(body.words)}
    asked |= {"term": body.term, "rows": body.rows, "columns": body.columns}
    tunnel, ticket = tunnels.new_tunnel(session, task, TunnelKind(body.kind), asked, call)
    expires_at = tunnel.expires_at.isoformat().replace("+00:00", "Z")
    return TunnelOut(id=tunnel.id, ticket=ticket, path="/v1/tunnels", expires_at=expires_at)


def _record_refusal(
    session: Db, call: audit.Call, caller: Caller, task_id: str, error: AppError
) -> None:
    session.rollback()
    audit.refused_tunnel(
        session, call, target=("task", task_id), tenant_id=caller.tenant_id, why=error.detail
    )
    commit(session)


# --- the WebSocket --------------------------------------------------------------------------------


class _Unknown:
    """Counts WebSockets whose user is not known yet."""

    count = 0


@sockets.websocket("/tunnels")
async def carry_tunnel(socket: WebSocket) -> None:
    await socket.accept()
    tunnel = await _taken(socket)
    if tunnel is None:
        return
    refusal = open_streams.refusal(tunnel.call.key_id, tunnel.tenant_id)
    if refusal is not None:
        await socket.close(TRY_LATER, refusal.detail[:120])
        return
    with open_streams.one(tunnel.call.key_id, tunnel.tenant_id):
        await TunnelRelay(socket, tunnel).run()


async def _taken(socket: WebSocket) -> TakenTunnel | None:
    """Use the ticket in the first message; if it is missing or not valid, close the socket and
    return None.
    """
    if _Unknown.count >= UNKNOWN_MAX:
        await socket.close(TRY_LATER, "too many connections without a ticket")
        return None
    _Unknown.count += 1
    try:
        async with asyncio.timeout(TICKET_WITHIN_S):
            ticket = await socket.receive_text()
    except (TimeoutError, KeyError, WebSocketDisconnect):
        await _close(socket, "no ticket came")
        return None
    finally:
        _Unknown.count -= 1
    address = socket.client.host if socket.client else ""
    try:
        tunnel = await in_thread(f"address {address}", _take, ticket, address)
    except AppError as error:
        await socket.close(TRY_LATER, error.detail[:120])
        return None
    if tunnel is None:
        await _close(socket, NO_TICKET)
    return tunnel


async def _close(socket: WebSocket, why: str) -> None:
    if socket.client_state.name == "CONNECTED":
        await socket.close(VIOLATION, why)


def _take(ticket: str, address: str) -> TakenTunnel | None:
    with transaction() as session:
        return tunnels.take(session, ticket, address)
