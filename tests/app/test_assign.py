"""Which island a request goes to."""

from __future__ import annotations

from collections import Counter

import pytest

from app.assign import choose

SMALL = {"small": Counter(cpu=1)}
BOTH = {"big": Counter(cpu=4), "small": Counter(cpu=1)}
MIXED = {"east": Counter(cpu=2), "west": Counter(cpu=2, cuda=1)}


@pytest.mark.parametrize(
    ("kinds", "devices", "load", "island"),
    [
        ({"cpu": 1}, SMALL, {"small": 9}, "small"),  # the only one
        ({"cpu": 1}, BOTH, {"big": 4, "small": 0}, "small"),  # 4/4 > 0/1
        ({"cpu": 1}, BOTH, {"big": 4, "small": 2}, "big"),  # 4/4 < 2/1
        ({"cpu": 1}, MIXED, {"east": 0, "west": 0}, "east"),  # 0 = 0: by name
        ({"cpu": 1, "cuda": 1}, MIXED, {"east": 0, "west": 9}, "west"),  # all kinds in one place
        ({"tpu": 1}, MIXED, {"east": 0, "west": 0}, None),  # nobody has it
    ],
)
def test_a_request_goes_where_most_is_free_for_each_task(kinds, devices, load, island):
    assert choose(kinds, devices, Counter(load)) == island
