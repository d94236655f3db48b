"""Encrypts the secrets of tenants: at rest in the database, and on their way to one device host.

At rest, a value is encrypted with a key from a file outside the database (`Keyring`).  In a launch
it is encrypted to the public key of the host that will run the task (`sealed_to`); only that host
can open it (`HostKey`).  Both bind the value to its purpose: for another purpose it does not open.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from app.storage.signing import SEALING_KEY, BadSignature, Signer, kept_private, unsealed

_KEY_BYTES, _NONCE_BYTES = 32, 12
_TO_HOST = b"roundhouse secrets to a host 1\n"


class CannotOpen(Exception):
    """Raised for a value that this key does not open, or that was sealed for another purpose."""


class NoKey(Exception):
    """Raised if no key is set; the message says how to set one."""


class Keyring:
    """Holds keys in the order of their file: the first key encrypts, every key decrypts."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = {_key_id(key): key for key in keys}
        self.newest = _key_id(keys[0])
        self.ids = frozenset(self._keys)

    @classmethod
    def read(cls, path: Path) -> Keyring:
        """Read the file, with one key on each line as 64 hexadecimal digits; raises NoKey."""
        try:
            lines = path.read_text("ascii").split()
            keys = [bytes.fromhex(line) for line in lines]
        except FileNotFoundError as error:
            raise NoKey(
                f"there is no key for secrets in {path}; make one with `python -m "
                "app.local.secrets_key`, or set ROUNDHOUSE_SECRETS_KEY to its file"
            ) from error
        except (OSError, ValueError) as error:
            raise NoKey(f"the key for secrets in {path} cannot be read: {error}") from error
        if not keys or any(len(key) != _KEY_BYTES for key in keys):
            raise NoKey(f"{path} must have a key of {2 * _KEY_BYTES} hexadecimal digits a line")
        return cls(keys)

    @staticmethod
    def make(path: Path) -> None:
        """Make the file with a new key, unless it exists; only its owner can read it."""
        kept_private(path, _new_line)

    @staticmethod
    def add(path: Path) -> None:
        """Put a new key before the other keys of the file."""
        draft = path.with_name(f"{path.name}.new")
        draft.unlink(missing_ok=True)
        older = path.read_bytes()
        kept_private(draft, lambda: _new_line() + older)
        draft.replace(path)

    def encrypted(self, value: str, about: str) -> bytes:
        """Encrypt a value with the newest key; `about` says what it is for."""
        nonce = os.urandom(_NONCE_BYTES)
        key = ChaCha20Poly1305(self._keys[self.newest])
        return nonce + key.encrypt(nonce, value.encode(), about.encode())

    def decrypted(self, sealed: bytes, about: str, *, key_id: str) -> str:
        """Decrypt what the key of this id encrypted; raises CannotOpen."""
        if (key := self._keys.get(key_id)) is None:
            raise CannotOpen(f"the key {key_id}, with which it was encrypted, is not in the file")
        nonce, body = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
        try:
            return ChaCha20Poly1305(key).decrypt(nonce, body, about.encode()).decode()
        except (InvalidTag, ValueError) as error:
            raise CannotOpen("it was changed, or belongs to another row") from error


def _new_line() -> bytes:
    return f"{os.urandom(_KEY_BYTES).hex()}\n".encode()


def _key_id(key: bytes) -> str:
    return hashlib.sha256(b"roundhouse key for secrets 1\n" + key).hexdigest()[:16]


# --- to one host --------------------------------------------------------------------------------


class HostKey:
    """Holds the private key of a host, to which secrets are sealed.

    The host proves with its signing key that the key is its own.
    """

    def __init__(self, private: X25519PrivateKey) -> None:
        self._private = private
        self.public = private.public_key().public_bytes_raw().hex()

    @classmethod
    def at(cls, path: Path) -> HostKey:
        """Return the key in this file, which is made if missing; only its owner can read it."""
        made = kept_private(path, lambda: X25519PrivateKey.generate().private_bytes_raw())
        return cls(X25519PrivateKey.from_private_bytes(made))

    def announced(self, signer: Signer) -> str:
        """Return the public key, signed by its host: what `sealed_to` takes."""
        return signer.sealed(self.public.encode(), SEALING_KEY).decode().replace("\n", ":")

    def opened(self, sealed: str, about: str) -> str:
        """Open what was sealed to this key for this purpose; raises CannotOpen."""
        try:
            raw = base64.b64decode(sealed, validate=True)
            sender = X25519PublicKey.from_public_bytes(raw[:_KEY_BYTES])
            shared = self._private.exchange(sender)
            key = _one_key(shared, raw[:_KEY_BYTES], bytes.fromhex(self.public))
            return key.decrypt(bytes(_NONCE_BYTES), raw[_KEY_BYTES:], about.encode()).decode()
        except (InvalidTag, ValueError) as error:
            raise CannotOpen("it was sealed to another host, or for another launch") from error


def sealed_to(announced: str, value: str, about: str, *, host_key: str) -> str:
    """Seal a value to the host that announced this key and signed it with `host_key`.

    Raises BadSignature if it did not.
    """
    public = unsealed(announced.replace(":", "\n").encode(), key=host_key, context=SEALING_KEY)
    try:
        receiver = bytes.fromhex(public.decode("ascii"))
        ours = X25519PrivateKey.generate()
        shared = ours.exchange(X25519PublicKey.from_public_bytes(receiver))
    except ValueError as error:
        raise BadSignature("the host announced no key") from error
    sender = ours.public_key().public_bytes_raw()
    key = _one_key(shared, sender, receiver)
    # The key is used once, so its nonce need not differ.
    body = key.encrypt(bytes(_NONCE_BYTES), value.encode(), about.encode())
    return base64.b64encode(sender + body).decode()


def _one_key(shared: bytes, sender: bytes, receiver: bytes) -> ChaCha20Poly1305:
    info = _TO_HOST + sender + receiver
    derived = HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=None, info=info).derive(shared)
    return ChaCha20Poly1305(derived)
