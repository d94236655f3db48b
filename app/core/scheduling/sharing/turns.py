"""Chooses which of the co-located tasks runs next on a device, from what the device measured.

The island sends how well served each of these tasks is, in the order of rule F3. For each level of
the tenant tree it sends the branch's usage and weight, as of the slot time of each task that was
booked. From then on the device counts itself: the task that holds the slot uses more, and so do the
branches above the task. At the end of a turn the device walks the tree from the top to the lowest
usage per weight. So shares follow the weights within turns, not within rounds of the island, and a
task with too long a turn then waits longer.

Invariant (tested): of two tasks that share a device all the time, neither is ahead, per weight, by
more than one of its own turns, once the less served one has caught up. The module has no side
effects: values in, values out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

JSON = dict[str, Any]

TURN_US = 5_000  # in microseconds: how long a task keeps the slot before the next task is chosen
_BITS = 32  # binary digits of a score behind the point; ties are exact


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Describes a branch above a task.

    `used` is in micro-device-seconds times thousandths of cost, `weight` in thousandths.
    """

    name: str
    used: int
    weight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Describes a task's part in sharing a device.

    `path` leads from the top of the tree. `held_us` of the task's slot time is booked there
    already, and each further microsecond adds `rate` to each level. Among the tasks of one user,
    tasks without a turn yet go first, then the lowest `place`.
    """

    task: str
    epoch: int
    place: int
    held_us: int
    rate: int
    path: tuple[Level, ...]


def least_served(
    shares: Collection[Share], held_us: Mapping[str, int], among: Collection[str] | None = None
) -> str:
    """Return the task that goes next.

    `among` restricts the choice; `held_us` is how long each task has held the slot so far. A task
    that has just ended counts, too: its user has used that time.
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
    """Return the shares below each branch at a depth."""

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
    """Holds the shares in a device's newest answer, by task; empty if the device is not shared."""

    shares: dict[str, Share]

    @classmethod
    def of(cls, bodies: Collection[JSON]) -> Rota:
        shares = map(from_json, bodies)
        return cls({share.task: share for share in shares})

    def has(self, task: str, epoch: int) -> bool:
        share = self.shares.get(task)
        return share is not None and share.epoch == epoch

    def is_heir(self, task: str) -> bool:
        """True if another task of the same user goes before the task: the task is a standby."""
        mine = self.shares.get(task)
        names = mine and [level.name for level in mine.path]
        return mine is not None and any(
            share.place < mine.place and [level.name for level in share.path] == names
            for share in self.shares.values()
        )

    def next_of(self, tasks: Collection[str], held_us: Mapping[str, int]) -> str:
        """Return the least served of these tasks."""
        return least_served(self.shares.values(), held_us, tasks)

    def most_of(self, tasks: Collection[str], held_us: Mapping[str, int]) -> str:
        """Return the one of these tasks that would get its turn last."""
        left = set(tasks)
        while len(left) > 1:
            left.discard(self.next_of(left, held_us))
        return left.pop()
