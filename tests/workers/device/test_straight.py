"""Blocks that go straight from who makes them to who lacks them, before they are written down."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.core.model.messages import Came, Finished, Given, Launch, Paused, Started, Stored, Wanted
from app.storage.signing import block_key, input_name
from tests.workers.conftest import Ground
from tests.workers.graph.test_runner import body, launched, node, ran
from workers.device import resident as residents
from workers.device.resident import Stay, Straight
from workers.transfer import peer_auth

#: Two legs that take from each other, when the test has opened the gate.
RING = body(
    node("gate", "start", params={"seed": 9}),
    node("a", "start", params={"seed": 3}),
    node("b", "start", params={"seed": 4}),
    node("left", "pairs", "x=a.y y=gate.y"),
    node("right", "pairs", "x=b.y y=gate.y"),
    node("one", "nap", "x=right.y", params={"nap_s": 0.5}),
    node("two", "draw", "x=left.y"),
    node("said", "listed", "x=one.y"),
    node("told", "listed", "x=two.y"),
    said="said.y",
    told="told.y",
)
GATE = {"nodes": ["gate"], "takes": {}, "gives": {"g0": "gate.y"}, "after_ms": {}}


def part(*nodes: str, takes: str, gives: str, ends: str) -> dict[str, Any]:
    port, made = {"left": "l0", "right": "r0"}, {"g0": "gate.y"}
    return {
        "nodes": list(nodes),
        "takes": {**made, port[takes]: f"{takes}.y"},
        "gives": {port[gives]: f"{gives}.y", ends: f"{ends}.y"},
        "after_ms": {port[gives]: 1.0},
        "late": ["g0", port[takes]],
    }


LEFT = part("a", "left", "one", "said", takes="right", gives="left", ends="said")
RIGHT = part("b", "right", "two", "told", takes="left", gives="right", ends="told")


@pytest.fixture
def pair(grounds: Callable[..., Ground], tmp_path: Path) -> tuple[Ground, Ground]:
    """Two hosts, with a store each: what passes between them does so straight."""
    return (
        grounds(home=tmp_path / "left", patience_s=30.0),
        grounds(home=tmp_path / "right", patience_s=30.0),
    )


def wanted(task: str, output: str, taker: Ground, by: str) -> Wanted:
    report = taker.reports[-1]
    key = block_key(report.secret, input_name(by, 1, output))
    told = {"output": output, "task": by, "epoch": 1, "port": output}
    return Wanted(task=task, epoch=1, takers=[{**told, "place": report.links, "key": key}])


def run_both(pair: tuple[Ground, Ground]) -> None:
    """Until each has what the other made, and nobody was told yet what that is."""
    left, right = pair
    gates = [gate(ground) for ground in pair]
    launched(left, "left", RING, part=LEFT, outputs=["l0"])
    launched(right, "right", RING, part=RIGHT, outputs=["r0"])
    left.supervisor.receive(wanted("left", "l0", right, "right"))
    right.supervisor.receive(wanted("right", "r0", left, "left"))
    left.event(Started, "left")
    right.event(Started, "right")
    give(left, "left", "g0", gates[0])
    give(right, "right", "g0", gates[1])
    left.until(lambda: came(left, "left", "r0"))
    right.until(lambda: came(right, "right", "l0"))


def gate(ground: Ground) -> dict[str, Any]:
    launched(ground, "gate", RING, part=GATE, outputs=["g0"])
    kept: dict[str, Any] = ground.event(Finished, "gate").outputs["g0"]
    return kept


def give(ground: Ground, task: str, port: str, kept: dict[str, Any]) -> None:
    ground.supervisor.receive(Given(task=task, epoch=1, port=port, source=kept))


def came(ground: Ground, task: str, port: str) -> list[Came]:
    return [event for event in ground.all(Came, task) if event.port == port]


def ended(ground: Ground, task: str) -> Any:
    """It has run to its end, and says that it is still here."""
    view = ground.view(task)
    return view is not None and view.state == "ended"


def kept_for_all(pair: tuple[Ground, Ground], sha256: str) -> None:
    """What the right one made, as in a store of both."""
    left, right = pair
    with right.store.open(sha256) as file:
        left.store.put([file.read()])


def kept_of(ground: Ground, task: str) -> dict[str, Any]:
    kept: dict[str, Any] = ground.event(Stored, task).kept
    return kept


def kept_of_right(pair: tuple[Ground, Ground]) -> dict[str, Any]:
    """What it made; if the other's had come before, that rests on it, and its word comes first."""
    left, right = pair
    until_s = time.monotonic() + 20.0
    while not (left.all(Stored, "left") or right.all(Stored, "right")):
        assert time.monotonic() < until_s, "neither counts"
        time.sleep(0.01)
    if left.all(Stored, "left"):
        give(right, "right", "l0", kept_of(left, "left"))
    return kept_of(right, "right")


def test_what_is_made_of_it_counts_when_it_is_written_down(pair: tuple[Ground, Ground]) -> None:
    """What was made before counts at once: else two would wait for each other for ever."""
    left, right = pair
    run_both(pair)
    assert [event.way for event in came(left, "left", "r0")] == ["host"]
    kept = kept_of(left, "left"), kept_of(right, "right")
    for ground, task in zip(pair, ("left", "right"), strict=True):
        ground.until(lambda ground=ground, task=task: ended(ground, task))
        assert not ground.all(Finished, task)
    left.until(lambda: left.view("left").lacks == ["r0"])  # it asks what that is
    give(left, "left", "r0", kept[1])
    give(right, "right", "l0", kept[0])
    results = left.event(Finished, "left").result | right.event(Finished, "right").result
    assert results == ran(RING)
    assert len(came(left, "left", "r0")) == 1


def test_what_turns_out_to_be_other_bits_is_made_again(pair: tuple[Ground, Ground]) -> None:
    left, _ = pair
    run_both(pair)
    kept = kept_of_right(pair)
    give(left, "left", "r0", {**kept, "sha256": "0" * 64})
    left.until(lambda: left.view("left") is None)
    assert not left.all(Finished, "left")
    kept_for_all(pair, kept["sha256"])
    launched(
        left, "left", RING, 2, part=LEFT, outputs=["l0"], inputs={"r0": kept, "g0": gate(left)}
    )
    assert left.event(Finished, "left", 2).result == {"said": ran(RING)["said"]}


def test_what_nobody_writes_down_is_made_again(
    pair: tuple[Ground, Ground], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residents, "UNSURE_US", 300_000)  # else it takes a quarter of a minute
    left, _ = pair
    run_both(pair)
    left.until(lambda: left.view("left") is None)
    assert not left.all(Finished, "left")
    assert left.all(Stored, "left")  # it was made before


def test_a_pause_is_told_when_that_is_known(pair: tuple[Ground, Ground]) -> None:
    """Its image may hold what came straight."""
    left, _ = pair
    run_both(pair)
    left.pause("left")
    left.until(lambda: (view := left.view("left")) and view.state == "paused")
    assert not left.all(Paused, "left")
    give(left, "left", "r0", kept_of_right(pair))
    left.event(Paused, "left")
    launched(left, "left", RING, 2, part=LEFT, outputs=["l0"])
    assert left.event(Started, "left", 2).resumed == "resident"
    assert left.event(Finished, "left", 2).result == {"said": ran(RING)["said"]}


def test_who_does_not_run_takes_it_when_it_is_written_down(
    grounds: Callable[..., Ground], tmp_path: Path
) -> None:
    left = grounds(home=tmp_path / "left", patience_s=0.2)
    right = grounds(home=tmp_path / "right", patience_s=30.0)
    gates = [gate(ground) for ground in (left, right)]
    launched(left, "left", RING, part=LEFT, outputs=["l0"])
    left.event(Started, "left")
    give(left, "left", "g0", gates[0])
    assert left.event(Paused, "left").lacks == "r0"
    launched(right, "right", RING, part=RIGHT, outputs=["r0"])
    right.supervisor.receive(wanted("right", "r0", left, "left"))
    give(right, "right", "g0", gates[1])
    kept = kept_of(right, "right")
    left.until(lambda: kept["sha256"] in left.supervisor.lookout.came)
    inputs = {"r0": kept, "g0": gates[0]}
    launched(left, "left", RING, 2, part=LEFT, outputs=["l0"], inputs=inputs)
    started = left.event(Started, "left", 2)
    assert started.resumed == "resident"
    assert left.event(Finished, "left", 2).result == {"said": ran(RING)["said"]}
    late = {event.port: event.way for event in left.all(Came, "left", 2)}
    assert (started.ways | late)["r0"] == "host"


def test_only_who_was_told_the_key_may_bring_it(pair: tuple[Ground, Ground]) -> None:
    left, _ = pair
    launched(left, "left", RING, part=LEFT, outputs=["l0"])
    left.event(Started, "left")
    name, place = input_name("left", 1, "r0"), left.reports[-1].links
    with pytest.raises(ConnectionRefusedError, match="does not know the secret"):
        peer_auth.at_desk(peer_auth.INPUT, place, "ab" * 32, name)
    assert "r0" in left.supervisor.stays["left", 1].lacks


def test_a_taker_that_is_gone_costs_nothing(pair: tuple[Ground, Ground]) -> None:
    left, right = pair
    gates = gate(left)
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = list(server.getsockname())
    launched(left, "left", RING, part=LEFT, outputs=["l0"])
    told = wanted("left", "l0", right, "right")
    told.takers[0]["place"] = place
    left.supervisor.receive(told)
    left.event(Started, "left")
    give(left, "left", "g0", gates)
    assert left.event(Stored, "left").output == "l0"


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


def test_events_that_rest_on_less_overtake_no_other() -> None:
    launch = Launch(
        **{"task": "t", "epoch": 1, "seq": 1, "tenant": "x", "run": {}, "bundle": ""},
        **{"params": {}, "inputs": {}, "outputs": [], "world_size": 1, "preset": {}, "images": []},
        **{"budget_us": 1, "checkpoint_every_s": 0.0, "memory_bytes": 0},
    )
    stay = Stay.of(launch, 0)
    none = frozenset[str]()

    def told() -> list[tuple[int, str]]:
        return [(event.seq, type(event).__name__) for event in stay.events]

    stay.unsure["x"] = Straight(sha256="0", since_us=0)
    stay.tell(Came, 1, port="x", way="host", size_bytes=1, rests_on=none)
    stay.tell(Stored, 2, output="a", kept={})
    stay.unsure["y"] = Straight(sha256="1", since_us=0)
    stay.tell(Paused, 3)
    stay.tell(Stored, 4, output="b", kept={}, rests_on=none)
    assert told() == [(1, "Came"), (2, "Stored")]
    stay.is_sure("x")
    assert told() == [(1, "Came"), (2, "Stored"), (3, "Stored")]
    assert not stay.is_over()
    stay.is_sure("y")
    assert told()[3:] == [(4, "Paused")]
    stay.unsure["z"] = Straight(sha256="2", since_us=0)
    stay.tell(Finished, 5, result={}, outputs={})
    stay.void()
    stay.tell(Stored, 6, output="c", kept={})  # of a thread that had begun before
    assert told()[4:] == []
    assert stay.is_over() is False
