"""The clock of a device's host, as people are told of it."""

from __future__ import annotations

import pytest

from app.core.device.clock_skew import began_s, skew_s, told_skew, wall_clock_s

HEARD_S = 1_000_000.0


@pytest.mark.parametrize(
    ("ahead_s", "told"),
    [
        (90.0, "The clock of its host is 1m 30s ahead of the database's."),
        (-40.0, "The clock of its host is 40.0 s behind the database's."),
        (-3.0, ""),  # the report may have waited so long
        (0.0, ""),
    ],
)
def test_clock_that_is_off_is_told(ahead_s, told):
    up_s = 5000.0
    began = began_s(None, wall_s=HEARD_S + ahead_s, monotonic_s=up_s)
    assert told_skew(skew_s(began, sent_us=int(up_s * 1e6), heard_s=HEARD_S)) == told


def test_report_changes_only_when_the_clock_was_set():
    known = began_s(None, wall_s=HEARD_S + 0.49, monotonic_s=10.0)
    slewed = [began_s(known, wall_s=HEARD_S + 0.49 + n / 10, monotonic_s=10.0) for n in range(5)]
    assert set(slewed) == {known}
    assert began_s(known, wall_s=HEARD_S + 60.0, monotonic_s=10.0) == known + 60


def test_clock_before_1970_is_not_negative():
    assert began_s(None, wall_s=5.0, monotonic_s=1000.0) == 0


def test_ticket_is_made_for_the_clock_of_the_host():
    began = began_s(None, wall_s=HEARD_S + 90.0, monotonic_s=7.0)
    assert wall_clock_s(began, sent_us=7_000_000, since_s=2.0) == HEARD_S + 92.0
