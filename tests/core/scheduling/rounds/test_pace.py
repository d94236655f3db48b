"""How often many devices report, and how long each may act unheard."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.scheduling.rounds.pace import HeartbeatPace, pace_for

FEW = {"beat_s": 2.0, "lease_s": 10.0}


@pytest.mark.parametrize(
    ("devices", "beat_s", "lease_s"),
    [(0, 2, 10), (1, 2, 10), (800, 2, 10), (801, 4, 16), (1_600, 4, 16), (10_240, 26, 82)],
)
def test_many_devices_report_less_often_and_have_longer_leases(
    devices: int, beat_s: float, lease_s: float
) -> None:
    found = pace_for(devices, **FEW, beats_a_second=400.0)
    assert found == HeartbeatPace(beat_s=beat_s, lease_s=lease_s)
    assert (found.beat_us, found.lease_us) == (beat_s * 1_000_000, lease_s * 1_000_000)


@given(st.integers(0, 10**6), st.floats(0.1, 60), st.floats(1, 10), st.floats(1, 10_000))
def test_no_number_of_devices_sends_more_than_an_island_asks_for(
    devices: int, beat_s: float, times: float, beats_a_second: float
) -> None:
    lease_s = beat_s * times
    found = pace_for(devices, beat_s=beat_s, lease_s=lease_s, beats_a_second=beats_a_second)
    assert devices / found.beat_s <= beats_a_second * (1 + 1e-9)
    assert found.beat_s >= beat_s
    assert found.lease_s / found.beat_s >= min(times, 3.0) * (1 - 1e-9)
