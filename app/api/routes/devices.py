"""Islands, hosts and devices: what there is to run on, and which of it takes new work.

All users may look, because the devices are shared.  The task on a device is shown only to callers
who may see the task.  Changes are for platform admins.
"""

from __future__ import annotations

from typing import Any

from fastapi import Response
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.api.access.auth import Authed, PlatformAdmin
from app.api.access.caller import Caller
from app.api.access.visibility import of_caller
from app.api.cursors import Paged
from app.api.middleware import v1_router
from app.api.problems import declared
from app.api.schemas.base import Page
from app.api.schemas.fleet import (
    DeviceOut,
    DevicePatch,
    EnrolmentIn,
    EnrolmentOut,
    HostOut,
    IslandOut,
)
from app.api.versions import IfMatch, check_version, etag
from app.core.device import health_cordons
from app.core.device.health_cordons import Fitness
from app.core.model.provisions.container_image import PREFIX
from app.core.model.provisions.mounts import need_of
from app.core.security.sandbox_layers import Sandbox
from app.db import transactions
from app.db.models import Device, Enrolment, Host, Island, Placement
from app.db.transactions import Db, after_commit
from app.errors import NotFound
from app.identity import enrolment
from app.insight.reports import device_failure, device_health
from app.intake import actions
from app.messaging import outbox

router = v1_router("devices")


# --- islands ------------------------------------------------------------------------------------


@router.get("/islands", response_model=Page[IslandOut], summary="List islands")
def list_islands(paging: Paged, caller: Authed, session: Db) -> dict[str, Any]:
    """Lists each island with its scheduler and its number of devices."""
    return paging.read(session, _islands(), by=Island.name).page()


@router.get(
    "/islands/{name}", response_model=IslandOut, summary="Show an island", responses=declared(404)
)
def get_island(name: str, caller: Authed, session: Db) -> Any:
    """Shows the island's scheduler and its number of devices."""
    found = session.execute(_islands().where(Island.name == name)).one_or_none()
    if found is None:
        raise NotFound("island", name)
    return found


def _islands() -> Any:
    return (
        select(
            Island.name,
            Island.leader,
            func.coalesce(Island.leader_until > func.now(), False).label("led"),
            Island.term,
            Island.key,
            func.count(Device.id).label("devices"),
        )
        .outerjoin(Device, Device.island == Island.name)
        .group_by(Island.name)
    )


# --- hosts --------------------------------------------------------------------------------------


@router.get("/hosts", response_model=Page[HostOut], summary="List hosts")
def list_hosts(paging: Paged, caller: Authed, session: Db) -> dict[str, Any]:
    """Lists each host with its number of devices, and how many of them are up."""
    return paging.read(session, _hosts(), by=Host.name).page()


@router.get("/hosts/{name}", response_model=HostOut, summary="Show a host", responses=declared(404))
def get_host(name: str, caller: Authed, session: Db) -> Any:
    """Shows how many devices the host has, how many are up, and whether it takes new work."""
    return _host_out(session, name)


@router.post(
    "/hosts/{name}/drain",
    response_model=HostOut,
    summary="Drain a host: it takes no new work",
    responses=declared(403, 404),
)
def drain_host(name: str, caller: PlatformAdmin, session: Db) -> Any:
    """Moves the host's tasks to free devices while they run, or pauses them at their next safe
    point; paused tasks resume in their turn.  No step is lost.

    `devices` of the host that are no longer `busy` can be switched off.
    """
    return _cordon_host(session, name, True, by=caller.user_name)


@router.post(
    "/hosts/{name}/uncordon",
    response_model=HostOut,
    summary="Let a host take work again",
    responses=declared(403, 404),
)
def uncordon_host(name: str, caller: PlatformAdmin, session: Db) -> Any:
    """Lets the host take work again.  Devices that are cordoned themselves stay cordoned."""
    return _cordon_host(session, name, False, by=caller.user_name)


def _cordon_host(session: Session, name: str, cordoned: bool, *, by: str) -> Any:
    host = session.get(Host, name, with_for_update={"key_share": True})
    if host is None:
        raise NotFound("host", name)
    host.cordoned = cordoned
    its = select(Device.id).where(Device.host == name)
    if cordoned:
        actions.empty_devices(session, session.scalars(its).all(), by=by)
    else:
        open_ = session.scalars(its.where(~Device.cordoned)).all()
        actions.leave_devices(session, open_, by=by)
    session.flush()
    after_commit(session, lambda: outbox.nudge_island(host.island))
    return _host_out(session, name)


def _hosts() -> Any:
    up = func.count(Device.id).filter(Device.lease_until > func.now())
    return (
        select(
            Host.name,
            Host.island,
            Host.cordoned,
            func.count(Device.id).label("devices"),
            up.label("up"),
        )
        .outerjoin(Device, Device.host == Host.name)
        .group_by(Host.name)
    )


def _host_out(session: Session, name: str) -> Any:
    found = session.execute(_hosts().where(Host.name == name)).one_or_none()
    if found is None:
        raise NotFound("host", name)
    return found


# --- devices ------------------------------------------------------------------------------------


@router.get("/devices", response_model=Page[DeviceOut], summary="List devices")
def list_devices(
    paging: Paged,
    caller: Authed,
    session: Db,
    island: str | None = None,
    kind: str | None = None,
) -> dict[str, Any]:
    """Lists each device: whether it is up and busy, and whether it takes new work."""
    query = _devices(caller)
    if island is not None:
        query = query.where(Device.island == island)
    if kind is not None:
        query = query.where(Device.kind == kind)
    found = paging.read(session, query, by=Device.id)
    return found.page([_shown(caller, row) for row in found.rows])


@router.get(
    "/devices/{id}", response_model=DeviceOut, summary="Show a device", responses=declared(404)
)
def get_device(id: str, response: Response, caller: Authed, session: Db) -> dict[str, Any]:
    """Shows whether the device is up and busy, and its `ETag` for a change."""
    return _device_out(session, response, caller, id)


@router.patch(
    "/devices/{id}",
    response_model=DeviceOut,
    summary="Change the cost of a device",
    responses=declared(403, 404, 412, 428),
)
def change_device(
    id: str,
    body: DevicePatch,
    response: Response,
    caller: PlatformAdmin,
    session: Db,
    if_match: IfMatch = None,
) -> dict[str, Any]:
    """Needs the device's `ETag` as `If-Match`.  The new cost counts from the next launch on."""
    device = _locked_device(session, id)
    check_version(if_match, device.version)
    device.cost_milli = round(body.cost * 1000)
    device.version += 1
    session.flush()
    return _device_out(session, response, caller, id)


@router.post(
    "/devices/{id}/cordon",
    response_model=DeviceOut,
    summary="Drain a device: it takes no new work",
    responses=declared(403, 404),
)
def cordon_device(
    id: str, response: Response, caller: PlatformAdmin, session: Db
) -> dict[str, Any]:
    """Moves its tasks to free devices while they run, or pauses them at their next safe point."""
    return _cordon_device(session, response, caller, id, True)


@router.post(
    "/devices/{id}/uncordon",
    response_model=DeviceOut,
    summary="Let a device take work again",
    responses=declared(403, 404),
)
def uncordon_device(
    id: str, response: Response, caller: PlatformAdmin, session: Db
) -> dict[str, Any]:
    """Lets the device take work again.  If its host is drained, that must be ended too.

    A device that a health rule has cordoned is checked first: it stays `cordoned` until it passes.
    """
    return _cordon_device(session, response, caller, id, False)


def _cordon_device(
    session: Session, response: Response, caller: Caller, id: str, cordoned: bool
) -> dict[str, Any]:
    device = _locked_device(session, id)
    is_checked_first = _note_wish(session, device, cordoned, by=caller.user_name)
    device.maintenance = ""  # from now on it is as this administrator wants it
    if device.cordoned != cordoned and not is_checked_first:
        device.cordoned = cordoned
        device.version += 1
        if cordoned:
            actions.empty_devices(session, [id], by=caller.user_name)
        elif not session.get_one(Host, device.host).cordoned:
            actions.leave_devices(session, [id], by=caller.user_name)
        session.flush()
        after_commit(session, lambda: outbox.nudge_island(device.island))
    return _device_out(session, response, caller, id)


def _note_wish(session: Session, device: Device, cordoned: bool, *, by: str) -> bool:
    """Record what an administrator wants of a device that a rule may have cordoned.

    True if the device serves only after it has passed a check.
    """
    before, now_s = Fitness.of(device.fitness), transactions.now_s(session)
    after = (
        health_cordons.cordon_asked(before)
        if cordoned
        else health_cordons.let_serve_asked(before, by=by, now_s=now_s)
    )
    if not device.health:  # no monitor can check it
        after = health_cordons.heard(after, None, now_s=now_s, is_cordoned=device.cordoned)
    if after != before:
        device.fitness = after.as_json()
        device.version += 1
    return after.is_checking


def _locked_device(session: Session, id: str) -> Device:
    device = session.get(Device, id, with_for_update={"key_share": True})
    if device is None:
        raise NotFound("device", id)
    return device


def _devices(caller: Caller) -> Any:
    open_ = select(Placement.task_id).where(
        Placement.device_id == Device.id, Placement.ended_at.is_(None), ~Placement.leaving
    )
    seen = open_.where(of_caller(caller, Placement.tenant_id))
    return select(
        Device,
        Host.cordoned.label("host_cordoned"),
        func.coalesce(Device.lease_until > func.now(), False).label("up"),
        open_.exists().label("busy"),
        func.array(seen.order_by(Placement.shares, Placement.id).scalar_subquery()).label("tasks"),
    ).join(Host, Host.name == Device.host)


def _device_out(session: Session, response: Response, caller: Caller, id: str) -> dict[str, Any]:
    row = session.execute(_devices(caller).where(Device.id == id)).one_or_none()
    if row is None:
        raise NotFound("device", id)
    response.headers["ETag"] = etag(row.Device.version)
    return _shown(caller, row)


def _shown(caller: Caller, row: Any) -> dict[str, Any]:
    shown = {name: getattr(row.Device, name, None) for name in DeviceOut.model_fields}
    return {
        **shown,
        "up": row.up,
        "cordoned": row.Device.cordoned or row.host_cordoned,
        "stopping": bool(row.Device.facts.get("stopping")),
        "failure": "" if row.up else device_failure(row.Device),
        "busy": row.busy,
        "task_id": row.tasks[0] if row.tasks else None,
        "tasks": row.tasks,
        "cost": row.Device.cost_milli / 1000,
        "sandbox": _sandbox(Sandbox.of(row.Device.facts)),
        "facts": _facts(row.Device.facts, shows_mounts=caller.sees_all),
        "health": device_health(row.Device),
    }


def _sandbox(said: Sandbox) -> dict[str, Any]:
    told = {"mode": said.mode, "missing": said.missing, "refuses": said.refuses}
    return {**told, "layers": list(said.standing)}


def _facts(said: dict[str, Any], *, shows_mounts: bool) -> dict[str, Any]:
    """Return the facts of a device that the caller may know; memory is shown only as sums.

    The names of mounts are left out, unless the caller may see them.
    """
    shown = {name: said[name] for name in _SHOWN if name in said}
    if "offers" in shown and not shows_mounts:
        hidden = need_of(""), PREFIX
        shown["offers"] = [each for each in shown["offers"] if not each.startswith(hidden)]
    pairs = [pair for pair in said.get("held_bytes", {}).values()]
    on_device, on_host = (sum(pair[n] for pair in pairs) for n in (0, 1))
    return {**shown, "held_bytes": {"device": on_device, "host": on_host}}


_SHOWN = (
    *(
        "model",
        "compute_capability",
        "uuid",
        "labels",
        "offers",
        "gives",
        "rack",
        "location",
        "sandbox",
        "torch",
        "protocol",
    ),
    *("capabilities", "splice", "host_memory_bytes", "limits", "unlimited"),
)


# --- enrolments ---------------------------------------------------------------------------------


@router.get(
    "/enrolments",
    response_model=Page[EnrolmentOut],
    summary="List enrolments",
    responses=declared(403),
)
def list_enrolments(paging: Paged, caller: PlatformAdmin, session: Db) -> dict[str, Any]:
    """Lists the hosts and devices that may connect, each with its key, and those that no longer
    may.
    """
    return paging.read(session, select(Enrolment), by=Enrolment.device_id).page()


@router.post(
    "/enrolments",
    status_code=201,
    response_model=EnrolmentOut,
    summary="Enrol a host or a device",
    responses=declared(403, 409),
)
def create_enrolment(body: EnrolmentIn, caller: PlatformAdmin, session: Db) -> Enrolment:
    """Accepts heartbeats of the host's devices, or of the device, from now on, if the host signed
    them with this key.

    Another key is accepted only after this enrolment was revoked.
    """
    return enrolment.enrol(session, body.device_id, body.key, by=caller.user_name)


@router.delete(
    "/enrolments/{device_id}",
    response_model=EnrolmentOut,
    summary="Revoke an enrolment",
    responses=declared(403, 404),
)
def revoke_enrolment(device_id: str, caller: PlatformAdmin, session: Db) -> Enrolment:
    """Ignores the host's devices, or the device, from now on.  When its lease ends, its tasks
    continue elsewhere, from their last checkpoint.  To lose no step, `drain` it first.
    """
    return enrolment.revoke(session, device_id)
