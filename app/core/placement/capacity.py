"""Computes the capacity of an island that a tenant can count on, for `core.placement.islands`.

By fair share a tenant's work runs beside that of all other tenants with work there, each at the
speed of its part of the devices (rules F3, F4). So new work ends when the tenant's own queue has
been worked off at that speed, or when all queues have been, if that is sooner, because no device is
left idle.

Times are nanoseconds of one device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from app.core.model.snapshot import BoardTenant
from app.core.placement.islands import KindCapacity

Tenants = Mapping[str, BoardTenant]


@dataclass(slots=True)
class Stock:
    """Describes an island's devices of one kind, and the work that every tenant has queued for
    them.

    `rivals` is the total weight of the tenants with work there, by parent. It is updated when work
    is added, so that `room` costs only the depth of the tree.
    """

    kind: str
    devices: int
    queued_ns: Counter[str] = field(default_factory=Counter)
    total_ns: int = 0
    present: set[str] = field(default_factory=set)
    rivals: Counter[str | None] = field(default_factory=Counter)

    def add(self, tenant: str, work_ns: int, tenants: Tenants) -> None:
        """Add work that a tenant has queued there."""
        self.queued_ns[tenant] += work_ns
        self.total_ns += work_ns
        for one in _upwards(tenant, tenants):
            if one.id in self.present:
                break
            self.present.add(one.id)
            self.rivals[one.parent] += one.weight

    def part(self, tenant: str, tenants: Tenants) -> Fraction:
        """Return the tenant's fair share of the devices among all tenants with work there."""
        weight, rivals = self.devices, 1
        for one in _upwards(tenant, tenants):
            itself = 0 if one.id in self.present else one.weight
            weight *= one.weight
            rivals *= self.rivals[one.parent] + itself
        owed = tenants[tenant].guarantee.get(self.kind, 0)
        return max(Fraction(weight, rivals), Fraction(min(owed, self.devices)))

    def room(self, tenant: str, work_ns: int, tenants: Tenants) -> KindCapacity:
        """Return the capacity that a tenant with this much new work finds."""
        part = self.part(tenant, tenants)
        alone_ns = (self.queued_ns[tenant] + work_ns) * part.denominator // part.numerator
        ends_ns = min(alone_ns, (self.total_ns + work_ns) // self.devices)
        lanes = max(1, int(part))
        busy_ns = max(0, ends_ns - work_ns // lanes)
        return KindCapacity(devices=self.devices, share=lanes, busy_ns=busy_ns)


def _upwards(tenant: str, tenants: Tenants) -> Iterator[BoardTenant]:
    """Yield the tenant and its ancestors."""
    at: str | None = tenant
    while at is not None:
        yield tenants[at]
        at = tenants[at].parent
