"""Defines the tables of decisions, of events, and of the messages about them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    ForeignKey,
    ForeignKeyConstraint,
    Identity,
    Index,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from app.db.models.base import Base, Xid8, json_column, now_column, one_of


class Cycle(Base):
    """A round that decided something: what the scheduler saw, as far as it mattered
    (`core.scheduling.record`).

    `core.scheduling.cycle.decide(snapshot, now_s=now_s)` reproduces its decisions.  If something
    changed before all of them were written, only the first ones have rows.
    """

    __tablename__ = "cycles"
    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    island: Mapped[str] = mapped_column(ForeignKey("islands.name"))
    at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp(), index=True)
    now_s: Mapped[float]
    snapshot: Mapped[dict[str, Any]] = json_column()


class Decision(Base):
    """A move of a task, the rule that caused it, and the other task that gains or loses by it."""

    __tablename__ = "decisions"
    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    cycle_id: Mapped[int] = mapped_column(ForeignKey("cycles.id", ondelete="CASCADE"), index=True)
    at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    task_id: Mapped[str] = mapped_column(ForeignKey("tasks.id"), index=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    move: Mapped[str]
    rule: Mapped[str]
    because: Mapped[str]
    devices: Mapped[list[Any]] = json_column("[]")
    against: Mapped[str | None]
    __table_args__ = (Index("ix_decisions_tenant_id_id", "tenant_id", "id"),)


# --- what happened ------------------------------------------------------------------------------


class RequestEvent(Base):
    """A message about a request, in plain words; append only.

    Readers page by (txid, id) below the oldest running transaction, so that no late commit is
    missed. `task_id` is a task of the request. It is not a foreign key: with one, deleting a task
    would search all events, or each event would need one more index entry.
    """

    __tablename__ = "events"
    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    txid: Mapped[int] = mapped_column(Xid8, server_default=text("pg_current_xact_id()"))
    at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    request_id: Mapped[str | None] = mapped_column(ForeignKey("requests.id"))
    task_id: Mapped[str | None]
    type: Mapped[str]
    message: Mapped[str]
    data: Mapped[dict[str, Any]] = json_column()
    __table_args__ = (
        Index("ix_events_request_id_txid_id", "request_id", "txid", "id"),
        Index("ix_events_tenant_id_txid_id", "tenant_id", "txid", "id"),
    )


# --- webhooks, audit, logs ----------------------------------------------------------------------


class Webhook(Base):
    """A tenant's address that receives messages about ends of requests; `events` are the types it
    wants.

    A webhook without `url` stands for the addresses that requests name; a tenant has at most one.
    One with a `name` is a channel, which requests name: `encrypted` is its address, sealed as
    secrets are, and `url` only repeats the name.
    The secrets are stored unhashed, since every message is signed with them; `old_secret` signs too
    until `old_secret_until`.
    """

    __tablename__ = "webhooks"
    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    url: Mapped[str | None]
    events: Mapped[list[Any]] = json_column("[]")
    secret: Mapped[str]
    old_secret: Mapped[str | None]
    old_secret_until: Mapped[datetime | None]
    rotated_at: Mapped[datetime | None]
    disabled_at: Mapped[datetime | None]
    created_at: Mapped[datetime] = now_column()
    name: Mapped[str | None]
    kind: Mapped[str | None]  # one of `core.webhooks.channel_texts.KINDS`
    key_id: Mapped[str | None]
    encrypted: Mapped[bytes | None]
    __table_args__ = (
        Index("ix_webhooks_tenant_id_id", "tenant_id", "id"),
        Index("uq_webhooks_name", "tenant_id", "name", unique=True),
        Index(
            "uq_webhooks_addressless",
            "tenant_id",
            unique=True,
            postgresql_where=text("url is null"),
        ),
    )


DELIVERY_STATES = ("pending", "delivered", "given_up")


class Delivery(Base):
    """A message to an address; `id` is its `webhook-id`, the same each time it is sent.

    `attempt` counts how often a sender has taken it, and fences writes about it.  `round_from` is
    the attempt after which the present round of tries began.  The sender that took it has it until
    `taken_until`.
    """

    __tablename__ = "deliveries"
    id: Mapped[str] = mapped_column(primary_key=True)
    webhook_id: Mapped[str] = mapped_column(ForeignKey("webhooks.id", ondelete="CASCADE"))
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    request_id: Mapped[str | None] = mapped_column(
        ForeignKey("requests.id", ondelete="SET NULL"), index=True
    )
    url: Mapped[str]
    type: Mapped[str]
    body: Mapped[str]
    state: Mapped[str] = mapped_column(server_default="pending")
    attempt: Mapped[int] = mapped_column(server_default="0")
    round_from: Mapped[int] = mapped_column(server_default="0")
    attempts: Mapped[list[Any]] = json_column("[]")
    due_at: Mapped[datetime] = now_column()
    taken_until: Mapped[datetime | None]
    created_at: Mapped[datetime] = now_column()
    ended_at: Mapped[datetime | None]
    __table_args__ = (
        one_of("state", DELIVERY_STATES),
        Index("ix_deliveries_webhook_id_id", "webhook_id", "id"),
        Index(
            "ix_deliveries_due",
            "webhook_id",
            "due_at",
            postgresql_where=text("state = 'pending'"),
        ),
        Index(
            "ix_deliveries_taken",
            "tenant_id",
            postgresql_where=text("state = 'pending' and taken_until is not null"),
        ),
    )


class RequestChannel(Base):
    """A channel that a request names, and the types of `events` that are told there.

    `told` maps each type to the time of its last message, in seconds since 1970
    (`core.webhooks.grouping`).
    """

    __tablename__ = "request_channels"
    request_id: Mapped[str] = mapped_column(
        ForeignKey("requests.id", ondelete="CASCADE"), primary_key=True
    )
    webhook_id: Mapped[str] = mapped_column(
        ForeignKey("webhooks.id", ondelete="CASCADE"), primary_key=True, index=True
    )
    events: Mapped[list[Any]] = json_column("[]")
    told: Mapped[dict[str, Any]] = json_column()


class NewsItem(Base):
    """Tells that something happened to a request `count` times; no message told a channel yet.

    Control looks at it when it is due, and sends it or waits for more.
    """

    __tablename__ = "news"
    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    request_id: Mapped[str]
    webhook_id: Mapped[str]
    type: Mapped[str]
    task: Mapped[str]
    count: Mapped[int] = mapped_column(server_default="1")
    at: Mapped[datetime] = now_column()
    due_at: Mapped[datetime] = mapped_column(server_default=func.now(), index=True)
    __table_args__ = (
        ForeignKeyConstraint(
            ["request_id", "webhook_id"],
            ["request_channels.request_id", "request_channels.webhook_id"],
            ondelete="CASCADE",
        ),
        Index("ix_news_request_id_webhook_id", "request_id", "webhook_id"),
    )


AUDITED_ACTIONS = ("made", "changed", "removed", "asked", "read", "refused")


class AuditEvent(Base):
    """An action of a person as an administrator; a trigger refuses every change
    (`app.identity.audit`).

    There are no foreign keys, because the row outlives what it names.  `tenant_id` is the tenant
    that the action concerns; null means the platform.  `before` and `after` are `json`, which
    Postgres stores letter by letter.
    """

    __tablename__ = "audit_events"
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    at: Mapped[datetime]
    tenant_id: Mapped[str | None]
    user_id: Mapped[str]
    user: Mapped[str]
    user_tenant_id: Mapped[str]
    key_id: Mapped[str]
    address: Mapped[str]
    request_id: Mapped[str]
    operation: Mapped[str]
    action: Mapped[str]
    target_kind: Mapped[str]
    target_id: Mapped[str]
    before: Mapped[dict[str, Any]] = mapped_column(JSON)
    after: Mapped[dict[str, Any]] = mapped_column(JSON)
    previous: Mapped[str] = mapped_column(unique=True)  # so the chain cannot fork
    hash: Mapped[str]
    __table_args__ = (
        one_of("action", AUDITED_ACTIONS),
        Index("ix_audit_events_tenant_id_id", "tenant_id", "id"),
    )


class LogLine(Base):
    """A line that a job printed.  `id` orders the lines of all epochs of a task."""

    __tablename__ = "logs"
    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    task_id: Mapped[str] = mapped_column(ForeignKey("tasks.id"))
    epoch: Mapped[int]
    line: Mapped[int]
    at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    stream: Mapped[str]
    text: Mapped[str]
    __table_args__ = (
        UniqueConstraint("task_id", "epoch", "line"),
        Index("ix_logs_task_id_id", "task_id", "id"),
    )


class Metric(Base):
    """The metrics of one step of a job, or one row that a command wrote."""

    __tablename__ = "metrics"
    task_id: Mapped[str] = mapped_column(ForeignKey("tasks.id"), primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    values: Mapped[dict[str, Any]] = json_column()
