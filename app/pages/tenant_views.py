"""Shows tenants: what each is owed, has and may still take, and what its members used.

Administrators create and change tenants here, and see the effect of a change before they save it.
The forms call the operations of the API, so pages and API do the same, and reject the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, time, timedelta
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Depends, Request, Response
from sqlalchemy import exists, select
from sqlalchemy.orm import Session

from app.api.access.caller import Caller
from app.api.access.gate import GatedRoute
from app.api.access.visibility import of_caller
from app.api.routes import budgets as of_budgets
from app.api.routes import reservations as of_reservations
from app.api.routes import tenant_work as of_work
from app.api.routes import tenants as of_tenants
from app.api.schemas.people import TenantIn, TenantPatch
from app.api.versions import etag
from app.core.model.descriptor import TIERS
from app.core.units import counted
from app.db import transactions
from app.db.models import Reservation, ReservationWindow, Tenant
from app.db.transactions import Db
from app.insight import reports
from app.insight.reports import TenantShare
from app.pages import charts, forms, limit_forms, views
from app.pages.admin_views import Admin, SendingAdmin, tenant_names
from app.pages.forms import Field

USE_SHOWN_DAYS = 30
USE_SHOWN = 50
DAY_S = 86_400
BY_KIND = ("guarantee", "limit")
#: The bounds of a tenant that may be none, in words.
BOUNDS = {
    "max_running": "Tasks that run, at most",
    "max_queued": "Tasks in the queue, at most",
    "idle_pause_s": "Pause what computes nothing, after seconds",
    "session_end_s": "End sessions without input, after seconds",
}

router = APIRouter(include_in_schema=False, route_class=GatedRoute)


# --- all of them --------------------------------------------------------------------------------


@router.get("/ui/tenants")
def list_tenants(request: Request, session: Db, caller: Admin) -> Response:
    """Show quotas and use of the tenants that the caller sees, and the use of each member."""
    now = reports.clock(session)
    shares = reports.fair_share(session, now)
    rows = {
        row.id: row for row in session.scalars(select(Tenant).where(of_caller(caller, Tenant.id)))
    }
    tenant = None if caller.sees_all else caller.tenant_id
    since = now - timedelta(days=USE_SHOWN_DAYS)
    use = reports.usage(
        session, tenant, since=since, until=now, group_by=("tenant", "user"), interval_s=DAY_S
    )
    return views.page(
        request,
        "tenants.html",
        caller,
        now=now,
        section="tenants",
        shares=[share for share in shares if share.id in rows],
        parts=charts.parts_of_level(shares),
        rows=rows,
        use=sorted(use, key=lambda row: -row.held_us)[:USE_SHOWN],
        use_us=sum(row.held_us for row in use),
        held=_held_by_member(session, tenant),
        days=USE_SHOWN_DAYS,
        parents=tenant_names(session, caller),
    )


def _held_by_member(session: Session, tenant: str | None) -> Counter[tuple[str, str]]:
    """Return the devices that each member's tasks hold now, by the names of tenant and member."""
    held = Counter[tuple[str, str]]()
    for task in reports.running(session, tenant):
        held[task.tenant, task.user] += len(task.devices)
    return held


@router.post("/ui/tenants")
def add_tenant(
    request: Request,
    session: Db,
    caller: SendingAdmin,
    name: Field = "",
    parent_id: Field = "",
    weight: Field = "1",
) -> Response:
    views.acts_as(request, session, caller, of_tenants.create_tenant)
    body = forms.filled(
        TenantIn, name=name, parent_id=parent_id or None, weight=forms.number(weight)
    )
    made = of_tenants.create_tenant(body, Response(), caller, session)
    told = forms.Told(words=f"{made['name']} is added. Add its members next.")
    return views.answered(request, told, at=f"/ui/tenants/{made['id']}")


# --- one of them --------------------------------------------------------------------------------


class KindEffect(NamedTuple):
    """Tells what a change does to a tenant's devices of one kind.

    `by_weight` is its part by weight, `fair` its entitlement now; both before and after.
    """

    tenant: str
    kind: str
    by_weight: tuple[float, float]
    fair: tuple[float, float]


@router.get("/ui/tenants/{id}")
def show_tenant(request: Request, session: Db, caller: Admin, id: str) -> Response:
    return _shown(request, session, caller, id)


def _shown(
    request: Request,
    session: Session,
    caller: Caller,
    id: str,
    typed: Mapping[str, str] = MappingProxyType({}),
    effect: Sequence[KindEffect] | None = None,
) -> Response:
    """Show a tenant; `typed` are values of its form that are not saved, `effect` what they would
    do.
    """
    tenant = of_tenants.get_tenant(id, Response(), caller, session)
    now = reports.clock(session)
    shares = reports.fair_share(session, now)
    names = tenant_names(session, caller)
    return views.page(
        request,
        "tenant.html",
        caller,
        now=now,
        section="tenants",
        tenant=tenant,
        share=next((share for share in shares if share.id == id), None),
        below=[share for share in shares if share.parent_id == id],
        parts=charts.parts_of_level(shares),
        names=names,
        chart=_use_by_day(session, id, now),
        days=USE_SHOWN_DAYS,
        budgets=reports.burn_downs(session, id),
        reservations=_reservations(session, id, now),
        may_change=caller.sees_all or id != caller.tenant_id,
        tiers=TIERS,
        bounds=BOUNDS,
        own_budget=limit_forms.shown_budget(tenant["budget"]),
        each_limits=limit_forms.shown_limits(tenant["user_defaults"]),
        each_budget=limit_forms.shown_budget(tenant["user_defaults"]["budget"]),
        user_bounds=limit_forms.BOUNDS,
        given={**_as_typed(tenant), "past": "", **typed},
        effect=effect,
    )


def _use_by_day(session: Session, id: str, now: datetime) -> charts.UsageChart:
    """Return the devices that each member had on an average of each day; the tenants below have
    charts of their own.
    """
    since = datetime.combine(now.date() - timedelta(days=USE_SHOWN_DAYS), time(), UTC)
    rows = reports.usage(
        session, id, since=since, until=now, group_by=("bucket", "user"), interval_s=DAY_S
    )
    devices = len(reports.devices(session, None, now))
    return charts.usage_chart(
        rows, by="user", since=since, until=now, interval_s=DAY_S, devices=devices
    )


def _reservations(session: Session, id: str, now: datetime) -> list[dict[str, Any]]:
    """Return the reservations of a tenant that have not ended, the next first."""
    mine, ahead = Reservation.tenant_id == id, ReservationWindow.ends_at > now
    is_ahead = exists().where(ReservationWindow.reservation_id == Reservation.id, ahead)
    rows = session.scalars(select(Reservation).where(mine, is_ahead)).all()
    found = of_reservations.shown(session, rows)
    return sorted(found, key=lambda it: (it["windows"][0]["begins_at"], it["name"]))


# --- change it ----------------------------------------------------------------------------------


def _typed(
    name: Field = "",
    parent_id: Field = "",
    weight: Field = "",
    guarantee: Field = "",
    limit: Field = "",
    tier: Field = "",
    max_running: Field = "",
    max_queued: Field = "",
    idle_pause_s: Field = "",
    session_end_s: Field = "",
) -> dict[str, str]:
    """Return the fields of the form."""
    return {field: text.strip() for field, text in locals().items()}


def _as_typed(tenant: Mapping[str, Any]) -> dict[str, str]:
    """Return the tenant's values as its form shows them."""
    plain = {name: str(tenant[name] or "") for name in ("name", "parent_id", "tier")}
    by_kind = {name: forms.pairs_text(tenant[name]) for name in BY_KIND}
    bounds = {name: "" if tenant[name] is None else str(tenant[name]) for name in BOUNDS}
    return {**plain, "weight": reports.number(tenant["weight"]), **by_kind, **bounds}


@router.post("/ui/tenants/{id}")
def change_tenant(
    request: Request,
    session: Db,
    caller: SendingAdmin,
    id: str,
    typed: Annotated[dict[str, str], Depends(_typed)],
    limits: limit_forms.Typed,
    do: Field = "",
    version: Field = "",
    past: Field = "",
) -> Response:
    """Change a tenant, or show the effect of a change, or act on all of its work."""
    act = forms.chosen(do, {**dict.fromkeys(_ACTS), **_ON_ALL_WORK})
    tenant = of_tenants.get_tenant(id, Response(), caller, session)
    if act is not None:
        views.acts_as(request, session, caller, act.operation)
        found = act.operation(id, caller, session)
        more = " There are more: press again." if found["more"] else ""
        told = f"{counted(found['requests'], 'request')} {act.told}.{more}"
        return _answered(request, session, caller, id, told)
    if do == "delete":
        views.acts_as(request, session, caller, of_tenants.delete_tenant)
        of_tenants.delete_tenant(id, caller, session)
        deleted = forms.Told(words=f"{tenant['name']} is deleted.")
        return views.answered(request, deleted, at="/ui/tenants")
    if do == "adjust":
        views.acts_as(request, session, caller, of_budgets.adjust_tenant_budget)
        of_budgets.adjust_tenant_budget(id, limit_forms.adjustment(limits), caller, session)
        told = f"The budget of {tenant['name']} is changed for this period."
        return _answered(request, session, caller, id, told)
    forms.check_version(tenant, version)
    body = _patch(tenant, typed, past=bool(past)) if do in _OWN else _limits(tenant, limits, do)
    tag = etag(tenant["version"])
    if do == "preview":
        effect = _effect(caller, id, body, tag)
        return _shown(request, session, caller, id, {**typed, "past": past}, effect)
    views.acts_as(request, session, caller, of_tenants.change_tenant)
    changed = of_tenants.change_tenant(id, body, Response(), caller, session, tag)
    return _answered(request, session, caller, id, f"{changed['name']} is changed.")


#: What the buttons of a tenant's page do: for the tenant itself, or for each of its users.
_OWN = ("save", "preview")
_EACH = {f"each-{do}": do for do in limit_forms.ACTS}
_ACTS = (*_OWN, "delete", "adjust", "budget", "no-budget", *_EACH)


def _limits(tenant: Mapping[str, Any], typed: Mapping[str, str], do: str) -> TenantPatch:
    """Return the budget that a form gives the tenant, or the limits or budget of each user."""
    if do not in _EACH:
        return forms.filled(TenantPatch, **limit_forms.values(do, typed))
    each = {**tenant["user_defaults"], **limit_forms.values(_EACH[do], typed)}
    return forms.filled(TenantPatch, user_defaults=each)


def _answered(request: Request, session: Session, caller: Caller, id: str, told: str) -> Response:
    show = partial(_shown, request, session, caller, id)
    return views.answered(request, forms.Told(words=told), show)


class _OnAllWork(NamedTuple):
    """Names an operation on all work of a tenant, and what is told of the requests it took."""

    operation: Callable[..., dict[str, Any]]
    told: str


_ON_ALL_WORK = {
    "hold": _OnAllWork(of_work.hold_tenant_work, "paused at the next safe point"),
    "release": _OnAllWork(of_work.release_tenant_work, "resumed"),
    "cancel": _OnAllWork(of_work.cancel_tenant_work, "cancelled"),
}


def _patch(tenant: Mapping[str, Any], typed: Mapping[str, str], *, past: bool) -> TenantPatch:
    """Return the fields that differ from the tenant's; raises RequestValidationError."""
    before = _as_typed(tenant)
    differ = {name: text for name, text in typed.items() if text != before[name]}
    values = {name: _value(name, text) for name, text in differ.items()}
    return forms.filled(TenantPatch, **values, for_past_usage=past)


def _value(name: str, text: str) -> Any:
    if name in BY_KIND:
        return forms.numbers_by_kind(name, text)
    if name in BOUNDS and not text:
        return None
    return forms.number(text) if name in (*BOUNDS, "weight") else text


def _effect(caller: Caller, id: str, body: TenantPatch, tag: str) -> list[KindEffect]:
    """Return what a change would do to the tenants that the caller sees; nothing is saved.

    The very operation that saves is called, in a transaction that is not committed.
    """
    with transactions.trial() as its:
        now = reports.clock(its)
        before = _by_kind(reports.fair_share(its, now))
        of_tenants.change_tenant(id, body, Response(), caller, its, tag)
        its.flush()
        after = _by_kind(reports.fair_share(its, now))
        seen = tenant_names(its, caller)
    pairs = [(before[key], after[key]) for key in after if key in before and key[0] in seen]
    return [
        KindEffect(
            tenant=seen[now_has.id],
            kind=kind.kind,
            by_weight=(was_kind.by_weight, kind.by_weight),
            fair=(was_kind.fair, kind.fair),
        )
        for (_, was_kind), (now_has, kind) in pairs
        if (was_kind.by_weight, was_kind.fair) != (kind.by_weight, kind.fair)
    ]


def _by_kind(
    shares: Sequence[TenantShare],
) -> dict[tuple[str, str], tuple[TenantShare, reports.KindShare]]:
    return {(share.id, kind.kind): (share, kind) for share in shares for kind in share.kinds}
