"""Decides which addresses of the network may be called on behalf of a tenant.

Webhooks and the connections of tasks follow these rules: an address must be public, or lie in a
network that an administrator allows.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

#: Public addresses that are never called. An address in the first five networks contains another
#: address, which the check would not see. The last two belong to servers of the clouds themselves.
_NEVER = tuple(
    ip_network(one)
    for one in (
        "64:ff9b::/96", "64:ff9b:1::/48", "::ffff:0:0:0/96", "2002::/16", "2001::/32",
        "192.0.0.0/24", "168.63.129.16/32",
    )
)  # fmt: skip


def networks(listed: str) -> tuple[Network, ...]:
    """Parse networks between commas; raises ValueError."""
    return tuple(ip_network(one.strip()) for one in listed.split(",") if one.strip())


def addresses_by_name(listed: str) -> dict[str, list[str]]:
    """Parse names with addresses, NAME=ADDRESS between commas; raises ValueError."""
    found: dict[str, list[str]] = {}
    for one in listed.split(","):
        name, _, address = one.strip().partition("=")
        if one.strip():
            found.setdefault(name.lower(), []).append(str(ip_address(address)))
    return found


def may_call(address: Address, allowed: Iterable[Network] = ()) -> bool:
    """True if the address is public, or in a network that the deployment allows."""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if any(address in network for network in allowed):
        return True
    if any(address in network for network in _NEVER):
        return False
    # is_global includes multicast, for example, and the private fec0::/10 of older networks
    inner = isinstance(address, IPv6Address) and address.is_site_local
    return address.is_global and not (address.is_multicast or address.is_reserved or inner)


def literal_address(host: str) -> Address | None:
    """Return the address if the host is written as one; None for a name that must be resolved."""
    host = host.removesuffix(".")  # a final point marks a complete name
    if host == "localhost" or host.endswith(".localhost"):
        return ip_address("127.0.0.1")
    with suppress(ValueError):
        return ip_address(host)
    with suppress(OSError):
        return ip_address(socket.inet_aton(host))  # also accepts 2130706433, 0x7f.1 and 127.1
    return None
