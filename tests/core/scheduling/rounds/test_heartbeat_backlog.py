"""What a round takes of the heartbeats that have come."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.core.model.protocol.messages import Alive, Stopped
from app.core.scheduling.rounds.heartbeat_backlog import (
    EVENT_WEIGHT,
    FIRST,
    LEAST,
    MOST,
    HeartbeatBacklog,
    launches_wait,
)


def alive(device, sent_us=1, *, incarnation="p", events=0):
    ends = [Stopped(task="t", epoch=1, seq=seq, step=0, held_us=0) for seq in range(1, events + 1)]
    return Alive(
        device=device,
        incarnation=incarnation,
        sent_us=sent_us,
        facts={},
        residents=[],
        events=ends,
        logs=[],
    )


@pytest.fixture
def backlog():
    return HeartbeatBacklog()


def fill(backlog, devices, **more):
    for n in range(devices):
        backlog.put(alive(f"h.{n}", **more), 0.0)


def test_newest_of_a_process_replaces_the_older_ones(backlog):
    first, second, third = (alive("h.0", sent_us) for sent_us in (1, 2, 3))
    for one in (first, third, second):
        backlog.put(one, 0.0)
    assert backlog.take() == [third]
    assert len(backlog) == 0


def test_older_process_of_a_device_comes_first(backlog):
    new, old = alive("h.0", 1, incarnation="p2"), alive("h.0", 9, incarnation="p1")
    backlog.put(new, 0.0)
    backlog.put(old, 0.0)
    assert backlog.take() == [old, new]


def test_round_takes_at_most_the_bound_and_the_longest_waiting_first(backlog):
    fill(backlog, FIRST + 5)
    backlog.put(alive("h.0", 2), 1.0)  # it beats again, and keeps its place
    first, rest = backlog.take(), backlog.take()
    assert {one.device for one in first} == {f"h.{n}" for n in range(FIRST)}
    assert {one.device for one in rest} == {f"h.{n}" for n in range(FIRST, FIRST + 5)}


def test_what_is_put_back_is_older_than_what_came_meanwhile(backlog):
    fill(backlog, 2)
    backlog.take()
    backlog.put(alive("h.1", 2), 7.0)
    backlog.put_back()
    assert [(one.sent_us, came_s) for one, came_s in backlog.alive_since()] == [(1, 0.0), (2, 7.0)]
    backlog.take()
    backlog.put_back()
    assert [came_s for _, came_s in backlog.alive_since()] == [0.0, 7.0]


def test_only_newest_process_of_a_device_that_stays_proves_it_alive(backlog):
    for device, incarnation in (("h.1", "p2"), ("h.0", "p1"), ("h.0", "p2"), ("h.1", "p1")):
        backlog.put(alive(device, incarnation=incarnation), 0.0)
    backlog.put(replace(alive("h.2", incarnation="p2"), facts={"leaving": True}), 0.0)
    backlog.put(alive("h.2", incarnation="p1"), 0.0)
    seen = {(one.device, one.incarnation) for one, _ in backlog.alive_since()}
    assert seen == {("h.0", "p2"), ("h.1", "p2")}


def test_events_weigh_more(backlog):
    fill(backlog, FIRST, events=1)
    assert len(backlog.take()) == FIRST // (1 + EVENT_WEIGHT)


def test_heartbeat_that_weighs_more_than_the_bound_is_taken_alone(backlog):
    backlog.put(alive("h.0", events=FIRST), 0.0)
    backlog.put(alive("h.1"), 0.0)
    assert [one.device for one in backlog.take()] == ["h.0"]
    assert [one.device for one in backlog.take()] == ["h.1"]


def test_bound_falls_after_long_rounds_and_grows_while_others_wait(backlog):
    for _ in range(20):
        backlog.adapt(3.0, most_s=1.0)
    assert backlog.bound == LEAST
    backlog.adapt(0.1, most_s=1.0)
    assert backlog.bound == LEAST, "nothing waited, so nothing is known of a larger round"
    for _ in range(20):
        fill(backlog, MOST + 1)
        backlog.take()
        backlog.adapt(0.1, most_s=1.0)
    assert backlog.bound == MOST
    backlog.adapt(0.7, most_s=1.0)
    assert backlog.bound == MOST


def test_process_waits_since_its_first_heartbeat_that_no_round_recorded(backlog):
    assert backlog.oldest_s() is None
    backlog.put(alive("h.0", 1), 3.0)
    backlog.put(alive("h.1", 1), 4.0)
    backlog.put(alive("h.0", 2), 5.0)
    assert backlog.oldest_s() == 3.0
    backlog.take()
    backlog.put(alive("h.0", 3), 7.0)
    assert backlog.oldest_s() == 7.0
    backlog.put_back()
    assert backlog.oldest_s() == 3.0


@pytest.mark.parametrize(
    ("oldest_s", "planned_s", "waits"),
    [
        (None, 99.0, False),
        (98.0, 99.0, False),
        (97.0, 99.0, True),
        (97.0, 91.0, True),
        (97.0, 90.0, False),
    ],
    ids=["none waits", "not late", "late", "late, soon a lease", "launches waited for a lease"],
)
def test_launches_wait_for_late_heartbeats_and_at_most_one_lease(oldest_s, planned_s, waits):
    now = {"now_s": 100.0, "lease_s": 10.0}
    assert launches_wait(oldest_s=oldest_s, planned_s=planned_s, **now) is waits


def test_all_that_end_at_once_are_recorded_before_the_next_are_launched():
    """Play rounds that take 0.1 s: leases and events of all devices come before late launches."""
    backlog, now_s, planned_s, to_launch, late_launches = HeartbeatBacklog(), 0.0, 0.0, 0, 0
    fill(backlog, 2 * MOST, events=1)
    while backlog or to_launch:
        to_launch += len(backlog.take())
        waits = launches_wait(
            oldest_s=backlog.oldest_s(), planned_s=planned_s, now_s=now_s, lease_s=10.0
        )
        if not waits:
            late_launches += now_s > 2.5 and len(backlog) > 0
            to_launch, planned_s = max(0, to_launch - 128), now_s
        now_s += 0.1
        assert now_s < 60.0
    assert late_launches <= 2
