"""Measure the server's time for each page of tenants and administrators, with growing data.

    python -m benchmarks.pages [--quick]

One API process as `make up` starts it shares the machine with Postgres. It has no request first,
then 3, then 100,000 (--quick: 10,000), of which nine of ten have ended and the others wait. Every
page that a signed-in browser can open is requested again and again, one call at a time. Each call
is timed from the first byte sent to the last byte received. The readers are a member, a tenant
admin and a platform admin, as far as they may see the page. The slowest reader's time counts.
"""

from __future__ import annotations

import http.client
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass

from fastapi.routing import APIRoute

from app.api.access import auth
from app.db import transactions
from app.local.embedded_servers import embedded_postgres, embedded_redis, temporary_home
from app.pages import site
from app.settings import settings
from benchmarks import Target, quick, report
from benchmarks.api_load import Service, fill, serving

BOUND_MS = 200
LONGEST_S = 10.0
READERS = (("alpha", "member"), ("alpha", "tenant_admin"), ("platform", "platform_admin"))
NOT_PAGES = {
    "/",  # leads to /ui/
    "/ui/login",  # before one is signed in
    "/ui/login/oidc",
    "/ui/login/oidc/callback",
    "/ui/stream",  # does not end
    "/ui/{rest:path}",  # addresses that do not exist
}
REQUEST, MEMBER, WEBHOOK = f"req_{1:032x}", "usr_of_alpha", "whk_of_alpha"
TENANT = "ten_below_alpha"

#: Ids and filters with which pages are requested; a page without an entry by its address alone.
ASKED = {
    "/ui/requests": [
        "/ui/requests",
        "/ui/requests?state=queued",
        "/ui/requests?q=nothing+of+this+name",
        "/ui/requests?q=exp:a7&show=label.exp",
        "/ui/requests?show=label.exp&sort=-label.exp",
    ],
    "/ui/requests/{id}": [f"/ui/requests/{REQUEST}"],
    "/ui/requests/{id}/again": [f"/ui/requests/{REQUEST}/again"],
    "/ui/requests/{id}/log": [f"/ui/requests/{REQUEST}/log"],
    "/ui/compare": [f"/ui/compare?run={REQUEST}&run=req_{2:032x}"],
    "/ui/tenants/{id}": [f"/ui/tenants/{TENANT}"],
    "/ui/members/{id}": [f"/ui/members/{MEMBER}"],
    "/ui/webhooks/{id}": [f"/ui/webhooks/{WEBHOOK}"],
}

PEOPLE = f"""
insert into users (id, tenant_id, name) select '{MEMBER}', id, 'shown' from tenants
  where name = 'alpha';
insert into tenants (id, name, parent_id) select '{TENANT}', 'below', id from tenants
  where name = 'alpha';
insert into webhooks (id, tenant_id, url, events, secret)
  select '{WEBHOOK}', id, 'https://example.org/', '["request.done"]', 's' from tenants
  where name = 'alpha'
"""

#: Inserts requests `first` to `last` over a month, with a task, an event, placements and usage.
FILL = """
insert into requests (id, tenant_id, user_id, name, state, labels, submitted_at, ended_at)
  select 'req_' || lpad(to_hex(n), 32, '0'), :tenant, :user, 'r' || n,
    case when n % 10 = 0 then 'queued' else 'done' end,
    jsonb_build_object('exp', 'a' || n % 1000), now() - interval '1 min' * (n % 43200),
    case when n % 10 > 0 then now() - interval '1 min' * (n % 43200) end
  from generate_series(cast(:first as int), :last) n;
insert into tasks (id, request_id, tenant_id, user_id, island, ordinal, name, type, kind, state,
    submitted_at, waiting_since, ended_at, descriptor)
  select 'tsk_' || substr(id, 5), id, tenant_id, user_id, 'local', 0, 'train', 'default', 'cpu',
    case when state = 'queued' then 'waiting' else 'done' end, submitted_at,
    case when state = 'queued' then submitted_at end, ended_at,
    '{"run": {"job": "train:Train"}, "outputs": [], "max_duration_s": 100,
      "checkpoint": {"every_s": 60, "keep": 3}}'
  from requests where id not in (select request_id from tasks);
insert into events (tenant_id, request_id, task_id, type, message)
  select tenant_id, request_id, id, 'task.' || state, 'It is ' || state || '.' from tasks
  where state in ('waiting', 'done') and id not in
    (select task_id from events where task_id is not null);
insert into placements (task_id, epoch, device_id, tenant_id, user_id, kind, cost_milli,
    incarnation, launched_at, started_at, ended_at)
  select id, 1, 'h.0', tenant_id, user_id, 'cpu', 1000, 'i', ended_at - interval '1 min',
    ended_at - interval '1 min', ended_at from tasks
  where state = 'done' and id not in (select task_id from placements);
insert into usage (bucket, tenant_id, user_id, kind, bucket_s, held_us, charged_us)
  select date_trunc('minute', submitted_at), tenant_id, user_id, kind, 60, sum(6e7), sum(6e7)
  from tasks where state = 'done' group by 1, 2, 3, 4
  on conflict (bucket, tenant_id, user_id, kind, bucket_s)
  do update set held_us = excluded.held_us, charged_us = excluded.charged_us;
delete from lines;
insert into lines (island, user_id, kind, memory_bytes, width, tenant_id, waiting)
  select island, user_id, kind, memory_bytes, devices_min, tenant_id, count(*) from tasks
  where state = 'waiting' group by 1, 2, 3, 4, 5, 6
"""


def main() -> int:
    calls, most = (10, 10_000) if quick() else (50, 100_000)
    took: dict[str, dict[str, list[float]]] = {}
    with temporary_home() as home, embedded_postgres(home) as postgres, embedded_redis(home) as url:
        os.environ |= {"DATABASE_URL": postgres, "REDIS_URL": url, "ROUNDHOUSE_HOME": str(home)}
        settings.cache_clear()  # modules of the pages have read others
        with serving() as service:
            fill(PEOPLE)
            readers = [signed_in(service, *who) for who in READERS]
            stored = 0
            for requests in (0, 3, most):
                if requests:
                    fill(FILL, first=stored + 1, last=requests)
                stored = requests
                took[f"{requests:,} requests"] = dict(looked_at(readers, _addresses(), calls))
    targets = [
        Target(
            name=f"the slowest page, p95, {many}",
            value=max(p95(ms) for ms in found.values()),
            unit="ms",
            op="<=",
            bound=BOUND_MS,
        )
        for many, found in took.items()
    ]
    beside = {
        f"{page}, {many}": {"p50 ms": round(statistics.median(ms), 1), "most ms": round(max(ms), 1)}
        for many, found in took.items()
        for page, ms in found.items()
    }
    return report("pages", targets, beside)


def p95(ms: list[float]) -> float:
    return round(sorted(ms)[int(0.95 * len(ms))], 1)


# --- readers ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reader:
    """Acts as a browser with a signed-in user."""

    port: int
    cookie: str

    def took_ms(self, path: str) -> float | None:
        """Return the milliseconds of the call; None for a page that the user may not see."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.connect()
        began_s = time.perf_counter()
        connection.request("GET", path, headers={"Cookie": f"{auth.COOKIE}={self.cookie}"})
        with closing(connection), connection.getresponse() as answer:
            answer.read()
        took_ms = 1e3 * (time.perf_counter() - began_s)
        assert answer.status in (200, 403, 404), (path, answer.status)
        return took_ms if answer.status == 200 else None


def signed_in(service: Service, tenant: str, role: str) -> Reader:
    with transactions.transaction() as session:
        _, cookie = auth.sign_in(session, service.keys[tenant][role])
    return Reader(service.port, cookie)


def page_paths() -> list[str]:
    """Return the paths of all pages of the service, with {id} where they have one."""
    there = {
        route.path
        for router in site.routers()
        for route in router.routes
        if isinstance(route, APIRoute) and "GET" in (route.methods or ())
    }
    return sorted(there - NOT_PAGES)


def _addresses() -> Iterator[str]:
    for path in page_paths():
        yield from ASKED.get(path, [path])


def looked_at(
    readers: list[Reader], addresses: Iterable[str], calls: int
) -> Iterator[tuple[str, list[float]]]:
    """Yield each address, and the milliseconds of each call by the reader for whom it was slowest.

    A reader calls an address `calls` times, or fewer if that would take longer than LONGEST_S.
    """
    for path in addresses:
        slowest: list[float] = []
        for reader in readers:
            if reader.took_ms(path) is None:
                continue
            found = list(_called(reader, path, calls))
            slowest = max(slowest, found, key=lambda ms: statistics.median(ms or [0.0]))
        if slowest:
            yield path, slowest


def _called(reader: Reader, path: str, calls: int) -> Iterator[float]:
    until_s = time.perf_counter() + LONGEST_S
    for _ in range(calls):
        took_ms = reader.took_ms(path)
        assert took_ms is not None, path
        yield took_ms
        if time.perf_counter() > until_s:
            return


if __name__ == "__main__":
    sys.exit(main())
