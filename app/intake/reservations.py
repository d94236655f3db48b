"""Reserves devices for tenants and users, and takes them out of service for maintenance.

Control calls `look` every few seconds: it writes to tenants, users, devices and tasks what counts
now, and islands read it as any guarantee (`core.fairness.reservation`), drained device or start
condition. So a service that
was down when a window began makes it true at its first look. All that reserve or look hold one
advisory lock, so that two calls cannot promise the same devices.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, and_, delete, exists, false, func, or_, select, text
from sqlalchemy.orm import Session

from app.core.fairness import reservation
from app.core.fairness.reservation import Reserved
from app.core.fairness.reserved_devices import kept
from app.db import tenant_tree, transactions
from app.db.models import (
    Device,
    Host,
    Placement,
    Reservation,
    ReservationWindow,
    Task,
    Tenant,
    User,
)
from app.db.reserved_times import ReservedTimes, is_known
from app.identity import audit
from app.intake import actions, reserved_tasks

_LOCK = 0x7265736572766564  # key of an advisory lock; unique in this database
_DECIDE = text("select pg_advisory_xact_lock(:key)").bindparams(key=_LOCK)
_TRY_TO_DECIDE = text("select pg_try_advisory_xact_lock(:key)").bindparams(key=_LOCK)
_LEAD = timedelta(seconds=reservation.LEAD_MOST_S)
_Owner = TypeVar("_Owner", Tenant, User)
KEPT = timedelta(days=30)  # a reservation is forgotten so long after its last window


def lock(session: Session) -> None:
    """Let nobody else reserve, and nothing be put in force, until this transaction ends."""
    session.execute(_DECIDE)


# --- what can be reserved -------------------------------------------------------------------------


def reservable(session: Session, island: str) -> dict[str, int]:
    """Return how many devices of each kind an island can promise: those it has, without what it
    guarantees to tenants at the top of the tree at all times.
    """
    known = Device.island == island, is_known(session)
    query = select(Device.kind, func.count()).where(*known)
    has = Counter({kind: number for kind, number in session.execute(query.group_by(Device.kind))})
    root = select(Tenant.id).where(Tenant.parent_id.is_(None)).scalar_subquery()
    tops = select(Tenant.guarantee).where(or_(Tenant.parent_id == root, Tenant.id == root))
    for guarantee in session.scalars(tops):
        has.subtract(guarantee)
    return {kind: max(0, number) for kind, number in has.items()}


def reserved_in(session: Session, island: str, *, but: str = "") -> Reserved:
    """Return what is reserved on an island from now on, without the reservation with the id
    `but`.
    """
    mine = (Reservation.island == island) & (Reservation.id != but)
    ahead = ReservationWindow.ends_at > transactions.now(session)
    query = select(ReservationWindow, Reservation).join(
        Reservation, Reservation.id == ReservationWindow.reservation_id
    )
    time_of = ReservedTimes(session, island)
    return Reserved.of(
        time_of(it, window.begins_at, window.ends_at)
        for window, it in session.execute(query.where(mine, ahead))
    )


# --- what is in force -----------------------------------------------------------------------------


def look(session: Session) -> bool:
    """Put in force what is due, and take out of force what has ended; True if anything changed.

    While another control does it, or a call reserves, nothing is done.
    """
    if not session.scalar(select(_anything_due(session))) or not session.scalar(_TRY_TO_DECIDE):
        return reserved_tasks.mark(session)
    return put_in_force(session)


_IS_NAMED = (Reservation.device_ids != []) | (Reservation.labels != [])


def _anything_due(session: Session) -> Any:
    now = transactions.now(session)
    begins_at, over = ReservationWindow.begins_at, ReservationWindow.ends_at <= now
    near = and_(Reservation.tenant_id.is_(None), begins_at <= now + _LEAD)
    due = and_(~ReservationWindow.in_force, ~over, or_(begins_at <= now, near))
    ended = and_(ReservationWindow.in_force, over)
    # whoever takes the place of a device that is lost must be looked for all the time
    keeps = and_(ReservationWindow.in_force, Reservation.tenant_id.is_not(None), _IS_NAMED)
    mine = Reservation.id == ReservationWindow.reservation_id
    return exists().where(mine, or_(ended, due, keeps))


def put_in_force(session: Session, *, freed: Iterable[str] = ()) -> bool:
    """Make tenants, users and devices show what is in force now; the caller holds the lock.

    `freed` are devices whose maintenance was cancelled; another one may go on.
    """
    now = transactions.now(session)
    query = select(ReservationWindow, Reservation).join(
        Reservation, Reservation.id == ReservationWindow.reservation_id
    )
    near = and_(ReservationWindow.begins_at <= now + _LEAD, ReservationWindow.ends_at > now)
    rows = session.execute(
        query.where(or_(ReservationWindow.in_force, near)).order_by(
            ReservationWindow.begins_at, Reservation.id
        )
    ).all()
    changed, back = False, set(freed)
    for window, it in rows:
        counts = _begins_at(session, window, it) <= now < window.ends_at
        if counts != window.in_force:
            window.in_force, changed = counts, True
            back |= _begin(session, window, it) if counts else _end(session, window, it)
    in_force = [(window, it) for window, it in rows if window.in_force]
    for window, it in in_force:
        if still := back.intersection(it.device_ids):
            _take_out(session, window, it, sorted(still))
    promised = [it for _, it in in_force if it.tenant_id is not None]
    changed |= _promise(session, promised)
    changed |= _keep(session, promised)
    changed |= reserved_tasks.mark(session)
    _forget(session, now)
    return changed


def _begin(session: Session, window: ReservationWindow, it: Reservation) -> set[str]:
    """Note in the audit log that a window begins; maintenance drains its devices."""
    if it.tenant_id is None:
        _take_out(session, window, it, it.device_ids)
    _write_down(session, it, "begins")
    return set()


def _end(session: Session, window: ReservationWindow, it: Reservation) -> set[str]:
    """Note in the audit log that a window ends; return the devices that maintenance gives back."""
    back = _bring_back(session, window, it) if it.tenant_id is None else set[str]()
    _write_down(session, it, "ends")
    return back


def _begins_at(session: Session, window: ReservationWindow, it: Reservation) -> datetime:
    """Return when a window begins to count: maintenance empties its devices before it."""
    if it.tenant_id is not None:
        return window.begins_at
    if window.in_force:  # it began already, whatever its tasks would need now
        return window.begins_at - _LEAD
    on_them = Placement.device_id.in_(it.device_ids) & Placement.ended_at.is_(None)
    query = select(Task.switch_us).join(Placement, Placement.task_id == Task.id).where(on_them)
    pauses_s = [us / 1e6 for us in session.scalars(query)]
    return window.begins_at - timedelta(seconds=reservation.lead_s(pauses_s))


def _promise(session: Session, in_force: Iterable[Reservation]) -> bool:
    """Write to tenants and users how many devices are reserved for them now; True if that has
    changed.

    A tenant can only use what the tenants above it are promised, too.
    """
    wanted = defaultdict[str, dict[str, Counter[str]]](lambda: defaultdict(Counter))
    for it in in_force:
        ids = [tenant.id for tenant in tenant_tree.path(session, str(it.tenant_id))]
        for id in [*ids, *([it.user_id] if it.user_id else [])]:
            wanted[id][it.island].update(it.devices)
    changed = False
    for owners in (_showing(session, Tenant, wanted), _showing(session, User, wanted)):
        for owner in owners:
            now = {island: dict(devices) for island, devices in wanted.get(owner.id, {}).items()}
            changed |= owner.reserved != now
            owner.reserved = now
    return changed


def _keep(session: Session, in_force: Iterable[Reservation]) -> bool:
    """Write to devices which reservation keeps them now, by their ids or labels; True if that has
    changed. One that does not serve is replaced where another one suits.
    """
    islands = defaultdict[str, list[Reservation]](list)
    for it in in_force:
        if it.device_ids or it.labels:
            islands[it.island].append(it)
    columns = Device.id, Device.reserved_by, _serves(session)
    known = or_(Device.reserved_by != "", Device.island.in_(islands))
    rows = session.execute(select(*columns).join(Host, Host.name == Device.host).where(known)).all()
    before = {id: by for id, by, _ in rows if by}
    idle, now = [id for id, _, serves in rows if not serves], dict[str, str]()
    for island, mine in islands.items():
        times = ReservedTimes(session, island)
        demands = (found for it in mine for found in times.named(it).items())
        now |= kept(demands, before, but=idle)
    changed = [id for id in before.keys() | now.keys() if before.get(id) != now.get(id)]
    for device in _locked(session, changed) if changed else ():
        device.reserved_by = now.get(device.id, "")
    return bool(changed)


def _serves(session: Session) -> ColumnElement[bool]:
    alive = func.coalesce(Device.lease_until > transactions.now(session), false())
    return and_(alive, ~Device.cordoned, ~Host.cordoned)


def _showing(session: Session, kind: type[_Owner], wanted: Iterable[str]) -> Sequence[_Owner]:
    """Return the tenants or users that show a reservation, or should, with their rows locked."""
    shows = or_(kind.reserved != {}, kind.id.in_(list(wanted)))
    query = select(kind).where(shows).order_by(kind.id).with_for_update(key_share=True)
    return session.scalars(query.execution_options(populate_existing=True)).all()


def _take_out(
    session: Session, window: ReservationWindow, it: Reservation, ids: Sequence[str]
) -> None:
    """Drain devices that are maintained, except those that somebody has drained already."""
    told = _maintenance(window, it)
    for device in _locked(session, ids):
        if not device.cordoned:
            device.cordoned, device.maintenance = True, told
            device.version += 1
    session.flush()
    actions.empty_devices(session, ids, by=f"maintenance {it.name}")


def _bring_back(session: Session, window: ReservationWindow, it: Reservation) -> set[str]:
    """Let the devices serve that this maintenance has drained, and return them."""
    told, back, open_ = _maintenance(window, it), set[str](), list[str]()
    for device in _locked(session, it.device_ids):
        if device.maintenance == told:
            device.cordoned, device.maintenance = False, ""
            device.version += 1
            back.add(device.id)
            if not session.get_one(Host, device.host).cordoned:
                open_.append(device.id)
    session.flush()
    actions.leave_devices(session, open_, by=f"the end of maintenance {it.name}")
    return back


def _locked(session: Session, ids: Sequence[str]) -> list[Device]:
    query = select(Device).where(Device.id.in_(ids)).order_by(Device.id)
    fresh = query.with_for_update(key_share=True).execution_options(populate_existing=True)
    return list(session.scalars(fresh))


def _maintenance(window: ReservationWindow, it: Reservation) -> str:
    """Return the reason that a device shows."""
    return f"Maintenance {it.name} until {window.ends_at.astimezone(UTC):%Y-%m-%d %H:%M} UTC."


def _write_down(session: Session, it: Reservation, action: str) -> None:
    call = audit.Call(operation="lookAtReservations", user="control")
    after = {"name": it.name, "window": action}
    audit.append(
        session,
        call,
        "changed",
        target=("reservation", it.id),
        tenant_id=it.tenant_id or "",
        after=after,
    )


def _forget(session: Session, now: datetime) -> None:
    """Delete the reservations whose last window ended long ago."""
    recent = exists().where(
        ReservationWindow.reservation_id == Reservation.id, ReservationWindow.ends_at > now - KEPT
    )
    session.execute(delete(Reservation).where(~recent))


def give_back(session: Session, it: Reservation) -> set[str]:
    """Let the devices serve that a maintenance has drained, and return them.

    What is in force then begins anew with `put_in_force`, by what the maintenance is by then.
    """
    back = set[str]()
    for window in windows_of(session, it) if it.tenant_id is None else ():
        if window.in_force:
            back |= _bring_back(session, window, it)
            window.in_force = False
    return back


def reschedule(session: Session, it: Reservation, ahead: Mapping[datetime, datetime]) -> None:
    """Give a reservation other windows than those that have not ended; `ahead` are begins with
    their ends.
    """
    known = set[datetime]()
    for window in windows_of(session, it):
        if window.begins_at in ahead:
            known.add(window.begins_at)
            window.ends_at = ahead[window.begins_at]
        elif window.ends_at > transactions.now(session):
            session.delete(window)
    session.add_all(
        ReservationWindow(reservation_id=it.id, begins_at=begins_at, ends_at=ends_at)
        for begins_at, ends_at in ahead.items()
        if begins_at not in known
    )
    session.flush()


def cancel(session: Session, it: Reservation) -> None:
    """Delete a reservation, and end what it has in force; the caller holds the lock."""
    back = give_back(session, it)
    reserved_tasks.bereave(session, it.id)
    session.delete(it)
    session.flush()
    put_in_force(session, freed=back)


def windows_of(session: Session, it: Reservation) -> list[ReservationWindow]:
    """Return all windows of a reservation that are kept, in order."""
    query = select(ReservationWindow).where(ReservationWindow.reservation_id == it.id)
    return list(session.scalars(query.order_by(ReservationWindow.begins_at)))


def names_in(
    session: Session, island: str, begins_at: datetime, ends_at: datetime, *, but: str = ""
) -> list[str]:
    """Return the names of the reservations of an island that lie in an interval, in order,
    without the one with the id `but`.
    """
    inside = ReservationWindow.begins_at < ends_at, ReservationWindow.ends_at > begins_at
    mine = Reservation.island == island, Reservation.id == ReservationWindow.reservation_id
    others = Reservation.id != but
    query = select(Reservation.name).where(*mine, *inside, others).distinct()
    return list(session.scalars(query.order_by(Reservation.name)))
