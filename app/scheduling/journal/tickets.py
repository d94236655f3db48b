"""Keeps, charges and releases the slots of tickets, which a gang over several islands holds."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import partial

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.core.model.lifecycle import ENDED, Move
from app.core.model.snapshot import PlanDecision
from app.db import transactions
from app.db.models import Placement, Task
from app.scheduling import gang_tickets, guest_placements, ledger
from app.scheduling.journal import settlement, task_writer
from app.scheduling.journal.device_rows import DeviceRows
from app.scheduling.journal.losses import HUNG, LOST
from app.scheduling.journal.plan_rows import PlanRows


def keep_seats(
    session: Session, rows: PlanRows, ticket: Task, placement: Placement, decision: PlanDecision
) -> None:
    """Start a ticket at once, without a device's report: its slots are kept for its gang from now
    on.
    """
    ticket.good_for = rows.tasks[str(ticket.gang_id)].epoch + 1
    task_writer.move_task(session, ticket, Move.Started)
    session.flush()
    others = select(Placement.id).where(
        Placement.device_id.in_(decision.devices),
        Placement.ended_at.is_(None),
        Placement.task_id != ticket.id,
    )
    if not session.scalar(select(others.exists())):
        begin_to_keep(session, ticket, placement)
    seats = ", ".join(decision.devices)
    told = f"{decision.because} It keeps {seats} for its gang."
    task_writer.tell(session, ticket, "task.launched", told, device=ticket.seat, rule=decision.rule)


def begin_to_keep(session: Session, ticket: Task, placement: Placement) -> None:
    """Begin to charge a ticket: the task that had the slot before has left.

    The time is taken from the database's clock, as a ticket has no home device that measures it.
    """
    now = ticket.started_at = placement.started_at = transactions.now(session)
    ticket.first_started_at = ticket.first_started_at or now
    guest_placements.seated(session, guest_placements.of_task(session, ticket))


def let_go(session: Session, rows: PlanRows, ticket: Task, decision: PlanDecision) -> None:
    """Release a ticket's slots: no ranks of its gang run there any more.

    What the ticket held since the last heartbeat of its device is charged in a transaction of its
    own.  This transaction may have charged other accounts already, and two islands that charge the
    same accounts in different orders could deadlock.
    """
    placement = rows.open[ticket.id]
    kept = (placement, *guest_placements.of_task(session, ticket))
    held_us = {each.id: _kept_us(each, transactions.now(session)) for each in kept}
    transactions.after_commit(session, partial(charge_rest, ticket.id, held_us))
    task_writer.close_stay(
        session, ticket, placement, "finished" if decision.move == Move.Finished else "paused"
    )
    task_writer.move_task(session, ticket, decision.move)
    if ticket.state in ENDED:
        task_writer.end_task(session, ticket, "task.done", decision.because)
    else:
        task_writer.tell(session, ticket, "task.paused", decision.because)


def charge_rest(task_id: str, held_us: Mapping[int, int]) -> None:
    """Charge placements that have ended, by id, up to what each held in all."""
    with transactions.transaction() as session:
        task = session.get_one(Task, task_id, with_for_update={"key_share": True})
        query = select(Placement).where(Placement.id.in_(held_us)).order_by(Placement.id)
        for placement in session.scalars(query):
            before_us = placement.held_us
            ledger.note(session, placement, held_us[placement.id])
            more_us = placement.held_us - before_us
            if placement.guest:
                task.guest_held_us += more_us
            else:
                task.total_held_us += more_us
                if placement.end in (LOST, HUNG):
                    task.unheard_us += more_us
        settlement.write_down(session)


def _kept_us(placement: Placement, until: datetime) -> int:
    if placement.started_at is None:
        return 0
    return round((until - placement.started_at).total_seconds() * 1e6)


def charge_tickets(session: Session, house: DeviceRows) -> None:
    """Charge the tickets on a device for the slots that they keep, at each heartbeat."""
    for (id, _), placement in house.open.items():
        ticket = house.tasks[id]
        if not gang_tickets.is_ticket(ticket) or placement.ended_at is not None:
            continue
        if placement.started_at is None and not house.is_taken_before(placement):
            begin_to_keep(session, ticket, placement)
        before_us = placement.held_us
        ledger.note(session, placement, _kept_us(placement, transactions.now(session)))
        ticket.held_us = placement.held_us
        guests = guest_placements.of_task(session, ticket)
        guest_placements.charge(session, ticket, guests, placement.held_us - before_us)
