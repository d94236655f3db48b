"""The key for secrets is made once, and never over a database that has secrets of another key."""

import pytest
from sqlalchemy import text

from app.db.models import ImageKey
from app.identity import secrets_key


def test_key_is_made_before_the_schema_exists(session, tmp_path):
    session.execute(text("alter table secrets rename to elsewhere"))
    secrets_key.make(session, tmp_path / "secrets.key")
    assert (tmp_path / "secrets.key").exists()


def test_key_is_not_made_over_secrets_of_another(session, world, tmp_path):
    session.add(ImageKey(tenant_id="ten_red", key_id="0" * 16, encrypted=b"x"))
    session.commit()
    with pytest.raises(secrets_key.KeyLost, match="1 key of images cannot be opened"):
        secrets_key.make(session, tmp_path / "secrets.key")
    assert not (tmp_path / "secrets.key").exists()
