"""The keys, certificates and users of a deployment in containers
(`app.local.container_secrets`)."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from app.local import container_secrets
from app.settings import settings
from app.storage.signing import Signer


@pytest.fixture
def made(tmp_path: Path) -> Path:
    container_secrets.make(tmp_path / "made", ["local"])
    return tmp_path / "made"


def test_secrets_are_readable_by_their_owner_only(made):
    modes = {stat.S_IMODE(path.stat().st_mode) for path in made.rglob("*")}
    assert modes <= {0o700, 0o400, 0o600}


def test_api_control_and_islands_have_the_same_key_and_hosts_have_none(made):
    keys = {path.parent.name: path.read_bytes() for path in made.rglob("secrets.key")}
    assert keys.keys() == {"api", "control", "island"}
    assert len(set(keys.values())) == 1


def test_existing_secrets_stay(made):
    before = {path: path.read_bytes() for path in made.rglob("*") if path.is_file()}
    container_secrets.make(made, ["local", "other"])
    after = {path: path.read_bytes() for path in made.rglob("*") if path.is_file()}
    assert after.items() >= before.items()
    other = Signer.at(made / "hosts" / "other" / "signing.key")
    assert (made / "public" / "other.pub").read_text().strip() == other.public


def test_a_process_reads_its_secret_settings_from_files(made, monkeypatch):
    monkeypatch.setenv("ROUNDHOUSE_SECRETS", str(made / "device"))
    monkeypatch.delenv("REDIS_URL", raising=False)
    settings.cache_clear()
    assert settings().redis_url.get_secret_value().startswith("rediss://device:")
    settings.cache_clear()
