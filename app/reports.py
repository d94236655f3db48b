"""What the API and the pages say in numbers: rows become frozen values here, and only here.

So a number on a page is the number in the API.  Nothing here writes or decides.  A `tenant` of None
asks for all tenants (a platform admin); with a tenant's id nothing of another tenant is told except
that a device is in use and how much the others hold in all.

Rules F1, F2 and F10 are read from here; the arithmetic is `core.fairshare` and `core.division`.
"""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, func, select, text, tuple_
from sqlalchemy.dialects.postgresql import distinct_on
from sqlalchemy.orm import Session

from app.core import fairshare
from app.core.division import division
from app.core.lifecycle import NOT_STARTED, ON_A_DEVICE
from app.models import (
    Account,
    Device,
    Event,
    Host,
    LedgerBase,
    LogLine,
    Metric,
    Placement,
    Request,
    Task,
    Tenant,
    Usage,
    User,
)

LIVE = ON_A_DEVICE | {"waiting"}  # who wants a device now


def clock(session: Session) -> datetime:
    """The database's clock: the one by which leases end and usage is booked."""
    now: datetime = session.execute(select(func.now())).scalar_one()
    return now


# --- shares -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KindShare:
    """One tenant and one kind of device.

    `devices` are up and take work; `by_weight` of them are the tenant's while everybody has work;
    `fair` is its part now, among those who have work; `held` are under its tasks; `waiting` counts
    tasks that could start at once.
    """

    kind: str
    devices: int
    by_weight: float
    fair: float
    held: int
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantShare:
    """A tenant's share, summed over kinds and by kind.

    `share` is its part of all weights.  `usage_us` is faded usage now and `total_us` all it was
    ever charged, in micro-device-seconds times cost; `score` is `usage_us` over `weight`: the
    tenant with the lower one goes first.
    """

    id: str
    tenant: str
    weight: float
    share: float
    fair: float
    held: int
    waiting: int
    usage_us: int
    total_us: int
    score: float
    kinds: tuple[KindShare, ...]


def fair_share(session: Session, now: datetime) -> list[TenantShare]:
    """Every tenant that owns a share, by name."""
    capacity, demand = _capacity(session, now), _demand(session)
    held = _held(session)
    tenants = session.scalars(
        select(Tenant).where(Tenant.parent_id.is_not(None)).order_by(Tenant.name)
    ).all()
    weights = {tenant.id: tenant.weight_milli for tenant in tenants}
    fair = {
        kind: division(
            capacity[kind],
            {id: sum(demand[id, kind].values()) for id in weights if demand[id, kind]},
            weights,
        )
        for kind in capacity
    }
    used = _accounts(session, now)
    shares = []
    for tenant in tenants:
        part = Fraction(tenant.weight_milli, sum(weights.values()))
        kinds = tuple(
            KindShare(
                kind=kind,
                devices=devices,
                by_weight=float(devices * part),
                fair=float(fair[kind].get(tenant.id, 0)),
                held=held[tenant.id, kind],
                waiting=demand[tenant.id, kind].get("waiting", 0),
            )
            for kind, devices in sorted(capacity.items())
        )
        shares.append(_tenant_share(tenant, float(part), kinds, used[tenant.id]))
    return shares


def _tenant_share(
    tenant: Tenant, share: float, kinds: tuple[KindShare, ...], used: tuple[int, int]
) -> TenantShare:
    usage_us, total_us = used
    weight = tenant.weight_milli / 1000
    return TenantShare(
        id=tenant.id,
        tenant=tenant.name,
        weight=weight,
        share=share,
        fair=sum(kind.fair for kind in kinds),
        held=sum(kind.held for kind in kinds),
        waiting=sum(kind.waiting for kind in kinds),
        usage_us=usage_us,
        total_us=total_us,
        score=usage_us / weight,
        kinds=kinds,
    )


def others(shares: Iterable[TenantShare], tenant: str) -> TenantShare:
    """All the other tenants as one, without a name: what one may know of them."""
    rest = [share for share in shares if share.id != tenant]
    by_kind: dict[str, list[KindShare]] = defaultdict(list)
    for share in rest:
        for kind in share.kinds:
            by_kind[kind.kind].append(kind)
    weight, usage_us = sum(share.weight for share in rest), sum(share.usage_us for share in rest)
    return TenantShare(
        id="",
        tenant="all others",
        weight=weight,
        share=sum(share.share for share in rest),
        fair=sum(share.fair for share in rest),
        held=sum(share.held for share in rest),
        waiting=sum(share.waiting for share in rest),
        usage_us=usage_us,
        total_us=sum(share.total_us for share in rest),
        score=usage_us / weight if weight else 0.0,
        kinds=tuple(_sum_kind(kinds) for kinds in by_kind.values()),
    )


def _sum_kind(kinds: Sequence[KindShare]) -> KindShare:
    return KindShare(
        kind=kinds[0].kind,
        devices=kinds[0].devices,
        by_weight=sum(kind.by_weight for kind in kinds),
        fair=sum(kind.fair for kind in kinds),
        held=sum(kind.held for kind in kinds),
        waiting=sum(kind.waiting for kind in kinds),
    )


def _capacity(session: Session, now: datetime) -> dict[str, int]:
    """Devices of each kind that take work now; a kind that nobody can use counts 0."""
    usable = and_(Device.lease_until > now, ~Device.cordoned, ~Host.cordoned)
    query = (
        select(Device.kind, func.count().filter(usable))
        .join(Host, Host.name == Device.host)
        .group_by(Device.kind)
    )
    return {kind: count for kind, count in session.execute(query)}


def _demand(session: Session) -> dict[tuple[str, str], dict[str, int]]:
    """(tenant, kind) -> state -> how many tasks want a device or have one."""
    query = (
        select(Task.tenant_id, Task.kind, Task.state, func.count())
        .where(Task.state.in_(LIVE))
        .group_by(Task.tenant_id, Task.kind, Task.state)
    )
    demand: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for tenant, kind, state, count in session.execute(query):
        demand[tenant, kind][state] = count
    return demand


def _holders() -> Select[Placement]:
    """Who sits on each device: until it has let go, one who was told to leave still does."""
    return (
        select(Placement)
        .where(Placement.ended_at.is_(None))
        .ext(distinct_on(Placement.device_id))
        .order_by(Placement.device_id, Placement.leaving.desc(), Placement.id)
    )


def _held(session: Session) -> dict[tuple[str, str], int]:
    held: dict[tuple[str, str], int] = defaultdict(int)
    for placement in session.scalars(_holders()):
        held[placement.tenant_id, placement.kind] += 1
    return held


def _accounts(session: Session, now: datetime) -> dict[str, tuple[int, int]]:
    """Tenant -> (faded usage now, all it was ever charged), both in microseconds."""
    query = select(Account.tenant_id, func.sum(Account.faded), func.sum(Account.total_us)).group_by(
        Account.tenant_id
    )
    base = session.get(LedgerBase, 1)
    used: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for tenant, faded, total_us in session.execute(query):
        used[tenant] = (_usage_now_us(int(faded), base, now), int(total_us))
    return used


def _usage_now_us(faded: int, base: LedgerBase | None, now: datetime) -> int:
    if base is None:
        return 0
    return fairshare.usage_us(
        faded, now_s=now.timestamp(), since_s=base.since_s, half_life_s=base.half_life_s
    )


def verdict(share: TenantShare, shares: Sequence[TenantShare]) -> str:
    """One sentence for the tenant: what it holds, what it should, who goes first, what waits.

    `shares` are those of all tenants: the scheduler goes by usage for one's weight, not by what is
    held, so who holds little may still come after others.
    """
    devices = sum(kind.devices for kind in share.kinds)
    if not devices:
        return f"No device takes work now; {_tasks(share.waiting)}."
    if not share.held and not share.waiting:
        entitled = sum(kind.by_weight for kind in share.kinds)
        return (
            f"Nothing of yours runs or waits; by weight {number(entitled)} of "
            f"{_devices(devices)} {'is' if entitled == 1 else 'are'} yours, "
            "and what others leave idle too."
        )
    fair = f"your fair share now is {number(share.fair)}{_so(share, shares)}"
    return f"You hold {share.held} of {_devices(devices)}; {fair}; {_tasks(share.waiting)}."


_OTHERS_FIRST = "; others, who have used less for their weight, go first"
_YOUR_TURN = "; others have used more for their weight, so your turn comes"
_OTHERS_TURN = "; others wait who have used less for their weight, so they are due a turn"


def _so(share: TenantShare, shares: Sequence[TenantShare]) -> str:
    """Who goes first; nothing if kinds of devices differ in that, or nobody is ahead."""
    rest = [other for other in shares if other.id != share.id]
    if share.waiting:
        waited = [kind for kind in share.kinds if kind.waiting and kind.devices]
        said = {_who_goes_first(share, kind, rest) for kind in waited}
        return said.pop() if len(said) == 1 else ""
    over = [kind for kind in share.kinds if kind.held > kind.fair]
    due = any(
        other.score < share.score and _of_kind(other, kind.kind).waiting
        for kind in over
        for other in rest
    )
    return _OTHERS_TURN if due else ""


def _who_goes_first(share: TenantShare, kind: KindShare, rest: Sequence[TenantShare]) -> str:
    """Rules F3 and F6 for one kind that the tenant waits for, by what the ledger has booked."""
    rivals = [(other, _of_kind(other, kind.kind)) for other in rest]
    waiting = [other.score for other, their in rivals if their.waiting]
    holding = [other.score for other, their in rivals if their.held]
    taken = kind.held + sum(their.held for _, their in rivals) >= kind.devices
    stay = taken and bool(holding) and max(holding) < share.score
    if stay or any(score < share.score for score in waiting):
        return _OTHERS_FIRST
    return _YOUR_TURN if any(score > share.score for score in waiting + holding) else ""


def _of_kind(share: TenantShare, kind: str) -> KindShare:
    return next(each for each in share.kinds if each.kind == kind)


def verdict_of_all(shares: Sequence[TenantShare]) -> str:
    """The same for who looks after all tenants."""
    kinds = shares[0].kinds if shares else ()
    devices = sum(kind.devices for kind in kinds)
    held, waiting = sum(share.held for share in shares), sum(share.waiting for share in shares)
    busy = sum(1 for share in shares if share.held or share.waiting)
    tenants = f"{busy} of {len(shares)} tenants {'has' if busy == 1 else 'have'} work"
    return f"{held} of {_devices(devices)} held; {tenants}; {_tasks(waiting)}."


def number(value: float) -> str:
    """At most two digits behind the point, none where there is nothing to say."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _devices(count: int) -> str:
    return f"{count} device" + ("" if count == 1 else "s")


def _tasks(waiting: int) -> str:
    if not waiting:
        return "no task waits"
    return "1 task waits" if waiting == 1 else f"{waiting} tasks wait"


# --- the queue ----------------------------------------------------------------------------------


_LAST = 2**31 - 1  # the place of a task that has none yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """A task that waits.  `place` counts over the whole island, from 1; None while it is blocked.

    `since` is when it began to wait: its submission, or when it last left a device.  There is no
    estimate of its start yet, so `starts_at` says nothing rather than something wrong.
    """

    id: str
    request_id: str
    name: str
    request: str
    tenant: str
    user: str
    state: str
    place: int | None
    kind: str
    memory_bytes: int
    priority: int
    since: datetime
    step: int
    reasons: tuple[dict[str, Any], ...]
    starts_at: datetime | None = None


def rank(item: Queued) -> tuple[int, str]:
    """Where a task stands in `queue`: by place, the blocked ones last, then by age (ids sort)."""
    return (_LAST if item.place is None else item.place, item.id)


def queue(
    session: Session,
    tenant: str | None,
    *,
    after: tuple[int, str] | None = None,
    limit: int = 200,
) -> list[Queued]:
    """Waiting tasks in the island's order, then the blocked ones; `after` is a `rank`."""
    left = (
        select(func.max(Placement.ended_at))
        .where(Placement.task_id == Task.id)
        .correlate(Task)
        .scalar_subquery()
    )
    ranked = tuple_(func.coalesce(Task.place, _LAST), Task.id)
    query = _with_names(
        select(Task, func.coalesce(left, Task.submitted_at).label("since")), tenant
    ).where(Task.state.in_(NOT_STARTED))
    if after is not None:
        query = query.where(ranked > tuple_(*after))
    query = query.order_by(ranked).limit(limit)
    return [
        Queued(
            id=task.id,
            request_id=task.request_id,
            name=task.name,
            request=request,
            tenant=owner,
            user=user,
            state=task.state,
            place=task.place,
            kind=task.kind,
            memory_bytes=task.memory_bytes,
            priority=task.priority,
            since=since,
            step=task.step,
            reasons=tuple(task.reasons),
        )
        for task, since, request, owner, user in session.execute(query)
    ]


def _with_names(query: Select[*tuple[Any, ...]], tenant: str | None) -> Select[*tuple[Any, ...]]:
    """Adds the names of a task's request, tenant and user."""
    query = (
        query.add_columns(Request.name, Tenant.name, User.name)
        .join(Request, Request.id == Task.request_id)
        .join(Tenant, Tenant.id == Task.tenant_id)
        .join(User, User.id == Task.user_id)
    )
    return query if tenant is None else query.where(Task.tenant_id == tenant)


# --- devices and what runs on them --------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A task on a device.  `total_held_us` is its seat time so far, over all its launches."""

    id: str
    request_id: str
    name: str
    request: str
    tenant: str
    user: str
    state: str
    device: str | None
    step: int
    metrics: dict[str, Any]
    started_at: datetime | None
    total_held_us: int
    pauses: int
    lost_steps: int


def running(session: Session, tenant: str | None) -> list[Running]:
    query = _with_names(select(Task), tenant).where(Task.state.in_(ON_A_DEVICE))
    return [
        Running(
            id=task.id,
            request_id=task.request_id,
            name=task.name,
            request=request,
            tenant=owner,
            user=user,
            state=task.state,
            device=task.seat,
            step=task.step,
            metrics=task.metrics,
            started_at=task.started_at,
            total_held_us=task.total_held_us + task.held_us,
            pauses=task.pauses,
            lost_steps=task.lost_steps,
        )
        for task, request, owner, user in session.execute(query.order_by(Task.seat, Task.id))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceView:
    """A device and who holds it.  `state`: up, down or cordoned.

    `holder` is None while it is free.  For a tenant, who holds a device of another tenant's is
    told without a name, and nothing else of it.
    """

    id: str
    host: str
    kind: str
    state: str
    memory_bytes: int
    holder: str | None
    yours: bool
    task: Running | None
    since: datetime | None


def devices(session: Session, tenant: str | None, now: datetime) -> list[DeviceView]:
    holders = {placement.device_id: placement for placement in session.scalars(_holders())}
    names = {id: name for id, name in session.execute(select(Tenant.id, Tenant.name))}
    tasks = {task.id: task for task in running(session, tenant)}
    query = select(Device, Host.cordoned).join(Host, Host.name == Device.host).order_by(Device.id)
    return [
        _device_view(
            device,
            state=_device_state(device, drained, now),
            placement=holders.get(device.id),
            tenant=tenant,
            names=names,
            tasks=tasks,
        )
        for device, drained in session.execute(query)
    ]


def _device_state(device: Device, drained: bool, now: datetime) -> str:
    if device.lease_until is None or device.lease_until <= now:
        return "down"
    return "cordoned" if device.cordoned or drained else "up"


def _device_view(
    device: Device,
    *,
    state: str,
    placement: Placement | None,
    tenant: str | None,
    names: Mapping[str, str],
    tasks: Mapping[str, Running],
) -> DeviceView:
    yours = placement is not None and placement.tenant_id == tenant
    shown = yours or (placement is not None and tenant is None)
    holder = None
    if placement is not None:
        holder = names[placement.tenant_id] if shown else "another tenant"
    return DeviceView(
        id=device.id,
        host=device.host,
        kind=device.kind,
        state=state,
        memory_bytes=device.memory_bytes,
        holder=holder,
        yours=yours,
        task=tasks.get(placement.task_id) if shown and placement is not None else None,
        since=(placement.started_at or placement.launched_at) if shown and placement else None,
    )


# --- usage --------------------------------------------------------------------------------------

GROUPS = ("bucket", "tenant", "user", "kind")
INTERVALS = {"10s": 10, "1m": 60, "10m": 600, "1h": 3600, "1d": 86400}  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """Micro-device-seconds of one group; a field that was not grouped by is None.

    `bucket` is the start of the interval in which they were booked.
    """

    bucket: datetime | None = None
    tenant: str | None = None
    user: str | None = None
    kind: str | None = None
    held_us: int
    charged_us: int


def usage(
    session: Session,
    tenant: str | None,
    *,
    since: datetime,
    until: datetime,
    group_by: Sequence[str],
    interval_s: int,
) -> list[UsageRow]:
    """Usage booked from `since` up to, not including, `until`, summed by `group_by`."""
    bucket = func.date_bin(
        timedelta(seconds=interval_s), Usage.bucket, datetime(1970, 1, 1, tzinfo=UTC)
    )
    columns = {"bucket": bucket, "tenant": Tenant.name, "user": User.name, "kind": Usage.kind}
    chosen: list[ColumnElement[Any]] = [
        columns[name].label(name) for name in GROUPS if name in group_by
    ]
    query = (
        select(
            *chosen,
            func.coalesce(func.sum(Usage.held_us), 0).label("held_us"),
            func.coalesce(func.sum(Usage.charged_us), 0).label("charged_us"),
        )
        .join(Tenant, Tenant.id == Usage.tenant_id)
        .join(User, User.id == Usage.user_id)
        .where(Usage.bucket >= since, Usage.bucket < until)
        .group_by(*chosen)
        .order_by(*chosen)
    )
    if tenant is not None:
        query = query.where(Usage.tenant_id == tenant)
    rows = session.execute(query).mappings()
    return [
        UsageRow(**{**row, "held_us": int(row["held_us"]), "charged_us": int(row["charged_us"])})
        for row in rows
    ]


def to_csv(rows: Iterable[UsageRow], group_by: Sequence[str]) -> str:
    """A line of names, then a line a row; times in ISO 8601."""
    names = [*(name for name in GROUPS if name in group_by), "held_us", "charged_us"]
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(names)
    for row in rows:
        values = (getattr(row, name) for name in names)
        writer.writerow(v.isoformat() if isinstance(v, datetime) else v for v in values)
    return out.getvalue()


# --- what happened ------------------------------------------------------------------------------

DECISIONS = ("task.launched", "task.pausing", "task.held")


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """One event, in the words in which it was told."""

    id: int
    at: datetime
    type: str
    message: str
    tenant: str
    request_id: str | None
    request: str | None
    task_id: str | None
    task: str | None
    data: dict[str, Any]


def events(
    session: Session,
    tenant: str | None,
    *,
    request: str | None = None,
    types: Sequence[str] = (),
    before: int | None = None,
    limit: int = 50,
) -> list[Happened]:
    """The newest first; `before` is the id of the last one seen."""
    query = (
        select(Event, Tenant.name, Request.name, Task.name)
        .join(Tenant, Tenant.id == Event.tenant_id)
        .outerjoin(Request, Request.id == Event.request_id)
        .outerjoin(Task, Task.id == Event.task_id)
        .order_by(Event.id.desc())
        .limit(limit)
    )
    if tenant is not None:
        query = query.where(Event.tenant_id == tenant)
    if request is not None:
        query = query.where(Event.request_id == request)
    if types:
        query = query.where(Event.type.in_(types))
    if before is not None:
        query = query.where(Event.id < before)
    return [
        Happened(
            id=event.id,
            at=event.at,
            type=event.type,
            message=event.message,
            tenant=owner,
            request_id=event.request_id,
            request=name,
            task_id=event.task_id,
            task=task,
            data=event.data,
        )
        for event, owner, name, task in session.execute(query)
    ]


# --- requests -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLine:
    """A request in a list.  `tasks` counts its tasks by state."""

    id: str
    name: str
    tenant: str
    user: str
    state: str
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
    state: str | None = None,
    before: str | None = None,
    limit: int = 50,
) -> list[RequestLine]:
    """The newest first (ids sort by time); `before` is the id of the last one seen."""
    query = select(Request.id).order_by(Request.id.desc()).limit(limit)
    if tenant is not None:
        query = query.where(Request.tenant_id == tenant)
    if state is not None:
        query = query.where(Request.state == state)
    if before is not None:
        query = query.where(Request.id < before)
    return _request_lines(session, list(session.scalars(query)))


def request(session: Session, tenant: str | None, id: str) -> RequestLine | None:
    """None too for a request of another tenant."""
    query = select(Request.id).where(Request.id == id)
    if tenant is not None:
        query = query.where(Request.tenant_id == tenant)
    lines = _request_lines(session, list(session.scalars(query)))
    return lines[0] if lines else None


def _request_lines(session: Session, ids: Sequence[str]) -> list[RequestLine]:
    counts: dict[str, dict[str, int]] = defaultdict(dict)
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    per_state = (
        select(
            Task.request_id,
            Task.state,
            func.count(),
            func.sum(Task.total_held_us + Task.held_us),
            func.sum(Task.pauses),
            func.sum(Task.lost_steps),
        )
        .where(Task.request_id.in_(ids))
        .group_by(Task.request_id, Task.state)
    )
    for id, state, count, *more in session.execute(per_state):
        counts[id][state] = count
        sums[id] = [int(a) + int(b) for a, b in zip(sums[id], more, strict=True)]
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
            state=row.state,
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
    """All that a page tells of one task.  `name` is unique within its request."""

    id: str
    name: str
    type: str
    kind: str
    state: str
    hold: str
    place: int | None
    device: str | None
    image_on: str | None
    step: int
    metrics: dict[str, Any]
    reasons: tuple[dict[str, Any], ...]
    epoch: int
    total_held_us: int
    pauses: int
    lost_steps: int
    cause: str | None
    message: str | None
    detail: str | None
    result: dict[str, Any] | None
    capabilities: tuple[str, ...]
    started_at: datetime | None
    ended_at: datetime | None


def tasks(session: Session, request: str) -> list[TaskView]:
    query = select(Task).where(Task.request_id == request).order_by(Task.ordinal)
    return [
        TaskView(
            id=task.id,
            name=task.name,
            type=task.type,
            kind=task.kind,
            state=task.state,
            hold=task.hold,
            place=task.place,
            device=task.seat,
            image_on=task.image_on,
            step=task.step,
            metrics=task.metrics,
            reasons=tuple(task.reasons),
            epoch=task.epoch,
            total_held_us=task.total_held_us + task.held_us,
            pauses=task.pauses,
            lost_steps=task.lost_steps,
            cause=task.cause,
            message=task.message,
            detail=task.detail,
            result=task.result,
            capabilities=tuple(task.capabilities),
            started_at=task.first_started_at,
            ended_at=task.ended_at,
        )
        for task in session.scalars(query)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """One launch of one task on one device; `end` is None while it lasts."""

    task: str
    epoch: int
    device: str
    launched_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    held_us: int
    first_step: int | None
    last_step: int | None
    end: str | None


def stays(session: Session, request: str, *, limit: int = 200) -> list[Stay]:
    """The last `limit` stays of a request's tasks, oldest first."""
    query = (
        select(Placement, Task.name)
        .join(Task, Task.id == Placement.task_id)
        .where(Task.request_id == request)
        .order_by(Placement.id.desc())
        .limit(limit)
    )
    return [
        Stay(
            task=name,
            epoch=row.epoch,
            device=row.device_id,
            launched_at=row.launched_at,
            started_at=row.started_at,
            ended_at=row.ended_at,
            held_us=row.held_us,
            first_step=row.first_step,
            last_step=row.last_step,
            end=row.end,
        )
        for row, name in reversed(session.execute(query).all())
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One line that a task printed."""

    id: int
    task: str
    epoch: int
    at: datetime
    stream: str
    text: str


def log_tail(session: Session, request: str, *, limit: int = 200) -> list[Said]:
    """The last lines of all of a request's tasks, oldest first."""
    query = (
        select(LogLine, Task.name)
        .join(Task, Task.id == LogLine.task_id)
        .where(Task.request_id == request)
        .order_by(LogLine.id.desc())
        .limit(limit)
    )
    return [
        Said(id=row.id, task=name, epoch=row.epoch, at=row.at, stream=row.stream, text=row.text)
        for row, name in reversed(session.execute(query).all())
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One number that a task's steps returned: (step, value) in order of steps."""

    task: str
    name: str
    points: tuple[tuple[int, float], ...]


def curves(session: Session, request: str, *, points: int = 200) -> list[Curve]:
    """Each number of each task, thinned evenly to about `points`; the last one always stays."""
    numbered = (
        select(
            Task.name.label("task"),
            Metric.step,
            Metric.values,
            func.row_number().over(partition_by=Task.id, order_by=Metric.step.desc()).label("back"),
            func.count().over(partition_by=Task.id).label("all"),
        )
        .join(Task, Task.id == Metric.task_id)
        .where(Task.request_id == request)
        .subquery()
    )
    every = func.greatest(1, numbered.c.all / text(str(points)))
    query = (
        select(numbered.c.task, numbered.c.step, numbered.c["values"])
        .where((numbered.c.back - 1) % every == 0)
        .order_by(numbered.c.task, numbered.c.step)
    )
    found: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for task, step, values in session.execute(query):
        for name, value in values.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                found[task, name].append((step, float(value)))
    return [Curve(task=task, name=name, points=tuple(line)) for (task, name), line in found.items()]
