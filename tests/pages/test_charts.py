from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from app.insight.forecast import Start
from app.insight.reports import Curve, Happened, Queued, ReportedStay, UsageRow
from app.insight.time_spent import TimeSpent
from app.pages.charts import (
    FoldedTurns,
    about,
    breakdown,
    by_place,
    changes,
    curve_charts,
    figure,
    folded,
    next_start,
    not_numbers,
    own_reasons_first,
    parts_of_level,
    queued_words,
    sparkline,
    time_line,
    usage_chart,
)

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


def test_metrics_are_short():
    assert [figure(value) for value in (0.123456, 12, "warm-up", 1e-9)] == [
        "0.1235",
        "12",
        "warm-up",
        "1e-09",
    ]
    assert not_numbers({"loss": "nan", "acc": 0.5, "norm": "inf", "note": "fine"}) == [
        "loss",
        "norm",
    ]


def test_estimate_has_no_more_digits_than_it_is_worth():
    assert [about(seconds) for seconds in (0.4, 19.46, 59.6, 245.2)] == [
        "0 s",
        "19 s",
        "1m 00s",
        "4m 05s",
    ]


def test_a_sparkline_fills_its_height():
    assert sparkline([3.0]) == ""
    assert sparkline([0.0, 4.0, 2.0]) == "0.0,19.0 40.0,1.0 80.0,10.0"
    assert sparkline([1.0, 1.0]) == "0.0,19.0 80.0,19.0"
    assert sparkline([-1.7e308, 1.7e308]) == "0.0,19.0 80.0,1.0"


def row(at_s, user, held_s):
    held_us = int(held_s * 1e6)
    bucket = NOON + timedelta(seconds=at_s)
    return UsageRow(bucket=bucket, user=user, held_us=held_us, charged_us=held_us)


def chart(rows, *, seconds=30, devices=2):
    until = NOON + timedelta(seconds=seconds)
    return usage_chart(rows, by="user", since=NOON, until=until, interval_s=10, devices=devices)


def test_no_interval_shows_more_devices_in_use_than_there_are():
    drawn = chart([row(0, "ann", 5), row(10, "ann", 12), row(20, "ann", 11)], devices=1)
    assert [sum(values) for _, values in drawn.rows] == pytest.approx([0.8, 1.0, 1.0])
    assert drawn.totals[0].held_us == 28e6
    two = chart([row(10, "ann", 4), row(10, "bob", 12), row(20, "bob", 10)], devices=1)
    assert [sum(values) for _, values in two.rows] == pytest.approx([0.6, 1.0, 1.0])
    assert two.rows[0][1] == pytest.approx((0.45, 0.15))  # bob used most, so he is first


def test_usage_is_shown_as_devices_held_per_interval():
    drawn = chart([row(0, "ann", 5), row(0, "bob", 10), row(20, "ann", 10)])
    assert drawn.names == ("ann", "bob")  # most used first
    assert [values for _, values in drawn.rows] == [(0.5, 1.0), (0, 0), (1.0, 0)]
    assert [total.held_us for total in drawn.totals] == [15e6, 10e6]


def test_unfinished_interval_is_in_the_totals_but_not_drawn():
    drawn = chart([row(0, "ann", 5), row(30, "ann", 1)], seconds=34)
    assert len(drawn.rows) == 3
    assert drawn.totals[0].held_us == 6e6


def test_all_but_the_eight_largest_users_are_drawn_as_one():
    drawn = chart([row(0, f"user{n}", 10 - n) for n in range(10)], devices=10)
    assert drawn.names == (*(f"user{n}" for n in range(7)), "all others")
    assert drawn.totals[-1].held_us == (3 + 2 + 1) * 1e6
    assert drawn.rows[0][1][-1] == pytest.approx(0.6)


def test_curves_of_several_tasks_share_their_axis():
    loss, other = (
        Curve(task_id="1", task="a", name="loss", points=((1, 0.5), (2, 0.25))),
        Curve(task_id="2", task="b", name="loss", points=((2, 0.75),)),
    )
    (drawn,) = curve_charts([loss, other])
    assert drawn.tasks == ("a", "b")
    assert drawn.rows == ((1, (0.5, None)), (2, (0.25, 0.75)))


def stay(task, device, begun_s, ended_s, *, guest=False):
    at = NOON + timedelta(seconds=begun_s)
    return ReportedStay(
        task=task, epoch=1, device=device, guest=guest, launched_at=at, started_at=at,
        ended_at=None if ended_s is None else NOON + timedelta(seconds=ended_s),
        held_us=0, first_step=0, last_step=None, end=None, input_bytes=0, fetched_bytes=0,
    )  # fmt: skip


def test_stays_are_drawn_as_bars_on_one_line():
    until = NOON + timedelta(seconds=100)
    lent = stay("b", "d1", 60, 80, guest=True)
    stays = [stay("a", "d1", 0, 50), stay("b", "d0", 50, None), lent]
    line = time_line(stays, since=NOON, until=until)
    assert line.key == ("d0", "d1")
    drawn = [(lane.name, part) for lane in line.lanes for part in lane.parts]
    assert [(task, part.x, part.width, part.colour) for task, part in drawn] == [
        ("a", 0, 50, 1),
        ("b", 50, 50, 0),
        ("b, lent", 60, 20, 1),
    ]


def test_line_of_a_paused_task_goes_on_to_now():
    submitted, now = NOON - timedelta(seconds=40), NOON + timedelta(seconds=60)
    line = time_line([stay("a", "d0", 0, 10)], since=submitted, until=now)
    ((part,),) = (lane.parts for lane in line.lanes)
    assert (part.x, part.width) == (40, 10)


def test_task_without_a_stay_has_an_empty_line():
    assert time_line([], since=NOON, until=NOON).lanes == ()


def test_seconds_of_a_task_are_shown_with_their_part_of_the_whole():
    spent = TimeSpent(waited_s=50, switched_s=1, moved_s=0, computed_s=48, staged_s=1)
    assert breakdown(spent) == [
        ("Queued", 50, 50),
        ("Starting", 1, 1),
        ("Migrating", 0, 0),
        ("Running", 48, 48),
        ("Saving state", 1, 1),
    ]


def queued(place, phase="queued", p50_s=None):
    estimate = None
    if p50_s is not None:
        at = {"starts_at": NOON, "earliest_at": NOON, "latest_at": NOON}
        estimate = Start(p10_s=0.0, p50_s=p50_s, p90_s=2 * p50_s, **at)
    return Queued(
        id=f"t{place}", request_id="r", name="t", request="r", tenant="a", user="u",
        state="waiting", phase=phase, place=place, kind="cpu", memory_bytes=0, priority=0,
        since=NOON, step=0, reasons=(), estimate=estimate,
    )  # fmt: skip


def test_queue_is_in_order_of_places_with_the_first_start():
    queue = [
        queued(29),
        queued(None, "paused"),
        queued(27, "preempted", 60.0),
        queued(28, p50_s=9.0),
    ]
    assert [item.place for item in by_place(queue)] == [27, 28, 29, None]
    assert queued_words(queue, None) == "2 queued, 1 preempted, 1 paused"
    assert queued_words(queue, 4000) == "4,000 queued"
    assert next_start(queue).p50_s == 9.0
    assert next_start([queued(1)]) is None


def test_reason_that_is_a_tasks_own_comes_first():
    def waiting(place, *messages):
        return replace(queued(place), reasons=tuple({"message": each} for each in messages))

    queue = [waiting(1, "busy"), waiting(2, "busy", "limit"), waiting(3, "busy", "served", "older")]
    first = [[one["message"] for one in item.reasons] for item in own_reasons_first(queue)]
    assert first == [["busy"], ["limit", "busy"], ["served", "older", "busy"]]


def test_changes_of_the_audit_log_have_units_and_names():
    before = {"weight_milli": 1000, "carried": 5, "parent_id": "ten_1", "idle_pause_s": None}
    after = {"weight_milli": 3000, "carried": 9, "parent_id": "ten_2", "idle_pause_s": 1800}
    assert changes(before, after, {"ten_1": "root", "ten_2": "vision"}) == [
        ("weight", "1 → 3"),
        ("parent", "root → vision"),
        ("idle pause", "nothing → 30m 00s"),
    ]
    assert changes({}, {"cordoned": True, "events": ["a", "b"]}, {}) == [
        ("cordoned", "yes"),
        ("events", "a, b"),
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
    assert isinstance(turns, FoldedTurns)
    assert (turns.message, list(turns.turns)) == ("2 turns: paused and resumed", events[1:-1])


def test_few_turns_and_turns_of_several_tasks_stay_apart():
    few = happened(*(ONE_TURN * 2)[:8])
    assert folded(few) == few
    mixed = few + happened(*ONE_TURN, task="u")
    assert folded(mixed) == mixed
    assert folded([]) == []


def test_weights_of_siblings_add_up_to_100_percent_at_each_level() -> None:
    weights = {"a": (None, 1), "b": (None, 1), "c": (None, 1), "a1": ("a", 2), "a2": ("a", 3)}
    shares = [
        SimpleNamespace(id=id, parent_id=parent, weight=float(weight))
        for id, (parent, weight) in weights.items()
    ]
    parts = parts_of_level(shares)
    assert sorted(parts[id] for id in "abc") == [33, 33, 34]
    assert (parts["a1"], parts["a2"]) == (40, 60)
