"""Makes the ids of rows: a prefix that tells the table, and a UUID. Ids sort by the time at which
they were made.
"""

from __future__ import annotations

import uuid_utils


def new_id(kind: str) -> str:
    """Return an id such as `req_01926f…`, for the prefix `req`."""
    return f"{kind}_{uuid_utils.uuid7().hex}"
