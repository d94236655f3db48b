"""Computes the bytes and the makespan of a placement, task by task.

A problem consists of numbered tasks with options, blocks, places and lines.  A *place* is where a
copy may lie; a *line* is a queue in which tasks run, with one or more lanes.  A device is a place
with a line of one lane, a host a place without a line.  At the level of islands, an island is a
place with a line of many lanes for each kind of device.  `app.core.placement.planner` and
`app.core.placement.islands` build problems and search.

Invariants: tasks are placed in one total order.  Each line runs its tasks, and each link carries
its transfers, strictly in that order.  A block is copied once from the nearest copy to each place
that needs it; copies made on the way stay.  So the bytes depend on where tasks run, not on when.
All values are integers, and every step can be undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

NS = 1_000_000_000
FAR = 1 << 62


class Option(NamedTuple):
    """Describes one way to run a task: it needs its blocks at `places`, and `lanes` lanes of each
    line.
    """

    places: tuple[int, ...]
    mask: int  # bit mask of `places`
    lines: tuple[int, ...]
    lanes: int
    time_ns: int


class Hop(NamedTuple):
    link: int
    to: int


class Trip(NamedTuple):
    """Describes one copy over one link."""

    block: int
    link: int
    source: int
    to: int
    bytes: int
    start_ns: int
    end_ns: int
    task: int


def option(places: tuple[int, ...], lines: tuple[int, ...], time_ns: int, lanes: int = 1) -> Option:
    return Option(places, mask_of(places), lines, lanes, time_ns)


def mask_of(places: Iterable[int]) -> int:
    mask = 0
    for place in places:
        mask |= 1 << place
    return mask


def bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


@dataclass(kw_only=True, eq=False)
class PlacementProblem:
    """Numbers the tasks, blocks, places, lines and links of a problem.

    A task follows the tasks in `after`, which includes its data edges. `lanes` are the times at
    which each line's lanes become free. `ways[a][b]` are the hops from place a to place b.
    """

    options: list[tuple[Option, ...]]
    reads: list[tuple[int, ...]]
    writes: list[tuple[int, ...]]
    after: list[tuple[int, ...]]
    size: list[int]
    at: list[int]  # per block, a mask of places
    lanes: list[tuple[int, ...]]
    links: list[tuple[int, int]]  # latency in ns, bytes per second
    ways: list[list[tuple[Hop, ...]]]
    places: int
    _hops: dict[tuple[int, int], int] = field(default_factory=dict)
    _sources: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    @property
    def tasks(self) -> int:
        return len(self.options)

    @cached_property
    def direct(self) -> bool:
        """True if a link leads from each place to each other place."""
        return all(len(way) <= 1 for row in self.ways for way in row)

    @cached_property
    def readers(self) -> list[tuple[int, ...]]:
        found: list[list[int]] = [[] for _ in self.size]
        for task, blocks in enumerate(self.reads):
            for block in blocks:
                found[block].append(task)
        return [tuple(tasks) for tasks in found]

    @cached_property
    def maker(self) -> dict[int, int]:
        return {block: task for task, blocks in enumerate(self.writes) for block in blocks}

    @cached_property
    def followers(self) -> list[tuple[int, ...]]:
        found: list[list[int]] = [[] for _ in self.options]
        for task, before in enumerate(self.after):
            for other in before:
                found[other].append(task)
        return [tuple(tasks) for tasks in found]

    @cached_property
    def least_ns(self) -> list[int]:
        return [min(option.time_ns for option in options) for options in self.options]

    @cached_property
    def least_work(self) -> list[int]:
        """The least lane-nanoseconds of each task, over its options."""
        return [
            min(o.time_ns * o.lanes * len(o.lines) for o in options) for options in self.options
        ]

    @cached_property
    def tail_ns(self) -> list[int]:
        """The length of the longest chain after each task, without transfers."""
        tail = [0] * self.tasks
        for task in reversed(self.sorted_by(lambda task: 0)):
            for other in self.followers[task]:
                tail[task] = max(tail[task], tail[other] + self.least_ns[other])
        return tail

    @cached_property
    def took_ns(self) -> list[list[int]]:
        """How long each block occupies each link, in nanoseconds, by link and block."""
        return [[-(-size * NS // rate) for size in self.size] for _, rate in self.links]

    def way_ns(self, block: int, source: int, to: int) -> int:
        """Return how long a block travels if no link is busy."""
        return sum(
            self.links[hop.link][0] + self.took_ns[hop.link][block] for hop in self.ways[source][to]
        )

    def sorted_by(self, rank: Callable[[int], int]) -> list[int]:
        """Return the tasks in an order in which each comes after those that it needs; apart from
        that, by descending rank.
        """
        waits = [len(before) for before in self.after]
        ready = [(-rank(task), task) for task in range(self.tasks) if not waits[task]]
        heapify(ready)
        order = []
        while ready:
            _, task = heappop(ready)
            order.append(task)
            for other in self.followers[task]:
                waits[other] -= 1
                if not waits[other]:
                    heappush(ready, (-rank(other), other))
        return order

    def sources(self, where: int, to: int) -> tuple[int, ...]:
        """Return the places of the mask with the fewest hops to `to`."""
        found = self._sources.get((where, to))
        if found is None:
            near = min(len(self.ways[place][to]) for place in bits(where))
            found = tuple(place for place in bits(where) if len(self.ways[place][to]) == near)
            self._sources[where, to] = found
        return found

    def hops(self, where: int, needed: int) -> int:
        """Return how many copies bring a block from the places `where` to all places `needed`."""
        needed &= ~where
        if not needed or self.direct:
            return needed.bit_count()
        found = self._hops.get((where, needed))
        if found is None:
            found = self._hops[where, needed] = self._grow(where, needed)
        return found

    def _grow(self, have: int, needed: int) -> int:
        count = 0
        while needed:
            ways = (self.ways[s][p] for p in bits(needed) for s in self.sources(have, p))
            way = min(ways, key=len)
            count += len(way)
            have |= mask_of(hop.to for hop in way)
            needed &= ~have
        return count


class Timeline:
    """Holds the tasks placed so far and their cost; `place` adds a task, `undo` removes the last
    ones.
    """

    __slots__ = (
        "arrive",
        "begin",
        "end",
        "free",
        "link_free",
        "log",
        "problem",
        "sums",
        "trips",
        "where",
    )

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem = problem
        self.where = list(problem.at)
        self.arrive = [
            [0 if mask >> place & 1 else -1 for place in range(problem.places)]
            for mask in problem.at
        ]
        self.free = list(problem.lanes)
        self.link_free = [0] * len(problem.links)
        self.begin = [-1] * problem.tasks
        self.end = [-1] * problem.tasks
        self.sums = [0, 0]  # bytes, makespan
        self.log: list[tuple[list[Any], int, Any]] = []
        self.trips: list[Trip] | None = None  # a list in which transfers are recorded, or None

    @property
    def bytes(self) -> int:
        return int(self.sums[0])

    @property
    def makespan_ns(self) -> int:
        return int(self.sums[1])

    def place(self, task: int, option: Option, not_before_ns: int = 0) -> int:
        """Run the task by this option after all placed tasks; return when it ends."""
        start = max(not_before_ns, self._ready(task, option, not_before_ns))
        if option.lines:
            for line in option.lines:
                at = self.free[line][option.lanes - 1]
                if at > start:
                    start = at
        self._book(task, option, start)
        return start + option.time_ns

    def _ready(self, task: int, option: Option, not_before_ns: int) -> int:
        """Bring missing blocks to the task's places; return when all its inputs are there."""
        start, end, arrive = 0, self.end, self.arrive
        for other in self.problem.after[task]:
            if end[other] > start:
                start = end[other]
        for place in option.places:
            for block in self.problem.reads[task]:
                at = arrive[block][place]
                if at < 0:
                    at = self._bring(task, block, place, not_before_ns)
                if at > start:
                    start = at
        return start

    def _book(self, task: int, option: Option, start: int) -> None:
        log, end = self.log, start + option.time_ns
        log.append((self.begin, task, self.begin[task]))
        log.append((self.end, task, self.end[task]))
        self.begin[task], self.end[task] = start, end
        for line in option.lines:
            lanes = self.free[line]
            log.append((self.free, line, lanes))
            if len(lanes) == 1:
                self.free[line] = (end,)
            else:
                self.free[line] = tuple(sorted((*lanes[option.lanes :], *[end] * option.lanes)))
        for block in self.problem.writes[task]:
            row = self.arrive[block]
            log.append((self.where, block, self.where[block]))
            for place in option.places:
                self.where[block] |= 1 << place
                log.append((row, place, row[place]))
                row[place] = end
        if end > self.sums[1]:
            log.append((self.sums, 1, self.sums[1]))
            self.sums[1] = end

    def run(
        self, order: Sequence[int], seats: Sequence[int], first: int = 0, limit_ns: int = FAR
    ) -> bool:
        """Place the order from its `first` task on; False if a task would exceed the limit."""
        options, tail = self.problem.options, self.problem.tail_ns
        for n in range(first, len(order)):
            task = order[n]
            if self.place(task, options[task][seats[task]]) + tail[task] > limit_ns:
                return False
        return True

    def undo(self, mark: int) -> None:
        """Undo every change made since the log had the length `mark`."""
        log = self.log
        while len(log) > mark:
            cells, index, old = log.pop()
            cells[index] = old

    def missing_bytes(self, task: int, option: Option) -> int:
        """Return the bytes that would be copied if the task ran by this option."""
        problem = self.problem
        return sum(
            problem.size[block] * problem.hops(self.where[block], option.mask)
            for block in problem.reads[task]
        )

    def _bring(self, task: int, block: int, place: int, not_before_ns: int) -> int:
        """Copy a block to a place from the nearest copy; return when it arrives."""
        problem, log, row = self.problem, self.log, self.arrive[block]
        sources = problem.sources(self.where[block], place)
        source = sources[0]
        for other in sources[1:]:
            if row[other] < row[source]:
                source = other
        at = row[source]
        mask = 0
        for link, to in problem.ways[source][place]:
            start = max(at, self.link_free[link], not_before_ns)
            took = problem.took_ns[link][block]
            at = start + problem.links[link][0] + took
            log.append((self.link_free, link, self.link_free[link]))
            self.link_free[link] = start + took
            log.append((row, to, row[to]))
            row[to] = at
            mask |= 1 << to
            size = problem.size[block]
            log.append((self.sums, 0, self.sums[0]))
            self.sums[0] += size
            if self.trips is not None:
                self.trips.append(Trip(block, link, source, to, size, start, at, task))
            source = to
        log.append((self.where, block, self.where[block]))
        self.where[block] |= mask
        return at


class PlacementChoice:
    """Holds the option of every task, and the bytes that these options move if memory is
    unlimited.
    """

    __slots__ = ("count", "need", "problem", "seats", "source", "total")

    def __init__(self, problem: PlacementProblem, seats: Sequence[int]) -> None:
        self.problem = problem
        self.seats = list(seats)
        self.count = [[0] * problem.places for _ in problem.size]  # number of readers at each place
        self.need = [0] * len(problem.size)
        self.source = list(problem.at)
        for task, options in enumerate(problem.options):
            option = options[seats[task]]
            for block in problem.writes[task]:
                self.source[block] |= option.mask
            for block in problem.reads[task]:
                self.need[block] |= option.mask
                for place in option.places:
                    self.count[block][place] += 1
        self.total = sum(self._cost(block) for block in range(len(problem.size)))

    def _cost(self, block: int) -> int:
        need = self.need[block] & ~self.source[block]
        if not need:
            return 0
        return self.problem.size[block] * self.problem.hops(self.source[block], need)

    def move(self, task: int, to: int) -> int:
        """Change the task's option to `to`; returns the option before."""
        problem, was = self.problem, self.seats[task]
        if to == was:
            return was
        old, new = problem.options[task][was], problem.options[task][to]
        self.seats[task] = to
        for block in problem.writes[task]:
            self.total -= self._cost(block)
            self.source[block] = problem.at[block] | new.mask
            self.total += self._cost(block)
        for block in problem.reads[task]:
            count, need = self.count[block], self.need[block]
            for place in old.places:
                count[place] -= 1
                if not count[place]:
                    need &= ~(1 << place)
            for place in new.places:
                count[place] += 1
                need |= 1 << place
            if need != self.need[block]:
                self.total -= self._cost(block)
                self.need[block] = need
                self.total += self._cost(block)
        return was
