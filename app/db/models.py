"""All tables: columns and constraints only.  `app.scheduling.snapshot_reader` turns rows into
values.

Each kind of column has one writer.  The API writes the actions that users request
(`cancel_asked_at`, `hold`, `priority`) and new rows.  Only `app.scheduling.journal`, in the
island's transaction, writes the state of a task, a placement or an order.  Only
`app.scheduling.ledger` writes usage.  Constraints enforce what must be true even if our code has a
bug: a task has one open placement, and a device's slot belongs to one task at a time.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    DateTime,
    FetchedValue,
    ForeignKey,
    Identity,
    Index,
    MetaData,
    Numeric,
    Text,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import UserDefinedType

from app.core.model.descriptor import TIERS
from app.core.model.lifecycle import State
from app.core.model.tensor_file import FORMATS
from app.core.security.grants import ROLES


class Xid8(UserDefinedType[int]):
    """Postgres' 64-bit transaction id.  Streams read by it, so that they don't miss a late
    commit.
    """

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "xid8"


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {
        datetime: DateTime(timezone=True),
        dict[str, Any]: JSONB,
        list[Any]: JSONB,
        str: Text,
    }


def _now() -> Any:
    return mapped_column(server_default=func.now())


def _json(default: str = "{}") -> Any:
    return mapped_column(JSONB, server_default=text(f"'{default}'"))


def _txid(**more: Any) -> Any:
    """The transaction that last wrote the row; a trigger sets it, and
    `app.scheduling.snapshot_reader` reads changes by it.
    """
    return mapped_column(
        Xid8,
        server_default=text("pg_current_xact_id()"),
        server_onupdate=FetchedValue(),
        **more,
    )


def _one_of(column: str, words: Any) -> CheckConstraint:
    listed = ", ".join(f"'{word}'" for word in words)
    return CheckConstraint(f"{column} in ({listed})", name=column)


# --- tenants and users --------------------------------------------------------------------------


class Tenant(Base):
    """A node of the tenant tree; the root ("platform") has no parent and owns no share.

    Two tenants of the same name have different parents.  `guarantee` and `limit` are numbers of
    devices by kind, {"cuda": 4}; in `limit`, "*" means all kinds together.  `max_running` and
    `max_queued` bound the number of tasks in the whole subtree; null means no bound.  `tier` is the
    best tier that requests of the subtree may ask for.
    """

    __tablename__ = "tenants"
    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    parent_id: Mapped[str | None] = mapped_column(ForeignKey("tenants.id"))
    weight_milli: Mapped[int] = mapped_column(BigInteger, server_default="1000")
    guarantee: Mapped[dict[str, Any]] = _json()
    limit: Mapped[dict[str, Any]] = _json()
    max_running: Mapped[int | None]
    max_queued: Mapped[int | None]
    tier: Mapped[str] = mapped_column(server_default="standard")
    version: Mapped[int] = mapped_column(server_default="1")
    created_at: Mapped[datetime] = _now()
    txid: Mapped[int] = _txid(index=True)
    __table_args__ = (
        CheckConstraint("weight_milli > 0", name="weight_milli"),
        CheckConstraint("max_running >= 0", name="max_running"),
        CheckConstraint("max_queued >= 0", name="max_queued"),
        _one_of("tier", TIERS),
        Index(
            "uq_tenants_parent_id_name",
            "parent_id",
            "name",
            unique=True,
            postgresql_nulls_not_distinct=True,
        ),
    )


class User(Base):
    """A user of a tenant.  `weight_milli` divides the tenant's share among its users.

    `service` marks a service account: a program that uses the API; no person signs in with it.
    """

    __tablename__ = "users"
    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str]
    weight_milli: Mapped[int] = mapped_column(BigInteger, server_default="1000")
    service: Mapped[bool] = mapped_column(server_default=text("false"))
    version: Mapped[int] = mapped_column(server_default="1")
    created_at: Mapped[datetime] = _now()
    txid: Mapped[int] = _txid(index=True)
    __table_args__ = (
        UniqueConstraint("tenant_id", "name"),
        CheckConstraint("weight_milli > 0", name="weight_milli"),
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
    created_at: Mapped[datetime] = _now()
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
    __table_args__ = (_one_of("role", ROLES),)


class WebSession(Base):
    """A browser that is signed in: the SHA-256 of its cookie, and the API key that it acts for."""

    __tablename__ = "web_sessions"
    token_sha256: Mapped[str] = mapped_column(primary_key=True)
    key_id: Mapped[str] = mapped_column(ForeignKey("api_keys.id"))
    expires_at: Mapped[datetime]
    created_at: Mapped[datetime] = _now()


# --- the fleet ----------------------------------------------------------------------------------


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
    tally: Mapped[dict[str, Any]] = _json()
    tallied_at: Mapped[datetime | None]
    key: Mapped[str | None]  # public key, which verifies the island's messages to devices
    created_at: Mapped[datetime] = _now()


class Enrolment(Base):
    """A device that an administrator admits: its heartbeats count if `key` verifies them.

    `key` is the public key of the device's host.  The device may not exist yet, and the row of a
    device stays after its enrolment was revoked.
    """

    __tablename__ = "enrolments"
    device_id: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str]
    enrolled_by: Mapped[str]  # a user's name
    enrolled_at: Mapped[datetime] = _now()
    revoked_at: Mapped[datetime | None]


class Host(Base):
    __tablename__ = "hosts"
    name: Mapped[str] = mapped_column(primary_key=True)
    island: Mapped[str] = mapped_column(ForeignKey("islands.name"))
    cordoned: Mapped[bool] = mapped_column(server_default=text("false"))
    created_at: Mapped[datetime] = _now()
    txid: Mapped[int] = _txid(index=True)


class Device(Base):
    """A device.  `id` is "<host>.<n>"; the device's Celery queue is called "device.<host>.<n>".

    `incarnation` is the process that last reported as this device.  `heard_us` is when that process
    sent the newest recorded heartbeat, by its own clock.  `lease_until` is how long the device may
    go on without another heartbeat, by the database's clock.

    `links` is the [address, port] where other workers reach the device's worker.  `secret` gives
    access to the blocks that the worker serves.  No response of the API contains either of them,
    and both are new with each process.
    """

    __tablename__ = "devices"
    id: Mapped[str] = mapped_column(primary_key=True)
    host: Mapped[str] = mapped_column(ForeignKey("hosts.name"))
    island: Mapped[str] = mapped_column(ForeignKey("islands.name"), index=True)
    kind: Mapped[str]
    threads: Mapped[int] = mapped_column(server_default="1")
    memory_bytes: Mapped[int] = mapped_column(BigInteger, server_default="0")
    cost_milli: Mapped[int] = mapped_column(BigInteger, server_default="1000")
    cordoned: Mapped[bool] = mapped_column(server_default=text("false"))
    incarnation: Mapped[str] = mapped_column(server_default="")
    heard_us: Mapped[int] = mapped_column(BigInteger, server_default="0")
    lease_until: Mapped[datetime | None]
    seen_at: Mapped[datetime | None]
    facts: Mapped[dict[str, Any]] = _json()
    links: Mapped[list[Any]] = mapped_column(JSONB, server_default=text("'[]'"))
    secret: Mapped[str] = mapped_column(server_default="")
    version: Mapped[int] = mapped_column(server_default="1")
    created_at: Mapped[datetime] = _now()
    txid: Mapped[int] = _txid(index=True)
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
    params: Mapped[dict[str, Any]] = _json()
    version: Mapped[int] = mapped_column(server_default="1")
    updated_at: Mapped[datetime] = _now()


# --- work and data ------------------------------------------------------------------------------


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
    entry_points: Mapped[dict[str, Any]] = _json()
    signatures: Mapped[dict[str, Any]] = _json()
    created_at: Mapped[datetime] = _now()


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
    created_at: Mapped[datetime] = _now()


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
    tensors: Mapped[list[Any]] = _json("[]")
    tensor_count: Mapped[int]
    task_id: Mapped[str | None] = mapped_column(ForeignKey("tasks.id"))
    output: Mapped[str] = mapped_column(server_default="")
    created_at: Mapped[datetime] = _now()
    deleted_at: Mapped[datetime | None]
    freed_at: Mapped[datetime | None]
    __table_args__ = (
        UniqueConstraint("tenant_id", "name", "version"),
        CheckConstraint("version > 0", name="version"),
        _one_of("format", FORMATS),
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
    seen_at: Mapped[datetime] = _now()


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
    touched_at: Mapped[datetime] = _now()
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


REQUEST_STATES = ("queued", "running", "done", "failed", "cancelled")


class Request(Base):
    """The content of a POST.  `state` summarizes the request's tasks; `app.scheduling.journal`
    maintains it.
    """

    __tablename__ = "requests"
    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"))
    name: Mapped[str]
    state: Mapped[str] = mapped_column(server_default="queued")
    tier: Mapped[str] = mapped_column(server_default="standard")
    priority: Mapped[int] = mapped_column(server_default="0")
    labels: Mapped[dict[str, Any]] = _json()
    descriptor: Mapped[dict[str, Any]] = _json()
    submitted_at: Mapped[datetime] = _now()
    ended_at: Mapped[datetime | None]
    __table_args__ = (
        _one_of("state", REQUEST_STATES),
        _one_of("tier", TIERS),
        Index("ix_requests_tenant_id_id", "tenant_id", "id"),
    )


class Task(Base):
    """A task: what an island schedules.

    `epoch` counts launches and fences every write.  `event_seq` and `order_seq` are the last event
    recorded and the last order written in this epoch.  `seat` is the device that the task holds or
    is about to hold; for an elastic task, its home device.  `resized_at` is since when an elastic
    task holds its present number of devices.  `image_on` is the device with the paused image of
    `step` in its host's memory; `saved` says whether that image is durable too.  `move_to` is the
    device that the task is to be moved to ("*": any other), and `moving` how far the move is
    (`core.model.migration.Moving`).

    `assigned` says why the task is on its island (`app.intake.island_assignment`).  `abroad` says
    that tasks of other islands wait for its end.

    `gang_id` is set for a gang that spans islands and for its tickets
    (`app.scheduling.gang_tickets`): it is the id of the gang.  A ticket keeps its slots for the
    gang's epoch `good_for`.

    `cost_milli` is what a second of this epoch costs, if the task is charged by its memory and not
    by its device.  `unheard_us` is the part of `total_held_us` in which its device was not heard
    from before it was lost: charged, but not counted for `max_duration_s`.  `waited_us` is the sum
    of all ended waits.  `away` has the waits of the last hour after the task had started (rule F9),
    as [from, to] in seconds since 1970.
    """

    __tablename__ = "tasks"
    id: Mapped[str] = mapped_column(primary_key=True)
    request_id: Mapped[str] = mapped_column(ForeignKey("requests.id"), index=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"))
    island: Mapped[str | None] = mapped_column(ForeignKey("islands.name"))
    assigned: Mapped[dict[str, Any] | None] = mapped_column(JSONB(none_as_null=True))
    abroad: Mapped[bool] = mapped_column(server_default=text("false"))
    gang_id: Mapped[str | None] = mapped_column(ForeignKey("tasks.id"))
    ordinal: Mapped[int]
    name: Mapped[str]
    type: Mapped[str]
    kind: Mapped[str]
    descriptor: Mapped[dict[str, Any]] = _json()
    memory_bytes: Mapped[int] = mapped_column(BigInteger, server_default="0")
    devices_min: Mapped[int] = mapped_column(server_default="1")
    devices_max: Mapped[int] = mapped_column(server_default="1")
    across_hosts: Mapped[bool] = mapped_column(server_default=text("false"))
    tier: Mapped[str] = mapped_column(server_default="standard")
    priority: Mapped[int] = mapped_column(server_default="0")
    # actions that users request, written by the API
    hold: Mapped[str] = mapped_column(server_default="")
    save_asked: Mapped[bool] = mapped_column(server_default=text("false"))
    cancel_asked_at: Mapped[datetime | None]
    not_before: Mapped[datetime | None]
    move_to: Mapped[str | None]
    move_asked_at: Mapped[datetime | None]
    # state, written by the journal
    state: Mapped[str] = mapped_column(server_default="blocked")
    epoch: Mapped[int] = mapped_column(server_default="0")
    event_seq: Mapped[int] = mapped_column(server_default="0")
    order_seq: Mapped[int] = mapped_column(server_default="0")
    good_for: Mapped[int] = mapped_column(server_default="0")
    saved: Mapped[bool] = mapped_column(server_default=text("true"))
    seat: Mapped[str | None] = mapped_column(ForeignKey("devices.id"))
    image_on: Mapped[str | None] = mapped_column(ForeignKey("devices.id"))
    moving: Mapped[dict[str, Any] | None] = mapped_column(JSONB(none_as_null=True))
    step: Mapped[int] = mapped_column(BigInteger, server_default="0")
    launched_at: Mapped[datetime | None]
    started_at: Mapped[datetime | None]
    resized_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    first_started_at: Mapped[datetime | None]
    held_us: Mapped[int] = mapped_column(BigInteger, server_default="0")
    total_held_us: Mapped[int] = mapped_column(BigInteger, server_default="0")
    guest_held_us: Mapped[int] = mapped_column(BigInteger, server_default="0")
    unheard_us: Mapped[int] = mapped_column(BigInteger, server_default="0")
    switch_us: Mapped[int] = mapped_column(BigInteger, server_default="0")
    cost_milli: Mapped[int] = mapped_column(BigInteger, server_default="0")
    shares: Mapped[bool] = mapped_column(server_default=text("false"))
    attempts: Mapped[int] = mapped_column(server_default="0")
    retry_max: Mapped[int] = mapped_column(server_default="0")
    retry_at: Mapped[datetime | None]
    waiting_since: Mapped[datetime | None]
    waited_us: Mapped[int] = mapped_column(BigInteger, server_default="0")
    away: Mapped[list[Any]] = _json("[]")
    pauses: Mapped[int] = mapped_column(server_default="0")
    lost_steps: Mapped[int] = mapped_column(BigInteger, server_default="0")
    metrics: Mapped[dict[str, Any]] = _json()
    capabilities: Mapped[list[Any]] = _json("[]")
    preset: Mapped[dict[str, Any]] = _json()
    cause: Mapped[str | None]
    message: Mapped[str | None]
    detail: Mapped[str | None]
    result: Mapped[dict[str, Any] | None] = mapped_column(JSONB)
    passed: Mapped[list[dict[str, Any]] | None] = mapped_column(JSONB)
    outputs: Mapped[dict[str, Any]] = _json()
    submitted_at: Mapped[datetime] = _now()
    txid: Mapped[int] = _txid()
    __table_args__ = (
        UniqueConstraint("request_id", "name"),
        _one_of("state", State),
        _one_of("hold", ("", "user", "admin")),
        _one_of("tier", TIERS),
        CheckConstraint("epoch >= 0", name="epoch"),
        CheckConstraint("devices_min between 1 and devices_max", name="devices"),
        Index(
            "ix_tasks_queue",
            "tenant_id",
            "id",
            postgresql_where=text("state in ('blocked', 'waiting')"),
        ),
        Index(
            "ix_tasks_live",
            "island",
            "id",
            postgresql_where=text("state not in ('done', 'failed', 'cancelled')"),
        ),
        Index("ix_tasks_island_txid", "island", "txid"),
        Index("ix_tasks_gang_id", "gang_id", postgresql_where=text("gang_id is not null")),
        Index("ix_tasks_gang_txid", "txid", postgresql_where=text("gang_id is not null")),
        Index(
            "ix_tasks_gang_retry",
            "retry_at",
            postgresql_where=text("gang_id is not null and retry_at is not null"),
        ),
        Index(
            "ix_tasks_line",
            "island",
            "user_id",
            "kind",
            "memory_bytes",
            "devices_min",
            text("priority desc"),
            "submitted_at",
            "id",
            postgresql_where=text("state = 'waiting'"),
        ),
        Index(
            "ix_tasks_not_before",
            "island",
            "not_before",
            postgresql_where=text("state = 'blocked' and not_before is not null"),
        ),
        Index(
            "ix_tasks_on_a_device",
            "seat",
            postgresql_where=text(
                "state in ('starting', 'running', 'splicing', 'pausing', 'stopping')"
            ),
        ),
        Index(
            "ix_tasks_abroad",
            "txid",
            postgresql_where=text("abroad and state in ('done', 'failed', 'cancelled')"),
        ),
        Index(
            "ix_tasks_blocked",
            "island",
            "kind",
            "tenant_id",
            postgresql_where=text("state = 'blocked'"),
        ),
        Index("ix_tasks_image_on", "image_on", postgresql_where=text("image_on is not null")),
        Index("ix_tasks_move_to", "move_to", postgresql_where=text("move_to is not null")),
        Index("ix_tasks_save_asked", "id", postgresql_where=text("save_asked")),
        {"postgresql_with": {"fillfactor": "70"}},
    )


class Need(Base):
    """A dependency: `task_id` starts only when `needs_id` is done.

    `port` takes the other task's `output`; "" means that the dependency is only an order in time
    (`after`).  `given` is the transaction that found the output durable while `needs_id`, a task of
    a graph, still runs; from then on `task_id` need not wait.  If `late`, `task_id` may start
    without this input and waits for it on its device, up to a time limit.
    """

    __tablename__ = "needs"
    task_id: Mapped[str] = mapped_column(ForeignKey("tasks.id"), primary_key=True)
    needs_id: Mapped[str] = mapped_column(ForeignKey("tasks.id"), primary_key=True, index=True)
    port: Mapped[str] = mapped_column(primary_key=True, server_default="")
    output: Mapped[str] = mapped_column(server_default="")
    given: Mapped[int | None] = mapped_column(Xid8)
    late: Mapped[bool] = mapped_column(server_default=text("false"))
    __table_args__ = (Index("ix_needs_given", "given", postgresql_where=text("given is not null")),)


class Line(Base):
    """The number of a user's tasks with equal needs that wait on an island;
    `app.scheduling.journal` counts them.
    """

    __tablename__ = "lines"
    island: Mapped[str] = mapped_column(ForeignKey("islands.name"), primary_key=True)
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"), primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    memory_bytes: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    width: Mapped[int] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    waiting: Mapped[int] = mapped_column(BigInteger, server_default="0")


class Placement(Base):
    """An epoch of a task on a device: one row for each launch, from which the ledger charges.

    `held_us` is how long the task held the slot, measured by the device.  `staged_us` is the part
    of it in which the job stood still while its state was copied.  `input_bytes` is the size of the
    inputs; `fetched_bytes` is the part that was read from the store because no host had it.  `ways`
    says by port how each input came (`core.model.messages.WAYS`).  `leaving` is set when the device
    was told to release the slot: from then on the slot may be promised to the next task.

    A `guest` is an additional row: a device that an elastic task holds beyond its home
    (`app.scheduling.guest_placements`).  `shares` says that the task was launched next to other
    tasks, to take turns with them (`core.scheduling.time_sharing`).
    """

    __tablename__ = "placements"
    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    task_id: Mapped[str] = mapped_column(ForeignKey("tasks.id"))
    epoch: Mapped[int]
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"))
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"))
    kind: Mapped[str]
    cost_milli: Mapped[int] = mapped_column(BigInteger)
    incarnation: Mapped[str]
    launched_at: Mapped[datetime] = _now()
    started_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    leaving: Mapped[bool] = mapped_column(server_default=text("false"))
    guest: Mapped[bool] = mapped_column(server_default=text("false"))
    shares: Mapped[bool] = mapped_column(server_default=text("false"))
    held_us: Mapped[int] = mapped_column(BigInteger, server_default="0")
    staged_us: Mapped[int] = mapped_column(BigInteger, server_default="0")
    charged_us: Mapped[int] = mapped_column(BigInteger, server_default="0")
    input_bytes: Mapped[int] = mapped_column(BigInteger, server_default="0")
    fetched_bytes: Mapped[int] = mapped_column(BigInteger, server_default="0")
    ways: Mapped[dict[str, str]] = _json()
    first_step: Mapped[int | None] = mapped_column(BigInteger)
    last_step: Mapped[int | None] = mapped_column(BigInteger)
    end: Mapped[str | None]
    __table_args__ = (
        Index(
            "uq_placements_home",
            "task_id",
            "epoch",
            unique=True,
            postgresql_where=text("not guest"),
        ),
        Index(
            "uq_placements_open_task",
            "task_id",
            unique=True,
            postgresql_where=text("ended_at is null and not guest"),
        ),
        Index(
            "uq_placements_open_guest",
            "task_id",
            "device_id",
            unique=True,
            postgresql_where=text("ended_at is null and guest"),
        ),
        Index(
            "uq_placements_open_seat",
            "device_id",
            unique=True,
            postgresql_where=text("ended_at is null and not leaving and not shares"),
        ),
        Index("ix_placements_open", "device_id", postgresql_where=text("ended_at is null")),
        Index("ix_placements_task_id", "task_id"),
        Index("ix_placements_tenant_id_id", "tenant_id", "id"),
    )


class Account(Base):
    """The usage of a user: `faded` is the decayed sum of rule F2, `total_us` never decays."""

    __tablename__ = "accounts"
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    faded: Mapped[int] = mapped_column(Numeric(1000, 0), server_default="0")
    total_us: Mapped[int] = mapped_column(BigInteger, server_default="0")
    txid: Mapped[int] = _txid(index=True)


class Lift(Base):
    """The idle-credit floor of a tenant (`user_id` "") or user, by kind and island.

    `faded` is the decayed usage that it is taken to have had while it was away.  The unit is
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


class Order(Base):
    """The outbox: an order to a device, until the device shows that it has received it."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    task_id: Mapped[str] = mapped_column(ForeignKey("tasks.id"))
    epoch: Mapped[int]
    seq: Mapped[int]
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"))
    kind: Mapped[str]
    body: Mapped[dict[str, Any]] = _json()
    created_at: Mapped[datetime] = _now()
    sent_at: Mapped[datetime | None]
    sends: Mapped[int] = mapped_column(server_default="0")
    answered_at: Mapped[datetime | None]
    __table_args__ = (
        UniqueConstraint("task_id", "epoch", "seq", "device_id"),
        Index(
            "ix_orders_unanswered", "device_id", "id", postgresql_where=text("answered_at is null")
        ),
    )


class Checkpoint(Base):
    """A durable image of a task at `step`; `sha256` is the address of its manifest in the store.

    `host` wrote it and signed it with the private key that belongs to `key`.  The store grew by
    `new_bytes`.  A task that began from another task's checkpoint has that checkpoint as its first.
    """

    __tablename__ = "checkpoints"
    id: Mapped[str] = mapped_column(primary_key=True)
    task_id: Mapped[str] = mapped_column(ForeignKey("tasks.id"))
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    epoch: Mapped[int]
    step: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str]
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    new_bytes: Mapped[int] = mapped_column(BigInteger, server_default="0")
    took_us: Mapped[int] = mapped_column(BigInteger)
    host: Mapped[str] = mapped_column(server_default="")
    key: Mapped[str] = mapped_column(server_default="")
    created_at: Mapped[datetime] = _now()
    damaged_at: Mapped[datetime | None]
    deleted_at: Mapped[datetime | None]
    __table_args__ = (UniqueConstraint("task_id", "step", "sha256"),)


# --- what was decided ---------------------------------------------------------------------------


class Cycle(Base):
    """A round that decided something: what the scheduler saw, as far as it mattered
    (`core.scheduling.record`).

    `core.scheduling.cycle.decide(snapshot, now_s=now_s)` reproduces its decisions.
    """

    __tablename__ = "cycles"
    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    island: Mapped[str] = mapped_column(ForeignKey("islands.name"))
    at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp(), index=True)
    now_s: Mapped[float]
    snapshot: Mapped[dict[str, Any]] = _json()


class Decision(Base):
    """A move of a task, the rule that caused it, and the other task that gains or loses by it."""

    __tablename__ = "decisions"
    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    cycle_id: Mapped[int] = mapped_column(ForeignKey("cycles.id", ondelete="CASCADE"), index=True)
    at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    task_id: Mapped[str] = mapped_column(ForeignKey("tasks.id"))
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    move: Mapped[str]
    rule: Mapped[str]
    because: Mapped[str]
    devices: Mapped[list[Any]] = _json("[]")
    against: Mapped[str | None]
    __table_args__ = (Index("ix_decisions_tenant_id_id", "tenant_id", "id"),)


# --- what happened ------------------------------------------------------------------------------


class Event(Base):
    """A message about a request, in plain words; append only.

    Readers page by (txid, id) below the oldest running transaction, so that no late commit is
    missed.
    """

    __tablename__ = "events"
    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    txid: Mapped[int] = mapped_column(Xid8, server_default=text("pg_current_xact_id()"))
    at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    request_id: Mapped[str | None] = mapped_column(ForeignKey("requests.id"))
    task_id: Mapped[str | None] = mapped_column(ForeignKey("tasks.id"))
    type: Mapped[str]
    message: Mapped[str]
    data: Mapped[dict[str, Any]] = _json()
    __table_args__ = (
        Index("ix_events_request_id_txid_id", "request_id", "txid", "id"),
        Index("ix_events_tenant_id_txid_id", "tenant_id", "txid", "id"),
    )


# --- webhooks, audit, logs ----------------------------------------------------------------------


class Webhook(Base):
    """A tenant's address that receives messages about ends of requests; `events` are the types it
    wants.

    A webhook without `url` stands for the addresses that requests name; a tenant has at most one.
    The secrets are stored unhashed, since every message is signed with them; `old_secret` signs too
    until `old_secret_until`.
    """

    __tablename__ = "webhooks"
    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    url: Mapped[str | None]
    events: Mapped[list[Any]] = _json("[]")
    secret: Mapped[str]
    old_secret: Mapped[str | None]
    old_secret_until: Mapped[datetime | None]
    rotated_at: Mapped[datetime | None]
    disabled_at: Mapped[datetime | None]
    created_at: Mapped[datetime] = _now()
    __table_args__ = (
        Index("ix_webhooks_tenant_id_id", "tenant_id", "id"),
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
    request_id: Mapped[str | None] = mapped_column(ForeignKey("requests.id"), index=True)
    url: Mapped[str]
    type: Mapped[str]
    body: Mapped[str]
    state: Mapped[str] = mapped_column(server_default="pending")
    attempt: Mapped[int] = mapped_column(server_default="0")
    round_from: Mapped[int] = mapped_column(server_default="0")
    attempts: Mapped[list[Any]] = _json("[]")
    due_at: Mapped[datetime] = _now()
    taken_until: Mapped[datetime | None]
    created_at: Mapped[datetime] = _now()
    ended_at: Mapped[datetime | None]
    __table_args__ = (
        _one_of("state", DELIVERY_STATES),
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
        _one_of("action", AUDITED_ACTIONS),
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
    """The values that a job's step returned, sampled at the heartbeats."""

    __tablename__ = "metrics"
    task_id: Mapped[str] = mapped_column(ForeignKey("tasks.id"), primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    values: Mapped[dict[str, Any]] = _json()


class Idempotency(Base):
    """The response to an `Idempotency-Key`, written in the transaction that did the work."""

    __tablename__ = "idempotency"
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"), primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    route: Mapped[str]
    body_sha256: Mapped[str]
    status: Mapped[int | None]
    response: Mapped[dict[str, Any] | None] = mapped_column(JSONB)
    location: Mapped[str | None]
    created_at: Mapped[datetime] = _now()
