"""How many calls a key and a tenant may make, counted in Redis for all API processes together.

A bucket holds a minute's calls and fills up evenly.  It is one number: when it will be full again.
A call takes from all its buckets or from none, in one round trip, by the clock of Redis.

Redis keeps nothing that may not be lost.  While it is away nobody is refused, and only every
AGAIN_S is it waited for, for TIMEOUT_S twice.

(The library `limits` takes four round trips for two buckets and what is left in them, counts in
one what the other refuses, and does not go with the redis client that we have.)
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from app.settings import settings

log = logging.getLogger(__name__)

WINDOW_S = 60
TIMEOUT_S = 0.1
AGAIN_S = 5.0
_US = 1_000_000

# For each bucket KEYS has its name, and ARGV what a call costs and what it holds, in microseconds.
# Returns whether one of them was short, the time, and when each will be full again.
_TAKE = """
local clock = redis.call('TIME')
local now, short, full = clock[1] * 1000000 + clock[2], 0, {}
for i, key in ipairs(KEYS) do
  full[i] = math.max(tonumber(redis.call('GET', key) or 0), now)
  if full[i] + ARGV[2 * i - 1] - now > tonumber(ARGV[2 * i]) then short = 1 end
end
if short == 0 then
  for i, key in ipairs(KEYS) do
    full[i] = full[i] + ARGV[2 * i - 1]
    redis.call('SET', key, string.format('%.0f', full[i]), 'PX', math.ceil(ARGV[2 * i] / 1000))
  end
end
return {short, now, unpack(full)}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """As it is after a call; `quota` calls in WINDOW_S, `full_in_us` until it is full again."""

    name: str
    quota: int
    full_in_us: int

    @property
    def remaining(self) -> int:
        return max(0, (WINDOW_S * _US - self.full_in_us) // cost_us(self.quota))

    @property
    def full_in_s(self) -> int:
        return math.ceil(self.full_in_us / _US)

    @property
    def next_in_s(self) -> int:
        """Until it has room for one more call, at least 1; for a bucket that is empty."""
        missing_us = self.full_in_us + cost_us(self.quota) - WINDOW_S * _US
        return max(1, math.ceil(missing_us / _US))


@dataclass(frozen=True, slots=True)
class Taken:
    """`refused`: the bucket that was short, of several the one that is so for longest."""

    buckets: tuple[Bucket, ...] = ()
    refused: Bucket | None = None


def cost_us(quota: int) -> int:
    return max(1, WINDOW_S * _US // quota)


class Limiter:
    """One a process and Redis."""

    def __init__(self, redis_url: str) -> None:
        options: dict[str, Any] = {
            "socket_timeout": TIMEOUT_S,
            "socket_connect_timeout": TIMEOUT_S,
            "retry": Retry(NoBackoff(), 1),
        }
        self._take = Redis.from_url(redis_url, **options).register_script(_TAKE)
        self._away_until_s = 0.0  # by the monotonic clock
        self._lock = threading.Lock()

    def take(self, quotas: Mapping[str, tuple[str, int]]) -> Taken:
        """One call out of each bucket: its name -> (whose it is, calls a minute)."""
        if not quotas or time.monotonic() < self._away_until_s:
            return Taken()
        keys = [f"rate:{name}:{whose}" for name, (whose, _) in quotas.items()]
        args = [n for _, quota in quotas.values() for n in (cost_us(quota), WINDOW_S * _US)]
        try:
            short, now_us, *full_us = self._take(keys=keys, args=args)
        except (RedisError, OSError) as error:
            self._gone(error)
            return Taken()
        buckets = tuple(
            Bucket(name=name, quota=quota, full_in_us=full - now_us)
            for (name, (_, quota)), full in zip(quotas.items(), full_us, strict=True)
        )
        return Taken(buckets, _emptiest(buckets) if short else None)

    def _gone(self, error: Exception) -> None:
        """Said once, though many calls find it out at once."""
        now_s = time.monotonic()
        with self._lock:
            first, self._away_until_s = now_s >= self._away_until_s, now_s + AGAIN_S
        if first:
            log.warning("no call is refused for %g s, as Redis is away: %s", AGAIN_S, error)


def _emptiest(buckets: tuple[Bucket, ...]) -> Bucket:
    empty = [bucket for bucket in buckets if not bucket.remaining]
    return max(empty, key=lambda bucket: bucket.next_in_s)


@lru_cache
def _limiter(redis_url: str) -> Limiter:
    return Limiter(redis_url)


def take(*, key_id: str, tenant_id: str, reads: bool) -> Taken:
    """One call of this key of this tenant."""
    what, quotas = "reads" if reads else "writes", {}
    for who, id in (("key", key_id), ("tenant", tenant_id)):
        if quota := getattr(settings(), f"{who}_{what}_per_min"):
            quotas[f"{who}-{what}"] = (id, quota)
    url = settings().redis_url.get_secret_value()
    return _limiter(url).take(quotas) if url else Taken()
