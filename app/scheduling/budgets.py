"""Counts charges against budgets, and puts in force what an exhausted budget asks for.

`spend` is called by the ledger in the transaction of each charge, so the sum of what all periods
of a budget have spent is what the ledger charged since the budget was set. A user without a budget
has that of the tenant's `user_defaults`, with rows of its own. Control calls `look`
every few seconds; it is the only writer of `exhausted`, by which islands hold back, pause or demote
(`core.fairness.budget`). All amounts are micro-device-seconds.

Whoever sets or changes a budget locks the table of usage first. So every charge is either in the
sum with which the budget begins, or is made by a transaction that sees the budget.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, func, select, text, true, tuple_, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from app.core.fairness import budget as budgets
from app.core.fairness.budget import ALL, Budget, Period, Spending, budget_of
from app.core.webhooks import channel_texts
from app.db import tenant_tree, transactions
from app.db.ids import new_id
from app.db.models import BudgetPeriod, Delivery, Tenant, Usage, User, Webhook
from app.errors import Conflict
from app.identity import audit

JSON = dict[str, Any]
Owner = Tenant | User
Account = tuple[str, str, str]  # user, tenant, kind of device

MOST_ADJUSTMENTS = 1000  # of one kind in one period
_LOCK = 0x627564676574  # key of an advisory lock; unique in this database
_DECIDE = text("select pg_advisory_xact_lock(:key)").bindparams(key=_LOCK)
_TRY_TO_DECIDE = text("select pg_try_advisory_xact_lock(:key)").bindparams(key=_LOCK)
_ANY = text(
    "select exists (select from tenants where budget is not null)"
    " or exists (select from users where budget is not null)"
    " or exists (select from tenants where jsonb_exists(user_defaults, 'budget'))"
)


# --- charges --------------------------------------------------------------------------------------


def spend(session: Session, charges: Iterable[tuple[Account, int, int]]) -> None:
    """Add charges to the periods of the budgets that they count in.

    A charge is (whose, over how many µs it was made up to now, micro-device-seconds). It is split
    where a period ends. Only the ledger calls this, after it has written the usage.
    """
    if not session.scalar(_ANY):
        return
    now_us = time_us(session)
    found = _Budgets.read(session, {account[:2] for account, _, _ in charges})
    sums: dict[tuple[str, str, str, Period], list[int]] = defaultdict(lambda: [0, 0])
    for (user, tenant, kind), over_us, charged_us in charges:
        for owner, it in found.of(user, tenant):
            for key in {kind, ALL} & it.grants_us.keys():
                for period, part_us in it.shares(over_us, charged_us, now_us):
                    spent = sums[*owner, key, period]
                    spent[0], spent[1] = it.grants_us[key], spent[1] + part_us
    # sorted, so that two islands cannot deadlock
    rows = [
        _row(tenant, user, kind, period, granted_us) | {"spent_us": spent_us}
        for (tenant, user, kind, period), (granted_us, spent_us) in sorted(sums.items())
    ]
    if rows:
        session.connection().execute(_SPEND, rows)


@dataclass(frozen=True, slots=True)
class _Budgets:
    """Holds all budgets, and the tenants above each tenant."""

    tenants: Mapping[str, Budget]
    users: Mapping[str, Budget]
    parents: Mapping[str, str | None]

    @classmethod
    def read(cls, session: Session, whose: Iterable[tuple[str, str]]) -> _Budgets:
        rows = session.execute(select(Tenant.id, Tenant.parent_id, Tenant.budget)).all()
        mine = User.id.in_([user for user, _ in whose])
        return cls(
            tenants={row.id: budget_of(row.budget) for row in rows if row.budget is not None},
            users={user: budget_of(terms) for user, terms in of_users(session, mine).items()},
            parents={row.id: row.parent_id for row in rows},
        )

    def of(self, user: str, tenant: str) -> Iterator[tuple[tuple[str, str], Budget]]:
        """Yield (tenant, user or "") of each budget above an account, and the budget."""
        if user in self.users:
            yield (tenant, user), self.users[user]
        above: str | None = tenant
        while above is not None:
            if above in self.tenants:
                yield (above, ""), self.tenants[above]
            above = self.parents[above]


def _row(tenant: str, user: str, kind: str, period: Period, granted_us: int) -> dict[str, Any]:
    return {
        "tenant_id": tenant,
        "user_id": user,
        "kind": kind,
        "begins_at": period.begins_at,
        "ends_at": period.ends_at,
        "granted_us": granted_us,
    }


_NEW = insert(BudgetPeriod)
_SPEND = _NEW.on_conflict_do_update(
    index_elements=["tenant_id", "user_id", "kind", "begins_at"],
    set_={"spent_us": BudgetPeriod.spent_us + _NEW.excluded.spent_us},
)


def time_us(session: Session) -> int:
    """Return the time of the database, in µs since 1970."""
    return round(transactions.now_s(session) * 1e6)


def of_users(session: Session, which: ColumnElement[bool]) -> Mapping[str, JSON]:
    """Return the budgets of users, their own or their tenant's default, in the form of a row."""
    terms = func.coalesce(User.budget, Tenant.user_defaults["budget"])
    query = select(User.id, terms).join(Tenant, Tenant.id == User.tenant_id)
    bound = query.where(which, terms.is_not(None), User.deleted_at.is_(None)).order_by(User.id)
    return {id: found for id, found in session.execute(bound)}


def terms_of(session: Session, owner: Owner) -> JSON | None:
    """Return the budget that counts for a tenant or user in its form in a row, None without one."""
    if owner.budget is not None or isinstance(owner, Tenant):
        return owner.budget
    default = select(Tenant.user_defaults["budget"]).where(Tenant.id == owner.tenant_id)
    return session.scalar(default)


# --- what follows ---------------------------------------------------------------------------------


def look(session: Session) -> bool:
    """Begin the periods that are due, and put in force what each budget asks for.

    Returns True if anything is in force now that was not, or the other way round. While another
    control does it, or a call changes a budget, nothing is done.
    """
    if not session.scalar(_ANY) or not session.scalar(_TRY_TO_DECIDE):
        return False
    changed, notices = False, list[BudgetNotice]()
    tenants = select(Tenant).where(Tenant.budget.is_not(None)).order_by(Tenant.id)
    owners: list[tuple[Owner, JSON | None]] = [(it, it.budget) for it in session.scalars(tenants)]
    terms_of_users = of_users(session, true())
    users = select(User).where(User.id.in_(terms_of_users)).order_by(User.id)
    owners += ((user, terms_of_users[user.id]) for user in session.scalars(users))
    running = _running(session)
    for owner, terms in owners:
        changed |= _decide(session, owner, terms, notices, running.get(_ids(owner), ()))
    session.flush()
    _write_notices(session, notices)
    return changed


def _decide(
    session: Session,
    owner: Owner,
    terms: JSON | None,
    notices: list[BudgetNotice],
    rows: Iterable[BudgetPeriod] | None = None,
) -> bool:
    """Put in force what the budget of a tenant or user asks for now; True if that is a change.

    `terms` are the budget in its form in a row. What is to be told is added to `notices`. `rows`
    are the budget's, if they were read already.
    """
    in_force, ends_at = dict[str, str](), None
    if terms is not None:
        it = budget_of(terms)
        period = it.period_at(time_us(session))
        begun = _begun(session, owner, it, period, rows)
        spendings = {kind: spending_of(row) for kind, row in begun.items()}
        notices += _reached(owner, it, begun)
        in_force, ends_at = dict(budgets.actions(it, spendings)), period.ends_at
    if (owner.exhausted, owner.budget_ends_at) == (in_force, ends_at):
        return False
    transactions.lock_again(session, owner)
    if (newer := terms_of(session, owner)) != terms:
        return _decide(session, owner, newer, notices)
    changed = owner.exhausted != in_force
    owner.exhausted, owner.budget_ends_at = in_force, ends_at
    return changed


def _reached(owner: Owner, it: Budget, rows: Mapping[str, BudgetPeriod]) -> Iterator[BudgetNotice]:
    """Yield the highest percentages that are reached for the first time, and note them as told."""
    for kind, row in rows.items():
        reached = budgets.reached(it, spending_of(row))
        if reached and reached[-1] > row.told:
            row.told = reached[-1]
            yield BudgetNotice(owner, kind, row.told, it.at[row.told], it.to)


class BudgetNotice(NamedTuple):
    """Says that so much of a budget is spent, and what follows."""

    owner: Owner
    kind: str
    percent: int
    action: str
    to: tuple[str, ...]  # names of channels


def _write_notices(session: Session, notices: Iterable[BudgetNotice]) -> None:
    """Tell channels and the audit log what is spent.

    Nothing may be locked after it in the transaction.
    """
    notices = list(notices)
    for notice in notices:
        _tell_channels(session, notice)
    session.flush()
    call = audit.Call(operation="lookAtBudgets", user="control")
    for owner, kind, percent, action, _ in notices:
        target = ("user" if isinstance(owner, User) else "tenant", owner.id)
        after = {"budget": kind, "spent_percent": percent, "action": action}
        tenant = _ids(owner)[0]
        audit.append(session, call, "changed", target=target, tenant_id=tenant, after=after)


def _tell_channels(session: Session, notice: BudgetNotice) -> None:
    owner, kind, percent, action, to = notice
    tenant = _ids(owner)[0]
    mine = (Webhook.tenant_id == tenant, Webhook.disabled_at.is_(None))
    at = transactions.now(session)
    named = select(Webhook).where(*mine, Webhook.name.in_(to))
    for channel in session.scalars(named.order_by(Webhook.id)):
        form = str(channel.kind)
        body = channel_texts.budget_body(form, owner.name, kind, percent, action, at=at)
        session.add(
            Delivery(
                id=new_id("msg"),
                webhook_id=channel.id,
                tenant_id=tenant,
                url=channel.url,
                type=channel_texts.BUDGET,
                body=body,
            )
        )


def _ids(owner: Owner) -> tuple[str, str]:
    return (owner.tenant_id, owner.id) if isinstance(owner, User) else (owner.id, "")


def _running(session: Session) -> dict[tuple[str, str], list[BudgetPeriod]]:
    """Return the rows of all periods that have not ended, by tenant and user."""
    found = defaultdict[tuple[str, str], list[BudgetPeriod]](list)
    going_on = select(BudgetPeriod).where(BudgetPeriod.ends_at > transactions.now(session))
    for row in session.scalars(going_on.order_by(BudgetPeriod.kind)):
        found[row.tenant_id, row.user_id].append(row)
    return found


def _begun(
    session: Session,
    owner: Owner,
    it: Budget,
    period: Period,
    known: Iterable[BudgetPeriod] | None = None,
) -> dict[str, BudgetPeriod]:
    """Return the rows of a period by kind, once each has what the period before left."""
    tenant, user = _ids(owner)
    if known is None:
        rows = rows_of(session, owner, period)
    else:
        begins_at = period.begins_at
        rows = {row.kind: row for row in known if row.begins_at == begins_at}
    for kind, granted_us in it.grants_us.items():
        if kind not in rows:
            new = _row(tenant, user, kind, period, granted_us)
            session.execute(insert(BudgetPeriod).values(new).on_conflict_do_nothing())
    if not rows.keys() >= it.grants_us.keys():
        rows = rows_of(session, owner, period)
    if any(row.carried_us is None for row in rows.values()):
        past = rows_of(session, owner, it.period_at(period.begins_us - 1))
        for kind, row in rows.items():
            if row.carried_us is None:
                before = past.get(kind)
                row.carried_us = budgets.carried_us(it, spending_of(before)) if before else 0
    return {kind: rows[kind] for kind in it.grants_us}


def rows_of(session: Session, owner: Owner, period: Period) -> dict[str, BudgetPeriod]:
    """Return the rows of a budget in a period, by kind."""
    query = select(BudgetPeriod).where(_is_of(owner)).execution_options(populate_existing=True)
    query = query.where(BudgetPeriod.begins_at == period.begins_at)
    return {row.kind: row for row in session.scalars(query.order_by(BudgetPeriod.kind))}


def _is_of(owner: Owner) -> ColumnElement[bool]:
    return tuple_(BudgetPeriod.tenant_id, BudgetPeriod.user_id) == _ids(owner)


def spending_of(row: BudgetPeriod) -> Spending:
    """Return the counts of a row."""
    return Spending(
        granted_us=row.granted_us,
        carried_us=row.carried_us or 0,
        adjusted_us=sum(one["us"] for one in row.adjustments),
        spent_us=row.spent_us,
    )


# --- what administrators set ----------------------------------------------------------------------


def lock(session: Session) -> None:
    """Let no charge be booked, and nothing be decided, until this transaction ends."""
    session.execute(text("lock table usage in share row exclusive mode"))
    session.execute(_DECIDE)


def set_budget(session: Session, owner: Owner, it: Budget | None) -> None:
    """Give a tenant or user a budget, or none; its row is new, or locked after `lock`.

    What was charged in the present period counts, by the buckets of the usage. A budget that keeps
    its period and kind also keeps what is counted there, to the microsecond.
    """
    lock(session)
    before = terms_of(session, owner)
    old = None if before is None else budget_of(before)
    owner.budget = None if it is None else it.as_json()
    session.flush()
    terms = terms_of(session, owner)
    if terms is not None:
        it = budget_of(terms)
        tenant, user = _ids(owner)
        period = it.period_at(time_us(session))
        kept = _kinds_that_go_on(old, it, period, time_us(session))
        for kind, granted_us in it.grants_us.items():
            spent_us = 0 if kind in kept else charged_within(session, owner, kind, period)
            row = _row(tenant, user, kind, period, granted_us) | {"spent_us": spent_us}
            begun = insert(BudgetPeriod).values({**row, "carried_us": 0})
            anew = {"granted_us": granted_us, "ends_at": row["ends_at"]}
            if kind not in kept:
                anew |= {"spent_us": spent_us, "told": 0}
            key = ["tenant_id", "user_id", "kind", "begins_at"]
            session.execute(begun.on_conflict_do_update(index_elements=key, set_=anew))
    _decide_and_tell(session, owner)


def set_default(session: Session, tenant: Tenant, it: Budget | None) -> None:
    """Give each user of a tenant without a budget of its own this one, or none; the tenant is new,
    or locked after `lock`. It is counted as by `set_budget`; control puts it in force.
    """
    before = tenant.user_defaults.get("budget")
    if it is not None and before is not None:
        same = replace(it, since=budget_of(before).since)
        it = same if same.as_json() == before else it  # its periods go on
    after = None if it is None else it.as_json()
    if after == before:
        return
    lock(session)
    others = {name: limit for name, limit in tenant.user_defaults.items() if name != "budget"}
    tenant.user_defaults = others if after is None else {**others, "budget": after}
    session.flush()
    bound = (User.tenant_id == tenant.id, User.budget.is_(None), User.deleted_at.is_(None))
    if it is None:
        freed = update(User).where(*bound).values(exhausted={}, budget_ends_at=None)
        session.execute(freed)
        return
    period = it.period_at(time_us(session))
    old = None if before is None else budget_of(before)
    kept = _kinds_that_go_on(old, it, period, time_us(session))
    users = session.scalars(select(User.id).where(*bound).order_by(User.id)).all()
    for kind, granted_us in it.grants_us.items():
        spent = {} if kind in kept else _charged_to_users(session, tenant, kind, period)
        rows = [
            {
                **_row(tenant.id, user, kind, period, granted_us),
                "spent_us": spent.get(user, 0),
                "carried_us": 0,
                "told": 0,
            }
            for user in users
        ]
        if rows:
            session.connection().execute(_KEEP if kind in kept else _BEGIN, rows)


_KEY = ["tenant_id", "user_id", "kind", "begins_at"]
_ANEW = {name: _NEW.excluded[name] for name in ("granted_us", "ends_at", "spent_us", "told")}
_BEGIN = _NEW.on_conflict_do_update(index_elements=_KEY, set_=_ANEW)
_KEPT = {name: _NEW.excluded[name] for name in ("granted_us", "ends_at")}
_KEEP = _NEW.on_conflict_do_update(index_elements=_KEY, set_=_KEPT)


def _charged_to_users(
    session: Session, tenant: Tenant, kind: str, period: Period
) -> Mapping[str, int]:
    """Return what was charged to each user of a tenant since the period began."""
    query = select(Usage.user_id, func.sum(Usage.charged_us)).group_by(Usage.user_id)
    query = query.where(Usage.tenant_id == tenant.id, Usage.bucket >= period.begins_at)
    if kind != ALL:
        query = query.where(Usage.kind == kind)
    return {user: int(charged_us) for user, charged_us in session.execute(query)}


def _decide_and_tell(session: Session, owner: Owner) -> None:
    notices = list[BudgetNotice]()
    _decide(session, owner, terms_of(session, owner), notices)
    session.flush()
    _write_notices(session, notices)


def _kinds_that_go_on(old: Budget | None, new: Budget, period: Period, now_us: int) -> set[str]:
    """Return the kinds that are counted in this very period already."""
    if old is None or old.period_at(now_us) != period:
        return set()
    return set(old.grants_us.keys() & new.grants_us.keys())


def whose_usage(owner: Owner) -> ColumnElement[bool]:
    """Return a condition: the usage counts in the budget of this tenant or user."""
    if isinstance(owner, User):
        return Usage.user_id == owner.id
    return tenant_tree.within(Usage.tenant_id, owner.id)


def charged_within(session: Session, owner: Owner, kind: str, period: Period) -> int:
    """Return what was charged since the period began, by the buckets of the usage."""
    query = select(func.sum(Usage.charged_us)).where(whose_usage(owner))
    query = query.where(Usage.bucket >= period.begins_at)
    if kind != ALL:
        query = query.where(Usage.kind == kind)
    return int(session.scalar(query) or 0)


def adjust(session: Session, owner: Owner, kind: str, *, us: int, why: str, by: str) -> bool:
    """Add to what the budget grants in this period, or take away; False if it has no such kind."""
    terms = terms_of(session, owner)
    if terms is None or kind not in (it := budget_of(terms)).grants_us:
        return False
    session.execute(_DECIDE)
    row = _begun(session, owner, it, it.period_at(time_us(session)))[kind]
    session.refresh(row, with_for_update=True)
    if len(row.adjustments) >= MOST_ADJUSTMENTS:
        raise Conflict(f"this period has {MOST_ADJUSTMENTS} adjustments already; change the budget")
    at = transactions.now(session).isoformat(timespec="seconds")
    row.adjustments = [*row.adjustments, {"us": us, "why": why, "by": by, "at": at}]
    row.told = 0 if us > 0 else row.told
    session.flush()
    _decide_and_tell(session, owner)
    return True
