"""Connections to a Postgres that hangs, and what its refusals mean."""

from __future__ import annotations

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError

from app.db import guarded_connection
from app.db.guarded_connection import GuardedConnection, refusal
from tests import hanging_relay


@pytest.fixture
def relay(servers):
    if "host" not in make_url(servers.database_url).query:
        pytest.skip("Postgres has no Unix socket here")
    carried, url = hanging_relay.through(servers.database_url)
    with carried:
        yield (
            carried,
            make_url(url).set(drivername="postgresql").render_as_string(hide_password=False),
        )


def test_statement_to_a_postgres_that_hangs_ends(relay):
    carried, url = relay
    with GuardedConnection.connect(url, autocommit=True) as connection:
        assert connection.execute("select 1").fetchone() == (1,)
        with carried.hanging(), pytest.raises(psycopg.OperationalError, match="does not answer"):
            connection.execute("select 1")
        assert connection.closed


def test_slow_statement_goes_on_while_postgres_answers(relay, monkeypatch):
    monkeypatch.setattr(guarded_connection, "LOOK_AFTER_S", 0.05)
    monkeypatch.setattr(guarded_connection, "LOOK_GAP_S", 0.0)
    with GuardedConnection.connect(relay[1], autocommit=True) as connection:
        assert connection.execute("select 1 from pg_sleep(0.6)").fetchone() == (1,)


def test_failed_statement_leaves_the_connection_usable(relay):
    with GuardedConnection.connect(relay[1], autocommit=True) as connection:
        with pytest.raises(psycopg.errors.DivisionByZero):
            connection.execute("select 1 / 0")
        assert connection.execute("select 2").fetchone() == (2,)


def _error(engine, statement, *before):
    with engine.connect() as connection:
        for each in before:
            connection.execute(text(each))
        with pytest.raises(DBAPIError) as raised:
            connection.execute(text(statement))
    return raised.value


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ("53100", "disk of the database is full"),
        ("53200", "no memory"),
        ("53300", "no connection left"),
        ("53400", "no room"),
        ("57014", "took too long"),
        ("57P01", "stops or starts"),
        ("57P03", "stops or starts"),
        ("25006", "read-only"),
        ("08006", "was lost"),
        ("40P01", "same rows"),
        ("40001", "same rows"),
        ("55P03", "same rows"),
        ("58030", "cannot use its disk"),
        ("28P01", "password"),
        ("3D000", "does not exist"),
        ("42501", "no right"),
        ("42703", ""),
        ("23505", ""),
        ("22003", ""),
        ("25P02", ""),
    ],
)
def test_refusal_of_postgres_is_told_by_its_class(engine, state, told):
    raising = f"do $$ begin raise exception 'no' using errcode = '{state}'; end $$"
    found = refusal(_error(engine, raising))
    assert (told in found) if told else (found == "")


def test_read_only_database_refuses(engine):
    error = _error(engine, "create table t ()", "set transaction read only")
    assert "read-only" in refusal(error)


def test_connection_that_is_refused_says_why():
    full = psycopg.OperationalError("FATAL: sorry, too many clients already")
    assert "no connection left" in refusal(full)
    assert "stops or starts" in refusal(psycopg.OperationalError("FATAL: ... is starting up"))


@pytest.mark.parametrize(
    "words",
    [
        "failed to resolve host 'db.test': [Errno -3] Temporary failure in name resolution",
        'could not translate host name "db.test" to address: Name or service not known',
    ],
)
def test_host_whose_name_cannot_be_resolved_is_told(words):
    assert "name of the database's host" in refusal(psycopg.OperationalError(words))


def test_database_that_is_away_does_not_answer(tmp_path):
    with pytest.raises(DBAPIError) as raised:
        create_engine(f"postgresql+psycopg://x@/x?host={tmp_path}").connect()
    assert refusal(raised.value) == "the database does not answer"
    assert refusal(ValueError("x")) == ""
