"""Reservations: devices that a tenant or user is guaranteed in windows, and planned maintenance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice
from typing import Annotated, Any

from fastapi import Query, Response
from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.orm import Session

from app.api.access.auth import Authed, PlatformAdmin
from app.api.access.caller import Caller
from app.api.access.visibility import of_caller
from app.api.cursors import Paged
from app.api.middleware import v1_router
from app.api.problems import declared
from app.api.reservation_windows import Times, Windows, changed_windows, first_windows
from app.api.schemas.base import KIND, Page
from app.api.schemas.reservations import (
    DeviceId,
    DeviceLabel,
    FreeTimesOut,
    ReservationIn,
    ReservationOut,
    ReservationPatch,
)
from app.api.times import Time
from app.core.fairness.budget import time_at
from app.core.fairness.reservation import Reserved, ReservedTime, Shortage
from app.core.units import counted
from app.db import tenant_tree, transactions
from app.db.ids import new_id
from app.db.models import Device, Island, Reservation, ReservationWindow, Tenant, User
from app.db.reserved_times import ReservedTimes
from app.db.transactions import Db, after_commit
from app.db.user_limits import bound_of
from app.errors import BadInput, Conflict, NotFound
from app.identity import audit
from app.intake import recurrences, reservations, reserved_tasks
from app.messaging import outbox

router = v1_router("reservations")

MOST = 1000  # reservations that have not ended
MOST_SHOWN = 100  # windows in an answer
_AHEAD = timedelta(days=60)  # how far free times are looked for
_MOST_FREE = 20
_NOT_BOTH = "give either `device_ids`, or a number of devices in `devices`, maybe with `labels`"
_ONLY_IDS = "maintenance names device_ids only"
_NO_NUMBER = "say how many devices of which kind, or which in `device_ids`"


@router.post(
    "/reservations",
    status_code=201,
    response_model=ReservationOut,
    summary="Reserve devices, or plan maintenance",
    responses=declared(403, 409),
)
def create_reservation(
    body: ReservationIn, response: Response, caller: PlatformAdmin, session: Db
) -> dict[str, Any]:
    """Inside its windows a reservation is a guarantee: whoever borrowed the devices gives them back
    without a loss when the tenant wants them, and nothing stands idle.  After a window, running
    tasks go on as any others, except those that name the reservation: they wait for the next one.

    If more would be reserved than there is, the answer is 409 and names the reservations and the
    next free time.  Maintenance is never refused: it drains its devices early enough to have them
    empty when it begins, and lets them serve again when it ends.
    """
    reservations.lock(session)
    which = Device.id.in_(body.device_ids) | Device.kind.in_(body.devices)
    island = _island(session, body.island, which)
    times = Times(body.begins_at, body.ends_at, body.rule, body.timezone)
    found = first_windows(times, transactions.now(session))
    it = _maintenance(session, body) if body.maintenance else _guarantee(session, body)
    it.island, it.created_by = island, caller.user_name
    _take_devices(session, it, body)
    _check_room(session, it, found)
    session.add(it)
    session.flush()
    reservations.reschedule(session, it, dict(found))
    if reservations.put_in_force(session):
        after_commit(session, partial(outbox.nudge_island, it.island))
    response.headers["Location"] = f"/v1/reservations/{it.id}"
    return shown(session, [it])[0]


@router.get(
    "/reservations",
    response_model=Page[ReservationOut],
    summary="List reservations",
)
def list_reservations(paging: Paged, caller: Authed, session: Db) -> dict[str, Any]:
    """Lists the reservations of the tenants that you see, and all maintenance.  One is kept for 30
    days after its last window.
    """
    found = paging.read(session, _seen(caller), by=Reservation.id)
    return found.page(shown(session, found.rows))


@router.get(
    "/reservations:free",
    response_model=FreeTimesOut,
    summary="Find when devices can be reserved",
)
def list_free_times(
    caller: Authed,
    session: Db,
    kind: Annotated[str, Query(pattern=f"^{KIND}$")] = "cuda",
    devices: Annotated[int, Query(ge=1, le=1_000_000)] = 1,
    label: Annotated[Sequence[DeviceLabel], Query(max_length=16)] = (),
    device_id: Annotated[Sequence[DeviceId], Query(max_length=1000)] = (),
    for_s: Annotated[int, Query(ge=1, le=5_184_000)] = 3600,
    since: Time = None,
    island: str | None = None,
) -> dict[str, Any]:
    """Lists up to 20 times in the 60 days after `since`, or after now, in which so many devices are
    free for `for_s` seconds or longer: any of the kind, those with each `label`, or those that
    `device_id` names.
    """
    which = Device.id.in_(device_id) if device_id else Device.kind == kind
    name = _island(session, island, which, pointer="?island")
    wanted = Reservation(devices={kind: devices}, device_ids=[], labels=[*label])
    if device_id:
        wanted.devices, wanted.device_ids = _named(session, device_id, name, "?device_id")
        if len(wanted.devices) > 1:
            raise BadInput.at("?device_id", "must be devices of one kind", "kind")
        [(kind, devices)] = wanted.devices.items()
    now = transactions.now(session)
    begins_at = max(now, since or now)
    if begins_at > now + recurrences.HORIZON:
        raise BadInput.at("?since", "must lie within two years from now", "too-late")
    has = reservations.reservable(session, name)
    taken = reservations.reserved_in(session, name)
    time = ReservedTimes(session, name)(wanted, begins_at, begins_at + _AHEAD)
    return {
        "island": name,
        "kind": kind,
        "devices": devices,
        "reservable": has.get(kind, 0),
        "windows": _free_times(taken, time, has, lasting=timedelta(seconds=for_s)),
    }


@router.get(
    "/reservations/{id}",
    response_model=ReservationOut,
    summary="Show a reservation",
    responses=declared(404),
)
def get_reservation(id: str, caller: Authed, session: Db) -> dict[str, Any]:
    """Shows the windows that have not ended, and how many devices serve now."""
    return shown(session, [_visible(session, caller, id)])[0]


@router.patch(
    "/reservations/{id}",
    response_model=ReservationOut,
    summary="Change a reservation or maintenance",
    responses=declared(403, 404, 409),
)
def change_reservation(
    id: str, body: ReservationPatch, caller: PlatformAdmin, session: Db
) -> dict[str, Any]:
    """Takes a name or an id.  The reservation keeps its place: what it has already cannot be taken
    by others meanwhile.  More than there is is refused with 409 as when it was made, and then
    nothing changes.

    Windows that have begun stay.  `ends_at` alone, inside a window, moves the end of that window.
    """
    reservations.lock(session)
    it = _visible(session, caller, id)
    if "note" in body.model_fields_set:
        it.note = body.note or ""
    given = body.model_dump(include={*Times._fields}, exclude_none=True)
    devices = {"devices", "device_ids", "labels"} & body.model_dump(exclude_none=True).keys()
    if given or devices:
        _change(session, it, given, body if devices else None)
        after_commit(session, partial(outbox.nudge_island, it.island))
    session.flush()
    return shown(session, [it])[0]


@router.delete(
    "/reservations/{id}",
    status_code=204,
    summary="Cancel a reservation or maintenance",
    responses=declared(403, 404),
)
def delete_reservation(id: str, caller: PlatformAdmin, session: Db) -> None:
    """Ends it at once, with all its windows.  Running tasks go on as any others, except those that
    name it: they are paused, and run no more.  Devices in maintenance take work again.
    """
    reservations.lock(session)
    it = _visible(session, caller, id)
    reservations.cancel(session, it)
    after_commit(session, partial(outbox.nudge_island, it.island))


# --- what a call gives ----------------------------------------------------------------------------


def _island(
    session: Session, name: str | None, which: ColumnElement[bool], *, pointer: str = "/island"
) -> str:
    """Return the island that is named, or the one with most of `which` devices."""
    names = session.scalars(select(Island.name).order_by(Island.name)).all()
    if name is None and names:
        most = select(Device.island).where(which).group_by(Device.island)
        found = session.scalar(most.order_by(func.count().desc(), Device.island).limit(1))
        return found or names[0]
    if name is None or name not in names:
        told = f"must be one of {', '.join(names) or 'none: there is no island yet'}"
        raise BadInput.at(pointer, told, "unknown-island")
    return name


def _new(session: Session, body: ReservationIn) -> Reservation:
    if session.scalar(select(Reservation.id).where(Reservation.name == body.name)):
        raise Conflict(f"there is a reservation {body.name} already; cancel it, or take a new name")
    if (session.scalar(select(func.count()).select_from(Reservation)) or 0) >= MOST:
        raise Conflict(f"there are {MOST} reservations already; cancel one first")
    return Reservation(
        id=new_id("rsv"),
        name=body.name,
        begins_at=body.begins_at,
        ends_at=body.ends_at,
        rule=body.rule,
        timezone=body.timezone,
        note=body.note or "",
    )


def _maintenance(session: Session, body: ReservationIn) -> Reservation:
    for name in ("tenant_id", "user_id"):
        if getattr(body, name):
            raise BadInput.at(f"/{name}", _ONLY_IDS, "maintenance")
    return _new(session, body)


def _take_devices(
    session: Session, it: Reservation, body: ReservationIn | ReservationPatch
) -> None:
    """Let a reservation or maintenance take the devices that a call gives; raises BadInput."""
    if it.tenant_id is None:
        for name in ("devices", "labels"):
            if getattr(body, name):
                raise BadInput.at(f"/{name}", _ONLY_IDS, "maintenance")
    if body.device_ids or it.tenant_id is None:
        for name in ("devices", "labels"):
            if getattr(body, name):
                raise BadInput.at("/device_ids", _NOT_BOTH, "devices")
        it.devices, it.device_ids = _named(session, body.device_ids or (), it.island)
        it.labels = []
    else:
        if body.labels is not None:
            it.labels = sorted({*body.labels})
        if not body.devices and (it.device_ids or body.devices is not None or not it.devices):
            raise BadInput.at("/devices", _NO_NUMBER, "required")
        it.devices, it.device_ids = dict(body.devices or it.devices), []
    user = session.get_one(User, it.user_id) if it.user_id else None
    if it.tenant_id is not None:
        _check_limits(session, it, user)


def _named(
    session: Session, given: Sequence[str], island: str, pointer: str = "/device_ids"
) -> tuple[dict[str, int], list[str]]:
    """Return how many devices of each kind are named, and which."""
    ids = sorted(set(given))
    if not ids:
        raise BadInput.at(pointer, "name the devices that take no work", "required")
    mine = Device.id.in_(ids), Device.island == island
    kinds = {id: kind for id, kind in session.execute(select(Device.id, Device.kind).where(*mine))}
    for n, id in enumerate(given):
        if id not in kinds:
            at = f"{pointer}/{n}" if pointer.startswith("/") else pointer
            raise BadInput.at(at, f"{island} has no device {id}", "unknown-device")
    return {kind: [*kinds.values()].count(kind) for kind in sorted({*kinds.values()})}, ids


def _guarantee(session: Session, body: ReservationIn) -> Reservation:
    user = session.get(User, body.user_id) if body.user_id else None
    if body.user_id and (user is None or user.deleted_at is not None):
        raise BadInput.at("/user_id", f"there is no user with id {body.user_id}", "unknown-user")
    tenant_id = body.tenant_id or (user.tenant_id if user else None)
    if tenant_id is None:
        told = "say for which tenant, or for which user in `user_id`"
        raise BadInput.at("/tenant_id", told, "required")
    if session.get(Tenant, tenant_id) is None:
        raise BadInput.at("/tenant_id", f"there is no tenant with id {tenant_id}", "unknown-tenant")
    if user is not None and user.tenant_id != tenant_id:
        raise BadInput.at("/user_id", f"{user.name} is a user of another tenant", "unknown-user")
    it = _new(session, body)
    it.tenant_id, it.user_id = tenant_id, body.user_id
    return it


def _check_limits(session: Session, it: Reservation, user: User | None) -> None:
    """Refuse what limits would keep the tenant or the user from using (rule F4)."""
    ids = [each.id for each in tenant_tree.path(session, str(it.tenant_id))]
    limits = [
        (it.name, it.limit) for it in session.scalars(select(Tenant).where(Tenant.id.in_(ids)))
    ]
    if user is not None:
        both = select(User.limit, Tenant.user_defaults).join(Tenant, Tenant.id == User.tenant_id)
        row = session.execute(both.where(User.id == user.id)).one()
        limits.append((user.name, bound_of(row, "limit") or {}))
    for name, limit in limits:
        for kind, number in it.devices.items():
            most = min(limit.get(key, number) for key in (kind, tenant_tree.ALL))
            if most < number:
                told = f"{name} has a limit of {counted(most, 'device')}; raise it first"
                at = "/device_ids" if it.device_ids else f"/devices/{kind}"
                raise BadInput.at(at, told, "limit")


def _change(
    session: Session,
    it: Reservation,
    given: Mapping[str, Any],
    devices: ReservationPatch | None,
) -> None:
    """Change when it is, and of which devices; raises BadInput or Conflict if that cannot be."""
    times = Times(it.begins_at, it.ends_at, it.rule, it.timezone)
    known = [(each.begins_at, each.ends_at) for each in reservations.windows_of(session, it)]
    times, found = changed_windows(times, given, known, transactions.now(session))
    freed = reservations.give_back(session, it)
    if given and found:
        more = {"window": f"from {_text(found[0][0])} to {_text(found[0][1])}"}
        audit.changed_too(session, it, more)
    it.begins_at, it.ends_at, it.rule, it.timezone = times
    if devices is not None:
        _take_devices(session, it, devices)
        reserved_tasks.confine(session, it)
    _check_room(session, it, found)
    reservations.reschedule(session, it, dict(found))
    reservations.put_in_force(session, freed=freed)


def _check_room(session: Session, it: Reservation, found: Windows) -> None:
    """Raise Conflict if more would be reserved than there is; maintenance is never refused."""
    if it.tenant_id is None:
        return
    has = reservations.reservable(session, it.island)
    time_of = ReservedTimes(session, it.island)
    wanted = [time_of(it, *window) for window in found]
    taken = reservations.reserved_in(session, it.island, but=it.id)
    short = taken.shortage(wanted, has)
    if short is not None:
        raise Conflict(_told(session, it, short, taken, has, time_of))


def _told(
    session: Session,
    it: Reservation,
    short: Shortage,
    taken: Reserved,
    has: dict[str, int],
    time_of: ReservedTimes,
) -> str:
    begins_at, ends_at = time_at(short.begins_us), time_at(short.ends_us)
    what = f"{'named ' * bool(it.device_ids)}{short.kind} device"
    labels = f" with label {' and '.join(it.labels)}" * bool(it.labels)
    of = f"of {counted(short.wanted, what)}{labels} only {short.free}"
    told = f"{of} can be reserved from {_text(begins_at)} to {_text(ends_at)}"
    if names := reservations.names_in(session, it.island, begins_at, ends_at, but=it.id):
        told += f"; reserved then: {', '.join(names[:5])}"
    wanted = time_of(it, begins_at, begins_at + _AHEAD)
    if free := _free_times(taken, wanted, has, lasting=ends_at - begins_at):
        return f"{told}; next free: from {_text(free[0]['begins_at'])}"
    most = has.get(short.kind, 0)
    if short.kind in wanted.named:
        most = min(most, len(wanted.named[short.kind].among))
    return f"{told}; {it.island} can reserve {most} in all"


def _text(at: datetime) -> str:
    """Return a time in words; with its second if there is one, so that short windows differ."""
    clock = "%H:%M:%S" if at.second else "%H:%M"
    return f"{at.astimezone(UTC):%Y-%m-%d {clock}} UTC"


def _free_times(
    taken: Reserved, wanted: ReservedTime, has: dict[str, int], *, lasting: timedelta
) -> list[dict[str, datetime]]:
    lasting_us = lasting // timedelta(microseconds=1)
    found = islice(taken.free_times(wanted, has, lasting_us=lasting_us), _MOST_FREE)
    return [{"begins_at": time_at(begins), "ends_at": time_at(ends)} for begins, ends in found]


# --- answers --------------------------------------------------------------------------------------


def _seen(caller: Caller) -> Any:
    mine = of_caller(caller, Reservation.tenant_id)
    return select(Reservation).where(or_(mine, Reservation.tenant_id.is_(None)))


def _visible(session: Session, caller: Caller, id: str) -> Reservation:
    """Return the reservation of this id or name."""
    named = or_(Reservation.id == id, Reservation.name == id)
    first = (Reservation.id == id).desc()
    found: Reservation | None = session.scalar(_seen(caller).where(named).order_by(first).limit(1))
    if found is None:
        raise NotFound("reservation", id)
    return found


def shown(session: Session, rows: Sequence[Reservation]) -> list[dict[str, Any]]:
    """Return the reservations with their windows that have not ended, as answers show them."""
    now = transactions.now(session)
    ahead = ReservationWindow.ends_at > now
    mine = ReservationWindow.reservation_id.in_([it.id for it in rows])
    windows = dict[str, list[ReservationWindow]]()
    query = select(ReservationWindow).where(mine, ahead).order_by(ReservationWindow.begins_at)
    for window in session.scalars(query):
        windows.setdefault(window.reservation_id, []).append(window)
    serving = Device.lease_until > now, ~Device.cordoned
    islands = {it.island: ReservedTimes(session, it.island) for it in rows}
    columns = Device.island, Device.kind, Device.id, Device.reserved_by
    serve = session.execute(select(*columns).where(Device.island.in_(islands), *serving)).all()
    return [_out(it, windows.get(it.id, []), islands[it.island], serve, now) for it in rows]


def _out(
    it: Reservation,
    ahead: list[ReservationWindow],
    times: ReservedTimes,
    serve: Sequence[Any],
    now: datetime,
) -> dict[str, Any]:
    named = times.named(it)
    suits = Counter(
        kind
        for island, kind, id, _ in serve
        if island == it.island and (kind not in named or id in named[kind].among)
    )
    if not ahead:
        state = "ended"
    else:
        state = "active" if ahead[0].in_force and ahead[0].begins_at <= now else "planned"
    shown = {name: getattr(it, name, None) for name in ReservationOut.model_fields}
    return {
        **shown,
        "maintenance": it.tenant_id is None,
        "state": state,
        "kept_device_ids": sorted(id for *_, id, by in serve if by == it.id),
        "available": {kind: suits[kind] for kind in it.devices},
        "windows": [
            {"begins_at": each.begins_at, "ends_at": each.ends_at} for each in ahead[:MOST_SHOWN]
        ],
        "windows_ahead": len(ahead),
        "note": it.note or None,
    }
