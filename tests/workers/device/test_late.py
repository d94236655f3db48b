"""What comes late: a partition of a graph that begins before all that it takes is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.core.model.messages import Came, Failed, Finished, Given, Paused, Started, Stopped, Stored
from app.storage.signing import block_key
from tests.workers.conftest import Ground
from tests.workers.graph.test_runner import body, launched, node, paused_and_saved, ran

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


def partition(ground: Ground, task: str, part: dict[str, Any], **more: Any) -> None:
    launched(ground, task, WHOLE, part=part, **more)


@pytest.fixture
def ground(grounds: Callable[..., Ground]) -> Ground:
    """Whose patience does not end before a slow test has given what it lacks."""
    return grounds(patience_s=30.0)


@pytest.fixture
def block(ground: Ground) -> dict[str, Any]:
    """What `noisy` makes, durable."""
    partition(ground, "maker", MAKER, outputs=["b0"])
    kept: dict[str, Any] = ground.event(Finished, "maker").outputs["b0"]
    return kept


def give(ground: Ground, block: dict[str, Any], *, epoch: int = 1, task: str = "t1") -> None:
    ground.supervisor.receive(Given(task=task, epoch=epoch, port="b0", source=block))


def is_right(ground: Ground, *, epoch: int = 1) -> bool:
    return bool(ground.event(Finished, "t1", epoch).result == ran(WHOLE))


def was_told(ground: Ground, block: dict[str, Any], *, epoch: int = 1) -> bool:
    """How it came: when it started, if it was there by then."""
    started = ground.event(Started, "t1", epoch)
    told = len(ground.all(Came, "t1", epoch)), started.ways, started.input_bytes
    return told in [(0, {"b0": "here"}, block["size_bytes"]), (1, {}, 0)]


def asks(ground: Ground) -> bool:
    return any(view.lacks == ["b0"] for view in ground.reports[-1].residents)


def test_it_goes_on_when_the_block_has_come(ground: Ground, block: dict[str, Any]) -> None:
    partition(ground, "t1", TAKER)
    assert ground.event(Started, "t1").ways == {}
    give(ground, block)
    assert is_right(ground)
    came = ground.event(Came, "t1")
    assert (came.port, came.way, came.size_bytes) == ("b0", "here", block["size_bytes"])


def test_it_may_be_given_before_there_is_a_process(ground: Ground, block: dict[str, Any]) -> None:
    partition(ground, "t1", TAKER)
    for _ in range(3):  # said more than once
        give(ground, block)
    assert is_right(ground)
    assert was_told(ground, block)


def test_what_is_there_at_its_launch_is_an_input_like_others(
    ground: Ground, block: dict[str, Any]
) -> None:
    partition(ground, "t1", TAKER, inputs={"b0": block})
    assert ground.event(Started, "t1").ways == {"b0": "here"}
    assert is_right(ground)
    assert not ground.all(Came, "t1")


def test_it_asks_for_what_it_was_not_told_of(ground: Ground, block: dict[str, Any]) -> None:
    partition(ground, "t1", TAKER)
    ground.until(lambda: asks(ground))
    give(ground, block)
    assert is_right(ground)


def test_it_leaves_its_seat_when_it_has_waited_too_long(grounds: Callable[..., Ground]) -> None:
    ground = grounds(patience_s=0.2)
    partition(ground, "maker", MAKER, outputs=["b0"])
    block = ground.event(Finished, "maker").outputs["b0"]
    partition(ground, "t1", TAKER)
    assert ground.event(Paused, "t1").lacks == "b0"
    ground.launch("t2", "nodes:start", outputs=["y"])
    ground.event(Finished, "t2")
    partition(ground, "t1", TAKER, epoch=2, inputs={"b0": block})
    assert ground.event(Started, "t1", 2).resumed == "resident"
    assert is_right(ground, epoch=2)
    assert was_told(ground, block, epoch=2)


def test_it_stays_for_longer_while_nobody_else_wants_the_device(
    grounds: Callable[..., Ground],
) -> None:
    ground = grounds(patience_s=0.2, at_rest_s=30.0)
    ground.wanted = False
    partition(ground, "maker", MAKER, outputs=["b0"])
    block = ground.event(Finished, "maker").outputs["b0"]
    partition(ground, "t1", TAKER)
    ground.until(lambda: asks(ground))
    asked_us = ground.reports[-1].sent_us
    ground.until(lambda: ground.reports[-1].sent_us > asked_us + 1_000_000)
    assert not ground.all(Paused, "t1")
    give(ground, block)
    assert is_right(ground)


def test_it_leaves_for_who_comes_to_its_device(grounds: Callable[..., Ground]) -> None:
    ground = grounds(patience_s=0.2, at_rest_s=30.0)
    ground.wanted = False
    partition(ground, "t1", TAKER)
    ground.until(lambda: asks(ground))
    ground.launch("t2", "nodes:start", outputs=["y"])
    assert ground.event(Paused, "t1").lacks == "b0"
    ground.event(Finished, "t2")


def test_it_leaves_when_somebody_is_in_line(grounds: Callable[..., Ground]) -> None:
    ground = grounds(patience_s=0.2, at_rest_s=30.0)
    ground.wanted = False
    partition(ground, "t1", TAKER)
    ground.until(lambda: asks(ground))
    asked_us = ground.reports[-1].sent_us
    ground.until(lambda: ground.reports[-1].sent_us > asked_us + 400_000)
    assert not ground.all(Paused, "t1")
    ground.wanted = True
    assert ground.event(Paused, "t1").lacks == "b0"


def test_its_image_says_what_it_lacks(ground: Ground, block: dict[str, Any]) -> None:
    partition(ground, "t1", TAKER)
    ground.event(Started, "t1")
    images = paused_and_saved(ground, "t1", 1)
    ground.drop = [["t1", 1]]
    ground.until(lambda: ground.view("t1") is None)
    partition(ground, "t1", TAKER, epoch=2, images=images, inputs={"b0": block})
    assert ground.event(Started, "t1", 2).resumed == "image"
    assert is_right(ground, epoch=2)


def test_it_can_lack_it_still_after_a_pause(ground: Ground, block: dict[str, Any]) -> None:
    partition(ground, "t1", TAKER)
    ground.event(Started, "t1")
    images = paused_and_saved(ground, "t1", 1)
    partition(ground, "t1", TAKER, epoch=2, images=images)
    ground.event(Started, "t1", 2)
    give(ground, block, epoch=1)  # of before its pause: stale
    give(ground, block, epoch=2)
    assert is_right(ground, epoch=2)
    assert ground.event(Came, "t1", 2).epoch == 2


def test_who_waits_can_be_cancelled(ground: Ground) -> None:
    partition(ground, "t1", TAKER)
    ground.event(Started, "t1")
    ground.cancel("t1")
    ground.event(Stopped, "t1")


def test_what_cannot_be_had_is_no_fault_of_its_own(ground: Ground, block: dict[str, Any]) -> None:
    partition(ground, "t1", TAKER)
    give(ground, {**block, "sha256": "0" * 64})
    failed = ground.event(Failed, "t1")
    assert failed.cause == "store"
    assert "b0" in failed.message
    ground.until(lambda: not ground.supervisor.lives.residents)
    assert len(ground.all(Failed, "t1")) == 1
    partition(ground, "t1", TAKER, epoch=2)
    give(ground, block, epoch=2)
    assert is_right(ground, epoch=2)


def test_what_it_made_is_given_again_after_a_restore(ground: Ground, block: dict[str, Any]) -> None:
    """Whoever made its image may have ended before it was durable."""
    early = {**TAKER, "gives": {**TAKER["gives"], "b1": "drawn.y"}, "after_ms": {"b1": 1.0}}
    partition(ground, "t1", early, outputs=["b1"])
    first = ground.event(Stored, "t1").kept
    images = paused_and_saved(ground, "t1", 1)
    ground.drop = [["t1", 1]]
    ground.until(lambda: ground.view("t1") is None)
    partition(ground, "t1", early, epoch=2, images=images, outputs=["b1"])
    assert ground.event(Stored, "t1", 2).kept == first  # though nothing can run before b0 is there
    give(ground, block, epoch=2)
    assert ground.event(Finished, "t1", 2).result == ran(WHOLE)


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


def test_what_it_gave_lies_in_a_file_when_it_is_durable(
    ground: Ground, block: dict[str, Any]
) -> None:
    """Else a partition would take new memory for each block that it gives; images are the same."""
    launched(ground, "t1", LARGE, part=GIVER, outputs=["b1"])
    first = ground.event(Stored, "t1").kept
    images = paused_and_saved(ground, "t1", 1)
    launched(ground, "t1", LARGE, 2, part=GIVER, outputs=["b1"], inputs={"b0": block})
    ended = ground.event(Finished, "t1", 2)
    assert ended.result == {"read": [True, 4.0 * (2 << 18)]}
    assert ended.outputs["b1"] == first
    launched(ground, "t1", LARGE, 3, part=GIVER, outputs=["b1"], images=images)
    assert ground.event(Started, "t1", 3).resumed == "image"
    assert ground.event(Stored, "t1", 3).kept == first
    give(ground, block, epoch=3)
    assert ground.event(Finished, "t1", 3).result == ended.result


def test_only_what_may_come_late_can_be_lacking(ground: Ground) -> None:
    partition(ground, "t1", {**TAKER, "late": []})
    assert "b0" in ground.event(Failed, "t1").message


def test_outputs_leave_one_behind_the_other_while_a_node_runs(ground: Ground) -> None:
    graph = body(
        node("a", "start"), node("b", "start"), node("nap", "nap", "x=b.y", params={"nap_s": 30.0})
    )
    gives = {"b0": "a.y", "b1": "b.y", "b2": "nap.y"}
    early = {"nodes": ["a", "b", "nap"], "takes": {}, "gives": gives}
    early["after_ms"] = {"b0": 1.0, "b1": 1.0}
    launched(ground, "t1", graph, part=early, outputs=[*gives])
    ground.until(lambda: len(ground.all(Stored, "t1")) == 2)
    assert not ground.all(Finished, "t1")


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


def test_durable_blocks_come_from_the_other_host_while_both_partitions_run(
    grounds: Callable[..., Ground], tmp_path: Path
) -> None:
    """Each host has a store of its own, so that a block can only come from its maker's host."""
    left, right = (grounds(home=tmp_path / name, patience_s=30.0) for name in ("left", "right"))
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
    ways = [ground.event(Came, task).way for ground, task in ((left, "left"), (right, "right"))]
    assert ways == ["host", "host"]


# --- several executors ----------------------------------------------------------------------------

WIDE = body(
    node("parts", "pieces", writes="parts", params={"count": 7}),
    node("own", "pieces", writes="parts", params={"count": 5}),
    node("drawn", "draw", "x=own.parts", map="x"),
    node("mine", "total", "xs=drawn.y"),
    node("draws", "draw", "x=parts.parts", map="x"),
    node("again", "pairs", "x=draws.y y=parts.parts", map=["x", "y"]),
    node("all", "total", "xs=again.y"),
    node("both", "total", "xs=all.y,mine.y"),
    node("rest", "nap", "x=both.y", params={"nap_s": 0.6}),  # so that a pause comes before the end
    node("one", "listed", "x=rest.y"),
    node("two", "listed", "x=mine.y"),
    one="one.y",
    two="two.y",
)
PARTS = {"nodes": ["parts"], "takes": {}, "gives": {"b0": "parts.parts"}, "after_ms": {}}
GANG = {
    "nodes": [node["name"] for node in WIDE["nodes"] if node["name"] != "parts"],
    "takes": {"b0": "parts.parts"},
    "gives": {"b1": "mine.y", "one": "one.y", "two": "two.y"},
    "after_ms": {"b1": 1.0},
    "late": ["b0"],
}


def parts(ground: Ground) -> dict[str, Any]:
    launched(ground, "maker", WIDE, part=PARTS, outputs=["b0"])
    kept: dict[str, Any] = ground.event(Finished, "maker").outputs["b0"]
    return kept


def gang(ground: Ground, epoch: int = 1, **more: Any) -> None:
    launched(ground, "t1", WIDE, epoch, part=GANG, world_size=3, outputs=["b1"], **more)


def test_executors_give_and_take_while_they_run(ground: Ground) -> None:
    late = parts(ground)
    gang(ground)
    made = ground.event(Stored, "t1")  # nothing that reads b0 can have run
    assert made.output == "b1"
    ground.until(lambda: asks(ground))
    give(ground, late)
    ended = ground.event(Finished, "t1")
    assert ended.result == ran(WIDE)
    assert ended.outputs["b1"] == made.kept
    assert [event.port for event in ground.all(Came, "t1")] == ["b0"]


def test_executors_leave_their_seats_when_they_have_waited_too_long(
    grounds: Callable[..., Ground],
) -> None:
    ground = grounds(patience_s=0.2)
    late = parts(ground)
    gang(ground)
    assert ground.event(Paused, "t1").lacks == "b0"
    assert ground.all(Stored, "t1")  # others may wait for it
    ground.launch("t2", "nodes:start", outputs=["y"])
    ground.event(Finished, "t2")
    gang(ground, 2, inputs={"b0": late})
    assert ground.event(Started, "t1", 2).resumed == "resident"
    assert ground.event(Finished, "t1", 2).result == ran(WIDE)


def test_an_image_of_executors_says_what_they_lack(ground: Ground) -> None:
    late = parts(ground)
    gang(ground)
    first = ground.event(Stored, "t1").kept
    images = paused_and_saved(ground, "t1", 1)
    ground.drop = [["t1", 1]]
    ground.until(lambda: ground.view("t1") is None)
    gang(ground, 2, images=images)
    assert ground.event(Started, "t1", 2).resumed == "image"
    assert ground.event(Stored, "t1", 2).kept == first
    give(ground, late, epoch=2)
    assert ground.event(Finished, "t1", 2).result == ran(WIDE)


def test_an_image_of_executors_holds_what_came(ground: Ground) -> None:
    late = parts(ground)
    gang(ground, inputs={"b0": late})
    ground.event(Started, "t1")
    images = paused_and_saved(ground, "t1", 1)
    ground.drop = [["t1", 1]]
    ground.until(lambda: ground.view("t1") is None)
    gang(ground, 2, images=images, inputs={"b0": late})
    assert ground.event(Finished, "t1", 2).result == ran(WIDE)
