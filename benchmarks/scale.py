"""Measure a million waiting tasks of 10,000 tenants in Postgres: loading, rounds, explaining.

    python -m benchmarks.scale [--quick]

One island has 64 devices, which are only rows and heartbeats. Each round hears one device (its task
has started, or is done), decides, writes the decisions and commits. It runs by the island's own
`Scheduler` with durable commits. --quick has a tenth of the tasks and fewer rounds. Beside wall
time stands the CPU time of the island's or the API's own process, which other load changes little.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from sqlalchemy import text

from app.core.model.protocol.messages import Alive, Finished, ResidentView, Started
from app.db import transactions
from app.db.models import Task
from app.insight import explain
from app.local import seed
from app.local.embedded_servers import embedded_postgres, embedded_redis, temporary_home
from app.scheduling.board_follower import Follower
from benchmarks import Target, quick, report

if TYPE_CHECKING:
    from workers.control.scheduler import Scheduler

ISLAND = "isle"
TENANTS = 10_000
DEVICES = 64
FACTS = {"host": "h", "island": ISLAND, "kind": "cpu", "threads": 1, "memory_bytes": 2**30}

FILL = """
insert into islands (name) values ('isle');
insert into tenants (id, name) values ('root', 'platform');
insert into tenants (id, name, parent_id, weight_milli)
  select 't' || n, 'tenant ' || n, 'root', 1000 * (1 + n % 4)
  from generate_series(1, {tenants}) n;
insert into users (id, tenant_id, name) select 'u' || n, 't' || n, 'user'
  from generate_series(1, {tenants}) n;
insert into accounts (user_id, tenant_id, faded)
  select 'u' || n, 't' || n, (n * 7919 % 1000003)::numeric * 1000000 * power(2::numeric, 40)
  from generate_series(1, {tenants}) n;
insert into requests (id, tenant_id, user_id, name, state, descriptor)
  select 'r' || n, 't' || n, 'u' || n, 'request', 'queued', '{{"bundle": "sha256:{zeros}"}}'
  from generate_series(1, {tenants}) n;
insert into tasks (id, request_id, tenant_id, user_id, island, ordinal, name, type, kind, state,
    priority, submitted_at, waiting_since, descriptor)
  select 'k' || n, 'r' || who, 't' || who, 'u' || who, 'isle', n / {tenants}, 'k' || n, 'train',
    'cpu', 'waiting', n % 3, now() - interval '1 s' * (n % 86400), now(),
    '{{"name": "k", "run": {{"job": "train:Train"}}, "max_duration_s": 100, "outputs": [],
       "checkpoint": {{"every_s": 60, "keep": 3}}}}'
  from (select n, 1 + n % {tenants} as who from generate_series(1, {tasks}) n) numbered;
insert into lines (island, user_id, kind, memory_bytes, width, tenant_id, waiting)
  select island, user_id, kind, memory_bytes, devices_min, min(tenant_id), count(*) from tasks
  group by 1, 2, 3, 4, 5;
"""


def main() -> int:
    tasks, rounds = (100_000, 100) if quick() else (1_000_000, 500)
    with temporary_home() as home, embedded_postgres(home) as url, embedded_redis(home) as redis:
        os.environ |= {"DATABASE_URL": url, "REDIS_URL": redis, "ROUNDHOUSE_ISLAND": ISLAND}
        seed.migrate()
        _fill(tasks)
        read_s = statistics.median(_read_s() for _ in range(3))
        rounds_took = list(_rounds(rounds))
        with transactions.transaction() as session:
            warm = _timed(lambda: explain.warm(session))  # as the API does when it starts
        took = {"a round": rounds_took, "an explanation": list(_explains(rounds, tasks))}
    targets = [
        Target(name="the board is read anew", value=round(read_s, 2), unit="s", op="<=", bound=5),
        _p99("a round", took["a round"], 50),
        _p99("an explanation", took["an explanation"], 20),
    ]
    beside: dict[str, float] = {
        "tasks": tasks,
        "who waits is read by the API, s": round(warm[0], 2),
    }
    for name, times in took.items():
        beside |= {
            f"{name}, p50 ms": _ms(times, 0.5),
            f"{name}, p50 ms of CPU": _ms(times, 0.5, cpu=True),
            f"{name}, p99 ms of CPU": _ms(times, 0.99, cpu=True),
        }
    return report("scale", targets, beside)


Took = tuple[float, float]
"""Seconds by the clock, and seconds of CPU."""


def _ms(times: list[Took], part: float, *, cpu: bool = False) -> float:
    return round(1e3 * sorted(one[cpu] for one in times)[int(part * len(times))], 1)


def _p99(name: str, times: list[Took], bound_ms: float) -> Target:
    value = _ms(times, 0.99)
    return Target(name=f"{name}, p99", value=value, unit="ms", op="<=", bound=bound_ms)


def _fill(tasks: int) -> None:
    fill = FILL.strip().format(tenants=TENANTS, tasks=tasks, zeros="0" * 64)
    with transactions.transaction() as session:
        for statement in fill.rstrip(";").split(";\n"):
            session.execute(text(statement.replace(":", r"\:")))
    with (
        transactions.engine()
        .connect()
        .execution_options(isolation_level="AUTOCOMMIT") as connection
    ):
        connection.execute(text("vacuum analyze"))


def _read_s() -> float:
    with transactions.transaction() as session:
        now_s = transactions.now_s(session)
        began = time.perf_counter()
        Follower(ISLAND).look(session, now_s=now_s)
        return time.perf_counter() - began


def _rounds(rounds: int) -> Iterator[Took]:
    from workers.control.scheduler import Scheduler  # reads the settings when it is imported

    scheduler, devices = Scheduler(ISLAND), [_Device(n) for n in range(DEVICES)]
    for device in devices:
        _round(scheduler, device.speaks())
    for device, _ in zip(itertools.cycle(devices), range(rounds), strict=False):
        heartbeat = device.speaks()
        yield _timed(lambda heartbeat=heartbeat: _round(scheduler, heartbeat))  # type: ignore[misc]


def _round(scheduler: Scheduler, alive: Alive) -> None:
    scheduler.hear(alive)
    scheduler.nudge()
    scheduler.look()


class _Device:
    """Simulates a device's messages: its task has started, or, the next time, is done."""

    clock_us = itertools.count(1)

    def __init__(self, n: int) -> None:
        self.id = f"h.{n}"

    def speaks(self) -> Alive:
        seated = self._seated()
        return Alive(
            device=self.id,
            incarnation="p",
            sent_us=next(self.clock_us),
            facts=FACTS,
            residents=[self._resident(*row[:2]) for row in seated],
            events=[self._event(*row) for row in seated],
            logs=[],
        )

    def _seated(self) -> list[Any]:
        query = text(
            "select t.id, t.epoch, t.state, t.event_seq from placements p"
            " join tasks t on t.id = p.task_id and t.seat = p.device_id"
            " where p.device_id = :seat and p.ended_at is null and not p.leaving"
        )
        with transactions.transaction() as session:
            return list(session.execute(query, {"seat": self.id}).all())

    def _resident(self, task: str, epoch: int) -> ResidentView:
        return ResidentView(
            task=task, epoch=epoch, state="running", step=1, held_us=0, order_seq=1, memory_bytes=0
        )

    def _event(self, task: str, epoch: int, state: str, seq: int) -> Any:
        head: dict[str, Any] = {"task": task, "epoch": epoch, "seq": seq + 1}
        if state == "starting":
            return Started(**head, step=0, held_us=0, preset={}, capabilities=[], resumed="fresh")
        return Finished(**head, step=1, held_us=50_000, result={}, outputs={})


def _explains(times: int, tasks: int) -> Iterator[Took]:
    for n in range(times):
        id = f"k{1 + (n * 7919) % tasks}"
        yield _timed(lambda id=id: _explain(id))  # type: ignore[misc]


def _explain(id: str) -> None:
    with transactions.transaction() as session:
        explain.explain(session, [session.get_one(Task, id)])


def _timed(act: Callable[[], None]) -> Took:
    began = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - began[0], time.process_time() - began[1]


if __name__ == "__main__":
    sys.exit(main())
