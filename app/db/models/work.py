"""Tables of requests and tasks, and of where tasks run."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    ColumnElement,
    ForeignKey,
    Identity,
    Index,
    ScalarSelect,
    UniqueConstraint,
    func,
    literal_column,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, column_property, mapped_column

from app.core.model import descriptor
from app.core.model.descriptor import TIERS, TaskDescriptor
from app.core.model.lifecycle import State
from app.core.model.request_needs import AWAITED, OTHERWISE, NeedOutcome, RequestStanding
from app.core.model.reserved_task import ReservationStanding
from app.core.model.retry_decision import HELD_BY_RULE
from app.core.model.rungs import HELD_AT_RUNG, PROMOTED, RUNG_HOLDS
from app.db.models.base import Base, Xid8, json_column, now_column, one_of, txid_column

# of a member that lost at a rung, and holds no device (`core.model.rungs`)
IS_RESTING = (
    f"hold in ('{HELD_AT_RUNG}', '{PROMOTED}') and state in ('blocked', 'waiting')"
    " and cancel_asked_at is null"
)
REQUEST_STATES = ("queued", "running", "done", "failed", "cancelled")


class Request(Base):
    """The content of a POST.  `state` summarizes the request's tasks; `app.scheduling.journal`
    maintains it.

    An ended request is deleted after a while (`app.scheduling.retention`), unless users `keep` it.
    """

    __tablename__ = "requests"
    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"))
    name: Mapped[str]
    state: Mapped[str] = mapped_column(server_default="queued")
    tier: Mapped[str] = mapped_column(server_default="standard")
    priority: Mapped[int] = mapped_column(server_default="0")
    labels: Mapped[dict[str, Any]] = json_column()
    descriptor: Mapped[dict[str, Any]] = json_column()
    environment_id: Mapped[str | None] = mapped_column(ForeignKey("environments.id"))
    submitted_at: Mapped[datetime] = now_column()
    ended_at: Mapped[datetime | None]
    keep: Mapped[bool] = mapped_column(server_default=text("false"))
    delete_asked_at: Mapped[datetime | None]
    __table_args__ = (
        one_of("state", REQUEST_STATES),
        one_of("tier", TIERS),
        Index(
            "ix_requests_ended_at",
            "ended_at",
            postgresql_where=text("ended_at is not null and not keep"),
        ),
        Index(
            "ix_requests_delete_asked_at",
            "delete_asked_at",
            postgresql_where=text("delete_asked_at is not null"),
        ),
        Index("ix_requests_tenant_id_id", "tenant_id", "id"),
        Index(
            "ix_requests_live",
            "id",
            postgresql_where=text("state not in ('done', 'failed', 'cancelled')"),
        ),
        Index(
            "ix_requests_failed",
            "tenant_id",
            "id",
            postgresql_where=text("state in ('failed', 'cancelled')"),
        ),
        Index("ix_requests_kept", "tenant_id", "id", postgresql_where=text("keep")),
        Index("ix_requests_name", "name", "id"),
        Index("ix_requests_id_ends", text("right(id, 8)")),
        Index(
            "ix_requests_labels",
            "labels",
            postgresql_using="gin",
            postgresql_ops={"labels": "jsonb_path_ops"},
        ),
        Index("ix_requests_submitted_at", "submitted_at", postgresql_using="brin"),
        Index(
            "ix_requests_environment_id",
            "environment_id",
            "submitted_at",
            postgresql_where=text("environment_id is not null"),
        ),
    )


class Task(Base):
    """A task: what an island schedules."""

    __tablename__ = "tasks"
    id: Mapped[str] = mapped_column(primary_key=True)
    request_id: Mapped[str] = mapped_column(ForeignKey("requests.id"))
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"))
    island: Mapped[str | None] = mapped_column(ForeignKey("islands.name"))
    # why the task is on its island (`app.intake.island_assignment`)
    assigned: Mapped[dict[str, Any] | None] = mapped_column(JSONB(none_as_null=True))
    # True: tasks of other islands wait for its end
    abroad: Mapped[bool] = mapped_column(server_default=text("false"))
    # For a gang that spans islands, and for its tickets (`app.scheduling.gang_tickets`): the id of
    # the gang.
    gang_id: Mapped[str | None] = mapped_column(ForeignKey("tasks.id"))
    # For a lot, and for its members (`app.scheduling.journal.lots`): the id of the lot. A lot has
    # no index and no island.
    lot_id: Mapped[str | None] = mapped_column(ForeignKey("tasks.id"))
    lot_index: Mapped[int | None]
    # the values of a member by the key of its matrix or search
    lot_values: Mapped[dict[str, Any] | None] = mapped_column(JSONB(none_as_null=True))
    # True: an ended task or lot starts again, as a user asked; for members see `Lot.again`
    again_asked: Mapped[bool] = mapped_column(server_default=text("false"))
    ordinal: Mapped[int]
    name: Mapped[str]
    type: Mapped[str]
    kind: Mapped[str]
    descriptor: Mapped[dict[str, Any]] = json_column()
    memory_bytes: Mapped[int] = mapped_column(BigInteger, server_default="0")
    devices_min: Mapped[int] = mapped_column(server_default="1")
    devices_max: Mapped[int] = mapped_column(server_default="1")
    across_hosts: Mapped[bool] = mapped_column(server_default=text("false"))
    device_choice: Mapped[str] = mapped_column(server_default="")  # `core.model.device_choice`
    tier: Mapped[str] = mapped_column(server_default="standard")
    priority: Mapped[int] = mapped_column(server_default="0")
    # actions that users request, written by the API
    hold: Mapped[str] = mapped_column(server_default="")
    save_asked: Mapped[bool] = mapped_column(server_default=text("false"))
    cancel_asked_at: Mapped[datetime | None]
    not_before: Mapped[datetime | None]
    # How it stands to the requests that it comes after (`core.model.request_needs`):
    # "waits" when it is submitted; then control writes it, by the rows of `request_needs`.
    standing: Mapped[str] = mapped_column(server_default="")
    # The reservation in whose windows alone it runs, which may be removed; and how it stands to it
    # (`core.model.reserved_task`), which control writes.
    reservation_id: Mapped[str | None]
    reservation_state: Mapped[str] = mapped_column(server_default="")
    move_to: Mapped[str | None]  # device that the task is to be moved to; "*": any other device
    move_asked_at: Mapped[datetime | None]
    # state, written by the journal
    state: Mapped[str] = mapped_column(server_default="blocked")
    epoch: Mapped[int] = mapped_column(server_default="0")  # number of launches; fences every write
    event_seq: Mapped[int] = mapped_column(server_default="0")  # last event recorded in this epoch
    order_seq: Mapped[int] = mapped_column(server_default="0")  # last order written in this epoch
    # of a ticket: the gang's epoch for which it keeps its slots
    good_for: Mapped[int] = mapped_column(server_default="0")
    # True: the image on `image_on` is durable too
    saved: Mapped[bool] = mapped_column(server_default=text("true"))
    # device that the task holds or is about to hold; the home device of an elastic task
    seat: Mapped[str | None] = mapped_column(ForeignKey("devices.id"))
    # device with the paused image of `step` in its host's memory
    image_on: Mapped[str | None] = mapped_column(ForeignKey("devices.id"))
    # how far a move is (`core.model.checkpoints.migration.Moving`)
    moving: Mapped[dict[str, Any] | None] = mapped_column(JSONB(none_as_null=True))
    step: Mapped[int] = mapped_column(BigInteger, server_default="0")
    launched_at: Mapped[datetime | None]
    started_at: Mapped[datetime | None]
    # since when an elastic task holds its present number of devices
    resized_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    first_started_at: Mapped[datetime | None]
    held_us: Mapped[int] = mapped_column(BigInteger, server_default="0")
    total_held_us: Mapped[int] = mapped_column(BigInteger, server_default="0")
    guest_held_us: Mapped[int] = mapped_column(BigInteger, server_default="0")
    # part of `held_us` before it started
    prepared_us: Mapped[int] = mapped_column(BigInteger, server_default="0")
    # Part of `total_held_us` before it started, and in which its device was not heard from before
    # it was lost: charged, but not counted for `max_duration_s`.
    unheard_us: Mapped[int] = mapped_column(BigInteger, server_default="0")
    switch_us: Mapped[int] = mapped_column(BigInteger, server_default="0")
    # what a second of this epoch costs, if the task is charged by its memory and not by its device
    cost_milli: Mapped[int] = mapped_column(BigInteger, server_default="0")
    shares: Mapped[bool] = mapped_column(server_default=text("false"))
    attempts: Mapped[int] = mapped_column(server_default="0")
    # most attempts after failures; -1: it never starts again (`core.model.provisions.retry`)
    retry_max: Mapped[int] = mapped_column(server_default="0")
    # devices on which it failed, as [device, until when in seconds since 1970, whether it rather
    # waits than starts there] (`core.model.retry_decision`)
    avoids: Mapped[list[Any]] = json_column("[]")
    retry_at: Mapped[datetime | None]
    waiting_since: Mapped[datetime | None]
    waited_us: Mapped[int] = mapped_column(BigInteger, server_default="0")  # sum of all ended waits
    # Waits of the last hour after the task had started (rule F9), as [from, to] in seconds since
    # 1970.
    away: Mapped[list[Any]] = json_column("[]")
    pauses: Mapped[int] = mapped_column(server_default="0")
    lost_steps: Mapped[int] = mapped_column(BigInteger, server_default="0")
    # highest values in heartbeats, over all epochs
    peak_device_bytes: Mapped[int] = mapped_column(BigInteger, server_default="0")
    peak_host_bytes: Mapped[int] = mapped_column(BigInteger, server_default="0")
    # highest use of resources on the task's host (`provisions.resources`)
    peaks: Mapped[dict[str, int]] = json_column()
    metrics: Mapped[dict[str, Any]] = json_column()
    capabilities: Mapped[list[Any]] = json_column("[]")
    # `core.model.provisions.process_images`
    bound_because: Mapped[str] = mapped_column(server_default="")
    goes_on_with: Mapped[str] = mapped_column(server_default="")
    preset: Mapped[dict[str, Any]] = json_column()
    cause: Mapped[str | None]
    message: Mapped[str | None]
    detail: Mapped[str | None]
    result: Mapped[dict[str, Any] | None] = mapped_column(JSONB)
    passed: Mapped[list[dict[str, Any]] | None] = mapped_column(JSONB)
    outputs: Mapped[dict[str, Any]] = json_column()
    # files of a command that were not kept, as in `messages.Finished`
    dropped: Mapped[dict[str, Any]] = json_column()
    # why the store refuses its newest checkpoint or output, or ""
    unstored: Mapped[str] = mapped_column(server_default="")
    # for which rank of the running gang the others wait (`ResidentView.behind`), or ""
    behind: Mapped[str] = mapped_column(server_default="")
    submitted_at: Mapped[datetime] = now_column()
    txid: Mapped[int] = txid_column()

    @property
    def spec(self) -> TaskDescriptor:
        """The task's descriptor; raises BadValue.  A gang's ticket has none."""
        return descriptor.from_json(self.descriptor)

    __table_args__ = (
        UniqueConstraint("request_id", "name"),
        one_of("state", State),
        one_of("hold", ("", "user", "admin", "idle", HELD_BY_RULE, *RUNG_HOLDS)),
        one_of("standing", RequestStanding),
        one_of("reservation_state", ReservationStanding),
        one_of("tier", TIERS),
        CheckConstraint("epoch >= 0", name="epoch"),
        CheckConstraint("devices_min between 1 and devices_max", name="devices"),
        Index("ix_tasks_tenant_id_state_id", "tenant_id", "state", "id"),
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
        # A request has few tasks that are no members; the unique constraint finds all of them.
        Index("ix_tasks_request_id", "request_id", postgresql_where=text("lot_index is null")),
        Index(
            "uq_tasks_lot_id",
            "lot_id",
            "lot_index",
            unique=True,
            postgresql_where=text("lot_index is not null"),
        ),
        Index(
            "ix_tasks_lot_live",
            "lot_id",
            postgresql_where=text(
                "lot_index is not null and state not in ('done', 'failed', 'cancelled')"
            ),
        ),
        Index(
            "ix_tasks_lot_failed",
            "lot_id",
            "lot_index",
            postgresql_where=text("lot_index is not null and state in ('failed', 'cancelled')"),
        ),
        Index("ix_tasks_resting", "lot_id", "hold", postgresql_where=text(IS_RESTING)),
        Index("ix_tasks_again_asked", "id", postgresql_where=text("again_asked")),
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
            "device_choice",
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
        Index("ix_tasks_unstored", "id", postgresql_where=text("unstored != ''")),
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
        Index(
            "ix_tasks_reservation_id",
            "reservation_id",
            "reservation_state",
            "id",
            postgresql_where=text(
                "reservation_id is not null and state not in ('done', 'failed', 'cancelled')"
            ),
        ),
        Index("ix_tasks_image_on", "image_on", postgresql_where=text("image_on is not null")),
        Index("ix_tasks_move_to", "move_to", postgresql_where=text("move_to is not null")),
        Index("ix_tasks_save_asked", "id", postgresql_where=text("save_asked")),
        Index(
            "ix_tasks_outputs",
            text("jsonb_path_query_array(outputs, '$.*.sha256')"),
            postgresql_using="gin",
            postgresql_where=text("outputs <> '{}'"),
        ),
        {"postgresql_with": {"fillfactor": "70"}},
    )


class Lot(Base):
    """Counts the members of a lot (`core.model.lot_members.LotCounts`); the lot itself is a task.

    Transactions that lock tasks lock them before this row.
    """

    __tablename__ = "lots"
    id: Mapped[str] = mapped_column(ForeignKey("tasks.id"), primary_key=True)
    count: Mapped[int]
    at_once: Mapped[int]
    failures_allowed: Mapped[int | None]
    made: Mapped[int] = mapped_column(server_default="0")
    # Ended members that are to start again: those in one of `again_states` that ended before
    # `again_before`.
    again: Mapped[int] = mapped_column(server_default="0")
    again_states: Mapped[list[Any]] = json_column("[]")
    again_before: Mapped[datetime | None]
    live: Mapped[int] = mapped_column(server_default="0")
    done: Mapped[int] = mapped_column(server_default="0")
    failed: Mapped[int] = mapped_column(server_default="0")
    cancelled: Mapped[int] = mapped_column(server_default="0")
    stopped: Mapped[int] = mapped_column(server_default="0")
    # sums over the members that have ended
    held_us: Mapped[int] = mapped_column(BigInteger, server_default="0")
    pauses: Mapped[int] = mapped_column(BigInteger, server_default="0")
    lost_steps: Mapped[int] = mapped_column(BigInteger, server_default="0")
    # False: control need not look at it, until a user changes something
    is_open: Mapped[bool] = mapped_column(server_default=text("true"))
    if TYPE_CHECKING:  # set below, as they count tasks
        resting: Mapped[int]
        promoted: Mapped[int]
    __table_args__ = (
        CheckConstraint("live >= 0 and again >= 0 and made <= count", name="counts"),
        Index("ix_lots_open", "id", postgresql_where=text("is_open")),
    )


def _resting(*which: ColumnElement[bool]) -> ScalarSelect[int]:
    """Count the members of a lot that rest at a rung."""
    is_resting = literal_column(IS_RESTING, Boolean)
    mine = select(func.count()).select_from(Task).where(Task.lot_id == Lot.id, is_resting, *which)
    return mine.correlate(Lot).scalar_subquery()


Lot.resting = column_property(_resting())
Lot.promoted = column_property(_resting(Task.hold == PROMOTED))


class RungResult(Base):
    """Holds with which value a lot's member reached a rung of its rule `stop` (`core.model.rungs`).

    `value` is null for one that is no finite number. `passed`: the member went on, or may, because
    of its value or because a person let it. Control has not looked at it before it `is_decided`.
    """

    __tablename__ = "rung_results"
    task_id: Mapped[str] = mapped_column(ForeignKey("tasks.id"), primary_key=True)
    rung: Mapped[int] = mapped_column(primary_key=True)
    lot_id: Mapped[str] = mapped_column(ForeignKey("tasks.id"))
    step: Mapped[int] = mapped_column(BigInteger)
    value: Mapped[float | None]
    at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    passed: Mapped[bool] = mapped_column(server_default=text("false"))
    is_decided: Mapped[bool] = mapped_column(server_default=text("false"))
    __table_args__ = (
        Index("ix_rung_results_lot_id", "lot_id"),
        Index("ix_rung_results_new", "lot_id", postgresql_where=text("not is_decided")),
    )


class ProgressMark(Base):
    """Holds the newest progress of a task that control saw (`core.webhooks.stalls`).

    Only tasks have one whose requests name a channel for tasks that stall.
    """

    __tablename__ = "progress_marks"
    task_id: Mapped[str] = mapped_column(ForeignKey("tasks.id"), primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger)
    line: Mapped[int] = mapped_column(BigInteger)  # id in `logs`
    row: Mapped[int] = mapped_column(BigInteger)  # step in `metrics`
    held_us: Mapped[int] = mapped_column(BigInteger)  # for which the task held a device before
    is_told: Mapped[bool] = mapped_column(server_default=text("false"))


class Need(Base):
    """A dependency: `task_id` starts only when `needs_id` is done."""

    __tablename__ = "needs"
    task_id: Mapped[str] = mapped_column(ForeignKey("tasks.id"), primary_key=True)
    needs_id: Mapped[str] = mapped_column(ForeignKey("tasks.id"), primary_key=True, index=True)
    # port that takes `output`; "": an order in time only (`after`)
    port: Mapped[str] = mapped_column(primary_key=True, server_default="")
    output: Mapped[str] = mapped_column(server_default="")  # output of the task `needs_id`
    # The transaction that found the output durable while `needs_id`, a task of a graph, still runs.
    # From then on `task_id` need not wait.
    given: Mapped[int | None] = mapped_column(Xid8)
    # True: the task may start without this input and waits for it on its device, up to a time limit
    late: Mapped[bool] = mapped_column(server_default=text("false"))
    __table_args__ = (Index("ix_needs_given", "given", postgresql_where=text("given is not null")),)


class RequestNeed(Base):
    """Says what the task `task_id` awaits of another request (`core.model.request_needs`).

    The needed request is kept until the task has ended; afterwards it may be deleted, so there is
    no foreign key.
    """

    __tablename__ = "request_needs"
    task_id: Mapped[str] = mapped_column(ForeignKey("tasks.id"), primary_key=True)
    needs_request_id: Mapped[str] = mapped_column(primary_key=True, index=True)
    # a task of that request, whose output is taken; "": the request as a whole
    needs_task_id: Mapped[str] = mapped_column(primary_key=True, server_default="")
    name: Mapped[str]  # that of the needed request, and of its task: "prep" or "prep/train"
    awaited: Mapped[str]
    otherwise: Mapped[str]
    outcome: Mapped[str] = mapped_column(server_default="")
    decided_at: Mapped[datetime | None]
    __table_args__ = (
        one_of("awaited", AWAITED),
        one_of("otherwise", OTHERWISE),
        one_of("outcome", NeedOutcome),
        Index(
            "ix_request_needs_open",
            "needs_request_id",
            postgresql_where=text("outcome in ('', 'hold')"),
        ),
    )


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
    device_choice: Mapped[str] = mapped_column(primary_key=True, server_default="")
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    waiting: Mapped[int] = mapped_column(BigInteger, server_default="0")


class Placement(Base):
    """An epoch of a task on a device: one row for each launch, from which the ledger charges."""

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
    launched_at: Mapped[datetime] = now_column()
    started_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    # True: the device was told to release the slot, which may be promised to the next task
    leaving: Mapped[bool] = mapped_column(server_default=text("false"))
    # True: an additional row, for a device that an elastic task holds beyond its home
    # (`app.scheduling.guest_placements`)
    guest: Mapped[bool] = mapped_column(server_default=text("false"))
    # True: launched next to other tasks, to take turns with them
    # (`core.scheduling.sharing.time_sharing`)
    shares: Mapped[bool] = mapped_column(server_default=text("false"))
    # Thousandths of the device that the task holds. Of rows that neither leave nor share, the
    # island gives at most 1000 of a device (`journal.decisions`).
    fraction_milli: Mapped[int] = mapped_column(server_default="1000")
    # how long the task held the device, its start included, measured by the device
    held_us: Mapped[int] = mapped_column(BigInteger, server_default="0")
    # part of `held_us` in which the job stood still while its state was copied
    staged_us: Mapped[int] = mapped_column(BigInteger, server_default="0")
    charged_us: Mapped[int] = mapped_column(BigInteger, server_default="0")
    input_bytes: Mapped[int] = mapped_column(BigInteger, server_default="0")  # size of the inputs
    # part of `input_bytes` read from the store, because no host had it
    fetched_bytes: Mapped[int] = mapped_column(BigInteger, server_default="0")
    # by port: how the input came (`core.model.protocol.messages.WAYS`)
    ways: Mapped[dict[str, str]] = json_column()
    # what the task used of the network here (`provisions.network_policy.FIGURES`); null: nothing
    # yet
    network: Mapped[dict[str, Any] | None] = mapped_column(JSONB(none_as_null=True))
    # what the task waits for on the device before it starts (`ResidentView.waits_for`)
    waits_for: Mapped[str] = mapped_column(server_default="")
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
            postgresql_where=text(
                "ended_at is null and not leaving and not shares and fraction_milli = 1000"
            ),
        ),
        Index("ix_placements_open", "device_id", postgresql_where=text("ended_at is null")),
        Index(
            "ix_placements_ended",
            "device_id",
            "ended_at",
            postgresql_where=text("ended_at is not null"),
        ),
        Index("ix_placements_task_id", "task_id"),
        Index("ix_placements_tenant_id_id", "tenant_id", "id"),
    )


class OutboxOrder(Base):
    """The outbox: an order to a device, until the device shows that it has received it."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    task_id: Mapped[str] = mapped_column(ForeignKey("tasks.id"))
    epoch: Mapped[int]
    seq: Mapped[int]
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"))
    kind: Mapped[str]
    body: Mapped[dict[str, Any]] = json_column()
    created_at: Mapped[datetime] = now_column()
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
    Housekeeping deletes the row some minutes after `deleted_at`; neither a pinned nor a best one is
    marked for its age.
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
    # for an image with a command's processes: the epoch of its dump, and the lines printed before
    # it
    printed_epoch: Mapped[int | None]
    printed_lines: Mapped[int | None]
    created_at: Mapped[datetime] = now_column()
    damaged_at: Mapped[datetime | None]
    deleted_at: Mapped[datetime | None]
    pinned_at: Mapped[datetime | None]
    # The metric of the task's `checkpoint.best` as it was reported last before the image, and at
    # which step. A value that is no finite number is null, and so is the step if there was none.
    ranked_value: Mapped[float | None]
    ranked_step: Mapped[int | None] = mapped_column(BigInteger)
    # one of the task's best (`core.model.checkpoints.best`)
    best: Mapped[bool] = mapped_column(server_default=text("false"))
    __table_args__ = (
        UniqueConstraint("task_id", "step", "sha256"),
        Index(
            "ix_checkpoints_best",
            "tenant_id",
            "task_id",
            postgresql_where=text("best"),
        ),
        Index(
            "ix_checkpoints_pinned",
            "tenant_id",
            "task_id",
            postgresql_where=text("pinned_at is not null"),
        ),
    )


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
    created_at: Mapped[datetime] = now_column()
