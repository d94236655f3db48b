"""Write orders to devices; the outbox sends them after the commit."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import select, tuple_
from sqlalchemy.orm import Session

from app.core.model import codec
from app.core.model.checkpoints.migration import Moving
from app.core.model.protocol import messages
from app.core.model.protocol.messages import JSON, Launch, Resize, Save
from app.db import transactions
from app.db.models import Device, OutboxOrder, Task
from app.scheduling import launch_image_key, launch_secrets
from app.scheduling.journal.device_rows import DeviceRows
from app.scheduling.journal.plan_rows import PlanRows
from app.scheduling.round_notes import notes_of

FOR_EVER_US = 2**61


def order_saves(session: Session, island: str) -> None:
    """Order the checkpoints that users requested while their tasks run.

    This needs no decision of the scheduler.
    """
    wished = select(Task).where(Task.save_asked, Task.state == "running", Task.island == island)
    free = wished.with_for_update(key_share=True, skip_locked=True)
    for task in session.scalars(free.execution_options(populate_existing=True)):
        task.save_asked = False
        write_order(session, task, Save)


def order_round(session: Session, task: Task, moving: Moving) -> None:
    """Order one more checkpoint of a task that is being moved, while it runs."""
    task.moving = codec.to_json(replace(moving, asked=len(moving.rounds) + 1), whole=True)
    write_order(session, task, Save)


def write_order(session: Session, task: Task, kind: type[messages.Order], **details: Any) -> None:
    """Order something of the device that the task is on."""
    task.order_seq += 1
    order = kind(task=task.id, epoch=task.epoch, seq=task.order_seq, **details)
    _write(session, str(task.seat), order, messages.checked(order))


def _write_launch(session: Session, task: Task, device: Device, launch: Launch) -> None:
    launch = launch_secrets.with_secrets(session, task, device, launch)
    launch = launch_image_key.with_image_key(session, task, device, launch)
    _write(session, device.id, launch, messages.checked(launch))


def _write(session: Session, device: str, order: messages.Order, body: JSON) -> None:
    row = OutboxOrder(
        task_id=order.task,
        epoch=order.epoch,
        seq=order.seq,
        device_id=device,
        kind=type(order).__name__,
        body=body,
        sent_at=transactions.now(session),
        sends=1,
    )
    session.add(row)
    notes_of(session).orders.append(row)


def ordered(session: Session) -> list[OutboxOrder]:
    """Return the orders of this transaction.  They are counted as sent, because they are sent when
    it commits.
    """
    notes = notes_of(session)
    rows, notes.orders = notes.orders, []
    return [order for order in rows if order in session]


def order_hosts(
    session: Session,
    rows: PlanRows,
    task: Task,
    hosts: Sequence[Sequence[Device]],
    launch: Launch | None = None,
) -> None:
    """Place the ranks of a task on these hosts; the first of them is the host of its home device.

    The home device is ordered to launch the task, or, without a `launch`, to move the ranks of the
    running task.  Each other host is ordered to launch its remote ranks.

    A new secret authenticates the hosts to each other, so a worker that obeys an older order cannot
    join.
    """
    seats, links = [len(devices) for devices in hosts], {}
    if len(hosts) > 1:
        links = {"secret": secrets.token_hex(32)}
    home = hosts[0][0]
    if launch is None:
        named = {} if _refuses_names(home) else {"guests": _guests(hosts[0])}
        write_order(session, task, Resize, seats=seats, links=links, **named)
    else:
        task.order_seq += 1
        guests = _guests(hosts[0])
        placed = replace(launch, seq=task.order_seq, seats=seats, links=links, guests=guests)
        _write_launch(session, task, home, placed)
    for host, devices in enumerate(hosts[1:], 1):
        remote = _of_remote_ranks(rows.shelf.launch(task, home), devices[0])
        joining = {**links, "home": home.links}
        placed = replace(remote, seats=seats, host=host, links=joining, guests=_guests(devices))
        _write_launch(session, task, devices[0], placed)


def readdress_launches(session: Session, house: DeviceRows) -> None:
    """Send launches of remote ranks that a home device waits for to the new process of this device.

    They name the process that was replaced, so the new one would not obey them. Ranks that a home
    has reached already are lost with that process; the home reports it.
    """
    tasks = (house.tasks.get(id) for id, _ in house.lent_to)
    awaited = [
        (task.id, task.epoch, task.order_seq)
        for task in tasks
        if task is not None and task.state in ("starting", "splicing")
    ]
    if not awaited:
        return
    newest = tuple_(OutboxOrder.task_id, OutboxOrder.epoch, OutboxOrder.seq).in_(awaited)
    here = (OutboxOrder.device_id == house.device.id, OutboxOrder.kind == "Launch")
    for order in session.scalars(select(OutboxOrder).where(newest, *here)):
        order.body = {**order.body, "incarnation": house.device.incarnation}
        order.answered_at, order.sent_at = None, transactions.now(session)
        order.sends += 1
        notes_of(session).orders.append(order)


def _guests(devices: Sequence[Device]) -> list[str]:
    """Return the further devices of a host that the task's processes see; a CPU needs no names."""
    first, *others = devices
    return [] if first.kind == "cpu" else [device.id for device in others]


def _refuses_names(device: Device) -> bool:
    """True for a worker of an older version, which takes no names of devices in a Resize."""
    return "ranks_apart" in device.facts


def _of_remote_ranks(launch: Launch, device: Device) -> Launch:
    """Return the launch of remote ranks.

    The coordinator host sends their part of the image, stores the outputs and enforces the time
    limit.
    """
    return replace(
        launch,
        spec=replace(launch.spec, outputs=(), publish={}),
        images=[],
        budget_us=FOR_EVER_US,
        incarnation=device.incarnation,
        surely_until_us=0,
    )
