"""Measure the picks per second of the tenant tree, and of peers with the same rule.

    python -m benchmarks.fair_pick [--quick]

A pick finds the task that goes first, removes it and charges its user a turn. Usage fades with a
half-life of a week and is counted exactly; each tenant has one user. All figures are medians of
five rounds, in CPU time of one core, for Postgres in wall time. The same run measures:

* the naive way, which decays every tenant's usage and then scans all tenants for the least served;
* Postgres with `for update skip locked` on a tenant and a job, in one function, with 1,000 tenants;
  once durably, and once with commits that do not wait for the disk;
* a flood: the 99th percentile of other tenants' picks before and after one tenant adds a million
  tasks.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable

import psycopg

from app.core.fairness.fair_tree import FairTree, Path, lane
from app.local.embedded_servers import embedded_postgres, temporary_home
from benchmarks import Target, quick, report

ROUNDS = 5
LANE = lane("cuda")
LANES = (LANE,)
HALF_LIFE_S = 7 * 86400.0
TURN_US = 600 * 1_000_000
FEWEST_TENANTS, TENANTS, MOST_TENANTS = 1_000, 10_000, 100_000
TASKS = 1_000_000
POSTGRES_TENANTS = 1_000

SCHEMA = """
create table tenants (id int primary key, weight int not null, vkey numeric not null,
  queued int not null) with (fillfactor = 70);
create table jobs (id bigint primary key, tenant int not null, priority int not null,
  state text not null) with (fillfactor = 90);
insert into tenants select n, 1 + n % 4, n * 7919 % 1000, 0 from generate_series(1, {tenants}) n;
insert into jobs select n, 1 + n % {tenants}, 0, 'queued' from generate_series(1, {jobs}) n;
update tenants set queued = (select count(*) from jobs where tenant = tenants.id);
create index on tenants (vkey) where queued > 0;
create index on jobs (tenant, priority desc, id) where state = 'queued';
create function pick(turn numeric) returns bigint language plpgsql as $$
declare who int; job bigint;
begin
  select id into who from tenants where queued > 0 order by vkey limit 1 for update skip locked;
  update jobs set state = 'running' where id = (
    select id from jobs where tenant = who and state = 'queued'
    order by priority desc, id limit 1 for update skip locked) returning id into job;
  update tenants set vkey = vkey + turn / weight, queued = queued - 1 where id = who;
  return job;
end $$;
"""


def main() -> int:
    picks = 20_000 if quick() else 100_000
    few, many, most = (picks_per_s(tenants, picks) for tenants in tenant_counts())
    before_us, after_us = flood_us(picks)
    targets = [
        Target(
            name="picks, 10,000 tenants, 1,000,000 waiting tasks",
            value=round(many),
            unit="1/s",
            op=">=",
            bound=300_000,
        ),
        Target(
            name="cost of a pick, 100,000 tenants to 1,000",
            value=round(few / most, 2),
            unit="times",
            op="<=",
            bound=5,
        ),
    ]
    peers = {
        "ours, 1,000 tenants, picks/s": round(few),
        "ours, 100,000 tenants, picks/s": round(most),
        "the others' picks before a flood, p99 us": before_us,
        "the others' picks after one tenant adds 1,000,000 tasks, p99 us": after_us,
        "decay all and scan, 10,000 tenants, picks/s": round(naive_picks_per_s(TENANTS)),
        **postgres(),
    }
    return report("fair_pick", targets, peers)


def tenant_counts() -> tuple[int, int, int]:
    return FEWEST_TENANTS, TENANTS, MOST_TENANTS


# --- ours ---------------------------------------------------------------------------------------


def crowd(tenants: int, tasks: int) -> FairTree[str]:
    """Make tenants of four weights with different usage; their tasks come in turn."""
    tree = FairTree[str](half_life_s=HALF_LIFE_S)
    paths = [plant(tree, n) for n in range(tenants)]
    for n in range(tasks):
        push(tree, paths[n % tenants], n)
    return tree


def plant(tree: FairTree[str], n: int) -> Path:
    used_us = n * 7919 % 1000 * 1_000_000
    tree.add((f"t{n}",), weight=1000 * (1 + n % 4), faded=tree.faded(used_us))
    path = f"t{n}", "user"
    tree.add(path, faded=tree.faded(used_us))
    return path


def push(tree: FairTree[str], path: Path, n: int) -> None:
    tree.push(path, f"k{n}", lane=LANE, id=f"k{n}", priority=0, submitted_s=float(n))


def pick(tree: FairTree[str]) -> str:
    found = tree.first(LANES)
    if found is None:
        raise LookupError("nobody waits any more: the benchmark has too few tasks")
    tree.take(found[2], tree.faded(TURN_US))
    return found[2]


def picks_per_s(tenants: int, picks: int) -> float:
    """Measure picks from a tree that has a million tasks at first.

    Each tenant is picked once before the measurement.
    """
    tree = crowd(tenants, TASKS)
    for _ in range(tenants):
        pick(tree)
    return median_per_s(lambda: pick(tree), picks)


def median_per_s(once: Callable[[], object], times: int) -> float:
    return statistics.median(per_s(once, times) for _ in range(ROUNDS))


def per_s(once: Callable[[], object], times: int) -> float:
    gc.collect()
    began_s = time.process_time()
    for _ in range(times):
        once()
    return times / (time.process_time() - began_s)


def flood_us(picks: int) -> tuple[float, float]:
    """Return the p99 in µs of a pick of other tenants, before and after the flood."""
    tree = crowd(FEWEST_TENANTS, 6 * picks)
    path = plant(tree, FEWEST_TENANTS)
    # so high a usage that the flooding tenant is not picked
    tree.charge(tree.branches[path], tree.faded(TURN_US * picks))
    push(tree, path, TASKS)
    before_us = p99_us(tree, picks)
    for n in range(TASKS):
        push(tree, path, TASKS + 1 + n)
    return before_us, p99_us(tree, picks)


def p99_us(tree: FairTree[str], picks: int) -> float:
    gc.collect()
    return statistics.median(round_p99_us(tree, picks // ROUNDS) for _ in range(ROUNDS))


def round_p99_us(tree: FairTree[str], picks: int) -> float:
    took_ns = []
    for _ in range(picks):
        began_ns = time.perf_counter_ns()
        pick(tree)
        took_ns.append(time.perf_counter_ns() - began_ns)
    return sorted(took_ns)[int(0.99 * picks)] / 1000


# --- the naive way ------------------------------------------------------------------------------


def naive_picks_per_s(tenants: int) -> float:
    """Measure picks that fade every tenant's usage and then scan for the lowest."""
    used = [float(n * 7919 % 1000) for n in range(tenants)]
    weight = [1 + n % 4 for n in range(tenants)]
    fading = 2.0 ** (-1 / HALF_LIFE_S)

    def once() -> None:
        for n in range(tenants):
            used[n] *= fading
        least = min(range(tenants), key=lambda n: used[n] / weight[n])
        used[least] += TURN_US / 1e6

    return median_per_s(once, 10)


# --- Postgres -----------------------------------------------------------------------------------


def postgres() -> dict[str, float]:
    jobs, picks = (100_000, 300) if quick() else (1_000_000, 2_000)
    with temporary_home() as home, embedded_postgres(home) as url:
        plain = url.replace("postgresql+psycopg", "postgresql")
        with psycopg.connect(plain, autocommit=True) as connection:
            connection.execute(SCHEMA.format(tenants=POSTGRES_TENANTS, jobs=jobs))
            connection.execute("vacuum analyze")
            durable = median_wall_per_s(connection, picks)
            connection.execute("set synchronous_commit = off")
            loose = median_wall_per_s(connection, picks)
    crowd = f"{POSTGRES_TENANTS:,} tenants, {jobs:,} jobs"
    return {
        f"Postgres skip locked, {crowd}, durable picks/s": durable,
        f"Postgres skip locked, {crowd}, picks/s that a crash may lose": loose,
    }


def median_wall_per_s(connection: psycopg.Connection[tuple[object, ...]], picks: int) -> float:
    return statistics.median(wall_per_s(connection, picks) for _ in range(ROUNDS))


def wall_per_s(connection: psycopg.Connection[tuple[object, ...]], picks: int) -> float:
    began_s = time.perf_counter()
    for _ in range(picks):
        connection.execute("select pick(600)")
    return round(picks / (time.perf_counter() - began_s))


if __name__ == "__main__":
    sys.exit(main())
