"""What is encrypted or sealed opens with its key, for its purpose, and not otherwise."""

from __future__ import annotations

import base64
import stat
from pathlib import Path

import pytest

from app.storage.sealing import CannotOpen, HostKey, Keyring, NoKey, sealed_to
from app.storage.signing import BadSignature, Signer

VALUE = "hf_the_token é"


@pytest.fixture
def keys(tmp_path: Path) -> Keyring:
    Keyring.make(tmp_path / "secrets.key")
    return Keyring.read(tmp_path / "secrets.key")


def tampered(sealed: bytes) -> bytes:
    """Return the bytes with another last one, whatever that was."""
    return sealed[:-1] + bytes([sealed[-1] ^ 1])


def test_value_at_rest_opens_for_its_row_only(keys: Keyring) -> None:
    sealed = keys.encrypted(VALUE, "row 1")
    assert VALUE.encode() not in sealed
    assert sealed != keys.encrypted(VALUE, "row 1")
    assert keys.decrypted(sealed, "row 1", key_id=keys.newest) == VALUE
    for changed, about in ((sealed, "row 2"), (tampered(sealed), "row 1"), (b"", "row 1")):
        with pytest.raises(CannotOpen):
            keys.decrypted(changed, about, key_id=keys.newest)


def test_new_key_encrypts_and_older_ones_still_open(keys: Keyring, tmp_path: Path) -> None:
    sealed = keys.encrypted(VALUE, "row")
    Keyring.add(tmp_path / "secrets.key")
    newer = Keyring.read(tmp_path / "secrets.key")
    assert newer.newest != keys.newest
    assert newer.decrypted(sealed, "row", key_id=keys.newest) == VALUE
    with pytest.raises(CannotOpen, match="not in the file"):
        keys.decrypted(newer.encrypted(VALUE, "row"), "row", key_id=newer.newest)


def test_key_file_is_made_once_and_is_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "secrets.key"
    with pytest.raises(NoKey, match="there is no key"):
        Keyring.read(path)
    Keyring.make(path)
    before = path.read_bytes()
    Keyring.make(path)
    assert path.read_bytes() == before
    Keyring.add(path)
    assert path.read_bytes().endswith(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("content", ["", "\n", "abcd", "ab" * 33, "zz" * 32, "é" * 64])
def test_key_file_without_a_key_is_told(content: str, tmp_path: Path) -> None:
    path = tmp_path / "secrets.key"
    path.write_text(content)
    with pytest.raises(NoKey):
        Keyring.read(path)


# --- to one host --------------------------------------------------------------------------------


def test_value_sealed_to_a_host_opens_there_for_its_launch_only(tmp_path: Path) -> None:
    signer = Signer.at(tmp_path / "signing.key")
    host, other = (HostKey.at(tmp_path / f"{name}.key") for name in ("host", "other"))
    sealed = sealed_to(host.announced(signer), VALUE, "launch 1", host_key=signer.public)
    assert VALUE.encode() not in base64.b64decode(sealed)
    assert host.opened(sealed, "launch 1") == VALUE
    assert HostKey.at(tmp_path / "host.key").opened(sealed, "launch 1") == VALUE
    other_bytes = base64.b64encode(tampered(base64.b64decode(sealed))).decode()
    for key, what, about in (
        (other, sealed, "launch 1"),
        (host, sealed, "launch 2"),
        (host, other_bytes, "launch 1"),
        (host, "", "launch 1"),
        (host, "no base64!", "launch 1"),
    ):
        with pytest.raises(CannotOpen):
            key.opened(what, about)


def test_value_is_sealed_only_to_a_key_that_its_host_signed(tmp_path: Path) -> None:
    signer, forger = (Signer.at(tmp_path / f"{name}.key") for name in ("host", "forger"))
    host = HostKey.at(tmp_path / "sealing.key")
    as_checkpoint = signer.sealed(host.public.encode()).decode().replace("\n", ":")
    for announced in (host.announced(forger), as_checkpoint, host.public, "", ":", "é"):
        with pytest.raises(BadSignature):
            sealed_to(announced, VALUE, "launch", host_key=signer.public)
