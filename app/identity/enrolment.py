"""Enrols devices: an island listens only to devices that an administrator enrolled, with their
host's key.

Heartbeats of other devices are ignored, whatever their signature. A device with a revoked enrolment
is ignored, too: its lease ends, and its tasks continue on other devices.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from app.core.model.protocol.messages import Alive
from app.db.models import Device, Enrolment, Island
from app.errors import Conflict, NotFound

READ_EVERY_S = 1.0


def enrol(
    session: Session, device: str, key: str, *, by: str, may_replace: bool = False
) -> Enrolment:
    """Enrol this device, with its host's public key.

    Raises Conflict if it has another key that may not be replaced.  A device that comes back with a
    new key counts as a new device: messages of the old one are ignored.
    """
    row = session.get(Enrolment, device, with_for_update=True)
    if row is None:
        row = Enrolment(device_id=device, key=key, enrolled_by=by)
        session.add(row)
    elif row.key != key or row.revoked_at is not None:
        if row.revoked_at is None and not may_replace:
            raise Conflict(
                f"{device} is already enrolled with another key; revoke that enrolment first"
            )
        if row.key != key and (
            known := session.get(Device, device, with_for_update={"key_share": True})
        ):
            known.incarnation, known.heard_us = "", -1
        row.key, row.enrolled_by, row.revoked_at = key, by, None
        row.enrolled_at = func.now()
    session.flush()
    session.refresh(row)
    return row


def revoke(session: Session, device: str) -> Enrolment:
    row = session.get(Enrolment, device, with_for_update=True)
    if row is None:
        raise NotFound("enrolment", device)
    if row.revoked_at is None:
        row.revoked_at = func.now()
        session.flush()
        session.refresh(row)
    return row


def name_key(session: Session, island: str, key: str) -> None:
    """Record the key with which the island signs from now on."""
    row = insert(Island).values(name=island, key=key)
    session.execute(row.on_conflict_do_update(index_elements=[Island.name], set_={"key": key}))


class Roster:
    """The keys of enrolled devices and of other islands, as they were at the last read.

    `read` and the other methods may run in two threads: the data is replaced as a whole.
    """

    def __init__(self, island: str) -> None:
        self.island = island
        self.peers: list[str] = []
        self._keys: dict[str, str] = {}
        self._hosts: Collection[str] = frozenset()
        self._due_s = 0.0  # by the monotonic clock

    @property
    def hosts(self) -> Collection[str]:
        """The public keys of all hosts with enrolled devices."""
        return self._hosts

    def read(self, session: Session) -> None:
        """Read the keys again if they are older than READ_EVERY_S."""
        if time.monotonic() < self._due_s:
            return
        enrolled = select(Enrolment.device_id, Enrolment.key).where(Enrolment.revoked_at.is_(None))
        keys = {device: key for device, key in session.execute(enrolled)}
        self._keys, self._hosts = keys, frozenset(keys.values())
        others = select(Island.key).where(Island.name != self.island, Island.key.is_not(None))
        self.peers = _sorted(session.scalars(others).all())
        self._due_s = time.monotonic() + READ_EVERY_S

    def has_key(self, device: str, key: str) -> bool:
        """True if the device is enrolled with this key."""
        return self._keys.get(device) == key

    def objection(self, alive: Alive) -> str:
        """Return why this heartbeat, sent by one of `hosts`, does not count; "" if it does."""
        facts, host = alive.facts, alive.device.rpartition(".")[0] or alive.device
        if self._keys.get(alive.device) != facts.get("key"):
            return f"{alive.device} is not enrolled with the key of the message's sender"
        if facts.get("host") != host:
            return f"{alive.device} reports another host"
        if facts.get("island") != self.island:
            return f"{alive.device} reports another island"
        return ""


def _sorted(keys: Sequence[str | None]) -> list[str]:
    return sorted(key for key in keys if key)
