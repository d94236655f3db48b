"""Wrong keys are rate-limited by address, counted, and recorded within bounds."""

from __future__ import annotations

import pytest
import redis
from fastapi.testclient import TestClient
from sqlalchemy import func, select

from app.api.access import wrong_keys
from app.api.access.auth import _check, _random
from app.db.models import AuditEvent
from app.identity import audit, rate_limits
from app.settings import settings
from tests.app.conftest import problem

LIMIT = 3


@pytest.fixture
def limited(servers, environment, monkeypatch):
    # so that Redis is awaited on a busy machine, too
    monkeypatch.setattr(rate_limits, "TIMEOUT_S", 30.0)
    # so that no call of a slow test comes back meanwhile
    for module in (rate_limits, wrong_keys):
        monkeypatch.setattr(module, "WINDOW_S", 3600)
    monkeypatch.setenv("ROUNDHOUSE_WRONG_KEYS_PER_MIN", str(LIMIT))
    monkeypatch.setattr(wrong_keys, "guard", wrong_keys._Guard())
    monkeypatch.setattr(audit, "_lately", audit._Lately())
    settings.cache_clear()
    rate_limits._limiter.cache_clear()
    with redis.Redis.from_url(servers.redis_url) as client:
        for name in client.scan_iter("rate:wrong-keys:*"):
            client.delete(name)
    yield
    rate_limits._limiter.cache_clear()


def wrong_key() -> str:
    """Return a well-formed key that was never issued."""
    bare = f"rh_{_random(8)}_{_random(43)}"
    return bare + _check(bare)


def ask(client: TestClient, key: str):
    return client.get("/v1/me", headers={"Authorization": f"Bearer {key}"})


@pytest.fixture
def client(as_):
    return as_("")


@pytest.fixture
def member(world):
    return world.keys["red.member"]


def refused_rows(session) -> list[AuditEvent]:
    return list(session.scalars(select(AuditEvent).where(AuditEvent.action == "refused")))


def test_wrong_keys_beyond_the_bound_are_refused_without_a_look_up(limited, client, session):
    for _ in range(LIMIT + 1):
        problem(ask(client, wrong_key()), 401, "unauthenticated")
    answer = ask(client, wrong_key())
    found = problem(answer, 429, "rate-limited")
    assert "invalid keys" in found["detail"]
    assert int(answer.headers["retry-after"]) >= 1


def test_a_key_that_was_good_before_goes_on_while_its_address_is_refused(limited, client, member):
    assert ask(client, member).status_code == 200
    for _ in range(LIMIT + 2):
        ask(client, wrong_key())
    assert ask(client, wrong_key()).status_code == 429
    assert ask(client, member).status_code == 200


def test_a_flood_of_wrong_keys_is_counted_and_writes_few_records(limited, client, session):
    before = wrong_keys.counted._value.get()
    for _ in range(20):
        ask(client, wrong_key())
    assert wrong_keys.counted._value.get() - before == LIMIT + 1
    rows = refused_rows(session)
    assert [row.after for row in rows] == [{"wrong_keys": 1}], "one for the address in a minute"
    assert rows[0].address


def test_records_of_many_addresses_are_bounded_and_say_how_many_they_stand_for(
    limited, app, world, session
):
    for n in range(wrong_keys.RECORDS_PER_MIN + 5):
        ask(TestClient(app, client=(f"10.0.0.{n}", 1)), wrong_key())
    count = session.scalar(
        select(func.count()).select_from(AuditEvent).where(AuditEvent.action == "refused")
    )
    assert count == wrong_keys.RECORDS_PER_MIN


def test_signing_in_with_wrong_keys_is_refused_too(limited, client):
    form, origin = {"key": wrong_key()}, {"Sec-Fetch-Site": "same-origin"}
    statuses = [
        client.post("/ui/login", data=form, headers=origin).status_code for _ in range(LIMIT + 2)
    ]
    assert statuses[-1] == 429
    assert set(statuses[:-1]) == {200} or set(statuses[:-1]) == {401}
