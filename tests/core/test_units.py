from __future__ import annotations

import pytest

from app.core.units import age, counted, duration, parse_bytes, parse_seconds, size


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("16GB", 16_000_000_000),
        ("1.5 GiB", 3 * 2**29),
        ("512 B", 512),
        ("64M", 64_000_000),
        ("64Mi", 64 * 2**20),
        (" 2tb ", 2 * 10**12),
    ],
)
def test_size_with_a_unit_is_read(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("4h", 14400), ("1h 30m", 5400), ("1.5h", 5400), ("2d", 172800), ("500ms", 0.5), ("45S", 45)],
)
def test_duration_with_a_unit_is_read(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "16", "8e9", "GB", "-1GB", "1 GB 2", "4h3", "h", "1e3s", "iB"]
)
def test_text_without_a_number_or_a_unit_is_refused(text):
    for parse in (parse_bytes, parse_seconds):
        with pytest.raises(ValueError, match="such as"):
            parse(text)


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
