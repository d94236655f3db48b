"""Finds the address for a connection of a task, and connects to the very address that was checked.

The proxy resolves a name, never the task. The name may resolve to another address a moment later;
that changes nothing, because the connection uses the checked address and not the name.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from ipaddress import ip_address

from app.core.model.provisions.network_policy import Destination
from app.core.security.addresses import Address, Network, may_call
from app.core.security.proxy_request import NotServed

RESOLVE_S = 10.0  # limit until a name is resolved
CONNECT_S = 10.0  # limit until an address has accepted a connection
TRIED_MAX = 4  # most addresses of one name
RESOLVERS = 64  # most names that are resolved at once

Resolve = Callable[[str, int], Sequence[str]]


def resolve_by_system(host: str, port: int) -> list[str]:
    """Return the addresses of a name, in the order of the system; raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


@dataclass
class Connector:
    """Connects to destinations.

    `private` are networks that may be reached although they are not public.  `hosts` are names with
    fixed addresses, which are not resolved.
    """

    private: tuple[Network, ...] = ()
    hosts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    resolve: Resolve = resolve_by_system
    connect_s: float = CONNECT_S

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(RESOLVERS, "resolver")

    async def connect(self, wanted: Destination) -> socket.socket:
        """Return a connection to the destination; raises NotServed."""
        found = await self._addresses(wanted)
        permitted = [each for each in found if self._is_permitted(each)]
        if not permitted:
            told = "is not a public address" if wanted.is_address else "has no public address"
            raise NotServed(403, f"{wanted.host} {told}, and this host allows no other ones")
        for address in permitted[:TRIED_MAX]:
            if (sock := await self._connected(address, wanted.port)) is not None:
                return sock
        raise NotServed(502, f"{wanted} does not accept the connection")

    async def _addresses(self, wanted: Destination) -> list[Address]:
        if wanted.is_address:
            return [ip_address(wanted.host)]
        written = self.hosts.get(wanted.host)
        if written is None:
            written = await self._resolved(wanted)
        return [ip_address(each.partition("%")[0]) for each in written]

    async def _resolved(self, wanted: Destination) -> Sequence[str]:
        asked = asyncio.get_running_loop().run_in_executor(
            self._pool, self.resolve, wanted.host, wanted.port
        )
        try:
            return await asyncio.wait_for(asked, RESOLVE_S)
        except TimeoutError as error:
            raise NotServed(504, f"{wanted.host} was not resolved in {RESOLVE_S:g} s") from error
        except (OSError, UnicodeError) as error:
            raise NotServed(502, f"{wanted.host} cannot be resolved") from error

    def _is_permitted(self, address: Address) -> bool:
        if any(address in network for network in self.private):
            return True
        return may_call(address, self.private) and not _is_own(address)

    async def _connected(self, address: Address, port: int) -> socket.socket | None:
        """Return a connection, or None if the address does not answer."""
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connecting = asyncio.get_running_loop().sock_connect(sock, (str(address), port))
            await asyncio.wait_for(connecting, self.connect_s)
        except OSError:  # includes TimeoutError
            sock.close()
            return None
        except BaseException:
            sock.close()
            raise
        return sock


def _is_own(address: Address) -> bool:
    """True if the address is one of this host, whose services may trust any program of the host."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((str(address), 9))  # sends no packet
        except OSError:
            return False  # no route leads to the address
        return ip_address(probe.getsockname()[0].partition("%")[0]) == address
