"""Actions on all work of a tenant: cancel, pause, resume."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy.orm import Session

from app.api.access.auth import Authed, check_role
from app.api.access.caller import Caller
from app.api.middleware import v1_router
from app.api.problems import declared
from app.api.routes.tenants import visible_tenant
from app.api.schemas.people import RequestsTaken
from app.db.transactions import Db
from app.intake import tenant_work
from app.intake.tenant_work import WorkOfTenant

router = v1_router("tenants")

_WISH: dict[str, Any] = {
    "status_code": 202,
    "response_model": RequestsTaken,
    "responses": {
        202: {"description": "How many requests were taken, and whether to call again."},
        **declared(403, 404),
    },
}


@router.post("/tenants/{id}/cancel", summary="Cancel all work of a tenant", **_WISH)
def cancel_tenant_work(id: str, caller: Authed, session: Db) -> dict[str, Any]:
    """Cancels the requests of the tenant and of all tenants below it, as `POST
    /v1/requests/{id}/cancel` does: 50 in a call.  Call again while `more` is true.

    What is submitted later is not cancelled.  A tenant admin may do this in the own tenant, too.
    """
    return _taken(session, caller, id, tenant_work.cancel)


@router.post("/tenants/{id}/hold", summary="Pause all work of a tenant", **_WISH)
def hold_tenant_work(id: str, caller: Authed, session: Db) -> dict[str, Any]:
    """Pauses the requests of the tenant and of all tenants below it, as `POST
    /v1/requests/{id}/hold` does: 50 in a call.  Call again while `more` is true.

    What is submitted later is not paused; `max_running: 0` of the tenant starts none of it.
    """
    return _taken(session, caller, id, tenant_work.hold)


@router.post("/tenants/{id}/release", summary="Resume all work of a tenant", **_WISH)
def release_tenant_work(id: str, caller: Authed, session: Db) -> dict[str, Any]:
    """Resumes the paused requests of the tenant and of all tenants below it: 50 in a call.  Call
    again while `more` is true.

    Also what its users paused themselves goes on.  What a platform admin paused is passed over,
    unless a platform admin asks.
    """
    return _taken(session, caller, id, tenant_work.release)


def _taken(
    session: Session,
    caller: Caller,
    id: str,
    act: Callable[[Session, WorkOfTenant], tuple[int, bool]],
) -> dict[str, Any]:
    tenant = visible_tenant(session, caller, id)
    check_role(caller, "platform_admin", "tenant_admin")
    asked = WorkOfTenant(tenant_id=tenant.id, by=caller.user_name, as_admin=caller.sees_all)
    requests, more = act(session, asked)
    return {"requests": requests, "more": more}
