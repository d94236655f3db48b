"""Have Redis, Postgres, the store, the clock and the name server refuse while tenants train.

    python -m benchmarks.refusals [--quick]

There are two systems, each with two CPU devices, one of them on a host of its own.  Of the first,
Redis stands behind a proxy that answers errors, Postgres behind one that stops to carry bytes, and
Postgres' tables and the store lie on small file systems (as root, who may mount them).  The second
has its store in a bucket behind a proxy, and finds all servers by name.  Each refusal lasts 20 s; 8
s with --quick. Meanwhile `/readyz` and `roundhouse doctor` must say so in the right words, and
afterwards the service must be ready again by itself.

The clock of a host is set by libfaketime, if `pip install libfaketime` brought it.

At the end every job must have the bits of the same job run alone. No process may have ended, no
step may have been run twice, and no two processes may have run one task at once.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import redis

from app.local.embedded_servers import (
    embedded_postgres,
    embedded_redis,
    temporary_home,
)
from app.local.process_supervisor import Spec, leashed
from app.local.up import ROOT, Handle, running
from benchmarks import Target, chaos, quick, report
from tests import hanging_relay, name_server, refusing_redis, s3
from tests.acceptance.conftest import System
from tests.hanging_relay import HangingRelay
from tests.name_server import NameServer
from tests.refusing_redis import RefusingRedis
from tests.refusing_store import RefusingStore
from tests.small_disk import disk_of_tables, filled, mount, small_disk

JSON = dict[str, Any]
Turned = contextlib.AbstractContextManager[None]

LASTS_S = 8.0 if "--quick" in sys.argv else 20.0
READY_AGAIN_S = 90.0
LOOK_S = 0.5
LATE_S = 10.0  # of each answer of a slow store
CLOCK_S = 90
STORE_BYTES = TABLES_BYTES = 512 * 2**20
OWN_NAMES = "ROUNDHOUSE_BENCH_OWN_NAMES"  # set in a process whose mounts are its own
FAR = "far.0"
OF_REDIS = ("READONLY", "LOADING", "NOAUTH", "OOM", "MISCONF", "BUSY", "NOPERM", "UNBLOCKED")


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A refusal, on during a context, and the words that a check must say meanwhile.

    `is_failure` is False if the service stays ready.
    """

    name: str
    wanted: str
    on: Callable[[], Turned]
    is_failure: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    refusal: Refusal
    told: list[str]  # what the checks said that failed, or said what was wanted, each once
    doctor: list[str]  # the same of `roundhouse doctor`, which ran once
    status: int  # of `roundhouse doctor`
    again_s: float  # from the end of the refusal until the service was ready; -1: it was not

    @property
    def is_right(self) -> bool:
        wanted = self.refusal.wanted
        says = all(any(wanted in one for one in each) for each in (self.told, self.doctor))
        exits = not wanted or bool(self.status) == self.refusal.is_failure
        return (says or not wanted) and exits and self.again_s >= 0


@dataclass(kw_only=True)
class Servers:
    """The servers of one system, and what stands before them."""

    postgres_url: str
    redis_url: str
    relay: HangingRelay
    proxy: RefusingRedis
    env: dict[str, str] = field(default_factory=dict)

    def say(self, *statements: str) -> None:
        url = self.postgres_url.replace("+psycopg", "")
        with psycopg.connect(url, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement)


# --- the refusals ---------------------------------------------------------------------------------


def of_redis(servers: Servers) -> Iterator[Refusal]:
    for name in OF_REDIS:
        reply = getattr(refusing_redis, name)
        yield Refusal(name=f"redis {name}", wanted=name, on=partial(servers.proxy.refusing, reply))


def of_postgres(servers: Servers, tables: Path | None) -> Iterator[Refusal]:
    found: dict[tuple[str, str], Callable[[], Turned]] = {
        ("read-only", "is read-only"): partial(_read_only, servers),
        ("has no connection left", "no connection left"): partial(_no_connection_left, servers),
        ("ends all sessions", ""): partial(_shutdowns, servers),
        ("hangs", "does not answer"): servers.relay.hanging,
    }
    if tables is not None:
        found["disk full", "disk of the database is full"] = partial(filled, tables)
    for (name, wanted), on in found.items():
        yield Refusal(name=f"postgres {name}", wanted=wanted, on=on)


def of_folder(store: Path) -> Iterator[Refusal]:
    yield Refusal(name="store full", wanted="No space left", on=partial(filled, store))
    yield Refusal(name="store read-only", wanted="Read-only", on=partial(_store_read_only, store))


def of_clock(clock: Path) -> Iterator[Refusal]:
    for sign, side in (("+", "ahead of"), ("-", "behind")):
        yield Refusal(
            name=f"clock of a host {sign}{CLOCK_S} s",
            wanted=f"{side} the database's",
            on=partial(_clock_off, clock, f"{sign}{CLOCK_S}"),
            is_failure=False,
        )


def of_bucket(servers: Servers, store: RefusingStore) -> Iterator[Refusal]:
    yield Refusal(name="S3 answers 503", wanted="503", on=store.refusing)
    yield Refusal(
        name=f"S3 answers after {LATE_S:g} s",
        wanted="store: ",
        on=partial(store.answering_late, LATE_S),
    )


@contextlib.contextmanager
def _read_only(servers: Servers) -> Iterator[None]:
    name = "default_transaction_read_only"
    servers.say(f"alter system set {name} = on", "select pg_reload_conf()")
    try:
        yield
    finally:
        reset = "set default_transaction_read_only = off"
        servers.say(reset, f"alter system reset {name}", "select pg_reload_conf()")


@contextlib.contextmanager
def _no_connection_left(servers: Servers) -> Iterator[None]:
    """Take every connection: those of the service end, and ours get their places."""
    url = servers.postgres_url.replace("+psycopg", "")
    with contextlib.ExitStack() as held, psycopg.connect(url, autocommit=True) as ours:
        ours.execute(_END_OTHERS)
        with contextlib.suppress(psycopg.OperationalError):
            while True:
                held.enter_context(psycopg.connect(url))
        yield


@contextlib.contextmanager
def _shutdowns(servers: Servers) -> Iterator[None]:
    ended = threading.Event()

    def end_sessions() -> None:
        while not ended.wait(0.2):
            servers.say(_END_OTHERS)

    thread = threading.Thread(target=end_sessions)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def _store_read_only(store: Path) -> Iterator[None]:
    mount(store, "-o", "remount,ro")
    try:
        yield
    finally:
        mount(store, "-o", "remount,rw")


@contextlib.contextmanager
def _clock_off(clock: Path, by: str) -> Iterator[None]:
    clock.write_text(by)
    try:
        yield
    finally:
        clock.write_text("+0")


@contextlib.contextmanager
def _names_gone(servers: Servers, names: NameServer) -> Iterator[None]:
    """End all connections too: one that is open needs no name."""
    with names.gone():
        servers.say(_END_OTHERS)
        with redis.Redis.from_url(servers.redis_url) as client:
            client.client_kill_filter(_type="normal", skipme=True)
        yield


_END_OTHERS = """
    select pg_terminate_backend(pid) from pg_stat_activity
    where pid <> pg_backend_pid() and backend_type = 'client backend'
"""


# --- the systems ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _servers(home: Path) -> Iterator[Servers]:
    with contextlib.ExitStack() as stack:
        postgres_url = stack.enter_context(embedded_postgres(home))
        # Redis has a home of its own, since Postgres holds the lock of its home.
        redis_url = stack.enter_context(embedded_redis(stack.enter_context(temporary_home())))
        relay, relayed_url = hanging_relay.through(postgres_url)
        stack.enter_context(relay)
        proxy = stack.enter_context(RefusingRedis(redis_url))
        servers = Servers(postgres_url=postgres_url, redis_url=redis_url, relay=relay, proxy=proxy)
        servers.env |= {**chaos.ENV, "REDIS_URL": proxy.url, "DATABASE_URL": relayed_url}
        yield servers


def _first(stack: contextlib.ExitStack) -> tuple[Servers, list[Refusal]]:
    home = stack.enter_context(temporary_home())
    servers = stack.enter_context(_servers(home))
    refusals = [*of_redis(servers)]
    if os.geteuid() != 0:
        return servers, [*refusals, *of_postgres(servers, None)]
    on_disk = disk_of_tables(home / "tables", TABLES_BYTES, servers.postgres_url)
    tables = stack.enter_context(on_disk)
    store = stack.enter_context(small_disk(home / "own" / "store", STORE_BYTES))
    servers.env["ROUNDHOUSE_STORE"] = str(store)
    refusals += [*of_postgres(servers, tables), *of_folder(store)]
    return servers, refusals


def _second(stack: contextlib.ExitStack) -> tuple[Servers, list[Refusal]]:
    home = stack.enter_context(temporary_home())
    servers = stack.enter_context(_servers(home))
    server = stack.enter_context(s3.serving())
    store = stack.enter_context(RefusingStore(server.endpoint))
    servers.env |= {**server.environment, "ROUNDHOUSE_STORE": server.new_bucket()}
    servers.env["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{store.port}"
    refusals = [*of_bucket(servers, store)]
    if OWN_NAMES in os.environ:
        names = stack.enter_context(NameServer())
        for variable in ("REDIS_URL", "DATABASE_URL", "AWS_ENDPOINT_URL"):
            named = f"{variable.partition('_')[0].lower()}{name_server.SUFFIX}"
            servers.env[variable] = servers.env[variable].replace("127.0.0.1", named)
        refusals.append(
            Refusal(
                name="name server gone",
                wanted="cannot be resolved",
                on=partial(_names_gone, servers, names),
            )
        )
    return servers, refusals


def _with_own_names() -> None:
    """Start anew, as root, where mounts are our own and all names come from our name server."""
    if os.geteuid() != 0 or OWN_NAMES in os.environ or not shutil.which("unshare"):
        return
    os.environ[OWN_NAMES] = "1"
    words = ["unshare", "--mount", sys.executable, "-m", "benchmarks.refusals", *sys.argv[1:]]
    os.execvp(words[0], words)


@contextlib.contextmanager
def _own_resolver() -> Iterator[None]:
    if OWN_NAMES in os.environ:
        with temporary_home() as home:
            (file := home / "resolv.conf").write_text(name_server.RESOLV_CONF)
            file.chmod(0o644)
            mount(Path("/etc/resolv.conf"), "--bind", str(file))
            yield
            subprocess.run(["umount", "-l", "/etc/resolv.conf"], check=True)
    else:
        yield


@contextlib.contextmanager
def _far_host(handle: Handle, env: dict[str, str], home: Path) -> Iterator[tuple[Path | None, Any]]:
    """Serve a device on a host of its own; yields the file that sets its clock, and its process."""
    clock = home / "clock"
    clock.write_text("+0")
    given = {**os.environ, **env, "ROUNDHOUSE_HOME": str(home / "far"), "ROUNDHOUSE_DEVICE": FAR}
    given.setdefault("ROUNDHOUSE_STORE", f"{handle.facts['home']}/store")
    given |= {"ROUNDHOUSE_SANDBOX": "preferred", **handle.enrol(FAR, home / "far", "local")}
    del given["DATABASE_URL"]
    if library := _faketime():
        given |= {"LD_PRELOAD": str(library), "FAKETIME_TIMESTAMP_FILE": str(clock)}
        given |= {"FAKETIME_NO_CACHE": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    words = ["-m", "celery", "-A", "workers.device.worker", "worker", "--pool", "threads", "-c"]
    words += ["2", "-Q", f"device.{FAR}", "-n", f"{FAR}@bench", "-l", "WARNING"]
    spec = Spec(name=FAR, command=(sys.executable, *words), env=given)
    with (home / "far.log").open("wb") as log:
        process = subprocess.Popen(leashed(spec), env=given, cwd=ROOT, stdout=log, stderr=log)
    try:
        yield clock if library else None, process
    finally:
        process.terminate()
        process.wait(60)


def _faketime() -> Path | None:
    found = importlib.util.find_spec("libfaketime")
    below = Path(found.origin).parent if found is not None and found.origin else Path("/usr/lib")
    pattern = "**/libfaketime.so.1" if found is not None else "*/faketime/libfaketime.so.1"
    return next(below.glob(pattern), None)


# --- a run ----------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Run:
    """What was found of all systems."""

    jobs: int = 0
    found: list[Found] = field(default_factory=list)
    judged: list[chaos.Judgment] = field(default_factory=list)
    ended: int = 0  # processes


def main() -> int:
    quick()
    _with_own_names()
    began_s, run = time.monotonic(), Run()
    with _own_resolver():
        for number, begun in enumerate((_first, _second)):
            with contextlib.ExitStack() as stack:
                _disturb(run, stack, *begun(stack), sets_clock=number == 0)
    return _report(run, began_s)


def _disturb(
    run: Run,
    stack: contextlib.ExitStack,
    servers: Servers,
    refusals: list[Refusal],
    *,
    sets_clock: bool,
) -> None:
    homes = [stack.enter_context(temporary_home()) for _ in range(2)]
    handle = stack.enter_context(running(homes[0], devices=chaos.DEVICES - 1, env=servers.env))
    system = stack.enter_context(contextlib.closing(System(handle)))
    clock, far = stack.enter_context(_far_host(handle, servers.env, homes[1]))
    assert system.until(lambda: handle._devices_up() == chaos.DEVICES), "the far host is not up"
    if clock is not None and sets_clock:
        refusals += of_clock(clock)
    before = handle.pids()
    plan = chaos.Plan(
        jobs=9,
        steps=60 * int(LASTS_S),
        length_s=len(refusals) * (LASTS_S + 10),
        ends_within_s=600.0,
        disturbances={},
    )
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(chaos._submit, system, plan)
        time.sleep(LASTS_S)
        run.found += [_met(system, refusal) for refusal in refusals]
        ids = accepted.result()
    until_s = time.monotonic() + plan.ends_within_s
    tasks = [chaos._ended(system, tenant, id, plan.steps, until_s) for tenant, id in ids]
    run.jobs += plan.jobs
    run.judged += [chaos._judged(system, task) for task in tasks]
    run.ended += sum(before[name] != pid for name, pid in handle.pids().items())
    run.ended += far.poll() is not None


def _met(system: System, refusal: Refusal) -> Found:
    """Turn a refusal on; return what the checks said of it."""
    client, told = system.client("alpha", "viewer"), dict[str, None]()
    with refusal.on():
        until_s = time.monotonic() + LASTS_S
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(_doctor, system, LASTS_S / 2)
            while time.monotonic() < until_s:
                told |= dict.fromkeys(_telling(client.ready()["checks"], refusal))
                time.sleep(LOOK_S)
            checks, status = asked.result()
    ended_s = time.monotonic()
    again_s = -1.0
    while again_s < 0 and time.monotonic() < ended_s + READY_AGAIN_S:
        failed = [name for name, one in client.ready()["checks"].items() if not one["ok"]]
        if not {*failed} - {"answers"}:
            again_s = time.monotonic() - ended_s
        time.sleep(LOOK_S)
    doctor = _telling(checks, refusal)
    chaos._say(
        f"{refusal.name}: ready again after {again_s:.1f} s; {' | '.join(told) or 'nothing said'};"
        f" doctor ({status}): {' | '.join(doctor) or 'nothing said'}"
    )
    return Found(refusal=refusal, told=[*told], doctor=doctor, status=status, again_s=again_s)


def _doctor(system: System, after_s: float) -> tuple[dict[str, JSON], int]:
    """Run `roundhouse doctor` once; return its checks by name, and its exit status."""
    time.sleep(after_s)
    env = {
        **os.environ,
        "ROUNDHOUSE_URL": system.url,
        "ROUNDHOUSE_KEY": system.keys["alpha"]["viewer"],
    }
    words = [sys.executable, "-m", "app.cli.main", "doctor", "--output", "json"]
    done = subprocess.run(words, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    try:
        checks = json.loads(done.stdout)
    except ValueError:
        checks = [{"check": "doctor", "ok": False, "detail": done.stderr[-300:]}]
    return {f"{n} {one['check']}": one for n, one in enumerate(checks)}, done.returncode


def _telling(checks: dict[str, JSON], refusal: Refusal) -> list[str]:
    return [
        f"{name.split()[-1]}: {check['detail']}"
        for name, check in checks.items()
        if not check["ok"] or (not refusal.is_failure and refusal.wanted in check["detail"])
    ]


def _report(run: Run, began_s: float) -> int:
    def no(name: str, value: int, unit: str) -> Target:
        return Target(name=name, value=value, unit=unit, op="<=", bound=0)

    tasks = [one.task for one in run.judged]
    right = sum(one.has_right_bits for one in run.judged)
    wrong = [one.refusal.name for one in run.found if not one.is_right]
    targets = [
        Target(name="jobs done, right bits", value=right, unit="jobs", op=">=", bound=run.jobs),
        no("refusals without the right words", len(wrong), "refusals"),
        no("processes that ended", run.ended, "processes"),
        no("steps run twice", sum(task["lost_steps"] for task in tasks), "steps"),
        no(
            "steps that two processes ran at once", sum(one.overlaps for one in run.judged), "pairs"
        ),
    ]
    peers = {
        "ready again, s": {one.refusal.name: round(one.again_s, 1) for one in run.found},
        "said": {one.refusal.name: one.told[:3] for one in run.found},
        "doctor": {one.refusal.name: [one.status, *one.doctor[:3]] for one in run.found},
        "without the right words": wrong,
        "not right": [chaos._why(one.task) for one in run.judged if not one.has_right_bits],
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
