"""Defines the scopes to which a key may be narrowed; every operation needs one scope.

A key without scopes may do all that its role may. A key with scopes may do the part of that which
they allow: they never add to a role. A write scope includes the read scope.
"""

from __future__ import annotations

from collections.abc import Collection

#: What each scope allows, in the order in which scopes are listed.
MEANINGS = {
    "work:read": "read requests, tasks, logs, metrics, checkpoints, code, data, names of secrets",
    "work:write": "submit requests, code, data and secrets; pause, resume, move, change and cancel",
    "usage:read": "read shares, the queue, usage and decisions; simulate; scrape /metrics",
    "devices:read": "read islands, hosts, devices, presets and mounts",
    "devices:write": "drain hosts and devices; enrol and change devices; change presets and mounts",
    "admin:read": "read tenants, users, keys, webhooks and the audit log",
    "admin:write": "create and change tenants, users, keys and webhooks",
}
SCOPES = tuple(MEANINGS)

#: The area of the operations under each tag.
AREAS = {
    "requests": "work",
    "tasks": "work",
    "checkpoints": "work",
    "bundles": "work",
    "graphs": "work",
    "datablocks": "work",
    "shares": "usage",
    "simulations": "usage",
    "meta": "usage",
    "secrets": "work",
    "channels": "work",
    "devices": "devices",
    "presets": "devices",
    "environments": "work",
    "mounts": "devices",
    "reservations": "devices",
    "tenants": "admin",
    "users and keys": "admin",
    "webhooks": "admin",
    "audit": "admin",
}

Scopes = Collection[str] | None  # None means all scopes


def allows(scopes: Scopes, needed: str) -> bool:
    if scopes is None or needed in scopes:
        return True
    area, _, how = needed.partition(":")
    return how == "read" and f"{area}:write" in scopes


def within(scopes: Scopes, others: Scopes) -> bool:
    """True if a key with `scopes` may do no more than a key with `others`."""
    if scopes is None:
        return others is None
    return all(allows(others, scope) for scope in scopes)
