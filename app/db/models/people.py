"""Tables of tenants, users, their keys and their browser sessions."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    ForeignKey,
    Index,
    Numeric,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from app.core.model.descriptor import TIERS
from app.core.security.grants import ROLES
from app.db.models.base import Base, json_column, now_column, one_of, txid_column


class Tenant(Base):
    """A node of the tenant tree; the root ("platform") has no parent and owns no share.

    Two tenants of the same name have different parents. All limits hold for the tenant together
    with all tenants below it.
    """

    __tablename__ = "tenants"
    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    parent_id: Mapped[str | None] = mapped_column(ForeignKey("tenants.id"))
    weight_milli: Mapped[int] = mapped_column(BigInteger, server_default="1000")
    # Faded usage that counts in comparisons only, because the weight has changed
    # (`app.scheduling.ledger.reweigh`).
    carried: Mapped[int] = mapped_column(Numeric(1000, 0), default=0, server_default="0")
    guarantee: Mapped[dict[str, Any]] = json_column()  # number of devices by kind: {"cuda": 4}
    # number of devices by kind; "*" means all kinds together
    limit: Mapped[dict[str, Any]] = json_column()
    max_running: Mapped[int | None]  # most running tasks; null: no limit
    max_queued: Mapped[int | None]  # most queued tasks; null: no limit
    # a task that computes nothing for this long is paused; null: what the tenant above says
    idle_pause_s: Mapped[int | None]
    # a session without input for this long is ended; null: what the tenant above says
    session_end_s: Mapped[int | None]
    # destinations that tasks may reach (`provisions.network_policy`); null: no policy of its own
    network: Mapped[list[Any] | None] = mapped_column(JSONB(none_as_null=True))
    # limits, and the budget, of its users without their own, as in `User`: only those that are set
    user_defaults: Mapped[dict[str, Any]] = json_column()
    # what may be charged in a period (`core.fairness.budget.Budget.as_json`); null: no budget
    budget: Mapped[dict[str, Any] | None] = mapped_column(JSONB(none_as_null=True))
    # what the budget has put in force by kind, until the period ends (`app.scheduling.budgets`)
    exhausted: Mapped[dict[str, Any]] = json_column()
    budget_ends_at: Mapped[datetime | None]
    # devices that are reserved for it now, by island and kind (`app.scheduling.reservations`)
    reserved: Mapped[dict[str, Any]] = json_column()
    # best tier that requests may ask for
    tier: Mapped[str] = mapped_column(server_default="standard")
    version: Mapped[int] = mapped_column(server_default="1")
    created_at: Mapped[datetime] = now_column()
    txid: Mapped[int] = txid_column(index=True)
    __table_args__ = (
        CheckConstraint("weight_milli > 0", name="weight_milli"),
        CheckConstraint("max_running >= 0", name="max_running"),
        CheckConstraint("max_queued >= 0", name="max_queued"),
        CheckConstraint("idle_pause_s > 0", name="idle_pause_s"),
        CheckConstraint("session_end_s > 0", name="session_end_s"),
        one_of("tier", TIERS),
        Index(
            "uq_tenants_parent_id_name",
            "parent_id",
            "name",
            unique=True,
            postgresql_nulls_not_distinct=True,
        ),
    )


class User(Base):
    """A user of a tenant.  `weight_milli` divides the tenant's share among its users;
    `carried` is as for a tenant.

    `service` marks a service account: a program that uses the API; no person signs in with it.

    A deleted user keeps this row, because usage and history name it; its name may be used again.
    """

    __tablename__ = "users"
    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str]
    weight_milli: Mapped[int] = mapped_column(BigInteger, server_default="1000")
    carried: Mapped[int] = mapped_column(Numeric(1000, 0), default=0, server_default="0")
    service: Mapped[bool] = mapped_column(server_default=text("false"))
    # Limits of the user alone, as for a tenant; null: what the tenant's `user_defaults` say.
    limit: Mapped[dict[str, Any] | None] = mapped_column(JSONB(none_as_null=True))
    max_running: Mapped[int | None]
    max_queued: Mapped[int | None]
    max_sessions: Mapped[int | None]  # most sessions that have not ended
    max_duration_s: Mapped[float | None]  # longest `max_duration_s` of a task
    # the budget of the user alone, as for a tenant; null: what the tenant's `user_defaults` say
    budget: Mapped[dict[str, Any] | None] = mapped_column(JSONB(none_as_null=True))
    exhausted: Mapped[dict[str, Any]] = json_column()
    budget_ends_at: Mapped[datetime | None]
    # devices that are reserved for it now, by island and kind (`app.scheduling.reservations`)
    reserved: Mapped[dict[str, Any]] = json_column()
    # channels that are told of requests that name none: {"to", "on"} each
    notify: Mapped[list[Any] | None] = mapped_column(JSONB(none_as_null=True))
    deleted_at: Mapped[datetime | None]
    version: Mapped[int] = mapped_column(server_default="1")
    created_at: Mapped[datetime] = now_column()
    txid: Mapped[int] = txid_column(index=True)
    __table_args__ = (
        Index(
            "uq_users_tenant_id_name",
            "tenant_id",
            "name",
            unique=True,
            postgresql_where=text("deleted_at is null"),
        ),
        CheckConstraint("weight_milli > 0", name="weight_milli"),
        CheckConstraint("max_running >= 0", name="max_running"),
        CheckConstraint("max_queued >= 0", name="max_queued"),
        CheckConstraint("max_sessions >= 0", name="max_sessions"),
        CheckConstraint("max_duration_s > 0", name="max_duration_s"),
        Index("ix_users_budget", "id", postgresql_where=text("budget is not null")),
    )


class ApiKey(Base):
    """An API key.  `id` is its public part; of the secret only the SHA-256 is stored.

    `scopes` restrict what the key's role allows; null means no restriction.  `replaced_by` is the
    key that replaced this one in a rotation and stays valid when this one expires.
    """

    __tablename__ = "api_keys"
    id: Mapped[str] = mapped_column(primary_key=True)
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"), index=True)
    role: Mapped[str]
    name: Mapped[str]
    scopes: Mapped[list[Any] | None] = mapped_column(JSONB(none_as_null=True))
    secret_sha256: Mapped[str]
    replaced_by: Mapped[str | None] = mapped_column(ForeignKey("api_keys.id"))
    created_at: Mapped[datetime] = now_column()
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
    __table_args__ = (one_of("role", ROLES),)


class Secret(Base):
    """A secret of a user, or of all users of a tenant if `user_id` is null.

    `encrypted` opens with the key `key_id` of a file outside the database, and only as this
    `version` of this row (`app.identity.secret_store`).
    """

    __tablename__ = "secrets"
    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    user_id: Mapped[str | None] = mapped_column(ForeignKey("users.id"))
    name: Mapped[str]
    version: Mapped[int] = mapped_column(server_default="1")
    key_id: Mapped[str]
    encrypted: Mapped[bytes]
    set_by: Mapped[str]
    set_at: Mapped[datetime] = now_column()
    last_used_at: Mapped[datetime | None]
    __table_args__ = (
        Index(
            "uq_secrets_tenant_id_user_id_name",
            "tenant_id",
            "user_id",
            "name",
            unique=True,
            postgresql_nulls_not_distinct=True,
        ),
    )


class ImageKey(Base):
    """The key of a tenant with which the images of its commands are encrypted.

    `encrypted` opens with the key `key_id` of a file outside the database
    (`app.identity.image_keys`).
    """

    __tablename__ = "image_keys"
    tenant_id: Mapped[str] = mapped_column(
        ForeignKey("tenants.id", ondelete="CASCADE"), primary_key=True
    )
    key_id: Mapped[str]
    encrypted: Mapped[bytes]
    created_at: Mapped[datetime] = now_column()


class WebSession(Base):
    """A browser that is signed in: the SHA-256 of its cookie, and the API key that it acts for."""

    __tablename__ = "web_sessions"
    token_sha256: Mapped[str] = mapped_column(primary_key=True)
    key_id: Mapped[str] = mapped_column(ForeignKey("api_keys.id"))
    expires_at: Mapped[datetime]
    created_at: Mapped[datetime] = now_column()
