"""What a person does in a browser, told from what its page does by itself."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.cli.interactive.browser_input import BrowserInput

POLL = b"GET /api/kernels?1 HTTP/1.1\r\nHost: x\r\nSec-Fetch-Dest: empty\r\n\r\n"
BODY = b"GET \r\n\r\nPOST" * 2 + b"12345678"
SAVE = b"PUT /api/contents/a HTTP/1.1\r\nHost: x\r\nContent-Length: 32\r\n\r\n" + BODY
PAGE = b"GET /lab HTTP/1.1\r\nSec-Fetch-Dest: document\r\n\r\n"
UPGRADE = b"GET /channels HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"


def frame(opcode, size):
    head = bytes([128 | opcode])
    if size < 126:
        head += bytes([128 | size])
    elif size < 2**16:
        head += bytes([128 | 126]) + size.to_bytes(2, "big")
    else:
        head += bytes([128 | 127]) + size.to_bytes(8, "big")
    return head + b"mask" + b"\x81" * size


PING, EMPTY, SHORT, LONG = frame(9, 4), frame(1, 0), frame(1, 200), frame(2, 70_000)
REST = frame(0, 70_000)  # of a message that began before
STREAMS = [
    ([POLL, POLL], False),
    ([POLL, SAVE, POLL], True),
    ([PAGE], True),
    ([UPGRADE, PING, PING], False),
    ([POLL, UPGRADE, PING, SHORT], True),
    ([UPGRADE, LONG], True),
    ([UPGRADE, REST, PING], False),
    ([UPGRADE, EMPTY], True),
    ([b"\x16\x03\x01 and other bytes of TLS"], False),
    ([b"GET /" + b"a" * 70_000], True),
]


@pytest.mark.parametrize(("sent", "is_input"), STREAMS)
@given(cuts=st.lists(st.integers(0, 80_000), max_size=8))
def test_input_is_found_however_the_bytes_are_cut(sent, is_input, cuts):
    body, follower = b"".join(sent), BrowserInput()
    places = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
    pieces = [body[a:b] for a, b in itertools.pairwise(places)]
    assert any([follower.holds_input(piece) for piece in pieces]) == is_input


def test_what_a_body_holds_is_not_read_as_a_call():
    assert len(BODY) == 32
    follower = BrowserInput()
    assert follower.holds_input(SAVE)
    assert not follower.holds_input(POLL)


@given(st.lists(st.binary(max_size=300), max_size=10))
def test_any_bytes_are_followed(pieces):
    follower = BrowserInput()
    for piece in pieces:
        follower.holds_input(piece)
