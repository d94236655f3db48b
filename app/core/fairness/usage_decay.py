"""Computes how usage fades with a half-life (rule F2), and scores that compare exactly (rule F3).

* Usage fades lazily. A charge made at time t is stored as charge * 2^((t - T0) / H) and never
  touched again. The common factor 2^-((now - T0) / H) turns the sum into today's usage. The factor
  is the same for all branches, so waiting never changes the *order*, and the order is kept without
  the factor.
* Faded usage is an integer in units of 2^-40 µs. A score is an integer that orders exactly as
  usage / weight does; no float is ever compared.

`app.scheduling.ledger` does what rule F1 says (what is charged).
"""

from __future__ import annotations

import math

FIXED_POINT_BITS = 40
SHORTEST_HALF_LIFE_S = 1.0
# 100 years: up to this a float counts microseconds exactly
LONGEST_HALF_LIFE_S = 100 * 366 * 86400.0


def half_life(half_life_s: float) -> float:
    """Return the half-life if usage can fade by it; raises ValueError if not."""
    if half_life_s and not SHORTEST_HALF_LIFE_S <= half_life_s <= LONGEST_HALF_LIFE_S:
        raise ValueError(
            f"must be 0 (usage never decays) or from {SHORTEST_HALF_LIFE_S:g} s to "
            f"{LONGEST_HALF_LIFE_S:.0f} s (100 years); got {half_life_s:g} s"
        )
    return half_life_s


def faded(charge_us: int, *, at_s: float, since_s: float, half_life_s: float) -> int:
    """Return a charge in the form in which it is added to a sum that starts at T0 = `since_s`.

    `charge_us` was made at `at_s`. The result is linear in the charge for `at_s >= since_s`. A
    half-life of 0 means that usage never fades.
    """
    growth, doublings = growth_over(at_s - since_s, half_life_s)
    return _shifted(charge_us * growth, doublings)


def unheard_us(*, now_s: float, heard_s: float, lease_ends_s: float, lease_s: float) -> int:
    """Return how long a device was held after its last heartbeat, in µs, if it is lost now (F1).

    It was held until its lease ended, at most `lease_s` after the heartbeat; or until `now_s`, if
    another process speaks for the device by then.
    """
    until_s = min(now_s, lease_ends_s, heard_s + lease_s)
    return max(0, round((until_s - heard_s) * 1e6))


def usage_us(faded: int, *, now_s: float, since_s: float, half_life_s: float) -> int:
    """Return how many decayed device-microseconds a faded sum stands for now; for display only.

    T0 is in the future if the clock has jumped back; until then usage has not faded.
    """
    growth, doublings = growth_over(max(0.0, now_s - since_s), half_life_s)
    numerator = faded << max(0, -doublings)
    denominator = growth << max(0, doublings)
    return (2 * numerator + denominator) // (2 * denominator)


def rebase(faded: int, halvings: int) -> int:
    """Return the same sum for a T0 that is `halvings` half-lives later.

    Sums keep their order.
    """
    return _shifted(faded, -halvings)


def carried_over(used: int, carried: int, *, weight: int, new_weight: int) -> int:
    """Return what a branch carries after a change of its weight, so that its place in the order
    stays (rule F3).

    `used` is its faded usage. `carried` is what earlier changes of the weight added to it, or took
    from it, in comparisons. The score stays what it was; usage from now on counts by the new
    weight. The result fades like usage, and `used` plus the result is never below 0.
    """
    return (used + carried) * new_weight // weight - used


def growth_over(elapsed_s: float, half_life_s: float) -> tuple[int, int]:
    """Return 2^(elapsed / half-life) as (mantissa in units of 2^-40, whole doublings)."""
    if half_life_s <= 0:
        return 1 << FIXED_POINT_BITS, 0
    half_lives = elapsed_s / half_life_s
    doublings = math.floor(half_lives)
    return round(math.ldexp(2.0 ** (half_lives - doublings), FIXED_POINT_BITS)), doublings


def integral_over(elapsed_s: float, half_life_s: float) -> int:
    """Return the integral of 2^(t / half-life) up to `elapsed_s`, in µs and units of 2^-40.

    The integral only grows.  One device used from a to b adds integral(b) - integral(a) of faded
    usage.
    """
    if half_life_s <= 0:
        return round(elapsed_s * 1e6) << FIXED_POINT_BITS
    half_lives = elapsed_s / half_life_s
    doublings = math.floor(half_lives)
    mean_us = half_life_s * 1e6 / math.log(2)
    return _shifted(
        round(math.ldexp(mean_us * 2.0 ** (half_lives - doublings), FIXED_POINT_BITS)), doublings
    )


def _shifted(value: int, bits: int) -> int:
    return value << bits if bits >= 0 else value >> -bits


# --- scores that compare exactly (rule F3) ------------------------------------------------------

SCORE_BITS = 128  # twice the bits of a weight


def score(faded: int, weight: int) -> int:
    """Return an integer that orders exactly as `faded / weight` does, for weights below 2^64.

    Two different fractions a/v and b/w differ by at least 1/(v*w). Multiplied by 2^128 they differ
    by more than 1, so rounding down neither swaps them nor makes them equal. Equal fractions stay
    equal.
    """
    return (faded << SCORE_BITS) // weight


def unscored(score: int, weight: int) -> int:
    """Return the faded usage that gives a branch of this weight this score; for display only."""
    return (score * weight) >> SCORE_BITS
