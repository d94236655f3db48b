"""Makes the ids of rows: a prefix that tells the table, and a UUID. Ids sort by the time at which
they were made.
"""

from __future__ import annotations

import uuid_utils


def id_at(kind: str, at_s: float) -> str:
    """Return a text that sorts behind the ids of this kind that were made before, and before later
    ones; the time is in seconds since 1970.
    """
    return f"{kind}_{int(at_s * 1000):012x}"


def new_id(kind: str) -> str:
    """Return an id such as `req_01926f…`, for the prefix `req`."""
    return f"{kind}_{uuid_utils.uuid7().hex}"
