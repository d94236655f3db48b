"""A real HTTP server that takes webhooks in, and does what its path says."""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from typing import Any


@dataclass(frozen=True, slots=True)
class Got:
    path: str
    headers: dict[str, str]
    body: str


@dataclass
class Receiver:
    """`got` are the calls that came; `release` ends those that hang."""

    url: str
    got: Queue[Got] = field(default_factory=Queue)
    release: threading.Event = field(default_factory=threading.Event)
    failures_left: int = 0

    def next(self) -> Got:
        return self.got.get(timeout=180)  # a sender may be a process that starts


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    found: Receiver

    def handle_error(self, *_: Any) -> None:
        """A call that breaks off is what some tests are about."""


class _Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.found.got.put(Got(self.path, headers, body))
        getattr(self, self.path.strip("/"))()

    def do_GET(self) -> None:
        self.server.found.got.put(Got(f"GET {self.path}", {}, ""))
        self._answer(200)

    def ok(self) -> None:
        self._answer(204)

    def fail(self) -> None:
        self._answer(503)

    def flaky(self) -> None:
        self.server.found.failures_left -= 1
        self._answer(500 if self.server.found.failures_left >= 0 else 200)

    def gone(self) -> None:
        self._answer(410)

    def redirect(self) -> None:
        self._answer(307, Location=f"{self.server.found.url}/ok")

    def see(self) -> None:
        self._answer(303, Location=f"{self.server.found.url}/elsewhere")

    def hang(self) -> None:
        self.server.found.release.wait()

    def drip(self) -> None:
        """Always something, and never an answer."""
        self._pour(b"HTTP/1.1 200 OK\r\nX-Slow: ", b"x", pause_s=0.05)

    def no_head(self) -> None:
        """A header without an end."""
        self._pour(b"HTTP/1.1 200 OK\r\nX-Long: ", b"x" * 65536)

    def endless(self) -> None:
        """An answer whose body has no end."""
        self._pour(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n", b"x" * 65536)

    def rubbish(self) -> None:
        self.wfile.write(b"this is not HTTP\r\n\r\n")

    def _pour(self, head: bytes, piece: bytes, *, pause_s: float = 0.0) -> None:
        with contextlib.suppress(OSError):  # the other side has had enough
            self.wfile.write(head)
            while not self.server.found.release.wait(pause_s):
                self.wfile.write(piece)

    def _answer(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": "0", **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Tests look at `got`."""


@contextlib.contextmanager
def receiver(context: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    """On a free port of 127.0.0.1; over TLS with a `context`."""
    with _Server(("127.0.0.1", 0), _Answering) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        scheme = "https" if context else "http"
        server.found = Receiver(f"{scheme}://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server.found
        finally:
            server.found.release.set()
            server.shutdown()
            thread.join()
