"""Numbers the versions of the messages between islands and device workers, for people.

Nothing is decided by it: what a worker takes is a fact of its own (`messages.Alive.facts`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Raise this with each change because of which workers of the version before must be restarted.
#: 1: one worker for each host. Workers before that report no number.
PROTOCOL = 1

_DO = "stop it, and start the worker of this service's version (docs/howto/upgrade.md)"


def told_version(facts: Mapping[str, Any]) -> str:
    """Say that the worker with these facts is older or newer than this service; "" if it is not.

    Facts without an island are of no worker's report.
    """
    said = facts.get("protocol", 0)
    if "island" not in facts or said == PROTOCOL:
        return ""
    if said > PROTOCOL:
        return (
            f"Its worker is newer (messages {said}) than this service (messages {PROTOCOL}): "
            "upgrade the service first (docs/howto/upgrade.md)."
        )
    return (
        f"Its worker is older (messages {said}) than this service (messages {PROTOCOL}): when its "
        f"tasks may pause, {_DO}."
    )


def told_unreadable(facts: Mapping[str, Any], why: str) -> str:
    """Say that a report of a worker with these facts cannot be read, and what to do."""
    said = facts.get("protocol", 0)
    version = said if type(said) is int and 0 <= said < 10**6 else "unknown"
    return (
        f"Its worker is of another version (messages {version}; this service has {PROTOCOL}), and "
        f"its reports cannot be read: {_DO}. What could not be read: {why[:200].rstrip('.')}."
    )
