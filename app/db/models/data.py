"""Tables of bundles, graphs, datablocks and uploads."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    ForeignKey,
    Index,
    LargeBinary,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from app.core.model.checkpoints.tensor_file import FORMATS
from app.core.model.provisions.folder import FOLDER
from app.db.models.base import Base, json_column, now_column, one_of


class Bundle(Base):
    """Code that a tenant uploaded; the store has its bytes once, under their hash.

    `entry_points` are the top-level classes and functions, found without running the code:
    {"module:Name": "class" | "function"}.  `signatures` are the arguments with which the classes
    can be constructed (`core.model.graphs.entry_signature`), as far as the source shows them.
    `package_files` are the files that a request may name as its environment, by path, with the
    hashes of their bytes; None for a bundle of before there were environments.
    """

    __tablename__ = "bundles"
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    sha256: Mapped[str] = mapped_column(primary_key=True)
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    entry_points: Mapped[dict[str, Any]] = json_column()
    signatures: Mapped[dict[str, Any]] = json_column()
    package_files: Mapped[dict[str, Any] | None] = mapped_column(JSONB(none_as_null=True))
    created_at: Mapped[datetime] = now_column()


class PackageFile(Base):
    """A file of a tenant's bundles that names packages, such as a requirements.txt."""

    __tablename__ = "package_files"
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    sha256: Mapped[str] = mapped_column(primary_key=True)
    body: Mapped[bytes] = mapped_column(LargeBinary)


ENVIRONMENT_STATES = ("locking", "locked", "failed", "stale")


class Environment(Base):
    """The packages that a tenant's file names, and their lock; equal files are locked once.

    A lock over the platform's packages is `stale` when the platform has other versions.
    """

    __tablename__ = "environments"
    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"))
    path: Mapped[str]
    sort: Mapped[str]  # sort of the file (`provisions.environment.SORTS`)
    source_sha256: Mapped[str]  # hash of the file
    python: Mapped[str]
    # True: only commands of one rank use the lock, so it may have packages that replace the
    # platform's
    alone: Mapped[bool]
    state: Mapped[str] = mapped_column(server_default="locking")
    platform: Mapped[dict[str, Any]] = json_column()
    lock_sha256: Mapped[str | None]  # address of the lock in the store
    packages: Mapped[list[Any]] = json_column("[]")  # [name, version] of each package in the lock
    message: Mapped[str] = mapped_column(server_default="")  # what `uv` said when it failed
    created_at: Mapped[datetime] = now_column()
    claimed_until: Mapped[datetime | None]  # until when a control process has time to lock it
    tried_at: Mapped[datetime | None]
    locked_at: Mapped[datetime | None]
    # how long the last locking took
    took_us: Mapped[int] = mapped_column(BigInteger, server_default="0")
    __table_args__ = (
        UniqueConstraint("tenant_id", "source_sha256", "sort", "python", "alone"),
        one_of("state", ENVIRONMENT_STATES),
        Index("ix_environments_locking", "id", postgresql_where=text("state = 'locking'")),
        Index(
            "ix_environments_lock_sha256",
            "lock_sha256",
            postgresql_where=text("lock_sha256 is not null"),
        ),
        Index("ix_environments_tenant_id_id", "tenant_id", "id"),
    )


class Graph(Base):
    """A graph of small functions that a tenant sent; `body` is its JSON as it was sent.

    Its hash is taken of its canonical bytes (`core.model.graphs.task_graph.canonical`), which
    devices find in the store.  `took_ms` is how long its nodes took in the last run, by kind of
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

    The bytes lie in the store under their hash. The bytes of a folder are its manifest
    (`provisions.folder`). A deleted datablock has no name any more.
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
    # the first of the tensors, as [{"name", "dtype", "shape"}]
    tensors: Mapped[list[Any]] = json_column("[]")
    tensor_count: Mapped[int]  # number of all tensors
    file_count: Mapped[int] = mapped_column(server_default="0")  # number of files of a folder
    # size of these files in all
    file_bytes: Mapped[int] = mapped_column(BigInteger, server_default="0")
    # task that published it, until the task is deleted
    task_id: Mapped[str | None] = mapped_column(ForeignKey("tasks.id", ondelete="SET NULL"))
    output: Mapped[str] = mapped_column(server_default="")  # output of that task
    created_at: Mapped[datetime] = now_column()
    deleted_at: Mapped[datetime | None]
    # since when no task has needed its bytes, after it was deleted
    freed_at: Mapped[datetime | None]
    __table_args__ = (
        UniqueConstraint("tenant_id", "name", "version"),
        CheckConstraint("version > 0", name="version"),
        one_of("format", (*FORMATS, FOLDER)),
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


class StoredFile(Base):
    """A file that a tenant uploaded for its folders; the store has its bytes under their hash.

    It stays while a folder has it, and for a day after it was last named.
    """

    __tablename__ = "stored_files"
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    sha256: Mapped[str] = mapped_column(primary_key=True, index=True)
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    touched_at: Mapped[datetime] = now_column()


class DatablockFile(Base):
    """A folder has this file, at one path or more."""

    __tablename__ = "datablock_files"
    datablock_id: Mapped[str] = mapped_column(ForeignKey("datablocks.id"), primary_key=True)
    sha256: Mapped[str] = mapped_column(primary_key=True, index=True)


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


class Mount(Base):
    """A folder of hosts that tasks may see, read-only, or a container image (`sort`).

    `tenants` are ids of the tenants that may use it, each with all tenants below it; null: all may.
    A host shows the `path` only where its own administrator allows it.
    """

    __tablename__ = "mounts"
    name: Mapped[str] = mapped_column(primary_key=True)
    path: Mapped[str]
    sort: Mapped[str] = mapped_column(server_default="folder")
    tenants: Mapped[list[Any] | None] = mapped_column(JSONB(none_as_null=True))
    version: Mapped[int] = mapped_column(server_default="1")
    created_at: Mapped[datetime] = now_column()


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
