"""Shows pages of a tenant's administrators: its members and their keys, its webhooks, its audit
log.

They show the answers of the API's operations, and their forms call these operations. So pages and
API show the same, and reject the same.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Any, get_args

from fastapi import APIRouter, Depends, Form, Request, Response
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.api.access.auth import IS_VALID, check_role
from app.api.access.caller import Caller
from app.api.access.gate import GatedRoute
from app.api.access.visibility import of_caller
from app.api.cursors import Paging
from app.api.routes import audit as of_audit
from app.api.routes import budgets as of_budgets
from app.api.routes import tenants as of_tenants
from app.api.routes import webhooks as of_webhooks
from app.api.schemas.people import KeyIn, RotateKeyIn, UserIn, UserPatch
from app.api.times import day
from app.api.versions import etag
from app.core.security.grants import ROLES
from app.core.security.scopes import MEANINGS
from app.core.webhooks.message_bodies import TYPES
from app.db import transactions
from app.db.models import ApiKey, Tenant, User
from app.db.transactions import Db
from app.errors import BadInput
from app.insight import reports
from app.pages import forms, limit_forms, views
from app.pages.forms import Field
from app.pages.views import Sender, Visitor

ON_A_PAGE = 50
KEYS_SHOWN = 200

#: How long a replaced key or secret stays valid besides its successor, in seconds.
OVERLAPS = {0: "not at all", 3600: "an hour", 86_400: "a day", 7 * 86_400: "a week"}
#: The lifetime of a new key, in days; 0 is never.
LIVES = {0: "never", 30: "in 30 days", 90: "in 90 days", 365: "in a year"}
TARGETS = (
    "key", "user", "tenant", "webhook", "request", "task", "checkpoint", "session", "device",
    "host", "preset", "secret", "reservation",
)  # fmt: skip

router = APIRouter(include_in_schema=False, route_class=GatedRoute)


def admin(caller: Visitor) -> Caller:
    check_role(caller, "tenant_admin", "platform_admin")
    return caller


Admin = Annotated[Caller, Depends(admin, scope="function")]


def sending_admin(caller: Sender) -> Caller:
    return admin(caller)


SendingAdmin = Annotated[Caller, Depends(sending_admin, scope="function")]


def _paging(request: Request, cursor: str, limit: int = ON_A_PAGE) -> Paging:
    return Paging(http=request, response=Response(), limit=limit, given=cursor or None)


def tenant_names(session: Session, caller: Caller) -> dict[str, str]:
    """Return id -> name of the tenants that the caller sees, the own one first."""
    query = select(Tenant.id, Tenant.name).where(of_caller(caller, Tenant.id))
    rows = session.execute(query.order_by(Tenant.id != caller.tenant_id, Tenant.name))
    return {id: name for id, name in rows}


def _given(text: str) -> str | None:
    """Return None for a field that was left empty."""
    return text or None


# --- members ------------------------------------------------------------------------------------


@router.get("/ui/members")
def list_members(request: Request, session: Db, caller: Admin, cursor: str = "") -> Response:
    found = of_tenants.list_users(_paging(request, cursor), caller, session)
    return views.page(
        request,
        "members.html",
        caller,
        now=transactions.now(session),
        section="members",
        members=found["items"],
        next_cursor=found["next_cursor"],
        keys=_good_keys(session, [user["id"] for user in found["items"]]),
        tenants=tenant_names(session, caller),
    )


def _good_keys(session: Session, users: list[str]) -> dict[str, Any]:
    """Return the number of valid keys of each user, and when one of them was last used."""
    query = (
        select(ApiKey.user_id, func.count().label("n"), func.max(ApiKey.last_used_at).label("used"))
        .where(ApiKey.user_id.in_(users), *IS_VALID)
        .group_by(ApiKey.user_id)
    )
    return {row.user_id: row for row in session.execute(query)}


@router.post("/ui/members")
def add_member(
    request: Request,
    session: Db,
    caller: SendingAdmin,
    name: Field = "",
    tenant_id: Field = "",
    service: Field = "",
) -> Response:
    views.acts_as(request, session, caller, of_tenants.create_user)
    body = forms.filled(UserIn, name=name, tenant_id=_given(tenant_id), service=bool(service))
    made = of_tenants.create_user(body, Response(), caller, session)
    words = f"{made['name']} added. Create an API key next."
    return views.answered(request, forms.Told(words=words), at=f"/ui/members/{made['id']}")


@router.get("/ui/members/{id}")
def show_member(
    request: Request, session: Db, caller: Admin, id: str, cursor: str = ""
) -> Response:
    user = of_tenants.get_user(id, Response(), caller, session)
    paging = _paging(request, cursor, KEYS_SHOWN)
    found = of_tenants.list_keys(paging, caller, session, user_id=id)
    newest_first = sorted(found["items"], key=lambda key: key["created_at"], reverse=True)
    tenant = session.get_one(Tenant, user["tenant_id"])
    drawn = reports.burn_downs(session, tenant.id, id)
    return views.page(
        request,
        "member.html",
        caller,
        now=transactions.now(session),
        section="members",
        user=user,
        tenant=tenant.name,
        limits=limit_forms.shown_limits(user),
        inherited=limit_forms.shown_limits(tenant.user_defaults),
        user_bounds=limit_forms.BOUNDS,
        budget=limit_forms.shown_budget(user["budget"]),
        budgets=[it for it in drawn if it.is_own],
        keys=newest_first,
        next_cursor=found["next_cursor"],
        roles=[role for role in ROLES if caller.sees_all or role != "platform_admin"],
        scopes=MEANINGS,
        lives=LIVES,
        overlaps=OVERLAPS,
    )


@router.post("/ui/members/{id}")
def change_member(
    request: Request,
    session: Db,
    caller: SendingAdmin,
    id: str,
    limits: limit_forms.Typed,
    version: Field = "",
    do: Field = "",
    key: Field = "",
    name: Field = "",
    role: Field = "",
    scopes: Annotated[list[str] | None, Form()] = None,
    days: Field = "0",
    overlap_s: Field = "0",
) -> Response:
    known: dict[str, Callable[..., Any]] = {
        "make": of_tenants.create_key,
        "rotate": of_tenants.rotate_key,
        "revoke": of_tenants.revoke_key,
        "adjust": of_budgets.adjust_user_budget,
        **dict.fromkeys(limit_forms.ACTS, of_tenants.change_user),
    }
    operation = forms.chosen(do, known)
    views.acts_as(request, session, caller, operation)
    user = of_tenants.get_user(id, Response(), caller, session)
    if do == "make":
        given = {"user_id": id, "role": role, "name": name, "scopes": scopes}
        body = forms.filled(KeyIn, **given, expires_at=_ends(days))
        made = of_tenants.create_key(body, Response(), caller, session)
        told = forms.Told(words=f"The new key {name!r} of {user['name']}:", secret=made["key"])
    elif do == "rotate":
        width = forms.filled(RotateKeyIn, overlap_s=forms.whole_number(overlap_s))
        made = of_tenants.rotate_key(key, Response(), caller, session, width)
        told = forms.Told(words=f"The key that takes the place of {key}:", secret=made["key"])
    elif do == "adjust":
        of_budgets.adjust_user_budget(id, limit_forms.adjustment(limits), caller, session)
        told = forms.Told(words=f"The budget of {user['name']} is changed for this period.")
    elif do in limit_forms.ACTS:
        forms.check_version(user, version)
        patch = forms.filled(UserPatch, **limit_forms.values(do, limits))
        of_tenants.change_user(id, patch, Response(), caller, session, etag(user["version"]))
        told = forms.Told(words=f"{user['name']} is changed.")
    else:
        of_tenants.revoke_key(key, caller, session)
        told = forms.Told(words=f"The key {key} is revoked.")
    show = partial(show_member, request, session, caller, id)
    return views.answered(request, told, show)


def _ends(days: str) -> str | None:
    """Return when a new key ends; raises BadInput for a choice that the page does not offer."""
    if forms.whole_number(days) not in LIVES:
        raise BadInput.at("/days", f"{days!r:.20} is not one of the choices", "range")
    return (datetime.now(UTC) + timedelta(days=int(days))).isoformat() if int(days) else None


# --- webhooks -----------------------------------------------------------------------------------


@router.get("/ui/webhooks")
def list_webhooks(request: Request, session: Db, caller: Admin, cursor: str = "") -> Response:
    found = of_webhooks.list_webhooks(_paging(request, cursor), caller, session)
    return views.page(
        request,
        "webhooks.html",
        caller,
        now=transactions.now(session),
        section="webhooks",
        hooks=found["items"],
        next_cursor=found["next_cursor"],
        tenants=tenant_names(session, caller),
        types=TYPES,
    )


@router.post("/ui/webhooks")
def add_webhook(
    request: Request,
    session: Db,
    caller: SendingAdmin,
    url: Field = "",
    events: Annotated[list[str] | None, Form()] = None,
    tenant_id: Field = "",
) -> Response:
    views.acts_as(request, session, caller, of_webhooks.create_webhook)
    given = {"url": url.strip(), "events": events or [], "tenant_id": _given(tenant_id)}
    body = forms.filled(of_webhooks.WebhookIn, **given)
    made = of_webhooks.create_webhook(body, Response(), caller, session)
    words = f"{made['url']} added. Its messages are signed with this secret:"
    told = forms.Told(words=words, secret=made["secret"])
    return views.answered(request, told, partial(list_webhooks, request, session, caller))


@router.get("/ui/webhooks/{id}")
def show_webhook(
    request: Request, session: Db, caller: Admin, id: str, state: str = "", cursor: str = ""
) -> Response:
    hook = of_webhooks.get_webhook(id, caller, session)
    states = get_args(of_webhooks.DeliveryState)
    state = state if state in states else ""
    paging = _paging(request, cursor)
    found = of_webhooks.list_deliveries(id, paging, caller, session, state=_given(state))  # type: ignore[arg-type]
    return views.page(
        request,
        "webhook.html",
        caller,
        now=transactions.now(session),
        section="webhooks",
        hook=hook,
        tenant=session.get_one(Tenant, hook["tenant_id"]).name,
        deliveries=found["items"],
        next_cursor=found["next_cursor"],
        state=state,
        states=states,
        overlaps=OVERLAPS,
    )


@router.post("/ui/webhooks/{id}")
def change_webhook(
    request: Request,
    session: Db,
    caller: SendingAdmin,
    id: str,
    do: Field = "",
    delivery: Field = "",
    overlap_s: Field = "0",
) -> Response:
    known: dict[str, Callable[..., Any]] = {
        "rotate": of_webhooks.rotate_webhook,
        "test": of_webhooks.test_webhook,
        "send": of_webhooks.redeliver,
        "delete": of_webhooks.delete_webhook,
    }
    operation = forms.chosen(do, known)
    views.acts_as(request, session, caller, operation)
    show = partial(show_webhook, request, session, caller, id)
    if do == "rotate":
        body = forms.filled(of_webhooks.RotateSecretIn, overlap_s=forms.whole_number(overlap_s))
        made = of_webhooks.rotate_webhook(id, caller, session, body)
        told = forms.Told(words="Its messages are signed with a new secret:", secret=made["secret"])
    elif do == "test":
        of_webhooks.test_webhook(id, Response(), caller, session)
        told = forms.Told(words="A test was sent; its delivery is shown below.")
    elif do == "send":
        of_webhooks.get_webhook(id, caller, session)
        of_webhooks.redeliver(delivery, caller, session)
        told = forms.Told(words=f"{delivery} is sent again.")
    else:
        of_webhooks.delete_webhook(id, caller, session)
        told = forms.Told(words="The webhook and its deliveries are deleted.")
        return views.answered(request, told, at="/ui/webhooks")
    return views.answered(request, told, show)


# --- the audit log ------------------------------------------------------------------------------


@router.get("/ui/audit")
def list_audit(
    request: Request,
    session: Db,
    caller: Admin,
    action: str = "",
    target_kind: str = "",
    operation: str = "",
    user_id: str = "",
    target_id: str = "",
    since: str = "",
    until: str = "",
    cursor: str = "",
) -> Response:
    """Show the audit log; `since` and `until` are days in UTC, both included."""
    actions = get_args(of_audit.Action)
    asked = {
        "action": action if action in actions else "",
        "target_kind": target_kind,
        "operation": operation.strip(),
        "user_id": user_id,
        "target_id": target_id.strip(),
    }
    last = day(until, "?until")
    found = of_audit.list_audit_events(
        _paging(request, cursor),
        caller,
        session,
        **{name: _given(value) for name, value in asked.items()},  # type: ignore[arg-type]
        since=day(since, "?since"),
        until=last + timedelta(days=1) if last else None,
    )
    following = request.url.include_query_params(cursor=found["next_cursor"])
    return views.page(
        request,
        "audit.html",
        caller,
        now=transactions.now(session),
        section="audit",
        events=found["items"],
        following=f"?{following.query}" if found["next_cursor"] else "",
        asked={**asked, "since": since, "until": until},
        user=session.scalar(
            select(User.name).where(User.id == user_id, of_caller(caller, User.tenant_id))
        ),
        actions=actions,
        targets=TARGETS,
        tenants=tenant_names(session, caller),
    )
