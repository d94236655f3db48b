"""What an island's schedulers count, for who watches them: sums that only grow, in its row.

A process that is asked by Prometheus is another one than the scheduler, and tables forget, so the
scheduler keeps sums.  Every event that it tells is counted, and every round that it leads.  The
row, which it has locked anyway, is written once a second; a scheduler that dies takes what it
counted in its last second with it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from typing import Any

from sqlalchemy import event
from sqlalchemy.orm import Session, object_session

from app.db import after_commit, now
from app.models import Event, Island

WRITTEN_EVERY_S = 1.0
ROUND_BOUNDS_S = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)

# The keys of a tally; what follows the first two is a place in ROUND_BOUNDS_S, and an event's type.
ROUNDS, TOLD = "rounds.", "told."
ROUNDS_US, SWITCHES, SWITCH_US = "rounds_us", "switches", "switch_us"


class Tally:
    """What one scheduler has counted since it last wrote it down."""

    def __init__(self) -> None:
        self._new: Counter[str] = Counter()
        self._due_s = 0.0  # by the monotonic clock

    def round(self, took_s: float) -> None:
        """It led a round.  Rounds that take longer than all bounds are in the place behind."""
        self._new[f"{ROUNDS}{bisect_left(ROUND_BOUNDS_S, took_s)}"] += 1
        self._new[ROUNDS_US] += round(took_s * 1e6)

    def write(self, session: Session, row: Island, *, leads: bool) -> None:
        """At the end of a round: what it told counts if it is committed.

        That all is well is said by the one who leads only.
        """
        session.flush()
        told = session.info.pop("told", Counter())
        after_commit(session, lambda: self._new.update(told))
        if time.monotonic() < self._due_s:
            return
        written = Counter(self._new)
        row.tally = dict(Counter(row.tally) + written)
        if leads:
            row.tallied_at = now(session)
        after_commit(session, lambda: self._written(written))

    def _written(self, written: Counter[str]) -> None:
        self._new.subtract(written)
        self._due_s = time.monotonic() + WRITTEN_EVERY_S


@event.listens_for(Event, "after_insert")
def _told(mapper: Any, connection: Any, row: Event) -> None:
    session = object_session(row)
    if session is None:
        return
    told = session.info.setdefault("told", Counter())
    told[f"{TOLD}{row.type}"] += 1
    if switch_us := (row.data or {}).get("switch_us"):
        told[SWITCHES] += 1
        told[SWITCH_US] += switch_us
