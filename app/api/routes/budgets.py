"""Budgets of tenants and users: what is spent and left, and adjustments for one period.

The budget itself is a field of the tenant or user (`app.api.routes.tenants`).
"""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from app.api import budget_values
from app.api.access.auth import Authed, check_role
from app.api.access.caller import Caller
from app.api.access.visibility import visible_user
from app.api.budget_values import hours
from app.api.middleware import v1_router
from app.api.problems import declared
from app.api.routes.tenants import tell_islands, tenant_to_change, visible_tenant
from app.api.schemas.budgets import AdjustmentIn, BudgetOut
from app.core.fairness.budget import HOUR_US
from app.db.models import Tenant, User
from app.db.transactions import Db
from app.errors import BadInput, Conflict
from app.insight import reports
from app.scheduling import budgets

router = v1_router("tenants")


@router.get(
    "/tenants/{id}/budget",
    response_model=BudgetOut,
    summary="Show what is spent of a tenant's budget",
    responses=declared(404),
)
def get_tenant_budget(id: str, caller: Authed, session: Db) -> dict[str, Any]:
    """Shows what the budget grants in this period, what is spent and left, and when nothing will be
    left at the rate of the last day.  Every user of the tenant may see it.
    """
    return _shown(session, visible_tenant(session, caller, id))


@router.post(
    "/tenants/{id}/budget/adjustments",
    status_code=201,
    response_model=BudgetOut,
    summary="Add to a tenant's budget for this period",
    responses=declared(403, 404, 409),
)
def adjust_tenant_budget(
    id: str, body: AdjustmentIn, caller: Authed, session: Db
) -> dict[str, Any]:
    """Adds device-hours to the present period, or takes some away; the audit log says who and why.
    Tasks that the budget has paused go on at once if it has some left.
    """
    return _adjusted(session, caller, tenant_to_change(session, caller, id), body)


@router.get(
    "/users/{id}/budget",
    response_model=BudgetOut,
    summary="Show what is spent of a user's budget",
    responses=declared(403, 404),
)
def get_user_budget(id: str, caller: Authed, session: Db) -> dict[str, Any]:
    """Shows the budget of your own user, or as an admin of any user that you see."""
    user = visible_user(session, caller, id)
    if user.id != caller.user_id:
        check_role(caller, "platform_admin", "tenant_admin")
    return _shown(session, user)


@router.post(
    "/users/{id}/budget/adjustments",
    status_code=201,
    response_model=BudgetOut,
    summary="Add to a user's budget for this period",
    responses=declared(403, 404, 409),
)
def adjust_user_budget(id: str, body: AdjustmentIn, caller: Authed, session: Db) -> dict[str, Any]:
    """Adds device-hours to the present period, or takes some away, as for a tenant."""
    user = visible_user(session, caller, id)
    check_role(caller, "platform_admin", "tenant_admin")
    return _adjusted(session, caller, user, body)


def _adjusted(
    session: Session, caller: Caller, owner: Tenant | User, body: AdjustmentIn
) -> dict[str, Any]:
    terms = budgets.terms_of(session, owner)
    if terms is None:
        raise Conflict(f"{owner.name} has no budget to add to; set the field `budget` of it first")
    us, by = round(body.device_hours * HOUR_US), caller.user_name
    if not budgets.adjust(session, owner, body.kind, us=us, why=body.why, by=by):
        kinds = ", ".join(sorted(terms["grants_us"]))
        raise BadInput.at("/kind", f"the budget has no {body.kind!r}; it has {kinds}", "kind")
    tell_islands(session)
    return _shown(session, owner)


def _shown(session: Session, owner: Tenant | User) -> dict[str, Any]:
    terms = budgets.terms_of(session, owner)
    if terms is None:
        nothing = dict.fromkeys(("budget", "begins_at", "ends_at"))
        return {**nothing, "is_default": False, "kinds": []}
    period, standings = reports.budget_standings(session, owner)
    return {
        "budget": budget_values.shown(terms),
        "is_default": owner.budget is None,
        "begins_at": period.begins_at,
        "ends_at": period.ends_at,
        "kinds": [_kind(each) for each in standings],
    }


def _kind(it: reports.BudgetStanding) -> dict[str, Any]:
    return {
        "kind": it.kind,
        "granted_hours": hours(it.spending.granted_us),
        "carried_hours": hours(it.spending.carried_us),
        "adjusted_hours": hours(it.spending.adjusted_us),
        "spent_hours": hours(it.spending.spent_us),
        "left_hours": hours(it.spending.left_us),
        "in_force": it.in_force or None,
        "last_day_hours": hours(it.charged_us),
        "runs_out_at": it.runs_out_at,
        "adjustments": [
            {"device_hours": hours(one["us"]), **{name: one[name] for name in ("why", "by", "at")}}
            for one in it.adjustments
        ],
    }
