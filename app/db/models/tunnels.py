"""The table of tunnels: who looked into which task, how, and for how long."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from app.core.model.provisions.tunnel import TunnelKind
from app.db.models.base import Base, json_column, now_column, one_of


class Tunnel(Base):
    """A tunnel into a task (`provisions.tunnel`).

    It begins with a ticket, of which only the hash is kept.  `opened_at` is when the ticket was
    used.  The API process that carries the tunnel writes `seen_at` again and again, so that a
    tunnel whose process died does not count as open for ever.  `active_at` is when the user last
    sent something.  `asked` is what the user wants inside (`TunnelTicket`), and `call` who that is
    (`app.identity.audit.Call`).
    """

    __tablename__ = "tunnels"
    id: Mapped[str] = mapped_column(primary_key=True)
    task_id: Mapped[str] = mapped_column(ForeignKey("tasks.id"))
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    kind: Mapped[str]
    asked: Mapped[dict[str, Any]] = json_column()
    call: Mapped[dict[str, Any]] = json_column()
    ticket_sha256: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[datetime] = now_column()
    expires_at: Mapped[datetime]
    opened_at: Mapped[datetime | None]
    seen_at: Mapped[datetime | None]
    active_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    sent_bytes: Mapped[int] = mapped_column(BigInteger, server_default="0")  # to the task
    received_bytes: Mapped[int] = mapped_column(BigInteger, server_default="0")
    __table_args__ = (
        one_of("kind", tuple(TunnelKind)),
        Index("ix_tunnels_task_id_ended_at", "task_id", "ended_at"),
        Index("ix_tunnels_tenant_id_ended_at", "tenant_id", "ended_at"),
    )
