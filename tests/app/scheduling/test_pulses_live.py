"""An island in a process of its own, which is killed, and devices that send pulses together."""

from __future__ import annotations

import signal
import time

import pytest
from sqlalchemy import text

from app.db import transactions
from app.local import seed
from app.local.embedded_servers import embedded_postgres, embedded_redis, temporary_home
from app.messaging import outbox
from app.messaging.message_keys import MessageKeys
from app.settings import settings
from app.storage.signing import Signer
from benchmarks.devices import ISLAND, Fleet, fill_island, island_process

DEVICES, HOST_DEVICES, PATIENCE_S = 8, 4, 120.0


@pytest.fixture
def world(monkeypatch):
    """An empty system of its own: the folder, the keys of the host, the address of Redis."""
    cached = (settings, transactions.engine, transactions._sessions, outbox.celery)
    with temporary_home() as home, embedded_postgres(home) as url, embedded_redis(home) as at:
        for name, value in {
            "DATABASE_URL": url,
            "REDIS_URL": at,
            "ROUNDHOUSE_ISLAND": ISLAND,
            "ROUNDHOUSE_HOME": str(home),
            "ROUNDHOUSE_SLICE_MIN_S": "1e6",  # played devices obey no Pause
            "ROUNDHOUSE_SLICE_MAX_S": "1e6",
        }.items():
            monkeypatch.setenv(name, value)
        for each in cached:
            each.cache_clear()
        seed.migrate()
        keys = MessageKeys(Signer.at(home / "host.key"))
        fill_island(DEVICES, keys.public)
        yield home, keys, at
        transactions.engine().dispose()
    monkeypatch.undo()
    for each in cached:
        each.cache_clear()


def until(true, act=lambda: time.sleep(0.2)):
    deadline_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline_s
        act()


def play_until(fleet, true):
    until(true, lambda: fleet.play(0.5))


def term_now():
    """How often the lead of the island was taken."""
    with transactions.transaction() as session:
        return session.scalar(text("select term from islands"))


@pytest.mark.slow
def test_a_new_leader_asks_each_device_for_its_report_and_loses_no_task(world):
    home, keys, at = world
    fleet = Fleet(DEVICES, keys, at, each=HOST_DEVICES)
    with island_process(home, ISLAND) as island:
        play_until(fleet, lambda: fleet.running() == DEVICES)
        play_until(fleet, lambda: fleet.pulses >= 3 * DEVICES)
        island.send_signal(signal.SIGKILL)
        island.wait(PATIENCE_S)
    steps, term = progress(), term_now()
    with island_process(home, ISLAND):
        until(lambda: term_now() > term)  # meanwhile the devices are silent
        play_until(fleet, lambda: fleet.asked >= DEVICES)
        before = fleet.pulses
        play_until(fleet, lambda: fleet.pulses >= before + 3 * DEVICES)
    assert fleet.running() == DEVICES
    with transactions.transaction() as session:
        lost = "select count(*) from events where type = 'task.lost'"
        assert session.scalar(text(lost)) == 0
        leased = "select count(*) from devices where lease_until > now() - interval '60 s'"
        assert session.scalar(text(leased)) == DEVICES
    assert all(later > before for before, later in zip(steps, progress(), strict=True))


def progress():
    """How far each running task is, as the island has written it."""
    with transactions.transaction() as session:
        running = "select step from tasks where state = 'running' order by id"
        return [*session.scalars(text(running))]
