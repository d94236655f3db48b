"""Plans and heartbeats become rows: the only writer of the state of tasks, placements and orders.

Two entries, both inside the island's transaction and after its row was locked, so that only one
scheduler writes at a time:

* `store(plan)` writes down what was decided, and the orders that follow from it;
* `record(alive)` writes down what a device says is true, and makes the answer.

Every event is fenced: it counts only if it comes from the epoch that the task is in, from the
process that holds it, and carries the next `seq`.  Anything else is history and changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import uuid_utils
from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from app import launch, ledger
from app.core import lifecycle, messages
from app.core.island import Decision, Plan
from app.core.lifecycle import ENDED, Move
from app.core.messages import CAUSES, Alive, Answer, LogLines, ResidentView, key
from app.models import (
    Checkpoint,
    Device,
    Event,
    Host,
    LogLine,
    Metric,
    Order,
    Placement,
    Request,
    Task,
)
from app.settings import settings

log = logging.getLogger(__name__)

CHANGES = "roundhouse"  # the channel on which open streams hear that there is something to read
RETRY_BACKOFF_S = 2.0  # doubled with each attempt


# --- what was decided ---------------------------------------------------------------------------


def store(session: Session, plan: Plan) -> None:
    """Write the plan down, in its order; the orders it needs go into the outbox."""
    tasks = _locked(session, {decision.task for decision in plan.decisions})
    for decision in plan.decisions:
        _DECIDED[decision.move](session, tasks[decision.task], decision)
    _order_saves(session)
    _store_reasons(session, plan)


def _unlock(session: Session, task: Task, decision: Decision) -> None:
    _move(session, task, decision.move)


def _lock(session: Session, task: Task, decision: Decision) -> None:
    _move(session, task, decision.move)
    tell(session, task, "task.held", decision.because)


def _launch(session: Session, task: Task, decision: Decision) -> None:
    device = session.get_one(Device, decision.device)
    _move(session, task, Move.Launch)
    task.epoch += 1
    task.event_seq = task.order_seq = task.held_us = 0
    task.seat, task.launched_at, task.started_at = device.id, func.now(), None
    task.place, task.reasons = None, []
    session.add(
        Placement(
            task_id=task.id,
            epoch=task.epoch,
            device_id=device.id,
            tenant_id=task.tenant_id,
            user_id=task.user_id,
            kind=device.kind,
            cost_milli=device.cost_milli,
            incarnation=device.incarnation,
        )
    )
    _order(session, task, "Launch", **launch.body(session, task, device))
    tell(session, task, "task.launched", decision.because, device=device.id, rule=decision.rule)


def _pause(session: Session, task: Task, decision: Decision) -> None:
    _move(session, task, Move.Pause)
    _leave(session, task)
    _order(session, task, "Pause", successor=decision.against or "")
    tell(session, task, "task.pausing", decision.because, rule=decision.rule, for_=decision.against)


def _cancel(session: Session, task: Task, decision: Decision) -> None:
    on_a_device = task.state in lifecycle.ON_A_DEVICE
    _move(session, task, Move.Cancel)
    if on_a_device:
        _leave(session, task)
        _order(session, task, "Cancel")
    else:
        _end(session, task, "task.cancelled", decision.because)


def _give_up(session: Session, task: Task, decision: Decision) -> None:
    _move(session, task, Move.GaveUp)
    task.cause, task.message = "needs", decision.because
    _end(session, task, "task.failed", decision.because)


def _lose(session: Session, task: Task, decision: Decision) -> None:
    lose(session, task, decision.because)


_DECIDED = {
    Move.Unlocked: _unlock,
    Move.Locked: _lock,
    Move.Launch: _launch,
    Move.Pause: _pause,
    Move.Cancel: _cancel,
    Move.GaveUp: _give_up,
    Move.Lost: _lose,
}


def _order_saves(session: Session) -> None:
    """A wish that needs no decision: checkpoints asked for while the task runs."""
    wished = select(Task).where(Task.save_asked, Task.state == "running").with_for_update()
    for task in session.scalars(wished):
        task.save_asked = False
        _order(session, task, "Save")


def _store_reasons(session: Session, plan: Plan) -> None:
    rows = select(Task.id, Task.reasons, Task.place).where(Task.id.in_(list(plan.reasons)))
    for id, reasons, place in session.execute(rows).all():
        now = [asdict(reason) for reason in plan.reasons[id]]
        if (now, plan.places.get(id)) != (reasons, place):
            values = {"reasons": now, "place": plan.places.get(id)}
            session.execute(update(Task).where(Task.id == id).values(values))


def _order(session: Session, task: Task, kind: str, **details: Any) -> None:
    task.order_seq += 1
    order = messages.decode(
        {"is": kind, "task": task.id, "epoch": task.epoch, "seq": task.order_seq, **details}
    )
    session.add(
        Order(
            task_id=task.id,
            epoch=task.epoch,
            seq=task.order_seq,
            device_id=task.seat,
            kind=kind,
            body=messages.encode(order),
        )
    )
    session.flush()  # in the order of the plan: a seat is given up before it is promised again


# --- what a device says -------------------------------------------------------------------------


def record(session: Session, alive: Alive) -> tuple[Answer, bool] | None:
    """Write down a heartbeat: (the answer, did anything change), or None for a stale one."""
    device = _heard(session, alive)
    if device is None:
        return None
    tasks = _locked(session, {item.task for item in [*alive.residents, *alive.events]})
    changed = _empty_house(session, device) if device.incarnation != alive.incarnation else False
    device.incarnation = alive.incarnation
    heard: dict[str, int] = {}
    for event in sorted(alive.events, key=lambda event: (event.task, event.epoch, event.seq)):
        changed |= _take_in(session, device, tasks.get(event.task), event, heard)
    keep, drop = [], []
    for view in alive.residents:
        here = _confirm(session, device, tasks.get(view.task), view)
        (keep if here else drop).append([view.task, view.epoch])
    changed |= _miss(session, device, alive)
    answer = Answer(
        device=device.id,
        incarnation=alive.incarnation,
        sent_us=alive.sent_us,
        lease_us=int(settings().lease_s * 1e6),
        heard=heard,
        logged=_store_logs(session, device, alive.logs),
        keep=keep,
        drop=drop,
    )
    return answer, changed


def _heard(session: Session, alive: Alive) -> Device | None:
    """The device's row with its lease renewed; None if this heartbeat is not its newest."""
    device = session.get(Device, alive.device, with_for_update=True)
    if device is None:
        device = _register(session, alive)
    if device.incarnation == alive.incarnation and alive.sent_us <= device.heard_us:
        return None
    if alive.incarnation < device.incarnation and _lease_open(session, device):
        return None  # a late word of a process that has been replaced
    device.heard_us = alive.sent_us
    device.seen_at = func.now()
    lease_s = 0.0 if alive.facts.get("leaving") else settings().lease_s
    device.lease_until = func.now() + timedelta(seconds=lease_s)
    device.threads = int(alive.facts.get("threads", 1))
    device.memory_bytes = int(alive.facts.get("memory_bytes", 0))
    if device.facts != alive.facts:
        device.facts = alive.facts
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


def _lease_open(session: Session, device: Device) -> bool:
    still = select(Device.lease_until > func.now()).where(Device.id == device.id)
    return bool(session.scalar(still))


def _empty_house(session: Session, device: Device) -> bool:
    """A new process speaks for the device.

    It holds the device's lock, which the kernel passes on only when every process of the old house
    is gone; so whatever was seated or parked there is lost, without waiting for the lease.
    """
    parked = select(Task).where(Task.image_on == device.id).with_for_update()
    for task in session.scalars(parked):
        task.image_on = None
    open_ = select(Placement.task_id).where(
        Placement.device_id == device.id, Placement.ended_at.is_(None)
    )
    lost = _locked(session, session.scalars(open_).all())
    for task in lost.values():
        lose(session, task, f"The worker of {device.id} was replaced.")
    return bool(lost)


def lose(session: Session, task: Task, because: str) -> None:
    """The device holds it no longer: back to the queue, to go on from the last checkpoint."""
    device = task.seat
    _close(session, task, "lost")
    _move(session, task, Move.Lost)
    task.image_on = None
    if task.state in ENDED:
        _end(session, task, "task.cancelled", because)
    else:
        tell(session, task, "task.lost", because, device=device, step=task.step)


def _take_in(
    session: Session,
    device: Device,
    task: Task | None,
    event: messages.Event,
    heard: dict[str, int],
) -> bool:
    """Apply one event if it is the next of its epoch; acknowledge it if it will never count."""
    name = key(event.task, event.epoch)
    placement = _placement(session, event.task, event.epoch, device)
    if task is None or placement is None or event.epoch < task.epoch:
        heard[name] = max(event.seq, heard.get(name, 0))
        if task is not None and placement is not None and isinstance(event, messages.Saved):
            _keep_checkpoint(session, task, event)  # late, but durable all the same
        return False
    if event.seq == task.event_seq + 1:
        task.event_seq = event.seq
        if placement.ended_at is None or isinstance(event, messages.Saved):
            ledger.charge(session, placement, event.held_us)
            placement.last_step = event.step
            _EVENTS[type(event)](session, task, event)
    heard[name] = task.event_seq
    return True


def _started(session: Session, task: Task, event: messages.Started) -> None:
    _move(session, task, Move.Started)
    lost = max(0, task.step - event.step)
    task.lost_steps += lost
    task.step, task.started_at, task.image_on = event.step, func.now(), None
    if event.resumed != "fresh":  # beginning is no switch, and says nothing about the next one
        task.switch_us = event.switch_us
    task.capabilities, task.preset = event.capabilities, event.preset
    if task.first_started_at is None:
        task.first_started_at = func.now()
    placement = _open_placement(session, task)
    placement.started_at, placement.first_step = func.now(), event.step
    said = {
        "fresh": f"Started on {task.seat}",
        "resident": f"Went on on {task.seat} after step {event.step}, in place",
        "image": f"Went on on {task.seat} after step {event.step}, from its checkpoint",
    }[event.resumed]
    tell(
        session,
        task,
        "task.started",
        said + (f"; {lost} steps are run again." if lost else "."),
        device=task.seat,
        step=event.step,
        lost_steps=lost,
        switch_us=event.switch_us,
    )


def _saved(session: Session, task: Task, event: messages.Saved) -> None:
    _keep_checkpoint(session, task, event)
    if task.image_on is not None and event.step == task.step:
        task.saved = True
    told = f"Checkpoint at step {event.step} is durable ({event.size_bytes} bytes)."
    tell(session, task, "task.saved", told, step=event.step, sha256=event.sha256)


def _keep_checkpoint(session: Session, task: Task, event: messages.Saved) -> None:
    row = insert(Checkpoint).values(
        id=f"ckp_{uuid_utils.uuid7().hex}",
        task_id=task.id,
        tenant_id=task.tenant_id,
        epoch=event.epoch,
        step=event.step,
        sha256=event.sha256,
        size_bytes=event.size_bytes,
        took_us=event.took_us,
    )
    session.execute(row.on_conflict_do_nothing())


def _paused(session: Session, task: Task, event: messages.Paused) -> None:
    device = task.seat
    _move(session, task, Move.Paused)
    task.step = event.step
    if task.state == "stopping":
        return  # it was cancelled meanwhile; the device goes on to end it
    _close(session, task, "paused")
    task.image_on, task.saved = device, False
    task.pauses += 1
    told = f"Paused after step {event.step} on {device}; no step is lost."
    tell(session, task, "task.paused", told, device=device, step=event.step)


def _finished(session: Session, task: Task, event: messages.Finished) -> None:
    _close(session, task, "finished")
    _move(session, task, Move.Finished)
    task.step, task.result, task.outputs = event.step, event.result, event.outputs
    _end(session, task, "task.done", f"Done after {event.step} steps.", step=event.step)


def _failed(session: Session, task: Task, event: messages.Failed) -> None:
    _close(session, task, "failed")
    task.step = max(task.step, event.step)
    task.cause, task.message, task.detail = event.cause, event.message, event.detail
    if event.cause == "image":
        _damage(session, task)
    retry = CAUSES[event.cause] and (event.cause == "image" or task.attempts < task.retry_max)
    _move(session, task, Move.Failed if retry else Move.GaveUp)
    task.image_on = None
    if task.state in ENDED:
        _end(session, task, f"task.{task.state}", event.message, cause=event.cause)
        return
    if event.cause != "image":
        task.attempts += 1
        task.retry_at = func.now() + timedelta(seconds=RETRY_BACKOFF_S * 2**task.attempts / 2)
    told = f"{event.message} It will be tried again ({task.attempts} of {task.retry_max})."
    tell(session, task, "task.retry", told, cause=event.cause)


def _damage(session: Session, task: Task) -> None:
    """The newest checkpoint could not be restored: the one before it is taken next."""
    newest = (
        select(Checkpoint.id)
        .where(Checkpoint.task_id == task.id, Checkpoint.damaged_at.is_(None))
        .order_by(Checkpoint.step.desc(), Checkpoint.created_at.desc())
        .limit(1)
    )
    session.execute(
        update(Checkpoint)
        .where(Checkpoint.id == newest.scalar_subquery())
        .values(damaged_at=func.now())
    )


def _stopped(session: Session, task: Task, event: messages.Stopped) -> None:
    _close(session, task, "stopped")
    _move(session, task, Move.Stopped)
    task.step = event.step
    _end(session, task, "task.cancelled", f"Cancelled after step {event.step}.")


_EVENTS: dict[type, Any] = {
    messages.Started: _started,
    messages.Saved: _saved,
    messages.Paused: _paused,
    messages.Finished: _finished,
    messages.Failed: _failed,
    messages.Stopped: _stopped,
}


def _confirm(session: Session, device: Device, task: Task | None, view: ResidentView) -> bool:
    """Take in how far a resident is; False if it must be dropped."""
    if task is None or view.epoch != task.epoch:
        return False
    session.execute(
        update(Order)
        .where(Order.task_id == task.id, Order.epoch == task.epoch, Order.seq <= view.order_seq)
        .where(Order.answered_at.is_(None))
        .values(answered_at=func.now())
    )
    if view.state == "ended":
        return True  # it goes by itself when its last event is acknowledged
    if task.seat != device.id:
        return task.image_on == device.id
    placement = _open_placement(session, task)
    ledger.charge(session, placement, view.held_us)
    placement.last_step = view.step
    task.held_us = placement.held_us
    if task.started_at is not None and view.step > task.step:
        task.step = view.step
    if view.metrics:
        _sample(session, task, view)
    return True


def _sample(session: Session, task: Task, view: ResidentView) -> None:
    if task.metrics == view.metrics:
        return
    task.metrics = view.metrics
    row = insert(Metric).values(task_id=task.id, step=view.step, values=view.metrics)
    session.execute(row.on_conflict_do_nothing())


def _miss(session: Session, device: Device, alive: Alive) -> bool:
    """What we believe to lie on the device and what it does not hold."""
    held = {(view.task, view.epoch) for view in alive.residents}
    told = {(event.task, event.epoch) for event in alive.events}
    taken_in = select(Order.task_id).where(
        Order.task_id == Placement.task_id,
        Order.epoch == Placement.epoch,
        Order.kind == "Launch",
        Order.answered_at.is_not(None),
    )
    open_ = select(Placement.task_id, Placement.epoch).where(
        Placement.device_id == device.id, Placement.ended_at.is_(None), taken_in.exists()
    )
    gone = {row.task_id for row in session.execute(open_) if tuple(row) not in held | told}
    for task in _locked(session, gone).values():
        lose(session, task, f"{device.id} holds it no longer.")
    parked = select(Task).where(Task.image_on == device.id)
    for task in session.scalars(parked):
        if (task.id, task.epoch) not in held:
            task.image_on = None
            gone.add(task.id)
    return bool(gone)


def _store_logs(session: Session, device: Device, logs: Iterable[LogLines]) -> dict[str, int]:
    logged = {}
    for chunk in logs:
        logged[key(chunk.task, chunk.epoch)] = chunk.first + len(chunk.lines)
        placement = _placement(session, chunk.task, chunk.epoch, device)
        if placement is None or not chunk.lines:
            continue  # a device may only write into the log of what was placed on it
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
        _changed(session, task.tenant_id, task.request_id)
    return logged


# --- shared by both -----------------------------------------------------------------------------


def _locked(session: Session, ids: Iterable[str]) -> dict[str, Task]:
    query = select(Task).where(Task.id.in_(set(ids))).order_by(Task.id).with_for_update()
    return {task.id: task for task in session.scalars(query)}


def _move(session: Session, task: Task, move: str) -> None:
    task.state = lifecycle.after(task.id, task.state, move)
    _changed(session, task.tenant_id, task.request_id)


def _placement(session: Session, task_id: str, epoch: int, device: Device) -> Placement | None:
    query = select(Placement).where(
        Placement.task_id == task_id, Placement.epoch == epoch, Placement.device_id == device.id
    )
    return session.scalar(query)


def _open_placement(session: Session, task: Task) -> Placement:
    query = select(Placement).where(Placement.task_id == task.id, Placement.ended_at.is_(None))
    return session.scalars(query).one()


def _leave(session: Session, task: Task) -> None:
    _open_placement(session, task).leaving = True
    session.flush()


def _close(session: Session, task: Task, end: str) -> None:
    """The task lets go of its seat: what it held is final."""
    placement = _open_placement(session, task)
    placement.ended_at, placement.end = func.now(), end
    task.total_held_us += placement.held_us
    task.held_us, task.seat, task.started_at = 0, None, None
    session.execute(
        update(Order)
        .where(Order.task_id == task.id, Order.epoch == task.epoch, Order.answered_at.is_(None))
        .values(answered_at=func.now())
    )


def _end(session: Session, task: Task, type_: str, message: str, **data: Any) -> None:
    task.ended_at, task.place, task.reasons, task.image_on = func.now(), None, [], None
    tell(session, task, type_, message, **data)


def tell(session: Session, task: Task, type_: str, message: str, **data: Any) -> None:
    """Write what happened to a task, for its owner and for open streams."""
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
    _changed(session, task.tenant_id, task.request_id)


def _changed(session: Session, tenant_id: str, request_id: str) -> None:
    session.info.setdefault("changed", set()).add((tenant_id, request_id))


def settle(session: Session) -> None:
    """Sum up the requests whose tasks moved, and wake the open streams at the commit."""
    session.flush()
    for tenant_id, request_id in sorted(session.info.pop("changed", ())):
        _sum_up(session, request_id)
        session.execute(select(func.pg_notify(CHANGES, f"{tenant_id} {request_id}")))


def _sum_up(session: Session, request_id: str) -> None:
    rows = session.execute(
        select(Task.state, Task.first_started_at).where(Task.request_id == request_id)
    ).all()
    started = any(row.first_started_at is not None for row in rows)
    state = lifecycle.request_state((row.state for row in rows), started=started)
    request = session.get_one(Request, request_id)
    if request.state == state:
        return
    request.state = state
    if state in ENDED:
        request.ended_at = func.now()
        session.add(
            Event(
                tenant_id=request.tenant_id,
                request_id=request_id,
                type=f"request.{state}",
                message=f"The request is {state}.",
            )
        )
