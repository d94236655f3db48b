"""What comes late: a partition of a graph that begins before all that it takes is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.core.model.protocol.messages import (
    Came,
    Failed,
    Finished,
    Given,
    Paused,
    Started,
    Stopped,
    Stored,
)
from app.storage.signing import block_key
from tests.workers.conftest import DeviceRig
from tests.workers.graph.test_runner import body, launched, node, ran

WHOLE = body(
    node("start", "start", params={"seed": 3}),
    node("noisy", "draw", "x=start.y"),
    node("own", "start", params={"seed": 4}),
    node("drawn", "draw", "x=own.y"),
    node("told", "said", "x=noisy.y"),
    node("again", "draw", "x=told.y"),
    node("one", "listed", "x=again.y"),
    node("two", "listed", "x=drawn.y"),
    one="one.y",
    two="two.y",
)
MAKER = {"nodes": ["start", "noisy"], "takes": {}, "gives": {"b0": "noisy.y"}, "after_ms": {}}
TAKER = {
    "nodes": ["own", "drawn", "told", "again", "one", "two"],
    "takes": {"b0": "noisy.y"},
    "gives": {"one": "one.y", "two": "two.y"},
    "after_ms": {},
    "late": ["b0"],
}


def partition(rig: DeviceRig, task: str, part: dict[str, Any], **more: Any) -> None:
    launched(rig, task, WHOLE, part=part, **more)


@pytest.fixture
def rig(rigs: Callable[..., DeviceRig]) -> DeviceRig:
    """Whose patience does not end before a slow test has given what it lacks."""
    return rigs(patience_s=30.0)


@pytest.fixture
def block(rig: DeviceRig) -> dict[str, Any]:
    """What `noisy` makes, durable."""
    partition(rig, "maker", MAKER, outputs=["b0"])
    kept: dict[str, Any] = rig.event(Finished, "maker").outputs["b0"]
    return kept


def give(rig: DeviceRig, block: dict[str, Any], *, epoch: int = 1, task: str = "t1") -> None:
    rig.supervisor.receive(Given(task=task, epoch=epoch, port="b0", source=block))


def is_right(rig: DeviceRig, *, epoch: int = 1) -> bool:
    return bool(rig.event(Finished, "t1", epoch).result == ran(WHOLE))


def was_told(rig: DeviceRig, block: dict[str, Any], *, epoch: int = 1) -> bool:
    """How it came: when it started, if it was there by then."""
    started = rig.event(Started, "t1", epoch)
    told = len(rig.all(Came, "t1", epoch)), started.ways, started.input_bytes
    return told in [(0, {"b0": "here"}, block["size_bytes"]), (1, {}, 0)]


def asks(rig: DeviceRig) -> bool:
    return any(view.lacks == ["b0"] for view in rig.reports[-1].residents)


def test_task_goes_on_when_the_late_block_has_come(rig: DeviceRig, block: dict[str, Any]) -> None:
    partition(rig, "t1", TAKER)
    assert rig.event(Started, "t1").ways == {}
    give(rig, block)
    assert is_right(rig)
    came = rig.event(Came, "t1")
    assert (came.port, came.way, came.size_bytes) == ("b0", "here", block["size_bytes"])


def test_block_may_come_before_there_is_a_process(rig: DeviceRig, block: dict[str, Any]) -> None:
    partition(rig, "t1", TAKER)
    for _ in range(3):  # said more than once
        give(rig, block)
    assert is_right(rig)
    assert was_told(rig, block)


def test_block_present_at_the_launch_is_an_ordinary_input(
    rig: DeviceRig, block: dict[str, Any]
) -> None:
    partition(rig, "t1", TAKER, inputs={"b0": block})
    assert rig.event(Started, "t1").ways == {"b0": "here"}
    assert is_right(rig)
    assert not rig.all(Came, "t1")


def test_task_asks_for_a_block_that_it_was_not_told_of(
    rig: DeviceRig, block: dict[str, Any]
) -> None:
    partition(rig, "t1", TAKER)
    rig.until(lambda: asks(rig))
    give(rig, block)
    assert is_right(rig)


def test_task_leaves_its_slot_when_it_has_waited_too_long(rigs: Callable[..., DeviceRig]) -> None:
    rig = rigs(patience_s=0.2)
    partition(rig, "maker", MAKER, outputs=["b0"])
    block = rig.event(Finished, "maker").outputs["b0"]
    partition(rig, "t1", TAKER)
    assert rig.event(Paused, "t1").lacks == "b0"
    rig.launch("t2", "nodes:start", outputs=["y"])
    rig.event(Finished, "t2")
    partition(rig, "t1", TAKER, epoch=2, inputs={"b0": block})
    assert rig.event(Started, "t1", 2).resumed == "resident"
    assert is_right(rig, epoch=2)
    assert was_told(rig, block, epoch=2)


@pytest.fixture
def unwanted(rigs: Callable[..., DeviceRig]) -> DeviceRig:
    """A device that no other task wants; the answer that says so may take the task's patience."""
    rig = rigs(patience_s=5.0, at_rest_s=600.0)
    rig.wanted = False
    return rig


def test_task_stays_longer_until_another_waits_in_line(unwanted: DeviceRig) -> None:
    partition(unwanted, "t1", TAKER)
    unwanted.until(lambda: asks(unwanted))
    asked_us = unwanted.reports[-1].sent_us
    unwanted.until(lambda: unwanted.reports[-1].sent_us > asked_us + 6_000_000)
    assert not unwanted.all(Paused, "t1")
    unwanted.wanted = True
    assert unwanted.event(Paused, "t1").lacks == "b0"


def test_task_leaves_for_a_task_that_comes_to_its_device(unwanted: DeviceRig) -> None:
    partition(unwanted, "t1", TAKER)
    unwanted.until(lambda: asks(unwanted))
    unwanted.launch("t2", "nodes:start", outputs=["y"])
    assert unwanted.event(Paused, "t1").lacks == "b0"
    unwanted.event(Finished, "t2")


def test_image_of_a_task_says_which_blocks_it_lacks(rig: DeviceRig, block: dict[str, Any]) -> None:
    partition(rig, "t1", TAKER)
    rig.event(Started, "t1")
    images = rig.paused_and_saved("t1", 1)
    rig.drop = [["t1", 1]]
    rig.until(lambda: rig.view("t1") is None)
    partition(rig, "t1", TAKER, epoch=2, images=images, inputs={"b0": block})
    assert rig.event(Started, "t1", 2).resumed == "image"
    assert is_right(rig, epoch=2)


def test_task_can_still_lack_a_block_after_a_pause(rig: DeviceRig, block: dict[str, Any]) -> None:
    partition(rig, "t1", TAKER)
    rig.event(Started, "t1")
    images = rig.paused_and_saved("t1", 1)
    partition(rig, "t1", TAKER, epoch=2, images=images)
    rig.event(Started, "t1", 2)
    give(rig, block, epoch=1)  # of before its pause: stale
    give(rig, block, epoch=2)
    assert is_right(rig, epoch=2)
    assert rig.event(Came, "t1", 2).epoch == 2


def test_task_that_waits_for_a_block_can_be_cancelled(rig: DeviceRig) -> None:
    partition(rig, "t1", TAKER)
    rig.event(Started, "t1")
    rig.cancel("t1")
    rig.event(Stopped, "t1")


def test_block_that_cannot_be_had_is_no_fault_of_the_task(
    rig: DeviceRig, block: dict[str, Any]
) -> None:
    partition(rig, "t1", TAKER)
    give(rig, {**block, "sha256": "0" * 64})
    failed = rig.event(Failed, "t1")
    assert failed.cause == "store"
    assert "b0" in failed.message
    rig.until(lambda: not rig.supervisor.stays.residents)
    assert len(rig.all(Failed, "t1")) == 1
    partition(rig, "t1", TAKER, epoch=2)
    give(rig, block, epoch=2)
    assert is_right(rig, epoch=2)


def test_output_made_before_a_restore_is_given_again(rig: DeviceRig, block: dict[str, Any]) -> None:
    """Whoever made its image may have ended before it was durable."""
    early = {**TAKER, "gives": {**TAKER["gives"], "b1": "drawn.y"}, "after_ms": {"b1": 1.0}}
    partition(rig, "t1", early, outputs=["b1"])
    first = rig.event(Stored, "t1").kept
    images = rig.paused_and_saved("t1", 1)
    rig.drop = [["t1", 1]]
    rig.until(lambda: rig.view("t1") is None)
    partition(rig, "t1", early, epoch=2, images=images, outputs=["b1"])
    assert rig.event(Stored, "t1", 2).kept == first  # though nothing can run before b0 is there
    give(rig, block, epoch=2)
    assert rig.event(Finished, "t1", 2).result == ran(WHOLE)


LARGE = body(
    node("start", "start", params={"seed": 3}),
    node("noisy", "draw", "x=start.y"),
    node("big", "start", params={"seed": 4, "size": 2 << 18}),
    node("read", "lying", "x=big.y gate=noisy.y"),
    big="big.y",
    read="read.y",
)
GIVER = {
    "nodes": ["big", "read"],
    "takes": {"b0": "noisy.y"},
    "gives": {"b1": "big.y", "read": "read.y"},
    "after_ms": {"b1": 1.0},
    "late": ["b0"],
}


def test_output_is_a_file_once_it_is_durable(rig: DeviceRig, block: dict[str, Any]) -> None:
    """Else a partition would take new memory for each block that it gives; images are the same."""
    launched(rig, "t1", LARGE, part=GIVER, outputs=["b1"])
    first = rig.event(Stored, "t1").kept
    images = rig.paused_and_saved("t1", 1)
    launched(rig, "t1", LARGE, 2, part=GIVER, outputs=["b1"], inputs={"b0": block})
    ended = rig.event(Finished, "t1", 2)
    assert ended.result == {"read": [True, 4.0 * (2 << 18)]}
    assert ended.outputs["b1"] == first
    launched(rig, "t1", LARGE, 3, part=GIVER, outputs=["b1"], images=images)
    assert rig.event(Started, "t1", 3).resumed == "image"
    assert rig.event(Stored, "t1", 3).kept == first
    give(rig, block, epoch=3)
    assert rig.event(Finished, "t1", 3).result == ended.result


def test_only_declared_late_inputs_can_be_lacking(rig: DeviceRig) -> None:
    partition(rig, "t1", {**TAKER, "late": []})
    assert "b0" in rig.event(Failed, "t1").message


def test_outputs_are_stored_one_after_the_other_while_a_node_runs(rig: DeviceRig) -> None:
    graph = body(
        node("a", "start"), node("b", "start"), node("nap", "nap", "x=b.y", params={"nap_s": 300.0})
    )
    gives = {"b0": "a.y", "b1": "b.y", "b2": "nap.y"}
    early = {"nodes": ["a", "b", "nap"], "takes": {}, "gives": gives}
    early["after_ms"] = {"b0": 1.0, "b1": 1.0}
    launched(rig, "t1", graph, part=early, outputs=[*gives])
    rig.until(lambda: len(rig.all(Stored, "t1")) == 2)
    assert not rig.all(Finished, "t1")
    rig.let_end("t1")
    rig.event(Finished, "t1")


#: Two partitions that take a block from each other.
RING = body(
    node("a", "start", params={"seed": 3}),
    node("b", "start", params={"seed": 4}),
    node("one", "draw", "x=b.y"),
    node("two", "draw", "x=a.y"),
    node("said", "listed", "x=one.y"),
    node("told", "listed", "x=two.y"),
    said="said.y",
    told="told.y",
)
LEFT = {
    "nodes": ["a", "one", "said"],
    "takes": {"r0": "b.y"},
    "gives": {"l0": "a.y", "said": "said.y"},
    "after_ms": {"l0": 1.0},
    "late": ["r0"],
}
RIGHT = {
    "nodes": ["b", "two", "told"],
    "takes": {"l0": "a.y"},
    "gives": {"r0": "b.y", "told": "told.y"},
    "after_ms": {"r0": 1.0},
    "late": ["l0"],
}


def test_blocks_come_from_the_other_host_while_both_partitions_run(
    rigs: Callable[..., DeviceRig], tmp_path: Path
) -> None:
    """Each host has a store of its own, so that a block can only come from its maker's host."""
    left, right = (rigs(home=tmp_path / name, patience_s=30.0) for name in ("left", "right"))
    launched(left, "left", RING, part=LEFT, outputs=["l0"])
    launched(right, "right", RING, part=RIGHT, outputs=["r0"])
    for maker, made, taker, task in (
        (left, left.event(Stored, "left"), right, "right"),
        (right, right.event(Stored, "right"), left, "left"),
    ):
        taker.event(Started, task)
        report = maker.reports[-1]
        copy = {"place": report.links, "key": block_key(report.secret, made.kept["sha256"])}
        source = {**made.kept, "copies": [copy]}
        taker.supervisor.receive(Given(task=task, epoch=1, port=made.output, source=source))
    results = left.event(Finished, "left").result | right.event(Finished, "right").result
    assert results == ran(RING)
    ways = [rig.event(Came, task).way for rig, task in ((left, "left"), (right, "right"))]
    assert ways == ["host", "host"]


# --- several executors ----------------------------------------------------------------------------

RESTS = 40


def wide(*, nap_s: float) -> Any:
    """A graph that naps before its end, so often and so long, or until it may end."""
    naps = [
        node(f"r{n}", "nap", f"x=r{n - 1}.y" if n else "x=both.y", params={"nap_s": nap_s})
        for n in range(RESTS)
    ]
    return body(
        node("parts", "pieces", writes="parts", params={"count": 7}),
        node("own", "pieces", writes="parts", params={"count": 5}),
        node("drawn", "draw", "x=own.parts", map="x"),
        node("mine", "total", "xs=drawn.y"),
        node("draws", "draw", "x=parts.parts", map="x"),
        node("again", "pairs", "x=draws.y y=parts.parts", map=["x", "y"]),
        node("all", "total", "xs=again.y"),
        node("both", "total", "xs=all.y,mine.y"),
        *naps,
        node("one", "listed", f"x=r{RESTS - 1}.y"),
        node("two", "listed", "x=mine.y"),
        one="one.y",
        two="two.y",
    )


WIDE = wide(nap_s=0.0)
SLOW = wide(nap_s=0.5)  # the same with many seconds before its end
PARTS = {"nodes": ["parts"], "takes": {}, "gives": {"b0": "parts.parts"}, "after_ms": {}}
GANG = {
    "nodes": [node["name"] for node in WIDE["nodes"] if node["name"] != "parts"],
    "takes": {"b0": "parts.parts"},
    "gives": {"b1": "mine.y", "one": "one.y", "two": "two.y"},
    "after_ms": {"b1": 1.0},
    "late": ["b0"],
}


def parts(rig: DeviceRig) -> dict[str, Any]:
    launched(rig, "maker", WIDE, part=PARTS, outputs=["b0"])
    kept: dict[str, Any] = rig.event(Finished, "maker").outputs["b0"]
    return kept


def gang(rig: DeviceRig, epoch: int = 1, *, graph: Any = WIDE, **more: Any) -> None:
    launched(rig, "t1", graph, epoch, part=GANG, world_size=3, outputs=["b1"], **more)


def test_executors_send_and_receive_late_blocks_while_they_run(rig: DeviceRig) -> None:
    late = parts(rig)
    gang(rig)
    made = rig.event(Stored, "t1")  # nothing that reads b0 can have run
    assert made.output == "b1"
    rig.until(lambda: asks(rig))
    give(rig, late)
    ended = rig.event(Finished, "t1")
    assert ended.result == ran(WIDE)
    assert ended.outputs["b1"] == made.kept
    assert [event.port for event in rig.all(Came, "t1")] == ["b0"]


def test_executors_leave_their_slots_when_they_have_waited_too_long(
    rigs: Callable[..., DeviceRig],
) -> None:
    rig = rigs(patience_s=0.2)
    late = parts(rig)
    gang(rig)
    assert rig.event(Paused, "t1").lacks == "b0"
    assert rig.all(Stored, "t1")  # others may wait for it
    rig.launch("t2", "nodes:start", outputs=["y"])
    rig.event(Finished, "t2")
    gang(rig, 2, inputs={"b0": late})
    assert rig.event(Started, "t1", 2).resumed == "resident"
    assert rig.event(Finished, "t1", 2).result == ran(WIDE)


def test_image_of_executors_says_which_blocks_they_lack(rig: DeviceRig) -> None:
    late = parts(rig)
    gang(rig)
    first = rig.event(Stored, "t1").kept
    images = rig.paused_and_saved("t1", 1)
    rig.drop = [["t1", 1]]
    rig.until(lambda: rig.view("t1") is None)
    gang(rig, 2, images=images)
    assert rig.event(Started, "t1", 2).resumed == "image"
    assert rig.event(Stored, "t1", 2).kept == first
    give(rig, late, epoch=2)
    assert rig.event(Finished, "t1", 2).result == ran(WIDE)


def test_image_of_executors_holds_the_blocks_that_came(rig: DeviceRig) -> None:
    late = parts(rig)
    gang(rig, graph=SLOW, inputs={"b0": late})
    rig.event(Started, "t1")
    images = rig.paused_and_saved("t1", 1)
    rig.drop = [["t1", 1]]
    rig.until(lambda: rig.view("t1") is None)
    gang(rig, 2, graph=SLOW, images=images, inputs={"b0": late})
    rig.event(Started, "t1", 2)
    rig.let_end("t1", 2)
    assert rig.event(Finished, "t1", 2).result == ran(WIDE)
