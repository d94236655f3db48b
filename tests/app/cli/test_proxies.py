"""Calls through proxies: which are made, and what is said of those that fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from app.cli import proxies, wording
from app.cli.client import ApiProblem, BadEnvironment, Client, Unreachable

VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, *(name.upper() for name in VARIABLES), "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)


class Answers(BaseHTTPRequestHandler):
    """Answers as a service, and refuses as a proxy."""

    def do_GET(self) -> None:
        is_proxied = self.path.startswith("http://")
        body = b"Access Denied" if is_proxied else b'{"items": []}'
        self.send_response(403 if is_proxied else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HTTP_PROXY", NOWHERE),
        ("http_proxy", NOWHERE),
        ("ALL_PROXY", "socks5://127.0.0.1:9"),
        ("ALL_PROXY", "nonsense://x"),
        ("SSL_CERT_FILE", "/does/not/exist"),
    ],
)
def test_loopback_is_reached_whatever_proxies_and_certificates_are_named(
    address, monkeypatch, name, value
):
    monkeypatch.setenv(name, value)
    with Client(address, "k", patience_s=0.0) as client:
        assert client.get("/v1/requests") == {"items": []}


def test_host_of_no_proxy_is_called_without_the_proxy(monkeypatch):
    monkeypatch.setenv("ALL_PROXY", "nonsense://x")
    monkeypatch.setenv("NO_PROXY", "roundhouse.test")
    Client("http://roundhouse.test", "k").close()
    assert proxies.in_words("http://roundhouse.test") == ""


def test_silent_proxy_is_named_without_its_password(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://ada:secret@127.0.0.1:9")
    with (
        Client("http://roundhouse.test", "k", patience_s=0.0) as client,
        pytest.raises(Unreachable) as raised,
    ):
        client.get("/v1/me")
    told = wording.unreachable(raised.value).plain
    assert "through the proxy of HTTP_PROXY=http://127.0.0.1:9." in told
    assert "NO_PROXY" in told
    assert "secret" not in told


def test_refusal_of_a_proxy_names_the_proxy(monkeypatch, address):
    monkeypatch.setenv("HTTP_PROXY", address)
    with (
        Client("http://roundhouse.test", "k", patience_s=0.0) as client,
        pytest.raises(ApiProblem) as raised,
    ):
        client.get("/v1/me")
    assert f"the proxy of HTTP_PROXY={address}" in raised.value.detail


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:9"),
        ("HTTPS_PROXY", "nonsense://x"),
        ("SSL_CERT_FILE", "/does/not/exist"),
    ],
)
def test_variable_that_cannot_be_used_is_named_with_what_to_do(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(BadEnvironment, match=f"{name}={value} cannot be") as raised:
        Client("https://roundhouse.test", "k")
    assert "\n  Name a" in str(raised.value)
