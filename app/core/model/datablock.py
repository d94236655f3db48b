"""Defines the states of a datablock's copies, as one table: "a STATE copy that sees MOVE becomes
...".

A datablock is immutable: a new version is another datablock. A copy is one place where it lies: a
device's memory, a host's memory, a disk, the store. Two rules hold between its copies. At most one
is `exclusive`, and then none is `shared`. While the block is needed, a whole copy lies somewhere or
the tasks that made it can run again. Only the methods of `TrackedBlock` move copies, and they keep
the first rule; `check` reports breaches of both.

A block has one count of references for all copies: readers that have not run yet, and holders of
its name. At zero, all of its copies may be removed.

This module also computes which copies to evict when memory is short, which tasks must run again
when copies are lost, and planned bytes against moved ones. It moves nothing; `workers` do that.

`python -m app.core.model.datablock` prints the table, for docs/internals/graphs.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum


class CopyState(StrEnum):
    absent = "absent"
    in_flight = "in_flight"  # memory is reserved; the block is being copied or computed
    exclusive = "exclusive"  # the only whole copy
    shared = "shared"  # a whole copy beside other whole copies
    spilled = "spilled"  # moved to a slower place, and to be copied back
    invalid = "invalid"  # the memory is held, but no longer contains this block
    lost = "lost"  # the copy was lost when its place died


class CopyMove(StrEnum):
    """A change of one copy."""

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


# Made and Arrived both end a transfer: Made if it is now the only whole copy, Arrived if there are
# others. Joined and Alone follow from changes of other copies. Overwrite hands a copy's memory to
# the block that an in-out port writes.
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

WHOLE = frozenset({CopyState.exclusive, CopyState.shared})
HOLDS_MEMORY = WHOLE | {CopyState.in_flight, CopyState.invalid}


class IllegalCopyMove(Exception):
    """Raised when the copy's state does not allow the move."""

    def __init__(self, block: str, place: str, state: str, move: str) -> None:
        self.block, self.place, self.state, self.move = block, place, state, move
        expected = ", ".join(COPY[state]) or "nothing more"
        super().__init__(
            f"the copy of {block} on {place} is {state}, got {move}, expected {expected}"
        )


class StillNeeded(Exception):
    """Raised when the last whole copy of a block would be dropped although the block is still
    needed.
    """

    def __init__(self, block: str, place: str, refs: int) -> None:
        self.block, self.place, self.refs = block, place, refs
        super().__init__(
            f"{place} holds the last whole copy of {block}, which {refs} still need: "
            "spill it, or release it first"
        )


class BlockGone(Exception):
    """Raised for a needed block that has no whole copy and that no task of the graph makes."""

    def __init__(self, block: str) -> None:
        self.block = block
        super().__init__(f"no copy of {block} is left and nothing can make it again: upload it")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedBlock:
    """Tracks one datablock: its size, its reference count, and the state of its copy at each place.

    `refs` counts readers that have not run and holders of its name. A place that is not in `copies`
    has no copy. `recipe`: tasks can make the block again.
    """

    id: str
    bytes: int
    refs: int = 0
    recipe: bool = False
    copies: Mapping[str, CopyState] = field(default_factory=dict)

    def state(self, place: str) -> CopyState:
        return self.copies.get(place, CopyState.absent)

    @property
    def whole(self) -> tuple[str, ...]:
        """The places from which the block can be read, by name."""
        return tuple(sorted(place for place, state in self.copies.items() if state in WHOLE))

    @property
    def free(self) -> bool:
        """True if there are no readers or holders any more, so that all copies may be removed."""
        return self.refs == 0

    def held_bytes(self, place: str) -> int:
        return self.bytes if self.state(place) in HOLDS_MEMORY else 0

    def took(self, more: int = 1) -> TrackedBlock:
        """Count `more` readers or holders."""
        return replace(self, refs=self.refs + more)

    def released(self, fewer: int = 1) -> TrackedBlock:
        """Remove `fewer` readers or holders from the count; raises ValueError if there are not so
        many.
        """
        if fewer > self.refs:
            raise ValueError(f"{self.id} is needed by {self.refs}, {fewer} cannot let go of it")
        return replace(self, refs=self.refs - fewer)

    def expect(self, place: str) -> TrackedBlock:
        """Record that memory at `place` is reserved and the bytes are requested."""
        return self._moved(place, CopyMove.Expect)

    def landed(self, place: str) -> TrackedBlock:
        """Record that all bytes are at `place`.

        If another copy was `exclusive`, it becomes `shared`.
        """
        others = self.whole
        if not others:
            return self._moved(place, CopyMove.Made)
        return self._moved(place, CopyMove.Arrived)._follow(
            others, CopyState.exclusive, CopyMove.Joined
        )

    def failed(self, place: str) -> TrackedBlock:
        """Record that the transfer to `place` was given up."""
        return self._moved(place, CopyMove.Fail)

    def spilled(self, place: str) -> TrackedBlock:
        """Move the copy at `place` to a slower place for some time; another copy must be whole."""
        return self._moved(place, CopyMove.Spill)._settled()

    def dropped(self, place: str) -> TrackedBlock:
        """Free the copy at `place`.

        Raises StillNeeded if it is the last whole copy and the block is needed.
        """
        if self.refs and self.whole == (place,):
            raise StillNeeded(self.id, place, self.refs)
        return self._moved(place, CopyMove.Drop)._settled()

    def overwritten(self, place: str) -> TrackedBlock:
        """Give the memory of the copy at `place` to the next version that an in-out port writes.

        The port's own read is one of `refs`.  If others need the only whole copy, this raises
        StillNeeded: the block must be copied instead.
        """
        if self.refs > 1 and self.whole == (place,):
            raise StillNeeded(self.id, place, self.refs - 1)
        return self._moved(place, CopyMove.Overwrite)._settled()

    def lost(self, places: Iterable[str]) -> TrackedBlock:
        """Record that these places died, with their copies."""
        block = self
        for place in sorted(set(places) & set(self.copies)):
            if "Lose" in COPY[block.state(place)]:
                block = block._moved(place, CopyMove.Lose)
        return block._settled()

    def _settled(self) -> TrackedBlock:
        """Adjust the other copies after one was removed.

        A single whole copy becomes exclusive. If no whole copy is left, spilled copies are dropped.
        """
        if not self.whole:
            return self._follow(self.copies, CopyState.spilled, CopyMove.Drop)
        return (
            self._follow(self.whole, CopyState.shared, CopyMove.Alone)
            if len(self.whole) == 1
            else self
        )

    def _follow(self, places: Iterable[str], state: CopyState, move: CopyMove) -> TrackedBlock:
        block = self
        for place in places:
            if block.state(place) == state:
                block = block._moved(place, move)
        return block

    def _moved(self, place: str, move: CopyMove) -> TrackedBlock:
        state = self.state(place)
        if move not in COPY[state]:
            raise IllegalCopyMove(self.id, place, state, move)
        copies = {**self.copies, place: CopyState(COPY[state][move])}
        if copies[place] == CopyState.absent:
            del copies[place]
        return replace(self, copies=copies)


def check(block: TrackedBlock) -> tuple[str, ...]:
    """Report, in sentences, which rules the copies of a block break; () if none."""
    states = Counter(block.copies.values())
    faults = []
    if states[CopyState.exclusive] > 1 or (
        states[CopyState.exclusive] and states[CopyState.shared]
    ):
        faults.append(f"{block.id} has an only copy beside others: {dict(block.copies)}")
    if states[CopyState.shared] == 1:
        faults.append(f"{block.id} has one shared copy alone: {dict(block.copies)}")
    readable = block.whole or states[CopyState.in_flight] or block.recipe
    if block.refs and not readable:
        faults.append(f"{block.refs} need {block.id}, which lies nowhere and cannot be made")
    if states[CopyState.spilled] and not block.whole:
        faults.append(f"{block.id} was put aside, and is nowhere")
    return tuple(faults)


# --- eviction -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictableCopy:
    """Describes a block's copy on a device or host, from where it may be evicted.

    `next_use` is the position in the plan of the next task that reads the block here; None if no
    task does. `clean`: the block is whole elsewhere too, or not needed, so dropping the copy loses
    nothing.
    """

    block: str
    bytes: int
    next_use: int | None
    clean: bool


def victims(held: Iterable[EvictableCopy], need_bytes: int) -> tuple[EvictableCopy, ...]:
    """Return the copies to drop, in order, to free `need_bytes`; all of them if that is too little.

    The order follows the known plan (Belady 1966): copies never used here again go first, then
    those used farthest in the future.  Among equals clean copies go first, then large ones.  Copies
    that turn out not to be needed for the sum stay.
    """
    chosen, freed = list[EvictableCopy](), 0
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


def _farthest(copy: EvictableCopy) -> tuple[int, int, bool, int, str]:
    never = copy.next_use is None
    return (not never, -(copy.next_use or 0), not copy.clean, -copy.bytes, copy.block)


# --- what must run again ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Cone:
    """Lists tasks that must run again, in a possible order, and the blocks that they make again."""

    tasks: tuple[str, ...] = ()
    blocks: frozenset[str] = frozenset()


def cone(
    wanted: Iterable[str],
    *,
    whole: frozenset[str],
    maker: Mapping[str, str],
    reads: Mapping[str, tuple[str, ...]],
) -> Cone:
    """Return the smallest set of finished tasks that makes the wanted blocks whole again.

    `whole` are the blocks that lie somewhere, `maker` the task that wrote each block, `reads` the
    blocks that each task reads. The set is the smallest because a block has one maker, so each task
    in it has to run. Raises BlockGone for a block that no task makes.
    """
    blocks, again, entered = set[str](), list[str](), set[str]()
    todo = [(block, False) for block in sorted(set(wanted) - whole, reverse=True)]
    while todo:  # depth first: a task follows the makers of what it reads
        block, met = todo.pop()
        if met:
            again.append(maker[block])
            continue
        blocks.add(block)
        if block not in maker:
            raise BlockGone(block)
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
class TransferBytes:
    """Counts bytes by way (block, from, to): as planned, and as measured when they were moved.

    A tenant is charged `moved_bytes`. In a run without losses both tables are equal.
    """

    planned: Mapping[Way, int] = field(default_factory=dict)
    moved: Mapping[Way, int] = field(default_factory=dict)

    @property
    def planned_bytes(self) -> int:
        return sum(self.planned.values())

    @property
    def moved_bytes(self) -> int:
        return sum(self.moved.values())

    def counting(self, moved: Iterable[tuple[Way, int]]) -> TransferBytes:
        """Add bytes that were moved now; a way may occur several times."""
        count = Counter(self.moved)
        for way, bytes_ in moved:
            count[way] += bytes_
        return replace(self, moved=dict(count))

    def differences(self) -> tuple[str, ...]:
        """Return a sentence for each way on which the moved bytes differ from the planned bytes."""
        ways = sorted({*self.planned, *self.moved})
        pairs = ((way, self.planned.get(way, 0), self.moved.get(way, 0)) for way in ways)
        return tuple(
            f"{block} from {source} to {target}: {planned} bytes planned, {moved} moved"
            for (block, source, target), planned, moved in pairs
            if planned != moved
        )


def account(planned: Iterable[tuple[Way, int]]) -> TransferBytes:
    """Return an account of the planned bytes, with nothing moved yet."""
    count = Counter[Way]()
    for way, bytes_ in planned:
        count[way] += bytes_
    return TransferBytes(planned=dict(count))


def table() -> str:
    """Return the table as Markdown, one row per state, one column per move."""
    rows = [["state", *CopyMove], ["---"] * (len(CopyMove) + 1)]
    rows += [[state, *(COPY[state].get(move, "·") for move in CopyMove)] for state in CopyState]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    import sys

    sys.stdout.write(table() + "\n")
