"""The ledger turns what devices measured into charges of tenants.  It is the only writer of usage.

A charge is the growth of a placement's `held_us`, times its cost at that time.  Placement, account
and bucket are written in one transaction (`note`, `book`), so the three sums agree to the
microsecond at any instant: sum(placements.charged_us) = sum(usage.charged_us) =
sum(accounts.total_us).  When a request is deleted, its placements go and the other two stay.

Rules F1 and F2.  A running task is charged at every heartbeat; decay is lazy
(`core.fairness.usage_decay`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from sqlalchemy import ColumnElement, Table, func, select, tuple_, update
from sqlalchemy.dialects.postgresql import Insert, insert
from sqlalchemy.orm import Session

from app.core.fairness import usage_decay
from app.core.model.snapshot import IdleCreditFloor
from app.db import tenant_tree, transactions
from app.db.models import Account, Base, LedgerBase, Placement, Tenant, Usage, User
from app.db.models import Lift as LiftRow
from app.scheduling import budgets
from app.scheduling.round_notes import notes_of
from app.settings import settings

REBASE_HALF_LIVES = 200  # far below the number at which fixed-point sums overflow their column


def base(session: Session) -> LedgerBase:
    """Return the ledger's T0 and half-life.

    The row is created when it is first used. After a change of the half-life the sums are rebuilt,
    and the row is read again.
    """
    row = session.info.get("ledger") or session.get(LedgerBase, 1)
    if row is None:
        values = {
            "id": 1,
            "half_life_s": settings().half_life_s,
            "since_s": transactions.now_s(session),
        }
        session.execute(insert(LedgerBase).values(values).on_conflict_do_nothing())
        row = session.get_one(LedgerBase, 1)
    if row.half_life_s != settings().half_life_s:
        _change_half_life(session, row, settings().half_life_s)
    _rebase(session, row)
    session.info["ledger"] = row  # a session keeps only weak references to its rows
    return row


def it_is(session: Session, row: LedgerBase | None) -> None:
    """Remember a row that another statement of this transaction read, so that it is not read
    again.
    """
    if row is not None:
        session.info["ledger"] = row


def charge(session: Session, placement: Placement, held_us: int) -> int:
    """Charge at once what the placement held since its last charge; return the charge.

    To charge several placements, call `note` for each, and `book` once.
    """
    charged = note(session, placement, held_us)
    book(session)
    return charged


def note(session: Session, placement: Placement, held_us: int) -> int:
    """Add what the placement held since the last call to its row and to the notes of this
    transaction.

    Returns the charge in micro-device-seconds.  `book` writes all notes into buckets and accounts.
    """
    if held_us <= placement.held_us:
        return 0  # a late or repeated report, charged before
    held = held_us - placement.held_us
    charged = _cost_us(placement, held_us) - _cost_us(placement, placement.held_us)
    placement.held_us, placement.charged_us = held_us, placement.charged_us + charged
    account = (placement.user_id, placement.tenant_id, placement.kind)
    note_sums(session, account, held, charged, over_us=held)
    return charged


def _cost_us(placement: Placement, held_us: int) -> int:
    """Return what so long a time costs now; as the difference of two, it is exact to a µs."""
    return held_us * placement.cost_milli // 1000


def note_sums(
    session: Session,
    account: tuple[str, str, str],
    held_us: int,
    charged_us: int,
    *,
    over_us: int,
) -> None:
    """Add to the notes what a statement has added to placements of a (user, tenant, kind).

    The charge was made over the last `over_us`: the time of the placement that held longest.
    """
    noted = notes_of(session).charges
    notes_of(session).spans.append((account, over_us, charged_us))
    old = noted.get(account, (0, 0, 0))
    faded = _faded(session, charged_us)
    noted[account] = old[0] + held_us, old[1] + charged_us, old[2] + faded


def _faded(session: Session, charged_us: int) -> int:
    since = base(session)
    return usage_decay.faded(
        charged_us,
        at_s=transactions.now_s(session),
        since_s=since.since_s,
        half_life_s=since.half_life_s,
    )


def book(session: Session) -> None:
    """Write all notes: one row for each account and bucket, however many charges there were."""
    notes = notes_of(session)
    noted, notes.charges = notes.charges, {}
    spans, notes.spans = notes.spans, []
    if not noted:
        return
    bucket_s = settings().usage_bucket_s
    begins_s = int(transactions.now_s(session)) // bucket_s * bucket_s
    bucket = {"bucket": datetime.fromtimestamp(begins_s, UTC), "bucket_s": bucket_s}
    buckets, accounts = [], dict[tuple[str, str], list[int]]()
    for (user, tenant, kind), (held, charged, faded) in sorted(noted.items()):
        owner = {"user_id": user, "tenant_id": tenant}
        buckets.append({**bucket, **owner, "kind": kind, "held_us": held, "charged_us": charged})
        account = accounts.setdefault((user, tenant), [0, 0])
        account[0] += faded
        account[1] += charged
    session.connection().execute(_BUCKET, buckets)
    sums = [
        {"user_id": user, "tenant_id": tenant, "faded": faded, "total_us": total}
        for (user, tenant), (faded, total) in accounts.items()
    ]
    session.connection().execute(_ACCOUNT, sums)
    budgets.spend(session, spans)


def _grow(table: Table, *columns: str) -> Insert:
    """Build a statement that adds to a row, or inserts it."""
    row = insert(table)
    grown = {name: table.c[name] + row.excluded[name] for name in columns}
    return row.on_conflict_do_update(index_elements=table.primary_key, set_=grown)


def _raise_to(table: Table, column: str) -> Insert:
    """Build a statement that sets one column of a row, or inserts the row if there is none."""
    row = insert(table)
    raised = {column: row.excluded[column]}
    return row.on_conflict_do_update(index_elements=table.primary_key, set_=raised)


_LIFT = _raise_to(Base.metadata.tables["lifts"], "faded")
_BUCKET = _grow(Base.metadata.tables["usage"], "held_us", "charged_us")
_ACCOUNT = _grow(Base.metadata.tables["accounts"], "faded", "total_us")


def lift(session: Session, island: str, lifts: Iterable[IdleCreditFloor]) -> None:
    """Store the idle-credit floors that `core.scheduling.idle_credit` decided; they are charged to
    no account."""
    newest = {(lift.tenant, lift.user, lift.kind): lift.faded_us for lift in lifts}
    rows = [
        {"island": island, "tenant_id": tenant, "user_id": user, "kind": kind, "faded": faded}
        for (tenant, user, kind), faded in newest.items()
    ]
    session.connection().execute(_LIFT, rows)


def reweigh(session: Session, row: Tenant | User, weight_milli: int, *, past: bool) -> None:
    """Give a tenant or user another weight that counts from now on; with `past`, for all usage.

    The caller holds the row's lock. Idle-credit floors keep their place in the order.
    """
    old, row.weight_milli = row.weight_milli, weight_milli
    if past:
        row.carried = 0
    elif old != weight_milli:
        used = int(session.scalar(select(func.sum(Account.faded)).where(_accounts_of(row))) or 0)
        row.carried = usage_decay.carried_over(
            used, int(row.carried), weight=old, new_weight=weight_milli
        )
    whose = (row.id, "") if isinstance(row, Tenant) else (row.tenant_id, row.id)
    session.execute(
        update(LiftRow)
        .where(tuple_(LiftRow.tenant_id, LiftRow.user_id) == whose)
        .values(faded=func.div(LiftRow.faded * weight_milli, old))
    )


def _accounts_of(row: Tenant | User) -> ColumnElement[bool]:
    """Return a condition for the accounts whose usage is the row's.

    The root's children are not below it here.
    """
    if isinstance(row, User):
        return Account.user_id == row.id
    if row.parent_id is None:
        return Account.tenant_id == row.id
    return tenant_tree.within(Account.tenant_id, row.id)


def _rebase(session: Session, row: LedgerBase) -> None:
    """Move T0 forward by whole half-lives before the numbers grow too long; the order does not
    change.
    """
    if not row.half_life_s:
        return
    halvings = int((transactions.now_s(session) - row.since_s) // row.half_life_s)
    if halvings < REBASE_HALF_LIVES:
        return
    session.refresh(row, with_for_update=True)  # another island may have done it meanwhile
    halvings = int((transactions.now_s(session) - row.since_s) // row.half_life_s)
    if halvings < REBASE_HALF_LIVES:
        return
    for account in session.scalars(select(Account).with_for_update()):
        account.faded = usage_decay.rebase(int(account.faded), halvings)
    for lift in session.scalars(select(LiftRow).with_for_update()):
        lift.faded = usage_decay.rebase(int(lift.faded), halvings)
    for branch in _reweighed(session):
        branch.carried = usage_decay.rebase(int(branch.carried), halvings)
    row.since_s += halvings * row.half_life_s


def _change_half_life(session: Session, row: LedgerBase, half_life_s: float) -> None:
    """Rebuild the sums from the usage buckets, because faded sums are right for one half-life only.

    Idle-credit floors and carried usage (`Tenant.carried`, `User.carried`) have no buckets. Their
    present amounts are kept, and fade with the new half-life from now on.
    """
    now_s, was_s, was_half_life_s = transactions.now_s(session), row.since_s, row.half_life_s

    def left(faded: int) -> int:
        left_us = usage_decay.usage_us(
            int(faded), now_s=now_s, since_s=was_s, half_life_s=was_half_life_s
        )
        return left_us << usage_decay.FIXED_POINT_BITS

    for lift in session.scalars(select(LiftRow).with_for_update()):
        lift.faded = left(lift.faded)
    for branch in _reweighed(session):
        branch.carried = left(branch.carried)
    row.half_life_s, row.since_s = half_life_s, now_s
    rebuild(session)


def _reweighed(session: Session) -> Iterator[Tenant | User]:
    """Yield the tenants and users that carry something over, locked."""
    yield from session.scalars(select(Tenant).where(Tenant.carried != 0).with_for_update())
    yield from session.scalars(select(User).where(User.carried != 0).with_for_update())


def rebuild(session: Session) -> None:
    """Recompute every account from the usage rows, each bucket charged at its start."""
    row = session.get_one(LedgerBase, 1)
    accounts = {account.user_id: account for account in session.scalars(select(Account))}
    for account in accounts.values():
        account.faded, account.total_us = 0, 0
    for usage in session.scalars(select(Usage)):
        account = accounts[usage.user_id]
        account.total_us += usage.charged_us
        account.faded = int(account.faded) + usage_decay.faded(
            usage.charged_us,
            at_s=usage.bucket.timestamp(),
            since_s=row.since_s,
            half_life_s=row.half_life_s,
        )
