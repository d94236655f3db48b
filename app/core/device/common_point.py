"""Brings the ranks of a gang to a common point, at which no call of theirs is under way.

Torch's own groups hold sockets and threads.  They can be dropped only where no call has begun that
another member has not made.  An order closes a gate before the calls of all ranks.  A rank at the
gate may pass while it has made fewer calls of some group than another member of that group: it may
be the cause for which that member waits.  So exactly the causes of calls that had begun are made,
and no rank goes further.  Steps play no part, and the script need not help.

The ranks write the counters (`workers.ranks.native.board`).  They belong to the tenant, so a gang
whose counters lie misleads only itself: its order is taken back when its time is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

HOLD_WITHIN_S = 30.0  # an order that has not brought all ranks to rest by then is taken back
#: Seconds for ranks at rest to let go of their groups; nothing there waits for another rank.
DROP_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCounters:
    """Says what one rank has done of its order.

    `inside` counts its threads that are about to make a call.  `settled` is the number of `calls`
    that the rank had made when it last saw all of them end.  `open_receives` counts its receives
    from any rank: any rank may have to come.  `dropped` is the number of the last order for which
    it has let go of its groups, and `built` that of the last order after which it has built them
    anew.
    """

    inside: int = 0
    calls: int = 0
    settled: int = 0
    open_receives: int = 0
    dropped: int = 0
    built: int = 0
    is_over: bool = False  # the rank has ended, or has never joined


@dataclass(frozen=True, slots=True, kw_only=True)
class GangCounters:
    """Says where a gang stands: `groups` has the calls that each member of a group has begun, by
    the index of the group.

    `let_go` is the number of the last order at which the ranks were told to let go.
    """

    ranks: Sequence[RankCounters]
    groups: dict[int, tuple[int, ...]] = field(default_factory=dict)
    let_go: int = 0


def limits(counters: GangCounters) -> dict[int, int]:
    """Return, for each group, how many calls a member may begin while the gate is closed.

    The members that have begun fewer are behind.  A limit never falls while an order lasts, as
    counters only grow.
    """
    return {index: max(calls, default=0) for index, calls in counters.groups.items()}


def may_all_pass(counters: GangCounters) -> bool:
    """True while some rank waits for a message from any rank, which every rank may have to send."""
    return any(rank.open_receives for rank in counters.ranks if not rank.is_over)


def is_at_rest(counters: GangCounters) -> bool:
    """True if no call is under way, and no rank may begin one.

    No rank still builds the groups of which it let go before: others would have to take part.
    """
    ranks = [rank for rank in counters.ranks if not rank.is_over]
    return (
        all(_rests(rank) and rank.built == counters.let_go for rank in ranks)
        and not may_all_pass(counters)
        and all(len({*calls}) <= 1 for calls in counters.groups.values())
    )


def _rests(rank: RankCounters) -> bool:
    return not rank.inside and rank.settled == rank.calls


class PointStage(StrEnum):
    """Lists how far an order has come."""

    open = "open"  # no order: the ranks run
    holding = "holding"  # the gate is closed, and causes are let through
    dropping = "dropping"  # all are at rest, and let go of their groups
    dropped = "dropped"
    taken_back = "taken_back"  # the order has failed; it is not given again before `open`


@dataclass(slots=True)
class CommonPoint:
    """Decides how far the order of one gang has come."""

    stage: PointStage = PointStage.open
    number: int = 0  # number of the newest order
    _until_s: float = 0.0
    _before: GangCounters | None = None  # what was read before

    def order(self, now_s: float) -> None:
        """Begin an order, if none lasts."""
        if self.stage == PointStage.open:
            self.stage, self.number = PointStage.holding, self.number + 1
            self._until_s = now_s + HOLD_WITHIN_S

    def look(self, counters: GangCounters, now_s: float) -> PointStage:
        """Return the stage that follows from what the ranks have written.

        The counters are read one after the other while ranks move.  Counters that were read twice
        with no difference were true together in between, as calls only grow.
        """
        is_true, self._before = counters == self._before, counters
        if self.stage == PointStage.holding and is_true and is_at_rest(counters):
            self.stage, self._until_s = PointStage.dropping, now_s + DROP_WITHIN_S
        if self.stage == PointStage.dropping and self._has_dropped(counters):
            self.stage = PointStage.dropped
        if self.stage in (PointStage.holding, PointStage.dropping) and now_s >= self._until_s:
            self.stage = PointStage.taken_back
        return self.stage

    def end(self) -> None:
        """End the order; the ranks build their groups anew and run on."""
        self.stage = PointStage.open

    @property
    def is_settled(self) -> bool:
        """True if nothing further comes of the order."""
        return self.stage in (PointStage.dropped, PointStage.taken_back)

    def _has_dropped(self, counters: GangCounters) -> bool:
        return all(rank.dropped == self.number for rank in counters.ranks if not rank.is_over)
