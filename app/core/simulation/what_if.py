"""Run a simulation under a named policy, and report its result as plain values.

The report is a dictionary for JSON; docs/reference/simulation.md explains each key.  There are two
waiting times: until the first start, and in total (`lost`: end minus arrival minus work, so pauses
and switches count).  `core.fairness.water_filling` computes what each tenant is owed: at each time
every kind's devices are divided by weight, guarantee, limit and what is wanted then.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from app.core.fairness import water_filling
from app.core.fairness.budget import Budget
from app.core.fairness.fair_tree import ALL
from app.core.model.device_choice import choice_in
from app.core.model.snapshot import BoardDevice, BoardTenant, BoardUser, Policy
from app.core.scheduling.gangs.even_hosts import hosts_with
from app.core.simulation.device_meter import Interval, Key
from app.core.simulation.replayed_lot import LotRule
from app.core.simulation.replayed_reservations import Maintained, ReservedFor
from app.core.simulation.simulator import Arrival, Costs, Report, simulate

#: policy -> (one queue for all tenants?, may tasks be paused?, which tasks may pass a waiting gang)
POLICIES: Mapping[str, tuple[bool, bool, str]] = {
    "fair": (False, True, "easy"),
    "fair-easy": (False, False, "easy"),
    "fair-strict": (False, False, "strict"),
    "fair-greedy": (False, False, "greedy"),
    "fifo": (True, False, "strict"),
    "fifo-easy": (True, False, "easy"),
    "fifo-greedy": (True, False, "greedy"),
}

WIDTHS = (1, 2, 8, 16)  # the least number of devices of each width class
SHORT_S = 600.0  # a bounded slowdown counts shorter jobs as this long
CURVE = 100  # number of equal parts of a distribution

Value = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The input of a replay.  `users` need only hold users with a weight other than 1."""

    arrivals: Sequence[Arrival]
    devices: Sequence[BoardDevice]
    tenants: Sequence[BoardTenant]
    users: Sequence[BoardUser] = ()
    policy: Policy = field(default_factory=Policy)
    named: str = "fair"
    costs: Costs = field(default_factory=Costs)
    until_s: float = math.inf
    lots: Mapping[str, LotRule] = field(default_factory=dict)  # those with a rule `stop`
    budgets: Mapping[str, Budget] = field(default_factory=dict)  # of tenants and users, by id
    reserved: Sequence[ReservedFor] = ()
    maintained: Sequence[Maintained] = ()
    begins_us: int = 0  # when its clock is at 0, in µs since 1970, for budgets and reservations


def run(setup: Setup, *, go_on: Callable[[], bool] = lambda: True) -> tuple[Report, Value]:
    """Replay the setup with the engine of an island, without tasks that need more than there is.

    `go_on` is called in each round; raises `simulator.Stopped` when it returns False.
    """
    fitting = _fitting(setup)
    in_line, tenants, users, reserved = fitting, setup.tenants, setup.users, setup.reserved
    if POLICIES[setup.named][0]:
        in_line = [replace(a, tenant=_ALL, user=_ALL, owner=a.tenant) for a in fitting]
        tenants, users = (BoardTenant(id=_ALL, name=_ALL, weight=1000),), ()
        # nobody is promised anything, but tasks wait for the windows that they name
        reserved = [each._replace(owners=()) for each in setup.reserved]
    report = simulate(
        in_line,
        setup.devices,
        tenants,
        policy(setup.named, setup.policy),
        costs=setup.costs,
        until_s=setup.until_s,
        checked=False,
        keep_timeline=False,
        users=users,
        lots=setup.lots,
        budgets=setup.budgets,
        reserved=reserved,
        maintained=setup.maintained,
        begins_us=setup.begins_us,
        go_on=go_on,
    )
    return report, summary(setup, fitting, report)


_ALL = "all"


def policy(named: str, given: Policy) -> Policy:
    """Return the given policy under this name; without pauses, patience never ends."""
    _, turns, backfill = POLICIES[named]
    patience_s = given.patience_s if turns else math.inf
    return replace(given, turns=turns, backfill=backfill, patience_s=patience_s)


def _fitting(setup: Setup) -> list[Arrival]:
    """Return the arrivals that could start and that need none that could not."""
    counted: dict[tuple[str, int, str], int] = {}
    out = set[str]()
    for arrival in setup.arrivals:
        need = arrival.kind, arrival.memory_bytes, arrival.choice
        if need not in counted:
            choice = choice_in(arrival.choice)
            counted[need] = sum(
                device.kind == arrival.kind
                and device.memory_bytes >= arrival.memory_bytes
                and choice.suits(device.traits)
                for device in setup.devices
            )
        if arrival.width > counted[need] or not _has_hosts(setup, arrival):
            out.add(arrival.task)
    found = out
    while found:
        found = {a.task for a in setup.arrivals if not out.isdisjoint(a.after)} - out
        out |= found
    return [arrival for arrival in setup.arrivals if arrival.task not in out]


def _has_hosts(setup: Setup, arrival: Arrival) -> bool:
    """True if as many hosts as the arrival names have its devices, as many on each."""
    if not (choice := choice_in(arrival.choice)).hosts:
        return True
    on = Counter(
        device.host
        for device in setup.devices
        if device.kind == arrival.kind
        and device.memory_bytes >= arrival.memory_bytes
        and choice.suits(device.traits)
    )
    return hosts_with(on, hosts=choice.hosts, width=arrival.width) >= choice.hosts


# --- the report ---------------------------------------------------------------------------------


def summary(setup: Setup, fitting: Sequence[Arrival], report: Report) -> Value:
    """Return all figures of a replay, as docs/reference/simulation.md lists them."""
    by_tenant: dict[str, list[Arrival]] = defaultdict(list)
    by_width: dict[int, list[Arrival]] = defaultdict(list)
    for arrival in fitting:
        by_tenant[arrival.tenant].append(arrival)
        by_width[max(least for least in WIDTHS if least <= arrival.width)].append(arrival)
    shares = _TenantShares(setup, report)
    total_s = math.fsum(report.device_s.values())
    capacity_s = len(setup.devices) * report.until_s
    return {
        "policy": setup.named,
        "devices": dict(sorted(Counter(device.kind for device in setup.devices).items())),
        "left_out": len(setup.arrivals) - len(fitting),
        **_figures(fitting, report),
        "lasted_s": round(report.until_s, 3),
        "device_h": _hours(total_s),
        "utilisation": round(total_s / capacity_s, 4) if capacity_s else 0.0,
        "fairness_error": shares.error(),
        "tenants": [
            {
                "tenant": tenant.name,
                "weight": tenant.weight / 1000,
                **_figures(by_tenant[tenant.id], report),
                "device_h": _hours(report.device_s.get(tenant.id, 0.0)),
                **shares.of(tenant.id),
            }
            for tenant in setup.tenants
            if tenant.id in by_tenant
        ],
        "widths": [
            {"devices": _class(least), **_figures(by_width[least], report)}
            for least in WIDTHS
            if least in by_width
        ],
        "lost_curve_s": _curve(report.lost_s.values()),
        "over_time": shares.over_time(),
    }


def _figures(arrivals: Sequence[Arrival], report: Report) -> Value:
    done = [arrival for arrival in arrivals if arrival.task in report.finished]
    waits = [report.waits_s[a.task] for a in arrivals if a.task in report.waits_s]
    slowdowns = sorted(
        (report.lost_s[a.task] + max(a.work_s, SHORT_S)) / max(a.work_s, SHORT_S) for a in done
    )
    return {
        "jobs": len(arrivals),
        "finished": len(done),
        "pauses": sum(report.pauses.get(arrival.task, 0) for arrival in arrivals),
        "resizes": sum(report.resizes.get(arrival.task, 0) for arrival in arrivals),
        "wait_s": spread(waits),
        "lost_s": spread(report.lost_s[arrival.task] for arrival in done),
        "slowdown": {
            "p50": _rounded(quantile(slowdowns, 50)),
            "p95": _rounded(quantile(slowdowns, 95)),
        },
    }


def spread(values: Iterable[float]) -> Value:
    """Return mean and quantiles; null without values."""
    ordered = sorted(values)
    mean = math.fsum(ordered) / len(ordered) if ordered else None
    return {
        "mean": _rounded(mean),
        **{f"p{percent}": _rounded(quantile(ordered, percent)) for percent in (50, 95, 99)},
        "max": _rounded(ordered[-1] if ordered else None),
    }


def quantile(ordered: Sequence[float], percent: int) -> float | None:
    """Return the least value that is at or above `percent` percent of all (nearest rank)."""
    if not ordered:
        return None
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]


def _curve(values: Iterable[float]) -> list[float]:
    """Return quantiles from the least to the greatest, in equal parts."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return [round(ordered[n * last // CURVE], 3) for n in range(CURVE + 1)] if ordered else []


def _class(least: int) -> str:
    above = [other for other in WIDTHS if other > least]
    if not above:
        return f"{least}+"
    return str(least) if above[0] == least + 1 else f"{least}-{above[0] - 1}"


def _hours(seconds: float) -> float:
    return round(seconds / 3600, 3)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


# --- shares -------------------------------------------------------------------------------------


class _TenantShares:
    """Compares, for each interval, the devices that each tenant held with those it was owed."""

    def __init__(self, setup: Setup, report: Report) -> None:
        self._names = {tenant.id: tenant.name for tenant in setup.tenants}
        self._devices = len(setup.devices)
        self._lengths_s = [interval.lasts_s for interval in report.intervals]
        self._wanted = [sum(interval.wanted.values()) for interval in report.intervals]
        self._held = [_by_tenant(interval.held) for interval in report.intervals]
        self._owed = [_owed(setup, interval) for interval in report.intervals]
        self._held_s, self._owed_s = self._sums(self._held), self._sums(self._owed)

    def _sums(self, amounts: list[dict[str, float]]) -> dict[str, float]:
        """Return device-seconds by tenant."""
        found: dict[str, float] = defaultdict(float)
        for by_tenant, lasts_s in zip(amounts, self._lengths_s, strict=True):
            for tenant, amount in by_tenant.items():
                found[tenant] += amount * lasts_s
        return found

    def of(self, tenant: str) -> Value:
        """Return the tenant's part of all device time, and the part that it was owed."""
        share, fair = _part(self._held_s, tenant), _part(self._owed_s, tenant)
        return {
            "share": round(share, 4),
            "fair_share": round(fair, 4),
            "share_error": round(share - fair, 4),
        }

    def error(self) -> float:
        """Return the mean part of all devices that a tenant was owed and did not hold."""
        lacking_s = math.fsum(
            lasts_s * sum(max(0.0, part - held.get(id, 0.0)) for id, part in owed.items())
            for lasts_s, owed, held in zip(self._lengths_s, self._owed, self._held, strict=True)
        )
        capacity_s = math.fsum(self._lengths_s) * self._devices
        return round(lacking_s / capacity_s, 4) if capacity_s else 0.0

    def over_time(self) -> Value:
        """Return mean devices held by each tenant, and wanted by all, in intervals of `every_s`."""
        return {
            "every_s": self._lengths_s[0] if self._lengths_s else 0.0,
            "wanted": [round(wanted, 3) for wanted in self._wanted],
            "held": {
                name: [round(held.get(id, 0.0), 3) for held in self._held]
                for id, name in self._names.items()
                if id in self._held_s
            },
        }


def _part(seconds: Mapping[str, float], tenant: str) -> float:
    whole_s = math.fsum(seconds.values())
    return seconds.get(tenant, 0.0) / whole_s if whole_s else 0.0


def _by_tenant(amounts: Mapping[Key, float]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for (tenant, _), amount in amounts.items():
        found[tenant] += amount
    return dict(found)


def _owed(setup: Setup, interval: Interval) -> dict[str, float]:
    owed: dict[str, float] = defaultdict(float)
    for kind, devices in Counter(device.kind for device in setup.devices).items():
        # what a budget keeps from a tenant is not owed to it
        wanted = {
            tenant: max(0.0, amount - interval.barred.get((tenant, k), 0.0))
            for (tenant, k), amount in interval.wanted.items()
            if k == kind
        }
        for tenant, part in owed_by_tree(devices, kind, setup.tenants, wanted).items():
            owed[tenant] += float(part)
    return dict(owed)


def owed_by_tree(
    devices: int, kind: str, tenants: Iterable[BoardTenant], wanted: Mapping[str, float]
) -> dict[str, Fraction]:
    """Return how many devices of a kind each tenant that wants some is owed now.

    If a tenant has children, its own demand counts like a child of weight 1.
    """
    of = {tenant.id: tenant for tenant in tenants}
    below: dict[str | None, dict[str, None]] = defaultdict(dict)
    for id in wanted:
        at: str | None = id
        while at is not None:
            below[of[at].parent][at] = None
            at = of[at].parent

    def branch(id: str) -> water_filling.Claimant:
        demand = Fraction(round(wanted.get(id, 0.0) * 1000), 1000)
        children = {child: branch(child) for child in below.get(id, ())}
        if children and demand:
            children[_ITSELF] = water_filling.Claimant(demand=demand)
        return water_filling.Claimant(
            weight=Fraction(of[id].weight, 1000),
            demand=0 if children else demand,
            guarantee=of[id].guarantee.get(kind, 0),
            limit=min((of[id].limit[k] for k in (kind, ALL) if k in of[id].limit), default=None),
            children=children,
        )

    parts = water_filling.divide_tree(devices, {id: branch(id) for id in below[None]})
    return {
        path[-1] or path[-2]: part
        for path, part in parts.items()
        if path[-1] == _ITSELF or not below.get(path[-1])
    }


_ITSELF = ""
