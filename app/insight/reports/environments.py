"""Lists the environments of tenants, and the hosts on which each one is built."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import BigInteger, String, cast, column, func, select, true
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Session

from app.db.models import Device, Environment, Request, Tenant, User


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltOn:
    """Names a host that has an environment; `took_us` is how long it took to build there."""

    host: str
    size_bytes: int
    took_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallingOn:
    """Names a host that must build an environment; `state` is one of
    `core.model.device_choice.BUILD_STATES`.
    """

    host: str
    state: str
    told: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentLine:
    """An environment in a list; `used_at` is when a request last named it."""

    row: Environment
    tenant: str
    user: str
    used_at: datetime | None
    hosts: Sequence[BuiltOn]
    installing: Sequence[InstallingOn]


def newest_environments(
    session: Session, tenant: str | None, *, before: str | None = None, limit: int = 50
) -> list[EnvironmentLine]:
    """Return environments, newest first; `before` is the id of the last one seen."""
    query = select(Environment).order_by(Environment.id.desc()).limit(limit)
    if tenant is not None:
        query = query.where(Environment.tenant_id == tenant)
    if before is not None:
        query = query.where(Environment.id < before)
    return environments(session, session.scalars(query).all())


def environments(session: Session, rows: Sequence[Environment]) -> list[EnvironmentLine]:
    """Return what is shown of these environments, in their order."""
    ids = [row.id for row in rows]
    used = select(Request.environment_id, func.max(Request.submitted_at))
    used = used.where(Request.environment_id.in_(ids)).group_by(Request.environment_id)
    used_at = {id: at for id, at in session.execute(used)}
    tenants = _names(session, Tenant, {row.tenant_id for row in rows})
    users = _names(session, User, {row.user_id for row in rows})
    locks = {row.lock_sha256 for row in rows} - {None}
    built, installing = _built(session, locks), _installing(session, locks)
    return [
        EnvironmentLine(
            row=row,
            tenant=tenants[row.tenant_id],
            user=users[row.user_id],
            used_at=used_at.get(row.id),
            hosts=built.get(row.lock_sha256 or "", []),
            installing=installing.get(row.lock_sha256 or "", []),
        )
        for row in rows
    ]


def _names(session: Session, model: type[Tenant | User], ids: set[str]) -> dict[str, str]:
    rows = session.execute(select(model.id, model.name).where(model.id.in_(ids)))
    return {id: name for id, name in rows}


def _built(session: Session, locks: set[str | None]) -> dict[str, list[BuiltOn]]:
    """Return for each lock the hosts with a device that is up and reports the environment."""
    if not locks:
        return {}
    pair = func.jsonb_each(Device.facts["environments"])
    told = pair.table_valued(column("key", String), column("value", JSONB)).lateral()
    size = func.max(cast(told.c.value[0].astext, BigInteger))
    took = func.max(cast(told.c.value[1].astext, BigInteger))
    query = (
        select(told.c.key, Device.host, size, took)
        .select_from(Device)
        .join(told, true())
        .where(told.c.key.in_(locks), Device.lease_until > func.now())
        .group_by(told.c.key, Device.host)
        .order_by(told.c.key, Device.host)
    )
    found = defaultdict[str, list[BuiltOn]](list)
    for lock, host, size_bytes, took_us in session.execute(query):
        found[lock].append(BuiltOn(host=host, size_bytes=size_bytes, took_us=took_us))
    return found


# which state counts if the devices of a host report several
_NEAREST = ("building", "failed", "waiting")


def _installing(session: Session, locks: set[str | None]) -> dict[str, list[InstallingOn]]:
    """Return for each lock the hosts that are up, were asked to build it, and have not built it
    yet.
    """
    if not locks:
        return {}
    pair = func.jsonb_each(Device.facts["builds"])
    told = pair.table_valued(column("key", String), column("value", JSONB)).lateral()
    query = (
        select(told.c.key, Device.host, told.c.value)
        .select_from(Device)
        .join(told, true())
        .where(told.c.key.in_(locks), Device.lease_until > func.now())
        .order_by(told.c.key, Device.host, Device.id)
    )
    found = defaultdict[tuple[str, str], list[InstallingOn]](list)
    for lock, host, (state, why) in session.execute(query):
        found[lock, host].append(InstallingOn(host=host, state=state, told=why))
    hosts = defaultdict[str, list[InstallingOn]](list)
    for (lock, _), of_devices in found.items():
        hosts[lock].append(min(of_devices, key=lambda one: _NEAREST.index(one.state)))
    return hosts
