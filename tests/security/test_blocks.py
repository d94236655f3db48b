"""A viewer's knowledge of a block is not enough to fetch it from a device worker over TCP."""

from __future__ import annotations

import hashlib
import socket

import pytest

from app.core.security import peer_proof
from app.storage.signing import Signer, block_key
from tests.workers.transfer.test_peer_blocks import BODY, OTHER, SHA256, Giving, filled
from workers.transfer import peer_auth
from workers.transfer.peer_blocks import Giver

pytestmark = pytest.mark.security


@pytest.fixture
def desk(tmp_path):
    desk = Giving(filled(tmp_path / "theirs"))
    yield desk
    desk.close()


def fetched(place, key, sha256=SHA256):
    """Fetch the block as a device worker does; raises OSError."""
    with peer_auth.at_desk(peer_proof.BLOCK, place, key, sha256) as sock:
        size = int.from_bytes(peer_auth.read(sock, 8), "big")
        return peer_auth.read(sock, size)


def test_host_with_the_key_gets_the_block(desk):
    assert fetched(desk.links.place, desk.copy()["key"]) == BODY


def test_hash_address_and_public_key_are_not_enough_to_get_a_block(desk, tmp_path):
    public = Signer.at(tmp_path / "signing.key").public
    before = Giver(filled(tmp_path / "before"))  # the worker before this one, with another secret
    before.close()
    guesses = {
        "nothing": "00" * 32,
        "the hash": SHA256,
        "the hash of the hash": hashlib.sha256(bytes.fromhex(SHA256)).hexdigest(),
        "the host's public key": public,
        "a key made of the hash": block_key(SHA256, SHA256),
        "a key made of the public key": block_key(public, SHA256),
        "a key made of nothing": block_key("", SHA256),
        "a key of the worker before": block_key(before.secret, SHA256),
        "the key of another block": desk.copy(OTHER)["key"],
    }
    for key in guesses.values():
        with pytest.raises(OSError, match="does not know the secret"):
            fetched(desk.links.place, key)


def test_overheard_handshake_is_useless(desk, monkeypatch):
    """Replay a reader's recorded messages: they fail, because the challenge is a new one."""
    heard = []
    sendall = socket.socket.sendall
    monkeypatch.setattr(
        socket.socket, "sendall", lambda sock, data: heard.append(data) or sendall(sock, data)
    )
    with peer_auth.at_desk(peer_proof.BLOCK, desk.links.place, desk.copy()["key"], SHA256) as sock:
        assert peer_auth.read(sock, 8)
        ours = [each for each in heard if len(each) in (peer_proof.HELLO.size + 32, 32)]
    hello, proof = ours[0], ours[-1]
    with socket.create_connection(tuple(desk.links.place), timeout=60) as again:
        sendall(again, hello)
        peer_auth.read(again, peer_proof.CHALLENGE_BYTES + peer_proof.PROOF_BYTES)
        sendall(again, proof)
        with pytest.raises(ConnectionResetError):
            peer_auth.read(again, 8)
