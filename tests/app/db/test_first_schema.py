"""The first migration makes the schema that databases of before have, and goes on from there."""

import hashlib
import re
import uuid

import pytest
from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import create_engine, make_url, text

from tests.conftest import ROOT

#: The schema that the 81 migrations up to commit b8fedf72 made.  Databases that they made exist, so
#: the first migration may not make another; what changes belongs into a migration of its own.
FINGERPRINT = "d80dc7f51e1e35cf9843b6e509def91c28670aa88eb210d721cb23bd8ae854f1"

LISTINGS = (
    """select table_name, column_name, udt_name, is_nullable, column_default, identity_generation
       from information_schema.columns where table_schema = 'public'""",
    """select conrelid::regclass, conname, pg_get_constraintdef(oid)
       from pg_constraint where connamespace = 'public'::regnamespace and conrelid <> 0""",
    "select indexdef from pg_indexes where schemaname = 'public'",
    "select pg_get_functiondef(oid) from pg_proc where pronamespace = 'public'::regnamespace",
    "select pg_get_triggerdef(oid) from pg_trigger where not tgisinternal",
    "select relname, reloptions::text from pg_class where relnamespace = 'public'::regnamespace",
)


@pytest.fixture
def url(servers):
    """Give the address of an empty database."""
    name = f"first_{uuid.uuid4().hex[:12]}"
    server = create_engine(servers.database_url, isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.execute(text(f"create database {name}"))
        yield make_url(servers.database_url).set(database=name).render_as_string(False)
        connection.execute(text(f"drop database {name} with (force)"))
    server.dispose()


def upgrade(url, revision):
    config = Config()
    config.set_main_option("script_location", str(ROOT / "migrations"))
    config.attributes["url"] = url
    command.upgrade(config, revision)


def execute(url, statement):
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text(statement))
    engine.dispose()


def fingerprint(url):
    engine = create_engine(url)
    with engine.connect() as connection:
        rows = [
            " ".join(map(str, row))
            for listing in LISTINGS
            for row in connection.execute(text(listing))
        ]
    engine.dispose()
    # A constraint that a table got later may be not validated; a zero may have been cast.
    lines = sorted(re.sub(r" NOT VALID|'0'::\w+|\s", "", row) for row in rows)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def test_first_migration_makes_the_schema_of_before(url):
    upgrade(url, "0081")
    assert fingerprint(url) == FINGERPRINT


def test_fingerprint_shows_a_missing_index(url):
    upgrade(url, "0081")
    execute(url, "drop index ix_tasks_line")
    assert fingerprint(url) != FINGERPRINT


def test_older_database_is_refused_with_the_commit_that_upgrades_it(url):
    upgrade(url, "head")
    execute(url, "update alembic_version set version_num = '0052'")
    with pytest.raises(CommandError, match=r"has revision 0052.*Check out commit b8fedf72"):
        upgrade(url, "head")
