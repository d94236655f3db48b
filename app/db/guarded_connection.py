"""Ends the wait for a Postgres that hangs, and says why Postgres refused something.

A stopped server keeps its sockets: neither TCP nor a timeout of the server ends a statement there.
So a statement that takes longer than LOOK_AFTER_S asks by a new connection whether Postgres still
answers. A slow statement, such as a long one of an island, goes on as long as it does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from typing import Any

import psycopg
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

LOOK_AFTER_S = 1.5
CONNECT_S = 2  # time for Postgres to accept a new connection; libpq takes no less
LOOK_GAP_S = 1.0  # one look answers for all statements of this process that wait

#: Ends a connection whose packets are lost; Unix sockets ignore it.
TCP = {
    "tcp_user_timeout": 4000,  # ms
    "keepalives_idle": 10,  # s
    "keepalives_interval": 2,  # s
    "keepalives_count": 3,
}

# What a refusal means, by the beginning of its SQLSTATE. Other errors are faults of a statement.
_REFUSALS = {
    "08": "the connection to the database was lost",
    "25006": "the database is read-only now, and takes no change",
    "28": "the database refuses our user or password",
    "3D": "the database does not exist on its server",
    "40": "another change of the same rows came first",
    "42501": "the database gives our user no right to do this",
    "53100": "the disk of the database is full",
    "53200": "the database has no memory left",
    "53300": "the database has no connection left",
    "53": "the database has no room left",
    "55P03": "another change holds the same rows for too long",
    "57014": "the database took too long",
    "57P": "the database stops or starts",
    "58": "the database cannot use its disk",
    "host": "the name of the database's host cannot be resolved",
}
NO_ANSWER = "the database does not answer"

# A connection that is refused has no SQLSTATE, only words; those of another language are not known.
_STATES = {
    "could not translate host name": "host",
    "failed to resolve host": "host",
    "too many clients": "53300",
    "connection slots are reserved": "53300",
    "too many connections": "53300",
    "is starting up": "57P03",
    "is shutting down": "57P03",
    "not yet accepting connections": "57P03",
    "authentication failed": "28P01",
}


class GuardedConnection(psycopg.Connection[Any]):
    """A connection whose waits end when Postgres answers no other connection either."""

    _looked = threading.Lock()
    _answered_s = -LOOK_GAP_S  # by the monotonic clock, for all connections

    def wait(self, gen: Any, *given: Any, **more: Any) -> Any:
        return super().wait(self._watched(gen), *given, **more)

    def _watched(self, gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Pass `gen` on; psycopg sends a falsy value when the socket was not ready for a while."""
        look_s = time.monotonic() + LOOK_AFTER_S
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if not ready and time.monotonic() > look_s:
                    self._look()
                    look_s = time.monotonic() + LOOK_AFTER_S
                wanted = gen.send(ready)
        except StopIteration as ended:
            return ended.value

    def _look(self) -> None:
        """Raise OperationalError, with this connection closed, if Postgres does not answer."""
        with self._looked:
            if time.monotonic() < GuardedConnection._answered_s + LOOK_GAP_S:
                return
            if self._is_answered():
                GuardedConnection._answered_s = time.monotonic()
                return
        self.pgconn.finish()
        raise psycopg.OperationalError(NO_ANSWER)

    def _is_answered(self) -> bool:
        known: dict[str, Any] = {**self.info.get_parameters(), "password": self.info.password}
        known["connect_timeout"] = CONNECT_S
        try:
            psycopg.connect(**known).close()
        except psycopg.errors.ConnectionTimeout:
            return False
        except psycopg.Error:
            return True  # such as: no connection is left
        return True


def is_conflict(error: Exception) -> bool:
    """True if the same transaction may succeed at once: a deadlock, or a lost race."""
    return str(getattr(getattr(error, "orig", error), "sqlstate", None) or "").startswith("40")


def refusal(error: Exception) -> str:
    """Say why Postgres refused, if it would refuse any such statement now; otherwise empty."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    state = getattr(cause, "sqlstate", None) or ""
    if not state and isinstance(cause, psycopg.OperationalError):
        state = next((state for words, state in _STATES.items() if words in str(cause)), "")
    found = (_REFUSALS.get(state[:length]) for length in (5, 3, 2))
    if told := next(filter(None, found), None):
        return told
    is_silence = isinstance(error, OperationalError | InterfaceError | psycopg.OperationalError)
    return NO_ANSWER if is_silence else ""
