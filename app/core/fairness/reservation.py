"""Plans which devices are reserved when, so that no more are promised than there are.

Inside its window a reservation is a guarantee (rule F4) of its tenant or user: whoever borrowed the
devices gives them back when they are wanted, without a loss. So nothing is kept free before the
window, nor inside it for work that does not come. The maintenance of devices takes them out of
service instead; it is never refused.

Slurm's reservations keep nodes idle for hours before they begin, which flux-sched's issue 284 is
about. Times are µs since 1970; an interval includes its begin and not its end.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

LEAD_LEAST_S = 10.0  # maintenance empties its devices at least so long before it begins
LEAD_MOST_S = 1800.0


class ReservedTime(NamedTuple):
    """Says how many devices of each kind are taken from one instant up to another."""

    begins_us: int
    ends_us: int
    devices: Mapping[str, int]


class Shortage(NamedTuple):
    """Says where a reservation does not fit: so many devices are free, and it wants more."""

    kind: str
    begins_us: int
    ends_us: int
    free: int
    wanted: int


@dataclass(frozen=True, slots=True)
class Reserved:
    """Knows how many devices of each kind are taken at each time.

    `instants` are those at which this changes, by kind in order, and `levels` hold what is taken
    from each of them on.
    """

    instants: Mapping[str, list[int]]
    levels: Mapping[str, list[int]]

    @classmethod
    def of(cls, times: Iterable[ReservedTime]) -> Reserved:
        """Add up what the windows take."""
        changes: dict[str, Counter[int]] = defaultdict(Counter)
        for begins_us, ends_us, devices in times:
            for kind, number in devices.items():
                changes[kind][begins_us] += number
                changes[kind][ends_us] -= number
        instants, levels = dict[str, list[int]](), dict[str, list[int]]()
        for kind, by_instant in changes.items():
            taken, instants[kind], levels[kind] = 0, sorted(by_instant), []
            for at_us in instants[kind]:
                taken += by_instant[at_us]
                levels[kind].append(taken)
        return cls(instants, levels)

    def most_taken(self, kind: str, begins_us: int, ends_us: int) -> int:
        """Return the most devices that are taken at any instant of an interval."""
        instants = self.instants.get(kind, [])
        first, last = bisect_right(instants, begins_us), bisect_left(instants, ends_us)
        before = self.levels[kind][first - 1] if first else 0
        return max([before, *self.levels.get(kind, [])[first:last]])

    def shortage(self, wanted: Iterable[ReservedTime], has: Mapping[str, int]) -> Shortage | None:
        """Return the first time at which fewer devices are free than are wanted; None if there is
        none. `has` is how many devices of each kind can be reserved at all.
        """
        for begins_us, ends_us, devices in sorted(wanted, key=lambda time: time.begins_us):
            for kind, number in sorted(devices.items()):
                free = has.get(kind, 0) - self.most_taken(kind, begins_us, ends_us)
                if free < number:
                    return Shortage(kind, begins_us, ends_us, max(0, free), number)
        return None

    def free_times(
        self, wanted: ReservedTime, has: Mapping[str, int], *, lasting_us: int
    ) -> Iterator[tuple[int, int]]:
        """Yield the intervals, as long as can be, in which the wanted devices are free.

        Each lies between the begin and the end of `wanted`, and lasts at least `lasting_us`.
        """
        from_us = wanted.begins_us
        for begins_us, ends_us in [*self._full(wanted, has), (wanted.ends_us, wanted.ends_us)]:
            if begins_us - from_us >= lasting_us:
                yield from_us, begins_us
            from_us = max(from_us, ends_us)

    def _full(self, wanted: ReservedTime, has: Mapping[str, int]) -> list[tuple[int, int]]:
        """Return the intervals in which too few devices of some kind are free, in order."""
        full = []
        for kind, number in wanted.devices.items():
            spare = has.get(kind, 0) - number
            if spare < 0:
                full.append((wanted.begins_us, wanted.ends_us))
                continue
            instants, levels = self.instants.get(kind, []), self.levels.get(kind, [])
            for at, taken in enumerate(levels):
                begins_us = max(instants[at], wanted.begins_us)
                ends_us = min((*instants[at + 1 : at + 2], wanted.ends_us))
                if taken > spare and begins_us < ends_us:
                    full.append((begins_us, ends_us))
        return sorted(full)


def owed(guarantee: Mapping[str, int], *reserved: Mapping[str, int]) -> Mapping[str, int]:
    """Return the guarantee of a branch (rule F4) with what is reserved for it now."""
    found = Counter(guarantee)
    for devices in reserved:
        found.update(devices)
    return dict(found)


def lead_s(pauses_s: Iterable[float]) -> float:
    """Return how long before its begin maintenance empties its devices.

    `pauses_s` are the measured times of the last switch of each task on them. A task is written
    out and read elsewhere, so it needs twice as long.
    """
    longest_s = 2 * max(pauses_s, default=0.0)
    return min(LEAD_MOST_S, max(LEAD_LEAST_S, longest_s))
