"""Tests that assert how long something took are found in their source."""

from __future__ import annotations

import math

import pytest

from tests.time_bounds import TimeBound, bounds_in

HEAD = "import time\nMOST_S = 7.0\n"


@pytest.mark.parametrize(
    ("body", "bound_s", "line"),
    [
        ("began_s = time.monotonic()\n    assert time.monotonic() - began_s < 5", 5, 5),
        ("took_s = time.perf_counter() - 0\n    assert took_s <= MOST_S", 7, 5),
        ("until_s = time.time() + 3\n    while True: assert time.time() < until_s", 3, 5),
        ("began_s = time.time()\n    assert time.time() - began_s < other()", math.inf, 5),
    ],
)  # fmt: skip
def test_assertion_about_a_clock_is_found(body: str, bound_s: float, line: int) -> None:
    source = f"{HEAD}def test_it():\n    {body}\n"
    assert list(bounds_in(source, "a.py")) == [TimeBound(bound_s, "a.py::test_it", line)]


def test_bound_of_a_helper_counts_for_the_tests_that_call_it() -> None:
    source = (
        f"{HEAD}def within(most_s=4.0):\n    until_s = time.monotonic() + most_s\n"
        "    assert time.monotonic() < until_s\n"
        "def test_it():\n    within()\n"
        "def test_other():\n    assert 1 < 2\n"
    )
    assert list(bounds_in(source, "a.py")) == [TimeBound(4.0, "a.py::test_it", 5)]


def test_wait_that_ends_without_an_assertion_is_not_a_bound() -> None:
    source = f"{HEAD}def test_it():\n    if time.monotonic() < 9: pass\n    assert True\n"
    assert not list(bounds_in(source, "a.py"))
