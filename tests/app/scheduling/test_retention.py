"""Ended requests are deleted whole, a piece at a time; nothing else changes, and no sum."""

from __future__ import annotations

import random
import time
from datetime import timedelta

import pytest
from sqlalchemy import func, insert, or_, select, text, update

from app.db.models import (
    Account,
    Base,
    Checkpoint,
    Datablock,
    DatablockUse,
    Delivery,
    Event,
    LogLine,
    Need,
    Order,
    Placement,
    Request,
    Task,
    Tunnel,
    Usage,
)
from app.db.transactions import transaction
from app.scheduling import housekeeping, ledger, retention
from app.settings import settings
from tests.app import documented
from tests.app.conftest import fingerprints
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
    documented.documented(session)
    session.add(_task("tsk_ticket", gang_id=TASK["id"], island=documented.ISLAND["name"]))
    session.flush()
    session.execute(update(Task).where(Task.id == TASK["id"]).values(gang_id=TASK["id"]))
    session.add(Need(task_id="tsk_ticket", needs_id=TASK["id"]))
    device = documented.DEVICE["id"]
    session.add(Order(task_id=TASK["id"], epoch=1, seq=1, device_id=device, kind="Stop"))
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
    return ID


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


def _delete_all(session) -> int:
    """Delete until nothing is due; return in how many transactions."""
    for n in range(1, 1000):
        with transaction() as its:
            if not retention.delete_some(its):
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
        session.add(Event(request_id=other, type="t", message="m", tenant_id=OWNER["tenant_id"]))
        session.commit()
        before = fingerprints(session)
        gone = {*_mentions(session, []), "requests", "tasks"}
        _delete_all(session)
        after = fingerprints(session)
        for table in before.keys() - gone:
            assert after[table] == before[table], table
        assert _there(session, other)
        assert session.scalar(select(func.count()).where(Event.request_id == other))
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

    def test_search_for_old_requests_reads_an_index_from_its_oldest_end(self, session, world):
        session.execute(
            text(
                "insert into requests (id, tenant_id, user_id, name, state, ended_at)"
                " select 'req_' || n, 'ten_red', 'usr_red.member', 'r', 'done',"
                " now() - interval '1 h' * n from generate_series(1, 5000) n"
            )
        )
        session.execute(text("analyze requests"))
        asked = retention._ended().where(~Request.keep, retention.is_over(Request.ended_at, 10))
        words = asked.order_by(Request.ended_at).compile(
            session.connection(), compile_kwargs={"literal_binds": True}
        )
        found = session.connection().exec_driver_sql(f"explain {words}").scalars()
        plan = "\n".join(found)
        assert "Index Scan using ix_requests_ended_at" in plan, plan
        assert "Sort" not in plan, plan


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
