"""An outlet of the proxy: its rules, its bounds, and bytes that pass through unchanged."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from app.core.model.provisions.network_policy import destinations
from app.core.security.addresses import networks
from tests.workers.egress.peers import HOUSE, HOUSE_NETWORK, answer_of, ask, echo, rest_of, serving
from workers.egress import outlet as outlets
from workers.egress.addresses import Connector
from workers.egress.outlet import Outlet, OutletRules


class Running:
    """An outlet in an event loop of its own thread."""

    def __init__(self, connector: Connector, rules: OutletRules, **more: Any) -> None:
        self.told: list[str] = []
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]

        async def made() -> Outlet:
            return Outlet(self.listener, rules, connector, self.told.append, **more)

        self.outlet = asyncio.run_coroutine_threadsafe(made(), self.loop).result(60)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.outlet.close(), self.loop).result(60)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(60)
        self.loop.close()

    def wait_for(self, holds: Any) -> None:
        until_s = time.monotonic() + 60
        while not holds(self.outlet):
            assert time.monotonic() < until_s
            time.sleep(0.01)


@contextlib.contextmanager
def running(*allow: str, resolve: Any = None, **more: Any) -> Iterator[Running]:
    connector = Connector(
        private=networks(HOUSE_NETWORK),
        hosts={"files.test": [HOUSE], "both.test": ["169.254.169.254", "127.0.0.1", HOUSE]},
        resolve=resolve or _nothing,
        connect_s=20.0,
    )
    rules = OutletRules(allow=destinations(allow), withdrawn=more.pop("withdrawn", ()))
    found = Running(connector, rules, **more)
    try:
        yield found
    finally:
        found.close()


def _nothing(host: str, port: int) -> list[str]:
    raise socket.gaierror(f"{host} is unknown")


def test_tunnel_passes_bytes_in_both_directions_and_counts_them():
    sent = os.urandom(3_000_000)
    with serving(echo) as port, running(f"files.test:{port}") as proxy:
        sock, answer = ask(proxy.port, f"CONNECT files.test:{port} HTTP/1.1")
        assert answer == b"HTTP/1.1 200 Connection established\r\n\r\n"
        with sock:
            threading.Thread(target=lambda: (sock.sendall(sent), sock.shutdown(1))).start()
            assert hashlib.sha256(rest_of(sock)).digest() == hashlib.sha256(sent).digest()
        proxy.wait_for(lambda outlet: not outlet.open_connections)
        assert proxy.outlet.use.numbers() == [1, 0, len(sent), len(sent)]
        assert not proxy.told


def test_plain_request_gets_its_answer():
    def serve(sock: socket.socket) -> None:
        asked = answer_of(sock)
        sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + asked)

    with serving(serve) as port, running(f"files.test:{port}") as proxy:
        url = f"http://files.test:{port}/simple/torch/"
        sock, answer = ask(proxy.port, f"GET {url} HTTP/1.1\r\nHost: files.test")
        assert answer == b"HTTP/1.1 200 OK\r\n\r\n"
        expected = b"GET /simple/torch/ HTTP/1.1\r\nHost: files.test\r\nConnection: close\r\n\r\n"
        assert rest_of(sock) == expected
        sock.close()


def test_bytes_behind_the_head_are_not_lost():
    with serving(echo) as port, running(f"files.test:{port}") as proxy:
        sock = socket.create_connection(("127.0.0.1", proxy.port), 60)
        sock.sendall(f"CONNECT files.test:{port} HTTP/1.1\r\n\r\nhello".encode())
        assert answer_of(sock).startswith(b"HTTP/1.1 200")
        assert sock.recv(5) == b"hello"
        sock.close()


@pytest.mark.parametrize(
    ("target", "status", "told"),
    [
        ("other.test:443", 403, "other.test:443 is not in network.allow of this task"),
        ("files.test:1", 403, "files.test:1 is not in network.allow of this task"),
        ("old.test:443", 403, "the policy of the tenant does not allow old.test:443 any more"),
        ("unknown.test:443", 502, "unknown.test cannot be resolved"),
        ("2130706433:443", 400, "2130706433:443 must be a name"),
        (f"{HOUSE}:443", 403, f"{HOUSE}:443 is not in network.allow of this task"),
    ],
)
def test_refusal_says_why_to_the_program_and_to_the_owner(target, status, told):
    more = {"withdrawn": destinations(["old.test:443"])}
    with running("unknown.test:443", **more) as proxy:
        sock, answer = ask(proxy.port, f"CONNECT {target} HTTP/1.1")
        assert answer.decode().startswith(f"HTTP/1.1 {status} {told}")
        assert f"Roundhouse: {told}" in rest_of(sock).decode()
        sock.close()
        assert [each.startswith(told) for each in proxy.told] == [True]
        assert proxy.outlet.use.numbers() == [0, 1, 0, 0]


# --- hostile ------------------------------------------------------------------------------------

NEVER = [
    "127.0.0.1", "127.255.255.254", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254",
    "100.100.100.200", "0.0.0.0", "224.0.0.1", "255.255.255.255", "168.63.129.16", "::1", "::",
    "fe80::1", "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254",
    "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "::ffff:0:7f00:1", "::7f00:1",
]  # fmt: skip


@pytest.mark.parametrize("address", NEVER)
def test_name_of_an_inner_address_is_not_connected(address):
    """Nothing listens at most of them; a connection would be a 502, or hang."""
    with running("evil.test:443", resolve=lambda *_: [address]) as proxy:
        sock, answer = ask(proxy.port, "CONNECT evil.test:443 HTTP/1.1")
        sock.close()
        told = "evil.test has no public address, and this host allows no other ones"
        assert answer.decode().startswith(f"HTTP/1.1 403 {told}")
        assert address not in "".join(proxy.told)


@pytest.mark.parametrize("address", NEVER)
def test_inner_address_is_not_connected_though_it_is_allowed(address):
    written = f"[{address}]:443" if ":" in address else f"{address}:443"
    with running(written) as proxy:
        sock, answer = ask(proxy.port, f"CONNECT {written} HTTP/1.1")
        sock.close()
        assert answer.startswith(b"HTTP/1.1 403 ")
        assert proxy.outlet.use.numbers() == [0, 1, 0, 0]


def test_name_that_is_rebound_is_asked_for_once():
    """The name answers with a permitted address, and a moment later with the loopback."""
    answers = [[HOUSE], ["127.0.0.1"], ["127.0.0.1"]]

    def inner(sock: socket.socket) -> None:
        sock.sendall(b"a secret of the host")

    with (
        contextlib.closing(socket.create_server(("127.0.0.1", 0))) as trap,
        serving(echo, port=trap.getsockname()[1]) as port,
        running(f"evil.test:{port}", resolve=lambda *_: answers.pop(0)) as proxy,
    ):
        trap.setblocking(False)
        sock, answer = ask(proxy.port, f"CONNECT evil.test:{port} HTTP/1.1")
        assert answer.startswith(b"HTTP/1.1 200")
        sock.sendall(b"ping")
        assert sock.recv(4) == b"ping"
        sock.close()
        assert len(answers) == 2
        again, answer = ask(proxy.port, f"CONNECT evil.test:{port} HTTP/1.1")
        again.close()
        assert answer.startswith(b"HTTP/1.1 403 ")
        with pytest.raises(BlockingIOError):
            trap.accept()


def test_only_the_permitted_ones_of_several_addresses_are_tried():
    with (
        contextlib.closing(socket.create_server(("127.0.0.1", 0))) as trap,
        serving(echo, port=trap.getsockname()[1]) as port,
        running(f"both.test:{port}") as proxy,
    ):
        trap.setblocking(False)
        sock, answer = ask(proxy.port, f"CONNECT both.test:{port} HTTP/1.1")
        assert answer.startswith(b"HTTP/1.1 200")
        sock.close()
        with pytest.raises(BlockingIOError):
            trap.accept()


def test_own_public_address_of_the_host_is_not_connected(monkeypatch):
    """A host may have a public address, at which services of its own listen."""
    monkeypatch.setattr("workers.egress.addresses.may_call", lambda *_: True)
    with running("own.test:443", resolve=lambda *_: ["127.0.0.1"]) as proxy:
        sock, answer = ask(proxy.port, "CONNECT own.test:443 HTTP/1.1")
        sock.close()
        assert answer.startswith(b"HTTP/1.1 403 ")


def test_head_without_end_and_silence_are_bounded(monkeypatch):
    with running("files.test:443") as proxy:
        sock = socket.create_connection(("127.0.0.1", proxy.port), 60)
        sock.sendall(b"CONNECT files.test:443 HTTP/1.1\r\nX: " + b"x" * outlets.HEAD_BYTES)
        assert answer_of(sock).startswith(b"HTTP/1.1 431 ")
        monkeypatch.setattr(outlets, "HEAD_S", 0.3)
        slow = socket.create_connection(("127.0.0.1", proxy.port), 60)
        slow.sendall(b"CONNECT files")
        assert answer_of(slow).startswith(b"HTTP/1.1 408 ")
        for each in (sock, slow):
            each.close()
        proxy.wait_for(lambda outlet: not outlet.open_connections)


def test_connections_of_a_task_are_bounded(monkeypatch):
    monkeypatch.setattr(outlets, "CONNECTIONS_MAX", 3)
    with serving(echo) as port, running(f"files.test:{port}") as proxy:
        head = f"CONNECT files.test:{port} HTTP/1.1"
        held = [ask(proxy.port, head) for _ in range(3)]
        assert all(answer.startswith(b"HTTP/1.1 200") for _, answer in held)
        fourth, answer = ask(proxy.port, head)
        fourth.close()
        assert answer.startswith(b"HTTP/1.1 429 a task can have 3 connections at once")
        held.pop()[0].close()
        proxy.wait_for(lambda outlet: outlet.open_connections == 2)
        again, answer = ask(proxy.port, head)
        assert answer.startswith(b"HTTP/1.1 200")
        for sock in (again, *(sock for sock, _ in held)):
            sock.close()


def test_flood_of_refusals_is_answered_slowly_and_told_in_part(monkeypatch):
    monkeypatch.setattr(outlets, "NEW_BURST", 20)
    monkeypatch.setattr(outlets, "NEW_PER_S", 40.0)
    monkeypatch.setattr(outlets, "TOLD_PER_S", 0.001)
    with running("files.test:443") as proxy:
        began_s = time.monotonic()
        for _ in range(60):
            sock, answer = ask(proxy.port, "CONNECT other.test:443 HTTP/1.1")
            sock.close()
            assert answer.startswith(b"HTTP/1.1 403 ")
        assert time.monotonic() - began_s >= 0.9
        assert proxy.outlet.use.refused == 60
        assert len(proxy.told) == outlets.TOLD_BURST
        assert proxy.outlet.untold == 50


def test_task_that_does_not_read_stops_only_its_own_connection():
    def pour(sock: socket.socket) -> None:
        while True:
            sock.sendall(b"x" * (1 << 16))

    with (
        serving(pour) as source,
        serving(echo) as port,
        running(f"files.test:{source}", f"files.test:{port}") as proxy,
    ):
        deaf = [ask(proxy.port, f"CONNECT files.test:{source} HTTP/1.1")[0] for _ in range(8)]
        sock, answer = ask(proxy.port, f"CONNECT files.test:{port} HTTP/1.1")
        assert answer.startswith(b"HTTP/1.1 200")

        def received_meanwhile() -> int:
            before = proxy.outlet.use.received_bytes
            sock.sendall(b"ping")
            assert sock.recv(4) == b"ping"
            return proxy.outlet.use.received_bytes - before

        # Until the kernel's buffers of all of them are full, and the proxy takes no more.  A single
        # look proves nothing: the sender may just not have its turn.
        until_s = time.monotonic() + 60
        few = 20 * 4 + 8 * 2 * outlets.BLOCK_BYTES
        while sum(received_meanwhile() for _ in range(20)) > few:
            assert time.monotonic() < until_s
        for each in (sock, *deaf):
            each.close()


def test_connection_that_is_silent_for_long_ends(monkeypatch):
    clock = SimpleNamespace(now_s=0.0, monotonic_ns=time.monotonic_ns)
    clock.monotonic = lambda: clock.now_s
    monkeypatch.setattr(outlets, "time", clock)
    monkeypatch.setattr(outlets, "IDLE_LOOK_S", 0.05)
    with serving(echo) as port, running(f"files.test:{port}", idle_s=100.0) as proxy:
        sock, _ = ask(proxy.port, f"CONNECT files.test:{port} HTTP/1.1")
        for _ in range(4):
            clock.now_s += 60.0
            sock.sendall(b"x")
            assert sock.recv(1) == b"x"
        until_s = time.monotonic() + 60
        while not select.select([sock], [], [], 0.1)[0]:
            assert time.monotonic() < until_s
            clock.now_s += 101.0  # once may be before the proxy has noted that it passed the byte
        assert sock.recv(1) == b""
        sock.close()
        proxy.wait_for(lambda outlet: not outlet.open_connections)


def test_server_that_ends_first_can_still_be_answered():
    got = []

    def serve(sock: socket.socket) -> None:
        sock.sendall(b"done")
        sock.shutdown(socket.SHUT_WR)
        got.append(rest_of(sock))

    with serving(serve) as port, running(f"files.test:{port}") as proxy:
        sock, _ = ask(proxy.port, f"CONNECT files.test:{port} HTTP/1.1")
        assert rest_of(sock) == b"done"
        sock.sendall(b"thanks")
        sock.close()
        proxy.wait_for(lambda outlet: not outlet.open_connections)
        until_s = time.monotonic() + 60
        while not got and time.monotonic() < until_s:
            time.sleep(0.01)
        assert got == [b"thanks"]


def test_closed_outlet_ends_its_connections():
    with serving(echo) as port, running(f"files.test:{port}") as proxy:
        sock, _ = ask(proxy.port, f"CONNECT files.test:{port} HTTP/1.1")
    assert sock.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", proxy.port), 1)
    sock.close()
