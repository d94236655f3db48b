"""Collects what an island's transaction did, so that its sums are written once, at its end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from sqlalchemy.orm import Session

from app.db.models import OutboxOrder, Task


@dataclass
class RoundNotes:
    """Notes of one transaction; `journal.settlement.settle` writes them, `journal.orders` sends.

    moved     ids of requests with tasks that changed their state
    changed   (tenant, request) of whatever open streams may want to read
    closed    (task, epoch) of stays that ended: their orders need no answer
    waiting   by queue, as the columns of `lines`: by how many more tasks wait there
    charges   by (user, tenant, kind): held, charged and faded micro-device-seconds
    spans     each of these charges alone: whose, over how many µs, micro-device-seconds
    orders    rows that are sent after the commit
    events    what is told about requests and tasks, in this order: columns of `events` by name
    news      what channels may want to tell: request_id, type and task
    members   tasks that ended and are members of lots
    written   events that were written already, for `insight.counters`
    """

    moved: set[str] = field(default_factory=set)
    changed: set[tuple[str, str]] = field(default_factory=set)
    closed: set[tuple[str, int]] = field(default_factory=set)
    waiting: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    charges: dict[tuple[str, str, str], tuple[int, int, int]] = field(default_factory=dict)
    spans: list[tuple[tuple[str, str, str], int, int]] = field(default_factory=list)
    orders: list[OutboxOrder] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    news: list[dict[str, str]] = field(default_factory=list)
    members: list[Task] = field(default_factory=list)
    written: list[dict[str, Any]] = field(default_factory=list)

    def copy(self) -> RoundNotes:
        return RoundNotes(**{one.name: getattr(self, one.name).copy() for one in fields(self)})


def notes_of(session: Session) -> RoundNotes:
    """Return the notes of this session's transaction."""
    notes: RoundNotes | None = session.info.get("round")
    return set_notes(session, RoundNotes()) if notes is None else notes


def set_notes(session: Session, notes: RoundNotes) -> RoundNotes:
    session.info["round"] = notes
    return notes
