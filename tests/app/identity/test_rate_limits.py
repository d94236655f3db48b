"""Rate limits: what is counted, what is refused, what is said of it, and Redis being away.

Quotas are so small here that a bucket takes longer to get room for one more call than a test runs;
time goes by only where a test moves it.
"""

from __future__ import annotations

import logging
import re
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from app.api.access import auth
from app.identity import rate_limits
from app.identity.rate_limits import WINDOW_S, Limiter, RateBucket, cost_us
from app.main import create_app
from app.settings import settings
from tests.app.conftest import descriptor, problem


@pytest.fixture
def buckets(servers, environment):
    """Redis, in which no bucket has been begun."""
    rate_limits._limiter.cache_clear()
    with redis.Redis.from_url(servers.redis_url) as client:
        for key in client.scan_iter("rate:*"):
            client.delete(key)
        yield client
    rate_limits._limiter.cache_clear()


@pytest.fixture
def limited(monkeypatch, buckets):
    """Sets quotas: `limited(key_reads=3)`; what is not named has none."""

    def limit(**quotas):
        for name in ("key_reads", "key_writes", "tenant_reads", "tenant_writes"):
            monkeypatch.setenv(f"ROUNDHOUSE_{name.upper()}_PER_MIN", str(quotas.get(name, 0)))
        settings.cache_clear()

    return limit


def go_by(buckets, seconds):
    """Every bucket is as if so much time had gone by."""
    for key in buckets.scan_iter("rate:*"):
        full_us = int(buckets.get(key))
        buckets.set(key, full_us - seconds * 10**6)


def refused(answer, whose):
    found = problem(answer, 429, "rate-limited")
    assert whose in found["detail"]
    return int(answer.headers["retry-after"])


class TestWhatIsRefused:
    def test_key_may_make_its_quota_of_calls_per_minute_and_no_more(self, as_, limited, buckets):
        limited(key_reads=3)
        red = as_("red.member")
        assert [red.get("/v1/me").status_code for _ in range(4)] == [200, 200, 200, 429]
        wait_s = refused(red.get("/v1/me"), "This key may make 3 reads in 60 s")
        assert 10 < wait_s <= 20  # a third of a minute brings one more
        assert as_("red.other").get("/v1/me").status_code == 200
        go_by(buckets, wait_s)
        assert [red.get("/v1/me").status_code for _ in range(2)] == [200, 429]

    def test_keys_of_a_tenant_share_a_quota(self, as_, limited):
        limited(tenant_reads=2)
        for who in ("red.member", "red.viewer"):
            assert as_(who).get("/v1/me").status_code == 200
        refused(as_("red.other").get("/v1/me"), "All keys of your tenant together")
        assert as_("blue.member").get("/v1/me").status_code == 200

    def test_reads_and_writes_are_counted_separately(self, red, limited):
        limited(key_reads=1, key_writes=1)
        assert red.post("/v1/requests", json=descriptor()).status_code == 202
        assert red.get("/v1/requests").status_code == 200
        refused(red.get("/v1/requests"), "1 reads")
        refused(red.post("/v1/requests", json=descriptor()), "1 changes")

    def test_call_refused_by_one_bucket_uses_nothing_of_the_other(self, as_, limited):
        limited(key_reads=1, tenant_reads=2)
        red = as_("red.member")
        assert [red.get("/v1/me").status_code for _ in range(5)] == [200, 429, 429, 429, 429]
        assert as_("red.other").get("/v1/me").status_code == 200
        refused(as_("red.viewer").get("/v1/me"), "All keys of your tenant")

    def test_a_refused_call_changes_nothing_and_asks_the_database_nothing(
        self, red, limited, rows, monkeypatch
    ):
        limited(key_writes=1)
        assert red.post("/v1/requests", json=descriptor()).status_code == 202
        before = rows()
        monkeypatch.setattr(auth, "caller_of_key", lambda *_: pytest.fail("it was looked up"))
        refused(red.post("/v1/requests", json=descriptor()), "This key")
        assert rows() == before

    def test_revoked_key_is_unknown_however_often_it_was_valid(self, as_, limited, world):
        limited(key_reads=100)
        key = auth.id_of(world.keys["red.member"])
        assert as_("red.member").get("/v1/me").status_code == 200
        as_("root").delete(f"/v1/keys/{key}")
        problem(as_("red.member").get("/v1/me"), 401, "unauthenticated")

    def test_simultaneous_calls_get_no_more_than_the_quota(self, limited, buckets):
        limited(key_reads=2)
        with ThreadPoolExecutor(8) as threads:
            taken = list(
                threads.map(
                    lambda _: rate_limits.take(key_id="k", tenant_id="t", reads=True), range(40)
                )
            )
        assert sum(one.refused is None for one in taken) == 2

    def test_frequent_caller_asks_redis_seldom_and_gets_no_more(
        self, servers, buckets, monkeypatch
    ):
        """A quota of 24,000 brings 20 calls in AHEAD_S.  Redis' own clock goes on, so a bucket that
        is half empty is put there: what was taken from it shows in when it will be full.
        """
        monkeypatch.setattr(rate_limits.time, "monotonic", lambda: 0.0)
        limiter, trips = Limiter(servers.redis_url), []
        ask = limiter._take
        monkeypatch.setattr(limiter, "_take", lambda **all: trips.append(1) or ask(**all))
        quotas = {"key-reads": ("k", 24_000)}
        seconds, _ = buckets.time()
        begun_us = (seconds + WINDOW_S // 2) * 10**6
        buckets.set("rate:key-reads:k", begun_us)
        assert all(limiter.take(quotas).refused is None for _ in range(33))
        assert len(trips) == 3  # one, and twice as many as are taken ahead
        taken_us = int(buckets.get("rate:key-reads:k")) - begun_us
        assert taken_us == 33 * cost_us(24_000)
        buckets.set("rate:key-reads:k", (seconds + 3600) * 10**6)
        assert limiter.take(quotas).refused is not None

    def test_unused_calls_expire(self, servers, buckets, monkeypatch):
        now_s = [0.0]
        monkeypatch.setattr(rate_limits.time, "monotonic", lambda: now_s[0])
        limiter, quotas = Limiter(servers.redis_url), {"key-reads": ("k", 24_000)}
        for _ in range(2):
            limiter.take(quotas)
        assert limiter.take_held(quotas) is not None
        now_s[0] += rate_limits.AHEAD_S + 0.001
        assert limiter.take_held(quotas) is None

    def test_key_that_comes_back_after_a_pause_is_charged_for_one_call(
        self, servers, buckets, monkeypatch
    ):
        """The bucket is half empty, as above."""
        now_s = [0.0]
        monkeypatch.setattr(rate_limits.time, "monotonic", lambda: now_s[0])
        limiter, quotas = Limiter(servers.redis_url), {"key-reads": ("k", 24_000)}
        begun_us = (buckets.time()[0] + WINDOW_S // 2) * 10**6
        buckets.set("rate:key-reads:k", begun_us)
        limiter.take(quotas)
        now_s[0] += rate_limits.AHEAD_S + 0.001
        limiter.take(quotas)
        assert int(buckets.get("rate:key-reads:k")) - begun_us == 2 * cost_us(24_000)

    def test_small_quotas_are_counted_call_by_call(self, servers, buckets):
        limiter, quotas = Limiter(servers.redis_url), {"key-reads": ("k", 600)}
        for _ in range(3):
            limiter.take(quotas)
            assert limiter.take_held(quotas) is None

    def test_default_quota_is_far_above_what_one_process_serves(self, as_, buckets):
        assert settings().key_writes_per_min >= 2000 * 60
        answer = as_("red.member").get("/v1/me")
        assert '"key-reads";r=119999;t=1' in answer.headers["ratelimit"]


class TestWhatIsSaid:
    def test_every_answer_says_what_is_left(self, as_, limited):
        limited(key_reads=4, tenant_reads=6)
        red = as_("red.member")
        for path, status in (("", 200), ("/req_0", 404), ("?state=x", 422)):
            answer = red.get(f"/v1/requests{path}")
            assert answer.status_code == status
            policy = answer.headers["ratelimit-policy"]
            assert policy == '"key-reads";q=4;w=60, "tenant-reads";q=6;w=60'
        [key, tenant] = self.left(answer)
        assert (key[0], tenant[0]) == (1, 3)
        assert 30 < key[1] <= 45  # three calls of a quarter of a minute each
        assert 20 < tenant[1] <= 30

    def test_refusal_says_what_is_left_too(self, as_, limited):
        limited(key_reads=2)
        red = as_("red.member")
        answers = [red.get("/v1/me") for _ in range(3)]
        left = [self.left(answer)[0] for answer in answers]
        assert [r for r, _ in left] == [1, 0, 0]
        assert all(50 < t <= 60 for _, t in left[1:])
        assert 20 < int(answers[2].headers["retry-after"]) <= 30

    @staticmethod
    def left(answer):
        found = re.findall(r"r=(\d+);t=(\d+)", answer.headers["ratelimit"])
        return [(int(r), int(t)) for r, t in found]

    def test_call_without_a_quota_has_no_headers(self, as_, limited):
        limited()
        answer = as_("red.member").get("/v1/me")
        assert not [name for name in answer.headers if name.startswith("ratelimit")]

    def test_every_operation_declares_its_rate_limit(self):
        paths = create_app().openapi()["paths"]
        lacking = [
            (path, method)
            for path, methods in paths.items()
            for method, operation in methods.items()
            if path.startswith("/v1/") and "429" not in operation["responses"]
        ]
        assert lacking == []

    def test_error_of_the_rate_limit_has_a_page(self, as_):
        page = as_("").get("/problems/rate-limited")
        assert page.status_code == 200
        assert "Retry-After" in page.text


class TestRedisAway:
    @pytest.fixture
    def nobody(self, tmp_path):
        """An address at which nobody is."""
        return f"unix://{tmp_path}/nobody.sock"

    @pytest.fixture
    def silent(self, tmp_path):
        """An address at which somebody takes calls and never answers."""
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{tmp_path}/s")
            listener.listen()
            yield f"unix://{tmp_path}/s"

    @pytest.mark.parametrize("kind", ["nobody", "silent"])
    def test_no_call_is_refused_without_redis_and_the_log_says_so_once(
        self, kind, request, as_, limited, monkeypatch, caplog
    ):
        monkeypatch.setenv("REDIS_URL", request.getfixturevalue(kind))
        monkeypatch.setattr(rate_limits, "TIMEOUT_S", 0.05)
        monkeypatch.setattr(rate_limits, "AGAIN_S", 3600.0)  # it is tried once
        limited(key_reads=1)
        red = as_("red.member")
        with caplog.at_level(logging.WARNING, logger="app.identity.rate_limits"):
            answers = [red.get("/v1/me") for _ in range(5)]
        assert [answer.status_code for answer in answers] == [200] * 5
        assert "ratelimit" not in answers[0].headers
        [said] = [record.getMessage() for record in caplog.records]
        assert "rate limits are off for 3600 s" in said

    def test_calls_count_again_when_redis_is_back(self, buckets, servers):
        limiter = Limiter(servers.redis_url)
        quotas = {"key-reads": ("k", 1)}
        limiter._away_until_s = float("inf")
        assert limiter.take(quotas).buckets == ()
        limiter._away_until_s = 0.0
        assert [limiter.take(quotas).refused is None for _ in range(2)] == [True, False]

    def test_count_lost_by_redis_is_forgiven(self, as_, limited, buckets):
        limited(key_reads=1)
        red = as_("red.member")
        assert [red.get("/v1/me").status_code for _ in range(2)] == [200, 429]
        buckets.delete(*buckets.scan_iter("rate:*"))
        buckets.script_flush()
        assert red.get("/v1/me").status_code == 200

    def test_calls_are_not_counted_without_redis(self, as_, limited, monkeypatch):
        monkeypatch.setenv("REDIS_URL", "")
        limited(key_reads=1)
        assert [as_("red.member").get("/v1/me").status_code for _ in range(2)] == [200, 200]


@given(st.integers(1, 10**9), st.integers(0, 2 * WINDOW_S * 10**6))
def test_a_bucket_is_empty_until_it_has_room_for_one_more(quota, full_in_us):
    bucket = RateBucket(name="b", quota=quota, full_in_us=full_in_us)
    room_us = WINDOW_S * 10**6 - full_in_us
    assert (bucket.remaining == 0) == (room_us < cost_us(quota))
    if not bucket.remaining:
        later = RateBucket(
            name="b", quota=quota, full_in_us=max(0, full_in_us - bucket.next_in_s * 10**6)
        )
        assert later.remaining >= 1


@given(st.integers(1, 10**6))
def test_a_full_bucket_holds_its_quota(quota):
    assert RateBucket(name="b", quota=quota, full_in_us=0).remaining >= quota


def test_a_browser_session_counts_as_its_key(app, world, limited, buckets):
    limited(key_reads=2)
    browser = TestClient(app, follow_redirects=False)
    ours = {"Sec-Fetch-Site": "same-origin"}
    browser.post("/ui/login", data={"key": world.keys["red.member"]}, headers=ours)
    assert browser.get("/v1/me").status_code == 200
    key = TestClient(app, headers={"Authorization": f"Bearer {world.keys['red.member']}"})
    assert [key.get("/v1/me").status_code for _ in range(2)] == [200, 429]
    assert browser.get("/v1/me").status_code == 429
