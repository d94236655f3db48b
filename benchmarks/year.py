"""Measure a service that holds a year of work: size, pages, lists, and deleting beside live load.

python -m benchmarks.year [--quick] [TASKS]

A year's traffic of 100 users is written straight into the tables of an embedded Postgres: 1,000,000
tasks (--quick: 100,000), with their requests, events, placements, logs, metrics, outputs and usage.
Requests have three tasks that depend on each other, and a twentieth of the tasks belongs to sweeps
of 900.  One API process as `make up` starts it and Postgres share the machine.

Each page that a signed-in browser can open, and each list of the API with its filters, is called
one at a time by a member, a tenant admin, a platform admin, and a member of a tenant without work.
The slowest reader's time counts.  The same is done with 10,000 tasks.  Then control deletes what is
older than 300 days, while an island runs, callers submit and read, and control does its chores.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import text

from app.db import transactions
from app.db.models import Tenant
from app.identity import audit
from app.identity.audit import Call
from app.insight.counters import WRITTEN_EVERY_S
from app.local.embedded_servers import embedded_postgres, embedded_redis, temporary_home
from app.main import app
from app.messaging import outbox
from app.settings import settings
from benchmarks import Target, quick, report
from benchmarks.api_load import Caller, Service, described, serving
from benchmarks.devices import island_process, longest_round_s, tally_of
from benchmarks.pages import READERS, Reader, looked_at, p95, page_paths, signed_in

ALL_READERS = (*READERS, ("beta", "member"))  # beta has no work
FEW = 10_000  # tasks of the small service beside
BOUND_MS = 200
LONGEST_PIECE_S = 1.0
PIECE = 45_000  # tasks written at once; a multiple of a sweep's 900
QUEUED = 300  # the newest tasks, which wait
KEPT_DAYS = 300
ISLAND = "local"
SUBMITS_PER_S, READS_PER_S = 10.0, 5.0

Took = dict[str, list[float]]
"""The milliseconds of each call, by address."""


# --- a year of work -----------------------------------------------------------------------------

#: 100 users: a quarter belong to alpha, and five to each other tenant.
PEOPLE = """
insert into tenants (id, name, parent_id) select 'ten_' || lpad(to_hex(n), 32, '0'), 'team-' || n,
    (select id from tenants where parent_id is null) from generate_series(5, 19) n;
insert into users (id, tenant_id, name) select 'usr_' || lpad(to_hex(n), 32, '0'),
    case when n < 25 then (select id from tenants where name = 'alpha')
      else 'ten_' || lpad(to_hex(n / 5), 32, '0') end, 'user-' || n
  from generate_series(0, 99) n;
insert into webhooks (id, tenant_id, url, events, secret)
  select 'whk_of_alpha', id, 'https://example.org/', '["request.done"]', 's' from tenants
  where name = 'alpha';
insert into users (id, tenant_id, name) select 'usr_of_alpha', id, 'shown' from tenants
  where name = 'alpha';
insert into bundles (tenant_id, sha256, size_bytes)
  select tenant_id, repeat(md5(id || n), 2), 4096 from users, generate_series(0, 99) n
  where id like 'usr_0%'
"""

#: Tasks `first` up to `end` of `tasks`, oldest first, with all that belongs to them.  A request has
#: the number of its first task.
WORK = """
create temporary table piece on commit drop as
  select n, case when n / 900 % 20 = 5 then n - n % 900 else n - n % 3 end as r,
    n / 900 % 20 = 5 as is_sweep,
    now() - interval '365 days' * (1 - cast(n as float) / :tasks) as at
  from generate_series(cast(:first as int), :end - 1) n;
create temporary table made on commit drop as
  select r, 'req_' || lpad(to_hex(r), 32, '0') as id, min(at) as at,
    case when r in (:sweep, :sweep - 3) then 0 else (hashint4(r) & 1023) % 100 end as who,
    (hashint4(r + 1) & 1023) as dice,
    case when max(n) >= :tasks - :queued then 'queued' when (hashint4(r) & 15) = 0 then 'failed'
      when (hashint4(r) & 15) = 1 then 'cancelled' else 'done' end as state
  from piece group by r;
insert into requests (id, tenant_id, user_id, name, state, labels, submitted_at, ended_at, keep,
    descriptor)
  select made.id, u.tenant_id, u.id, 'run-' || r, made.state,
    jsonb_build_object('exp', 'a' || r / 3 % 1000, 'team', u.name), made.at,
    case when made.state <> 'queued' then made.at + interval '1 h' end, dice = 0,
    jsonb_build_object('name', 'run-' || r, 'tier', 'standard', 'bundle',
      'sha256:' || repeat(md5(u.id || r % 100), 2), 'tasks', jsonb_build_array(
        jsonb_build_object('name', 'train', 'type', 'train', 'run',
          jsonb_build_object('job', 'train:Train'), 'params',
          jsonb_build_object('steps', 1000, 'lr', 0.001, 'seed', r), 'devices',
          jsonb_build_object('kind', 'cpu', 'min', 1, 'max', 1))))
  from made join users u on u.id = 'usr_' || lpad(to_hex(who), 32, '0');
insert into tasks (id, request_id, tenant_id, user_id, island, ordinal, name, type, kind, state,
    epoch, event_seq, order_seq, step, submitted_at, launched_at, started_at, first_started_at,
    ended_at, total_held_us, waited_us, message, metrics, result, outputs, descriptor)
  select 'tsk_' || lpad(to_hex(n), 32, '0'), req.id, req.tenant_id, req.user_id, 'local', n - p.r,
    case when p.is_sweep then 'train-' || n % 900
      else (array['prepare', 'train', 'evaluate'])[1 + n % 3] end,
    case when p.is_sweep then 'train' else (array['prepare', 'train', 'evaluate'])[1 + n % 3] end,
    'cpu', req.state, 1, 3, 2, 1000, req.submitted_at, start.at, start.at, start.at, req.ended_at,
    1e6 * (60 + n % 3000), 3e8,
    case when req.state = 'failed' then 'ValueError: the loss is not finite' end,
    jsonb_build_object('loss', 1.0 / (1 + n % 997), 'accuracy', n % 997 / 1000.0),
    case when req.state = 'done' then jsonb_build_object('loss', 1.0 / (1 + n % 997)) end,
    case when req.state = 'done' and n % 3 = 1 then jsonb_build_object('model',
      jsonb_build_object('sha256', repeat(md5('model' || n), 2), 'size_bytes', 40000000))
      else cast('{}' as jsonb) end,
    jsonb_build_object('name', 'train', 'run', jsonb_build_object('job', 'train:Train'), 'params',
      jsonb_build_object('steps', 1000, 'lr', 0.001, 'seed', n), 'outputs',
      jsonb_build_array('model'), 'max_duration_s', 7200, 'devices',
      jsonb_build_object('kind', 'cpu', 'min', 1, 'max', 1), 'checkpoint',
      jsonb_build_object('every_s', 600, 'keep', 3))
  from piece p join made on made.r = p.r join requests req on req.id = made.id
    cross join lateral (select req.submitted_at + interval '5 min' as at) start
  where req.ended_at is not null;
insert into tasks (id, request_id, tenant_id, user_id, island, ordinal, name, type, kind, state,
    submitted_at, waiting_since, descriptor)
  select 'tsk_' || lpad(to_hex(n), 32, '0'), req.id, req.tenant_id, req.user_id, 'local', n - p.r,
    case when p.is_sweep then 'train-' || n % 900
      else (array['prepare', 'train', 'evaluate'])[1 + n % 3] end, 'train', 'cpu',
    case when n = p.r or p.is_sweep then 'waiting' else 'blocked' end, req.submitted_at,
    req.submitted_at, jsonb_build_object('name', 'train', 'run',
      jsonb_build_object('job', 'train:Train'), 'outputs', jsonb_build_array('model'),
      'max_duration_s', 7200, 'checkpoint', jsonb_build_object('every_s', 600, 'keep', 3))
  from piece p join made on made.r = p.r join requests req on req.id = made.id
  where req.ended_at is null;
insert into needs (task_id, needs_id, port, output)
  select 'tsk_' || lpad(to_hex(n), 32, '0'), 'tsk_' || lpad(to_hex(n - 1), 32, '0'), 'x', 'model'
  from piece where n > r and not is_sweep;
create temporary table ended on commit drop as
  select n, id, request_id, tenant_id, user_id, state, started_at, ended_at, total_held_us
  from tasks join piece on id = 'tsk_' || lpad(to_hex(n), 32, '0') where ended_at is not null;
insert into placements (task_id, epoch, device_id, tenant_id, user_id, kind, cost_milli,
    incarnation, launched_at, started_at, ended_at, held_us, charged_us, first_step, last_step,
    "end")
  select id, 1, 'h.0', tenant_id, user_id, 'cpu', 1000, 'i', started_at, started_at, ended_at,
    total_held_us, total_held_us, 0, 1000,
    case state when 'done' then 'finished' when 'failed' then 'failed' else 'stopped' end
  from ended;
insert into events (tenant_id, request_id, task_id, type, message, at, data)
  select tenant_id, id, null, 'request.submitted', 'Submitted with its tasks by a user.',
    submitted_at, cast('{}' as jsonb) from requests where id in (select id from made)
  union all
  select tenant_id, request_id, id, 'task.launched',
    'team used least for its weight of all that wait.', started_at,
    cast('{"device": "h.0", "rule": "F3"}' as jsonb) from ended
  union all
  select tenant_id, request_id, id, 'task.started', 'Started on h.0.', started_at,
    cast('{"step": 0}' as jsonb) from ended
  union all
  select tenant_id, request_id, id, 'task.' || state, 'It is ' || state || '.', ended_at,
    cast('{}' as jsonb) from ended
  union all
  select tenant_id, id, null, 'request.' || state, 'All tasks have ended.', ended_at,
    cast('{}' as jsonb) from requests where id in (select id from made) and ended_at is not null;
insert into logs (task_id, epoch, line, at, stream, text)
  select id, 1, line, started_at + interval '1 s' * line, 'stdout',
    'step ' || 50 * line || ' loss ' || 1.0 / line || ' lr 0.001 tokens/s 12000'
  from ended, generate_series(1, 20) line where n % 5 = 1;
insert into metrics (task_id, step, at, values)
  select id, 100 * k, started_at + interval '1 min' * k,
    jsonb_build_object('loss', 1.0 / k, 'accuracy', k / 20.0)
  from ended, generate_series(1, 10) k where n % 10 = 1;
insert into checkpoints (id, task_id, tenant_id, epoch, step, sha256, size_bytes, took_us,
    created_at)
  select 'ckp_' || lpad(to_hex(3 * n + k), 32, '0'), t.id, t.tenant_id, 1, 300 * k,
    repeat(md5('image' || n || k), 2), 40000000, 300000, t.ended_at
  from ended t join requests r on r.id = t.request_id, generate_series(1, 3) k
  where r.keep or t.ended_at > now() - interval '1 day';
insert into datablocks (id, tenant_id, user_id, name, version, format, sha256, size_bytes,
    tensor_count, task_id, output, created_at)
  select 'dbk_' || lpad(to_hex(n), 32, '0'), tenant_id, user_id, 'model-' || n % 1000, 1 + n / 1000,
    'safetensors', repeat(md5('model' || n), 2), 40000000, 100, id, 'model', ended_at
  from ended where n % 100 = 1 and state = 'done';
insert into cycles (island, at, now_s, snapshot)
  select 'local', ended_at, 0, jsonb_build_object('tasks', repeat(md5(id), 30)) from ended
  where ended_at > now() - interval '7 days' and n % 2 = 0;
insert into decisions (cycle_id, at, task_id, tenant_id, move, rule, because, devices)
  select (select max(id) from cycles), started_at, id, tenant_id, 'launch', 'F3',
    'team used least for its weight of all that wait.', '["h.0"]' from ended
  where ended_at > now() - interval '7 days';
insert into deliveries (id, webhook_id, tenant_id, request_id, url, type, body, state, attempt,
    created_at, ended_at)
  select 'msg_' || substr(r.id, 5), 'whk_of_alpha', tenant_id, r.id, 'https://example.org/',
    'request.' || r.state, '{"type": "request.done"}', 'delivered', 1, ended_at, ended_at
  from requests r join tenants t on t.id = r.tenant_id and t.name = 'alpha'
  where r.id in (select id from made) and ended_at > now() - interval '30 days';
insert into idempotency (user_id, key, route, body_sha256, status, response, created_at)
  select user_id, id, 'POST /v1/requests', md5(id), 202, descriptor, submitted_at from requests
  where id in (select id from made) and submitted_at > now() - interval '1 day';
insert into usage (bucket, tenant_id, user_id, kind, bucket_s, held_us, charged_us)
  select case when is_fine then date_bin('10 s', ended_at, 'epoch')
      else date_trunc('hour', ended_at) end, tenant_id, user_id, 'cpu',
    case when is_fine then 10 else 3600 end, sum(total_held_us), sum(total_held_us)
  from (select *, ended_at > now() - interval '2 days' as is_fine from ended) booked
  group by 1, 2, 3, 5
  on conflict on constraint pk_usage do update set held_us = usage.held_us + excluded.held_us,
    charged_us = usage.charged_us + excluded.charged_us
"""

SUMS = """
insert into accounts (user_id, tenant_id, faded, total_us)
  select user_id, tenant_id, sum(charged_us), sum(charged_us) from usage group by 1, 2;
insert into daily_usage (day, tenant_id, user_id, kind, held_us, charged_us)
  select date_bin('1 day', bucket, 'epoch'), tenant_id, user_id, kind, sum(held_us), sum(charged_us)
  from usage where bucket_s >= 3600 group by 1, 2, 3, 4;
insert into lines (island, user_id, kind, memory_bytes, width, tenant_id, waiting)
  select island, user_id, kind, memory_bytes, devices_min, tenant_id, count(*) from tasks
  where state = 'waiting' group by 1, 2, 3, 4, 5, 6
"""

LEDGER = """
select tenant_id, user_id, kind, date_trunc('hour', bucket), sum(held_us), sum(charged_us)
  from usage group by 1, 2, 3, 4
union all select tenant_id, user_id, '', null, faded, total_us from accounts order by 1, 2, 3, 4
"""


def write_year(tasks: int) -> None:
    """Write a year of `tasks` tasks; foreign keys are not checked meanwhile."""
    _run(PEOPLE)
    for first in range(0, tasks, PIECE):
        end = min(first + PIECE, tasks)
        _run(WORK, first=first, end=end, tasks=tasks, queued=QUEUED, sweep=newest_sweep(tasks))
    _run(SUMS)
    _administer(tasks // 500)
    engine = transactions.engine().execution_options(isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text("vacuum analyze"))
        connection.execute(text("checkpoint"))


def _run(statements: str, **given: int) -> None:
    with transactions.transaction() as session:
        session.execute(text("set local session_replication_role = replica"))
        for statement in statements.split(";\n"):
            session.connection().execute(text(statement), given)


def _administer(times: int) -> None:
    """Let an administrator change the weight of a tenant again and again: the audit log grows."""
    for n in range(times):
        with transactions.transaction() as session:
            audit.begin(session, Call(operation="update_tenant", user="admin"))
            session.get_one(Tenant, f"ten_{5 + n % 15:032x}").weight_milli = 1000 + n


# --- what is called -----------------------------------------------------------------------------

#: What stands for an id in an address, by the start of its path.
IDS = {
    "/v1/requests/": "{sweep}",
    "/v1/tasks/": "{task}",
    "/v1/webhooks/": "whk_of_alpha",
    "/ui/requests/": "{sweep}",
    "/ui/members/": "usr_of_alpha",
    "/ui/webhooks/": "whk_of_alpha",
}
FILTERS = {
    "/v1/requests": (
        "state=failed",
        "state=queued,running",
        "phase=queued",
        "phase=preempted",
        "phase=failed",
        "label=exp:a7",
        "label=exp:none",
        "name={name}",
        "name=none",
        "id_ends={end}",
        "submitted_after=2100-01-01T00:00:00Z",
    ),
    "/v1/tasks": (
        "state=failed",
        "state=waiting",
        "state=splicing",
        "phase=preempted",
        "phase=paused",
        "request_id={sweep}",
    ),
    "/v1/requests/{id}/logs": ("tail=100", "grep=loss", "grep=none"),
    "/v1/datablocks": ("latest=true", "format=npy", "name=model-1", "name=none"),
    "/v1/queue": ("state=waiting", "kind=cpu"),
    "/v1/audit-events": ("operation=none", "target_kind=tenant", "action=refused", "user_id=none"),
    "/v1/webhooks/{id}/deliveries": ("state=pending",),
    "/ui/requests": ("state=queued", "state=preempted", "state=failed"),
    "/ui/requests/{id}": ("grep=none",),
}
#: Reads that are no lists, but may grow with what is stored.
OTHERS = (
    "/v1/requests/{small}",
    "/v1/requests/{sweep}",
    "/v1/requests/{sweep}/plan",
    "/v1/tasks/{task}",
    "/v1/tasks/{task}/explain",
    "/v1/fair-share",
    "/v1/usage",
    "/v1/usage?since={year}",
    "/v1/usage?since={year}&group_by=bucket,user&interval=1d",
    "/v1/audit-events/verification",
    "/ui/requests/{small}",
)


def newest_sweep(tasks: int) -> int:
    """Return the number of the newest request of 900 tasks that has ended."""
    block = (tasks - QUEUED) // 900 - 1
    return 900 * (block - (block - 5) % 20)


def list_addresses(tasks: int) -> Iterator[str]:
    """Yield the addresses of all lists of the API, with each filter, and of some other reads."""
    for path, operations in app.openapi()["paths"].items():
        named = {one.get("name") for one in operations.get("get", {}).get("parameters", ())}
        if "cursor" in named and not path.endswith("/stream"):
            yield from _filtered(path, tasks)
    yield from (_with_ids(path, tasks) for path in OTHERS)


def every_address(tasks: int) -> Iterator[str]:
    """Yield the addresses of all pages, and of all lists of the API."""
    for path in page_paths():
        yield from _filtered(path, tasks)
    yield from list_addresses(tasks)


def _filtered(path: str, tasks: int) -> Iterator[str]:
    for start, id in IDS.items():
        if path.startswith(start):
            plain = path.replace("{id}", id)
            break
    else:
        plain = path
    yield _with_ids(plain, tasks)
    for asked in FILTERS.get(path, ()):
        yield _with_ids(f"{plain}?{asked}", tasks)


def _with_ids(path: str, tasks: int) -> str:
    sweep = newest_sweep(tasks)
    return path.format(
        sweep=f"req_{sweep:032x}",
        task=f"tsk_{sweep + 1:032x}",
        small=f"req_{sweep - 3:032x}",
        name=f"run-{sweep}",
        end=f"{sweep:08x}",
        year=time.strftime("%Y-%m-%dT00:00:00Z", time.gmtime(time.time() - 365 * 86400)),
    )


# --- live load ----------------------------------------------------------------------------------


@dataclass
class Live:
    """Holds what was measured of the service in use: milliseconds, and seconds of pieces."""

    submit_ms: list[float] = field(default_factory=list)
    read_ms: list[float] = field(default_factory=list)
    pieces_s: list[float] = field(default_factory=list)
    chores_s: list[float] = field(default_factory=list)
    failed: list[BaseException] = field(default_factory=list)


@contextmanager
def _used(service: Service, tasks: int) -> Iterator[Live]:
    """Submit and read at a steady pace, and let control assign and tidy, while this lasts."""
    from workers.control.controller import Control  # reads the settings when it is imported

    live, done, submitter, reader = Live(), threading.Event(), Caller(service), Caller(service)
    body = json.dumps(described(service.bundle)).encode()
    addresses = [path for path in list_addresses(tasks) if path.startswith(("/v1/r", "/v1/t"))]
    control = Control()

    def submit(_: int) -> None:
        live.submit_ms.append(_call_ms(submitter, "POST /v1/requests", body, 202))

    def read(n: int) -> None:
        address = addresses[n % len(addresses)]
        live.read_ms.append(_call_ms(reader, f"GET {address}", b"", 200))

    def manage(_: int) -> None:
        began_s, was_due_s = time.perf_counter(), control.chores_due_s
        control.nudge()
        control.look()
        if control.chores_due_s != was_due_s:
            live.chores_s.append(time.perf_counter() - began_s)

    paces = ((submit, SUBMITS_PER_S), (read, READS_PER_S), (manage, 1.0))
    threads = [
        threading.Thread(target=_paced, args=(act, per_s, done, live)) for act, per_s in paces
    ]
    for thread in threads:
        thread.start()
    try:
        yield live
    finally:
        done.set()
        for thread in threads:
            thread.join()
    if live.failed:
        raise live.failed[0]


def _paced(act: Callable[[int], None], per_s: float, done: threading.Event, live: Live) -> None:
    """Act `per_s` times a second, and less often only while an act takes longer."""
    n, due_s = 0, time.monotonic()
    try:
        while not done.wait(max(0.0, due_s - time.monotonic())):
            act(n)
            n, due_s = n + 1, max(due_s + 1 / per_s, time.monotonic())
    except BaseException as error:
        live.failed.append(error)


def _call_ms(caller: Caller, first: str, body: bytes, expected: int) -> float:
    began_s = time.perf_counter()
    status = caller.call(first, body)
    assert status == expected, (first, status)
    return 1e3 * (time.perf_counter() - began_s)


def _delete(live: Live, seconds: float) -> None:
    """Let the request deleter work for this long, with its own rests."""
    from workers.control.request_deleter import LOOK_S, RequestDeleter

    os.environ["ROUNDHOUSE_REQUESTS_KEPT_DAYS"] = str(KEPT_DAYS)
    settings.cache_clear()
    deleter, until_s = RequestDeleter(), time.monotonic() + seconds
    while time.monotonic() < until_s:
        began_s = time.perf_counter()
        rest_s = deleter.look()
        live.pieces_s.append(time.perf_counter() - began_s)
        if rest_s == LOOK_S:
            return
        time.sleep(rest_s)


# --- figures ------------------------------------------------------------------------------------


def main() -> int:
    calls, seconds, most = (10, 10.0, 100_000) if quick() else (20, 60.0, 1_000_000)
    most = next((int(word) for word in sys.argv[1:] if word.isdigit()), most)
    with _service(FEW) as (readers, _, _):
        few = dict(looked_at(readers, every_address(FEW), calls))
    with _service(most) as (readers, service, home):
        size = _size()
        many = dict(looked_at(readers, every_address(most), calls))
        before, tasks = _rows(LEDGER), _count()
        with island_process(home, ISLAND):
            with _used(service, most) as alone:
                time.sleep(seconds)
            rounds = tally_of(ISLAND)
            with _used(service, most) as beside:
                _delete(beside, seconds)
                time.sleep(2 * WRITTEN_EVERY_S)  # the island's tally is written now and then
            longest_s = longest_round_s(rounds, tally_of(ISLAND))
        is_same = _rows(LEDGER) == before
        deleted = tasks - _count() + len(alone.submit_ms) + len(beside.submit_ms)
    targets = [
        _at_most(f"slowest page, p95, {most:,} tasks", _slowest(many, "/ui/"), "ms", BOUND_MS),
        _at_most(f"slowest list, p95, {most:,} tasks", _slowest(many, "/v1/"), "ms", BOUND_MS),
        _at_most("longest piece of a deletion", max(beside.pieces_s), "s", LONGEST_PIECE_S),
        _at_most("longest round of the island meanwhile", longest_s, "s", LONGEST_PIECE_S),
        _at_most("sums of the ledger that changed", int(not is_same), "", 0),
    ]
    same = dict(zip(every_address(most), every_address(FEW), strict=True))  # other ids
    peers = {
        **size,
        f"slowest page, p95 ms, {FEW:,} tasks": _slowest(few, "/ui/"),
        f"slowest list, p95 ms, {FEW:,} tasks": _slowest(few, "/v1/"),
        "pieces deleted": len(beside.pieces_s),
        "tasks deleted": deleted,
        "load": round(os.getloadavg()[0], 1),
        **{f"alone: {name}": value for name, value in _told(alone).items()},
        **{f"beside deletes: {name}": value for name, value in _told(beside).items()},
        **{path: {"p95 ms": p95(ms), "few": p95(few[same[path]])} for path, ms in _by_time(many)},
    }
    return report("year", targets, peers)


@contextmanager
def _service(tasks: int) -> Iterator[tuple[list[Reader], Service, Path]]:
    """Serve a year of `tasks` tasks from servers of its own."""
    with ExitStack() as stack:
        home = stack.enter_context(temporary_home())
        url, redis = (stack.enter_context(s(home)) for s in (embedded_postgres, embedded_redis))
        os.environ |= {"DATABASE_URL": url, "REDIS_URL": redis, "ROUNDHOUSE_HOME": str(home)}
        for cached in (settings, transactions.engine, transactions._sessions, outbox.celery):
            cached.cache_clear()
        stack.callback(lambda: transactions.engine().dispose())
        service = stack.enter_context(serving())
        began_s = time.monotonic()
        write_year(tasks)
        sys.stderr.write(f"{tasks:,} tasks were written in {time.monotonic() - began_s:.0f} s\n")
        yield [signed_in(service, *who) for who in ALL_READERS], service, home


def _at_most(name: str, value: float, unit: str, bound: float) -> Target:
    return Target(name=name, value=round(value, 3), unit=unit, op="<=", bound=bound)


def _slowest(took: Took, start: str) -> float:
    return max(p95(ms) for path, ms in took.items() if path.startswith(start))


def _by_time(took: Took) -> list[tuple[str, list[float]]]:
    return sorted(took.items(), key=lambda item: -p95(item[1]))


def _told(live: Live) -> dict[str, float]:
    told: dict[str, float] = {"submits": len(live.submit_ms), "reads": len(live.read_ms)}
    for name, ms in (("submit", live.submit_ms), ("read", live.read_ms)):
        told |= {f"{name}, p50 ms": round(statistics.median(ms), 1), f"{name}, p95 ms": p95(ms)}
    return told | {"longest chores, s": round(max(live.chores_s, default=0.0), 2)}


def _size() -> dict[str, Any]:
    rows = _rows(
        "select relname, pg_total_relation_size(oid) from pg_class where relkind = 'r'"
        " and relnamespace = cast('public' as regnamespace) order by 2 desc limit 8"
    )
    tables = {f"{name}, MB": round(size / 1e6) for name, size in rows}
    [(whole,)] = _rows("select pg_database_size(current_database())")
    return {"on disk, MB": round(whole / 1e6), **tables}


def _count() -> int:
    [(count,)] = _rows("select count(*) from tasks")
    return int(count)


def _rows(query: str) -> list[tuple[Any, ...]]:
    with transactions.transaction() as session:
        return [tuple(row) for row in session.execute(text(query))]


if __name__ == "__main__":
    sys.exit(main())
