"""Usage of any period is the sum of its rows, whether these are read by day or one by one."""

from __future__ import annotations

import random
from collections import defaultdict
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import func, select, update

from app.db.models import DailyUsage, Tenant, Usage, User
from app.insight import reports
from app.insight.reports import UsageRow
from app.scheduling import housekeeping
from tests.scenery import Scenery
from tests.thoroughness import rest_long

DAY = timedelta(days=1)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SPAN_DAYS = 6  # days in which the rows lie; those of the last two stay fine


@pytest.fixture
def now(session):
    return reports.clock(session)


def _people(session) -> list[tuple[Tenant, User]]:
    """Three users of two tenants; two users have the same name."""
    scenery = Scenery(session)
    a, b = scenery.tenant("a"), scenery.tenant("b")
    return [(t, scenery.user(name, t)) for t, name in ((a, "ann"), (a, "bob"), (b, "ann"))]


def _book(session, dice, people, now, count) -> None:
    """Book rows of all widths, some at the very beginning of a day or of an hour."""
    for _ in range(count):
        tenant, user = dice.choice(people)
        at = now - dice.random() * SPAN_DAYS * DAY
        width_s = dice.choice([1, 10, 10, 10, 3600, 7200, 86400])
        at = _floor(at, dice.choice([width_s, width_s, 3600, 86400]))
        keys = {
            "bucket": at, "tenant_id": tenant.id, "user_id": user.id,
            "kind": dice.choice(["cpu", "cuda"]), "bucket_s": width_s,
        }  # fmt: skip
        held_us = dice.randrange(1, 10**15)
        if row := session.get(Usage, keys, populate_existing=True):
            row.held_us, row.charged_us = row.held_us + held_us, row.charged_us + 3 * held_us
        else:
            session.add(Usage(**keys, held_us=held_us, charged_us=3 * held_us))
        session.flush()


def _roll_up_all(session) -> None:
    for _ in range(24 * SPAN_DAYS):  # hours, of which one is rolled up at a time
        housekeeping.roll_up(session)


def _floor(at: datetime, width_s: int) -> datetime:
    return at - (at - EPOCH) % timedelta(seconds=width_s)


def _period(dice, now) -> tuple[datetime, datetime]:
    """Draw a period that begins and ends within, at, or just beside a day or an hour."""
    ends = set[datetime]()
    while len(ends) < 2:
        at = now + DAY - dice.random() * (SPAN_DAYS + 2) * DAY
        at = _floor(at, dice.choice([1, 3600, 86400, 86400]))
        ends.add(at + dice.choice([-1, 0, 0, 0, 1]) * timedelta(microseconds=1))
    since, until = sorted(ends)
    return since, until


def _summed(session, tenant, since, until, groups, interval_s) -> list[UsageRow]:
    """Sum up the rows of `usage` one by one."""
    sums: dict[tuple, list[int]] = defaultdict(lambda: [0, 0])
    rows = select(Usage, Tenant.name, User.name).join(Tenant, Tenant.id == Usage.tenant_id)
    for row, owner, user in session.execute(rows.join(User, User.id == Usage.user_id)):
        if since <= row.bucket < until and tenant in (None, row.tenant_id):
            values = (_floor(row.bucket, interval_s), owner, user, row.kind)
            named = dict(zip(reports.GROUPS, values, strict=True))
            key = tuple(named[name] if name in groups else None for name in reports.GROUPS)
            sums[key][0] += row.held_us
            sums[key][1] += row.charged_us
    if not groups and not sums:
        sums[None, None, None, None]  # without groups there is always one sum
    return [
        UsageRow(
            bucket=at, tenant=owner, user=user, kind=kind, held_us=held_us, charged_us=charged_us
        )
        for (at, owner, user, kind), (held_us, charged_us) in sorted(
            sums.items(), key=lambda item: tuple(str(part) for part in item[0])
        )
    ]


@pytest.mark.parametrize("seed", rest_long(range(6), keep=2))
def test_usage_of_any_period_is_the_sum_of_its_rows(session, now, seed):
    dice = random.Random(seed)
    people = _people(session)
    for _ in range(3):  # old rows are rolled up, and later ones are added to the same hours
        _book(session, dice, people, now, 60)
        _roll_up_all(session)
        session.expire_all()
    assert session.scalar(select(func.count()).where(Usage.bucket_s < 3600))
    assert session.scalar(select(func.count()).where(DailyUsage.held_us > 0))
    for _ in range(60):
        since, until = _period(dice, now)
        tenant = dice.choice([None, *(tenant.id for tenant, _ in people)])
        groups = [name for name in reports.GROUPS if dice.random() < 0.5]
        interval_s = dice.choice([*reports.INTERVALS.values(), 86400, 86400])
        asked = {"since": since, "until": until, "group_by": groups, "interval_s": interval_s}
        told = reports.usage(session, tenant, **asked)
        assert told == _summed(session, tenant, since, until, groups, interval_s), asked


@pytest.mark.parametrize("seed", rest_long(range(3)))
def test_sums_of_days_are_those_of_the_hours(session, now, seed):
    dice = random.Random(seed)
    people = _people(session)
    for _ in range(3):
        _book(session, dice, people, now, 50)
        _roll_up_all(session)
        session.expire_all()
    day = func.date_bin(DAY, Usage.bucket, EPOCH)
    keys = (day, Usage.tenant_id, Usage.user_id, Usage.kind)
    sums = (func.sum(Usage.held_us), func.sum(Usage.charged_us))
    hours = select(*keys, *sums).where(Usage.bucket_s >= 3600).group_by(*keys)
    found = {tuple(row) for row in session.execute(hours)}
    assert {tuple(row) for row in session.execute(select(DailyUsage.__table__))} == found


def test_whole_days_are_read_from_their_sums_unless_smaller_intervals_are_asked_for(session, now):
    [(tenant, user), *_] = _people(session)
    start = _floor(now, 86400) - 4 * DAY
    for hour in range(72):
        at = start + timedelta(hours=hour)
        keys = {"tenant_id": tenant.id, "user_id": user.id, "kind": "cpu", "bucket_s": 3600}
        session.add(Usage(bucket=at, **keys, held_us=1, charged_us=1))
    session.flush()
    session.execute(update(DailyUsage).values(held_us=DailyUsage.held_us + 1000))  # to be seen

    def held_us(since, until, **asked) -> list[int]:
        asked = {"group_by": (), "interval_s": 3600, **asked}
        return [
            row.held_us for row in reports.usage(session, None, since=since, until=until, **asked)
        ]

    since, until = start + timedelta(hours=1), start + timedelta(hours=71)
    assert held_us(since, until) == [23 + 1024 + 23]
    by_day = {"group_by": ("bucket",), "interval_s": 86400}
    assert held_us(since, until, **by_day) == [23, 1024, 23]
    assert held_us(since, until, group_by=("bucket",)) == [1] * 70
    assert held_us(since, since + timedelta(hours=30)) == [30]  # no day is whole


@pytest.mark.parametrize("since", [datetime.min, datetime.max - timedelta(hours=2)])
def test_periods_at_the_ends_of_time_are_read(session, since):
    since = since.replace(tzinfo=UTC)
    until = since + timedelta(hours=1)
    asked = {"group_by": (), "interval_s": 86400}
    assert reports.usage(session, None, since=since, until=until, **asked)[0].held_us == 0
