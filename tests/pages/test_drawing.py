from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from app.pages.drawing import (
    Turns,
    curve_charts,
    duration,
    figure,
    folded,
    size,
    spent_line,
    time_line,
    usage_chart,
)
from app.reports import Curve, Happened, Stay, UsageRow
from app.timespent import TimeSpent

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-3, "0 s"),  # two clocks may differ a little
        (0, "0 s"),
        (0.34, "340 ms"),
        (9.96, "10.0 s"),
        (59.9, "59 s"),
        (245, "4 min 05 s"),
        (3600, "1 h 00 min"),
        (86400 * 7, "7 d"),
        (86400 + 7200, "1 d 2 h"),
    ],
)
def test_a_duration_has_two_units_at_most(seconds, words):
    assert duration(timedelta(seconds=seconds)) == words


def test_numbers_are_short():
    assert [figure(value) for value in (0.123456, 12, "warm-up", 1e-9)] == [
        "0.1235",
        "12",
        "warm-up",
        "1e-09",
    ]
    assert [size(count) for count in (0, 999, 8_000_000_000)] == ["0 B", "999 B", "8 GB"]


def row(at_s, user, held_s):
    held_us = int(held_s * 1e6)
    bucket = NOON + timedelta(seconds=at_s)
    return UsageRow(bucket=bucket, user=user, held_us=held_us, charged_us=held_us)


def chart(rows, *, seconds=30):
    until = NOON + timedelta(seconds=seconds)
    return usage_chart(rows, by="user", since=NOON, until=until, interval_s=10)


def test_usage_becomes_devices_held_in_each_whole_interval():
    drawn = chart([row(0, "ann", 5), row(0, "bob", 10), row(20, "ann", 10)])
    assert drawn.names == ("ann", "bob")  # most used first
    assert [values for _, values in drawn.rows] == [(0.5, 1.0), (0, 0), (1.0, 0)]
    assert [total.held_us for total in drawn.totals] == [15e6, 10e6]


def test_the_open_interval_is_in_the_totals_but_not_drawn():
    drawn = chart([row(0, "ann", 5), row(30, "ann", 1)], seconds=34)
    assert len(drawn.rows) == 3
    assert drawn.totals[0].held_us == 6e6


def test_beyond_eight_names_the_least_used_are_drawn_as_one():
    drawn = chart([row(0, f"user{n}", 10 - n) for n in range(10)])
    assert drawn.names == (*(f"user{n}" for n in range(7)), "all others")
    assert drawn.totals[-1].held_us == (3 + 2 + 1) * 1e6
    assert drawn.rows[0][1][-1] == pytest.approx(0.6)


def test_curves_of_several_tasks_share_their_steps():
    loss, other = (
        Curve(task="a", name="loss", points=((1, 0.5), (2, 0.25))),
        Curve(task="b", name="loss", points=((2, 0.75),)),
    )
    (drawn,) = curve_charts([loss, other])
    assert drawn.tasks == ("a", "b")
    assert drawn.rows == ((1, (0.5, None)), (2, (0.25, 0.75)))


def stay(task, device, begun_s, ended_s, *, guest=False):
    at = NOON + timedelta(seconds=begun_s)
    return Stay(
        task=task, epoch=1, device=device, guest=guest, launched_at=at, started_at=at,
        ended_at=None if ended_s is None else NOON + timedelta(seconds=ended_s),
        held_us=0, first_step=0, last_step=None, end=None, input_bytes=0, fetched_bytes=0,
    )  # fmt: skip


def test_stays_become_lengths_on_one_line():
    until = NOON + timedelta(seconds=100)
    lent = stay("b", "d1", 60, 80, guest=True)
    stays = [stay("a", "d1", 0, 50), stay("b", "d0", 50, None), lent]
    line = time_line(stays, since=NOON, until=until)
    assert line.devices == ("d0", "d1")
    drawn = [(lane.task, part) for lane in line.lanes for part in lane.parts]
    assert [(task, part.x, part.width, part.colour) for task, part in drawn] == [
        ("a", 0, 50, 1),
        ("b", 50, 50, 0),
        ("b, lent", 60, 20, 1),
    ]


def test_the_line_of_a_paused_task_goes_on_to_now():
    submitted, now = NOON - timedelta(seconds=40), NOON + timedelta(seconds=60)
    line = time_line([stay("a", "d0", 0, 10)], since=submitted, until=now)
    ((part,),) = (lane.parts for lane in line.lanes)
    assert (part.x, part.width) == (40, 10)


def test_no_stay_is_an_empty_line():
    assert time_line([], since=NOON, until=NOON).lanes == ()


def test_a_task_s_seconds_become_one_bar():
    spent = TimeSpent(waited_s=50, switched_s=1, moved_s=0, computed_s=48, staged_s=1)
    assert [(part.words, part.x, part.width) for part in spent_line(spent)] == [
        ("computed 48 s, 48 %", 0, 48),
        ("staged 1.0 s, 1 %", 48, 1),
        ("switched 1.0 s, 1 %", 49, 1),
        ("waited 50 s, 50 %", 50, 50),
    ]


def happened(*types, task="t"):
    return [
        Happened(
            id=n, at=NOON, type=type, message=type, tenant="a", request_id="r", request="r",
            task_id=task, task=task, data={},
        )
        for n, type in enumerate(types)
    ]  # fmt: skip


ONE_TURN = ("task.saved", "task.paused", "task.pausing", "task.started", "task.launched")


def test_many_turns_in_a_row_become_one_line_and_none_is_lost():
    events = happened("task.done", *ONE_TURN * 2, "request.submitted")
    done, turns, submitted = folded(events)
    assert (done, submitted) == (events[0], events[-1])
    assert isinstance(turns, Turns)
    assert (turns.message, list(turns.turns)) == ("2 turns: paused and resumed", events[1:-1])


def test_a_few_turns_and_those_of_several_tasks_stay_apart():
    few = happened(*(ONE_TURN * 2)[:8])
    assert folded(few) == few
    mixed = few + happened(*ONE_TURN, task="u")
    assert folded(mixed) == mixed
    assert folded([]) == []
