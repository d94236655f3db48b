"""Signs messages, or proves them with a key that only their sender and their receiver have.

A signature (Ed25519) costs a sender 0.02 ms and a receiver 0.06 ms of a core, and each heartbeat
and its answer would need one. So a host and its island share a key: each announces an exchange key
(X25519), which it derives from its private key and signs, and both compute the shared key from the
two. A code under the shared key (HMAC-SHA256) then proves a message for 0.002 ms. The proof names
the exchange key of its sender, so the receiver needs no memory of earlier messages.

A sender that has not learned the receiver's exchange key signs. So the first messages of each
process are signed, and orders to devices of other islands.
"""

from __future__ import annotations

import hmac
from collections.abc import Container

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from app.storage.signing import BadSignature, Signer, unsealed

_EXCHANGE_KEY = b"roundhouse exchange key 1\n"
_SHARED_KEY = b"roundhouse shared key 1\n"
_ANNOUNCED_DIGITS, _CODE_DIGITS = 128 + 1 + 64, 64


class MessageKeys:
    """Holds the keys with which one host or island sends and receives messages."""

    def __init__(self, signer: Signer) -> None:
        self._signer = signer
        self.public = signer.public
        self._exchange = X25519PrivateKey.from_private_bytes(signer.derived(_EXCHANGE_KEY))
        public = self._exchange.public_key().public_bytes_raw().hex()
        #: the exchange key, after its signature
        self.announced = signer.sealed(public.encode(), _EXCHANGE_KEY).decode().replace("\n", ":")
        # public key of another -> the exchange key that it announced, and the shared key
        self._shared: dict[str, tuple[str, bytes]] = {}

    def learn(self, other: str, announced: str) -> bytes:
        """Return the key shared with the owner of the public key `other`, who announced this.

        It proves the messages to that receiver from now on. Raises BadSignature if `other` did not
        sign it.
        """
        known = self._shared.get(other)
        if known is None or known[0] != announced:
            known = self._shared[other] = announced, self._shared_key(other, announced)
        return known[1]

    def sealed(self, context: bytes, body: bytes, *, to: str = "") -> str:
        """Return a message: the sender's public key, the proof and the body, a line each.

        The proof is a code if the public key `to` has announced an exchange key, else a signature.
        """
        if (known := self._shared.get(to)) is None:
            return f"{self.public}\n{self._signer.sealed(body, context).decode()}"
        return f"{self.public}\n{self.announced}{_code(known[1], context, body)}\n{body.decode()}"

    def opened(self, text: str, context: bytes, *, known: Container[str]) -> tuple[str, bytes]:
        """Return the sender's public key and the body; raises BadSignature.

        `known` are the accepted public keys.
        """
        key, _, sealed = text.partition("\n")
        if key not in known:
            raise BadSignature(f"the key {key[:16]!r} may not sign this message")
        proof, _, body = sealed.partition("\n")
        if len(proof) != _ANNOUNCED_DIGITS + _CODE_DIGITS:
            return key, unsealed(sealed.encode(), key=key, context=context)
        announced, code = proof[:_ANNOUNCED_DIGITS], proof[_ANNOUNCED_DIGITS:]
        said = body.encode()
        expected = _code(self.learn(key, announced), context, said)
        if not hmac.compare_digest(code.encode(), expected.encode()):
            raise BadSignature(f"its code is not of the key shared with {key[:16]}…")
        return key, said

    def _shared_key(self, other: str, announced: str) -> bytes:
        public = unsealed(announced.replace(":", "\n").encode(), key=other, context=_EXCHANGE_KEY)
        try:
            theirs = X25519PublicKey.from_public_bytes(bytes.fromhex(public.decode("ascii")))
            secret = self._exchange.exchange(theirs)
        except ValueError as error:
            raise BadSignature(f"{other[:16]}… announced no exchange key") from error
        owners = "\n".join(sorted((self.public, other)))
        return hmac.digest(secret, _SHARED_KEY + owners.encode(), "sha256")


def _code(key: bytes, context: bytes, body: bytes) -> str:
    return hmac.digest(key, context + body, "sha256").hex()
