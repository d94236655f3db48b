"""No second call hides in a first one: raw bytes against uvicorn as the product runs it.

A proxy before the service may read where a message ends by other rules than the service does.  So a
message of which two readers could think differently is refused, and its connection closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from app.api.http_protocol import BoundedProtocol
from tests.security.test_half_open import connected, serving

pytestmark = pytest.mark.security

HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: x\r\n\r\n"
ONE_CHUNK = b"%x\r\n%s\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN)
CHUNKED_HIDDEN = b"0\r\n\r\n" + HIDDEN


def _post(*lines: bytes, body: bytes, end: bytes = b"\r\n") -> bytes:
    return end.join([b"POST / HTTP/1.1", b"Host: x", *lines, b"", b""]) + body


def _length(body: bytes) -> bytes:
    return b"Content-Length: %d" % len(body)


TE = b"Transfer-Encoding: chunked"
REFUSED = {
    # two lengths
    "length and chunks": _post(_length(CHUNKED_HIDDEN), TE, body=CHUNKED_HIDDEN),
    "chunks and length": _post(TE, b"Content-Length: 4", body=ONE_CHUNK),
    "length of nothing and chunks": _post(b"Content-Length: 0", TE, body=CHUNKED_HIDDEN),
    "two lengths": _post(b"Content-Length: 0", _length(HIDDEN), body=HIDDEN),
    "two lengths, the other first": _post(_length(HIDDEN), b"Content-Length: 0", body=HIDDEN),
    "one length twice": _post(_length(HIDDEN), _length(HIDDEN), body=HIDDEN),
    "list of lengths": _post(b"Content-Length: 0, %d" % len(HIDDEN), body=HIDDEN),
    # a length that is no number
    "length with a sign": _post(b"Content-Length: +33", body=HIDDEN),
    "negative length": _post(b"Content-Length: -1", body=HIDDEN),
    "hexadecimal length": _post(b"Content-Length: 0x0", body=HIDDEN),
    "length with a letter": _post(b"Content-Length: 0a", body=HIDDEN),
    "length with a space": _post(b"Content-Length: 0 33", body=HIDDEN),
    "length beyond 64 bits": _post(b"Content-Length: 18446744073709551616", body=HIDDEN),
    "length of nothing at all": _post(b"Content-Length:", body=HIDDEN),
    "length with a vertical tab": _post(b"Content-Length: \x0b0", body=HIDDEN),
    # a coding that one reader knows and another does not
    "chunks named twice": _post(TE, TE, body=CHUNKED_HIDDEN),
    "chunks before another coding": _post(b"Transfer-Encoding: chunked, x", body=CHUNKED_HIDDEN),
    "other coding": _post(b"Transfer-Encoding: xchunked", body=CHUNKED_HIDDEN),
    "coding in quotes": _post(b'Transfer-Encoding: "chunked"', body=CHUNKED_HIDDEN),
    "coding after a vertical tab": _post(b"Transfer-Encoding: \x0bchunked", body=CHUNKED_HIDDEN),
    "identity and length": _post(b"Transfer-Encoding: identity", b"Content-Length: 0", body=HIDDEN),
    "no coding": _post(b"Transfer-Encoding:", body=CHUNKED_HIDDEN),
    # chunks that two readers see differently
    "chunk size with a sign": _post(TE, body=b"+0\r\n\r\n" + HIDDEN),
    "chunk size with 0x": _post(TE, body=b"0x0\r\n\r\n" + HIDDEN),
    "chunk size after a space": _post(TE, body=b" 0\r\n\r\n" + HIDDEN),
    "chunk size before a space": _post(TE, body=b"0 \r\n\r\n" + HIDDEN),
    "chunk size beyond 64 bits": _post(TE, body=b"1" + b"0" * 16 + b"\r\n\r\n" + HIDDEN),
    "no chunk size": _post(TE, body=b"\r\n\r\n" + HIDDEN),
    "chunk size ended by a bare LF": _post(TE, body=b"0\n\n" + HIDDEN),
    "chunk size ended by a bare CR": _post(TE, body=b"0\r\r" + HIDDEN),
    "extension ended by a bare LF": _post(TE, body=b"2;x\nxx\r\n" + CHUNKED_HIDDEN),
    "chunk longer than its size": _post(TE, body=b"1\r\nabc\r\n" + CHUNKED_HIDDEN),
    "chunk ended by a bare LF": _post(TE, body=b"1\r\na\n" + CHUNKED_HIDDEN),
    # header lines
    "header before a space": _post(b"Content-Length : 0", body=HIDDEN),
    "coding before a space": _post(b"Transfer-Encoding : chunked", body=CHUNKED_HIDDEN),
    "coding before a tab": _post(b"Transfer-Encoding\t: chunked", body=CHUNKED_HIDDEN),
    "header after a space": _post(b" Content-Length: 0", body=HIDDEN),
    "folded length": _post(b"Content-Length:", b" 0", body=HIDDEN),
    "folded coding": _post(b"Transfer-Encoding:", b"\tchunked", body=CHUNKED_HIDDEN),
    "folded header": _post(b"X: a", b" " + TE, b"Content-Length: 0", body=HIDDEN),
    "bare LF in a header": _post(b"X: a\nTransfer-Encoding: chunked", body=CHUNKED_HIDDEN),
    "bare CR in a header": _post(b"X: a\rTransfer-Encoding: chunked", body=CHUNKED_HIDDEN),
    "NUL in a header": _post(b"X: a\0b", body=HIDDEN),
    "NUL in the name of a header": _post(b"Content-Length\0: 0", body=HIDDEN),
    "header without a colon": _post(b"Content-Length", body=HIDDEN),
    "header without a name": _post(b": chunked", body=HIDDEN),
    "only bare LFs": _post(b"Content-Length: 0", body=HIDDEN, end=b"\n"),
    "only bare CRs": _post(b"Content-Length: 0", body=HIDDEN, end=b"\r"),
    # the first line
    "HTTP/0.9": b"GET /\r\n" + HIDDEN,
    "HTTP/1.2": b"GET / HTTP/1.2\r\nHost: x\r\n\r\n" + HIDDEN,
    "preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + HIDDEN,
    "space in the address": b"GET / HTTP/1.1 /x HTTP/1.1\r\nHost: x\r\n\r\n" + HIDDEN,
    "tab in the first line": b"GET\t/ HTTP/1.1\r\nHost: x\r\n\r\n" + HIDDEN,
    "NUL in the address": b"GET /\0 HTTP/1.1\r\nHost: x\r\n\r\n" + HIDDEN,
    "unknown method": b"SMUGGLE / HTTP/1.1\r\nHost: x\r\n\r\n" + HIDDEN,
    "method in small letters": b"get / HTTP/1.1\r\nHost: x\r\n\r\n" + HIDDEN,
}  # fmt: skip
#: understood by all in one way, and the connection ends with the answer
LAST = {
    "chunks in HTTP/1.0": _post(TE, body=CHUNKED_HIDDEN).replace(b"HTTP/1.1", b"HTTP/1.0", 1),
    "HTTP/1.0": b"GET / HTTP/1.0\r\nHost: x\r\n\r\n" + HIDDEN,
    "HTTP/2.0": b"GET / HTTP/2.0\r\nHost: x\r\n\r\n" + HIDDEN,
    "connection that its client closes": _post(b"Connection: close", body=HIDDEN),
    "closed after a body": _post(b"Connection: x, close", _length(HIDDEN), body=HIDDEN * 2),
}
#: all bytes belong to the first call
WHOLE = {
    "call in a body": _post(_length(HIDDEN), body=HIDDEN),
    "call in a chunk": _post(TE, body=b"%x\r\n%s\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN)),
    "call in a body after other headers": _post(
        b"Content-Lengths: 0", _length(HIDDEN), body=HIDDEN
    ),
}
#: an intermediary that believes these would no longer look into the connection
UPGRADES = {
    "HTTP/2": b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\n"
    b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n",
    "WebSocket": b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
    "tunnel": b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
}


class Recorder:
    """An application that notes each call that reaches it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, bytes]] = []

    async def __call__(
        self, scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]
    ) -> None:
        if scope["type"] == "websocket":  # as the service answers where it has no WebSocket
            await receive()
            await send({"type": "websocket.close"})
            return
        body, more = b"", True
        self.calls.append((scope["method"], scope["path"], b"?"))
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.calls[-1] = (scope["method"], scope["path"], body)
        headers = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b""})


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[int, Recorder]]:
    recorder = Recorder()
    with serving(BoundedProtocol, recorder) as (port, _):
        yield port, recorder


def sent(port: int, message: bytes) -> bytes:
    """Return what comes back until the server closes the connection."""
    got = b""
    with connected(port) as connection:
        connection.sendall(message)
        while piece := connection.recv(65536):
            got += piece
    return got


@pytest.mark.parametrize("what", REFUSED)
def test_message_of_which_two_readers_could_think_differently_is_refused(what, served):
    port, recorder = served
    recorder.calls.clear()
    assert sent(port, REFUSED[what]).startswith(b"HTTP/1.1 400 ")
    assert "/hidden" not in [path for _, path, _ in recorder.calls]


@pytest.mark.parametrize("what", LAST)
def test_nothing_is_read_after_the_last_call_of_a_connection(what, served):
    port, recorder = served
    recorder.calls.clear()
    got = sent(port, LAST[what])
    assert got.startswith(b"HTTP/1.1 200 ")
    assert got.count(b"HTTP/1.1 ") == 1
    assert [path for _, path, _ in recorder.calls] == ["/"]


@pytest.mark.parametrize("what", WHOLE)
def test_call_within_a_body_stays_there(what, served):
    port, recorder = served
    recorder.calls.clear()
    closing = b"GET /next HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    got = sent(port, WHOLE[what] + closing)
    assert got.count(b"HTTP/1.1 200 ") == 2
    assert recorder.calls == [("POST", "/", HIDDEN), ("GET", "/next", b"")]


@pytest.mark.parametrize("what", UPGRADES)
def test_connection_is_not_given_to_another_protocol(what, served):
    port, recorder = served
    recorder.calls.clear()
    with connected(port) as connection:
        connection.sendall(UPGRADES[what])
        got = connection.recv(65536)
    # HTTP/2 is answered as if no other protocol was named
    status = {"tunnel": b"400", "WebSocket": b"403"}.get(what, b"200")
    assert got.startswith(b"HTTP/1.1 " + status)
    assert b"upgrade" not in got.lower()


def test_two_calls_that_all_readers_see_are_two(served):
    port, recorder = served
    recorder.calls.clear()
    end = b"GET /end HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert sent(port, _post(b"Content-Length: 0", body=HIDDEN + end)).count(b"HTTP/1.1 200 ") == 3
    assert [path for _, path, _ in recorder.calls] == ["/", "/hidden", "/end"]
