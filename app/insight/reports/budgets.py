"""Shows what is spent of a budget, when it runs out, and how it burns down."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.core.fairness.budget import ALL, Period, Spending, budget_of, time_at
from app.db.models import Tenant, Usage, User
from app.scheduling import budgets
from app.scheduling.budgets import Owner

RATE_OVER = timedelta(days=1)  # span of the usage by which a forecast is made


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetStanding:
    """Shows one kind of a budget in the present period, in micro-device-seconds."""

    kind: str
    spending: Spending
    adjustments: list[dict[str, Any]]
    in_force: str  # "" if nothing is
    seen_at: datetime
    charged_us: int  # in the day before
    runs_out_at: datetime | None  # at the rate of the last day; None: not in this period


def budget_standings(session: Session, owner: Owner) -> tuple[Period, list[BudgetStanding]]:
    """Return how much of a budget is spent; the owner has one."""
    terms = budgets.terms_of(session, owner)
    assert terms is not None
    it, now_us = budget_of(terms), budgets.time_us(session)
    period = it.period_at(now_us)
    rows = budgets.rows_of(session, owner, period)
    since = Period(now_us - RATE_OVER // timedelta(microseconds=1), now_us)
    found = []
    for kind, granted_us in sorted(it.grants_us.items()):
        row = rows.get(kind)
        spending = Spending(granted_us=granted_us) if row is None else budgets.spending_of(row)
        charged_us = budgets.charged_within(session, owner, kind, since)
        found.append(
            BudgetStanding(
                kind=kind,
                spending=spending,
                adjustments=[] if row is None else row.adjustments,
                in_force=owner.exhausted.get(kind, ""),
                seen_at=time_at(now_us),
                charged_us=charged_us,
                runs_out_at=_runs_out(spending, charged_us, now_us, period),
            )
        )
    return period, found


def _runs_out(spending: Spending, charged_us: int, now_us: int, period: Period) -> datetime | None:
    """Return when nothing is left if as much is charged each day as in the last one."""
    if spending.left_us <= 0:
        return time_at(now_us)
    day_us = RATE_OVER // timedelta(microseconds=1)
    at_us = now_us + spending.left_us * day_us // charged_us if charged_us else period.ends_us
    return time_at(at_us) if at_us < period.ends_us else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnDown:
    """Draws one kind of a budget in a picture that is 1 wide and 1 high.

    `points` are (time, left) from the beginning of the period to now; `forecast` is where the line
    goes if as much is charged as in the last day. What is left below 0 is drawn as 0.
    """

    owner: str  # name of the tenant or user
    is_own: bool  # True for the budget of the user alone
    ends_at: datetime
    standing: BudgetStanding
    points: tuple[tuple[float, float], ...]
    forecast: tuple[float, float]


def burn_downs(session: Session, tenant_id: str, user_id: str = "") -> list[BurnDown]:
    """Return the budgets of a tenant and of one of its users, a picture for each kind."""
    owners = [session.get(Tenant, tenant_id), session.get(User, user_id) if user_id else None]
    return [
        drawn
        for owner in owners
        if owner is not None and budgets.terms_of(session, owner) is not None
        for drawn in _drawn(session, owner)
    ]


def _drawn(session: Session, owner: Tenant | User) -> Iterator[BurnDown]:
    period, standings = budget_standings(session, owner)
    for standing in standings:
        points = tuple(_points(session, owner, period, standing))
        yield BurnDown(
            owner=owner.name,
            is_own=isinstance(owner, User),
            ends_at=period.ends_at,
            standing=standing,
            points=points,
            forecast=_forecast(points[-1], period, standing),
        )


def _points(
    session: Session, owner: Tenant | User, period: Period, standing: BudgetStanding
) -> Iterator[tuple[float, float]]:
    """Yield what was left after each day, and now.

    The days are sums of buckets; what is left now is exact.
    """
    begins_at, total_us = period.begins_at, standing.spending.total_us
    day = func.date_bin(timedelta(days=1), Usage.bucket, begins_at)
    query = select(day, func.sum(Usage.charged_us)).where(budgets.whose_usage(owner))
    query = query.where(Usage.bucket >= begins_at).group_by(day).order_by(day)
    if standing.kind != ALL:
        query = query.where(Usage.kind == standing.kind)
    yield 0.0, 1.0 if total_us > 0 else 0.0
    left_us = total_us
    now_s = standing.seen_at.timestamp()
    for at, charged_us in session.execute(query):
        left_us -= int(charged_us)
        ends_s = (at + timedelta(days=1)).timestamp()
        if ends_s < now_s:
            yield _across(period, ends_s), _up(left_us, total_us)
    yield _across(period, now_s), _up(standing.spending.left_us, total_us)


def _forecast(
    now: tuple[float, float], period: Period, standing: BudgetStanding
) -> tuple[float, float]:
    if standing.runs_out_at is not None:
        return max(now[0], _across(period, standing.runs_out_at.timestamp())), 0.0
    days_left = (period.ends_us / 1e6 - standing.seen_at.timestamp()) / 86400
    left_us = standing.spending.left_us - standing.charged_us * days_left
    return 1.0, _up(left_us, standing.spending.total_us)


def _across(period: Period, at_s: float) -> float:
    return (at_s * 1e6 - period.begins_us) / (period.ends_us - period.begins_us)


def _up(left_us: float, total_us: int) -> float:
    return min(1.0, max(0.0, left_us / total_us)) if total_us > 0 else 0.0
