"""The numbers that the API and the pages show: rows become frozen values here, and only here.

So a number on a page equals the number in the API.  Nothing here writes or decides.  A `tenant` of
None asks for all tenants (a platform administrator).  With a tenant's id, two facts about other
tenants are given: that a device is in use, and how much the others hold in all.

Rules F1, F2 and F10 are read from here; the arithmetic is in `core.fairness.fair_tree` and
`core.fairness.water_filling`.
"""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from math import inf, isfinite
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, func, select, text, true
from sqlalchemy.dialects.postgresql import distinct_on
from sqlalchemy.orm import InstrumentedAttribute, Session, aliased

from app.core.fairness import fair_tree
from app.core.fairness.water_filling import Branch, divide_tree
from app.core.model.lifecycle import ENDED, NOT_STARTED, ON_A_DEVICE
from app.core.model.phase import request_phase
from app.core.security.sandbox_layers import Sandbox
from app.core.units import counted
from app.data import datablocks as blocks
from app.db import tenant_tree
from app.db.models import (
    Account,
    Checkpoint,
    Cycle,
    Datablock,
    Decision,
    Device,
    Event,
    Host,
    Island,
    LedgerBase,
    Lift,
    LogLine,
    Placement,
    Request,
    Task,
    Tenant,
    Usage,
    User,
)
from app.insight import explain, phases
from app.insight.explain import Why
from app.insight.forecast import Start
from app.scheduling import guest_placements


def clock(session: Session) -> datetime:
    """Return the time of the database, by which leases end and usage is booked."""
    now: datetime = session.execute(select(func.now())).scalar_one()
    return now


# --- shares -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KindShare:
    """The share of one tenant, with those below it, in one kind of device.

    `devices` is the number of devices that are up and take work.  `by_weight` is the tenant's part
    of them if every tenant had work.  `fair` is its part now, among the tenants that have work, by
    guarantee, limit and weight.  `held` is the number under its tasks; `borrowed` of them exceed
    its guarantee.  `by_memory` of them are charged by the memory that is reserved on them, their
    dominant resource.  `waiting` counts the tasks that could start at once.

    `idle_us` is the tenant's idle credit: usage of that kind that it is taken to have had while it
    was away, decayed to now.  It adds to `usage_us` when the order of tenants is decided, and is
    never charged.
    """

    kind: str
    devices: int
    by_weight: float
    fair: float
    held: int
    waiting: int
    guarantee: int = 0
    limit: int | None = None
    borrowed: int = 0
    by_memory: int = 0
    idle_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantShare:
    """The share of a tenant and all tenants below it, summed over kinds and by kind.

    `share` is its part of all weights.  `usage_us` is its decayed usage now and `total_us` all that
    it was ever charged, in micro-device-seconds times cost.  `score` is `usage_us` over `weight`:
    among tenants with the same `parent_id`, the lower score goes first.  `depth` counts the tenants
    above it that own a share.
    """

    id: str
    tenant: str
    parent_id: str | None = None
    depth: int = 0
    weight: float
    share: float
    fair: float
    held: int
    waiting: int
    guarantee: int = 0
    borrowed: int = 0
    usage_us: int
    total_us: int
    score: float
    kinds: tuple[KindShare, ...]


def fair_share(session: Session, now: datetime) -> list[TenantShare]:
    """Return every tenant that owns a share, each after its parent, siblings by name."""
    tree, work = _Tree(session), _Work(session)
    capacity, held = _capacity(session, now), work.held
    fair = {kind: _divided(tree, work, kind, devices) for kind, devices in capacity.items()}
    below = {id: tree.below(id) for id in tree.order}
    used = _accounts(session)
    base = session.get(LedgerBase, 1)
    idle = {key: _usage_now_us(faded, base, now) // 1000 for key, faded in _lifts(session).items()}
    shares = []
    for id in tree.order:
        row, path = tree.rows[id], tree.path(id)
        kinds = tuple(
            _kind_share(
                row,
                kind,
                devices=devices,
                part=tree.part(id),
                fair=fair[kind].get(path, Fraction(0)),
                held=sum(held[one, kind] for one in below[id]),
                by_memory=sum(work.by_memory[one, kind] for one in below[id]),
                idle_us=idle.get((id, kind), 0),
                waiting=sum(work.waiting[one, kind] for one in below[id]),
            )
            for kind, devices in sorted(capacity.items())
        )
        faded = sum(used[one][0] for one in below[id])
        total_us = sum(used[one][1] for one in below[id])
        usage_us = _usage_now_us(faded, base, now)
        shares.append(_tenant_share(tree, row, kinds, usage_us=usage_us, total_us=total_us))
    return shares


def _kind_share(
    row: Any, kind: str, *, devices: int, part: Fraction, fair: Fraction, held: int, **more: int
) -> KindShare:
    guarantee = row.guarantee.get(kind, 0)
    return KindShare(
        kind=kind,
        devices=devices,
        by_weight=float(devices * part),
        fair=float(fair),
        held=held,
        guarantee=guarantee,
        limit=_limit(row, kind),
        borrowed=max(0, held - guarantee),
        **more,
    )


def _tenant_share(
    tree: _Tree, row: Any, kinds: tuple[KindShare, ...], *, usage_us: int, total_us: int
) -> TenantShare:
    weight = row.weight_milli / 1000
    return TenantShare(
        id=row.id,
        tenant=row.name,
        parent_id=row.parent_id,
        depth=len(tree.path(row.id)) - 1,
        weight=weight,
        share=float(tree.part(row.id)),
        fair=sum(kind.fair for kind in kinds),
        held=sum(kind.held for kind in kinds),
        waiting=sum(kind.waiting for kind in kinds),
        guarantee=sum(kind.guarantee for kind in kinds),
        borrowed=sum(kind.borrowed for kind in kinds),
        usage_us=usage_us,
        total_us=total_us,
        score=usage_us / weight,
        kinds=kinds,
    )


def _limit(row: Any, kind: str) -> int | None:
    """The limit for one kind; a limit on all kinds together bounds each of them."""
    limits = [row.limit[each] for each in (kind, tenant_tree.ALL) if each in row.limit]
    return min(limits, default=None)


class _Tree:
    """The tenants that own shares, and how they lie below each other."""

    def __init__(self, session: Session) -> None:
        columns = (
            Tenant.id,
            Tenant.name,
            Tenant.parent_id,
            Tenant.weight_milli,
            Tenant.guarantee,
            Tenant.limit,
        )
        rows = session.execute(select(*columns).order_by(Tenant.name.desc())).all()
        self.rows = {row.id: row for row in rows}
        self.roots = {row.id for row in rows if row.parent_id is None}
        self.children: dict[str | None, list[str]] = defaultdict(list)
        for row in rows:
            if row.id not in self.roots:
                self.children[row.parent_id].append(row.id)
        self.order = list(self._in_order())
        self._parts: dict[str, Fraction] = {}
        self._below: dict[str, list[str]] = {}

    def _in_order(self) -> Iterator[str]:
        ahead = [id for root in self.roots for id in self.children[root]]
        while ahead:
            id = ahead.pop()
            yield id
            ahead += self.children[id]

    def path(self, id: str) -> tuple[str, ...]:
        """The tenant's ids from the top down; the root owns no share and stands beside its
        children.
        """
        above = self.rows[id].parent_id
        if above is None or above in self.roots:
            return (id,)
        return (*self.path(above), id)

    def below(self, id: str) -> list[str]:
        """The tenant and all below it."""
        found = self._below.get(id)
        if found is None:
            found = self._below[id] = [id]
            for child in self.children[id]:
                found += self.below(child)
        return found

    def part(self, id: str) -> Fraction:
        """The tenant's part of all weights: its weight among its siblings, times its
        parent's part.
        """
        if id not in self._parts:
            row = self.rows[id]
            siblings = self.children[row.parent_id]
            above = Fraction(1) if row.parent_id in self.roots else self.part(row.parent_id)
            among = sum(self.rows[each].weight_milli for each in siblings)
            for each in siblings:
                self._parts[each] = above * Fraction(self.rows[each].weight_milli, among)
        return self._parts[id]


class _Work:
    """The tenants that have work, counted; the journal keeps the counts of waiting tasks (`lines`).

    `wanted` is (tenant, kind) -> user -> (weight, devices that the user's tasks hold or wait for).
    """

    def __init__(self, session: Session) -> None:
        self.waiting: dict[tuple[str, str], int] = defaultdict(int)
        self.held: dict[tuple[str, str], int] = defaultdict(int)
        self.wanted: dict[tuple[str, str], dict[str, tuple[int, int]]] = defaultdict(dict)
        self.by_memory: dict[tuple[str, str], int] = defaultdict(int)
        dominant = set(session.scalars(_BY_MEMORY))
        for placement in session.scalars(_holders()):
            self.held[placement.tenant_id, placement.kind] += 1
            if placement.task_id in dominant:
                self.by_memory[placement.tenant_id, placement.kind] += 1
        for tenant, kind, _, _, waiting, _ in (rows := session.execute(_WORK).all()):
            self.waiting[tenant, kind] += waiting
        for tenant, kind, user, weight, _, devices in rows:
            self.wanted[tenant, kind][user] = weight, devices


_BY_MEMORY = (
    select(Task.id)
    .join(Placement, Placement.task_id == Task.id)
    .where(Placement.ended_at.is_(None), ~Placement.guest, Task.cost_milli > 0)
)

_WORK = text(
    """
    select work.tenant_id, kind, user_id, u.weight_milli,
           sum(waiting)::bigint as waiting, sum(devices)::bigint as devices
    from (
        select tenant_id, kind, user_id, waiting, waiting * width as devices from lines
        where waiting > 0
        union all
        select tenant_id, kind, user_id, 0, 1 from placements where ended_at is null
    ) work join users u on u.id = user_id
    group by 1, 2, 3, 4
    """
)


def _divided(
    tenants: _Tree, work: _Work, kind: str, devices: int
) -> dict[tuple[str, ...], Fraction]:
    """Return the part of each tenant and user that has work, by path."""

    def branch(id: str) -> Branch | None:
        row = tenants.rows[id]
        mine: dict[str, Branch] = {
            user: Branch(weight=weight, demand=wanted)
            for user, (weight, wanted) in work.wanted.get((id, kind), {}).items()
        }
        below = () if id in tenants.roots else tenants.children[id]
        mine |= {child: made for child in below if (made := branch(child)) is not None}
        if not mine:
            return None
        return Branch(
            weight=row.weight_milli,
            guarantee=row.guarantee.get(kind, 0),
            limit=_limit(row, kind),
            children=mine,
        )

    tops = [*tenants.roots, *(id for root in tenants.roots for id in tenants.children[root])]
    return divide_tree(devices, {id: made for id in tops if (made := branch(id)) is not None})


def within(shares: Sequence[TenantShare], tenant: str) -> list[TenantShare]:
    """Return the shares of the tenant and of all tenants below it."""
    seen: set[str | None] = {tenant}
    found = []
    for share in shares:
        if share.id == tenant or share.parent_id in seen:
            seen.add(share.id)
            found.append(share)
    return found


def others(shares: Iterable[TenantShare], tenant: str) -> TenantShare:
    """Sum up all other tenants as one without a name: all that a tenant may know about them."""
    shares = list(shares)
    mine = [share for share in shares if share.id == tenant and share.depth]
    rest = [share for share in shares if not share.depth and share.id != tenant]
    by_kind: dict[str, list[KindShare]] = defaultdict(list)
    for share in rest:
        for kind in share.kinds:
            by_kind[kind.kind].append(kind)
    less = {kind.kind: kind for share in mine for kind in share.kinds}
    weight = sum(share.weight for share in rest)
    usage_us = sum(share.usage_us for share in rest) - sum(share.usage_us for share in mine)
    kinds = tuple(_sum_kind(kinds, less.get(kind)) for kind, kinds in by_kind.items())
    return TenantShare(
        id="",
        tenant="all others",
        weight=weight,
        share=sum(share.share for share in rest) - sum(share.share for share in mine),
        fair=sum(kind.fair for kind in kinds),
        held=sum(kind.held for kind in kinds),
        waiting=sum(kind.waiting for kind in kinds),
        borrowed=sum(kind.borrowed for kind in kinds),
        usage_us=usage_us,
        total_us=sum(share.total_us for share in rest) - sum(share.total_us for share in mine),
        score=usage_us / weight if weight else 0.0,
        kinds=kinds,
    )


def _sum_kind(kinds: Sequence[KindShare], less: KindShare | None) -> KindShare:
    minus = () if less is None else (less,)

    def total(of: Callable[[KindShare], float]) -> float:
        return sum(of(kind) for kind in kinds) - sum(of(kind) for kind in minus)

    return KindShare(
        kind=kinds[0].kind,
        devices=kinds[0].devices,
        by_weight=total(lambda kind: kind.by_weight),
        fair=total(lambda kind: kind.fair),
        held=int(total(lambda kind: kind.held)),
        waiting=int(total(lambda kind: kind.waiting)),
        by_memory=int(total(lambda kind: kind.by_memory)),
        borrowed=max(0, int(total(lambda kind: kind.borrowed))),
    )


def _capacity(session: Session, now: datetime) -> dict[str, int]:
    """Return the number of devices that take work now, by kind; 0 if none of a kind can be used."""
    usable = and_(Device.lease_until > now, ~Device.cordoned, ~Host.cordoned)
    query = (
        select(Device.kind, func.count().filter(usable))
        .join(Host, Host.name == Device.host)
        .group_by(Device.kind)
    )
    return {kind: count for kind, count in session.execute(query)}


def _holders() -> Select[Placement]:
    """Select the placement that holds each device, one for a device.

    A task that was told to leave holds its device until it has left.  Among tasks that share a
    device, the first to come counts.
    """
    return _who_sits().ext(distinct_on(Placement.device_id))


def _who_sits() -> Select[Placement]:
    order = (Placement.device_id, Placement.leaving.desc(), Placement.id)
    return select(Placement).where(Placement.ended_at.is_(None)).order_by(*order)


def _accounts(session: Session) -> dict[str, tuple[int, int]]:
    """Return by tenant (decayed sum, all it was ever charged in microseconds), of its own users."""
    query = select(Account.tenant_id, func.sum(Account.faded), func.sum(Account.total_us)).group_by(
        Account.tenant_id
    )
    used: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for tenant, faded, total_us in session.execute(query):
        used[tenant] = int(faded), int(total_us)
    return used


def _lifts(session: Session) -> dict[tuple[str, str], int]:
    """Return (tenant, kind) -> its idle-credit floor, in thousandths; the highest one of all
    islands.
    """
    query = select(Lift.tenant_id, Lift.kind, func.max(Lift.faded)).where(Lift.user_id == "")
    rows = session.execute(query.group_by(Lift.tenant_id, Lift.kind))
    return {(tenant, kind): int(faded) for tenant, kind, faded in rows}


def _usage_now_us(faded: int, base: LedgerBase | None, now: datetime) -> int:
    if base is None:
        return 0
    return fair_tree.usage_us(
        faded, now_s=now.timestamp(), since_s=base.since_s, half_life_s=base.half_life_s
    )


def verdict(share: TenantShare, shares: Sequence[TenantShare]) -> str:
    """Say in short sentences what the tenant uses, what is queued and which tenants run first.

    `shares` are those of all tenants.  The scheduler compares usage over weight, not what is held,
    so a tenant that holds little may still come after others.
    """
    devices = sum(kind.devices for kind in share.kinds)
    if not devices:
        return f"No device takes work now. {_queued_tasks(share.waiting)}."
    if not share.held and not share.waiting:
        entitled = sum(kind.by_weight for kind in share.kinds)
        return (
            f"Nothing of yours runs or is queued. By weight, {number(entitled)} of "
            f"{counted(devices, 'device')} {('is' if entitled == 1 else 'are')} yours, plus idle "
            "devices of others."
        )
    return (
        f"{share.held} of {counted(devices, 'device')} in use by you. "
        f"{_queued_tasks(share.waiting)}.{_so(share, shares)}"
    )


_OTHERS_FIRST = " Tenants with less recent usage run first."
_YOUR_TURN = " You have less recent usage than others, so you run first."
_OTHERS_TURN = " Tenants with less recent usage are queued and run next."


def _so(share: TenantShare, shares: Sequence[TenantShare]) -> str:
    """Say which tenants go first; "" if that differs by kind of device, or if no tenant is
    ahead.
    """
    rest = list(_rivals(share, shares))
    if share.waiting:
        waited = [kind for kind in share.kinds if kind.waiting and kind.devices]
        said = {_who_goes_first(kind, rest) for kind in waited}
        return said.pop() if len(said) == 1 else ""
    over = [kind for kind in share.kinds if kind.held > kind.fair]
    due = any(
        other.score < mine and _of_kind(other, kind.kind).waiting
        for kind in over
        for mine, other in rest
    )
    return _OTHERS_TURN if due else ""


def _rivals(
    share: TenantShare, shares: Sequence[TenantShare]
) -> Iterator[tuple[float, TenantShare]]:
    """Yield the competing tenants, each with the score that it is compared with.

    On each level that is the score of the tenant itself or of its ancestor there.
    """
    by_id = {each.id: each for each in shares}
    mine: TenantShare | None = share
    while mine is not None:
        for other in shares:
            if other.parent_id == mine.parent_id and other.id != mine.id:
                yield mine.score, other
        mine = by_id.get(mine.parent_id or "")


def _who_goes_first(kind: KindShare, rest: Sequence[tuple[float, TenantShare]]) -> str:
    """Apply rules F3 and F6 to one kind that the tenant waits for, by what the ledger has
    booked.
    """
    rivals = [(mine - other.score, _of_kind(other, kind.kind)) for mine, other in rest]
    waiting = [lead for lead, their in rivals if their.waiting]
    holding = [lead for lead, their in rivals if their.held]
    taken = kind.held + sum(their.held for _, their in rivals) >= kind.devices
    stay = taken and bool(holding) and min(holding) > 0
    if stay or any(lead > 0 for lead in waiting):
        return _OTHERS_FIRST
    return _YOUR_TURN if any(lead < 0 for lead in waiting + holding) else ""


def _of_kind(share: TenantShare, kind: str) -> KindShare:
    return next(each for each in share.kinds if each.kind == kind)


def verdict_of_all(shares: Sequence[TenantShare]) -> str:
    """Say the same for a platform administrator, about all tenants."""
    kinds = shares[0].kinds if shares else ()
    devices = sum(kind.devices for kind in kinds)
    tops = [share for share in shares if not share.depth]
    held, waiting = sum(share.held for share in tops), sum(share.waiting for share in tops)
    busy = sum(1 for share in shares if share.held or share.waiting)
    tenants = f"{busy} of {counted(len(shares), 'tenant')} {'has' if busy == 1 else 'have'} work"
    return f"{held} of {counted(devices, 'device')} in use. {tenants}. {_queued_tasks(waiting)}."


def number(value: float) -> str:
    """Format with at most two digits after the point, and without trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _queued_tasks(waiting: int) -> str:
    return f"{counted(waiting, 'task')} queued" if waiting else "No task is queued"


# --- the queue ----------------------------------------------------------------------------------


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
    query = _with_names(select(Task), None).where(Task.id == func.any(ids)).order_by(Task.id)
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
    """Return the ids of a page, queried by tenant, or by island for all tenants, as an index has
    them.

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
        priority=task.priority,
        since=waits_since or task.submitted_at,
        step=task.step,
        reasons=told.reasons,
        nearest=told.nearest,
        starts_at=told.estimate.starts_at if told.estimate else None,
        estimate=told.estimate,
        no_estimate=told.no_estimate,
    )


def _with_names(query: Select[*tuple[Any, ...]], tenant: str | None) -> Select[*tuple[Any, ...]]:
    """Add the names of a task's request, tenant and user to the query."""
    query = (
        query.add_columns(Request.name, Tenant.name, User.name)
        .join(Request, Request.id == Task.request_id)
        .join(Tenant, Tenant.id == Task.tenant_id)
        .join(User, User.id == Task.user_id)
    )
    return query if tenant is None else query.where(Task.tenant_id == tenant)


def median_wait_s(session: Session, tenant: str | None, *, requests: int = 200) -> float | None:
    """Return the median time from submission to first start, in seconds; None if no task has
    started.

    It covers the tasks of the newest `requests` requests that have started.
    """
    newest = select(Request.id).order_by(Request.id.desc()).limit(requests)
    if tenant is not None:
        newest = newest.where(Request.tenant_id == tenant)
    waited_s = func.extract("epoch", Task.first_started_at - Task.submitted_at)
    query = select(func.percentile_cont(0.5).within_group(waited_s)).where(
        Task.request_id.in_(newest), Task.first_started_at.is_not(None)
    )
    found = session.scalar(query)
    return None if found is None else float(found)


# --- devices and what runs on them --------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A task on its `devices`, its home device first.  `total_held_us` is the time that it has held
    slots, over all its launches.  `steps` is its parameter of that name, if that is a number that
    the task can still reach.
    """

    id: str
    request_id: str
    name: str
    request: str
    tenant: str
    user: str
    state: str
    phase: str
    devices: tuple[str, ...]
    step: int
    metrics: dict[str, Any]
    started_at: datetime | None
    total_held_us: int
    pauses: int
    lost_steps: int
    steps: int | None = None


def running(session: Session, tenant: str | None) -> list[Running]:
    query = _with_names(select(Task), tenant).where(Task.state.in_(ON_A_DEVICE))
    rows = session.execute(query.order_by(Task.seat, Task.id)).all()
    held = _held(session, [row[0] for row in rows])
    return [
        Running(
            id=task.id,
            request_id=task.request_id,
            name=task.name,
            request=request,
            tenant=owner,
            user=user,
            state=task.state,
            phase=phases.of_task(task),
            devices=held[task.id],
            step=task.step,
            metrics=task.metrics,
            started_at=task.started_at,
            total_held_us=task.total_held_us + task.held_us,
            pauses=task.pauses,
            lost_steps=task.lost_steps,
            steps=_steps(task),
        )
        for task, request, owner, user in rows
    ]


def _steps(task: Task) -> int | None:
    """Return the number of steps that the task is to make, if its parameter `steps` says so."""
    steps = task.descriptor.get("params", {}).get("steps")
    return steps if type(steps) is int and steps >= max(task.step, 1) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The newest values of each metric of a task, oldest first, and its number of steps per
    second.
    """

    rate: float | None
    metrics: dict[str, tuple[float, ...]]


def paces(session: Session, tasks: Sequence[str], *, rows: int = 40) -> dict[str, Pace]:
    """Return the pace of each task, from its last `rows` rows of metrics."""
    found: dict[str, list[Any]] = defaultdict(list)
    for row in session.execute(_NEWEST_METRICS, {"tasks": list(tasks), "rows": rows}):
        found[row.id].insert(0, row)
    return {id: _pace(rows) for id, rows in found.items()}


def _pace(rows: Sequence[Any]) -> Pace:
    metrics: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.told.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                metrics[name].append(_finite(value))
    took_s = (rows[-1].at - rows[0].at).total_seconds()
    rate = (rows[-1].step - rows[0].step) / took_s if took_s > 0 else None
    lines = {name: tuple(filter(isfinite, line)) for name, line in metrics.items()}
    return Pace(rate=rate, metrics=lines)


def _finite(value: float) -> float:
    """Convert a tenant's number, which may be an int too large for a float: then infinity."""
    try:
        return float(value)
    except OverflowError:
        return inf


_NEWEST_METRICS = text(
    """
    select t.id, m.step, m.at, m.told from unnest(cast(:tasks as text[])) as t (id)
    cross join lateral (
        select step, at, values as told from metrics
        where task_id = t.id order by step desc limit :rows
    ) m order by t.id, m.step desc
    """
)


def _held(session: Session, tasks: Sequence[Task]) -> dict[str, tuple[str, ...]]:
    """Return by task all devices that it holds."""
    lent = guest_placements.guests(
        session, [task.id for task in tasks if task.resized_at is not None]
    )
    return {
        task.id: (task.seat, *(guest.device_id for guest in lent[task.id])) if task.seat else ()
        for task in tasks
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceView:
    """A device and the task that holds it.  `state` is up, down or cordoned.  `others` is the
    number of further tasks that take turns on it.

    `holder` is the tenant of that task; None while the device is free.  A tenant that asks sees no
    name, and no other detail, of another tenant.
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
    others: int
    sandbox: Sandbox


def devices(session: Session, tenant: str | None, now: datetime) -> list[DeviceView]:
    holders: dict[str, list[Placement]] = defaultdict(list)
    for placement in session.scalars(_who_sits()):
        holders[placement.device_id].append(placement)
    names = {id: name for id, name in session.execute(select(Tenant.id, Tenant.name))}
    tasks = {task.id: task for task in running(session, tenant)}
    # HOST.2 before HOST.10
    order = (Device.host, func.length(Device.id), Device.id)
    query = select(Device, Host.cordoned).join(Host, Host.name == Device.host).order_by(*order)
    return [
        _device_view(
            device,
            state=_device_state(device, drained, now),
            placements=holders[device.id],
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
    placements: Sequence[Placement],
    tenant: str | None,
    names: Mapping[str, str],
    tasks: Mapping[str, Running],
) -> DeviceView:
    """Build the view of a device; if tasks share it, the asking tenant's own task is shown."""
    sits = [each for each in placements if not each.leaving]
    mine = [each for each in sits if each.tenant_id == tenant]
    shared = mine if len(sits) > 1 and len(sits) == len(placements) else []
    placement = next(iter((*shared, *placements)), None)
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
        others=max(0, len(sits) - 1),
        sandbox=Sandbox.of(device.facts),
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
    """Return usage booked from `since` up to, not including, `until`, summed by `group_by`."""
    bucket = func.date_bin(
        timedelta(seconds=interval_s), Usage.bucket, datetime(1970, 1, 1, tzinfo=UTC)
    )
    columns = {"bucket": bucket, "tenant": Tenant.name, "user": User.name, "kind": Usage.kind}
    chosen: list[ColumnElement[Any]] = [
        columns[name].label(name) for name in GROUPS if name in group_by
    ]
    # Group by id too, since two tenants may have the same name.
    ids = [Usage.tenant_id] if "tenant" in group_by else []
    query = (
        select(
            *chosen,
            func.coalesce(func.sum(Usage.held_us), 0).label("held_us"),
            func.coalesce(func.sum(Usage.charged_us), 0).label("charged_us"),
        )
        .join(Tenant, Tenant.id == Usage.tenant_id)
        .join(User, User.id == Usage.user_id)
        .where(Usage.bucket >= since, Usage.bucket < until)
        .group_by(*chosen, *ids)
        .order_by(*chosen, *ids)
    )
    if tenant is not None:
        query = query.where(Usage.tenant_id == tenant)
    rows = session.execute(query).mappings()
    return [
        UsageRow(**{**row, "held_us": int(row["held_us"]), "charged_us": int(row["charged_us"])})
        for row in rows
    ]


def to_csv(rows: Iterable[UsageRow], group_by: Sequence[str]) -> str:
    """Format as CSV: a line of names, then a line for each row; times in ISO 8601."""
    names = [*(name for name in GROUPS if name in group_by), "held_us", "charged_us"]
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(names)
    for row in rows:
        values = (getattr(row, name) for name in names)
        writer.writerow(v.isoformat() if isinstance(v, datetime) else v for v in values)
    return out.getvalue()


# --- what happened ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """An event, with its message as it was written."""

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
    without: Collection[str] = (),
    before: int | None = None,
    limit: int = 50,
) -> list[Happened]:
    """Return events, newest first, `without` these types; `before` is the id of the last
    one seen.
    """
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
    if without:
        query = query.where(Event.type.not_in(without))
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


# --- decisions ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """The other task of a decision: it pays for the move, or the move is made for it.

    If the task is another tenant's, nothing else about it is given.
    """

    tenant: str
    task_id: str | None
    task: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """A move that an island decided on; `rule` is one of F1-F10, or another named rule.

    `because` is for the task's owner; `cycle` is the number of the round in which it was decided.
    """

    id: int
    at: datetime
    island: str
    cycle: int
    move: str
    rule: str
    because: str
    tenant: str
    request_id: str
    request: str
    task_id: str
    task: str
    devices: tuple[str, ...]
    against: Against | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The round of a decision, with all of its decisions that the caller may see.

    `snapshot` is what the scheduler saw, from which the decisions can be reproduced; None unless
    the caller may see all tenants.
    """

    decision: Decided
    now_s: float
    decisions: list[Decided]
    snapshot: dict[str, Any] | None


def decisions(
    session: Session,
    tenant: str | None,
    *,
    below: bool = False,
    before: int | None = None,
    limit: int = 50,
) -> list[Decided]:
    """Return decisions, newest first; `before` is the id of the last one seen."""
    query = _decisions(tenant, below=below).limit(limit)
    if before is not None:
        query = query.where(Decision.id < before)
    return [_decided(row) for row in session.execute(query)]


def decision(session: Session, tenant: str | None, id: int, *, below: bool = False) -> Round | None:
    """Return a decision's round; None if there is none, or if it is about another tenant's task."""
    query = _decisions(tenant, below=below)
    row = session.execute(query.where(Decision.id == id)).first()
    if row is None:
        return None
    cycle = session.get_one(Cycle, row[0].cycle_id)
    rows = session.execute(query.where(Decision.cycle_id == cycle.id)).all()
    return Round(
        decision=_decided(row),
        now_s=cycle.now_s,
        decisions=[_decided(row) for row in reversed(rows)],
        snapshot=cycle.snapshot if tenant is None else None,
    )


def _decisions(tenant: str | None, *, below: bool) -> Select[*tuple[Any, ...]]:
    rival, owner = aliased(Task), aliased(Tenant)

    def seen(column: InstrumentedAttribute[str]) -> ColumnElement[bool]:
        if tenant is None:
            return true()
        return tenant_tree.within(column, tenant) if below else column == tenant

    return (
        select(
            Decision,
            Cycle.island,
            Tenant.name,
            Task.request_id,
            Request.name,
            Task.name,
            rival.name,
            owner.name,
            seen(rival.tenant_id),
        )
        .join(Cycle, Cycle.id == Decision.cycle_id)
        .join(Tenant, Tenant.id == Decision.tenant_id)
        .join(Task, Task.id == Decision.task_id)
        .join(Request, Request.id == Task.request_id)
        .outerjoin(rival, rival.id == Decision.against)
        .outerjoin(owner, owner.id == rival.tenant_id)
        .where(seen(Decision.tenant_id))
        .order_by(Decision.id.desc())
    )


def _decided(row: Any) -> Decided:
    made, island, tenant, request_id, request, task, rival, owner, visible = row
    against = None
    if rival is not None:
        shown = (owner, made.against, rival) if visible else ("another tenant", None, None)
        against = Against(tenant=shown[0], task_id=shown[1], task=shown[2])
    return Decided(
        id=made.id,
        at=made.at,
        island=island,
        cycle=made.cycle_id,
        move=made.move,
        rule=made.rule,
        because=made.because,
        tenant=tenant,
        request_id=request_id,
        request=request,
        task_id=made.task_id,
        task=task,
        devices=tuple(made.devices),
        against=against,
    )


# --- requests -----------------------------------------------------------------------------------


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
    before: str | None = None,
    limit: int = 50,
) -> list[RequestLine]:
    """Return requests, newest first (ids sort by time); `before` is the id of the last one seen."""
    query = select(Request.id).order_by(Request.id.desc()).limit(limit)
    if tenant is not None:
        query = query.where(Request.tenant_id == tenant)
    if phase is not None:
        query = query.where(phases.is_in([phase]))
    if before is not None:
        query = query.where(Request.id < before)
    return _request_lines(session, list(session.scalars(query)))


def request(session: Session, tenant: str | None, id: str) -> RequestLine | None:
    """Return the request; None if there is none, or if it is another tenant's."""
    query = select(Request.id).where(Request.id == id)
    if tenant is not None:
        query = query.where(Request.tenant_id == tenant)
    lines = _request_lines(session, list(session.scalars(query)))
    return lines[0] if lines else None


def _request_lines(session: Session, ids: Sequence[str]) -> list[RequestLine]:
    counts: dict[str, dict[str, int]] = defaultdict(dict)
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    leading: dict[str, set[str]] = defaultdict(set)
    per_phase = (
        select(
            Task.request_id,
            phases.TASK_PHASE.label("phase"),
            phases.IS_NO_TICKET.label("leads"),
            func.count(),
            func.sum(Task.total_held_us + Task.held_us),
            func.sum(Task.pauses),
            func.sum(Task.lost_steps),
        )
        .where(Task.request_id.in_(ids))
        .group_by(Task.request_id, "phase", "leads")
    )
    for id, phase, leads, count, *more in session.execute(per_phase):
        counts[id][phase] = counts[id].get(phase, 0) + count
        if leads:
            leading[id].add(phase)
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
    cause: str | None
    message: str | None
    detail: str | None
    result: dict[str, Any] | None
    outputs: dict[str, dict[str, Any]]
    params: dict[str, Any]
    steps: int | None
    is_command: bool
    capabilities: tuple[str, ...]
    started_at: datetime | None
    ended_at: datetime | None


EXPLAINED = 50


def tasks(session: Session, request: str) -> list[TaskView]:
    query = select(Task).where(Task.request_id == request).order_by(Task.ordinal)
    found = session.scalars(query).all()
    waiting = [task for task in found if task.state in NOT_STARTED]
    told = defaultdict(Why, explain.explain(session, waiting[:EXPLAINED]))
    held = _held(session, found)
    return [
        TaskView(
            id=task.id,
            name=task.name,
            type=task.type,
            kind=task.kind,
            state=task.state,
            phase=phases.of_task(task),
            hold=task.hold,
            place=told[task.id].place,
            devices=held[task.id],
            image_on=task.image_on,
            step=task.step,
            metrics=task.metrics,
            reasons=told[task.id].reasons,
            starts=told[task.id].estimate,
            epoch=task.epoch,
            total_held_us=task.total_held_us + task.held_us,
            pauses=task.pauses,
            lost_steps=task.lost_steps,
            cause=task.cause,
            message=task.message,
            detail=task.detail,
            result=task.result,
            outputs=task.outputs,
            params=task.descriptor.get("params") or {},
            steps=_steps(task),
            is_command="command" in task.descriptor.get("run", {}),
            capabilities=tuple(task.capabilities),
            started_at=task.first_started_at,
            ended_at=task.ended_at,
        )
        for task in found
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
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


def stays(session: Session, request: str, *, limit: int = 200) -> list[Stay]:
    """Return the last `limit` stays of a request's tasks, oldest first."""
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
class Kept:
    """A checkpoint of one task that has not been deleted."""

    id: str
    task: str
    step: int
    size_bytes: int
    created_at: datetime
    damaged: bool


def checkpoints(session: Session, request: str, *, limit: int = 20) -> list[Kept]:
    """List the checkpoints of a request's tasks, the newest first."""
    query = (
        select(Checkpoint, Task.name)
        .join(Task, Task.id == Checkpoint.task_id)
        .where(Task.request_id == request, Checkpoint.deleted_at.is_(None))
        .order_by(Checkpoint.id.desc())
        .limit(limit)
    )
    return [
        Kept(
            id=row.id,
            task=name,
            step=row.step,
            size_bytes=row.size_bytes,
            created_at=row.created_at,
            damaged=row.damaged_at is not None,
        )
        for row, name in session.execute(query)
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


def log_tail(session: Session, request: str, *, grep: str = "", limit: int = 200) -> list[Said]:
    """Return the last lines of all tasks of a request that contain `grep`, oldest first."""
    query = (
        select(LogLine, Task.name)
        .join(Task, Task.id == LogLine.task_id)
        .where(Task.request_id == request)
        .order_by(LogLine.id.desc())
        .limit(limit)
    )
    if grep:
        query = query.where(func.strpos(LogLine.text, grep) > 0)
    return [
        Said(id=row.id, task=name, epoch=row.epoch, at=row.at, stream=row.stream, text=row.text)
        for row, name in reversed(session.execute(query).all())
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A number that a task's steps returned, as (step, value) in order of steps."""

    task: str
    name: str
    points: tuple[tuple[int, float], ...]


def curves(session: Session, request: str, *, points: int = 200) -> list[Curve]:
    """Return each numeric metric of each task: every row, or about `points` of them if there are
    more.

    Steps are then cut into equal ranges.  The rows with the lowest and the highest value of each
    range are kept, and the first and the last row.  So each point is a row, and no extreme is lost.
    """
    found: dict[tuple[str, str], set[tuple[int, float]]] = defaultdict(set)
    for row in session.execute(_CURVES, {"request": request, "points": points}):
        kept = [(row.lowest[1], row.lowest[0]), (row.highest[1], row.highest[0])]
        kept += [tuple(row.first)] if row.is_first else []
        kept += [tuple(row.last)] if row.is_last else []
        line = ((int(step), float(value)) for step, value in kept)
        found[row.task, row.name] |= {point for point in line if isfinite(point[1])}
    return [
        Curve(task=task, name=name, points=tuple(sorted(line)))
        for (task, name), line in found.items()
        if line
    ]


_CURVES = text(
    """
    with span as (
        select t.id, t.name, min(m.step) as first, max(m.step) as last, count(*) as rows
        from metrics m join tasks t on t.id = m.task_id
        where t.request_id = :request group by t.id, t.name
    ), numbers as (
        select span.name as task, one.key as name, m.step, one.value::numeric as value,
            case when rows <= :points then m.step
                else div((m.step - first)::numeric * (:points / 2), last - first + 1) end as range
        from span join metrics m on m.task_id = span.id
            cross join lateral jsonb_each(m.values) one
        where jsonb_typeof(one.value) = 'number'
    ), ranges as (
        select task, name, range, min(array[value, step]) as lowest,
            max(array[value, step]) as highest, min(array[step, value]) as first,
            max(array[step, value]) as last
        from numbers group by task, name, range
    )
    select *, lag(range) over line is null as is_first, lead(range) over line is null as is_last
    from ranges window line as (partition by task, name order by range)
    order by task, name, range
    """
)


# --- datablocks ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLine:
    """A version of a datablock in a list; `holders` is the number of tasks that need it.

    `request_id` is the request that published it; None if it was uploaded.
    """

    row: Datablock
    tenant: str
    user: str
    request_id: str | None
    holders: int


def datablocks(
    session: Session, tenant: str | None, *, before: str | None = None, limit: int = 50
) -> list[BlockLine]:
    """Return versions that are not deleted, newest first; `before` is the id of the last
    one seen.
    """
    query = (
        select(Datablock, Tenant.name, User.name, Task.request_id)
        .join(Tenant, Tenant.id == Datablock.tenant_id)
        .join(User, User.id == Datablock.user_id)
        .outerjoin(Task, Task.id == Datablock.task_id)
        .where(Datablock.deleted_at.is_(None))
        .order_by(Datablock.id.desc())
        .limit(limit)
    )
    if tenant is not None:
        query = query.where(Datablock.tenant_id == tenant)
    if before is not None:
        query = query.where(Datablock.id < before)
    rows = session.execute(query).all()
    needed = blocks.holders(session, [row.id for row, *_ in rows])
    return [
        BlockLine(row=row, tenant=owner, user=user, request_id=request, holders=needed[row.id])
        for row, owner, user, request in rows
    ]
