"""The demo's judges must find what is wrong, or its "all promises held" means nothing."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from examples import judge
from examples.judge import Kill, Life, Sample, Window

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
KILL = Kill(devices=["local.1"], at=NOON)


def stay(device, end, *, first, last, at_s, held_us=1_000_000):
    launched = (NOON + timedelta(seconds=at_s)).isoformat()
    return {
        "device_id": device,
        "end": end,
        "first_step": first,
        "last_step": last,
        "launched_at": launched,
        "held_us": held_us,
    }


def life(*placements, saved=(), **task):
    checkpoints = [
        {"step": step, "created_at": (NOON + timedelta(seconds=at_s)).isoformat()}
        for step, at_s in saved
    ]
    known = {"state": "done", "pauses": 1, "result": {"parameters": "abc"}}
    return Life(
        tenant="alpha",
        name="alpha/digits-1",
        task={**known, **task},
        placements=placements,
        checkpoints=checkpoints,
    )


def test_window_ends_when_a_tenant_has_one_job_left():
    def sample(at_s, used, left):
        return Sample(at_s=at_s, used_us={"a": used}, unfinished={"a": left})

    window = judge.saturated([sample(1, 0, 2), sample(5, 40, 2), sample(6, 50, 1)])
    assert window == Window(seconds=4, used_us={"a": 40})


@pytest.mark.parametrize(
    ("a_us", "b_us", "held"),
    [
        (25, 75, True),  # exactly 1 : 3
        (29, 71, True),  # 4 points off
        (31, 69, False),
        (0, 0, False),  # nothing was used at all
    ],
)
def test_shares_may_be_five_percentage_points_off(a_us, b_us, held):
    window = Window(seconds=60, used_us={"a": a_us, "b": b_us})
    found = judge.shares_follow_weights(window, {"a": 1.0, "b": 3.0}, least_s=45)
    assert found.held is held


def test_short_window_proves_nothing():
    window = Window(seconds=44, used_us={"a": 1, "b": 1})
    assert not judge.shares_follow_weights(window, {"a": 1.0, "b": 1.0}, least_s=45).held


def test_charge_of_one_microsecond_too_much_is_found():
    lives = [life(stay("local.0", "finished", first=0, last=9, at_s=0))]
    assert judge.ledger_adds_up(lives, {"alpha": 1_000_000}).held
    assert not judge.ledger_adds_up(lives, {"alpha": 1_000_001}).held


def test_a_planned_pause_that_loses_a_step_is_found():
    before = stay("local.0", "paused", first=0, last=10, at_s=-9)
    whole = life(before, stay("local.1", "finished", first=10, last=20, at_s=9))
    short = life(before, stay("local.1", "finished", first=9, last=20, at_s=9))
    assert judge.pauses_lose_nothing([whole], KILL).held
    assert not judge.pauses_lose_nothing([short], KILL).held


def test_task_paused_on_the_killed_device_may_lose_steps_since_its_checkpoint():
    before = stay("local.1", "paused", first=0, last=10, at_s=-9)
    after = stay("local.0", "finished", first=4, last=20, at_s=9)
    hit = life(before, after, saved=[(4, -5)])
    too_far = life(before, after, saved=[(6, -5)])
    assert judge.kill_costs_little([hit], KILL).held
    assert not judge.kill_costs_little([too_far], KILL).held


def test_launch_that_never_got_its_slot_loses_nothing():
    before = stay("local.0", "paused", first=0, last=10, at_s=-9)
    unseated = stay("local.1", "lost", first=None, last=None, at_s=-1, held_us=0)
    after = stay("local.0", "finished", first=10, last=20, at_s=9)
    assert judge.pauses_lose_nothing([life(before, unseated, after)], KILL).held


def test_kill_without_a_victim_proves_nothing():
    quiet = life(stay("local.0", "finished", first=0, last=9, at_s=0))
    assert not judge.kill_costs_little([quiet], KILL).held


def test_different_bits_and_missing_results_are_found():
    assert judge.same_bits(life(), {"parameters": "abc"}).held
    assert not judge.same_bits(life(), {"parameters": "abd"}).held
    assert not judge.same_bits(life(result=None), {}).held
