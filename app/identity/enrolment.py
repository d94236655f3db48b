"""Enrols hosts and devices: an island listens only to devices that an administrator enrolled, with
their host's key.

The enrolment of a host (`host-b`) covers its devices (`host-b.0`, ...), unless one has an enrolment
of its own.  Heartbeats of other devices are ignored, whatever their signature. A device with a
revoked enrolment is ignored, too: its lease ends, and its tasks continue on other devices.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from app.core.model.protocol.messages import Alive
from app.db.models import Device, Enrolment, Island
from app.errors import Conflict, NotFound

READ_EVERY_S = 1.0
HOST_DEVICES_MAX = 128  # devices that the enrolment of a host covers: a host names them itself


def covering(device: str) -> list[str]:
    """Return the names under which a device may be enrolled: its own, and then its host's.

    A name that ends with a number behind a dot is never that of a host.
    """
    host, _, number = device.rpartition(".")
    if not (host and number.isdecimal()):
        return []  # a device has a number
    is_covered = int(number) < HOST_DEVICES_MAX and not host.rpartition(".")[2].isdecimal()
    return [device, host] if is_covered else [device]


def host_key(session: Session, device: str) -> str:
    """Return the public key with which the device is enrolled; "" if it is not."""
    return _key_of(device, _keys(session, Enrolment.device_id.in_(covering(device))))


def _keys(session: Session, *which: ColumnElement[bool]) -> dict[str, str]:
    """Return the public keys by the name of the host or device; "" where it is revoked."""
    query = select(Enrolment.device_id, Enrolment.key, Enrolment.revoked_at).where(*which)
    return {name: "" if revoked_at else key for name, key, revoked_at in session.execute(query)}


def _key_of(device: str, keys: Mapping[str, str]) -> str:
    return next((keys[name] for name in covering(device) if name in keys), "")


def enrol(
    session: Session, device: str, key: str, *, by: str, may_replace: bool = False
) -> Enrolment:
    """Enrol this device, or all devices of this host, with the host's public key.

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
        if row.key != key:
            _forget_processes(session, device)
        row.key, row.enrolled_by, row.revoked_at = key, by, None
        row.enrolled_at = func.now()
    session.flush()
    session.refresh(row)
    return row


def _forget_processes(session: Session, name: str) -> None:
    """Forget which processes of the device, or of the devices that the host's key covers, were
    heard last.
    """
    own = select(Enrolment.device_id).where(Enrolment.device_id == Device.id).exists()
    its = select(Device).where(or_(Device.id == name, (Device.host == name) & ~own))
    locked = its.order_by(Device.id).with_for_update(key_share=True, of=Device)
    for device in session.scalars(locked.execution_options(populate_existing=True)):
        device.incarnation, device.heard_us = "", -1


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
        self._keys: dict[str, str] = {}  # by the name of a device or host; "" if it is revoked
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
        keys = _keys(session)
        self._keys, self._hosts = keys, frozenset(filter(None, keys.values()))
        others = select(Island.key).where(Island.name != self.island, Island.key.is_not(None))
        self.peers = _sorted(session.scalars(others).all())
        self._due_s = time.monotonic() + READ_EVERY_S

    def has_key(self, device: str, key: str) -> bool:
        """True if the device is enrolled with this key."""
        return bool(key) and _key_of(device, self._keys) == key

    def objection(self, alive: Alive) -> str:
        """Return why this heartbeat, sent by one of `hosts`, does not count; "" if it does."""
        facts, host = alive.facts, alive.device.rpartition(".")[0] or alive.device
        if not self.has_key(alive.device, str(facts.get("key") or "")):
            return f"{alive.device} is not enrolled with the key of the message's sender"
        if facts.get("host") != host:
            return f"{alive.device} reports another host"
        if facts.get("island") != self.island:
            return f"{alive.device} reports another island"
        return ""


def _sorted(keys: Sequence[str | None]) -> list[str]:
    return sorted(key for key in keys if key)
