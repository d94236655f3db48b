"""A token bucket: bursts, the long run, and debts."""

from __future__ import annotations

from app.core.device.token_bucket import TokenBucket


def test_bucket_allows_a_burst_and_then_what_comes_back():
    bucket = TokenBucket(10.0, 2.0)
    bucket.take(10.0, 0)
    assert bucket.debt_us(0) == 0
    bucket.take(4.0, 0)
    assert bucket.debt_us(0) == 2_000_001
    assert bucket.debt_us(1_000_000) == 1_000_001
    assert bucket.debt_us(3_000_000) == 0


def test_bucket_never_holds_more_than_its_burst():
    bucket = TokenBucket(10.0, 2.0)
    bucket.take(0.0, 10**12)
    bucket.take(11.0, 10**12)
    assert bucket.debt_us(10**12) > 0


def test_earlier_time_brings_nothing():
    bucket = TokenBucket(1.0, 1.0)
    bucket.take(1.0, 5_000_000)
    bucket.take(0.0, 1_000_000)
    assert bucket.left == 0.0
    assert bucket.at_us == 5_000_000
