"""Decides which destinations a task may reach over the network.

A destination is written `HOST:PORT`: a name such as `huggingface.co:443`, or an address such as
`192.0.2.7:443` or `[2001:db8::7]:443`.  In a list, `*.pypi.org:443` stands for all names below
pypi.org, but not for pypi.org itself, and `*:443` for every name.  An address is reached only where
a list has this very address.

A task lists the destinations that it wants (`network.allow`).  Tenants have policies; the policy of
a tenant binds the tenants below it too (`effective`).  Without any policy nothing is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

from app.core.model.fields import JSON, Fields

MAX_DESTINATIONS = 64  # per task, and per tenant's policy
MAX_TOLD = 10  # destinations that a message lists
MAX_HOST_LENGTH = 253
#: What is counted for a task: connections, refused ones, bytes that it sent and received.
FIGURES = ("connections", "refused", "sent_bytes", "received_bytes")
NEED = "egress"  # what a host must offer to a task with a network
EXAMPLE = "huggingface.co:443"

_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PORT = re.compile(r"[1-9][0-9]{0,4}")


class BadDestination(ValueError):
    """Raised for a text that is not a destination; the message says what is wrong."""


@dataclass(frozen=True, slots=True, order=True)
class Destination:
    """A host and a port, or a pattern of them; the host is in its only valid spelling."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def is_pattern(self) -> bool:
        return self.host.startswith("*")

    @property
    def is_address(self) -> bool:
        return not self.is_pattern and _address(self.host) is not None

    def covers(self, other: Destination) -> bool:
        """True if everything that the other destination stands for is allowed by this one."""
        if self.port != other.port:
            return False
        if self.host == other.host:
            return True
        if not self.is_pattern or other.is_address:
            return False
        return other.host.removeprefix("*").endswith(self.host.removeprefix("*"))


def destination(text: str, *, may_be_pattern: bool = True) -> Destination:
    """Read a destination; raises BadDestination."""
    host, _, port = text.lower().rpartition(":")
    if not text.isascii() or not _PORT.fullmatch(port) or int(port) > 65535:
        raise BadDestination(f"must end with a port from 1 to 65535, as in {EXAMPLE}")
    if host.startswith("[") and host.endswith("]"):
        return Destination(_written_address(host[1:-1]), int(port))
    if _address(host) is not None:
        return Destination(_written_address(host), int(port))
    if may_be_pattern and host == "*":
        return Destination(host, int(port))
    name = host.removesuffix(".")
    _check_name(name.removeprefix("*.") if may_be_pattern else name)
    return Destination(name, int(port))


def destinations(texts: Iterable[str]) -> tuple[Destination, ...]:
    """Read destinations that were checked before."""
    return tuple(destination(text) for text in texts)


def is_allowed(allow: Iterable[Destination], wanted: Destination) -> bool:
    return any(each.covers(wanted) for each in allow)


def _check_name(name: str) -> None:
    labels = name.split(".")
    if len(name) > MAX_HOST_LENGTH or not all(map(_LABEL.fullmatch, labels)):
        raise BadDestination(
            "must be a name of letters, digits, '-' and '.', or an address (in brackets if it has "
            "colons); only the first part of a name may be '*'"
        )
    if _NUMBER.fullmatch(labels[-1]):
        raise BadDestination("must be a name, or an address with four numbers from 0 to 255")


def _written_address(text: str) -> str:
    if (address := _address(text)) is None:
        raise BadDestination(f"{text:.60} is not an address")
    return address


def _address(text: str) -> str | None:
    """Return an address in its only spelling; None for anything else."""
    with suppress(ValueError):
        address = ip_address(text)
        if isinstance(address, IPv6Address):
            if address.scope_id is not None:
                return None
            address = address.ipv4_mapped or address
        return str(address)
    return None


# --- the wish of a task -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkWish:
    """Lists the destinations that a task wants to reach; an empty list means no network."""

    allow: tuple[str, ...] = ()

    def as_json(self) -> JSON | None:
        return {"allow": list(self.allow)} if self.allow else None


NO_NETWORK = NetworkWish()


def read_network(fields: Fields) -> NetworkWish:
    """Read the field `network` of a task."""
    if not fields.given:
        return NO_NETWORK
    allow = fields.texts("allow", None, "")
    if len(allow) > MAX_DESTINATIONS:
        told = f"must have at most {MAX_DESTINATIONS} destinations; got {len(allow)}"
        fields.fault("allow", told, "range")
    found: dict[str, None] = {}
    for n, text in enumerate(allow[:MAX_DESTINATIONS]):
        try:
            found[str(destination(text))] = None
        except BadDestination as error:
            fields.fault(f"allow/{n}", f"{error}; got {text!r:.100}")
    if not allow:
        fields.fault(
            "allow", "must list what the task may reach; omit network for nothing", "missing"
        )
    fields.close()
    return NetworkWish(allow=tuple(found))


# --- the policies of tenants --------------------------------------------------------------------

Policy = Sequence[Destination] | None


def effective(policies: Iterable[Policy]) -> tuple[Destination, ...]:
    """Return what a tenant may reach, by its own policy and those of the tenants above it.

    None stands for a tenant without a policy, which follows the tenant above. The result has what
    every policy allows. If no tenant has a policy, it is empty.
    """
    given = [policy for policy in policies if policy is not None]
    listed = dict.fromkeys(each for policy in given for each in policy)
    return tuple(each for each in listed if all(is_allowed(policy, each) for policy in given))


def listed(allow: Sequence[Destination]) -> str:
    """Return the destinations in words; beyond MAX_TOLD they are counted."""
    more = len(allow) - MAX_TOLD
    told = ", ".join(map(str, allow[:MAX_TOLD])) or "nothing"
    return told + (f" and {more} more" if more > 0 else "")


def withdrawn(wish: NetworkWish, allow: Sequence[Destination]) -> list[str]:
    """Return those wishes of an accepted task that the policies no longer allow."""
    return [text for text in wish.allow if not is_allowed(allow, destination(text))]
