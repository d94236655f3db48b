"""Mounts: folders and container images of the hosts that an administrator names, and the tenants
that may use them.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path, Response
from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from app.api.access.auth import Authed, PlatformAdmin
from app.api.access.caller import Caller
from app.api.middleware import v1_router
from app.api.problems import declared
from app.api.schemas.base import KIND, Page
from app.api.schemas.mounts import MountIn, MountOut, MountPatch, Sort
from app.api.versions import IfMatch, check_version, etag
from app.core.model.provisions.mounts import MAX_KNOWN, is_allowed
from app.data import mounts
from app.db import tenant_tree
from app.db.models import Mount, Tenant
from app.db.transactions import Db
from app.errors import BadInput, Conflict, NotFound

router = v1_router("mounts")

MountName = Annotated[str, Path(pattern=f"^{KIND}$", description="The name of the mount.")]


@router.get("/mounts", response_model=Page[MountOut], summary="List mounts")
def list_mounts(caller: Authed, session: Db, sort: Sort | None = None) -> dict[str, Any]:
    """Lists the mounts that your tenant may use; a platform administrator sees all of them."""
    query = select(Mount).order_by(Mount.name)
    if sort is not None:
        query = query.where(Mount.sort == sort)
    found = _usable(session, caller, list(session.scalars(query)))
    hosts, unpacked = mounts.hosts(session, found), mounts.unpacked(session, found)
    items = [_shown(caller, one, hosts, unpacked) for one in found]
    return {"items": items, "next_cursor": None}


@router.get(
    "/mounts/{name}", response_model=MountOut, summary="Show a mount", responses=declared(404)
)
def get_mount(name: MountName, response: Response, caller: Authed, session: Db) -> dict[str, Any]:
    """Shows the mount, and its `ETag` for a change."""
    found = session.get(Mount, name)
    if found is None or not _usable(session, caller, [found]):
        raise NotFound("mount", name)
    return _with_etag(session, response, caller, found)


@router.post(
    "/mounts",
    status_code=201,
    response_model=MountOut,
    summary="Register a mount",
    responses=declared(403, 409),
)
def create_mount(
    body: MountIn, response: Response, caller: PlatformAdmin, session: Db
) -> dict[str, Any]:
    """Names a folder that tasks of these tenants can see, read-only, or a container image in which
    their commands can run.  A host shows it only if its own administrator allows the path
    (`ROUNDHOUSE_MOUNT_ROOTS`), and only behind all layers of its sandbox.
    """
    # One writer at a time, so that the bound on their number holds; readers go on.
    session.execute(text("lock table mounts in share row exclusive mode"))
    if session.get(Mount, body.name) is not None:
        raise Conflict(f"there is a mount {body.name!r} already; delete it first")
    if session.execute(select(func.count()).select_from(Mount)).scalar_one() >= MAX_KNOWN:
        raise Conflict(f"there are {MAX_KNOWN} mounts already; delete one first")
    _check_tenants(session, body.tenants)
    mount = Mount(name=body.name, path=body.path, sort=body.sort, tenants=body.tenants)
    session.add(mount)
    session.flush()
    response.headers["Location"] = f"/v1/mounts/{mount.name}"
    return _with_etag(session, response, caller, mount)


@router.patch(
    "/mounts/{name}",
    response_model=MountOut,
    summary="Change who may use a mount",
    responses=declared(403, 404, 412, 428),
)
def change_mount(
    name: MountName,
    body: MountPatch,
    response: Response,
    caller: PlatformAdmin,
    session: Db,
    if_match: IfMatch = None,
) -> dict[str, Any]:
    """Needs the mount's `ETag` as `If-Match`.  Counts for submissions and launches from now on;
    tasks that run keep what they see.
    """
    mount = _locked(session, name)
    check_version(if_match, mount.version)
    _check_tenants(session, body.tenants)
    mount.tenants = body.tenants
    mount.version += 1
    session.flush()
    return _with_etag(session, response, caller, mount)


@router.delete(
    "/mounts/{name}", status_code=204, summary="Delete a mount", responses=declared(403, 404)
)
def delete_mount(name: MountName, caller: PlatformAdmin, session: Db) -> None:
    """Deletes the name; the files stay.  Tasks that run keep what they see, and those that wait
    for the mount wait on, or fail when they are launched.
    """
    session.delete(_locked(session, name))


def _locked(session: Session, name: str) -> Mount:
    mount = session.get(Mount, name, with_for_update=True)
    if mount is None:
        raise NotFound("mount", name)
    return mount


def _check_tenants(session: Session, ids: list[str] | None) -> None:
    known = set(session.scalars(select(Tenant.id).where(Tenant.id.in_(ids or []))))
    for n, id in enumerate(ids or []):
        if id not in known:
            raise BadInput.at(f"/tenants/{n}", f"there is no tenant with id {id}", "unknown-tenant")


def _usable(session: Session, caller: Caller, found: list[Mount]) -> list[Mount]:
    if caller.sees_all:
        return found
    path = [tenant.id for tenant in tenant_tree.path(session, caller.tenant_id)]
    return [mount for mount in found if is_allowed(mount.tenants, path)]


def _with_etag(
    session: Session, response: Response, caller: Caller, mount: Mount
) -> dict[str, Any]:
    session.refresh(mount)
    response.headers["ETag"] = etag(mount.version)
    of_one = mounts.hosts(session, [mount]), mounts.unpacked(session, [mount])
    return _shown(caller, mount, *of_one)


def _shown(
    caller: Caller, mount: Mount, hosts: dict[str, int], unpacked: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    return {
        "name": mount.name,
        "sort": mount.sort,
        "path": mount.path if caller.sees_all else None,
        "read_only": True,
        "tenants": mount.tenants if caller.sees_all else None,
        "hosts": hosts[mount.name],
        "unpacked": unpacked.get(mount.name, []),
        "version": mount.version,
        "created_at": mount.created_at,
    }
