"""Real servers for all tests: Postgres with the schema made by the migrations, and Redis.

`DATABASE_URL` and `REDIS_URL` win over embedded servers; on that Postgres a database of its own is
made for the run and dropped at its end.  Two ways to use it:

* `session` (and all of `app.db.transactions`) works in one transaction that is rolled back after
  the test;
* `committed` really commits, and empties every table after the test.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
from alembic import command
from alembic.config import Config
from hypothesis import HealthCheck
from hypothesis import settings as Profile
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session, sessionmaker

from app.db import transactions
from app.db.models import Base
from app.local import embedded_servers
from app.messaging import outbox
from app.settings import settings
from tests import thoroughness

ROOT = Path(__file__).parent.parent

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="take fewer examples and seeds")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--fast"):
        thoroughness.be_fast()
        Profile.load_profile("fast")


# The folders whose tests mostly wait for processes, the longest first.
_WAITING = ("acceptance", "workers", "security", "pages", "examples")
# The part of a run over which their files are spread.  At the end no process is left with one.
_SPREAD = 0.75


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let tests that compute run beside tests that wait.

    `--dist loadfile` shares out whole files in this order.
    """
    files = sorted({item.path for item in items}, key=lambda path: (_place_in_line(path), path))
    waiting = [path for path in files if _place_in_line(path) < len(_WAITING)]
    computing = [path for path in files if _place_in_line(path) == len(_WAITING)]
    due = {path: _SPREAD * at / len(waiting) for at, path in enumerate(waiting)}
    due |= {path: at / len(computing) for at, path in enumerate(computing)}
    items.sort(key=lambda item: (due[item.path], item.path))


def _place_in_line(path: Path) -> int:
    folder = path.relative_to(ROOT / "tests").parts[0]
    return _WAITING.index(folder) if folder in _WAITING else len(_WAITING)


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
            _migrate(url)
            yield url
        finally:
            connection.execute(text(f"drop database {name} with (force)"))
    server.dispose()


def _migrate(url: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(ROOT / "migrations"))
    config.attributes["url"] = url
    command.upgrade(config, "head")


@pytest.fixture(scope="session")
def engine(servers: Servers) -> Iterator[Engine]:
    engine = create_engine(servers.database_url, json_deserializer=transactions.read_json)
    yield engine
    engine.dispose()


@pytest.fixture
def environment(servers: Servers, tmp_path: Path) -> Iterator[None]:
    """The settings of a process of this deployment, with a store of its own."""
    given = {
        "DATABASE_URL": servers.database_url,
        "REDIS_URL": servers.redis_url,
        "ROUNDHOUSE_HOME": str(tmp_path / "home"),
    }
    with mock.patch.dict(os.environ, given):
        _forget()
        yield
        transactions.engine().dispose()
    _forget()


def _forget() -> None:
    """Forget what was made from settings; the engine stays, with the statements it has compiled."""
    settings.cache_clear()
    transactions._sessions.cache_clear()
    outbox.celery.cache_clear()
    outbox.signer.cache_clear()


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
    names = ", ".join(table.name for table in Base.metadata.sorted_tables)
    with engine.begin() as connection:
        connection.execute(text("alter table audit_events disable trigger stay"))
        connection.execute(text(f"truncate {names} restart identity cascade"))
        connection.execute(text("alter table audit_events enable trigger stay"))
