"""Decides which copies of blocks are evicted when memory is short, and which tasks run again when
copies are lost.

A datablock is immutable: a new version is another datablock. A copy is one place where it lies: a
device's memory, a host's memory, a disk, the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


class BlockGone(Exception):
    """Raised for a needed block that has no whole copy and that no task of the graph makes."""

    def __init__(self, block: str) -> None:
        self.block = block
        super().__init__(f"no copy of {block} is left and nothing can make it again: upload it")


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
