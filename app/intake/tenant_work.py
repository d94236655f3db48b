"""Cancels, pauses and resumes all requests of a tenant and of the tenants below it, by pages.

A call changes at most AT_ONCE requests, each as if a person had named it (`app.intake.actions`).
Requests that have nothing left to change are passed over, so repeated calls come to an end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import ColumnElement, exists, select
from sqlalchemy.orm import Session

from app.core.model.lifecycle import ENDED
from app.core.model.rungs import RUNG_HOLDS
from app.db import tenant_tree
from app.db.models import Request, Task
from app.identity import audit
from app.intake import actions
from app.intake.actions import ADMIN_HOLD, USER_HOLD

AT_ONCE = 50  # most requests that one call changes


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkOfTenant:
    """Describes whose requests are changed, and who asks; `as_admin`: of the platform."""

    tenant_id: str
    by: str
    as_admin: bool


def cancel(session: Session, work: WorkOfTenant) -> tuple[int, bool]:
    """Cancel requests; return how many, and True if there are more."""
    which = _has_task(Task.cancel_asked_at.is_(None))
    return _each(session, work, which, lambda one: actions.cancel_request(session, one, by=work.by))


def hold(session: Session, work: WorkOfTenant) -> tuple[int, bool]:
    """Pause requests; return how many, and True if there are more."""
    own = ADMIN_HOLD if work.as_admin else USER_HOLD
    which = _has_task(Task.hold.not_in({own, ADMIN_HOLD, *RUNG_HOLDS}))

    def act(request: Request) -> None:
        actions.hold_request(session, request, by=work.by, as_admin=work.as_admin)

    return _each(session, work, which, act)


def release(session: Session, work: WorkOfTenant) -> tuple[int, bool]:
    """Resume requests that people paused; return how many, and True if there are more.

    What an administrator of the platform paused is left to administrators of the platform.
    """
    held = _has_task(Task.hold.in_({USER_HOLD, ADMIN_HOLD}))
    which = held if work.as_admin else held & ~_has_task(Task.hold == ADMIN_HOLD)

    def act(request: Request) -> None:
        actions.release_request(session, request, by=work.by, as_admin=work.as_admin)

    return _each(session, work, which, act)


def _has_task(which: ColumnElement[bool]) -> ColumnElement[bool]:
    """Return a condition: the request has such a task that has not ended."""
    return exists().where(Task.request_id == Request.id, Task.state.not_in(ENDED), which)


def _each(
    session: Session,
    work: WorkOfTenant,
    which: ColumnElement[bool],
    act: Callable[[Request], None],
) -> tuple[int, bool]:
    mine = tenant_tree.within(Request.tenant_id, work.tenant_id)
    query = select(Request).where(mine, Request.state.not_in(ENDED), which).order_by(Request.id)
    found = session.scalars(query.limit(AT_ONCE + 1)).all()
    for request in found[:AT_ONCE]:
        audit.asked(session, request)
        act(request)
    return min(len(found), AT_ONCE), len(found) > AT_ONCE
