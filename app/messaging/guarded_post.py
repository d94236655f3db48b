"""Sends a POST to an address that a tenant chose, guarded against access to internal services.

The name is resolved here, each of its addresses is checked, and the connection uses the checked
address. So a name that resolves differently a moment later gains nothing. No proxy is used, no
redirect is followed, and only the status of the answer is read. One deadline covers everything,
however slowly the other side responds; only the system's resolver has a deadline of its own.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Mapping
from functools import lru_cache
from ipaddress import ip_address
from typing import Any

import httpcore2
import httpx2

from app.core.security.addresses import Network, may_call
from app.core.webhooks.retries import AttemptAnswer


class _Refused(Exception):
    """Raised when the address may not be called.  The text does not name it, since a tenant could
    explore the network in this way.
    """


def post(
    url: str,
    body: str,
    headers: Mapping[str, str],
    *,
    timeout_s: float,
    allowed: Iterable[Network] = (),
) -> AttemptAnswer:
    """Send the POST; a fault of the other side raises nothing."""
    began_s = time.monotonic()
    status, error = None, ""
    try:
        status = _status(url, body, headers, _Guarded(began_s + timeout_s, tuple(allowed)))
    except _Refused as refused:
        error = str(refused)
    except httpcore2.TimeoutException:
        error = f"no answer within {timeout_s:g} s"
    except (httpcore2.NetworkError, httpcore2.ProtocolError, httpx2.InvalidURL, OSError) as failed:
        error = str(failed) or type(failed).__name__
    return AttemptAnswer(
        status=status, error=error, took_us=round((time.monotonic() - began_s) * 1e6)
    )


def _status(url: str, body: str, headers: Mapping[str, str], network: _Guarded) -> int:
    parts = httpx2.URL(url)
    sent = {"Host": parts.netloc.decode(), "Connection": "close", **headers}
    content = body.encode()
    sent["Content-Length"] = str(len(content))
    target = httpcore2.URL(
        scheme=parts.raw_scheme, host=parts.raw_host, port=parts.port, target=parts.raw_path
    )
    with (
        httpcore2.ConnectionPool(ssl_context=_trusted(), network_backend=network) as pool,
        pool.stream("POST", target, headers=list(sent.items()), content=content) as answer,
    ):
        return answer.status


@lru_cache
def _trusted() -> Any:
    return httpx2.create_ssl_context()


class _Guarded(httpcore2.SyncBackend):
    """Connects only to permitted addresses, and not after the deadline."""

    def __init__(self, deadline_s: float, allowed: tuple[Network, ...]) -> None:
        self._deadline_s, self._allowed = deadline_s, allowed

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore2.NetworkStream:
        failed: Exception = _Refused("the name resolves to no permitted address")
        for address in self._addresses(host, port):
            try:
                left_s = _left_s(self._deadline_s)
                return _DeadlineStream(super().connect_tcp(address, port, left_s), self._deadline_s)
            except httpcore2.ConnectError as error:
                failed = error
        raise failed

    def connect_unix_socket(self, *_: Any, **__: Any) -> httpcore2.NetworkStream:
        raise _Refused("sockets of this machine are not permitted")

    def _addresses(self, host: str, port: int) -> list[str]:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (socket.gaierror, UnicodeError) as error:
            raise _Refused("the name does not resolve") from error
        listed = dict.fromkeys(str(entry[4][0]) for entry in found)
        return [one for one in listed if may_call(ip_address(one), self._allowed)]


class _DeadlineStream(httpcore2.NetworkStream):
    """A stream that fails after the deadline."""

    def __init__(self, stream: httpcore2.NetworkStream, deadline_s: float) -> None:
        self._stream, self._deadline_s = stream, deadline_s

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left_s(self._deadline_s))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _left_s(self._deadline_s))

    def start_tls(
        self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.NetworkStream:
        left_s = _left_s(self._deadline_s)
        return _DeadlineStream(
            self._stream.start_tls(ssl_context, server_hostname, left_s), self._deadline_s
        )

    def close(self) -> None:
        self._stream.close()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise httpcore2.ReadTimeout
    return left_s
