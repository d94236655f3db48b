"""Computes the bytes, the makespan and the memory of a placement, task by task.

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

from app.core.model.datablock import EvictableCopy, victims

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
    """Describes one copy over one link. `spill`: it frees memory, or returns a block that was
    evicted.
    """

    block: int
    link: int
    source: int
    to: int
    bytes: int
    start_ns: int
    end_ns: int
    task: int
    spill: bool


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

    A task follows the tasks in `after`, which includes its data edges. `replaces` maps a block that
    a task writes to the read block whose memory it takes over. `lanes` are the times at which each
    line's lanes become free. `ways[a][b]` are the hops from place a to place b.
    """

    options: list[tuple[Option, ...]]
    reads: list[tuple[int, ...]]
    writes: list[tuple[int, ...]]
    after: list[tuple[int, ...]]
    replaces: list[dict[int, int]]
    workspace: list[int]
    size: list[int]
    at: list[int]  # per block, a mask of places
    kept: list[bool]  # per block: True if it is needed after the graph too
    lanes: list[tuple[int, ...]]
    links: list[tuple[int, int]]  # latency in ns, bytes per second
    ways: list[list[tuple[Hop, ...]]]
    places: int
    host: list[int]  # per place: the place to which its blocks are evicted
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

    With `budget` the memory of every place is tracked in the order of the tasks. A copy stays until
    its last reader was placed, and is evicted earlier if memory is short (`datablock.victims`).
    This needs all `seats` and the `order`, and that a device's line has the same number as its
    place.
    """

    __slots__ = (
        "arrive",
        "begin",
        "budget",
        "during",
        "end",
        "free",
        "last",
        "leaves",
        "left",
        "link_free",
        "log",
        "order",
        "peak",
        "position",
        "problem",
        "put_aside",
        "seats",
        "sums",
        "trips",
        "used",
        "where",
    )

    def __init__(
        self,
        problem: PlacementProblem,
        *,
        budget: list[int | None] | None = None,
        seats: Sequence[int] = (),
        order: Sequence[int] = (),
    ) -> None:
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
        self.sums = [0, 0, 0]  # bytes, how many of them for evictions, makespan
        self.log: list[tuple[list[Any], int, Any]] = []
        self.trips: list[Trip] | None = None  # a list in which transfers are recorded, or None
        # recorded with trips: (block, place, task that needs the memory)
        self.leaves: list[tuple[int, int, int]] = []
        self.budget = budget
        self.seats = seats
        if budget is not None:
            self.position = {task: n for n, task in enumerate(order)}
            self.left = [
                len(readers) + kept
                for readers, kept in zip(problem.readers, problem.kept, strict=True)
            ]
            self.used = [
                sum(problem.size[block] for block, row in enumerate(self.arrive) if row[place] >= 0)
                for place in range(problem.places)
            ]
            self.peak = list(self.used)
            self.during = list(self.used)
            self.last = [0] * problem.places  # when the last task at each place began
            # per block, a mask of places from which it was evicted
            self.put_aside = [0] * len(problem.size)

    @property
    def bytes(self) -> int:
        return int(self.sums[0])

    @property
    def spilled_bytes(self) -> int:
        return int(self.sums[1])

    @property
    def makespan_ns(self) -> int:
        return int(self.sums[2])

    def place(self, task: int, option: Option, not_before_ns: int = 0) -> int:
        """Run the task by this option after all placed tasks; return when it ends."""
        come = not_before_ns
        if self.budget is not None:
            come = max(come, self._make_room(task, option))
        start = max(not_before_ns, self._ready(task, option, come))
        if option.lines:
            for line in option.lines:
                at = self.free[line][option.lanes - 1]
                if at > start:
                    start = at
            start = max(start, come)
        self._book(task, option, start)
        if self.budget is not None:
            self._let_go(task, option)
        return start + option.time_ns

    def _ready(self, task: int, option: Option, come: int) -> int:
        """Bring missing blocks to the task's places; return when all its inputs are there."""
        start, end, arrive = 0, self.end, self.arrive
        for other in self.problem.after[task]:
            if end[other] > start:
                start = end[other]
        for place in option.places:
            for block in self.problem.reads[task]:
                at = arrive[block][place]
                if at < 0:
                    at = self._bring(task, block, place, come)
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
        if end > self.sums[2]:
            log.append((self.sums, 2, self.sums[2]))
            self.sums[2] = end

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

    def _bring(
        self, task: int, block: int, place: int, not_before_ns: int, spill: bool = False
    ) -> int:
        """Copy a block to a place from the nearest copy; return when it arrives."""
        problem, log, row = self.problem, self.log, self.arrive[block]
        sources = problem.sources(self.where[block], place)
        source = sources[0]
        for other in sources[1:]:
            if row[other] < row[source]:
                source = other
        at = row[source]
        if self.budget is not None and self.put_aside[block] >> place & 1:
            spill = True
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
            if spill:
                log.append((self.sums, 1, self.sums[1]))
                self.sums[1] += size
            if self.trips is not None:
                self.trips.append(Trip(block, link, source, to, size, start, at, task, spill))
            source = to
        log.append((self.where, block, self.where[block]))
        self.where[block] |= mask
        return at

    # --- memory ---------------------------------------------------------------------------------

    def _set(self, cells: list[Any], index: int, value: Any) -> None:
        self.log.append((cells, index, cells[index]))
        cells[index] = value

    def _make_room(self, task: int, option: Option) -> int:
        """Reserve the task's memory at its places; return when its blocks may start to arrive."""
        assert self.budget is not None
        problem, earliest = self.problem, 0
        for place in option.places:
            coming = [b for b in problem.reads[task] if self.arrive[b][place] < 0]
            incoming = sum(problem.size[b] for b in coming)
            more = incoming + sum(problem.size[b] for b in problem.writes[task])
            handed = sum(
                problem.size[old] for old in problem.replaces[task].values() if self.left[old] == 1
            )
            needed = more + problem.workspace[task] - handed
            bound = self.budget[place]
            if bound is not None:
                earliest = max(earliest, self._room_for(task, place, needed, incoming, bound))
            self._set(self.used, place, self.used[place] + more)
            self._set(self.during, place, self.used[place] + problem.workspace[task] - handed)
            self._set(self.peak, place, max(self.peak[place], self.during[place]))
        return earliest

    def _room_for(self, task: int, place: int, needed: int, incoming: int, bound: int) -> int:
        """Reserve memory at one place; return when blocks may start to arrive.

        If both tasks fit, blocks may arrive while the previous task still runs; otherwise only
        after its end.
        """
        over = self.used[place] + needed - bound
        if over > 0:
            return self._evict(task, place, over)
        together = self.during[place] + incoming
        if together > bound:
            return int(self.free[place][0])
        self._set(self.peak, place, max(self.peak[place], together))
        return int(self.last[place])

    def _evict(self, task: int, place: int, over: int) -> int:
        """Free `over` bytes by evictions; returns when they are free."""
        problem = self.problem
        at = int(self.free[place][0])
        for victim in victims(self._held(task, place), over):
            block = int(victim.block)
            if not victim.clean:
                aside = self._bring(task, block, problem.host[place], at, spill=True)
                at = max(at, aside)
            if victim.next_use is not None:
                self._set(self.put_aside, block, self.put_aside[block] | 1 << place)
            self._forget(block, place)
            if self.trips is not None:
                self.leaves.append((block, place, task))
        return at

    def _held(self, task: int, place: int) -> list[EvictableCopy]:
        """Return the copies at the place that may be evicted for the task."""
        reads, bit = self.problem.reads[task], 1 << place
        return [
            EvictableCopy(
                block=str(block),
                bytes=self.problem.size[block],
                next_use=self._next_use(block, place, self.position[task]),
                clean=mask != bit,
            )
            for block, mask in enumerate(self.where)
            if mask & bit and block not in reads
        ]

    def _next_use(self, block: int, place: int, now: int) -> int | None:
        """Return the position in the order of the next task that reads the block at the place."""
        options, seats = self.problem.options, self.seats
        uses = [
            self.position[task]
            for task in self.problem.readers[block]
            if place in options[task][seats[task]].places
        ]
        return min((use for use in uses if use > now), default=None)

    def _forget(self, block: int, place: int) -> None:
        self._set(self.used, place, self.used[place] - self.problem.size[block])
        self._set(self.arrive[block], place, -1)
        self._set(self.where, block, self.where[block] & ~(1 << place))

    def _let_go(self, task: int, option: Option) -> None:
        """Free the blocks without readers left, after the task was placed."""
        for place in option.places:
            self._set(self.last, place, self.begin[task])
        for block in {*self.problem.reads[task]}:
            self._set(self.left, block, self.left[block] - 1)
        for block in (*self.problem.reads[task], *self.problem.writes[task]):
            if not self.left[block]:
                for place in bits(self.where[block]):
                    self._forget(block, place)


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
