"""The audit log: lists what administrators did, and verifies that no record was changed.

A tenant admin reads the records of the own tenant and of tenants below it.  Keys and addresses of
users of other tenants are hidden.  A platform admin reads everything.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from app.api.access.auth import AnyAdmin, PlatformAdmin
from app.api.access.caller import Caller
from app.api.access.visibility import of_caller
from app.api.cursors import Paged
from app.api.middleware import v1_router
from app.api.schemas.base import Out, Page, example
from app.api.times import Time
from app.core.security.hash_chain import TrustedLink
from app.db.models import AuditEvent, Tenant
from app.db.transactions import Db
from app.identity import audit

router = v1_router("audit", 403)

Action = Literal["made", "changed", "removed", "asked", "read", "refused"]


class AuditEventOut(Out):
    model_config = example(
        id=41,
        at="2026-11-21T12:00:00.123456Z",
        tenant_id="ten_0192f0c1b7e97d3e9a4c5b6d7e8f9a01",
        user_id="usr_0192f0c1b7e97d3e9a4c5b6d7e8f9a02",
        user="platform_admin",
        key_id="x7Kq29Zb",
        address="10.0.0.7",
        request_id="0192f0c1b7e97d3e9a4c5b6d7e8f9a0b",
        operation="changeTenant",
        action="changed",
        target_kind="tenant",
        target_id="ten_0192f0c1b7e97d3e9a4c5b6d7e8f9a01",
        before={"weight_milli": 1000},
        after={"weight_milli": 2000},
        hash="9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    )
    id: int
    at: datetime
    tenant_id: str | None = Field(description="The tenant concerned; null: the platform.")
    user_id: str
    user: str
    key_id: str | None = Field(description="The public part of the key.")
    address: str | None
    request_id: str
    operation: str = Field(description="The operation id of the API; or signIn, signOut, seed.")
    action: Action
    target_kind: str
    target_id: str
    before: dict[str, Any]
    after: dict[str, Any]
    hash: str


class ChainHead(Out):
    id: int
    hash: str


class BrokenEntry(Out):
    id: int
    detail: str


class Verification(Out):
    model_config = example(
        intact=True,
        checked=41,
        head={"id": 41, "hash": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"},
        known="41:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        broken=None,
    )
    intact: bool
    checked: int = Field(description="Number of valid records after the known record.")
    head: ChainHead | None = Field(description="The last valid record; null if there is none.")
    known: str | None = Field(
        description="The head of the chain; pass it as `known` to the next verification."
    )
    broken: BrokenEntry | None = Field(
        description="The first invalid record, and why it is invalid."
    )


# --- looking ------------------------------------------------------------------------------------


@router.get(
    "/audit-events",
    response_model=Page[AuditEventOut],
    summary="List actions of administrators, newest first",
)
def list_audit_events(
    paging: Paged,
    caller: AnyAdmin,
    session: Db,
    tenant_id: Annotated[str | None, Query(description="The tenant concerned.")] = None,
    user_id: Annotated[str | None, Query(description="The user who acted.")] = None,
    key_id: Annotated[str | None, Query(description="The key that was used.")] = None,
    operation: Annotated[str | None, Query(description="An action such as changeTenant.")] = None,
    action: Action | None = None,
    target_kind: Annotated[
        str | None, Query(description="A kind of target, such as tenant, device or key.")
    ] = None,
    target_id: str | None = None,
    since: Time = None,
    until: Time = None,
) -> dict[str, Any]:
    """Lists changes of tenants, users, keys, devices, hosts, presets and mounts, sign-ins, and
    actions on other users' work.  Reading a request, task or checkpoint of another tenant by id is
    recorded once an hour.
    """
    wanted = {
        AuditEvent.tenant_id: tenant_id,
        AuditEvent.user_id: user_id,
        AuditEvent.operation: operation,
        AuditEvent.action: action,
        AuditEvent.target_kind: target_kind,
        AuditEvent.target_id: target_id,
    }
    known = of_caller(caller, AuditEvent.user_tenant_id)
    query = select(AuditEvent, known.label("known")).where(of_caller(caller, AuditEvent.tenant_id))
    query = query.where(*(column == value for column, value in wanted.items() if value is not None))
    if key_id is not None:  # a key that is not shown to the caller cannot be searched for either
        query = query.where(AuditEvent.key_id == key_id, known)
    if since is not None:
        query = query.where(AuditEvent.at >= since)
    if until is not None:
        query = query.where(AuditEvent.at < until)
    found = paging.read(session, query, by=AuditEvent.id, newest_first=True)
    seen = _tenants_seen(session, caller, [row.AuditEvent for row in found.rows])
    return found.page([_shown(row.AuditEvent, known=row.known, seen=seen) for row in found.rows])


def _shown(row: AuditEvent, *, known: bool, seen: set[str]) -> dict[str, Any]:
    shown = {name: getattr(row, name) for name in AuditEventOut.model_fields}
    if not known:
        shown |= {"key_id": None, "address": None}
    for side in ("before", "after"):
        if shown[side].get("parent_id") not in {None, *seen}:
            shown[side] = {**shown[side], "parent_id": None}
    return shown


def _tenants_seen(session: Session, caller: Caller, rows: list[AuditEvent]) -> set[str]:
    """Return the parent tenants named in these rows that the caller may know of."""
    parents = (side.get("parent_id") for row in rows for side in (row.before, row.after))
    named = {parent for parent in parents if parent is not None}
    if not named:
        return set()
    query = select(Tenant.id).where(Tenant.id.in_(named), of_caller(caller, Tenant.id))
    return set(session.scalars(query)) if not caller.sees_all else named


# --- verifying ----------------------------------------------------------------------------------


@router.get(
    "/audit-events/verification",
    response_model=Verification,
    summary="Verify the audit log",
)
def verify_audit_events(
    caller: PlatformAdmin,
    session: Db,
    known: Annotated[
        str | None,
        Query(
            description="`known` of an earlier verification, stored elsewhere: ID:HASH.",
            pattern=r"^[1-9][0-9]{0,17}:[0-9a-f]{64}$",
        ),
    ] = None,
) -> dict[str, Any]:
    """Reads the chain from its beginning, or from a `known` record, and names the first record that
    was changed, inserted or removed.

    Keep `known` where this database's administrators cannot write.  Without it, the
    verification cannot detect that the end was cut off, or that the whole log was written anew.
    """
    id, _, hash = (known or "").partition(":")
    found = audit.verified(session, TrustedLink(int(id), hash) if known else TrustedLink())
    head = found.head if found.head.id else None
    return {
        "intact": found.broken is None,
        "checked": found.checked,
        "head": head,
        "known": f"{head.id}:{head.hash}" if head else None,
        "broken": found.broken,
    }
