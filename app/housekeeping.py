"""Chores that keep tables and the store small.  Each may run twice or not at all without harm."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import column, delete, func, or_, select, text, true, update
from sqlalchemy.dialects.postgresql import JSONB, insert
from sqlalchemy.orm import Session

from app.core.lifecycle import ENDED
from app.models import Bundle, Checkpoint, Cycle, Idempotency, Order, Task, Usage, WebSession
from app.settings import settings
from app.store import Store

FINE_USAGE_KEPT = text("interval '2 days'")
DECISIONS_KEPT = text("interval '7 days'")
ANSWERED_ORDERS_KEPT = text("interval '1 hour'")
IDEMPOTENCY_KEPT = text("interval '1 day'")
ENDED_CHECKPOINTS_KEPT = text("interval '1 day'")
MARKED_CHECKPOINTS_KEPT = text("interval '1 hour'")
HOUR_S = 3600
FRESH_BLOB_S = 3600.0  # younger bytes stay: a row that names them may be on its way


def tidy(session: Session) -> list[str]:
    """All chores in one transaction; returns the blobs that nothing refers to any more."""
    session.execute(
        delete(Idempotency).where(Idempotency.created_at < func.now() - IDEMPOTENCY_KEPT)
    )
    session.execute(delete(Order).where(Order.answered_at < func.now() - ANSWERED_ORDERS_KEPT))
    session.execute(delete(Cycle).where(Cycle.at < func.now() - DECISIONS_KEPT))
    session.execute(delete(WebSession).where(WebSession.expires_at < func.now()))
    roll_up(session)
    prune_checkpoints(session)
    return forget_checkpoints(session)


def roll_up(session: Session) -> None:
    """Old fine buckets become hours; the sums stay what they were."""
    old = delete(Usage).where(
        Usage.bucket_s < HOUR_S,
        Usage.bucket < func.date_trunc("hour", func.now() - FINE_USAGE_KEPT),
    )
    gone = old.returning(Usage).cte("gone")
    hour = func.date_trunc("hour", gone.c.bucket)
    keys = (hour, gone.c.tenant_id, gone.c.user_id, gone.c.kind)
    sums = select(*keys, HOUR_S, func.sum(gone.c.held_us), func.sum(gone.c.charged_us)).group_by(
        *keys
    )
    columns = ["bucket", "tenant_id", "user_id", "kind", "bucket_s", "held_us", "charged_us"]
    row = insert(Usage).from_select(columns, sums)
    grown = {
        "held_us": Usage.held_us + row.excluded.held_us,
        "charged_us": Usage.charged_us + row.excluded.charged_us,
    }
    session.execute(row.on_conflict_do_update(constraint="pk_usage", set_=grown))


def prune_checkpoints(session: Session) -> None:
    """Mark those beyond `checkpoint.keep` of a live task, and all of one that ended a while ago."""
    age = func.row_number().over(
        partition_by=Checkpoint.task_id,
        order_by=(Checkpoint.step.desc(), Checkpoint.created_at.desc()),
    )
    good = Checkpoint.damaged_at.is_(None)
    ranked = (
        select(Checkpoint.id, age.label("age"), Checkpoint.task_id)
        .where(Checkpoint.deleted_at.is_(None), good)
        .subquery()
    )
    keep = Task.descriptor["checkpoint"]["keep"].as_integer()
    surplus = select(ranked.c.id).join(Task, Task.id == ranked.c.task_id).where(ranked.c.age > keep)
    left_over = (
        select(Checkpoint.id)
        .join(Task, Task.id == Checkpoint.task_id)
        .where(Task.state.in_(ENDED), Task.ended_at < func.now() - ENDED_CHECKPOINTS_KEPT)
    )
    of_no_use = or_(
        Checkpoint.id.in_(surplus),
        Checkpoint.id.in_(left_over),
        Checkpoint.damaged_at < func.now() - ENDED_CHECKPOINTS_KEPT,
    )
    marked = update(Checkpoint).where(Checkpoint.deleted_at.is_(None), of_no_use)
    session.execute(
        marked.values(deleted_at=func.now()).execution_options(synchronize_session=False)
    )


def forget_checkpoints(session: Session) -> list[str]:
    """Delete the rows that were marked an hour ago; returns the blobs that nothing names now.

    Not at once: an order that offers the checkpoint may be on its way, and bytes that are younger
    are never freed.
    """
    old = delete(Checkpoint).where(Checkpoint.deleted_at < func.now() - MARKED_CHECKPOINTS_KEPT)
    return _unreferenced(session, set(session.scalars(old.returning(Checkpoint.sha256))))


def free_blobs(sha256s: Iterable[str]) -> None:
    """After the commit: what no row names goes, unless somebody has just put it there again."""
    store = Store(settings().store_folder)
    for sha256 in sha256s:
        store.delete(sha256, older_than_s=FRESH_BLOB_S)


def _unreferenced(session: Session, sha256s: set[str]) -> list[str]:
    """The same bytes may be another checkpoint, an output or a bundle of somebody."""
    if not sha256s:
        return []  # else every output of every task would be looked at, for nothing
    kept = set(
        session.scalars(
            select(Checkpoint.sha256).where(
                Checkpoint.sha256.in_(sha256s), Checkpoint.deleted_at.is_(None)
            )
        )
    )
    kept |= set(session.scalars(select(Bundle.sha256).where(Bundle.sha256.in_(sha256s))))
    output = func.jsonb_each(Task.outputs).table_valued(column("value", JSONB)).lateral()
    digest = output.c.value["sha256"].astext
    named = select(digest).select_from(Task).join(output, true()).where(digest.in_(sha256s))
    kept |= set(session.scalars(named))
    return sorted(sha256s - kept)
