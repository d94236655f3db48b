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
from functools import lru_cache
from typing import NamedTuple

from app.core.fairness.reserved_devices import Demand, matched

LEAD_LEAST_S = 10.0  # maintenance empties its devices at least so long before it begins
LEAD_MOST_S = 1800.0


_ANY: Mapping[str, Demand] = {}


class ReservedTime(NamedTuple):
    """Says how many devices of each kind are taken from one instant up to another.

    `named` says by kind among which devices, if not all of the kind will do.
    """

    begins_us: int
    ends_us: int
    devices: Mapping[str, int]
    named: Mapping[str, Demand] = _ANY


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

    `instants` are those at which this changes, by kind in order. `levels` hold what is taken from
    each of them on, and `demands` those among it that take certain devices only.
    """

    instants: Mapping[str, list[int]]
    levels: Mapping[str, list[int]]
    demands: Mapping[str, list[frozenset[Demand]]]

    @classmethod
    def of(cls, times: Iterable[ReservedTime]) -> Reserved:
        """Add up what the windows take."""
        changes: dict[str, dict[int, Counter[Demand | None]]]
        changes = defaultdict(lambda: defaultdict(Counter))
        for begins_us, ends_us, devices, named in times:
            for kind, number in devices.items():
                demand = named.get(kind)
                changes[kind][begins_us][demand] += number
                changes[kind][ends_us][demand] -= number
        instants, levels = dict[str, list[int]](), dict[str, list[int]]()
        demands = dict[str, list[frozenset[Demand]]]()
        for kind, by_instant in changes.items():
            taken, now = Counter[Demand | None](), frozenset[Demand]()
            instants[kind], levels[kind], demands[kind] = sorted(by_instant), [], []
            for at_us in instants[kind]:
                taken.update(by_instant[at_us])
                if by_instant[at_us].keys() - {None}:
                    now = frozenset(each for each, number in taken.items() if each and number)
                levels[kind].append(taken.total())
                demands[kind].append(now)
        return cls(instants, levels, demands)

    def most_taken(self, kind: str, begins_us: int, ends_us: int) -> int:
        """Return the most devices that are taken at any instant of an interval."""
        return max((self.levels[kind][n] for n in self._in(kind, begins_us, ends_us)), default=0)

    def _in(self, kind: str, begins_us: int, ends_us: int) -> range:
        """Return the places of the instants that say what is taken in an interval."""
        instants = self.instants.get(kind, [])
        first, last = bisect_right(instants, begins_us), bisect_left(instants, ends_us)
        return range(max(0, first - 1), last)

    def _free(self, wanted: ReservedTime, kind: str, has: int) -> int:
        """Return how many devices of a kind are free throughout the wanted time, and suit it."""
        begins_us, ends_us, _, named = wanted
        free = has - self.most_taken(kind, begins_us, ends_us)
        if (demand := named.get(kind)) is None:
            return free
        instants = self._in(kind, begins_us, ends_us)
        taken = {self.demands[kind][n] for n in instants} or {frozenset[Demand]()}
        return min(free, *(_left_for(demand, each) for each in taken))

    def shortage(self, wanted: Iterable[ReservedTime], has: Mapping[str, int]) -> Shortage | None:
        """Return the first time at which fewer devices are free than are wanted; None if there is
        none. `has` is how many devices of each kind can be reserved at all.
        """
        for time in sorted(wanted, key=lambda time: time.begins_us):
            for kind, number in sorted(time.devices.items()):
                free = self._free(time, kind, has.get(kind, 0))
                if free < number:
                    return Shortage(kind, time.begins_us, time.ends_us, max(0, free), number)
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
            demand, spare = wanted.named.get(kind), has.get(kind, 0) - number
            if spare < 0 or (demand and len(demand.among) < number):
                full.append((wanted.begins_us, wanted.ends_us))
                continue
            instants, levels = self.instants.get(kind, []), self.levels.get(kind, [])
            for at, taken in enumerate(levels):
                begins_us = max(instants[at], wanted.begins_us)
                ends_us = min((*instants[at + 1 : at + 2], wanted.ends_us))
                if begins_us < ends_us and (
                    taken > spare or (demand and _left_for(demand, self.demands[kind][at]) < number)
                ):
                    full.append((begins_us, ends_us))
        return sorted(full)


@lru_cache(maxsize=1024)
def _left_for(demand: Demand, taken: frozenset[Demand]) -> int:
    """Return how many devices of a demand are left beside others that are filled before it."""
    return [*matched([*sorted(taken), demand]).values()].count(demand.id)


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
