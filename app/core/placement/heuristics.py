"""Computes placements by simple rules: to compare with, and to begin the search with.

Each rule takes a problem and returns a whole placement, measured by the same `Timeline` as all
others. `starts` are the placements with which the search begins
(`app.core.placement.local_search`).
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from app.core.placement.cost_model import FAR, NS, Option, PlacementProblem, Timeline, bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Holds the option of each task, their order, and the cost.

    `least_makespan_ns` is the best makespan that was seen, `least_bytes` a lower bound for all
    placements. `exact`: for this order, no placement within the guard moves fewer bytes.
    """

    seats: tuple[int, ...]
    order: tuple[int, ...]
    makespan_ns: int
    bytes: int
    least_makespan_ns: int = 0
    least_bytes: int = 0
    exact: bool = False


def measure(problem: PlacementProblem, seats: Sequence[int], order: Sequence[int]) -> Solution:
    """Return the cost of a placement with unlimited memory."""
    line = Timeline(problem)
    line.run(order, seats)
    return Solution(
        seats=tuple(seats), order=tuple(order), makespan_ns=line.makespan_ns, bytes=line.bytes
    )


def ranks(problem: PlacementProblem) -> list[int]:
    """Return HEFT's upward ranks: mean time of each task and of the longest chain after it.

    The chain includes the mean times of copies.
    """
    places = sorted({p for options in problem.options for o in options for p in o.places})
    speeds = Counter(
        problem.links[hop.link] for a in places for b in places for hop in problem.ways[a][b]
    )
    rank = [0] * problem.tasks
    for task in reversed(problem.sorted_by(lambda task: 0)):
        times = [o.time_ns for o in problem.options[task]]
        behind = [rank[other] for other in problem.followers[task]]
        for block in problem.writes[task]:
            size = problem.size[block]
            copies = sum(n * (late - (-size * NS // rate)) for (late, rate), n in speeds.items())
            copy = copies // len(places) ** 2
            behind += [copy + rank[other] for other in problem.readers[block]]
        rank[task] = sum(times) // len(times) + max(behind, default=0)
    return rank


def heft(problem: PlacementProblem) -> Solution:
    """Place by HEFT (Topcuoglu 2002): by upward rank, each task where it ends first, also in gaps.

    As published, it assumes that links are always free; the result is measured like all others.
    """
    rank = ranks(problem)
    order = problem.sorted_by(rank.__getitem__)
    taken: dict[int, list[tuple[int, int]]] = {n: [] for n in range(len(problem.lanes))}
    there = [dict.fromkeys(bits(mask), 0) for mask in problem.at]
    begin, end, seats = [0] * problem.tasks, [0] * problem.tasks, [0] * problem.tasks
    for task in order:
        best = (FAR, 0, 0)
        for n, choice in enumerate(problem.options[task]):
            ready = max((end[other] for other in problem.after[task]), default=0)
            for place in choice.places:
                for block in problem.reads[task]:
                    ready = max(ready, _arrives(problem, block, there[block], place))
            start = _gap(problem, taken, choice, ready)
            best = min(best, (start + choice.time_ns, n, start))
        end[task], seats[task], begin[task] = best
        _settle(problem, task, problem.options[task][seats[task]], begin, end, there)
        for line in problem.options[task][seats[task]].lines:
            insort(taken[line], (begin[task], end[task]))
    return measure(problem, seats, by_start(order, begin))


def _arrives(problem: PlacementProblem, block: int, there: dict[int, int], place: int) -> int:
    if place in there:
        return there[place]
    return min(at + problem.way_ns(block, source, place) for source, at in there.items())


def _settle(
    problem: PlacementProblem,
    task: int,
    choice: Option,
    begin: list[int],
    end: list[int],
    there: list[dict[int, int]],
) -> None:
    for place in choice.places:
        for block in problem.reads[task]:
            there[block][place] = _arrives(problem, block, there[block], place)
        for block in problem.writes[task]:
            there[block][place] = end[task]


def _gap(
    problem: PlacementProblem, taken: dict[int, list[tuple[int, int]]], choice: Option, ready: int
) -> int:
    """Return when the first long enough gap begins.

    Lines with several lanes have no gaps.
    """
    if len(choice.lines) == 1 and len(problem.lanes[choice.lines[0]]) == 1:
        at = max(ready, problem.lanes[choice.lines[0]][0])
        for start, end in taken[choice.lines[0]]:
            if at + choice.time_ns <= start:
                break
            at = max(at, end)
        return at
    for line in choice.lines:
        ends = [*problem.lanes[line], *(end for _, end in taken[line])]
        ready = max(ready, sorted(ends)[-len(problem.lanes[line]) :][choice.lanes - 1])
    return ready


def by_start(order: Sequence[int], begin: Sequence[int]) -> list[int]:
    """Return the tasks in the order in which they begin; tasks that begin together keep their
    order.
    """
    place = {task: n for n, task in enumerate(order)}
    return sorted(order, key=lambda task: (begin[task], place[task]))


def listed(problem: PlacementProblem, weight: int) -> Solution:
    """Place by upward rank, each task where it ends first; the delay of copies counts `weight`
    times.

    Unlike HEFT, the rule takes busy links into account, and fills no gaps.
    """
    order, line = problem.sorted_by(ranks(problem).__getitem__), Timeline(problem)
    seats = [0] * problem.tasks
    for task in order:
        best = (FAR, 0)
        for n, choice in enumerate(problem.options[task]):
            late = weight * _copy_ns(problem, line, task, choice) if weight else 0
            mark = len(line.log)
            best = min(best, (line.place(task, choice) + late, n))
            line.undo(mark)
        seats[task] = best[1]
        line.place(task, problem.options[task][best[1]])
    return measure(problem, seats, order)


def _copy_ns(problem: PlacementProblem, line: Timeline, task: int, choice: Option) -> int:
    """Return how long the copies would take, one after the other."""
    return sum(
        problem.way_ns(block, problem.sources(line.where[block], place)[0], place)
        for place in choice.places
        for block in problem.reads[task]
        if not line.where[block] >> place & 1
    )


def together(problem: PlacementProblem) -> Solution:
    """Place on one place all tasks that can run there, so that few bytes move."""
    order = problem.sorted_by(ranks(problem).__getitem__)
    places = sorted({p for options in problem.options for o in options for p in o.places})
    found = []
    for place in places:
        seats = [
            min(range(len(options)), key=lambda n, o=options: (place not in o[n].places, n))  # type: ignore[misc]
            for options in problem.options
        ]
        found.append(measure(problem, seats, order))
    return min(found, key=lambda one: (one.makespan_ns, one.bytes))


def dmda(problem: PlacementProblem, beta: int = 1) -> Solution:
    """Place by StarPU's dmda: each ready task goes where its end, plus beta times its copies, is
    earliest.
    """
    line, seats, order = Timeline(problem), [0] * problem.tasks, list[int]()
    waits = [len(before) for before in problem.after]
    ready = [(0, task) for task in range(problem.tasks) if not waits[task]]
    while ready:
        now, task = heappop(ready)
        costs = []
        for n, choice in enumerate(problem.options[task]):
            free = max((line.free[x][choice.lanes - 1] for x in choice.lines), default=0)
            copies = beta * _copy_ns(problem, line, task, choice)
            costs.append((max(now, free) + choice.time_ns + copies, n))
        seats[task] = min(costs)[1]
        line.place(task, problem.options[task][seats[task]], now)
        order.append(task)
        _ready_now(problem, line, task, waits, ready)
    return measure(problem, seats, order)


def _ready_now(
    problem: PlacementProblem,
    line: Timeline,
    task: int,
    waits: list[int],
    ready: list[tuple[int, int]],
) -> None:
    for other in problem.followers[task]:
        waits[other] -= 1
        if not waits[other]:
            heappush(ready, (max(line.end[u] for u in problem.after[other]), other))


def idle_rule(
    problem: PlacementProblem, priority: Callable[[int, int, int], int], cost: Callable[..., int]
) -> Solution:
    """Whenever a line is idle, give the ready task of the highest priority an option that uses idle
    lines.

    `priority(task, waited_ns, since_ns)`: largest first. `cost(line, task, option)`: least first.
    """
    line, seats, order = Timeline(problem), [0] * problem.tasks, list[int]()
    waits = [len(before) for before in problem.after]
    coming = [(0, task) for task in range(problem.tasks) if not waits[task]]
    ready: dict[int, int] = {}
    now = 0
    while coming or ready:
        while coming and coming[0][0] <= now:
            since, task = heappop(coming)
            ready[task] = since
        for task in sorted(ready, key=lambda t: (-priority(t, now - ready[t], ready[t]), t)):
            idle = [
                (cost(line, task, choice), n)
                for n, choice in enumerate(problem.options[task])
                if all(line.free[x][choice.lanes - 1] <= now for x in choice.lines)
            ]
            if idle:
                del ready[task]
                seats[task] = min(idle)[1]
                line.place(task, problem.options[task][seats[task]], now)
                order.append(task)
                _ready_now(problem, line, task, waits, coming)
        later = [at for lanes in line.free for at in lanes if at > now]
        now = max(now, min([*later, *(at for at, _ in coming[:1])], default=now))
    return measure(problem, seats, order)


def least_bytes(problem: PlacementProblem) -> Solution:
    """Place by US9996394B2, claim 1.

    The ready task with the highest priority, by waiting and run time, goes to the idle accelerator
    that needs the least data transfer.
    """

    def priority(task: int, waited: int, since: int) -> int:
        times = [choice.time_ns for choice in problem.options[task]]
        return waited + sum(times) // len(times)

    return idle_rule(problem, priority, lambda line, task, choice: line.missing_bytes(task, choice))


def starts(problem: PlacementProblem) -> Iterator[Solution]:
    """Yield the placements with which the search begins."""
    yield heft(problem)
    yield listed(problem, 0)
    yield listed(problem, 1)
    yield listed(problem, 4)
    yield dmda(problem, 4)
    yield least_bytes(problem)
    yield together(problem)
