"""Limits the rate of calls of keys and tenants, counted in Redis for all API processes together.

A bucket holds the calls of one minute and refills evenly. It is stored as one number: the time at
which it will be full again. A call takes from all its buckets or from none, in one round trip, by
the clock of Redis.

A key that calls frequently takes some calls ahead, so that most calls need no round trip. Calls
that it has not used after AHEAD_S are lost. AHEAD and AHEAD_S are too small to matter for a quota:
small quotas are counted call by call.

Redis holds nothing that may not be lost. While it is unreachable no call is refused, and it is
tried only every AGAIN_S, for twice TIMEOUT_S.

(The library `limits` needs four round trips for two buckets and their remainders, counts calls in
one bucket that the other refuses, and does not work with our redis client.)
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
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
AHEAD = 16  # most calls that are taken ahead at once; a quota must refill as many within AHEAD_S
AHEAD_S = 0.05
KEPT = 10_000  # keys with a remembered last call
_US = 1_000_000

# For each bucket, KEYS has its name, and ARGV has the cost of a call and its size, in microseconds.
# The last item of ARGV is the number of calls wanted.  Returns the number of calls taken, the time,
# and when each bucket will be full again.
_TAKE = """
local clock = redis.call('TIME')
local now, taken, full = clock[1] * 1000000 + clock[2], tonumber(ARGV[#ARGV]), {}
for i, key in ipairs(KEYS) do
  full[i] = math.max(tonumber(redis.call('GET', key) or 0), now)
  taken = math.min(taken, math.floor((now + ARGV[2 * i] - full[i]) / ARGV[2 * i - 1]))
end
if taken > 0 then
  for i, key in ipairs(KEYS) do
    full[i] = full[i] + taken * ARGV[2 * i - 1]
    redis.call('SET', key, string.format('%.0f', full[i]), 'PX', math.ceil(ARGV[2 * i] / 1000))
  end
end
return {math.max(taken, 0), now, unpack(full)}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateBucket:
    """Describes a bucket after a call: `quota` calls in WINDOW_S, and `full_in_us` until it is full
    again.
    """

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
        """Seconds until an empty bucket has room for one more call, at least 1."""
        missing_us = self.full_in_us + cost_us(self.quota) - WINDOW_S * _US
        return max(1, math.ceil(missing_us / _US))


@dataclass(frozen=True, slots=True)
class RateResult:
    """The result of a call; `refused` is the empty bucket with the longest wait, if any."""

    buckets: tuple[RateBucket, ...] = ()
    refused: RateBucket | None = None


def cost_us(quota: int) -> int:
    return max(1, WINDOW_S * _US // quota)


Quotas = Mapping[str, tuple[str, int]]
"""Buckets by name: (owner, calls a minute)."""


@dataclass(slots=True)
class _Ahead:
    """Calls that were taken ahead at `at_s`, by the monotonic clock, and not made yet.

    `full_in_us` has the value of each bucket at that time.
    """

    at_s: float
    left: int
    full_in_us: tuple[int, ...]

    def buckets(self, quotas: Quotas, now_s: float) -> tuple[RateBucket, ...]:
        """Return the buckets as they will be if the calls that are left are not made."""
        gone_us = round((now_s - self.at_s) * _US)
        return tuple(
            RateBucket(
                name=name, quota=quota, full_in_us=max(0, full - gone_us - self._of_us(quota))
            )
            for (name, (_, quota)), full in zip(quotas.items(), self.full_in_us, strict=True)
        )

    def _of_us(self, quota: int) -> int:
        return self.left * cost_us(quota)


class Limiter:
    """The rate limiter of a process, for one Redis."""

    def __init__(self, redis_url: str) -> None:
        options: dict[str, Any] = {
            "socket_timeout": TIMEOUT_S,
            "socket_connect_timeout": TIMEOUT_S,
            "retry": Retry(NoBackoff(), 1),
        }
        self._take = Redis.from_url(redis_url, **options, **settings().redis_tls).register_script(
            _TAKE
        )
        self._away_until_s = 0.0  # by the monotonic clock
        self._ahead: OrderedDict[tuple[Any, ...], _Ahead] = OrderedDict()
        self._lock = threading.Lock()

    def take_held(self, quotas: Quotas) -> RateResult | None:
        """Take one call without a round trip; None if that is impossible."""
        now_s = time.monotonic()
        if not quotas or now_s < self._away_until_s:
            return RateResult()
        with self._lock:
            ahead = self._ahead.get(_cache_key(quotas))
            if ahead is None or not ahead.left or now_s > ahead.at_s + AHEAD_S:
                return None
            ahead.left -= 1
            return RateResult(ahead.buckets(quotas, now_s))

    def take(self, quotas: Quotas) -> RateResult:
        """Take one call out of each bucket."""
        held = self.take_held(quotas)
        return self._take_by_redis(quotas) if held is None else held

    def _take_by_redis(self, quotas: Quotas) -> RateResult:
        keys = [f"rate:{name}:{whose}" for name, (whose, _) in quotas.items()]
        args = [n for _, quota in quotas.values() for n in (cost_us(quota), WINDOW_S * _US)]
        wanted, now_s = self._wanted(quotas), time.monotonic()
        try:
            taken, now_us, *full_us = self._take(keys=keys, args=[*args, wanted])
        except (RedisError, OSError) as error:
            self._gone(error)
            return RateResult()
        ahead = _Ahead(now_s, max(0, taken - 1), tuple(full - now_us for full in full_us))
        buckets = ahead.buckets(quotas, now_s)
        self._keep(quotas, ahead)
        return RateResult(buckets, None if taken else _emptiest(buckets))

    def _wanted(self, quotas: Quotas) -> int:
        """Return the number of calls to take: several for a key that called just now, if its quota
        allows it.
        """
        with self._lock:
            before = self._ahead.get(_cache_key(quotas))
        if before is None or time.monotonic() > before.at_s + AHEAD_S:
            return 1
        least = min(quota for _, quota in quotas.values())
        return max(1, min(AHEAD, int(least * AHEAD_S / WINDOW_S)))

    def _keep(self, quotas: Quotas, ahead: _Ahead) -> None:
        with self._lock:
            self._ahead[_cache_key(quotas)] = ahead
            self._ahead.move_to_end(_cache_key(quotas))
            if len(self._ahead) > KEPT:
                self._ahead.popitem(last=False)

    def _gone(self, error: Exception) -> None:
        """Stop asking Redis for a while.

        It is logged once, although many calls may notice it at the same time.
        """
        now_s = time.monotonic()
        with self._lock:
            first, self._away_until_s = now_s >= self._away_until_s, now_s + AGAIN_S
        if first:
            log.warning(
                "rate limits are off for %g s, because Redis is not available: %s", AGAIN_S, error
            )


def _cache_key(quotas: Quotas) -> tuple[Any, ...]:
    return tuple(quotas.items())


def _emptiest(buckets: tuple[RateBucket, ...]) -> RateBucket:
    empty = [bucket for bucket in buckets if not bucket.remaining]
    return max(empty, key=lambda bucket: bucket.next_in_s)


@lru_cache
def _limiter(redis_url: str) -> Limiter:
    return Limiter(redis_url)


def take(*, key_id: str, tenant_id: str, reads: bool) -> RateResult:
    """Take one call of this key of this tenant."""
    url = settings().redis_url.get_secret_value()
    return _limiter(url).take(_quotas(key_id, tenant_id, reads)) if url else RateResult()


def take_held(*, key_id: str, tenant_id: str, reads: bool) -> RateResult | None:
    """Take one call without asking Redis; None if Redis must be asked."""
    url = settings().redis_url.get_secret_value()
    return _limiter(url).take_held(_quotas(key_id, tenant_id, reads)) if url else RateResult()


def take_wrong_key(address: str) -> RateResult:
    """Count one wrong key from this address."""
    url, quota = settings().redis_url.get_secret_value(), settings().wrong_keys_per_min
    return _limiter(url).take({"wrong-keys": (address, quota)}) if url and quota else RateResult()


def _quotas(key_id: str, tenant_id: str, reads: bool) -> Quotas:
    what, quotas = "reads" if reads else "writes", {}
    for who, id in (("key", key_id), ("tenant", tenant_id)):
        if quota := getattr(settings(), f"{who}_{what}_per_min"):
            quotas[f"{who}-{what}"] = (id, quota)
    return quotas
