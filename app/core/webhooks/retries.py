"""Decides when a webhook message is sent again, and when it is given up.

The times follow Standard Webhooks (https://www.standardwebhooks.com), version 1. A message keeps
its id whenever it is sent again. Only an answer of 2xx accepts it; 410 asks for no more messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

#: seconds before each attempt, in all a little more than three days; after the last attempt a
#: message is given up
WAITS_S = (0, 5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400)
JITTER = 0.2  # the largest part of each wait that is added at random, so that retries spread out

Verdict = StrEnum("Verdict", ["delivered", "again", "unwanted"])


def verdict(status: int | None) -> Verdict:
    """Judge an answer by its status; None means no answer.  A redirect is not followed."""
    if status is not None and 200 <= status < 300:
        return Verdict.delivered
    return Verdict.unwanted if status == 410 else Verdict.again


def wait_s(tries: int, luck: float) -> float | None:
    """Return the seconds to wait after `tries` attempts, or None to give up.

    `luck` is a random number from [0, 1).
    """
    if tries >= len(WAITS_S):
        return None
    return WAITS_S[tries] * (1 + JITTER * luck)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptAnswer:
    """Describes the answer to an attempt; `status` is None if there was none, and `error`
    says why.
    """

    status: int | None
    error: str
    took_us: int
