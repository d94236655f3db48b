"""Reads from a gang's shared table where each of its ranks stands, if torch's own groups make the
calls.

A rank waits in C++, where nothing of ours sees it.  So a rank is taken to wait if it has begun a
call that another member of the group has not: `core.device.gang_watch` tells nothing while ranks
move.  The ranks can write anything into the table, so each number is bounded here.
"""

from __future__ import annotations

from app.core.device.gang_watch import RankIs, RankStanding
from workers.ranks import turns
from workers.ranks.native import call_counters
from workers.ranks.shared_memory import GROUPS, Arena
from workers.ranks.turns import RankState

_DOES = {RankState.NEW: RankIs.new, RankState.DONE: RankIs.ended}


def native_standings(arena: Arena) -> list[RankStanding]:
    """Return where each rank of the gang stands."""
    lacks: dict[int, set[int]] = {rank: set() for rank in range(arena.ranks)}
    for index in range(GROUPS):
        if arena.words[arena.group(index) + call_counters.NAME]:
            first = call_counters.counts_at(arena, index)
            begun = {r: n for r in lacks if (n := arena.words[first + r]) >= 0}
            for rank, number in begun.items():
                lacks[rank] |= {other for other, theirs in begun.items() if theirs < number}
    return [_standing(arena, rank, tuple(sorted(lacks[rank]))) for rank in lacks]


def _standing(arena: Arena, rank: int, lacks: tuple[int, ...]) -> RankStanding:
    words, at = arena.words, arena.rank(rank)
    does = _DOES.get(words[at + turns.STATE])  # type: ignore[call-overload]
    if does is None:
        does = RankIs.waits if lacks else RankIs.runs
    calls = words[at + call_counters.CALLS]
    text = f"{arena.read_text(at + turns.TEXT)}, its call {calls}" if lacks else ""
    mark = (words[at + turns.STATE], calls)
    return RankStanding(rank=rank, does=does, text=text, lacks=lacks, mark=mark)
