"""Every table: columns and constraints only.  Rows become values in `app.snapshot`.

Who writes what: the API writes wishes (`cancel_asked_at`, `hold`, `priority`) and new rows; only
`app.journal`, in the island's transaction, writes the state of a task, a placement or an order;
only `app.ledger` writes usage.  Constraints hold what must be true even against our own bugs: a
task has one open placement, a device gives its seat to one task at a time.
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

from app.core.descriptor import TIERS
from app.core.grant import ROLES
from app.core.lifecycle import State
from app.core.tensorfile import FORMATS


class Xid8(UserDefinedType[int]):
    """Postgres' 64-bit transaction id, by which streams are read without missing a late commit."""

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
    """The transaction that wrote the row last; a trigger keeps it (`app.snapshot` follows it)."""
    return mapped_column(
        Xid8,
        server_default=text("pg_current_xact_id()"),
        server_onupdate=FetchedValue(),
        **more,
    )


def _one_of(column: str, words: Any) -> CheckConstraint:
    listed = ", ".join(f"'{word}'" for word in words)
    return CheckConstraint(f"{column} in ({listed})", name=column)


# --- who ----------------------------------------------------------------------------------------


class Tenant(Base):
    """A node of the tenant tree; the root ("platform") has no parent and owns no share.  Of two
    tenants of one name at least one has another parent.

    `guarantee` and `limit` are devices by kind, {"cuda": 4}; in `limit` "*" is all kinds together.
    `max_running` and `max_queued` bound the tasks of the whole subtree; null is no bound.  `tier`
    is the best one that requests of the subtree may ask for.
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
    """`weight_milli` shares what the tenant has among its users.

    `service`: a service account, a program that nobody signs in as.
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
    """`id` is the public part of the key; of the secret only its SHA-256 is kept.

    `scopes` narrow what its role may do; null: they do not.  `replaced_by` is the key that it was
    rotated into, which goes on when this one expires.
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
    """A signed-in browser: the cookie's SHA-256, and the key it stands for."""

    __tablename__ = "web_sessions"
    token_sha256: Mapped[str] = mapped_column(primary_key=True)
    key_id: Mapped[str] = mapped_column(ForeignKey("api_keys.id"))
    expires_at: Mapped[datetime]
    created_at: Mapped[datetime] = _now()


# --- where --------------------------------------------------------------------------------------


class Island(Base):
    """`leader_until` is the lease of the scheduler that leads; each change of leader is a term.

    `tally` is what its schedulers have counted, up to `tallied_at` (`app.tally`).
    """

    __tablename__ = "islands"
    name: Mapped[str] = mapped_column(primary_key=True)
    leader: Mapped[str | None]
    leader_until: Mapped[datetime | None]
    leading_since: Mapped[datetime | None]
    term: Mapped[int] = mapped_column(BigInteger, server_default="0")
    tally: Mapped[dict[str, Any]] = _json()
    tallied_at: Mapped[datetime | None]
    key: Mapped[str | None]  # the public one, which verifies what the island tells devices
    created_at: Mapped[datetime] = _now()


class Enrolment(Base):
    """A device that an administrator lets in: its heartbeats count if `key` verifies them.

    `key` is the public one of the device's host.  There may be no such device yet, and a device
    whose enrolment was revoked keeps its row.
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
    """`id` is "<host>.<n>", also the name of its Celery queue: "device.<host>.<n>".

    `incarnation` is the process that last said it is this device, `heard_us` when it sent the
    newest heartbeat recorded (its own clock), and `lease_until` (database clock) how long it may go
    on without being heard again.

    `links` is where its worker can be reached by others, as [address, port], and `secret` opens the
    blocks that it gives them.  No response has either of them, and both are new with each process.
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
    """Parameters configured on a device of `kind` for tasks of `task_type`; "*" is the fallback."""

    __tablename__ = "presets"
    task_type: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    params: Mapped[dict[str, Any]] = _json()
    version: Mapped[int] = mapped_column(server_default="1")
    updated_at: Mapped[datetime] = _now()


# --- what ---------------------------------------------------------------------------------------


class Bundle(Base):
    """Code that a tenant uploaded; the bytes lie in the store under their hash, once for all.

    `entry_points` are the top-level classes and functions found without running the code:
    {"module:Name": "class" | "function"}, and `signatures` what classes can be made with
    (`core.signature`), as far as that can be seen.
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

    The bytes whose hash it is (`core.taskgraph.canonical`) lie in the store, for the devices.
    `took_ms` is how long its nodes took when it last ran on devices of each kind, `made_bytes` how
    large the blocks were that they made.
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
    """One version of a tenant's named data; it never changes, and its number is never given twice.

    The bytes lie in the store under their hash.  `tensors` are the first of `tensor_count`, as
    [{"name", "dtype", "shape"}].  A task that published it is named with its output.  What was
    deleted has no name any more, and `freed_at` says since when nothing needed its bytes.
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
    """A task takes this version at `port`: its bytes stay until the task has ended."""

    __tablename__ = "datablock_uses"
    task_id: Mapped[str] = mapped_column(ForeignKey("tasks.id"), primary_key=True)
    port: Mapped[str] = mapped_column(primary_key=True)
    datablock_id: Mapped[str] = mapped_column(ForeignKey("datablocks.id"), index=True)


class DatablockPlace(Base):
    """A task that takes this version began on this device, or one there published it: so its host
    had the bytes on its disk then, and may have them still.
    """

    __tablename__ = "datablock_places"
    datablock_id: Mapped[str] = mapped_column(ForeignKey("datablocks.id"), primary_key=True)
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"), primary_key=True)
    seen_at: Mapped[datetime] = _now()


class Upload(Base):
    """A datablock, or a bundle (which has no name), on its way in: so much of it is there as its
    parts are, one behind the other.
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
    """Bytes of an upload from `at` on; they lie in the store under `place`."""

    __tablename__ = "upload_parts"
    upload_id: Mapped[str] = mapped_column(
        ForeignKey("uploads.id", ondelete="CASCADE"), primary_key=True
    )
    at: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    place: Mapped[str] = mapped_column(index=True)


REQUEST_STATES = ("queued", "running", "done", "failed", "cancelled")


class Request(Base):
    """One POST.  `state` sums up its tasks; `app.journal` keeps it."""

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
    """What an island schedules.

    `epoch` counts launches and fences every write; `event_seq` and `order_seq` are the last event
    recorded and the last order written in this epoch.  `seat` is the device held or about to be
    held, the home of an elastic task, and `resized_at` since when that holds as many as it does;
    `image_on` the device in whose host memory a paused image at `step` lies, and `saved` whether
    that image is durable too.  `move_to` is the device that it is to be moved to ("*": any other),
    and `moving` how far that is (`core.migration.Moving`).

    `assigned` says why it is on its island (`app.assign`), and `abroad` that tasks of other islands
    wait for its end.

    `gang_id` names the gang that spans islands which it is, or of which it is a ticket
    (`app.span`); a ticket keeps its seats for the epoch `good_for` of that.

    `cost_milli` is what a second in this epoch costs, if it is
    charged by its memory and not by its device.  `unheard_us` is the part of `total_held_us` in
    which its device was not heard of and then lost: charged, but not counted for `max_duration_s`.
    `waited_us` is the sum of all waits that ended;
    `away` those [from, to] of the last hour after it had started (rule F9), in seconds since 1970.
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
    # wishes, written by the API
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
    """`task_id` starts only when `needs_id` is done; `port` takes its `output` ("": `after`).

    It need not wait for that if the output was `given` before: by this transaction it was seen that
    it is durable, while `needs_id`, a leg of a graph, runs on.  And what may come `late` it waits
    for on its device, until it has done so for too long.
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
    """How many tasks of a user, alike in what they need, wait on an island; the journal counts."""

    __tablename__ = "lines"
    island: Mapped[str] = mapped_column(ForeignKey("islands.name"), primary_key=True)
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"), primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    memory_bytes: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    width: Mapped[int] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    waiting: Mapped[int] = mapped_column(BigInteger, server_default="0")


class Placement(Base):
    """One epoch of one task on one device: the ledger's source, one row a launch.

    `held_us` is what the device measured from taking the seat to letting go; for `staged_us` of it
    the job stood still, because its state was copied.  `input_bytes` is what its inputs took, and
    `fetched_bytes` what of it was read from the store, as no host had it; `ways` says by port how
    each came (`core.messages.WAYS`).  `leaving` is set when the device was told to let go: from
    then on the seat may be promised to the next task.

    A `guest` is a row more: a device that an elastic task holds beyond its home (`app.lending`).
    Who `shares` was launched beside others, to take turns with them (`core.sharing`).
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
    """What a user has used: `faded` is the decayed sum of rule F2, `total_us` never fades."""

    __tablename__ = "accounts"
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    faded: Mapped[int] = mapped_column(Numeric(1000, 0), server_default="0")
    total_us: Mapped[int] = mapped_column(BigInteger, server_default="0")
    txid: Mapped[int] = _txid(index=True)


class Lift(Base):
    """What a tenant (`user_id` "") or a user is taken to have used of a kind on an island while it
    was away: faded, in micro-device-seconds times thousandths of cost (`app.core.credit`).
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
    """One row: the half-life and the T0 that every `faded` is relative to (`app.ledger`)."""

    __tablename__ = "ledger"
    id: Mapped[int] = mapped_column(primary_key=True)
    half_life_s: Mapped[float]
    since_s: Mapped[float]
    __table_args__ = (CheckConstraint("id = 1", name="one_row"),)


class Usage(Base):
    """Micro-device-seconds held and charged (held times cost), by the bucket of their booking."""

    __tablename__ = "usage"
    bucket: Mapped[datetime] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"), primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    bucket_s: Mapped[int] = mapped_column(primary_key=True)
    held_us: Mapped[int] = mapped_column(BigInteger)
    charged_us: Mapped[int] = mapped_column(BigInteger)


class Order(Base):
    """The outbox: what a device was told, until it shows that it took it in."""

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

    `host` wrote it and signed it with the key whose public part is `key`; the store grew by
    `new_bytes`.  A task that began from a checkpoint of another one has that one's as its first.
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
    """One round that decided something: what it saw, as far as it mattered (`core.record`).

    `core.decide.decide(snapshot, now_s=now_s)` gives its decisions again.
    """

    __tablename__ = "cycles"
    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    island: Mapped[str] = mapped_column(ForeignKey("islands.name"))
    at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp(), index=True)
    now_s: Mapped[float]
    snapshot: Mapped[dict[str, Any]] = _json()


class Decision(Base):
    """One move of one task, by which rule, and against whom."""

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
    """What happened to a request, in plain words; append only.

    Readers page by (txid, id) below the oldest running transaction, so a late commit is not missed.
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


# --- who is told --------------------------------------------------------------------------------


class Webhook(Base):
    """An address of a tenant that is told of ends of requests; `events` are the types it wants.

    One without `url` stands for the addresses that requests name: a tenant has at most one.  The
    secrets are kept as they are, since every message is signed with them; `old_secret` signs too
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

    `attempt` counts how often it was taken and fences what is written of it; the tries of this
    round are those after `round_from`.  Who took it has it until `taken_until`.
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
    """What somebody did as an administrator; a trigger refuses every change (`app.audit`).

    No foreign keys: it outlives what it names.  `tenant_id` is whose affair it is, null that of
    the platform.  `before` and `after` are `json`, which Postgres keeps letter by letter.
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
    """One line that a job printed.  `id` orders the lines of all epochs of a task."""

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
    """What a job's step returned, sampled at the heartbeats."""

    __tablename__ = "metrics"
    task_id: Mapped[str] = mapped_column(ForeignKey("tasks.id"), primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    values: Mapped[dict[str, Any]] = _json()


class Idempotency(Base):
    """The answer given to an `Idempotency-Key`, written in the transaction that did the work."""

    __tablename__ = "idempotency"
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"), primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    route: Mapped[str]
    body_sha256: Mapped[str]
    status: Mapped[int | None]
    response: Mapped[dict[str, Any] | None] = mapped_column(JSONB)
    location: Mapped[str | None]
    created_at: Mapped[datetime] = _now()
