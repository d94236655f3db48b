"""Says how far the wall clock of a device's host is off.  Nothing is decided by it.

No rule of Roundhouse compares the clocks of two hosts: leases go by the clock of the database, and
messages by the monotonic clock of their sender. But the files and logs of a host whose clock is off
carry wrong times, and certificates and S3 may refuse it. So people are told.
"""

from __future__ import annotations

from app.core.units import duration

TOLD_S = 10.0  # smaller differences may be the time that a report waited
KEPT_S = 1.0  # a host does not report a smaller change of its clock


def began_s(known_s: float | None, *, wall_s: float, monotonic_s: float) -> int:
    """Return the wall clock's time at which the host's monotonic clock began, in whole seconds.

    It stays the same until a clock was set: reports that say nothing new cost the island little.
    """
    now_s = wall_s - monotonic_s
    if known_s is not None and abs(now_s - known_s) <= KEPT_S:
        return int(known_s)
    return max(0, round(now_s))


def wall_clock_s(clock_began_s: float, *, sent_us: int, since_s: float) -> float:
    """Return what the host's wall clock shows `since_s` after its report of `sent_us` was heard."""
    return clock_began_s + sent_us / 1e6 + since_s


def skew_s(clock_began_s: float, *, sent_us: int, heard_s: float) -> float:
    """Return how far the host's clock was ahead of the database's, which heard the report of
    `sent_us` at `heard_s`; negative: behind.
    """
    return wall_clock_s(clock_began_s, sent_us=sent_us, since_s=0.0) - heard_s


def told_skew(skew_s: float) -> str:
    """Say it to people; empty if the clock may be right."""
    if abs(skew_s) < TOLD_S:
        return ""
    side = "ahead of" if skew_s > 0 else "behind"
    return f"The clock of its host is {duration(abs(skew_s))} {side} the database's."
