"""Names the limits that hold for a user alone: its own, or those of each user of its tenant."""

from __future__ import annotations

from typing import Any

#: The columns of a user that hold limits, which are the names in `Tenant.user_defaults` too. That
#: also has "budget", for `scheduling.budgets`.
LIMITS = ("limit", "max_running", "max_queued", "max_sessions", "max_duration_s")


def bound_of(row: Any, name: str) -> Any:
    """Return a limit from a row that has the user's limits and `user_defaults`; None if there is
    none.
    """
    own = getattr(row, name)
    return row.user_defaults.get(name) if own is None else own


#: SQL of an object with the limits of the user `u` of the tenant `t`; without those that are null.
LIMITS_OF_USER = (
    "t.user_defaults - 'budget' || jsonb_strip_nulls(jsonb_build_object("
    + ", ".join(f"""'{name}', u."{name}\"""" for name in LIMITS)
    + "))"
)
