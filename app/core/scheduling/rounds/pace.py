"""Sets how often the devices of an island report, and how long each may act without an answer.

An island has time for a bounded number of heartbeats a second. So the more devices report, the
less often each does, and the longer is its lease (Nomad's servers pace their clients so, too).
Reports of events are sent at once at any pace.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: A lease is longer than the shortest one by so many times the delay of a beat: two of three
#: heartbeats may be lost or late.
DELAYS_A_LEASE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatPace:
    """Tells in which time a device reports again, and how long its lease is, in seconds."""

    beat_s: float
    lease_s: float

    @property
    def beat_us(self) -> int:
        return int(self.beat_s * 1e6)

    @property
    def lease_us(self) -> int:
        return int(self.lease_s * 1e6)


def pace_for(
    devices: int, *, beat_s: float, lease_s: float, beats_a_second: float
) -> HeartbeatPace:
    """Return the pace at which so many devices send at most `beats_a_second` heartbeats.

    `beat_s` and `lease_s` are those of few devices. A slower beat is a multiple of `beat_s`, so
    that it stays the same while devices come and go.
    """
    times = max(1, math.ceil(devices / (beats_a_second * beat_s)))
    delay_s = (times - 1) * beat_s
    return HeartbeatPace(beat_s=beat_s + delay_s, lease_s=lease_s + DELAYS_A_LEASE * delay_s)
