"""Shows reservations and maintenance as a calendar of kinds and weeks, and as a list.

Platform administrators add, change and remove them here. What is reserved for others is only a
number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, time, timedelta
from functools import partial
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

from fastapi import APIRouter, Request, Response
from sqlalchemy import select
from sqlalchemy.orm import Session

from app.api.access.gate import GatedRoute
from app.api.cursors import Paging
from app.api.routes import reservations as of_reservations
from app.api.schemas.reservations import ReservationIn, ReservationPatch
from app.api.times import unknown_zone
from app.core.fairness.budget import time_us
from app.db import transactions
from app.db.models import Island
from app.db.transactions import Db
from app.errors import BadInput
from app.intake import reservations
from app.pages import forms, views
from app.pages.admin_views import tenant_names
from app.pages.forms import Field
from app.pages.operator_views import platform_admin
from app.pages.views import Sender, Visitor

ON_A_PAGE = 200
WEEKS = 6

router = APIRouter(include_in_schema=False, route_class=GatedRoute)


class Week(NamedTuple):
    """Says how many devices of a kind are reserved at most in a week, and by whom as far as the
    reader may know.
    """

    begins_at: datetime
    most: int
    names: tuple[str, ...]


class KindWeeks(NamedTuple):
    """One kind of device of an island, of which so many can be reserved, in the coming weeks."""

    island: str
    kind: str
    reservable: int
    weeks: tuple[Week, ...]


@router.get("/ui/reservations")
def list_reservations(request: Request, session: Db, caller: Visitor, cursor: str = "") -> Response:
    paging = Paging(http=request, response=Response(), limit=ON_A_PAGE, given=cursor or None)
    found = of_reservations.list_reservations(paging, caller, session)
    now = transactions.now(session)
    may_change = caller.sees_all
    return views.page(
        request,
        "reservations.html",
        caller,
        now=now,
        section="devices" if may_change else "overview",
        reservations=found["items"],
        next_cursor=found["next_cursor"],
        calendar=_calendar(session, found["items"], now),
        may_change=may_change,
        tenants=tenant_names(session, caller) if may_change else {},
        islands=_islands(session) if may_change else {},
    )


def _calendar(session: Session, shown: Sequence[Any], now: datetime) -> list[KindWeeks]:
    monday = datetime.combine(now.date() - timedelta(days=now.weekday()), time(), UTC)
    weeks = [monday + n * timedelta(weeks=1) for n in range(WEEKS)]
    found = []
    for island in session.scalars(select(Island.name).order_by(Island.name)).all():
        has, taken = (
            reservations.reservable(session, island),
            reservations.reserved_in(session, island),
        )
        for kind in sorted(has):
            mine = [it for it in shown if it["island"] == island and kind in it["devices"]]
            cells = [_week(at, mine, partial(taken.most_taken, kind)) for at in weeks]
            found.append(KindWeeks(island, kind, has[kind], tuple(cells)))
    return found


def _week(begins_at: datetime, shown: Sequence[Any], most_taken: Callable[[int, int], int]) -> Week:
    ends_at = begins_at + timedelta(weeks=1)
    names = [
        it["name"]
        for it in shown
        if any(
            window["begins_at"] < ends_at and window["ends_at"] > begins_at
            for window in it["windows"]
        )
    ]
    return Week(begins_at, most_taken(time_us(begins_at), time_us(ends_at)), tuple(sorted(names)))


def _islands(session: Session) -> dict[str, str]:
    names = session.scalars(select(Island.name).order_by(Island.name)).all()
    return {"": "with most of them", **{name: name for name in names}} if len(names) > 1 else {}


@router.post("/ui/reservations")
def change_reservations(
    request: Request,
    session: Db,
    caller: Sender,
    do: Field = "",
    reservation: Field = "",
    name: Field = "",
    tenant_id: Field = "",
    kind: Field = "",
    number: Field = "",
    devices: Field = "",
    device_ids: Field = "",
    labels: Field = "",
    begins: Field = "",
    ends: Field = "",
    timezone: Field = "UTC",
    rule: Field = "",
    note: Field = "",
    island: Field = "",
) -> Response:
    known: dict[str, Callable[..., Any]] = {
        "reserve": of_reservations.create_reservation,
        "maintain": of_reservations.create_reservation,
        "change": of_reservations.change_reservation,
        "remove": of_reservations.delete_reservation,
    }
    platform_admin(caller)
    operation = forms.chosen(do, known)
    views.acts_as(request, session, caller, operation)
    if do == "remove":
        of_reservations.delete_reservation(reservation, caller, session)
        told = forms.Told(words="It is removed. Tasks go on, except those that name it.")
    elif do == "change":
        wanted = {
            "devices": forms.numbers_by_kind("devices", devices) if devices.strip() else None,
            "device_ids": _names(device_ids) or None,
            "labels": _names(labels),
            "begins_at": _time(begins, timezone, "/begins_at") if begins else None,
            "ends_at": _time(ends, timezone, "/ends_at") if ends else None,
            "timezone": timezone,
            "rule": rule.strip(),
            "note": note.strip() or None,
        }
        before = of_reservations.get_reservation(reservation, caller, session)
        shown = {**before, "devices": None} if before["device_ids"] else before
        changes = {name: value for name, value in wanted.items() if shown.get(name) != value}
        body = forms.filled(ReservationPatch, **changes)
        of_reservations.change_reservation(reservation, body, caller, session)
        told = forms.Told(words=f"{before['name']} is changed.")
    else:
        what: dict[str, Any] = {"maintenance": True, "device_ids": _names(device_ids)}
        if do == "reserve":
            counts = {kind.strip(): _number(number)} if number.strip() else {}
            what = {"tenant_id": tenant_id, "devices": counts}
            what |= {"labels": _names(labels), "device_ids": _names(device_ids)}
        made = forms.filled(
            ReservationIn,
            name=name.strip(),
            begins_at=_time(begins, timezone, "/begins_at"),
            ends_at=_time(ends, timezone, "/ends_at"),
            timezone=timezone,
            rule=rule.strip(),
            note=note.strip() or None,
            island=island or None,
            **what,
        )
        of_reservations.create_reservation(made, Response(), caller, session)
        told = forms.Told(words=f"{made.name} is added.")
    return views.answered(request, told, partial(list_reservations, request, session, caller))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 8):
        raise BadInput.at("/devices", f"must be a number of devices; got {text!r:.40}", "number")
    return int(text)


def _time(text: str, zone: str, pointer: str) -> str:
    """Return the time of a form, which is in the zone, with its offset."""
    if told := unknown_zone(zone):
        raise BadInput.at("/timezone", told, "timezone")
    try:
        return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).isoformat()
    except ValueError:
        told = f"must be a time such as 2026-12-07T09:00; got {text!r:.40}"
        raise BadInput.at(pointer, told, "time") from None
