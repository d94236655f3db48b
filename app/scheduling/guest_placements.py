"""Manages devices that a task holds besides its home device: rows of `placements` that are its
*guests*.

The task's processes are coordinated at its home device (`workers.residents.coordinator`). On the
home's host, the other ranks are processes of the home, whose sandbox shows all these devices. The
guests there are not involved: only these rows say that their slots are taken. On each other host,
one guest runs the remote ranks (`workers.residents.remote_ranks`) for all guests of its host, and
gets orders of its own. A guest is charged for the time that the home held its slot meanwhile, so
only the home's clock is read. A guest has started when the home reports it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from sqlalchemy import ColumnElement, and_, func, or_, select
from sqlalchemy.orm import InstrumentedAttribute, Session, aliased

from app.core.model.device_choice import WHOLE_MILLI, choice_in
from app.db import transactions
from app.db.models import Device, Placement, Task
from app.scheduling import gang_tickets, ledger


def guests(session: Session, tasks: Collection[str]) -> dict[str, list[Placement]]:
    """Return the placements of guests that have not ended, by task, in the order in which they were
    lent.
    """
    found = defaultdict[str, list[Placement]](list)
    if not tasks:
        return found
    lent = Placement.guest & Placement.ended_at.is_(None)
    query = select(Placement).where(lent, Placement.task_id.in_(list(tasks)))
    for guest in session.scalars(query.order_by(Placement.id)):
        if guest.ended_at is None:  # the guest may have ended in this transaction
            found[guest.task_id].append(guest)
    return found


def of_last_epoch(session: Session, tasks: Collection[str]) -> dict[str, list[str]]:
    """Return the devices that were guests in each task's last stay, ended or not."""
    found = defaultdict[str, list[str]](list)
    if not tasks:
        return found
    last = and_(Placement.task_id == Task.id, Placement.epoch == Task.epoch, Placement.guest)
    query = select(Task.id, Placement.device_id).join(Placement, last)
    for id, device in session.execute(query.where(Task.id.in_(tasks)).order_by(Placement.id)):
        found[id].append(device)
    return found


def of_task(session: Session, task: Task) -> Sequence[Placement]:
    """Return the task's guests; no query if it had none in this epoch."""
    return guests(session, [task.id])[task.id] if task.resized_at is not None else ()


def is_lent(device: ColumnElement[str] | InstrumentedAttribute[str]) -> ColumnElement[bool]:
    """Return a condition: a guest holds the device in the given column, or it is kept for a
    gang.
    """
    lent = or_(Placement.guest, gang_tickets.is_of_ticket())
    there = (Placement.device_id == device, Placement.ended_at.is_(None), lent)
    return select(Placement.id).where(*there).exists()


def has_fractions(
    device: ColumnElement[str] | InstrumentedAttribute[str],
) -> ColumnElement[bool]:
    """Return a condition: a task holds a fraction of the device in the given column."""
    is_fraction = Placement.fraction_milli < WHOLE_MILLI
    there = (Placement.device_id == device, Placement.ended_at.is_(None), is_fraction)
    return select(Placement.id).where(*there).exists()


def check_fractions(session: Session, devices: Collection[str]) -> None:
    """Raise OverfullDevice if the fractions that tasks have of one of these devices exceed the
    whole.

    Tasks that leave, or that share a device in turns, do not count. Only the island's leader gives
    its devices to tasks, so nothing is added between this check and the commit.
    """
    session.flush()
    given = func.sum(Placement.fraction_milli)
    query = (
        select(Placement.device_id, given)
        .where(
            Placement.device_id.in_(devices),
            Placement.ended_at.is_(None),
            ~Placement.leaving,
            ~Placement.shares,
        )
        .group_by(Placement.device_id)
        .having(given > WHOLE_MILLI)
    )
    if overfull := session.execute(query).all():
        told = ", ".join(f"{milli} thousandths of {device}" for device, milli in overfull)
        raise OverfullDevice(f"tasks were given {told}")


class OverfullDevice(Exception):
    """Raised for a plan that gives more of a device than there is. The whole plan is then not
    written.
    """


def lend(session: Session, task: Task, devices: Sequence[Device], cost_milli: int) -> None:
    """Lend these devices to the task from now on; a second of all of them costs `cost_milli`."""
    whole, more = divmod(max(0, cost_milli), len(devices))
    for n, device in enumerate(devices):
        guest = placement_on(task, device, whole + (n < more))
        guest.launched_at, guest.guest = transactions.now(session), True
        session.add(guest)


def placement_on(task: Task, device: Device, cost_milli: int) -> Placement:
    """Return a new placement of the task, in its present epoch; a second costs `cost_milli`."""
    return Placement(
        task_id=task.id,
        epoch=task.epoch,
        device_id=device.id,
        tenant_id=task.tenant_id,
        user_id=task.user_id,
        kind=device.kind,
        cost_milli=cost_milli,
        incarnation=device.incarnation,
        fraction_milli=choice_in(task.device_choice).fraction_milli,  # a ticket has no spec
    )


def awaits(session: Session, task: Task, on: Device) -> bool:
    """True if the task's processes on this device's host have to wait, because a task placed
    earlier still holds one of the guests there.

    They use all of these accelerators as soon as they begin. On a CPU they only share the host's
    processors for a moment.
    """
    if task.resized_at is None or task.started_at is not None or on.kind == "cpu":
        return False
    before = aliased(Placement)
    held = and_(
        before.device_id == Placement.device_id,
        before.id < Placement.id,
        before.task_id != Placement.task_id,
        before.ended_at.is_(None),
    )
    mine = (Placement.task_id == task.id, Placement.epoch == task.epoch, Placement.guest)
    near = (Device.id == Placement.device_id, Device.host == on.host)
    found = select(before.id).join(Placement, held).join(Device, and_(*near)).where(*mine)
    return bool(session.scalar(select(found.exists())))


def seated(session: Session, lent: Iterable[Placement]) -> None:
    """Record that ranks now run on these devices."""
    for guest in lent:
        guest.started_at = guest.started_at or transactions.now(session)


def by_host(devices: Iterable[Device]) -> list[list[Device]]:
    """Group a task's devices by the host of their ranks: the home's host first, then each other
    host.
    """
    found = dict[str, list[Device]]()
    for device in devices:
        found.setdefault(device.host, []).append(device)
    return list(found.values())


def charge(session: Session, task: Task, lent: Iterable[Placement], held_us: int) -> None:
    """Charge guests for `held_us` more of the home's slot time, but not for time before they were
    lent.
    """
    for guest in lent:
        before_us = guest.held_us
        ledger.note(session, guest, held_us_with(session, guest, held_us))
        task.guest_held_us += guest.held_us - before_us


def held_us_with(session: Session, guest: Placement, more_us: int) -> int:
    """Return how long a guest has held its device if the home has held its own for
    `more_us` more.
    """
    since_us = round((transactions.now(session) - guest.launched_at).total_seconds() * 1e6)
    return min(guest.held_us + more_us, since_us)


def cost(session: Session, placements: Iterable[Placement]) -> int:
    """Return what a second of these placements costs, in thousandths; 0 if it is the cost of their
    devices.
    """
    held = list(placements)
    of_devices = sum(session.get_one(Device, each.device_id).cost_milli for each in held)
    charged = sum(each.cost_milli for each in held)
    return charged if charged != of_devices else 0


def end(session: Session, lent: Iterable[Placement], how: str) -> None:
    for guest in lent:
        guest.ended_at, guest.end = transactions.now(session), how
