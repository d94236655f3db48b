"""What a key may be narrowed to: a few scopes, of which every operation needs one.

A key without scopes may do all that its role may.  One with scopes may do of that what they allow:
they never add to a role.  To write somewhere is to read there too.
"""

from __future__ import annotations

from collections.abc import Collection

#: What each one opens, in the order in which they are told.
MEANINGS = {
    "work:read": "look at requests, tasks, logs, metrics, checkpoints, code and data",
    "work:write": "submit requests, code and data; pause, move, change and cancel",
    "usage:read": "look at shares, the queue, usage and decisions; simulate; scrape /metrics",
    "devices:read": "look at islands, hosts, devices and presets",
    "devices:write": "drain and cordon; enrol and change devices; change presets",
    "admin:read": "look at tenants, users, keys, webhooks and the audit log",
    "admin:write": "make and change tenants, users, keys and webhooks",
}
SCOPES = tuple(MEANINGS)

#: what the operations under a tag are about
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
    "devices": "devices",
    "presets": "devices",
    "tenants": "admin",
    "users and keys": "admin",
    "webhooks": "admin",
    "audit": "admin",
}

Scopes = Collection[str] | None  # None: all of them


def allows(scopes: Scopes, needed: str) -> bool:
    if scopes is None or needed in scopes:
        return True
    area, _, how = needed.partition(":")
    return how == "read" and f"{area}:write" in scopes


def within(scopes: Scopes, others: Scopes) -> bool:
    """Whether a key with `scopes` may do no more than one with `others`."""
    if scopes is None:
        return others is None
    return all(allows(others, scope) for scope in scopes)
