"""The life of a datablock's copies: one table, read as "a STATE copy that sees MOVE becomes ...".

A datablock is immutable: a new version is another datablock.  A copy is one place where it lies: a
device's memory, a host's memory, a disk, the store.  Two rules hold between its copies: at most one
is `exclusive`, and then none is `shared`; and while somebody needs it, a whole copy lies somewhere
or the tasks that made it can run again.  Only the functions of `Datablock` move copies, and they
keep the first rule; `check` tells of both.

A block is counted whole: readers that have not run yet, and whoever holds its name.  At nought all
of its copies may go.

Here too: which copies give way when memory is short, which tasks must run again when copies are
lost, and planned bytes against moved ones.  Nothing is moved here; `workers` do that.

The table is printed by `python -m app.core.datablock`, for docs/graphs.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum


class State(StrEnum):
    absent = "absent"
    in_flight = "in_flight"  # room is reserved; it is on its way, or being computed
    exclusive = "exclusive"  # whole, and the only one
    shared = "shared"  # whole, and others are too
    spilled = "spilled"  # put aside in a slower place, to come back here
    invalid = "invalid"  # the memory is held, what it holds is not this block any more
    lost = "lost"  # the place died with it


class Move(StrEnum):
    """What happens to one copy."""

    Expect = "Expect"
    Made = "Made"
    Arrived = "Arrived"
    Joined = "Joined"
    Alone = "Alone"
    Spill = "Spill"
    Overwrite = "Overwrite"
    Drop = "Drop"
    Fail = "Fail"
    Lose = "Lose"


# Made and Arrived both end a flight: as the only whole copy, or as one of several.  Joined and
# Alone follow what happened to the other copies.  Overwrite hands a copy's memory to the block that
# an in-out port writes.
COPY: dict[str, dict[str, str]] = {
    "absent": {"Expect": "in_flight"},
    "in_flight": {"Made": "exclusive", "Arrived": "shared", "Fail": "absent", "Lose": "lost"},
    "exclusive": {
        "Joined": "shared",
        "Overwrite": "invalid",
        "Drop": "absent",
        "Lose": "lost",
    },
    "shared": {
        "Alone": "exclusive",
        "Spill": "spilled",
        "Overwrite": "invalid",
        "Drop": "absent",
        "Lose": "lost",
    },
    "spilled": {"Expect": "in_flight", "Drop": "absent", "Lose": "lost"},
    "invalid": {"Expect": "in_flight", "Drop": "absent", "Lose": "lost"},
    "lost": {"Expect": "in_flight", "Drop": "absent"},
}

WHOLE = frozenset({State.exclusive, State.shared})
HOLDS_MEMORY = WHOLE | {State.in_flight, State.invalid}


class IllegalMove(Exception):
    """A copy was told to make a move that its state does not know."""

    def __init__(self, block: str, place: str, state: str, move: str) -> None:
        self.block, self.place, self.state, self.move = block, place, state, move
        expected = ", ".join(COPY[state]) or "nothing more"
        super().__init__(
            f"the copy of {block} on {place} is {state}, got {move}, expected {expected}"
        )


class StillNeeded(Exception):
    """The last whole copy of a block was told to go while somebody needs it."""

    def __init__(self, block: str, place: str, refs: int) -> None:
        self.block, self.place, self.refs = block, place, refs
        super().__init__(
            f"{place} holds the last whole copy of {block}, which {refs} still need: "
            "spill it, or release it first"
        )


class Gone(Exception):
    """A block is needed, no whole copy of it is left, and no task of the graph makes it."""

    def __init__(self, block: str) -> None:
        self.block = block
        super().__init__(f"no copy of {block} is left and nothing can make it again: upload it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Datablock:
    """One datablock: its bytes, who needs it, and the state of its copy at each place.

    `refs` counts readers that have not run and holders of its name.  A place not in `copies` has
    none.  `recipe`: can it be made again by tasks?
    """

    id: str
    bytes: int
    refs: int = 0
    recipe: bool = False
    copies: Mapping[str, State] = field(default_factory=dict)

    def state(self, place: str) -> State:
        return self.copies.get(place, State.absent)

    @property
    def whole(self) -> tuple[str, ...]:
        """The places from which it can be read, by name."""
        return tuple(sorted(place for place, state in self.copies.items() if state in WHOLE))

    @property
    def free(self) -> bool:
        """Nobody needs it: all of its copies may go."""
        return self.refs == 0

    def held_bytes(self, place: str) -> int:
        return self.bytes if self.state(place) in HOLDS_MEMORY else 0

    def took(self, more: int = 1) -> Datablock:
        """`more` readers or holders came."""
        return replace(self, refs=self.refs + more)

    def released(self, fewer: int = 1) -> Datablock:
        """`fewer` readers or holders went; raises ValueError if there were not so many."""
        if fewer > self.refs:
            raise ValueError(f"{self.id} is needed by {self.refs}, {fewer} cannot let go of it")
        return replace(self, refs=self.refs - fewer)

    def expect(self, place: str) -> Datablock:
        """Room is reserved at `place` and the bytes are asked for."""
        return self._moved(place, Move.Expect)

    def landed(self, place: str) -> Datablock:
        """The bytes are there, whole; an only copy is one no more."""
        others = self.whole
        if not others:
            return self._moved(place, Move.Made)
        return self._moved(place, Move.Arrived)._follow(others, State.exclusive, Move.Joined)

    def failed(self, place: str) -> Datablock:
        """The transfer was given up."""
        return self._moved(place, Move.Fail)

    def spilled(self, place: str) -> Datablock:
        """It gives way at `place`, to come back: another copy must be whole by then."""
        return self._moved(place, Move.Spill)._settled()

    def dropped(self, place: str) -> Datablock:
        """Its memory at `place` is free; raises StillNeeded for the last whole copy in need."""
        if self.refs and self.whole == (place,):
            raise StillNeeded(self.id, place, self.refs)
        return self._moved(place, Move.Drop)._settled()

    def overwritten(self, place: str) -> Datablock:
        """Its memory at `place` becomes that of an in-out port's next version.

        The port reads it, so that is one of `refs`; if another needs the only copy, it must be
        copied instead, and this raises StillNeeded.
        """
        if self.refs > 1 and self.whole == (place,):
            raise StillNeeded(self.id, place, self.refs - 1)
        return self._moved(place, Move.Overwrite)._settled()

    def lost(self, places: Iterable[str]) -> Datablock:
        """Those places died, with whatever they held of it."""
        block = self
        for place in sorted(set(places) & set(self.copies)):
            if "Lose" in COPY[block.state(place)]:
                block = block._moved(place, Move.Lose)
        return block._settled()

    def _settled(self) -> Datablock:
        """After a copy went: the one that is left is alone; with none, nothing is put aside."""
        if not self.whole:
            return self._follow(self.copies, State.spilled, Move.Drop)
        return self._follow(self.whole, State.shared, Move.Alone) if len(self.whole) == 1 else self

    def _follow(self, places: Iterable[str], state: State, move: Move) -> Datablock:
        block = self
        for place in places:
            if block.state(place) == state:
                block = block._moved(place, move)
        return block

    def _moved(self, place: str, move: Move) -> Datablock:
        state = self.state(place)
        if move not in COPY[state]:
            raise IllegalMove(self.id, place, state, move)
        copies = {**self.copies, place: State(COPY[state][move])}
        if copies[place] == State.absent:
            del copies[place]
        return replace(self, copies=copies)


def check(block: Datablock) -> tuple[str, ...]:
    """What is wrong between the copies of a block, in sentences; empty if nothing is."""
    states = Counter(block.copies.values())
    faults = []
    if states[State.exclusive] > 1 or (states[State.exclusive] and states[State.shared]):
        faults.append(f"{block.id} has an only copy beside others: {dict(block.copies)}")
    if states[State.shared] == 1:
        faults.append(f"{block.id} has one shared copy alone: {dict(block.copies)}")
    readable = block.whole or states[State.in_flight] or block.recipe
    if block.refs and not readable:
        faults.append(f"{block.refs} need {block.id}, which lies nowhere and cannot be made")
    if states[State.spilled] and not block.whole:
        faults.append(f"{block.id} was put aside, and is nowhere")
    return tuple(faults)


# --- who gives way ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A copy that may give way at a place.

    `next_use` is the place in the plan's order of the next task that reads it here, None if none
    does.  `clean`: it is whole elsewhere too, or nobody needs it: dropping it loses nothing.
    """

    block: str
    bytes: int
    next_use: int | None
    clean: bool


def victims(held: Iterable[Held], need_bytes: int) -> tuple[Held, ...]:
    """Who gives way, in order, so that `need_bytes` come free; all of them if that is too little.

    By the known plan (Belady 1966): what is used farthest in the future goes first, what is never
    used here again before all.  Among equals clean copies go first, then large ones.  Whoever is
    not needed to reach the sum stays.
    """
    chosen, freed = list[Held](), 0
    for copy in sorted(held, key=_farthest):
        if freed >= need_bytes:
            break
        chosen.append(copy)
        freed += copy.bytes
    for copy in reversed(chosen[:-1]):
        if freed - copy.bytes >= need_bytes:
            chosen.remove(copy)
            freed -= copy.bytes
    return tuple(chosen)


def _farthest(copy: Held) -> tuple[int, int, bool, int, str]:
    never = copy.next_use is None
    return (not never, -(copy.next_use or 0), not copy.clean, -copy.bytes, copy.block)


# --- what must run again ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Cone:
    """Tasks that must run again, in an order in which they can, and the blocks they make anew."""

    tasks: tuple[str, ...] = ()
    blocks: frozenset[str] = frozenset()


def cone(
    wanted: Iterable[str],
    *,
    whole: frozenset[str],
    maker: Mapping[str, str],
    reads: Mapping[str, tuple[str, ...]],
) -> Cone:
    """The smallest set of finished tasks that makes the wanted blocks whole again.

    `whole` are the blocks that lie somewhere, `maker` the task that wrote each block, `reads` the
    blocks each task reads.  It is the smallest: a block has one maker, so each task in it has to
    run.  Raises Gone for a block that no task makes.
    """
    blocks, again, entered = set[str](), list[str](), set[str]()
    todo = [(block, False) for block in sorted(set(wanted) - whole, reverse=True)]
    while todo:  # depth first: a task stands behind the makers of what it reads
        block, met = todo.pop()
        if met:
            again.append(maker[block])
            continue
        blocks.add(block)
        if block not in maker:
            raise Gone(block)
        if maker[block] in entered:
            continue
        entered.add(maker[block])
        todo.append((block, True))
        needed = reads[maker[block]]
        todo += [(other, False) for other in reversed(needed) if other not in whole]
    return Cone(tasks=tuple(again), blocks=frozenset(blocks))


# --- planned against moved ----------------------------------------------------------------------

Way = tuple[str, str, str]  # block, from, to


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Bytes by way (block, from, to): as planned, and as counted where they were moved.

    A tenant is charged `moved_bytes`; in a run without losses the two tables are equal.
    """

    planned: Mapping[Way, int] = field(default_factory=dict)
    moved: Mapping[Way, int] = field(default_factory=dict)

    @property
    def planned_bytes(self) -> int:
        return sum(self.planned.values())

    @property
    def moved_bytes(self) -> int:
        return sum(self.moved.values())

    def counting(self, moved: Iterable[tuple[Way, int]]) -> Account:
        """With what was moved now; the same way may come again."""
        count = Counter(self.moved)
        for way, bytes_ in moved:
            count[way] += bytes_
        return replace(self, moved=dict(count))

    def differences(self) -> tuple[str, ...]:
        """A sentence for each way whose bytes are not those planned; empty if all are."""
        ways = sorted({*self.planned, *self.moved})
        pairs = ((way, self.planned.get(way, 0), self.moved.get(way, 0)) for way in ways)
        return tuple(
            f"{block} from {source} to {target}: {planned} bytes planned, {moved} moved"
            for (block, source, target), planned, moved in pairs
            if planned != moved
        )


def account(planned: Iterable[tuple[Way, int]]) -> Account:
    """An account of what is planned, nothing moved yet."""
    count = Counter[Way]()
    for way, bytes_ in planned:
        count[way] += bytes_
    return Account(planned=dict(count))


def table() -> str:
    """The table as Markdown, one row a state, one column a move."""
    rows = [["state", *Move], ["---"] * (len(Move) + 1)]
    rows += [[state, *(COPY[state].get(move, "·") for move in Move)] for state in State]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    import sys

    sys.stdout.write(table() + "\n")
