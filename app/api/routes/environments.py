"""Environments: the packages that requests bring, as they were locked."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Query
from sqlalchemy import select
from sqlalchemy.orm import Session

from app.api.access.auth import Authed, Submitter
from app.api.access.caller import Caller
from app.api.access.visibility import of_caller
from app.api.cursors import Paged
from app.api.middleware import v1_router
from app.api.problems import declared
from app.api.schemas.base import Page
from app.api.schemas.environments import EnvironmentOut, EnvironmentWithLock
from app.db.models import Environment
from app.db.transactions import Db, lock_again
from app.errors import Gone, NotFound
from app.identity import audit
from app.insight import reports
from app.insight.reports.environments import EnvironmentLine
from app.settings import settings
from app.storage.store import Damaged, Store

router = v1_router("environments")


@router.get(
    "/environments", response_model=Page[EnvironmentOut], summary="List environments, newest first"
)
def list_environments(
    paging: Paged,
    caller: Authed,
    session: Db,
    state: Annotated[
        Literal["locking", "locked", "failed", "stale"] | None, Query(description="Its state.")
    ] = None,
) -> dict[str, Any]:
    """Lists the environments of the tenants that you see.  Each is what one file of packages was
    locked to; requests with the same file share it.
    """
    query = select(Environment).where(of_caller(caller, Environment.tenant_id))
    if state is not None:
        query = query.where(Environment.state == state)
    found = paging.read(session, query, by=Environment.id, newest_first=True)
    return found.page([_shown(line) for line in reports.environments(session, found.rows)])


@router.get(
    "/environments/{id}",
    response_model=EnvironmentWithLock,
    summary="Show an environment and its lock",
    responses=declared(404, 410),
)
def get_environment(id: str, caller: Authed, session: Db) -> dict[str, Any]:
    """Shows the environment with its whole lock."""
    row = _find(session, caller, id)
    (line,) = reports.environments(session, [row])
    return {**_shown(line), "lock": _lock(row)}


@router.post(
    "/environments/{id}/refresh",
    response_model=EnvironmentOut,
    summary="Have an environment locked anew",
    responses=declared(403, 404),
)
def refresh_environment(id: str, caller: Submitter, session: Db) -> dict[str, Any]:
    """The next request that names the file gets the newest versions that fit, with a new lock.

    Requests that were submitted before keep the packages that they have.  An environment that is
    not locked is left as it is: it is locked anew anyhow.
    """
    row = _find(session, caller, id)
    lock_again(session, row)  # control may be writing its lock
    audit.asked(session, row)
    if row.state == "locked":
        row.state = "stale"
    session.flush()
    (line,) = reports.environments(session, [row])
    return _shown(line)


def _find(session: Session, caller: Caller, id: str) -> Environment:
    query = select(Environment).where(Environment.id == id)
    row = session.scalar(query.where(of_caller(caller, Environment.tenant_id)))
    if row is None:
        raise NotFound("environment", id)
    return row


def _lock(row: Environment) -> str | None:
    if row.lock_sha256 is None:
        return None
    try:
        with Store.at(settings().store_address).open(row.lock_sha256) as file:
            return file.read().decode()
    except Damaged as error:
        raise Gone(f"{error}; tell an administrator") from error


def _shown(line: EnvironmentLine) -> dict[str, Any]:
    row = line.row
    plain = ("id", "tenant_id", "user_id", "path", "sort", "python", "state", "message")
    more = ("platform", "lock_sha256", "created_at", "locked_at")
    return {
        **{name: getattr(row, name) for name in (*plain, *more)},
        "packages": [{"name": name, "version": version} for name, version in row.packages],
        "lock_us": row.took_us,
        "hosts": [
            {"host": one.host, "size_bytes": one.size_bytes, "build_us": one.took_us}
            for one in line.hosts
        ],
        "installing": [
            {"host": one.host, "state": one.state, "message": one.told} for one in line.installing
        ],
        "used_at": line.used_at,
    }
