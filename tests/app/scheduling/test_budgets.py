"""Budgets count what the ledger charges, to the microsecond, and put in force what they ask for."""

from __future__ import annotations

import random
from collections import defaultdict
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import func, select

from app.core.fairness.budget import HOUR_US, Budget, budget_of
from app.core.webhooks import channel_texts
from app.db import transactions
from app.db.models import AuditEvent, BudgetPeriod, Delivery, Tenant, Usage, User, Webhook
from app.messaging import channels, webhooks
from app.scheduling import budgets, ledger, snapshot_reader
from app.settings import settings
from app.storage.sealing import Keyring

BEGIN_S = datetime(2026, 3, 20, 15, 30, tzinfo=UTC).timestamp()
DAY_S = 86400.0
HERS, HIS = ("usr_red.member", "ten_red"), ("usr_blue.member", "ten_blue")
PAUSE = {100: "pause"}


@pytest.fixture
def clock(world, session):
    """Set the time of the transaction; it begins at BEGIN_S."""

    def set_to(at_s):
        session.connection()  # begins the transaction whose time is set
        transactions.it_is(session, at_s)

    set_to(BEGIN_S)
    return set_to


def charge(session, whose, us, *, kind="cuda", over_us=None):
    ledger.note_sums(session, (*whose, kind), us, us, over_us=over_us or us)
    ledger.book(session)


def grant(session, owner, hours, **more):
    grants_us = {kind: round(each * HOUR_US) for kind, each in hours.items()}
    budgets.set_budget(session, owner, Budget(grants_us=grants_us, **{"at": PAUSE, **more}))
    return owner


def red(session):
    return session.get_one(Tenant, "ten_red")


def rows(session, tenant, user=""):
    query = select(BudgetPeriod).where(
        BudgetPeriod.tenant_id == tenant, BudgetPeriod.user_id == user
    )
    query = query.order_by(BudgetPeriod.begins_at, BudgetPeriod.kind)
    return session.scalars(query.execution_options(populate_existing=True)).all()


def test_budget_that_is_used_pauses_until_the_next_period(session, clock):
    tenant = grant(session, red(session), {"cuda": 1.0}, period=1)
    charge(session, HERS, HOUR_US - 1)
    assert not budgets.look(session)
    charge(session, HERS, 1)
    assert budgets.look(session)
    assert tenant.exhausted == {"cuda": "pause"}
    ends_at = datetime(2026, 3, 21, tzinfo=UTC)
    assert tenant.budget_ends_at == ends_at
    seen = snapshot_reader.tenants(session, "isle")["ten_red"]
    assert (seen.exhausted, seen.budget_ends_s) == ({"cuda": "pause"}, ends_at.timestamp())
    clock(ends_at.timestamp() - 1e-6)
    assert not budgets.look(session)
    clock(ends_at.timestamp())
    assert budgets.look(session)
    assert tenant.exhausted == {}


def test_budget_of_a_tenant_above_counts_what_is_charged_below(session, clock):
    session.add(Tenant(id="ten_below", name="below", parent_id="ten_red"))
    session.flush()
    session.add(User(id="usr_below", tenant_id="ten_below", name="below"))
    session.flush()
    tenant = grant(session, red(session), {"*": 1.0})
    charge(session, ("usr_below", "ten_below"), HOUR_US // 2, kind="cuda")
    charge(session, HERS, HOUR_US // 2, kind="cpu")
    charge(session, HIS, HOUR_US)
    budgets.look(session)
    assert tenant.exhausted == {"*": "pause"}


def test_budget_of_a_user_counts_the_user_alone(session, clock):
    owner = grant(session, session.get_one(User, HERS[0]), {"cuda": 1.0})
    charge(session, ("usr_red.other", "ten_red"), 2 * HOUR_US)
    budgets.look(session)
    assert owner.exhausted == {}
    charge(session, HERS, HOUR_US)
    budgets.look(session)
    assert owner.exhausted == {"cuda": "pause"}
    assert snapshot_reader.users(session, "isle")[HERS[0]].exhausted == {"cuda": "pause"}


def give_each(session, hours, **more):
    """Set the budget of each user of red; None removes it."""
    it = None
    if hours is not None:
        grants_us = {kind: round(each * HOUR_US) for kind, each in hours.items()}
        it = Budget(grants_us=grants_us, **{"at": PAUSE, **more})
    budgets.set_default(session, red(session), it)


def test_default_counts_for_each_user_alone_and_an_own_budget_replaces_it(session, clock):
    her, other = session.get_one(User, HERS[0]), User(id="usr_2", tenant_id="ten_red", name="bo")
    session.add(other)
    session.flush()
    charge(session, HERS, HOUR_US // 2)
    give_each(session, {"cuda": 1.0, "*": 9.0})
    charge(session, HERS, HOUR_US // 2 - 1)
    charge(session, ("usr_2", "ten_red"), HOUR_US // 4)
    charge(session, HIS, HOUR_US)
    assert not budgets.look(session), "a default of red does not count for blue"
    spent = [(row.user_id, row.kind, row.spent_us) for row in rows_of_users(session)]
    assert sorted(spent) == [
        ("usr_2", "*", HOUR_US // 4),
        ("usr_2", "cuda", HOUR_US // 4),
        (HERS[0], "*", HOUR_US - 1),
        (HERS[0], "cuda", HOUR_US - 1),
    ]
    charge(session, HERS, 1)
    assert budgets.look(session)
    assert (her.exhausted, other.exhausted) == ({"cuda": "pause"}, {})
    grant(session, her, {"cuda": 2.0})
    assert her.exhausted == {}
    own = {row.kind: row.spent_us for row in rows(session, "ten_red", HERS[0])}
    assert own["cuda"] == HOUR_US
    budgets.set_budget(session, her, None)
    assert her.exhausted == {"cuda": "pause"}, "the default counts again, with what was spent"
    give_each(session, None)
    session.expire_all()
    assert (her.exhausted, her.budget_ends_at) == ({}, None)
    assert not budgets.look(session)


def rows_of_users(session):
    query = select(BudgetPeriod).where(BudgetPeriod.user_id != "", BudgetPeriod.spent_us > 0)
    return session.scalars(query.execution_options(populate_existing=True)).all()


def test_default_that_is_set_again_keeps_its_periods_and_counts(session, clock):
    day = datetime.fromtimestamp(BEGIN_S, UTC).date()
    give_each(session, {"cuda": 1.0}, period=7, since=day)
    charge(session, HERS, HOUR_US // 2)
    clock(BEGIN_S + 3 * DAY_S)
    give_each(session, {"cuda": 1.0}, period=7, since=day + timedelta(days=3))
    assert red(session).user_defaults["budget"]["since"] == day.isoformat()
    give_each(session, {"cuda": 3.0}, period=7, since=day)
    [row] = rows(session, "ten_red", HERS[0])
    assert (row.granted_us, row.spent_us) == (3 * HOUR_US, HOUR_US // 2)


def test_use_before_the_budget_was_set_counts_and_one_that_is_too_low_is_used_at_once(
    session, clock
):
    charge(session, HERS, 3 * HOUR_US)
    tenant = grant(session, red(session), {"cuda": 4.0})
    assert tenant.exhausted == {}
    grant(session, tenant, {"cuda": 3.0})
    assert tenant.exhausted == {"cuda": "pause"}
    budgets.set_budget(session, tenant, None)
    assert (tenant.budget, tenant.exhausted, tenant.budget_ends_at) == (None, {}, None)


def test_use_of_an_earlier_period_does_not_count(session, clock):
    charge(session, HERS, 3 * HOUR_US)
    clock(BEGIN_S + 40 * DAY_S)
    assert grant(session, red(session), {"cuda": 1.0}).exhausted == {}


def test_charge_over_the_end_of_a_period_is_split_at_the_microsecond(session, clock):
    grant(session, red(session), {"cuda": 10.0}, period=1)
    midnight_s = datetime(2026, 3, 21, tzinfo=UTC).timestamp()
    clock(midnight_s + 3)
    charge(session, HERS, 10_000_000)
    assert [row.spent_us for row in rows(session, "ten_red")] == [7_000_000, 3_000_000]


def test_sum_of_tasks_is_split_by_the_time_over_which_they_ran(session, clock):
    grant(session, red(session), {"cuda": 10.0}, period=1)
    clock(datetime(2026, 3, 21, tzinfo=UTC).timestamp() + 1)
    charge(session, HERS, 40_000_000, over_us=4_000_000)  # ten tasks, four seconds each
    assert [row.spent_us for row in rows(session, "ten_red")] == [30_000_000, 10_000_000]


def test_what_is_left_is_carried_to_the_next_period(session, clock):
    grant(session, red(session), {"cuda": 4.0}, period=1, carry_milli=500)
    charge(session, HERS, HOUR_US)
    for day in (1, 2):
        clock(BEGIN_S + day * DAY_S)
        budgets.look(session)
    found = [(row.carried_us, row.spent_us) for row in rows(session, "ten_red")]
    assert found == [(0, HOUR_US), (3 * HOUR_US // 2, 0), (11 * HOUR_US // 4, 0)]


def test_adjustment_lets_go_on_and_says_who_and_why(session, clock):
    tenant = grant(session, red(session), {"cuda": 1.0})
    charge(session, HERS, HOUR_US)
    budgets.look(session)
    assert tenant.exhausted == {"cuda": "pause"}
    added = budgets.adjust(session, tenant, "cuda", us=HOUR_US, why="a deadline", by="root")
    assert (added, tenant.exhausted) == (True, {})
    [row] = rows(session, "ten_red")
    assert [(one["us"], one["why"], one["by"]) for one in row.adjustments] == [
        (HOUR_US, "a deadline", "root")
    ]
    assert not budgets.adjust(session, tenant, "cpu", us=1, why="", by="root")


def test_each_percentage_is_written_to_the_audit_log_once(session, clock):
    at = {80: "notify", 100: "hold"}
    grant(session, red(session), {"cuda": 1.0}, at=at)
    for _ in range(5):
        charge(session, HERS, HOUR_US // 4)
        budgets.look(session)
        budgets.look(session)
    query = select(AuditEvent.after).where(AuditEvent.operation == "lookAtBudgets")
    told = [after for after in session.scalars(query.order_by(AuditEvent.id))]
    assert [(one["spent_percent"], one["action"]) for one in told] == [(100, "hold")]
    assert red(session).exhausted == {"cuda": "hold"}


@pytest.mark.parametrize("kind", channel_texts.KINDS)
def test_each_percentage_is_told_to_the_channels_of_the_budget_once(session, clock, kind):
    for name, tenant in (("alerts", "ten_red"), ("others", "ten_red"), ("alerts", "ten_blue")):
        channel = Webhook(
            tenant_id=tenant, name=name, kind=kind, secret=webhooks.new_secret(), events=[]
        )
        channels.add(
            session,
            channel,
            "https://hooks.example.org/x",
            Keyring.read(settings().secrets_key_file),
        )
    grant(session, red(session), {"cuda": 1.0}, at={80: "notify", 100: "pause"}, to=("alerts",))
    for _ in range(5):
        charge(session, HERS, HOUR_US // 4)
        budgets.look(session)
        budgets.look(session)
    rows = session.scalars(select(Delivery).order_by(Delivery.id)).all()
    assert [(row.tenant_id, row.type) for row in rows] == [("ten_red", "budget.reached")]
    assert "red: 100 % of the budget for cuda devices is used" in rows[0].body


def test_kind_that_is_not_granted_any_more_stops_nothing(session, clock):
    tenant = grant(session, red(session), {"cuda": 1.0})
    charge(session, HERS, 2 * HOUR_US)
    grant(session, tenant, {"cpu": 1.0, "*": 5.0})
    clock(BEGIN_S + 40 * DAY_S)
    charge(session, HERS, HOUR_US, kind="cpu")
    budgets.look(session)
    assert tenant.exhausted == {"cpu": "pause"}


def test_changed_budget_keeps_what_is_counted(session, clock):
    tenant = grant(session, red(session), {"cuda": 10.0}, period=1)
    clock(datetime(2026, 3, 21, tzinfo=UTC).timestamp() + 3)
    charge(session, HERS, 10_000_000)
    grant(session, tenant, {"cuda": 20.0, "*": 30.0}, period=1)
    spent = [(row.kind, row.spent_us) for row in rows(session, "ten_red")]
    # "*" is new: it begins with the usage of the day, by buckets
    assert spent == [("cuda", 7_000_000), ("*", 10_000_000), ("cuda", 3_000_000)]


@pytest.mark.parametrize("seed", range(5))
def test_periods_sum_up_to_the_ledger_with_random_charges_adjustments_and_zones(
    session, clock, seed
):
    """An own count of each microsecond agrees: each charge is 1 µs for each µs held."""
    chance = random.Random(seed)
    owners = [red(session), session.get_one(User, HERS[0]), session.get_one(Tenant, "ten_root")]
    for owner in owners:
        zone = chance.choice(["UTC", "Asia/Kathmandu", "America/New_York", "Africa/Cairo"])
        period = chance.choice(["month", "week", 1, 3])
        more = {"timezone": zone, "period": period, "carry_milli": chance.randint(0, 1000)}
        grant(session, owner, {"cuda": chance.uniform(0, 300), "*": 100.0}, **more)
    at_us, made, added = round(BEGIN_S * 1e6), [], defaultdict(int)
    for _ in range(150):
        at_us += chance.randint(1, 20 * HOUR_US)
        clock(at_us / 1e6)
        at_us = round(transactions.now_s(session) * 1e6)
        whose, kind = chance.choice([HERS, HIS]), chance.choice(["cuda", "cpu"])
        held_us = chance.randint(1, 30 * HOUR_US)
        charge(session, whose, held_us, kind=kind)
        made.append((whose, kind, at_us - held_us, at_us))
        if chance.random() < 0.2:
            owner, us = chance.choice(owners), chance.randint(-HOUR_US, HOUR_US)
            budgets.adjust(session, owner, "*", us=us, why="chance", by="root")
            added[owner.id] += us
        if chance.random() < 0.5:
            budgets.look(session)
    budgets.look(session)
    total = session.scalar(select(func.sum(Usage.charged_us)))
    assert total == sum(ends - begins for _, _, begins, ends in made)
    for owner in owners:
        ids = (owner.tenant_id, owner.id) if isinstance(owner, User) else (owner.id, "")
        it, found = budget_of(owner.budget), rows(session, *ids)
        mine = [
            one for one in made if ids[0] in (one[0][1], "ten_root") and ids[1] in one[0] + ("",)
        ]
        for kind in it.grants_us:
            counted = [(b, e) for _, k, b, e in mine if kind in (k, "*")]
            of_kind = [row for row in found if row.kind == kind]
            assert sum(row.spent_us for row in of_kind) == sum(e - b for b, e in counted)
            for row in of_kind:
                begins, ends = (round(t.timestamp() * 1e6) for t in (row.begins_at, row.ends_at))
                spent = sum(max(0, min(e, ends) - max(b, begins)) for b, e in counted)
                spending = budgets.spending_of(row)
                assert row.spent_us == spent
                whole = row.granted_us + (row.carried_us or 0) + spending.adjusted_us
                assert spending.spent_us + spending.left_us == whole
        adjusted = sum(budgets.spending_of(row).adjusted_us for row in found)
        assert adjusted == added[owner.id]
