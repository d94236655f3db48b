"""The base class of all tables, and the columns that many tables have."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import CheckConstraint, DateTime, FetchedValue, MetaData, Text, func, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, mapped_column
from sqlalchemy.types import UserDefinedType


class Xid8(UserDefinedType[int]):
    """Postgres' 64-bit transaction id.  Streams read by it, so that they don't miss a late
    commit.
    """

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "xid8"


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {
        datetime: DateTime(timezone=True),
        dict[str, Any]: JSONB,
        list[Any]: JSONB,
        str: Text,
    }


def now_column() -> Any:
    return mapped_column(server_default=func.now())


def json_column(default: str = "{}") -> Any:
    return mapped_column(JSONB, server_default=text(f"'{default}'"))


def txid_column(**more: Any) -> Any:
    """The transaction that last wrote the row; a trigger sets it, and
    `app.scheduling.snapshot_reader` reads changes by it.
    """
    return mapped_column(
        Xid8,
        server_default=text("pg_current_xact_id()"),
        server_onupdate=FetchedValue(),
        **more,
    )


def one_of(column: str, words: Any) -> CheckConstraint:
    listed = ", ".join(f"'{word}'" for word in words)
    return CheckConstraint(f"{column} in ({listed})", name=column)
