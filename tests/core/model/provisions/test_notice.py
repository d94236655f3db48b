"""A command's notice is as long as the command asks, as the island allows, and as others bear."""

from __future__ import annotations

import pytest

from app.core.model.provisions.notice import Notice, notice_us

MINUTE = Notice(seconds=60.0)


@pytest.mark.parametrize(
    ("rule", "most_s", "seconds"),
    [
        ("drain", 300.0, 60),
        ("drain", 30.0, 30),
        ("move", 300.0, 60),
        ("F5", 300.0, 10),  # the device is owed to another tenant: one slice at most
        ("F5", 5.0, 5),
        ("F4", 300.0, 0),  # it is only frozen where it is
    ],
)
def test_notice_is_as_long_as_the_shortest_bound(rule: str, most_s: float, seconds: int) -> None:
    assert notice_us(MINUTE, rule, most_s=most_s, slice_s=10.0) == seconds * 1_000_000


def test_task_that_asks_for_no_notice_gets_none() -> None:
    assert notice_us(None, "drain", most_s=300.0, slice_s=10.0) == 0
