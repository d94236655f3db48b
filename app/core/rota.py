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

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

JSON = dict[str, Any]

TURN_US = 5_000  # so long who has the seat keeps it, before the next one is looked for
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
    is booked there, and a microsecond more adds `rate` to each level.  Of one user's the one whose
    `place` is the lowest goes first, but for one turn that each begins with."""

    task: str
    epoch: int
    place: int
    held_us: int
    rate: int
    path: tuple[Level, ...]


def least_served(
    shares: Collection[Share], held_us: Mapping[str, int], among: Collection[str] | None = None
) -> str:
    """The task that goes next, of these if only some can; `held_us` is how long each of all has
    held the seat by now.  Who has just ended counts too: its user has had it.
    """
    here, depth = sorted(shares, key=lambda share: share.task), 0
    can = {share.task for share in here} if among is None else {*among}
    while len(here) > 1 and depth < len(here[0].path):
        branches = (branch for branch in _branches(here, depth) if _any_of(branch, can))
        here = min(branches, key=lambda branch: _score(branch, depth, held_us))
        depth += 1
    of_one_user = (share for share in here if share.task in can)
    return min(of_one_user, key=lambda share: (held_us[share.task] > 0, share.place)).task


def _branches(shares: Sequence[Share], depth: int) -> list[list[Share]]:
    """Those below each branch at a depth."""

    def branch(share: Share) -> str:
        return share.path[depth].name

    return [list(below) for _, below in groupby(sorted(shares, key=branch), branch)]


def _any_of(branch: Sequence[Share], can: Collection[str]) -> bool:
    return any(share.task in can for share in branch)


def _score(branch: Sequence[Share], depth: int, held_us: Mapping[str, int]) -> int:
    since = sum((held_us[share.task] - share.held_us) * share.rate for share in branch)
    level = branch[0].path[depth]
    return ((level.used + since) << _BITS) // level.weight


def as_json(share: Share) -> JSON:
    path = [[level.name, level.used, level.weight] for level in share.path]
    return {
        "task": share.task,
        "epoch": share.epoch,
        "place": share.place,
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

    def is_heir(self, task: str) -> bool:
        """One of the same user goes before it."""
        mine = self.shares.get(task)
        names = mine and [level.name for level in mine.path]
        return mine is not None and any(
            share.place < mine.place and [level.name for level in share.path] == names
            for share in self.shares.values()
        )

    def next_of(self, tasks: Collection[str], held_us: Mapping[str, int]) -> str:
        """Of these the least served."""
        return least_served(self.shares.values(), held_us, tasks)

    def most_of(self, tasks: Collection[str], held_us: Mapping[str, int]) -> str:
        """Of these the one whose turn would come last."""
        left = set(tasks)
        while len(left) > 1:
            left.discard(self.next_of(left, held_us))
        return left.pop()
