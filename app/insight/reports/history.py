"""Events that happened, and decisions of islands."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Select, select, true
from sqlalchemy.orm import InstrumentedAttribute, Session, aliased

from app.db import tenant_tree
from app.db.models import Cycle, Decision, Request, RequestEvent, Task, Tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """An event, with its message as it was written."""

    id: int
    at: datetime
    type: str
    message: str
    tenant: str
    request_id: str | None
    request: str | None
    task_id: str | None
    task: str | None
    data: dict[str, Any]


def events(
    session: Session,
    tenant: str | None,
    *,
    request: str | None = None,
    without: Collection[str] = (),
    limit: int = 50,
) -> list[Happened]:
    """Return the newest events first, `without` these types."""
    # The events of a tenant or a request have an index in this order.
    is_of_all = tenant is None and request is None
    newest = (
        (RequestEvent.id.desc(),)
        if is_of_all
        else (RequestEvent.txid.desc(), RequestEvent.id.desc())
    )
    query = (
        select(RequestEvent, Tenant.name, Request.name, Task.name)
        .join(Tenant, Tenant.id == RequestEvent.tenant_id)
        .outerjoin(Request, Request.id == RequestEvent.request_id)
        .outerjoin(Task, Task.id == RequestEvent.task_id)
        .order_by(*newest)
        .limit(limit)
    )
    if tenant is not None:
        query = query.where(RequestEvent.tenant_id == tenant)
    if request is not None:
        query = query.where(RequestEvent.request_id == request)
    if without:
        query = query.where(RequestEvent.type.not_in(without))
    return [
        Happened(
            id=event.id,
            at=event.at,
            type=event.type,
            message=event.message,
            tenant=owner,
            request_id=event.request_id,
            request=name,
            task_id=event.task_id,
            task=task,
            data=event.data,
        )
        for event, owner, name, task in session.execute(query)
    ]


# --- decisions ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherTask:
    """Describes the other task of a decision: it pays for the move, or the move is made for it.

    If that task is another tenant's, nothing else about it is given.
    """

    tenant: str
    task_id: str | None
    task: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """A move that an island decided on; `rule` is one of F1-F10, or another named rule.

    `because` is for the task's owner; `cycle` is the number of the round in which it was decided.
    """

    id: int
    at: datetime
    island: str
    cycle: int
    move: str
    rule: str
    because: str
    tenant: str
    request_id: str
    request: str
    task_id: str
    task: str
    devices: tuple[str, ...]
    against: OtherTask | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The round of a decision, with all of its decisions that the caller may see.

    `snapshot` is what the scheduler saw, from which the decisions can be reproduced; None unless
    the caller may see all tenants.
    """

    decision: Decided
    now_s: float
    decisions: list[Decided]
    snapshot: dict[str, Any] | None


def decisions(
    session: Session,
    tenant: str | None,
    *,
    below: bool = False,
    before: int | None = None,
    limit: int = 50,
) -> list[Decided]:
    """Return decisions, newest first; `before` is the id of the last one seen."""
    query = _decisions(tenant, below=below).limit(limit)
    if before is not None:
        query = query.where(Decision.id < before)
    return [_decided(row) for row in session.execute(query)]


def decision(session: Session, tenant: str | None, id: int, *, below: bool = False) -> Round | None:
    """Return a decision's round; None if there is none, or if it is about another tenant's task."""
    query = _decisions(tenant, below=below)
    row = session.execute(query.where(Decision.id == id)).first()
    if row is None:
        return None
    cycle = session.get_one(Cycle, row[0].cycle_id)
    rows = session.execute(query.where(Decision.cycle_id == cycle.id)).all()
    return Round(
        decision=_decided(row),
        now_s=cycle.now_s,
        decisions=[_decided(row) for row in reversed(rows)],
        snapshot=cycle.snapshot if tenant is None else None,
    )


def _decisions(tenant: str | None, *, below: bool) -> Select[*tuple[Any, ...]]:
    rival, owner = aliased(Task), aliased(Tenant)

    def seen(column: InstrumentedAttribute[str]) -> ColumnElement[bool]:
        if tenant is None:
            return true()
        return tenant_tree.within(column, tenant) if below else column == tenant

    return (
        select(
            Decision,
            Cycle.island,
            Tenant.name,
            Task.request_id,
            Request.name,
            Task.name,
            rival.name,
            owner.name,
            seen(rival.tenant_id),
        )
        .join(Cycle, Cycle.id == Decision.cycle_id)
        .join(Tenant, Tenant.id == Decision.tenant_id)
        .join(Task, Task.id == Decision.task_id)
        .join(Request, Request.id == Task.request_id)
        .outerjoin(rival, rival.id == Decision.against)
        .outerjoin(owner, owner.id == rival.tenant_id)
        .where(seen(Decision.tenant_id))
        .order_by(Decision.id.desc())
    )


def _decided(row: Any) -> Decided:
    made, island, tenant, request_id, request, task, rival, owner, visible = row
    against = None
    if rival is not None:
        shown = (owner, made.against, rival) if visible else ("another tenant", None, None)
        against = OtherTask(tenant=shown[0], task_id=shown[1], task=shown[2])
    return Decided(
        id=made.id,
        at=made.at,
        island=island,
        cycle=made.cycle_id,
        move=made.move,
        rule=made.rule,
        because=made.because,
        tenant=tenant,
        request_id=request_id,
        request=request,
        task_id=made.task_id,
        task=task,
        devices=tuple(made.devices),
        against=against,
    )
