"""Tasks: their state, why they wait, what they did; pause, resume, save, move, resize, cancel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, get_args

from fastapi import Body, Path, Query, Response
from fastapi.responses import StreamingResponse
from sqlalchemy import (
    ARRAY,
    Numeric,
    Text,
    and_,
    any_,
    bindparam,
    cast,
    func,
    literal,
    select,
    true,
    tuple_,
)
from sqlalchemy.orm import Session, aliased
from sqlalchemy.orm.attributes import instance_dict

from app.api import cursors, downloads
from app.api.access import tunnel_access
from app.api.access.auth import Authed
from app.api.access.caller import Caller
from app.api.access.visibility import of_caller, task_to_act_on, visible_task
from app.api.cursors import Paged, PagedBy200
from app.api.downloads import Download
from app.api.middleware import v1_router
from app.api.problems import declared
from app.api.schemas.base import Page, PhaseWord, TaskState
from app.api.schemas.tasks import (
    AskedTaskOut,
    CheckpointOut,
    Explained,
    LotOut,
    MetricOut,
    MigrateIn,
    PlacementOut,
    ResizeIn,
    ResourcesOut,
    RungOut,
    TaskOut,
)
from app.core.model import codec
from app.core.model import descriptor as descriptors
from app.core.model.checkpoints import migration
from app.core.model.checkpoints.migration import ANYWHERE, Moving
from app.core.model.device_choice import choice_in, traits_in
from app.core.model.graphs import dependencies
from app.core.model.lifecycle import ENDED, State
from app.core.model.next_size import memory_to_request, resources_to_request
from app.core.model.phase import task_phase
from app.core.model.protocol.messages import ARTIFACTS
from app.core.model.provisions import process_images
from app.core.model.provisions.lots import Array
from app.core.model.provisions.resources import of_amounts
from app.core.model.provisions.stop_rule import StopRule
from app.core.model.provisions.tunnel import why_not_into
from app.db.models import (
    Checkpoint,
    Device,
    Host,
    Metric,
    Need,
    Placement,
    RequestNeed,
    Task,
    Tenant,
)
from app.db.transactions import AnySelect, Db
from app.errors import BadInput, Conflict, NotFound
from app.insight import explain, phases, reports
from app.insight.lot_counts import ends_in_s, lot_states, phase_of, rungs_of
from app.insight.reports import NetworkUse
from app.insight.time_spent import time_spent
from app.intake import actions, request_needs
from app.intake.intake import NewTask
from app.intake.request_needs import FoundRequests
from app.scheduling import guest_placements
from app.scheduling.journal.best_members import metric_value

router = v1_router("tasks", 404)

AskedPhases = Annotated[
    str | None,
    Query(description="One phase or several, separated by commas: queued, paused, preempted …"),
]


@router.get("/tasks", response_model=Page[TaskOut], summary="List tasks, newest first")
def list_tasks(
    paging: Paged,
    caller: Authed,
    session: Db,
    state: Annotated[
        str | None, Query(description="One state or several, separated by commas.")
    ] = None,
    phase: AskedPhases = None,
    request_id: str | None = None,
    name: Annotated[str | None, Query(description="The exact name.")] = None,
    lot: Annotated[
        str | None, Query(description="The id of a lot: its members, the newest first.")
    ] = None,
    sort: Annotated[
        str | None,
        Query(
            pattern=r"^-?metric:.{1,200}$",
            description="With `lot`: `metric:NAME` lists the members by the last value of this "
            "metric, the lowest first, `-metric:NAME` the highest. Others are left out.",
        ),
    ] = None,
) -> dict[str, Any]:
    """Lists the tasks of the tenants that you see; every filter narrows the list."""
    query = select(Task).where(of_caller(caller, Task.tenant_id))
    if states := words_in(state, TaskState, "state"):
        query = query.where(Task.state.in_(states))
        if not ENDED.intersection(states):
            query = query.where(phases.IS_LIVE_TASK)
    if asked := words_in(phase, PhaseWord, "phase"):
        query = query.where(phases.has_task_in(asked))
    if request_id is not None:
        query = query.where(Task.request_id == request_id)
    if name is not None:
        query = query.where(Task.name == name)
    if lot is not None:
        query = query.where(Task.lot_id == lot, Task.lot_index.is_not(None))
    if sort is not None:
        if lot is None:
            raise BadInput.at("?sort", "goes with lot: name the lot whose members to sort", "lot")
        found = _by_metric(session, paging, query, sort)
        return found.page(task_outs(session, caller, found.rows))
    by_state = request_id is None and lot is None and (states or asked or not caller.sees_all)
    found = paging.read(
        session,
        query,
        by=Task.id,
        newest_first=True,
        parts=_by_tenant_and_state(caller, states, asked) if by_state else None,
    )
    return found.page(task_outs(session, caller, found.rows))


def _by_metric(
    session: Session, paging: cursors.Paging, query: AnySelect, sort: str
) -> cursors.FoundPage:
    """Return a page of tasks in the order of a metric; of equal values the oldest goes first."""
    value = metric_value(sort.partition(":")[2])
    key = -value if sort.startswith("-") else value
    query = query.where(value.is_not(None))
    if (cursor := paging.cursor) is not None:
        id, last = cursors.opened(cursor, 2)
        try:
            number = Decimal(last)
        except InvalidOperation as error:
            raise cursors.bad_cursor() from error
        query = query.where(tuple_(key, Task.id) > tuple_(literal(number, Numeric), literal(id)))
    rows = session.execute(query.add_columns(key).order_by(key, Task.id).limit(paging.most)).all()
    sealed = [cursors.seal(task.id, value) for task, value in rows]
    return paging.cut([task for task, _ in rows], sealed)


def _by_tenant_and_state(
    caller: Caller, states: Collection[str], asked: Collection[str]
) -> cursors.PageParts:
    """Return parts by tenant and state: the tenants that the caller sees, each with every possible
    state of the tasks that are asked for.
    """
    possible = phases.states_in(asked) if asked else frozenset(State)
    wanted = possible.intersection(states) if states else possible
    unnested = func.unnest(cast(sorted(wanted), ARRAY(Text))).table_valued("state")
    each = unnested.render_derived()
    table = (
        select(Tenant.id, each.c.state)
        .join(each, true())
        .where(of_caller(caller, Tenant.id))
        .subquery("parts")
    )
    holds = and_(Task.tenant_id == table.c.id, Task.state == table.c.state)
    return cursors.PageParts(table=table, holds=holds)


def words_in(text: str | None, known: Any, name: str) -> list[str]:
    """Return the words between commas; an unknown word raises BadInput that points at ?`name`."""
    words = [word.strip() for word in (text or "").split(",") if word.strip()]
    if unknown := [word for word in words if word not in get_args(known)]:
        listed = ", ".join(get_args(known))
        raise BadInput.at(f"?{name}", f"must be one of {listed}; got {unknown[0]!r:.80}", name)
    return words


@router.get("/tasks/{id}", response_model=TaskOut, summary="Show a task")
def get_task(id: str, caller: Authed, session: Db) -> TaskOut:
    """Shows the task's state, what it asked for, and how it ended."""
    return task_outs(session, caller, [visible_task(session, caller, id)])[0]


@router.get(
    "/tasks/{id}/descriptor", response_model=AskedTaskOut, summary="Show what a task asked for"
)
def get_asked_task(id: str, caller: Authed, session: Db) -> dict[str, Any]:
    """Shows the descriptor of the task, with defaults for what it left out.  A member of a lot has
    its own values in it.  Of secrets only the names are there.
    """
    task = visible_task(session, caller, id)
    return {"task_id": task.id, "request_id": task.request_id, "descriptor": task.descriptor}


OutputName = Annotated[
    str, Path(pattern=r"^([A-Za-z_][A-Za-z0-9_]{0,62}|artifacts\.zip)$", examples=[ARTIFACTS])
]


@router.get(
    "/tasks/{id}/outputs/{name}",
    response_class=StreamingResponse,
    summary="Download an output, or its artifacts",
    responses={**downloads.ANSWERS, **declared(409)},
)
def get_output(id: str, name: OutputName, caller: Authed, session: Db, asked: Download) -> Response:
    """Sends a published output as the file of tensors that became a datablock.  `artifacts.zip`
    holds the files of a command that were kept when it ended (`artifacts` in its descriptor).

    Other outputs are stored as they lay in memory, for other tasks: to get a file, publish the
    output.
    """
    task = visible_task(session, caller, id)
    kept = task.outputs.get(name)
    if kept is None:
        raise NotFound("output", name)
    if name != ARTIFACTS and "format" not in kept:
        told = f"{name} is kept in the memory format of tasks; publish the output to get a file"
        raise Conflict(told)
    filename = f"{task.name}-{name}" + ("" if name == ARTIFACTS else f".{kept['format']}")
    headers = downloads.headers_of(kept["sha256"], filename)
    return downloads.answer(kept["sha256"], kept["size_bytes"], headers, asked)


@router.get("/tasks/{id}/explain", response_model=Explained, summary="Explain why a task waits")
def explain_task(id: str, caller: Authed, session: Db) -> dict[str, Any]:
    """Shows all reasons why the task waits, which to end first, its place, when it is expected to
    start, and how it spent its time so far.
    """
    task = visible_task(session, caller, id)
    told = explain.explain(session, [task])[id]
    return {
        "task_id": task.id,
        "state": task.state,
        "phase": phases.of_task(task),
        "place": told.place,
        "message": told.reasons[0]["message"] if told.reasons else _does_not_wait(session, task),
        "reasons": told.reasons,
        "nearest": told.nearest,
        "starts_at": told.estimate.starts_at if told.estimate else None,
        "estimate": told.estimate,
        "no_estimate": told.no_estimate,
        "movement": reports.movement_of(task),
        "time": time_spent(session, [id])[id],
    }


def _does_not_wait(session: Session, task: Task) -> str:
    where = f" on {task.seat}" if task.seat else ""
    told = f"{task.state.capitalize()}{where}{_moves(task)}."
    return f"{told} {explain.breadth(session, task)}".rstrip()


def _moves(task: Task) -> str:
    if task.moving is not None:
        return f"; {migration.told(codec.from_json(Moving, task.moving))}"
    if task.move_to is None:
        return ""
    to = "another device" if task.move_to == ANYWHERE else task.move_to
    return f"; it moves to {to} when that is free"


# --- history ------------------------------------------------------------------------------------


@router.get("/tasks/{id}/metrics", response_model=Page[MetricOut], summary="Metrics of a task")
def list_metrics(id: str, paging: PagedBy200, caller: Authed, session: Db) -> dict[str, Any]:
    """Lists the rows of metrics, by step; a step that ran again has the newest values."""
    task = visible_task(session, caller, id)
    query = select(Metric).where(Metric.task_id == task.id)
    return paging.read(session, query, by=Metric.step).page()


@router.get(
    "/tasks/{id}/checkpoints",
    response_model=Page[CheckpointOut],
    summary="List the checkpoints of a task, newest first",
)
def list_checkpoints(id: str, paging: Paged, caller: Authed, session: Db) -> dict[str, Any]:
    """Lists the checkpoints that the task keeps, and those that are damaged or being deleted; of a
    lot, those of all its members.
    """
    task = visible_task(session, caller, id)
    which = Checkpoint.task_id == task.id
    if task.lot_id == task.id:
        members = select(Task.id).where(Task.lot_id == task.id, Task.lot_index.is_not(None))
        which = Checkpoint.task_id.in_(members)
    query = select(Checkpoint).where(which)
    return paging.read(session, query, by=Checkpoint.id, newest_first=True).page()


@router.get(
    "/tasks/{id}/placements",
    response_model=Page[PlacementOut],
    summary="List the placements of a task, newest first",
)
def list_placements(id: str, paging: Paged, caller: Authed, session: Db) -> dict[str, Any]:
    """Lists one entry per launch, and one per borrowed device; the held time is charged."""
    task = visible_task(session, caller, id)
    query = select(Placement).where(Placement.task_id == task.id)
    return paging.read(session, query, by=Placement.id, newest_first=True).page()


# --- requested actions --------------------------------------------------------------------------


def _after(session: Session, caller: Caller, task: Task) -> TaskOut:
    session.flush()
    session.refresh(task)
    return task_outs(session, caller, [task])[0]


@router.post(
    "/tasks/{id}/pause",
    status_code=202,
    response_model=TaskOut,
    summary="Pause a task at its next safe point",
    responses=declared(403, 409),
)
def pause_task(id: str, caller: Authed, session: Db) -> TaskOut:
    """Pauses the task without losing a step; others may use its device until it is resumed."""
    task = task_to_act_on(session, caller, id)
    actions.pause_task(session, task, by=caller.user_name, as_admin=caller.sees_all)
    return _after(session, caller, task)


@router.post(
    "/tasks/{id}/resume",
    status_code=202,
    response_model=TaskOut,
    summary="Resume a task",
    responses=declared(403, 409),
)
def resume_task(id: str, caller: Authed, session: Db) -> TaskOut:
    """Queues the task again; it continues after the step at which it was paused."""
    task = task_to_act_on(session, caller, id)
    actions.resume_task(session, task, by=caller.user_name, as_admin=caller.sees_all)
    return _after(session, caller, task)


@router.post(
    "/tasks/{id}/checkpoint",
    status_code=202,
    response_model=TaskOut,
    summary="Save a checkpoint at the next safe point",
    responses=declared(403, 409),
)
def checkpoint_task(id: str, caller: Authed, session: Db) -> TaskOut:
    """Saves a checkpoint; the task continues to run."""
    task = task_to_act_on(session, caller, id)
    actions.save_task(session, task, by=caller.user_name)
    return _after(session, caller, task)


@router.post(
    "/tasks/{id}/migrate",
    status_code=202,
    response_model=TaskOut,
    summary="Move a task to another device while it runs",
    responses=declared(403, 409, 422),
)
def migrate_task(
    id: str, caller: Authed, session: Db, body: Annotated[MigrateIn, Body()] = MigrateIn()
) -> TaskOut:
    """Copies the task while it runs, stops it for the last difference, and resumes it there.

    No step is lost.  If the move fails at any point, the task stays in its state and on its device,
    and its events say why.
    """
    task = task_to_act_on(session, caller, id)
    if body.to is not None:
        _must_fit(session, task, body.to)
    actions.move_task(session, task, body.to or ANYWHERE, by=caller.user_name)
    return _after(session, caller, task)


@router.post(
    "/tasks/{id}/resize",
    status_code=202,
    response_model=TaskOut,
    summary="Change how many devices a task may hold",
    responses=declared(403, 409, 422),
)
def resize_task(id: str, body: ResizeIn, caller: Authed, session: Db) -> TaskOut:
    """Changes the number of devices; the number of ranks stays, and they take turns on the devices.

    The task returns surplus devices at its next safe point, and takes more when no other task could
    use them.  The result has the same bits, whatever devices the task had and when.
    """
    task = task_to_act_on(session, caller, id)
    actions.resize_task(session, task, body.devices_max, by=caller.user_name)
    return _after(session, caller, task)


def _must_fit(session: Session, task: Task, to: str) -> None:
    """Raise BadInput at /to if the task can never run on that device."""
    device = session.get(Device, to)
    if device is None:
        here = select(Device.id).where(Device.island == task.island).order_by(Device.id).limit(10)
        there_are = ", ".join(session.scalars(here))
        told = f"must be the id of a device, such as {there_are}; got {to!r:.80}"
        raise BadInput.at("/to", told, "unknown")
    if device.island != task.island:
        raise BadInput.at(
            "/to",
            f"must be a device of the task's island; {to} belongs to island {device.island}",
            "island",
        )
    if device.kind != task.kind:
        raise BadInput.at(
            "/to", f"must be a {task.kind} device; {to} is a {device.kind} device", "kind"
        )
    if device.memory_bytes < task.memory_bytes:
        told = (
            f"must have at least {task.memory_bytes} bytes of memory; {to} has "
            f"{device.memory_bytes}"
        )
        raise BadInput.at("/to", told, "memory")
    choice = choice_in(task.device_choice)
    if not choice.suits(replace(traits_in(device.facts), kept_for=device.reserved_by)):
        raise BadInput.at("/to", f"must be a device{choice.told}; {to} is none", "choice")
    if device.cordoned or session.get_one(Host, device.host).cordoned:
        raise BadInput.at("/to", f"{to} is drained and takes no new work", "cordoned")
    if task.seat == to:
        raise BadInput.at("/to", f"the task is already on {to}", "there")


@router.post(
    "/tasks/{id}/cancel",
    status_code=202,
    response_model=TaskOut,
    summary="Cancel a task",
    responses=declared(403),
)
def cancel_task(id: str, caller: Authed, session: Db) -> TaskOut:
    """Cancels the task; tasks that need it fail.

    To cancel it twice, or after its end, is no error.
    """
    task = task_to_act_on(session, caller, id)
    actions.cancel_task(session, task, by=caller.user_name)
    return _after(session, caller, task)


# --- rows to answers ----------------------------------------------------------------------------


def task_outs(session: Session, caller: Caller, tasks: Sequence[Task]) -> list[TaskOut]:
    needs = _needs(session, {task.id: task.request_id for task in tasks})
    awaited = _awaited(
        session, [task.id for task in tasks if request_needs.comes_after(task.descriptor)]
    )
    lent = guest_placements.guests(
        session, [task.id for task in tasks if task.resized_at is not None]
    )
    used = reports.network_use(session, tasks)
    shown = [
        _task_out(task, caller, needs[task.id], awaited[task.id], lent[task.id], used.get(task.id))
        for task in tasks
    ]
    _count_members(session, shown)
    return shown


def _count_members(session: Session, shown: Sequence[TaskOut]) -> None:
    """Add what became of their members, and what all of these took, to the lots among the tasks."""
    lots = {task.id: task for task in shown if task.lot_id == task.id}
    for id, state in lot_states(session, lots).items():
        out, counts = lots[id], state.counts
        out.lot_id = None
        out.held_us, out.pauses, out.lost_steps = state.held_us, state.pauses, state.lost_steps
        out.lot = LotOut(
            count=counts.count,
            at_once=counts.at_once,
            max_failures=counts.failures_allowed,
            phases=dict(state.phases),
            left=counts.left,
            rungs=[RungOut(**asdict(rung)) for rung in state.rungs],
            is_held=counts.has_failed_too_often,
            ends_in_s=ends_in_s(session, id, state),
        )
        if out.state not in ENDED:
            out.phase = phase_of(state, out.hold).value


_NOTHING_COUNTED = ResourcesOut()  # given, because a default is copied for each task


def new_task_out(
    request: Mapping[str, Any],
    task: NewTask,
    needs: Iterable[dependencies.DependencyEdge],
    after: FoundRequests,
) -> dict[str, Any]:
    """Return the answer for a task that is being written.

    Fields that are not given have their defaults.
    """
    spec, said = task.spec, descriptors.as_json(task.spec)
    return {
        "id": task.id,
        "name": spec.name,
        "type": spec.type,
        "kind": spec.devices.kind,
        "devices_min": spec.devices.min,
        "devices_max": spec.devices.max,
        "across_hosts": spec.devices.across_hosts,
        "hosts": spec.devices.hosts,
        "hold": task.hold,
        "step": task.step,
        "request_id": request["id"],
        "tenant_id": request["tenant_id"],
        "tier": request["tier"],
        "state": "blocked",
        "phase": task_phase("blocked", hold=task.hold, begun=False, retries=False, has_image=False),
        "submitted_at": request["submitted_at"],
        "no_tunnel": why_not_into("blocked", spec),
        "movement": process_images.movement(spec.run.kind, (), ""),
        "peak_resources": _NOTHING_COUNTED,
        "needs": [
            *({"task": n.task, "port": n.port, "output": n.output} for n in needs),
            *after.needs(spec),
        ],
        "after_requests": after.shown(spec),
        "inputs": said["inputs"],
        "from_checkpoint": said["from_checkpoint"],
        "publish": said["publish"],
        "network": said["network"],
        "lot": _new_lot_out(spec.array, spec.stop),
    }


def _new_lot_out(array: Array | None, stop: StopRule | None) -> dict[str, Any] | None:
    if array is None:
        return None
    return {
        "count": array.count,
        "at_once": array.at_once,
        "max_failures": array.failures_allowed,
        "phases": {"queued": array.count},
        "left": array.count,
        "rungs": [asdict(rung) for rung in rungs_of(stop)],
        "is_held": False,
        "ends_in_s": None,
    }


_NEEDED = aliased(Task)
_NEEDS = (
    select(Need.task_id, _NEEDED.name, Need.port, Need.output, _NEEDED.request_id)
    .join(_NEEDED, _NEEDED.id == Need.needs_id)
    .where(Need.task_id == any_(bindparam("ids", type_=ARRAY(Text))))
    .order_by(_NEEDED.request_id.desc(), _NEEDED.ordinal, Need.port)  # its own request first
)


def _needs(session: Session, requests: Mapping[str, str]) -> dict[str, list[dict[str, str]]]:
    """Return the needs of tasks, which are given with their requests."""
    found: dict[str, list[dict[str, str]]] = defaultdict(list)
    for id, name, port, output, of in session.execute(_NEEDS, {"ids": [*requests]}):
        need = {"task": name, "port": port, "output": output}
        found[id].append(need if of == requests[id] else {**need, "request_id": of})
    return found


_AWAITED = (
    select(RequestNeed)
    .where(RequestNeed.task_id == any_(bindparam("ids", type_=ARRAY(Text))))
    .order_by(RequestNeed.needs_request_id.desc(), RequestNeed.needs_task_id)
    .execution_options(populate_existing=True)
)


def _awaited(session: Session, ids: list[str]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    if not ids:
        return found
    for need in session.scalars(_AWAITED, {"ids": ids}):
        found[need.task_id].append(request_needs.shown(vars(need)))
    return found


#: The fields of an answer that a row has under the same name.
_COLUMNS = [name for name in TaskOut.model_fields if hasattr(Task, name)]


def _task_out(
    task: Task,
    caller: Caller,
    needs: list[dict[str, str]],
    awaited: list[dict[str, Any]],
    lent: list[Placement],
    used: NetworkUse | None,
) -> TaskOut:
    loaded = instance_dict(task)  # reading 900 tasks attribute by attribute takes long
    shown = {name: loaded[name] for name in _COLUMNS}
    next_time = resources_to_request(task.state, task.peaks)
    shown |= {
        "hosts": choice_in(loaded["device_choice"]).hosts or None,
        "phase": phases.of_task(task),
        "needs": needs,
        "after_requests": awaited,
        "inputs": task.descriptor.get("inputs") or {},
        "from_checkpoint": task.descriptor.get("from_checkpoint"),
        "publish": task.descriptor.get("publish") or {},
        "lent": [guest.device_id for guest in lent],
        "cancel_asked": task.cancel_asked_at is not None,
        "held_us": task.total_held_us + task.held_us,
        "memory_to_request_bytes": memory_to_request(task.state, task.peak_device_bytes),
        "peak_resources": of_amounts(task.peaks).as_json(),
        "resources_to_request": None if next_time is None else next_time.as_json(),
        "network": None if used is None else used.as_json(),
        "no_tunnel": tunnel_access.why_closed(caller, task),
        "movement": reports.movement_of(task),
        "dropped": task.dropped or None,
    }
    return TaskOut.model_validate(shown)
