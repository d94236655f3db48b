"""Measure what one message costs in CPU of each process, rows and bytes.

    python -m benchmarks.message_costs [--quick]

An island in a process of its own serves played devices (`benchmarks.devices`), whose messages come
at an even rate. The devices send each kind of message beside their heartbeats. The cost of the
heartbeats alone is subtracted. Submits go through the API over HTTP. Assignments are made by
control's own code, on rows of several islands with many hosts.

CPU is that of the island, the API or control, of all processes of Postgres, and of Redis. Rows are
those that Postgres inserted, updated or deleted. WAL bytes are those that Postgres wrote to its
log. Redis bytes are those that came in and went out. --quick watches for a quarter of the time, and
leaves out the heartbeats of 256 devices.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import psutil
import redis
from sqlalchemy import text

from app.db import transactions
from app.intake import island_assignment
from app.local import seed
from app.local.embedded_servers import embedded_postgres, embedded_redis, temporary_home
from app.messaging import outbox
from app.messaging.message_keys import MessageKeys
from app.settings import settings
from app.storage.signing import Signer
from benchmarks import Target, quick, report
from benchmarks.api_load import Caller, Service, described, serving
from benchmarks.devices import (
    BEAT_S,
    FIRST_LIMIT_S,
    ISLAND,
    DevicePlayer,
    Fleet,
    fill_island,
    island_process,
)
from benchmarks.idle import family_s, own_s

FEW = 64  # devices
FLUSHED_S = 12.0  # after which an idle connection of Postgres has told all its rows
LINES = 10  # of a log, in one heartbeat
ISLANDS, HOSTS, HOST_DEVICES = 20, 125, 8  # where requests are assigned


@dataclass(frozen=True, slots=True)
class Spent:
    """Counts what was used so far, or for one message."""

    process_ms: float
    postgres_ms: float
    redis_ms: float
    rows: float
    wal_bytes: float
    redis_bytes: float

    def less(self, other: Spent, times: float = 1.0) -> Spent:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Spent(*(mine - times * theirs for mine, theirs in pairs))

    def over(self, count: float) -> Spent:
        return Spent(*(one / count for one in astuple(self)))


def main() -> int:
    sizes, watch_s, submits = ((FEW,), 10.0, 150) if quick() else ((FEW, 256, 1_024), 40.0, 600)
    costs, beside = dict[str, Spent](), dict[str, Any]()
    for devices in sizes:
        costs |= _on_an_island(devices, watch_s)
    with temporary_home() as home, embedded_postgres(home) as url, embedded_redis(home) as at:
        _use(url, at, home)
        with serving() as service:
            (api,) = (one for one in psutil.Process().children() if "uvicorn" in one.cmdline())
            meter = _Meter(at, lambda: own_s(api))
            costs |= _of_submits(meter, service, submits)
        costs |= _of_assignments(_Meter(at, time.process_time))
        transactions.engine().dispose()
    beside["load"] = [round(one, 1) for one in os.getloadavg()]
    submit = costs["submit"]
    targets = [
        _at_most(
            "unchanged heartbeat, CPU of the island",
            costs[f"heartbeat, of {sizes[-1]} devices"].process_ms,
            0.1,
        ),
        _at_most(
            "submit of one task, CPU of API and Postgres",
            submit.process_ms + submit.postgres_ms,
            1.5,
        ),
        _at_most(
            "an end and the next launch, CPU of all",
            _cpu_ms(costs["end, and the next launch"]),
            7.0,
        ),
    ]
    told = {name: _told(spent) for name, spent in costs.items()}
    return report("message_costs", targets, {**told, **beside})


def _on_an_island(devices: int, watch_s: float) -> dict[str, Spent]:
    with temporary_home() as home, embedded_postgres(home) as url, embedded_redis(home) as at:
        _use(url, at, home)
        os.environ |= {"ROUNDHOUSE_SLICE_MIN_S": "1e6", "ROUNDHOUSE_SLICE_MAX_S": "1e6"}
        keys = MessageKeys(Signer.at(home / "host.key"))
        seed.migrate()
        fill_island(devices, keys.public)
        try:
            with island_process(home, ISLAND) as island:
                meter = _Meter(at, lambda: own_s(island))
                return _of_devices(meter, Fleet(devices, keys, at), watch_s)
        finally:
            transactions.engine().dispose()


def _at_most(name: str, value: float, bound: float) -> Target:
    return Target(name=name, value=round(value, 3), unit="ms", op="<=", bound=bound)


def _cpu_ms(spent: Spent) -> float:
    return spent.process_ms + spent.postgres_ms + spent.redis_ms


def _told(spent: Spent) -> dict[str, float]:
    return {name: round(getattr(spent, name), 3) for name in Spent.__slots__}


def _use(url: str, at: str, home: object) -> None:
    os.environ |= {"DATABASE_URL": url, "REDIS_URL": at, "ROUNDHOUSE_HOME": str(home)}
    os.environ["ROUNDHOUSE_ISLAND"] = ISLAND
    for cached in (settings, transactions.engine, transactions._sessions, outbox.celery):
        cached.cache_clear()


class _Meter:
    """Reads how much the measured process, Postgres and Redis have used so far."""

    def __init__(self, at: str, process_s: Callable[[], float]) -> None:
        self.redis, self.process_s = redis.Redis.from_url(at), process_s
        with transactions.transaction() as session:
            backend = psutil.Process(int(session.scalar(text("select pg_backend_pid()")) or 0))
        self.postmaster = backend.parents()[0]

    def now(self) -> Spent:
        told = self.redis.info()
        with transactions.transaction() as session:
            session.execute(text("select pg_stat_force_next_flush()"))
        with transactions.transaction() as session:
            rows, wal = session.execute(_ROWS).one()
        ended = self.postmaster.cpu_times()
        postgres_s = family_s(self.postmaster.pid) + ended.children_user + ended.children_system
        return Spent(
            process_ms=1e3 * self.process_s(),
            postgres_ms=1e3 * postgres_s,
            redis_ms=1e3 * (told["used_cpu_user"] + told["used_cpu_sys"]),
            rows=float(rows),
            wal_bytes=float(wal),
            redis_bytes=float(told["total_net_input_bytes"] + told["total_net_output_bytes"]),
        )


_ROWS = text(
    "select tup_inserted + tup_updated + tup_deleted,"
    " pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')"
    " from pg_stat_database where datname = current_database()"
)


# --- messages of devices ------------------------------------------------------------------------


def _of_devices(meter: _Meter, fleet: Fleet, watch_s: float) -> dict[str, Spent]:
    devices = len(fleet.devices)
    _launch_all(fleet)
    beats = _spent_each_s(meter, fleet, lambda: fleet.play(watch_s))
    found = {f"heartbeat, of {devices} devices": beats.over(devices / BEAT_S)}
    if devices > FEW:  # what the heartbeats of many cost would hide all else
        return found

    def sent(act: Callable[[DevicePlayer], None], count: int) -> tuple[Spent, float]:
        """Return the cost per second while devices do this in turn, and how long it took."""

        def send() -> None:
            for n in range(count):
                act(fleet.devices[n % devices])
                fleet.play(watch_s / count)

        began_s = time.monotonic()
        return _spent_each_s(meter, fleet, send), time.monotonic() - began_s

    def each(act: Callable[[DevicePlayer], None], count: int) -> Spent:
        spent, took_s = sent(act, count)
        return spent.less(beats).over(count / took_s)

    found[f"{LINES} lines of a log"] = each(_print, 2 * devices)
    found["checkpoint note"] = each(DevicePlayer.save, 2 * devices)
    both = each(DevicePlayer.end, devices)
    spent, took_s = sent(DevicePlayer.end, devices)  # no task waits any more
    idle = _spent_each_s(meter, fleet, lambda: fleet.play(watch_s))
    # A device had a task for half of that time.
    ended = spent.less(beats, 0.5).less(idle, 0.5).over(devices / took_s)
    found |= {"end, and the next launch": both, "end": ended, "launch and start": both.less(ended)}
    found["heartbeat without a task"] = idle.over(devices / BEAT_S)
    return found


def _print(device: DevicePlayer) -> None:
    device.print_lines(LINES)


def _launch_all(fleet: Fleet) -> None:
    until_s = time.monotonic() + FIRST_LIMIT_S
    while fleet.running() < len(fleet.devices):
        if time.monotonic() > until_s:
            raise RuntimeError(f"only {fleet.running()} of {len(fleet.devices)} tasks run")
        fleet.play(1.0)
    fleet.play(3 * BEAT_S)


def _spent_each_s(meter: _Meter, fleet: Fleet, act: Callable[[], None]) -> Spent:
    before, before_s = meter.now(), time.monotonic()
    act()
    fleet.play(3 * BEAT_S)  # what was sent is taken in, and Postgres has counted its rows
    return meter.now().less(before).over(time.monotonic() - before_s)


# --- submits and assignments --------------------------------------------------------------------


def _of_submits(meter: _Meter, service: Service, count: int) -> dict[str, Spent]:
    found = {}
    for name, tasks, times in (("submit", 1, count), ("submit of 100 tasks", 100, count // 10)):
        body = json.dumps(described(service.bundle, tasks)).encode()
        for _ in range(10):
            Caller(service).call("POST /v1/requests", body)
        time.sleep(FLUSHED_S)
        before, caller = meter.now(), Caller(service)
        for _ in range(times):
            status = caller.call("POST /v1/requests", body)
            assert status == 202, status
        time.sleep(FLUSHED_S)
        found[name] = meter.now().less(before).over(times)
    return found


def _of_assignments(meter: _Meter) -> dict[str, Spent]:
    """Assign the submitted requests: a page for one request, and for the rest 500 at a time."""
    with transactions.transaction() as session:
        for statement in _ISLANDS.strip().rstrip(";").split(";\n"):
            values = {"islands": ISLANDS, "hosts": HOSTS, "devices": HOST_DEVICES}
            session.execute(text(statement), values)
        session.execute(text("analyze"))
    found, after = dict[str, Spent](), ""
    whole = island_assignment.NEW_PAGE
    # The first page of all also prepares the statements.
    for name, page in (("first page", 1), ("page of one request", 1), (f"page of {whole}", whole)):
        island_assignment.NEW_PAGE = page
        before = meter.now()
        with transactions.transaction() as session:
            _, last = island_assignment.assign_new(session, after=after)
        found[name], after = meter.now().less(before), last or after
    return found


_ISLANDS = """
insert into islands (name, leader, leader_until)
  select 'i' || n, 'x', now() + interval '1 hour' from generate_series(1, :islands) n;
insert into hosts (name, island)
  select 'i' || n || '.' || h, 'i' || n
  from generate_series(1, :islands) n, generate_series(1, :hosts) h;
insert into devices (id, host, island, kind, memory_bytes, lease_until)
  select 'i' || n || '.' || h || '.' || d, 'i' || n || '.' || h, 'i' || n, 'cpu', 1073741824,
    now() + interval '1 hour'
  from generate_series(1, :islands) n, generate_series(1, :hosts) h, generate_series(1, :devices) d;
"""


if __name__ == "__main__":
    sys.exit(main())
