"""Decides by an identity provider's claims who may sign in, to which tenant and with which role.

A deployment lists grants in order: a value of one claim, with a tenant and a role. The first grant
that matches a person counts; a person whom no grant matches may not sign in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROLES = ("platform_admin", "tenant_admin", "member", "viewer")

# claims; the first one that is present names the user
NAMES = ("preferred_username", "email", "sub")
NAME_LENGTH = 100


@dataclass(frozen=True, slots=True)
class Grant:
    tenant: str
    role: str


def read(written: Mapping[str, str]) -> dict[str, Grant]:
    """Parse {"value": "TENANT:ROLE"}; raises ValueError."""
    found = {}
    for value, text in written.items():
        tenant, _, role = text.rpartition(":")
        if not tenant or role not in ROLES:
            raise ValueError(f"must be TENANT:ROLE with a role of {', '.join(ROLES)}; got {text!r}")
        found[value] = Grant(tenant, role)
    return found


def of(claim: Any, grants: Mapping[str, Grant]) -> Grant | None:
    """Return the first grant that matches the claim; None if none does.

    `claim` is a text or a list of texts; a value of any other type matches nothing.
    """
    values = [claim] if isinstance(claim, str) else claim if isinstance(claim, list) else []
    return next((grant for value, grant in grants.items() if value in values), None)


def user_id(issuer: str, subject: str, tenant_id: str) -> str:
    """Return the id of a person in a tenant; it changes if the person changes tenants."""
    text = "\0".join((issuer, subject, tenant_id))
    return f"usr_{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def name(claims: Mapping[str, Any]) -> str:
    for claim in NAMES:
        said = claims.get(claim)
        if isinstance(said, str) and (word := said.strip()[:NAME_LENGTH]) and word.isprintable():
            return word
    return "somebody"
