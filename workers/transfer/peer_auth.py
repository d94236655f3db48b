"""Connects device workers of several hosts: for the ranks of a gang, or to send a block.

The island makes a secret for each set of hosts that a gang runs on, and sends it in the orders to
each host. A device worker with remote ranks connects to the device worker of the coordinator host,
and each proves that it knows the secret. The secret itself never crosses the network. So a worker
with an old order cannot join, and neither can a stranger. The sockets go to the processes of the
gang (`workers.residents.remote_ranks`). Their traffic is not encrypted: a deployment has a network
of its own between its hosts. The handshake is that of `app.core.security.peer_proof`.

A worker that takes a block (`workers.transfer.peer_blocks`) uses the same handshake. Its hello
continues with the hash of the block, and the secret is the key of that block alone. A worker that
brings a block does the same with the name of the input, and the API with the hash of a ticket
(`workers.device.tunnels`).
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from app.core.security import peer_proof

HANDSHAKE_S = 5.0
WAITING_LIMIT = 64  # unauthenticated connections
WAITING_PER_ADDRESS = 16  # unauthenticated connections of one address
# in seconds: time until a retry; the order may reach the coordinator host later than this one
AGAIN_S = 0.1
WITHIN_S = 30.0

SORTS = ("line", "link")  # names of the connections by their number (`peer_proof.LINE`, `LINK`)

# two sockets, line and link, of each host except the coordinator host
Sockets = list[socket.socket]
Handshake = Generator[int, bytes, Callable[[], None]]
Examination = Generator[int, bytes, None]


@dataclass
class Expected:
    """Lists the hosts of one gang that must connect; `then` is called when all have."""

    secret: bytes
    hosts: int  # hosts that are to connect, without the coordinator host
    then: Callable[[Sockets], None]
    joined: dict[tuple[int, str], socket.socket] = field(default_factory=dict)


class Desk(Protocol):
    """Serves one kind of connection, for example to send blocks; `named` is 32 bytes in
    hexadecimal.

    No method may block.
    """

    def key(self, named: str) -> bytes: ...

    def serve(self, sock: socket.socket, named: str) -> None:
        """Serve and own a connection that has proved to know the key."""


@dataclass(eq=False)
class Visitor:
    """An unauthenticated connection; the next `wanted` bytes of it are awaited."""

    sock: socket.socket
    address: str
    until_s: float
    talk: Handshake
    wanted: int = 0
    came: bytes = b""
    has_spoken: bool = False


class Links:
    """Listens for connections of other hosts.

    `call` runs a function in the thread of the object's owner. One thread does the handshakes of
    all visitors, and blocks on none of them; each has a deadline. There is a limit to how many
    visitors of one address may wait, and to how many may wait in all. Beyond it the oldest one that
    has sent nothing is dropped: of that address, or of all.
    """

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
        self._expected: dict[bytes, Expected] = {}  # replaced, never changed: two threads read it
        self._visitors: dict[Visitor, None] = {}  # the eldest first
        self._proven: set[socket.socket] = set()  # until the owner's thread has them
        self._ended = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._greeter = threading.Thread(target=self._greet_all, name="links", daemon=True)

    def listen(self) -> None:
        self._greeter.start()

    def expect(self, secret: str, hosts: int, then: Callable[[Sockets], None]) -> None:
        known = bytes.fromhex(secret)
        self._expected = {
            **self._expected,
            peer_proof.secret_digest(known): Expected(known, hosts, then),
        }

    def forget(self, secret: str) -> None:
        expected = self._take_expected(peer_proof.secret_digest(bytes.fromhex(secret)))
        for sock in expected.joined.values() if expected else ():
            sock.close()

    def close(self) -> None:
        os.eventfd_write(self._ended, 1)
        if self._greeter.ident is not None:
            self._greeter.join()
        self._server.close()
        os.close(self._ended)
        for expected in self._expected.values():
            for sock in expected.joined.values():
                sock.close()
        for sock in self._proven:  # the owner does not get these any more
            sock.close()

    def _take_expected(self, digest: bytes) -> Expected | None:
        expected = self._expected.get(digest)
        self._expected = {key: one for key, one in self._expected.items() if key != digest}
        return expected

    # --- in the greeter's thread ---

    def _greet_all(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._ended, selectors.EVENT_READ)
            selector.register(self._server, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(self._timeout_s()):
                    if key.fileobj == self._ended:
                        self._dismiss(selector, list(self._visitors))
                        return
                    if key.fileobj is self._server:
                        self._accept(selector)
                    # otherwise the visitor was dropped in this round
                    elif key.data in self._visitors:
                        self._hear(selector, key.data)
                now_s = time.monotonic()
                self._dismiss(selector, [v for v in self._visitors if now_s >= v.until_s])

    def _timeout_s(self) -> float | None:
        eldest = next(iter(self._visitors), None)  # all visitors have the same time limit
        return None if eldest is None else max(0.0, eldest.until_s - time.monotonic())

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            sock, (address, *_) = self._server.accept()
        except OSError:  # the visitor has gone
            return
        beside = [v for v in self._visitors if v.address == address]
        if len(beside) >= WAITING_PER_ADDRESS:
            self._dismiss(selector, [_eldest_silent(beside)])
        elif len(self._visitors) >= WAITING_LIMIT:
            self._dismiss(selector, [_eldest_silent(list(self._visitors))])
        sock.setblocking(False)
        until_s = time.monotonic() + HANDSHAKE_S
        visitor = Visitor(sock, address, until_s, self._handshake(sock))
        visitor.wanted = next(visitor.talk)
        self._visitors[visitor] = None
        selector.register(sock, selectors.EVENT_READ, visitor)

    def _hear(self, selector: selectors.BaseSelector, visitor: Visitor) -> None:
        try:
            piece = visitor.sock.recv(visitor.wanted - len(visitor.came))
            if not piece:
                raise ConnectionResetError("the peer closed the connection")
            visitor.came += piece
            visitor.has_spoken = True
            if len(visitor.came) == visitor.wanted:
                came, visitor.came = visitor.came, b""
                visitor.wanted = visitor.talk.send(came)
        except BlockingIOError:
            return
        except StopIteration as end:
            selector.unregister(visitor.sock)
            del self._visitors[visitor]
            end.value()
        except OSError:
            self._dismiss(selector, [visitor])

    def _dismiss(self, selector: selectors.BaseSelector, visitors: list[Visitor]) -> None:
        for visitor in visitors:
            del self._visitors[visitor]
            selector.unregister(visitor.sock)
            visitor.sock.close()

    def _handshake(self, sock: socket.socket) -> Handshake:
        """Authenticate a visitor.

        A generator: it yields how many bytes it needs next, and returns the function to call at the
        end.
        """
        hello = yield peer_proof.HELLO.size
        digest, host, sort, _ = peer_proof.HELLO.unpack(hello)
        if desk := self._desks.get(sort):
            named = yield peer_proof.NAME_BYTES
            yield from _examine(sock, desk.key(named.hex()), hello + named)
            return lambda: _serve(sock, desk, named.hex())
        gang = self._expected.get(digest)
        if gang is None or not 1 <= host <= gang.hosts or sort >= len(SORTS):
            raise ConnectionRefusedError("no process of that gang is expected here")
        yield from _examine(sock, gang.secret, hello)
        return lambda: self._hand_over(sock, digest, host, SORTS[sort])

    def _hand_over(self, sock: socket.socket, digest: bytes, host: int, sort: str) -> None:
        self._proven.add(sock)
        self._call(lambda: self._joined(sock, digest, host, sort))

    # --- in the owner's thread ---

    def _joined(self, sock: socket.socket, digest: bytes, host: int, sort: str) -> None:
        self._proven.discard(sock)
        expected = self._expected.get(digest)
        if expected is None:
            sock.close()
            return
        sock.setblocking(True)
        if (before := expected.joined.pop((host, sort), None)) is not None:
            before.close()  # the host tries again
        expected.joined[host, sort] = sock
        if len(expected.joined) == expected.hosts * len(SORTS):
            self._take_expected(digest)
            expected.then([expected.joined[key] for key in sorted(expected.joined)])


def _eldest_silent(visitors: list[Visitor]) -> Visitor:
    """Choose the visitor to drop: the oldest one that has sent nothing, or else the oldest of
    all.
    """
    return next((v for v in visitors if not v.has_spoken), visitors[0])


def _listening(address: str) -> socket.socket:
    """Listen on `address` if this host has it. If not, for example behind NAT, listen on all
    addresses.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family, backlog=WAITING_LIMIT)
    except OSError:
        return socket.create_server(("", 0), family=family, backlog=WAITING_LIMIT)


def _serve(sock: socket.socket, desk: Desk, named: str) -> None:
    sock.settimeout(HANDSHAKE_S)
    desk.serve(sock, named)


def _examine(sock: socket.socket, secret: bytes, hello: bytes) -> Examination:
    """Exchange proofs that both sides know the secret; raises OSError."""
    challenge = os.urandom(peer_proof.CHALLENGE_BYTES)
    sock.sendall(challenge + peer_proof.proof_of(secret, b"home", hello, challenge))
    theirs = yield peer_proof.PROOF_BYTES
    if not peer_proof.is_proof(theirs, secret, b"outpost", hello, challenge):
        raise ConnectionRefusedError("it does not know the secret")


def connect(home: list[str | int], secret: str, host: int, wanted: Callable[[], bool]) -> Sockets:
    """Connect the line and the link of remote ranks; retry for WITHIN_S while they are `wanted`.

    Raises OSError if it fails.
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
    """Connect to `desk` of another host, for the block `named`; raises OSError."""
    sock = socket.create_connection((str(place[0]), int(place[1])), timeout=timeout_s)
    try:
        _prove(sock, bytes.fromhex(key), 0, desk, bytes.fromhex(named))
    except OSError:
        sock.close()
        raise
    return sock


def _prove(sock: socket.socket, secret: bytes, host: int, sort: int, named: bytes = b"") -> None:
    hello = peer_proof.hello_to(sort, secret, host=host, named=named)
    sock.sendall(hello)
    challenge = read(sock, peer_proof.CHALLENGE_BYTES)
    proof = read(sock, peer_proof.PROOF_BYTES)
    if not peer_proof.is_proof(proof, secret, b"home", hello, challenge):
        raise ConnectionRefusedError("the peer does not know the secret of the gang")
    sock.sendall(peer_proof.proof_of(secret, b"outpost", hello, challenge))


def wait_for(sock: socket.socket, stall_s: float) -> None:
    """Give the socket a receive timeout in the kernel.

    MSG_WAITALL then waits for all bytes, which it would not do with Python's own timeouts.
    """
    sock.settimeout(None)
    whole_s = int(stall_s)
    limit = struct.pack("ll", whole_s, int((stall_s - whole_s) * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def read(sock: socket.socket, size: int) -> bytes:
    """Read exactly `size` bytes; raises OSError."""
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise ConnectionResetError("the other side closed the connection")
        data += piece
    return data
