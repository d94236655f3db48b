"""Answers GET /metrics for Prometheus: counts of API calls, and the figures of
`app.insight.metrics`.

The counts are those of this process. If PROMETHEUS_MULTIPROC_DIR names a folder, which its client
library reads at the start, they are those of all processes that share the folder.

The figures cover all tenants. So the call needs a key of the root tenant, of any role, or a
platform admin's key. (A viewer of the root tenant sees nothing else of other tenants.)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from fastapi.routing import APIRoute
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.access import wrong_keys
from app.api.access.auth import Authed
from app.api.access.caller import Caller
from app.api.access.scoped import ScopedRoute, operation_id
from app.api.problems import declared
from app.db.transactions import Db
from app.errors import Forbidden
from app.insight.metrics import figures

FAILURES_MINUTES, FAILURES_MIN, FAILURES_SHARE = 5, 3, 0.01
BOUNDS_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)

EXAMPLE = 'roundhouse_waiting_tasks{kind="cuda"} 3.0\n'

_SHARED = "PROMETHEUS_MULTIPROC_DIR"

disable_created_metrics()  # such metrics would double the counters' series for nothing
registry = CollectorRegistry()
ProcessCollector(registry=registry)
registry.register(wrong_keys.counted)
answers = Counter(
    "roundhouse_api_answers",
    "Responses of the API.",
    ["operation", "status"],
    registry=registry,
)
seconds = Histogram(
    "roundhouse_api_seconds",
    "Time until the response began, including a requested wait (`?wait=`).",
    ["operation"],
    buckets=BOUNDS_S,
    registry=registry,
)


class Failures:
    """Counts the answers of 5xx of this process in the last minutes, for `/readyz`."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._minutes: dict[int, list[int]] = {}  # minute -> [calls, failed ones]

    def count(self, status: int) -> None:
        now = int(self._clock_s() // 60)
        for old in [each for each in self._minutes if each <= now - FAILURES_MINUTES]:
            del self._minutes[old]
        minute = self._minutes.setdefault(now, [0, 0])
        minute[0] += 1
        minute[1] += status >= 500

    def told(self) -> str:
        """Say how many calls failed, if it is more than a few; otherwise empty."""
        since = int(self._clock_s() // 60) - FAILURES_MINUTES
        recent = [counts for minute, counts in [*self._minutes.items()] if minute > since]
        calls, failed = (sum(counts[n] for counts in recent) for n in (0, 1))
        if failed < FAILURES_MIN or failed < FAILURES_SHARE * calls:
            return ""
        told = f"{failed} of {calls} calls of the last {FAILURES_MINUTES} minutes failed (5xx)"
        return f"{told}: the log says why"


failures = Failures()


class Measured:
    """Counts every answer, and the time until it begins; a stream may last for hours after that."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        began_s, answered = time.perf_counter(), False

        async def send_measured(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start" and not answered:
                answered = True
                _count(scope, message["status"], time.perf_counter() - began_s)
            await send(message)

        try:
            await self.app(scope, receive, send_measured)
        except Exception:
            if not answered:  # Starlette answers it outside of this middleware
                _count(scope, 500, time.perf_counter() - began_s)
            raise


def _count(scope: Scope, status: int, took_s: float) -> None:
    operation = _operation(scope)
    answers.labels(operation, status).inc()
    seconds.labels(operation).observe(took_s)
    if operation != "getReadyz":  # its 503 is a finding, not a failure
        failures.count(status)


def _operation(scope: Scope) -> str:
    """Return a word of a closed set, whatever the path is."""
    route = scope.get("route")
    if isinstance(route, APIRoute):
        return operation_id(route)
    return "static" if scope["path"].startswith(("/static/", "/docs/")) else "none"


# --- the page that is scraped -------------------------------------------------------------------

router = APIRouter(tags=["meta"], route_class=ScopedRoute)


def _watcher(caller: Authed) -> Caller:
    if not (caller.in_root or caller.sees_all):
        raise Forbidden(
            "metrics cover all tenants, so they need a key of a user of the root tenant"
        )
    return caller


class _Together:
    def __init__(self, read: list[Metric]) -> None:
        self.read = read

    def collect(self) -> Iterator[Metric]:
        return chain(_answered().collect(), self.read)


def _answered() -> CollectorRegistry:
    """Return the registry of this process, or a joint one of all processes that share the folder.

    The joint one has no figures of a single process (`process_*`), which would differ from scrape
    to scrape.
    """
    if not os.environ.get(_SHARED):
        return registry
    together = CollectorRegistry()
    MultiProcessCollector(together)
    return together


@router.get(
    "/metrics",
    response_class=Response,
    summary="Metrics for Prometheus",
    responses={
        200: {"content": {"text/plain": {"example": EXAMPLE}}},
        **declared(401, 403, 429, 503),
    },
)
def get_metrics(
    request: Request, session: Db, _: Annotated[Caller, Depends(_watcher, scope="function")]
) -> Response:
    """Answers in the text format of Prometheus, or in that of OpenMetrics if `Accept` asks for it.

    docs/reference/metrics.md has the table of all figures. Figures from the database may be some
    seconds old.
    """
    encode, media_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(_Together(figures.newest(session))), media_type=media_type)
