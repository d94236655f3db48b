"""The engine and its transactions.

The API uses `get_session`: one transaction per request, committed before the answer leaves.  Loops
use `transaction()`.  Sessions are synchronous everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated

from fastapi import Depends
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session, sessionmaker

from app.settings import settings


@lru_cache
def engine() -> Engine:
    """The process' engine; a connection is tested before use, as Postgres may have restarted."""
    url = settings().database_url.get_secret_value()
    if not url:
        raise RuntimeError("DATABASE_URL is not set; `make up` starts an embedded Postgres")
    return create_engine(url, pool_pre_ping=True, pool_size=8, max_overflow=8)


@lru_cache
def _sessions() -> sessionmaker[Session]:
    return sessionmaker(engine(), expire_on_commit=False)


@contextmanager
def transaction() -> Iterator[Session]:
    """Commits on the way out, rolls back on any error."""
    with _sessions().begin() as session:
        yield session
    for act in session.info.get("after_commit", ()):
        act()


def after_commit(session: Session, act: Callable[[], None]) -> None:
    """Have `act` done once the transaction is committed, and never if it is rolled back."""
    session.info.setdefault("after_commit", []).append(act)


def get_session() -> Iterator[Session]:
    with transaction() as session:
        yield session


# scope="function": the commit comes before the answer, so a failed commit is not a 200.
Db = Annotated[Session, Depends(get_session, scope="function")]


def now_s(session: Session) -> float:
    """The database's clock at the start of this transaction: the only clock leases know."""
    transaction = session.get_transaction()
    known = session.info.get("now_s")
    if transaction is None or known is None or known[0] is not transaction:
        at_s = float(session.scalar(text("select extract(epoch from now())")))
        it_is(session, at_s)
        return at_s
    return float(known[1])


def it_is(session: Session, now_s: float) -> None:
    """What `now()` was in a statement of this transaction, so that nobody asks again."""
    session.info["now_s"] = (session.get_transaction(), now_s)


def now(session: Session) -> datetime:
    """The same, to the microsecond what `now()` is in SQL."""
    return datetime.fromtimestamp(now_s(session), UTC)
