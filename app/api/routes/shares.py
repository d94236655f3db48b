"""The figures of sharing: shares, the queue, usage, and decisions.

All of them come from `app.insight.reports`, as do those of the pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal

from fastapi import Query, Request, Response
from pydantic import AfterValidator

from app.api import cursors
from app.api.access.auth import Authed
from app.api.access.caller import Caller
from app.api.cursors import Paged, PagedBy100
from app.api.middleware import v1_router
from app.api.problems import declared
from app.api.schemas.base import Page, example_of
from app.api.schemas.people import TenantOut
from app.api.schemas.tasks import Explained, TaskOut
from app.api.times import Time
from app.db.transactions import Db
from app.errors import BadInput, NotFound
from app.insight import reports

MOST_BUCKETS = 5000  # most intervals in one answer

router = v1_router("shares")

_TASK = example_of(TaskOut)
_AT = _TASK["submitted_at"]


def _shown(example: Any) -> dict[int | str, dict[str, Any]]:
    """Return the example of an answer, as FastAPI's `responses=`."""
    return {200: {"content": {"application/json": {"example": example}}}}


def _seen_by(caller: Caller) -> str | None:
    return None if caller.sees_all else caller.tenant_id


def _below(caller: Caller) -> bool:
    """True if the caller also sees the tenants below its own: a tenant admin."""
    return caller.role == "tenant_admin"


# --- shares -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FairShare:
    """The shares of `tenants`, which the caller may see by name; `others` sums up all the rest."""

    at: datetime
    verdict: str
    tenants: list[reports.TenantShare]
    others: reports.TenantShare | None


_SHARE = {
    "tenant": "vision",
    "depth": 0,
    "weight": 2.0,
    "share": 0.5,
    "fair": 1.0,
    "held": 1,
    "waiting": 3,
    "guarantee": 1,
    "borrowed": 0,
    "usage_us": 90_000_000,
    "total_us": 120_000_000,
    "score": 45_000_000.0,
    "kinds": [
        {
            "kind": "cpu",
            "devices": 2,
            "by_weight": 1.0,
            "fair": 1.0,
            "held": 1,
            "waiting": 3,
            "guarantee": 1,
            "limit": 4,
            "borrowed": 0,
            "by_memory": 0,
            "idle_us": 0,
        }
    ],
}
_FAIR_SHARE = {
    "at": _AT,
    "verdict": "1 of 2 devices in use by you. 3 tasks wait.",
    "tenants": [{**_SHARE, "id": example_of(TenantOut)["id"], "parent_id": None}],
    "others": {**_SHARE, "id": "", "parent_id": None, "tenant": "others", "kinds": []},
}


@router.get(
    "/fair-share", summary="Show entitlements and use of devices", responses=_shown(_FAIR_SHARE)
)
def get_fair_share(session: Db, caller: Authed) -> FairShare:
    """Shows guarantee, limit, share by weight, fair share now (given the tenants with work), held,
    borrowed and waiting devices, and usage, each for a tenant and all tenants below it.

    A platform admin sees every tenant, a tenant admin its own and those below it, other users their
    own.  The rest is summed up.
    """
    now = reports.clock(session)
    shares = reports.fair_share(session, now)
    if caller.sees_all:
        verdict = reports.verdict_of_all(shares)
        return FairShare(at=now, verdict=verdict, tenants=shares, others=None)
    mine = reports.within(shares, caller.tenant_id)
    return FairShare(
        at=now,
        verdict=reports.verdict(mine[0], shares) if mine else reports.verdict_of_all(shares),
        tenants=mine if _below(caller) else mine[:1],
        others=reports.others(shares, caller.tenant_id),
    )


# --- the queue ----------------------------------------------------------------------------------


_QUEUED = {
    "id": _TASK["id"],
    "request_id": _TASK["request_id"],
    "name": "train",
    "request": "sweep-7",
    "tenant": "vision",
    "user": "ada",
    "state": "waiting",
    "phase": "queued",
    "place": 2,
    "kind": "cpu",
    "devices": 1,
    "memory_bytes": 0,
    "priority": 0,
    "since": _AT,
    "step": 0,
    **{name: example_of(Explained)[name] for name in ("reasons", "nearest", "starts_at")},
    "estimate": example_of(Explained)["estimate"],
    "no_estimate": None,
}


@router.get(
    "/queue",
    response_model=Page[reports.Queued],
    summary="List queued tasks, and why each waits",
    responses=_shown({"items": [_QUEUED], "next_cursor": None}),
)
def get_queue(
    paging: PagedBy100,
    session: Db,
    caller: Authed,
    state: Literal["waiting", "blocked"] | None = None,
    kind: Annotated[str | None, Query(description="of device", max_length=63)] = None,
) -> dict[str, Any]:
    """Lists waiting and blocked tasks, oldest first, with their reasons, place and expected start.

    `place` counts all tenants' tasks that wait for that kind of device on its island, from 1.
    """
    found = reports.queue(
        session,
        _seen_by(caller),
        below=_below(caller),
        state=state,
        kind=kind,
        after=_id_in(paging.cursor),
        limit=paging.most,
    )
    return paging.cut(found, [cursors.seal(item.id) for item in found]).page()


def _id_in(cursor: str | None) -> str | None:
    if cursor is None:
        return None
    [id] = cursors.opened(cursor)
    return id


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
        raise ValueError(f"must be one or more of {', '.join(reports.GROUPS)}; got {unknown[0]!r}")
    return text


def _split(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


Interval = Literal["10s", "1m", "10m", "1h", "1d"]
Groups = Annotated[
    str,
    Query(
        description="Any of tenant, user, kind, bucket; separated by commas.",
        examples=["tenant,user"],
    ),
    AfterValidator(_groups),
]


_USAGE = {
    "since": "2026-11-20T12:00:00Z",
    "until": _AT,
    "interval": "1h",
    "group_by": ["tenant"],
    "items": [
        {
            "bucket": None,
            "tenant": "vision",
            "user": None,
            "kind": None,
            "held_us": 90_000_000,
            "charged_us": 90_000_000,
        }
    ],
}


@router.get(
    "/usage",
    summary="Report usage by tenant, user, kind and time",
    response_model=UsageReport,
    responses={
        200: {
            "content": {
                "application/json": {"example": _USAGE},
                "text/csv": {
                    "schema": {"type": "string"},
                    "example": "tenant,held_us,charged_us\r\nvision,90000000,90000000\r\n",
                },
            }
        }
    },
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
    """Shows micro-device-seconds held, and charged (held times the device's cost).

    The period is from `since` (default: a day before `until`) up to, not including, `until`
    (default: now), by the time of booking.  With `bucket` among the groups, usage is summed per
    `interval`.  CSV comes with `format=csv` or `Accept: text/csv`.
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
        told = (
            f"must give at most {MOST_BUCKETS} intervals between `since` and `until`; choose a "
            "longer interval"
        )
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


_DECIDED = {
    "id": 20_471_147,
    "at": _AT,
    "island": "local",
    "cycle": 815,
    "move": "launch",
    "rule": "F3",
    "because": "vision has used least for its weight of all that wait.",
    "tenant": "vision",
    "request_id": _TASK["request_id"],
    "request": "sweep-7",
    "task_id": _TASK["id"],
    "task": "train",
    "devices": ["local.0"],
    "against": {"tenant": "another tenant", "task_id": None, "task": None},
}
_ROUND = {
    "decision": _DECIDED,
    "now_s": 1_795_262_400.0,
    "decisions": [_DECIDED],
    "snapshot": None,
}


@router.get(
    "/decisions",
    response_model=Page[reports.Decided],
    summary="List scheduling decisions, and the rule of each",
    responses=_shown({"items": [_DECIDED], "next_cursor": None}),
)
def list_decisions(paging: Paged, session: Db, caller: Authed) -> dict[str, Any]:
    """Lists every decision of an island, newest first: the move, its task, the rule, the reason,
    and the competing task, whose tenant is "another tenant" unless the caller may see it.
    """
    before = cursors.opened_numbers(paging.cursor)[0] if paging.cursor is not None else None
    found = reports.decisions(
        session, _seen_by(caller), below=_below(caller), before=before, limit=paging.most
    )
    return paging.cut(found, [cursors.seal(decided.id) for decided in found]).page()


@router.get(
    "/decisions/{id}",
    response_model=reports.Round,
    summary="Show one decision and its scheduling round",
    responses={**_shown(_ROUND), **declared(404)},
)
def get_decision(id: int, session: Db, caller: Authed) -> reports.Round:
    """Shows a decision with the other decisions of its cycle.  A platform admin also gets the
    `snapshot` that the island used: with it, the same rules give the same decisions at `now_s`.
    """
    found = None
    if abs(id) < 2**63:  # others are no numbers of rows
        found = reports.decision(session, _seen_by(caller), id, below=_below(caller))
    if found is None:
        raise NotFound("decision", str(id))
    return found
