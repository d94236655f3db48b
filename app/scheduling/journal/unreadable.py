"""Records devices whose reports the island cannot read, so that they are in the lists of people.

A worker of another version signs its reports, but says in them what this version does not know.
Such a device gets no lease.  Its row says why, as that of a device which cannot be served
(`facts.failed`), until a report of it can be read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, or_, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from app.core.model.protocol.protocol_version import told_unreadable
from app.core.model.protocol.wellformed import is_id
from app.db.models import Device, Host

_KIND = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableReport:
    """Describes a report that a known host signed and the island cannot read."""

    device: str
    kind: str
    told: str


def unreadable_report(body: Mapping[str, Any], why: str) -> UnreadableReport | None:
    """Return what can be said of a signed report that is not well formed; None without a device."""
    device, said = body.get("device"), body.get("facts")
    if not is_id(device) or not str(device).rpartition(".")[0]:
        return None
    facts = said if isinstance(said, dict) else {}
    kind = facts.get("kind")
    known = isinstance(kind, str) and _KIND.fullmatch(kind)
    return UnreadableReport(
        device=str(device), kind=str(kind) if known else "cpu", told=told_unreadable(facts, why)
    )


def note_unreadable(session: Session, island: str, reports: Mapping[str, UnreadableReport]) -> None:
    """Record why these devices are not served, unless they have a lease: then an older report of
    theirs could be read.
    """
    _register(session, island, reports)
    is_down = or_(Device.lease_until.is_(None), Device.lease_until <= func.now())
    query = select(Device).where(Device.id.in_(sorted(reports)), Device.island == island, is_down)
    locked = query.order_by(Device.id).with_for_update(skip_locked=True, key_share=True)
    for device in session.scalars(locked):
        told = reports[device.id].told
        if device.facts.get("failed") != told:
            device.facts = {**device.facts, "failed": told}
    session.flush()


def _register(session: Session, island: str, reports: Mapping[str, UnreadableReport]) -> None:
    known = {*session.scalars(select(Device.id).where(Device.id.in_(reports)))}
    new = [reports[id] for id in sorted(reports.keys() - known)]
    if not new:
        return
    hosts = sorted({report.device.rpartition(".")[0] for report in new})
    rows = [{"name": name, "island": island} for name in hosts]
    session.execute(insert(Host).values(rows).on_conflict_do_nothing())
    for report in new:
        host = report.device.rpartition(".")[0]
        session.add(Device(id=report.device, host=host, island=island, kind=report.kind))
    session.flush()
