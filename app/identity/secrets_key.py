"""Compares the file with the key of secrets with what the database holds encrypted.

The database has secrets, the keys of tenants' images and the addresses of channels, encrypted with
keys that are only in the file.  A restore that leaves the file behind must not make a new key
without a word: whatever is set afterwards hides that all else is lost.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from sqlalchemy import delete, func, inspect, select
from sqlalchemy.orm import Session

from app.core.units import counted
from app.db.models import ImageKey, Secret, Webhook
from app.storage.sealing import Keyring, NoKey


class KeyLost(Exception):
    """Raised instead of making a key over a database that has secrets of another one."""


def make(session: Session, file: Path) -> None:
    """Make the file with a new key, unless it exists; raises KeyLost."""
    if not file.exists() and (told := lost(session, file)):
        raise KeyLost(
            f"{told}. Copy the file back from your backup. If the key is lost for good, "
            "`python -m app.local.secrets_key --lost` removes what it encrypted and makes a new one"
        )
    Keyring.make(file)


def lost(session: Session, file: Path) -> str:
    """Say what no key of the file opens; empty if there is nothing."""
    if not inspect(session.connection()).has_table(Secret.__tablename__):
        return ""  # the schema is made later
    try:
        known, why = Keyring.read(file).ids, f"a key that is not in {file}"
    except NoKey as error:
        known, why = frozenset(), str(error)
        if not file.exists():
            why = f"there is no {file}; copy it back from your backup"
    found = Counter[str]()
    tables: tuple[tuple[Any, str], ...] = (
        (Secret, "secret"),
        (ImageKey, "key of images"),
        (Webhook, "address of a channel"),
    )
    for table, thing in tables:
        query = select(func.count()).select_from(table).where(table.key_id.not_in(known))
        found[thing] = session.scalars(query).one()
    if not found.total():
        return ""
    things = " and ".join(counted(n, thing) for thing, n in found.items() if n)
    return f"{things} cannot be opened: {why}"


def forget_lost(session: Session, file: Path) -> int:
    """Remove what no key of the file opens; return the number of rows."""
    known = Keyring.read(file).ids
    tables: tuple[tuple[Any, Any], ...] = (
        (Secret, Secret.id),
        (ImageKey, ImageKey.tenant_id),
        (Webhook, Webhook.id),
    )
    return sum(
        len(session.scalars(delete(table).where(table.key_id.not_in(known)).returning(id)).all())
        for table, id in tables
    )
