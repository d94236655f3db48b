"""Keeps rows of mounts: which tenant may use which folder or container image of the hosts, and its
path there.

A right is checked twice: when a request is submitted, and when a task is launched. A task that runs
keeps the mounts with which it was launched.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.core.model.descriptor import Descriptor
from app.core.model.fields import Fault, Hints, escaped
from app.core.model.protocol.messages import JSON
from app.core.model.provisions.mounts import (
    FOLDER,
    IMAGE,
    SORTS,
    is_allowed,
    offer_of,
)
from app.core.model.provisions.registry_image import is_reference
from app.db import tenant_tree
from app.db.models import Device, Mount, Task


def paths(session: Session) -> dict[str, dict[str, str]]:
    """Return the paths of all mounts, by sort and name. The mounts of all tenants are included,
    because a device learns all of them.
    """
    found: dict[str, dict[str, str]] = {sort: {} for sort in SORTS}
    for name, sort, path in session.execute(select(Mount.name, Mount.sort, Mount.path)):
        found[sort][name] = path
    return found


def usable(session: Session, path: Collection[str], sort: str = FOLDER) -> dict[str, Mount]:
    """Return the mounts of a tenant, by name. `path` has the tenant's id, and the ids of all
    tenants above.
    """
    found = session.scalars(select(Mount).where(Mount.sort == sort).order_by(Mount.name))
    return {mount.name: mount for mount in found if is_allowed(mount.tenants, path)}


def hosts(session: Session, mounts: Iterable[Mount]) -> dict[str, int]:
    """Return for each mount the number of hosts with a device that is up and shows the mount."""
    offers = {mount.name: offer_of(mount.name, mount.sort) for mount in mounts}
    offer = func.jsonb_array_elements_text(Device.facts["offers"]).label("offer")
    up = select(Device.host, offer).where(Device.lease_until > func.now()).subquery()
    query = (
        select(up.c.offer, func.count(up.c.host.distinct()))
        .where(up.c.offer.in_(offers.values()))
        .group_by(up.c.offer)
    )
    counted: dict[str, int] = {offer: hosts for offer, hosts in session.execute(query)}
    return {name: counted.get(offer, 0) for name, offer in offers.items()}


def unpacked(session: Session, mounts: Iterable[Mount]) -> dict[str, list[JSON]]:
    """Return for each container image the hosts that are up and have it unpacked."""
    names = {mount.name for mount in mounts if mount.sort == IMAGE}
    if not names:
        return {}
    told = Device.facts["unpacked"]
    query = select(Device.host, told).where(Device.lease_until > func.now(), told.is_not(None))
    found: dict[str, dict[str, JSON]] = {name: {} for name in names}
    for host, images in session.execute(query.order_by(Device.host, Device.id)):
        for name in names & (images or {}).keys():
            found[name][host] = {
                "host": host,
                "digest": f"sha256:{images[name]['digest']}",
                "size_bytes": images[name]["size_bytes"],
                "unpack_us": images[name]["took_us"],
            }
    return {name: [*by_host.values()] for name, by_host in found.items()}


def faults(session: Session, descriptor: Descriptor, path: Collection[str]) -> list[Fault]:
    """Return a fault for each mount that the tenant may not use, whether it exists or not."""
    asked = {
        FOLDER: [
            (f"/tasks/{n}/mounts/{escaped(target)}", name)
            for n, task in enumerate(descriptor.tasks)
            for target, name in task.mounts.items()
        ],
        IMAGE: [
            (f"/tasks/{n}/image", task.image)
            for n, task in enumerate(descriptor.tasks)
            if task.image is not None and not is_reference(task.image)
        ],
    }
    return [
        fault
        for sort, names in asked.items()
        if names
        for fault in _unknown(names, usable(session, path, sort), sort)
    ]


def _unknown(
    asked: Iterable[tuple[str, str]], known: Collection[str], sort: str
) -> Iterator[Fault]:
    hints = Hints()
    for where, name in asked:
        if name not in known:
            told = f"your tenant has no {_CALLED[sort]} {name!r}{hints.hint(name, known)}"
            yield Fault(where, f"{told}{_listed(known)}", "unknown-mount")


_CALLED = {FOLDER: "mount", IMAGE: "container image"}


def _listed(known: Collection[str]) -> str:
    return f"; it may use {', '.join(sorted(known))}" if known else "; it may use none"


def of_tasks(session: Session, tasks: Sequence[Task]) -> dict[str, JSON]:
    """Return the mounts of each task, as target -> path. Mounts that the task's tenant may not use
    now are left out.
    """
    wanting = [task for task in tasks if task.descriptor.get("mounts")]
    by_tenant = _usable_by_tenant(session, wanting, FOLDER)
    return {
        task.id: {
            target: by_tenant[task.tenant_id][name].path
            for target, name in task.descriptor["mounts"].items()
            if name in by_tenant[task.tenant_id]
        }
        for task in wanting
    }


def roots_of_tasks(session: Session, tasks: Sequence[Task]) -> dict[str, str]:
    """Return the path of each task's registered container image, if the task's tenant may use it
    now.
    """
    named = [(task, task.descriptor.get("image")) for task in tasks]
    wanting = [task for task, image in named if image and not is_reference(image)]
    by_tenant = _usable_by_tenant(session, wanting, IMAGE)
    return {
        task.id: by_tenant[task.tenant_id][name].path
        for task in wanting
        if (name := task.descriptor["image"]) in by_tenant[task.tenant_id]
    }


def _usable_by_tenant(
    session: Session, tasks: Iterable[Task], sort: str
) -> dict[str, dict[str, Mount]]:
    return {
        id: usable(session, [tenant.id for tenant in tenant_tree.path(session, id)], sort)
        for id in {task.tenant_id for task in tasks}
    }
