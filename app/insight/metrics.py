"""Computes Prometheus metrics of queue, shares, devices, islands and checkpoints from rows.

Schedulers and devices are other processes, on other hosts, so all figures come from Postgres, and
every API process reports the same: take their maximum, not their sum. Figures of a single API
process are in `app.api.metrics`.

A scrape reads sums that exist anyway: `lines` instead of waiting tasks, open placements, tallies.
The number of series is the number of tenants times device kinds, for at most `metrics_tenants_max`
tenants. No series is for a single user, request or task.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from sqlalchemy import and_, case, func, literal_column, select, text
from sqlalchemy.orm import Session

from app.db.lines import IN_LINE
from app.db.models import (
    AuditEvent,
    Checkpoint,
    Delivery,
    Device,
    Host,
    Island,
    OutboxOrder,
    Task,
)
from app.insight import reports
from app.insight.counters import (
    CAME,
    NETWORK,
    ROUND_BOUNDS_S,
    ROUNDS,
    ROUNDS_US,
    SWITCH_US,
    SWITCHES,
    TOLD,
)
from app.insight.reports import TenantShare
from app.settings import settings

KEPT_S = 5.0  # minimum age at which figures are read again
MOST_OF_A_CORE = 0.1  # part of a core that reading may take; slow reads are repeated less often
TIME_LIMIT_MS = 10_000
RECENT = timedelta(minutes=10)  # rows of checkpoints are kept at least this long
QUANTILES = (0.5, 0.95, 1.0)
US = 1e-6


class FigureCache:
    """Caches the newest figures, and reads them again if they are too old; one thread reads, others
    wait.

    Shares are computed exactly, which takes seconds for ten thousand tenants with work.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: list[Metric] = []
        self._until_s = 0.0  # by the monotonic clock

    def newest(self, session: Session) -> list[Metric]:
        with self._lock:
            if (began_s := time.monotonic()) >= self._until_s:
                self._found = read(session)
                took_s = time.monotonic() - began_s
                self._until_s = began_s + max(KEPT_S, took_s / MOST_OF_A_CORE)
            return self._found

    def forget(self) -> None:
        self._until_s = 0.0


figures = FigureCache()


def read(session: Session) -> list[Metric]:
    began_s = time.monotonic()
    session.execute(text(f"set local statement_timeout = {TIME_LIMIT_MS}"))
    now = reports.clock(session)
    found = [
        *_tenants(session, now),
        *_devices(session, now),
        *_health(session, now),
        *_islands(session, now),
        *_network(session),
        *_checkpoints(session, now),
        _audit(session),
        _messages(session),
    ]
    took = _gauge("roundhouse_reading_seconds", "Time to read these figures.")
    took.add_metric([], time.monotonic() - began_s)
    return [*found, took]


def _gauge(name: str, told: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, told, labels=labels)


def _counter(name: str, told: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(name, told, labels=labels)


# --- tenants ------------------------------------------------------------------------------------

_BY_KIND: dict[str, tuple[str, Callable[[reports.KindShare], float | None]]] = {
    "waiting_tasks": ("Tasks that could start at once.", lambda kind: kind.waiting),
    "held_devices": ("Devices under its tasks.", lambda kind: kind.held),
    "fair_devices": ("Its current entitlement, among tenants with work.", lambda kind: kind.fair),
    "guaranteed_devices": ("Its guaranteed devices.", lambda kind: kind.guarantee),
    "limit_devices": ("Its maximum number of devices, if it has a limit.", lambda kind: kind.limit),
    "borrowed_devices": ("Devices held beyond its guarantee.", lambda kind: kind.borrowed),
}
_IN_ALL: dict[str, tuple[Callable[..., Any], str, Callable[[TenantShare], float]]] = {
    "usage_seconds": (
        GaugeMetricFamily,
        "Decayed usage, in device-seconds times cost.",
        lambda share: share.usage_us * US,
    ),
    "score_seconds": (
        GaugeMetricFamily,
        "Usage divided by weight: the sibling with the lower value goes first.",
        lambda share: share.score * US,
    ),
    "charged_seconds": (
        CounterMetricFamily,
        "Total charged usage, in device-seconds times cost.",
        lambda share: share.total_us * US,
    ),
}


def _tenants(session: Session, now: datetime) -> Iterator[Metric]:
    shares = list(_told_apart(reports.fair_share(session, now)))
    told = _told_of(shares)
    yield from _by_kind(told)
    yield from _in_all(told)
    yield from _waiting(shares, told, _up_the_tree(shares, _waits(session)))
    left_out = _gauge("roundhouse_tenants_left_out", "beyond ROUNDHOUSE_METRICS_TENANTS_MAX")
    left_out.add_metric([], len(shares) - len(told))
    yield left_out


def _told_apart(shares: list[TenantShare]) -> Iterator[TenantShare]:
    """Name each tenant by its path, "vision/faces".

    Names are unique among siblings only, and two series with equal labels would invalidate the
    scrape.
    """
    paths: dict[str | None, str] = {}
    for share in shares:  # parents come first
        name = share.tenant.replace("\\", "\\\\").replace("/", "\\/")
        above = paths.get(share.parent_id)
        paths[share.id] = name if above is None else f"{above}/{name}"
        yield replace(share, tenant=paths[share.id])


def _told_of(shares: list[TenantShare]) -> list[TenantShare]:
    """Return all tenants.

    If there are too many, those with the most devices and waiting tasks, then the most usage.
    """
    most = settings().metrics_tenants_max
    busy = sorted(shares, key=lambda share: (-share.held - share.waiting, -share.usage_us))
    return busy[:most]


def _by_kind(told: list[TenantShare]) -> Iterator[Metric]:
    for name, (what, of_kind) in _BY_KIND.items():
        family = _gauge(f"roundhouse_tenant_{name}", _below(what), "tenant", "level", "kind")
        for share in told:
            for kind in share.kinds:
                if (value := of_kind(kind)) is not None:
                    family.add_metric([*_tenant_labels(share), kind.kind], value)
        yield family


def _in_all(told: list[TenantShare]) -> Iterator[Metric]:
    for name, (made, what, of_share) in _IN_ALL.items():
        family = made(f"roundhouse_tenant_{name}", _below(what), labels=["tenant", "level"])
        for share in told:
            family.add_metric(_tenant_labels(share), of_share(share))
        yield family


def _below(what: str) -> str:
    return f"{what} Includes child tenants."


def _tenant_labels(share: TenantShare) -> list[str]:
    return [share.tenant, str(share.depth)]


Waits = Mapping[tuple[str, str], float]


def _waiting(shares: list[TenantShare], told: list[TenantShare], waits: Waits) -> Iterator[Metric]:
    heads = _gauge(
        "roundhouse_tenant_head_wait_seconds",
        _below(
            "How long the first task of a queue has waited, for the queue where that is longest."
        ),
        *("tenant", "level", "kind"),
    )
    for share in told:
        for kind in share.kinds:
            if (wait_s := waits.get((share.id, kind.kind))) is not None:
                heads.add_metric([*_tenant_labels(share), kind.kind], wait_s)
    yield heads
    tasks = _gauge("roundhouse_waiting_tasks", "Tasks that could start at once.", "kind")
    longest = _gauge("roundhouse_head_wait_seconds", "The same, for all tenants.", "kind")
    tops = [share for share in shares if not share.depth]
    for name in [kind.kind for kind in tops[0].kinds] if tops else ():
        waiting = (kind.waiting for top in tops for kind in top.kinds if kind.kind == name)
        tasks.add_metric([name], sum(waiting))
        longest.add_metric([name], max(waits.get((top.id, name), 0.0) for top in tops))
    yield from (tasks, longest)


# Reads only the first task of each line; the index for launches makes this fast.
_WAITS = text(
    f"""
    select l.tenant_id, l.kind, max(extract(epoch from now() - first.since))::float8
    from lines l cross join lateral (
        select coalesce(t.waiting_since, t.submitted_at) as since from tasks t
        where {IN_LINE} and t.state = 'waiting'
        order by t.priority desc, t.submitted_at, t.id limit 1
    ) first
    where l.waiting > 0
    group by 1, 2
    """
)


def _waits(session: Session) -> dict[tuple[str, str], float]:
    return {(tenant, kind): wait_s for tenant, kind, wait_s in session.execute(_WAITS)}


def _up_the_tree(shares: Iterable[TenantShare], waits: Waits) -> Waits:
    """Add the waits of lower tenants: a tenant waits as long as the longest wait below it.

    Lower tenants come after higher ones in `shares`.
    """
    found = defaultdict(float, waits)
    for share in reversed(list(shares)):
        for kind in share.kinds:
            mine, above = (share.id, kind.kind), (share.parent_id or "", kind.kind)
            if mine in found:
                found[above] = max(found[above], found[mine])
    return dict(found)


# --- devices and islands ------------------------------------------------------------------------


def _devices(session: Session, now: datetime) -> Iterator[Metric]:
    up = func.coalesce(Device.lease_until > now, False)
    state = case(
        (~up, "down"),
        (Device.cordoned | Host.cordoned, "cordoned"),
        (Device.facts["stopping"].as_boolean(), "stopping"),
        else_="up",
    )
    query = (
        select(Device.island, Device.kind, state, func.count())
        .join(Host, Host.name == Device.host)
        .group_by(Device.island, Device.kind, state)
    )
    counted = {(island, kind, is_): n for island, kind, is_, n in session.execute(query)}
    devices = _gauge(
        "roundhouse_devices", "Devices; up: takes new work.", "island", "kind", "state"
    )
    for island, kind in sorted({(island, kind) for island, kind, _ in counted}):
        for is_ in ("up", "cordoned", "stopping", "down"):
            devices.add_metric([island, kind, is_], counted.get((island, kind, is_), 0))
    yield devices
    ages = _gauge(
        "roundhouse_heartbeat_age_seconds",
        "Age of the oldest last heartbeat of all devices that are not down.",
        "island",
    )
    age_s = func.extract("epoch", now - func.min(Device.seen_at))
    for island, seconds in session.execute(
        select(Device.island, age_s).where(up, Device.seen_at.is_not(None)).group_by(Device.island)
    ):
        ages.add_metric([island], max(0.0, float(seconds)))
    yield ages


#: Figures of devices with a monitor, by island and kind: name -> (description, field of a reading,
#: how to sum it).
_HEALTH: dict[str, tuple[str, str, Any]] = {
    "utilisation_percent": ("Mean load of watched devices.", "utilisation_percent", func.avg),
    "memory_used_bytes": ("Memory in use on watched devices.", "memory_used_bytes", func.sum),
    "power_watts": ("Power that watched devices take.", "power_w", func.sum),
    "temperature_celsius": (
        "Temperature of the hottest watched device.",
        "temperature_c",
        func.max,
    ),
    "ecc_uncorrected": (
        "Uncorrectable memory errors of watched devices since their drivers were loaded.",
        "ecc_uncorrected",
        func.sum,
    ),
}


def _health(session: Session, now: datetime) -> Iterator[Metric]:
    reading = Device.health["reading"]
    sums = [of(reading[name].as_float()) for _, name, of in _HEALTH.values()]
    watched = select(Device.island, Device.kind, *sums, func.count()).where(
        Device.health.has_key("checked"), Device.lease_until > now
    )
    rows = session.execute(watched.group_by(Device.island, Device.kind)).all()
    gauges = [
        _gauge(f"roundhouse_device_{name}", told, "island", "kind")
        for name, (told, _, _) in _HEALTH.items()
    ]
    number = _gauge("roundhouse_watched_devices", "Devices with a monitor.", "island", "kind")
    for island, kind, *values in rows:
        for gauge, value in zip((*gauges, number), values, strict=True):
            if value is not None:
                gauge.add_metric([island, kind], float(value))
    yield from (*gauges, number)
    unfit = _gauge(
        "roundhouse_unfit_devices", "Devices cordoned by a health rule.", "island", "kind", "rule"
    )
    rule = Device.fitness["cordon"]["rule"].astext
    counted = select(Device.island, Device.kind, rule, func.count()).where(rule.is_not(None))
    for island, kind, why, n in session.execute(counted.group_by(Device.island, Device.kind, rule)):
        unfit.add_metric([island, kind, why], n)
    yield unfit


def _islands(session: Session, now: datetime) -> Iterator[Metric]:
    led = _gauge("roundhouse_island_led", "1 if a scheduler leads the island.", "island")
    age = _gauge(
        "roundhouse_island_round_age_seconds",
        "Time since the leading scheduler last recorded a round.",
        "island",
    )
    rounds = HistogramMetricFamily(
        "roundhouse_island_round_seconds", "Rounds of the leading scheduler.", labels=["island"]
    )
    events = _counter("roundhouse_task_events", "Events of tasks.", "island", "event")
    came = _counter("roundhouse_inputs", "Inputs of tasks, by source.", "island", "way")
    switches = _counter("roundhouse_switches", "Starts of tasks on a device.", "island")
    switching = _counter(
        "roundhouse_switch_seconds",
        "How long available slots were empty before these starts.",
        "island",
    )
    for row in session.scalars(select(Island).order_by(Island.name)):
        led.add_metric([row.name], row.leader_until is not None and row.leader_until > now)
        if row.tallied_at is not None:
            age.add_metric([row.name], max(0.0, (now - row.tallied_at).total_seconds()))
        rounds.add_metric([row.name], _buckets(row.tally), row.tally.get(ROUNDS_US, 0) * US)
        switches.add_metric([row.name], row.tally.get(SWITCHES, 0))
        switching.add_metric([row.name], row.tally.get(SWITCH_US, 0) * US)
        for key, count in sorted(row.tally.items()):
            if key.startswith(TOLD):
                events.add_metric([row.name, key.removeprefix(TOLD)], count)
            elif key.startswith(CAME):
                came.add_metric([row.name, key.removeprefix(CAME)], count)
    yield from (led, age, rounds, events, came, switches, switching, _unanswered(session))


def _network(session: Session) -> Iterator[Metric]:
    made = _counter("roundhouse_network_connections", "Connections of tasks.", "island")
    refused = _counter("roundhouse_network_refusals", "Refused connections of tasks.", "island")
    bytes_ = _counter("roundhouse_network_bytes", "Bytes of tasks.", "island", "direction")
    for name, tally in session.execute(select(Island.name, Island.tally).order_by(Island.name)):
        made.add_metric([name], tally.get(f"{NETWORK}connections", 0))
        refused.add_metric([name], tally.get(f"{NETWORK}refused", 0))
        for direction in ("sent", "received"):
            count = tally.get(f"{NETWORK}{direction}_bytes", 0)
            bytes_.add_metric([name, direction], count)
    yield from (made, refused, bytes_)


def _buckets(tallied: Mapping[str, int]) -> list[tuple[str, float]]:
    found, sum_ = [], 0
    for place, bound in enumerate((*map(str, ROUND_BOUNDS_S), "+Inf")):
        sum_ += tallied.get(f"{ROUNDS}{place}", 0)
        found.append((bound, float(sum_)))
    return found


def _unanswered(session: Session) -> Metric:
    orders = _gauge(
        "roundhouse_orders_unanswered", "Orders that a device has not acknowledged yet.", "island"
    )
    query = (
        select(Device.island, func.count(OutboxOrder.id))
        .outerjoin(
            OutboxOrder, and_(OutboxOrder.device_id == Device.id, OutboxOrder.answered_at.is_(None))
        )
        .group_by(Device.island)
    )
    for island, count in session.execute(query):
        orders.add_metric([island], count)
    return orders


# --- checkpoints, the audit log, and messages to webhooks ---------------------------------------


def _checkpoints(session: Session, now: datetime) -> Iterator[Metric]:
    """Return figures of the last ten minutes, since rows are not kept longer.

    Ids begin with the time, so they select the rows.
    """
    since = f"ckp_{int((now - RECENT).timestamp() * 1000):012x}"
    took_us = func.percentile_cont(list(QUANTILES)).within_group(Checkpoint.took_us)
    size, new = func.sum(Checkpoint.size_bytes), func.sum(Checkpoint.new_bytes)
    query = select(func.count(), size, new, took_us).where(Checkpoint.id >= since)
    count, whole, fresh, times_us = session.execute(query).one()
    made = _gauge("roundhouse_recent_checkpoints", "Checkpoints of the last ten minutes.")
    made.add_metric([], count)
    sizes = _gauge(
        "roundhouse_recent_checkpoint_bytes", "Their sizes; new: the growth of the store.", "part"
    )
    sizes.add_metric(["whole"], float(whole or 0))
    sizes.add_metric(["new"], float(fresh or 0))
    times = _gauge("roundhouse_recent_checkpoint_seconds", "How long they took.", "quantile")
    for quantile, us in zip(QUANTILES, times_us or (), strict=False):
        times.add_metric([str(quantile)], us * US)
    refused = _gauge(
        "roundhouse_unstored_tasks", "Tasks whose newest checkpoint or outputs the store refuses."
    )
    unstored = select(func.count()).where(Task.unstored != literal_column("''"))
    refused.add_metric([], session.scalar(unstored) or 0)
    yield from (made, sizes, times, refused)


def _audit(session: Session) -> Metric:
    events = _counter(
        "roundhouse_audit_events", "Records of the audit log; the number never decreases."
    )
    events.add_metric([], session.scalar(select(func.coalesce(func.max(AuditEvent.id), 0))) or 0)
    return events


def _messages(session: Session) -> Metric:
    due = _gauge(
        "roundhouse_webhook_messages_due",
        "Deliveries that are due; few while the controller works.",
    )
    late = select(func.count()).where(Delivery.state == "pending", Delivery.due_at <= func.now())
    due.add_metric([], session.scalar(late) or 0)
    return due
