"""A token bucket: how much somebody may say, in bursts and in the long run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Bucket:
    """Up to `burst` tokens, of which `per_s` come back each second.  More may be taken than are
    there: then it is in debt, and whoever took them waits until that is paid.
    """

    burst: float
    per_s: float
    left: float = 0.0
    at_us: int = 0

    def __post_init__(self) -> None:
        self.left = self.burst

    def take(self, tokens: float, now_us: int) -> None:
        """Time never runs backwards here: an earlier `now_us` brings nothing."""
        came = max(0, now_us - self.at_us) * self.per_s / 1e6
        self.left = min(self.burst, self.left + came) - tokens
        self.at_us = max(self.at_us, now_us)

    def debt_us(self, now_us: int) -> int:
        """How long until nothing is owed; 0 if nothing is."""
        self.take(0.0, now_us)
        return 0 if self.left >= 0 else int(-self.left / self.per_s * 1e6) + 1
