"""Answers for the service itself: liveness, readiness, and the API page."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
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
from kombu.exceptions import OperationalError
from pydantic import BaseModel
from sqlalchemy import func, or_, select, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from app.api.metrics import failures
from app.core.security.sandbox_layers import Sandbox, summary
from app.db.guarded_connection import refusal
from app.db.models import Bundle, Device, Island
from app.db.transactions import transaction
from app.identity import secrets_key
from app.insight.reports.health import told_warnings
from app.messaging import broker, outbox
from app.settings import settings
from app.storage.store import Store

REDIS_TIMEOUT_S = 2.0
HEARD_S = 1.5  # time for control to take a message
HEARD_LOOK_S = 0.05
HOLDS_S = 2.0  # an answer holds so long: anybody may ask, and the checks write
PROBE_BYTES = 2**16
STORE_S = 2.0  # the store may try again for so long; then its last answer is told
# how long a device's refusal is reported; the device tries again sooner
REFUSAL_TOLD = timedelta(minutes=5)
READY_S = 4.0  # time limit of all checks together
NAMED = 3  # most devices that a check names
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
    """Checks that Postgres, Redis and the store take writes, the schema, the key of secrets,
    control, a leader for each island, a device that is up, and the rate of failed calls.

    Work is accepted even while the scheduler, Redis or the devices are down: it waits.  An answer
    holds for two seconds.
    """
    answer = await asyncio.shield(_shared_checks())
    return JSONResponse(answer.model_dump(), 200 if answer.ready else 503)


def _shared_checks() -> asyncio.Task[Readiness]:
    """Return the checks that run, or have just ended; begin them if there are none.

    So all callers together cost what one costs.
    """
    now_s = time.monotonic()
    last = _last_checks.get(None)
    if last is not None and (not last.checks.done() or now_s < last.began_s + HOLDS_S):
        return last.checks
    checks = asyncio.create_task(_checks())
    _last_checks.set(_Checks(checks, now_s))
    return checks


async def _checks() -> Readiness:
    rows, messages = await asyncio.gather(_rows_and_objects(), _in_time("redis", _redis_checks))
    checks = {**rows, **messages}
    checks["answers"] = Check(ok=not (told := failures.told()), detail=told or "few calls fail")
    return Readiness(ready=all(check.ok for check in checks.values()), checks=checks)


@dataclass
class _Checks:
    """Holds a run of all checks, and when it began."""

    checks: asyncio.Task[Readiness]
    began_s: float


_last_checks: RunVar[_Checks | None] = RunVar("last checks")  # of this process's event loop


async def _rows_and_objects() -> dict[str, Check]:
    """Check the database, and then the store for a bundle that the database knows."""
    rows = await _in_time("postgres", _database_checks)
    return {**rows, **await _in_time("store", lambda: {"store": _store()})}


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
        "postgres": _takes_rows,
        "islands": _islands,
        "devices": _devices,
        "sandbox": _sandbox,
        "secrets": _secrets,
    }
    try:
        with transaction() as session:
            schema = _schema(session)
            if not schema.ok:
                return {"schema": schema}  # the other questions may not fit it
            found = {"schema": schema} | {name: ask(session) for name, ask in asked.items()}
            newest = select(Bundle.sha256).order_by(Bundle.created_at.desc()).limit(1)
            _known_bundle[:] = session.scalars(newest).all()
            return found
    except (SQLAlchemyError, RuntimeError) as error:
        told = refusal(error) or f"no answer: {type(error).__name__}"
        return {"postgres": Check(ok=False, detail=told)}


# With little memory these numbers go through a file of some 300 kB beside the tables. A full disk
# refuses it, even while a small row finds room in a page that exists.
_FILE_ON_DISK = "select count(*) from generate_series(1, 15000)"


def _takes_rows(session: Session) -> Check:
    """Write a row, delete it in the same transaction, and use the disk: a database that answers may
    be read-only, or full.
    """
    row = {"row": uuid.uuid4().hex}
    session.execute(text("insert into alembic_version (version_num) values (:row)"), row)
    session.execute(text("delete from alembic_version where version_num = :row"), row)
    session.execute(text("set local work_mem = '64kB'"))
    session.execute(text(_FILE_ON_DISK))
    return Check(ok=True, detail="takes writes")


@lru_cache
def _head() -> str:
    return str(ScriptDirectory(str(MIGRATIONS)).get_current_head())


def _schema(session: Session) -> Check:
    if not session.scalar(text("select to_regclass('alembic_version')")):
        return Check(ok=False, detail="no schema: `python -m app.local.seed KEYS_FILE` makes it")
    found = session.scalar(text("select version_num from alembic_version"))
    detail = f"at revision {found}; the newest is {_head()}"
    if found != _head():
        return Check(ok=False, detail=f"{detail}: `alembic upgrade head` brings it there")
    return Check(ok=True, detail=detail)


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
    """Count devices; one that failed is named, and one that is silent without having said so."""
    is_up = func.coalesce(Device.lease_until > func.now(), False)
    left = Device.facts.has_key("leaving") | Device.cordoned
    failed = Device.facts["failed"].astext
    rows = session.execute(select(Device.id, is_up, left, failed).order_by(Device.id)).all()
    live = sum(up for _, up, *_ in rows)
    silent = [id for id, up, is_meant, why in rows if not (up or is_meant or why)]
    faulty = [f"{id}: {why.rstrip('.')}" for id, up, _, why in rows if why and not up]
    more = f" and {len(silent) - NAMED} more" if len(silent) > NAMED else ""
    told = f"; no heartbeat of {', '.join(silent[:NAMED])}{more}" if silent else ""
    told += "".join(f"; {one}" for one in faulty[:NAMED])
    unfit = select(Device.id).where(Device.fitness.has_key("cordon")).order_by(Device.id)
    if names := session.scalars(unfit.limit(NAMED)).all():
        told += f"; cordoned for their health: {', '.join(names)}"
    return Check(ok=live > 0, detail=f"{live} of {len(rows)} are up{told}{_warnings(session)}")


def _warnings(session: Session) -> str:
    up = select(Device).where(Device.lease_until > func.now()).order_by(Device.id)
    devices = session.scalars(up).all()
    off = [f"{device.id}: {told}" for device in devices for told in told_warnings(device)]
    return "".join(f"; {told.rstrip('.')}" for told in off[:NAMED])


def _secrets(session: Session) -> Check:
    told = secrets_key.lost(session, settings().secrets_key_file)
    return Check(ok=not told, detail=told or "the key for secrets opens all of them")


def _sandbox(session: Session) -> Check:
    """Describe the sandbox of each device that is up, and devices that refuse to serve."""
    is_up = Device.lease_until > func.now()
    refused = Device.facts.has_key("refuses") & (Device.seen_at > func.now() - REFUSAL_TOLD)
    query = select(Device.id, Device.facts).where(or_(is_up, refused)).order_by(Device.id)
    found = [(id, Sandbox.of(facts)) for id, facts in session.execute(query)]
    refuses = any(sandbox.refuses for _, sandbox in found)
    return Check(ok=not refuses, detail=summary(found) or "no device has reported")


def _redis_checks() -> dict[str, Check]:
    url = settings().redis_url.get_secret_value()
    if not url:
        return {"redis": Check(ok=False, detail="REDIS_URL is not set")}
    if told := broker.refusal(url, settings().redis_tls, timeout_s=REDIS_TIMEOUT_S):
        return {"redis": Check(ok=False, detail=told)}
    try:
        control = Check(ok=_hears(), detail="takes messages")
    except (OperationalError, redis.RedisError, OSError) as error:
        return {"redis": Check(ok=False, detail=f"no answer: {type(error).__name__}")}
    if not control.ok:
        control.detail = f"took no message within {HEARD_S:g} s: it hangs, or does not run"
    return {"redis": Check(ok=True, detail="takes messages"), "control": control}


def _hears() -> bool:
    """True if control empties its queue; its process may live, and hang."""
    with outbox.celery().connection_for_write() as connection:
        client = connection.default_channel.client
        if not client.llen(broker.CONTROL_QUEUE):  # else those that wait are enough of a question
            broker.send(outbox.celery(), broker.CONTROL_PROBE, broker.CONTROL_QUEUE)
        until_s = time.monotonic() + HEARD_S
        while client.llen(broker.CONTROL_QUEUE):
            if time.monotonic() > until_s:
                return False
            time.sleep(HEARD_LOOK_S)
    return True


_known_bundle: list[str] = []  # the newest one of the database, or none


def _store() -> Check:
    """Put a small object into the store and delete it, and look for a bundle that is known."""
    address = settings().store_address
    try:
        store = Store.at(address, patience_s=STORE_S)
        if lacking := [bundle for bundle in _known_bundle if not store.has(bundle)]:
            told = f"bundle {lacking[0][:12]}… is not in {address}: is it the right store?"
            return Check(ok=False, detail=told)
        name = f"probe/{uuid.uuid4().hex}"
        store.place.keep([os.urandom(PROBE_BYTES)], lambda: name)
        store.place.delete(name)
    except OSError as error:
        return Check(ok=False, detail=f"takes no object: {error}")
    return Check(ok=True, detail="takes objects")


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


INTRODUCTION = """\
**Work.** `POST /v1/requests` submits; `GET /v1/requests/{id}` and its streams follow what becomes
of it; `GET /v1/tasks/{id}/explain` says why a task waits.

**Administration** begins with three calls: `POST /v1/tenants` makes a team, `POST /v1/users` a
member of it, and `POST /v1/keys` the member's key. Devices join when their worker starts;
`GET /v1/devices` shows them.

*Authorize* takes a key. Each operation names the scope that a key needs. Every error is
`application/problem+json`, and its `type` is the URL of an explanation."""

#: The groups of the API's page, in its order: first work, then from the tenants on administration
#: (`docs.css` has the headings).
TAGS: list[dict[str, Any]] = [
    {"name": tag, "description": description}
    for tag, description in {
        "requests": "Submit, follow and change requests.",
        "tasks": "The tasks of a request, and why each waits.",
        "shares": "Entitlements, queues, usage and scheduling decisions.",
        "checkpoints": "Checkpoints of jobs, and the tensors in them.",
        "bundles": "The code that requests run.",
        "graphs": "Programs of many small functions of a bundle.",
        "datablocks": "Named and versioned tensors that tasks can use as inputs.",
        "environments": "Packages that requests bring, as they are locked.",
        "secrets": "Values for environment variables, never shown again.",
        "tenants": "Teams, their weights, their quotas and all of their work.",
        "users and keys": "The users of a tenant, and their API keys.",
        "devices": "Islands, hosts and devices.",
        "reservations": "Devices that a tenant is guaranteed in windows, and planned maintenance.",
        "presets": "Device settings for each type of task.",
        "mounts": "Folders and container images of the hosts that tasks can see, read-only.",
        "channels": "Names for addresses that requests tell of their events.",
        "webhooks": "Notifications of ended requests, and their deliveries.",
        "simulations": "What would change with other shares or devices.",
        "audit": "The actions of administrators.",
        "meta": "The service itself.",
    }.items()
]
