"""Where the portions of a graph are cut into legs, so that all of it ends soonest.

The nodes of a portion run one after the other in the order of the plan, and consecutive ones are a
**piece**: what one leg runs.  A piece begins when all that it needs of others is there.  What a
node has made is there for others when it lies in the store, a moment after it has run, while the
piece goes on; where several executors share a piece, when all of it has ended.  So many pieces let
nodes begin early; but each costs a launch, for which its place stands still.  `cut` weighs the two
by what it would come to: `timed` plays the pieces through, as the islands' schedulers will start
them.

Of few nodes all ways are tried.  Else a cut is taken to be of use only at either side of a node
that waits for another portion, or, if its block is there only at the end, behind one that another
portion waits for.  With all of these cut no piece waits for itself: a way into a piece ends at its
first node, and one out of it begins there or later.  From there cuts are taken away, and put back,
as long as that costs less: the time until all has ended, and a part of every launch, as others have
the machines for it that are spared one.

Pieces of a single executor may be **patient** instead.  Such a piece begins when all is there that
its first node needs; what the others need may come **late**, and their portion waits for it on its
device.  Only for a moment: a launch costs as much.  A node that would wait longer begins a piece of
its own, for which its portion leaves the device until all is there.  `patient` plays the nodes
through, and cuts where that comes up.  What is not late was there before its piece began: for that
no pieces wait for each other in a ring.  For what is late they may, and still none of them stands
still, as all portions run their nodes in the order of one plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate, combinations, pairwise
from math import inf

EFFORT = 300_000  # nodes looked at: a second or two, and all there is to try for some hundred
ROUNDS = 6
WORTH = 0.01  # of a launch, that something may end later for each that is spared

Piece = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """`portions` lists the nodes of each portion in the order of the plan, `needs` of each node
    those that it waits for, of whatever portion, and `ms` how long it takes.

    What a node has made is there for other pieces `give_ms` after it has run; None: when its piece
    has ended.  Then those that another portion waits for are `at_ends`: cut off, they give sooner.
    """

    portions: Mapping[int, Sequence[str]]
    needs: Mapping[str, AbstractSet[str]]
    ms: Mapping[str, float]
    launch_ms: float
    give_ms: float | None = None
    seats: Mapping[str, int] = field(init=False)
    at_ends: AbstractSet[str] = field(init=False)

    def __post_init__(self) -> None:
        seats = {name: portion for portion, names in self.portions.items() for name in names}
        at_ends = {
            other
            for name, others in self.needs.items()
            for other in others
            if self.give_ms is None and seats[other] != seats[name]
        }
        object.__setattr__(self, "seats", seats)
        object.__setattr__(self, "at_ends", at_ends)

    def across(self, name: str) -> set[str]:
        """What it needs of other portions."""
        return {other for other in self.needs[name] if self.seats[other] != self.seats[name]}


@dataclass(frozen=True, slots=True)
class Timed:
    """Pieces by when each begins; the last one ends at `ends_ms`, and `cost_ms` weighs it all.

    `late` has the nodes of others that give only after a piece that needs them was launched, and
    `waits_ms` how long nodes wait for such within their piece; only patient pieces have any.
    """

    pieces: tuple[Piece, ...]
    ends_ms: float
    cost_ms: float
    late: Mapping[Piece, AbstractSet[str]] = field(default_factory=dict)
    waits_ms: Mapping[str, float] = field(default_factory=dict)


def cut(work: Work, *, effort: int = EFFORT) -> Timed:
    """The pieces that cost least, of those that were looked at."""
    return _Search(work, effort).best()


def timed(work: Work, pieces: Sequence[Piece]) -> Timed:
    """When each piece begins if every portion runs one at a time, of those that can begin the first
    that is listed; pieces that wait for each other in a ring never end.
    """
    before, behind = _edges(work, pieces)
    lanes = {portion: _Lane() for portion in work.portions}
    places = [lanes[work.seats[piece[0]]] for piece in pieces]
    for n, count in enumerate(before):
        if not count:
            places[n].may_begin(n, 0.0)
    ready_ms = [0.0] * len(pieces)
    began, ends_ms = list[tuple[float, int]](), 0.0
    while lane := min(lanes.values(), key=_Lane.next_ms):
        at_ms, n = lane.begin()
        runs_ms = at_ms + work.launch_ms
        lane.free_ms = runs_ms + sum(map(work.ms.__getitem__, pieces[n]))
        began.append((at_ms, n))
        ends_ms = max(ends_ms, lane.free_ms)
        for other, after_ms in behind[n]:
            before[other] -= 1
            ready_ms[other] = max(ready_ms[other], runs_ms + after_ms)
            if not before[other]:
                places[other].may_begin(other, ready_ms[other])
    if len(began) < len(pieces):
        return Timed(tuple(pieces), inf, inf)
    cost_ms = _cost_ms(work, ends_ms, len(pieces))
    return Timed(tuple(pieces[n] for _, n in began), ends_ms, cost_ms)


def _cost_ms(work: Work, ends_ms: float, pieces: int) -> float:
    return ends_ms + WORTH * work.launch_ms * pieces


def _edges(work: Work, pieces: Sequence[Piece]) -> tuple[list[int], list[list[tuple[int, float]]]]:
    """For how many others each piece waits; and which wait for it, each with how long after it was
    launched all is there that they need of it.
    """
    made = {name: (n, ms) for n, piece in enumerate(pieces) for name, ms in _made(work, piece)}
    before, behind = [0] * len(pieces), list[list[tuple[int, float]]]([] for _ in pieces)
    for n, piece in enumerate(pieces):
        last_ms = dict[int, float]()
        for name in piece:
            for other in work.needs[name]:
                giver, ms = made[other]
                last_ms[giver] = max(ms, last_ms.get(giver, 0.0))
        last_ms.pop(n, None)
        before[n] = len(last_ms)
        for giver, ms in last_ms.items():
            behind[giver].append((n, ms))
    return before, behind


def _made(work: Work, piece: Piece) -> Iterator[tuple[str, float]]:
    """By node, how long after its piece was launched what it made is there for others."""
    ran_ms = list(accumulate(map(work.ms.__getitem__, piece)))
    for name, ms in zip(piece, ran_ms, strict=True):
        yield name, ran_ms[-1] if work.give_ms is None else ms + work.give_ms


class _Lane:
    """Of a portion: pieces that can begin by when they can, then, when they could, as listed."""

    def __init__(self) -> None:
        self.free_ms = 0.0
        self.later = list[tuple[float, int]]()
        self.ready = list[int]()

    def __bool__(self) -> bool:
        return bool(self.ready or self.later)

    def may_begin(self, n: int, at_ms: float) -> None:
        heapq.heappush(self.later, (at_ms, n))

    def next_ms(self) -> float:
        if self.ready:
            return self.free_ms
        return max(self.free_ms, self.later[0][0]) if self.later else inf

    def begin(self) -> tuple[float, int]:
        """When the next one begins, and which it is."""
        at_ms = self.next_ms()
        while self.later and self.later[0][0] <= at_ms:
            heapq.heappush(self.ready, heapq.heappop(self.later)[1])
        return at_ms, heapq.heappop(self.ready)


Cut = tuple[int, int]  # the place in its portion's list before which it is, and the portion


class _Search:
    """`able` are the cuts that are tried; `effort` is what may still be spent."""

    def __init__(self, work: Work, effort: int) -> None:
        self.work, self.effort = work, effort
        everywhere = sorted(
            (n, portion) for portion, names in work.portions.items() for n in range(1, len(names))
        )
        of_use = [one for one in everywhere if self._is_of_use(*one)]
        self.able = everywhere if self._are_few(everywhere) else of_use

    def _is_of_use(self, n: int, portion: int) -> bool:
        last, first = self.work.portions[portion][n - 1 : n + 1]
        waits = bool(self.work.across(last) or self.work.across(first))
        return last in self.work.at_ends or waits

    def _are_few(self, able: Sequence[Cut]) -> bool:
        """Few enough to look at all ways."""
        ways: int = 2 ** len(able)
        return ways * len(self.work.ms) <= self.effort

    def best(self) -> Timed:
        """Of all ways, if they are few; else from all cuts and from none, and either way along."""
        if self._are_few(self.able):
            every = (
                set(cuts) for n in range(len(self.able) + 1) for cuts in combinations(self.able, n)
            )
            return min(map(self._timed, every), key=lambda found: found.cost_ms)
        backward = self.able[::-1]
        ways = [(set(self.able), self.able), (set(self.able), backward)]
        ways += [(set[Cut](), self.able), (set[Cut](), backward)]
        return min((self._from(*way) for way in ways), key=lambda found: found.cost_ms)

    def _from(self, cuts: set[Cut], able: Sequence[Cut]) -> Timed:
        """Change one after the other, as long as that is cheaper."""
        best = self._timed(cuts)
        for _ in range(ROUNDS):
            before = best
            for made in (True, False):
                for one in able:
                    if self.effort > 0 and (one in cuts) == made:
                        found = self._timed(cuts ^ {one})
                        if found.cost_ms < best.cost_ms:
                            best, cuts = found, cuts ^ {one}
            if best is before:
                break
        return best

    def _timed(self, cuts: set[Cut]) -> Timed:
        self.effort -= len(self.work.ms)
        return timed(self.work, _pieces(self.work, cuts))


def _pieces(work: Work, cuts: set[Cut]) -> list[Piece]:
    """Listed by when the plan has their first nodes, as near as the portions' own lists say."""
    found = list[tuple[int, int, Piece]]()
    for portion, names in work.portions.items():
        begin = 0
        for n in range(1, len(names) + 1):
            if n == len(names) or (n, portion) in cuts:
                found.append((begin, portion, tuple(names[begin:n])))
                begin = n
    return [piece for _, _, piece in sorted(found)]


# --- pieces that wait within ----------------------------------------------------------------------


def patient(work: Work, patience_ms: float) -> Timed:
    """Pieces of which no node but the first waits for longer; of a single executor, so that nodes
    give when they have run.  Portions whose orders wait for each other in a ring never end.
    """
    if work.give_ms is None:
        raise ValueError("several executors give all when a piece has ended: they cannot wait")
    try:
        order = tuple(TopologicalSorter(_waits(work)).static_order())
    except CycleError:
        return Timed(tuple(tuple(names) for names in work.portions.values() if names), inf, inf)
    play = _Play(work, work.give_ms, patience_ms)
    for name in order:
        play.run(name)
    return play.found()


def _waits(work: Work) -> dict[str, set[str]]:
    """For what each node waits: what it needs, and the one before it in its portion."""
    waits = {name: {*work.needs[name]} for name in work.seats}
    for names in work.portions.values():
        for before, name in pairwise(names):
            waits[name].add(before)
    return waits


@dataclass(slots=True, kw_only=True)
class _Begun:
    """A piece that was launched at `at_ms`."""

    at_ms: float
    names: list[str]


class _Play:
    """Nodes run one after the other, each behind all for which it waits.

    `free_ms` is when the last one of a portion has run, `there_ms` when other portions have what a
    node made.
    """

    def __init__(self, work: Work, give_ms: float, patience_ms: float) -> None:
        self.work, self.give_ms, self.patience_ms = work, give_ms, patience_ms
        self.free_ms, self.there_ms = dict[int, float](), dict[str, float]()
        self.begun = {portion: list[_Begun]() for portion in work.portions}
        self.waits_ms = dict[str, float]()

    def run(self, name: str) -> None:
        portion = self.work.seats[name]
        free_ms = self.free_ms.get(portion, 0.0)
        there_ms = max(map(self.there_ms.__getitem__, self.work.across(name)), default=0.0)
        begins_ms = max(free_ms, there_ms)
        pieces = self.begun[portion]
        if not pieces or begins_ms - free_ms > self.patience_ms:
            pieces.append(_Begun(at_ms=begins_ms, names=[]))
            begins_ms += self.work.launch_ms
        elif begins_ms > free_ms:
            self.waits_ms[name] = begins_ms - free_ms
        pieces[-1].names.append(name)
        self.free_ms[portion] = begins_ms + self.work.ms[name]
        self.there_ms[name] = self.free_ms[portion] + self.give_ms

    def found(self) -> Timed:
        every = [piece for pieces in self.begun.values() for piece in pieces]
        every.sort(key=lambda piece: piece.at_ms)
        ends_ms = max(self.free_ms.values(), default=0.0)
        late = {tuple(piece.names): self._late(piece) for piece in every}
        return Timed(
            pieces=tuple(late),
            ends_ms=ends_ms,
            cost_ms=_cost_ms(self.work, ends_ms, len(every)),
            late={piece: others for piece, others in late.items() if others},
            waits_ms=self.waits_ms,
        )

    def _late(self, piece: _Begun) -> frozenset[str]:
        """What its own portion made before was there at once."""
        needed = (other for name in piece.names for other in self.work.across(name))
        return frozenset(other for other in needed if self.there_ms[other] > piece.at_ms)
