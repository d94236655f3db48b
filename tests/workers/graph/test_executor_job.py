"""Graphs over several executors, in real processes: the bits of one, whatever happens to them."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import pytest

from app.core.model.graphs.task_graph import parse
from app.core.model.protocol.messages import Failed, Finished, Resized, Saved, Started
from app.core.placement.executors import spread
from tests.thoroughness import rest_long
from tests.workers.conftest import DeviceRig
from tests.workers.graph.test_runner import LONG, SLOW, body, launched, node, ran

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
def test_executors_give_what_one_executor_gives(graph: Any, executors: int, rig: DeviceRig) -> None:
    launched(rig, "t1", graph, world_size=executors)
    assert rig.event(Finished, "t1").result == ran(graph)


def test_sizes_of_blocks_are_reported_by_whichever_executor_made_them(rig: DeviceRig) -> None:
    """Lists that were dealt out as a whole; all as one executor tells it."""
    launched(rig, "t1", WIDE)
    launched(rig, "t3", WIDE, world_size=3)
    alone, told = (rig.event(Finished, task).made_bytes for task in ("t1", "t3"))
    assert told == alone
    assert {"parts.parts", "draws.y", "again.y", "d0.y", "listed.y", "last.y"} <= told.keys()


def test_graph_uses_as_many_slots_as_it_is_lent(rig: DeviceRig) -> None:
    """The executors of one seat run one after another, those of three side by side."""
    launched(rig, "t1", SLOW, world_size=3)
    rig.steps("t1", 2)
    for seats in (3, 1, 2):
        rig.resize("t1", seats)
        rig.until(lambda n=seats: [e for e in rig.all(Resized, "t1", 1) if e.seats == [n]])
    rig.let_end("t1")
    assert rig.event(Finished, "t1").result == ran(LONG)


def test_graph_gets_its_slots_though_each_node_outlasts_the_time_between_checkpoints(
    rig: DeviceRig,
) -> None:
    """A checkpoint is due whenever a node ends; it must not put the change of slots off."""
    naps = [node(f"n{n}", "nap", "x=s.y", params={"nap_s": 0.2}) for n in range(60)]
    launched(rig, "t1", body(node("s", "start"), *naps), checkpoint_every_s=0.05, world_size=2)
    rig.until(lambda: rig.all(Saved, "t1", 1))
    for seats in (2, 1, 2):
        rig.resize("t1", seats)
        rig.until(lambda n=seats: [e for e in rig.all(Resized, "t1", 1) if e.seats == [n]])
        rig.until(lambda n=len(rig.all(Saved, "t1", 1)): len(rig.all(Saved, "t1", 1)) > n)
    assert not rig.all(Finished, "t1", 1)


@pytest.mark.parametrize("seats", [1, 2])
def test_first_finished_result_in_the_order_of_nodes_counts(seats: int, rig: DeviceRig) -> None:
    """Whichever executor comes to its end first: here the later one, which does not sleep."""
    graph, result = finished_twice(executors=2)
    launched(rig, "t1", graph, world_size=2)
    rig.resize("t1", seats)
    assert rig.event(Finished, "t1").result == result


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


@pytest.mark.parametrize("seed", rest_long([1, 0, 2]))
def test_disturbed_executors_end_with_the_same_bits(seed: int, rig: DeviceRig, slow: Any) -> None:
    """Paused anywhere, its seats changed, resumed in place or from its image, and checkpointed."""
    dice, executors = random.Random(seed), 2 + seed % 2
    images: list[dict[str, object]] = []
    resumed = []
    for epoch in range(1, 8):
        more = {"images": images, "checkpoint_every_s": 0.05, "world_size": executors}
        launched(rig, "t1", SLOW, epoch, **more)
        resumed.append(rig.event(Started, "t1", epoch).resumed)
        if dice.random() < 0.7:
            rig.resize("t1", executors, epoch)
        if epoch == 7:
            break
        time.sleep(dice.uniform(0, 0.2))
        images = rig.paused_and_saved("t1", epoch)
        if dice.random() < 0.6:
            rig.drop.append(["t1", epoch])
            rig.until(lambda: not rig.supervisor.stays.residents)
    rig.let_end("t1", epoch)
    assert rig.event(Finished, "t1", epoch).result == slow, resumed
    assert {"fresh", "resident", "image"} >= set(resumed) > {"fresh"}


@pytest.fixture(scope="module")
def slow() -> Any:
    return ran(LONG)


@pytest.mark.parametrize("executor", [0, 1])
def test_killed_executor_ends_its_launch_and_the_next_goes_on(
    executor: int, rig: DeviceRig, slow: Any
) -> None:
    launched(rig, "t1", SLOW, checkpoint_every_s=0.05, world_size=2)
    saved = rig.until(lambda: [e for e in rig.all(Saved, "t1", 1) if e.step > 0])[0]
    (resident,) = rig.supervisor.stays.residents.values()
    os.kill(executors_of(resident.pid)[executor], signal.SIGKILL)
    failed = rig.event(Failed, "t1")
    assert failed.cause in ("exit", "exception")
    assert f"rank {executor}" in failed.message
    launched(rig, "t1", SLOW, 2, images=[rig.image(saved)], world_size=2)
    assert rig.went_on_from(saved)
    rig.let_end("t1", 2)
    assert rig.event(Finished, "t1", 2).result == slow


def executors_of(resident: int) -> list[int]:
    """By rank: the children of the conductor, which is the first with several."""
    with open(f"/proc/{resident}/task/{resident}/children") as file:
        found = sorted(map(int, file.read().split()))
    return found if len(found) != 1 else executors_of(found[0])
