"""Images of a graph's executors: taken one after another at a cut, in any order of events.

All executors are in this process, and do what the test says, as in processes of their own.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.core.model.graphs.task_graph import parse, program
from app.core.placement.executors import EVERYBODY, ExecutorSpread
from tests.thoroughness import seeds
from tests.workers.graph.test_executor_job import STATES, WIDE
from tests.workers.graph.test_runner import context, nodes, ran
from workers.capture.capture import Surroundings
from workers.graph import runner
from workers.graph.executor_job import ExecutorJob, LoadedExecutor
from workers.hardware.accelerator import Accelerator
from workers.ranks import turns
from workers.ranks.shared_memory import Arena, close, make
from workers.ranks.turns import Turns

JSON = dict[str, Any]

GRAPHS = {"tensors": WIDE, "states": STATES}


class ExecutorsHere:
    """The executors of a graph, from its begin or from the images of all of them."""

    def __init__(
        self, graph: JSON, found: ExecutorSpread, images: dict[int, JSON] | None = None
    ) -> None:
        count = found.executors
        self.handles = make(count, land_bytes=1 << 26)
        arena = Arena(self.handles)
        turns.seat_all(arena, count)
        self.jobs = list[ExecutorJob]()
        for rank in range(count):
            loaded = LoadedExecutor(
                *(graph, lambda name: getattr(nodes, name.partition(":")[2]), Accelerator("cpu")),
                spread=found,
                turns=Turns(arena, rank, apart=True),
                around=Surroundings(code=Path("/nowhere"), scratch=Path("/nowhere"), ctx=None),
            )
            self.jobs.append(loaded.begin({}) if images is None else loaded.go_on(images[rank]))
        self.contexts = [context() for _ in range(count)]

    def goes_on(self, executor: int) -> bool:
        """Run a node or a shard of this executor, if it can run one."""
        job, ctx = self.jobs[executor], self.contexts[executor]
        if ctx.result is not None:
            return False
        job._tell_passed()
        if job._is_ready():
            job.step(ctx)
            return True
        job.passing.reclaim()
        return False

    def result(self) -> Any:
        """Run all to their end; return the result of the first, which waits for all others."""
        while any([self.goes_on(executor) for executor in reversed(range(len(self.jobs)))]):
            pass
        assert all(ctx.result is not None for ctx in self.contexts), [
            job._waits_for() for job in self.jobs
        ]
        return self.contexts[0].result


def dealt(graph: JSON, count: int, dice: random.Random) -> ExecutorSpread:
    """Return a random executor for each node."""
    parsed = parse(graph)
    seats = {n.name: EVERYBODY if n.map else dice.randrange(count) for n in parsed.nodes}
    return ExecutorSpread(executors=count, order=program(parsed).order, seats=seats)


Begin = Callable[..., ExecutorsHere]


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    monkeypatch.setattr(runner, "BURST_S", 0.0)  # a step is one node or shard
    begun = list[ExecutorsHere]()

    def begin(*how: Any) -> ExecutorsHere:
        begun.append(ExecutorsHere(*how))
        return begun[-1]

    yield begin
    for executors in begun:
        close(executors.handles)


@functools.cache
def undisturbed(kind: str) -> Any:
    return ran(GRAPHS[kind])


@pytest.mark.parametrize("seed", seeds(range(12)))
@pytest.mark.parametrize("kind", GRAPHS)
def test_graph_goes_on_from_images_made_while_other_executors_run_on(
    kind: str, seed: int, begin: Begin
) -> None:
    """An executor whose image is made runs on, before the images of the others are made."""
    dice, count, graph = random.Random(seed), 2 + seed % 2, GRAPHS[kind]
    found = dealt(graph, count, dice)
    executors = begin(graph, found)
    for _ in range(4):
        for _ in range(dice.randrange(12)):
            executors.goes_on(dice.randrange(count))
        standing, images = set[int](), dict[int, JSON]()
        while len(images) < count:
            one = dice.randrange(count)
            if one not in standing and dice.random() < 0.5:
                executors.jobs[one].stand()
                standing.add(one)
            elif one not in standing or one in images:
                executors.goes_on(one)
            elif len(standing) == count:
                images[one] = copy.deepcopy(executors.jobs[one].state())
        if any(ctx.result is not None for ctx in executors.contexts):
            break
        executors = begin(graph, found, images)
    assert executors.result() == undisturbed(kind)
