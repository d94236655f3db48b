"""Decides what a caller may see and act on.

A platform admin sees everything, a tenant admin what belongs to the own tenant and to tenants below
it, other users what belongs to their tenant.  Everything else is reported as not found, so that ids
of other tenants stay unknown.  A member acts on their own requests, a tenant admin on all requests
in view, a viewer on none.
"""

from __future__ import annotations

from typing import Any, TypeVar

from sqlalchemy import ColumnElement, select, true
from sqlalchemy.orm import InstrumentedAttribute, Session

from app.api.access.caller import Caller
from app.db import tenant_tree
from app.db.models import Checkpoint, Delivery, Request, Task, User, Webhook
from app.errors import Forbidden, NotFound
from app.identity import audit

OfTenant = TypeVar("OfTenant", Checkpoint, Delivery, Request, Task, User, Webhook)


def of_caller(caller: Caller, tenant_id: InstrumentedAttribute[Any]) -> ColumnElement[bool]:
    """Return a condition: the row belongs to a tenant that the caller sees."""
    if caller.sees_all:
        return true()
    if caller.role == "tenant_admin":
        return tenant_tree.within(tenant_id, caller.tenant_id)
    return tenant_id == caller.tenant_id


def visible(
    session: Session, caller: Caller, model: type[OfTenant], id: str, *, lock: bool = False
) -> OfTenant:
    """Return the row if its tenant is one that the caller sees; otherwise raises NotFound, as if
    there were no such row.

    `lock` keeps others from changing the row, but not from referring to it.
    """
    query = select(model).where(model.id == id, of_caller(caller, model.tenant_id))
    found = session.scalar(query.with_for_update(key_share=True) if lock else query)
    if found is None:
        raise NotFound(model.__name__.lower(), id)
    return found


def visible_user(session: Session, caller: Caller, id: str) -> User:
    """Return the user; raises NotFound also for a deleted one."""
    found = visible(session, caller, User, id)
    if found.deleted_at is not None:
        raise NotFound("user", id)
    return found


def visible_request(session: Session, caller: Caller, id: str) -> Request:
    found = visible(session, caller, Request, id)
    audit.looked(session, found)
    return found


def visible_task(session: Session, caller: Caller, id: str) -> Task:
    found = visible(session, caller, Task, id)
    audit.looked(session, found)
    return found


def request_to_act_on(session: Session, caller: Caller, id: str) -> Request:
    found = visible_request(session, caller, id)
    _check_may_act(caller, found)
    audit.asked(session, found)
    return found


def task_to_act_on(session: Session, caller: Caller, id: str) -> Task:
    found = visible_task(session, caller, id)
    _check_may_act(caller, found)
    audit.asked(session, found)
    return found


def may_act(caller: Caller, found: Request | Task) -> bool:
    """True if the caller may act on a request or task that the caller can see."""
    if caller.role in ("platform_admin", "tenant_admin"):
        return True
    return caller.role == "member" and found.user_id == caller.user_id


def _check_may_act(caller: Caller, found: Request | Task) -> None:
    if may_act(caller, found):
        return
    raise Forbidden(f"only the owner or an administrator may do this; got role {caller.role}")
