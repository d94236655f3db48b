"""Sessions: what became of a connection while nobody used it, and what is done after a commit."""

from __future__ import annotations

import time

import pytest
from sqlalchemy import text

from app.db import transactions
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
