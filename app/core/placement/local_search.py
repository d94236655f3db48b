"""Searches placements: as few bytes as possible, at a makespan near the best one known.

Simple rules give the starts (`app.core.placement.heuristics`).  Local search improves them by moves
of one task, swaps of two, and moves of whole clusters.  Small problems are searched exhaustively
(`app.core.placement.exact`).  The criteria, in this order: makespan within the guard, fewer bytes,
less time.

The same problem always gives the same answer: effort is counted in placed tasks, never in seconds,
and random choices come from a seed.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush, heapreplace

from app.core.placement.cost_model import FAR, Option, PlacementChoice, PlacementProblem, Timeline
from app.core.placement.exact import THOUSAND, Exact, unavoidable
from app.core.placement.heuristics import Solution, by_start, measure, starts

MOVES = tuple[tuple[int, int], ...]  # (task, option) of all that move together

SMALL = 48  # graphs with at most this many tasks try to swap all pairs; larger ones only neighbours
MANY = 150  # graphs of more tasks: moves are first tried many at a time
NEAR = 6  # distance in the order within which neighbours are swapped
# exhaustive search: most tasks that have a choice; there may be at most MANY tasks in all
EXACT = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Limits the effort of a search, in placed tasks. `guard` is in thousandths of the best
    makespan.

    `search` is the effort for graphs of `whole` tasks and more; smaller ones get a part of it.
    """

    guard: int = 1030
    search: int = 150_000
    exact: int = 60_000
    whole: int = 40
    seed: int = 0


def solve(problem: PlacementProblem, effort: Effort | None = None) -> Solution:
    """Return the best placement found, with unlimited memory."""
    effort = effort or Effort()
    if problem.tasks == 1:
        return _single(problem, effort)
    if _is_sweep(problem):
        return _swept(problem)
    search = Search(problem, effort)
    for start in starts(problem):
        search.offer(start)
    found = search.descend()
    choices = sum(len(options) > 1 for options in problem.options)
    if effort.exact and choices <= EXACT and problem.tasks <= MANY:
        found = Exact(problem, guard=effort.guard, effort=effort.exact).improve(found)
        search.see(found)
    if not found.exact and choices > 1:
        found = search.shake(found)
    return replace(found, least_bytes=unavoidable(problem, found.order)[0])


def _single(problem: PlacementProblem, effort: Effort) -> Solution:
    """Measure every option of a single task.

    Most requests have one task, and need no search.
    """
    found = [measure(problem, (n,), (0,)) for n in range(len(problem.options[0]))]
    least_ns = min(one.makespan_ns for one in found)
    limit_ns = least_ns * effort.guard // THOUSAND
    best = min(found, key=lambda one: _worth(one.makespan_ns, one.bytes, limit_ns))
    least_bytes = unavoidable(problem, best.order)[0]
    return replace(best, least_makespan_ns=least_ns, least_bytes=least_bytes, exact=True)


def _is_sweep(problem: PlacementProblem) -> bool:
    """True if all tasks with a choice have the same options, and none has blocks or an order.

    All of them take one lane each.
    """
    choices = {options for options in problem.options if len(options) > 1}
    lanes = {one.lanes for options in problem.options for one in options}
    return len(choices) == 1 and lanes == {1} and not problem.size and not any(problem.after)


def _swept(problem: PlacementProblem) -> Solution:
    """Place the tasks without a choice, then each other task on the lane where it ends first.

    The other tasks are all alike, so no placement of them can end sooner.
    """
    line, seats = Timeline(problem), [0] * problem.tasks
    order = sorted(range(problem.tasks), key=lambda task: len(problem.options[task]) > 1)
    rest = [task for task in order if len(problem.options[task]) > 1]
    line.run(order[: -len(rest)], seats)
    choices = problem.options[rest[0]]
    ends = [
        (free + choice.time_ns, n)
        for n, choice in enumerate(choices)
        for free in line.free[choice.lines[0]]
    ]
    heapify(ends)
    for task in rest:
        end, seats[task] = ends[0]
        heapreplace(ends, (end + choices[seats[task]].time_ns, seats[task]))
    found = measure(problem, seats, order)
    return replace(found, least_makespan_ns=found.makespan_ns, exact=True)


class Search:
    """Keeps the best placements so far, and the effort that is left."""

    def __init__(self, problem: PlacementProblem, effort: Effort) -> None:
        self.problem, self.effort = problem, effort
        self.left = effort.search * min(problem.tasks, effort.whole) // effort.whole
        self.draw = random.Random(effort.seed)
        self.offers: list[Solution] = []
        self.quickest: Solution | None = None
        self.levels = _levels(problem)
        clusters = (unit for units in self.levels for unit in units if len(unit) > 1)
        self.clusters = list(dict.fromkeys(clusters))

    @property
    def least_ns(self) -> int:
        """The best makespan seen."""
        return self.quickest.makespan_ns if self.quickest else FAR

    def see(self, found: Solution) -> None:
        if found.makespan_ns < self.least_ns:
            self.quickest = found

    @property
    def limit_ns(self) -> int:
        return self.least_ns * self.effort.guard // THOUSAND

    def offer(self, found: Solution) -> None:
        """Add a start of the search: as it is, and once more with its tasks in the order in which
        they began.
        """
        self.offers.append(self._measured(found.seats, found.order))
        self.offers.append(self._sorted(found))

    def descend(self) -> Solution:
        """Reduce the makespan, then the bytes within the guard, from several starts."""
        effort = self.left
        quickest = min(self.offers, key=lambda one: (one.makespan_ns, one.bytes))
        quickest = self.sink(quickest, 0, until=effort * 8 // 10)
        self.offers.append(quickest)
        best = quickest
        different = self._different()
        if self.problem.tasks > MANY:
            different = different[:2]
        for n, start in enumerate(different):
            share = self.left // (len(different) - n)
            best = min(
                best, self.sink(start, self.limit_ns, until=self.left - share), key=self._worth
            )
        return self._within(best)

    def _within(self, best: Solution) -> Solution:
        """Reduce the makespan if it exceeds the limit, which falls whenever a better makespan is
        found.
        """
        if best.makespan_ns > self.limit_ns:
            best = self.sink(best, self.limit_ns, until=self.left - 10 * self.problem.tasks)
        if best.makespan_ns > self.limit_ns and self.quickest:
            best = self.quickest
        return replace(best, least_makespan_ns=self.least_ns)

    def _worth(self, found: Solution) -> tuple[int, int, int]:
        return _worth(found.makespan_ns, found.bytes, self.limit_ns)

    def _different(self) -> list[Solution]:
        """Return the most promising starts, without duplicates."""
        seen: dict[tuple[int, ...], Solution] = {}
        for found in sorted(self.offers, key=self._worth):
            seen.setdefault(found.seats, found)
        few = sorted(seen.values(), key=lambda one: (one.bytes, one.makespan_ns))
        within = [one for one in few if one.makespan_ns <= 2 * self.limit_ns]
        return list(dict.fromkeys([*list(seen.values())[:2], *within[:1], *within[:3]]))[:4]

    def shake(self, best: Solution) -> Solution:
        """Until no effort is left: move some tasks at random, improve again, and keep the result if
        it is better.
        """
        movable = [t for t, options in enumerate(self.problem.options) if len(options) > 1]
        at = best
        while movable and self.left > 0:
            layout = PlacementChoice(self.problem, at.seats)
            for _ in range(self.draw.randint(1, 3)):
                tasks: Sequence[int] = (self.draw.choice(movable),)
                if self.clusters and self.draw.random() < 0.5:
                    tasks = self.draw.choice(self.clusters)
                place = self.draw.choice(self.problem.options[self.draw.choice(movable)]).places
                for task, to in self._to(tasks, place):
                    layout.move(task, to)
            start = self._measured(layout.seats, at.order)
            self.left -= self.problem.tasks
            if tuple(layout.seats) == at.seats:
                continue
            found = self.sink(start, self.limit_ns, until=0)
            if self._worth(found) <= self._worth(at) or self.draw.random() < 0.05:
                at = found
            best = min(best, found, key=self._worth)
        return self._within(best)

    # --- one descent ----------------------------------------------------------------------------

    def sink(self, found: Solution, limit_ns: int, *, until: int) -> Solution:
        """Pass over the order as long as that improves something.

        With a limit of 0 the makespan is reduced.
        """
        many = self.problem.tasks > MANY and found.makespan_ns <= limit_ns
        while many and self.left > until:
            after = self._batch(found, limit_ns, until)
            many = after.bytes < found.bytes
            found = after
        while self.left > until:
            after = self._sweep(found, limit_ns, until)
            sorted_ = self._sorted(after)
            if _worth(sorted_.makespan_ns, sorted_.bytes, limit_ns) < _worth(
                after.makespan_ns, after.bytes, limit_ns
            ):
                after = sorted_
            if after == found:
                break
            found = after
        return found

    def _batch(self, found: Solution, limit_ns: int, until: int) -> Solution:
        """For large graphs: choose many moves by bytes alone, then test them together against the
        limit.

        One evaluation of the makespan serves many moves. A batch that is too slow is split into
        halves. Clusters move first, large ones before small ones, then tasks.
        """
        sweep = _Sweep(self, found, limit_ns)
        for units in self.levels:
            # a line filled up to the limit would end after it
            cap_ns = (self.least_ns + limit_ns) // 2
            passed = _Pass(self.problem, units, sweep.layout.seats, cap_ns)
            todo = [passed.moves()]
            self.left -= 3 * passed.looked  # roughly the effort of this pass
            while todo and self.left > until:
                few = todo.pop()
                if not few:
                    continue
                together = tuple(one for move in few for one in move)
                if not sweep.attempt(0, together) and few[1:]:
                    half = len(few) // 2
                    todo += [few[half:], few[:half]]
        return sweep.found

    def _sorted(self, found: Solution) -> Solution:
        line = Timeline(self.problem)
        line.run(found.order, found.seats)
        self.left -= 2 * self.problem.tasks
        return self._measured(found.seats, by_start(found.order, line.begin))

    def _sweep(self, found: Solution, limit_ns: int, until: int) -> Solution:
        """Try every move, in the order of the moves' first tasks."""
        sweep = _Sweep(self, found, limit_ns)
        for n, task in enumerate(found.order):
            if self.left <= until:
                break
            for move in self._moves(sweep, n):
                sweep.attempt(n, move)
            sweep.line.place(task, self.problem.options[task][sweep.layout.seats[task]])
        self.left -= self.problem.tasks
        return sweep.found

    def _moves(self, sweep: _Sweep, n: int) -> Iterator[MOVES]:
        task, seats = sweep.order[n], sweep.layout.seats
        if not sweep.hot(task):
            return
        options = self.problem.options[task]
        for to in range(len(options)):
            if to != seats[task]:
                yield ((task, to),)
        if len(options) > 1:
            for other in self._partners(sweep, n):
                yield from self._swap(seats, task, other)
        for cluster in sweep.first.get(task, ()):
            for choice in options:
                move = tuple(self._to(cluster, choice.places))
                if any(seats[one] != to for one, to in move):
                    yield move

    def _partners(self, sweep: _Sweep, n: int) -> Sequence[int]:
        """Return later tasks at other places that are worth a swap."""
        order = sweep.order
        if len(order) <= SMALL:
            return order[n + 1 :]
        task, problem = order[n], self.problem
        near = set(order[n + 1 : n + 1 + NEAR])
        for block in (*problem.reads[task], *problem.writes[task]):
            near.update(problem.readers[block][:NEAR])
        return [other for other in sorted(near) if sweep.place[other] > n]

    def _swap(self, seats: Sequence[int], task: int, other: int) -> Iterator[MOVES]:
        mine = self.problem.options[task][seats[task]].places
        theirs = self.problem.options[other][seats[other]].places
        if mine != theirs:
            move = (*self._to((task,), theirs), *self._to((other,), mine))
            if len(move) == 2:
                yield move

    def _to(self, tasks: Sequence[int], places: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        """Yield the tasks that can run at exactly these places, each with its option for them."""
        for task in tasks:
            for n, choice in enumerate(self.problem.options[task]):
                if choice.places == places:
                    yield task, n
                    break

    def _measured(self, seats: Sequence[int], order: Sequence[int]) -> Solution:
        line = Timeline(self.problem)
        line.run(order, seats)
        found = Solution(
            seats=tuple(seats), order=tuple(order), makespan_ns=line.makespan_ns, bytes=line.bytes
        )
        self.see(found)
        return found


class _Sweep:
    """Makes one pass along the order: tasks before the current one are fixed, later ones may
    move.
    """

    def __init__(self, search: Search, found: Solution, limit_ns: int) -> None:
        self.search, self.order, self.limit_ns = search, found.order, limit_ns
        self.begun_with = found
        self.layout = PlacementChoice(search.problem, found.seats)
        self.line = Timeline(search.problem)
        self.makespan_ns, self.bytes = found.makespan_ns, found.bytes
        self.place = {task: n for n, task in enumerate(found.order)}
        self.first = defaultdict[int, list[tuple[int, ...]]](list)
        for cluster in search.clusters:
            self.first[min(cluster, key=self.place.__getitem__)].append(cluster)
        self.chain: frozenset[int] | None = None
        if self.makespan_ns > limit_ns and len(found.order) > SMALL:
            line = Timeline(search.problem)
            line.run(found.order, found.seats)
            self.chain = _chain(search.problem, line, found)

    def hot(self, task: int) -> bool:
        """True if moving the task may help.

        If the makespan is too late, only a chain of tasks causes that.
        """
        return self.chain is None or task in self.chain

    @property
    def found(self) -> Solution:
        return replace(
            self.begun_with,
            seats=tuple(self.layout.seats),
            makespan_ns=self.makespan_ns,
            bytes=self.bytes,
        )

    def take_back(self, back: list[tuple[int, int]]) -> None:
        for task, was in reversed(back):
            self.layout.move(task, was)

    def attempt(self, n: int, move: MOVES) -> bool:
        """Apply the move; keep it if the placement is then better, and undo it if not."""
        layout, search = self.layout, self.search
        late = self.makespan_ns > self.limit_ns
        back = [(task, layout.move(task, to)) for task, to in move]
        search.left -= len(move)
        if late or layout.total < self.bytes:
            bound = self.makespan_ns if late else self.limit_ns
            cost = self._cost(n, bound)
            if cost is not None and _worth(*cost, self.limit_ns) < _worth(
                self.makespan_ns, self.bytes, self.limit_ns
            ):
                self.makespan_ns, self.bytes = cost
                if self.makespan_ns < search.least_ns:
                    search.see(self.found)
                return True
        self.take_back(back)
        return False

    def _cost(self, n: int, bound_ns: int) -> tuple[int, int] | None:
        search, seats = self.search, self.layout.seats
        line, mark = self.line, len(self.line.log)
        whole = line.run(self.order, seats, n, bound_ns)
        cost = (line.makespan_ns, line.bytes)
        # placing a task writes about six log entries
        search.left -= 1 + (len(line.log) - mark) // 6
        line.undo(mark)
        return cost if whole else None


def _worth(makespan_ns: int, bytes_: int, limit_ns: int) -> tuple[int, int, int]:
    return max(makespan_ns, limit_ns), bytes_, makespan_ns


def _chain(problem: PlacementProblem, line: Timeline, found: Solution) -> frozenset[int]:
    """Return the tasks that determine the makespan, each delaying the next."""
    behind = dict[tuple[int, int], int]()  # (line, end) -> task
    for task in found.order:
        for x in problem.options[task][found.seats[task]].lines:
            behind[x, line.end[task]] = task
    at, chain = max(found.order, key=lambda task: (line.end[task], task)), list[int]()
    while at not in chain:
        chain.append(at)
        lines = problem.options[at][found.seats[at]].lines
        held = [behind[x, line.begin[at]] for x in lines if (x, line.begin[at]) in behind]
        held += sorted(problem.after[at], key=lambda other: -line.end[other])
        at = held[0] if held else at
    return frozenset(chain)


class _Pass:
    """Makes one pass after Fiduccia and Mattheyses (1982): each unit may move once, the best saving
    first.

    A unit is a task or a cluster. Moves that cost bytes are made too, because they may enable
    better ones; the best state of the pass counts. No line gets more work than fits before
    `cap_ns`.
    """

    PATIENCE = 150  # number of moves without a new best placement after which a pass ends
    LOOKS = 12  # per task: evaluations in one pass
    CROWD = 12  # neighbours per block that are evaluated again after a move

    def __init__(
        self,
        problem: PlacementProblem,
        units: list[tuple[int, ...]],
        seats: Sequence[int],
        cap_ns: int,
    ) -> None:
        self.problem, self.layout, self.units = problem, PlacementChoice(problem, seats), units
        self.unit_of = {task: n for n, unit in enumerate(units) for task in unit}
        self.cap = [cap_ns * len(lanes) for lanes in problem.lanes]
        self.load = _load(problem, seats)
        self.moved = set[int]()
        self.looked = 0
        self.version = [0] * len(units)
        self.heaps: list[list[tuple[int, int, MOVES, int]]] = [[] for _ in problem.lanes]
        for unit in range(len(units)):
            self._look(unit)

    def moves(self) -> list[MOVES]:
        """Return the moves up to the best state, in order."""
        layout, made = self.layout, list[MOVES]()
        best, length = layout.total, 0
        enough = self.looked + self.LOOKS * self.problem.tasks
        while len(made) - length < self.PATIENCE and self.looked < enough:
            move = self._next()
            if move is None:
                break
            self._book(move)
            made.append(move)
            if layout.total < best:
                best, length = layout.total, len(made)
        return made[:length]

    def _look(self, unit: int) -> None:
        """Evaluate what each move of the unit would save now."""
        layout, before, tasks = self.layout, self.layout.total, self.units[unit]
        self.version[unit] += 1
        for choice in self.problem.options[tasks[0]]:
            if not choice.lines:
                continue
            move = tuple(
                (task, to)
                for task in tasks
                if (to := _seat_at(self.problem, task, choice.places, layout.seats[task])) >= 0
            )
            if move:
                self.looked += len(move)
                back = [(task, layout.move(task, to)) for task, to in move]
                entry = (layout.total - before, unit, move, self.version[unit])
                heappush(self.heaps[choice.lines[0]], entry)
                for task, was in reversed(back):
                    layout.move(task, was)

    def _next(self) -> MOVES | None:
        """Return the move that saves most, among those to lines that still have capacity."""
        tops = []
        for line, heap in enumerate(self.heaps):
            while heap and (heap[0][1] in self.moved or heap[0][3] < self.version[heap[0][1]]):
                heappop(heap)
            if heap and self.load[line] + self._work(heap[0][2], line) <= self.cap[line]:
                tops.append((heap[0], line))
        if not tops:
            return None
        (_, unit, move, _), line = min(tops)
        heappop(self.heaps[line])
        self.moved.add(unit)
        return move

    def _work(self, move: MOVES, line: int) -> int:
        options = self.problem.options
        choices = [options[task][to] for task, to in move]
        return sum(one.time_ns * one.lanes for one in choices if line in one.lines)

    def _book(self, move: MOVES) -> None:
        problem, near = self.problem, set[int]()
        for task, to in move:
            was = self.layout.move(task, to)
            _shift(self.load, problem.options[task][was], -1)
            _shift(self.load, problem.options[task][to], 1)
            for block in (*problem.reads[task], *problem.writes[task]):
                near.update(self.unit_of[one] for one in problem.readers[block][: self.CROWD])
                if block in problem.maker:
                    near.add(self.unit_of[problem.maker[block]])
        for unit in sorted(near - self.moved):
            self._look(unit)


def _seat_at(problem: PlacementProblem, task: int, places: tuple[int, ...], now: int) -> int:
    """Return the task's option at exactly these places.

    Returns -1 if there is none, or if it is the present one.
    """
    for n, choice in enumerate(problem.options[task]):
        if choice.places == places:
            return n if n != now else -1
    return -1


def _shift(load: list[int], choice: Option, sign: int) -> None:
    for line in choice.lines:
        load[line] += sign * choice.time_ns * choice.lanes


def _load(problem: PlacementProblem, seats: Sequence[int]) -> list[int]:
    """Return the lane-nanoseconds of each line."""
    load = [sum(lanes) for lanes in problem.lanes]
    for task, options in enumerate(problem.options):
        _shift(load, options[seats[task]], 1)
    return load


def _levels(problem: PlacementProblem) -> list[list[tuple[int, ...]]]:
    """Return all tasks in clusters joined by their largest blocks, on three levels.

    On the first two levels a cluster has at most a quarter, then a sixteenth, of the work for one
    lane. On the third level each task is alone.
    """
    work = problem.least_work
    lines = max(1, sum(len(lanes) for lanes in problem.lanes))
    levels = [_merged(problem, work, sum(work) // (part * lines)) for part in (4, 16)]
    return [*levels, [(task,) for task in range(problem.tasks)]]


def _merged(problem: PlacementProblem, work: list[int], bound: int) -> list[tuple[int, ...]]:
    head, weight = list(range(problem.tasks)), list(work)

    def root(task: int) -> int:
        while head[task] != task:
            head[task] = task = head[head[task]]
        return task

    for block in sorted(range(len(problem.size)), key=lambda b: (-problem.size[b], b)):
        tasks = list(problem.readers[block])
        if block in problem.maker:
            tasks.append(problem.maker[block])
        for other in tasks[1:]:
            a, b = root(tasks[0]), root(other)
            if a != b and weight[a] + weight[b] <= bound:
                head[b] = a
                weight[a] += weight[b]
    members = defaultdict[int, list[int]](list)
    for task in range(problem.tasks):
        members[root(task)].append(task)
    return [tuple(tasks) for tasks in members.values()]
