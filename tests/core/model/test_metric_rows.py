"""How rows of metrics are kept, thinned and delivered."""

from __future__ import annotations

import random

from app.core.model.metric_rows import MetricRows, extremes


def test_rows_of_the_same_step_become_one():
    rows = MetricRows()
    for step, values in ((1, {"a": 1}), (1, {"b": 2}), (2, {"a": 3}), (2, {})):
        rows.add(step, values)
    assert rows.take() == [(1, {"a": 1, "b": 2}), (2, {"a": 3})]
    assert (rows.take(), rows.size_bytes) == ([], 0)


def test_rows_are_taken_in_parts_that_fit_a_message():
    rows = MetricRows()
    for step in range(1200):
        rows.add(step, {"a": step})
    assert rows.fill_a_message
    parts = [rows.take() for _ in range(4)]
    assert [len(part) for part in parts] == [500, 500, 200, 0]
    assert [step for part in parts for step, _ in part] == [*range(1200)]
    assert not rows.thinned


def test_thinned_rows_keep_lowest_highest_and_last_of_each_metric():
    values = [random.Random(1).random() for _ in range(5000)]
    values[3210], values[77] = 9.0, -9.0
    rows = MetricRows(most_rows=100)
    for step, value in enumerate(values):
        late = {"late": step} if step in (40, 4001) else {}
        rows.add(step, {"loss": value, **late})
    assert rows.thinned
    assert len(rows.rows) <= 100
    kept = [(step, row["loss"]) for step, row in rows.rows if "loss" in row]
    assert all(values[step] == value for step, value in kept)
    assert {-9.0, 9.0} <= {value for _, value in kept}
    assert kept[-1] == (4999, values[-1])
    assert [row["late"] for _, row in rows.rows if "late" in row] == [40, 4001]
    assert [step for step, _ in rows.rows] == sorted(step for step, _ in rows.rows)


def test_extremes_keep_first_and_last_value_that_is_no_number():
    losses = (1.0, "nan", 3.0, "inf", "nan", 2.0)
    rows = [(step, {"loss": loss}) for step, loss in enumerate(losses)]
    assert [step for step, _ in extremes(rows)] == [0, 1, 2, 4, 5]


def test_rows_with_ever_new_metrics_stay_within_bounds():
    rows = MetricRows(most_rows=50, most_bytes=4000)
    for step in range(1000):
        rows.add(step, {f"metric {step}": step})
    assert len(rows.rows) <= 50
    assert rows.size_bytes <= 4100
    assert rows.rows[-1] == (999, {"metric 999": 999})


def test_rows_are_kept_until_a_later_report_is_answered():
    rows = MetricRows()
    for step in range(10):
        rows.add(step, {"a": step})
    size_bytes = rows.size_bytes
    first = rows.part(size_bytes // 2, now_us=100)
    assert [step for step, _ in first] == [0, 1, 2, 3, 4]
    rows.add(9, {"b": 1})  # that row was not sent yet
    assert len(rows.part(2 * size_bytes, now_us=200)) == 10
    rows.delivered(99)
    assert len(rows.rows) == 10
    rows.delivered(200)
    assert [step for step, _ in rows.rows] == [5, 6, 7, 8, 9]
    assert rows.rows[-1][1] == {"a": 9, "b": 1}
    assert len(rows.part(1, now_us=300)) == 1
    rows.add(5, {"c": 1})
    rows.delivered(300)
    assert not [row for row in rows.rows[:-1] if "c" in row[1]]


def test_sent_row_is_not_changed_by_a_later_one_of_its_step():
    rows = MetricRows()
    rows.add(1, {"a": 1})
    rows.part(1000, now_us=1)
    rows.add(1, {"b": 2})
    rows.delivered(1)
    assert rows.rows == [(1, {"b": 2})]
