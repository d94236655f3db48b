"""Keeps the secrets of users and tenants: stores them encrypted, finds them for a task, never shows
them.

A task of a user may name the user's own secrets and those of its tenant. If both have one of the
same name, the user's counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sqlalchemy import ColumnElement, and_, func, or_, select
from sqlalchemy.orm import Session

from app.db.ids import new_id
from app.db.models import Secret
from app.errors import Conflict, Unavailable
from app.settings import settings
from app.storage.sealing import Keyring, NoKey

MOST = 100  # secrets of a user, and of a tenant for all of its users


def keyring() -> Keyring:
    """Return the keys as they are in their file now; raises NoKey."""
    return Keyring.read(settings().secrets_key_file)


def whose(tenant_id: str, user_id: str | None) -> ColumnElement[bool]:
    """Return a condition: the secret belongs to the user or, if that is None, to all users of the
    tenant.
    """
    is_owner = Secret.user_id.is_(None) if user_id is None else Secret.user_id == user_id
    return and_(Secret.tenant_id == tenant_id, is_owner)


def usable(tenant_id: str, user_id: str) -> ColumnElement[bool]:
    """Return the condition that tasks of this user may name the secret."""
    is_theirs = or_(Secret.user_id.is_(None), Secret.user_id == user_id)
    return and_(Secret.tenant_id == tenant_id, is_theirs)


def put(
    session: Session, tenant_id: str, user_id: str | None, name: str, value: str, *, by: str
) -> tuple[Secret, bool]:
    """Store a value; return its row, and True if it is new.

    The caller has locked the tenant, so that no other call adds a secret now.  Raises Conflict if
    there are too many, and Unavailable where no key is set.
    """
    try:
        keys = keyring()
    except NoKey as error:
        raise Unavailable(f"this service cannot store secrets: {error}") from error
    mine = whose(tenant_id, user_id)
    row = session.scalar(select(Secret).where(mine, Secret.name == name).with_for_update())
    is_new = row is None
    if row is None:
        if session.execute(select(func.count()).where(mine)).scalar_one() >= MOST:
            raise Conflict(f"there are {MOST} secrets already; remove one first")
        row = Secret(id=new_id("sct"), tenant_id=tenant_id, user_id=user_id, name=name, version=0)
        session.add(row)
    row.version += 1
    row.set_by, row.set_at = by, func.clock_timestamp()
    encrypt(row, value, keys)
    session.flush()
    session.refresh(row)
    return row, is_new


def encrypt(row: Secret, value: str, keys: Keyring) -> None:
    row.key_id, row.encrypted = keys.newest, keys.encrypted(value, about(row))


def decrypted(row: Secret, keys: Keyring) -> str:
    """Return the value; raises CannotOpen if the row was tampered with or its key is gone."""
    return keys.decrypted(row.encrypted, about(row), key_id=row.key_id)


def about(row: Secret) -> str:
    """Return the text that binds a value to its owner, name and version."""
    return "\n".join((row.id, row.tenant_id, row.user_id or "", row.name, str(row.version)))


def find(
    session: Session, tenant_id: str, user_id: str, names: Iterable[str]
) -> Mapping[str, Secret]:
    """Return the secrets of these names that tasks of the user may use, by name."""
    query = select(Secret).where(usable(tenant_id, user_id), Secret.name.in_({*names}))
    rows: Sequence[Secret] = session.scalars(query).all()
    return {row.name: row for row in sorted(rows, key=lambda row: row.user_id is not None)}


def encrypt_again(session: Session) -> int:
    """Encrypt again, with the newest key, all secrets that are encrypted with an older one; return
    how many.
    """
    keys = keyring()
    older = select(Secret).where(Secret.key_id != keys.newest).with_for_update()
    rows = session.scalars(older).all()
    for row in rows:
        encrypt(row, decrypted(row, keys), keys)
    return len(rows)
