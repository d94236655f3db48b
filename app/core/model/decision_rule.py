"""Names why a round decides something, in the order of `docs/concepts/fair_share.md`."""

from enum import StrEnum


class DecisionRule(StrEnum):
    """Names the rule of a decision; the values are shown, and stored with each decision."""

    # rules of fair share
    CHARGE = "F1"
    ORDER = "F3"
    QUOTA = "F4"
    RECLAIM = "F5"
    TURN = "F6/F8"
    RECLAIM_OR_TURN = "F5/F6/F8"  # of a search for victims: each victim has one of the two
    GANG = "F7"
    TIER = "F9"
    # what users, administrators and hosts ask for
    START = "start"
    REQUESTS = "requests"
    NEEDS = "needs"
    RESERVATION = "reservation"
    HOLD = "hold"
    CANCEL = "cancel"
    MOVE = "move"
    WISH = "wish"  # to have fewer devices
    DRAIN = "drain"
    LEASE = "lease"
    # how tasks share devices and islands
    SHARE = "share"
    BATCH = "batch"
    REGROUP = "regroup"
    GROW = "grow"
    TICKETS = "tickets"

    @property
    def goes_first(self) -> bool:
        """True if a task goes before all others by this rule."""
        return self in (DecisionRule.GANG, DecisionRule.TIER)
