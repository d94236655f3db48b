"""Records what tasks used of the network, as the proxies of their devices have counted it."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.core.model.protocol.messages import Alive, ResidentView
from app.core.model.provisions.network_policy import FIGURES
from app.db.models import Placement
from app.scheduling import gang_tickets
from app.scheduling.journal.device_rows import DeviceRows


def take_in(session: Session, house: DeviceRows, alive: Alive) -> None:
    """Keep the figures of each epoch in its placement on this device.

    They only grow, so a report that says less than an earlier one changes nothing.
    """
    for view in alive.residents:
        if not view.network:
            continue
        placement = _placement(session, house, view)
        if placement is None:
            continue  # a device may speak only of tasks that were placed on it
        before = placement.network or {}
        now = {name: max(before.get(name, 0), view.network.get(name, 0)) for name in FIGURES}
        if now != before:
            placement.network = now


def _placement(session: Session, house: DeviceRows, view: ResidentView) -> Placement | None:
    """Return the placement of the resident's epoch on this device.

    For remote ranks it may be the placement of a ticket of their gang.
    """
    if (view.task, view.epoch) in house.open:
        return house.open[view.task, view.epoch]
    for placement in house.open.values():
        task = house.tasks[placement.task_id]
        gang = (task.gang_id, task.good_for)
        if gang_tickets.is_ticket(task) and gang == (view.task, view.epoch):
            return placement
    there = (Placement.task_id == view.task, Placement.epoch == view.epoch)
    query = select(Placement).where(*there, Placement.device_id == house.device.id)
    return session.scalar(query.order_by(Placement.guest).limit(1))
