"""Finds the rank that is behind: the rank for which the other ranks of a gang wait.

A rank that computes for ever, sleeps in a lock, or ends early keeps all other ranks in a collective
call. NCCL's watchdog says so after ten minutes, and PyTorch's flight recorder compares files of all
ranks afterwards. Here the ranks wait in memory that their host can read. So the rank is named while
the gang still stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

PATIENCE_S = 1.0  # a gang in which nothing moves for less is left alone
JOIN_S = 30.0  # the same while a rank has not joined: imports take each rank another time
#: A gang is slow by habit: nothing is told before it stands for so many times its usual pause.
USUAL_TIMES = 2.0
FADE = 0.9  # what is left of the usual pause each time the gang moves
NAMED_MOST = 8  # ranks that a sentence names


class RankIs(StrEnum):
    """Lists what a rank does, as its host sees it."""

    new = "new"  # it has not joined its gang
    ready = "ready"  # it could run, and waits for its turn on a slot
    runs = "runs"
    waits = "waits"  # for something that another rank does
    away = "away"  # it sleeps, or waits for something outside the gang
    ended = "ended"
    elsewhere = "elsewhere"  # it is on another host


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStanding:
    """Says where a rank stands.

    `text` is the call in which it waits, or for what it is away. `lacks` has the ranks that have
    not made that call; it is empty if that is not known. `mark` changes whenever the rank moves.
    """

    rank: int
    does: RankIs
    text: str = ""
    lacks: tuple[int, ...] = ()
    mark: tuple[int, ...] = ()


class GangWatch:
    """Watches where the ranks of one gang stand."""

    def __init__(self) -> None:
        self._marks: tuple[tuple[int, ...], ...] = ()
        self._since_s = 0.0  # when a rank moved last
        self._stood = False  # True if a rank waits for others since then, and all have joined
        self._usual_s = 0.0  # for how long the gang stands so between two moves
        self._told = ""

    def news(self, standings: Sequence[RankStanding] | None, now_s: float) -> str | None:
        """Return who is behind now, if that has changed since it was returned last; else None.

        Without `standings` the gang stands by order, so no rank is behind.
        """
        told = "" if standings is None else self._look(standings, now_s)
        if standings is None:
            self._marks, self._stood = (), False
        if told == self._told:
            return None
        self._told = told
        return told

    def _look(self, standings: Sequence[RankStanding], now_s: float) -> str:
        """Return who is behind, in a sentence; "" while the ranks move, or none waits for others.

        The sentence stays the same until a rank moves.
        """
        marks, who = tuple(each.mark for each in standings), who_is_behind(standings)
        joins = any(each.does == RankIs.new for each in standings)
        if marks != self._marks:
            stood_s = now_s - self._since_s if self._stood else 0.0
            self._usual_s = max(stood_s, self._usual_s * FADE)
            self._marks, self._since_s = marks, now_s
            self._stood = bool(who) and not joins
            return ""
        patience_s = JOIN_S if joins else max(PATIENCE_S, USUAL_TIMES * self._usual_s)
        return who if now_s - self._since_s >= patience_s else ""


def who_is_behind(standings: Sequence[RankStanding]) -> str:
    """Return a sentence about the ranks for which others wait, in a call or for a slot; "" if no
    rank waits.
    """
    waiting = [each for each in standings if each.does == RankIs.waits]
    by_rank = {each.rank: each for each in standings}
    calls = [(each, late) for each in waiting if (late := _late(each, by_rank))]
    if calls:
        first, late = min(calls, key=lambda call: (len(call[1]), call[0].rank))
        here = [each for each in waiting if each.text == first.text]
        return (
            f"{_wait(here)} in {first.text}, to which {_ranks(late)} {_have(late)} not come: "
            f"{_what_they_do(late)}."
        )
    movers = [each for each in standings if each.does in (RankIs.runs, RankIs.away)]
    ready = [each for each in standings if each.does == RankIs.ready]
    if not movers or not (waiting or ready):
        return ""
    here = [each for each in waiting if each.text == waiting[0].text]
    wait = f"{_wait(here)} in {here[0].text}" if here else f"{_wait(ready)} for a slot"
    return f"{wait}, and {_what_they_do(movers)}."


def _late(waiting: RankStanding, by_rank: Mapping[int, RankStanding]) -> list[RankStanding]:
    """Return the ranks that have not made the call, and that do not wait for other ranks."""
    lacking = [by_rank[rank] for rank in waiting.lacks if rank in by_rank]
    return [each for each in lacking if each.does not in (RankIs.waits, RankIs.ready)]


def _wait(ranks: Sequence[RankStanding]) -> str:
    return f"{_ranks(ranks).capitalize()} {'wait' if ranks[1:] else 'waits'}"


def _have(ranks: Sequence[RankStanding]) -> str:
    return "have" if ranks[1:] else "has"


def _ranks(ranks: Sequence[RankStanding]) -> str:
    numbers = [str(each.rank) for each in ranks]
    if not numbers[1:]:
        return f"rank {numbers[0]}"
    if numbers[NAMED_MOST:]:
        return f"ranks {', '.join(numbers[:NAMED_MOST])} and {len(numbers) - NAMED_MOST} more"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def _what_they_do(ranks: Sequence[RankStanding]) -> str:
    told = [f"rank {each.rank} {_DOES[each.does]}{_of(each)}" for each in ranks[:NAMED_MOST]]
    return ", ".join([*told, *(["…"] if ranks[NAMED_MOST:] else [])])


def _of(standing: RankStanding) -> str:
    return f" ({standing.text})" if standing.does == RankIs.away and standing.text else ""


_DOES = {
    RankIs.new: "has not joined the gang",
    RankIs.runs: "runs code of its own",
    RankIs.away: "is away",
    RankIs.ended: "has ended",
    RankIs.elsewhere: "is on another host",
}
