"""Implements a token bucket: it limits an amount, both at once and in the long run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TokenBucket:
    """Holds up to `burst` tokens, refilled by `per_s` per second.

    More tokens may be taken than there are. Then the bucket is in debt, and the caller must wait
    until the debt is paid.
    """

    burst: float
    per_s: float
    left: float = 0.0
    at_us: int = 0

    def __post_init__(self) -> None:
        self.left = self.burst

    def take(self, tokens: float, now_us: int) -> None:
        """Take tokens; an earlier `now_us` than the last one refills nothing."""
        came = max(0, now_us - self.at_us) * self.per_s / 1e6
        self.left = min(self.burst, self.left + came) - tokens
        self.at_us = max(self.at_us, now_us)

    def debt_us(self, now_us: int) -> int:
        """Return how long it takes until the debt is paid, in microseconds; 0 if there is no
        debt.
        """
        self.take(0.0, now_us)
        return 0 if self.left >= 0 else int(-self.left / self.per_s * 1e6) + 1
