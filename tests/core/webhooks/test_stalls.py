"""Stalls: a task that holds a device and makes no progress is told once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.core.webhooks.stalls import SignsOfProgress, judge_progress

STALLED_US = 100

LOOKS = st.lists(st.tuples(st.integers(0, 80), st.booleans()))


@given(LOOKS, st.sampled_from(["step", "line", "row"]))
def test_stall_is_told_once_for_each_stretch_without_progress(looks, grows):
    """Each look comes after more time on the device, with or without progress."""
    seen, n, held_us, stretches = None, 0, 0, [[0]]
    for passed_us, goes_on in looks:
        held_us, n = held_us + passed_us, n + goes_on
        if goes_on or seen is None:
            stretches.append([held_us, 0])
        progress = SignsOfProgress(**{grows: n})
        seen, is_due = judge_progress(seen, progress, held_us=held_us, stalled_us=STALLED_US)
        is_stalled = held_us - stretches[-1][0] >= STALLED_US
        assert is_due == (is_stalled and not stretches[-1][1])
        stretches[-1][1] += is_due
        assert seen.is_told == bool(stretches[-1][1])


def test_time_without_a_device_does_not_count():
    seen, _ = judge_progress(None, SignsOfProgress(step=3), held_us=50, stalled_us=STALLED_US)
    for _ in range(1000):  # looks while it is paused
        seen, is_due = judge_progress(
            seen, SignsOfProgress(step=3), held_us=50, stalled_us=STALLED_US
        )
        assert not is_due
