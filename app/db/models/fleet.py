"""Tables of islands, hosts, devices and presets."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from app.db.models.base import Base, json_column, now_column, txid_column


class Island(Base):
    """An island.  `leader_until` is the lease of the leading scheduler; each change of leader is a
    new term.

    `tally` has the counters of the island's schedulers, up to `tallied_at`
    (`app.insight.counters`).
    """

    __tablename__ = "islands"
    name: Mapped[str] = mapped_column(primary_key=True)
    leader: Mapped[str | None]
    leader_until: Mapped[datetime | None]
    leading_since: Mapped[datetime | None]
    term: Mapped[int] = mapped_column(BigInteger, server_default="0")
    tally: Mapped[dict[str, Any]] = json_column()
    tallied_at: Mapped[datetime | None]
    key: Mapped[str | None]  # public key, which verifies the island's messages to devices
    created_at: Mapped[datetime] = now_column()


class Enrolment(Base):
    """A host that an administrator admits with its devices, or a single device: heartbeats count if
    `key` verifies them.

    `device_id` is the name of the host or device, which may not exist yet, and `key` the host's
    public key.  The row stays after the enrolment was revoked.
    """

    __tablename__ = "enrolments"
    device_id: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str]
    enrolled_by: Mapped[str]  # a user's name
    enrolled_at: Mapped[datetime] = now_column()
    revoked_at: Mapped[datetime | None]


class Host(Base):
    __tablename__ = "hosts"
    name: Mapped[str] = mapped_column(primary_key=True)
    island: Mapped[str] = mapped_column(ForeignKey("islands.name"))
    cordoned: Mapped[bool] = mapped_column(server_default=text("false"))
    created_at: Mapped[datetime] = now_column()
    txid: Mapped[int] = txid_column(index=True)


class Device(Base):
    """A device.

    No response of the API contains `links` or `secret`, and both are new with each process.
    """

    __tablename__ = "devices"
    # "<host>.<n>"; the device's Celery queue is called "device.<host>.<n>"
    id: Mapped[str] = mapped_column(primary_key=True)
    host: Mapped[str] = mapped_column(ForeignKey("hosts.name"))
    island: Mapped[str] = mapped_column(ForeignKey("islands.name"), index=True)
    kind: Mapped[str]
    threads: Mapped[int] = mapped_column(server_default="1")
    memory_bytes: Mapped[int] = mapped_column(BigInteger, server_default="0")
    cost_milli: Mapped[int] = mapped_column(BigInteger, server_default="1000")
    cordoned: Mapped[bool] = mapped_column(server_default=text("false"))
    # process that last reported as this device
    incarnation: Mapped[str] = mapped_column(server_default="")
    # when that process sent the newest recorded heartbeat, by its own clock
    heard_us: Mapped[int] = mapped_column(BigInteger, server_default="0")
    # how long the device may continue without another heartbeat, by the database's clock
    lease_until: Mapped[datetime | None]
    # length of the lease that the device was given last; 0: by a version that did not record it
    lease_us: Mapped[int] = mapped_column(BigInteger, server_default="0")
    # how long a step that has begun may run after the lease; until then its task is left alone
    grace_us: Mapped[int] = mapped_column(BigInteger, server_default="0")
    seen_at: Mapped[datetime | None]  # when a heartbeat was recorded last, by the database's clock
    facts: Mapped[dict[str, Any]] = json_column()
    # [address, port] where other workers reach the device's worker
    links: Mapped[list[Any]] = mapped_column(JSONB, server_default=text("'[]'"))
    # gives access to the blocks that the worker serves
    secret: Mapped[str] = mapped_column(server_default="")
    health: Mapped[dict[str, Any]] = json_column()  # last report of the device's monitor
    # What the island remembers and decided because of `health` (`core.device.health_cordons`). With
    # a cordon in it, `cordoned` is set too.
    fitness: Mapped[dict[str, Any]] = json_column()
    # why it takes no work for a time that was planned (`app.scheduling.reservations`); "": it does
    maintenance: Mapped[str] = mapped_column(server_default="")
    # id of the reservation that keeps this very device now, by its id or labels; "": of none
    reserved_by: Mapped[str] = mapped_column(server_default="")
    version: Mapped[int] = mapped_column(server_default="1")
    created_at: Mapped[datetime] = now_column()
    txid: Mapped[int] = txid_column(index=True)
    __table_args__ = (
        CheckConstraint("cost_milli > 0", name="cost_milli"),
        CheckConstraint("memory_bytes >= 0", name="memory_bytes"),
    )


class Preset(Base):
    """Parameters configured on a device of `kind` for tasks of `task_type`; "*" is the fallback
    type.
    """

    __tablename__ = "presets"
    task_type: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    params: Mapped[dict[str, Any]] = json_column()
    version: Mapped[int] = mapped_column(server_default="1")
    updated_at: Mapped[datetime] = now_column()
