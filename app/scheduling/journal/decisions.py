"""Writes a plan: applies each decision to the rows, and puts the orders that follow into the
outbox.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sqlalchemy import text
from sqlalchemy.orm import Session

from app.core.model import lifecycle
from app.core.model.decision_rule import DecisionRule
from app.core.model.lifecycle import Move
from app.core.model.protocol import messages
from app.core.model.provisions import notice
from app.core.model.snapshot import Plan, PlanDecision, Snapshot
from app.core.scheduling.record import as_json
from app.core.scheduling.rounds import plan_parts
from app.db import transactions
from app.db.models import Cycle, Device, Placement, Task
from app.scheduling import gang_tickets, guest_placements, ledger
from app.scheduling.journal import (
    losses,
    orders,
    plan_rows,
    request_needs,
    task_writer,
    tickets,
)
from app.scheduling.journal.plan_rows import PlanRows
from app.settings import settings


@dataclass(slots=True)
class UnwrittenPlan:
    """Holds a plan that is written in parts, each in a transaction of its own.

    `seen` is the snapshot from which the plan was decided; it is stored with the first part, so
    that the decisions can be reproduced.
    """

    rest: Plan | None
    seen: Snapshot | None = None
    cycle_id: int | None = None
    is_begun: bool = False


def store(session: Session, plan: Plan, *, seen: Snapshot | None = None) -> bool:
    """Write a whole plan in its order; see `store_part`."""
    return store_part(session, UnwrittenPlan(plan, seen), most=len(plan.decisions))


def store_part(session: Session, unwritten: UnwrittenPlan, *, most: int) -> bool:
    """Write about `most` decisions of a plan, and put the orders that they need into the outbox.

    Returns False, and writes nothing, if the plan is out of date: a user's action on one of the
    tasks is being written at the same time, or a device has reported the end of a task since an
    earlier part was written.  The next plan will include it.
    """
    if unwritten.rest is None:
        return True
    part, rest = plan_parts.cut(unwritten.rest, most)
    with session.no_autoflush:
        rows = plan_rows.load(session, part)
        if rows is None:
            return False
        if not unwritten.is_begun:
            _begin(session, unwritten)
        elif not plan_parts.is_legal(part, {id: task.state for id, task in rows.tasks.items()}):
            return False
        for decision in part.decisions:
            task = rows.tasks[decision.task]
            _DECIDED[Move(decision.move)](session, rows, task, decision)
        if unwritten.cycle_id is not None:
            _keep_decisions(session, unwritten.cycle_id, rows, part)
        if rows.divided:
            guest_placements.check_fractions(session, rows.divided)
    unwritten.rest = rest
    return True


def _begin(session: Session, unwritten: UnwrittenPlan) -> None:
    """Write what belongs to a plan as a whole: idle-credit floors, and what the round saw.

    A round that only applied start conditions (rule "start"), and moved no device, is not stored.
    """
    unwritten.is_begun = True
    plan, seen = unwritten.rest, unwritten.seen
    if plan is None or seen is None:
        return
    if plan.lifts:
        ledger.lift(session, seen.island, plan.lifts)
    if any(decision.rule != "start" for decision in plan.decisions):
        cycle = Cycle(island=seen.island, now_s=plan.now_s, snapshot=as_json(seen))
        session.add(cycle)
        session.flush()
        unwritten.cycle_id = cycle.id


def _keep_decisions(session: Session, cycle_id: int, rows: PlanRows, part: Plan) -> None:
    kept = [
        {
            "cycle_id": cycle_id,
            "task_id": decision.task,
            "tenant_id": rows.tasks[decision.task].tenant_id,
            "move": decision.move,
            "rule": decision.rule,
            "because": decision.because,
            "devices": decision.devices,
            "against": decision.against,
        }
        for decision in part.decisions
        if decision.rule != "start"
    ]
    session.execute(_KEEP_DECISIONS, {"decisions": json.dumps(kept)})


_KEEP_DECISIONS = text(
    """
    insert into decisions (cycle_id, task_id, tenant_id, move, rule, because, devices, against)
    select cycle_id, task_id, tenant_id, move, rule, because, devices, against
    from jsonb_populate_recordset(cast(null as decisions), cast(:decisions as jsonb))
    """
)


def _unlock(session: Session, rows: PlanRows, task: Task, decision: PlanDecision) -> None:
    task_writer.move_task(session, task, decision.move)


def _lock(session: Session, rows: PlanRows, task: Task, decision: PlanDecision) -> None:
    task_writer.move_task(session, task, decision.move)
    task_writer.tell(session, task, "task.held", decision.because)


def _launch(session: Session, rows: PlanRows, task: Task, decision: PlanDecision) -> None:
    device = rows.devices[str(decision.device)]
    if rows.releases and any(isinstance(row, Placement) for row in session.dirty):
        session.flush()  # a flush inserts before it updates: first release the slot
    task_writer.move_task(session, task, Move.Launch)
    task.epoch += 1
    task.event_seq = task.order_seq = task.held_us = task.prepared_us = 0
    task.cost_milli = decision.cost
    task.seat, task.launched_at = device.id, transactions.now(session)
    task.started_at = task.resized_at = None
    task.shares = decision.shares
    all_cost = decision.cost or sum(rows.devices[id].cost_milli for id in decision.devices)
    placement = guest_placements.placement_on(task, device, all_cost // len(decision.devices))
    placement.shares = decision.shares
    session.add(placement)
    rows.open[task.id] = placement
    devices = [rows.devices[id] for id in decision.devices]
    if more := devices[1:]:
        guest_placements.lend(session, task, more, all_cost - placement.cost_milli)
        task.resized_at = transactions.now(session)  # not null marks guests; set again at the start
    if gang_tickets.is_ticket(task):
        tickets.keep_seats(session, rows, task, placement, decision)
        return
    if task.gang_id:
        devices += gang_tickets.kept(session, task)
    launch = replace(rows.shelf.launch(task, device), beside=decision.shares)
    if device.id in rows.lent or _awaits_guests(session, task, device):
        # prepare now; start only after the island confirms
        launch = replace(launch, surely_until_us=0)
    hosts = guest_placements.by_host(devices)
    orders.order_hosts(session, rows, task, hosts, launch)
    task_writer.tell(
        session, task, "task.launched", decision.because, device=device.id, rule=decision.rule
    )


def _awaits_guests(session: Session, task: Task, home: Device) -> bool:
    if task.resized_at is None or home.kind == "cpu":
        return False
    session.flush()
    return guest_placements.awaits(session, task, home)


def _share(session: Session, rows: PlanRows, task: Task, decision: PlanDecision) -> None:
    task_writer.move_task(session, task, Move.Share)
    task.shares = True
    task_writer.tell(session, task, "task.shares", decision.because, device=task.seat)


def _charge(session: Session, rows: PlanRows, task: Task, decision: PlanDecision) -> None:
    """Change what a second of the task costs, from its device's last report on (rule F1)."""
    task_writer.move_task(session, task, Move.Charge)
    task.cost_milli = rows.open[task.id].cost_milli = decision.cost


def _pause(session: Session, rows: PlanRows, task: Task, decision: PlanDecision) -> None:
    task_writer.move_task(session, task, Move.Pause)
    _leaves(rows, task)
    if gang_tickets.is_ticket(task):
        task_writer.tell(session, task, "task.pausing", decision.because, rule=decision.rule)
        return
    moves, successor = (
        decision.rule in (DecisionRule.MOVE, DecisionRule.REGROUP),
        decision.against or "",
    )
    if rows.seats.get(successor) != task.seat:
        successor = ""  # the successor gets another of the released slots
    more = _notice(task, decision)
    orders.write_order(session, task, messages.Pause, successor=successor, moves=moves, **more)
    # The message does not name the successor, which may be another tenant's task.
    told = decision.because
    if more:
        told = f"{told} It is told, and has {more['notice_us'] / 1e6:g} s."
    task_writer.tell(session, task, "task.pausing", told, rule=decision.rule)


def _notice(task: Task, decision: PlanDecision) -> dict[str, Any]:
    """Return the fields of a Pause that give a command its notice; {} if it gets none."""
    if not task.descriptor.get("notice"):
        return {}
    bounds = {"most_s": settings().notice_max_s, "slice_s": settings().slice_max_s}
    us = notice.notice_us(task.spec.notice, decision.rule, **bounds)
    return {"notice_us": us, "why": notice.OF_RULE[decision.rule]} if us else {}


def _leaves(rows: PlanRows, task: Task) -> None:
    """Mark all devices that the task holds as leaving, so that they can be promised to others."""
    for placement in (rows.open[task.id], *rows.guests.get(task.id, ())):
        placement.leaving = True


def _splice(session: Session, rows: PlanRows, task: Task, decision: PlanDecision) -> None:
    task_writer.move_task(session, task, Move.Splice)
    home, guests = rows.open[task.id], rows.guests.get(task.id, [])
    for guest in guests:
        guest.leaving = guest.device_id not in decision.devices
    stay = [home, *(guest for guest in guests if not guest.leaving)]
    had = {placement.device_id for placement in stay}
    lent = [rows.devices[id] for id in decision.devices if id not in had]
    if lent:
        session.flush()  # first release the slots
        cost = decision.cost or sum(rows.devices[id].cost_milli for id in decision.devices)
        guest_placements.lend(session, task, lent, cost - sum(each.cost_milli for each in stay))
        task.resized_at, task.cost_milli = transactions.now(session), decision.cost
    hosts = guest_placements.by_host(rows.devices[id] for id in decision.devices)
    orders.order_hosts(session, rows, task, hosts)
    task_writer.tell(
        session, task, "task.resizing", decision.because, devices=list(decision.devices)
    )


def _cancel(session: Session, rows: PlanRows, task: Task, decision: PlanDecision) -> None:
    on_a_device = task.state in lifecycle.ON_A_DEVICE
    task_writer.move_task(session, task, Move.Cancel)
    if on_a_device:
        _leaves(rows, task)
        orders.write_order(session, task, messages.Cancel)
    else:
        task_writer.end_task(session, task, "task.cancelled", decision.because)


def _give_up(session: Session, rows: PlanRows, task: Task, decision: PlanDecision) -> None:
    task_writer.move_task(session, task, Move.GaveUp)
    told = request_needs.why_never(session, task) if task.standing else None
    task.cause, task.message = "needs", told or decision.because
    task_writer.end_task(session, task, "task.failed", task.message)


def _lose(session: Session, rows: PlanRows, task: Task, decision: PlanDecision) -> None:
    """End the stay of a task after the lease of its unheard device has ended.

    What the task held since the device's last heartbeat is charged after the commit, for the reason
    given at `let_go`.
    """
    placement = rows.open[task.id]
    unheard_us = losses.unheard_us_of_placement(session, placement, rows.open.values())
    if unheard_us:
        held_us = {placement.id: placement.held_us + unheard_us}
        for guest in guest_placements.of_task(session, task):
            held_us[guest.id] = guest_placements.held_us_with(session, guest, unheard_us)
        transactions.after_commit(session, partial(tickets.charge_rest, task.id, held_us))
    losses.lose(session, task, placement, decision.because)


_DECIDED = {
    Move.Unlocked: _unlock,
    Move.Locked: _lock,
    Move.Launch: _launch,
    Move.Splice: _splice,
    Move.Share: _share,
    Move.Charge: _charge,
    Move.Pause: _pause,
    Move.Paused: tickets.let_go,
    Move.Finished: tickets.let_go,
    Move.Cancel: _cancel,
    Move.GaveUp: _give_up,
    Move.Lost: _lose,
}
