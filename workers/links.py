"""Connections between device workers of several hosts: of a gang, or for a block.

Its island makes a secret for each set of hosts that the gang is to live on, and tells it in the
orders to each of them.  Whoever is to hold an outpost connects to the device worker of the home,
and each proves that it knows the secret, which never crosses: so a worker whose order is stale, or
a stranger, joins nothing.  The sockets go to the processes of the gang (`workers.outpost`).  What
these say is not encrypted: between its hosts a deployment has a network of its own.

    outpost -> home   hello: which secret (its digest), which host, line or link, a challenge
    home -> outpost   a challenge, and its proof over both
    outpost -> home   its proof over both

Whoever takes a block (`workers.giving`) comes by the same door: its hello goes on with the hash of
the block, and the secret is the key of that block alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

HANDSHAKE_S = 5.0
AT_ONCE = 4  # of strangers who say nothing, none keeps more than these waiting
WAITING_LIMIT = 64
AGAIN_S = 0.1  # the order to home may come after that to an outpost
WITHIN_S = 30.0

SORTS = ("line", "link")
_BLOCK = len(SORTS)  # in the place of a sort
_HASH_BYTES = hashlib.sha256().digest_size
_HELLO = struct.Struct("!16sHB16s")
_PROOF_BYTES = hashlib.sha256().digest_size
_CHALLENGE_BYTES = 16

Sockets = list[socket.socket]  # of each host but home, its line and its link


@dataclass
class Expected:
    """The hosts of one gang; `then` is called when all have connected."""

    secret: bytes
    hosts: int  # but home
    then: Callable[[Sockets], None]
    joined: dict[tuple[int, str], socket.socket] = field(default_factory=dict)


class Giver(Protocol):
    """Who has blocks for others; called in threads of ours."""

    def key(self, sha256: str) -> bytes: ...

    def give(self, sock: socket.socket, sha256: str) -> None:
        """To whoever has proved to know the key; the socket is the giver's from here on."""


class Links:
    """Where other hosts connect to; `call` calls in the thread of whoever owns this."""

    def __init__(
        self, address: str, call: Callable[[Callable[[], None]], None], giver: Giver
    ) -> None:
        self._server = _listening(address)
        self._server.setblocking(False)
        self.place = [address, self._server.getsockname()[1]]
        self._call, self._giver = call, giver
        self._hands = ThreadPoolExecutor(AT_ONCE, "links")
        self._waiting = 0
        self._expected: dict[bytes, Expected] = {}

    def listen(self, selector: selectors.BaseSelector) -> None:
        selector.register(self._server, selectors.EVENT_READ, self._accept)

    def expect(self, secret: str, hosts: int, then: Callable[[Sockets], None]) -> None:
        known = bytes.fromhex(secret)
        self._expected[_digest(known)] = Expected(known, hosts, then)

    def forget(self, secret: str) -> None:
        expected = self._expected.pop(_digest(bytes.fromhex(secret)), None)
        for sock in expected.joined.values() if expected else ():
            sock.close()

    def close(self) -> None:
        self._server.close()
        self._hands.shutdown(cancel_futures=True)
        for expected in self._expected.values():
            for sock in expected.joined.values():
                sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # whoever it was has gone
            sock, _ = self._server.accept()
            if self._waiting >= WAITING_LIMIT:
                sock.close()
                return
            self._waiting += 1
            self._hands.submit(self._greet, sock, dict(self._expected))

    def _greet(self, sock: socket.socket, expected: dict[bytes, Expected]) -> None:
        """In a thread of its own."""
        joined = None
        try:
            sock.settimeout(HANDSHAKE_S)
            hello = read(sock, _HELLO.size)
            if _HELLO.unpack(hello)[2] == _BLOCK:
                self._give(sock, hello)
            else:
                joined = _admitted(sock, hello, expected)
        except (OSError, struct.error):
            sock.close()
        self._call(lambda: self._greeted(sock, joined))

    def _give(self, sock: socket.socket, hello: bytes) -> None:
        named = read(sock, _HASH_BYTES)
        _examine(sock, self._giver.key(named.hex()), hello + named)
        self._giver.give(sock, named.hex())

    def _greeted(self, sock: socket.socket, joined: tuple[bytes, int, str] | None) -> None:
        self._waiting -= 1
        if joined is None:
            return
        digest, host, sort = joined
        expected = self._expected.get(digest)
        if expected is None:
            sock.close()
            return
        if (before := expected.joined.pop((host, sort), None)) is not None:
            before.close()  # it tries again
        expected.joined[host, sort] = sock
        if len(expected.joined) == expected.hosts * len(SORTS):
            del self._expected[digest]
            expected.then([expected.joined[key] for key in sorted(expected.joined)])


def _listening(address: str) -> socket.socket:
    """There alone, if that is an address of this host; else, as behind a translation, anywhere."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family, backlog=WAITING_LIMIT)
    except OSError:
        return socket.create_server(("", 0), family=family, backlog=WAITING_LIMIT)


def _admitted(
    sock: socket.socket, hello: bytes, expected: dict[bytes, Expected]
) -> tuple[bytes, int, str]:
    """Who has come, and proved it; raises OSError for anybody else."""
    digest, host, sort, _ = _HELLO.unpack(hello)
    gang = expected.get(digest)
    if gang is None or not 1 <= host <= gang.hosts or sort >= len(SORTS):
        raise ConnectionRefusedError("nobody of that gang is expected here")
    _examine(sock, gang.secret, hello)
    sock.settimeout(None)
    return digest, host, SORTS[sort]


def _examine(sock: socket.socket, secret: bytes, hello: bytes) -> None:
    """Both prove that they know the secret; raises OSError."""
    challenge = os.urandom(_CHALLENGE_BYTES)
    sock.sendall(challenge + _proof(secret, b"home", hello, challenge))
    if not hmac.compare_digest(
        read(sock, _PROOF_BYTES), _proof(secret, b"outpost", hello, challenge)
    ):
        raise ConnectionRefusedError("it does not know the secret")


def connect(home: list[str | int], secret: str, host: int, wanted: Callable[[], bool]) -> Sockets:
    """The line and the link of an outpost; tried for a while, as long as they are `wanted`.

    Raises OSError if there is no way.
    """
    until_s = time.monotonic() + WITHIN_S
    while True:
        try:
            return _connected((str(home[0]), int(home[1])), bytes.fromhex(secret), host)
        except OSError:
            if not wanted() or time.monotonic() >= until_s:
                raise
        time.sleep(AGAIN_S)


def _connected(home: tuple[str, int], secret: bytes, host: int) -> Sockets:
    made: Sockets = []
    try:
        for sort in range(len(SORTS)):
            made.append(socket.create_connection(home, timeout=HANDSHAKE_S))
            _prove(made[-1], secret, host, sort)
            made[-1].settimeout(None)
    except OSError:
        for sock in made:
            sock.close()
        raise
    return made


def asked(place: list[str | int], key: str, sha256: str) -> socket.socket:
    """A connection by which that block comes, if it is there still; raises OSError."""
    sock = socket.create_connection((str(place[0]), int(place[1])), timeout=HANDSHAKE_S)
    try:
        _prove(sock, bytes.fromhex(key), 0, _BLOCK, bytes.fromhex(sha256))
    except OSError:
        sock.close()
        raise
    return sock


def _prove(sock: socket.socket, secret: bytes, host: int, sort: int, named: bytes = b"") -> None:
    hello = _HELLO.pack(_digest(secret), host, sort, os.urandom(_CHALLENGE_BYTES)) + named
    sock.sendall(hello)
    challenge = read(sock, _CHALLENGE_BYTES)
    proof = read(sock, _PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"home", hello, challenge)):
        raise ConnectionRefusedError("whoever answers does not know the secret")
    sock.sendall(_proof(secret, b"outpost", hello, challenge))


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()[:16]


def _proof(secret: bytes, who: bytes, hello: bytes, challenge: bytes) -> bytes:
    return hmac.digest(secret, who + hello + challenge, "sha256")


def read(sock: socket.socket, size: int) -> bytes:
    """So many bytes; raises OSError."""
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise ConnectionResetError("the other side closed the connection")
        data += piece
    return data
