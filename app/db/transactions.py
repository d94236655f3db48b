"""Provides the database engine and its transactions.

The API uses `get_session`: one transaction per request, committed before the response is sent, by
`released`, in the thread that worked in it (`app.api.access.gate`). Loops use `transaction()`. All
sessions are synchronous.
"""

from __future__ import annotations

import json
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated, Any

import psycopg
from anyio import CancelScope
from fastapi import Depends
from pydantic_core import from_json
from sqlalchemy import Engine, Row, Select, create_engine, event, inspect, text
from sqlalchemy.exc import InvalidatePoolError
from sqlalchemy.orm import Session, sessionmaker
from starlette.concurrency import run_in_threadpool
from starlette.requests import HTTPConnection

from app.db.guarded_connection import CONNECT_S, TCP, GuardedConnection
from app.errors import NotFound
from app.settings import settings

#: A result row, and a query, with any columns.
AnyRow = Row[*tuple[Any, ...]]
AnySelect = Select[*tuple[Any, ...]]

POOL_SIZE = 16  # connections that a process keeps open
POOL_EXTRA = 8  # further temporary connections: for uploads, checks and loops besides API calls
POOL_WAIT_S = 2.0  # time to wait for a free connection
LOCK_S, STATEMENT_S = 3, 30  # longest waits of the API for a lock, and for a statement
LONGEST_DIGITS = 4000  # longest integer that is parsed as a number


@lru_cache
def engine() -> Engine:
    """The database engine of this process."""
    url = settings().database_url.get_secret_value()
    if not url:
        raise RuntimeError("DATABASE_URL is not set; `make up` starts an embedded Postgres")
    engine = create_engine(
        url,
        pool_size=POOL_SIZE,
        max_overflow=POOL_EXTRA,
        pool_timeout=POOL_WAIT_S,
        connect_args={"connect_timeout": CONNECT_S, **TCP},
        json_deserializer=read_json,
    )

    @event.listens_for(engine, "do_connect")
    def connect(_: Any, __: Any, given: Any, named: Any) -> GuardedConnection:
        return GuardedConnection.connect(*given, **named)

    @event.listens_for(engine, "checkout")
    def check_alive(connection: Any, *_: Any) -> None:
        """Detect connections that a restart of Postgres has closed.

        A live connection has nothing to read while it is idle, so most connections are not pinged;
        a ping costs as much as a small statement.
        """
        try:
            if _has_news(connection):
                engine.dialect.do_ping(connection)
        except psycopg.Error as error:
            raise InvalidatePoolError from error

    return engine


def bound_waits() -> None:
    """Bound the statements of this process, in which people wait; call it before the first one.

    The long statements of islands and control have no bound as long as Postgres answers.
    """

    @event.listens_for(engine(), "connect")
    def bound(connection: Any, _: Any) -> None:
        connection.execute(f"set lock_timeout = '{LOCK_S}s'")
        connection.execute(f"set statement_timeout = '{STATEMENT_S}s'")
        connection.commit()


def read_json(given: str | bytes) -> Any:
    """Parse a JSON column.

    Postgres stores integers of any length, but Python parses none of more than 4300 digits.  Such a
    number, which can only be a tenant's, becomes a text.
    """
    try:
        return from_json(given)
    except ValueError:  # a longer number, or deeper lists than this fast parser takes
        return json.loads(given, parse_int=_int_or_text)


def _int_or_text(digits: str) -> int | str:
    long = len(digits) > LONGEST_DIGITS
    return f"{digits[:20]}… ({len(digits)} digits)" if long else int(digits)


def _has_news(connection: Any) -> bool:
    news = select.poll()
    news.register(connection.fileno(), select.POLLIN)
    return bool(news.poll(0))


@lru_cache
def _sessions() -> sessionmaker[Session]:
    return sessionmaker(engine(), expire_on_commit=False)


@contextmanager
def transaction() -> Iterator[Session]:
    """Yield a session; commit at the end, roll back on any error."""
    with _sessions()() as session:
        yield session
        commit(session)


@contextmanager
def trial() -> Iterator[Session]:
    """Yield a session of which nothing is committed, to find out what a change would do."""
    with _sessions()() as session:
        yield session
        session.rollback()


def see_one_snapshot(session: Session) -> None:
    """Let all queries that follow see the rows of one instant, so that their figures agree.

    Call it before the first query, and only if nothing is written. A session on a connection of
    its own is in a transaction already, and keeps it.
    """
    if isinstance(session.get_bind(), Engine):
        session.connection(execution_options={"isolation_level": "REPEATABLE READ"})


def commit(session: Session) -> None:
    """Commit, then call what was registered with `after_commit`."""
    session.commit()
    for act in session.info.pop("after_commit", ()):
        act()


def after_commit(session: Session, act: Callable[[], None]) -> None:
    """Call `act` after the transaction is committed, but not if it is rolled back."""
    session.info.setdefault("after_commit", []).append(act)


def plan_for_values(session: Session) -> None:
    """Have Postgres plan each later statement of this transaction for the values that it is given.

    Otherwise it may use a general plan for a statement that it has seen often. Such a plan assumes
    that a third of all rows are later than a given time, and reads all rows to find none.
    """
    session.execute(text("set local plan_cache_mode = force_custom_plan"))


def lock_again(session: Session, row: Any, *, key_share: bool = False) -> None:
    """Lock a row that was read without a lock, and read it again; raises NotFound if it was deleted
    meanwhile.

    `key_share` allows others to refer to the row.
    """
    kind, (id,) = type(row), inspect(row).identity
    lock: Any = {"key_share": key_share}
    if session.get(kind, id, populate_existing=True, with_for_update=lock) is None:
        raise NotFound(kind.__name__.lower(), id)


@contextmanager
def savepoint(session: Session) -> Iterator[None]:
    """Run the block in a savepoint: if it fails, its changes and its `after_commit` are undone."""
    acts = list(session.info.get("after_commit", ()))
    try:
        with session.begin_nested():
            yield
    except BaseException:
        session.info["after_commit"] = acts
        raise


def forget_acts(session: Session) -> None:
    """Forget what a transaction that failed wanted to do after its commit."""
    session.info.pop("after_commit", None)


def is_awaited(session: Session) -> bool:
    """True if something is to be done after the commit."""
    return bool(session.info.get("after_commit"))


@contextmanager
def released(session: Session) -> Iterator[Session]:
    """Commit at the end, roll back on any error, and return the connection to the pool."""
    try:
        yield session
        commit(session)
    finally:
        session.close()


async def get_session(request: HTTPConnection) -> Session:
    """Return the session of a call.  It holds no connection; an endpoint uses one only inside
    `released`.
    """
    session = request.state.session = _sessions()()
    return session


async def close_session(request: HTTPConnection) -> None:
    """Close the session of a call that has ended; raises RuntimeError if its transaction is
    open.
    """
    session: Session | None = getattr(request.state, "session", None)
    if session is not None and session.in_transaction():
        with CancelScope(shield=True):
            await run_in_threadpool(session.close)
        raise RuntimeError("an endpoint left its transaction open: it must use `released`")


Db = Annotated[Session, Depends(get_session)]


def now_s(session: Session) -> float:
    """The database's time at the start of this transaction, in seconds: the only clock for
    leases.
    """
    transaction = session.get_transaction()
    known = session.info.get("now_s")
    if transaction is None or known is None or known[0] is not transaction:
        at_s = float(session.scalar(text("select extract(epoch from now())")))
        it_is(session, at_s)
        return at_s
    return float(known[1])


def it_is(session: Session, now_s: float) -> None:
    """Remember the `now()` that a statement of this transaction returned, so that it is not queried
    again.
    """
    session.info["now_s"] = (session.get_transaction(), now_s)


def now(session: Session) -> datetime:
    """The same time as a datetime, equal to SQL's `now()` to the microsecond."""
    return datetime.fromtimestamp(now_s(session), UTC)
