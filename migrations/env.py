"""Alembic's entry: the schema comes to be by these migrations and in no other way."""

from alembic import context
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.dialects.postgresql.base import ischema_names

from app.db.models import Base, Xid8
from app.settings import Settings

LOCK = 0x726F756E  # one migrator at a time, however many processes start at once

ischema_names["xid8"] = Xid8  # so that `alembic check` knows the type when it meets it


def run() -> None:
    url = context.config.attributes.get("url") or Settings().database_url.get_secret_value()
    with create_engine(url, poolclass=NullPool).connect() as connection:
        context.configure(
            connection=connection, target_metadata=Base.metadata, compare_server_default=False
        )
        with context.begin_transaction():
            connection.execute(text("select pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
            context.run_migrations()


run()
