"""Defines all tables: columns and constraints only. `app.scheduling.snapshot_reader` turns rows
into values.

Each kind of column has one writer. The API writes the actions that users request
(`cancel_asked_at`, `hold`, `priority`) and new rows. Only `app.scheduling.journal`, in the island's
transaction, writes the state of a task, a placement or an order. Only `app.scheduling.ledger`
writes usage. Constraints enforce what must be true even if our code has a bug: a task has one open
placement, and a device's slot belongs to one task at a time.
"""

from __future__ import annotations

from app.db.models.base import Base, Xid8
from app.db.models.data import (
    ENVIRONMENT_STATES,
    Bundle,
    Datablock,
    DatablockFile,
    DatablockPlace,
    DatablockUse,
    Environment,
    Graph,
    Mount,
    PackageFile,
    StoredFile,
    Upload,
    UploadPart,
)
from app.db.models.fleet import Device, Enrolment, Host, Island, Preset
from app.db.models.history import (
    AUDITED_ACTIONS,
    DELIVERY_STATES,
    AuditEvent,
    Cycle,
    Decision,
    Delivery,
    LogLine,
    Metric,
    NewsItem,
    RequestChannel,
    RequestEvent,
    Webhook,
)
from app.db.models.ledger import Account, BudgetPeriod, DailyUsage, LedgerBase, Lift, Usage
from app.db.models.people import ApiKey, ImageKey, Secret, Tenant, User, WebSession
from app.db.models.reservations import Reservation, ReservationWindow
from app.db.models.tunnels import Tunnel
from app.db.models.work import (
    REQUEST_STATES,
    Checkpoint,
    Idempotency,
    Line,
    Lot,
    Need,
    OutboxOrder,
    Placement,
    ProgressMark,
    Request,
    RequestNeed,
    RungResult,
    Task,
)

__all__ = [
    "AUDITED_ACTIONS",
    "DELIVERY_STATES",
    "ENVIRONMENT_STATES",
    "REQUEST_STATES",
    "Account",
    "ApiKey",
    "AuditEvent",
    "Base",
    "BudgetPeriod",
    "Bundle",
    "Checkpoint",
    "Cycle",
    "DailyUsage",
    "Datablock",
    "DatablockFile",
    "DatablockPlace",
    "DatablockUse",
    "Decision",
    "Delivery",
    "Device",
    "Enrolment",
    "Environment",
    "Graph",
    "Host",
    "Idempotency",
    "ImageKey",
    "Island",
    "LedgerBase",
    "Lift",
    "Line",
    "LogLine",
    "Lot",
    "Metric",
    "Mount",
    "Need",
    "NewsItem",
    "OutboxOrder",
    "PackageFile",
    "Placement",
    "Preset",
    "ProgressMark",
    "Request",
    "RequestChannel",
    "RequestEvent",
    "RequestNeed",
    "Reservation",
    "ReservationWindow",
    "RungResult",
    "Secret",
    "StoredFile",
    "Task",
    "Tenant",
    "Tunnel",
    "Upload",
    "UploadPart",
    "Usage",
    "User",
    "WebSession",
    "Webhook",
    "Xid8",
]
