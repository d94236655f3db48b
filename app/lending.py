"""Devices that a task holds beyond its home: rows of `placements` that are its *guests*.

Its ranks are conducted by its home (`workers.gang`).  On the home's host they are processes of the
home, and the device worker of a guest's device has nothing to do with it: that its seat is taken is
written here, and only here.  On each other host one of its guests' device workers holds an outpost
(`workers.outpost`), and has orders of its own.  A guest is charged for the time that its home held
its seat meanwhile; so no clock but the home's is read.  It has started when home said so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from sqlalchemy import ColumnElement, or_, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from app import db, ledger, span
from app.models import Device, Placement, Task


def guests(session: Session, tasks: Collection[str]) -> dict[str, list[Placement]]:
    """Those that have not ended, by task, in the order in which they were lent."""
    found = defaultdict[str, list[Placement]](list)
    if not tasks:
        return found
    lent = Placement.guest & Placement.ended_at.is_(None)
    query = select(Placement).where(lent, Placement.task_id.in_(list(tasks)))
    for guest in session.scalars(query.order_by(Placement.id)):
        if guest.ended_at is None:  # it may have ended in this transaction
            found[guest.task_id].append(guest)
    return found


def of_task(session: Session, task: Task) -> Sequence[Placement]:
    """None are looked for where it has had none in this epoch."""
    return guests(session, [task.id])[task.id] if task.resized_at is not None else ()


def is_lent(device: ColumnElement[str] | InstrumentedAttribute[str]) -> ColumnElement[bool]:
    """Whether a guest sits on the device that a column names, or it is kept for a gang."""
    lent = or_(Placement.guest, span.is_of_ticket())
    there = (Placement.device_id == device, Placement.ended_at.is_(None), lent)
    return select(Placement.id).where(*there).exists()


def lend(session: Session, task: Task, devices: Sequence[Device], cost_milli: int) -> None:
    """These too are the task's from now on; a second of all of them costs `cost_milli`."""
    whole, more = divmod(max(0, cost_milli), len(devices))
    for n, device in enumerate(devices):
        guest = Placement(
            task_id=task.id,
            epoch=task.epoch,
            device_id=device.id,
            tenant_id=task.tenant_id,
            user_id=task.user_id,
            kind=device.kind,
            cost_milli=whole + (n < more),
            incarnation=device.incarnation,
            launched_at=db.now(session),
            guest=True,
        )
        session.add(guest)


def seated(session: Session, lent: Iterable[Placement]) -> None:
    """Ranks sit there."""
    for guest in lent:
        guest.started_at = guest.started_at or db.now(session)


def by_host(devices: Iterable[Device]) -> list[list[Device]]:
    """Of a task, home first: those of home's host, then those of each other."""
    found = dict[str, list[Device]]()
    for device in devices:
        found.setdefault(device.host, []).append(device)
    return list(found.values())


def charge(session: Session, task: Task, lent: Iterable[Placement], held_us: int) -> None:
    """Their home held its seat for `held_us` more; none is charged from before it was lent."""
    for guest in lent:
        before_us = guest.held_us
        ledger.note(session, guest, held_us_with(session, guest, held_us))
        task.guest_held_us += guest.held_us - before_us


def held_us_with(session: Session, guest: Placement, more_us: int) -> int:
    """How long a guest has held its device if its home has held its own for `more_us` more."""
    since_us = round((db.now(session) - guest.launched_at).total_seconds() * 1e6)
    return min(guest.held_us + more_us, since_us)


def cost(session: Session, placements: Iterable[Placement]) -> int:
    """What a second of these costs, in thousandths, if that is not what their devices cost."""
    held = list(placements)
    of_devices = sum(session.get_one(Device, each.device_id).cost_milli for each in held)
    charged = sum(each.cost_milli for each in held)
    return charged if charged != of_devices else 0


def end(session: Session, lent: Iterable[Placement], how: str) -> None:
    for guest in lent:
        guest.ended_at, guest.end = db.now(session), how
