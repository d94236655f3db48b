"""Says by which proxy calls of the command reach the service, and which variable names it.

The variables are those that curl, pip and others read: `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and
`NO_PROXY`, in either case. No proxy reaches the loopback of this machine, so none is used for it.
"""

from __future__ import annotations

import ipaddress
import os
from urllib.parse import urlsplit
from urllib.request import proxy_bypass


def is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def variable_of(url: str) -> str:
    """Return the variable that names a proxy for the address; "" if there is none."""
    parts = urlsplit(url)
    if is_loopback(url) or proxy_bypass(parts.hostname or ""):
        return ""
    names = (f"{parts.scheme}_proxy", "all_proxy")
    spellings = (spelling for name in names for spelling in (name, name.upper()))
    return next((name for name in spellings if os.environ.get(name)), "")


def proxy_of(url: str) -> str | None:
    return os.environ.get(variable_of(url))


def in_words(url: str) -> str:
    """Return the variable with its value, without a password; "" if no proxy is used."""
    name = variable_of(url)
    return f"{name}={_without_login(os.environ[name])}" if name else ""


def _without_login(proxy: str) -> str:
    scheme, slashes, rest = proxy.rpartition("://")
    return f"{scheme}{slashes}{rest.rpartition('@')[2]}"
