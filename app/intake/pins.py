"""Pins checkpoints: a pinned one stays, whatever its age, with its request."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.core.units import counted
from app.data import datablocks
from app.db import transactions
from app.db.models import Checkpoint, Request, RequestEvent, Task, Tenant
from app.db.transactions import AnyRow
from app.errors import Conflict, QuotaExceeded
from app.settings import settings


def pin_checkpoint(session: Session, checkpoint: Checkpoint, *, by: str) -> None:
    """Pin a checkpoint; pinning it again changes nothing.

    Raises Conflict if it is damaged or being deleted, QuotaExceeded if its tenant may pin no more,
    or stores too much.
    """
    if checkpoint.pinned_at is None:
        _check_pinned(session, checkpoint)
        if not checkpoint.best:  # the best count already
            datablocks.check_room(session, checkpoint.tenant_id, checkpoint.size_bytes)
    task = _locked(session, checkpoint)
    if checkpoint.deleted_at is not None or checkpoint.damaged_at is not None:
        why = "is being deleted" if checkpoint.deleted_at is not None else "is damaged"
        raise Conflict(f"the checkpoint {why}, so it cannot be pinned")
    if checkpoint.pinned_at is None:
        checkpoint.pinned_at = transactions.now(session)
        told = f"Checkpoint {checkpoint.id} of step {checkpoint.step} pinned by {by}."
        _tell(session, task, "checkpoint.pinned", told)


def unpin_checkpoint(session: Session, checkpoint: Checkpoint, *, by: str) -> None:
    """Let a pinned checkpoint go: its age counts again."""
    task = _locked(session, checkpoint)
    if checkpoint.pinned_at is not None:
        checkpoint.pinned_at = None
        told = f"Checkpoint {checkpoint.id} unpinned by {by}."
        _tell(session, task, "checkpoint.unpinned", told)


def pinned_of(session: Session, request_id: str) -> AnyRow | None:
    """Return the id of a pinned checkpoint of the request's tasks, if there is one."""
    query = select(Checkpoint.id).join(Task, Task.id == Checkpoint.task_id)
    mine = (Task.request_id == request_id, Checkpoint.pinned_at.is_not(None))
    return session.execute(query.where(*mine).order_by(Checkpoint.id).limit(1)).first()


def _locked(session: Session, checkpoint: Checkpoint) -> Task:
    """Lock the request, so that it is not deleted meanwhile, then the checkpoint; return the
    task.
    """
    task = session.get_one(Task, checkpoint.task_id)
    request = session.get_one(Request, task.request_id)
    transactions.lock_again(session, request, key_share=True)
    if request.delete_asked_at is not None:
        raise Conflict("its request is being deleted, so it cannot be changed any more")
    transactions.lock_again(session, checkpoint)
    return task


def _tell(session: Session, task: Task, type_: str, message: str) -> None:
    owner = {"tenant_id": task.tenant_id, "request_id": task.request_id, "task_id": task.id}
    session.add(RequestEvent(type=type_, message=message, **owner))


def _check_pinned(session: Session, checkpoint: Checkpoint) -> None:
    """Raise QuotaExceeded if the tenant has as many pinned checkpoints as it may.

    The tenant is locked until the commit. So of two calls for the last place, the second counts the
    first.
    """
    most = settings().pinned_checkpoints_max
    if not most:
        return
    tenant = select(Tenant.name).where(Tenant.id == checkpoint.tenant_id)
    name = session.execute(tenant.with_for_update(key_share=True)).scalar_one()
    mine = (Checkpoint.tenant_id == checkpoint.tenant_id, Checkpoint.pinned_at.is_not(None))
    pinned = session.scalar(select(func.count()).select_from(Checkpoint).where(*mine)) or 0
    if pinned >= most:
        raise QuotaExceeded(
            f"{name} has {counted(pinned, 'pinned checkpoint')} of at most {most}. Unpin one: POST "
            "/v1/checkpoints/ID/unpin. Or ask an administrator to raise "
            "ROUNDHOUSE_PINNED_CHECKPOINTS_MAX"
        )
