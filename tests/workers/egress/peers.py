"""Servers and clients around a proxy, for tests."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

#: An address of this machine that tests allow as a network in the house.
HOUSE = "127.77.0.5"
HOUSE_NETWORK = "127.77.0.0/16"


@contextlib.contextmanager
def serving(
    serve: Callable[[socket.socket], None], address: str = HOUSE, port: int = 0
) -> Iterator[int]:
    """Serve each connection in a thread; gives the port."""
    with socket.create_server((address, port)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = listener.accept()
                    threading.Thread(target=_serve, args=(serve, sock), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(60)


def _serve(serve: Callable[[socket.socket], None], sock: socket.socket) -> None:
    with sock, contextlib.suppress(OSError):
        serve(sock)


def echo(sock: socket.socket) -> None:
    """Send all bytes back, and end when the other side has ended."""
    while data := sock.recv(1 << 16):
        sock.sendall(data)


def ask(port: int, head: str, address: str = "127.0.0.1") -> tuple[socket.socket, bytes]:
    """Send a head to a proxy; return the connection and the head of the answer."""
    sock = socket.create_connection((address, port), 60)
    sock.sendall(head.encode() + b"\r\n\r\n")
    return sock, answer_of(sock)


def answer_of(sock: socket.socket) -> bytes:
    """Read the head of an answer, and nothing behind it."""
    read = b""
    while not read.endswith(b"\r\n\r\n"):
        if not (byte := sock.recv(1)):
            break
        read += byte
    return read


def rest_of(sock: socket.socket) -> bytes:
    read = b""
    while data := sock.recv(1 << 16):
        read += data
    return read
