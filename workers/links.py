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
the block, and the secret is the key of that block alone.  So does who brings one, with the name of
the input that it is.
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
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

HANDSHAKE_S = 5.0
AT_ONCE = 4  # of strangers who say nothing, none keeps more than these waiting
WAITING_LIMIT = 64
AGAIN_S = 0.1  # the order to home may come after that to an outpost
WITHIN_S = 30.0

SORTS = ("line", "link")
BLOCK, INPUT = len(SORTS), len(SORTS) + 1  # in the place of a sort: taken from here, brought here
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


class Desk(Protocol):
    """Who gives blocks or takes them; called in threads of ours.  What is `named` is 32 bytes."""

    def key(self, named: str) -> bytes: ...

    def serve(self, sock: socket.socket, named: str) -> None:
        """Whoever has proved to know the key; the socket is the desk's from here on."""


class Links:
    """Where other hosts connect to; `call` calls in the thread of whoever owns this."""

    def __init__(
        self,
        address: str,
        call: Callable[[Callable[[], None]], None],
        desks: Mapping[int, Desk],
    ) -> None:
        self._server = _listening(address)
        self._server.setblocking(False)
        self.place = [address, self._server.getsockname()[1]]
        self._call, self._desks = call, desks
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
            if desk := self._desks.get(_HELLO.unpack(hello)[2]):
                _serve(sock, hello, desk)
            else:
                joined = _admitted(sock, hello, expected)
        except (OSError, struct.error):
            sock.close()
        self._call(lambda: self._greeted(sock, joined))

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


def _serve(sock: socket.socket, hello: bytes, desk: Desk) -> None:
    named = read(sock, _HASH_BYTES)
    _examine(sock, desk.key(named.hex()), hello + named)
    desk.serve(sock, named.hex())


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


def at_desk(
    desk: int, place: list[str | int], key: str, named: str, timeout_s: float = HANDSHAKE_S
) -> socket.socket:
    """A connection by which that block comes, if it is there still, or goes; raises OSError."""
    sock = socket.create_connection((str(place[0]), int(place[1])), timeout=timeout_s)
    try:
        _prove(sock, bytes.fromhex(key), 0, desk, bytes.fromhex(named))
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


def wait_for(sock: socket.socket, stall_s: float) -> None:
    """Whoever reads there waits for so long, and with MSG_WAITALL for all that it asks for, which
    the timeouts of Python do not allow.
    """
    sock.settimeout(None)
    whole_s = int(stall_s)
    limit = struct.pack("ll", whole_s, int((stall_s - whole_s) * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def read(sock: socket.socket, size: int) -> bytes:
    """So many bytes; raises OSError."""
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise ConnectionResetError("the other side closed the connection")
        data += piece
    return data
