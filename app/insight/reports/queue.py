"""Tasks that wait, with reasons and estimates."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Select, func, select, text, true
from sqlalchemy.orm import Session

from app.core.model.device_choice import ANY_DEVICE, DeviceChoice, choice_in
from app.core.model.lifecycle import ENDED
from app.db import tenant_tree
from app.db.models import Island, Request, Task, Tenant, User
from app.insight import explain, phases
from app.insight.explain import Why
from app.insight.forecast import Start
from app.scheduling.journal.lots import IS_NO_MEMBER


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """A task that waits.  `place` is its position, from 1, among all tasks that wait for its kind
    of device on its island; None while it is blocked.

    `since` is when it began to wait: its submission, or when it last left a device.  `starts_at` is
    the middle of the `estimate`; `no_estimate` says why there is none.
    """

    id: str
    request_id: str
    name: str
    request: str
    tenant: str
    user: str
    state: str
    phase: str
    place: int | None
    kind: str
    devices: int = 1
    memory_bytes: int
    choice: DeviceChoice = ANY_DEVICE
    priority: int
    since: datetime
    step: int
    reasons: tuple[dict[str, Any], ...]
    nearest: dict[str, Any] | None = None
    starts_at: datetime | None = None
    estimate: Start | None = None
    no_estimate: dict[str, Any] | None = None


def queue(
    session: Session,
    tenant: str | None,
    *,
    below: bool = False,
    state: str | None = None,
    kind: str | None = None,
    after: str | None = None,
    limit: int = 200,
) -> list[Queued]:
    """Return waiting and blocked tasks, oldest first (ids sort by time).

    `after` is the id of the last task of the previous page.  With `below`, tasks of the tenants
    below are included.
    """
    ids = _in_queue(session, tenant, below=below, state=state, kind=kind, after=after, limit=limit)
    query = with_names(select(Task), None).where(Task.id == func.any(ids)).order_by(Task.id)
    rows = session.execute(query).all()
    told = explain.explain(session, [row[0] for row in rows])
    return [
        _queued(task, request, owner, user, told[task.id]) for task, request, owner, user in rows
    ]


def _in_queue(
    session: Session,
    tenant: str | None,
    *,
    below: bool,
    state: str | None,
    kind: str | None,
    after: str | None,
    limit: int,
) -> list[str]:
    """Return the ids of a page.

    They are queried by tenant, or by island for all tenants, because there are indexes for both.
    Each of those queries returns at most a page, so the cost does not grow with the length of a
    queue.
    """
    query = select(Task.id).where(_QUEUED, Task.state.not_in(ENDED))
    if state is not None:
        query = query.where(Task.state == state)
    if kind is not None:
        query = query.where(Task.kind == kind)
    if after is not None:
        query = query.where(Task.id > after)
    page = query.order_by(Task.id).limit(limit)
    if tenant is not None:
        mine = tenant_tree.within(Tenant.id, tenant) if below else Tenant.id == tenant
        its = page.where(Task.tenant_id == Tenant.id).correlate(Tenant).lateral("its")
        pages = select(its.c.id).select_from(Tenant).join(its, true()).where(mine)
        return list(session.scalars(pages.order_by(its.c.id).limit(limit)))
    islands: list[str | None] = [None, *session.scalars(select(Island.name))]
    found = [id for island in islands for id in session.scalars(page.where(Task.island == island))]
    return sorted(found)[:limit]


# Literal, as in the index ix_tasks_queue: Postgres cannot use the index if states are parameters.
_QUEUED = text("tasks.state in ('blocked', 'waiting')")


def _queued(task: Task, request: str, owner: str, user: str, told: Why) -> Queued:
    waits_since = task.waiting_since if task.state == "waiting" else None
    return Queued(
        id=task.id,
        request_id=task.request_id,
        name=task.name,
        request=request,
        tenant=owner,
        user=user,
        state=task.state,
        phase=phases.of_task(task),
        place=told.place,
        kind=task.kind,
        devices=task.devices_min,
        memory_bytes=task.memory_bytes,
        choice=choice_in(task.device_choice),
        priority=task.priority,
        since=waits_since or task.submitted_at,
        step=task.step,
        reasons=told.reasons,
        nearest=told.nearest,
        starts_at=told.estimate.starts_at if told.estimate else None,
        estimate=told.estimate,
        no_estimate=told.no_estimate,
    )


def with_names(query: Select[*tuple[Any, ...]], tenant: str | None) -> Select[*tuple[Any, ...]]:
    """Add the names of a task's request, tenant and user to the query."""
    query = (
        query.add_columns(Request.name, Tenant.name, User.name)
        .join(Request, Request.id == Task.request_id)
        .join(Tenant, Tenant.id == Task.tenant_id)
        .join(User, User.id == Task.user_id)
    )
    return query if tenant is None else query.where(Task.tenant_id == tenant)


NEWEST_REQUESTS = 200  # so many requests give the median wait


def median_wait_s(session: Session, tenant: str | None) -> float | None:
    """Return the median time from submission to first start, in seconds; None if no task has
    started.

    It covers the tasks of the newest requests that have started, without members of lots, which
    wait for each other.
    """
    newest = select(Request.id).order_by(Request.id.desc()).limit(NEWEST_REQUESTS)
    if tenant is not None:
        newest = newest.where(Request.tenant_id == tenant)
    waited_s = func.extract("epoch", Task.first_started_at - Task.submitted_at)
    query = select(func.percentile_cont(0.5).within_group(waited_s)).where(
        Task.request_id.in_(newest), IS_NO_MEMBER, Task.first_started_at.is_not(None)
    )
    found = session.scalar(query)
    return None if found is None else float(found)
