"""Tables of usage, which only `app.scheduling.ledger` writes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Index, Numeric, text
from sqlalchemy.orm import Mapped, mapped_column

from app.db.models.base import Base, json_column, txid_column


class Account(Base):
    """The usage of a user: `faded` is the decayed sum of rule F2, `total_us` never decays."""

    __tablename__ = "accounts"
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    faded: Mapped[int] = mapped_column(Numeric(1000, 0), server_default="0")
    total_us: Mapped[int] = mapped_column(Numeric(1000, 0), server_default="0")
    txid: Mapped[int] = txid_column(index=True)


class Lift(Base):
    """The idle-credit floor of a tenant (`user_id` "") or user, by kind and island.

    `faded` is the decayed usage that it is assumed to have had while it had no work. The unit is
    micro-device-seconds times thousandths of cost (`app.core.scheduling.idle_credit`).
    """

    __tablename__ = "lifts"
    island: Mapped[str] = mapped_column(ForeignKey("islands.name"), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(
        ForeignKey("tenants.id", ondelete="CASCADE"), primary_key=True
    )
    user_id: Mapped[str] = mapped_column(primary_key=True, server_default="")
    kind: Mapped[str] = mapped_column(primary_key=True)
    faded: Mapped[int] = mapped_column(Numeric(1000, 0))


class LedgerBase(Base):
    """A single row: the half-life, and the T0 that every `faded` is relative to
    (`app.scheduling.ledger`)."""

    __tablename__ = "ledger"
    id: Mapped[int] = mapped_column(primary_key=True)
    half_life_s: Mapped[float]
    since_s: Mapped[float]
    __table_args__ = (CheckConstraint("id = 1", name="one_row"),)


#: Buckets of usage of any width are counted from this time.
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Usage(Base):
    """Micro-device-seconds held and charged (held times cost), by the time bucket of the
    booking.
    """

    __tablename__ = "usage"
    bucket: Mapped[datetime] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"), primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    bucket_s: Mapped[int] = mapped_column(primary_key=True)
    held_us: Mapped[int] = mapped_column(BigInteger)
    charged_us: Mapped[int] = mapped_column(BigInteger)
    __table_args__ = (Index("ix_usage_fine", "bucket", postgresql_where=text("bucket_s < 3600")),)


class DailyUsage(Base):
    """Sums of rows of `Usage` that are an hour wide or wider, by the day (UTC) of their bucket.

    A trigger of `usage` adds each such row, and what it grows by, in the same transaction
    (`add_to_day` in `migrations/versions/0081_pre_first_schema.sql`).
    """

    __tablename__ = "daily_usage"
    day: Mapped[datetime] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"), primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    held_us: Mapped[int] = mapped_column(BigInteger)
    charged_us: Mapped[int] = mapped_column(BigInteger)


class BudgetPeriod(Base):
    """One kind of device in one period of the budget of a tenant (`user_id` "") or user.

    All amounts are micro-device-seconds, as charged. `carried_us` is what the period before left,
    and is null until that period is over. `adjustments` are what administrators added: `us`, `why`,
    `by` and `at` of each. `told` is the highest percentage that was written to the audit log.
    """

    __tablename__ = "budget_periods"
    tenant_id: Mapped[str] = mapped_column(
        ForeignKey("tenants.id", ondelete="CASCADE"), primary_key=True
    )
    user_id: Mapped[str] = mapped_column(primary_key=True, server_default="")
    kind: Mapped[str] = mapped_column(primary_key=True)
    begins_at: Mapped[datetime] = mapped_column(primary_key=True)
    ends_at: Mapped[datetime]
    granted_us: Mapped[int] = mapped_column(BigInteger)
    carried_us: Mapped[int | None] = mapped_column(BigInteger)
    adjustments: Mapped[list[Any]] = json_column("[]")
    spent_us: Mapped[int] = mapped_column(BigInteger, server_default="0")
    told: Mapped[int] = mapped_column(server_default="0")
