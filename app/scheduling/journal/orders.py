"""Write orders to devices; the outbox sends them after the commit."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.core.model import messages, migration
from app.core.model.migration import Moving
from app.db import transactions
from app.db.models import Device, Order, Task
from app.scheduling.journal.plan_rows import PlanRows

FOR_EVER_US = 2**61


def order_saves(session: Session, island: str) -> None:
    """Order the checkpoints that users asked for while their tasks run: an action that needs no
    decision.
    """
    wished = select(Task).where(Task.save_asked, Task.state == "running", Task.island == island)
    free = wished.with_for_update(key_share=True, skip_locked=True)
    for task in session.scalars(free.execution_options(populate_existing=True)):
        task.save_asked = False
        write_order(session, task, "Save")


def order_round(session: Session, task: Task, moving: Moving) -> None:
    """Order one more checkpoint of a task that is being moved, while it runs."""
    task.moving = migration.as_json(replace(moving, asked=len(moving.rounds) + 1))
    write_order(session, task, "Save")


def write_order(session: Session, task: Task, kind: str, **details: Any) -> None:
    task.order_seq += 1
    write_order_to(session, task, str(task.seat), kind, **details)


def write_order_to(session: Session, task: Task, device: str, kind: str, **details: Any) -> None:
    order = messages.decode(
        {"is": kind, "task": task.id, "epoch": task.epoch, "seq": task.order_seq, **details}
    )
    row = Order(
        task_id=task.id,
        epoch=task.epoch,
        seq=task.order_seq,
        device_id=device,
        kind=kind,
        body=messages.encode(order),
        sent_at=transactions.now(session),
        sends=1,
    )
    session.add(row)
    session.info.setdefault("ordered", []).append(row)


def ordered(session: Session) -> list[Order]:
    """Return the orders of this transaction.  They are counted as sent, because they are sent when
    it commits.
    """
    return [order for order in session.info.pop("ordered", ()) if order in session]


def order_hosts(
    session: Session,
    rows: PlanRows,
    task: Task,
    kind: str,
    hosts: Sequence[Sequence[Device]],
    **details: Any,
) -> None:
    """Order the home device to place its ranks on these hosts; launch remote ranks on the other
    hosts.

    A new secret authenticates the hosts to each other, so a worker that obeys an older order cannot
    join.
    """
    seats, links = [len(devices) for devices in hosts], {}
    if len(hosts) > 1:
        links = {"secret": secrets.token_hex(32)}
    write_order(session, task, kind, seats=seats, links=links, **details)
    home = hosts[0][0]
    for host, (device, *_) in enumerate(hosts[1:], 1):
        outpost = {
            "images": [],  # the coordinator host sends its part of the image
            "outputs": [],
            "publish": [],
            "budget_us": FOR_EVER_US,  # the coordinator host enforces the time limit
            "incarnation": device.incarnation,
            "surely_until_us": 0,
            "seats": seats,
            "host": host,
            "links": {**links, "home": home.links},
        }
        body = {**rows.shelf.body(task, home), **outpost}
        write_order_to(session, task, device.id, "Launch", **body)
