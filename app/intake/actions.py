"""Actions that users request after they submitted: cancel, hold, release, save, move, resize,
priority, keep, delete.

An action is written and answered at once; the island carries it out and writes the state.  A
repeated request changes nothing more.  Each request that changes something leaves an event with the
name of the user.  After the commit, the open streams and the island are notified (or control, if
the task has no island yet); both notifications may be lost.

An ended request or task does not change.  Cancelling it is no error, and an ended request can be
kept or deleted; any other action is a Conflict.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session

from app.core.model.checkpoints.migration import ANYWHERE, MOVABLE
from app.core.model.lifecycle import ENDED, ON_A_DEVICE, State
from app.core.model.provisions import session as session_model
from app.core.model.provisions.notice import NEED
from app.core.model.rungs import HELD_AT_RUNG, PROMOTED, RUNG_HOLDS
from app.core.units import counted
from app.db import transactions
from app.db.models import Lot, Request, RequestEvent, Task, Tenant
from app.db.transactions import after_commit
from app.errors import BadInput, Conflict, Forbidden, QuotaExceeded
from app.intake import pins, request_needs
from app.messaging import outbox
from app.messaging.live_updates import changes
from app.scheduling import gang_tickets
from app.scheduling.journal import request_needs as needs_journal
from app.scheduling.journal import rungs
from app.scheduling.journal.lots import IS_LOT, IS_NO_MEMBER, counts_of
from app.settings import settings

ADMIN_HOLD, USER_HOLD = "admin", "user"
IDLE_HOLD = session_model.HOLD


# --- about a request ----------------------------------------------------------------------------


def cancel_request(session: Session, request: Request, *, by: str) -> None:
    if _each(session, request, _wish_cancel):
        _tell(session, request, None, "request.cancel_asked", f"Cancel requested by {by}.")


def hold_request(session: Session, request: Request, *, by: str, as_admin: bool) -> None:
    _check_live(request)
    hold = ADMIN_HOLD if as_admin else USER_HOLD
    if _each(session, request, _unless_at_rung(lambda task: _wish_hold(task, hold))):
        _tell(session, request, None, "request.hold_asked", f"Paused by {by}.")


def release_request(session: Session, request: Request, *, by: str, as_admin: bool) -> None:
    _check_live(request)
    release = _unless_at_rung(lambda task: _wish_release(session, task, as_admin))
    changed = _each(session, request, release)
    if _forgive(session, session.scalars(_lots_of(request)).all()) or changed:
        _tell(session, request, None, "request.release_asked", f"Resumed by {by}.")


def retry_request(session: Session, request: Request, states: Collection[str], *, by: str) -> None:
    """Let the request's tasks and members of lots in these states start again.

    Control does it, of a lot no more than its `at_once`. Raises Conflict if no task is in such a
    state, or if one cannot start again.
    """
    top = select(Task).where(Task.request_id == request.id, IS_NO_MEMBER).order_by(Task.id)
    fresh = top.with_for_update(key_share=True).execution_options(populate_existing=True)
    tasks = [task for task in session.scalars(fresh).all() if not gang_tickets.is_ticket(task)]
    _check_not_deleted(request)
    rows = [task for task in tasks if task.lot_id is None and task.state in states]
    for task in rows:
        if task.gang_id or (task.descriptor["run"].get("part") is not None):
            told = f"{task.name} spans islands, and cannot start again; submit the request anew"
            raise Conflict(told)
    if (lacking := request_needs.lost_inputs(session, rows)) is not None:
        told = f"an input of {lacking.name} is of a request that was deleted since"
        raise Conflict(f"{told}; submit the request anew")
    ids = {task.lot_id for task in tasks}
    found = sum([_retry_lot(session, lot, states) for lot in _lots(session, ids)])
    if not found and not rows:
        raise Conflict(f"none of its tasks is {' or '.join(sorted(states))}; nothing was changed")
    lots = [task for task in tasks if task.lot_id is not None and task.state in ENDED]
    for task in [*rows, *(lots if found else ())]:
        task.again_asked = True
    told = f"Retry of {counted(found + len(rows), 'task')} requested by {by}."
    _tell(session, request, None, "request.retry_asked", told)
    after_commit(session, outbox.nudge_control)


def _lots(session: Session, ids: Collection[str | None]) -> Sequence[Lot]:
    query = select(Lot).where(Lot.id.in_([id for id in ids if id])).order_by(Lot.id)
    locked = query.with_for_update().execution_options(populate_existing=True)
    return session.scalars(locked).all()


def _retry_lot(session: Session, lot: Lot, states: Collection[str]) -> int:
    """Count the members in these states as waiting again; return how many there are."""
    wanted = sorted({*states, *(lot.again_states if lot.again else ())})
    found = sum(getattr(lot, state) for state in wanted)
    if not found:
        return 0
    for state in wanted:
        setattr(lot, state, 0)
    if State.cancelled in wanted:
        lot.stopped = 0
    lot.again, lot.again_states, lot.is_open = lot.again + found, wanted, True
    lot.again_before = session.scalar(select(func.clock_timestamp()))
    return int(found)


def delete_request(session: Session, request: Request, *, by: str) -> None:
    """Request that an ended request be deleted; control does it.

    Raises Conflict if some of its tasks have not ended, or if it is to be kept.
    """
    transactions.lock_again(session, request, key_share=True)
    live = select(Task.state).where(Task.request_id == request.id, Task.state.not_in(ENDED))
    if request.state not in ENDED or session.scalar(live.limit(1)):
        raise Conflict(
            f"the request is {request.state}; only an ended one can be deleted. Cancel it first: "
            f"POST /v1/requests/{request.id}/cancel"
        )
    if request.keep:
        raise Conflict(
            "the request is to be kept. Release it first: PATCH /v1/requests/"
            f'{request.id} with {{"keep": false}}'
        )
    if (pinned := pins.pinned_of(session, request.id)) is not None:
        raise Conflict(
            f"its checkpoint {pinned.id} is pinned. Unpin it first: POST "
            f"/v1/checkpoints/{pinned.id}/unpin"
        )
    if (other := request_needs.dependant_of(session, request.id)) is not None:
        raise Conflict(
            f"the request {other.name} ({other.id}) comes after this one and has not ended; cancel"
            " it first, or wait until it has ended"
        )
    if request.delete_asked_at is None:
        request.delete_asked_at = transactions.now(session)
        _tell(session, request, None, "request.delete_asked", f"Delete requested by {by}.")


def change_request(
    session: Session,
    request: Request,
    *,
    priority: int | None,
    labels: dict[str, str] | None,
    keep: bool | None = None,
    at_once: int | None = None,
    max_failures: int | None = None,
    keep_best: float | None = None,
    by: str,
) -> None:
    """Change priority or labels, whether the request is kept, or the bounds of its lots.

    Raises Conflict if the priority of an ended request would change, or if the request is being
    deleted; QuotaExceeded if its tenant may keep no more; NotFound if it was deleted
    meanwhile.
    """
    # Lock the tasks before their lots, and these before their request, as the island does.
    reordered = priority is not None and priority != request.priority
    if reordered:
        if request.state in ENDED:
            raise Conflict(f"the request is {request.state}, so its priority has no effect")
        _each(session, request, lambda task: _set(task, "priority", priority))
    bounds = {"at_once": at_once, "max_failures": max_failures, "keep_best": keep_best}
    if any(value is not None for value in bounds.values()):
        _bound_lots(session, request, bounds, by)
    if priority is not None and reordered:
        request.priority = priority
        told = f"Priority set to {priority} by {by}."
        _tell(session, request, None, "request.priority_set", told)
    if keep is not None and keep != request.keep:
        _keep(session, request, keep, by)
    if labels is not None:
        transactions.lock_again(session, request, key_share=True)
        _check_not_deleted(request)
        request.labels = labels


def _bound_lots(
    session: Session, request: Request, bounds: Mapping[str, float | None], by: str
) -> None:
    """Change how many members of the request's lots may be unended, how many may fail, or which
    share goes on past a rung.
    """
    _check_live(request)
    if (keep := bounds["keep_best"]) is not None:
        _keep_best(session, request, keep)
    lots = _lots(session, session.scalars(_lots_of(request)).all())
    if not lots:
        raise Conflict("the request has no lot, which at_once, max_failures and keep_best are for")
    columns = {"at_once": bounds["at_once"], "failures_allowed": bounds["max_failures"]}
    for lot in lots:
        for name, value in columns.items():
            if value is not None:
                setattr(lot, name, value)
    what = " and ".join(f"{name} {value:g}" for name, value in bounds.items() if value is not None)
    _tell(session, request, None, "request.lot_changed", f"Set to {what} by {by}.")
    after_commit(session, outbox.nudge_control)


def _keep_best(session: Session, request: Request, keep: float) -> None:
    """Change the share that goes on past a rung; control decides anew about all results."""
    mine = select(Task).where(Task.request_id == request.id, IS_LOT).order_by(Task.id)
    locked = mine.with_for_update(key_share=True).execution_options(populate_existing=True)
    found = [task for task in session.scalars(locked) if task.descriptor.get("stop")]
    if not found:
        raise Conflict("no lot of the request has the field stop, which keep_best is for")
    for task in found:
        rule = {**task.descriptor["stop"], "keep": keep}
        task.descriptor = {**task.descriptor, "stop": rule}
        rungs.decide_anew(session, task.id)


def _lots_of(request: Request) -> Select[str]:
    return select(Task.id).where(Task.request_id == request.id, IS_LOT).order_by(Task.id)


def _keep(session: Session, request: Request, keep: bool, by: str) -> None:
    if keep:
        _check_kept(session, request)
    transactions.lock_again(session, request, key_share=True)
    _check_not_deleted(request)
    request.keep = keep
    told = f"Kept by {by}." if keep else f"No longer kept: {by} released it."
    _tell(session, request, None, "request.kept" if keep else "request.let_go", told)


def _check_not_deleted(request: Request) -> None:
    if request.delete_asked_at is not None:
        raise Conflict("the request is being deleted, so it cannot be changed any more")


def _check_kept(session: Session, request: Request) -> None:
    """Raise QuotaExceeded if the request's tenant keeps as many other requests as it may.

    The tenant is locked until the commit. So of two calls for the last place, the second counts the
    first.
    """
    most = settings().kept_requests_max
    if not most:
        return
    tenant = select(Tenant.name).where(Tenant.id == request.tenant_id)
    name = session.execute(tenant.with_for_update(key_share=True)).scalar_one()
    others = (Request.tenant_id == request.tenant_id, Request.keep, Request.id != request.id)
    kept = session.scalar(select(func.count()).select_from(Request).where(*others)) or 0
    if kept >= most:
        raise QuotaExceeded(
            f"{name} keeps {counted(kept, 'request')} of at most {most}. Release one: GET "
            '/v1/requests?keep=true lists them, PATCH /v1/requests/ID with {"keep": false} releases'
            " one. Or ask an administrator to raise ROUNDHOUSE_KEPT_REQUESTS_MAX"
        )


# --- about a task -------------------------------------------------------------------------------


def cancel_task(session: Session, task: Task, *, by: str) -> None:
    """Request that the task be cancelled. Raises Conflict for a ticket, which ends with its
    gang.
    """
    if gang_tickets.is_ticket(task):
        raise Conflict(
            f"the task holds devices for the task {task.gang_id}, and ends with it: cancel "
            f"{task.gang_id}"
        )
    if _one(session, task, _wish_cancel):
        _tell(session, task, task, "task.cancel_asked", f"Cancel requested by {by}.")


def pause_task(session: Session, task: Task, *, by: str, as_admin: bool) -> None:
    _check_live(task)
    hold = ADMIN_HOLD if as_admin else USER_HOLD
    if _one(session, task, _unless_at_rung(lambda task: _wish_hold(task, hold), task)):
        _tell(session, task, task, "task.hold_asked", f"Pause requested by {by}.")


def resume_task(session: Session, task: Task, *, by: str, as_admin: bool) -> None:
    """Resume the task; a member that lost at a rung passes it, and goes on when there is room."""
    _check_live(task)
    release = _unless_at_rung(lambda task: _wish_release(session, task, as_admin), task)
    changed = _one(session, task, release)
    if task.lot_index is not None and task.descriptor.get("stop"):
        rungs.let_pass(session, task)
        after_commit(session, outbox.nudge_control)
    if _forgive(session, [task.id] if task.lot_id == task.id else ()) or changed:
        _tell(session, task, task, "task.release_asked", f"Resumed by {by}.")


def _forgive(session: Session, lots: Sequence[str]) -> bool:
    """Let lots that were held for their failures go on: as many more members may fail."""
    held = [lot for lot in _lots(session, lots) if counts_of(lot).has_failed_too_often]
    for lot in held:
        array = session.get_one(Task, lot.id).spec.array
        more = array.failures_allowed if array is not None else None
        lot.failures_allowed = lot.failed + (more or 0)
    if held:
        after_commit(session, outbox.nudge_control)
    return bool(held)


def wake_task(session: Session, task: Task, *, by: str) -> None:
    """Queue a session again that gave its device back.

    Nothing changes if it has not given it back.
    """
    if _one(session, task, _wish_wake):
        _tell(session, task, task, "task.woken", f"It comes back: {by} types.")


def save_task(session: Session, task: Task, *, by: str) -> None:
    """Request a checkpoint. Raises Conflict unless the task is on a device."""
    _check_live(task)
    if task.state not in ON_A_DEVICE:
        raise Conflict(f"the task is {task.state}; only a task on a device has new state to save")
    if gang_tickets.is_ticket(task):
        raise Conflict(
            f"the task holds devices for the task {task.gang_id}, and has no state of its own"
        )
    if _one(session, task, lambda one: one is task and _set(task, "save_asked", True)):
        _tell(session, task, task, "task.save_asked", f"Checkpoint requested by {by}.")


def move_task(session: Session, task: Task, to: str, *, by: str) -> None:
    """Request a move to the device `to`, or to ANYWHERE else. Raises Conflict if the task cannot be
    moved.
    """
    _check_live(task)
    if task.state not in ON_A_DEVICE or task.state == State.stopping:
        raise Conflict(f"the task is {task.state}; only a task on a device can be moved")
    if task.devices_min > 1 or task.gang_id:
        raise Conflict(
            "the task needs several devices at once; only tasks on one device can be moved"
        )
    if task.state == State.running and not {MOVABLE, NEED} & {*task.capabilities}:
        raise Conflict(
            "the state of the task cannot be captured, so the task cannot be moved; a command with"
            " `notice` can, because it saves its state when it is told"
        )
    if _one(session, task, lambda task: _wish_move(task, to)):
        where = "any other device" if to == ANYWHERE else to
        _tell(session, task, task, "task.move_asked", f"Move to {where} requested by {by}.")


def resize_task(session: Session, task: Task, most: int, *, by: str) -> None:
    """Limit the task to `most` devices.  Raises Conflict if it has no ranks that can share them."""
    _check_live(task)
    spec = task.spec
    ranks = spec.world_size
    if spec.run.kind != "job":
        raise Conflict(
            "only a job can change its number of devices, because it does so between steps"
        )
    if ranks == 1:
        raise Conflict("the task has one rank, which uses one device; see `world_size`")
    if task.gang_id:
        raise Conflict("the gang spans islands; its number of devices is fixed")
    if hosts := spec.devices.choice.hosts:
        raise Conflict(
            f"the task has as many devices on each of {hosts} hosts; their number is fixed"
        )
    if not task.devices_min <= most <= ranks:
        told = f"must be {task.devices_min} to {ranks} devices for {ranks} ranks; got {most}"
        raise BadInput.at("/devices_max", told, "range")
    if _one(session, task, lambda task: _set(task, "devices_max", most)):
        told = f"Limited to {counted(most, 'device')} by {by}."
        _tell(session, task, task, "task.resize_asked", told)


def empty_devices(session: Session, devices: Iterable[str], *, by: str) -> None:
    """Request that the tasks on these devices move elsewhere. The island pauses tasks that cannot
    be moved.
    """
    on_them = Task.seat.in_(list(devices)) & Task.state.in_([State.starting, State.running])
    alone = (Task.devices_min == 1, Task.gang_id.is_(None))
    query = select(Task).where(on_them, *alone).order_by(Task.id)
    fresh = query.with_for_update(key_share=True).execution_options(populate_existing=True)
    for task in session.scalars(fresh).all():
        if _wish(session, [task], lambda task: _wish_move(task, ANYWHERE)):
            told = f"{by} drains {task.seat}: the task moves to another device if one is free."
            _tell(session, task, task, "task.move_asked", told, drains=task.seat)


def leave_devices(session: Session, devices: Iterable[str], *, by: str) -> None:
    """Withdraw the moves that `empty_devices` asked for, because the devices take work again.

    Tasks that are being copied already still move.
    """
    wished = Task.seat.in_(list(devices)) & (Task.move_to == ANYWHERE) & Task.moving.is_(None)
    query = select(Task).where(wished).order_by(Task.id)
    fresh = query.with_for_update(key_share=True).execution_options(populate_existing=True)
    for task in session.scalars(fresh).all():
        if _drained(session, task) and _wish(session, [task], _wish_stay):
            told = f"{by} lets {task.seat} take work again: the task stays there."
            _tell(session, task, task, "task.move_withdrawn", told)


def _drained(session: Session, task: Task) -> bool:
    """True if the task's last move was requested because its device is drained."""
    asked = select(RequestEvent.data).where(
        RequestEvent.request_id == task.request_id,
        RequestEvent.task_id == task.id,
        RequestEvent.type == "task.move_asked",
    )
    last = session.scalar(asked.order_by(RequestEvent.id.desc()).limit(1)) or {}
    return bool(last.get("drains") == task.seat)


def _wish_stay(task: Task) -> bool:
    task.move_to = task.move_asked_at = None
    return True


def _wish_move(task: Task, to: str) -> bool:
    if task.move_to == to or (to == ANYWHERE and task.move_to is not None):
        return False
    task.move_to, task.move_asked_at = to, func.now()
    return True


def _check_live(wished_of: Request | Task) -> None:
    if wished_of.state in ENDED:
        raise Conflict(f"the task is already {wished_of.state}; nothing was changed")


# --- writing an action --------------------------------------------------------------------------

Wish = Callable[[Task], bool]


def _each(session: Session, request: Request, wish: Wish) -> bool:
    """Apply the action to all tasks that have not ended.

    They are locked in the order of their ids, as the island locks them. A lot is locked before its
    members are read, and gets no members meanwhile.
    """
    session.execute(_lots_of(request).with_for_update(key_share=True))
    query = select(Task).where(Task.request_id == request.id, Task.state.not_in(ENDED))
    locked = query.order_by(Task.id).with_for_update(key_share=True)
    fresh = locked.execution_options(populate_existing=True)
    return _wish(session, session.scalars(fresh), wish)


def _one(session: Session, task: Task, wish: Wish) -> bool:
    """Apply the action to the task; to the tickets of a gang that spans islands, too, and to the
    members of a lot.
    """
    which = Task.gang_id == task.id if task.gang_id == task.id else Task.id == task.id
    if task.lot_id == task.id:
        which = Task.lot_id == task.id
        session.execute(select(Task.id).where(Task.id == task.id).with_for_update(key_share=True))
    query = select(Task).where(which, Task.state.not_in(ENDED)).order_by(Task.id)
    fresh = query.with_for_update(key_share=True).execution_options(populate_existing=True)
    return _wish(session, session.scalars(fresh), wish)


def _wish(session: Session, tasks: Iterable[Task], wish: Wish) -> bool:
    changed = [task for task in tasks if wish(task)]
    for task in changed:
        if task.gang_id:
            gang_tickets.nudge_others(session, task)
    for island in sorted({task.island or "" for task in changed}):
        after_commit(session, lambda island=island: _nudge(island))  # type: ignore[misc]
    return bool(changed)


def _wish_cancel(task: Task) -> bool:
    if task.cancel_asked_at is not None:
        return False
    task.cancel_asked_at = func.now()
    return True


def _wish_hold(task: Task, hold: str) -> bool:
    return task.hold != ADMIN_HOLD and _set(task, "hold", hold)


def _wish_wake(task: Task) -> bool:
    return task.hold == IDLE_HOLD and _set(task, "hold", "")


def _wish_release(session: Session, task: Task, as_admin: bool) -> bool:
    if task.hold == ADMIN_HOLD and not as_admin:
        raise Forbidden(
            "an administrator of the platform paused the task; only administrators of the "
            "platform can resume it"
        )
    is_waived = needs_journal.waive(session, task)
    is_let_go = task.hold != PROMOTED and _set(task, "hold", _RELEASED.get(task.hold, ""))
    return is_waived or is_let_go


_RELEASED = {HELD_AT_RUNG: PROMOTED}


def _unless_at_rung(wish: Wish, asked: Task | None = None) -> Wish:
    """Return the wish for tasks other than members at rungs, which their lot lets go on; `asked`
    is not among these.
    """
    return lambda task: (task is asked or task.hold not in RUNG_HOLDS) and wish(task)


def _set(task: Task, wish: str, value: Any) -> bool:
    if getattr(task, wish) == value:
        return False
    setattr(task, wish, value)
    return True


def _nudge(island: str) -> None:
    if island:
        outbox.nudge_island(island)
    else:
        outbox.nudge_control()


def tell(session: Session, task: Task, type_: str, message: str) -> None:
    """Add an event about the task, and wake the streams that show it."""
    _tell(session, task, task, type_, message)


def _tell(
    session: Session,
    about: Request | Task,
    task: Task | None,
    type_: str,
    message: str,
    **data: Any,
) -> None:
    tenant_id = about.tenant_id
    request_id = about.request_id if isinstance(about, Task) else about.id
    session.add(
        RequestEvent(
            tenant_id=tenant_id,
            request_id=request_id,
            task_id=task.id if task else None,
            type=type_,
            message=message,
            data={"task": task.name, **data} if task else data,
        )
    )
    after_commit(session, lambda: changes.tell(tenant_id, request_id))
