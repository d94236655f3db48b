"""Measures how many no-op functions a second a peer runs in two worker slots, from submit to done.

    python benchmarks/peers/lives.py NAME LIVES

NAME is the peer, and LIVES is how many functions each run submits. Prints one JSON object:
functions per second, by the way they are submitted. Each figure is the median of three runs after a
warm-up. The ways:

* batches: 100 functions in one call.
* single: one function in each call. Procrastinate and Celery are called by eight threads.
* process: as single, but each function in a process of its own, and a fifth of LIVES.

The peers' guarantees differ:

* Procrastinate is durable: a job and its end are commits. The end is read from its table here.
* Celery's messages and results are synced to disk here. By default a message is acknowledged before
  its task runs, so a killed worker loses the task.
* Dask keeps nothing on disk: its scheduler's end loses all tasks.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SLOTS, CALLERS, BATCH, REPEATS = 2, 8, 100, 3
LIMIT_S = 600.0
UNFINISHED = "select count(*) from procrastinate_jobs where status <> 'succeeded'"


def nothing(ctx: None) -> dict[str, int]:
    return {}


def lives_s(run: Callable[[int], object], lives: int) -> float:
    """Return lives per second; `run` submits this many and waits until the last is done."""
    took_s = []
    for _ in range(REPEATS + 1):
        began_s = time.perf_counter()
        run(lives)
        took_s.append(time.perf_counter() - began_s)
    return round(lives / statistics.median(took_s[1:]), 1)  # the first is the warm-up


def batches(lives: int) -> list[int]:
    return [min(BATCH, lives - n) for n in range(0, lives, BATCH)]


def share(lives: int, act: Callable[[int], object]) -> None:
    """Let each caller act for its share of the lives."""
    with ThreadPoolExecutor(CALLERS) as pool:
        list(pool.map(act, (len(range(n, lives, CALLERS)) for n in range(CALLERS))))


@contextmanager
def working(*command: str) -> Iterator[None]:
    """Run a worker, whose app is found in this module."""
    process = subprocess.Popen(
        (sys.executable, "-m", *command), cwd=Path(__file__).parent, stdout=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait()


# --- Procrastinate, on the Postgres at DATABASE_URL ----------------------------------------------


def procrastinate_app() -> Any:
    import procrastinate

    connector = procrastinate.PsycopgConnector(conninfo=os.environ["DATABASE_URL"])
    app = procrastinate.App(connector=connector)
    app.task(name="nothing")(nothing)
    return app


def procrastinate_lives(lives: int) -> dict[str, float]:
    import psycopg

    app = procrastinate_app()
    task = app.tasks["nothing"]

    def defer_batches(lives: int) -> None:
        for size in batches(lives):
            task.batch_defer(*[{"ctx": None}] * size)
        wait()

    def defer(lives: int) -> None:
        share(lives, lambda some: [task.defer(ctx=None) for _ in range(some)])
        wait()

    def wait() -> None:
        until_s = time.monotonic() + LIMIT_S
        while table.execute(UNFINISHED).fetchone() != (0,):
            if time.monotonic() > until_s:
                raise TimeoutError(f"not all jobs have succeeded after {LIMIT_S:g} s")
            time.sleep(0.01)

    with app.open(), psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as table:
        app.schema_manager.apply_schema()
        options = ("--app", "lives.procrastinate_worker", "worker", "--concurrency", str(SLOTS))
        with working("procrastinate", "--log-level", "critical", *options):
            return {"batches": lives_s(defer_batches, lives), "single": lives_s(defer, lives)}


# --- Celery, on the Redis at REDIS_URL -----------------------------------------------------------


def celery_app() -> Any:
    from celery import Celery

    app = Celery("lives", broker=os.environ["REDIS_URL"], backend=os.environ["REDIS_URL"])
    app.task(nothing, name="nothing")
    app.finalize()
    return app


def celery_lives(lives: int) -> dict[str, float]:
    from celery import group

    task = celery_app().tasks["nothing"]

    def send_groups(lives: int) -> None:
        sent = [group([task.s(None)] * size).apply_async() for size in batches(lives)]
        wait(sent)

    def send(lives: int) -> None:
        share(lives, lambda some: wait([task.delay(None) for _ in range(some)]))

    def wait(sent: list[Any]) -> None:
        for one in sent:
            one.get(timeout=LIMIT_S)

    options = ("-A", "lives:celery_worker", "worker", "--concurrency", str(SLOTS))
    quietly = ("--loglevel", "CRITICAL", "--without-gossip", "--without-mingle")
    with working("celery", *options, *quietly):
        found = {"batches": lives_s(send_groups, lives), "single": lives_s(send, lives)}
    with working("celery", *options, *quietly, "--max-tasks-per-child", "1"):
        return {**found, "process": lives_s(send, lives // 5)}


# --- Dask, in this process and two of its own ----------------------------------------------------


def dask_lives(lives: int) -> dict[str, float]:
    from distributed import Client, LocalCluster

    def submit_maps(lives: int) -> None:
        made = [client.map(nothing, [None] * size, pure=False) for size in batches(lives)]
        client.gather(made)

    def submit(lives: int) -> None:
        client.gather([client.submit(nothing, None, pure=False) for _ in range(lives)])

    with (
        LocalCluster(
            n_workers=SLOTS, threads_per_worker=1, dashboard_address=None, silence_logs="ERROR"
        ) as cluster,
        Client(cluster) as client,
    ):
        return {"batches": lives_s(submit_maps, lives), "single": lives_s(submit, lives)}


def __getattr__(name: str) -> Any:
    made = {"procrastinate_worker": procrastinate_app, "celery_worker": celery_app}
    if name in made:
        return made[name]()
    raise AttributeError(name)


PEERS = {"procrastinate": procrastinate_lives, "celery": celery_lives, "dask": dask_lives}

if __name__ == "__main__":
    sys.stdout.write(json.dumps(PEERS[sys.argv[1]](int(sys.argv[2]))) + "\n")
