"""Requests: submit, look, wait, change, cancel, hold, delete."""

from __future__ import annotations

import asyncio
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Annotated, Any

from fastapi import Body, Header, Query, Response
from pydantic import AfterValidator, WithJsonSchema
from sqlalchemy import Text, bindparam, func, literal_column, select
from sqlalchemy.orm import Session

from app.api.access.auth import Authed, Submitter
from app.api.access.caller import Caller
from app.api.access.gate import in_thread
from app.api.access.visibility import of_caller, request_to_act_on, visible_request
from app.api.cursors import Paged
from app.api.descriptor_schema import DescriptorIn, in_order
from app.api.middleware import v1_router
from app.api.problems import declared
from app.api.routes.tasks import AskedPhases, new_task_out, task_outs, words_in
from app.api.schemas.base import Page, PhaseWord, RequestState
from app.api.schemas.requests import (
    RequestOut,
    RequestPatch,
    RequestPlan,
    RequestSummary,
    RetryIn,
    SubmittedOut,
    Validated,
)
from app.api.times import Time
from app.core.model.lifecycle import ENDED
from app.core.model.phase import request_phase
from app.data import graphs
from app.db.models import Request, Task, Tenant, User
from app.db.transactions import Db, plan_for_values, released, transaction
from app.errors import BadInput, Forbidden, NotFound
from app.insight import phases
from app.insight.lot_counts import lot_states
from app.intake import actions, intake, island_assignment
from app.messaging.live_updates import LONGEST_WAIT_S as LOOK_AGAIN_S
from app.messaging.live_updates import changes
from app.scheduling.journal.lots import IS_NO_MEMBER

LONGEST_WAIT_S = 60.0

router = v1_router("requests")


# --- submit -------------------------------------------------------------------------------------

IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=200,
        pattern=r"^[\x21-\x7e]+$",
        description="Makes retries safe: a repeated call with the same key and body returns the "
        "first response.",
    ),
]


@router.post(
    "/requests",
    status_code=202,
    response_model=RequestOut,
    summary="Submit a request",
    responses=declared(403, 409, 413),
)
def submit_request(
    caller: Submitter, session: Db, body: DescriptorIn, idempotency_key: IdempotencyKey = None
) -> Response:
    """Accepts a request; accepted work is durable before this answer and is never lost.

    A request that can never run is rejected at once (422, with a pointer to the reason).  Every
    other request is queued, whatever the tenant's share.  Only if an administrator has limited the
    queue of the tenant (`max_queued`), and it is full, the request is rejected (409 `queue-full`).
    """
    owner = _owner(caller)
    once = intake.Once(idempotency_key, "POST /v1/requests", body)
    facts = intake.request_facts(session, owner, once)
    if not facts.is_first:
        answer = intake.replay(session, owner, once)
        return _accepted(answer, {"Idempotency-Replayed": "true"})
    accepted = intake.accept(session, owner, body, facts)
    shown = _new_request_out(caller, accepted).model_dump_json(by_alias=True)
    answer = intake.IntakeResponse(202, shown, f"/v1/requests/{accepted.request['id']}")
    intake.write(session, accepted, once, answer)
    return _accepted(answer)


def _accepted(
    answer: intake.IntakeResponse, more: Mapping[str, str] = MappingProxyType({})
) -> Response:
    headers = {"Location": answer.location, **more}
    return Response(answer.body, answer.status, headers, media_type="application/json")


@router.post(
    "/requests:validate",
    response_model=Validated,
    summary="Check a request without submitting it",
    responses=declared(403, 413),
)
def validate_request(caller: Submitter, session: Db, body: DescriptorIn) -> dict[str, Any]:
    """Runs the same checks as a submission, and shows the tasks with every default filled in.

    It does not check whether a limited queue has space, because that changes all the time.
    """
    owner = _owner(caller)
    facts = intake.request_facts(session, owner, intake.Once(None, "", body))
    return intake.checked(session, owner, body, facts).shown()


def _owner(caller: Caller) -> intake.Owner:
    if caller.in_root:
        raise Forbidden(
            f"the tenant {caller.tenant_name} has no share and cannot submit work; use the key of "
            "a user of another tenant"
        )
    return intake.Owner(caller.tenant_id, caller.user_id, caller.user_name)


# --- look ---------------------------------------------------------------------------------------


@router.get(
    "/requests/{id}/descriptor",
    response_model=SubmittedOut,
    summary="Show what was submitted",
    responses=declared(404),
)
def get_submitted_request(id: str, caller: Authed, session: Db) -> dict[str, Any]:
    """Shows the descriptor as it was submitted; `POST /v1/requests` with it runs the same again.

    A task that was not given a field then gets the default of that time.  Names of datablocks,
    checkpoints and other requests are resolved anew.
    """
    request = visible_request(session, caller, id)
    return {"request_id": request.id, "descriptor": _submitted(caller, request)}


def _submitted(caller: Caller, request: Request) -> dict[str, Any]:
    """Return the submitted descriptor, without the URL of another user, which may have a token."""
    descriptor = in_order(request.descriptor)
    if isinstance(descriptor.get("notify"), dict) and caller.user_id != request.user_id:
        del descriptor["notify"]
    return descriptor


@router.get(
    "/requests/{id}/plan",
    response_model=RequestPlan,
    summary="Show the islands of the tasks, and the executors of the graphs",
    responses=declared(404),
)
def plan_of_request(id: str, caller: Authed, session: Db) -> dict[str, Any]:
    """Shows the island of each task, and why, and what passes between islands.  For each graph it
    shows the executor of each node, what passes between executors, and, once done, what has passed.

    An executor is a process of the task with its own device, or its own share of a device.
    """
    visible_request(session, caller, id)
    return {
        "tasks": island_assignment.places(session, id),
        "crossings": island_assignment.crossings(session, id),
        "graphs": [_plan(plan) for plan in graphs.plans(session, id)],
    }


def _plan(plan: graphs.StoredPlan) -> dict[str, Any]:
    moved = sum(copy.moved_bytes or 0 for copy in plan.copies)
    return {
        "task": plan.task,
        "graph": plan.graph,
        "executors": plan.executors,
        "nodes": [{"node": node, "executor": executor} for node, executor in plan.nodes],
        "copies": [asdict(copy) for copy in plan.copies],
        "planned_bytes": sum(copy.planned_bytes or 0 for copy in plan.copies),
        "moved_bytes": moved if plan.is_done else None,
    }


@router.get("/requests", response_model=Page[RequestSummary], summary="List requests, newest first")
def list_requests(
    paging: Paged,
    caller: Authed,
    session: Db,
    state: Annotated[
        str | None, Query(description="One state or several, separated by commas.")
    ] = None,
    phase: AskedPhases = None,
    label: Annotated[
        list[str] | None, Query(description="NAME:VALUE; all given labels must match.")
    ] = None,
    name: Annotated[str | None, Query(description="The exact name.")] = None,
    id_ends: Annotated[
        str | None,
        Query(pattern="^[0-9a-f]{8,32}$", description="The last 8 digits of the id, or more."),
    ] = None,
    keep: Annotated[
        bool | None, Query(description="true: only requests that are kept; false: only others.")
    ] = None,
    tenant_id: Annotated[str | None, Query(description="Only requests of this tenant.")] = None,
    submitted_after: Time = None,
) -> dict[str, Any]:
    """Lists the requests of the tenants that you see; every filter narrows the list."""
    query = select(Request).where(of_caller(caller, Request.tenant_id))
    if states := words_in(state, RequestState, "state"):
        query = query.where(phases.has_state(states))
    if asked := words_in(phase, PhaseWord, "phase"):
        query = query.where(phases.is_in(asked))
    for item in label or []:
        query = query.where(Request.labels.contains(_label(item)))
    if name is not None:
        query = query.where(Request.name == name)
    if id_ends is not None:
        last_8 = literal_column("right(requests.id, 8)", Text)  # an index has them
        query = query.where(last_8 == id_ends[-8:], Request.id.like(f"%{id_ends}"))
    if keep is not None:
        query = query.where(Request.keep if keep else ~Request.keep)
    if tenant_id is not None:
        query = query.where(Request.tenant_id == tenant_id)
    if submitted_after is not None:
        plan_for_values(session)
        query = query.where(Request.submitted_at > submitted_after)
    found = paging.read(session, query, by=Request.id, newest_first=True)
    return found.page(_summaries(session, found.rows))


def _label(item: str) -> dict[str, str]:
    name, colon, value = item.partition(":")
    if not colon or not name:
        raise BadInput.at("?label", f"must be NAME:VALUE; got {item!r}", "label")
    return {name: value}


_SECONDS = r"^\d{1,9}(\.\d{1,9})?s?$"


def _wait(text: str) -> str:
    if not re.fullmatch(_SECONDS, text, re.ASCII):
        raise ValueError(
            f"must be in seconds, such as 30s; more than {LONGEST_WAIT_S:g}s counts as "
            f"{LONGEST_WAIT_S:g}s"
        )
    return text


Wait = Annotated[
    str,
    AfterValidator(_wait),
    WithJsonSchema({"type": "string", "pattern": _SECONDS}),
    Query(
        description=f"How long to wait for a change, such as `30s`; more than {LONGEST_WAIT_S:g}s "
        f"counts as {LONGEST_WAIT_S:g}s."
    ),
]


@router.get(
    "/requests/{id}",
    response_model=RequestOut,
    summary="Show a request and its tasks",
    responses=declared(404),
)
async def get_request(id: str, caller: Authed, session: Db, wait: Wait = "0s") -> dict[str, Any]:
    """Shows the request.  With `wait`, the answer comes when the request or one of its tasks
    changes its state, or has ended.
    """
    with changes.subscribe(id) as news:
        seen = await in_thread(caller.tenant_id, _read_and_let_go, session, caller, id)
        shown, until_s = seen, asyncio.get_running_loop().time() + _seconds(wait)
        while _same(seen, shown) and seen["state"] not in ENDED and not changes.closing:
            left_s = until_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                break
            await news.wait(min(left_s, LOOK_AGAIN_S))
            shown = await in_thread(caller.tenant_id, _read_again, caller, id)
    return shown


def _seconds(wait: str) -> float:
    return min(float(wait.removesuffix("s")), LONGEST_WAIT_S)


def _read_and_let_go(session: Session, caller: Caller, id: str) -> dict[str, Any]:
    """Read the request, and return the connection before the wait."""
    with released(session):
        return request_out(session, caller, visible_request(session, caller, id))


def _read_again(caller: Caller, id: str) -> dict[str, Any]:
    with transaction() as session:
        return request_out(session, caller, visible_request(session, caller, id))


def _same(before: dict[str, Any], now: dict[str, Any]) -> bool:
    def states(shown: dict[str, Any]) -> list[Any]:
        return [shown["state"], shown["priority"], *((t.state, t.hold) for t in shown["tasks"])]

    return states(before) == states(now)


# --- change -------------------------------------------------------------------------------------


@router.patch(
    "/requests/{id}",
    response_model=RequestOut,
    summary="Change priority, labels or lots, or keep it",
    responses=declared(403, 404, 409),
)
def change_request(id: str, body: RequestPatch, caller: Authed, session: Db) -> dict[str, Any]:
    """Changes the priority, which counts within the tenant.  `labels` replaces all labels.
    `at_once`, `max_failures` and `keep_best` change its lots.

    A request with `keep` is not deleted, however old it is, and neither are its checkpoints.  A
    tenant keeps a limited number of requests (409 `quota-exceeded`).
    """
    found = request_to_act_on(session, caller, id)
    actions.change_request(session, found, by=caller.user_name, **body.model_dump())
    return request_out(session, caller, found)


_WISH: dict[str, Any] = {
    "status_code": 202,
    "response_model": RequestOut,
    "responses": declared(403, 404, 409),
}


@router.post(
    "/requests/{id}/cancel",
    summary="Cancel a request",
    **{**_WISH, "responses": declared(403, 404)},
)
def cancel_request(id: str, caller: Authed, session: Db) -> dict[str, Any]:
    """Ends all tasks of the request; tasks that have ended stay as they are.

    To cancel a request twice, or after its end, is no error.
    """
    found = request_to_act_on(session, caller, id)
    actions.cancel_request(session, found, by=caller.user_name)
    return request_out(session, caller, found)


@router.post("/requests/{id}/hold", summary="Pause a request", **_WISH)
def hold_request(id: str, caller: Authed, session: Db) -> dict[str, Any]:
    """Starts no task of the request, and pauses the running ones, until the request is released."""
    found = request_to_act_on(session, caller, id)
    actions.hold_request(session, found, by=caller.user_name, as_admin=caller.sees_all)
    return request_out(session, caller, found)


@router.post("/requests/{id}/release", summary="Resume a request", **_WISH)
def release_request(id: str, caller: Authed, session: Db) -> dict[str, Any]:
    """Queues the request's tasks again.  Only an admin can release what an admin holds."""
    found = request_to_act_on(session, caller, id)
    actions.release_request(session, found, by=caller.user_name, as_admin=caller.sees_all)
    return request_out(session, caller, found)


@router.post("/requests/{id}/retry", summary="Start failed tasks again", **_WISH)
def retry_request(
    id: str, caller: Authed, session: Db, body: Annotated[RetryIn, Body()] = RetryIn()
) -> dict[str, Any]:
    """Lets the tasks of the request that failed start again, and those of its lots' members; a
    cancelled lot also makes the members that it had left.

    A task goes on from its newest checkpoint, and all its attempts count anew.
    """
    found = request_to_act_on(session, caller, id)
    actions.retry_request(session, found, body.states, by=caller.user_name)
    return request_out(session, caller, found)


@router.delete(
    "/requests/{id}",
    summary="Delete an ended request",
    **_WISH,
)
def delete_request(id: str, caller: Authed, session: Db) -> dict[str, Any]:
    """Deletes the request with its tasks, events, logs, metrics, decisions, outputs and
    checkpoints, some minutes after it has ended.

    Its device time stays charged.  Datablocks that it published stay, and so does the audit log.
    """
    found = request_to_act_on(session, caller, id)
    actions.delete_request(session, found, by=caller.user_name)
    return request_out(session, caller, found)


# --- rows to answers ----------------------------------------------------------------------------


_TASKS = (
    select(Task)
    .where(Task.request_id == bindparam("id"), IS_NO_MEMBER)
    .order_by(Task.ordinal)
    .execution_options(populate_existing=True)
)


def _new_request_out(caller: Caller, accepted: intake.Accepted) -> RequestOut:
    """Return what `request_out` will read of the request, once it is written."""
    request, tasks = accepted.request, accepted.tasks
    after = accepted.found.after
    shown = [new_task_out(request, task, accepted.needs[task.spec.name], after) for task in tasks]
    # a lot counts as its members
    new = [(t["phase"], t["lot"]["count"]) if t["lot"] else (t["phase"], 1) for t in shown]
    columns = {name: value for name, value in request.items() if name != "descriptor"}
    return RequestOut.model_validate(
        {
            **columns,
            "state": "queued",
            "phase": request_phase("queued", (task["phase"] for task in shown)),
            "tenant": caller.tenant_name,
            "user": caller.user_name,
            "ended_at": None,
            "task_states": {"blocked": sum(count for _, count in new)},
            "task_phases": dict(sum((Counter({p: n}) for p, n in new), Counter[str]())),
            "hold": min(task.hold for task in tasks),
            "bundle": str(request["descriptor"].get("bundle") or ""),
            "tasks": shown,
            "notes": [*accepted.found.notes],
        }
    )


def request_out(session: Session, caller: Caller, request: Request) -> dict[str, Any]:
    """Return the request with its tasks; raises NotFound if it was deleted after it was read."""
    session.flush()
    tasks = list(session.scalars(_TASKS, {"id": request.id}))
    found = _summaries(session, [request])
    if not found:
        raise NotFound("request", request.id)
    [summary] = found
    bundle = str(request.descriptor.get("bundle") or "")
    return {**summary, "bundle": bundle, "tasks": task_outs(session, caller, tasks)}


_NAMES = (
    select(Request.id, Tenant.name.label("tenant"), User.name.label("user"))
    .join(Tenant, Tenant.id == Request.tenant_id)
    .join(User, User.id == Request.user_id)
    .where(Request.id.in_(bindparam("ids", expanding=True)))
)
_COUNTED = (
    select(
        Task.request_id,
        Task.state,
        phases.TASK_PHASE.label("phase"),
        Task.hold,
        phases.IS_NO_TICKET.label("leads"),
        Task.lot_id.label("lot"),
        func.count(),
    )
    .where(Task.request_id.in_(bindparam("ids", expanding=True)), IS_NO_MEMBER)
    .group_by(Task.request_id, Task.state, "phase", Task.hold, "leads", "lot")
)


@dataclass(slots=True)
class _Counted:
    """Counts the tasks of one request, and the members of its lots, by state and by phase.

    `leading` are the phases of its leading tasks, `holders` the holders of tasks that have not
    ended.
    """

    states: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    leading: set[str] = field(default_factory=set)
    holders: set[str] = field(default_factory=set)


def _summaries(session: Session, requests: list[Request]) -> list[dict[str, Any]]:
    """Sum up requests; those that were deleted after they were read are left out."""
    ids = [request.id for request in requests]
    names = {row.id: row for row in session.execute(_NAMES, {"ids": ids})}
    counted: dict[str, _Counted] = defaultdict(_Counted)
    lots: dict[str, str] = {}
    for id, state, phase, hold, leads, lot, n in session.execute(_COUNTED, {"ids": ids}):
        of = counted[id]
        if lot is not None:
            lots[lot] = id
            of.holders.update({hold} if state not in ENDED else ())
            continue
        of.states[state] += n
        of.phases[phase] += n
        if leads:
            of.leading.add(phase)
        if state not in ENDED:
            of.holders.add(hold)
    for lot, members in lot_states(session, lots).items():
        of = counted[lots[lot]]
        of.states.update(members.states)
        of.phases.update(members.phases)
        of.leading.update(members.phases)
    return [
        _summary(request, names[request.id], counted[request.id])
        for request in requests
        if request.id in names
    ]


def _summary(request: Request, names: Any, tasks: _Counted) -> dict[str, Any]:
    return {
        "id": request.id,
        "name": request.name,
        "state": request.state,
        "phase": request_phase(request.state, tasks.leading),
        "tier": request.tier,
        "priority": request.priority,
        "labels": request.labels,
        "tenant_id": request.tenant_id,
        "tenant": names.tenant,
        "user_id": request.user_id,
        "user": names.user,
        "submitted_at": request.submitted_at,
        "ended_at": request.ended_at,
        "keep": request.keep,
        "delete_asked_at": request.delete_asked_at,
        "task_states": dict(tasks.states),
        "task_phases": dict(tasks.phases),
        "hold": min(tasks.holders, default=""),  # "" sorts first: at least one task is not held
    }
