"""Counts what an island's schedulers do, for monitoring: sums that only grow, in the island's row.

Prometheus asks another process than the scheduler, and table rows are deleted, so the scheduler
keeps sums. It counts every event that it writes and every round that it leads. The row, which it
has locked anyway, is written once a second. A scheduler that dies loses the counts of its last
second.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from typing import Any

from sqlalchemy import event
from sqlalchemy.orm import Session, object_session

from app.db.models import Island, Placement
from app.db.transactions import after_commit, now
from app.scheduling.round_notes import notes_of

WRITTEN_EVERY_S = 1.0
ROUND_BOUNDS_S = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)

# The keys of the counts. The first four are prefixes. They are followed by: a place in
# ROUND_BOUNDS_S, the type of an event, one of core.model.protocol.messages.WAYS, one of
# provisions.network_policy.FIGURES.
ROUNDS, TOLD, CAME, NETWORK = "rounds.", "told.", "came.", "network."
ROUNDS_US, SWITCHES, SWITCH_US = "rounds_us", "switches", "switch_us"


class Tally:
    """The counts of one scheduler since it last wrote them to its island's row."""

    def __init__(self) -> None:
        self._new: Counter[str] = Counter()
        self._due_s = 0.0  # by the monotonic clock

    def round(self, took_s: float) -> None:
        """Count a led round.  Rounds longer than all bounds go into the place after the
        last bound.
        """
        self._new[f"{ROUNDS}{bisect_left(ROUND_BOUNDS_S, took_s)}"] += 1
        self._new[ROUNDS_US] += round(took_s * 1e6)

    def write(self, session: Session, row: Island, *, leads: bool) -> None:
        """Write the counts at the end of a round; events of this round count after the commit.

        Only the leader updates `tallied_at`, which shows that all is well.
        """
        session.flush()
        told = session.info.pop("told", Counter())
        notes = notes_of(session)
        for written_event in notes.written:
            told.update(_counts(written_event))
        notes.written = []
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


def _counts(written: dict[str, Any]) -> dict[str, int]:
    """Return what an event adds to the counts."""
    switch_us = written["data"].get("switch_us")
    switch = {SWITCHES: 1, SWITCH_US: switch_us} if switch_us else {}
    return {f"{TOLD}{written['type']}": 1, **switch}


@event.listens_for(Placement.ways, "set")
def _came(row: Placement, ways: dict[str, str], before: Any, initiator: Any) -> None:
    known = before if isinstance(before, dict) else {}
    if (told := _new(row)) is not None:
        told.update(f"{CAME}{way}" for port, way in ways.items() if port not in known)


@event.listens_for(Placement.network, "set")
def _used(row: Placement, now: dict[str, int], before: Any, initiator: Any) -> None:
    known = before if isinstance(before, dict) else {}
    if (told := _new(row)) is not None:
        told.update({f"{NETWORK}{name}": n - known.get(name, 0) for name, n in now.items()})


def _new(row: Any) -> Counter[str] | None:
    """The counts that this transaction has noted."""
    session = object_session(row)
    return None if session is None else session.info.setdefault("told", Counter())
