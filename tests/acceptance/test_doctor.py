"""Faults are planted into a live system; `roundhouse doctor` fails and names each of them.

Postgres and Redis are servers of the test, which stand behind what can hang and refuse.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess

import psutil
import psycopg
import pytest
import redis

from app.local.embedded_servers import (
    embedded_postgres,
    embedded_redis,
    temporary_home,
)
from tests import command_line, hanging_relay
from tests.acceptance.conftest import running_system
from tests.refusing_redis import RefusingRedis
from tests.small_disk import disk_of_tables, filled, small_disk

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk"),
]

DISK_BYTES = 384 * 2**20


@pytest.fixture(scope="module")
def live():
    """A system of two hosts with a device each."""
    with contextlib.ExitStack() as stack:
        home, servers, own = (stack.enter_context(temporary_home()) for _ in range(3))
        postgres_url = stack.enter_context(embedded_postgres(servers))
        redis_url = stack.enter_context(embedded_redis(own))
        on_disk = disk_of_tables(servers / "tables", DISK_BYTES, postgres_url)
        tables = stack.enter_context(on_disk)
        store = stack.enter_context(small_disk(servers / "disk", DISK_BYTES)) / "store"
        relay, relayed_url = hanging_relay.through(postgres_url)
        stack.enter_context(relay)
        proxy = stack.enter_context(RefusingRedis(redis_url))
        env = {"DATABASE_URL": relayed_url, "REDIS_URL": proxy.url, "ROUNDHOUSE_STORE": str(store)}
        env |= {"ROUNDHOUSE_LEASE_S": "12"}
        system = stack.enter_context(running_system(home, devices=2, hosts=2, env=env))
        client = system.client("alpha")
        client.put("/v1/secrets/token", {"value": "a-secret-token"})
        client.submit_job(
            "train:TrainAloud", name="one", params={"steps": 1, "seed": 0}
        )  # the store has a bundle
        yield Live(system, relay, tables, store, redis_url, postgres_url)


class Live:
    def __init__(self, system, relay, tables, store, redis_url, postgres_url):
        self.system, self.relay, self.tables, self.store = system, relay, tables, store
        self.redis_url, self.postgres_url = redis_url, postgres_url.replace("+psycopg", "")
        self.home = system.handle.wanted.home
        self.is_stopped = False

    # --- faults ---

    @contextlib.contextmanager
    def hung(self, *names):
        processes = [psutil.Process(self.system.handle.pids()[name]) for name in names]
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):  # was killed by its watchdog
                    process.resume()

    @contextlib.contextmanager
    def moved_away(self, path):
        away = path.with_name("away")
        path.rename(away)
        try:
            yield
        finally:
            if path.is_dir():
                subprocess.run(["rm", "-r", str(path)], check=True)
            away.rename(path)

    @contextlib.contextmanager
    def full_redis(self):
        with redis.Redis.from_url(self.redis_url) as client:
            client.config_set("maxmemory", "1")
            try:
                yield
            finally:
                client.config_set("maxmemory", "0")

    @contextlib.contextmanager
    def other_schema(self):
        [(now,)] = self.system.sql("select version_num from alembic_version")
        self.system.sql("update alembic_version set version_num = '0001' returning 1")
        try:
            yield
        finally:
            self.system.sql("update alembic_version set version_num = %s returning 1", now)

    @contextlib.contextmanager
    def read_only(self):
        with psycopg.connect(self.postgres_url, autocommit=True) as connection:
            connection.execute("alter system set default_transaction_read_only = on")
            connection.execute("select pg_reload_conf()")
            try:
                yield
            finally:
                connection.execute("set default_transaction_read_only = off")
                connection.execute("alter system reset default_transaction_read_only")
                connection.execute("select pg_reload_conf()")

    # --- what doctor says ---

    def doctor(self):
        """Return the exit status, and the details of the checks that failed, by name."""
        env = {"ROUNDHOUSE_URL": self.system.url}
        env["ROUNDHOUSE_KEY"] = self.system.keys["alpha"]["member"]
        found = command_line.invoke(["doctor", "-o", "json"], env=env)
        try:
            checks = json.loads(found.stdout)
        except ValueError:
            return found.exit_code, {"doctor": found.output}
        return found.exit_code, {one["check"]: one["detail"] for one in checks if not one["ok"]}

    def until(self, true):
        assert self.system.until(lambda: true(*self.doctor())), self.doctor()


#: Name of a fault: how it is planted, the check that must fail, and its words.
FAULTS = {
    "one of two devices hung": (lambda it: it.hung("host.local-2"), "device", "local-2.1 sends no"),
    "all devices hung": (lambda it: it.hung("host.local", "host.local-2"), "devices", "0 of 2 are"),
    "control hung": (lambda it: it.hung("control"), "control", "took no message within 1.5 s"),
    "island hung": (lambda it: it.hung("island"), "islands", "no scheduler leads"),
    "API hung": (lambda it: it.hung("api"), "doctor", "does not answer"),
    "secrets.key gone": (
        lambda it: it.moved_away(it.home / "secrets.key"), "secrets", "there is no",
    ),
    "folder of the store gone": (
        lambda it: it.moved_away(it.store), "store", "is it the right store?",
    ),
    "disk of the store full": (
        lambda it: filled(it.store), "store", "No space left on device",
    ),
    "disk of Postgres full": (
        lambda it: filled(it.tables), "postgres", "the disk of the database is full",
    ),
    "Redis full": (lambda it: it.full_redis(), "redis", "refuses messages: OOM"),
    "Postgres hung": (lambda it: it.relay.hanging(), "postgres", "the database does not answer"),
    "Postgres read-only": (lambda it: it.read_only(), "postgres", "the database is read-only"),
    "schema of another version": (lambda it: it.other_schema(), "schema", "at revision 0001"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_named_by_doctor(live, fault):
    plant, check, words = FAULTS[fault]
    live.until(lambda status, failed: status == 0)
    with plant(live):
        live.until(lambda status, failed: status == 6 and words in failed.get(check, ""))
    live.until(lambda status, failed: status == 0)
