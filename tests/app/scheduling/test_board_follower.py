"""A board that follows the rows is the board that is made of all of them."""

from __future__ import annotations

import random

import pytest
from sqlalchemy import func, select, text

from app.core.fairness import usage_decay
from app.core.model.snapshot import GangWait, Plan, PlanDecision
from app.core.scheduling.board import Board
from app.core.scheduling.cycle import cycle
from app.core.scheduling.record import as_json, from_json, seen_by
from app.db import transactions
from app.db.models import (
    Account,
    Device,
    Host,
    Island,
    Lift,
    Line,
    Need,
    Placement,
    Request,
    Task,
    Tenant,
    Usage,
    User,
)
from app.insight import reports
from app.scheduling import board_follower, journal, ledger, snapshot_reader
from app.scheduling.board_follower import BEGINNING, MORE, Follower
from tests.thoroughness import rest_long

DESCRIPTOR = {
    "name": "train",
    "run": {"job": "train:Train"},
    "max_duration_s": 100.0,
    "checkpoint": {"every_s": 60.0, "keep": 3},
}


@pytest.fixture
def isle(session):
    """Two tenants below the root, three users, three devices."""
    session.add(Island(name="isle"))
    session.add(Tenant(id="root", name="platform"))
    session.flush()
    session.add_all([Tenant(id=f"ten_{x}", name=x, parent_id="root") for x in "ab"])
    session.add(Host(name="h", island="isle"))
    session.flush()
    for user, tenant in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        session.add(User(id=user, tenant_id=f"ten_{tenant}", name=user))
    for n in range(3):
        session.add(Device(id=f"h.{n}", host="h", island="isle", kind="cpu"))
    session.flush()
    session.execute(text("update devices set lease_until = now() + interval '1 day'"))
    return Follower("isle")


def add(session, name, user, *, state="blocked", **more):
    tenant = session.get_one(User, user).tenant_id
    request = Request(
        id=f"req_{name}",
        tenant_id=tenant,
        user_id=user,
        name=name,
        descriptor={"bundle": "sha256:" + "0" * 64},
    )
    session.add(request)
    session.flush()
    task = Task(
        id=f"tsk_{name}",
        request_id=request.id,
        tenant_id=tenant,
        user_id=user,
        island="isle",
        ordinal=0,
        name=name,
        type="train",
        kind="cpu",
        state=state,
        descriptor=DESCRIPTOR,
        **more,
    )
    session.add(task)
    session.flush()
    return task


def forget(session):
    """What SQL changed behind the session's back is read again."""
    session.flush()
    session.expire_all()


def a_round(session, follower):
    """One round as the island makes it; returns the decisions."""
    forget(session)
    now_s = transactions.now_s(session)
    board = follower.look(session, now_s=now_s)
    plan = follower.cycle(session, board)
    assert journal.store(session, plan)
    journal.settle(session)
    return [(decision.task, str(decision.move)) for decision in plan.decisions]


def of_all(session):
    """What a board made of all rows decides."""
    forget(session)
    now_s = transactions.now_s(session)
    plan = cycle(Board.of(snapshot_reader.load(session, "isle", now_s=now_s), now_s=now_s))
    return [(decision.task, str(decision.move)) for decision in plan.decisions]


_RENEWED_BUT_THE_LAST = text(
    "update devices set lease_until ="
    " to_timestamp(case when id = 'h.2' then :ends else :at + 20 end)"
)


def as_if_long_ago(session):
    """Let all devices look as if an early transaction had changed them last."""
    session.execute(text("update devices set txid = '3'"))


def is_marked(session, change):
    """True if this change of a device's row marks the row as changed."""
    as_if_long_ago(session)
    session.execute(text(f"update devices set {change} where id = 'h.0'"))
    return session.scalar(text("select txid <> '3'::xid8 from devices where id = 'h.0'"))


OF_A_LEASE = ("heard_us", "lease_until", "lease_us", "seen_at")


@pytest.mark.parametrize(
    "column", [column.name for column in Device.__table__.columns if column.name != "txid"]
)
def test_each_column_but_those_of_a_lease_marks_its_device(session, isle, column):
    assert is_marked(session, f"{column} = {column}") == (column not in OF_A_LEASE)


@pytest.mark.parametrize(
    ("before", "after", "marks"),
    [
        ("now() + interval '9 s'", "now() + interval '15 s'", False),
        ("now() + interval '9 s'", "now() + interval '8 s'", True),
        ("now() + interval '1 s'", "now() + interval '15 s'", True),
        ("now() - interval '9 s'", "now() + interval '15 s'", True),
        ("null", "now() + interval '15 s'", True),
        ("now() + interval '9 s'", "null", True),
    ],
    ids=["in time", "shortened", "late", "too late", "first", "none any more"],
)
def test_only_a_lease_that_is_renewed_in_time_marks_nothing(session, isle, before, after, marks):
    session.execute(text(f"update devices set lease_until = {before}"))
    assert is_marked(session, f"lease_until = {after}, heard_us = 7, seen_at = now()") == marks


class TestFollowing:
    def test_first_look_reads_running_and_waiting_tasks_and_those_that_may_start(
        self, session, isle
    ):
        for n in range(5):
            add(session, f"t{n}", "a1")
        expected = of_all(session)
        assert len(expected) == 5 + 3  # five are unlocked, three find a device
        assert a_round(session, isle) == expected

    def test_later_looks_read_only_changes(self, session, isle):
        a_round(session, isle)
        add(session, "new", "b1")
        assert a_round(session, isle) == [("tsk_new", "Unlocked"), ("tsk_new", "Launch")]
        assert a_round(session, isle) == []

    def test_requested_action_is_seen(self, session, isle):
        task = add(session, "t", "a1")
        a_round(session, isle)
        task.cancel_asked_at = text("now()")
        assert a_round(session, isle) == [("tsk_t", "Cancel")]

    def test_task_starts_when_the_task_it_needed_is_done(self, session, isle):
        first, second = add(session, "first", "a1"), add(session, "second", "a1")
        session.add(Need(task_id=second.id, needs_id=first.id))
        a_round(session, isle)
        assert a_round(session, isle) == []
        session.execute(text("update placements set ended_at = now(), \"end\" = 'finished'"))
        session.execute(text("update tasks set state = 'done', seat = null where name = 'first'"))
        assert a_round(session, isle) == [("tsk_second", "Unlocked"), ("tsk_second", "Launch")]

    @pytest.mark.parametrize("given", [None, "1"])
    @pytest.mark.parametrize("end", ["failed", "cancelled"])
    def test_partition_ends_when_the_maker_of_its_late_input_fails(self, session, isle, end, given):
        """It may run, wait or be blocked; if it was given the input, it goes on."""
        maker, *takers = (add(session, f"t{n}", "a1") for n in range(5))
        for task in takers:
            task.descriptor = {**DESCRIPTOR, "run": {"graph": f"sha256:{0:064}", "part": {}}}
            need = {"task_id": task.id, "needs_id": maker.id, "port": "b0", "given": given}
            session.add(Need(late=task is not takers[-1], **need))
        a_round(session, isle)  # three devices: the maker and two takers start
        session.execute(text("update tasks set state = 'running' where state = 'starting'"))
        assert a_round(session, isle) == []
        session.execute(text("update placements set ended_at = now() where task_id = 'tsk_t0'"))
        session.execute(text(f"update tasks set state = '{end}', seat = null where name = 't0'"))
        decided = sorted(a_round(session, isle))
        if given:
            assert decided == [("tsk_t3", "Launch")]
        else:
            given_up = [("tsk_t3", "GaveUp"), ("tsk_t4", "GaveUp")]
            assert decided == [("tsk_t1", "Pause"), ("tsk_t2", "Pause"), *given_up]
            session.execute(text("update placements set ended_at = now()"))
            left = "update tasks set state = 'waiting', seat = null where state = 'pausing'"
            session.execute(text(left))
            assert sorted(a_round(session, isle)) == [("tsk_t1", "GaveUp"), ("tsk_t2", "GaveUp")]

    def test_task_is_unblocked_when_its_start_time_comes(self, session, isle):
        task = add(session, "t", "a1")
        session.execute(text("update tasks set not_before = now() + interval '1 hour'"))
        assert a_round(session, isle) == []
        session.execute(
            text("update tasks set not_before = now() - interval '1 s', txid = '3'::xid8")
        )
        assert a_round(session, isle) == [(task.id, "Unlocked"), (task.id, "Launch")]

    def test_a_weight_and_a_cordon_are_seen(self, session, isle):
        a_round(session, isle)
        session.get_one(Tenant, "ten_b").weight_milli = 5000
        session.get_one(Device, "h.0").cordoned = True
        a_round(session, isle)
        assert isle.board.tenants["ten_b"].weight == 5000
        assert isle.board.devices["h.0"].cordoned

    def test_device_whose_worker_stops_is_seen_and_takes_no_work(self, session, isle):
        for device in session.scalars(select(Device)):
            device.facts = {"stopping": True}
        task = add(session, "t", "a1")
        assert (task.id, "Launch") not in a_round(session, isle)
        seen = isle.board.devices["h.0"]
        assert (seen.cordoned, seen.stopping, seen.takes_work) == (False, True, False)
        session.get_one(Device, "h.0").facts = {}
        assert (task.id, "Launch") in a_round(session, isle)

    def test_lease_that_is_renewed_in_time_never_ends_on_the_board(self, session, isle):
        now_s = transactions.now_s(session)
        for passed_s in range(0, 120, 5):
            leases = {"at": now_s + passed_s, "ends": now_s + 60}
            session.execute(_RENEWED_BUT_THE_LAST, leases)
            as_if_long_ago(session)  # no row is read because of its mark
            forget(session)
            board = isle.look(session, now_s=now_s + passed_s)
            isle.since = 10**9  # a mark that a rolled-back session cannot have
            alive = [id for id in ("h.0", "h.1", "h.2") if board.alive(id)]
            assert alive == ["h.0", "h.1", "h.2"][: 3 if passed_s < 60 else 2]

    def test_tenant_moved_in_the_tree_makes_the_board_be_read_anew(self, session, isle):
        a_round(session, isle)
        session.get_one(Tenant, "ten_b").parent_id = "ten_a"
        before = isle.board
        a_round(session, isle)
        assert isle.board is not before
        assert isle.board.path_of("ten_b") == ("ten_a", "ten_b")


def test_story_of_a_task_outlasts_a_board_that_is_read_anew(session, isle):
    a_round(session, isle)
    task = add(session, "t", "a1", state="waiting")
    a_round(session, isle)
    task.state = "running"
    isle.forget()
    a_round(session, isle)  # all is read anew, so nothing is told of it
    task.hold = "user"
    a_round(session, isle)
    assert [line.split("  ")[-1] for line in isle.board.story.of("tsk_t")] == [
        "read(waiting) 0",
        "Launch F3(h.0) starting",
        "Pause hold(h.0) pausing",
    ]


def test_waits_of_gangs_outlast_a_board_that_is_read_anew(session, isle):
    a_round(session, isle)
    wait = GangWait(kind="cpu", again_s=isle.board.now_s + 900.0)
    isle.board.waits = {"cpu": wait}
    isle.forget()
    a_round(session, isle)
    assert isle.board.waits == {"cpu": wait}


class TestLongLines:
    def test_only_the_beginning_of_a_long_line_is_read(self, session, isle):
        for n in range(30):
            add(session, f"t{n:03}", "a1", priority=n % 3)
        a_round(session, isle)
        isle.forget()
        a_round(session, isle)
        waiting = [task for task in isle.board.tasks.values() if task.state == "waiting"]
        assert len(waiting) == BEGINNING
        assert {task.priority for task in waiting} == {2}

    def test_more_of_a_line_is_read_when_it_runs_out(self, session, isle):
        names = [add(session, f"t{n:03}", "a1").id for n in range(BEGINNING + 2 * MORE + 3)]
        a_round(session, isle)
        isle.forget()
        launched = []
        while True:
            session.execute(text("update placements set ended_at = now()"))
            session.execute(
                text("update tasks set state = 'done', seat = null where state = 'starting'")
            )
            decided = [task for task, move in a_round(session, isle) if move == "Launch"]
            if not decided:
                break
            launched += decided
        assert launched == names[3:]

    def test_lines_that_run_out_together_are_read_on_together(self, session, isle, monkeypatch):
        for n in range(2 * BEGINNING):
            add(session, f"one_{n}", "a1")
            add(session, f"other_{n}", "a2")
        a_round(session, isle)
        for n in range(3, 3 + 2 * BEGINNING):
            session.add(Device(id=f"h.{n}", host="h", island="isle", kind="cpu"))
        session.flush()
        session.execute(text("update devices set lease_until = now() + interval '1 day'"))
        isle.forget()
        asked, beyond = [], Follower._beyond

        def noted(self, ends, each):
            asked.append({leaf.name for leaf, _ in ends})
            return beyond(self, ends, each)

        monkeypatch.setattr(Follower, "_beyond", noted)
        a_round(session, isle)
        assert asked == [{"a1", "a2"}]

    def test_new_task_before_the_last_one_read_is_added(self, session, isle):
        for n in range(3 * BEGINNING):
            add(session, f"t{n:03}", "a1")
        a_round(session, isle)
        isle.forget()
        a_round(session, isle)
        late, urgent = add(session, "z_late", "a1"), add(session, "urgent", "a1", priority=9)
        a_round(session, isle)
        assert urgent.id in isle.board.tasks
        assert late.id not in isle.board.tasks

    def test_tasks_that_avoid_labels_do_not_hide_those_behind_them(self, session, isle):
        session.execute(text("""update devices set facts = '{"labels": ["spot"]}'"""))
        for n in range(3 * BEGINNING):
            add(session, f"t{n:03}", "a1", device_choice="-spot")
        add(session, "z_any", "a1")
        assert ("tsk_z_any", "Launch") in a_round(session, isle)
        isle.forget()
        session.execute(text("update devices set facts = '{}' where id = 'h.0'"))
        session.execute(text("update placements set ended_at = now()"))
        session.execute(text("update tasks set state = 'done', seat = null where id = 'tsk_z_any'"))
        assert a_round(session, isle) == [("tsk_t000", "Launch")]

    def test_tasks_in_lines_are_counted(self, session, isle):
        for n in range(7):
            add(session, f"t{n}", "a1")
        a_round(session, isle)
        assert session.scalars(select(Line.waiting)).all() == [4]


class TestCommitted:
    """With transactions that really commit, or do so late."""

    @pytest.fixture
    def world(self, committed):
        with transactions.transaction() as session:
            session.add_all([Island(name="isle"), Tenant(id="ten_a", name="a")])
            session.flush()
            session.add(User(id="a1", tenant_id="ten_a", name="ann"))
            session.flush()
            for n in range(20):
                add(session, f"t{n:02}", "a1")
        return Follower("isle")

    def look(self, follower):
        """The tasks whose rows were read."""
        with transactions.transaction() as session:
            board = follower.look(session, now_s=transactions.now_s(session))
            read = set(follower.blocked)
            plan = follower.cycle(session, board)
            assert journal.store(session, plan)
            journal.settle(session)
        return read

    def test_only_what_changed_is_read_again(self, world):
        assert len(self.look(world)) == 20
        self.look(world)  # what the first round itself wrote
        assert self.look(world) == set()
        with transactions.transaction() as session:
            add(session, "new", "a1")
        assert self.look(world) == {"tsk_new"}

    def test_limits_of_a_user_and_those_that_its_tenant_gives_are_seen(self, world):
        def limits():
            self.look(world)
            user = world.board.users["a1"]
            return user.limit, user.most_running

        assert limits() == ({}, None)
        with transactions.transaction() as session:
            session.get_one(Tenant, "ten_a").user_defaults = {"max_running": 3}
        assert limits() == ({}, 3)
        with transactions.transaction() as session:
            session.get_one(User, "a1").limit = {"cpu": 2}
        assert limits() == ({"cpu": 2}, 3)

    def test_change_committed_after_a_later_one_is_not_missed(self, world):
        self.look(world)
        with transactions.transaction() as slow:
            add(slow, "slow", "a1")
            with transactions.transaction() as quick:
                add(quick, "quick", "a1")
            assert self.look(world) == {"tsk_quick"}
        assert self.look(world) == {"tsk_slow"}

    def test_task_behind_those_that_begin_to_wait_in_the_same_transaction_is_read(self, world):
        """A board may be read anew in the round that also records tasks as lost."""
        self.look(world)  # 20 tasks wait
        ids = [f"tsk_t{n:02}" for n in range(BEGINNING + 1)]
        with transactions.transaction() as session:
            session.execute(text("update tasks set state = 'done' where id > :id"), {"id": ids[-1]})
            self.move(session, ids[:-1], "Locked")
            journal.settle(session)
            session.execute(text("update lines set waiting = 1"))
        world.forget()
        with transactions.transaction() as session:
            self.move(session, ids[:-1], "Unlocked")  # `lines` is written at the end only
            world.look(session, now_s=transactions.now_s(session))
            journal.settle(session)
        with transactions.transaction() as session:
            session.execute(
                text("update tasks set state = 'done' where id = any(:ids)"), {"ids": ids[:-1]}
            )
        self.look(world)
        assert list(world.board.tasks) == ids[-1:]

    @staticmethod
    def move(session, ids, move):
        decisions = [PlanDecision(task=id, move=move, rule="r", because="of this") for id in ids]
        assert journal.store(session, Plan(decisions=tuple(decisions)))


class TestRecord:
    def test_recorded_round_gives_its_decisions_again(self, session, isle):
        for n in range(9):
            add(session, f"t{n}", ("a1", "a2", "b1")[n % 3], priority=n % 2)
        forget(session)
        board = isle.look(session, now_s=transactions.now_s(session))
        plan = isle.cycle(session, board)
        seen = from_json(as_json(seen_by(board, plan, plan.before, island="isle")))
        again = cycle(Board.of(seen, now_s=plan.now_s))
        assert again.decisions == plan.decisions


@pytest.mark.parametrize("seed", rest_long(range(6), keep=2))
@pytest.mark.slow
def test_followed_and_new_board_decide_alike(session, isle, seed, monkeypatch):
    """Tasks come, end, are held and released, change their urgency; devices close and open."""
    monkeypatch.setattr(board_follower, "BEGINNING", 3)
    monkeypatch.setattr(board_follower, "MORE", 2)
    dice = random.Random(seed)
    for n in range(40):
        for _ in range(dice.randrange(3)):
            name = f"t{n}_{dice.randrange(10**6)}"
            add(session, name, dice.choice(["a1", "a2", "b1"]), priority=dice.randrange(2))
        _disturb(session, dice)
        expected = of_all(session)
        assert a_round(session, isle) == expected


def _disturb(session, dice):
    tasks = session.scalars(select(Task).where(Task.state.not_in(("done", "cancelled"))))
    for task in tasks.all():
        if task.state == "starting" and dice.random() < 0.5:
            decision = PlanDecision(task=task.id, move="Lost", rule="test", because="for the test")
            journal.store(session, Plan(decisions=(decision,)))
        elif dice.random() < 0.05:
            task.hold = dice.choice(["", "user"])
        elif dice.random() < 0.05:
            task.priority = dice.randrange(3)
    device = session.get_one(Device, f"h.{dice.randrange(3)}")
    device.cordoned = dice.random() < 0.2
    if dice.random() < 0.2:
        defaults = [{}, {"max_running": 1}, {"limit": {"cpu": 1}}]
        session.get_one(Tenant, "ten_a").user_defaults = dice.choice(defaults)
    journal.settle(session)


class TestIdleCredit:
    """Tenant b worked for ages, and has more in line; a was away, and comes back."""

    LEVEL_S = 10_000_000

    @pytest.fixture
    def busy(self, session, isle):
        base = ledger.base(session)
        now_s = transactions.now_s(session)
        used = usage_decay.faded(
            self.LEVEL_S * 1_000_000,
            at_s=now_s,
            since_s=base.since_s,
            half_life_s=base.half_life_s,
        )
        session.add(
            Account(user_id="b1", tenant_id="ten_b", faded=used, total_us=self.LEVEL_S * 10**6)
        )
        for n in range(5):
            add(session, f"b{n}", "b1")
        assert len(self.a_round(session, isle).decisions) == 5 + 3
        return isle

    @staticmethod
    def a_round(session, follower, *, stored=True):
        forget(session)
        board = follower.look(session, now_s=transactions.now_s(session))
        plan = follower.cycle(session, board)
        if stored:
            seen = seen_by(board, plan, plan.before, island="isle")
            assert journal.store(session, plan, seen=seen)
            journal.settle(session)
        else:
            follower.forget()
        return plan

    @staticmethod
    def rows(session):
        return {
            (row.tenant_id, row.user_id, row.kind): int(row.faded)
            for row in session.scalars(select(Lift))
        }

    def test_idle_credit_floor_is_written_with_its_plan_and_charged_to_no_account(
        self, session, busy
    ):
        sums = session.execute(text("select sum(faded), sum(total_us) from accounts")).one()
        add(session, "a", "a1")
        plan = self.a_round(session, busy)
        (lift,) = plan.lifts
        assert self.rows(session) == {("ten_a", "", "cpu"): lift.faded_us}
        # Three devices for three days, of which a half is a's; its level is b's.
        us = usage_decay.usage_us(
            lift.faded_us // 1000,
            now_s=transactions.now_s(session),
            since_s=ledger.base(session).since_s,
            half_life_s=ledger.base(session).half_life_s,
        )
        assert us / 1e6 == pytest.approx(self.LEVEL_S - 3 * 3 * 86_400 / 2, abs=10)
        after = session.execute(text("select sum(faded), sum(total_us) from accounts")).one()
        assert after == sums

    def test_next_board_has_the_idle_credit_floor(self, session, busy):
        add(session, "a", "a1")
        (lift,) = self.a_round(session, busy).lifts
        busy.forget()
        assert self.a_round(session, busy).lifts == ()
        assert busy.board.tree.branches[("ten_a",)].lifts == {"cpu": lift.faded_us}

    def test_failed_plan_sets_no_idle_credit_floor_and_the_next_plan_does(self, session, busy):
        add(session, "a", "a1")
        lost = self.a_round(session, busy, stored=False)
        assert self.rows(session) == {}
        plan = self.a_round(session, busy)
        assert [lift.tenant for lift in plan.lifts] == ["ten_a"]
        assert len(lost.lifts) == 1

    def test_newcomer_during_a_new_reading_counts_as_new(self, session, busy):
        self.a_round(session, busy)
        busy.forget()
        add(session, "a", "a1")
        assert [lift.tenant for lift in self.a_round(session, busy).lifts] == ["ten_a"]

    def test_new_half_life_keeps_the_present_value_of_an_idle_credit_floor(
        self, session, busy, monkeypatch
    ):
        add(session, "a", "a1")
        self.a_round(session, busy)
        (before,) = self.rows(session).values()
        base = ledger.base(session)
        left_us = usage_decay.usage_us(
            before,
            now_s=transactions.now_s(session),
            since_s=base.since_s,
            half_life_s=base.half_life_s,
        )
        changed = ledger.settings().model_copy(update={"half_life_s": 3600.0})
        monkeypatch.setattr(ledger, "settings", lambda: changed)
        ledger.base(session)
        session.flush()
        session.expire_all()
        (after,) = self.rows(session).values()
        assert after == left_us << usage_decay.FIXED_POINT_BITS


class TestMemory:
    def test_a_task_that_reserves_most_of_the_memory_is_charged_by_it(self, session, isle):
        gb = 10**9
        for n, memory_gb in enumerate((80, 8, 8)):
            session.get_one(Device, f"h.{n}").memory_bytes = memory_gb * gb
        add(session, "large", "a1", memory_bytes=80 * gb)
        add(session, "small", "a1", memory_bytes=8 * gb)
        a_round(session, isle)
        rows = session.execute(
            select(Placement.task_id, Placement.cost_milli, Task.cost_milli)
            .join(Task, Task.id == Placement.task_id)
            .order_by(Placement.task_id)
        )
        # 80 of 96 GB are 5/6 of what three devices cost; 8 of 96 GB are less than one of three.
        assert rows.all() == [("tsk_large", 2500, 2500), ("tsk_small", 1000, 0)]
        forget(session)
        anew = snapshot_reader.load(session, "isle", now_s=transactions.now_s(session))
        assert {task.id: task.cost for task in anew.tasks.values()} == {
            "tsk_large": 2500,
            "tsk_small": 0,
        }
        placement = session.scalars(select(Placement).where(Placement.cost_milli == 2500)).one()
        assert ledger.charge(session, placement, 1_000_001) == 2_500_002
        sums = [
            session.scalar(select(func.sum(column)))
            for column in (Placement.charged_us, Usage.charged_us, Account.total_us)
        ]
        assert sums == [2_500_002] * 3
        share, _ = reports.fair_share(session, reports.clock(session))
        assert [(kind.held, kind.by_memory) for kind in share.kinds] == [(2, 1)]
