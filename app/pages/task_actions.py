"""Finds the actions that a request and its tasks allow now, so that a page offers exactly those.

This module decides only what is shown: `app.intake.actions` decides again when an action is
requested.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session, load_only

from app.api.access.auth import SUBMITTERS
from app.api.access.caller import Caller
from app.api.access.tunnel_access import why_closed
from app.api.access.visibility import may_act
from app.core.model.checkpoints.migration import MOVABLE
from app.core.model.lifecycle import ENDED, ON_A_DEVICE, State
from app.core.model.provisions import process_images
from app.core.model.provisions.notice import NEED as NOTICE
from app.core.model.request_needs import RequestStanding
from app.db.models import Lot, Request, Task
from app.intake.actions import ADMIN_HOLD
from app.scheduling.journal.lots import IS_LOT, IS_NO_MEMBER

ID_END = 8  # so many first characters of an id suffice for the command-line tool
INSIDE_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class OfTask:
    """Lists the actions on a task.

    `asked` are requested actions that are still in progress, in words. `widths` are the numbers of
    devices that the task may be given; empty if it has no ranks to share them.
    """

    asked: tuple[str, ...] = ()
    cancel: bool = False
    pause: bool = False
    resume: bool = False
    save: bool = False
    move: bool = False
    widths: Sequence[int] = ()
    devices_max: int = 1

    @property
    def any(self) -> bool:
        return self.cancel or self.pause or self.resume or self.save or self.move


@dataclass(frozen=True, slots=True, kw_only=True)
class LookInside:
    """Says how the reader can open a shell in the tasks of a request, with the command-line tool.

    `given` are the first tasks for which that is possible, as arguments of the tool; `others` is
    how many more there are, and `commands` are those whose files can be read. `waits` is True if
    none of them runs now. `closed` are names of tasks for which it is not possible, by the reason.
    """

    given: tuple[str, ...] = ()
    commands: frozenset[str] = frozenset()
    others: int = 0
    waits: bool = False
    closed: Mapping[str, Sequence[str]]


def look_inside(session: Session, caller: Caller, request: Request) -> LookInside:
    query = select(Task).where(Task.request_id == request.id, IS_NO_MEMBER, ~IS_LOT)
    query = query.order_by(Task.ordinal)
    needed = load_only(Task.name, Task.state, Task.user_id, Task.descriptor)
    tasks = session.scalars(query.options(needed)).all()
    closed: dict[str, list[str]] = {}
    opens = []
    for task in tasks:
        if why := why_closed(caller, task):
            closed.setdefault(why, []).append(task.name)
        else:
            opens.append(task)
    end = request.id[-ID_END:]
    given = [end if len(tasks) == 1 else f"{end}/{shlex.quote(task.name)}" for task in opens]
    named = zip(given, opens, strict=True)
    return LookInside(
        given=tuple(given[:INSIDE_SHOWN]),
        commands=frozenset(
            name for name, task in named if "command" in (task.descriptor.get("run") or {})
        ),
        others=len(given[INSIDE_SHOWN:]),
        waits=all(task.state != State.running for task in opens),
        closed=closed,
    )


def may_submit(caller: Caller) -> bool:
    """True if the reader may submit requests; the root tenant has no share."""
    return caller.role in SUBMITTERS and not caller.in_root


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Lists the actions on a request; none if the reader may not act.

    `delete` is for a request that has ended, `retry` for what failed, all others are for tasks that
    have not ended.
    """

    cancel: bool = False
    hold: bool = False
    release: bool = False
    retry: bool = False
    delete: bool = False
    of_task: defaultdict[str, OfTask]


def choices(session: Session, caller: Caller, request: Request) -> Choices:
    query = select(Task).where(Task.request_id == request.id, Task.state.not_in(ENDED))
    live = session.scalars(query.where(IS_NO_MEMBER)).all()
    if not may_act(caller, request):
        asked = {task.id: OfTask(asked=_asked(task)) for task in live}
        return Choices(of_task=defaultdict(OfTask, asked))
    held = [task.hold for task in live]
    return Choices(
        cancel=any(task.cancel_asked_at is None for task in live),
        hold="" in held,
        release=any(map(_is_held, live)) and (caller.sees_all or ADMIN_HOLD not in held),
        retry=request.delete_asked_at is None and _has_failed(session, request),
        delete=not live and not request.keep and request.delete_asked_at is None,
        of_task=defaultdict(OfTask, {task.id: _of_task(task, caller.sees_all) for task in live}),
    )


def _is_held(task: Task) -> bool:
    """True if somebody may resume the task, whoever or whatever holds it."""
    return bool(task.hold) or task.standing == RequestStanding.held


def _has_failed(session: Session, request: Request) -> bool:
    """True if a task of the request failed, or a member of one of its lots."""
    top = select(Task.id).where(Task.request_id == request.id, IS_NO_MEMBER)
    failed = Lot.id.in_(top) & (Lot.failed > 0)
    of_lots = select(Lot.id).where(failed).limit(1)
    alone = top.where(Task.state == State.failed, Task.gang_id.is_(None)).limit(1)
    return session.scalar(of_lots) is not None or session.scalar(alone) is not None


def _of_task(task: Task, as_admin: bool) -> OfTask:
    sits = task.state in ON_A_DEVICE and task.state != State.stopping
    run_kind = next(iter(task.descriptor.get("run") or {}), "")
    is_stuck = process_images.cannot_move(run_kind, task.capabilities)
    is_known = task.state != State.running or {MOVABLE, NOTICE} & {*task.capabilities}
    return OfTask(
        asked=_asked(task),
        cancel=task.cancel_asked_at is None,
        pause=not task.hold,
        resume=_is_held(task) and (as_admin or task.hold != ADMIN_HOLD),
        save=sits and not task.save_asked,
        move=sits
        and not is_stuck
        and bool(is_known)
        and task.devices_min == 1
        and task.move_to is None,
        widths=_widths(task),
        devices_max=task.devices_max,
    )


def _widths(task: Task) -> Sequence[int]:
    ranks = task.descriptor.get("world_size", 1)  # a ticket of a gang has no whole descriptor
    if ranks == 1 or "job" not in task.descriptor["run"]:
        return ()
    if task.descriptor.get("devices", {}).get("hosts"):
        return ()
    return range(task.devices_min, ranks + 1)


def _asked(task: Task) -> tuple[str, ...]:
    asked = {
        "cancelling": task.cancel_asked_at is not None,
        "saving a checkpoint": task.save_asked,
        "moving": task.move_to is not None,
    }
    return tuple(words for words, is_so in asked.items() if is_so)
