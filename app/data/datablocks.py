"""Rows of datablocks: the version that a name means, new versions, and the tasks that need them.

Three things always hold.  A version never changes, and its number is never reused.  For each tenant
only one version is made at a time (`shelve`).  Data that an unfinished task needs keeps its bytes,
whatever becomes of its name.

The tasks that need a version are counted when asked for, from the tasks themselves: there is no
stored count that could be wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import (
    ColumnElement,
    and_,
    exists,
    func,
    literal,
    or_,
    select,
    text,
    true,
    tuple_,
    union,
)
from sqlalchemy.dialects.postgresql import distinct_on, insert
from sqlalchemy.orm import Session

from app.core.model.descriptor import Source
from app.core.model.fields import near_name
from app.core.model.lifecycle import ENDED
from app.core.model.protocol.messages import JSON
from app.db.ids import new_id
from app.db.models import (
    Checkpoint,
    Datablock,
    DatablockPlace,
    DatablockUse,
    Device,
    StoredFile,
    Task,
    Upload,
)
from app.errors import QuotaExceeded
from app.settings import settings

_SHELF = 0x626C6B  # first key of the advisory locks; unique in this database
_VERSIONS_TOLD = 5
SEEN_AGAIN = timedelta(minutes=1)  # age at which the time in a `DatablockPlace` is updated
# most hosts named to a task that takes a version; after these the task asks the store
PLACES_TOLD = 3


# --- the version that a name means ----------------------------------------------------------------


def found(
    session: Session, tenant_id: str, wanted: Collection[Source], *, keep: bool = False
) -> dict[Source, Datablock]:
    """Return the existing versions that these sources mean now.

    With `keep`, they cannot be deleted before the end of this transaction.
    """
    if not wanted:
        return {}
    exact = [(source.name, source.version) for source in wanted if source.version is not None]
    names = {source.name for source in wanted if source.version is None}
    this = tuple_(Datablock.name, Datablock.version)
    mine = (Datablock.tenant_id == tenant_id, Datablock.deleted_at.is_(None))
    newest = (
        select(Datablock.name, func.max(Datablock.version))
        .where(*mine, Datablock.name.in_(names))
        .group_by(Datablock.name)
    )
    query = select(Datablock).where(*mine, or_(this.in_(exact), this.in_(newest)))
    rows = session.scalars(query.with_for_update(read=True) if keep else query).all()
    by_version = {(row.name, row.version): row for row in rows}
    by_name = {row.name: row for row in sorted(rows, key=lambda row: row.version)}
    looked = {
        source: by_version.get((source.name, source.version))
        if source.version is not None
        else by_name.get(source.name)
        for source in wanted
    }
    return {source: row for source, row in looked.items() if row is not None}


def missing(session: Session, tenant_id: str, source: Source) -> str:
    """Say why a source means no datablock, and what to do."""
    mine = (Datablock.tenant_id == tenant_id, Datablock.deleted_at.is_(None))
    there = select(Datablock.version).where(*mine, Datablock.name == source.name)
    newest = there.order_by(Datablock.version.desc()).limit(_VERSIONS_TOLD)
    if versions := session.scalars(newest).all():
        told = ", ".join(f"{source.name}@{version}" for version in versions)
        return f"your tenant has no {source.block}; the newest versions are {told}"
    names = session.scalars(select(Datablock.name).where(*mine).distinct()).all()
    near = near_name(source.name, names)
    put = f"PUT /v1/datablocks/{source.name}"
    hint = f"did you mean {near!r}? {put} uploads it" if near else f"upload it with {put}"
    return f"your tenant has no datablock {source.name!r}; {hint}"


# --- the next version -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class New:
    """Describes the next version of `name`; `core.model.checkpoints.tensor_file` made `summary`."""

    tenant_id: str
    user_id: str
    name: str
    sha256: str
    size_bytes: int
    summary: Mapping[str, Any]
    task_id: str | None = None
    output: str = ""


def added(session: Session, new: New) -> Datablock:
    """Insert the next version; the caller has called `shelve` for its tenant."""
    of_name = (Datablock.tenant_id == new.tenant_id, Datablock.name == new.name)
    last = session.scalar(select(func.max(Datablock.version)).where(*of_name)) or 0
    row = Datablock(
        id=new_id("blk"),
        tenant_id=new.tenant_id,
        user_id=new.user_id,
        name=new.name,
        version=last + 1,
        format=new.summary["format"],
        sha256=new.sha256,
        size_bytes=new.size_bytes,
        tensors=new.summary["tensors"],
        tensor_count=new.summary["tensor_count"],
        task_id=new.task_id,
        output=new.output,
    )
    session.add(row)
    session.flush()
    return row


def shelve(session: Session, tenants: Iterable[str]) -> None:
    """Take the lock for making versions of these tenants; it is held until the commit.

    The locks are taken in one order, so that two transactions that need several cannot deadlock.
    """
    session.execute(_LOCKED, {"shelf": _SHELF, "tenants": sorted(tenants)}).all()


_LOCKED = text(
    """
    select pg_advisory_xact_lock(:shelf, number) from (
        select distinct hashtext(tenant) as number
        from unnest(cast(:tenants as text[])) as tenant order by number
    ) as numbers
    """
)


# --- tasks that need a version --------------------------------------------------------------------


def use(session: Session, task_id: str, uses: Mapping[str, Datablock]) -> None:
    """Record that the task needs these versions, by port, until it has ended."""
    session.add_all(
        DatablockUse(task_id=task_id, port=port, datablock_id=row.id) for port, row in uses.items()
    )


def is_needed() -> ColumnElement[bool]:
    """Return the condition that an unfinished task takes this version."""
    return exists().where(
        DatablockUse.datablock_id == Datablock.id,
        Task.id == DatablockUse.task_id,
        Task.state.not_in(ENDED),
    )


def is_kept() -> ColumnElement[bool]:
    """Return a condition: the version's bytes are kept, because it still has its name or is
    needed.
    """
    return or_(Datablock.deleted_at.is_(None), is_needed())


def holders(session: Session, ids: Collection[str]) -> dict[str, int]:
    """Return how many unfinished tasks need each version; every given id is included."""
    live = and_(Task.id == DatablockUse.task_id, Task.state.not_in(ENDED))
    count = func.count(DatablockUse.task_id.distinct())
    query = (
        select(DatablockUse.datablock_id, count)
        .join(Task, live)
        .where(DatablockUse.datablock_id.in_(ids))
        .group_by(DatablockUse.datablock_id)
    )
    counted = {id: tasks for id, tasks in session.execute(query)} if ids else {}
    return {id: counted.get(id, 0) for id in ids}


# --- hosts that have a version --------------------------------------------------------------------


def are_taken_by(task: Task) -> bool:
    inputs = task.descriptor.get("inputs") or {}
    return any(source.startswith("datablock:") for source in inputs.values())


def seen_on(session: Session, device_id: str, task_id: str) -> None:
    """Record that this device's host has the versions that the task takes or has published.

    The host is then named to tasks elsewhere that take such a version (`places`).
    """
    takes = select(DatablockUse.datablock_id).where(DatablockUse.task_id == task_id)
    made = select(Datablock.id).where(Datablock.task_id == task_id)
    found = union(takes, made).subquery()
    each = select(found.c.datablock_id, literal(device_id), func.now())
    written = insert(DatablockPlace).from_select(["datablock_id", "device_id", "seen_at"], each)
    is_old = DatablockPlace.seen_at < func.now() - SEEN_AGAIN
    again = {"seen_at": written.excluded.seen_at}
    session.execute(written.on_conflict_do_update(index_elements=_PLACE, set_=again, where=is_old))


_PLACE = [DatablockPlace.datablock_id, DatablockPlace.device_id]


def reach(device: Any) -> Any:
    """Build SQL for how other hosts reach a device's worker: {"links": [address, port],
    "secret"}.
    """
    return func.jsonb_build_object("links", device.links, "secret", device.secret)


def places(session: Session, ids: Collection[str]) -> dict[str, list[JSON]]:
    """Return how to reach live device workers that may have each version (`reach`).

    The last seen comes first; there is one worker for each host.
    """
    of_host = (
        select(reach(Device).label("reach"), DatablockPlace.seen_at, DatablockPlace.device_id)
        .ext(distinct_on(Device.host))
        .join(DatablockPlace, DatablockPlace.device_id == Device.id)
        .where(DatablockPlace.datablock_id == Datablock.id, Device.lease_until > func.now())
        .order_by(Device.host, DatablockPlace.seen_at.desc(), DatablockPlace.device_id)
        .correlate(Datablock)
        .subquery()
    )
    newest = select(of_host).order_by(of_host.c.seen_at.desc(), of_host.c.device_id)
    up = newest.limit(PLACES_TOLD).lateral()
    query = select(Datablock.id, up.c.reach).join(up, true()).where(Datablock.id.in_(ids))
    found = defaultdict[str, list[JSON]](list)
    for id, how in session.execute(query.order_by(up.c.seen_at.desc(), up.c.device_id)):
        found[id].append(how)
    return found


# --- the quota of a tenant ------------------------------------------------------------------------


def kept_bytes(session: Session, tenant_id: str) -> int:
    """Return how many bytes a tenant keeps: datablocks, and checkpoints that are pinned or best.

    Equal bytes count once; unfinished uploads count with their full size.
    """
    blocks = select(Datablock.sha256, Datablock.size_bytes).where(
        Datablock.tenant_id == tenant_id, is_kept()
    )
    files = select(StoredFile.sha256, StoredFile.size_bytes).where(
        StoredFile.tenant_id == tenant_id
    )
    images = select(Checkpoint.sha256, Checkpoint.size_bytes).where(
        Checkpoint.tenant_id == tenant_id,
        or_(Checkpoint.best, Checkpoint.pinned_at.is_not(None)),
        Checkpoint.deleted_at.is_(None),
    )
    all_ = union(blocks, files, images).subquery()
    each = (
        select(all_.c.sha256, func.max(all_.c.size_bytes).label("size_bytes"))
        .group_by(all_.c.sha256)
        .subquery()
    )
    coming = select(func.coalesce(func.sum(Upload.size_bytes), 0))
    query = select(
        func.coalesce(func.sum(each.c.size_bytes), 0)
        + coming.where(Upload.tenant_id == tenant_id, Upload.name != "").scalar_subquery()
    )
    return int(session.scalar(query) or 0)


def check_room(session: Session, tenant_id: str, more_bytes: int) -> None:
    """Raise QuotaExceeded if the tenant may not keep that many more bytes."""
    quota = settings().datablock_quota_bytes
    if not quota or (kept := kept_bytes(session, tenant_id)) + more_bytes <= quota:
        return
    raise QuotaExceeded(
        f"your tenant stores {kept} of at most {quota} bytes of datablocks and of pinned and best "
        f"checkpoints, and this needs {more_bytes} more. Delete unneeded versions (GET "
        "/v1/datablocks lists them, DELETE /v1/datablocks/NAME@VERSION deletes one), unpin "
        "checkpoints or delete their requests, or ask an administrator to raise "
        "ROUNDHOUSE_DATABLOCK_QUOTA_BYTES"
    )


# --- as values ------------------------------------------------------------------------------------


def as_input(row: Datablock) -> JSON:
    """The datablock in the form that a Launch has."""
    return {
        "sha256": row.sha256,
        "size_bytes": row.size_bytes,
        "format": row.format,
        "datablock": f"{row.name}@{row.version}",
    }


def summary_of(row: Datablock) -> JSON:
    """The summary of a version that exists already."""
    return {"format": row.format, "tensors": row.tensors, "tensor_count": row.tensor_count}
