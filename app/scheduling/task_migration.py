"""Moves under way: begin each move that was asked for, and continue it from stage to stage.

The island calls this in its round, before it decides: `advance` looks at every task that is to be
moved and does what `core.model.checkpoints.migration` says, in the rows.  Pauses and launches are
ordinary decisions; `core.scheduling.cycle` makes them when it sees how far a move is.

Nothing here waits, and all state is in the rows, so the next leader of the island continues from
there.  A move that cannot continue is abandoned, and its task keeps its state and its place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.core.fairness.fair_tree import lane
from app.core.model import codec
from app.core.model.checkpoints import migration
from app.core.model.checkpoints.migration import ANYWHERE, MOVABLE, Act, MoveScene, Moving
from app.core.model.device_choice import with_packages
from app.core.model.lifecycle import ON_A_DEVICE, State
from app.core.model.provisions.notice import NEED
from app.core.model.provisions.process_images import choice_where_it_goes_on
from app.core.scheduling.board import Board
from app.core.scheduling.reclaim import defragment
from app.db import transactions
from app.db.models import Task
from app.scheduling import journal
from app.settings import settings

POLICY = migration.MovePolicy()


def advance(session: Session, board: Board, *, island: str) -> bool:
    """Continue every move of an island as far as it can go; False if nothing was written."""
    wished = select(Task).where(Task.move_to.is_not(None), Task.island == island)
    free = wished.order_by(Task.id).with_for_update(key_share=True, skip_locked=True)
    changed = False
    taken: set[str] = set()
    for task in session.scalars(free.execution_options(populate_existing=True)).all():
        changed |= _go_on(session, board, task, taken)
    session.flush()
    return changed


def _go_on(session: Session, board: Board, task: Task, taken: set[str]) -> bool:
    moving = codec.from_json(Moving, task.moving) if task.moving is not None else None
    if moving is None or moving.to != task.move_to:
        return _begin(session, board, task, taken)
    scene = MoveScene(
        state=task.state,
        epoch=task.epoch,
        seat=task.seat,
        open=_is_open(board, moving.to),
        now_s=board.now_s,
        bound_because="" if _may_leave(board, task) else task.bound_because,
    )
    match migration.next_act(moving, scene, POLICY):
        case migration.Next(Act.off, because):
            journal.break_off(session, task, because)
        case migration.Next(Act.copy):
            journal.order_round(session, task, moving)
        case migration.Next(Act.stop, _, until_s):
            told = task.spec.notice
            told_s = min(told.seconds, settings().notice_max_s) if told is not None else 0.0
            stopping = replace(moving, stopping=True, until_s=until_s + told_s)
            task.moving = codec.to_json(stopping, whole=True)
        case _:
            return False
    return True


def _is_open(board: Board, id: str) -> bool:
    return id in board.devices and board.open(board.devices[id])


def make_fit(session: Session, board: Board) -> None:
    """Request moves of tasks that could run elsewhere and hold what a waiting task needs."""
    for id, to in defragment.moves(board):
        query = select(Task).where(Task.id == id).with_for_update(key_share=True, skip_locked=True)
        task = session.scalar(query.execution_options(populate_existing=True))
        if task is None or task.move_to is not None or _asked_lately(board, task):
            continue
        task.move_to, task.move_asked_at = to, transactions.now(session)
        told = f"Moving to {to}: another task needs {task.seat}, and cannot use {to}."
        journal.tell(session, task, "task.move_asked", told, to=to)


def _asked_lately(board: Board, task: Task) -> bool:
    """True if a move of the task was requested within the deadline and did not end in a launch: a
    failed move is not tried again at once.
    """
    at, launched_at = task.move_asked_at, task.launched_at
    if at is None or (launched_at is not None and launched_at > at):
        return False
    return board.now_s < at.timestamp() + settings().move_deadline_s


# --- where to -------------------------------------------------------------------------------------


def _begin(session: Session, board: Board, task: Task, taken: set[str]) -> bool:
    """Reserve the target device if it is free; otherwise wait for it until the deadline."""
    if task.moving is not None:  # the target was changed while the move was under way
        task.moving = None
        return True
    if (because := _why_not(board, task)) is not None:
        journal.break_off(session, task, because)
        return True
    to = _free(board, task, taken) if task.state == State.running else None
    if to is None:
        return False
    taken.add(to)
    moving = Moving(
        to=to,
        source=str(task.seat),
        epoch=task.epoch,
        until_s=board.now_s + settings().move_deadline_s,
    )
    task.move_to, task.moving = to, codec.to_json(moving, whole=True)
    told = f"Moving from {task.seat} to {to}: its state is copied while it runs."
    journal.tell(session, task, "task.moving", told, to=to, source=task.seat)
    return True


def _why_not(board: Board, task: Task) -> str | None:
    """Return why the move is impossible, now and later; None if it may be possible."""
    asked_at, to = task.move_asked_at, str(task.move_to)
    if task.state not in ON_A_DEVICE or task.state == State.stopping:
        return "the task no longer holds a device"
    if task.seat == to:
        return "the task is already there"
    drained = board.devices.get(task.seat or "")
    is_drained = drained is not None and drained.cordoned
    if task.state == State.running and not _is_movable(task, is_drained=is_drained):
        return task.bound_because or "the state of the task cannot be captured"
    if to != ANYWHERE and not _is_open(board, to):
        return f"{to} takes no work"
    if to != ANYWHERE and not _goes_on_on(board, task, to):
        return f"{to} has another processor, kernel or CRIU: its processes cannot go on there"
    if asked_at is not None and board.now_s >= asked_at.timestamp() + settings().move_deadline_s:
        return "no device was free for it in time"
    if to == ANYWHERE and is_drained and task.state == State.running:
        return None if _free(board, task, set()) else "no other device is free for it"
    return None


def _is_movable(task: Task, *, is_drained: bool) -> bool:
    """True if the state of the task moves with it, or if it saves its state when it is told.

    A command with a notice leaves a drained device at once: it need not wait until a free device is
    found.
    """
    return MOVABLE in task.capabilities or (NEED in task.capabilities and not is_drained)


def _may_leave(board: Board, task: Task) -> bool:
    """True if a move may also end with another start of the task: from a drained device, or by
    notice.
    """
    source = board.devices.get(task.seat or task.image_on or "")
    is_drained = source is not None and source.cordoned
    return is_drained or bool({MOVABLE, NEED} & {*task.capabilities})


def _goes_on_on(board: Board, task: Task, to: str) -> bool:
    """True if the processes of a command can be restored on the device, or if the task has none."""
    need = task.goes_on_with
    return not need or NEED in task.capabilities or need in board.devices[to].traits.offers


def _free(board: Board, task: Task, taken: Any) -> str | None:
    """Return the target device if it is free and empty; if any device will do, the best one."""
    pool = board.pools.get(task.kind)
    if pool is None:
        return None
    choice = with_packages(_choice_of(task), "")  # packages are installed while the image is copied
    here = lane(task.kind, 1, task.memory_bytes, choice=choice)
    if task.move_to != ANYWHERE:
        to = str(task.move_to)
        fits = pool.takes(to, here) and pool.free.get(to) is False
        return to if fits and to not in taken else None
    empty = [id for id, leaving in pool.free.items() if not leaving and id not in taken]
    fitting = [id for id in empty if pool.takes(id, here)]
    waited_for = set(board.pinned())
    return min(fitting, key=lambda id: (id in waited_for, pool.open[id], id), default=None)


def _choice_of(task: Task) -> str:
    """Return the choice of devices on which the task can continue without beginning again, as a
    text.
    """
    if not task.goes_on_with or NEED in task.capabilities:
        return task.device_choice
    return choice_where_it_goes_on(task.device_choice, task.goes_on_with)
