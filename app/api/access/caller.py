"""Describes who makes a call; `app.api.access.auth` finds out who it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Describes the user or program that makes a call.

    `scopes` are the scopes to which the caller's key is narrowed; None if it is not. `service`: the
    caller is a program. `in_root`: the caller belongs to the root tenant, which owns no share and
    so cannot submit work.
    """

    user_id: str
    user_name: str
    tenant_id: str
    tenant_name: str
    role: str
    key_id: str
    scopes: tuple[str, ...] | None = None
    service: bool = False
    in_root: bool = False

    @property
    def sees_all(self) -> bool:
        return self.role == "platform_admin"
