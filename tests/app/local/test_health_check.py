"""The health check of a worker's container, and the part of it that a restart can mend."""

from __future__ import annotations

import pytest
import redis

from app.local.health_check import WAITING_LIMIT, main, queues_of_host
from app.settings import settings


@pytest.fixture
def queue(servers, monkeypatch):
    """Give an empty queue in the Redis of the tests."""
    monkeypatch.setenv("REDIS_URL", servers.redis_url)
    settings.cache_clear()
    name = "device.test_health_check.0"
    with redis.Redis.from_url(servers.redis_url) as client:
        yield client, name
        client.delete(name)
    settings.cache_clear()


@pytest.fixture
def no_redis(monkeypatch):
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1/0")
    settings.cache_clear()
    yield
    settings.cache_clear()


@pytest.mark.parametrize("is_redis_needed", [True, False])
def test_worker_whose_messages_pile_up_is_unhealthy(queue, is_redis_needed):
    client, name = queue
    client.rpush(name, *["x"] * WAITING_LIMIT)
    assert main([name], is_redis_needed=is_redis_needed) == ""
    client.rpush(name, "x")
    assert main([name], is_redis_needed=is_redis_needed) == (
        f"{WAITING_LIMIT + 1} messages wait in {name}"
    )


def test_worker_without_redis_is_not_ready_but_no_restart_would_help(no_redis):
    assert main(["device.local.0"]).startswith("Redis does not answer: ")
    assert main(["device.local.0"], is_redis_needed=False) == ""


def test_without_a_queue_those_of_the_hosts_devices_are_looked_at(tmp_path, monkeypatch):
    monkeypatch.setenv("ROUNDHOUSE_HOME", str(tmp_path))
    settings.cache_clear()
    try:
        settings().host_file.parent.mkdir()
        settings().host_file.write_text('{"serves": ["h.0", "h.2"], "known": {}}')
        assert queues_of_host() == ["device.h.0", "device.h.2"]
    finally:
        settings.cache_clear()
