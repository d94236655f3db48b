"""Signatures (Ed25519) of hosts and islands: nothing forged is restored, obeyed or believed.

A sealed body is the signature in hexadecimal digits, a line end, and the body.  The signature
covers a context and the body, so that it is worthless for any other purpose.  A private key never
leaves the hosts that need it.  A host's public key is sent with each heartbeat, and comes back with
a launch.  An administrator gives it to the islands, and an island's public key to the devices.

The keys with which a device worker gives a block to others, or opens a tunnel, are made here too.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from app.storage.backend import make_private

CHECKPOINT = b"roundhouse checkpoint 1\n"
HEARTBEAT = b"roundhouse heartbeat 1\n"
NEWS = b"roundhouse news 1\n"
SEALING_KEY = b"roundhouse sealing key 1\n"
_DIGITS = 128
_PUBLIC_KEY = re.compile(r"[0-9a-f]{64}")


class BadSignature(Exception):
    """The signer is wrong, or the content differs from what was signed."""


def kept_private(path: Path, make: Callable[[], bytes]) -> bytes:
    """Return the content of a file that only its owner can read; `make` gives it if it is missing.

    Processes that start together get the same content: the first complete file wins.
    """
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    make_private(path.parent)
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(make())
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return path.read_bytes()


class Signer:
    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public = private.public_key().public_bytes_raw().hex()

    @classmethod
    def at(cls, path: Path) -> Signer:
        """Return the signer of the key in this file, which is created if missing; only its owner
        can read it.

        Devices of one host may start together: the first complete file wins.
        """
        made = kept_private(path, lambda: Ed25519PrivateKey.generate().private_bytes_raw())
        return cls(Ed25519PrivateKey.from_private_bytes(made))

    def publish(self, path: Path) -> None:
        """Write the public key to a file, for use by all that trust it."""
        draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        draft.write_text(f"{self.public}\n")
        draft.replace(path)

    def derived(self, purpose: bytes) -> bytes:
        """Return a private key of 32 bytes, which only the owner of this key can compute."""
        return hmac.digest(self._private.private_bytes_raw(), purpose, "sha256")

    def sealed(self, body: bytes, context: bytes = CHECKPOINT) -> bytes:
        return self._private.sign(context + body).hex().encode() + b"\n" + body


def unverified(sealed: bytes) -> bytes:
    """Return the body without a check of the signature, for uses that only need to know what it
    names.
    """
    return sealed[_DIGITS + 1 :]


def unsealed(sealed: bytes, *, key: str, context: bytes = CHECKPOINT) -> bytes:
    """Return the body that `key` (a public key, hexadecimal) signed; raises BadSignature."""
    signature, end, body = sealed[:_DIGITS], sealed[_DIGITS : _DIGITS + 1], sealed[_DIGITS + 1 :]
    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
        public.verify(bytes.fromhex(signature.decode("ascii")), context + body)
    except (InvalidSignature, ValueError) as error:
        raise BadSignature(f"it was not signed by {key[:16]}…") from error
    if end != b"\n":
        raise BadSignature("it does not begin with a signature")
    return body


def is_public_key(written: str) -> bool:
    return _PUBLIC_KEY.fullmatch(written) is not None


def public_key(written: str) -> str:
    """Return a public key given as 64 hexadecimal digits, or as the path of a file with them.

    Raises ValueError, with a message for an operator.
    """
    found = written
    if not is_public_key(written):
        try:
            found = Path(written).read_text("ascii").strip()
        except (OSError, ValueError) as error:
            raise ValueError(f"no public key can be read from {written!r}: {error}") from error
    if not is_public_key(found):
        raise ValueError(f"{written!r} contains no public key (64 hexadecimal digits)")
    return found


def block_key(secret: str, named: str) -> str:
    """Return the key (hexadecimal) for one block of the device worker with that secret.

    `named` is the hash of the block.
    """
    return hmac.digest(bytes.fromhex(secret), b"block " + bytes.fromhex(named), "sha256").hex()


def tunnel_key(secret: str, named: str) -> str:
    """Return the key (hexadecimal) for the one tunnel whose ticket has the hash `named`."""
    return hmac.digest(bytes.fromhex(secret), b"tunnel " + bytes.fromhex(named), "sha256").hex()
