"""Whose turn it is on a device that several share: a device decides it, by what it measured.

The island says how well served each of them is, in the order of rule F3: at each level of the
tenant tree what a branch has used, and its weight, as of the time that each task had held the seat
when that was booked.  From then on the device counts itself: whoever holds the seat uses more, and
so do the branches above it.  At the end of a turn the tree is walked from the top, to the lowest
usage per weight; so shares follow the weights within turns, not within rounds of the island, and
who had too long a turn pays it back by waiting longer.

What always holds (tested): of two who share all the time, the one that is better served was so by
one turn of its own at most, per weight, once the other has caught up.  Values in, values out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

JSON = dict[str, Any]

TURN_US = 10_000  # so long who has the seat keeps it, before the next one is looked for
_BITS = 32  # of a score below one; ties are exact


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A branch above a task: what was used there, in micro-device-seconds times thousandths of
    cost, and its weight in thousandths."""

    name: str
    used: int
    weight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One who shares a device.  `path` leads from the top of the tree; `held_us` of its seat time
    is booked there, and a microsecond more adds `rate` to each level."""

    task: str
    epoch: int
    held_us: int
    rate: int
    path: tuple[Level, ...]


def least_served(shares: Collection[Share], held_us: Mapping[str, int]) -> str:
    """The task that goes next; `held_us` is how long each has held the seat by now."""
    among, depth = sorted(shares, key=lambda share: share.task), 0
    while len(among) > 1:
        branches = _branches(among, depth)
        among = min(branches, key=lambda branch: _score(branch, depth, held_us))
        depth += 1
    return among[0].task


def _branches(shares: Sequence[Share], depth: int) -> list[list[Share]]:
    """Those below each branch at a depth; who has no level there stands for itself."""

    def branch(share: Share) -> tuple[bool, str]:
        is_leaf = depth >= len(share.path)
        return is_leaf, share.task if is_leaf else share.path[depth].name

    return [list(below) for _, below in groupby(sorted(shares, key=branch), branch)]


def _score(branch: Sequence[Share], depth: int, held_us: Mapping[str, int]) -> int:
    since = sum((held_us[share.task] - share.held_us) * share.rate for share in branch)
    first = branch[0]
    if depth >= len(first.path):
        return held_us[first.task] << _BITS
    level = first.path[depth]
    return ((level.used + since) << _BITS) // level.weight


def as_json(share: Share) -> JSON:
    path = [[level.name, level.used, level.weight] for level in share.path]
    return {
        "task": share.task,
        "epoch": share.epoch,
        "held_us": share.held_us,
        "rate": share.rate,
        "path": path,
    }


def from_json(body: JSON) -> Share:
    levels = (Level(name=name, used=used, weight=weight) for name, used, weight in body["path"])
    return Share(**{**body, "path": tuple(levels)})


@dataclass(slots=True)
class Rota:
    """The shares of a device's newest answer, by task; empty while nobody shares it."""

    shares: dict[str, Share]

    @classmethod
    def of(cls, bodies: Collection[JSON]) -> Rota:
        shares = map(from_json, bodies)
        return cls({share.task: share for share in shares})

    def has(self, task: str, epoch: int) -> bool:
        share = self.shares.get(task)
        return share is not None and share.epoch == epoch

    def next_of(self, tasks: Collection[str], held_us: Callable[[str], int]) -> str:
        """Of these the least served."""
        held = {task: held_us(task) for task in tasks}
        return least_served([self.shares[task] for task in tasks], held)

    def most_of(self, tasks: Collection[str], held_us: Callable[[str], int]) -> str:
        """Of these the one whose turn would come last."""
        left = set(tasks)
        while len(left) > 1:
            left.discard(self.next_of(left, held_us))
        return left.pop()
