"""Runs chores that keep tables and the store small. Each may run twice, or not at all, without
harm.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import timedelta

from sqlalchemy import (
    ARRAY,
    Text,
    and_,
    cast,
    column,
    delete,
    exists,
    func,
    literal,
    literal_column,
    or_,
    select,
    text,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB, insert
from sqlalchemy.orm import Session, aliased

from app.core.model.lifecycle import ENDED
from app.data import datablocks, folders
from app.db.models import (
    Bundle,
    Checkpoint,
    Cycle,
    Datablock,
    DatablockPlace,
    Delivery,
    Environment,
    Graph,
    Idempotency,
    Need,
    OutboxOrder,
    Request,
    StoredFile,
    Task,
    Tunnel,
    Upload,
    UploadPart,
    Usage,
    WebSession,
)
from app.db.models.ledger import EPOCH
from app.db.transactions import engine, now, transaction
from app.scheduling.retention import is_over
from app.settings import settings
from app.storage.garbage_collector import Collector, Swept, condemned
from app.storage.store import UPLOADS, Store, blob, manifest

#: Buckets of usage become as wide as this, once they are as old as this.
USAGE_WIDTHS = (
    (timedelta(minutes=10), timedelta(hours=3)),
    (timedelta(hours=1), timedelta(days=2)),
)
ROLLED_UP_AT_ONCE = timedelta(hours=1)  # span of the buckets that one transaction adds up
ANSWERED_ORDERS_KEPT = text("interval '1 hour'")
IDEMPOTENCY_KEPT = text("interval '1 day'")
DAMAGED_CHECKPOINTS_KEPT = text("interval '1 day'")
NEW_CHECKPOINTS = text("interval '1 hour'")  # a task without one of this time has no surplus
MARKED_CHECKPOINTS_KEPT = text("interval '10 minutes'")
DELETED_DATABLOCKS_KEPT = text("interval '10 minutes'")
PLACES_KEPT = text("interval '7 days'")  # hosts have dropped data that was unused for so long
UNFINISHED_UPLOADS_KEPT = text("interval '1 day'")
TUNNELS_KEPT = text("interval '30 days'")  # the audit log still tells who opened them
SWEEPING = 0x526F756E64  # key of the advisory lock that lets one collector run at a time


def tidy(session: Session) -> list[str]:
    """Run all chores in one transaction; return names in the store without a row."""
    session.execute(
        delete(Idempotency).where(Idempotency.created_at < func.now() - IDEMPOTENCY_KEPT)
    )
    session.execute(
        delete(OutboxOrder).where(OutboxOrder.answered_at < func.now() - ANSWERED_ORDERS_KEPT)
    )
    session.execute(delete(Cycle).where(is_over(Cycle.at, settings().decisions_kept_days)))
    session.execute(
        delete(Delivery).where(is_over(Delivery.ended_at, settings().deliveries_kept_days))
    )
    session.execute(delete(DatablockPlace).where(DatablockPlace.seen_at < func.now() - PLACES_KEPT))
    session.execute(delete(WebSession).where(WebSession.expires_at < func.now()))
    session.execute(delete(Tunnel).where(Tunnel.created_at < func.now() - TUNNELS_KEPT))
    roll_up(session)
    prune_checkpoints(session)
    return [
        *forget_checkpoints(session),
        *forget_uploads(session),
        *forget_datablocks(session),
    ]


def roll_up(session: Session) -> None:
    """Merge old fine buckets into wider ones, the oldest first; the sums do not change."""
    for width, kept in USAGE_WIDTHS:
        _widen(session, width, kept)


def _widen(session: Session, width: timedelta, kept: timedelta) -> None:
    width_s = int(width.total_seconds())
    is_finer = Usage.bucket_s < width_s
    oldest = session.scalar(select(func.min(Usage.bucket)).where(is_finer))
    if oldest is None:
        return
    until = min(now(session) - kept, oldest + ROLLED_UP_AT_ONCE)
    old = delete(Usage).where(is_finer, Usage.bucket < func.date_bin(width, until, EPOCH))
    gone = old.returning(Usage).cte("gone")
    bucket = func.date_bin(width, gone.c.bucket, EPOCH)
    keys = (bucket, gone.c.tenant_id, gone.c.user_id, gone.c.kind)
    held_us, charged_us = func.sum(gone.c.held_us), func.sum(gone.c.charged_us)
    sums = select(*keys, literal(width_s), held_us, charged_us).group_by(*keys)
    columns = ["bucket", "tenant_id", "user_id", "kind", "bucket_s", "held_us", "charged_us"]
    row = insert(Usage).from_select(columns, sums)
    grown = {
        "held_us": Usage.held_us + row.excluded.held_us,
        "charged_us": Usage.charged_us + row.excluded.charged_us,
    }
    session.execute(row.on_conflict_do_update(constraint="pk_usage", set_=grown))


def prune_checkpoints(session: Session) -> None:
    """Mark checkpoints for deletion: those above a task's `checkpoint.keep`, and all those of tasks
    that ended long ago, unless the request is kept. A pinned checkpoint stays, and does not count.
    So do the best of a task (`checkpoint.best`), but they count if they are among its newest.

    The checkpoint that a task began from (epoch 0) stays as long as the task lives, because the
    task has no other beginning. Only a new checkpoint can make others surplus, so only tasks with
    new ones are looked at: there may be many checkpoints of a day.
    """
    new = aliased(Checkpoint)
    with_new = select(new.task_id).where(new.created_at > func.now() - NEW_CHECKPOINTS)
    age = func.row_number().over(
        partition_by=Checkpoint.task_id,
        order_by=(Checkpoint.step.desc(), Checkpoint.created_at.desc()),
    )
    good, is_unpinned = Checkpoint.damaged_at.is_(None), Checkpoint.pinned_at.is_(None)
    is_free = and_(is_unpinned, ~Checkpoint.best)
    ranked = (
        select(Checkpoint.id, age.label("age"), Checkpoint.task_id)
        .where(Checkpoint.deleted_at.is_(None), good, Checkpoint.epoch > 0, is_unpinned)
        .where(Checkpoint.task_id.in_(with_new))
        .subquery()
    )
    keep = Task.descriptor["checkpoint"]["keep"].as_integer()
    surplus = select(ranked.c.id).join(Task, Task.id == ranked.c.task_id).where(ranked.c.age > keep)
    kept_days = settings().checkpoints_kept_days
    left_over = (
        select(Checkpoint.id)
        .join(Task, Task.id == Checkpoint.task_id)
        .join(Request, Request.id == Task.request_id)
        .where(is_over(Checkpoint.created_at, kept_days))  # they are few, and quickly found
        .where(Task.state.in_(ENDED), ~Request.keep, is_over(Task.ended_at, kept_days))
    )
    of_no_use = or_(
        and_(is_free, or_(Checkpoint.id.in_(surplus), Checkpoint.id.in_(left_over))),
        Checkpoint.damaged_at < func.now() - DAMAGED_CHECKPOINTS_KEPT,
    )
    marked = update(Checkpoint).where(Checkpoint.deleted_at.is_(None), of_no_use)
    session.execute(
        marked.values(deleted_at=func.now()).execution_options(synchronize_session=False)
    )


def forget_checkpoints(session: Session) -> list[str]:
    """Delete the rows that were marked a while ago; return the names that no row refers to any
    more.

    The delay is needed because an order that offers the checkpoint may be on its way.
    """
    old = delete(Checkpoint).where(Checkpoint.deleted_at < func.now() - MARKED_CHECKPOINTS_KEPT)
    gone = session.execute(old.returning(Checkpoint.tenant_id, Checkpoint.sha256)).all()
    names = [name for tenant, sha256 in gone for name in (manifest(tenant, sha256), blob(sha256))]
    return sorted(set(names) - named(session, names))


def forget_uploads(session: Session) -> list[str]:
    """Delete uploads that were not continued for long; return the names of their parts."""
    old = select(Upload.id).where(Upload.touched_at < func.now() - UNFINISHED_UPLOADS_KEPT)
    ids = session.scalars(old.with_for_update(skip_locked=True)).all()
    parts = session.scalars(select(UploadPart.place).where(UploadPart.upload_id.in_(ids))).all()
    session.execute(delete(Upload).where(Upload.id.in_(ids)))
    return list(parts)


def forget_datablocks(session: Session) -> list[str]:
    """Free the bytes of deleted versions that are not needed any more; return their names.

    The delay is needed because a user may be downloading one.
    """
    gone = update(Datablock).where(
        Datablock.deleted_at < func.now() - DELETED_DATABLOCKS_KEPT,
        Datablock.freed_at.is_(None),
        ~datablocks.is_needed(),
    )
    freed = gone.values(freed_at=func.now()).returning(Datablock.id, Datablock.sha256)
    sums = {id: sha256 for id, sha256 in session.execute(freed)}
    session.execute(delete(DatablockPlace).where(DatablockPlace.datablock_id.in_(sums)))
    names = {blob(sha256) for sha256 in sums.values()} | {*folders.forget(session, sums)}
    return sorted(names - named(session, names))


def free(names: Iterable[str]) -> None:
    """Condemn names to which no row refers; called after the commit.

    The garbage collector deletes them later.
    """
    store = Store.at(settings().store_address)
    for name in names:
        condemned(store, name)


def named(session: Session, names: Collection[str]) -> set[str]:
    """Return the given names of blobs, manifests and parts of uploads that a row refers to.

    The same bytes may be another checkpoint, an output, a bundle, a graph or a datablock.
    """
    if not names:
        return set()
    parts = [name for name in names if name.startswith(f"{UPLOADS}/")]
    found = set(session.scalars(select(UploadPart.place).where(UploadPart.place.in_(parts))))
    digests = {name.rpartition("/")[2] for name in names}
    rows = select(Checkpoint.tenant_id, Checkpoint.sha256).where(Checkpoint.sha256.in_(digests))
    for tenant, sha256 in session.execute(rows):
        found |= {manifest(tenant, sha256), blob(sha256)}
    bundles = session.scalars(select(Bundle.sha256).where(Bundle.sha256.in_(digests)))
    graphs = session.scalars(select(Graph.sha256).where(Graph.sha256.in_(digests)))
    kept = select(Datablock.sha256).where(Datablock.sha256.in_(digests), datablocks.is_kept())
    files = session.scalars(select(StoredFile.sha256).where(StoredFile.sha256.in_(digests)))
    blobs = (*bundles, *graphs, *files, *_locks(session, digests), *session.scalars(kept))
    found |= {blob(sha256) for sha256 in (*blobs, *_outputs(session, digests))}
    return found & set(names)


def _locks(session: Session, digests: Collection[str]) -> Iterator[str]:
    """Yield the given hashes that are the lock of an environment or of an unfinished task."""
    known = select(Environment.lock_sha256).where(Environment.lock_sha256.in_(digests))
    yield from filter(None, session.scalars(known))
    named = Task.descriptor["environment"]["lock"].astext
    yield from session.scalars(
        select(named).where(Task.state.not_in(ENDED), named.in_(digests)).distinct()
    )


def _outputs(session: Session, digests: Collection[str]) -> Sequence[str]:
    """Return the given hashes that are an output of a task.

    A published output counts only while a task is to take it; otherwise its datablock keeps it.
    """
    columns = (column("key", Text), column("value", JSONB))
    output = func.jsonb_each(Task.outputs).table_valued(*columns).lateral()
    digest, taker = output.c.value["sha256"].astext, aliased(Task)
    is_wanted = exists().where(
        Need.needs_id == Task.id,
        Need.output == output.c.key,
        taker.id == Need.task_id,
        taker.state.not_in(ENDED),
    )
    is_only_an_output = output.c.value["datablock"].astext.is_(None)
    has_one = literal_column("jsonb_path_query_array(tasks.outputs, '$.*.sha256')", JSONB)
    query = select(digest).select_from(Task).join(output, true())
    query = query.where(  # an index has the hashes of tasks with outputs
        literal_column("tasks.outputs <> '{}'"), has_one.op("?|")(cast(list(digests), ARRAY(Text)))
    )
    return session.scalars(query.where(digest.in_(digests), is_only_an_output | is_wanted)).all()


# --- the store ----------------------------------------------------------------------------------


class Sweeper:
    """Runs the garbage collector, with references from rows.

    If several processes try, only one works at a time.
    """

    def __init__(self) -> None:
        self.collector = Collector(Store.at(settings().store_address), self._named)

    def sweep(self) -> Swept | None:
        """Run one sweep; None if another collector, on any host, is sweeping."""
        with engine().connect().execution_options(isolation_level="AUTOCOMMIT") as held:
            if not held.scalar(select(func.pg_try_advisory_lock(SWEEPING))):
                return None
            try:
                return self.collector.sweep()
            finally:
                held.execute(select(func.pg_advisory_unlock(SWEEPING)))

    def _named(self, names: Collection[str]) -> set[str]:
        found: set[str] = set()
        with transaction() as session:
            for some in _batches(sorted(names)):
                found |= named(session, some)
        return found


def _batches(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), 1000):
        yield names[start : start + 1000]
