"""Tables of bundles, graphs, datablocks and uploads."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, CheckConstraint, ForeignKey, Index, UniqueConstraint, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from app.core.model.tensor_file import FORMATS
from app.db.models.base import Base, json_column, now_column, one_of


class Bundle(Base):
    """Code that a tenant uploaded; the store has its bytes once, under their hash.

    `entry_points` are the top-level classes and functions, found without running the code:
    {"module:Name": "class" | "function"}.  `signatures` are the arguments with which the classes
    can be constructed (`core.model.signature`), as far as the source shows them.
    """

    __tablename__ = "bundles"
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    sha256: Mapped[str] = mapped_column(primary_key=True)
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    entry_points: Mapped[dict[str, Any]] = json_column()
    signatures: Mapped[dict[str, Any]] = json_column()
    created_at: Mapped[datetime] = now_column()


class Graph(Base):
    """A graph of small functions that a tenant sent; `body` is its JSON as it was sent.

    The hash is that of its canonical bytes (`core.model.task_graph.canonical`); these lie in the
    store, for the devices.  `took_ms` is how long its nodes took in the last run, by kind of
    device.  `made_bytes` is how large the blocks were that the nodes made.
    """

    __tablename__ = "graphs"
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    sha256: Mapped[str] = mapped_column(primary_key=True)
    nodes: Mapped[int]
    body: Mapped[dict[str, Any]] = mapped_column(JSON)
    took_ms: Mapped[dict[str, Any]] = mapped_column(JSONB, server_default=text("'{}'"))
    made_bytes: Mapped[dict[str, Any]] = mapped_column(JSONB, server_default=text("'{}'"))
    created_at: Mapped[datetime] = now_column()


class Datablock(Base):
    """A version of a tenant's named data; it never changes, and its number is never reused.

    The bytes lie in the store under their hash.  `tensors` has the first of the `tensor_count`
    tensors, as [{"name", "dtype", "shape"}].  If a task published the datablock, `task_id` and
    `output` name the task and its output.  A deleted datablock has no name any more; since
    `freed_at` no task has needed its bytes.
    """

    __tablename__ = "datablocks"
    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"))
    name: Mapped[str]
    version: Mapped[int]
    format: Mapped[str]
    sha256: Mapped[str] = mapped_column(index=True)
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    tensors: Mapped[list[Any]] = json_column("[]")
    tensor_count: Mapped[int]
    task_id: Mapped[str | None] = mapped_column(ForeignKey("tasks.id"))
    output: Mapped[str] = mapped_column(server_default="")
    created_at: Mapped[datetime] = now_column()
    deleted_at: Mapped[datetime | None]
    freed_at: Mapped[datetime | None]
    __table_args__ = (
        UniqueConstraint("tenant_id", "name", "version"),
        CheckConstraint("version > 0", name="version"),
        one_of("format", FORMATS),
        Index("ix_datablocks_tenant_id_id", "tenant_id", "id"),
        Index(
            "uq_datablocks_published",
            "task_id",
            "output",
            unique=True,
            postgresql_where=text("task_id is not null"),
        ),
        Index(
            "ix_datablocks_deleted",
            "id",
            postgresql_where=text("deleted_at is not null and freed_at is null"),
        ),
    )


class DatablockUse(Base):
    """A task takes this version at `port`: its bytes are kept until the task has ended."""

    __tablename__ = "datablock_uses"
    task_id: Mapped[str] = mapped_column(ForeignKey("tasks.id"), primary_key=True)
    port: Mapped[str] = mapped_column(primary_key=True)
    datablock_id: Mapped[str] = mapped_column(ForeignKey("datablocks.id"), index=True)


class DatablockPlace(Base):
    """A device near which a version's bytes may still lie.

    A task that takes this version started on the device, or a task there published it.  So the
    device's host had the bytes on its disk at that time.
    """

    __tablename__ = "datablock_places"
    datablock_id: Mapped[str] = mapped_column(ForeignKey("datablocks.id"), primary_key=True)
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"), primary_key=True)
    seen_at: Mapped[datetime] = now_column()


class Upload(Base):
    """A datablock, or a bundle (which has no name), that is being uploaded.

    The bytes received so far are its parts, one after the other.
    """

    __tablename__ = "uploads"
    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str]
    sha256: Mapped[str]
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    touched_at: Mapped[datetime] = now_column()
    __table_args__ = (UniqueConstraint("tenant_id", "name", "sha256", "size_bytes"),)


class UploadPart(Base):
    """Bytes of an upload, from offset `at` on; they lie in the store under `place`."""

    __tablename__ = "upload_parts"
    upload_id: Mapped[str] = mapped_column(
        ForeignKey("uploads.id", ondelete="CASCADE"), primary_key=True
    )
    at: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    place: Mapped[str] = mapped_column(index=True)
