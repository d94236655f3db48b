"""Stands between processes and a server of S3, and for a time refuses calls or answers late."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

_SLOW_DOWN = (
    b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)
_HOP_BY_HOP = {"connection", "transfer-encoding", "keep-alive"}


class RefusingStore:
    """Listens on a port of loopback and carries calls to the server at `upstream`."""

    def __init__(self, upstream: str) -> None:
        self.upstream = urlsplit(upstream).netloc
        self.refuses = False
        self.late_s = 0.0
        outer = self

        class Handler(_Handler):
            store = outer

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]

    def __enter__(self) -> RefusingStore:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Answer each call with 503."""
        self.refuses = True
        try:
            yield
        finally:
            self.refuses = False

    @contextlib.contextmanager
    def answering_late(self, late_s: float) -> Iterator[None]:
        self.late_s = late_s
        try:
            yield
        finally:
            self.late_s = 0.0


class _Handler(http.server.BaseHTTPRequestHandler):
    store: RefusingStore
    protocol_version = "HTTP/1.1"

    def _carry(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        time.sleep(self.store.late_s)
        if self.store.refuses:
            self._answer(503, [("Content-Type", "application/xml")], _SLOW_DOWN)
            return
        upstream = http.client.HTTPConnection(self.store.upstream, timeout=60)
        with contextlib.closing(upstream):
            # The name in "Host" would be taken for one of a bucket; no signature is checked.
            upstream.putrequest(self.command, self.path, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() != "host":
                    upstream.putheader(name, value)
            upstream.endheaders(body or None)
            reply = upstream.getresponse()
            self._answer(reply.status, reply.getheaders(), reply.read())

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _carry

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        known = {name.lower() for name, _ in headers}
        for name, value in headers:
            if name.lower() not in _HOP_BY_HOP and (
                name.lower() != "content-length" or self.command == "HEAD"
            ):
                self.send_header(name, value)
        if self.command != "HEAD" or "content-length" not in known:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""
