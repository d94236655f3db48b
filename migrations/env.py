"""Alembic's entry: the schema comes to be by these migrations and in no other way."""

import time

from alembic import context
from alembic.util import CommandError
from sqlalchemy import Connection, NullPool, create_engine, text
from sqlalchemy.dialects.postgresql.base import ischema_names

from app.db.models import Base, Xid8
from app.settings import Settings

LOCK = 0x726F756E  # one migrator at a time, however many processes start at once
LOOK_S = 0.2  # s until the lock is looked at again
FIRST = "0081"  # the first migration that is kept here
BRIDGE = "b8fedf72"  # the last commit with the migrations before it

ischema_names["xid8"] = Xid8  # so that `alembic check` knows the type when it meets it


def run() -> None:
    url = context.config.attributes.get("url") or Settings().database_url.get_secret_value()
    with create_engine(url, poolclass=NullPool).connect() as connection:
        _wait_for_others(connection)
        _refuse_older(connection)
        context.configure(
            connection=connection,
            target_metadata=Base.metadata,
            compare_server_default=False,
            transaction_per_migration=True,  # some work outside of a transaction
        )
        with context.begin_transaction():
            context.run_migrations()


def _wait_for_others(connection: Connection) -> None:
    """Take the lock of migrators, which the connection keeps until it is closed.

    A statement that waits for the lock would be one that `create index concurrently` waits for.
    """
    while not connection.scalar(text("select pg_try_advisory_lock(:lock)"), {"lock": LOCK}):
        connection.rollback()
        time.sleep(LOOK_S)
    connection.commit()


def _refuse_older(connection: Connection) -> None:
    """Raise with what to do, if the database has a schema from before the first migration."""
    if connection.scalar(text("select to_regclass('alembic_version')")):
        revision = connection.scalar(text("select version_num from alembic_version"))
        if revision and revision < FIRST:
            raise CommandError(
                f"The database has revision {revision}; this version upgrades from {FIRST} on."
                f" Check out commit {BRIDGE}, run `alembic upgrade head` there, then again here."
            )
    connection.rollback()


run()
