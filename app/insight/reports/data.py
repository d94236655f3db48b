"""Versions of datablocks."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.data import datablocks as blocks
from app.db.models import Datablock, Task, Tenant, User


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLine:
    """A version of a datablock in a list; `holders` is the number of tasks that need it.

    `request_id` is the request that published it; None if it was uploaded.
    """

    row: Datablock
    tenant: str
    user: str
    request_id: str | None
    holders: int


def datablocks(
    session: Session, tenant: str | None, *, before: str | None = None, limit: int = 50
) -> list[BlockLine]:
    """Return versions that are not deleted, newest first; `before` is the id of the last
    one seen.
    """
    query = (
        select(Datablock, Tenant.name, User.name, Task.request_id)
        .join(Tenant, Tenant.id == Datablock.tenant_id)
        .join(User, User.id == Datablock.user_id)
        .outerjoin(Task, Task.id == Datablock.task_id)
        .where(Datablock.deleted_at.is_(None))
        .order_by(Datablock.id.desc())
        .limit(limit)
    )
    if tenant is not None:
        query = query.where(Datablock.tenant_id == tenant)
    if before is not None:
        query = query.where(Datablock.id < before)
    rows = session.execute(query).all()
    needed = blocks.holders(session, [row.id for row, *_ in rows])
    return [
        BlockLine(row=row, tenant=owner, user=user, request_id=request, holders=needed[row.id])
        for row, owner, user, request in rows
    ]
