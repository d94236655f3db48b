"""A connection that never becomes a call costs little, and ends; raw sockets against a real
server.
"""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from app.api.http_protocol import BoundedProtocol

pytestmark = pytest.mark.security

LONGEST_S = 60.0
CHUNK = 2**20


class Hasty(BoundedProtocol):
    HEAD_S = 0.3
    BODY_S = 0.3
    WRITE_S = 0.5


class Patient(BoundedProtocol):
    """Ends no connection because of time."""

    HEAD_S = 3600.0
    BODY_S = 3600.0
    WRITE_S = 3600.0


class Narrow(BoundedProtocol):
    """Ends connections only because there are too many of them."""

    HEAD_S = 3600.0
    BODY_S = 3600.0
    HALF_OPEN_MAX = 8
    CONNECTIONS_MAX = 30


async def echo(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
    """Answer with as many bytes as came, or with as many as the path says."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message["body"]), message.get("more_body", False)
    body = bytes(int(scope["path"].strip("/") or size))
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


@contextmanager
def serving(
    protocol: type[BoundedProtocol], app: Any = echo, idle_s: int = 1
) -> Iterator[tuple[int, uvicorn.Server]]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        config = uvicorn.Config(
            app, http=protocol, lifespan="off", log_level="critical", timeout_keep_alive=idle_s
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        try:
            yield listening.getsockname()[1], server
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture
def port() -> Iterator[int]:
    with serving(Hasty) as (port, _):
        yield port


@pytest.fixture
def patient() -> Iterator[int]:
    with serving(Patient, idle_s=3600) as (port, _):
        yield port


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=LONGEST_S)


def until(true: Callable[[], bool]) -> None:
    until_s = time.monotonic() + LONGEST_S
    while not true():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def is_closed(connection: socket.socket) -> bool:
    """Read what comes; True once the server has closed the connection."""
    until_s = time.monotonic() + LONGEST_S
    while (left_s := until_s - time.monotonic()) > 0:
        if select.select([connection], [], [], left_s)[0]:
            try:
                if not connection.recv(65536):
                    return True
            except ConnectionResetError:
                return True
    return False


def sent_until_closed(
    connection: socket.socket, piece: bytes, *, times: int, pause_s: float = 0.0
) -> int:
    """Return how many pieces could be sent."""
    for n in range(times):
        try:
            connection.sendall(piece)
        except (ConnectionResetError, BrokenPipeError):
            return n
        time.sleep(pause_s)
    return times


def answered(port: int) -> bool:
    with connected(port) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return connection.recv(65536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("head", [b"GET / HTTP/1.1\r\nX: ", b"GET /", b"", b"\r\n"])
def test_header_section_of_100_MB_is_refused_before_it_is_kept(patient: int, head: bytes):
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with connected(patient) as connection:
        connection.sendall(head)
        sent = sent_until_closed(connection, b"a" * CHUNK, times=100)
    assert sent < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 20 * 1024


def test_header_section_that_is_too_large_is_answered_with_431(patient: int):
    with connected(patient) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nX: " + b"a" * (BoundedProtocol.HEAD_BYTES + 1))
        assert connection.recv(65536).startswith(b"HTTP/1.1 431 ")


def test_trailers_and_chunk_extensions_without_end_are_refused(patient: int):
    chunked = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    for endless in (b"0\r\nX: ", b"1;x="):
        with connected(patient) as connection:
            connection.sendall(chunked + endless)
            assert sent_until_closed(connection, b"a" * CHUNK, times=100) < 20


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\nabc",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HT",
    ],
    ids=["nothing", "half a head", "half a body", "half a second head"],
)
def test_half_open_call_is_closed_after_a_while(port: int, sent: bytes):
    with connected(port) as connection:
        connection.sendall(sent)
        assert is_closed(connection)


def test_head_that_comes_drop_by_drop_is_closed_though_it_goes_on(port: int):
    with connected(port) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nX: ")
        assert sent_until_closed(connection, b"a", times=1000, pause_s=0.02) < 1000


def test_half_open_connections_beyond_the_bound_end_the_oldest_and_calls_are_answered():
    with serving(Narrow) as (port, _), contextlib.ExitStack() as stack:
        opened = 3 * Narrow.HALF_OPEN_MAX
        waiting = [stack.enter_context(connected(port)) for _ in range(opened)]
        assert all(is_closed(one) for one in waiting[: -Narrow.HALF_OPEN_MAX])
        assert answered(port)


def test_connections_without_a_call_beyond_the_bound_end_and_leave_room_for_calls():
    with serving(Narrow, idle_s=3600) as (port, server), contextlib.ExitStack() as stack:
        idle: list[socket.socket] = []
        for _ in range(2 * Narrow.CONNECTIONS_MAX):
            idle.append(connection := stack.enter_context(connected(port)))
            connection.sendall(b"GET /1 HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(65536)
        until(lambda: len(server.server_state.connections) <= Narrow.HALF_OPEN_MAX)
        assert all(is_closed(one) for one in idle[: -Narrow.HALF_OPEN_MAX])
        assert answered(port)


def test_connections_beyond_the_bound_are_closed_at_once():
    with serving(Narrow) as (port, server), contextlib.ExitStack() as stack:
        body = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"
        for n in range(Narrow.CONNECTIONS_MAX):
            stack.enter_context(connected(port)).sendall(body)
            until(lambda n=n: len(server.server_state.connections) > n)
        beyond = [stack.enter_context(connected(port)) for _ in range(5)]
        assert all(is_closed(one) for one in beyond)
        assert len(server.server_state.connections) == Narrow.CONNECTIONS_MAX


@pytest.mark.parametrize("size", [20_000_000, 3_000_000])
def test_client_that_never_reads_its_answer_is_closed(size: int):
    came = threading.Event()

    class Seen(Hasty):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            came.set()

    with serving(Seen) as (port, server), connected(port) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(f"GET /{size} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert came.wait(LONGEST_S)
        until(lambda: not server.server_state.connections)


def test_thousands_of_pipelined_calls_are_refused(patient: int):
    with connected(patient) as connection:
        sent_until_closed(connection, b"GET /1 HTTP/1.1\r\nHost: x\r\n\r\n" * 5000, times=1)
        assert is_closed(connection)


def test_small_answer_does_not_wait_for_the_client_to_acknowledge_its_head():
    with serving(Patient) as (port, server), connected(port):
        until(lambda: server.server_state.connections)
        (one,) = server.server_state.connections
        kept = one.transport.get_extra_info("socket")
        assert kept.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_ordinary_calls_go_on_one_connection(patient: int):
    with connected(patient) as connection:
        for n in (1, 10, 100_000):
            connection.sendall(
                f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {n}\r\n\r\n".encode() + b"a" * n
            )
            got = b""
            while not got.endswith(b"0\r\n\r\n"):
                got += connection.recv(65536)
            assert got.startswith(b"HTTP/1.1 200")
