"""Device workers that join for a gang: who knows the secret is let in, and nobody else."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading

import pytest

from workers.transfer import peer_auth
from workers.transfer.peer_auth import Links, connect

SECRET, OTHER = "ab" * 32, "cd" * 32


class Desk:
    """A device worker that others connect to, with a thread of its own as a supervisor has."""

    def __init__(self, desks=None):
        self.calls = queue.SimpleQueue()
        self.links = Links("127.0.0.1", self.calls.put, desks or {})
        self.joined = queue.SimpleQueue()
        self._ends = threading.Event()
        self.links.listen()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def expect(self, hosts, secret=SECRET):
        done = threading.Event()
        self.calls.put(lambda: self.links.expect(secret, hosts, self.joined.put))
        self.calls.put(done.set)
        assert done.wait(10)

    def _run(self):
        while not self._ends.is_set():
            with contextlib.suppress(queue.Empty):
                self.calls.get(timeout=0.02)()

    def close(self):
        self._ends.set()
        self._thread.join()
        self.links.close()


@pytest.fixture
def desk():
    desk = Desk()
    yield desk
    desk.close()


def once():
    """It is tried once."""
    return False


def close(sockets):
    for sock in sockets:
        sock.close()


def test_all_hosts_are_joined_in_their_order_each_by_a_line_and_a_link(desk):
    desk.expect(2)
    theirs = {host: connect(desk.links.place, SECRET, host, lambda: True) for host in (2, 1)}
    ours = desk.joined.get(timeout=10)
    for n, (host, sort) in enumerate([(1, 0), (1, 1), (2, 0), (2, 1)]):
        theirs[host][sort].sendall(f"{host}.{sort}".encode())
        assert ours[n].recv(3) == f"{host}.{sort}".encode()
    close([*ours, *theirs[1], *theirs[2]])


def test_who_lost_one_of_its_connections_tries_again(desk):
    desk.expect(2)
    lost = connect(desk.links.place, SECRET, 1, lambda: True)
    again = connect(desk.links.place, SECRET, 1, lambda: True)
    assert lost[0].recv(1) == b""
    second = connect(desk.links.place, SECRET, 2, lambda: True)
    ours = desk.joined.get(timeout=10)
    ours[0].sendall(b"line")
    assert again[0].recv(4) == b"line"
    close([*ours, *lost, *again, *second])


def test_it_may_come_before_it_is_expected(desk):
    threading.Timer(0.3, lambda: desk.expect(1)).start()
    theirs = connect(desk.links.place, SECRET, 1, lambda: True)
    close([*desk.joined.get(timeout=10), *theirs])


@pytest.mark.parametrize(("secret", "host"), [(OTHER, 1), (SECRET, 2), (SECRET, 0)])
def test_who_is_not_expected_is_not_let_in(desk, secret, host):
    desk.expect(1)
    with pytest.raises(OSError, match=r"closed|refused|reset"):
        connect(desk.links.place, secret, host, once)
    assert desk.joined.empty()


def test_who_knows_a_secrets_digest_alone_proves_nothing(desk):
    desk.expect(1)
    hello = peer_auth._HELLO.pack(peer_auth._digest(bytes.fromhex(SECRET)), 1, 0, bytes(16))
    with socket.create_connection(desk.links.place) as stranger:
        stranger.settimeout(10)
        stranger.sendall(hello)
        answer = peer_auth.read(stranger, peer_auth._CHALLENGE_BYTES + peer_auth._PROOF_BYTES)
        stranger.sendall(answer[peer_auth._CHALLENGE_BYTES :])  # its own proof is no proof of ours
        assert stranger.recv(1) == b""
    assert desk.joined.empty()


def test_an_outpost_does_not_join_who_cannot_prove_that_it_is_home():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            sock, _ = server.accept()
            with sock:
                peer_auth.read(sock, peer_auth._HELLO.size)
                sock.sendall(bytes(peer_auth._CHALLENGE_BYTES + peer_auth._PROOF_BYTES))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionRefusedError, match="does not know the secret"):
            connect(list(server.getsockname()), SECRET, 1, once)
        thread.join()


def test_what_is_expected_no_longer_is_refused_and_let_go(desk):
    desk.expect(2)
    first = connect(desk.links.place, SECRET, 1, lambda: True)
    desk.calls.put(lambda: desk.links.forget(SECRET))
    assert first[0].recv(1) == b""
    with pytest.raises(OSError, match=r"closed|refused|reset"):
        connect(desk.links.place, SECRET, 2, once)
    close(first)
