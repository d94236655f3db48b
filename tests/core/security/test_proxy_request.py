"""Heads of requests to the proxy: where they go, and what is passed on of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.security.proxy_request import NotServed, answer, read_request
from tests.thoroughness import examples


def head(line: str, *headers: str) -> bytes:
    return "\r\n".join([line, *headers, "", ""]).encode("latin-1")


@pytest.mark.parametrize(
    ("target", "destination"),
    [
        ("HuggingFace.co:443", "huggingface.co:443"),
        ("93.184.216.34:443", "93.184.216.34:443"),
        ("[2606:2800:220:1::1]:8443", "[2606:2800:220:1::1]:8443"),
        ("[::ffff:10.0.0.1]:80", "10.0.0.1:80"),
    ],
)
def test_tunnel_names_its_destination_and_sends_nothing(target: str, destination: str) -> None:
    request = read_request(head(f"CONNECT {target} HTTP/1.1", f"Host: {target}"))
    assert str(request.destination) == destination
    assert request.is_tunnel


@pytest.mark.parametrize(
    ("url", "destination", "line"),
    [
        ("http://index.org/simple/?a=b", "index.org:80", "GET /simple/?a=b HTTP/1.1"),
        ("http://index.org", "index.org:80", "GET / HTTP/1.1"),
        ("HTTP://Index.org:8080/", "index.org:8080", "GET / HTTP/1.1"),
        ("http://[2606:2800::1]/x", "[2606:2800::1]:80", "GET /x HTTP/1.1"),
        ("http://[2606:2800::1]:81/x", "[2606:2800::1]:81", "GET /x HTTP/1.1"),
    ],
)
def test_plain_request_is_passed_on_without_its_host(url: str, destination: str, line: str) -> None:
    request = read_request(
        head(
            f"GET {url} HTTP/1.1",
            *("Host: index.org", "Proxy-Authorization: Basic eA==", "Accept: */*"),
            *("Proxy-Connection: keep-alive", "Connection: keep-alive"),
        )
    )
    assert str(request.destination) == destination
    assert request.first_bytes == head(line, "Host: index.org", "Accept: */*", "Connection: close")


@pytest.mark.parametrize(
    "line",
    [
        "", "GET", "GET / HTTP/1.1", "GET /simple HTTP/1.1", "GET https://a.org/ HTTP/1.1",
        "GET ftp://a.org/ HTTP/1.1", "GET file:///etc/passwd HTTP/1.1", "GET http:// HTTP/1.1",
        "GET http://a.org/ HTTP/2.0", "GET http://a.org/  HTTP/1.1", "CONNECT a.org HTTP/1.1",
        "CONNECT *.org:443 HTTP/1.1", "CONNECT *:443 HTTP/1.1", "CONNECT a.org:0 HTTP/1.1",
        "CONNECT a.org:443/x HTTP/1.1", "CONNECT u@a.org:443 HTTP/1.1",
        "CONNECT 2130706433:80 HTTP/1.1", "CONNECT 0x7f.1:80 HTTP/1.1",
        "CONNECT 127.1:80 HTTP/1.1", "CONNECT [fe80::1%1]:80 HTTP/1.1",
        "GET http://u:p@a.org/ HTTP/1.1", "GET http://[::1/ HTTP/1.1",
        "G\x00T http://a.org/ HTTP/1.1",
        "GET http://2130706433/ HTTP/1.1", "GET http://a.org:99999/ HTTP/1.1",
        "GET http://a.org\\@b.org/ HTTP/1.1", "GET http://a.org#@b.org/ HTTP/1.1x",
    ],
)  # fmt: skip
def test_request_without_a_clear_destination_is_not_served(line: str) -> None:
    with pytest.raises(NotServed) as refused:
        read_request(head(line))
    assert refused.value.status == 400


@pytest.mark.parametrize("header", [" folded: x", "no colon", "a\nb: c", "a b: c", ": x"])
def test_plain_request_with_a_bad_header_is_not_served(header: str) -> None:
    with pytest.raises(NotServed):
        read_request(head("GET http://a.org/ HTTP/1.1", "Host: a.org", header))


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_not_served(body: bytes) -> None:
    status, request = 200, None
    try:
        request = read_request(body + b"\r\n\r\n")
    except NotServed as refused:
        status = refused.status
    assert status == 400 if request is None else not request.destination.is_pattern


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(400, 599), st.text(max_size=400))
def test_answer_is_one_well_formed_message(status: int, told: str) -> None:
    first, _, rest = answer(status, told).decode("ascii").partition("\r\n")
    headers, _, body = rest.partition("\r\n\r\n")
    assert first.startswith(f"HTTP/1.1 {status} ")
    assert "\n" not in first
    assert f"Content-Length: {len(body)}" in headers.split("\r\n")
    assert headers.count("\r\n") == 2
