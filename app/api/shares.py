"""The numbers of sharing: who may hold how much, who waits, who used what, what was decided.

All of them come from `app.reports`, and so do those of the pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

from fastapi import Query, Request, Response
from pydantic import AfterValidator

from app import reports
from app.api import cursors
from app.api.auth import Authed, Caller
from app.api.cursors import Cursor, Limit
from app.api.edge import v1_router
from app.api.schemas import Page
from app.db import Db
from app.errors import BadInput

MOST_BUCKETS = 5000  # intervals in one answer

router = v1_router("shares")


def _seen_by(caller: Caller) -> str | None:
    return None if caller.sees_all else caller.tenant_id


# --- shares -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FairShare:
    """`tenants` are those that the caller may see by name; `others` are all the rest as one."""

    at: datetime
    verdict: str
    tenants: list[reports.TenantShare]
    others: reports.TenantShare | None


@router.get("/fair-share", summary="Who should hold how much now")
def get_fair_share(session: Db, caller: Authed) -> FairShare:
    """Weight, share, fair share now (given who has work), what is held and waits, and usage.

    A platform admin sees every tenant; others see their own, and the rest summed up.
    """
    now = reports.clock(session)
    shares = reports.fair_share(session, now)
    if caller.sees_all:
        verdict = reports.verdict_of_all(shares)
        return FairShare(at=now, verdict=verdict, tenants=shares, others=None)
    mine = [share for share in shares if share.id == caller.tenant_id]
    return FairShare(
        at=now,
        verdict=reports.verdict(mine[0], shares) if mine else reports.verdict_of_all(shares),
        tenants=mine,
        others=reports.others(shares, caller.tenant_id),
    )


# --- the queue ----------------------------------------------------------------------------------


@router.get("/queue", response_model=Page[reports.Queued], summary="What waits, and why")
def get_queue(
    request: Request,
    response: Response,
    session: Db,
    caller: Authed,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> dict[str, Any]:
    """Waiting tasks in the island's order, then blocked ones, oldest first.

    `place` counts all tenants' tasks from 1.  `starts_at` is null: there is no estimate yet.
    """
    after = _rank_in(cursor) if cursor is not None else None
    found = reports.queue(session, _seen_by(caller), after=after, limit=limit + 1)
    sealed = [cursors.seal(*reports.rank(item)) for item in found]
    return cursors.page(request, response, found, limit, sealed)


def _rank_in(cursor: str) -> tuple[int, str]:
    place, id = cursors.opened(cursor, 2)
    return cursors.opened_numbers(cursors.seal(place))[0], id


# --- usage --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReport:
    since: datetime
    until: datetime
    interval: str
    group_by: list[str]
    items: list[reports.UsageRow]


def _groups(text: str) -> str:
    unknown = [name for name in _split(text) if name not in reports.GROUPS]
    if unknown:
        raise ValueError(f"cannot group by {unknown[0]!r}; groups are {', '.join(reports.GROUPS)}")
    return text


def _split(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _aware(at: datetime | None) -> datetime | None:
    """A time without a zone is UTC."""
    return at if at is None or at.tzinfo else at.replace(tzinfo=UTC)


Interval = Literal["10s", "1m", "10m", "1h", "1d"]
Groups = Annotated[
    str,
    Query(description="Any of tenant, user, kind, bucket; with commas.", examples=["tenant,user"]),
    AfterValidator(_groups),
]
Time = Annotated[datetime | None, AfterValidator(_aware)]


@router.get(
    "/usage",
    summary="What was used, by tenant, user, kind and time",
    response_model=UsageReport,
    responses={200: {"content": {"text/csv": {"example": "tenant,held_us,charged_us\r\n"}}}},
)
def get_usage(
    request: Request,
    session: Db,
    caller: Authed,
    since: Time = None,
    until: Time = None,
    group_by: Groups = "tenant,user,kind",
    interval: Interval = "1h",
    format: Literal["json", "csv"] | None = None,
) -> Any:
    """Micro-device-seconds held, and charged (held times the device's cost).

    From `since` (default: a day before `until`) up to, not including, `until` (default: now), by
    the time of booking.  With `bucket` among the groups, summed per `interval`.  CSV with
    `format=csv` or `Accept: text/csv`.
    """
    until = until or reports.clock(session)
    since = since or until - timedelta(days=1)
    groups = _split(group_by)
    _check_span(since, until, reports.INTERVALS[interval] if "bucket" in groups else None)
    rows = reports.usage(
        session,
        _seen_by(caller),
        since=since,
        until=until,
        group_by=groups,
        interval_s=reports.INTERVALS[interval],
    )
    if format == "csv" or (format is None and _wants_csv(request)):
        return _csv(reports.to_csv(rows, groups))
    return UsageReport(since=since, until=until, interval=interval, group_by=groups, items=rows)


def _check_span(since: datetime, until: datetime, interval_s: int | None) -> None:
    if since >= until:
        raise BadInput.at("?since", "must be before `until`", "order")
    if interval_s and (until - since).total_seconds() / interval_s > MOST_BUCKETS:
        told = f"more than {MOST_BUCKETS} intervals lie between; ask for longer ones"
        raise BadInput.at("?interval", told, "too-many")


def _wants_csv(request: Request) -> bool:
    return request.headers.get("accept", "").startswith("text/csv")


def _csv(text: str) -> Response:
    return Response(
        text,
        media_type="text/csv; charset=utf-8",
        headers={"Content-Disposition": 'attachment; filename="usage.csv"', "Vary": "Accept"},
    )


# --- decisions ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """One move that the island decided on; `rule` is one of F1-F10, `because` is for the owner."""

    id: int
    at: datetime
    move: str
    rule: str | None
    because: str
    tenant: str
    request_id: str | None
    task_id: str | None
    task: str | None
    device: str | None


@router.get("/decisions", response_model=Page[Decided], summary="Who got what, and why")
def list_decisions(
    request: Request,
    response: Response,
    session: Db,
    caller: Authed,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> dict[str, Any]:
    """Launches, pauses and holds, the newest first, with the rule and the reason."""
    before = cursors.opened_numbers(cursor)[0] if cursor is not None else None
    found = reports.events(
        session, _seen_by(caller), types=reports.DECISIONS, before=before, limit=limit + 1
    )
    sealed = [cursors.seal(event.id) for event in found]
    return cursors.page(request, response, [_decided(event) for event in found], limit, sealed)


def _decided(event: reports.Happened) -> Decided:
    return Decided(
        id=event.id,
        at=event.at,
        move=event.type.removeprefix("task."),
        rule=event.data.get("rule"),
        because=event.message,
        tenant=event.tenant,
        request_id=event.request_id,
        task_id=event.task_id,
        task=event.task,
        device=event.data.get("device"),
    )
