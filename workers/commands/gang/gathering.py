"""Brings the ranks of a gang with torch's own groups to a common point, and lets them go on, for
their host.

The ranks write the table, so each number is taken as it is and none is an index.
"""

from __future__ import annotations

from app.core.device.common_point import (
    CommonPoint,
    GangCounters,
    PointStage,
    RankCounters,
    limits,
    may_all_pass,
)
from workers.ranks import turns
from workers.ranks.native import call_counters
from workers.ranks.shared_memory import GROUPS, Arena
from workers.ranks.turns import RankState

MOST_ORDERS = 2**31  # that a gang may get; more do not fit beside the futex of the gate
_NOT_THERE = (RankState.NEW, RankState.DONE)


class Gathering:
    """Gives the orders of one gang's host."""

    def __init__(self, arena: Arena) -> None:
        self.arena, self.words = arena, arena.words
        self.point = CommonPoint()

    def adopt(self) -> None:
        """Take over ranks of an image, which stand where the order of another host brought them.

        Raises ValueError if their table has no such order: the ranks wrote it themselves.
        """
        number = self.words[call_counters.HOLD]
        if not 0 < number <= MOST_ORDERS:
            raise ValueError(f"their table has order {number}")
        self.point = CommonPoint(PointStage.dropped, number)

    def has_come(self, now_s: float) -> bool:
        """Give the order if there is none; True once nothing further comes of it."""
        if self.point.stage == PointStage.open:
            self.point.order(now_s)
            self.words[call_counters.ALL_PASS] = 0
            self._write(call_counters.HOLD, self.point.number)
        counters = self.counters()
        for index, limit in limits(counters).items():
            self.words[self.arena.group(index) + call_counters.LIMIT] = limit
        self.words[call_counters.ALL_PASS] = int(may_all_pass(counters))
        stage = self.point.look(counters, now_s)
        if stage == PointStage.dropping:
            self._write(call_counters.DROP, self.point.number)
        elif stage == PointStage.taken_back:
            self._write(call_counters.HOLD, 0)
        return self.point.is_settled

    @property
    def lasts(self) -> bool:
        """True while the ranks are on their way."""
        return self.point.stage in (PointStage.holding, PointStage.dropping)

    @property
    def is_dropped(self) -> bool:
        """True if the ranks have let go of their groups."""
        return self.point.stage == PointStage.dropped

    def end(self) -> None:
        """Open the gate; the ranks build their groups anew."""
        if self.point.stage != PointStage.open:
            self.point.end()
            self._write(call_counters.HOLD, 0)

    def counters(self) -> GangCounters:
        """Read where the ranks stand."""
        arena, words = self.arena, self.words
        groups = {}
        for index in range(GROUPS):
            if words[arena.group(index) + call_counters.NAME]:
                first = call_counters.counts_at(arena, index)
                calls = (words[first + rank] for rank in range(arena.ranks))
                groups[index] = tuple(number for number in calls if number >= 0)
        ranks = [*map(self._rank, range(arena.ranks))]
        return GangCounters(ranks=ranks, groups=groups, let_go=words[call_counters.DROP])

    def _rank(self, rank: int) -> RankCounters:
        words, at = self.words, self.arena.rank(rank)
        return RankCounters(
            inside=words[at + call_counters.INSIDE],
            calls=words[at + call_counters.CALLS],
            settled=words[at + call_counters.SETTLED],
            open_receives=words[at + call_counters.OPEN_RECEIVES],
            dropped=words[at + call_counters.DROPPED],
            built=words[at + call_counters.BUILT],
            is_over=words[at + turns.STATE] in _NOT_THERE,
        )

    def _write(self, word: int, value: int) -> None:
        self.words[word] = value
        self.arena.wake(word)
