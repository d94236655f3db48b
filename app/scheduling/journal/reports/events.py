"""Applies the events of a task's present epoch, in the order of their numbers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from app.core.model import codec, failure_causes
from app.core.model.checkpoints import migration
from app.core.model.checkpoints.migration import MOVABLE, Moving
from app.core.model.descriptor import RunSpec, TaskDescriptor
from app.core.model.lifecycle import ENDED, Move
from app.core.model.protocol import messages
from app.core.model.protocol.messages import key
from app.core.model.provisions.process_images import mark_in
from app.core.model.snapshot import RESTARTS
from app.core.units import counted
from app.data import datablocks, graphs
from app.db import transactions
from app.db.guarded_connection import refusal
from app.db.models import Checkpoint, Device, Need, OutboxOrder, Placement, Task
from app.scheduling import guest_placements
from app.scheduling.journal import device_rows, losses, task_writer
from app.scheduling.journal.device_rows import DeviceRows
from app.scheduling.journal.reports import (
    best_checkpoints,
    device_health,
    outputs,
    restarts,
    retries,
)

log = logging.getLogger(__name__)


STORE_AGAIN_S = 10.0  # wait before a new launch after the store was unreachable


def take_in(
    session: Session,
    house: DeviceRows,
    event: messages.Event,
    heard: dict[str, int],
    *,
    careful: bool,
) -> bool:
    """Apply an event if it is the next one of its epoch.

    An event that can never count is acknowledged without effect.
    """
    name = key(event.task, event.epoch)
    task = house.tasks.get(event.task)
    if task is not None and event.epoch == task.epoch and event.seq <= task.event_seq:
        heard[name] = task.event_seq
        return False  # a repeated report
    placement = device_rows.placement_of(session, house, event.task, event.epoch)
    if task is None or placement is None or event.epoch < task.epoch:
        heard[name] = max(event.seq, heard.get(name, 0))
        if task is not None and placement is not None:
            _take_in_late(session, task, placement, event)
        return False
    if event.seq == task.event_seq + 1:
        task.event_seq = event.seq
        if placement.ended_at is None or isinstance(event, _LATE_TOO):
            placement.last_step = event.step
            task_writer.note_usage(session, task, placement, event)
            if careful:
                _apply(session, task, placement, event)
            else:
                _EVENTS[type(event)](session, task, placement, event)
    heard[name] = task.event_seq
    # for these two, tasks that can start now are nudged after the commit instead
    return not isinstance(event, messages.Stored | messages.Came)


def _take_in_late(
    session: Session, task: Task, placement: Placement, event: messages.Event
) -> None:
    """Record what is true even though the task was launched again meanwhile."""
    if isinstance(event, messages.Saved):
        outputs.keep_checkpoint(session, task, event)
    elif isinstance(event, messages.Came):
        _came(session, task, placement, event)


def _apply(session: Session, task: Task, placement: Placement, event: messages.Event) -> None:
    """Apply one event. If it makes no sense, end the stay of its own task and affect nothing else.

    Otherwise the event would be reported again and again, and no heartbeat of its device would ever
    be recorded.
    """
    try:
        with task_writer.savepoint(session):
            _EVENTS[type(event)](session, task, placement, event)
            task_writer.write_events(session)
        return
    except Exception as error:
        if refusal(error):
            raise  # the database went away: nothing is wrong with the event
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
    task_writer.move_task(session, task, Move.Started)
    lost = max(0, task.step - event.step)
    task.lost_steps += lost
    task.step, task.started_at, task.image_on = event.step, transactions.now(session), None
    task.prepared_us = placement.held_us
    if task.resized_at is not None:
        task.resized_at = task.started_at
        guest_placements.seated(session, guest_placements.of_task(session, task))
    if event.resumed != "fresh":  # a first start is no switch and predicts none
        task.switch_us = event.switch_us
    task.capabilities, task.preset = event.capabilities, event.preset
    is_movable = MOVABLE in event.capabilities
    _note_movement(
        session, task, placement, is_movable=is_movable, bound_because=event.bound_because
    )
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
    withdrawn = 0
    if event.resumed == "image" and RESTARTS in event.capabilities:
        withdrawn = outputs.withdraw_lines(session, task, event.step)
    said += f"; {counted(lost, 'step')} run again" if lost else ""
    said += f"; without {counted(withdrawn, 'line')} printed after it" if withdrawn else ""
    task_writer.tell(
        session,
        task,
        "task.started",
        f"{said}.",
        device=task.seat,
        step=event.step,
        lost_steps=lost,
        lines_withdrawn=withdrawn,
        switch_us=event.switch_us,
    )
    if task.moving is not None and task.seat == task.moving["to"]:
        _moved(session, task, lost)
        task_writer.note_news(session, task, "task.moved")
    elif event.resumed != "fresh":
        task_writer.note_news(session, task, "task.resumed")


def _moved(session: Session, task: Task, lost: int) -> None:
    """Finish a move: the task runs on its target.  The downtime is by the database's clock."""
    moving = codec.from_json(Moving, task.moving or {})
    stood = select(Placement.ended_at).where(
        Placement.task_id == task.id, Placement.epoch == moving.epoch, ~Placement.guest
    )
    ended_at, now = session.scalar(stood), transactions.now(session)
    downtime_us = 0 if ended_at is None else round((now - ended_at).total_seconds() * 1e6)
    rounds = len(moving.rounds)
    times = "once" if rounds == 1 else f"{rounds} times"
    task_writer.tell(
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
    devices = _devices(session, task, guests)
    if event.seats != [len(of_host) for of_host in guest_placements.by_host(devices)]:
        return _unreached(session, task, placement, guests, event)
    task_writer.move_task(session, task, Move.Spliced)
    guest_placements.seated(session, guests)
    if left := [guest for guest in guests if guest.leaving]:
        guest_placements.end(session, left, "resized")
        task.resized_at = transactions.now(session)
        task.cost_milli = guest_placements.cost(
            session, [p for p in (placement, *guests) if not p.leaving]
        )
    number, hosts = len(devices), len({device.host for device in devices})
    seats = "one device" if number == 1 else f"{number} devices"
    told = f"Resized after step {event.step}: it runs on {seats}"
    told += "." if hosts == 1 else f" of {hosts} hosts."
    task_writer.tell(
        session, task, "task.resized", told, step=event.step, devices=number, hosts=hosts
    )


def _devices(session: Session, task: Task, guests: Sequence[Placement]) -> list[Device]:
    """Return the devices that were ordered for the task's ranks."""
    ids = [task.seat, *(guest.device_id for guest in guests if not guest.leaving)]
    return [session.get_one(Device, id) for id in ids]


def _unreached(
    session: Session,
    task: Task,
    placement: Placement,
    guests: Sequence[Placement],
    event: messages.Resized,
) -> None:
    """Undo a resize onto a host that could not be joined; the task continues as before.

    If the task was also to leave devices, these are promised to others already, so it goes back to
    the queue.
    """
    if any(guest.leaving for guest in guests):
        losses.lose(session, task, placement, "It could not return devices that other tasks need.")
        return
    task_writer.move_task(session, task, Move.Spliced)
    guest_placements.end(
        session, [guest for guest in guests if guest.started_at is None], "unreached"
    )
    stay = guest_placements.of_task(session, task)
    task.resized_at = transactions.now(session)
    task.cost_milli = guest_placements.cost(session, (placement, *stay))
    told = f"Not resized: its other ranks could not be reached after step {event.step}."
    task_writer.tell(session, task, "task.resized", told, step=event.step, devices=sum(event.seats))


def _saved(session: Session, task: Task, placement: Placement, event: messages.Saved) -> None:
    outputs.keep_checkpoint(session, task, event)
    if task.moving is not None:
        _count_round(session, task, placement, event)
    if task.image_on is not None and event.step == task.step:
        task.saved = True
    if event.epoch == task.epoch and (event.has_processes or event.bound_because):
        is_movable = event.has_processes
        _note_movement(
            session, task, placement, is_movable=is_movable, bound_because=event.bound_because
        )
    told = f"Checkpoint saved at step {event.step} ({event.size_bytes:,} bytes)."
    task_writer.tell(session, task, "task.saved", told, step=event.step, sha256=event.sha256)


def _note_movement(
    session: Session, task: Task, placement: Placement, *, is_movable: bool, bound_because: str
) -> None:
    """Record whether the processes of a command can go to another device, and where; if not,
    why.
    """
    if RESTARTS not in task.capabilities:
        return
    others = [each for each in task.capabilities if each != MOVABLE]
    task.capabilities = [*others, MOVABLE] if is_movable else others
    task.bound_because = "" if is_movable else bound_because
    here = session.get_one(Device, placement.device_id)
    task.goes_on_with = mark_in(here.facts.get("offers") or ()) if is_movable else ""


def _count_round(session: Session, task: Task, placement: Placement, event: messages.Saved) -> None:
    moving = codec.from_json(Moving, task.moving or {})
    if event.epoch != moving.epoch:
        return
    wrote = session.get_one(Device, placement.device_id)
    done = migration.CopyRound(
        sha256=event.sha256,
        key=wrote.facts.get("key", ""),
        step=event.step,
        size_bytes=event.size_bytes,
        wrote_us=event.took_us,
    )
    task.moving = codec.to_json(moving.saved(done), whole=True)


def _came(session: Session, task: Task, placement: Placement, event: messages.Came) -> None:
    if event.port in placement.ways:
        return  # a repeated report
    placement.input_bytes += event.size_bytes
    placement.fetched_bytes += event.size_bytes if event.way == "store" else 0
    placement.ways = {**placement.ways, event.port: event.way}


def _paused(session: Session, task: Task, placement: Placement, event: messages.Paused) -> None:
    device, has_begun = task.seat, task.started_at is not None
    is_in_batch = placement.shares or task.state == "starting"  # nobody asked its head to pause
    task_writer.move_task(session, task, Move.Paused)
    task.step = event.step
    if task.state == "stopping":
        return  # it was cancelled meanwhile; the device goes on to end it
    is_returned = is_in_batch and not has_begun and not event.unstored
    if is_returned and task.spec.run.kind == "function":
        task_writer.close_stay(session, task, placement, "returned")
        told = "Back in the queue: the functions before it took too long."
        task_writer.tell(session, task, "task.returned", told, device=device)
        return
    stops_to_move = task.moving is not None and task.moving["stopping"]
    task_writer.close_stay(session, task, placement, "moved" if stops_to_move else "paused")
    task.image_on, task.saved = device, False
    task.pauses += 1
    device_health.note_success(session, placement)
    stopped = "Paused" if task.hold or stops_to_move or event.unstored else "Preempted"
    told = f"{stopped} on {device} after step {event.step}; no step lost."
    task_writer.tell(session, task, "task.paused", told, device=device, step=event.step)
    if stopped == "Preempted":
        task_writer.note_news(session, task, "task.preempted")
    if event.lacks:
        _wait_for(session, task, event.lacks)
    if event.unstored:
        outputs.hold_for_store(session, task, event)


def _wait_for(session: Session, task: Task, port: str) -> None:
    """Block a task until its missing input is there, because the input did not come while the task
    ran.
    """
    lacked = update(Need).where(Need.task_id == task.id, Need.port == port)
    session.execute(lacked.values(late=False).execution_options(synchronize_session=False))
    task_writer.move_task(session, task, Move.Locked)
    told = f"Preempted: its input {port} did not arrive."
    task_writer.tell(session, task, "task.lacks", told, port=port)


def _done(run: RunSpec, step: int) -> str:
    """The message of a task that is done.  Only a job has steps that its owner knows of."""
    return f"Done after {counted(step, 'step')}." if run.kind == "job" else "Done."


def _finished(session: Session, task: Task, placement: Placement, event: messages.Finished) -> None:
    spec = task.spec
    publish = spec.publish
    given = {
        name for name, kept in event.outputs.items() if name not in publish or "format" in kept
    }
    lacking = sorted({*spec.outputs} - given)
    if lacking:
        told = f"It ended without its declared outputs {', '.join(lacking)}."
        _failed(session, task, placement, _failure(event, cause="exception", message=told))
        return
    if spec.run.part is not None:
        new = {name: event.outputs[name] for name in event.outputs.keys() - task.outputs.keys()}
        outputs.give_outputs(session, task, placement, new)
    task_writer.close_stay(session, task, placement, "finished")
    task_writer.move_task(session, task, Move.Finished)
    task.step, task.result = event.step, event.result
    task.outputs, task.dropped = _kept(task, spec, event.outputs), event.dropped
    task.unstored = ""
    task.passed = event.passed if spec.run.kind == "graph" else None
    if (event.took_ms or event.made_bytes) and task.passed is not None:
        graphs.learn(session, task, event.took_ms, event.made_bytes)
    task.cause = task.message = task.detail = None  # left by an earlier attempt
    task_writer.end_task(session, task, "task.done", _done(spec.run, event.step), step=event.step)
    device_health.note_success(session, placement)
    for output, name in sorted(publish.items()):
        _publish(session, task, output, name)
    if publish:
        datablocks.seen_on(session, placement.device_id, task.id)


def _kept(task: Task, spec: TaskDescriptor, outputs: messages.JSON) -> messages.JSON:
    """Return the outputs to store.

    Outputs that a graph task gave while it ran stay, as other tasks have begun with them.
    """
    return {**outputs, **task.outputs} if spec.run.part is not None else outputs


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
    task_writer.tell(session, task, "task.published", told, **task.outputs[output])


def _failed(session: Session, task: Task, placement: Placement, event: messages.Failed) -> None:
    if event.cause == restarts.CAUSE:
        wait_s = task.spec.retry.backoff.wait_s(task.attempts + 1)
        restarts.begin_again(session, task, placement, event, wait_s=wait_s)
        return
    task_writer.close_stay(session, task, placement, "failed")
    task.step = max(task.step, event.step)
    task.cause, task.message, task.detail = event.cause, event.message, event.detail
    task.outputs, task.dropped = _kept(task, task.spec, event.outputs), event.dropped
    task.unstored = ""
    older = event.cause == "image" and _damage(session, task, event.epoch)
    away = not older and _is_excused(session, placement, event)
    decision = retries.decide(session, task, placement, event, is_excused=older or away)
    task_writer.move_task(session, task, Move.GaveUp if decision.gives_up else Move.Failed)
    task_writer.forget_image(session, task)
    said = retries.told_of(event, decision)
    if task.state in ENDED:
        told = f"{event.message} {decision.told}".rstrip()
        task_writer.end_task(session, task, f"task.{task.state}", told, **said)
        return
    if older:
        decision = replace(decision, told="It resumes from the previous checkpoint.")
    elif event.cause == "store":
        decision = replace(decision, wait_s=STORE_AGAIN_S)
    retries.apply(session, task, event, decision)
    type_ = "task.held" if decision.is_held else "task.retry"
    task_writer.tell(session, task, type_, f"{event.message} {decision.told}", **said)
    if not decision.is_held:
        task_writer.note_news(session, task, "task.retrying")


def _is_excused(session: Session, placement: Placement, event: messages.Failed) -> bool:
    """True if the task is not to blame: it restarts, and uses up no attempt."""
    if event.cause == "device":
        device_health.note_fault(session, placement)
    if event.cause in failure_causes.EXCUSED:
        return True
    device_health.note_failure(session, placement, event)
    return event.cause in failure_causes.SUSPECT and device_health.excuses(session, placement)


def _damage(session: Session, task: Task, epoch: int) -> bool:
    """Mark the checkpoint from which this epoch resumed as damaged; False if there was none."""
    launched = select(OutboxOrder.body).where(
        OutboxOrder.task_id == task.id, OutboxOrder.epoch == epoch, OutboxOrder.kind == "Launch"
    )
    home = launched.order_by(OutboxOrder.id).limit(1)  # launches of remote ranks come after it
    images = (session.scalar(home) or {}).get("images", [])
    if not images:
        return False
    damaged = update(Checkpoint).where(
        Checkpoint.task_id == task.id,
        Checkpoint.sha256 == images[0]["sha256"],
        Checkpoint.damaged_at.is_(None),
    )
    now = damaged.values(damaged_at=func.now()).returning(Checkpoint.id)
    found = session.scalars(now).all()
    best_checkpoints.mark_best(session, task)
    return bool(found)


def _stopped(session: Session, task: Task, placement: Placement, event: messages.Stopped) -> None:
    task_writer.close_stay(session, task, placement, "stopped")
    task_writer.move_task(session, task, Move.Stopped)
    task.step, task.unstored = event.step, ""
    task.outputs, task.dropped = _kept(task, task.spec, event.outputs), event.dropped
    task_writer.end_task(
        session, task, "task.cancelled", f"Cancelled after {counted(event.step, 'step')}."
    )


_LATE_TOO = messages.Saved | messages.Stored | messages.Came  # count even after the stay ended


_EVENTS: dict[type, Any] = {
    messages.Started: _started,
    messages.Saved: _saved,
    messages.Stored: outputs.store_output,
    messages.Came: _came,
    messages.Resized: _resized,
    messages.Paused: _paused,
    messages.Finished: _finished,
    messages.Failed: _failed,
    messages.Stopped: _stopped,
}
