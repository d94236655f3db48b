"""A registry of container images, read-only, over an OCI layout (HTTP API v2).

`Registry` counts what is asked, and can misbehave: `altered` has other bytes for a digest, and
`endless` is a blob that never ends. With a `certificate`, a file that has its key too, it speaks
TLS.
"""

from __future__ import annotations

import hashlib
import json
import re
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

ENDLESS_BYTES = 2**32  # an endless blob ends here, if nobody hangs up before
_BLOCK = b"\0" * 2**16
_PATH = re.compile(r"/v2/(.+)/(manifests|blobs)/sha256:([0-9a-f]{64})")


class Registry:
    """Serves the blobs of an OCI layout as manifests and blobs of every name in `names`."""

    def __init__(self, layout: Path, *names: str, certificate: Path | None = None) -> None:
        self.blobs, self.names = layout / "blobs" / "sha256", names
        self.digest = self.digest_in(layout)
        self.altered = dict[str, bytes]()
        self.endless = ""
        self.asked = list[tuple[str, str]]()  # ("manifests" or "blobs", digest)
        registry = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                registry.answer(self)

            do_HEAD = do_GET

            def log_message(self, *_: Any) -> None:
                """Say nothing: the tests look at `asked`."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.host = f"localhost:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @staticmethod
    def digest_in(layout: Path) -> str:
        [named] = json.loads((layout / "index.json").read_text())["manifests"]
        return str(named["digest"]).removeprefix("sha256:")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def reference(self, digest: str = "", name: str = "") -> str:
        return f"{self.host}/{name or self.names[0]}@sha256:{digest or self.digest}"

    def add(self, document: dict[str, Any]) -> str:
        """Add a manifest or an index; return its digest."""
        body = json.dumps(document).encode()
        digest = hashlib.sha256(body).hexdigest()
        (self.blobs / digest).write_bytes(body)
        return digest

    def document(self, digest: str = "") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.blobs / (digest or self.digest)).read_bytes())
        return found

    def answer(self, call: BaseHTTPRequestHandler) -> None:
        if call.path == "/v2/":
            return self._send(call, b"{}", "application/json")
        found = _PATH.fullmatch(call.path)
        if found is None or found[1] not in self.names:
            return self._refuse(call, "NAME_UNKNOWN", "repository name not known to registry")
        _, kind, digest = found.groups()
        self.asked.append((kind, digest))
        if digest == self.endless:
            return self._send_endless(call)
        file = self.blobs / digest
        if not file.exists():
            return self._refuse(call, "MANIFEST_UNKNOWN", "manifest unknown")
        body = self.altered.get(digest, file.read_bytes())
        media_type = "application/octet-stream"
        if kind == "manifests":
            media_type = json.loads(body).get("mediaType", media_type)
        self._send(call, body, media_type)

    def _send(
        self, call: BaseHTTPRequestHandler, body: bytes, media_type: str, status: int = 200
    ) -> None:
        call.send_response(status)
        call.send_header("Content-Type", media_type)
        call.send_header("Content-Length", str(len(body)))
        call.end_headers()
        if call.command == "GET":
            call.wfile.write(body)

    def _refuse(self, call: BaseHTTPRequestHandler, code: str, told: str) -> None:
        body = json.dumps({"errors": [{"code": code, "message": told}]}).encode()
        self._send(call, body, "application/json", 404)

    def _send_endless(self, call: BaseHTTPRequestHandler) -> None:
        call.send_response(200)
        call.send_header("Content-Type", "application/octet-stream")
        call.send_header("Content-Length", str(ENDLESS_BYTES))
        call.end_headers()
        try:
            for _ in range(ENDLESS_BYTES // len(_BLOCK)):
                call.wfile.write(_BLOCK)
        except OSError:
            call.close_connection = True  # the reader has hung up
