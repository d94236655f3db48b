"""Usage in groups, as rows or as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Select,
    Text,
    and_,
    cast,
    func,
    literal,
    null,
    or_,
    select,
)
from sqlalchemy.orm import Session

from app.db.models import DailyUsage, Tenant, Usage, User
from app.db.models.ledger import EPOCH


def clock(session: Session) -> datetime:
    """Return the time of the database, by which leases end and usage is booked."""
    now: datetime = session.execute(select(func.now())).scalar_one()
    return now


# --- usage --------------------------------------------------------------------------------------

GROUPS = ("bucket", "tenant", "user", "kind")
INTERVALS = {"10s": 10, "1m": 60, "10m": 600, "1h": 3600, "1d": 86400}  # seconds
HOUR_S, DAY_S = 3600, 86400


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """Micro-device-seconds of one group; a field that was not grouped by is None.

    `bucket` is the start of the interval in which they were booked.
    """

    bucket: datetime | None = None
    tenant: str | None = None
    user: str | None = None
    kind: str | None = None
    held_us: int
    charged_us: int


def usage(
    session: Session,
    tenant: str | None,
    *,
    since: datetime,
    until: datetime,
    group_by: Sequence[str],
    interval_s: int,
) -> list[UsageRow]:
    """Return usage booked from `since` up to, not including, `until`, summed by `group_by`."""
    booked = _booked(
        tenant, since, until, may_sum_days="bucket" not in group_by or interval_s % DAY_S == 0
    ).subquery()
    # First group by id: the names are then joined to few rows, however long the period is.
    ids = {
        "bucket": func.date_bin(timedelta(seconds=interval_s), booked.c.at, EPOCH),
        "tenant": booked.c.tenant_id,
        "user": booked.c.user_id,
        "kind": booked.c.kind,
    }
    keys: list[ColumnElement[Any]] = [ids[name].label(name) for name in GROUPS if name in group_by]
    sums = (
        func.sum(booked.c.held_us).label("held_us"),
        func.sum(booked.c.charged_us).label("charged_us"),
    )
    of_ids = select(*keys, *sums).group_by(*keys).subquery()
    named = {"tenant": Tenant.name, "user": User.name}
    shown: dict[str, ColumnElement[Any]] = {
        name: (named[name] if name in named else of_ids.c[name]).label(name)
        for name in GROUPS
        if name in group_by
    }
    chosen = [*shown.values()]
    # Group by id too, since two tenants may have the same name.
    apart = [of_ids.c.tenant] if "tenant" in group_by else []
    columns: list[ColumnElement[Any]] = [shown.get(name, null()) for name in GROUPS]
    columns += [_as_text(func.sum(of_ids.c.held_us)), _as_text(func.sum(of_ids.c.charged_us))]
    query = select(*columns).select_from(of_ids).group_by(*chosen, *apart).order_by(*chosen, *apart)
    if "tenant" in group_by:
        query = query.join(Tenant, Tenant.id == of_ids.c.tenant)
    if "user" in group_by:
        query = query.join(User, User.id == of_ids.c.user)
    return [
        UsageRow(
            bucket=start,
            tenant=owner,
            user=user,
            kind=kind,
            held_us=int(held),
            charged_us=int(charged),
        )
        for start, owner, user, kind, held, charged in session.connection().execute(query)
    ]


def _booked(
    tenant: str | None, since: datetime, until: datetime, *, may_sum_days: bool
) -> Select[*tuple[Any, ...]] | CompoundSelect[Any]:
    """Build a query of what was booked in the period, with the columns `at`, ids and sums.

    With `may_sum_days`, the hours of a whole day come as one row.
    """
    booked, in_days = _rows_of(Usage, tenant), _rows_of(DailyUsage, tenant)
    at, day = Usage.bucket, DailyUsage.day
    first, end = _days_within(since, until)
    if not may_sum_days or first == end:
        return booked.where(at >= since, at < until)
    is_fine = Usage.bucket_s < literal(HOUR_S, literal_execute=True)  # the condition of an index
    rest = or_(
        and_(at >= since, at < first),
        and_(at >= end, at < until),
        and_(at >= first, at < end, is_fine),
    )
    return in_days.where(day >= first, day < end).union_all(booked.where(rest))


def _rows_of(table: type[Usage] | type[DailyUsage], tenant: str | None) -> Select[*tuple[Any, ...]]:
    at = table.day if issubclass(table, DailyUsage) else table.bucket
    columns = (table.tenant_id, table.user_id, table.kind, table.held_us, table.charged_us)
    of_tenant = () if tenant is None else (table.tenant_id == tenant,)
    return select(at.label("at"), *columns).where(*of_tenant)


def _days_within(since: datetime, until: datetime) -> tuple[datetime, datetime]:
    """Return when the whole days (UTC) of the period begin and end; both are equal without any."""
    day = timedelta(seconds=DAY_S)
    end = until - (until - EPOCH) % day
    return end - max(0, (end - since) // day) * day, end


def _as_text(total: ColumnElement[Any]) -> ColumnElement[str]:
    """Return the sum as a text.

    A sum of bigints is numeric, and reading it as a Decimal takes far longer than as a text.
    """
    return cast(func.coalesce(total, 0), Text)


def to_csv(rows: Iterable[UsageRow], group_by: Sequence[str]) -> str:
    """Format as CSV: a line of names, then a line for each row; times in ISO 8601."""
    names = [*(name for name in GROUPS if name in group_by), "held_us", "charged_us"]
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(names)
    for row in rows:
        values = (getattr(row, name) for name in names)
        writer.writerow(v.isoformat() if isinstance(v, datetime) else v for v in values)
    return out.getvalue()
