"""Caches callers whose keys were valid a moment ago, so that frequent callers need no query.

Changes of keys, users and tenants that this process commits take effect at once. Changes that other
processes commit, or that bypass the ORM, and expired keys take effect after KNOWN_S at most.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from sqlalchemy import event
from sqlalchemy.orm import Mapper, ORMExecuteState, Session, object_session

from app.api.access.caller import Caller
from app.db.models import ApiKey, Base, Tenant, User

KNOWN_S = 1.0
KEPT = 10_000

_TELLING: tuple[type[Base], ...] = (ApiKey, User, Tenant)
_CHANGED = "callers"  # key in `session.info`, set when the session changed rows of _TELLING


@dataclass(frozen=True, slots=True)
class _KnownCredential:
    caller: Caller
    until_s: float  # time by the monotonic clock, in seconds


class Callers:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: OrderedDict[bytes, _KnownCredential] = OrderedDict()
        self.round = 0  # a counter; each time the cache is emptied, it grows by 1

    def get(self, token: str) -> Caller | None:
        with self._lock:
            known = self._of.get(digest_of(token))
        return known.caller if known is not None and time.monotonic() < known.until_s else None

    def keep(self, token: str, caller: Caller, round: int) -> None:
        """Keep a caller that was looked up in `round`.

        It is ignored if the cache was emptied since then.
        """
        known = _KnownCredential(caller, time.monotonic() + KNOWN_S)
        with self._lock:
            if round == self.round:
                self._of[digest_of(token)] = known
                self._of.move_to_end(digest_of(token))
                if len(self._of) > KEPT:
                    self._of.popitem(last=False)

    def forget(self) -> None:
        with self._lock:
            self.round += 1
            self._of.clear()


def digest_of(token: str) -> bytes:
    """Return the key under which a credential is remembered: a hash, so that no copy of it is
    kept.
    """
    return hashlib.sha256(token.encode()).digest()


callers = Callers()


# --- invalidation -------------------------------------------------------------------------------


def _row_changed(mapper: Mapper[Any], connection: Any, row: Base) -> None:
    if (session := object_session(row)) is not None:
        session.info[_CHANGED] = True


for _model in _TELLING:
    event.listen(_model, "after_update", _row_changed)
    event.listen(_model, "after_delete", _row_changed)


@event.listens_for(Session, "do_orm_execute")
def _rows_changed(state: ORMExecuteState) -> None:
    mapper = None if state.is_select else state.bind_mapper
    if mapper is not None and mapper.class_ in _TELLING:
        state.session.info[_CHANGED] = True


@event.listens_for(Session, "after_commit")
def _committed(session: Session) -> None:
    if session.info.pop(_CHANGED, False):
        callers.forget()
