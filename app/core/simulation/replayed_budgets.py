"""Replays budgets: counts what imaginary tasks are charged, and says what is in force.

It does on the virtual clock what the ledger and control do: charges are split where a period ends,
and the strictest action whose percentage is reached holds until the next period. Control looks
every two seconds; here it acts at the very µs, so a replay spends no more than the pauses take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from app.core.fairness import budget
from app.core.fairness.budget import ALL, Budget, Period, Spending

NOTIFY: budget.Action = "notify"


class Charged(NamedTuple):
    """Says what a task was charged over the last `over_us`, in micro-device-seconds."""

    user: str
    tenant: str
    kind: str
    over_us: int
    charged_us: int


class Rate(NamedTuple):
    """Says what a running task is charged, in thousandths of a device."""

    user: str
    tenant: str
    kind: str
    milli: int


class InForce(NamedTuple):
    """Says what the budget of a tenant or user has put in force by kind, and until when."""

    owner: str
    actions: Mapping[str, str]
    ends_s: float


@dataclass(slots=True)
class ReplayedBudgets:
    """Knows the budgets by the id of their tenant or user, and what is spent of them.

    `parents` are the tenants above each tenant. The virtual clock is at 0 at `begins_us`, in µs
    since 1970. A period that has begun before is unspent.
    """

    budgets: Mapping[str, Budget]
    parents: Mapping[str, str | None]
    begins_us: int = 0
    spent_us: Counter[tuple[str, str, Period]] = field(default_factory=Counter)
    carried_us: dict[tuple[str, str, Period], int] = field(default_factory=dict)
    _in_force: dict[str, InForce] = field(default_factory=dict)

    def spend(self, charged: Charged, now_us: int) -> None:
        """Count a charge that ends now in all budgets above its task."""
        for owner in self.owners(charged.user, charged.tenant):
            it = self.budgets[owner]
            for kind in {charged.kind, ALL} & it.grants_us.keys():
                ends_us = self.begins_us + now_us
                for period, us in it.shares(charged.over_us, charged.charged_us, ends_us):
                    self.spent_us[owner, kind, period] += us

    def look(self, now_us: int) -> Iterator[InForce]:
        """Yield what is in force now, for each budget for which that has changed."""
        for owner, it in self.budgets.items():
            period = it.period_at(self.begins_us + now_us)
            spendings = {kind: self.spending(owner, kind, period) for kind in it.grants_us}
            actions = budget.actions(it, spendings)
            now = InForce(owner, actions, (period.ends_us - self.begins_us) / 1e6)
            if actions != self._in_force.get(owner, InForce(owner, {}, 0.0)).actions:
                yield now
            self._in_force[owner] = now

    def spending(self, owner: str, kind: str, period: Period) -> Spending:
        """Return what is spent of one kind in a period, with what the period before has left."""
        it = self.budgets[owner]
        key = owner, kind, period
        if key not in self.carried_us:
            self.carried_us[key] = 0
            if period.begins_us > self.begins_us and it.carry_milli:
                before = self.spending(owner, kind, it.period_at(period.begins_us - 1))
                self.carried_us[key] = budget.carried_us(it, before)
        return Spending(
            granted_us=it.grants_us[kind],
            carried_us=self.carried_us[key],
            spent_us=self.spent_us[key],
        )

    def next_us(self, now_us: int, running: Iterable[Rate]) -> int | None:
        """Return when something else will be in force, if the same tasks run on; None: never."""
        at_us = self.begins_us + now_us
        rates = Counter[tuple[str, str]]()
        for user, tenant, kind, milli in running:
            for owner in self.owners(user, tenant):
                rates[owner, kind] += milli
                rates[owner, ALL] += milli
        found = []
        for owner, it in self.budgets.items():
            period = it.period_at(at_us)
            now = self._in_force.get(owner)
            if now is not None and any(it.grants_us[kind] for kind in now.actions):
                found.append(period.ends_us)  # a grant of nothing stays used
            for kind in it.grants_us:
                if not (rate := rates[owner, kind]):
                    continue
                spending = self.spending(owner, kind, period)
                missing = (spending.until_us(p) for p, action in it.at.items() if action != NOTIFY)
                found += [at_us + -(-us * 1000 // rate) for us in missing if us > 0]
        return min(found) - self.begins_us if found else None

    def owners(self, user: str, tenant: str) -> Iterator[str]:
        """Yield the user and the tenants, from its own upwards, that have budgets."""
        if user in self.budgets:
            yield user
        above: str | None = tenant
        while above is not None:
            if above in self.budgets:
                yield above
            above = self.parents.get(above)
