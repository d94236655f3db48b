"""A process that has run a leg of a graph lingers for the next one: the same bits in less time, and
in nobody's way.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from app.core.model.messages import Failed, Finished, Started
from tests.workers.conftest import Ground
from tests.workers.graph.test_runner import body, launched, node, paused_and_saved, ran
from workers.device import resident as residents

WHOLE = body(
    node("start", "start", params={"seed": 3}),
    node("noisy", "draw", "x=start.y"),
    node("nap", "nap", "x=noisy.y", params={"nap_s": 0.3}),
    node("parts", "pieces", writes="parts"),
    node("told", "said", "x=noisy.y"),
    node("again", "draw", "x=told.y"),
    node("grown", "grow", "state=noisy.y", "state", inout=["state"]),
    node("one", "listed", "x=again.y"),
    node("two", "listed", "x=grown.state"),
    one="one.y",
    two="two.y",
)
FIRST = {
    "nodes": ["start", "noisy", "nap", "parts"],
    "takes": {},
    "gives": {"b0": "start.y", "b1": "noisy.y", "b2": "parts.parts"},
    "after_ms": {},
    "is_last": False,
}
SECOND = {
    "nodes": ["told", "again", "grown", "one", "two"],
    "takes": {"b1": "noisy.y"},
    "gives": {"one": "one.y", "two": "two.y"},
    "after_ms": {},
    "is_last": True,
}


def leg(ground: Ground, task: str, part: dict[str, Any], **more: Any) -> None:
    launched(ground, task, WHOLE, part=part, **more)


def first(ground: Ground, task: str = "t1", **more: Any) -> dict[str, Any]:
    leg(ground, task, FIRST, outputs=["b0", "b1", "b2"], **more)
    outputs: dict[str, Any] = ground.event(Finished, task).outputs
    return {"b1": outputs["b1"]}


def processes(ground: Ground) -> list[int]:
    return [resident.pid for resident in list(ground.supervisor.residents.values())]


def is_as_alone(ground: Ground, task: str = "t2") -> bool:
    return bool(ground.event(Finished, task).result == ran(WHOLE))


def test_the_next_leg_goes_on_where_the_blocks_are(ground: Ground) -> None:
    inputs = first(ground)
    before = processes(ground)
    leg(ground, "t2", SECOND, inputs=inputs)
    ground.event(Started, "t2")
    assert processes(ground) == before
    assert len(before) == 1
    assert is_as_alone(ground)
    ground.until(lambda: not ground.supervisor.residents)  # no leg follows: nobody lingers
    assert not ground.all(Failed, "t1")
    assert len(ground.all(Finished, "t1")) == 1
    assert "t1/1" not in ground.lines
    assert [stream for stream, _ in ground.lines["t2/1"]] == ["stdout"]


def test_a_chain_of_legs_needs_one_process(ground: Ground) -> None:
    middle = {**FIRST, "nodes": ["told"], "takes": {"b1": "noisy.y"}, "gives": {"b3": "told.y"}}
    end = {**SECOND, "nodes": ["again", "grown", "one", "two"]}
    end["takes"] = {"b1": "noisy.y", "b3": "told.y"}
    inputs = first(ground)
    before = processes(ground)
    leg(ground, "m", middle, inputs=inputs, outputs=["b3"])
    inputs["b3"] = ground.event(Finished, "m").outputs["b3"]
    leg(ground, "t2", end, inputs=inputs)
    ground.event(Started, "t2")
    assert processes(ground) == before
    assert is_as_alone(ground)


def test_one_that_is_killed_meanwhile_is_missed_by_nobody(ground: Ground) -> None:
    inputs = first(ground)
    (pid,) = processes(ground)
    os.kill(pid, signal.SIGKILL)
    ground.until(lambda: not ground.supervisor.residents)
    leg(ground, "t2", SECOND, inputs=inputs)
    assert is_as_alone(ground)
    assert not ground.all(Failed, "t1")


def test_one_that_is_killed_in_its_second_leg_fails_that_one(ground: Ground) -> None:
    inputs = first(ground)
    slow = {**SECOND, "nodes": ["nap", *SECOND["nodes"]]}
    leg(ground, "t2", slow, inputs=inputs)
    ground.event(Started, "t2")
    (pid,) = processes(ground)
    os.kill(pid, signal.SIGKILL)
    assert ground.event(Failed, "t2").cause == "exit"
    assert len(ground.all(Finished, "t1")) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"tenant": "another"},
        {"params": {"other": 1}},
        {"memory_bytes": 1 << 20},
        {"part": {**SECOND, "takes": {}, "nodes": ["start", "noisy", *SECOND["nodes"]]}},
    ],
    ids=["tenant", "params", "memory", "takes nothing of it"],
)
def test_it_goes_on_with_nothing_else(ground: Ground, other: dict[str, Any]) -> None:
    inputs = first(ground)
    (pid,) = processes(ground)
    part = other.pop("part", SECOND)
    leg(ground, "t2", part, inputs=inputs if part["takes"] else {}, **other)
    ground.event(Started, "t2")
    assert set(processes(ground)) - {pid}
    assert is_as_alone(ground)


def test_it_makes_room_for_whoever_needs_its_place(grounds: Callable[..., Ground]) -> None:
    ground = grounds(residents_max=1)
    inputs = first(ground)
    ground.launch("t3", "nodes:start", outputs=["y"])
    ground.event(Finished, "t3")
    leg(ground, "t2", SECOND, inputs=inputs)
    assert is_as_alone(ground)


def test_it_makes_room_for_whoever_needs_its_memory(grounds: Callable[..., Ground]) -> None:
    ground = grounds(memory_bytes=100 << 20)
    inputs = first(ground, memory_bytes=60 << 20)
    (pid,) = processes(ground)
    ground.launch("t3", "nodes:start", outputs=["y"], memory_bytes=60 << 20)
    ground.event(Finished, "t3")
    assert pid not in processes(ground)
    leg(ground, "t2", SECOND, inputs=inputs, memory_bytes=60 << 20)
    assert is_as_alone(ground)


def test_it_waits_a_while_and_no_longer(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residents, "LINGER_US", 100_000)
    first(ground)
    ground.until(lambda: not ground.supervisor.residents)


def test_who_has_been_saved_ends_with_its_leg(ground: Ground) -> None:
    """Its slab holds what is not the next one's."""
    leg(ground, "t1", FIRST, outputs=["b0", "b1", "b2"], checkpoint_every_s=0.01)
    ground.event(Started, "t1")
    images = paused_and_saved(ground, "t1", 1)
    leg(ground, "t1", FIRST, epoch=2, outputs=["b0", "b1", "b2"], images=images)
    outputs = ground.event(Finished, "t1", 2).outputs
    ground.until(lambda: not ground.supervisor.residents)
    leg(ground, "t2", SECOND, inputs={"b1": outputs["b1"]})
    assert is_as_alone(ground)


def test_a_device_that_leaves_takes_it_along(ground: Ground) -> None:
    first(ground)
    ground.supervisor.stop()
    assert ground.reports[-1].residents == []
