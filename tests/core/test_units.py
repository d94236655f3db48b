from __future__ import annotations

import pytest

from app.core.units import age, counted, duration, size


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-3, "0 s"),  # two clocks may differ a little
        (0, "0 s"),
        (0.34, "340 ms"),
        (0.96, "1.0 s"),
        (59.9, "59.9 s"),
        (59.96, "1m 00s"),
        (245, "4m 05s"),
        (3600, "1h 00m"),
        (86400 * 7, "7d 00h"),
        (86400 + 7200, "1d 02h"),
    ],
)
def test_a_duration_has_two_units_at_most(seconds, words):
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-1, "now"), (0.9, "now"), (12, "12s"), (433, "7m"), (7200, "2h"), (200_000, "2d")],
)
def test_an_age_has_one_unit(seconds, words):
    assert age(seconds) == words


def test_sizes_are_binary():
    told = [size(count) for count in (0, 999, 8130, 4 * 2**30, 5 * 2**50)]
    assert told == ["0 B", "999 B", "7.9 KiB", "4.0 GiB", "5120.0 TiB"]


def test_a_count_says_its_thing_in_the_right_number():
    told = [counted(count, "task") for count in (0, 1, 4000)]
    assert told == ["0 tasks", "1 task", "4,000 tasks"]
