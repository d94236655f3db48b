"""Tenants, users and keys: who there is, what their share weighs, and by which key they come."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import uuid_utils
from fastapi import Request as HttpRequest
from fastapi import Response
from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from app.api import cursors
from app.api.auth import AnyAdmin, Authed, Caller, PlatformAdmin, check_role, id_of, new_key
from app.api.cursors import Cursor, Limit
from app.api.edge import v1_router
from app.api.problems import declared
from app.api.reach import of_caller
from app.api.schemas import (
    KeyIn,
    KeyMade,
    KeyOut,
    MeOut,
    Page,
    TenantIn,
    TenantOut,
    TenantPatch,
    UserIn,
    UserOut,
)
from app.api.versions import IfMatch, check_version, etag
from app.db import Db
from app.errors import BadInput, Conflict, Forbidden, NotFound
from app.models import ApiKey, Tenant, User

tenants = v1_router("tenants")
users = v1_router("users and keys")


# --- tenants ------------------------------------------------------------------------------------


@tenants.post(
    "/tenants",
    status_code=201,
    response_model=TenantOut,
    summary="Make a tenant",
    responses=declared(403, 409),
)
def create_tenant(
    body: TenantIn, response: Response, caller: PlatformAdmin, session: Db
) -> dict[str, Any]:
    """Its share of what is busy is its weight over the weights of all who want something."""
    parent = _parent(session, body.parent_id)
    tenant = Tenant(
        id=_new_id("ten"),
        name=body.name,
        parent_id=parent.id,
        weight_milli=round(body.weight * 1000),
    )
    _add(session, tenant, f"there is a tenant named {body.name!r} already")
    response.headers["Location"] = f"/v1/tenants/{tenant.id}"
    return _tenant_out(session, response, tenant)


@tenants.get("/tenants", response_model=Page[TenantOut], summary="List tenants")
def list_tenants(
    http: HttpRequest,
    response: Response,
    caller: Authed,
    session: Db,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> dict[str, Any]:
    """A platform admin sees all of them, everybody else their own."""
    query = select(Tenant).where(of_caller(caller, Tenant.id))
    if cursor is not None:
        query = query.where(Tenant.id > cursors.opened(cursor)[0])
    found = list(session.scalars(query.order_by(Tenant.id).limit(limit + 1)))
    shown = [_shown(tenant) for tenant in found]
    return cursors.page(http, response, shown, limit, [cursors.seal(row.id) for row in found])


@tenants.get(
    "/tenants/{id}", response_model=TenantOut, summary="Show a tenant", responses=declared(404)
)
def get_tenant(id: str, response: Response, caller: Authed, session: Db) -> dict[str, Any]:
    return _tenant_out(session, response, _visible_tenant(session, caller, id))


@tenants.patch(
    "/tenants/{id}",
    response_model=TenantOut,
    summary="Change a tenant's name, weight or parent",
    responses=declared(403, 404, 409, 412, 428),
)
def change_tenant(
    id: str,
    body: TenantPatch,
    response: Response,
    caller: Authed,
    session: Db,
    if_match: IfMatch = None,
) -> dict[str, Any]:
    """Needs the tenant's `ETag` as `If-Match`.  A new weight counts from the next decision on."""
    tenant = _visible_tenant(session, caller, id)
    check_role(caller, "platform_admin")
    session.refresh(tenant, with_for_update=True)
    check_version(if_match, tenant.version)
    if body.name is not None:
        tenant.name = body.name
    if body.weight is not None:
        tenant.weight_milli = round(body.weight * 1000)
    if body.parent_id is not None:
        tenant.parent_id = _new_parent(session, tenant, body.parent_id)
    tenant.version += 1
    _flush(session, f"there is a tenant named {body.name!r} already")
    return _tenant_out(session, response, tenant)


def _visible_tenant(session: Session, caller: Caller, id: str) -> Tenant:
    tenant = session.scalar(select(Tenant).where(Tenant.id == id, of_caller(caller, Tenant.id)))
    if tenant is None:
        raise NotFound("tenant", id)
    return tenant


def _parent(session: Session, id: str | None) -> Tenant:
    which = Tenant.parent_id.is_(None) if id is None else Tenant.id == id
    parent = session.scalar(select(Tenant).where(which).order_by(Tenant.created_at).limit(1))
    if parent is None:
        raise BadInput.at("/parent_id", f"there is no tenant with id {id}", "unknown-tenant")
    return parent


def _new_parent(session: Session, tenant: Tenant, id: str) -> str:
    """Raises BadInput if the tree would not be one any more."""
    if tenant.parent_id is None:
        raise BadInput.at("/parent_id", "the root of the tree has no parent", "cycle")
    parent = above = _parent(session, id)
    while above.id != tenant.id:
        if above.parent_id is None:
            return parent.id
        above = session.get_one(Tenant, above.parent_id)
    raise BadInput.at("/parent_id", "a tenant cannot lie below itself", "cycle")


def _tenant_out(session: Session, response: Response, tenant: Tenant) -> dict[str, Any]:
    session.refresh(tenant)
    response.headers["ETag"] = etag(tenant.version)
    return _shown(tenant)


def _shown(tenant: Tenant) -> dict[str, Any]:
    return {
        "id": tenant.id,
        "name": tenant.name,
        "parent_id": tenant.parent_id,
        "weight": tenant.weight_milli / 1000,
        "version": tenant.version,
        "created_at": tenant.created_at,
    }


# --- users --------------------------------------------------------------------------------------


@users.post(
    "/users",
    status_code=201,
    response_model=UserOut,
    summary="Make a user",
    responses=declared(403, 409),
)
def create_user(body: UserIn, response: Response, caller: AnyAdmin, session: Db) -> User:
    """A tenant admin makes users of the own tenant only."""
    tenant_id = body.tenant_id or caller.tenant_id
    seen = of_caller(caller, Tenant.id)
    if session.scalar(select(Tenant.id).where(Tenant.id == tenant_id, seen)) is None:
        raise BadInput.at("/tenant_id", f"there is no tenant with id {tenant_id}", "unknown-tenant")
    user = User(id=_new_id("usr"), tenant_id=tenant_id, name=body.name)
    _add(session, user, f"the tenant has a user named {body.name!r} already")
    session.refresh(user)
    response.headers["Location"] = f"/v1/users/{user.id}"
    return user


@users.get("/users", response_model=Page[UserOut], summary="List users", responses=declared(403))
def list_users(
    http: HttpRequest,
    response: Response,
    caller: AnyAdmin,
    session: Db,
    tenant_id: str | None = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> dict[str, Any]:
    query = select(User).where(of_caller(caller, User.tenant_id))
    if tenant_id is not None:
        query = query.where(User.tenant_id == tenant_id)
    if cursor is not None:
        query = query.where(User.id > cursors.opened(cursor)[0])
    found = list(session.scalars(query.order_by(User.id).limit(limit + 1)))
    return cursors.page(http, response, found, limit, [cursors.seal(row.id) for row in found])


@users.get(
    "/users/{id}", response_model=UserOut, summary="Show a user", responses=declared(403, 404)
)
def get_user(id: str, caller: Authed, session: Db) -> User:
    """Your own user, or as an admin any that you see."""
    user = _visible_user(session, caller, id)
    if user is None:
        raise NotFound("user", id)
    if user.id != caller.user_id:
        check_role(caller, "platform_admin", "tenant_admin")
    return user


@users.get("/me", response_model=MeOut, summary="Who am I?")
def get_me(caller: Authed) -> dict[str, Any]:
    return {
        "user_id": caller.user_id,
        "user": caller.user_name,
        "tenant_id": caller.tenant_id,
        "tenant": caller.tenant_name,
        "role": caller.role,
        "key_id": caller.key_id,
    }


def _visible_user(session: Session, caller: Caller, id: str) -> User | None:
    query = select(User).where(User.id == id, of_caller(caller, User.tenant_id))
    return session.scalar(query)


# --- keys ---------------------------------------------------------------------------------------


@users.post(
    "/keys",
    status_code=201,
    response_model=KeyMade,
    summary="Make an API key",
    responses=declared(403),
)
def create_key(body: KeyIn, response: Response, caller: AnyAdmin, session: Db) -> dict[str, Any]:
    """The key itself is in this answer and nowhere else, ever.  Only a platform admin makes keys
    of platform admins.
    """
    if body.role == "platform_admin" and not caller.sees_all:
        raise Forbidden("only a platform_admin makes keys with the role platform_admin")
    if _visible_user(session, caller, body.user_id) is None:
        raise BadInput.at("/user_id", f"there is no user with id {body.user_id}", "unknown-user")
    expires_at = _future(body.expires_at)
    token = new_key(session, body.user_id, body.role, body.name, expires_at=expires_at)
    id = str(id_of(token))
    response.headers["Location"] = f"/v1/keys/{id}"
    row = session.execute(_keys(caller).where(ApiKey.id == id)).one()
    return {**_key_out(row), "key": token}


def _future(at: datetime | None) -> datetime | None:
    if at is None:
        return None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    if at <= datetime.now(UTC):
        raise BadInput.at("/expires_at", "lies in the past", "range")
    return at


@users.get("/keys", response_model=Page[KeyOut], summary="List API keys", responses=declared(403))
def list_keys(
    http: HttpRequest,
    response: Response,
    caller: AnyAdmin,
    session: Db,
    user_id: str | None = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> dict[str, Any]:
    """Revoked and expired ones too; never the keys themselves."""
    query = _keys(caller)
    if user_id is not None:
        query = query.where(ApiKey.user_id == user_id)
    if cursor is not None:
        query = query.where(ApiKey.id > cursors.opened(cursor)[0])
    found = session.execute(query.order_by(ApiKey.id).limit(limit + 1)).all()
    shown = [_key_out(row) for row in found]
    return cursors.page(http, response, shown, limit, [cursors.seal(row["id"]) for row in shown])


@users.delete(
    "/keys/{id}",
    response_model=KeyOut,
    summary="Revoke an API key",
    responses=declared(403, 404),
)
def revoke_key(id: str, caller: Authed, session: Db) -> dict[str, Any]:
    """From now on it opens nothing, and browsers signed in with it are signed out.  Twice is no
    error.  Everybody may revoke their own keys.
    """
    row = session.execute(_keys(caller).where(ApiKey.id == id)).one_or_none()
    if row is None:
        raise NotFound("key", id)
    if row.ApiKey.user_id != caller.user_id:
        check_role(caller, "platform_admin", "tenant_admin")
    if row.ApiKey.role == "platform_admin" and not caller.sees_all:
        raise Forbidden("only a platform_admin revokes keys with the role platform_admin")
    if row.ApiKey.revoked_at is None:
        row.ApiKey.revoked_at = func.now()
        session.flush()
        session.refresh(row.ApiKey)
    return _key_out(row)


def _keys(caller: Caller) -> Any:
    return (
        select(ApiKey, User.tenant_id)
        .join(User, User.id == ApiKey.user_id)
        .where(of_caller(caller, User.tenant_id))
    )


def _key_out(row: Any) -> dict[str, Any]:
    shown = {name: getattr(row.ApiKey, name, None) for name in KeyOut.model_fields}
    return {**shown, "tenant_id": row.tenant_id}


# --- shared -------------------------------------------------------------------------------------


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid_utils.uuid7().hex}"


def _add(session: Session, row: Tenant | User, taken: str) -> None:
    session.add(row)
    _flush(session, taken)


def _flush(session: Session, taken: str) -> None:
    try:
        session.flush()
    except IntegrityError as error:
        raise Conflict(taken) from error
