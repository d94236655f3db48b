"""Keeps a key for each tenant, with which device workers encrypt the images of its commands.

A tenant's key lies in Postgres, encrypted with the key of secrets, which is outside the database.
So neither the store nor the database reveals an image. A change of the key of secrets leaves images
as they are.
"""

from __future__ import annotations

import os

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from app.db.models import ImageKey
from app.identity import secret_store
from app.storage.chunk_cipher import KEY_BYTES


def of_tenant(session: Session, tenant_id: str) -> str:
    """Return the tenant's key (hexadecimal), which is made at its first use.

    Raises NoKey, and CannotOpen if the row was tampered with or its key is gone.
    """
    keys = secret_store.keyring()
    mine = select(ImageKey).where(ImageKey.tenant_id == tenant_id)
    row = session.scalar(mine)
    if row is None:
        encrypted = keys.encrypted(os.urandom(KEY_BYTES).hex(), _about(tenant_id))
        made = {"tenant_id": tenant_id, "key_id": keys.newest, "encrypted": encrypted}
        session.execute(insert(ImageKey).values(made).on_conflict_do_nothing())
        # the key of this process, or of an island that was faster
        row = session.scalars(mine).one()
    return keys.decrypted(row.encrypted, _about(tenant_id), key_id=row.key_id)


def encrypt_again(session: Session) -> int:
    """Encrypt all keys of tenants with the newest key of secrets; return how many."""
    keys = secret_store.keyring()
    older = select(ImageKey).where(ImageKey.key_id != keys.newest).with_for_update()
    rows = session.scalars(older).all()
    for row in rows:
        plain = keys.decrypted(row.encrypted, _about(row.tenant_id), key_id=row.key_id)
        row.key_id, row.encrypted = keys.newest, keys.encrypted(plain, _about(row.tenant_id))
    return len(rows)


def _about(tenant_id: str) -> str:
    return f"key of images\n{tenant_id}"
