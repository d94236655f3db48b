"""What the API and the pages say, against real Postgres.  Devices hold tasks as in the picture."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import func, select, update

from app.db.models import Account, Host, LogLine, Metric, Placement, Usage, User
from app.insight import reports
from app.insight.reports import KindShare, TenantShare, UsageRow
from tests.scenery import Scenery

HOUR_US = 3600 * 10**6


@pytest.fixture
def scenery(session):
    return Scenery(session)


@pytest.fixture
def now(session):
    return reports.clock(session)


def by_name(session, now):
    return {share.tenant: share for share in reports.fair_share(session, now)}


class TestFairShare:
    def test_devices_are_shared_by_weight_among_tenants_with_work(self, session, scenery, now):
        a, b = scenery.tenant("a"), scenery.tenant("b")
        c, _ = scenery.tenant("c", 2000), scenery.tenant("idle", 4000)
        scenery.device("d0"), scenery.device("d1")
        scenery.task(a, "running", seat="d0")
        scenery.task(b, "running", seat="d1")
        for tenant in (a, b, c, c):
            scenery.task(tenant)
        shares = by_name(session, now)
        assert [(s.fair, s.held, s.waiting) for s in shares.values()] == [
            (0.5, 1, 1),  # a: 2 devices * 1 / (1 + 1 + 2); the idle one's weight does not count
            (0.5, 1, 1),
            (1.0, 0, 2),
            (0.0, 0, 0),
        ]
        assert [s.share for s in shares.values()] == [1 / 8, 1 / 8, 2 / 8, 4 / 8]
        assert shares["idle"].kinds[0].by_weight == 1.0

    def test_only_devices_that_take_work_count(self, session, scenery, now):
        a = scenery.tenant("a")
        scenery.device("up")
        scenery.device("down", lease_s=-1)
        scenery.device("cordoned", cordoned=True)
        for _ in range(4):
            scenery.task(a)
        assert by_name(session, now)["a"].kinds[0].devices == 1
        assert by_name(session, now)["a"].fair == 1.0
        session.execute(update(Host).values(cordoned=True))
        assert by_name(session, now)["a"].kinds[0].devices == 0

    def test_kinds_of_devices_are_divided_apart(self, session, scenery, now):
        a, b = scenery.tenant("a"), scenery.tenant("b")
        scenery.device("c0"), scenery.device("g0", kind="cuda"), scenery.device("g1", kind="cuda")
        scenery.task(a)
        scenery.task(a, kind="cuda")
        scenery.task(b, kind="cuda"), scenery.task(b, kind="cuda")
        shares = by_name(session, now)
        assert [(k.kind, k.fair) for k in shares["a"].kinds] == [("cpu", 1.0), ("cuda", 1.0)]
        assert [(k.kind, k.fair) for k in shares["b"].kinds] == [("cpu", 0.0), ("cuda", 1.0)]

    def test_task_told_to_leave_holds_its_device_until_it_has_left(self, session, scenery, now):
        a, b = scenery.tenant("a"), scenery.tenant("b")
        scenery.device("d0")
        pausing = scenery.task(a, "pausing", seat="d0")
        scenery.task(b, "starting", seat="d0")
        assert [s.held for s in by_name(session, now).values()] == [1, 0]
        ended = update(Placement).where(Placement.task_id == pausing.id)
        session.execute(ended.values(ended_at=func.now()))
        assert [s.held for s in by_name(session, now).values()] == [0, 1]

    def test_usage_is_that_of_the_ledger_and_fades(self, session, scenery, now):
        a = scenery.tenant("a", 2000)
        scenery.device("d0", cost_milli=3000)
        scenery.charge(scenery.task(a, "running", seat="d0"), 10 * 10**6)
        share = by_name(session, now)["a"]
        assert share.total_us == 30 * 10**6  # 10 s at three times the cost
        assert share.total_us == session.scalar(select(func.sum(Account.total_us)))
        assert share.total_us == session.scalar(select(func.sum(Usage.charged_us)))
        assert share.usage_us == pytest.approx(share.total_us, abs=1)
        assert share.score == share.usage_us / 2
        week_later = by_name(session, now + timedelta(days=7))["a"]
        assert week_later.usage_us == pytest.approx(share.total_us / 2, abs=1)
        assert week_later.total_us == share.total_us

    def test_other_tenants_are_shown_as_one_without_a_name(self, session, scenery, now):
        a, b, c = scenery.tenant("a"), scenery.tenant("b"), scenery.tenant("c", 2000)
        scenery.device("d0"), scenery.device("d1")
        scenery.task(b, "running", seat="d0")
        scenery.task(c, "running", seat="d1")
        scenery.task(c), scenery.task(a)
        shares = reports.fair_share(session, now)
        rest = reports.others(shares, a.id)
        assert (rest.id, rest.tenant) == ("", "all others")
        assert (rest.held, rest.waiting, rest.weight) == (2, 1, 3.0)
        assert rest.fair + shares[0].fair == 2.0
        assert rest.kinds[0].devices == 2

    def test_empty_system_is_no_error(self, session, now):
        assert reports.fair_share(session, now) == []
        assert reports.others([], "nobody").kinds == ()
        assert (
            reports.verdict_of_all([])
            == "0 of 0 devices in use. 0 of 0 tenants have work. No task waits."
        )


def one_kind(id, *, devices=2, fair=1.0, held=0, waiting=0, score=0.0):
    kind = KindShare(
        kind="cpu", devices=devices, by_weight=devices / 3, fair=fair, held=held, waiting=waiting
    )
    return TenantShare(
        id=id, tenant=id, weight=1.0, share=1 / 3, fair=fair, held=held, waiting=waiting,
        usage_us=int(score), total_us=0, score=score, kinds=(kind,),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("devices", "fair", "held", "waiting", "said"),
    [
        (2, 1.0, 1, 3, "1 of 2 devices in use by you. 3 tasks wait."),
        (3, 1.0, 1, 0, "1 of 3 devices in use by you. No task waits."),
        (2, 0.0, 0, 0, "Nothing of yours runs or is queued. By weight, 0.67 of 2 devices are "
            "yours, plus idle devices of others."),
        (0, 0.0, 0, 3, "No device takes work now. 3 tasks wait."),
        (0, 0.0, 0, 0, "No device takes work now. No task waits."),
    ],
)  # fmt: skip
def test_the_verdict_says_what_is_in_use_and_queued(devices, fair, held, waiting, said):
    share = one_kind("t", devices=devices, fair=fair, held=held, waiting=waiting)
    idle = one_kind("idle", devices=devices, fair=0.0)
    assert reports.verdict(share, [share, idle]) == said


FIRST = " Tenants with less recent usage run first."
YOURS = " You have less recent usage than others, so you run first."
THEIRS = " Tenants with less recent usage are queued and run next."


@pytest.mark.parametrize(
    ("waiting", "score", "held", "said"),
    [
        (waiting, score, held, said)
        for waiting, score, saids in [
            (1, 5, (YOURS, YOURS, YOURS)),
            (1, 10, ("", "", "")),
            (1, 20, (FIRST, FIRST, FIRST)),
            (0, 5, (None, "", "")),
            (0, 10, (None, "", "")),
            (0, 20, (None, "", THEIRS)),
        ]
        for held, said in enumerate(saids)
    ],
)
def test_verdict_compares_faded_usage_like_the_scheduler(waiting, score, held, said):
    mine = one_kind("t", fair=1.0, held=held, waiting=waiting, score=score)
    rival = one_kind("r", fair=1.0, held=2 - held, waiting=1, score=10)
    told = reports.verdict(mine, [mine, rival])
    if said is None:
        assert told.startswith("Nothing of yours runs or is queued")
    else:
        assert told.removesuffix(said).endswith((" wait.", " waits."))


@pytest.mark.parametrize(
    ("rivals", "said"),
    [
        ([("holds", 1, 0, 5)], FIRST),  # it keeps its device
        ([("holds", 1, 0, 5), ("holds too", 1, 0, 20)], YOURS),  # the one with more gives way
        ([("holds", 2, 0, 20), ("waits", 0, 1, 5)], FIRST),
        ([("holds", 2, 0, 20), ("idle", 0, 0, 5)], YOURS),
        ([("idle", 0, 0, 5)], ""),
    ],
)
def test_only_other_tenants_with_work_count(rivals, said):
    used = sum(held for _, held, _, _ in rivals)
    mine = one_kind("t", held=2 - used, waiting=1, score=10)
    rest = [one_kind(id, held=held, waiting=wait, score=score) for id, held, wait, score in rivals]
    assert reports.verdict(mine, [mine, *rest]).endswith(f" 1 task waits.{said}")


def test_others_run_next_only_if_a_task_of_theirs_is_queued():
    mine = one_kind("t", fair=1.0, held=2, score=20)
    idle = one_kind("idle", fair=1.0, held=0, waiting=0, score=5)
    assert reports.verdict(mine, [mine, idle]).endswith(" No task waits.")


class TestQueue:
    def test_queue_has_waiting_and_blocked_tasks_oldest_first(self, session, scenery):
        a = scenery.tenant("a")
        blocked = scenery.task(a, "blocked", hold="user")
        later, urgent = scenery.task(a), scenery.task(a, priority=1)
        scenery.device("d0")
        scenery.task(a, "running", seat="d0")
        scenery.task(a, "done")
        found = reports.queue(session, a.id)
        assert [(item.id, item.place) for item in found] == [
            (blocked.id, None),
            (later.id, 2),
            (urgent.id, 1),
        ]
        assert [item.id for item in reports.queue(session, a.id, state="blocked")] == [blocked.id]
        assert reports.queue(session, None, kind="cuda") == []

    def test_next_page_begins_after_the_last_task_seen(self, session, scenery):
        a = scenery.tenant("a")
        tasks = [scenery.task(a, state) for state in ("waiting", "waiting", "blocked", "blocked")]
        for tenant in (None, a.id):
            seen, after = [], None
            while page := reports.queue(session, tenant, after=after, limit=3):
                seen += [item.id for item in page]
                after = page[-1].id
            assert seen == [task.id for task in tasks]

    def test_tenant_sees_its_own_queue_and_its_admin_those_below_too(self, session, scenery):
        a, b = scenery.tenant("a"), scenery.tenant("b")
        c = scenery.tenant("c", parent_id=a.id)
        for tenant in (a, b, c):
            scenery.task(tenant)
        assert [item.tenant for item in reports.queue(session, a.id)] == ["a"]
        assert [item.tenant for item in reports.queue(session, a.id, below=True)] == ["a", "c"]
        assert [item.tenant for item in reports.queue(session, None)] == ["a", "b", "c"]

    def test_paused_task_waits_since_it_left_its_device(self, session, scenery, now):
        a = scenery.tenant("a")
        task = scenery.task(a, submitted_at=now - timedelta(hours=1))
        assert reports.queue(session, a.id)[0].since == task.submitted_at
        task.waiting_since = now - timedelta(minutes=1)
        assert reports.queue(session, a.id)[0].since == task.waiting_since


class TestTree:
    def test_a_tenant_has_the_figures_of_all_below_it(self, session, scenery, now):
        a, b = scenery.tenant("a", guarantee={"cpu": 1}), scenery.tenant("b", 3000)
        x = scenery.tenant("x", parent_id=a.id, limit={"*": 1})
        y = scenery.tenant("y", 3000, parent_id=a.id)
        for n in range(4):
            scenery.device(f"d{n}")
        held = scenery.task(x, "running", seat="d0")
        scenery.charge(held, 10**7)
        scenery.task(y, "running", seat="d1")
        for tenant in (x, y, y, b, b, b, b, b):
            scenery.task(tenant)
        shares = reports.fair_share(session, now)
        told = [(s.depth, s.tenant, s.share, s.fair, s.held, s.borrowed, s.waiting) for s in shares]
        # 4 devices: a and b by weight 1 and 3; a's one by 1 and 3 again.
        assert told == [
            (0, "a", 1 / 4, 1.0, 2, 1, 3),
            (1, "x", 1 / 16, 0.25, 1, 1, 1),
            (1, "y", 3 / 16, 0.75, 1, 1, 2),
            (0, "b", 3 / 4, 3.0, 0, 0, 5),
        ]
        assert [(s.guarantee, s.kinds[0].limit) for s in shares] == [
            (1, None), (0, 1), (0, None), (0, None)
        ]  # fmt: skip
        assert shares[0].usage_us == shares[1].usage_us == 10**7
        assert [s.tenant for s in reports.within(shares, a.id)] == ["a", "x", "y"]
        rest = reports.others(shares, x.id)
        assert (rest.held, rest.waiting, rest.fair, rest.usage_us) == (1, 7, 3.75, 0)
        rest = reports.others(shares, a.id)
        assert (rest.held, rest.waiting, rest.fair) == (0, 5, 3.0)

    def test_guarantee_is_owed_before_weights_and_limits_hold(self, session, scenery, now):
        a = scenery.tenant("a", guarantee={"cpu": 3})
        b, c = scenery.tenant("b", limit={"cpu": 0}), scenery.tenant("c", 9000)
        for n in range(4):
            scenery.device(f"d{n}")
        for tenant in (a, a, a, a, b, c, c, c, c):
            scenery.task(tenant)
        assert [s.fair for s in reports.fair_share(session, now)] == [3.0, 0.0, 1.0]

    def test_the_verdict_compares_those_right_below_one_tenant(self, session, scenery, now):
        a, b = scenery.tenant("a"), scenery.tenant("b")
        x, y = scenery.tenant("x", parent_id=a.id), scenery.tenant("y", parent_id=a.id)
        scenery.device("d0"), scenery.device("d1")
        scenery.charge(scenery.task(y, "running", seat="d0"), 10**6)
        scenery.charge(scenery.task(b, "running", seat="d1"), 5 * 10**6)
        scenery.task(x)
        shares = {share.tenant: share for share in reports.fair_share(session, now)}
        told = reports.verdict(shares["x"], list(shares.values()))
        assert told == f"0 of 2 devices in use by you. 1 task waits.{YOURS}"


class TestDevices:
    def test_another_tenants_task_on_a_device_is_shown_as_taken_only(self, session, scenery, now):
        a, b = scenery.tenant("a"), scenery.tenant("b")
        for name in ("d0", "d1", "d2"):
            scenery.device(name)
        mine = scenery.task(a, "running", seat="d0")
        scenery.task(b, "running", seat="d1")
        seen = reports.devices(session, a.id, now)
        assert [(d.holder, d.yours) for d in seen] == [
            ("a", True),
            ("another tenant", False),
            (None, False),
        ]
        assert seen[0].task.id == mine.id
        assert seen[1].task is None
        assert seen[1].since is None
        assert [d.holder for d in reports.devices(session, None, now)] == ["a", "b", None]

    def test_tasks_with_fractions_of_a_device_are_all_shown(self, session, scenery, now):
        a, b = scenery.tenant("a"), scenery.tenant("b")
        scenery.device("d0")
        mine = scenery.task(a, "running", seat="d0", device_choice="%500")
        scenery.task(b, "running", seat="d0", device_choice="%250")
        [seen] = reports.devices(session, a.id, now)
        assert [(f.fraction, f.holder, f.task and f.task.id) for f in seen.fractions] == [
            ("0.5", "a", mine.id),
            ("0.25", "another tenant", None),
        ]
        [seen] = reports.devices(session, None, now)
        assert [f.holder for f in seen.fractions] == ["a", "b"]

    def test_device_that_takes_no_work_is_marked(self, session, scenery, now):
        scenery.device("d0"), scenery.device("d1", lease_s=-1), scenery.device("d2", cordoned=True)
        scenery.device("d3", facts={"stopping": True})
        scenery.device("d4", facts={"stopping": True}, cordoned=True)
        seen = reports.devices(session, None, now)
        states = ["up", "down", "cordoned", "stopping", "cordoned"]
        assert [device.state for device in seen] == states


class TestUsage:
    @pytest.fixture
    def booked(self, session, scenery):
        a, b = scenery.tenant("a"), scenery.tenant("b")
        ann = scenery.user("ann", a)
        noon = datetime(2026, 11, 21, 12, tzinfo=UTC)
        rows = [
            (noon, a, None, 10),
            (noon + timedelta(seconds=10), a, ann, 20),
            (noon + timedelta(hours=1), a, ann, 40),
            (noon, b, None, 80),
        ]
        for at, tenant, user, held_us in rows:
            user = user or session.scalars(select(User).where(User.name == tenant.name)).one()
            scenery.add(
                Usage(
                    bucket=at, bucket_s=10, tenant_id=tenant.id, user_id=user.id,
                    kind="cpu", held_us=held_us, charged_us=2 * held_us,
                )
            )  # fmt: skip
        return noon, a

    def ask(self, session, tenant, noon, *, hours=24, group_by=(), interval_s=3600):
        return reports.usage(
            session, tenant, since=noon, until=noon + timedelta(hours=hours),
            group_by=group_by, interval_s=interval_s,
        )  # fmt: skip

    def test_every_grouping_adds_up_to_the_same(self, session, booked):
        noon, _ = booked
        for groups in ((), ("tenant",), ("user", "kind"), reports.GROUPS):
            rows = self.ask(session, None, noon, group_by=groups)
            assert sum(row.held_us for row in rows) == 150
            assert sum(row.charged_us for row in rows) == 300

    def test_two_tenants_of_one_name_are_not_added_up(self, session, scenery, booked):
        noon, a = booked
        inner = scenery.tenant(a.name, parent_id=a.id)
        [user] = session.scalars(select(User).where(User.tenant_id == inner.id))
        scenery.add(
            Usage(
                bucket=noon, bucket_s=10, tenant_id=inner.id, user_id=user.id,
                kind="cpu", held_us=5, charged_us=5,
            )
        )  # fmt: skip
        rows = self.ask(session, None, noon, group_by=("tenant",))
        assert sorted(row.held_us for row in rows if row.tenant == a.name) == [5, 70]

    def test_buckets_are_whole_intervals(self, session, booked):
        noon, a = booked
        rows = self.ask(session, a.id, noon, group_by=("bucket", "user"))
        assert rows == [
            UsageRow(bucket=noon, user="a", held_us=10, charged_us=20),
            UsageRow(bucket=noon, user="ann", held_us=20, charged_us=40),
            UsageRow(bucket=noon + timedelta(hours=1), user="ann", held_us=40, charged_us=80),
        ]

    def test_the_end_is_not_counted(self, session, booked):
        noon, a = booked
        assert self.ask(session, a.id, noon, hours=1)[0].held_us == 30

    def test_no_usage_is_no_error(self, session, scenery, now):
        a = scenery.tenant("a")
        assert self.ask(session, a.id, now) == [UsageRow(held_us=0, charged_us=0)]
        assert self.ask(session, a.id, now, group_by=("user",)) == []

    def test_csv_has_the_same_rows(self, session, booked):
        noon, a = booked
        rows = self.ask(session, a.id, noon, group_by=("bucket", "user"))
        assert reports.to_csv(rows, ("user", "bucket")).splitlines() == [
            "bucket,user,held_us,charged_us",
            "2026-11-21T12:00:00+00:00,a,10,20",
            "2026-11-21T12:00:00+00:00,ann,20,40",
            "2026-11-21T13:00:00+00:00,ann,40,80",
        ]


class TestRequests:
    def test_list_of_requests_sums_up_their_tasks(self, session, scenery):
        a = scenery.tenant("a")
        task = scenery.task(a, total_held_us=5, held_us=2, pauses=3, lost_steps=4)
        line = reports.request(session, a.id, task.request_id)
        assert (line.phase, line.tasks) == ("queued", {"queued": 1})
        assert (line.total_held_us, line.pauses, line.lost_steps) == (7, 3, 4)

    def test_newest_requests_come_first_page_by_page(self, session, scenery):
        a = scenery.tenant("a")
        ids = [scenery.task(a).request_id for _ in range(3)]
        first = reports.requests(session, a.id, limit=2)
        assert [line.id for line in first] == [ids[2], ids[1]]
        assert [line.id for line in reports.requests(session, a.id, before=ids[1])] == [ids[0]]
        assert reports.requests(session, a.id, phase="failed") == []

    def test_request_of_another_tenant_is_not_found(self, session, scenery):
        a, b = scenery.tenant("a"), scenery.tenant("b")
        task = scenery.task(a)
        assert reports.request(session, b.id, task.request_id) is None
        assert reports.request(session, None, task.request_id).name == f"request of {task.name}"

    @pytest.mark.parametrize(
        ("rows", "points"), [(1000, 100), (1003, 100), (295, 200), (391, 200), (736, 200)]
    )
    def test_a_long_curve_is_thinned_evenly_whatever_its_length(
        self, session, scenery, rows, points
    ):
        task = scenery.task(scenery.tenant("a"), name="train")
        told = {step: 1 / step for step in range(1, rows + 1)}
        told[rows // 2] = 99.0
        told[rows // 2 + 3] = -7.0
        for step, loss in told.items():
            session.add(Metric(task_id=task.id, step=step, values={"loss": loss, "note": "x"}))
        session.flush()
        (curve,) = reports.curves(session, task.request_id, points=points)
        assert (curve.task, curve.name) == ("train", "loss")
        assert 0.9 * points <= len(curve.points) <= points + 4
        assert all(told[step] == value for step, value in curve.points)
        steps = [step for step, _ in curve.points]
        assert (steps[0], steps[-1]) == (1, rows)
        gaps = [later - earlier for earlier, later in itertools.pairwise(steps)]
        assert max(gaps) <= 2 * rows / (points / 2)
        values = [value for _, value in curve.points]
        assert (max(values), min(values)) == (99.0, -7.0)

    def test_a_short_curve_is_every_row_and_only_finite_numbers(self, session, scenery):
        task = scenery.task(scenery.tenant("a"), name="train")
        told = {0: 0.1, 7: 10**400, 8: True, 9: "nan", 2**62: 3, 2**62 + 1: -1e300}
        for step, loss in told.items():
            session.add(Metric(task_id=task.id, step=step, values={"loss": loss}))
        session.flush()
        (curve,) = reports.curves(session, task.request_id)
        assert curve.points == ((0, 0.1), (2**62, 3.0), (2**62 + 1, -1e300))
        assert reports.curves(session, task.request_id, points=3)

    def test_end_of_the_log_is_shown_in_order(self, session, scenery):
        task = scenery.task(scenery.tenant("a"), name="train")
        for n in range(5):
            session.add(
                LogLine(task_id=task.id, epoch=1, line=n, stream="stdout", text=f"line {n}")
            )
            session.flush()
        tail = reports.log_tail(session, task.request_id, limit=2)
        assert [said.text for said in tail] == ["line 3", "line 4"]


def test_tasks_of_a_request_beyond_the_limit_leave_out_those_that_are_done(session, scenery):
    tenant = scenery.tenant("a")
    tasks = [scenery.task(tenant, state) for state in ("done", "failed", "done", "waiting")]
    request = tasks[0].request_id
    for ordinal, task in enumerate(tasks):
        task.request_id, task.ordinal = request, ordinal
    session.flush()

    def shown(limit: int) -> list[str]:
        return [task.state for task in reports.tasks(session, request, limit=limit)]

    assert shown(4) == ["done", "failed", "done", "waiting"]
    assert shown(3) == ["done", "failed", "waiting"]
    assert shown(1) == ["failed"]
