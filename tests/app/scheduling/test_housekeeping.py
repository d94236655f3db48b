"""Chores: what is old goes, what is named stays, and no sum changes."""

from __future__ import annotations

import hashlib
import os
import time
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import event, func, select, text, update

from app.db import transactions
from app.db.models import Checkpoint, Request, Task, Tenant, Usage, User
from app.scheduling import housekeeping
from app.settings import settings
from app.storage.garbage_collector import Swept
from app.storage.store import Store, manifest
from tests.app import documented


@pytest.fixture
def owner(session):
    session.add(Tenant(id="ten_a", name="a"))
    session.flush()
    session.add(User(id="usr_a", tenant_id="ten_a", name="ann"))
    session.flush()
    return {"tenant_id": "ten_a", "user_id": "usr_a"}


@pytest.fixture
def task(session, owner):
    session.add(Request(id="req_a", name="r", **owner))
    session.flush()
    descriptor = {"checkpoint": {"every_s": 60, "keep": 2}}
    task = Task(
        id="tsk_a",
        request_id="req_a",
        ordinal=0,
        name="t",
        type="train",
        kind="cpu",
        descriptor=descriptor,
        **owner,
    )
    session.add(task)
    session.flush()
    return task


def checkpoint(session, task, step, sha256):
    session.add(
        Checkpoint(
            id=f"ckp_{step}",
            task_id=task.id,
            tenant_id=task.tenant_id,
            epoch=1,
            step=step,
            sha256=sha256,
            size_bytes=1,
            took_us=1,
        )
    )
    session.flush()


def made_before(session, age):
    """Let all checkpoints be as old as this."""
    session.flush()
    session.execute(update(Checkpoint).values(created_at=func.now() - age))


def left(session):
    kept = select(Checkpoint.step).where(Checkpoint.deleted_at.is_(None))
    return sorted(session.scalars(kept))


def an_hour_later(session):
    marked = update(Checkpoint).where(Checkpoint.deleted_at.is_not(None))
    session.execute(marked.values(deleted_at=func.now() - timedelta(seconds=3601)))


class TestPruneCheckpoints:
    def test_running_task_keeps_its_newest_checkpoints(self, session, task):
        for step in (10, 20, 30, 40):
            checkpoint(session, task, step, f"sha-{step}")
        housekeeping.prune_checkpoints(session)
        assert left(session) == [30, 40]

    def test_old_checkpoints_go_when_a_new_one_is_made(self, session, task):
        for step in (10, 20, 30):
            checkpoint(session, task, step, f"sha-{step}")
        made_before(session, timedelta(days=3))
        checkpoint(session, task, 40, "sha-40")
        housekeeping.prune_checkpoints(session)
        assert left(session) == [30, 40]

    def test_damaged_checkpoint_does_not_count_and_is_deleted_after_a_day(self, session, task):
        for step in (10, 20, 30):
            checkpoint(session, task, step, f"sha-{step}")
        damaged = session.get_one(Checkpoint, "ckp_30")
        damaged.damaged_at = func.now() - timedelta(hours=23)
        session.flush()
        housekeeping.prune_checkpoints(session)
        assert left(session) == [10, 20, 30]
        damaged.damaged_at = func.now() - timedelta(days=2)
        session.flush()
        housekeeping.prune_checkpoints(session)
        assert left(session) == [10, 20]

    def test_task_that_ended_long_ago_keeps_no_checkpoint(self, session, task):
        checkpoint(session, task, 10, "sha-10")
        task.state, task.ended_at = "done", datetime.now(UTC) - timedelta(days=3)
        made_before(session, timedelta(days=3))
        housekeeping.prune_checkpoints(session)
        assert left(session) == []

    def test_pinned_checkpoint_stays_and_does_not_count(self, session, task):
        for step in (10, 20, 30, 40):
            checkpoint(session, task, step, f"sha-{step}")
        session.get_one(Checkpoint, "ckp_10").pinned_at = func.now()
        session.flush()
        housekeeping.prune_checkpoints(session)
        assert left(session) == [10, 30, 40]
        task.state, task.ended_at = "done", datetime.now(UTC) - timedelta(days=3)
        made_before(session, timedelta(days=3))
        housekeeping.prune_checkpoints(session)
        assert left(session) == [10]
        session.get_one(Checkpoint, "ckp_10").damaged_at = func.now() - timedelta(days=2)
        session.flush()
        housekeeping.prune_checkpoints(session)
        assert left(session) == []

    def test_best_checkpoint_stays_and_counts_if_it_is_among_the_newest(self, session, task):
        for step in (10, 20, 30, 40):
            checkpoint(session, task, step, f"sha-{step}")
        session.get_one(Checkpoint, "ckp_10").best = True
        session.get_one(Checkpoint, "ckp_40").best = True
        session.flush()
        housekeeping.prune_checkpoints(session)
        assert left(session) == [10, 30, 40]
        task.state, task.ended_at = "done", datetime.now(UTC) - timedelta(days=3)
        made_before(session, timedelta(days=3))
        housekeeping.prune_checkpoints(session)
        assert left(session) == [10, 40]


class TestForgetCheckpoints:
    def test_a_forgotten_manifest_is_condemned_and_the_kept_ones_stay(self, session, task):
        store = Store.at(settings().store_address)
        shas = [store.put_manifest("ten_a", str(step).encode()) for step in (10, 20, 30)]
        for step, sha256 in zip((10, 20, 30), shas, strict=True):
            checkpoint(session, task, step, sha256)
        oldest, *kept = (store.place.path(manifest("ten_a", sha256)) for sha256 in shas)
        housekeeping.free(housekeeping.tidy(session))
        assert oldest.exists()  # it is marked, and an order that offers it may be on its way
        an_hour_later(session)
        housekeeping.free(housekeeping.tidy(session))
        assert not oldest.exists()
        assert all(path.exists() for path in kept)
        assert store.sealed("ten_a", shas[0]) == b"10"  # whoever reads it now still can
        assert session.scalar(select(func.count()).select_from(Checkpoint)) == 2

    def test_bytes_named_by_another_checkpoint_or_output_stay(self, session, task):
        for step, sha256 in ((10, "same"), (20, "output"), (30, "same"), (40, "new")):
            checkpoint(session, task, step, sha256)
        task.outputs = {"tokens": {"sha256": "output", "size_bytes": 1}}
        session.flush()
        housekeeping.prune_checkpoints(session)
        an_hour_later(session)
        # The blob of that name is an output; no manifest of that name is left.
        assert housekeeping.forget_checkpoints(session) == [manifest("ten_a", "output")]

    def test_checkpoint_that_a_task_began_from_stays_while_the_task_lives(self, session, task):
        for step in (10, 20, 30, 40):
            checkpoint(session, task, step, f"sha-{step}")
        session.get_one(Checkpoint, "ckp_10").epoch = 0
        session.flush()
        housekeeping.prune_checkpoints(session)
        assert left(session) == [10, 30, 40]


class TestSweeper:
    def test_sweep_follows_the_rows_and_leaves_young_files(self, session, task):
        store = Store.at(settings().store_address)
        listed, orphan = (store.put_manifest("ten_a", body) for body in (b"listed", b"orphan"))
        checkpoint(session, task, 10, listed)
        sweeper = housekeeping.Sweeper()
        assert sweeper.sweep() == Swept()
        for sha256 in (listed, orphan):
            os.utime(store.place.path(manifest("ten_a", sha256)), (0, time.time() - 90_000))
        assert sweeper.sweep() == Swept(condemned=1)
        assert store.place.size(manifest("ten_a", listed)) is not None
        assert store.place.size(manifest("ten_a", orphan)) is None

    def test_only_one_of_two_sweepers_works(self, session):
        with transactions.engine().connect() as other:
            other.execute(select(func.pg_advisory_lock(housekeeping.SWEEPING)))
            assert housekeeping.Sweeper().sweep() is None


class TestRollUp:
    def test_old_fine_buckets_become_hours_with_the_same_sum(self, session, owner):
        start = datetime(2026, 1, 5, 10, 30, tzinfo=UTC)
        for n in range(400):  # 10 s each: two hours are touched
            at = start + timedelta(seconds=10 * n)
            session.add(
                Usage(bucket=at, bucket_s=10, kind="cpu", held_us=n, charged_us=2 * n, **owner)
            )
        session.flush()
        before = session.scalar(select(func.sum(Usage.charged_us)))
        housekeeping.roll_up(session)
        housekeeping.roll_up(session)
        assert session.scalar(select(func.sum(Usage.charged_us))) == before
        assert session.scalars(select(Usage.bucket_s)).all() == [3600, 3600]

    def test_buckets_of_some_hours_ago_become_ten_minutes(self, session, owner):
        now = datetime.now(UTC)
        start = now - timedelta(hours=5)
        for n in range(120):  # 10 s each: 20 minutes, and so two or three buckets
            at = start + timedelta(seconds=10 * n)
            session.add(Usage(bucket=at, bucket_s=10, kind="cpu", held_us=1, charged_us=2, **owner))
        session.flush()
        for _ in range(3):
            housekeeping.roll_up(session)
        assert set(session.scalars(select(Usage.bucket_s))) == {600}
        assert session.scalar(select(func.sum(Usage.charged_us))) == 240

    def test_fresh_buckets_stay_fine(self, session, owner):
        now = datetime.now(UTC)
        session.add(Usage(bucket=now, bucket_s=10, kind="cpu", held_us=1, charged_us=1, **owner))
        session.flush()
        housekeeping.roll_up(session)
        assert session.scalars(select(Usage.bucket_s)).all() == [10]


def test_outputs_are_found_by_an_index_among_many_tasks(session, world):
    documented.documented(session)
    session.execute(
        text(
            "insert into tasks (id, request_id, tenant_id, user_id, ordinal, name, type, kind,"
            " state, outputs) select 'tsk_' || n, id, tenant_id, user_id, n, 't' || n, 't', 'cpu',"
            " 'done', jsonb_build_object('y', jsonb_build_object('sha256', md5(cast(n as text))))"
            " from (select * from requests limit 1) r, generate_series(1, 20000) n"
        )
    )
    session.execute(text("analyze tasks"))
    sent = []
    at = (session.get_bind().engine, "before_cursor_execute", lambda *told: sent.append(told[2:4]))
    event.listen(*at)
    digests = [hashlib.md5(str(n).encode()).hexdigest() for n in (7, 20001)]
    assert housekeeping._outputs(session, digests) == digests[:1]
    event.remove(*at)
    [(query, given)] = sent
    plan = "\n".join(session.connection().exec_driver_sql(f"explain {query}", given).scalars())
    assert "ix_tasks_outputs" in plan, plan
