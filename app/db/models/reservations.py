"""Tables of reservations."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import ForeignKey, Index, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from app.db.models.base import Base, json_column, now_column


class Reservation(Base):
    """Devices of an island that are reserved for a tenant or one of its users, in windows.

    Without a tenant it is the maintenance of the devices in `device_ids`, which take no work then.
    """

    __tablename__ = "reservations"
    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    island: Mapped[str] = mapped_column(ForeignKey("islands.name"))
    tenant_id: Mapped[str | None] = mapped_column(ForeignKey("tenants.id"), index=True)
    user_id: Mapped[str | None] = mapped_column(ForeignKey("users.id"), index=True)
    devices: Mapped[dict[str, Any]] = json_column()  # number of devices by kind
    # the only devices that it takes, if it names them; or the labels of all that it takes
    device_ids: Mapped[list[Any]] = mapped_column(JSONB, server_default=text("'[]'"))
    labels: Mapped[list[Any]] = mapped_column(JSONB, server_default=text("'[]'"))
    begins_at: Mapped[datetime]  # of the first window, as it was given
    ends_at: Mapped[datetime]
    rule: Mapped[str] = mapped_column(server_default="")  # how it repeats; "": not at all
    timezone: Mapped[str] = mapped_column(server_default="UTC")
    note: Mapped[str] = mapped_column(server_default="")
    created_by: Mapped[str] = mapped_column(server_default="")
    created_at: Mapped[datetime] = now_column()


class ReservationWindow(Base):
    """A time in which a reservation counts; `in_force` says whether islands know that it does."""

    __tablename__ = "reservation_windows"
    reservation_id: Mapped[str] = mapped_column(
        ForeignKey("reservations.id", ondelete="CASCADE"), primary_key=True
    )
    begins_at: Mapped[datetime] = mapped_column(primary_key=True)
    ends_at: Mapped[datetime]
    in_force: Mapped[bool] = mapped_column(server_default=text("false"))
    __table_args__ = (Index("ix_reservation_windows_ends_at", "ends_at"),)
