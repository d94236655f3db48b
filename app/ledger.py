"""The ledger: what devices measured becomes what tenants are charged.  The only writer of usage.

A charge is the growth of a placement's `held_us`, times the device's cost.  Placement, account and
bucket are written in one transaction, so the three sums agree to the microsecond at any instant:
sum(placements.charged_us) = sum(usage.charged_us) = sum(accounts.total_us).

Rules F1 and F2.  A running task is charged at every heartbeat; decay is lazy (`core.fairshare`).
"""

from __future__ import annotations

from sqlalchemy import func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from app import db
from app.core import fairshare
from app.models import Account, LedgerBase, Placement, Usage
from app.settings import settings

REBASE_HALF_LIVES = 200  # far below where the fixed point would outgrow its column


def base(session: Session) -> LedgerBase:
    """The ledger's T0 and half-life; made at first use, rebased and re-read when they changed."""
    row = session.get(LedgerBase, 1)
    if row is None:
        values = {"id": 1, "half_life_s": settings().half_life_s, "since_s": db.now_s(session)}
        session.execute(insert(LedgerBase).values(values).on_conflict_do_nothing())
        row = session.get_one(LedgerBase, 1)
    if row.half_life_s != settings().half_life_s:
        _change_half_life(session, row, settings().half_life_s)
    _rebase(session, row)
    return row


def charge(session: Session, placement: Placement, held_us: int) -> int:
    """Book what `placement` held since the last time; returns the micro-device-seconds charged."""
    if held_us <= placement.held_us:
        return 0  # a late or doubled report: it has been charged
    held = held_us - placement.held_us
    charged = held_us * placement.cost_milli // 1000 - placement.charged_us
    placement.held_us, placement.charged_us = held_us, placement.charged_us + charged
    _book_bucket(session, placement, held, charged)
    _book_account(session, placement, charged)
    return charged


def _book_bucket(session: Session, placement: Placement, held_us: int, charged_us: int) -> None:
    bucket_s = settings().usage_bucket_s
    row = insert(Usage).values(
        bucket=func.date_bin(text(f"interval '{bucket_s} s'"), func.now(), func.to_timestamp(0)),
        bucket_s=bucket_s,
        tenant_id=placement.tenant_id,
        user_id=placement.user_id,
        kind=placement.kind,
        held_us=held_us,
        charged_us=charged_us,
    )
    grown = {
        "held_us": Usage.held_us + row.excluded.held_us,
        "charged_us": Usage.charged_us + row.excluded.charged_us,
    }
    session.execute(row.on_conflict_do_update(constraint="pk_usage", set_=grown))


def _book_account(session: Session, placement: Placement, charged_us: int) -> None:
    since = base(session)
    faded = fairshare.faded(
        charged_us,
        at_s=db.now_s(session),
        since_s=since.since_s,
        half_life_s=since.half_life_s,
    )
    row = insert(Account).values(
        user_id=placement.user_id,
        tenant_id=placement.tenant_id,
        faded=faded,
        total_us=charged_us,
    )
    grown = {
        "faded": Account.faded + row.excluded.faded,
        "total_us": Account.total_us + row.excluded.total_us,
    }
    session.execute(row.on_conflict_do_update(constraint="pk_accounts", set_=grown))


def _rebase(session: Session, row: LedgerBase) -> None:
    """Move T0 on by whole half-lives before numbers grow too long; the order does not change."""
    if not row.half_life_s:
        return
    halvings = int((db.now_s(session) - row.since_s) // row.half_life_s)
    if halvings < REBASE_HALF_LIVES:
        return
    session.refresh(row, with_for_update=True)  # another island may have done it meanwhile
    halvings = int((db.now_s(session) - row.since_s) // row.half_life_s)
    if halvings < REBASE_HALF_LIVES:
        return
    for account in session.scalars(select(Account).with_for_update()):
        account.faded = fairshare.rebase(int(account.faded), halvings)
    row.since_s += halvings * row.half_life_s


def _change_half_life(session: Session, row: LedgerBase, half_life_s: float) -> None:
    """Another half-life means other sums: rebuild them from the buckets."""
    row.half_life_s, row.since_s = half_life_s, db.now_s(session)
    rebuild(session)


def rebuild(session: Session) -> None:
    """Recompute every account from the usage rows, each bucket charged at its start."""
    row = session.get_one(LedgerBase, 1)
    accounts = {account.user_id: account for account in session.scalars(select(Account))}
    for account in accounts.values():
        account.faded, account.total_us = 0, 0
    for usage in session.scalars(select(Usage)):
        account = accounts[usage.user_id]
        account.total_us += usage.charged_us
        account.faded = int(account.faded) + fairshare.faded(
            usage.charged_us,
            at_s=usage.bucket.timestamp(),
            since_s=row.since_s,
            half_life_s=row.half_life_s,
        )
