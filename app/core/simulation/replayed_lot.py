"""Replays a lot with a rule `stop`: which members run, which rest at a rung, which go on.

It does to imaginary members what control and islands do to real ones: at most `at_once` run or
wait, those that go on past a rung come before new ones, and the losers end when only they are left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from app.core.model.provisions.stop_rule import StopRule
from app.core.model.rungs import RungValue, Standings


@dataclass(frozen=True, slots=True, kw_only=True)
class LotRule:
    """Holds the rule of a lot, and how many members may run or wait at once; 0: all of them."""

    stop: StopRule
    at_once: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RungMark:
    """Says after how much work, in seconds as in `Arrival`, a member reaches its next rung, and
    with which value.
    """

    work_s: float
    value: float | None


@dataclass(slots=True)
class ReplayedLot:
    """Knows the members of a lot; `coming` of them have not arrived yet."""

    rule: LotRule
    coming: int = 0
    resting: dict[str, None] = field(default_factory=dict)  # off their devices, lost at a rung
    _place: dict[str, int] = field(default_factory=dict)  # member -> its place among the arrivals
    _unmade: list[str] = field(default_factory=list)
    _live: set[str] = field(default_factory=set)
    _promoted: set[str] = field(default_factory=set)  # may go on, and wait for room
    _lost: set[str] = field(default_factory=set)  # live or resting
    _rungs: dict[str, int] = field(default_factory=dict)  # member -> rungs that it has reached
    _ranks: Standings = field(init=False)

    def __post_init__(self) -> None:
        self._ranks = Standings(self.rule.stop)

    def arrive(self, member: str) -> None:
        self.coming -= 1
        self._place[member] = len(self._place)
        self._unmade.append(member)

    def admit(self) -> Iterator[str]:
        """Yield the members that begin, or go on, as far as there is room."""
        while self._has_room() and (self._promoted or self._unmade):
            if self._promoted:
                member = min(self._promoted, key=lambda each: self._place[each])
                self._promoted.discard(member)
            else:
                member = self._unmade.pop(0)
            self._live.add(member)
            yield member

    def _has_room(self) -> bool:
        return not self.rule.at_once or len(self._live) < self.rule.at_once

    def reach(self, member: str, value: float | None) -> Sequence[str]:
        """Note that a member reached its next rung.

        Returns the members that had lost, are not at rest yet, and may go on now.
        """
        rung = self._rungs.get(member, 0)
        self._rungs[member] = rung + 1
        passing = self._ranks.add(RungValue(member=member, rung=rung, value=value))
        if self._ranks.lost_at(member) is not None:
            self._lost.add(member)
        freed = [one for one in passing if one in self._lost and self._ranks.lost_at(one) is None]
        self._lost.difference_update(freed)
        for one in freed:
            if one in self.resting:
                del self.resting[one]
                self._promoted.add(one)
        return [one for one in freed if one in self._live]

    def has_lost(self, member: str) -> bool:
        return member in self._lost

    def rest(self, member: str) -> None:
        """Note that a member that has lost left its devices."""
        self._live.discard(member)
        self.resting[member] = None

    def end(self, member: str) -> None:
        self._live.discard(member)
        self._lost.discard(member)

    def stop_losers(self) -> list[str]:
        """Return the resting members, which end now, if all others have ended; else none."""
        if self.coming or self._unmade or self._live or self._promoted:
            return []
        stopped, self.resting = [*self.resting], {}
        self._lost.difference_update(stopped)
        return stopped
