"""Sessions: what became of a connection while nobody used it, and what is done after a commit."""

from __future__ import annotations

import json
import time

import pytest
from sqlalchemy import func, select, text

from app.db import transactions
from app.db.models import Island
from app.db.transactions import after_commit, commit, transaction

BACKEND = text("select pg_backend_pid()")


def test_closed_connection_is_not_used_again(committed, engine):
    with transaction() as session:
        lost = session.scalar(BACKEND)
    with engine.connect() as other:
        other.execute(text("select pg_terminate_backend(:pid)"), {"pid": lost})
        there = text("select count(*) from pg_stat_activity where pid = :pid")
        until_s = time.monotonic() + 90
        while other.scalar(there, {"pid": lost}):
            other.rollback()  # a transaction sees the same activities all along
            assert time.monotonic() < until_s, "Postgres does not end it"
            time.sleep(0.01)
    with transaction() as session:
        assert session.scalar(BACKEND) != lost


def test_open_connection_is_used_again_without_a_check(committed, monkeypatch):
    with transaction() as session:
        same = session.scalar(BACKEND)
    monkeypatch.setattr(
        transactions.engine().dialect, "do_ping", lambda _: pytest.fail("it was asked")
    )
    with transaction() as session:
        assert session.scalar(BACKEND) == same


def test_action_after_a_commit_runs_once(committed):
    done = []
    with transaction() as session:
        after_commit(session, lambda: done.append(1))
        commit(session)
        assert done == [1]
    assert done == [1]


def test_action_after_a_commit_does_not_run_after_a_rollback(committed):
    done = []

    def fail():
        with transaction() as session:
            after_commit(session, lambda: done.append(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert done == []


@pytest.mark.parametrize(
    "written",
    [
        "1e-400",
        "0.10000000000000000555",
        str(2**80),
        "-0.0",
        '"\\ud83d\\ude80"',
        "[" * 500 + "]" * 500,
    ],
    ids=lambda written: written[:12],
)
def test_json_column_is_read_as_pythons_own_parser_reads_it(committed, written):
    with transaction() as session:
        query = text("select it, cast(it as text) from (select cast(:it as jsonb) it) one")
        read, kept = session.execute(query, {"it": written}).one()
    assert repr(read) == repr(json.loads(kept))


def test_json_column_with_more_digits_than_python_parses_is_read_as_text(committed):
    with transaction() as session:
        read = session.scalar(text("select cast(:it as jsonb)"), {"it": f"[{'7' * 5000}, 1]"})
    assert read == [f"{'7' * 20}… (5000 digits)", 1]


def test_queries_of_one_snapshot_do_not_see_later_commits(committed):
    count = select(func.count()).select_from(Island)
    with transactions.transaction() as reads:
        transactions.see_one_snapshot(reads)
        before = reads.scalar(count)
        with transactions.transaction() as writes:
            writes.add(Island(name="late"))
        assert reads.scalar(count) == before
    with transactions.transaction() as reads:
        assert reads.scalar(count) == before + 1
