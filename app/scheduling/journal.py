"""Write plans and heartbeats into rows: the only writer of the state of tasks, placements and
orders.

There are two entries.  Both run in the island's transaction after its row was locked, so that only
one scheduler writes at a time:

* `store(plan)` writes what was decided, and the orders that follow from it;
* `record(alive)` writes what a device reports, and builds the answer.

Every event is fenced.  It counts only if it comes from the task's present epoch and from the
process that holds the task, with the next `seq`.  Any other event is history and changes nothing.

Actions that users request lock tasks too: the tasks of one request, in the order of their ids.  To
avoid a deadlock, `record` (or `lock`, for several heartbeats) locks in the same order, and at once,
everything that it may touch.  `store` never waits for a lock.

The number of statements dominates the cost of a round.  So each entry reads at the beginning what
it may need and changes rows in memory.  It flushes on the way only where the order of writes
matters: a slot is released before it is promised again.  Sums are noted during the round, and
`settle` writes them.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import uuid_utils
from sqlalchemy import ColumnElement, func, or_, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.orm import InstrumentedAttribute, Session, aliased, defer

from app.core.fairness import fair_tree
from app.core.model import lifecycle, messages, migration
from app.core.model.lifecycle import ENDED, Move
from app.core.model.messages import CAUSES, Alive, Answer, LogLines, ResidentView, key
from app.core.model.migration import ANYWHERE, Moving
from app.core.model.snapshot import TIER_WINDOW_S, Decision, Plan, Snapshot
from app.core.placement import legs
from app.core.scheduling.board import been_away
from app.core.scheduling.record import as_json
from app.core.units import counted
from app.data import datablocks, graphs
from app.db import transactions
from app.db.models import (
    Checkpoint,
    Cycle,
    Device,
    Event,
    Host,
    LogLine,
    Metric,
    Need,
    Order,
    Placement,
    Request,
    Task,
)
from app.db.models import Decision as DecisionRow
from app.messaging import outbox, webhooks
from app.scheduling import gang_tickets, guest_placements, launch_order, ledger
from app.settings import settings

log = logging.getLogger(__name__)

CHANGES = "roundhouse"  # NOTIFY channel that wakes open streams when there is something to read
RETRY_BACKOFF_S = 2.0  # wait before the first retry; doubled with each attempt
RETRY_LONGEST_S = 600.0
STORE_AGAIN_S = 10.0  # wait before a new launch after the store was unreachable
FOR_EVER_US = 2**61
LOST = "lost"  # `Placement.end` if the device died, hung or was replaced
HUNG = "hung"  # `Placement.end` if the device reported later that the task made it hang
DEVICES_HUNG = 2  # devices that a task may make hang before it is not started again
LAUNCHES_UNSEEN = 20  # resends to a live device that never shows the task: it counts as lost then


# --- what was decided ---------------------------------------------------------------------------


def store(session: Session, plan: Plan, *, seen: Snapshot | None = None) -> bool:
    """Write the plan in its order, and put the orders that it needs into the outbox.

    `seen` is the snapshot that the plan was decided from; it is stored so that the decisions can be
    reproduced.  Returns False, and writes nothing, if a user's action on one of the plan's tasks is
    being written at the same time.  The plan is out of date then, and the next plan will include
    the action.
    """
    with session.no_autoflush:
        desk = _desk(session, plan)
        if desk is None:
            return False
        if seen is not None and plan.lifts:
            ledger.lift(session, seen.island, plan.lifts)
        cycle = _keep_cycle(session, plan, seen)
        for decision in plan.decisions:
            task = desk.tasks[decision.task]
            _DECIDED[Move(decision.move)](session, desk, task, decision)
            if cycle is not None and decision.rule != "start":
                _keep_decision(session, cycle, task, decision)
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Desk:
    """The rows that a plan needs: its tasks, their open placements, and the devices that it
    assigns.
    """

    tasks: dict[str, Task] = field(default_factory=dict)
    open: dict[str, Placement] = field(default_factory=dict)
    guests: dict[str, list[Placement]] = field(default_factory=dict)
    seats: Mapping[str, str] = field(default_factory=dict)  # launched task -> its device
    lent: set[str] = field(default_factory=set)  # devices on which a guest of another task still is
    devices: Mapping[str, Device] = field(default_factory=dict)
    shelf: launch_order.Shelf = field(default_factory=launch_order.Shelf)


def _desk(session: Session, plan: Plan) -> _Desk | None:
    """Load and lock the rows of a plan.

    None if another transaction has locked one of its tasks, or if the conditions of a gang have
    changed.
    """
    wanted = {decision.task for decision in plan.decisions}
    if not wanted:
        return _Desk()
    gangs = {task.gang for task in plan.before.values() if task.gang}
    tasks = _locked(session, Task.id.in_(wanted | gangs), wait=False)
    if len(tasks) < len(wanted | gangs) or not _are_as_seen(session, plan, gangs):
        return None
    seated = [id for id, task in tasks.items() if task.state in lifecycle.ON_A_DEVICE]
    seats = {each.task: str(each.device) for each in plan.decisions if each.move == Move.Launch}
    given = [each for each in plan.decisions if each.move in (Move.Launch, Move.Splice)]
    query = select(Device, guest_placements.is_lent(Device.id))
    here = query.where(Device.id.in_([id for each in given for id in each.devices]))
    found = session.execute(here).all() if given else ()
    devices = {row.id: row for row, _ in found}
    launches = [
        (tasks[each.task], devices[str(each.device)])
        for each in given
        if each.move == Move.Launch or tasks[each.task].across_hosts
    ]
    return _Desk(
        tasks=tasks,
        open={row.task_id: row for row in _open(session, Placement.task_id, seated)},
        guests=guest_placements.guests(
            session, [id for id in seated if tasks[id].resized_at is not None]
        ),
        seats=seats,
        lent={row.id for row, is_lent in found if is_lent},
        devices=devices,
        shelf=launch_order.look_up(session, launches),
    )


def _are_as_seen(session: Session, plan: Plan, gangs: Collection[str]) -> bool:
    """True if the conditions of gangs that span islands, and of their tickets, are as the plan saw
    them.

    The gangs are locked, so that no other island decides about them meanwhile.
    """
    terms = gang_tickets.terms_among(gang_tickets.of_gangs(session, gangs))
    return all(
        task.conditions.terms == terms[id] for id, task in plan.before.items() if id in terms
    )


def _keep_cycle(session: Session, plan: Plan, seen: Snapshot | None) -> Cycle | None:
    """Store the round and its snapshot.  None if the round gave and took no device.

    Such a round only applied start conditions (rule "start").
    """
    if seen is None or all(decision.rule == "start" for decision in plan.decisions):
        return None
    cycle = Cycle(island=seen.island, now_s=plan.now_s, snapshot=as_json(seen))
    session.add(cycle)
    session.flush()
    return cycle


def _keep_decision(session: Session, cycle: Cycle, task: Task, decision: Decision) -> None:
    session.add(
        DecisionRow(
            cycle_id=cycle.id,
            task_id=task.id,
            tenant_id=task.tenant_id,
            move=str(decision.move),
            rule=decision.rule,
            because=decision.because,
            devices=list(decision.devices),
            against=decision.against,
        )
    )


def _unlock(session: Session, desk: _Desk, task: Task, decision: Decision) -> None:
    _move(session, task, decision.move)


def _lock(session: Session, desk: _Desk, task: Task, decision: Decision) -> None:
    _move(session, task, decision.move)
    tell(session, task, "task.held", decision.because)


def _launch(session: Session, desk: _Desk, task: Task, decision: Decision) -> None:
    device = desk.devices[str(decision.device)]
    if any(isinstance(row, Placement) for row in session.dirty):
        session.flush()  # a flush inserts before it updates: first release the slot
    _move(session, task, Move.Launch)
    task.epoch += 1
    task.event_seq = task.order_seq = task.held_us = 0
    task.cost_milli = decision.cost
    task.seat, task.launched_at = device.id, transactions.now(session)
    task.started_at = task.resized_at = None
    task.shares = decision.shares
    all_cost = decision.cost or sum(desk.devices[id].cost_milli for id in decision.devices)
    placement = Placement(
        task_id=task.id,
        epoch=task.epoch,
        device_id=device.id,
        tenant_id=task.tenant_id,
        user_id=task.user_id,
        kind=device.kind,
        cost_milli=all_cost // len(decision.devices),
        incarnation=device.incarnation,
        shares=decision.shares,
    )
    session.add(placement)
    desk.open[task.id] = placement
    devices = [desk.devices[id] for id in decision.devices]
    if more := devices[1:]:
        guest_placements.lend(session, task, more, all_cost - placement.cost_milli)
        task.resized_at = transactions.now(session)  # not null marks guests; set again at the start
    if gang_tickets.is_ticket(task):
        _keep_seats(session, desk, task, placement, decision)
        return
    if task.gang_id:
        devices += gang_tickets.kept(session, task)
    body = {**desk.shelf.body(task, device), "beside": decision.shares}
    if device.id in desk.lent:
        body["surely_until_us"] = 0  # prepare now; start only after the island confirms
    _order_hosts(session, desk, task, "Launch", guest_placements.by_host(devices), **body)
    tell(session, task, "task.launched", decision.because, device=device.id, rule=decision.rule)


def _keep_seats(
    session: Session, desk: _Desk, ticket: Task, placement: Placement, decision: Decision
) -> None:
    """Start a ticket at once, without a report of a device: its slots are kept for its gang from
    now on.
    """
    ticket.good_for = desk.tasks[str(ticket.gang_id)].epoch + 1
    _move(session, ticket, Move.Started)
    session.flush()
    others = select(Placement.id).where(
        Placement.device_id.in_(decision.devices),
        Placement.ended_at.is_(None),
        Placement.task_id != ticket.id,
    )
    if not session.scalar(select(others.exists())):
        _begin_to_keep(session, ticket, placement)
    seats = ", ".join(decision.devices)
    told = f"{decision.because} It keeps {seats} for its gang."
    tell(session, ticket, "task.launched", told, device=ticket.seat, rule=decision.rule)


def _begin_to_keep(session: Session, ticket: Task, placement: Placement) -> None:
    """Begin to charge a ticket: the task that had the slot before has left.

    The time is taken from the database's clock, as a ticket has no home device that measures it.
    """
    now = ticket.started_at = placement.started_at = transactions.now(session)
    ticket.first_started_at = ticket.first_started_at or now
    guest_placements.seated(session, guest_placements.of_task(session, ticket))


def _let_go(session: Session, desk: _Desk, ticket: Task, decision: Decision) -> None:
    """Release a ticket's slots: no ranks of its gang run there any more.

    What the ticket held since the last heartbeat of its device is charged in a transaction of its
    own.  This transaction may have charged other accounts already, and two islands that charge the
    same accounts in different orders could deadlock.
    """
    placement = desk.open[ticket.id]
    kept = (placement, *guest_placements.of_task(session, ticket))
    held_us = {each.id: _kept_us(each, transactions.now(session)) for each in kept}
    transactions.after_commit(session, partial(_charge_rest, ticket.id, held_us))
    _close(session, ticket, placement, "finished" if decision.move == Move.Finished else "paused")
    _move(session, ticket, decision.move)
    if ticket.state in ENDED:
        _end(session, ticket, "task.done", decision.because)
    else:
        tell(session, ticket, "task.paused", decision.because)


def _charge_rest(task_id: str, held_us: Mapping[int, int]) -> None:
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
        write_down(session)


def _kept_us(placement: Placement, until: datetime) -> int:
    if placement.started_at is None:
        return 0
    return round((until - placement.started_at).total_seconds() * 1e6)


def _share(session: Session, desk: _Desk, task: Task, decision: Decision) -> None:
    _move(session, task, Move.Share)
    task.shares = True
    tell(session, task, "task.shares", decision.because, device=task.seat)


def _pause(session: Session, desk: _Desk, task: Task, decision: Decision) -> None:
    _move(session, task, Move.Pause)
    _leaves(desk, task)
    if gang_tickets.is_ticket(task):
        tell(session, task, "task.pausing", decision.because, rule=decision.rule)
        return
    moves, successor = decision.rule in ("move", "regroup"), decision.against or ""
    if desk.seats.get(successor) != task.seat:
        successor = ""  # the successor gets another of the released slots
    _order(session, task, "Pause", successor=successor, moves=moves)
    # The message does not name the successor, which may be another tenant's task.
    tell(session, task, "task.pausing", decision.because, rule=decision.rule)


def _leaves(desk: _Desk, task: Task) -> None:
    """Mark all devices that the task holds as free to be promised to others."""
    for placement in (desk.open[task.id], *desk.guests.get(task.id, ())):
        placement.leaving = True


def _splice(session: Session, desk: _Desk, task: Task, decision: Decision) -> None:
    _move(session, task, Move.Splice)
    home, guests = desk.open[task.id], desk.guests.get(task.id, [])
    for guest in guests:
        guest.leaving = guest.device_id not in decision.devices
    stay = [home, *(guest for guest in guests if not guest.leaving)]
    had = {placement.device_id for placement in stay}
    lent = [desk.devices[id] for id in decision.devices if id not in had]
    if lent:
        session.flush()  # first release the slots
        cost = decision.cost or sum(desk.devices[id].cost_milli for id in decision.devices)
        guest_placements.lend(session, task, lent, cost - sum(each.cost_milli for each in stay))
        task.resized_at, task.cost_milli = transactions.now(session), decision.cost
    hosts = guest_placements.by_host(desk.devices[id] for id in decision.devices)
    _order_hosts(session, desk, task, "Resize", hosts)
    tell(session, task, "task.resizing", decision.because, devices=list(decision.devices))


def _cancel(session: Session, desk: _Desk, task: Task, decision: Decision) -> None:
    on_a_device = task.state in lifecycle.ON_A_DEVICE
    _move(session, task, Move.Cancel)
    if on_a_device:
        _leaves(desk, task)
        _order(session, task, "Cancel")
    else:
        _end(session, task, "task.cancelled", decision.because)


def _give_up(session: Session, desk: _Desk, task: Task, decision: Decision) -> None:
    _move(session, task, Move.GaveUp)
    task.cause, task.message = "needs", decision.because
    _end(session, task, "task.failed", decision.because)


def _lose(session: Session, desk: _Desk, task: Task, decision: Decision) -> None:
    """End the stay of a task after the lease of its unheard device has ended.

    What the task held since the device's last heartbeat is charged after the commit, for the reason
    given at `_let_go`.
    """
    placement = desk.open[task.id]
    unheard_us = _unheard_us_of(session, placement, desk.open.values())
    if unheard_us:
        held_us = {placement.id: placement.held_us + unheard_us}
        for guest in guest_placements.of_task(session, task):
            held_us[guest.id] = guest_placements.held_us_with(session, guest, unheard_us)
        transactions.after_commit(session, partial(_charge_rest, task.id, held_us))
    lose(session, task, placement, decision.because)


_DECIDED = {
    Move.Unlocked: _unlock,
    Move.Locked: _lock,
    Move.Launch: _launch,
    Move.Splice: _splice,
    Move.Share: _share,
    Move.Pause: _pause,
    Move.Paused: _let_go,
    Move.Finished: _let_go,
    Move.Cancel: _cancel,
    Move.GaveUp: _give_up,
    Move.Lost: _lose,
}


def order_saves(session: Session, island: str) -> None:
    """Order the checkpoints that users asked for while their tasks run: an action that needs no
    decision.
    """
    wished = select(Task).where(Task.save_asked, Task.state == "running", Task.island == island)
    free = wished.with_for_update(key_share=True, skip_locked=True)
    for task in session.scalars(free.execution_options(populate_existing=True)):
        task.save_asked = False
        _order(session, task, "Save")


def order_round(session: Session, task: Task, moving: Moving) -> None:
    """Order one more checkpoint of a task that is being moved, while it runs."""
    task.moving = migration.as_json(replace(moving, asked=len(moving.rounds) + 1))
    _order(session, task, "Save")


def break_off(session: Session, task: Task, because: str) -> None:
    """Give up a task's move, which has failed: the task keeps its state and stays where it is."""
    to = task.move_to if task.move_to != ANYWHERE else "another device"
    told = f"Not moved to {to}: {because}."
    if task.cancel_asked_at is None:
        stays = f"on {task.seat}" if task.seat else "when its turn comes"
        told += f" No step is lost; it stays {stays}."
    tell(session, task, "task.move_failed", told, to=task.move_to)
    task.move_to = task.moving = None


def _order(session: Session, task: Task, kind: str, **details: Any) -> None:
    task.order_seq += 1
    _order_to(session, task, str(task.seat), kind, **details)


def _order_to(session: Session, task: Task, device: str, kind: str, **details: Any) -> None:
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


def _order_hosts(
    session: Session,
    desk: _Desk,
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
    _order(session, task, kind, seats=seats, links=links, **details)
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
        body = {**desk.shelf.body(task, home), **outpost}
        _order_to(session, task, device.id, "Launch", **body)


# --- what a device says -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Believed:
    """All rows that some heartbeats may touch, locked, as they were before the heartbeats.

    `open` has the placements that have not ended, and `unanswered` the orders that the device has
    not yet acknowledged; both by device.  `lent` has the devices that a task with another home
    device holds as guests.
    """

    devices: dict[str, Device]
    tasks: dict[str, Task]
    open: dict[str, list[Placement]]
    lent: dict[str, list[Placement]]
    unanswered: dict[str, list[Order]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _House:
    """The rows of one device while its heartbeat is recorded.

    `open` has the device's placements that have not ended, by (task, epoch).  `lent_to` lists,
    oldest first, the (task, epoch) pairs that have ranks here but another home device.  Each must
    release the slot before the next may have it.  A gang for which a ticket keeps the device is in
    `lent_to` too.
    """

    device: Device
    tasks: dict[str, Task]
    open: dict[tuple[str, int], Placement]
    lent_to: list[tuple[str, int]]
    unanswered: list[Order]

    def is_lent_to(self, view: ResidentView) -> bool:
        return (view.task, view.epoch) in self.lent_to

    def may_sit(self, view: ResidentView) -> bool:
        return not self.lent_to or self.lent_to[0] == (view.task, view.epoch)

    def is_taken_before(self, placement: Placement) -> bool:
        """True if a task that was placed here earlier still holds the slot."""
        return any(one.id < placement.id and one.ended_at is None for one in self.open.values())

    def placement(self, task: Task) -> Placement:
        return self.open[task.id, task.epoch]


Recorded = tuple[Answer, bool]


def record_all(session: Session, alives: Sequence[Alive], *, careful: bool) -> list[Recorded]:
    """Record each heartbeat; stale ones are left out.

    With `careful`, each heartbeat is written in a savepoint of its own, so that a bad one cannot
    spoil the others.  Without it, any error is raised.
    """
    believed = lock(session, alives)
    found = [_record_apart(session, alive, believed, careful=careful) for alive in alives]
    return [one for one in found if one is not None]


def _record_apart(
    session: Session, alive: Alive, believed: Believed, *, careful: bool
) -> Recorded | None:
    if not careful:
        return _record(session, alive, believed, careful=False)
    try:
        with _apart(session):
            found = _record(session, alive, believed, careful=True)
            write_down(session)
            return found
    except (OperationalError, InterfaceError):
        raise  # the database went away: nothing is wrong with the heartbeat
    except Exception:
        log.exception("the heartbeat of %s could not be recorded", alive.device)
        return None


def record(session: Session, alive: Alive) -> Recorded | None:
    """Record one heartbeat.  Returns (answer, whether anything changed), or None for a stale
    heartbeat.
    """
    found = _record(session, alive, lock(session, [alive]), careful=True)
    write_down(session)
    return found


def _record(
    session: Session, alive: Alive, believed: Believed, *, careful: bool
) -> Recorded | None:
    with session.no_autoflush:
        unheard_us = _unheard_us(session, believed.devices.get(alive.device))
        device = _heard(session, alive, believed)
        if device is None:
            return None
        house = _house(device, believed)
        is_new = device.incarnation != alive.incarnation
        changed = is_new and _empty_house(session, house, unheard_us)
        changed |= _take_in_hung(session, house, alive)
        device.incarnation = alive.incarnation
        heard: dict[str, int] = {}
        for event in sorted(alive.events, key=lambda event: (event.task, event.epoch, event.seq)):
            changed |= _take_in(session, house, event, heard, careful=careful)
        keep: list[list[Any]] = []
        drop: list[list[Any]] = []
        for view in alive.residents:
            here = _confirm(session, house, view)
            if here and not house.may_sit(view):
                continue  # it stays, and gets the slot when the task before it has left
            (keep if here else drop).append([view.task, view.epoch])
        _charge_tickets(session, house)
        changed |= _miss(session, house, alive)
        changed |= _look_ahead(house, alive)
        answer = Answer(
            device=device.id,
            incarnation=alive.incarnation,
            sent_us=alive.sent_us,
            lease_us=int(settings().lease_s * 1e6),
            heard=heard,
            logged=_store_logs(session, house, alive.logs),
            keep=keep,
            drop=drop,
            expect=launch_order.ahead(
                session, [*_coming(house), *_following(session, house, alive)]
            ),
            given=_given(session, house, alive),
        )
        return answer, changed


def lock(session: Session, alives: Sequence[Alive]) -> Believed:
    """Lock the devices, and every task that the heartbeats name or that is believed to be on the
    devices.
    """
    ids = sorted({alive.device for alive in alives})
    mine = select(Device).where(Device.id.in_(ids)).order_by(Device.id)
    locked = mine.with_for_update(key_share=True).execution_options(populate_existing=True)
    devices = {device.id: device for device in session.scalars(locked)}
    open_, lent = defaultdict[str, list[Placement]](list), defaultdict[str, list[Placement]](list)
    for placement in _open(session, Placement.device_id, ids, guests=True):
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
    tasks = _locked(session, here)
    _shelve(session, tasks, alives)
    _lock_needs(session, alives)
    unanswered = defaultdict[str, list[Order]](list)
    if tasks:
        query = select(Order).where(Order.device_id.in_(ids), Order.answered_at.is_(None))
        for order in session.scalars(query.order_by(Order.id).options(defer(Order.body))):
            unanswered[order.device_id].append(order)
    return Believed(devices=devices, tasks=tasks, open=open_, lent=lent, unanswered=unanswered)


def _shelve(session: Session, tasks: Mapping[str, Task], alives: Sequence[Alive]) -> None:
    """Take the datablock locks of all tenants with tasks that are about to publish, in one
    statement.

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


def _house(device: Device, believed: Believed) -> _House:
    tasks = believed.tasks
    open_, lent = believed.open.get(device.id, ()), believed.lent.get(device.id, ())
    return _House(
        device=device,
        tasks=tasks,
        open={(row.task_id, row.epoch): row for row in open_},
        lent_to=[
            to
            for row in sorted((*lent, *open_), key=lambda row: row.id)
            if (to := _lent_to(row, tasks))
        ],
        unanswered=believed.unanswered.get(device.id, []),
    )


def _lent_to(placement: Placement, tasks: Mapping[str, Task]) -> tuple[str, int] | None:
    """The (task, epoch) that may have ranks on this placement's device, but has another home
    device.
    """
    task = tasks.get(placement.task_id)
    if task is not None and gang_tickets.is_ticket(task):
        return str(task.gang_id), task.good_for
    return (placement.task_id, placement.epoch) if placement.guest else None


def _heard(session: Session, alive: Alive, believed: Believed) -> Device | None:
    """Renew the lease on the device's row.  None if this heartbeat is not the device's newest."""
    device, now = believed.devices.get(alive.device), transactions.now(session)
    if device is None:
        device = believed.devices[alive.device] = _register(session, alive)
    if device.incarnation == alive.incarnation and alive.sent_us <= device.heard_us:
        return None
    if alive.incarnation < device.incarnation:
        return None  # a late or replayed heartbeat of a process that has been replaced
    device.heard_us = alive.sent_us
    device.seen_at = now
    lease_s = 0.0 if alive.facts.get("leaving") else settings().lease_s
    device.lease_until = now + timedelta(seconds=lease_s)
    device.kind = alive.facts["kind"]
    device.threads = int(alive.facts.get("threads", 1))
    device.memory_bytes = int(alive.facts.get("memory_bytes", 0))
    if device.facts != alive.facts:
        device.facts = alive.facts
    if (device.links, device.secret) != (alive.links, alive.secret):
        device.links, device.secret = alive.links, alive.secret
    return device


def _register(session: Session, alive: Alive) -> Device:
    facts = alive.facts
    host = insert(Host).values(name=facts["host"], island=facts["island"])
    session.execute(host.on_conflict_do_nothing())
    device = Device(
        id=alive.device,
        host=facts["host"],
        island=facts["island"],
        kind=facts["kind"],
        incarnation=alive.incarnation,
        heard_us=-1,
    )
    session.add(device)
    session.flush()
    return device


def _empty_house(session: Session, house: _House, unheard_us: int) -> bool:
    """Drop what a replaced worker process held.  Its device was unheard for `unheard_us` of its
    lease.

    The new process holds the device's file lock, which the kernel passes on only when every process
    of the old worker is gone.  So whatever was placed or paused there is lost, and the lease need
    not be awaited.
    """
    here = house.device.id
    lost = [task for task in house.tasks.values() if task.seat == here]
    share_us = unheard_us // max(1, _number_started(house.open.values(), here))
    for task in lost:
        because = f"The worker of {here} was restarted."
        lose(session, task, house.placement(task), because, unheard_us=share_us)
    for task in house.tasks.values():
        if task.image_on == here:
            _forget_image(session, task)
    return bool(lost)


def _take_in_hung(session: Session, house: _House, alive: Alive) -> bool:
    """Record the tasks because of which the device hung; it reports them until it is answered.

    After the first hang the task goes on elsewhere and no attempt is used up.  A task that makes a
    second device hang fails, because otherwise it could take one device after the other from all
    tenants.
    """
    changed = False
    for id, epoch in alive.hung:
        task, placement = house.tasks.get(id), _placement(session, house, id, epoch)
        if task is None or placement is None or placement.end != LOST:
            continue  # recorded before, or the stay ended in another way
        placement.end, changed = HUNG, True
        session.flush()
        where = select(Placement.device_id).where(
            Placement.task_id == id, Placement.end == HUNG, ~Placement.guest
        )
        devices = session.scalars(where.distinct().order_by(Placement.device_id)).all()
        if task.state in ENDED:
            continue
        if len(devices) < DEVICES_HUNG:
            told = f"{house.device.id} stopped working while this task ran on it. "
            told += "If another device also stops working, the task is not started again."
            tell(session, task, "task.hung", told, device=house.device.id, step=task.step)
        else:
            _quarantine(session, task, devices)
    return changed


def _quarantine(session: Session, task: Task, devices: Sequence[str]) -> None:
    """Fail the task wherever it is; a device that holds the task drops it at the next answer."""
    told = (
        f"The devices {' and '.join(devices)} stopped working while this task ran on them, so it "
        "is not started again. Check its code for deadlocks, signals, and very many or very large "
        "messages; then submit it again."
    )
    for placement in _open(session, Placement.task_id, [task.id]):
        _close(session, task, placement, "failed")
    _move(session, task, Move.GaveUp)
    _forget_image(session, task)
    task.cause, task.message, task.detail = HUNG, told, None
    _end(session, task, f"task.{task.state}", told, cause=HUNG, devices=list(devices))


def _forget_image(session: Session, task: Task) -> None:
    """Forget the image in host memory: the task goes on from a checkpoint, or from its beginning.

    Outputs that were not durable have to be made again before inputs that others make of them can
    arrive.  So inputs that may come late, and are still missing, may be late again.
    """
    task.image_on = None
    if late := legs.late(task.descriptor["run"]):
        again = update(Need).where(Need.task_id == task.id, Need.port.in_(late), ~Need.late)
        lacking = again.where(Need.given.is_(None)).values(late=True)
        session.execute(lacking.execution_options(synchronize_session=False))


def _unheard_us(session: Session, device: Device | None) -> int:
    """Return for how long tasks have held a device since its last heartbeat, in microseconds.

    The time ends with the device's lease at the latest, because the device stopped its tasks then.
    The device does not know of a lease that was extended while Redis was away, so that extension is
    not counted.
    """
    if device is None or device.seen_at is None or device.lease_until is None:
        return 0
    return fair_tree.unheard_us(
        now_s=transactions.now_s(session),
        heard_s=device.seen_at.timestamp(),
        lease_ends_s=device.lease_until.timestamp(),
        lease_s=settings().lease_s,
    )


def _unheard_us_of(session: Session, placement: Placement, lost: Iterable[Placement]) -> int:
    """Return the same for one placement: tasks that take turns on a device held it one at a
    time.
    """
    if placement.started_at is None:
        return 0
    unheard_us = _unheard_us(session, session.get(Device, placement.device_id))
    return unheard_us // max(1, _number_started(lost, placement.device_id))


def _number_started(placements: Iterable[Placement], device: str) -> int:
    return sum(row.device_id == device and row.started_at is not None for row in placements)


def lose(
    session: Session, task: Task, placement: Placement, because: str, *, unheard_us: int = 0
) -> None:
    """Record that the device no longer holds the task, which goes back to the queue.

    The task will resume from its last checkpoint.  `unheard_us` is how long it held the device
    after the device's last heartbeat (rule F1).
    """
    if placement.started_at is not None and unheard_us:
        _note_held(session, task, placement, placement.held_us + unheard_us)
        task.unheard_us += unheard_us
    device = task.seat
    _close(session, task, placement, LOST)
    _move(session, task, Move.Lost)
    _forget_image(session, task)
    if task.state in ENDED:
        _end(session, task, "task.cancelled", because)
    else:
        tell(session, task, "task.lost", because, device=device, step=task.step)


def hand_over(session: Session, tasks: Mapping[str, tuple[str, str]], lost: str) -> None:
    """Move the tasks of a lost island to other islands, where each resumes from its last durable
    image.

    `tasks` maps each task to (its new island, why).  The caller has locked the row of the island
    `lost`.

    Whatever still reports for the old island is stale from now on: placements are closed, images in
    the memory of its hosts are forgotten, and the next launch has a higher epoch.
    """
    rows = _locked(session, Task.id.in_(tasks))
    home = {row.task_id: row for row in _open(session, Placement.task_id, sorted(rows))}
    for id, task in rows.items():
        if id in home:
            unheard_us = _unheard_us_of(session, home[id], home.values())
            because = f"The island {lost} is lost, and {task.seat} with it."
            lose(session, task, home[id], because, unheard_us=unheard_us)
        if task.state in ENDED:
            continue  # it was being cancelled
        if task.move_to is not None:
            break_off(session, task, f"the island {lost} is lost")
        island, because = tasks[id]
        _change_island(session, task, island)
        _forget_image(session, task)
        tell(session, task, "task.reassigned", because, island=island, lost=lost)


def unseat(session: Session, ids: Sequence[str], because: str) -> None:
    """Take the slots from members, on a lost island, of gangs that span islands; the tasks stay
    there.

    The caller has locked the row of that island.  Tasks with a pending cancel end here.
    """
    rows = _locked(session, Task.id.in_(ids))
    home = {row.task_id: row for row in _open(session, Placement.task_id, sorted(rows))}
    for id, task in rows.items():
        if id in home:
            unheard_us = _unheard_us_of(session, home[id], home.values())
            lose(session, task, home[id], because, unheard_us=unheard_us)
        if task.cancel_asked_at is not None and task.state not in ENDED:
            _move(session, task, Move.Cancel)
            _end(session, task, "task.cancelled", because)


def _change_island(session: Session, task: Task, island: str) -> None:
    """Move the task to another island's queue; the time that it has waited counts there too."""
    if task.state == "waiting":
        _count(session, task, -1)
    task.island = island
    if task.state == "waiting":
        _count(session, task, 1)


def _take_in(
    session: Session,
    house: _House,
    event: messages.Event,
    heard: dict[str, int],
    *,
    careful: bool,
) -> bool:
    """Apply one event if it is the next of its epoch; acknowledge it if it can never count."""
    name = key(event.task, event.epoch)
    task = house.tasks.get(event.task)
    placement = _placement(session, house, event.task, event.epoch)
    if task is None or placement is None or event.epoch < task.epoch:
        heard[name] = max(event.seq, heard.get(name, 0))
        if task is not None and placement is not None:
            _take_in_late(session, task, placement, event)
        return False
    if event.seq == task.event_seq + 1:
        task.event_seq = event.seq
        if placement.ended_at is None or isinstance(event, _LATE_TOO):
            placement.last_step = event.step
            _note(session, task, placement, event)
            if careful:
                _apply(session, task, placement, event)
            else:
                _EVENTS[type(event)](session, task, placement, event)
    heard[name] = task.event_seq
    # For these two, tasks that can start now are nudged after the commit.
    return not isinstance(event, messages.Stored | messages.Came)


def _take_in_late(
    session: Session, task: Task, placement: Placement, event: messages.Event
) -> None:
    """Record what is true even though the task was launched again meanwhile."""
    if isinstance(event, messages.Saved):
        _keep_checkpoint(session, task, event)
    elif isinstance(event, messages.Came):
        _came(session, task, placement, event)


def _apply(session: Session, task: Task, placement: Placement, event: messages.Event) -> None:
    """Apply one event; if it makes no sense, end the stay of its own task and spoil nothing else.

    Otherwise the event would be reported again and again, and no heartbeat of its device would ever
    be recorded.
    """
    try:
        with _apart(session):
            _EVENTS[type(event)](session, task, placement, event)
        return
    except (OperationalError, InterfaceError):
        raise  # the database went away: nothing is wrong with the event
    except Exception:
        log.exception("cannot record %s of task %s", type(event).__name__, task.id)
    if placement.ended_at is None:
        told = f"Its process sent an invalid {type(event).__name__}."
        _failed(session, task, placement, _failure(event, cause="exit", message=told))


def _failure(event: messages.Event, *, cause: str, message: str) -> messages.Failed:
    """The failure that replaces an event which cannot be recorded."""
    return messages.Failed(
        task=event.task,
        epoch=event.epoch,
        seq=event.seq,
        step=event.step,
        held_us=event.held_us,
        cause=cause,
        message=message,
    )


def _started(session: Session, task: Task, placement: Placement, event: messages.Started) -> None:
    _move(session, task, Move.Started)
    lost = max(0, task.step - event.step)
    task.lost_steps += lost
    task.step, task.started_at, task.image_on = event.step, transactions.now(session), None
    if task.resized_at is not None:
        task.resized_at = task.started_at
        guest_placements.seated(session, guest_placements.of_task(session, task))
    if event.resumed != "fresh":  # a first start is no switch and predicts none
        task.switch_us = event.switch_us
    task.capabilities, task.preset = event.capabilities, event.preset
    if task.first_started_at is None:
        task.first_started_at = task.started_at
    placement.started_at, placement.first_step = task.started_at, event.step
    placement.input_bytes, placement.fetched_bytes = event.input_bytes, event.fetched_bytes
    placement.ways = event.ways
    if event.resumed != "resident" and datablocks.are_taken_by(task):
        datablocks.seen_on(session, placement.device_id, task.id)
    said = {
        "fresh": f"Started on {task.seat}",
        "resident": f"Resumed on {task.seat} at step {event.step + 1}",
        "image": f"Resumed on {task.seat} at step {event.step + 1}, from its saved state",
        "folder": f"Restarted on {task.seat} in its saved working folder",
    }[event.resumed]
    tell(
        session,
        task,
        "task.started",
        said + (f"; {counted(lost, 'step')} run again." if lost else "."),
        device=task.seat,
        step=event.step,
        lost_steps=lost,
        switch_us=event.switch_us,
    )
    if task.moving is not None and task.seat == task.moving["to"]:
        _moved(session, task, lost)
    if "part" in task.descriptor["run"]:
        transactions.after_commit(session, partial(_introduce, task.id))


def _introduce(task_id: str) -> None:
    """Tell the devices of running graph tasks to which tasks they are to send their blocks
    directly.

    Looked up after the commit: of two tasks that begin at once, the later one sees both.
    """
    with transactions.transaction() as session:
        told = launch_order.wanted(session, task_id)
    for device, wanted in told:
        outbox.tell(device, wanted)


def _moved(session: Session, task: Task, lost: int) -> None:
    """Finish a move: the task runs on its target.  The downtime is by the database's clock."""
    moving = migration.from_json(task.moving or {})
    stood = select(Placement.ended_at).where(
        Placement.task_id == task.id, Placement.epoch == moving.epoch, ~Placement.guest
    )
    ended_at, now = session.scalar(stood), transactions.now(session)
    downtime_us = 0 if ended_at is None else round((now - ended_at).total_seconds() * 1e6)
    rounds = len(moving.rounds)
    times = "once" if rounds == 1 else f"{rounds} times"
    tell(
        session,
        task,
        "task.moved",
        f"Moved from {moving.source} to {moving.to}: copied {times} while it ran, paused for "
        f"{downtime_us / 1e6:.2f} s; {counted(lost, 'step')} lost.",
        to=moving.to,
        source=moving.source,
        rounds=rounds,
        last_bytes=moving.rounds[-1].fetched_bytes if rounds else 0,
        downtime_us=downtime_us,
        lost_steps=lost,
    )
    task.move_to = task.moving = None


def _resized(session: Session, task: Task, placement: Placement, event: messages.Resized) -> None:
    if task.state == "stopping":
        return  # cancelled meanwhile: all devices are being released
    guests = guest_placements.of_task(session, task)
    if not _sit(session, task, guests, event.seats):
        return _unreached(session, task, placement, guests, event)
    _move(session, task, Move.Spliced)
    guest_placements.seated(session, guests)
    if left := [guest for guest in guests if guest.leaving]:
        guest_placements.end(session, left, "resized")
        task.resized_at = transactions.now(session)
        task.cost_milli = guest_placements.cost(
            session, [p for p in (placement, *guests) if not p.leaving]
        )
    number, hosts = sum(event.seats), len(event.seats)
    seats = "one device" if number == 1 else f"{number} devices"
    told = f"Resized after step {event.step}: it runs on {seats}"
    told += "." if hosts == 1 else f" of {hosts} hosts."
    tell(session, task, "task.resized", told, step=event.step, devices=number, hosts=hosts)


def _sit(session: Session, task: Task, guests: Sequence[Placement], seats: list[int]) -> bool:
    """True if the ranks are on the devices that were ordered."""
    ids = [task.seat, *(guest.device_id for guest in guests if not guest.leaving)]
    hosts = guest_placements.by_host(session.get_one(Device, id) for id in ids)
    return seats == [len(devices) for devices in hosts]


def _unreached(
    session: Session,
    task: Task,
    placement: Placement,
    guests: Sequence[Placement],
    event: messages.Resized,
) -> None:
    """Undo a resize onto a host that could not be joined; the task goes on as before.

    If the task was also to leave devices, these are promised to others already, so it goes back to
    the queue.
    """
    if any(guest.leaving for guest in guests):
        lose(session, task, placement, "It could not return devices that other tasks need.")
        return
    _move(session, task, Move.Spliced)
    guest_placements.end(
        session, [guest for guest in guests if guest.started_at is None], "unreached"
    )
    stay = guest_placements.of_task(session, task)
    task.resized_at = transactions.now(session)
    task.cost_milli = guest_placements.cost(session, (placement, *stay))
    told = f"Not resized: its other host could not be reached after step {event.step}."
    tell(session, task, "task.resized", told, step=event.step, devices=sum(event.seats))


def _saved(session: Session, task: Task, placement: Placement, event: messages.Saved) -> None:
    _keep_checkpoint(session, task, event)
    if task.moving is not None:
        _count_round(session, task, placement, event)
    if task.image_on is not None and event.step == task.step:
        task.saved = True
    told = f"Checkpoint saved at step {event.step} ({event.size_bytes:,} bytes)."
    tell(session, task, "task.saved", told, step=event.step, sha256=event.sha256)


def _count_round(session: Session, task: Task, placement: Placement, event: messages.Saved) -> None:
    moving = migration.from_json(task.moving or {})
    if event.epoch != moving.epoch:
        return
    wrote = session.get_one(Device, placement.device_id)
    done = migration.Round(
        sha256=event.sha256,
        key=wrote.facts.get("key", ""),
        step=event.step,
        size_bytes=event.size_bytes,
        wrote_us=event.took_us,
    )
    task.moving = migration.as_json(moving.saved(done))


def _keep_checkpoint(session: Session, task: Task, event: messages.Saved) -> None:
    row = insert(Checkpoint).values(
        id=f"ckp_{uuid_utils.uuid7().hex}",
        task_id=task.id,
        tenant_id=task.tenant_id,
        epoch=event.epoch,
        step=event.step,
        sha256=event.sha256,
        size_bytes=event.size_bytes,
        new_bytes=event.new_bytes,
        took_us=event.took_us,
        host=func.coalesce(_of_writer(Device.host, event), ""),
        key=func.coalesce(_of_writer(Device.facts["key"].astext, event), ""),
    )
    # The same bytes were saved again at the same step: they exist now, even if lost before.
    there = {"damaged_at": None, "deleted_at": None}
    same = [Checkpoint.task_id, Checkpoint.step, Checkpoint.sha256]
    session.execute(row.on_conflict_do_update(index_elements=same, set_=there))


def _of_writer(column: Any, event: messages.Saved) -> Any:
    """A column of the device that wrote a checkpoint, as a subquery."""
    wrote = (Placement.task_id == event.task, Placement.epoch == event.epoch, ~Placement.guest)
    query = select(column).join(Placement, Placement.device_id == Device.id).where(*wrote)
    return query.scalar_subquery()


def _stored(session: Session, task: Task, placement: Placement, event: messages.Stored) -> None:
    """Record an output that a graph task reports while it runs; others may begin with it.

    The output is durable whatever becomes of the task.  A task that runs again makes the same bits,
    so the first report stays.
    """
    if task.state in ENDED or event.output in task.outputs:
        return
    task.outputs = {**task.outputs, event.output: event.kept}
    _give(session, task, placement, {event.output: event.kept})


def _give(
    session: Session, task: Task, placement: Placement, outputs: Mapping[str, messages.JSON]
) -> None:
    """Mark these outputs of a graph task as durable; after the commit the tasks that take them are
    told.
    """
    takers = Need.needs_id == task.id, Need.port != "", Need.output.in_(outputs)
    given = update(Need).where(*takers, Task.id == Need.task_id)
    told = given.values(given=func.pg_current_xact_id()).returning(
        Need.task_id, Need.port, Need.output, Need.late, Task.epoch, Task.seat
    )
    maker = session.scalars(
        select(datablocks.reach(Device)).where(Device.id == placement.device_id)
    ).one()
    rows = session.execute(told.execution_options(synchronize_session=False)).all()
    for row in rows:
        if row.late and row.seat is not None:
            source = launch_order.source(outputs[row.output], maker)
            come = messages.Given(task=row.task_id, epoch=row.epoch, port=row.port, source=source)
            transactions.after_commit(session, partial(outbox.tell, row.seat, come))
    if waited_for := {row.output for row in rows if not row.late}:
        transactions.after_commit(session, partial(_nudge_who_can_start, task.id, waited_for))


def _nudge_who_can_start(task_id: str, outputs: Collection[str]) -> None:
    """Nudge the islands with tasks that waited for one of these outputs and for nothing else.

    Looked up after the commit: of two tasks that give the last two outputs at once, the later sees
    both.
    """
    took, lacks, maker = aliased(Need), aliased(Need), aliased(Task)
    lacking = (
        select(lacks.task_id)
        .join(maker, maker.id == lacks.needs_id)
        .where(lacks.task_id == Task.id, lacks.given.is_(None), ~lacks.late, maker.state != "done")
    )
    able = (
        select(Task.island)
        .join(took, took.task_id == Task.id)
        .where(took.needs_id == task_id, took.port != "", took.output.in_(outputs))
        .where(Task.state == "blocked", ~lacking.exists())
        .distinct()
    )
    with transactions.transaction() as session:
        islands = session.scalars(able).all()
    for island in filter(None, islands):
        outbox.nudge_island(island)


def _came(session: Session, task: Task, placement: Placement, event: messages.Came) -> None:
    if event.port in placement.ways:
        return  # a repeated report
    placement.input_bytes += event.size_bytes
    placement.fetched_bytes += event.size_bytes if event.way == "store" else 0
    placement.ways = {**placement.ways, event.port: event.way}


def _paused(session: Session, task: Task, placement: Placement, event: messages.Paused) -> None:
    device = task.seat
    _move(session, task, Move.Paused)
    task.step = event.step
    if task.state == "stopping":
        return  # it was cancelled meanwhile; the device goes on to end it
    stops_to_move = task.moving is not None and task.moving["stopping"]
    _close(session, task, placement, "moved" if stops_to_move else "paused")
    task.image_on, task.saved = device, False
    task.pauses += 1
    stopped = "Paused" if task.hold or stops_to_move else "Preempted"
    told = f"{stopped} on {device} after step {event.step}; no step lost."
    tell(session, task, "task.paused", told, device=device, step=event.step)
    if event.lacks:
        _wait_for(session, task, event.lacks)


def _wait_for(session: Session, task: Task, port: str) -> None:
    """Block a task until its missing input is there: the input did not come while the task ran."""
    lacked = update(Need).where(Need.task_id == task.id, Need.port == port)
    session.execute(lacked.values(late=False).execution_options(synchronize_session=False))
    _move(session, task, Move.Locked)
    told = f"Preempted: its input {port} did not arrive."
    tell(session, task, "task.lacks", told, port=port)


def _done(task: Task, step: int) -> str:
    """The message of a task that is done.  Only a job has steps that its owner knows of."""
    return f"Done after {counted(step, 'step')}." if "job" in task.descriptor["run"] else "Done."


def _finished(session: Session, task: Task, placement: Placement, event: messages.Finished) -> None:
    publish = task.descriptor.get("publish") or {}
    given = {
        name for name, kept in event.outputs.items() if name not in publish or "format" in kept
    }
    lacking = sorted(set(task.descriptor.get("outputs", [])) - given)
    if lacking:
        told = f"It ended without its declared outputs {', '.join(lacking)}."
        _failed(session, task, placement, _failure(event, cause="exception", message=told))
        return
    if "part" in task.descriptor["run"]:
        new = {name: event.outputs[name] for name in event.outputs.keys() - task.outputs.keys()}
        _give(session, task, placement, new)
    _close(session, task, placement, "finished")
    _move(session, task, Move.Finished)
    task.step, task.result, task.outputs = event.step, event.result, _kept(task, event.outputs)
    task.passed = event.passed if "graph" in task.descriptor["run"] else None
    if (event.took_ms or event.made_bytes) and task.passed is not None:
        graphs.learn(session, task, event.took_ms, event.made_bytes)
    task.cause = task.message = task.detail = None  # left by an earlier attempt
    _end(session, task, "task.done", _done(task, event.step), step=event.step)
    for output, name in sorted(publish.items()):
        _publish(session, task, output, name)
    if publish:
        datablocks.seen_on(session, placement.device_id, task.id)


def _kept(task: Task, outputs: messages.JSON) -> messages.JSON:
    """The outputs to store.  Outputs that a graph task gave while it ran stay, as other tasks began
    with them.
    """
    return {**outputs, **task.outputs} if "part" in task.descriptor["run"] else outputs


def _publish(session: Session, task: Task, output: str, name: str) -> None:
    """Make the output the next version of a datablock; `lock` prevents other publishes at this
    moment.
    """
    kept = task.outputs[output]
    new = datablocks.New(
        tenant_id=task.tenant_id,
        user_id=task.user_id,
        name=name,
        sha256=kept["sha256"],
        size_bytes=kept["size_bytes"],
        summary=kept,
        task_id=task.id,
        output=output,
    )
    row = datablocks.added(session, new)
    task.outputs = {**task.outputs, output: datablocks.as_input(row)}
    told = f"Published {output} as datablock {row.name}@{row.version} ({row.size_bytes:,} bytes)."
    tell(session, task, "task.published", told, **task.outputs[output])


def _failed(session: Session, task: Task, placement: Placement, event: messages.Failed) -> None:
    _close(session, task, placement, "failed")
    task.step = max(task.step, event.step)
    task.cause, task.message, task.detail = event.cause, event.message, event.detail
    task.outputs = _kept(task, event.outputs)
    older = event.cause == "image" and _damage(session, task, event.epoch)
    away = event.cause in ("store", "host")  # not the task's fault
    retry = older or away or (CAUSES[event.cause] and task.attempts < task.retry_max)
    _move(session, task, Move.Failed if retry else Move.GaveUp)
    _forget_image(session, task)
    if task.state in ENDED:
        _end(session, task, f"task.{task.state}", event.message, cause=event.cause)
        return
    told = "It resumes from the previous checkpoint."
    if away:
        wait_s = STORE_AGAIN_S if event.cause == "store" else 0.0
        task.retry_at = transactions.now(session) + timedelta(seconds=wait_s)
        told = "It restarts soon; this does not count as an attempt."
    elif not older:
        task.attempts += 1
        wait_s = min(RETRY_LONGEST_S, RETRY_BACKOFF_S * 2 ** (task.attempts - 1))
        task.retry_at = transactions.now(session) + timedelta(seconds=wait_s)
        told = f"It is retried ({task.attempts} of {task.retry_max})."
    tell(session, task, "task.retry", f"{event.message} {told}", cause=event.cause)


def _damage(session: Session, task: Task, epoch: int) -> bool:
    """Mark the checkpoint from which this epoch resumed as damaged; False if there was none."""
    launched = select(Order.body).where(
        Order.task_id == task.id, Order.epoch == epoch, Order.kind == "Launch"
    )
    home = launched.order_by(Order.id).limit(1)  # launches of remote ranks come after it
    images = (session.scalar(home) or {}).get("images", [])
    if not images:
        return False
    damaged = update(Checkpoint).where(
        Checkpoint.task_id == task.id,
        Checkpoint.sha256 == images[0]["sha256"],
        Checkpoint.damaged_at.is_(None),
    )
    now = damaged.values(damaged_at=func.now()).returning(Checkpoint.id)
    return session.scalars(now).first() is not None


def _stopped(session: Session, task: Task, placement: Placement, event: messages.Stopped) -> None:
    _close(session, task, placement, "stopped")
    _move(session, task, Move.Stopped)
    task.step = event.step
    _end(session, task, "task.cancelled", f"Cancelled after {counted(event.step, 'step')}.")


_LATE_TOO = messages.Saved | messages.Stored | messages.Came  # count even after the stay ended

_EVENTS: dict[type, Any] = {
    messages.Started: _started,
    messages.Saved: _saved,
    messages.Stored: _stored,
    messages.Came: _came,
    messages.Resized: _resized,
    messages.Paused: _paused,
    messages.Finished: _finished,
    messages.Failed: _failed,
    messages.Stopped: _stopped,
}


def _confirm(session: Session, house: _House, view: ResidentView) -> bool:
    """Record a resident's progress; False if the device must drop the resident."""
    task = house.tasks.get(view.task)
    if task is None:
        return False
    if view.epoch != task.epoch:
        # The device has not heard of the new launch: the paused resident is what resumes.
        may = task.seat == house.device.id or _stands_by(task) or _gathers(session, task)
        return view.state == "paused" and may
    here = () if (task.id, task.epoch) in session.info.get("closed", ()) else house.unanswered
    for order in here:
        if (order.task_id, order.epoch) == (task.id, task.epoch) and order.seq <= view.order_seq:
            order.answered_at = transactions.now(session)
    if view.state == "ended":
        _sample(session, task, view)
        return True  # the device drops it when its last event is acknowledged
    if house.is_lent_to(view):
        return True  # its home device reports the progress
    if task.seat != house.device.id:
        return task.image_on == house.device.id or (view.state == "paused" and _stands_by(task))
    placement = house.placement(task)
    placement.last_step = view.step
    _note(session, task, placement, view)
    task.held_us = placement.held_us
    if task.started_at is not None and view.step > task.step:
        task.step = view.step
    _sample(session, task, view)
    return True


def _charge_tickets(session: Session, house: _House) -> None:
    """Charge the tickets on a device for the slots that they keep, at each heartbeat."""
    for (id, _), placement in house.open.items():
        ticket = house.tasks[id]
        if not gang_tickets.is_ticket(ticket) or placement.ended_at is not None:
            continue
        if placement.started_at is None and not house.is_taken_before(placement):
            _begin_to_keep(session, ticket, placement)
        before_us = placement.held_us
        ledger.note(session, placement, _kept_us(placement, transactions.now(session)))
        ticket.held_us = placement.held_us
        guests = guest_placements.of_task(session, ticket)
        guest_placements.charge(session, ticket, guests, placement.held_us - before_us)


def _stands_by(task: Task) -> bool:
    """True if remote hosts may still hold parts of the paused image.

    The home device, from which alone the task can resume, may lack those parts.
    """
    return not task.saved and task.image_on is not None and task.seat in (None, task.image_on)


def _gathers(session: Session, task: Task) -> bool:
    """True if the home device has its slot but still collects, before its first step, image parts
    of other hosts.
    """
    if task.saved or not task.across_hosts:
        return False
    epoch = (Placement.task_id == task.id, Placement.epoch == task.epoch)
    home = session.scalar(select(Placement).where(*epoch, ~Placement.guest))
    return home is not None and home.first_step == task.step


def _note(
    session: Session,
    task: Task,
    placement: Placement,
    said: messages.Event | messages.ResidentView,
) -> None:
    before_us = placement.held_us
    _note_held(session, task, placement, said.held_us)
    if placement.ended_at is not None:  # the total of the end did not include this
        task.total_held_us += placement.held_us - before_us
    placement.staged_us = max(placement.staged_us, said.staged_us)


def _note_held(session: Session, task: Task, placement: Placement, held_us: int) -> None:
    """Charge the placement up to `held_us`, and the task's other devices for the same time."""
    before_us = placement.held_us
    ledger.note(session, placement, held_us)
    if placement.held_us > before_us and placement.epoch == task.epoch:
        guest_placements.charge(
            session, task, guest_placements.of_task(session, task), placement.held_us - before_us
        )


def _sample(session: Session, task: Task, view: ResidentView) -> None:
    if not view.metrics or task.metrics == view.metrics:
        return
    if lost := sorted(_no_numbers(view.metrics) - _no_numbers(task.metrics)):
        told = f"Not a finite number at step {view.step:,}: {', '.join(lost[:5])}."
        tell(session, task, "task.not_finite", told, step=view.step, metrics=lost[:5])
    task.metrics = view.metrics
    points = {**dict(view.points), view.step: view.metrics}
    rows = [
        {"task_id": task.id, "step": step, "values": values}
        for step, values in sorted(points.items())
        if step <= view.step
    ]
    session.execute(insert(Metric).on_conflict_do_nothing(), rows)


def _no_numbers(metrics: Mapping[str, Any]) -> set[str]:
    """Return the names of metrics that are nan or infinite, which arrive as text."""
    return {name for name, value in metrics.items() if value in ("nan", "inf", "-inf")}


def _miss(session: Session, house: _House, alive: Alive) -> bool:
    """Record as lost what should be on the device but is not.  True if there was anything."""
    held = {(view.task, view.epoch) for view in alive.residents}
    told = {(event.task, event.epoch) for event in alive.events}
    on_the_way = {
        (order.task_id, order.epoch)
        for order in house.unanswered
        if order.kind == "Launch" and order.answered_at is None and order.sends < LAUNCHES_UNSEEN
    }
    gone = set()
    for place, placement in house.open.items():
        task = house.tasks[place[0]]
        if placement.ended_at is not None or gang_tickets.is_ticket(task):
            continue
        if place not in held | told | on_the_way:
            lose(session, task, placement, f"{house.device.id} no longer has the task.")
            gone.add(place)
    for task in house.tasks.values():
        if task.image_on == house.device.id and (task.id, task.epoch) not in held:
            _forget_image(session, task)
            gone.add((task.id, task.epoch))
    return bool(gone)


def _coming(house: _House) -> list[Task]:
    """The tasks that are being moved to this device."""
    here = house.device.id
    return [
        task
        for task in house.tasks.values()
        if task.move_to == here and task.moving is not None and task.seat != here
    ]


def _following(session: Session, house: _House, alive: Alive) -> Iterator[Task]:
    """Yield, for each graph task here, the next task of its portion, if that still waits for
    others.

    Looked up whenever an event arrives: by then other tasks may have made something too.
    """
    for task in [house.tasks[id] for id, _ in house.open] if alive.events else []:
        if task.seat != house.device.id or not legs.another_follows(task.descriptor["run"]):
            continue
        portion = task.name.rpartition(".")[0]  # it is called NAME.PORTION.LEG
        later = select(Task).where(
            Task.request_id == task.request_id,
            Task.island == house.device.island,
            Task.name.startswith(f"{portion}.", autoescape=True),
            Task.state == "blocked",
            Task.epoch == 0,
            Task.ordinal > task.ordinal,
        )
        yield from session.scalars(later.order_by(Task.ordinal).limit(1))


def _given(session: Session, house: _House, alive: Alive) -> list[messages.Given]:
    """The inputs that residents lack and that are available now."""
    lacking = {view.task: view for view in alive.residents if view.lacks}
    tasks = [house.tasks[id] for id in lacking if id in house.tasks]
    return [
        messages.Given(task=id, epoch=lacking[id].epoch, port=port, source=source)
        for id, inputs in launch_order.inputs(session, tasks).items()
        for port, source in inputs.items()
        if port in lacking[id].lacks
    ]


def _look_ahead(house: _House, alive: Alive) -> bool:
    """Record how much the device has prefetched of tasks that are being moved here."""
    there = {image["task"]: image for image in alive.ahead}
    changed = False
    for task in _coming(house):
        if task.id not in there:
            continue
        before, image = migration.from_json(task.moving or {}), there[task.id]
        now = before.fetched(image["sha256"], int(image["bytes"]), int(image["us"]))
        if now != before:
            task.moving = migration.as_json(now)
            changed = True
    return changed


def _store_logs(session: Session, house: _House, logs: Iterable[LogLines]) -> dict[str, int]:
    logged = {}
    for chunk in logs:
        logged[key(chunk.task, chunk.epoch)] = chunk.first + len(chunk.lines)
        placement = _placement(session, house, chunk.task, chunk.epoch)
        if placement is None or not chunk.lines:
            continue  # a device may write only the logs of tasks that were placed on it
        rows = [
            {
                "task_id": chunk.task,
                "epoch": chunk.epoch,
                "line": chunk.first + n,
                "stream": stream,
                "text": said.replace("\x00", "�"),
            }
            for n, (stream, said) in enumerate(chunk.lines)
        ]
        session.execute(insert(LogLine).values(rows).on_conflict_do_nothing())
        task = session.get_one(Task, chunk.task)
        _changed(session, task)
    return logged


# --- shared by both -----------------------------------------------------------------------------


def _locked(session: Session, which: ColumnElement[bool], *, wait: bool = True) -> dict[str, Task]:
    """Lock and return the tasks in the order of their ids; without `wait`, skip tasks locked by
    others.
    """
    session.flush()  # the rows are read again and must include changes made here
    query = select(Task).where(which).order_by(Task.id)
    free = query.with_for_update(key_share=True, skip_locked=not wait)
    fresh = free.execution_options(populate_existing=True)
    return {task.id: task for task in session.scalars(fresh)}


def _open(
    session: Session, by: InstrumentedAttribute[str], ids: Sequence[str], *, guests: bool = False
) -> Sequence[Placement]:
    """The placements of these tasks or devices that have not ended."""
    if not ids:
        return []
    query = select(Placement).where(by.in_(ids), Placement.ended_at.is_(None))
    if not guests:
        query = query.where(~Placement.guest)
    return session.scalars(query.order_by(Placement.id)).all()


@contextmanager
def _apart(session: Session) -> Iterator[None]:
    """Run the block in a savepoint: if it fails, its changes and its notes are undone."""
    noted = {name: copy(session.info[name]) for name in _NOTES if name in session.info}
    try:
        with session.begin_nested():
            yield
    except BaseException:
        for name in _NOTES:
            session.info.pop(name, None)
        session.info |= noted
        raise


def _move(session: Session, task: Task, move: str) -> None:
    before, task.state = task.state, lifecycle.after(task.id, task.state, move)
    if "waiting" in (before, task.state) and before != task.state:
        _wait(session, task, begins=task.state == "waiting")
    if not gang_tickets.is_ticket(task):  # the gang, not its tickets, decides the request's state
        session.info.setdefault("moved", set()).add(task.request_id)
    _changed(session, task)
    if task.gang_id:
        gang_tickets.nudge_others(session, task)


def _wait(session: Session, task: Task, *, begins: bool) -> None:
    """Record that a task enters or leaves its queue: the waiting time, and the number that wait."""
    now_s = transactions.now_s(session)
    if begins:
        task.waiting_since = transactions.now(session)
    elif task.waiting_since is not None:
        since_s = task.waiting_since.timestamp()
        task.waited_us += max(0, round((now_s - since_s) * 1e6))
        if task.epoch:
            away = tuple((from_s, to_s) for from_s, to_s in task.away)
            task.away = list(been_away(away, since_s, now_s, window_s=TIER_WINDOW_S))
        task.waiting_since = None
    _count(session, task, 1 if begins else -1)


def _count(session: Session, task: Task, change: int) -> None:
    """Note that `change` more tasks wait in the task's queue."""
    line = (task.island, task.user_id, task.kind, task.memory_bytes, task.devices_min)
    session.info.setdefault("lines", Counter())[(*line, task.tenant_id)] += change


def _placement(session: Session, house: _House, task_id: str, epoch: int) -> Placement | None:
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


def _close(session: Session, task: Task, placement: Placement, end: str) -> None:
    """End the stay of a task: its held time is final, and no order waits for an answer any more."""
    placement.ended_at, placement.end = transactions.now(session), end
    guest_placements.end(session, guest_placements.of_task(session, task), end)
    task.total_held_us += placement.held_us
    task.held_us, task.seat, task.shares = 0, None, False
    task.started_at = task.resized_at = None
    session.info.setdefault("closed", set()).add((task.id, task.epoch))


def _end(session: Session, task: Task, type_: str, message: str, **data: Any) -> None:
    task.ended_at, task.image_on = transactions.now(session), None
    task.move_to = task.moving = None
    _nudge_abroad(session, task)
    tell(session, task, type_, message, **data)


def _nudge_abroad(session: Session, task: Task) -> None:
    """Nudge the other islands with tasks that waited for this task's end, after the commit."""
    if not task.abroad:
        return
    query = select(Task.island).join(Need, Need.task_id == Task.id)
    query = query.where(Need.needs_id == task.id)
    islands = session.scalars(query.where(Task.island != task.island).distinct())
    for island in filter(None, islands):
        transactions.after_commit(session, partial(outbox.nudge_island, island))


def tell(session: Session, task: Task, type_: str, message: str, **data: Any) -> None:
    """Write an event of a task, for its owner and for open streams."""
    session.add(
        Event(
            tenant_id=task.tenant_id,
            request_id=task.request_id,
            task_id=task.id,
            type=type_,
            message=message,
            data={"task": task.name, **data},
        )
    )
    _changed(session, task)


def _changed(session: Session, task: Task) -> None:
    session.info.setdefault("changed", set()).add((task.tenant_id, task.request_id))


# --- the sums of it -----------------------------------------------------------------------------

_NOTES = ("lines", "moved", "changed", "closed", "after_commit", ledger.NOTED)


def write_down(session: Session) -> None:
    """Flush what was changed and charged so far, so that queries of this transaction see it."""
    session.flush()
    ledger.book(session)


def settle(session: Session) -> None:
    """Write the queue counts, update requests after moves of tasks, wake open streams at the
    commit.
    """
    write_down(session)
    noted = {name: sorted(session.info.pop(name, ())) for name in ("moved", "changed", "closed")}
    lines = sorted(line for line in session.info.pop("lines", Counter()).items() if line[1])
    if noted["closed"] or lines or noted["changed"]:
        closed = [{"task_id": task, "epoch": epoch} for task, epoch in noted["closed"]]
        counted = [dict(zip(_LINE, (*line, change), strict=True)) for line, change in lines]
        said = [" ".join(one) for one in noted["changed"]]
        sums = {"closed": json.dumps(closed), "lines": json.dumps(counted), "said": said}
        session.execute(_SUMS, {**sums, "channel": CHANGES})
    if noted["moved"]:
        _sum_up(session, noted["moved"])


_LINE = ("island", "user_id", "kind", "memory_bytes", "width", "tenant_id", "waiting")

# Orders of closed stays need no answer.  Lines are sorted, so that two islands cannot deadlock.
_SUMS = text(
    """
    with answered as (
        update orders set answered_at = now()
        from jsonb_to_recordset(cast(:closed as jsonb)) as closed (task_id text, epoch int)
        where orders.task_id = closed.task_id and orders.epoch = closed.epoch
            and answered_at is null
    ), counted as (
        insert into lines (island, user_id, kind, memory_bytes, width, tenant_id, waiting)
        select * from jsonb_to_recordset(cast(:lines as jsonb)) as line (island text, user_id text,
            kind text, memory_bytes bigint, width int, tenant_id text, waiting bigint)
        on conflict on constraint pk_lines do update set waiting = lines.waiting + excluded.waiting
    )
    select pg_notify(:channel, said) from unnest(cast(:said as text[])) as said
    """
)

_STATES = text(
    """
    select r.id, r.tenant_id, r.state, array_agg(distinct t.state) as tasks,
        bool_or(t.first_started_at is not null) as started,
        count(distinct t.island) > 1 as spread
    from requests r join tasks t on t.request_id = r.id
    where r.id = any(:ids) and (t.gang_id is null or t.gang_id = t.id) group by r.id order by r.id
    """
)


def _sum_up(session: Session, ids: Sequence[str]) -> None:
    """Update the states of these requests, now that some of their tasks have moved.

    For a request with tasks on several islands, only one transaction at a time does this, and it
    sees what the previous one did.  Otherwise two transactions that end the last two tasks could
    each leave the request open.
    """
    rows = session.execute(_STATES, {"ids": ids}).all()
    if spread := [row.id for row in rows if row.spread]:
        mine = select(Request.id).where(Request.id.in_(spread)).order_by(Request.id)
        session.execute(mine.with_for_update(key_share=True))
        rows = session.execute(_STATES, {"ids": ids}).all()
    ended = []
    for row in rows:
        state = lifecycle.request_state(row.tasks, started=row.started)
        if row.state == state:
            continue
        ended_at = transactions.now(session) if state in ENDED else None
        changed = update(Request).where(Request.id == row.id)
        session.execute(changed.values(state=state, ended_at=ended_at))
        if state in ENDED:
            ended.append(row.id)
            session.add(
                Event(
                    tenant_id=row.tenant_id,
                    request_id=row.id,
                    type=f"request.{state}",
                    message=f"The request is {state}.",
                )
            )
    if ended:
        webhooks.announce(session, ended)
