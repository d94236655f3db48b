"""Reads the head of a request to the proxy of a host, and returns where its connection goes.

Programs ask for a tunnel (`CONNECT huggingface.co:443 HTTP/1.1`), or for one plain request, with
the whole URL (`GET http://index.example.org/simple/ HTTP/1.1`). Everything after the head is passed
on unread.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from app.core.model.provisions.network_policy import BadDestination, Destination, destination

HEAD_BYTES = 8 * 1024  # most bytes of a head
TOLD_CHARACTERS = 300  # most characters of a reason in the first line of an answer

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,40}")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):.*", re.DOTALL)
_VERSION = re.compile(r"HTTP/1\.[01]")
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]")
#: Headers for the proxy itself. A plain connection ends after its first answer, because a further
#: request in it could ask for another host.
_OWN = frozenset({"connection", "keep-alive", "proxy-connection", "proxy-authorization"})


class NotServed(Exception):
    """Raised to answer a request with this status and reason, and then to end its connection."""

    def __init__(self, status: int, told: str) -> None:
        super().__init__(told)
        self.status, self.told = status, told


@dataclass(frozen=True, slots=True)
class ProxyRequest:
    """Describes a request: its destination, and the bytes to send there first; none for a
    tunnel.
    """

    destination: Destination
    first_bytes: bytes = b""

    @property
    def is_tunnel(self) -> bool:
        return not self.first_bytes


def read_request(head: bytes) -> ProxyRequest:
    """Read a head, from its first line to the empty line; raises NotServed."""
    lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not _TOKEN.fullmatch(words[0]) or not _VERSION.fullmatch(words[2]):
        raise NotServed(400, "expected a request to an HTTP proxy")
    method, target, _ = words
    if method == "CONNECT":
        return ProxyRequest(_read_destination(target))
    return _read_plain(method, target, lines[1:])


def _read_plain(method: str, target: str, headers: list[str]) -> ProxyRequest:
    scheme, _, rest = target.partition("://")
    if scheme.lower() != "http" or not rest:
        told = "ask this proxy for CONNECT HOST:PORT, or for an address that begins with http://"
        raise NotServed(400, told)
    try:
        parts = urlsplit(target)
        authority = parts.netloc
    except ValueError as error:
        raise NotServed(400, f"{target:.100} is no URL") from error
    if "@" in authority or _UNPRINTABLE.search(target):
        raise NotServed(400, "a URL must have no user name and no special characters")
    has_port = authority.rpartition(":")[2].isdecimal() and not authority.endswith("]")
    wanted = _read_destination(authority if has_port else f"{authority}:80")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    first = [f"{method} {path} HTTP/1.1", *_passed_on(headers), "Connection: close", "", ""]
    return ProxyRequest(wanted, "\r\n".join(first).encode("latin-1"))


def _passed_on(headers: list[str]) -> Iterator[str]:
    for line in headers:
        found = _HEADER.fullmatch(line)
        if found is None or "\n" in line or "\r" in line:
            raise NotServed(400, "a header of the request is not well formed")
        if found[1].lower() not in _OWN:
            yield line


def _read_destination(text: str) -> Destination:
    try:
        return destination(text, may_be_pattern=False)
    except BadDestination as error:
        raise NotServed(400, f"{text:.100} {error}") from error


def answer(status: int, told: str) -> bytes:
    """Return the answer to a request that is not served.

    The reason is in the first line, too, because many programs show only this line.
    """
    told = _UNPRINTABLE.sub("?", told)[:TOLD_CHARACTERS]
    body = f"Roundhouse: {told}\n"
    lines = (
        f"HTTP/1.1 {status} {told}",
        "Content-Type: text/plain; charset=utf-8",
        f"Content-Length: {len(body)}",
        "Connection: close",
        "",
        body,
    )
    return "\r\n".join(lines).encode()


TUNNEL_OPEN = b"HTTP/1.1 200 Connection established\r\n\r\n"
