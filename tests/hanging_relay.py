"""Stands between processes and a server, and for a time carries no byte: the server hangs.

New connections are taken and get no answer either, as from a stopped process or a lost network.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

from sqlalchemy.engine import make_url

PIECE_BYTES = 2**16


class HangingRelay:
    """Listens on a port of loopback and carries connections to the socket `path`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._goes = threading.Event()
        self._goes.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]

    def __enter__(self) -> HangingRelay:
        threading.Thread(target=self._serve, name="hanging relay", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._goes.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        self._goes.clear()
        try:
            yield
        finally:
            self._goes.set()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed at the end
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        self._goes.wait()
        with client, socket.socket(socket.AF_UNIX) as server:
            server.connect(self.path)
            back = threading.Thread(target=self._pump, args=(server, client), daemon=True)
            back.start()
            self._pump(client, server)
            back.join()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(PIECE_BYTES):
                self._goes.wait()
                sink.sendall(piece)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def through(url: str) -> tuple[HangingRelay, str]:
    """Return a relay to the Postgres of this URL with a Unix socket, and the URL through it."""
    given = make_url(url)
    relay = HangingRelay(f"{given.query['host']}/.s.PGSQL.{given.port or 5432}")
    new = given.set(host="127.0.0.1", port=relay.port, query={"sslmode": "disable"})
    return relay, new.render_as_string(hide_password=False)
