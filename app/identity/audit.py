"""Keeps the audit log: actions of people as administrators, as a chain of rows that nothing may
change.

A call identifies itself (`begin`). From then on its session automatically records the changes of
rows of WATCHED models. It sees changes of objects only, not those of a bare `update()`. Two kinds
of events must be reported: a requested action on another user's work (`asked`), and a read of what
belongs to another tenant (`looked`). All of it is written right before the commit, in the same
transaction: an action and its record are committed together, or not at all.

There is one chain, and so one writer at a time, from reading the chain's end to the commit. No lock
is taken after this one, so it delays only other audited calls. Submitting users, devices and
control never take it, and an island only when it launches a task with secrets (`used`).

Not recorded are: actions of members on their own work (the request's events show them), lists, and
refused calls, except those with wrong keys (`app.api.access.wrong_keys`).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from sqlalchemy import event, func, insert, inspect, select, text
from sqlalchemy.orm import Mapper, Session, object_session

from app.core.security.hash_chain import GENESIS, ChainLink, TrustedLink, Verdict, link_hash, verify
from app.db.models import (
    ApiKey,
    AuditEvent,
    Base,
    BudgetPeriod,
    Checkpoint,
    Datablock,
    Device,
    Enrolment,
    Environment,
    Host,
    Mount,
    Preset,
    Request,
    Reservation,
    Secret,
    Task,
    Tenant,
    User,
    Webhook,
)
from app.db.transactions import after_commit

READ_AGAIN_S = 3600.0  # in seconds: equal reads with one key within this time are recorded once
# interval in which equal wrong keys are recorded once, as any caller can try keys
REFUSED_AGAIN_S = 60.0
KEPT = 10_000
READ_AT_ONCE = 1000  # rows in a page when the chain is verified

#: Columns that are recorded automatically, by model.  Never the hash of a secret.
WATCHED: dict[type[Base], tuple[str, ...]] = {
    Tenant: (
        "name",
        "parent_id",
        "weight_milli",
        "carried",
        "guarantee",
        "limit",
        "max_running",
        "max_queued",
        "idle_pause_s",
        "session_end_s",
        "network",
        "user_defaults",
        "tier",
        "budget",
    ),
    User: (
        "tenant_id",
        "name",
        "weight_milli",
        "carried",
        "service",
        "limit",
        "max_running",
        "max_queued",
        "max_sessions",
        "max_duration_s",
        "budget",
        "deleted_at",
    ),
    BudgetPeriod: ("adjustments",),
    ApiKey: ("user_id", "role", "scopes", "name", "replaced_by", "expires_at", "revoked_at"),
    Secret: ("tenant_id", "user_id", "name", "set_by", "set_at"),
    Webhook: ("tenant_id", "url", "events", "name", "kind", "rotated_at", "disabled_at"),
    Host: ("cordoned",),
    Device: ("cordoned", "cost_milli", "fitness"),
    Enrolment: ("key", "enrolled_by", "revoked_at"),
    Preset: ("params",),
    Reservation: (
        "name",
        "island",
        "tenant_id",
        "user_id",
        "devices",
        "device_ids",
        "labels",
        "begins_at",
        "ends_at",
        "rule",
        "timezone",
        "note",
    ),
    Mount: ("path", "tenants", "sort"),
}
_ASKED: dict[type[Base], tuple[str, ...]] = {
    Request: ("priority", "labels", "keep", "delete_asked_at"),
    Task: ("hold", "priority", "devices_max", "save_asked", "cancel_asked_at", "move_to"),
    Datablock: ("deleted_at",),
    Environment: ("state",),
}
_COLUMNS = WATCHED | _ASKED | {Checkpoint: ()}
_KINDS: dict[type[Base], str] = {ApiKey: "key", BudgetPeriod: "budget"}

_LOCK = 0x6175646974  # key of an advisory lock; unique in this database


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The user of a call, and the operation of the API; `key_id` is the public part of the key."""

    operation: str
    user: str
    user_id: str = ""
    tenant_id: str = ""
    key_id: str = ""
    address: str = ""
    request_id: str = ""


@dataclass(slots=True, kw_only=True)
class _Noted:
    row: Base
    action: str
    before: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)  # what changed beside its columns


@dataclass(slots=True)
class _Book:
    """The actions of one transaction so far."""

    call: Call
    noted: dict[tuple[str, str], _Noted] = field(default_factory=dict)


# --- notes --------------------------------------------------------------------------------------


def begin(session: Session, call: Call) -> None:
    """Attribute what is done in this session from now on to this call."""
    session.info["audit"] = _Book(call)


def asked(session: Session, row: Request | Task | Webhook | Datablock | Environment) -> None:
    """Record that an action is requested on the row, unless the caller owns it.  A webhook has no
    owner.
    """
    book = _book(session)
    if book is not None and getattr(row, "user_id", None) != book.call.user_id:
        _note(book, row, "asked", _values(row))


def changed_too(session: Session, row: Reservation, more: dict[str, Any]) -> None:
    """Add to the record of a changed row what its own columns do not say."""
    book = _book(session)
    if book is not None:
        _note(book, row, "changed", _values_before(row))
        book.noted[_target(row)].more |= more


def looked(session: Session, row: Request | Task | Checkpoint) -> None:
    """Record that the row is shown to a caller of another tenant."""
    book = _book(session)
    if book is None or row.tenant_id == book.call.tenant_id:
        return
    if _lately.new(session, (book.call.key_id, book.call.operation, row.id), READ_AGAIN_S):
        _note(book, row, "read", _values(row))


def signed_in(session: Session, call: Call) -> None:
    """Record that a browser signed in with the key of the call."""
    append(session, call, "made", target=("session", call.key_id), tenant_id=call.tenant_id)


def refused(session: Session, call: Call, take_number: Callable[[], int]) -> None:
    """Record that a wrong key was sent: once in REFUSED_AGAIN_S for each key or, if the key is
    unknown, each address.

    `take_number` returns how many wrong keys the record stands for.
    """
    whose = call.key_id or call.address
    if _lately.new(session, (whose, call.operation, "refused"), REFUSED_AGAIN_S):
        target, affair = ("session", call.key_id), call.tenant_id or None
        record = _record(affair, "refused", target, {}, {"wrong_keys": take_number()})
        _write(session, call, [record])


def append(
    session: Session,
    call: Call,
    action: str,
    *,
    target: tuple[str, str],
    tenant_id: str | None,
    after: dict[str, Any] | None = None,
) -> None:
    """Write a record now; nothing may be locked after this in the same transaction."""
    _write(session, call, [_record(tenant_id, action, target, {}, after or {})])


def refused_tunnel(
    session: Session, call: Call, *, target: tuple[str, str], tenant_id: str | None, why: str
) -> None:
    """Record that a tunnel was refused: once in REFUSED_AGAIN_S for each key and target."""
    whose = call.key_id or call.address
    if _lately.new(session, (whose, call.operation, target[1]), REFUSED_AGAIN_S):
        append(session, call, "refused", target=target, tenant_id=tenant_id, after={"why": why})


def used(session: Session, secrets: Iterable[Secret], task: Task, device: str) -> None:
    """Record that a launch gives these secrets to a task, when the transaction commits."""
    user = session.get_one(User, task.user_id).name
    whose = {"user": user, "user_id": task.user_id, "tenant_id": task.tenant_id}
    found = session.info.setdefault("secrets used", [])
    found += [
        (
            Call(operation="launchTask", **whose),
            _record(
                row.tenant_id,
                "read",
                ("secret", row.id),
                {},
                {"name": row.name, "task": task.id, "epoch": task.epoch, "device": device},
            ),
        )
        for row in secrets
    ]


class _Lately:
    """Remembers which records this process wrote lately, so that they are not repeated: an open
    page reads again and again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until_s: OrderedDict[tuple[str, str, str], float] = OrderedDict()

    def new(self, session: Session, what: tuple[str, str, str], for_s: float) -> bool:
        """True if there is no such recent record.  After the commit there is one, for `for_s`."""
        with self._lock:
            if self._until_s.get(what, 0.0) > time.monotonic():
                return False
        after_commit(session, lambda: self._note(what, for_s))
        return True

    def _note(self, what: tuple[str, str, str], for_s: float) -> None:
        with self._lock:
            self._until_s[what] = time.monotonic() + for_s
            self._until_s.move_to_end(what)
            if len(self._until_s) > KEPT:
                self._until_s.popitem(last=False)


_lately = _Lately()


def _book(session: Session | None) -> _Book | None:
    return None if session is None else session.info.get("audit")


def _note(book: _Book, row: Base, action: str, before: dict[str, Any]) -> None:
    """Note an action for the record.

    The first note has the values from before. Any action replaces "read", and "removed" replaces
    any action.
    """
    known = book.noted.setdefault(_target(row), _Noted(row=row, action=action, before=before))
    if known.action == "read" or action == "removed":
        known.action = action


def _target(row: Base) -> tuple[str, str]:
    kind = _KINDS.get(type(row), type(row).__name__.lower())
    if isinstance(row, Webhook) and row.name is not None:
        kind = "channel"
    return kind, "/".join(str(part) for part in inspect(row).mapper.primary_key_from_instance(row))


def _values(row: Base) -> dict[str, Any]:
    return {name: _plain(getattr(row, name)) for name in _COLUMNS[type(row)]}


def _plain(value: Any) -> Any:
    match value:
        case datetime():
            return _iso_time(value)
        case Decimal():  # a whole number of Postgres
            return int(value)
    return value


def _iso_time(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="microseconds")


# --- automatic notes of changed rows ------------------------------------------------------------


def _made(mapper: Mapper[Any], connection: Any, row: Base) -> None:
    if (book := _book(object_session(row))) is not None:
        _note(book, row, "made", {})


def _changed(mapper: Mapper[Any], connection: Any, row: Base) -> None:
    if (book := _book(object_session(row))) is not None:
        _note(book, row, "changed", _values_before(row))


def _removed(mapper: Mapper[Any], connection: Any, row: Base) -> None:
    if (book := _book(object_session(row))) is not None:
        _note(book, row, "removed", _values_before(row))


def _values_before(row: Base) -> dict[str, Any]:
    """Return the values of the row as it was read."""
    attributes = inspect(row).attrs
    found = {}
    for name in _COLUMNS[type(row)]:
        gone = attributes[name].history.deleted
        found[name] = _plain(gone[0] if gone else getattr(row, name))
    return found


for _model in WATCHED:
    event.listen(_model, "after_insert", _made)
    event.listen(_model, "before_update", _changed)
    event.listen(_model, "before_delete", _removed)


# --- records ------------------------------------------------------------------------------------


@event.listens_for(Session, "before_commit")
def _write_down(session: Session) -> None:
    if session.in_nested_transaction():
        return
    if uses := session.info.pop("secrets used", None):
        session.flush()
        for call, record in uses:
            _write(session, call, [record])
    book = _book(session)
    if book is None:
        return
    session.flush()
    done = [_done(session, noted) for noted in book.noted.values()]
    book.noted.clear()
    if worth_it := [one for one in done if one is not None]:
        _write(session, book.call, worth_it)


def _done(session: Session, noted: _Noted) -> dict[str, Any] | None:
    """Return the columns of the record, except those about the call; None if no watched value has
    changed.
    """
    after = {} if noted.action == "removed" else _values(noted.row)
    before = noted.before
    if noted.action not in ("made", "removed"):
        before = {name: was for name, was in before.items() if was != after[name]}
        after = {name: after[name] for name in before} | noted.more
    if noted.action == "changed" and not after:
        return None
    return _record(_affair_of(session, noted), noted.action, _target(noted.row), before, after)


def _record(
    tenant_id: str | None,
    action: str,
    target: tuple[str, str],
    before: dict[str, Any],
    after: dict[str, Any],
) -> dict[str, Any]:
    kind, id = target
    return {
        "tenant_id": tenant_id,
        "action": action,
        "target_kind": kind,
        "target_id": id,
        "before": before,
        "after": after,
    }


def _affair_of(session: Session, noted: _Noted) -> str | None:
    """Return the tenant whose administrators may see the record.

    If a tenant was created or removed, that is its parent.
    """
    row = noted.row
    if isinstance(row, Tenant):
        return row.parent_id if noted.action in ("made", "removed") else row.id
    if isinstance(row, ApiKey):
        return session.get_one(User, row.user_id).tenant_id
    return getattr(row, "tenant_id", None)


def _write(session: Session, call: Call, done: list[dict[str, Any]]) -> None:
    session.execute(text("select pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
    # A separate statement sees what the previous holder of the lock committed.
    at, id, hash = session.execute(_END).one()
    rows = []
    for one in done:
        id += 1
        says = {"id": id, "at": _iso_time(at), **_by(call), **one}
        row = {**says, "at": at, "previous": hash, "hash": link_hash(hash, says)}
        hash = row["hash"]
        rows.append(row)
    session.execute(insert(AuditEvent), rows)


_LAST = select(AuditEvent.id, AuditEvent.hash).order_by(AuditEvent.id.desc()).limit(1).subquery()
_END = select(
    func.clock_timestamp(),
    func.coalesce(select(_LAST.c.id).scalar_subquery(), 0),
    func.coalesce(select(_LAST.c.hash).scalar_subquery(), GENESIS),
)


def _by(call: Call) -> dict[str, str]:
    return {
        "user_id": call.user_id,
        "user": call.user,
        "user_tenant_id": call.tenant_id,
        "key_id": call.key_id,
        "address": call.address,
        "request_id": call.request_id,
        "operation": call.operation,
    }


# --- verification -------------------------------------------------------------------------------


def verified(session: Session, known: TrustedLink) -> Verdict:
    """Verify the chain from `known` on, read in one snapshot, page by page."""
    query = select(AuditEvent.__table__).where(AuditEvent.id >= known.id).order_by(AuditEvent.id)
    with session.execute(query.execution_options(yield_per=READ_AT_ONCE)) as rows:
        return verify(_links(rows.mappings()), known)


def _links(rows: Any) -> Iterator[ChainLink]:
    for row in rows:
        says = {name: _plain(row[name]) for name in row if name not in ("previous", "hash")}
        yield ChainLink(id=row["id"], says=says, previous=row["previous"], hash=row["hash"])
