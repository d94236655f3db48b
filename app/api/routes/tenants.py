"""Tenants, users and keys: the tree with its shares and quotas, its users, and their keys.

Every change of the tree holds `tenant_tree.lock`, so checks of the tree still hold at the commit.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import partial
from typing import Annotated, Any

from fastapi import Body, Response
from sqlalchemy import exists, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from app.api import budget_values
from app.api.access.auth import (
    IS_VALID,
    NO_SECRET,
    AnyAdmin,
    Authed,
    check_role,
    id_of,
    new_key,
)
from app.api.access.caller import Caller
from app.api.access.visibility import of_caller, visible_user
from app.api.budget_values import budget_from
from app.api.cursors import Paged
from app.api.middleware import v1_router
from app.api.problems import declared
from app.api.schemas.base import Page
from app.api.schemas.budgets import BudgetIn
from app.api.schemas.people import (
    KeyIn,
    KeyMade,
    KeyOut,
    KeysRevoked,
    MeOut,
    RotateKeyIn,
    TenantIn,
    TenantOut,
    TenantPatch,
    UserDefaults,
    UserIn,
    UserOut,
    UserPatch,
)
from app.api.versions import IfMatch, check_version, etag
from app.core.fairness.budget import Budget
from app.core.model.fields import Fault, escaped
from app.core.model.lifecycle import ENDED
from app.core.model.provisions import network_policy
from app.core.security.grants import ROLES
from app.core.security.scopes import Scopes, within
from app.db import tenant_tree, transactions
from app.db.ids import new_id
from app.db.models import ApiKey, Island, Request, Reservation, Secret, Tenant, User, Webhook
from app.db.transactions import Db, after_commit
from app.db.user_limits import LIMITS
from app.errors import BadInput, Conflict, Forbidden, NotFound
from app.messaging import channels, outbox
from app.scheduling import budgets, ledger

tenants = v1_router("tenants")
users = v1_router("users and keys")


# --- tenants ------------------------------------------------------------------------------------


@tenants.post(
    "/tenants",
    status_code=201,
    response_model=TenantOut,
    summary="Create a tenant",
    responses=declared(403, 409),
)
def create_tenant(
    body: TenantIn, response: Response, caller: AnyAdmin, session: Db
) -> dict[str, Any]:
    """Makes a tenant, which shares busy devices by its weight with the siblings that want some.

    A tenant admin makes tenants below the own one, and divides its guarantee among them.
    """
    tenant_tree.lock(session)
    before = _promised(session, caller) if body.guarantee else {}
    parent = _parent(session, caller, body.parent_id)
    tenant = Tenant(
        id=new_id("ten"),
        name=body.name,
        parent_id=parent.id,
        weight_milli=round(body.weight * 1000),
        guarantee=body.guarantee,
        limit=body.limit,
        max_running=body.max_running,
        max_queued=body.max_queued,
        idle_pause_s=body.idle_pause_s,
        session_end_s=body.session_end_s,
        network=_network(session, caller, body.network),
        tier=body.tier,
    )
    _check_quota(tenant, "guarantee")
    _add(session, tenant, f"{parent.name} already has a child tenant named {body.name!r}")
    if body.guarantee:
        _check_promises(session, caller, tenant, before, "guarantee")
    _take_defaults(session, tenant, body.user_defaults)
    _take_budget(session, tenant, body)
    response.headers["Location"] = f"/v1/tenants/{tenant.id}"
    return _tenant_out(session, response, tenant)


@tenants.get("/tenants", response_model=Page[TenantOut], summary="List tenants")
def list_tenants(
    paging: Paged, caller: Authed, session: Db, parent_id: str | None = None
) -> dict[str, Any]:
    """Lists tenants.  A platform admin sees all of them, a tenant admin the own one and those below
    it, other users their own.  With `parent_id` only the children of that tenant are listed.
    """
    query = select(Tenant).where(of_caller(caller, Tenant.id))
    if parent_id is not None:
        query = query.where(Tenant.parent_id == parent_id)
    found = paging.read(session, query, by=Tenant.id)
    return found.page([_shown(tenant) for tenant in found.rows])


@tenants.get(
    "/tenants/{id}", response_model=TenantOut, summary="Show a tenant", responses=declared(404)
)
def get_tenant(id: str, response: Response, caller: Authed, session: Db) -> dict[str, Any]:
    """Shows the tenant's share and quota, and its `ETag` for a change."""
    return _tenant_out(session, response, visible_tenant(session, caller, id))


@tenants.patch(
    "/tenants/{id}",
    response_model=TenantOut,
    summary="Change a tenant's name, parent, weight or quota",
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
    """Needs the tenant's `ETag` as `If-Match`.  The change counts from the next decision on, and a
    new weight for usage from then on; with `for_past_usage` for all usage.

    A tenant admin may change the tenants below the own one, but not the own one.
    """
    tenant = tenant_to_change(session, caller, id)
    tenant_tree.lock(session)
    promised = body.guarantee is not None or body.parent_id is not None
    before = _promised(session, caller) if promised else {}
    _lock(session, tenant, body)
    check_version(if_match, tenant.version)
    _take_budget(session, tenant, body)
    if body.user_defaults is not None:
        _take_defaults(session, tenant, body.user_defaults)
    if body.parent_id is not None:
        tenant.parent_id = _new_parent(session, caller, tenant, body.parent_id)
        _flush(session, f"the new parent already has a child tenant named {tenant.name!r}")
    # it reads rows: after the name is set, that would write the name, which may be taken
    network = None if body.network is None else _network(session, caller, body.network)
    _reweigh(session, tenant, body)
    _take_over(tenant, body)
    if network is not None:
        tenant.network = network
    _check_quota(tenant, "limit" if body.guarantee is None else "guarantee")
    tenant.version += 1
    _flush(session, f"its parent already has a child tenant named {tenant.name!r}")
    if promised:
        changed = "parent_id" if body.guarantee is None else "guarantee"
        _check_promises(session, caller, tenant, before, changed)
    tell_islands(session)
    return _tenant_out(session, response, tenant)


def _reweigh(session: Session, row: Tenant | User, body: TenantPatch | UserPatch) -> None:
    if body.weight is not None or body.for_past_usage:
        weight_milli = row.weight_milli if body.weight is None else round(body.weight * 1000)
        ledger.reweigh(session, row, weight_milli, past=body.for_past_usage)


def _lock(session: Session, row: Tenant | User, body: TenantPatch | UserPatch) -> None:
    """Lock a row for a change; before it all charges, if a budget may change."""
    if body.model_fields_set & {"budget", "user_defaults"}:
        budgets.lock(session)
    transactions.lock_again(session, row)


def _take_budget(
    session: Session, row: Tenant | User, body: TenantIn | TenantPatch | UserIn | UserPatch
) -> None:
    """Set the budget that is given; null removes it.  The row is locked, or new."""
    if "budget" not in body.model_fields_set:
        return
    tenant = row.tenant_id if isinstance(row, User) else row.id
    budgets.set_budget(session, row, _budget(session, tenant, body.budget, "/budget"))


def _budget(session: Session, tenant: str, given: BudgetIn | None, where: str) -> Budget | None:
    """Return the budget that is given; raises BadInput."""
    if given is None:
        return None
    its = channels.names(session, tenant) if given.to else ()
    return budget_from(given, now=transactions.now(session), channels=its, where=where)


def _take_defaults(session: Session, tenant: Tenant, given: UserDefaults) -> None:
    """Set what each user of the tenant has without own limits; raises BadInput."""
    it = _budget(session, tenant.id, given.budget, "/user_defaults/budget")
    kept = {name: terms for name, terms in tenant.user_defaults.items() if name == "budget"}
    tenant.user_defaults = {**given.model_dump(exclude_none=True, exclude={"budget"}), **kept}
    budgets.set_default(session, tenant, it)


def _take_over(tenant: Tenant, body: TenantPatch) -> None:
    """Copy the given fields; null removes a bound on tasks, and is ignored elsewhere."""
    for name in ("name", "guarantee", "limit", "tier"):
        if (given := getattr(body, name)) is not None:
            setattr(tenant, name, given)
    for name in _MAY_BE_NULL & body.model_fields_set:
        setattr(tenant, name, getattr(body, name))


_MAY_BE_NULL = {"max_running", "max_queued", "idle_pause_s", "session_end_s", "network"}


@tenants.delete(
    "/tenants/{id}",
    status_code=204,
    summary="Delete an empty tenant",
    responses=declared(403, 404, 409),
)
def delete_tenant(id: str, caller: Authed, session: Db) -> None:
    """Deletes an empty tenant.  A tenant with users (also deleted ones), requests or tenants below
    it stays, because its usage is part of the accounts.  A tenant with webhooks stays until these
    are deleted.
    """
    tenant = tenant_to_change(session, caller, id)
    tenant_tree.lock(session)
    if there := _belongings(session, tenant):
        raise Conflict(
            f"only an empty tenant can be deleted; {tenant.name} has {' and '.join(there)}"
        )
    session.delete(tenant)
    _flush(session, f"{tenant.name} is no longer empty")
    tell_islands(session)


def _belongings(session: Session, tenant: Tenant) -> list[str]:
    owned = {
        "users": User.tenant_id == tenant.id,
        "requests": Request.tenant_id == tenant.id,
        "child tenants": Tenant.parent_id == tenant.id,
        "webhooks": Webhook.tenant_id == tenant.id,
        "secrets": Secret.tenant_id == tenant.id,
        "reservations": Reservation.tenant_id == tenant.id,
    }
    found = session.execute(select(*(exists().where(which) for which in owned.values()))).one()
    return [what for what, there in zip(owned, found, strict=True) if there]


def visible_tenant(session: Session, caller: Caller, id: str) -> Tenant:
    tenant = session.scalar(select(Tenant).where(Tenant.id == id, of_caller(caller, Tenant.id)))
    if tenant is None:
        raise NotFound("tenant", id)
    return tenant


def tenant_to_change(session: Session, caller: Caller, id: str) -> Tenant:
    tenant = visible_tenant(session, caller, id)
    check_role(caller, "platform_admin", "tenant_admin")
    if id == caller.tenant_id and not caller.sees_all:
        told = "a tenant_admin may change only tenants below the own tenant"
        raise Forbidden(f"{told}; a platform_admin can change {tenant.name}")
    return tenant


def _parent(session: Session, caller: Caller, id: str | None) -> Tenant:
    if id is None and not caller.sees_all:
        id = caller.tenant_id
    which = Tenant.parent_id.is_(None) if id is None else Tenant.id == id
    query = select(Tenant).where(which, of_caller(caller, Tenant.id))
    parent = session.scalar(query.order_by(Tenant.created_at).limit(1))
    if parent is None:
        raise BadInput.at("/parent_id", f"there is no tenant with id {id}", "unknown-tenant")
    return parent


def _new_parent(session: Session, caller: Caller, tenant: Tenant, id: str) -> str:
    """Return the new parent's id; raises BadInput if the tree would get a cycle."""
    if tenant.parent_id is None:
        raise BadInput.at("/parent_id", "the root tenant has no parent", "cycle")
    parent = _parent(session, caller, id)
    if tenant.id in (above.id for above in tenant_tree.path(session, parent.id)):
        raise BadInput.at(
            "/parent_id", "must not be the tenant itself or one of its descendants", "cycle"
        )
    return parent.id


def tell_islands(session: Session) -> None:
    """Wake the islands: a new weight or quota may let waiting tasks start."""
    for name in session.scalars(select(Island.name)):
        after_commit(session, partial(outbox.nudge_island, name))


def _tenant_out(session: Session, response: Response, tenant: Tenant) -> dict[str, Any]:
    session.refresh(tenant)
    response.headers["ETag"] = etag(tenant.version)
    return _shown(tenant)


def _shown(tenant: Tenant) -> dict[str, Any]:
    shown = {name: getattr(tenant, name, None) for name in TenantOut.model_fields}
    default = budget_values.shown(tenant.user_defaults.get("budget"))
    return {
        **shown,
        "weight": tenant.weight_milli / 1000,
        "user_defaults": {**tenant.user_defaults, "budget": default},
        "budget": budget_values.shown(tenant.budget),
    }


# --- the network --------------------------------------------------------------------------------


def _network(session: Session, caller: Caller, given: list[str] | None) -> list[str] | None:
    """Return a policy in its usual spelling; raises BadInput with all of its faults.

    A tenant admin gives away only what the policies of the own tenant and of those above it allow.
    """
    if given is None:
        return None
    is_bound = not caller.sees_all
    own = tenant_tree.network_of(tenant_tree.path(session, caller.tenant_id)) if is_bound else ()
    faults: list[Fault] = []
    found: dict[str, None] = {}
    for n, text in enumerate(given):
        try:
            wanted = network_policy.destination(text)
        except network_policy.BadDestination as error:
            faults.append(Fault(f"/network/{n}", f"{error}; got {text!r:.100}"))
            continue
        if is_bound and not network_policy.is_allowed(own, wanted):
            may = f"{caller.tenant_name} may reach {network_policy.listed(own)}"
            detail = f"{wanted} is not allowed: {may}; a platform_admin can change that"
            faults.append(Fault(f"/network/{n}", detail, "network"))
        found[str(wanted)] = None
    if faults:
        raise BadInput(f"{faults[0].pointer}: {faults[0].detail}", errors=tuple(faults))
    return list(found)


# --- quotas (rule F4) ---------------------------------------------------------------------------


def _check_quota(tenant: Tenant, changed: str) -> None:
    """Raise BadInput with all faults of the tenant's guarantee and limit.

    Its pointers name the field `changed`.
    """
    if faults := tuple(_above_limit(tenant, changed)):
        raise BadInput(f"{faults[0].pointer}: {faults[0].detail}", errors=faults)


def _above_limit(tenant: Tenant, changed: str) -> Iterator[Fault]:
    def told(devices: int, what: str, most: int) -> str:
        return f"must be at least the guarantee of {devices} {what}; got a limit of {most}"

    for kind, devices in tenant.guarantee.items():
        if devices > (most := tenant.limit.get(kind, devices)):
            detail = told(devices, f"{kind} devices", most)
            yield Fault(f"/{changed}/{escaped(kind)}", detail, "above-limit")
    in_all = sum(tenant.guarantee.values())
    if in_all > (most := tenant.limit.get(tenant_tree.ALL, in_all)):
        pointer = f"/limit/{tenant_tree.ALL}" if changed == "limit" else "/guarantee"
        yield Fault(pointer, told(in_all, "devices of all kinds", most), "above-limit")


def _promised(session: Session, caller: Caller) -> tenant_tree.Devices:
    """Return the guarantees that a tenant admin may divide; a platform admin has no limit."""
    return {} if caller.sees_all else tenant_tree.Promises(session).counts(caller.tenant_id)


def _check_promises(
    session: Session, caller: Caller, tenant: Tenant, before: tenant_tree.Devices, changed: str
) -> None:
    """Raise BadInput if a tenant's children are now promised more than the tenant has.

    For a tenant admin, tenants above the own one are not mentioned, and their promises may not
    grow.
    """
    promises = tenant_tree.Promises(session)
    top = None if caller.sees_all else caller.tenant_id
    broken = promises.broken(tenant.id, up_to=top)
    faults = [_broken(promise, tenant, changed) for promise in broken]
    if not caller.sees_all:
        faults += _more(caller, before, promises.counts(caller.tenant_id), changed)
    if faults:
        raise BadInput(f"{faults[0].pointer}: {faults[0].detail}", errors=tuple(faults))


def _more(
    caller: Caller, before: tenant_tree.Devices, now: tenant_tree.Devices, changed: str
) -> Iterator[Fault]:
    for kind, devices in now.items():
        if devices > (had := before.get(kind, 0)):
            told = f"{caller.tenant_name} has a guarantee of {had} {kind} devices in all"
            detail = f"{told}, and this change would need {devices}; ask a platform_admin"
            yield Fault(_at(changed, kind), detail, "promised")


def _broken(promise: tenant_tree.Promise, tenant: Tenant, changed: str) -> Fault:
    has, kind = f"{promise.tenant} has a guarantee of {promise.own}", f"{promise.kind} devices"
    detail = f"{has} {kind}, and its child tenants of {promise.below} together"
    to_do = (
        "lower the guarantees of its child tenants"
        if promise.tenant == tenant.name
        else "raise the former guarantee, or lower the latter ones"
    )
    return Fault(_at(changed, promise.kind), f"{detail}; {to_do}", "promised")


def _at(changed: str, kind: str) -> str:
    return f"/guarantee/{escaped(kind)}" if changed == "guarantee" else f"/{changed}"


# --- users --------------------------------------------------------------------------------------


@users.post(
    "/users",
    status_code=201,
    response_model=UserOut,
    summary="Create a user",
    responses=declared(403, 409),
)
def create_user(body: UserIn, response: Response, caller: AnyAdmin, session: Db) -> dict[str, Any]:
    """Makes a user.  A tenant admin makes users of the own tenant and of tenants below it.  With
    `service` the user is a program: it has keys, but no person signs in as it.
    """
    tenant_id = body.tenant_id or caller.tenant_id
    seen = of_caller(caller, Tenant.id)
    if session.scalar(select(Tenant.id).where(Tenant.id == tenant_id, seen)) is None:
        raise BadInput.at("/tenant_id", f"there is no tenant with id {tenant_id}", "unknown-tenant")
    weight_milli = round(body.weight * 1000)
    user = User(
        id=new_id("usr"),
        tenant_id=tenant_id,
        name=body.name,
        weight_milli=weight_milli,
        service=body.service,
    )
    _limit_user(user, body)
    _add(session, user, f"the tenant already has a user named {body.name!r}")
    _take_budget(session, user, body)
    response.headers["Location"] = f"/v1/users/{user.id}"
    return _user_out(session, response, user)


@users.get("/users", response_model=Page[UserOut], summary="List users", responses=declared(403))
def list_users(
    paging: Paged,
    caller: AnyAdmin,
    session: Db,
    tenant_id: str | None = None,
    service: bool | None = None,
) -> dict[str, Any]:
    """Lists users.  A platform admin sees all of them, a tenant admin those of the own tenant and
    of tenants below it.  `service` selects only service accounts, or only people.
    """
    query = select(User).where(of_caller(caller, User.tenant_id), User.deleted_at.is_(None))
    if service is not None:
        query = query.where(User.service == service)
    if tenant_id is not None:
        query = query.where(User.tenant_id == tenant_id)
    found = paging.read(session, query, by=User.id)
    return found.page([_user_shown(user) for user in found.rows])


@users.get(
    "/users/{id}", response_model=UserOut, summary="Show a user", responses=declared(403, 404)
)
def get_user(id: str, response: Response, caller: Authed, session: Db) -> dict[str, Any]:
    """Shows your own user, or as an admin any user that you see."""
    user = visible_user(session, caller, id)
    if user.id != caller.user_id:
        check_role(caller, "platform_admin", "tenant_admin")
    return _user_out(session, response, user)


@users.patch(
    "/users/{id}",
    response_model=UserOut,
    summary="Change a user's name, weight or limits",
    responses=declared(403, 404, 409, 412, 428),
)
def change_user(
    id: str,
    body: UserPatch,
    response: Response,
    caller: Authed,
    session: Db,
    if_match: IfMatch = None,
) -> dict[str, Any]:
    """Needs the user's `ETag` as `If-Match`.  A new weight counts from the next decision on, for
    usage from then on; with `for_past_usage` for all usage.
    """
    user = visible_user(session, caller, id)
    check_role(caller, "platform_admin", "tenant_admin")
    _lock(session, user, body)
    check_version(if_match, user.version)
    _take_budget(session, user, body)
    if body.name is not None:
        user.name = body.name
        _flush(session, f"the tenant already has a user named {body.name!r}")
    _reweigh(session, user, body)
    _limit_user(user, body)
    user.version += 1
    session.flush()
    tell_islands(session)
    return _user_out(session, response, user)


@users.delete(
    "/users/{id}",
    status_code=204,
    summary="Delete a user",
    responses=declared(403, 404, 409),
)
def delete_user(id: str, caller: AnyAdmin, session: Db) -> None:
    """Deletes a user with all keys and secrets.  Requests, usage and the audit log stay, and go on
    naming the user; the name can be given to a new one.  A user with work that has not ended, or
    with reservations, stays until these are gone, and so does your own user.

    A person whom an identity provider names cannot come back.
    """
    user = visible_user(session, caller, id)
    if user.id == caller.user_id:
        raise Conflict("nobody can delete their own user; another administrator can")
    _revoke_keys(session, caller, user)
    transactions.lock_again(session, user)
    _check_idle(session, user)
    for secret in session.scalars(select(Secret).where(Secret.user_id == user.id)).all():
        session.delete(secret)
    user.deleted_at = func.now()


def _check_idle(session: Session, user: User) -> None:
    """Raise Conflict if the user has work that has not ended, or reservations."""
    live = (Request.user_id == user.id, Request.state.not_in(ENDED))
    if (request := session.scalar(select(Request).where(*live).limit(1))) is not None:
        raise Conflict(
            f"{user.name} has work that has not ended, such as {request.name}. Cancel it first: "
            f"POST /v1/requests/{request.id}/cancel"
        )
    mine = select(Reservation.name).where(Reservation.user_id == user.id)
    if (reserved := session.scalar(mine.limit(1))) is not None:
        raise Conflict(f"devices are reserved for {user.name}; delete {reserved} first")


@users.get("/me", response_model=MeOut, summary="Show who the caller is")
def get_me(caller: Authed) -> dict[str, Any]:
    """Shows the user, the tenant and the role of the key that you sent."""
    return {
        "user_id": caller.user_id,
        "user": caller.user_name,
        "tenant_id": caller.tenant_id,
        "tenant": caller.tenant_name,
        "role": caller.role,
        "scopes": caller.scopes and list(caller.scopes),
        "key_id": caller.key_id,
    }


def _limit_user(user: User, body: UserIn | UserPatch) -> None:
    """Copy the given limits; null removes one."""
    for name in {*LIMITS} & body.model_fields_set:
        setattr(user, name, getattr(body, name))


def _user_out(session: Session, response: Response, user: User) -> dict[str, Any]:
    session.refresh(user)
    response.headers["ETag"] = etag(user.version)
    return _user_shown(user)


def _user_shown(user: User) -> dict[str, Any]:
    shown = {name: getattr(user, name, None) for name in UserOut.model_fields}
    return {
        **shown,
        "weight": user.weight_milli / 1000,
        "budget": budget_values.shown(user.budget),
    }


# --- keys ---------------------------------------------------------------------------------------


@users.post(
    "/keys",
    status_code=201,
    response_model=KeyMade,
    summary="Create an API key",
    responses=declared(403),
)
def create_key(body: KeyIn, response: Response, caller: AnyAdmin, session: Db) -> dict[str, Any]:
    """Makes a key, which only this answer ever shows.  Only a platform admin makes keys of platform
    admins.  `scopes` narrow what the key's role may do.  A key with scopes makes only keys that may
    do no more than itself.
    """
    if body.role == "platform_admin" and not caller.sees_all:
        raise Forbidden("only a platform_admin may create keys with the role platform_admin")
    try:
        visible_user(session, caller, body.user_id)
    except NotFound:
        told = f"there is no user with id {body.user_id}"
        raise BadInput.at("/user_id", told, "unknown-user") from None
    _check_within(caller, body.scopes)
    expires_at = _future(session, body.expires_at)
    scopes = None if body.scopes is None else sorted(set(body.scopes))
    token = new_key(
        session, body.user_id, body.role, body.name, scopes=scopes, expires_at=expires_at
    )
    return _key_made(session, response, caller, token)


def _check_within(caller: Caller, scopes: Scopes) -> None:
    if not within(scopes, caller.scopes):
        has = ", ".join(caller.scopes or ())
        raise Forbidden(f"a key with the scopes {has} cannot create keys with more scopes")


def _key_made(session: Session, response: Response, caller: Caller, token: str) -> dict[str, Any]:
    id = str(id_of(token))
    response.headers["Location"] = f"/v1/keys/{id}"
    row = session.execute(_keys(caller).where(ApiKey.id == id)).one()
    return {**_key_out(row), "key": token}


def _future(session: Session, at: datetime | None) -> datetime | None:
    if at is not None and at <= transactions.now(session):
        raise BadInput.at("/expires_at", "must be in the future", "range")
    return at


@users.get("/keys", response_model=Page[KeyOut], summary="List API keys", responses=declared(403))
def list_keys(
    paging: Paged, caller: AnyAdmin, session: Db, user_id: str | None = None
) -> dict[str, Any]:
    """Lists keys, including revoked and expired ones, without the keys themselves."""
    query = _keys(caller)
    if user_id is not None:
        query = query.where(ApiKey.user_id == user_id)
    found = paging.read(session, query, by=ApiKey.id)
    return found.page([_key_out(row) for row in found.rows])


@users.post(
    "/keys/{id}/rotate",
    status_code=201,
    response_model=KeyMade,
    summary="Rotate an API key",
    responses=declared(403, 404, 409),
)
def rotate_key(
    id: str,
    response: Response,
    caller: Authed,
    session: Db,
    body: Annotated[RotateKeyIn, Body()] = RotateKeyIn(),
) -> dict[str, Any]:
    """Makes a new key for the same user with the same role, scopes and name; only this answer ever
    shows it.  The old key stays valid for `overlap_s` at most.  All users may rotate their own
    keys, but no key that may do more than the one that they use for it.
    """
    old = _key_to_change(session, caller, id)
    _check_rotatable(session, caller, old)
    now = transactions.now(session)
    lives = None if old.expires_at is None else old.expires_at - old.created_at
    expires_at = _future(session, body.expires_at) or (None if lives is None else now + lives)
    token = new_key(
        session, old.user_id, old.role, old.name, scopes=old.scopes, expires_at=expires_at
    )
    ends = now + timedelta(seconds=body.overlap_s)
    old.expires_at = ends if old.expires_at is None else min(old.expires_at, ends)
    old.replaced_by = id_of(token)
    session.flush()
    return _key_made(session, response, caller, token)


def _check_rotatable(session: Session, caller: Caller, key: ApiKey) -> None:
    """Raise Forbidden or Conflict if the caller may not rotate the key; the key's row must be
    locked.
    """
    if ROLES.index(key.role) < ROLES.index(caller.role):
        raise Forbidden(f"a {caller.role} may not rotate keys with the role {key.role}")
    _check_within(caller, key.scopes)
    if key.secret_sha256 == NO_SECRET:
        raise Conflict("this key stands for browser sessions and cannot be rotated")
    if key.replaced_by is not None:
        raise Conflict(f"the key was already rotated; its successor is {key.replaced_by}")
    if key.revoked_at is not None or (
        key.expires_at and key.expires_at <= transactions.now(session)
    ):
        raise Conflict("the key is expired or revoked; create a new key")


@users.delete(
    "/keys/{id}",
    response_model=KeyOut,
    summary="Revoke an API key",
    responses=declared(403, 404),
)
def revoke_key(id: str, caller: Authed, session: Db) -> dict[str, Any]:
    """Ends the key's validity at once, and signs out browsers that signed in with it.  To revoke it
    twice is no error.  All users may revoke their own keys.
    """
    key = _key_to_change(session, caller, id)
    if key.revoked_at is None:
        key.revoked_at = func.now()
        session.flush()
        session.refresh(key)
    return _key_out(session.execute(_keys(caller).where(ApiKey.id == id)).one())


@users.delete(
    "/users/{id}/keys",
    response_model=KeysRevoked,
    responses={
        200: {"description": "How many keys were revoked; 0 if none was valid."},
        **declared(403, 404),
    },
    summary="Revoke all keys of a user",
)
def revoke_user_keys(id: str, caller: AnyAdmin, session: Db) -> dict[str, int]:
    """Ends the validity of all keys of a user at once, and signs out the browsers: for a stolen
    laptop.  Only the key that makes this call stays valid, so that nobody locks themselves out.

    A person whom an identity provider signs in can sign in again: block the person there, too.
    """
    user = visible_user(session, caller, id)
    return {"revoked": _revoke_keys(session, caller, user)}


def _revoke_keys(session: Session, caller: Caller, user: User) -> int:
    """Revoke the valid keys of a user; return how many.  Raises Forbidden, and revokes none."""
    others = (ApiKey.user_id == user.id, ApiKey.id != caller.key_id)
    query = select(ApiKey).where(*others, *IS_VALID).order_by(ApiKey.id)
    keys = session.scalars(query.with_for_update()).all()
    for key in keys:
        _check_role_of(key, caller)
    for key in keys:
        key.revoked_at = func.now()
    return len(keys)


def _key_to_change(session: Session, caller: Caller, id: str) -> ApiKey:
    """Return the key, with its row locked.  Raises NotFound or Forbidden."""
    row = session.execute(
        _keys(caller).where(ApiKey.id == id).with_for_update(of=ApiKey)
    ).one_or_none()
    if row is None:
        raise NotFound("key", id)
    key: ApiKey = row.ApiKey
    if key.user_id != caller.user_id:
        check_role(caller, "platform_admin", "tenant_admin")
    _check_role_of(key, caller)
    return key


def _check_role_of(key: ApiKey, caller: Caller) -> None:
    if key.role == "platform_admin" and not caller.sees_all:
        raise Forbidden("only a platform_admin may change keys with the role platform_admin")


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


def _add(session: Session, row: Tenant | User, taken: str) -> None:
    session.add(row)
    _flush(session, taken)


def _flush(session: Session, taken: str) -> None:
    try:
        session.flush()
    except IntegrityError as error:
        raise Conflict(taken) from error
