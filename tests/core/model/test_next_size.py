"""The memory to request next time, from what was held."""

from __future__ import annotations

import pytest

from app.core.model.next_size import UNIT_BYTES, memory_to_request, resources_to_request
from app.core.model.provisions.resources import LEAST_BYTES, Resources

MB = 2**20


@pytest.mark.parametrize(
    ("peak_bytes", "asked_bytes"),
    [(1, 64 * MB), (56 * MB, 64 * MB), (57 * MB, 128 * MB), (1024 * MB, 1152 * MB)],
)
def test_request_is_the_peak_with_an_eighth_to_spare(peak_bytes: int, asked_bytes: int) -> None:
    assert memory_to_request("done", peak_bytes) == asked_bytes
    assert asked_bytes % UNIT_BYTES == 0


@pytest.mark.parametrize(("state", "peak_bytes"), [("running", MB), ("failed", MB), ("done", 0)])
def test_task_that_may_need_more_names_no_request(state: str, peak_bytes: int) -> None:
    assert memory_to_request(state, peak_bytes) is None


def test_limits_to_ask_for_have_an_eighth_to_spare_and_are_whole_units() -> None:
    peaks = {"cpus": 1900, "memory": 2**30, "disk": 5, "processes": 12}
    found = resources_to_request("done", peaks)
    assert found == Resources(
        cpus_milli=2500, memory_bytes=2**30 + 2**27, disk_bytes=LEAST_BYTES, processes=16
    )
    assert resources_to_request("done", {"processes": 999}) == Resources(processes=1000)


@pytest.mark.parametrize(("state", "peaks"), [("failed", {"memory": 5}), ("done", {})])
def test_no_limits_are_named_for_a_task_that_is_not_done_or_not_counted(
    state: str, peaks: dict[str, int]
) -> None:
    assert resources_to_request(state, peaks) is None
