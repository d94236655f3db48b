"""Tasks with fractions of a device against real Postgres: what is written, refused and charged."""

from __future__ import annotations

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.core.model.device_choice import choice_in, text_of
from app.core.model.protocol.messages import decode
from app.core.model.snapshot import Plan, PlanDecision
from app.core.scheduling.cycle import decide as decide_round
from app.db import transactions
from app.db.models import Account, OutboxOrder, Placement, Preset, Task, Usage
from app.scheduling import journal, snapshot_reader
from app.scheduling.guest_placements import OverfullDevice
from tests.app.scheduling.test_journal import (
    DESCRIPTOR,
    decide,
    hear,
    lose,
    silence,
    started,
    task,
    view,
)

__all__ = ["task"]

OFFERS = {"offers": ["fraction"], "memory_bytes": 8 * 2**30}


def _fraction(session: Session, like: Task, id: str, fraction: float | None) -> Task:
    """Add a waiting task with this fraction, or a whole one, beside the first."""
    of = {column.name: getattr(like, column.name) for column in Task.__table__.columns}
    devices = {} if fraction is None else {"fraction": fraction}
    descriptor = {**DESCRIPTOR, "devices": devices}
    fresh = {"id": id, "name": id, "state": "waiting", "epoch": 0, "seat": None}
    session.add(Task(**{**of, **fresh, "descriptor": descriptor}))
    session.flush()
    added = session.get_one(Task, id)
    added.device_choice = text_of(added.spec.devices.choice)
    session.flush()
    return added


@pytest.fixture
def halves(session, task) -> tuple[Task, Task]:
    """Two tasks with half a device each run on h.0."""
    hear(session, **OFFERS)
    one, other = (_fraction(session, task, id, 0.5) for id in ("tsk_b", "tsk_c"))
    for half in (one, other):
        decide(session, half, "Launch", devices=("h.0",), cost=500)
    views = [view(half, "running") for half in (one, other)]
    hear(session, residents=views, events=[started(half) for half in (one, other)], **OFFERS)
    assert (one.state, other.state) == ("running", "running")
    return one, other


def _sums(session: Session) -> list[int]:
    return [
        session.scalar(select(func.sum(column)))
        for column in (Placement.charged_us, Usage.charged_us, Account.total_us)
    ]


def test_two_halves_are_placed_on_one_device(session, halves):
    rows = session.scalars(select(Placement).order_by(Placement.id)).all()
    assert [(row.device_id, row.fraction_milli, row.cost_milli) for row in rows] == [
        ("h.0", 500, 500),
        ("h.0", 500, 500),
    ]
    seen = snapshot_reader.load(session, "isle", now_s=transactions.now_s(session)).tasks
    assert {choice_in(seen[half.id].choice).fraction_milli for half in halves} == {500}


@pytest.mark.parametrize("fraction", [0.001, 0.5, None])
def test_no_more_than_a_device_is_given(session, task, halves, fraction):
    more = _fraction(session, task, "tsk_d", fraction)
    with pytest.raises(OverfullDevice, match=r"thousandths of h\.0"):
        decide(session, more, "Launch", devices=("h.0",), cost=1)


def test_no_fraction_is_given_of_a_device_that_a_whole_task_holds(session, task):
    hear(session, **OFFERS)
    decide(session, task, "Launch", devices=("h.0",))
    half = _fraction(session, task, "tsk_b", 0.5)
    with pytest.raises(OverfullDevice, match=r"1500 thousandths of h\.0"):
        decide(session, half, "Launch", devices=("h.0",), cost=500)


def test_a_whole_task_follows_all_fractions_that_were_told_to_leave(session, task, halves):
    one, other = halves
    decisions = [
        PlanDecision(
            task=half.id, move="Pause", rule="F6", because="x", devices=("h.0",), against=task.id
        )
        for half in halves
    ]
    launch = PlanDecision(task=task.id, move="Launch", rule="F6", because="x", devices=("h.0",))
    journal.store(session, Plan(decisions=(*decisions, launch)))
    journal.settle(session)
    assert (one.state, other.state, task.state) == ("pausing", "pausing", "starting")
    pauses = session.scalars(select(OutboxOrder).where(OutboxOrder.kind == "Pause")).all()
    assert {decode(order.body).successor for order in pauses} == {task.id}


def test_each_fraction_is_charged_for_its_part_to_the_microsecond(session, halves):
    for turn in range(1, 4):
        mine, others = 7_001 * turn, 20_003 * turn
        views = [
            view(half, "running", held_us=held)
            for half, held in zip(halves, (mine, others), strict=True)
        ]
        hear(session, residents=views, **OFFERS)
        assert _sums(session) == [mine // 2 + others // 2] * 3


def test_a_memory_share_above_the_fraction_is_what_is_charged(session, task):
    """By the round's own decision: 0.25 of the device, and three quarters of its memory."""
    hear(session, **OFFERS)
    small = _fraction(session, task, "tsk_b", 0.25)
    task.hold = "user"
    small.memory_bytes = 6 * 2**30
    session.flush()
    seen = snapshot_reader.load(session, "isle", now_s=transactions.now_s(session))
    plan = decide_round(seen, now_s=transactions.now_s(session))
    [launch] = [each for each in plan.decisions if each.move == "Launch"]
    assert (launch.task, launch.cost) == ("tsk_b", 750)
    journal.store(session, plan, seen=seen)
    journal.settle(session)
    hear(session, residents=[view(small, "running")], events=[started(small)], **OFFERS)
    hear(session, residents=[view(small, "running", held_us=1001)], **OFFERS)
    assert _sums(session) == [1001 * 750 // 1000] * 3


def test_a_lost_device_charges_each_fraction_for_all_of_the_unheard_time(session, halves):
    rows = [
        session.scalars(select(Placement).where(Placement.task_id == half.id)).one()
        for half in halves
    ]
    silence(session, 3)
    for row in rows:
        assert journal.losses.unheard_us_of_placement(session, row, rows) == 3_000_000
    for half in halves:
        lose(session, half)
    assert {half.state for half in halves} == {"waiting"}


def test_a_fraction_gets_no_settings_of_the_device(session, task):
    hear(session, device="g.0", host="g", kind="cuda", **OFFERS)
    params = {"power_limit_w": 300, "deterministic": True}
    session.add(Preset(kind="cuda", task_type="train", params=params))
    session.flush()
    half = _fraction(session, task, "tsk_b", 0.5)
    half.kind = "cuda"
    decide(session, half, "Launch", devices=("g.0",), cost=500)
    [order] = session.scalars(select(OutboxOrder).where(OutboxOrder.task_id == half.id))
    preset = decode(order.body).preset
    assert "power_limit_w" not in preset
    assert preset["deterministic"] is True


def test_a_changed_cost_counts_from_the_last_report_on_and_all_sums_agree(session, halves):
    half, other = halves
    beside = view(other, "running")
    hear(session, residents=[view(half, "running", held_us=1_001), beside], **OFFERS)
    decide(session, half, "Charge", devices=("h.0",), cost=1000)
    placed = session.scalars(select(Placement).where(Placement.task_id == half.id)).one()
    assert (half.state, half.cost_milli, placed.cost_milli) == ("running", 1000, 1000)
    hear(session, residents=[view(half, "running", held_us=3_000), beside], **OFFERS)
    decide(session, half, "Charge", devices=("h.0",), cost=333)
    hear(session, residents=[view(half, "running", held_us=4_000), beside], **OFFERS)
    charged_us = 1_001 // 2 + 1_999 + (4_000 * 333 // 1000 - 3_000 * 333 // 1000)
    assert placed.charged_us == charged_us
    assert _sums(session) == [charged_us] * 3
