"""Graphs over several executors, in real processes: the bits of one, whatever happens to them."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import pytest

from app.core.model.messages import Failed, Finished, Resized, Saved, Started
from app.core.model.task_graph import parse
from app.core.placement.executors import spread
from tests.thoroughness import rest_long
from tests.workers.conftest import Ground
from tests.workers.graph.test_runner import SLOW, body, launched, node, paused_and_saved, ran

WIDE = body(
    node("parts", "pieces", writes="parts", params={"count": 7}),
    node("draws", "draw", "x=parts.parts", map="x"),
    node("again", "pairs", "x=draws.y y=parts.parts", map=["x", "y"]),
    *(node(f"s{n}", "start", params={"seed": n}) for n in range(6)),
    *(node(f"d{n}", "draw", f"x=s{n}.y") for n in range(6)),
    node("g0", "grow", "state=d0.y", "state", inout=["state"], params={"by": 5}),
    node("few", "total", "xs=d0.y,d1.y,d2.y,d3.y,d4.y,d5.y,g0.state"),
    node("listed", "double", "x=d0.y,d1.y,s2.y", map="x"),
    node("all", "total", "xs=again.y"),
    node("both", "total", "xs=all.y,few.y"),
    node("last", "listed", "x=both.y"),
    node("more", "total", "xs=listed.y"),
    node("end", "listed", "x=more.y"),
    node("names", "named", "a=d0.y b=d5.y c=draws.y", map="c"),
    y="last.y",
    z="end.y",
    names="names.y",
)
STATES = body(  # what passes is no tensor: modules and optimizers, and what they share
    node("a", "begin_training", writes="state"),
    *(node(f"t{n}", "train", "state=a.state", "state", inout=["state"]) for n in range(3)),
    *(node(f"u{n}", "train", f"state=t{n}.state", "state", inout=["state"]) for n in range(3)),
    *(node(f"c{n}", "checksum", f"state=u{n}.state", "sum first") for n in range(3)),
    **{f"sum{n}": f"c{n}.sum" for n in range(3)},
)


@pytest.mark.parametrize("executors", [2, 3, 5])
@pytest.mark.parametrize("graph", [WIDE, STATES], ids=["tensors", "states"])
def test_it_gives_what_one_executor_gives(graph: Any, executors: int, ground: Ground) -> None:
    launched(ground, "t1", graph, world_size=executors)
    assert ground.event(Finished, "t1").result == ran(graph)


def test_it_tells_how_large_blocks_were_whoever_made_them(ground: Ground) -> None:
    """Lists that were dealt out as a whole; all as one executor tells it."""
    launched(ground, "t1", WIDE)
    launched(ground, "t3", WIDE, world_size=3)
    alone, told = (ground.event(Finished, task).made_bytes for task in ("t1", "t3"))
    assert told == alone
    assert {"parts.parts", "draws.y", "again.y", "d0.y", "listed.y", "last.y"} <= told.keys()


def test_it_takes_as_many_seats_as_it_is_lent(ground: Ground) -> None:
    """The executors of one seat run one after another, those of three side by side."""
    launched(ground, "t1", SLOW, world_size=3)
    ground.steps("t1", 2)
    for seats in (3, 1, 2):
        ground.resize("t1", seats)
        ground.until(lambda n=seats: [e for e in ground.all(Resized, "t1", 1) if e.seats == [n]])
    assert ground.event(Finished, "t1").result == ran(SLOW)


@pytest.mark.parametrize("seats", [1, 2])
def test_what_finishes_first_in_the_order_is_the_result(seats: int, ground: Ground) -> None:
    """Whichever executor comes to its end first: here the later one, which does not sleep."""
    graph, result = finished_twice(executors=2)
    launched(ground, "t1", graph, world_size=2)
    ground.resize("t1", seats)
    assert ground.event(Finished, "t1").result == result


def finished_twice(executors: int) -> tuple[Any, Any]:
    """A graph that two nodes finish, each of another executor, and what it gives."""
    graph = body(
        node("s", "start"),
        node("slow", "nap", "x=s.y", params={"nap_s": 0.5}),
        node("first", "stop", "x=slow.y"),
        *(node(f"n{n}", "add", "x=s.y" if n == 0 else f"x=n{n - 1}.y") for n in range(4)),
        node("second", "stop", "x=n3.y"),
        node("end", "total", "xs=first.y,second.y"),
    )
    found = spread(parse(graph), executors)
    assert found.order.index("first") < found.order.index("second")
    assert found.seats["first"] != found.seats["second"]
    return graph, ran(graph | {"outputs": {"y": "first.y"}})


@pytest.mark.parametrize("seed", rest_long(range(3), keep=2))
def test_disturbed_it_ends_with_the_same_bits(seed: int, ground: Ground, slow: Any) -> None:
    """Paused anywhere, its seats changed, resumed in place or from its image, and checkpointed."""
    dice, executors = random.Random(seed), 2 + seed % 2
    images: list[dict[str, object]] = []
    resumed = []
    for epoch in range(1, 8):
        more = {"images": images, "checkpoint_every_s": 0.05, "world_size": executors}
        launched(ground, "t1", SLOW, epoch, **more)
        resumed.append(ground.event(Started, "t1", epoch).resumed)
        if dice.random() < 0.7:
            ground.resize("t1", executors, epoch)
        if epoch == 7:
            break
        time.sleep(dice.uniform(0, 0.2))
        images = paused_and_saved(ground, "t1", epoch)
        if dice.random() < 0.6:
            ground.drop.append(["t1", epoch])
            ground.until(lambda: not ground.supervisor.lives.residents)
    assert ground.event(Finished, "t1", 7).result == slow, resumed
    assert {"fresh", "resident", "image"} >= set(resumed) > {"fresh"}


@pytest.fixture(scope="module")
def slow() -> Any:
    return ran(SLOW)


@pytest.mark.parametrize("executor", [0, 1])
def test_a_killed_executor_is_the_end_of_its_launch_and_the_next_goes_on(
    executor: int, ground: Ground, slow: Any
) -> None:
    launched(ground, "t1", SLOW, checkpoint_every_s=0.05, world_size=2)
    saved = ground.until(lambda: [e for e in ground.all(Saved, "t1", 1) if e.step > 0])[0]
    (resident,) = ground.supervisor.lives.residents.values()
    os.kill(executors_of(resident.pid)[executor], signal.SIGKILL)
    failed = ground.event(Failed, "t1")
    assert failed.cause in ("exit", "exception")
    assert f"rank {executor}" in failed.message
    launched(ground, "t1", SLOW, 2, images=[ground.image(saved)], world_size=2)
    assert ground.event(Finished, "t1", 2).result == slow
    assert ground.went_on_from(saved)


def executors_of(resident: int) -> list[int]:
    """By rank: the children of the conductor, which is the first with several."""
    with open(f"/proc/{resident}/task/{resident}/children") as file:
        found = sorted(map(int, file.read().split()))
    return found if len(found) != 1 else executors_of(found[0])
