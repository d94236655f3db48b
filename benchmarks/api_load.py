"""Measure how many requests the API accepts and how soon it answers, over HTTP, on one machine.

    python -m benchmarks.api_load [--quick]

One API process as `make up` starts it, Postgres with fsync, and the callers share the machine.
Callers are threads with a connection each. A caller sends its next call when its last call is
answered.

* Submits are counted when they are answered, which is after their commit, and then once more with
  two API processes. The CPU of a submit is that of the API and of all processes of Postgres. The
  CPU of the callers, which take it from the same cores, stands beside it.
* Reads are of 100,000 requests (--quick: 10,000). Two callers at once make each kind of read.
* Lives are no-op functions, all submitted at once. The real island and two real CPU devices run
  them until the last is done. They come from requests of 100 functions, from requests of one
  function, and with each function in a process of its own.

The peers are called without HTTP, from the threads of one process. Procrastinate defers jobs into
the same Postgres, and Celery sends tasks to the same Redis with every write synced to disk. Then
Procrastinate, Celery and Dask run as many no-op functions, each with two worker slots and servers
like ours. benchmarks/peers/lives.py says what each peer guarantees. Dask has an environment of its
own (benchmarks/peers/requirements.txt). Without it Dask is left out, and the result says so.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import procrastinate
import psutil
import redis
from celery import Celery
from sqlalchemy import make_url, text

from app.cli.bundling import bundle_folder
from app.cli.client import Client
from app.db import transactions
from app.local import seed
from app.local.embedded_servers import embedded_postgres, embedded_redis, temporary_home
from app.local.up import Handle, answers, running
from app.settings import settings
from benchmarks import Target, quick, report
from benchmarks.graph_dispatch import PEERS_PYTHON, absent
from benchmarks.idle import family_s

CALLERS = 8
READERS = 2
REPEATS = 3
TASKS = 100  # per bulk request
START_S = 120.0
WARM_S = 8.0  # until both of two API processes have started
LIVES_S = 600.0
WATCH_S = 0.2
PEERS_LIVES = Path(__file__).parent / "peers" / "lives.py"

CODE = "def nothing(ctx):\n    return {}\n"

#: Inserts requests that have ended, each with a task and an event.
FILL = """
insert into requests (id, tenant_id, user_id, name, state, labels, ended_at)
  select 'req_' || lpad(to_hex(n), 32, '0'), :tenant, :user, 'r' || n, 'done',
    jsonb_build_object('exp', 'a' || n % 1000), now()
  from generate_series(1, :requests) n;
insert into tasks
    (id, request_id, tenant_id, user_id, ordinal, name, type, kind, state, ended_at, descriptor)
  select 'tsk_' || lpad(to_hex(n), 32, '0'), 'req_' || lpad(to_hex(n), 32, '0'), :tenant, :user,
    0, 'nothing', 'default', 'cpu', 'done', now(), '{"run": {"function": "noop:nothing"}}'
  from generate_series(1, :requests) n;
insert into events (tenant_id, request_id, task_id, type, message)
  select :tenant, 'req_' || lpad(to_hex(n), 32, '0'), 'tsk_' || lpad(to_hex(n), 32, '0'),
    'task.done', 'Done.'
  from generate_series(1, :requests) n
"""

DEVICE = """insert into islands (name) values ('local');
insert into hosts (name, island) values ('h', 'local');
insert into devices (id, host, island, kind) values ('h.0', 'h', 'local', 'cpu')"""

READS = {
    "a request": "/v1/requests/req_{id}",
    "requests": "/v1/requests?limit=50",
    "requests by label": "/v1/requests?label=exp:a7",
    "requests by state": "/v1/requests?state=queued,running",
    "a task": "/v1/tasks/tsk_{id}",
    "tasks": "/v1/tasks?limit=50",
    "events of a request": "/v1/requests/req_{id}/events",
    "the queue": "/v1/queue",
    "shares": "/v1/fair-share",
    "usage": "/v1/usage",
}


def main() -> int:
    seconds, stored, lives = (2.0, 10_000, TASKS) if quick() else (10.0, 100_000, 5 * TASKS)
    with temporary_home() as home, running(home) as system:
        lives_s(system, TASKS)  # warm-up: processes start, and batches grow
        lived = lives_s(system, lives)
        single = lives_s(system, lives, of_request=1, isolation="user")
        closed = lives_s(system, lives, of_request=1)  # each starts a process
        apart = lives_s(system, lives, isolation="process")
        ours_load = load()
    peers = peers_lives(lives, {"batches": lived, "single": single, "process": apart})
    with temporary_home() as home, embedded_postgres(home) as postgres, embedded_redis(home) as url:
        os.environ |= {"DATABASE_URL": postgres, "REDIS_URL": url, "ROUNDHOUSE_HOME": str(home)}
        settings.cache_clear()  # the system above has read others
        with serving() as service:
            taken, spent_ms = submits(service, seconds)
        with serving(processes=2) as service:
            per_s(submitting(service, 1), WARM_S)  # warm-up: one answers before the other is there
            shared = median_per_s(submitting(service, 1), seconds)
        with serving() as service:
            fill(FILL, requests=stored)
            read_ms = reads(service, seconds / 5)
        peers |= {**procrastinate_defers(postgres, seconds), **celery_sends(url, seconds)}
    every = [ms for took in read_ms.values() for ms in took]
    targets = [
        Target(name="submits", value=taken["one task"], unit="/s", op=">=", bound=1000),
        Target(
            name="submit, CPU",
            value=round(spent_ms["API"] + spent_ms["Postgres"], 2),
            unit="ms",
            op="<=",
            bound=1.5,
        ),
        Target(
            name="bulk", value=round(TASKS * taken["bulk"]), unit="tasks/s", op=">=", bound=5000
        ),
        Target(name="reads, p99", value=p99(every), unit="ms", op="<=", bound=50),
        Target(name="lives of functions", value=lived, unit="/s", op=">=", bound=500),
        Target(name="lives of single requests", value=single, unit="/s", op=">=", bound=150),
        Target(
            name="lives of requests that share nothing", value=closed, unit="/s", op=">=", bound=60
        ),
        Target(name="lives in a process of their own", value=apart, unit="/s", op=">=", bound=60),
    ]
    beside = {
        "submits with an Idempotency-Key, /s": taken["with a key"],
        "submits by two API processes, /s": shared,
        **{f"a submit, CPU ms of {who}": round(ms, 2) for who, ms in spent_ms.items()},
        "load": load(),
        "load, lives of ours": ours_load,
        "requests stored": stored,
        **{f"{name}, p50 ms": round(statistics.median(ms), 1) for name, ms in read_ms.items()},
        **{f"{name}, p99 ms": p99(ms) for name, ms in read_ms.items()},
    }
    return report("api_load", targets, {**beside, **peers})


def load() -> list[float]:
    return [round(one, 1) for one in os.getloadavg()]


def p99(ms: list[float]) -> float:
    return round(sorted(ms)[int(0.99 * len(ms))], 1)


# --- the service --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Service:
    pid: int  # of the process that serves, or of the one that started those
    port: int
    key: str  # key of alpha's member
    bundle: str
    keys: dict[str, dict[str, str]]  # all keys: tenant -> role -> key


@contextmanager
def serving(processes: int = 1) -> Iterator[Service]:
    """Start the API alone, without island and devices, so that the work stays queued."""
    seed.migrate()
    with transactions.transaction() as session:
        keys = seed.seed(session, {}, tenants=True)
        for row in DEVICE.split(";"):
            session.execute(text(f"{row} on conflict do nothing"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    bounded = ("--http", "app.api.http_protocol:BoundedProtocol")
    options = (*bounded, "--no-access-log", "--log-level", "warning", "--port", str(port))
    workers = ("--workers", str(processes)) if processes > 1 else ()
    command = (sys.executable, "-m", "uvicorn", "app.main:app", *options, *workers)
    env = os.environ | {"ROUNDHOUSE_API_PROCESSES": str(processes)}
    with subprocess.Popen(command, env=env) as process:
        try:
            wait_for(lambda: answers(f"http://127.0.0.1:{port}", "/livez"))
            key = keys["alpha"]["member"]
            with Client(f"http://127.0.0.1:{port}", key) as client:
                yield Service(process.pid, port, key, uploaded(client), keys)
        finally:
            process.terminate()


def wait_for(true: Callable[[], bool]) -> None:
    until_s = time.monotonic() + START_S
    while not true():
        if time.monotonic() > until_s:
            raise TimeoutError(f"the API did not answer within {START_S:g} s")
        time.sleep(0.05)


def uploaded(client: Client) -> str:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "noop.py").write_text(CODE)
        bundle = bundle_folder(Path(folder))
    client.upload(bundle.sha256, bundle.body)
    return str(bundle.sha256)


def described(bundle: str, tasks: int = 1, **more: Any) -> dict[str, Any]:
    task = {"run": {"function": "noop:nothing"}, **more}
    return {
        "bundle": f"sha256:{bundle}",
        "tasks": [{"name": f"nothing-{n}", **task} for n in range(tasks)],
    }


def fill(statements: str, **given: object) -> None:
    """Insert rows for the member of alpha; the statements name the member by :tenant and :user."""
    with transactions.transaction() as session:
        who = session.execute(
            text(
                "select u.tenant_id as tenant, u.id as user from users u join tenants t"
                " on t.id = u.tenant_id where t.name = 'alpha' and u.name = 'member'"
            )
        ).one()
        given |= {"tenant": who.tenant, "user": who.user}
        for statement in statements.split(";\n"):
            session.connection().execute(text(statement), given)
    with (
        transactions.engine()
        .connect()
        .execution_options(isolation_level="AUTOCOMMIT") as connection
    ):
        connection.execute(text("vacuum analyze"))


# --- callers ------------------------------------------------------------------------------------


Act = Callable[[int], Callable[[], object]]
"""What the n-th caller does, again and again."""


class Caller:
    """Holds a connection that sends prepared requests and reads no more than it must.

    A client library would cost more than the API does.
    """

    def __init__(self, service: Service) -> None:
        self.socket = socket.create_connection(("127.0.0.1", service.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.file = self.socket.makefile("rb")
        self.head = f"Host: localhost\r\nAuthorization: Bearer {service.key}\r\n"

    def call(self, first: str, body: bytes = b"", head: str = "") -> int:
        """Send a request and return the status; `first` is the request line up to the version."""
        kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        self.socket.sendall(f"{first} HTTP/1.1\r\n{self.head}{kind}{head}\r\n".encode() + body)
        status = int(self.file.readline().split()[1])
        length = 0
        while (line := self.file.readline()) != b"\r\n":
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        self.file.read(length)
        return status


def per_s(act: Act, seconds: float) -> float:
    """Return the calls per second of CALLERS threads together."""
    done, stop = [0] * CALLERS, threading.Event()

    def go(n: int, doing: Callable[[], object]) -> None:
        while not stop.is_set():
            doing()
            done[n] += 1

    threads = [threading.Thread(target=go, args=(n, act(n))) for n in range(CALLERS)]
    began_s = time.perf_counter()
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    stop.set()
    for thread in threads:
        thread.join()
    return sum(done) / (time.perf_counter() - began_s)


def median_per_s(act: Act, seconds: float) -> float:
    return round(statistics.median(per_s(act, seconds) for _ in range(REPEATS)), 1)


def submits(service: Service, seconds: float) -> tuple[dict[str, float], dict[str, float]]:
    """Return the submits per second by kind of request, and the CPU time of a request with one task
    by process.
    """
    postgres = _postmaster()
    one, done = submitting(service, 1), count()

    def counted(n: int) -> Callable[[], object]:
        submit = one(n)

        def act() -> None:
            submit()
            next(done)

        return act

    def spent_ms() -> dict[str, float]:
        ended = postgres.cpu_times()
        postgres_s = family_s(postgres.pid) + ended.children_user + ended.children_system
        parts_s = {"API": family_s(service.pid), "Postgres": postgres_s}
        return {name: 1e3 * s for name, s in {**parts_s, "callers": time.process_time()}.items()}

    per_s(one, 1.0)  # warm-up
    before = spent_ms()
    taken = {"one task": median_per_s(counted, seconds)}
    made = next(done)
    each_ms = {name: (ms - before[name]) / made for name, ms in spent_ms().items()}
    taken["with a key"] = median_per_s(submitting(service, 1, keyed=True), seconds)
    taken["bulk"] = median_per_s(submitting(service, TASKS), seconds)
    return taken, each_ms


def submitting(service: Service, tasks: int, *, keyed: bool = False) -> Act:
    """Return callers that submit requests of this many tasks."""
    body, keys = json.dumps(described(service.bundle, tasks)).encode(), count()

    def act(_: int) -> Callable[[], object]:
        caller = Caller(service)

        def submit() -> None:
            head = f"Idempotency-Key: {next(keys)}\r\n" if keyed else ""
            status = caller.call("POST /v1/requests", body, head)
            assert status == 202, status

        return submit

    return act


def _postmaster() -> psutil.Process:
    with transactions.transaction() as session:
        backend = psutil.Process(int(session.scalar(text("select pg_backend_pid()")) or 0))
    return backend.parents()[0]


def reads(service: Service, seconds: float) -> dict[str, list[float]]:
    """Return the milliseconds of each read, by kind."""
    found: dict[str, list[float]] = {}
    for name, path in READS.items():
        first = "GET " + path.replace("{id}", f"{77:032x}")
        took_ms: list[float] = []
        until_s = time.perf_counter() + seconds
        threads = [
            threading.Thread(target=_read, args=(service, first, until_s, took_ms))
            for _ in range(READERS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found[name] = took_ms
    return found


def _read(service: Service, first: str, until_s: float, took_ms: list[float]) -> None:
    caller = Caller(service)
    caller.call(first)
    while time.perf_counter() < until_s:
        began_s = time.perf_counter()
        status = caller.call(first)
        took_ms.append(1e3 * (time.perf_counter() - began_s))
        assert status == 200, (first, status)


def lives_s(system: Handle, lives: int, *, of_request: int = TASKS, **task: Any) -> float:
    """Return no-op tasks per second, from the first submit until the last is done."""
    with Client(system.url, system.keys["alpha"]["member"]) as client:
        bundle = uploaded(client)
        began_s = time.perf_counter()
        ids = [
            client.submit(described(bundle, min(of_request, lives - n), **task))["id"]
            for n in range(0, lives, of_request)
        ]
        # Reading all tasks of a request at each change would cost as much as what is measured.
        while client.get("/v1/requests", state="queued,running", limit=1)["items"]:
            if time.perf_counter() > began_s + LIVES_S:
                raise TimeoutError(f"not all of {lives} lives have ended after {LIVES_S:g} s")
            time.sleep(WATCH_S)
        took_s = time.perf_counter() - began_s
        states = {client.get(f"/v1/requests/{id}")["state"] for id in ids}
        if states != {"done"}:
            raise RuntimeError(f"requests of no-op functions are {', '.join(sorted(states))}")
        return round(lives / took_s, 1)


# --- peers --------------------------------------------------------------------------------------


def procrastinate_defers(postgres: str, seconds: float) -> dict[str, float]:
    """Return jobs deferred per second, each in a transaction of its own."""
    connector = procrastinate.SyncPsycopgConnector(conninfo=plain(postgres), max_size=CALLERS)
    app = procrastinate.App(connector=connector)

    @app.task(name="nothing")
    def nothing() -> None: ...

    with app.open():
        app.schema_manager.apply_schema()
        found = median_per_s(lambda _: nothing.defer, seconds)
    return {f"procrastinate {version('procrastinate')}, defers /s": found}


def celery_sends(url: str, seconds: float) -> dict[str, float]:
    """Return messages sent per second, each synced to disk before Redis answers."""
    app = Celery(broker=synced(url))
    found = median_per_s(lambda _: lambda: app.send_task("nothing", ignore_result=True), seconds)
    return {f"celery {version('celery')}, Redis synced always, sends /s": found}


def peers_lives(lives: int, ours: dict[str, float]) -> dict[str, Any]:
    """Return the no-op functions per second of each peer, by way, and our figures divided by
    theirs.
    """
    found: dict[str, Any] = {}
    with temporary_home() as home, embedded_postgres(home) as postgres, embedded_redis(home) as url:
        env = os.environ | {"DATABASE_URL": plain(postgres), "REDIS_URL": synced(url)}
        for name in ("procrastinate", "celery", "dask"):
            if why := absent(name):
                found[name] = why
                continue
            python = PEERS_PYTHON if name == "dask" else sys.executable
            command = (str(python), str(PEERS_LIVES), name, str(lives))
            said = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True).stdout
            for way, their in json.loads(said).items():
                found[f"{name}, lives, {way}, /s"] = their
                found[f"lives, {way}, ours to {name}"] = round(ours[way] / their, 3)
        found["load, lives of peers"] = load()
    return found


def plain(postgres: str) -> str:
    return make_url(postgres).set(drivername="postgresql").render_as_string(False)


def synced(url: str) -> str:
    """Let Redis sync each write to disk; returns its address in Celery's form."""
    with redis.Redis.from_url(url) as server:
        server.config_set("appendonly", "yes")
        server.config_set("appendfsync", "always")
    return url.replace("unix://", "redis+socket://")


if __name__ == "__main__":
    sys.exit(main())
