"""The handshake with which one side shows a device worker that it knows a secret.

The secret never crosses the network, and a recorded handshake opens nothing: both sides add a
challenge.  The side that connects is "outpost", the listening device worker "home".

    outpost -> home   hello: which secret (its digest), which host, which desk, a challenge
    home -> outpost   a challenge, and its proof over both
    outpost -> home   its proof over both

A hello to a desk continues with the 32 bytes that name what is wanted there.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct

HELLO = struct.Struct("!16sHB16s")
NAME_BYTES = PROOF_BYTES = hashlib.sha256().digest_size
CHALLENGE_BYTES = 16

#: The purposes of a connection: the two of a gang's processes, a block, a tunnel.
LINE, LINK, BLOCK, TUNNEL = range(4)


def secret_digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()[:16]


def hello_to(desk: int, secret: bytes, *, host: int = 0, named: bytes = b"") -> bytes:
    return HELLO.pack(secret_digest(secret), host, desk, os.urandom(CHALLENGE_BYTES)) + named


def proof_of(secret: bytes, who: bytes, hello: bytes, challenge: bytes) -> bytes:
    """Return the proof of one side: `who` is b"home" or b"outpost"."""
    return hmac.digest(secret, who + hello + challenge, "sha256")


def is_proof(proof: bytes, secret: bytes, who: bytes, hello: bytes, challenge: bytes) -> bool:
    return hmac.compare_digest(proof, proof_of(secret, who, hello, challenge))
