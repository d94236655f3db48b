"""Reports shares of tenants: their part by weight, what they hold, and which of them go first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from fractions import Fraction
from typing import Any

from sqlalchemy import Select, and_, func, select, text
from sqlalchemy.dialects.postgresql import distinct_on
from sqlalchemy.orm import Session

from app.core.fairness import usage_decay
from app.core.fairness.reservation import owed
from app.core.fairness.water_filling import Claimant, divide_tree
from app.core.model.device_choice import WHOLE_MILLI
from app.core.units import counted
from app.db import tenant_tree
from app.db.models import Account, Device, Host, LedgerBase, Lift, Placement, Task, Tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class KindShare:
    """Describes the share of one tenant, with those below it, in one kind of device.

    `devices` is the number of devices that are up and take work. `by_weight` is the tenant's part
    of them if every tenant had work. `fair` is its part now, among the tenants that have work, by
    guarantee, limit and weight. `held` is the number that its tasks hold; `borrowed` of them exceed
    its guarantee. `by_memory` of them are charged by the memory that is reserved on them, their
    dominant resource. `waiting` counts the tasks that could start at once.

    `idle_us` is the tenant's idle credit: usage of that kind that it is assumed to have had while
    it had no work, decayed to now. It adds to `usage_us` when the order of tenants is decided, and
    is never charged.
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
    it was ever charged, in micro-device-seconds times cost.  `score` is `usage_us`, with what a
    changed weight carries over, over `weight`: among tenants with the same `parent_id`, the lower
    score goes first.  `depth` counts the tenants above it that own a share.
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
    tree, work = _Tree(session), _TenantWork(session)
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
        shares.append(
            _tenant_share(
                tree,
                row,
                kinds,
                usage_us=_usage_now_us(faded, base, now),
                counted_us=_usage_now_us(faded + int(row.carried), base, now),
                total_us=total_us,
            )
        )
    return shares


def _kind_share(
    row: Any, kind: str, *, devices: int, part: Fraction, fair: Fraction, held: int, **more: int
) -> KindShare:
    guarantee = _guarantee(row, kind)
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
    tree: _Tree,
    row: Any,
    kinds: tuple[KindShare, ...],
    *,
    usage_us: int,
    counted_us: int,
    total_us: int,
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
        score=counted_us / weight,
        kinds=kinds,
    )


def _limit(row: Any, kind: str) -> int | None:
    """Return the limit for one kind; a limit on all kinds together applies to each of them, too."""
    limits = [row.limit[each] for each in (kind, tenant_tree.ALL) if each in row.limit]
    return min(limits, default=None)


def _guarantee(row: Any, kind: str) -> int:
    """Return what is guaranteed to a tenant now, by its quota and by reservations."""
    return owed(row.guarantee, *row.reserved.values()).get(kind, 0)


class _Tree:
    """The tenants that own shares, and how they lie below each other."""

    def __init__(self, session: Session) -> None:
        columns = (
            Tenant.id,
            Tenant.name,
            Tenant.parent_id,
            Tenant.weight_milli,
            Tenant.carried,
            Tenant.guarantee,
            Tenant.reserved,
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
        """Return the tenant's ids from the top down.

        The root is not on the path of other tenants, as it owns no share.
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


class _TenantWork:
    """Counts the work of tenants; the journal keeps the counts of waiting tasks (`lines`).

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
    .where(
        Placement.ended_at.is_(None),
        ~Placement.guest,
        Task.cost_milli > 0,
        Placement.fraction_milli == WHOLE_MILLI,
    )
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
    tenants: _Tree, work: _TenantWork, kind: str, devices: int
) -> dict[tuple[str, ...], Fraction]:
    """Divide the devices of one kind fairly among the tenants and users that have work.

    The result is the share of each of them in devices, by path.
    """

    def branch(id: str) -> Claimant | None:
        row = tenants.rows[id]
        mine: dict[str, Claimant] = {
            user: Claimant(weight=weight, demand=wanted)
            for user, (weight, wanted) in work.wanted.get((id, kind), {}).items()
        }
        below = () if id in tenants.roots else tenants.children[id]
        mine |= {child: made for child in below if (made := branch(child)) is not None}
        if not mine:
            return None
        return Claimant(
            weight=row.weight_milli,
            guarantee=_guarantee(row, kind),
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
    """Sum up all other tenants as one without a name; a tenant may know no more about them."""
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
    """Select for each device the placement that holds it.

    A task that was told to leave holds its device until it has left.  If tasks share a device, the
    task that came first counts.
    """
    return select_holders().ext(distinct_on(Placement.device_id))


def select_holders() -> Select[Placement]:
    order = (Placement.device_id, Placement.leaving.desc(), Placement.id)
    return select(Placement).where(Placement.ended_at.is_(None)).order_by(*order)


def _accounts(session: Session) -> dict[str, tuple[int, int]]:
    """Return two sums for each tenant, in microseconds: the decayed usage of its own users, and all
    that they were ever charged.
    """
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
    return usage_decay.usage_us(
        faded, now_s=now.timestamp(), since_s=base.since_s, half_life_s=base.half_life_s
    )


def verdict(share: TenantShare, shares: Sequence[TenantShare]) -> str:
    """Say in short sentences what the tenant uses, what is queued and which tenants go first.

    `shares` are those of all tenants. The scheduler compares usage over weight, not what is held,
    so a tenant that holds little may still come after others.
    """
    devices = sum(kind.devices for kind in share.kinds)
    if not devices:
        return f"No device takes work now. {_waiting_tasks(share.waiting)}."
    if not share.held and not share.waiting:
        entitled = sum(kind.by_weight for kind in share.kinds)
        return (
            f"Nothing of yours runs or is queued. By weight, {number(entitled)} of "
            f"{counted(devices, 'device')} {('is' if entitled == 1 else 'are')} yours, plus idle "
            "devices of others."
        )
    return (
        f"{share.held} of {counted(devices, 'device')} in use by you. "
        f"{_waiting_tasks(share.waiting)}.{_so(share, shares)}"
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
        said = {_first_sentence(kind, rest) for kind in waited}
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
    """Yield the competing tenants, each with the score of this side with which it is compared.

    On each level that is the score of the tenant itself or of its ancestor there.
    """
    by_id = {each.id: each for each in shares}
    mine: TenantShare | None = share
    while mine is not None:
        for other in shares:
            if other.parent_id == mine.parent_id and other.id != mine.id:
                yield mine.score, other
        mine = by_id.get(mine.parent_id or "")


def _first_sentence(kind: KindShare, rest: Sequence[tuple[float, TenantShare]]) -> str:
    """Return a sentence on one kind for which the tenant waits, by rules F3 and F6 and the booked
    usage.
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
    """Say who runs first for a platform administrator, about all tenants."""
    kinds = shares[0].kinds if shares else ()
    devices = sum(kind.devices for kind in kinds)
    tops = [share for share in shares if not share.depth]
    held, waiting = sum(share.held for share in tops), sum(share.waiting for share in tops)
    busy = sum(1 for share in shares if share.held or share.waiting)
    tenants = f"{busy} of {counted(len(shares), 'tenant')} {'has' if busy == 1 else 'have'} work"
    return f"{held} of {counted(devices, 'device')} in use. {tenants}. {_waiting_tasks(waiting)}."


def number(value: float) -> str:
    """Format with at most two digits after the point, and without trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _waiting_tasks(waiting: int) -> str:
    """Count queued and preempted tasks together."""
    if not waiting:
        return "No task waits"
    return f"{counted(waiting, 'task')} {'waits' if waiting == 1 else 'wait'}"
