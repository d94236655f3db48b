"""Encrypts the chunks of a tenant's images with a key that the store does not have.

A chunk's address is the keyed BLAKE3 hash of its plain bytes.  So equal chunks of one tenant are
stored once, as without encryption, and whoever lacks the key cannot try out whether the tenant has
stored certain bytes.

Each chunk is encrypted by AES-256-GCM with a key of its own, made from its address, and with the
tenant, the address and the encoding as associated data.  The nonce is a keyed hash of what is
encrypted: the same chunk becomes the same bytes again, and no two texts share key and nonce, not
even if another version of the compressor makes other bytes of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from app.storage.backend import Bytes

KEY_BYTES = 32
_NONCE_BYTES, _TAG_BYTES = 12, 16
_ID_DIGITS = 32


class NoImageKey(Exception):
    """Raised for an image whose key this process does not have."""


class ChunkCipher:
    """Encrypts and decrypts with one key; `id` names the key without revealing it."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key of images has {KEY_BYTES} bytes, not {len(key)}")
        self.id = _derived(key, "id").hex()[:_ID_DIGITS]
        self._addresses = _derived(key, "addresses")
        self._bodies = _derived(key, "bodies")
        self._nonces = _derived(key, "nonces")

    def address(self, body: Bytes) -> str:
        return blake3(body, key=self._addresses).hexdigest()

    def encrypted(self, tenant: str, address: str, body: Bytes, encoding: bytes) -> list[Bytes]:
        """Return the pieces of an encrypted body, to be written one after the other."""
        nonce = blake3(body, key=self._nonces).digest(_NONCE_BYTES)
        about = _about(tenant, address, encoding)
        return [nonce, self._of(address).encrypt(nonce, body, about)]

    def decrypted(self, tenant: str, address: str, sealed: Bytes, encoding: bytes) -> bytes:
        """Decrypt a body; raises ValueError if it was changed, or belongs to another chunk."""
        if len(sealed) < _NONCE_BYTES + _TAG_BYTES:
            raise ValueError(f"{len(sealed)} bytes cannot be encrypted ones")
        nonce, rest = memoryview(sealed)[:_NONCE_BYTES], memoryview(sealed)[_NONCE_BYTES:]
        about = _about(tenant, address, encoding)
        try:
            return self._of(address).decrypt(nonce, rest, about)
        except InvalidTag as error:
            told = "its key does not open it: it was changed, cut, or is another chunk"
            raise ValueError(told) from error

    def _of(self, address: str) -> AESGCM:
        return AESGCM(blake3(bytes.fromhex(address), key=self._bodies).digest())


Ciphers = Mapping[str, ChunkCipher]  # by the id of the key
NO_CIPHERS: Ciphers = {}


def ciphers(keys: Iterable[str]) -> dict[str, ChunkCipher]:
    """Return the ciphers of these keys (hexadecimal), in their order; raises ValueError."""
    made = [ChunkCipher(bytes.fromhex(key)) for key in keys]
    return {cipher.id: cipher for cipher in made}


def _derived(key: bytes, purpose: str) -> bytes:
    return blake3(key, derive_key_context=f"roundhouse images 1: {purpose}").digest()


def _about(tenant: str, address: str, encoding: bytes) -> bytes:
    return f"{tenant}\n{address}\n".encode() + encoding
