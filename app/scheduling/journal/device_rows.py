"""Lock the rows that heartbeats may touch, before anything is recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import or_, select
from sqlalchemy.orm import Session, defer

from app.core.model.protocol import messages
from app.core.model.protocol.messages import Alive, ResidentView
from app.data import datablocks, mounts
from app.db.models import Device, Need, OutboxOrder, Placement, Task
from app.scheduling import gang_tickets
from app.scheduling.journal import task_writer


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedRows:
    """Holds all rows that some heartbeats may touch, locked, as they were before the heartbeats."""

    devices: dict[str, Device]
    tasks: dict[str, Task]
    open: dict[str, list[Placement]]  # by device: placements that have not ended
    lent: dict[str, list[Placement]]  # by device: placements of tasks that hold it as a guest
    # by device: tasks that are seated or paused there, or are being moved there
    near: dict[str, list[Task]]
    # by device: orders that the device has not yet acknowledged
    unanswered: dict[str, list[OutboxOrder]]
    # paths of all mounts by sort, if a device may show any
    mounts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRows:
    """Holds the rows of one device while its heartbeat is recorded."""

    device: Device
    tasks: dict[str, Task]  # tasks of all devices, by id
    # Tasks that were seated or paused here, or being moved here, before the heartbeat. No heartbeat
    # brings other tasks here, so there is no need to walk over `tasks`.
    near: list[Task]
    open: dict[tuple[str, int], Placement]  # by (task, epoch): placements here that have not ended
    # (task, epoch), oldest first, of tasks with ranks here and another home device, and of gangs
    # for which a ticket keeps the device. Each must release the slot before the next may have it.
    lent_to: list[tuple[str, int]]
    unanswered: list[OutboxOrder]

    def is_lent_to(self, view: ResidentView) -> bool:
        return (view.task, view.epoch) in self.lent_to

    def may_sit(self, view: ResidentView) -> bool:
        return not self.lent_to or self.lent_to[0] == (view.task, view.epoch)

    def is_taken_before(self, placement: Placement) -> bool:
        """True if a task that was placed here earlier still holds the slot."""
        return any(one.id < placement.id and one.ended_at is None for one in self.open.values())

    def placement(self, task: Task) -> Placement:
        return self.open[task.id, task.epoch]


def lock(session: Session, alives: Sequence[Alive]) -> LockedRows:
    """Lock the devices, and every task that the heartbeats name or that is believed to be on the
    devices.
    """
    ids = sorted({alive.device for alive in alives})
    mine = select(Device).where(Device.id.in_(ids)).order_by(Device.id)
    locked = mine.with_for_update(key_share=True).execution_options(populate_existing=True)
    devices = {device.id: device for device in session.scalars(locked)}
    open_, lent = defaultdict[str, list[Placement]](list), defaultdict[str, list[Placement]](list)
    for placement in task_writer.open_placements(session, Placement.device_id, ids, guests=True):
        if placement.guest:
            lent[placement.device_id].append(placement)
        else:
            open_[placement.device_id].append(placement)
    named = {view.task for alive in alives for view in alive.residents}
    named |= {event.task for alive in alives for event in alive.events}
    named |= {image["task"] for alive in alives for image in alive.ahead}
    named |= {task for alive in alives for task, _ in alive.hung}
    named |= {
        placement.task_id for of in (open_, lent) for each in of.values() for placement in each
    }
    here = or_(Task.id.in_(named), Task.image_on.in_(ids), Task.move_to.in_(ids))
    tasks = task_writer.locked_tasks(session, here)
    _shelve(session, tasks, alives)
    _lock_needs(session, alives)
    unanswered = defaultdict[str, list[OutboxOrder]](list)
    if tasks:
        query = select(OutboxOrder).where(
            OutboxOrder.device_id.in_(ids), OutboxOrder.answered_at.is_(None)
        )
        for order in session.scalars(
            query.order_by(OutboxOrder.id).options(defer(OutboxOrder.body))
        ):
            unanswered[order.device_id].append(order)
    may_show = any(alive.facts.get("mounts") is not None for alive in alives)
    return LockedRows(
        devices=devices,
        tasks=tasks,
        open=open_,
        lent=lent,
        near=_by_device(tasks.values()),
        unanswered=unanswered,
        mounts=mounts.paths(session) if may_show else {},
    )


def _by_device(tasks: Iterable[Task]) -> dict[str, list[Task]]:
    near = defaultdict[str, list[Task]](list)
    for task in tasks:
        for device in {task.seat, task.image_on, task.move_to} - {None}:
            near[str(device)].append(task)
    return near


def _shelve(session: Session, tasks: Mapping[str, Task], alives: Sequence[Alive]) -> None:
    """Take, in one statement, the datablock locks of all tenants whose tasks are about to publish.

    So two islands that publish for the same tenants cannot deadlock.
    """
    events = (event for alive in alives for event in alive.events)
    done = {event.task for event in events if isinstance(event, messages.Finished)}
    publish = [task for id, task in tasks.items() if id in done and task.descriptor.get("publish")]
    if publish:
        datablocks.shelve(session, {task.tenant_id for task in publish})


def _lock_needs(session: Session, alives: Sequence[Alive]) -> None:
    """Lock, in one order, the needs of graph tasks that take blocks from each other.

    Needed where one such task reports an output while another one gives up waiting for an input.
    """
    events = [event for alive in alives for event in alive.events]
    lacking = [e.task for e in events if isinstance(e, messages.Paused) and e.lacks]
    if not lacking:
        return
    told = {event.task for event in events}
    mine = select(Need.task_id).where(or_(Need.task_id.in_(lacking), Need.needs_id.in_(told)))
    session.execute(mine.order_by(Need.task_id, Need.needs_id, Need.port).with_for_update())


def rows_of_device(device: Device, believed: LockedRows) -> DeviceRows:
    tasks = believed.tasks
    open_, lent = believed.open.get(device.id, ()), believed.lent.get(device.id, ())
    return DeviceRows(
        device=device,
        tasks=tasks,
        near=believed.near.get(device.id, []),
        open={(row.task_id, row.epoch): row for row in open_},
        lent_to=[
            to
            for row in sorted((*lent, *open_), key=lambda row: row.id)
            if (to := _lent_to(row, tasks))
        ],
        unanswered=believed.unanswered.get(device.id, []),
    )


def _lent_to(placement: Placement, tasks: Mapping[str, Task]) -> tuple[str, int] | None:
    """Return the (task, epoch) that may have ranks on this placement's device, but has another home
    device.
    """
    task = tasks.get(placement.task_id)
    if task is not None and gang_tickets.is_ticket(task):
        return str(task.gang_id), task.good_for
    return (placement.task_id, placement.epoch) if placement.guest else None


def placement_of(session: Session, house: DeviceRows, task_id: str, epoch: int) -> Placement | None:
    """The task's placement in this epoch on this device, ended or not."""
    if (task_id, epoch) in house.open:
        return house.open[task_id, epoch]
    query = select(Placement).where(
        Placement.task_id == task_id,
        Placement.epoch == epoch,
        Placement.device_id == house.device.id,
        ~Placement.guest,
    )
    return session.scalar(query)
