"""Ended requests are deleted whole, a piece at a time; nothing else changes, and no sum."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import zstandard
from sqlalchemy import func, insert, or_, select, text, update
from sqlalchemy.orm import Session

from app.db import transactions
from app.db.models import (
    Account,
    Base,
    Checkpoint,
    Datablock,
    DatablockUse,
    Delivery,
    LogLine,
    Lot,
    Need,
    OutboxOrder,
    Placement,
    ProgressMark,
    Request,
    RequestEvent,
    RequestNeed,
    RungResult,
    Task,
    Tunnel,
    Usage,
)
from app.db.transactions import transaction
from app.scheduling import housekeeping, ledger, retention
from app.scheduling.archive import Archive, archive
from app.settings import settings
from tests.app import documented
from tests.app.conftest import fingerprints, people
from tests.app.documented import REQUEST, TASK, USER
from workers.control import request_deleter
from workers.control.request_deleter import RequestDeleter

ID = REQUEST["id"]
OWNER = {"tenant_id": documented.TENANT["id"], "user_id": USER["id"]}
#: what outlives a request, and how
STAYS = {"datablocks", "deliveries"}


@pytest.fixture(autouse=True)
def kept_for_ten_days(monkeypatch):
    monkeypatch.setenv("ROUNDHOUSE_REQUESTS_KEPT_DAYS", "10")
    settings.cache_clear()
    yield
    settings.cache_clear()


@pytest.fixture
def request_with_all(session, world) -> str:
    """A request with everything that can belong to one; a task of another waits."""
    _write_request(session)
    return ID


@pytest.fixture
def apart(committed) -> Iterator[Session]:
    """A session with a connection of its own; the same request is committed."""
    with transactions._sessions()() as session:
        people(session)
        session.commit()
        _write_request(session)
        yield session
        session.rollback()


def _write_request(session) -> None:
    documented.documented(session)
    session.add(_task("tsk_ticket", gang_id=TASK["id"], island=documented.ISLAND["name"]))
    session.flush()
    session.execute(update(Task).where(Task.id == TASK["id"]).values(gang_id=TASK["id"]))
    session.add(Need(task_id="tsk_ticket", needs_id=TASK["id"]))
    gone = {"needs_request_id": "req_gone", "name": "gone", "awaited": "done"}
    session.add(RequestNeed(task_id=TASK["id"], **gone, otherwise="fail", outcome="met"))
    session.add(Lot(id=TASK["id"], count=1, at_once=1))
    session.add(RungResult(task_id=TASK["id"], lot_id=TASK["id"], rung=0, step=9, value=0.5))
    session.add(ProgressMark(task_id=TASK["id"], step=9, line=0, row=0, held_us=5))
    device = documented.DEVICE["id"]
    session.add(OutboxOrder(task_id=TASK["id"], epoch=1, seq=1, device_id=device, kind="Stop"))
    soon = func.now() + timedelta(minutes=1)
    session.add(
        Tunnel(
            id="tun_a",
            task_id=TASK["id"],
            tenant_id=OWNER["tenant_id"],
            kind="shell",
            ticket_sha256="0",
            expires_at=soon,
        )
    )
    [block] = session.scalars(select(Datablock).where(Datablock.id == documented.DATABLOCK["id"]))
    block.task_id, block.output = TASK["id"], "y"
    session.add(DatablockUse(task_id=TASK["id"], port="x", datablock_id=block.id))
    session.flush()
    _ends(session, ID, days=11)


def _task(id, *, request_id=ID, ordinal=1, **more) -> Task:
    return Task(
        id=id, request_id=request_id, ordinal=ordinal, name=id, type="train", kind="cpu",
        state="waiting", descriptor=documented.GANG, **OWNER, **more,
    )  # fmt: skip


def _ends(session, id, *, days: float) -> None:
    at = func.now() - timedelta(days=days)
    session.execute(update(Request).where(Request.id == id).values(state="done", ended_at=at))
    mine = Task.request_id == id
    session.execute(update(Task).where(mine).values(state="done", ended_at=at, seat=None))
    theirs = Placement.task_id.in_(select(Task.id).where(mine))
    session.execute(update(Placement).where(theirs).values(ended_at=at))
    session.commit()


def _delete_all(session, archive=None) -> int:
    """Delete until nothing is due; return in how many transactions."""
    for n in range(1, 1000):
        with transaction() as its:
            if not retention.delete_some(its, archive):
                session.expire_all()
                return n
    raise AssertionError("it never ends")


def _there(session, id=ID) -> bool:
    return bool(session.scalar(select(func.count()).where(Request.id == id)))


def _mentions(session, task_ids) -> dict[str, int]:
    """Count the rows of each table that refer to the request or its tasks."""
    found = {}
    for table in Base.metadata.sorted_tables:
        columns = [
            table.c[name] for name in ("request_id", "task_id", "needs_id") if name in table.c
        ]
        if columns and table.name != "audit_events":
            named = or_(*(column.in_([ID, *task_ids]) for column in columns))
            found[table.name] = session.scalar(select(func.count()).select_from(table).where(named))
    return found


class TestDeleteSome:
    def test_all_that_belongs_to_an_old_request_goes(self, session, request_with_all):
        ids = [TASK["id"], "tsk_ticket"]
        before = _mentions(session, ids)
        assert all(before.values()), "a table of which the request has no row"
        _delete_all(session)
        assert not _there(session)
        assert not any(_mentions(session, ids).values())

    def test_nothing_else_changes(self, session, request_with_all):
        other = documented.WAITING_REQUEST
        session.add(
            RequestEvent(request_id=other, type="t", message="m", tenant_id=OWNER["tenant_id"])
        )
        session.commit()
        before = fingerprints(session)
        gone = {*_mentions(session, []), "requests", "tasks", "lots"}
        _delete_all(session)
        after = fingerprints(session)
        for table in before.keys() - gone:
            assert after[table] == before[table], table
        assert _there(session, other)
        assert session.scalar(select(func.count()).where(RequestEvent.request_id == other))
        assert session.scalars(select(Task.id).where(Task.request_id == other)).all()

    def test_published_datablocks_and_webhooks_stay(self, session, request_with_all):
        counts = [select(func.count()).select_from(table) for table in (Datablock, Delivery)]
        before = [session.scalar(count) for count in counts]
        _delete_all(session)
        assert [session.scalar(count) for count in counts] == before
        block = session.get_one(Datablock, documented.DATABLOCK["id"])
        assert (block.task_id, block.output) == (None, "y")

    def test_each_transaction_is_short(self, session, request_with_all, monkeypatch):
        monkeypatch.setattr(retention, "ROWS_AT_ONCE", 10)
        monkeypatch.setattr(retention, "TASKS_AT_ONCE", 3)
        rows = [_task(f"tsk_{n}", ordinal=n + 10) for n in range(10)]
        session.add_all(rows)
        session.flush()
        lines = [
            {"task_id": f"tsk_{n}", "epoch": 1, "line": line, "stream": "stdout", "text": "x"}
            for n in range(10)
            for line in range(10)
        ]
        session.execute(insert(LogLine), lines)
        _ends(session, ID, days=11)
        left = len(lines) + 2
        while _there(session):
            with transaction() as its:
                assert retention.delete_some(its)
            now = session.scalar(select(func.count()).select_from(LogLine))
            assert left - now <= 10
            left = now

    @pytest.mark.parametrize(
        ("days", "more", "goes"),
        [
            (11, {}, True),
            (9, {}, False),
            (11, {"keep": True}, False),
            (1, {"delete_asked_at": func.now()}, True),
            (5 / 1440, {"delete_asked_at": func.now()}, False),  # an island may still read its end
        ],
    )
    def test_request_goes_when_it_is_old_or_deleted(self, session, world, days, more, goes):
        documented.documented(session)
        _ends(session, ID, days=days)
        session.execute(update(Request).where(Request.id == ID).values({"keep": False} | more))
        session.commit()
        _delete_all(session)
        assert _there(session) is not goes

    def test_request_with_a_pinned_checkpoint_stays(self, session, world):
        documented.documented(session)
        _ends(session, ID, days=11)
        session.execute(update(Request).values(keep=False))
        mine = select(Task.id).where(Task.request_id == ID)
        pinned = update(Checkpoint).where(Checkpoint.task_id.in_(mine))
        assert session.execute(pinned.values(pinned_at=func.now())).rowcount
        session.commit()
        _delete_all(session)
        assert _there(session)
        session.execute(update(Checkpoint).values(pinned_at=None))
        session.commit()
        _delete_all(session)
        assert not _there(session)

    def test_without_a_setting_only_the_deleted_go(self, session, request_with_all, monkeypatch):
        monkeypatch.setenv("ROUNDHOUSE_REQUESTS_KEPT_DAYS", "0")
        settings.cache_clear()
        assert _delete_all(session) == 1
        assert _there(session)
        session.execute(update(Request).where(Request.id == ID).values(delete_asked_at=func.now()))
        session.commit()
        _delete_all(session)
        assert not _there(session)

    @pytest.mark.parametrize("what", ["a task", "a stay"])
    def test_request_of_which_something_goes_on_stays(self, session, request_with_all, what):
        if what == "a task":
            session.execute(update(Task).where(Task.id == "tsk_ticket").values(state="stopping"))
        else:
            mine = (Placement.task_id == TASK["id"], Placement.epoch == 1)
            session.execute(update(Placement).where(*mine).values(ended_at=None))
        session.commit()
        before = fingerprints(session)
        assert _delete_all(session) == 1
        assert fingerprints(session) == before

    def test_request_that_others_lock_waits_for_the_next_look(self, apart):
        apart.execute(select(Request.id).where(Request.id == ID).with_for_update())
        with transaction() as its:
            assert not retention.delete_some(its)
        apart.rollback()
        _delete_all(apart)
        assert not _there(apart)

    def test_task_that_others_lock_keeps_its_request_whole(self, apart):
        apart.execute(select(Task.id).where(Task.id == "tsk_ticket").with_for_update())
        before = fingerprints(apart)
        with transaction() as its:
            assert not retention.delete_some(its)
        assert fingerprints(apart) == before
        apart.rollback()
        _delete_all(apart)
        assert not _there(apart)

    def test_only_one_control_deletes_at_a_time(self, apart):
        apart.execute(select(func.pg_advisory_xact_lock(retention.DELETING)))
        assert _delete_all(apart) == 1
        assert _there(apart)

    def test_search_for_old_requests_reads_an_index_from_its_oldest_end(self, session, world):
        session.execute(
            text(
                "insert into requests (id, tenant_id, user_id, name, state, ended_at)"
                " select 'req_' || n, 'ten_red', 'usr_red.member', 'r', 'done',"
                " now() - interval '1 h' * n from generate_series(1, 5000) n"
            )
        )
        session.execute(text("analyze"))
        old = select(Request.id).where(retention._has_ended(), retention._is_old())
        words = (
            old.order_by(Request.ended_at)
            .limit(100)
            .compile(session.connection(), compile_kwargs={"literal_binds": True})
        )
        found = session.connection().exec_driver_sql(f"explain {words}").scalars()
        plan = "\n".join(found)
        assert "Index Scan using ix_requests_ended_at" in plan, plan
        assert "Sort" not in plan, plan


KILLED = """
import os, signal
from app.db.transactions import transaction
from app.scheduling import archive, retention

kept = archive.Archive.keep

def killed(self, rows, at):
    kept(self, rows, at)
    os.kill(os.getpid(), signal.SIGKILL)

archive.Archive.keep = killed
with transaction() as session:
    retention.delete_some(session, archive.archive())
"""
KEYS = {
    "metrics": ("task_id", "step"),
    "rung_results": ("task_id", "rung"),
    "needs": ("task_id", "needs_id", "port"),
    "request_needs": ("task_id", "needs_request_id", "needs_task_id"),
    "datablock_uses": ("task_id", "port"),
}


class TestArchived:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path, monkeypatch) -> Path:
        monkeypatch.setenv("ROUNDHOUSE_ARCHIVE", str(tmp_path))
        settings.cache_clear()
        return tmp_path

    def test_all_that_is_deleted_is_in_the_archive_once(
        self, session, request_with_all, folder, monkeypatch
    ):
        monkeypatch.setattr(retention, "ROWS_AT_ONCE", 3)
        monkeypatch.setattr(retention, "TASKS_AT_ONCE", 1)
        before = _rows_of(session)
        _delete_all(session, archive())
        assert not _there(session)
        found = _archived(folder)
        assert found.keys() == before.keys() - {"orders", "progress_marks", "tunnels"}
        for table, rows in found.items():
            assert sorted(rows) == sorted(before[table]), table

    def test_files_are_small_though_a_tenant_makes_long_rows(
        self, session, request_with_all, folder, monkeypatch
    ):
        most = 2000
        monkeypatch.setattr(retention, "TOLD_AT_ONCE", most)
        before = _rows_of(session)
        _delete_all(session, archive())
        assert not _there(session)
        found = _archived(folder)
        for table, rows in found.items():
            assert sorted(rows) == sorted(before[table]), table
        files = [_lines(file) for file in folder.rglob("*.zst")]
        assert len(files) > 1
        for lines in files:  # the last row may be longer than what is left
            assert sum(len(line.split(', "row": ', 1)[1]) - 1 for line in lines[:-1]) < most

    def test_rows_of_a_killed_control_are_in_a_second_file_and_equal(self, apart, folder):
        before = _rows_of(apart)
        killed = subprocess.run([sys.executable, "-c", KILLED], timeout=180)
        assert killed.returncode == -signal.SIGKILL
        assert _there(apart)
        assert _rows_of(apart) == before
        _delete_all(apart, archive())
        for table, rows in _archived(folder).items():
            assert len(rows) > len(before[table]), table
            assert sorted(set(rows)) == sorted(before[table]), table
            names = KEYS.get(table, ("id",))
            keys = {tuple(json.loads(row)[name] for name in names) for row in rows}
            assert len(keys) == len(before[table]), table

    def test_failed_archive_keeps_the_rows(
        self, session, request_with_all, folder, monkeypatch, caplog
    ):
        (folder / "a_file").touch()
        monkeypatch.setenv("ROUNDHOUSE_ARCHIVE", str(folder / "a_file" / "below"))
        settings.cache_clear()
        before = fingerprints(session)
        assert RequestDeleter().look() == request_deleter.LOOK_S
        assert "old requests stay" in caplog.text
        assert fingerprints(session) == before

    def test_nothing_is_written_or_locked_until_the_archive_is_durable(self, apart):
        class Watched(Archive):
            def keep(self, rows, at) -> str:
                assert its.scalar(text("select pg_current_xact_id_if_assigned()")) is None
                apart.execute(select(Task.id).with_for_update(nowait=True))
                apart.rollback()
                return super().keep(rows, at)

        watched = Watched(archive().place)
        with transaction() as its:
            assert retention.delete_some(its, watched)
        assert not _there(apart)

    def test_row_that_changes_meanwhile_is_archived_as_it_was_deleted(self, apart, folder):
        class Slow(Archive):
            def keep(self, rows, at) -> str:
                apart.execute(update(Task).where(Task.id == TASK["id"]).values(message="late"))
                apart.commit()
                return super().keep(rows, at)

        with transaction() as its:
            assert retention.delete_some(its, Slow(archive().place))
        assert _there(apart)
        _delete_all(apart, archive())
        assert not _there(apart)
        rows = [json.loads(row) for row in _archived(folder)["tasks"]]
        assert {row["id"]: row["message"] for row in rows}[TASK["id"]] == "late"  # of the last file

    def test_request_that_is_kept_meanwhile_stays(self, apart):
        class Slow(Archive):
            def keep(self, rows, at) -> str:
                apart.execute(update(Request).where(Request.id == ID).values(keep=True))
                apart.commit()
                return super().keep(rows, at)

        with transaction() as its:
            assert not retention.delete_some(its, Slow(archive().place))
        assert all(_mentions(apart, [TASK["id"], "tsk_ticket"]).values())


def _rows_of(session) -> dict[str, list[str]]:
    """Return all rows that belong to the request, as JSON by table."""
    found = {}
    for name, owner in (
        *((table.name, column) for table in retention._OF_TASKS for column in table.owners[:1]),
        ("tasks", "request_id"),
        ("events", "request_id"),
        ("requests", "id"),
    ):
        ids = [ID, TASK["id"], "tsk_ticket"]
        query = f"select row_to_json(it)::text from {name} it where {owner} = any(:ids)"
        found[name] = list(session.scalars(text(query), {"ids": ids}))
    assert all(found.values())
    return found


def _lines(file: Path) -> list[str]:
    return zstandard.decompress(file.read_bytes()).decode().splitlines()


def _archived(folder: Path) -> dict[str, list[str]]:
    """Return all rows of the archive, as JSON by table, oldest file first."""
    found: dict[str, list[str]] = {}
    for file in sorted((folder / "archive").rglob("*.zst")):
        for line in _lines(file):
            head, row = line[:-1].split(', "row": ', 1)
            assert json.loads(line)["row"] == json.loads(row)
            found.setdefault(json.loads(f"{head}}}")["table"], []).append(row)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_sums_of_the_ledger_are_the_same_before_and_after(session, request_with_all, seed):
    """Nothing that was charged is lost, whichever tasks go and whenever it was booked."""
    dice = random.Random(seed)
    for n in range(6):
        id = f"req_{n}"
        session.add(Request(id=id, name="r", **OWNER))
        session.flush()
        session.add(_task(f"tsk_{n}", request_id=id))
        session.flush()
        for epoch in range(dice.randrange(4)):
            stay = Placement(
                task_id=f"tsk_{n}", epoch=epoch, device_id=documented.DEVICE["id"], kind="cpu",
                cost_milli=dice.randrange(5000), incarnation="p1", ended_at=func.now(), **OWNER,
            )  # fmt: skip
            session.add(stay)
            session.flush()
            for held_us in sorted(dice.randrange(10**12) for _ in range(3)):
                ledger.charge(session, stay, held_us)
                back = timedelta(seconds=dice.randrange(20 * 86400), microseconds=1)
                newest = Usage.bucket == select(func.max(Usage.bucket)).scalar_subquery()
                session.execute(update(Usage).where(newest).values(bucket=func.now() - back))
        _ends(session, id, days=dice.choice([1, 9, 11, 40]))
    before = _sums(session)
    _delete_all(session)
    housekeeping.roll_up(session)
    assert _sums(session) == before
    assert not _there(session)


def _sums(session) -> dict[str, list[tuple]]:
    hour = func.date_trunc("hour", Usage.bucket)
    keys = (Usage.tenant_id, Usage.user_id, Usage.kind, hour)
    sums = (func.sum(Usage.held_us), func.sum(Usage.charged_us))
    buckets = select(*keys, *sums).group_by(*keys).order_by(*keys)
    accounts = select(Account.user_id, Account.faded, Account.total_us).order_by(Account.user_id)
    return {
        "buckets": [tuple(row) for row in session.execute(buckets)],
        "accounts": [tuple(row) for row in session.execute(accounts)],
    }


def test_control_goes_on_at_once_while_there_is_more_and_then_rests(session, request_with_all):
    deleter, waits = RequestDeleter(), []
    while not waits or waits[-1] < request_deleter.LOOK_S:
        began_s = time.monotonic()
        waits.append(deleter.look())
        took_s = time.monotonic() - began_s
        assert waits[-1] in (request_deleter.LOOK_S, pytest.approx(took_s, abs=took_s))
    assert not _there(session)
    assert len(waits) >= 2


class TestKept:
    @pytest.fixture(autouse=True)
    def old_checkpoints(self, session, request_with_all):
        session.execute(update(Checkpoint).values(created_at=func.now() - timedelta(days=10)))

    def test_checkpoints_of_a_kept_request_stay(self, session, request_with_all):
        session.execute(update(Request).where(Request.id == ID).values(keep=True))
        housekeeping.prune_checkpoints(session)
        marked = select(func.count()).where(Checkpoint.deleted_at.is_not(None))
        assert session.scalar(marked) == 0
        session.execute(update(Request).where(Request.id == ID).values(keep=False))
        housekeeping.prune_checkpoints(session)
        assert session.scalar(marked) == 2

    @pytest.mark.parametrize(("days", "marked"), [("0", 0), ("30", 0), ("2", 2)])
    def test_checkpoints_of_ended_tasks_are_kept_as_long_as_is_set(
        self, session, request_with_all, monkeypatch, days, marked
    ):
        monkeypatch.setenv("ROUNDHOUSE_CHECKPOINTS_KEPT_DAYS", days)
        settings.cache_clear()
        housekeeping.prune_checkpoints(session)
        counted = select(func.count()).where(Checkpoint.deleted_at.is_not(None))
        assert session.scalar(counted) == marked
