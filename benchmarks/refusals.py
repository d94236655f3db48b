"""Have Redis, Postgres and the store refuse for a time, one after another, while tenants train.

    python -m benchmarks.refusals [--quick]

The system is that of `make up` with two CPU devices; Redis stands behind a proxy that answers
errors, Postgres behind one that stops to carry bytes, and the store lies on a file system of its
own (as root, who may mount one). Each refusal lasts 20 s; 8 s with --quick. Meanwhile `/readyz`
must say so in the right words, and afterwards the service must be ready again by itself.

At the end every job must have the bits of the same job run alone. No process may have ended, no
step may have been run twice, and no two processes may have run one task at once.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from app.local.embedded_servers import embedded_postgres, embedded_redis, temporary_home
from app.local.up import running
from benchmarks import Target, chaos, quick, report
from tests import hanging_relay, refusing_redis
from tests.acceptance.conftest import System
from tests.hanging_relay import HangingRelay
from tests.refusing_redis import RefusingRedis

JSON = dict[str, Any]

LASTS_S = 8.0 if "--quick" in sys.argv else 20.0
READY_AGAIN_S = 90.0
LOOK_S = 0.5
STORE_BYTES = 512 * 2**20
OF_REDIS = ("READONLY", "LOADING", "NOAUTH", "OOM", "MISCONF", "BUSY", "NOPERM", "UNBLOCKED")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    name: str
    wanted: str
    told: list[str]  # what the failed checks said, each once
    again_s: float  # from the end of the refusal until the service was ready; -1: it was not

    @property
    def is_right(self) -> bool:
        return any(self.wanted in told for told in self.told) and self.again_s >= 0


class Refusals:
    """Turns refusals on, each for the time of a context."""

    def __init__(
        self, proxy: RefusingRedis, relay: HangingRelay, postgres_url: str, store: Path | None
    ) -> None:
        self.proxy, self.relay, self.store = proxy, relay, store
        self.postgres_url = postgres_url.replace("+psycopg", "")

    def each(self) -> Iterator[tuple[str, str, contextlib.AbstractContextManager[None]]]:
        """Yield a name, words that a check must say, and the refusal."""
        for name in OF_REDIS:
            yield f"redis {name}", name, self.proxy.refusing(getattr(refusing_redis, name))
        yield "postgres read-only", "read-only", self._read_only()
        yield "postgres has no connection left", "no connection left", self._full()
        yield "postgres ends all sessions", "", self._shutdowns()
        yield "postgres hangs", "does not answer", self.relay.hanging()
        if self.store is not None:
            yield "store full", "takes no object", self._store_full(self.store)
            yield "store read-only", "takes no object", self._store_read_only(self.store)

    def _said(self, *statements: str) -> None:
        with psycopg.connect(self.postgres_url, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement)

    @contextlib.contextmanager
    def _read_only(self) -> Iterator[None]:
        name = "default_transaction_read_only"
        self._said(f"alter system set {name} = on", "select pg_reload_conf()")
        try:
            yield
        finally:
            reset = "set default_transaction_read_only = off"
            self._said(reset, f"alter system reset {name}", "select pg_reload_conf()")

    @contextlib.contextmanager
    def _full(self) -> Iterator[None]:
        """Take every connection: those of the service end, and ours get their places."""
        with (
            contextlib.ExitStack() as held,
            psycopg.connect(self.postgres_url, autocommit=True) as ours,
        ):
            ours.execute(_END_OTHERS)
            with contextlib.suppress(psycopg.OperationalError):
                while True:
                    held.enter_context(psycopg.connect(self.postgres_url))
            yield

    @contextlib.contextmanager
    def _shutdowns(self) -> Iterator[None]:
        ended = threading.Event()

        def end_sessions() -> None:
            while not ended.wait(0.2):
                self._said(_END_OTHERS)

        thread = threading.Thread(target=end_sessions)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    @contextlib.contextmanager
    def _store_full(self, store: Path) -> Iterator[None]:
        filler = store / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(2**16))
        try:
            yield
        finally:
            filler.unlink()

    @contextlib.contextmanager
    def _store_read_only(self, store: Path) -> Iterator[None]:
        _mount(store, "-o", "remount,ro")
        try:
            yield
        finally:
            _mount(store, "-o", "remount,rw")


_END_OTHERS = """
    select pg_terminate_backend(pid) from pg_stat_activity
    where pid <> pg_backend_pid() and backend_type = 'client backend'
"""


def _mount(folder: Path, *words: str) -> None:
    subprocess.run(["mount", *words, str(folder)], check=True)


@contextlib.contextmanager
def _own_file_system(home: Path) -> Iterator[Path | None]:
    """Mount one for the store; None where that is not allowed."""
    if os.geteuid() != 0:
        yield None
        return
    store = home / "own" / "store"
    store.mkdir(parents=True)
    _mount(store, "-t", "tmpfs", "-o", f"size={STORE_BYTES},mode=700", "tmpfs")
    try:
        yield store
    finally:
        subprocess.run(["umount", "-l", str(store)], check=True)


def main() -> int:
    quick()
    began_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        servers, home = (stack.enter_context(temporary_home()) for _ in range(2))
        postgres_url = stack.enter_context(embedded_postgres(servers))
        redis_url = stack.enter_context(_redis(servers))
        proxy = stack.enter_context(RefusingRedis(redis_url))
        relay, relayed_url = hanging_relay.through(postgres_url)
        stack.enter_context(relay)
        store = stack.enter_context(_own_file_system(servers))
        env = {**chaos.ENV, "REDIS_URL": proxy.url, "DATABASE_URL": relayed_url}
        env |= {} if store is None else {"ROUNDHOUSE_STORE": str(store)}
        handle = stack.enter_context(running(home, devices=chaos.DEVICES, env=env))
        system = stack.enter_context(contextlib.closing(System(handle)))
        before = handle.pids()
        refusals = Refusals(proxy, relay, postgres_url, store)
        names = len(list(refusals.each()))
        plan = chaos.Plan(
            jobs=9,
            steps=60 * int(LASTS_S),
            length_s=names * (LASTS_S + 10),
            ends_within_s=600.0,
            disturbances={},
        )
        with ThreadPoolExecutor(1) as pool:
            accepted = pool.submit(chaos._submit, system, plan)
            time.sleep(LASTS_S)
            found = [_met(system, *each) for each in refusals.each()]
            ids = accepted.result()
        until_s = time.monotonic() + plan.ends_within_s
        tasks = [chaos._ended(system, tenant, id, plan.steps, until_s) for tenant, id in ids]
        judged = [chaos._judged(system, task) for task in tasks]
        ended = sum(before[name] != pid for name, pid in handle.pids().items())
    return _report(plan, found, judged, ended, began_s)


@contextlib.contextmanager
def _redis(home: Path) -> Iterator[str]:
    """Run Redis beside Postgres on one home, whose lock Postgres has."""
    with temporary_home() as own, embedded_redis(own) as url:
        yield url


def _met(
    system: System, name: str, wanted: str, refusal: contextlib.AbstractContextManager[None]
) -> Found:
    """Turn a refusal on; return what the checks said of it."""
    client, told = system.client("alpha", "viewer"), dict[str, None]()
    with refusal:
        until_s = time.monotonic() + LASTS_S
        while time.monotonic() < until_s:
            told |= dict.fromkeys(_failing(client.ready()["checks"]))
            time.sleep(LOOK_S)
    ended_s = time.monotonic()
    again_s = -1.0
    while again_s < 0 and time.monotonic() < ended_s + READY_AGAIN_S:
        checks = client.ready()["checks"]
        if not [told for told in _failing(checks) if not told.startswith("answers")]:
            again_s = time.monotonic() - ended_s
        time.sleep(LOOK_S)
    chaos._say(f"{name}: ready again after {again_s:.1f} s; {' | '.join(told) or 'nothing said'}")
    return Found(name=name, wanted=wanted, told=list(told) or [""], again_s=again_s)


def _failing(checks: JSON) -> list[str]:
    return [f"{name}: {check['detail']}" for name, check in checks.items() if not check["ok"]]


def _report(
    plan: chaos.Plan,
    found: list[Found],
    judged: list[chaos.Judgment],
    ended: int,
    began_s: float,
) -> int:
    def no(name: str, value: int, unit: str) -> Target:
        return Target(name=name, value=value, unit=unit, op="<=", bound=0)

    tasks = [one.task for one in judged]
    right = sum(one.has_right_bits for one in judged)
    targets = [
        Target(name="jobs done, right bits", value=right, unit="jobs", op=">=", bound=plan.jobs),
        no("refusals without the right words", sum(not one.is_right for one in found), "refusals"),
        no("processes that ended", ended, "processes"),
        no("steps run twice", sum(task["lost_steps"] for task in tasks), "steps"),
        no("steps that two processes ran at once", sum(one.overlaps for one in judged), "pairs"),
    ]
    peers = {
        "ready again, s": {one.name: round(one.again_s, 1) for one in found},
        "said": {one.name: one.told[:3] for one in found},
        "not right": [chaos._why(one.task) for one in judged if not one.has_right_bits],
        "attempts, pauses, lost steps": [
            sum(task[name] for task in tasks) for name in ("attempts", "pauses", "lost_steps")
        ],
        "each, s": LASTS_S,
        "seconds": round(time.monotonic() - began_s),
        "load (1 min)": round(os.getloadavg()[0], 1),
    }
    return report("refusals", targets, peers)


if __name__ == "__main__":
    sys.exit(main())
