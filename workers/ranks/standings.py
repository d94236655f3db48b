"""Reads from a gang's shared table where each of its ranks stands.

The ranks of a command can write anything into the table, so every number is bounded here, and the
table's lock is not taken: a rank might hold it for ever. What is read while a rank moves may be
half old and half new. `core.device.gang_watch` tells nothing before the ranks stand still.

`Turns.standing` says the same of a gang that fails. The ranks write that sentence, and those of a
command have no `app`.
"""

from __future__ import annotations

from app.core.device.gang_watch import RankIs, RankStanding
from workers.ranks import rendezvous, turns
from workers.ranks.shared_memory import GROUPS, Arena
from workers.ranks.turns import RankState, Wait

#: What the word of a rank's state says; any other number was written by the rank itself.
_DOES: dict[int, RankIs] = {
    RankState.NEW: RankIs.new,
    RankState.READY: RankIs.ready,
    RankState.RUNNING: RankIs.runs,
    RankState.WAITING: RankIs.waits,
    RankState.AWAY: RankIs.away,
    RankState.DONE: RankIs.ended,
}
_OF_A_CALL = (Wait.CALL, Wait.VOTE)
_MOVES = (
    turns.STATE,
    turns.KIND,
    turns.ABOUT,
    turns.NUMBER,
    turns.PART,
    turns.STEP,
    turns.TURNS,
)


def standings(arena: Arena) -> list[RankStanding]:
    """Return where each rank of the gang stands; of ranks on other hosts that is not known."""
    return [_standing(arena, rank) for rank in range(arena.ranks)]


def _standing(arena: Arena, rank: int) -> RankStanding:
    if not arena.is_here(rank):
        return RankStanding(rank=rank, does=RankIs.elsewhere)
    words, at = arena.words, arena.rank(rank)
    does = _DOES.get(words[at + turns.STATE], RankIs.runs)
    is_told = does in (RankIs.waits, RankIs.away)
    lacks = _lacked(arena, at) if does == RankIs.waits else ()
    return RankStanding(
        rank=rank,
        does=does,
        text=arena.read_text(at + turns.TEXT) if is_told else "",
        lacks=lacks,
        mark=(*(words[at + word] for word in _MOVES), *lacks),
    )


def _lacked(arena: Arena, at: int) -> tuple[int, ...]:
    """Return the ranks that have not made the call in which the rank at `at` waits."""
    words = arena.words
    group, number = words[at + turns.ABOUT], words[at + turns.NUMBER]
    if words[at + turns.KIND] not in _OF_A_CALL or not 0 <= group < GROUPS or number < 0:
        return ()
    return tuple(rendezvous.lacking(arena, group, number))
