"""A million waiting tasks of 10,000 tenants in Postgres: reading them, rounds, explaining.

python -m benchmarks.scale [--quick]

One island, 64 devices, which really are rows and heartbeats: each round hears one device (its task
has started, or is done), decides, writes down and commits, by the island's own `Scheduler` with
durable commits.  --quick has a tenth of the tasks and fewer rounds.
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

from app import db, seed
from app.core.messages import Alive, Finished, ResidentView, Started
from app.embedded import embedded_postgres, embedded_redis, temporary_home
from app.follow import Follower
from app.models import Task
from benchmarks import Target, quick, report

if TYPE_CHECKING:
    from workers.island import Scheduler

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
  select 'r' || n, 't' || n, 'u' || n, 'request', 'queued', '{{"bundle": "sha256:0"}}'
  from generate_series(1, {tenants}) n;
insert into tasks (id, request_id, tenant_id, user_id, island, ordinal, name, type, kind, state,
    priority, submitted_at, waiting_since, descriptor)
  select 'k' || n, 'r' || who, 't' || who, 'u' || who, 'isle', n / {tenants}, 'k' || n, 'train',
    'cpu', 'waiting', n % 3, now() - interval '1 s' * (n % 86400), now(),
    '{{"run": {{"job": "train:Train"}}, "max_duration_s": 100, "outputs": [],
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
        rounds_s = sorted(_rounds_s(rounds))
        explain_s = sorted(_explain_s(rounds, tasks))
    targets = [
        Target(name="the board is read anew", value=round(read_s, 2), unit="s", op="<=", bound=5),
        _p99("a round", rounds_s, 50),
        _p99("an explanation", explain_s, 20),
    ]
    medians = {
        "tasks": tasks,
        "a round, p50 ms": round(1e3 * statistics.median(rounds_s), 1),
        "an explanation, p50 ms": round(1e3 * statistics.median(explain_s), 1),
    }
    return report("scale", targets, medians)


def _p99(name: str, sorted_s: list[float], bound_ms: float) -> Target:
    value = round(1e3 * sorted_s[int(0.99 * len(sorted_s))], 1)
    return Target(name=f"{name}, p99", value=value, unit="ms", op="<=", bound=bound_ms)


def _fill(tasks: int) -> None:
    with db.transaction() as session:
        for statement in FILL.strip().format(tenants=TENANTS, tasks=tasks).rstrip(";").split(";\n"):
            session.execute(text(statement.replace(":", r"\:")))
    with db.engine().connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("vacuum analyze"))


def _read_s() -> float:
    with db.transaction() as session:
        now_s = db.now_s(session)
        began = time.perf_counter()
        Follower(ISLAND).look(session, now_s=now_s)
        return time.perf_counter() - began


def _rounds_s(rounds: int) -> Iterator[float]:
    from workers.island import Scheduler  # reads the settings when it is imported

    scheduler, devices = Scheduler(ISLAND), [_Device(n) for n in range(DEVICES)]
    for device in devices:
        _round(scheduler, device.speaks())
    for device, _ in zip(itertools.cycle(devices), range(rounds), strict=False):
        heartbeat = device.speaks()
        began = time.perf_counter()
        _round(scheduler, heartbeat)
        yield time.perf_counter() - began


def _round(scheduler: Scheduler, alive: Alive) -> None:
    scheduler.hear(alive)
    scheduler.nudge()
    scheduler.look()


class _Device:
    """What a device would say: that its task has started, or, the next time, is done."""

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
        query = text("select id, epoch, state, event_seq from tasks where seat = :seat")
        with db.transaction() as session:
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


def _explain_s(times: int, tasks: int) -> Iterator[float]:
    for n in range(times):
        id = f"k{1 + (n * 7919) % tasks}"
        yield _timed(lambda id=id: _explain(id))  # type: ignore[misc]


def _explain(id: str) -> None:
    with db.transaction() as session:
        from app import why

        why.explain(session, [session.get_one(Task, id)])


def _timed(act: Callable[[], None]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
