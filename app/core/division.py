"""Who should hold how many devices now: weighted max-min division (rule F3, seen from above).

Nobody gets more than they ask for; what one leaves over is divided among the rest by weight, again
and again.  So the least served by weight is served as well as can be, then the next.  The scheduler
does not use this: it picks by usage, and the pages show what that comes to over time.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction


def division(
    capacity: int, demands: Mapping[str, int], weights: Mapping[str, int]
) -> dict[str, Fraction]:
    """Devices for each name in `demands`, exact; they add up to min(capacity, sum of demands).

    `weights` are positive and may name others too.
    """
    # Who needs least per weight is satisfied first; the level only rises for those who stay.
    order = sorted(demands, key=lambda name: (Fraction(demands[name], weights[name]), name))
    left, weight_left = Fraction(capacity), sum(weights[name] for name in order)
    shares: dict[str, Fraction] = {}
    for name in order:
        fair = left * weights[name] / weight_left
        shares[name] = min(Fraction(demands[name]), fair)
        left -= shares[name]
        weight_left -= weights[name]
    return shares
