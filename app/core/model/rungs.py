"""Decides which members of a lot go on past a rung of their rule `stop`, and which pause.

This is asynchronous successive halving (ASHA, Li et al. 2020), with one difference: a loser is not
ended but paused. It goes on from the same bits as soon as enough results are in to put it among the
best. So at each rung the best `keep` of the results known so far pass, at least one; what has
passed once has passed. A result counts at a rung only if its member passed the rungs before.

All follows from the results in the order in which they came, whenever it is computed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from app.core.model.provisions.stop_rule import StopRule

HELD_AT_RUNG = "rung"  # the hold of a member that lost at a rung
PROMOTED = "promoted"  # the hold of one that passed later, until at_once leaves room
RUNG_HOLDS = (HELD_AT_RUNG, PROMOTED)

_Entry = tuple[float, int, str]  # badness, place in the order of arrival, member


@dataclass(frozen=True, slots=True, kw_only=True)
class RungValue:
    """Holds a member's value at a rung; `passed`: it passed already, or a person let it go on."""

    member: str
    rung: int
    value: float | None
    passed: bool = False


@dataclass(slots=True)
class Standings:
    """Ranks the results at each rung, and knows who `passed`."""

    rule: StopRule
    passed: set[tuple[str, int]] = field(default_factory=set)
    _ranks: dict[int, list[_Entry]] = field(default_factory=lambda: defaultdict(list))
    _entries: dict[tuple[str, int], _Entry] = field(default_factory=dict)
    # results at a rung of members that have not passed the one before
    _early: dict[tuple[str, int], tuple[int, RungValue]] = field(default_factory=dict)

    @classmethod
    def of(cls, rule: StopRule, results: Iterable[RungValue]) -> Standings:
        """Take in the results in the order in which they came."""
        standings = cls(rule)
        for result in results:
            standings.add(result)
        return standings

    def lost_at(self, member: str) -> int | None:
        """Return the first rung that the member reached and has not passed; None if it goes on."""
        for rung in range(len(self.rule.rungs)):
            key = member, rung
            if key not in self.passed:
                return rung if key in self._entries else None
        return None

    def place(self, member: str, rung: int) -> int | None:
        """Return the member's place at the rung, from 1; None if it does not count there."""
        entry = self._entries.get((member, rung))
        return None if entry is None else bisect_left(self._ranks[rung], entry) + 1

    def results(self, rung: int) -> int:
        """Return the number of results that count at the rung."""
        return len(self._ranks[rung])

    def add(self, result: RungValue) -> Sequence[str]:
        """Take in one more result; return the members that pass a rung by it."""
        order, key = len(self._entries) + len(self._early), (result.member, result.rung)
        if result.rung and (result.member, result.rung - 1) not in self.passed:
            self._early[key] = order, result
            return ()
        waiting, passing = [(order, result)], list[str]()
        while waiting:
            order, result = waiting.pop()
            for each in self._enter(order, result):
                self.passed.add((each, result.rung))
                passing.append(each)
                if (later := self._early.pop((each, result.rung + 1), None)) is not None:
                    waiting.append(later)
        return passing

    def _enter(self, order: int, result: RungValue) -> list[str]:
        """Rank the result at its rung; return the members that pass now and had not passed."""
        ranks = self._ranks[result.rung]
        entry = self.rule.badness(result.value), order, result.member
        insort(ranks, entry)
        self._entries[result.member, result.rung] = entry
        best = self.rule.passing(len(ranks))
        passing = {ranks[best - 1][2]}  # those before it pass, or passed at an earlier result
        if result.passed or bisect_left(ranks, entry) < best:
            passing.add(result.member)
        return sorted(each for each in passing if (each, result.rung) not in self.passed)
