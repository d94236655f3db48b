"""Reads the tenant tree from rows: tenants below and above a tenant, and guarantees along the tree.

The edges are `Tenant.parent_id`; there is one root. A transaction that changes an edge or a
guarantee holds `lock` until its commit. Otherwise two changes, each valid alone, could make an
invalid tree together. `app.core` defines how a tree shares devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, any_, bindparam, select, text
from sqlalchemy.orm import InstrumentedAttribute, Session

from app.core.model.provisions.network_policy import Destination, destinations, effective
from app.db.models import Tenant

ALL = "*"  # in a limit: devices of all kinds together

_LOCK = 0x74726565  # key of an advisory lock; unique in this database

Devices = dict[str, int]  # kind -> how many


def lock(session: Session) -> None:
    """Take the right to change the tree; it is held until this transaction ends.

    This locks no row: submits lock rows of tenants in another order, which could deadlock.
    """
    session.execute(text("select pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})


_BELOW = """(array(
    with recursive below as (
        select id from tenants where id = :top
        union select t.id from tenants t join below on t.parent_id = below.id
    ) select id from below
))"""


def within(tenant_id: InstrumentedAttribute[Any], top: str) -> ColumnElement[bool]:
    """Return a condition: the row belongs to the tenant `top` or to one below it.

    It is an array and not a join, so that an index that begins with the tenant can be used.
    """
    return tenant_id == any_(text(_BELOW).bindparams(bindparam("top", top, unique=True)))


@dataclass(frozen=True, slots=True)
class OnPath:
    """A tenant on the path up to the root, with its settings that also bind the tenants below it.

    The scheduler reads weights, guarantees and limits itself.
    """

    id: str
    name: str
    tier: str
    max_queued: int | None
    network: list[str] | None = None


def network_of(path: Iterable[OnPath]) -> tuple[Destination, ...]:
    """Return what tasks of the first tenant on the path may reach."""
    own = (tenant.network for tenant in path)
    return effective(None if listed is None else destinations(listed) for listed in own)


#: From the tenant :id up to the root.
WAY = """way as (
    select 0 as up, id, parent_id, name, tier, max_queued, network from tenants where id = :id
    union all
    select way.up + 1, t.id, t.parent_id, t.name, t.tier, t.max_queued, t.network
    from tenants t join way on t.id = way.parent_id
)"""
_PATH = text(
    f"with recursive {WAY} select id, name, tier, max_queued, network from way order by up"
)


def path(session: Session, id: str) -> list[OnPath]:
    """Return the tenant and all tenants above it, the root last."""
    return [OnPath(*row) for row in session.execute(_PATH, {"id": id})]


# --- guarantees ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """A tenant's guarantee for a kind, if it has one, and the sum of its children's guarantees."""

    tenant: str
    kind: str
    own: int | None
    below: int

    @property
    def counts(self) -> int:
        """The part that the tenant takes of its parent's guarantee."""
        return self.below if self.own is None else self.own

    @property
    def broken(self) -> bool:
        return self.own is not None and self.below > self.own


class Promises:
    """The guarantees of a whole tree, as they are in this transaction."""

    def __init__(self, session: Session) -> None:
        columns = (Tenant.id, Tenant.parent_id, Tenant.name, Tenant.guarantee)
        self._tenants = {row.id: row for row in session.execute(select(*columns))}
        self._children: dict[str | None, list[str]] = defaultdict(list)
        for row in self._tenants.values():
            self._children[row.parent_id].append(row.id)
        self._by_kind: dict[str, dict[str, Promise]] = {}
        for id in self._leaves_first():
            self._by_kind[id] = {promise.kind: promise for promise in self._of(id)}

    def counts(self, id: str) -> Devices:
        """Return the guarantees of the tenant and the tenants below it, by kind."""
        return {kind: promise.counts for kind, promise in self._by_kind[id].items()}

    def broken(self, id: str, *, up_to: str | None = None) -> Iterator[Promise]:
        """Yield guarantees that are less than the sum of the children's guarantees.

        It looks at the tenant and the tenants above it, up to `up_to` or the root, the nearest
        first.
        """
        at: str | None = id
        while at is not None:
            yield from (promise for promise in self._by_kind[at].values() if promise.broken)
            at = None if at == up_to else self._tenants[at].parent_id

    def _leaves_first(self) -> Iterable[str]:
        found = list(self._children[None])
        for id in found:  # the list grows while it is walked, level by level
            found += self._children[id]
        return reversed(found)

    def _of(self, id: str) -> Iterator[Promise]:
        row, below = self._tenants[id], defaultdict[str, int](int)
        for child in self._children[id]:
            for kind, devices in self.counts(child).items():
                below[kind] += devices
        for kind in sorted({*row.guarantee, *below}):
            own = row.guarantee.get(kind)
            yield Promise(tenant=row.name, kind=kind, own=own, below=below[kind])
