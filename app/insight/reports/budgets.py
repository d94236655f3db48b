"""Shows a tenant's and a user's budgets as they burn down."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.core.fairness.budget import ALL, Period
from app.db.models import Tenant, Usage, User
from app.scheduling import budgets
from app.scheduling.budgets import BudgetStanding


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnDown:
    """Draws one kind of a budget in a picture that is 1 wide and 1 high.

    `points` are (time, left) from the beginning of the period to now; `forecast` is where the line
    goes if as much is charged as in the last day. Left is below 0 at y > 1 only as 1.
    """

    owner: str  # name of the tenant or user
    is_own: bool  # True for the budget of the user alone
    ends_at: datetime
    standing: BudgetStanding
    points: tuple[tuple[float, float], ...]
    forecast: tuple[float, float]


def burn_downs(session: Session, tenant_id: str, user_id: str) -> list[BurnDown]:
    """Return the budgets of a tenant and of one of its users, a picture for each kind."""
    owners = [session.get(Tenant, tenant_id), session.get(User, user_id)]
    return [
        drawn
        for owner in owners
        if owner is not None and owner.budget is not None
        for drawn in _drawn(session, owner)
    ]


def _drawn(session: Session, owner: Tenant | User) -> Iterator[BurnDown]:
    period, standings = budgets.standings(session, owner)
    for standing in standings:
        points = tuple(_points(session, owner, period, standing))
        yield BurnDown(
            owner=owner.name,
            is_own=isinstance(owner, User),
            ends_at=_time(period.ends_us),
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
    begins_at, total_us = _time(period.begins_us), standing.spending.total_us
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


def _time(at_us: int) -> datetime:
    return datetime.fromtimestamp(at_us / 1e6, UTC)
