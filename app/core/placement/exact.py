"""Searches small problems exhaustively, for the best of all assignments in one order.

Tasks are placed in that order, in every way that may still be better. Three rules end a branch of
the search early: its makespan exceeds the limit, given the longest chain and the work left; its
bytes, with those that no placement avoids, are no fewer than the best ones; or it differs from
another branch only in the names of places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from app.core.placement.cost_model import Option, PlacementProblem, Timeline
from app.core.placement.heuristics import Solution

THOUSAND = 1000


def unavoidable(problem: PlacementProblem, order: Sequence[int]) -> list[int]:
    """Return for each n the bytes that every placement must move from the n-th task of the order
    on.

    A block that lies where none of its readers can run must be copied at least once.
    """
    place = {task: n for n, task in enumerate(order)}
    first = [0] * (len(order) + 1)
    for block, readers in enumerate(problem.readers):
        if block in problem.maker:
            at, maker = place[problem.maker[block]], problem.options[problem.maker[block]]
            masks = [choice.mask for choice in maker]
        else:
            at = min((place[task] for task in readers), default=0)
            masks = [problem.at[block]]
        hops = [min(_nearest(problem, mask, task) for mask in masks) for task in readers]
        first[at] += problem.size[block] * max(hops, default=0)
    for n in reversed(range(len(order))):
        first[n] += first[n + 1]
    return first


def _nearest(problem: PlacementProblem, where: int, task: int) -> int:
    return min(problem.hops(where, choice.mask) for choice in problem.options[task])


class Exact:
    """Searches by branch and bound over the options in one order: first the best makespan, then the
    fewest bytes near it.

    `guard` is in thousandths of the best makespan, `effort` in placed tasks.
    """

    def __init__(self, problem: PlacementProblem, *, guard: int, effort: int) -> None:
        self.problem, self.guard, self.left = problem, guard, effort
        self.twins = _twins(problem)

    def improve(self, found: Solution) -> Solution:
        """Return a placement that is at least as good; it is marked `exact` if the search was
        exhaustive.
        """
        quickest = self._search(found, by_bytes=False, limit_ns=found.least_makespan_ns - 1)
        least_ns = min(found.least_makespan_ns, quickest.makespan_ns)
        limit_ns = least_ns * self.guard // THOUSAND
        within = [one for one in (found, quickest) if one.makespan_ns <= limit_ns]
        best = min(within, key=lambda one: (one.bytes, one.makespan_ns))
        best = self._search(best, by_bytes=True, limit_ns=limit_ns)
        return replace(best, least_makespan_ns=least_ns, exact=self.left > 0)

    def _search(self, found: Solution, *, by_bytes: bool, limit_ns: int) -> Solution:
        search = _Branches(self, found, by_bytes, limit_ns)
        search.go(0)
        return search.best


class _Branches:
    """Runs one search: keeps the best placement so far, and ends branches that cannot be better."""

    def __init__(self, exact: Exact, found: Solution, by_bytes: bool, limit_ns: int) -> None:
        problem = exact.problem
        self.exact, self.problem, self.best = exact, problem, found
        self.by_bytes, self.limit_ns = by_bytes, limit_ns
        self.order, self.line = found.order, Timeline(problem)
        self.seats = [0] * problem.tasks
        self.ahead = unavoidable(problem, found.order)
        self.work = [0] * (problem.tasks + 1)
        for n in reversed(range(problem.tasks)):
            self.work[n] = self.work[n + 1] + problem.least_work[found.order[n]]
        self.lanes = max(1, sum(len(lanes) for lanes in problem.lanes))
        self.used = 0  # mask of the places where some task runs

    def go(self, n: int) -> None:
        """Place the n-th task in every way that may lead to a better placement."""
        if n == len(self.order):
            self._keep()
            return
        task, line, used = self.order[n], self.line, self.used
        for place in self._choices(n):
            if self.exact.left <= 0:
                return
            choice = self.problem.options[task][place]
            self.exact.left -= 1
            mark = len(line.log)
            end = line.place(task, choice)
            self.seats[task] = place
            self.used = used | choice.mask
            if end + self.problem.tail_ns[task] <= self.limit_ns and self._may_be_better(n + 1):
                self.go(n + 1)
            line.undo(mark)
            self.used = used

    def _choices(self, n: int) -> list[int]:
        """Return the options of the n-th task, best first.

        Of equivalent places that are unused, only one is tried.
        """
        task, line = self.order[n], self.line
        costs, seen = [], set[tuple[int, ...]]()
        for place, choice in enumerate(self.problem.options[task]):
            kind = tuple(
                -1 - self.exact.twins[p] if not self.used >> p & 1 else p for p in choice.places
            )
            if kind not in seen:
                seen.add(kind)
                mark = len(line.log)
                end, bytes_ = line.place(task, choice), line.bytes
                costs.append((bytes_, end, place) if self.by_bytes else (end, bytes_, place))
                line.undo(mark)
        return [place for _, _, place in sorted(costs)]

    def _may_be_better(self, n: int) -> bool:
        line = self.line
        if self.by_bytes and line.bytes + self.ahead[n] >= self.best.bytes:
            return False
        busy = sum(min(at, self.limit_ns) for lanes in line.free for at in lanes)
        return busy + self.work[n] <= self.limit_ns * self.lanes

    def _keep(self) -> None:
        line = self.line
        self.best = replace(
            self.best,
            seats=tuple(self.seats),
            makespan_ns=line.makespan_ns,
            bytes=line.bytes,
        )
        if not self.by_bytes:
            self.limit_ns = line.makespan_ns - 1


def _twins(problem: PlacementProblem) -> list[int]:
    """Return the first place that is equivalent to each place while both are unused."""
    places = range(problem.places)
    return [next(a for a in places if a == b or _alike(problem, a, b)) for b in places]


def _alike(problem: PlacementProblem, a: int, b: int) -> bool:
    """True if exchanging the two places changes nothing but their names."""
    swapped = {a: b, b: a}

    def other(place: int) -> int:
        return swapped.get(place, place)

    places = range(problem.places)
    if any(bool(mask >> a & 1) != bool(mask >> b & 1) for mask in problem.at):
        return False
    if any(
        _speed(problem, x, y) != _speed(problem, other(x), other(y)) for x in places for y in places
    ):
        return False
    for options in problem.options:
        kinds = {(o.places, o.time_ns, _lanes(problem, o)) for o in options}
        turned = {
            (tuple(sorted(map(other, o.places))), o.time_ns, _lanes(problem, o)) for o in options
        }
        if kinds != turned:
            return False
    return True


def _lanes(problem: PlacementProblem, choice: Option) -> tuple[object, ...]:
    return (choice.lanes, *sorted(problem.lanes[x] for x in choice.lines))


def _speed(problem: PlacementProblem, a: int, b: int) -> list[tuple[int, int]]:
    return [problem.links[hop.link] for hop in problem.ways[a][b]]
