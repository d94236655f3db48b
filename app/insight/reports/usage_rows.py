"""Usage in groups, as rows or as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Text, cast, func, null, select
from sqlalchemy.orm import Session

from app.db.models import Tenant, Usage, User


def clock(session: Session) -> datetime:
    """Return the time of the database, by which leases end and usage is booked."""
    now: datetime = session.execute(select(func.now())).scalar_one()
    return now


# --- usage --------------------------------------------------------------------------------------

GROUPS = ("bucket", "tenant", "user", "kind")
INTERVALS = {"10s": 10, "1m": 60, "10m": 600, "1h": 3600, "1d": 86400}  # seconds


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
    bucket = func.date_bin(
        timedelta(seconds=interval_s), Usage.bucket, datetime(1970, 1, 1, tzinfo=UTC)
    )
    # First group by id: the names are then joined to few rows, however long the period is.
    ids = {"bucket": bucket, "tenant": Usage.tenant_id, "user": Usage.user_id, "kind": Usage.kind}
    keys: list[ColumnElement[Any]] = [ids[name].label(name) for name in GROUPS if name in group_by]
    sums = (
        func.sum(Usage.held_us).label("held_us"),
        func.sum(Usage.charged_us).label("charged_us"),
    )
    found = select(*keys, *sums).where(Usage.bucket >= since, Usage.bucket < until)
    found = found.group_by(*keys)
    if tenant is not None:
        found = found.where(Usage.tenant_id == tenant)
    of_ids = found.subquery()
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
        for start, owner, user, kind, held, charged in session.execute(query)
    ]


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
