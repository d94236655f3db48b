"""Answers for the service itself: liveness, readiness, and the API page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import redis
from alembic.script import ScriptDirectory
from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar
from fastapi import APIRouter
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel
from sqlalchemy import func, or_, select, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from app.core.security.sandbox_layers import Sandbox, summary
from app.db.models import Device, Island
from app.db.transactions import transaction
from app.settings import settings

REDIS_TIMEOUT_S = 2.0
# how long a device's refusal is reported; the device tries again sooner
REFUSAL_TOLD = timedelta(minutes=5)
READY_S = 4.0  # time limit of all checks together
MIGRATIONS = Path(__file__).parent.parent.parent / "migrations"

router = APIRouter(tags=["meta"])


class Liveness(BaseModel):
    model_config = {"json_schema_extra": {"examples": [{"status": "alive"}]}}
    status: str = "alive"


class Check(BaseModel):
    ok: bool
    detail: str


class Readiness(BaseModel):
    """The result of all checks; `ready` if every check is ok."""

    model_config = {
        "json_schema_extra": {
            "examples": [{"ready": True, "checks": {"postgres": {"ok": True, "detail": "answers"}}}]
        }
    }
    ready: bool
    checks: dict[str, Check]


@router.get("/livez", response_model=Liveness, summary="Check that the process is alive")
async def get_livez() -> Liveness:
    """Answers without any check, and needs no thread and no connection."""
    return Liveness()


@router.get(
    "/readyz",
    response_model=Readiness,
    summary="Check that the whole system works",
    responses={503: {"model": Readiness, "description": "At least one check failed"}},
)
async def get_readyz() -> JSONResponse:
    """Checks Postgres and its schema, Redis, a leader for each island, and a device that is up.

    Work is accepted even while the scheduler, Redis or the devices are down: it waits.
    """
    postgres, redis = await asyncio.gather(
        _in_time("postgres", _database_checks), _in_time("redis", lambda: {"redis": _redis()})
    )
    checks = {**postgres, **redis}
    ready = all(check.ok for check in checks.values())
    answer = Readiness(ready=ready, checks=checks)
    return JSONResponse(answer.model_dump(), 200 if ready else 503)


async def _in_time(name: str, ask: Callable[[], dict[str, Check]]) -> dict[str, Check]:
    """Return the checks' results within READY_S; a thread that hangs is abandoned."""
    try:
        async with asyncio.timeout(READY_S):
            return await to_thread.run_sync(ask, abandon_on_cancel=True, limiter=_checkers(name))
    except TimeoutError:
        return {name: Check(ok=False, detail=f"no answer within {READY_S:g} s")}


def _checkers(name: str) -> CapacityLimiter:
    """Return a limiter for this check's own threads, because calls may occupy all other threads."""
    found = _limiters.get({})
    _limiters.set(found)
    return found.setdefault(name, CapacityLimiter(2))


_limiters: RunVar[dict[str, CapacityLimiter]] = RunVar("checkers")


def _database_checks() -> dict[str, Check]:
    asked: dict[str, Callable[[Session], Check]] = {
        "postgres": lambda session: Check(ok=True, detail="answers"),
        "schema": _schema,
        "islands": _islands,
        "devices": _devices,
        "sandbox": _sandbox,
    }
    try:
        with transaction() as session:
            return {name: ask(session) for name, ask in asked.items()}
    except (SQLAlchemyError, RuntimeError) as error:
        return {"postgres": Check(ok=False, detail=f"no answer: {type(error).__name__}")}


@lru_cache
def _head() -> str:
    return str(ScriptDirectory(str(MIGRATIONS)).get_current_head())


def _schema(session: Session) -> Check:
    if not session.scalar(text("select to_regclass('alembic_version')")):
        return Check(ok=False, detail=f"no schema; expected revision {_head()}")
    found = session.scalar(text("select version_num from alembic_version"))
    return Check(ok=found == _head(), detail=f"at revision {found}; the newest is {_head()}")


def _islands(session: Session) -> Check:
    led = func.coalesce(Island.leader_until > func.now(), False)
    rows = session.execute(select(Island.name, led)).all()
    unled = sorted(name for name, is_led in rows if not is_led)
    if not rows:
        return Check(ok=False, detail="no island scheduler has been started yet")
    if unled:
        return Check(ok=False, detail=f"no scheduler leads the islands {', '.join(unled)}")
    return Check(ok=True, detail=f"{len(rows)} led")


def _devices(session: Session) -> Check:
    up = func.count(Device.id).filter(Device.lease_until > func.now())
    known, live = session.execute(select(func.count(Device.id), up)).one()
    return Check(ok=live > 0, detail=f"{live} of {known} are up")


def _sandbox(session: Session) -> Check:
    """Describe the sandbox of each device that is up, and devices that refuse to serve."""
    is_up = Device.lease_until > func.now()
    refused = Device.facts.has_key("refuses") & (Device.seen_at > func.now() - REFUSAL_TOLD)
    query = select(Device.id, Device.facts).where(or_(is_up, refused)).order_by(Device.id)
    found = [(id, Sandbox.of(facts)) for id, facts in session.execute(query)]
    refuses = any(sandbox.refuses for _, sandbox in found)
    return Check(ok=not refuses, detail=summary(found) or "no device has reported")


def _redis() -> Check:
    url = settings().redis_url.get_secret_value()
    if not url:
        return Check(ok=False, detail="REDIS_URL is not set")
    timeouts = {"socket_timeout": REDIS_TIMEOUT_S, "socket_connect_timeout": REDIS_TIMEOUT_S}
    try:
        with redis.Redis.from_url(url, **timeouts, **settings().redis_tls) as client:
            client.ping()
    except (redis.RedisError, OSError) as error:
        return Check(ok=False, detail=f"no answer: {type(error).__name__}")
    return Check(ok=True, detail="answers")


# --- the OpenAPI page ---------------------------------------------------------------------------

_DOCS = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Roundhouse API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/static/vendor/swagger/swagger-ui.css">
<link rel="stylesheet" href="/static/docs.css">
</head>
<body>
<div id="docs"></div>
<script src="/static/vendor/swagger/swagger-ui-bundle.js"></script>
<script src="/static/docs.js"></script>
</body>
</html>
"""


@router.get("/docs", include_in_schema=False, response_class=HTMLResponse)
def show_docs() -> str:
    return _DOCS


#: The groups of the API's page, in its order: work, then what administrators change, then data.
TAGS: list[dict[str, Any]] = [
    {"name": tag, "description": description}
    for tag, description in {
        "requests": "Submit, follow and change requests.",
        "tasks": "The tasks of a request, and why each waits.",
        "shares": "Entitlements, queues, usage and scheduling decisions.",
        "tenants": "For administrators: tenants, their weights and their quotas.",
        "users and keys": "For administrators: the users of a tenant, and their API keys.",
        "devices": "For administrators: islands, hosts and devices.",
        "presets": "For administrators: device settings for each type of task.",
        "mounts": "For administrators: folders and container images of the hosts that tasks can "
        "see, read-only.",
        "simulations": "For administrators: what would change with other shares or devices.",
        "audit": "For administrators: the actions of administrators.",
        "webhooks": "For administrators: notifications of ended requests, and their deliveries.",
        "secrets": "Values for environment variables, never shown again.",
        "checkpoints": "Checkpoints of jobs, and the tensors in them.",
        "bundles": "The code that requests run.",
        "graphs": "Programs of many small functions of a bundle.",
        "datablocks": "Named and versioned tensors that tasks can use as inputs.",
        "environments": "Packages that requests bring, as they are locked.",
        "meta": "The service itself.",
    }.items()
]
