"""Device workers that join for a gang: who knows the secret is let in, and nobody else."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading

import pytest

from app.core.security import peer_proof
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
        assert done.wait(60)

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


def test_all_hosts_are_connected_in_order_each_by_two_sockets(desk):
    desk.expect(2)
    theirs = {host: connect(desk.links.place, SECRET, host, lambda: True) for host in (2, 1)}
    ours = desk.joined.get(timeout=60)
    for n, (host, sort) in enumerate([(1, 0), (1, 1), (2, 0), (2, 1)]):
        theirs[host][sort].sendall(f"{host}.{sort}".encode())
        assert ours[n].recv(3) == f"{host}.{sort}".encode()
    close([*ours, *theirs[1], *theirs[2]])


def test_host_that_lost_a_connection_tries_again(desk):
    desk.expect(2)
    lost = connect(desk.links.place, SECRET, 1, lambda: True)
    again = connect(desk.links.place, SECRET, 1, lambda: True)
    assert lost[0].recv(1) == b""
    second = connect(desk.links.place, SECRET, 2, lambda: True)
    ours = desk.joined.get(timeout=60)
    ours[0].sendall(b"line")
    assert again[0].recv(4) == b"line"
    close([*ours, *lost, *again, *second])


def test_host_may_connect_before_it_is_expected(desk):
    later = threading.Timer(0.3, lambda: desk.expect(1))
    later.start()
    theirs = connect(desk.links.place, SECRET, 1, lambda: True)
    close([*desk.joined.get(timeout=60), *theirs])
    later.join()


@pytest.mark.parametrize(("secret", "host"), [(OTHER, 1), (SECRET, 2), (SECRET, 0)])
def test_unexpected_host_is_refused(desk, secret, host):
    desk.expect(1)
    with pytest.raises(OSError, match=r"closed|refused|reset"):
        connect(desk.links.place, secret, host, once)
    assert desk.joined.empty()


def test_digest_of_a_secret_proves_nothing(desk):
    desk.expect(1)
    hello = peer_proof.HELLO.pack(peer_proof.secret_digest(bytes.fromhex(SECRET)), 1, 0, bytes(16))
    with socket.create_connection(desk.links.place) as stranger:
        stranger.settimeout(60)
        stranger.sendall(hello)
        answer = peer_auth.read(stranger, peer_proof.CHALLENGE_BYTES + peer_proof.PROOF_BYTES)
        stranger.sendall(answer[peer_proof.CHALLENGE_BYTES :])  # its own proof is no proof of ours
        assert stranger.recv(1) == b""
    assert desk.joined.empty()


def test_remote_host_joins_only_a_home_that_proves_itself():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            sock, _ = server.accept()
            with sock:
                peer_auth.read(sock, peer_proof.HELLO.size)
                sock.sendall(bytes(peer_proof.CHALLENGE_BYTES + peer_proof.PROOF_BYTES))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionRefusedError, match="does not know the secret"):
            connect(list(server.getsockname()), SECRET, 1, once)
        thread.join()


def test_host_no_longer_expected_is_refused_and_released(desk):
    desk.expect(2)
    first = connect(desk.links.place, SECRET, 1, lambda: True)
    desk.calls.put(lambda: desk.links.forget(SECRET))
    assert first[0].recv(1) == b""
    with pytest.raises(OSError, match=r"closed|refused|reset"):
        connect(desk.links.place, SECRET, 2, once)
    close(first)


def test_proven_connections_that_the_owner_never_takes_are_closed_at_the_end():
    calls = queue.SimpleQueue()
    links = Links("127.0.0.1", calls.put, {})
    links.expect(SECRET, 1, calls.put)
    links.listen()
    made = peer_auth.connect(links.place, SECRET, 1, lambda: False)
    for _ in made:
        calls.get(timeout=60)
    links.close()
    for sock in made:
        with sock:
            sock.settimeout(60)
            assert sock.recv(1) == b""
