"""Decides which URLs a webhook may have."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from app.core.security.addresses import Network, literal_address, may_call

URL_LENGTH = 2000


def refusal(url: str, allowed: Iterable[Network] = ()) -> str | None:
    """Return what is wrong with a URL as it is written; None if nothing is.

    The addresses of its host are checked later.
    """
    if len(url) > URL_LENGTH or not url.isascii() or not url.isprintable() or " " in url:
        return f"must be at most {URL_LENGTH} ASCII characters without spaces"
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"must be a valid URL: {error}"
    if parts.scheme not in ("http", "https") or not host:
        return "must begin with http:// or https:// and have a host"
    if "@" in parts.netloc:
        return "must not contain a user name or password; receivers verify the signature instead"
    if "#" in url:
        return "must not contain a fragment (#), which is never sent"
    literal = literal_address(host)
    if literal is not None and not may_call(literal, allowed):
        return (
            f"must be a public address; {host} is not one, and this deployment does not allow its "
            "network"
        )
    return None
