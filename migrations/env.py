"""Alembic's entry: the schema comes to be by these migrations and in no other way."""

from alembic import context
from sqlalchemy import NullPool, create_engine, text

from app.models import Base
from app.settings import Settings

LOCK = 0x726F756E  # one migrator at a time, however many processes start at once


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
