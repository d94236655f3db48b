"""Keeps tunnels as rows: their tickets, who may open them, where their tasks are, and when they
end.

A call of the API makes a ticket (`new_tunnel`). A WebSocket uses it (`take`), once and soon. From
then on the API process that carries the tunnel looks at its task again and again (`look`), which
also shows that the tunnel still exists. In the end it records what the tunnel carried (`end`). The
audit log has the ticket, each refusal and the end.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import and_, func, or_, select, text, update
from sqlalchemy.orm import Session

from app.core.device import clock_skew
from app.core.model.lifecycle import ENDED, State
from app.core.model.provisions import session as session_model
from app.core.model.provisions.tunnel import (
    PER_TASK,
    TICKET_S,
    TunnelKind,
    TunnelTicket,
    why_not_into,
)
from app.core.units import duration
from app.db import transactions
from app.db.ids import new_id
from app.db.models import ApiKey, Device, Task, Tunnel, User
from app.db.transactions import now
from app.errors import Conflict, TooManyCalls
from app.identity import audit
from app.insight import explain
from app.intake import actions

PER_TENANT = 64  # open tunnels
SEEN_EVERY_S = 15.0
# time without being seen after which its API process counts as dead
LOST_AFTER = text("interval '60 seconds'")

#: The message for every ticket that does not open a tunnel: unknown, used or too old.
NO_TICKET = "the ticket is unknown, used or expired; ask for a new one"


@dataclass(frozen=True, slots=True, kw_only=True)
class TunnelPlace:
    """Says where a tunnel's task is now, as far as its tunnel needs to know.

    `links` and `secret` are how to reach its device worker; empty if it has none. `over` is why the
    tunnel must end, and `waits` what the task waits for; both may be empty.
    """

    request_id: str
    state: str
    epoch: int
    device: str = ""
    clock_s: float = 0.0  # what the wall clock of the device's host shows
    links: tuple[Any, ...] = ()
    secret: str = ""
    over: str = ""
    waits: str = ""
    is_idle: bool = False  # a session that gave its device back, until somebody types

    @property
    def runs(self) -> bool:
        return self.state == State.running and bool(self.links)


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenTunnel:
    """A tunnel whose ticket was just used."""

    id: str
    task_id: str
    tenant_id: str
    request_id: str
    asked: dict[str, Any]
    call: audit.Call

    def ticket(self, epoch: int, clock_s: float) -> TunnelTicket:
        """Return the ticket for the device worker; each attempt to connect has its own.

        `clock_s` is what the clock of the device's host shows.
        """
        return TunnelTicket(
            tunnel=f"{self.id}/{secrets.token_hex(8)}",
            task=self.task_id,
            epoch=epoch,
            expires_s=int(clock_s + TICKET_S),
            **{**self.asked, "words": tuple(self.asked["words"])},
        )


# --- tickets --------------------------------------------------------------------------------------


def new_tunnel(
    session: Session, task: Task, kind: TunnelKind, asked: dict[str, Any], call: audit.Call
) -> tuple[Tunnel, str]:
    """Make a tunnel and its ticket; raises Conflict or TooManyCalls.

    The ticket is known only to its caller.
    """
    spec = task.spec
    if why := why_not_into(task.state, spec):
        raise Conflict(why)
    _check_limits(session, task)
    ticket = secrets.token_urlsafe(32)
    tunnel = Tunnel(
        id=new_id("tun"),
        task_id=task.id,
        tenant_id=task.tenant_id,
        kind=kind,
        asked={"kind": kind, **asked},
        call=asdict(call),
        ticket_sha256=_hash(ticket),
        expires_at=now(session) + timedelta(seconds=TICKET_S),
    )
    session.add(tunnel)
    session.flush()
    session.refresh(tunnel)
    what = "A shell" if kind == TunnelKind.SHELL else f"Port {asked['port']}"
    actions.tell(session, task, "task.tunnel_opened", f"{what} was opened by {call.user}.")
    about = {"task": task.id, "kind": kind, "port": asked["port"], "words": asked["words"]}
    audit.append(
        session, call, "made", target=("tunnel", tunnel.id), tenant_id=task.tenant_id, after=about
    )
    return tunnel, ticket


def _check_limits(session: Session, task: Task) -> None:
    is_open = _is_open()
    of_tenant = select(Tunnel.task_id).where(Tunnel.tenant_id == task.tenant_id, is_open)
    tasks = session.scalars(of_tenant).all()
    if tasks.count(task.id) >= PER_TASK:
        raise TooManyCalls(f"the task has {PER_TASK} open tunnels, which is its limit; close one")
    if len(tasks) >= PER_TENANT:
        raise TooManyCalls(
            f"your tenant has {PER_TENANT} open tunnels, which is its limit; close one"
        )


def _is_open() -> Any:
    opened = and_(Tunnel.opened_at.is_not(None), Tunnel.seen_at > func.now() - LOST_AFTER)
    offered = and_(Tunnel.opened_at.is_(None), Tunnel.expires_at > func.now())
    return and_(Tunnel.ended_at.is_(None), or_(opened, offered))


def take(session: Session, ticket: str, address: str) -> TakenTunnel | None:
    """Use a ticket; None if it opens nothing, which is recorded."""
    used = (
        update(Tunnel)
        .where(Tunnel.ticket_sha256 == _hash(ticket), Tunnel.opened_at.is_(None))
        .where(Tunnel.expires_at > func.now())
        .values(opened_at=func.now(), seen_at=func.now(), active_at=func.now())
        .returning(Tunnel.id)
    )
    id = session.scalar(used)
    if id is None:
        _refuse(session, ticket, address)
        return None
    tunnel = session.get_one(Tunnel, id)
    return TakenTunnel(
        id=tunnel.id,
        task_id=tunnel.task_id,
        tenant_id=tunnel.tenant_id,
        request_id=session.get_one(Task, tunnel.task_id).request_id,
        asked=tunnel.asked,
        call=audit.Call(**tunnel.call),
    )


def _refuse(session: Session, ticket: str, address: str) -> None:
    known = session.scalar(select(Tunnel).where(Tunnel.ticket_sha256 == _hash(ticket)))
    call = audit.Call(operation="openTunnel", user="", address=address)
    target, tenant_id = ("tunnel", ""), None
    if known is not None:
        call, target, tenant_id = audit.Call(**known.call), ("tunnel", known.id), known.tenant_id
    audit.refused_tunnel(session, call, target=target, tenant_id=tenant_id, why=NO_TICKET)


def _hash(ticket: str) -> str:
    return hashlib.sha256(ticket.encode()).hexdigest()


# --- while it is open -----------------------------------------------------------------------------


def look(
    session: Session,
    tunnel: TakenTunnel,
    *,
    sent: int,
    received: int,
    idle_s: float,
) -> TunnelPlace:
    """Record that the tunnel exists and what it has carried so far; return where its task is.

    `idle_s` is the time since its user typed.
    """
    known = update(Tunnel).where(Tunnel.id == tunnel.id)
    active_at = now(session) - timedelta(seconds=idle_s)
    session.execute(
        known.values(
            seen_at=func.now(),
            active_at=func.greatest(Tunnel.active_at, active_at),
            sent_bytes=sent,
            received_bytes=received,
        )
    )
    task, place = place_of(session, tunnel.task_id)
    if over := _why_over(session, tunnel, task):
        return _with(place, over=over)
    if place.runs:
        return place
    return _with(place, waits=_waits(session, task), is_idle=task.hold == session_model.HOLD)


def place_of(session: Session, task_id: str) -> tuple[Task, TunnelPlace]:
    """Return the task, and where it runs now, if it does."""
    query = (
        select(Task, Device)
        .outerjoin(Device, and_(Device.id == Task.seat, Device.lease_until > func.now()))
        .where(Task.id == task_id)
    )
    task, device = session.execute(query).one()
    place = TunnelPlace(request_id=task.request_id, state=task.state, epoch=task.epoch)
    if task.state != State.running or device is None:
        return task, place
    reach = {"links": tuple(device.links), "secret": device.secret}
    return task, _with(place, device=device.id, clock_s=_clock_s(session, device), **reach)


def _clock_s(session: Session, device: Device) -> float:
    """Return what the wall clock of the device's host shows now, by which the host judges tickets.

    Device workers of the version before do not report their clock; it is taken to be right.
    """
    now_s, began_s = transactions.now_s(session), device.facts.get("clock_began_s")
    if began_s is None or device.seen_at is None:
        return now_s
    since_s = now_s - device.seen_at.timestamp()
    return clock_skew.wall_clock_s(began_s, sent_us=device.heard_us, since_s=since_s)


def wake(session: Session, tunnel: TakenTunnel) -> None:
    """Queue a session again that gave its device back, because its user types."""
    task = session.get_one(Task, tunnel.task_id)
    actions.wake_task(session, task, by=tunnel.call.user)


def _with(place: TunnelPlace, **more: Any) -> TunnelPlace:
    return TunnelPlace(**{**asdict(place), **more})


def _why_over(session: Session, tunnel: TakenTunnel, task: Task) -> str:
    if task.state in ENDED:
        return f"the task is {task.state}"
    key = session.get(ApiKey, tunnel.call.key_id)
    has_expired = key is not None and key.expires_at is not None and key.expires_at <= now(session)
    if key is not None and (key.revoked_at is not None or has_expired):
        return "the key that opened it was revoked or has expired"
    user = session.get(User, tunnel.call.user_id)
    if user is None or user.deleted_at is not None:
        return "the user that opened it was removed"
    return ""


def _waits(session: Session, task: Task) -> str:
    """Say in one line why the task does not run, its place and when it is expected."""
    told = explain.explain(session, [task])[task.id]
    if not told.reasons:
        return f"It is {task.state}."
    place = f" Place {told.place}." if told.place else ""
    start = told.estimate.starts_at if told.estimate else None
    wait_s = (start - now(session)).total_seconds() if start else 0.0
    expected = f" Expected in {duration(max(1.0, wait_s))}." if start else ""
    return f"{told.reasons[0]['message']}{place}{expected}"


def end(session: Session, tunnel: TakenTunnel, *, sent: int, received: int, why: str) -> None:
    """Write down that the tunnel has ended, what it carried and for how long it was open."""
    row = session.get_one(Tunnel, tunnel.id, with_for_update=True)
    row.sent_bytes, row.received_bytes = sent, received
    if row.ended_at is None:  # otherwise `end_lost` took its API process for dead
        _end(session, row, now(session), why)


def end_lost(session: Session) -> None:
    """End tunnels whose API process has died, and tickets that were never used.

    This is a chore of control, which may run twice without harm.
    """
    unended = select(Tunnel).where(Tunnel.ended_at.is_(None)).with_for_update(skip_locked=True)
    lost = unended.where(Tunnel.opened_at.is_not(None), Tunnel.seen_at <= func.now() - LOST_AFTER)
    for row in session.scalars(lost.order_by(Tunnel.id)).all():
        assert row.seen_at is not None
        _end(session, row, row.seen_at, "the API process that carried it was lost")
    unused = unended.where(Tunnel.opened_at.is_(None), Tunnel.expires_at <= func.now())
    for row in session.scalars(unused.order_by(Tunnel.id)).all():
        row.ended_at = row.expires_at


def _end(session: Session, row: Tunnel, at: datetime, why: str) -> None:
    row.ended_at = at
    open_s = (at - row.opened_at).total_seconds() if row.opened_at else 0.0
    about = {
        "task": row.task_id,
        "why": why,
        "sent_bytes": row.sent_bytes,
        "received_bytes": row.received_bytes,
        "seconds": round(open_s, 3),
    }
    call, target = audit.Call(**row.call), ("tunnel", row.id)
    audit.append(session, call, "removed", target=target, tenant_id=row.tenant_id, after=about)
