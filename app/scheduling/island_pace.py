"""Reads the pace of an island (`core.scheduling.rounds.pace`), and keeps it for a transaction."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.core.scheduling.rounds.pace import HeartbeatPace, pace_for
from app.db.models import Device
from app.settings import settings

#: A device counts so long after its lease, since all leases end while an island has no leader.
COUNTS_FOR = timedelta(minutes=10)


def look_up(session: Session, island: str) -> HeartbeatPace:
    """Return the pace for the devices that the island had lately."""
    lately = Device.lease_until > func.now() - COUNTS_FOR
    query = select(func.count(Device.id)).where(Device.island == island, lately)
    return _pace_for(session.scalar(query) or 0)


def it_is(session: Session, pace: HeartbeatPace) -> None:
    """Let this transaction lease devices at this pace."""
    session.info["pace"] = pace


def pace_of(session: Session) -> HeartbeatPace:
    """Return the pace of this transaction; that of few devices if nothing was said."""
    pace: HeartbeatPace | None = session.info.get("pace")
    return _pace_for(0) if pace is None else pace


def told_us(pace: HeartbeatPace, *, is_paced: bool) -> int:
    """Return the beat that an answer tells a device; 0: its own beat will do.

    Only a device with the fact "paced" takes one.
    """
    return pace.beat_us if is_paced and pace.beat_s > settings().beat_s else 0


def _pace_for(devices: int) -> HeartbeatPace:
    ours = settings()
    return pace_for(
        devices,
        beat_s=ours.beat_s,
        lease_s=ours.lease_s,
        beats_a_second=ours.island_beats_per_s,
    )
