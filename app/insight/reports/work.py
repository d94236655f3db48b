"""Requests, their tasks, and the launches, checkpoints, log lines and metrics of these."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, func, or_, select, text, true
from sqlalchemy.orm import Session, aliased

from app.core.model.descriptor import RUNS
from app.core.model.lifecycle import ENDED, NOT_STARTED, State
from app.core.model.next_size import memory_to_request, resources_to_request
from app.core.model.phase import request_phase
from app.core.model.provisions import process_images
from app.core.model.provisions.artifacts import dropped_told
from app.core.model.provisions.resources import Resources, of_amounts
from app.core.model.run_comparison import ComparedRun
from app.core.model.rungs import HELD_AT_RUNG
from app.db.models import Checkpoint, LogLine, Placement, Request, Task, Tenant, User
from app.insight import explain, phases
from app.insight.explain import Why
from app.insight.forecast import Start
from app.insight.lot_counts import LotState, ends_in_s, lot_states, phase_of
from app.insight.reports.fleet import held_devices, steps_of
from app.insight.reports.network import NetworkUse, network_use
from app.insight.reports.runs import RequestSearch
from app.scheduling.journal import rungs
from app.scheduling.journal.best_members import metric_value
from app.scheduling.journal.lots import IS_NO_MEMBER


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLine:
    """A request in a list.  `tasks` counts its tasks by phase."""

    id: str
    name: str
    tenant: str
    user: str
    phase: str
    priority: int
    labels: dict[str, Any]
    bundle: str
    submitted_at: datetime
    ended_at: datetime | None
    tasks: dict[str, int]
    total_held_us: int
    pauses: int
    lost_steps: int


def requests(
    session: Session,
    tenant: str | None,
    *,
    phase: str | None = None,
    search: RequestSearch | None = None,
    before: str | None = None,
    limit: int = 50,
) -> list[RequestLine]:
    """Return requests, newest first (ids sort by time); `before` is the id of the last one seen."""
    query = select(Request.id).order_by(Request.id.desc()).limit(limit)
    if search is not None:
        query = query.where(*search.conditions)
    if tenant is not None:
        query = query.where(Request.tenant_id == tenant)
    if phase is not None:
        query = query.where(phases.is_in([phase]))
    if before is not None:
        query = query.where(Request.id < before)
    return request_lines(session, list(session.scalars(query)))


def request(session: Session, tenant: str | None, id: str) -> RequestLine | None:
    """Return the request; None if there is none, or if it is another tenant's."""
    query = select(Request.id).where(Request.id == id)
    if tenant is not None:
        query = query.where(Request.tenant_id == tenant)
    lines = request_lines(session, list(session.scalars(query)))
    return lines[0] if lines else None


def request_lines(session: Session, ids: Sequence[str]) -> list[RequestLine]:
    counts: dict[str, dict[str, int]] = defaultdict(dict)
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    leading: dict[str, set[str]] = defaultdict(set)
    per_phase = (
        select(
            Task.request_id,
            phases.TASK_PHASE.label("phase"),
            phases.IS_NO_TICKET.label("leads"),
            Task.lot_id,
            func.count(),
            func.sum(Task.total_held_us + Task.held_us),
            func.sum(Task.pauses),
            func.sum(Task.lost_steps),
        )
        .where(Task.request_id.in_(ids), IS_NO_MEMBER)
        .group_by(Task.request_id, "phase", "leads", Task.lot_id)
    )
    lots: dict[str, str] = {}
    for id, phase, leads, lot, count, *more in session.execute(per_phase):
        if lot is not None:
            lots[lot] = id  # it counts as its members
            continue
        counts[id][phase] = counts[id].get(phase, 0) + count
        if leads:
            leading[id].add(phase)
        sums[id] = [int(a) + int(b) for a, b in zip(sums[id], more, strict=True)]
    for lot, state in lot_states(session, lots).items():
        id, of_lot = lots[lot], (state.held_us, state.pauses, state.lost_steps)
        counts[id] = dict(Counter(counts[id]) + Counter(state.phases))
        leading[id].update(state.phases)
        sums[id] = [a + b for a, b in zip(sums[id], of_lot, strict=True)]
    query = (
        select(Request, Tenant.name, User.name)
        .join(Tenant, Tenant.id == Request.tenant_id)
        .join(User, User.id == Request.user_id)
        .where(Request.id.in_(ids))
        .order_by(Request.id.desc())
    )
    return [
        RequestLine(
            id=row.id,
            name=row.name,
            tenant=tenant,
            user=user,
            phase=request_phase(row.state, leading[row.id]),
            priority=row.priority,
            labels=row.labels,
            bundle=str(row.descriptor.get("bundle") or ""),
            submitted_at=row.submitted_at,
            ended_at=row.ended_at,
            tasks=counts[row.id],
            total_held_us=sums[row.id][0],
            pauses=sums[row.id][1],
            lost_steps=sums[row.id][2],
        )
        for row, tenant, user in session.execute(query)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskView:
    """All that a page shows about one task.  `name` is unique within its request.

    Of many waiting tasks, only the first `EXPLAINED` have reasons and an estimate.
    """

    id: str
    name: str
    type: str
    kind: str
    state: str
    phase: str
    lot: LotState | None  # what became of its members, if it is a lot
    ends_in_s: float | None  # expected time until the last of these ends
    hold: str
    place: int | None
    devices: tuple[str, ...]
    image_on: str | None
    step: int
    metrics: dict[str, Any]
    reasons: tuple[dict[str, Any], ...]
    starts: Start | None
    epoch: int
    total_held_us: int
    pauses: int
    lost_steps: int
    peak_device_bytes: int
    peak_host_bytes: int
    memory_to_request_bytes: int | None
    peak_resources: Resources
    resources_to_request: Resources | None
    network: NetworkUse | None
    cause: str | None
    message: str | None
    detail: str | None
    result: dict[str, Any] | None
    outputs: dict[str, dict[str, Any]]
    dropped: str  # which files of a command were not kept, in a sentence
    unstored: str
    behind: str  # for which of its ranks the others wait, in a sentence
    params: dict[str, Any]
    runs: str  # the command line, or the name of what is run
    env: dict[str, str]
    secrets: tuple[str, ...]  # names of variables
    steps: int | None
    is_command: bool
    capabilities: tuple[str, ...]
    movement: str  # in a sentence; empty before its first start
    started_at: datetime | None
    ended_at: datetime | None


EXPLAINED = 50


def _run_in_words(task: Task) -> str:
    """Return the command line, as a shell takes it, or the name of the class, function or graph."""
    run = task.descriptor.get("run") or {}
    if "command" in run:
        return shlex.join(run["command"])
    return next((str(run[kind]) for kind in RUNS if kind in run), "")


def movement_of(task: Task) -> str:
    """Say what happens to a task that leaves its device, and why."""
    run = task.descriptor.get("run") or {}  # the ticket of a gang has no descriptor
    run_kind = next((kind for kind in RUNS if kind in run), "")
    return process_images.movement(run_kind, task.capabilities, task.bound_because)


def tasks(session: Session, request: str, *, limit: int) -> list[TaskView]:
    """Return tasks of the request in their order; of more than `limit`, those that are not done
    first.  Members of lots are left out.
    """
    query = select(Task).where(Task.request_id == request, IS_NO_MEMBER)
    query = query.order_by(Task.state == State.done, Task.ordinal).limit(limit)
    found = sorted(session.scalars(query), key=lambda task: task.ordinal)
    waiting = [task for task in found if task.state in NOT_STARTED]
    told = defaultdict(Why, explain.explain(session, waiting[:EXPLAINED]))
    lots = lot_states(session, [task.id for task in found if task.lot_id is not None])
    held = held_devices(session, found)
    used = network_use(session, found)
    return [
        TaskView(
            id=task.id,
            name=task.name,
            type=task.type,
            kind=task.kind,
            state=task.state,
            phase=_phase(task, lots.get(task.id)),
            lot=lots.get(task.id),
            ends_in_s=ends_in_s(session, task.id, lots[task.id]) if task.id in lots else None,
            hold=task.hold,
            place=told[task.id].place,
            devices=held[task.id],
            image_on=task.image_on,
            step=task.step,
            metrics=task.metrics,
            reasons=told[task.id].reasons,
            starts=told[task.id].estimate,
            epoch=task.epoch,
            **_taken(task, lots.get(task.id)),
            peak_device_bytes=task.peak_device_bytes,
            peak_host_bytes=task.peak_host_bytes,
            memory_to_request_bytes=memory_to_request(task.state, task.peak_device_bytes),
            peak_resources=of_amounts(task.peaks),
            resources_to_request=resources_to_request(task.state, task.peaks),
            network=used.get(task.id),
            cause=task.cause,
            message=task.message,
            detail=task.detail,
            result=task.result,
            outputs=task.outputs,
            dropped=dropped_told(task.dropped),
            unstored=task.unstored,
            behind=task.behind,
            params=task.descriptor.get("params") or {},
            runs=_run_in_words(task),
            env=task.descriptor.get("env") or {},
            secrets=tuple(task.descriptor.get("secrets") or ()),
            steps=steps_of(task),
            is_command="command" in task.descriptor.get("run", {}),
            capabilities=tuple(task.capabilities),
            movement=movement_of(task),
            started_at=task.first_started_at,
            ended_at=task.ended_at,
        )
        for task in found
    ]


def _taken(task: Task, lot: LotState | None) -> dict[str, int]:
    """Return what the task took; of a lot, what all its members took together."""
    if lot is not None:
        return {
            "total_held_us": lot.held_us,
            "pauses": lot.pauses,
            "lost_steps": lot.lost_steps,
        }
    return {
        "total_held_us": task.total_held_us + task.held_us,
        "pauses": task.pauses,
        "lost_steps": task.lost_steps,
    }


def _phase(task: Task, lot: LotState | None) -> str:
    if lot is None or task.state in ENDED:
        return phases.of_task(task)
    return phase_of(lot, task.hold)


@dataclass(frozen=True, slots=True, kw_only=True)
class LotMember:
    """A member of a lot, as a row of a table.  `values` are those of its matrix or search."""

    id: str
    index: int
    values: dict[str, Any]
    phase: str
    step: int
    metrics: dict[str, Any]
    total_held_us: int
    message: str | None


def members(
    session: Session, lot: str, *, phase: str = "", after: int = -1, metric: str = "", limit: int
) -> list[LotMember]:
    """Return members of the lot by their indices, from behind `after` on; with `metric`, those with
    the lowest last values of it.
    """
    query = select(Task).where(Task.lot_id == lot, Task.lot_index > after)
    if phase:
        query = query.where(phases.has_task_in([phase]))
    if metric:
        value = metric_value(metric)
        query = query.where(value.is_not(None)).order_by(value)
    rows = session.scalars(query.order_by(Task.lot_index).limit(limit)).all()
    told = rungs.places_told(session, [task for task in rows if task.hold == HELD_AT_RUNG])
    return [
        LotMember(
            id=task.id,
            index=task.lot_index or 0,
            values=task.lot_values or {},
            phase=phases.of_task(task),
            step=task.step,
            metrics=task.metrics,
            total_held_us=task.total_held_us + task.held_us,
            message=told.get(task.id, task.message),
        )
        for task in rows
    ]


def _shown(request: str, members: Sequence[str]) -> ColumnElement[bool]:
    """Return the condition that a task is one of the request's, or one of these members of lots."""
    return or_(and_(Task.request_id == request, IS_NO_MEMBER), Task.id.in_(members))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedStay:
    """A launch of a task on a device, or an additional device that it was lent (`guest`).  `end` is
    None while the stay lasts.
    """

    task: str
    epoch: int
    device: str
    guest: bool
    launched_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    held_us: int
    input_bytes: int
    fetched_bytes: int
    first_step: int | None
    last_step: int | None
    end: str | None


def stays(
    session: Session, request: str, *, members: Sequence[str] = (), limit: int = 200
) -> list[ReportedStay]:
    """Return the last `limit` stays of a request's tasks, oldest first; of the members of its lots
    only these.
    """
    # One subquery per task, as in `log_tail`: with a plain join Postgres may read the placements of
    # all requests.
    of_task = select(Placement).where(Placement.task_id == Task.id)
    stay = aliased(Placement, of_task.order_by(Placement.id.desc()).limit(limit).lateral())
    query = (
        select(stay, Task.name)
        .join_from(Task, stay, true())
        .where(_shown(request, members))
        .order_by(stay.id.desc())
        .limit(limit)
    )
    return [
        ReportedStay(
            task=name,
            epoch=row.epoch,
            device=row.device_id,
            guest=row.guest,
            launched_at=row.launched_at,
            started_at=row.started_at,
            ended_at=row.ended_at,
            held_us=row.held_us,
            input_bytes=row.input_bytes,
            fetched_bytes=row.fetched_bytes,
            first_step=row.first_step,
            last_step=row.last_step,
            end=row.end,
        )
        for row, name in reversed(session.execute(query).all())
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCheckpoint:
    """A checkpoint of one task that has not been deleted."""

    id: str
    task: str
    step: int
    size_bytes: int
    created_at: datetime
    damaged: bool
    pinned: bool
    best: bool
    metric: str  # that ranks it, or ""
    value: float | None  # of this metric
    of_command: bool  # holds files of its working folder, and no tensors


def checkpoints(
    session: Session, request: str, *, members: Sequence[str] = (), limit: int = 20
) -> list[KeptCheckpoint]:
    """List the checkpoints of a request's tasks, the newest first; of the members of its lots only
    those of these.

    If there are more than `limit`, the best and the pinned ones come before newer ones.
    """
    is_kept = or_(Checkpoint.best, Checkpoint.pinned_at.is_not(None))
    query = (
        select(Checkpoint, Task.name, Task.descriptor["run"].has_key("command"))
        .add_columns(Task.descriptor["checkpoint"]["best"]["metric"].astext)
        .join(Task, Task.id == Checkpoint.task_id)
        .where(_shown(request, members), Checkpoint.deleted_at.is_(None))
        .order_by(is_kept.desc(), Checkpoint.id.desc())
        .limit(limit)
    )
    found = sorted(session.execute(query), key=lambda row: row.Checkpoint.id, reverse=True)
    return [
        KeptCheckpoint(
            id=row.id,
            task=name,
            step=row.step,
            size_bytes=row.size_bytes,
            created_at=row.created_at,
            damaged=row.damaged_at is not None,
            pinned=row.pinned_at is not None,
            best=row.best,
            metric=metric or "",
            value=row.ranked_value,
            of_command=of_command,
        )
        for row, name, of_command, metric in found
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A line that a task printed."""

    id: int
    task: str
    epoch: int
    at: datetime
    stream: str
    text: str


def log_tail(
    session: Session,
    request: str,
    *,
    members: Sequence[str] = (),
    task: str = "",
    grep: str = "",
    before: int | None = None,
    limit: int = 200,
) -> list[Said]:
    """Return the last lines of all tasks of a request that contain `grep`, oldest first; of the
    members of its lots only those of these.  With `before`, the last ones before that line.  With
    `task`, only the lines of the task, or member, of this name.
    """
    lines = select(LogLine).order_by(LogLine.id.desc()).limit(limit)
    if before is not None:
        lines = lines.where(LogLine.id < before)
    found = _lines(session, lines, _which(request, members, task), grep)
    return sorted(found, key=lambda line: line.id)[-limit:]


def log_head(
    session: Session, request: str, *, task: str = "", grep: str = "", after: int, limit: int = 200
) -> list[Said]:
    """Return the first lines after that line, as `log_tail` does."""
    lines = select(LogLine).where(LogLine.id > after).order_by(LogLine.id).limit(limit)
    found = _lines(session, lines, _which(request, (), task), grep)
    return sorted(found, key=lambda line: line.id)[:limit]


def _which(request: str, members: Sequence[str], task: str) -> ColumnElement[bool]:
    if task:
        return and_(Task.request_id == request, Task.name == task)
    return _shown(request, members)


def _lines(
    session: Session, lines: Select[LogLine], which: ColumnElement[bool], grep: str
) -> list[Said]:
    """Return lines of each of these tasks.

    Without a limit for each task, Postgres may read the lines of all tasks of the service.
    """
    of_task = lines.where(LogLine.task_id == Task.id)
    if grep:
        of_task = of_task.where(func.strpos(LogLine.text, grep) > 0)
    line = aliased(LogLine, of_task.lateral())
    query = select(line, Task.name).join_from(Task, line, true()).where(which)
    return [
        Said(id=row.id, task=name, epoch=row.epoch, at=row.at, stream=row.stream, text=row.text)
        for row, name in session.execute(query)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A number that a task's steps returned, as (step, value) in order of steps."""

    task_id: str
    task: str
    name: str
    points: tuple[tuple[int, float], ...]


def compared_runs(session: Session, tasks: Sequence[Task]) -> list[ComparedRun]:
    """Return the tasks for a comparison, each under the heading REQUEST/TASK."""
    ids = {task.request_id for task in tasks}
    rows = session.execute(select(Request.id, Request.name).where(Request.id.in_(ids)))
    names = {row.id: row.name for row in rows}
    return [
        ComparedRun(
            id=task.id,
            heading=f"{names[task.request_id]}/{task.name}",
            descriptor=task.descriptor,
            values=task.lot_values or {},
            phase=phases.of_task(task),
            step=task.step,
            held_us=task.total_held_us + task.held_us + task.guest_held_us,
            metrics=task.metrics,
        )
        for task in tasks
    ]


def curves(
    session: Session, request: str, *, members: Sequence[str] = (), points: int = 200
) -> list[Curve]:
    """Return each numeric metric of each task: every row, or about `points` of them if there are
    more.

    Steps are then cut into equal ranges.  The rows with the lowest and the highest value of each
    range are kept, and the first and the last row.  So each point is a row, and no extreme is lost.
    Of the members of lots only these are read.
    """
    found: dict[tuple[str, str, str], set[tuple[int, float]]] = defaultdict(set)
    given = {"request": request, "members": [*members], "points": points}
    for id, task, name, *rows in session.execute(_CURVES, given):
        line = ((int(row[0]), float(row[1])) for row in rows if row is not None)
        found[id, task, name] |= {point for point in line if isfinite(point[1])}
    return [
        Curve(task_id=id, task=task, name=name, points=tuple(sorted(line)))
        for (id, task, name), line in found.items()
        if line
    ]


#: The points of each range as [step, value]; null for a point that is there already.
_CURVES = text(
    """
    with numbers as (
        select t.id, t.name as task, one.key as name, m.step, one.value::numeric as value,
            case when rows <= :points then m.step
                else div((m.step - first)::numeric * (:points / 2), last - first + 1) end as range
        from tasks t
            cross join lateral (
                select min(step) as first, max(step) as last, count(*) as rows
                from metrics where task_id = t.id
            ) span
            cross join lateral (
                select step, values from metrics where task_id = t.id offset 0
            ) m
            cross join lateral jsonb_each(m.values) one
        where (t.request_id = :request and t.lot_index is null or t.id = any(:members))
            and jsonb_typeof(one.value) = 'number'
    ), ranges as (
        select id, task, name, range, min(array[value, step]) as lowest,
            max(array[value, step]) as highest, min(array[step, value]) as first,
            max(array[step, value]) as last
        from numbers group by id, task, name, range
    )
    select id, task, name, array[lowest[2], lowest[1]],
        case when highest <> lowest then array[highest[2], highest[1]] end,
        case when lag(range) over line is null then nullif(first, array[lowest[2], lowest[1]]) end,
        case when lead(range) over line is null then nullif(last, array[lowest[2], lowest[1]]) end
    from ranges window line as (partition by id, name order by range)
    order by task, id, name, range
    """
)
