"""Real servers for all tests: Postgres with the schema made by the migrations, and Redis.

`DATABASE_URL` and `REDIS_URL` win over embedded servers; on that Postgres a database of its own is
made for the run and dropped at its end.  Two ways to use it:

* `session` (and all of `app.db.transactions`) works in one transaction that is rolled back after
  the test;
* `committed` really commits, and empties every table after the test.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from alembic import command
from alembic.config import Config
from hypothesis import HealthCheck
from hypothesis import settings as Profile
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session, sessionmaker

from app.db import transactions
from app.db.models import Base
from app.local import embedded_servers
from app.messaging import outbox
from app.settings import settings
from app.storage.sealing import Keyring
from tests import distribution, stories, thoroughness
from tests.mark_summary import MarkSummary
from tests.sim import build

ROOT = Path(__file__).parent.parent
GIVEN_BACK_S = 60.0  # a busy machine ends the threads of a test within this time

# No test is timed: a busy machine is no fault.  The seed is that of the test, so that a run says
# the same as the one before.
Profile.register_profile(
    "roundhouse",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
Profile.load_profile("roundhouse")
Profile.register_profile("fast", Profile.get_profile("roundhouse"), max_examples=10)


NO_SIM = build.why_missing()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Give this process the simulated accelerator if one of its tests is marked `sim`.

    It comes before all tests: autograd counts the devices once, at its first backward pass.  What
    was imported and collected stays to the end, so no collection of garbage scans it: the tests
    that collect would each take a second.
    """
    if not NO_SIM and any(item.get_closest_marker("sim") for item in session.items):
        build.load()
    gc.freeze()


def pytest_report_header() -> str:
    if NO_SIM:
        return f"tests marked `sim` are skipped: {NO_SIM}"
    return "tests marked `sim` run on the simulated accelerator"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="take fewer examples and seeds")


def pytest_configure(config: pytest.Config) -> None:
    stories.watch()
    config.pluginmanager.register(MarkSummary())
    if config.getoption("--fast"):
        thoroughness.be_fast()
        Profile.load_profile("fast")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    stories.forget()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[pytest.TestReport]:
    report: pytest.TestReport = yield
    stories.add_to(report)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of processes for `-n auto`; tests of `make test-fast` start none."""
    return distribution.process_count(starts_processes=not config.getoption("--fast"))


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    dist = config.getoption("dist")
    return distribution.FilesTogether(config, log) if dist == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items if NO_SIM else []:
        if item.get_closest_marker("sim"):
            item.add_marker(pytest.mark.skip(reason=NO_SIM))
    due = distribution.due({item.path for item in items})
    items.sort(key=lambda item: (due[item.path], item.path))


@dataclass(frozen=True, slots=True)
class Servers:
    database_url: str
    redis_url: str


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    with contextlib.ExitStack() as stack:
        given = os.environ.get("DATABASE_URL"), os.environ.get("REDIS_URL")
        home = None if all(given) else stack.enter_context(embedded_servers.temporary_home())
        postgres_url = given[0] or stack.enter_context(embedded_servers.embedded_postgres(home))
        redis_url = given[1] or stack.enter_context(embedded_servers.embedded_redis(home))
        database_url = stack.enter_context(_new_database(postgres_url))
        yield Servers(database_url, redis_url)


@contextlib.contextmanager
def _new_database(server_url: str) -> Iterator[str]:
    name = f"test_{uuid.uuid4().hex[:12]}"
    server = create_engine(server_url, isolation_level="AUTOCOMMIT")
    url = make_url(server_url).set(database=name).render_as_string(hide_password=False)
    with server.connect() as connection:
        connection.execute(text(f"create database {name}"))
        try:
            migrate(url)
            yield url
        finally:
            connection.execute(text(f"drop database {name} with (force)"))
    server.dispose()


def migrate(url: str) -> None:
    """Give an empty database the newest schema."""
    config = Config()
    config.set_main_option("script_location", str(ROOT / "migrations"))
    config.attributes["url"] = url
    command.upgrade(config, "head")


@pytest.fixture(scope="session")
def engine(servers: Servers) -> Iterator[Engine]:
    engine = create_engine(servers.database_url, json_deserializer=transactions.read_json)
    yield engine
    engine.dispose()


@pytest.fixture(scope="session")
def secrets_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a key that encrypts the secrets of tenants."""
    path = tmp_path_factory.mktemp("secrets") / "secrets.key"
    Keyring.make(path)
    return path


@pytest.fixture
def environment(
    servers: Servers, tmp_path: Path, secrets_key: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """The settings of a process of this deployment, with a store of its own.

    `monkeypatch` puts all variables back, so that a test which changes one more leaves none behind.
    """
    given = {
        "DATABASE_URL": servers.database_url,
        "REDIS_URL": servers.redis_url,
        "ROUNDHOUSE_HOME": str(tmp_path / "home"),
        "ROUNDHOUSE_SECRETS_KEY": str(secrets_key),
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    _forget()
    yield
    _dispose(transactions.engine())
    _forget()


def _dispose(engine: Engine) -> None:
    """Close the connections of a pool, once the threads of the test have given them all back.

    A connection that is given back later is closed by nobody, which is an error of a later test.
    """
    until_s = time.monotonic() + GIVEN_BACK_S
    while (held := engine.pool.checkedout()) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert held == 0, f"{held} connections are still used: {threading.enumerate()}"
    engine.dispose()


def _forget() -> None:
    """Forget what was made from settings; the engine stays, with the statements it has compiled.

    A thread that publishes nudges would read the settings anew between two tests, and keep those of
    no test.
    """
    outbox.stop_nudging()
    settings.cache_clear()
    transactions._sessions.cache_clear()
    outbox.celery.cache_clear()
    outbox.message_keys.cache_clear()


@pytest.fixture
def session(environment: None, engine: Engine) -> Iterator[Session]:
    """Everything that uses `app.db.transactions` shares this transaction, which is rolled back."""
    with engine.connect() as connection, connection.begin() as all_of_it:
        sessions = sessionmaker(
            connection, join_transaction_mode="create_savepoint", expire_on_commit=False
        )
        with (
            mock.patch.object(transactions, "_sessions", return_value=sessions),
            sessions() as session,
        ):
            yield session
        all_of_it.rollback()


@pytest.fixture
def committed(environment: None, engine: Engine) -> Iterator[None]:
    """What is written is there for every connection; afterwards every table is empty."""
    yield
    with engine.begin() as connection:
        _empty(connection)


def _empty(connection: Connection) -> None:
    """Empty the tables that have rows; to truncate all takes ten times as long."""
    tables = [table.name for table in reversed(Base.metadata.sorted_tables)]
    rows = " union all ".join(
        f"select '{name}' where exists (select from {name})" for name in tables
    )
    filled = set(connection.scalars(text(rows)))
    used = "select sequencename from pg_sequences where last_value is not null"
    statements = [
        "alter table audit_events disable trigger stay",
        *(f"delete from {name}" for name in tables if name in filled),
        "alter table audit_events enable trigger stay",
        *(f"alter sequence {name} restart" for name in connection.scalars(text(used))),
    ]
    connection.execute(text("; ".join(statements)))
