"""What is sent is what arrives; anything else is refused."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from typing import Any

import pytest

from app.core.model.descriptor import RunSpec, TaskDescriptor
from app.core.model.protocol import messages
from app.core.model.protocol.messages import (
    _KINDS,
    Alive,
    Answer,
    BadMessage,
    CheckpointRef,
    ExpectedTask,
    Launch,
    LogLines,
    Paused,
    Pulse,
    decode,
    encode,
    key,
)

SAMPLES: dict[str, Any] = {
    "str": "x",
    "int": 7,
    "bool": True,
    "float": 1.5,
    "JSON": {"a": [1, None, {"is": "not a message"}]},
    "list[str]": ["x", "y"],
    "list[int]": [2, 1],
    "list[JSON]": [{"sha256": "0", "step": 3}],
    "list[JSON] | None": [{"task": "t", "held_us": 3}],
    "list[Any]": [["t", 1]],
    "list[list[Any]]": [["t", 1]],
    "list[list[str]]": [["stdout", "hello\nagain"]],
    "list[list[int]]": [[5, 10, 3]],
    "dict[str, int]": {"t/1": 4},
}

HASH = "0f" * 32
BLOCK = {"sha256": HASH, "size_bytes": 3}
IMAGE = CheckpointRef(sha256=HASH, step=3, key=HASH)

#: Where a name or a hash has a form of its own.
NAMED: dict[str, Any] = {
    "points": [[3, {"loss": 0.5}]],
    "network": {"connections": 2, "sent_bytes": 10},
    "peaks": {"memory_bytes": 7},
    "ranked": {"step": 7, "value": 0.5},
    "waits_for": "bytes",
    "behind": "Rank 0 waits, and rank 1 runs.",
    "spec": TaskDescriptor(
        name="train",
        type="train",
        run=RunSpec(kind="job", entry="train:Train"),
        params={"lr": 0.5},
        outputs=("x",),
        publish={"x": "weights"},
    ),
    "bundle": HASH,
    "inputs": {"x": {**BLOCK, "copies": [{"place": ["10.0.0.1", 9], "key": HASH}]}},
    "images": [IMAGE],
    "sha256": HASH,
    "kept": BLOCK,
    "source": BLOCK,
    "expect": [
        ExpectedTask(task="t", epoch=1, tenant="ten", bundle="", inputs=[BLOCK], image=None),
        ExpectedTask(
            task="u",
            epoch=2,
            tenant="ten",
            bundle=HASH,
            inputs=[],
            image=IMAGE,
            environment=HASH,
            image_key={"sealed": "c2VhbGVk"},
        ),
    ],
    "image_key": {"sealed": "c2VhbGVk"},
    "ahead": [{"task": "t", "sha256": HASH, "bytes": 1, "us": 2}],
    "peers": [HASH],
    "secret": HASH,
    "facts": {"host": "h", "island": "local", "kind": "cpu", "key": HASH},
    "preset": {"threads": 1, "flush_denormal": False},
    "Finished.outputs": {"x": BLOCK, "artifacts.zip": BLOCK},
    "Failed.outputs": {"artifacts.zip": BLOCK},
    "Stopped.outputs": {"artifacts.zip": BLOCK},
    "Launch.links": {"secret": HASH, "home": ["10.0.0.1", 9]},
    "Resize.links": {"secret": HASH},
    "Alive.links": ["10.0.0.1", 9],
    "Launch.mounts": {"/data": "/srv/imagenet"},
    "Launch.root": "/srv/ubuntu",
    "Answer.mounts": {"imagenet": "/srv/imagenet"},
    "Answer.images": {"ubuntu": "/srv/ubuntu"},
    "environments": [HASH],
    "exit_status": 137,
    "HostPulses.processes": [["h.0", "1"]],
    "HostPulses.pulses": [[7, 2, 1, [[5, 10, 3]]]],
    "matched": {"NCCL.*timeout": "NCCL: a timeout after 600 s"},
}


def sample(kind: type) -> Any:
    """A message of this kind, every field filled."""
    values: dict[str, Any] = {}
    for field in fields(kind):
        named = f"{kind.__name__}.{field.name}"
        inner = str(field.type).removeprefix("list[").removesuffix("]")
        if named in NAMED or field.name in NAMED:
            values[field.name] = NAMED.get(named, NAMED.get(field.name))
        elif inner == "Event":
            values[field.name] = [sample(messages.Paused), sample(messages.Started)]
        elif inner in _KINDS:
            values[field.name] = [sample(_KINDS[inner])]
        else:
            values[field.name] = SAMPLES[str(field.type)]
    return kind(**values)


@pytest.mark.parametrize("kind", _KINDS.values(), ids=_KINDS)
def test_every_message_survives_json(kind: type) -> None:
    message = sample(kind)
    assert decode(json.loads(json.dumps(encode(message)))) == message


def test_every_kind_of_message_can_be_decoded() -> None:
    for base in (messages.Order, messages.Event):
        names = {kind.__name__ for kind in base.__subclasses__()}
        assert names
        assert names <= set(_KINDS)


def test_older_worker_reads_messages_with_default_fields() -> None:
    answer = Answer(
        device="h.0", incarnation="i", sent_us=1, lease_us=2, heard={}, logged={}, keep=[], drop=[]
    )
    assert not encode(answer).keys() & {"expect", "next", "rota", "given", "wanted"}


def test_a_launch_says_where_its_descriptor_is_wrong() -> None:
    body = encode(sample(Launch))
    body["spec"]["run"] = {"job": "../m:J"}
    with pytest.raises(BadMessage, match=r"Launch\.spec/run/job: must be of the form"):
        decode(body)


def test_an_empty_heartbeat_survives_too() -> None:
    alive = Alive(
        device="h.0", incarnation="i", sent_us=1, facts={}, residents=[], events=[], logs=[]
    )
    assert decode(encode(alive)) == alive


FOUND = {"rule": "xid", "verdict": "cordon", "effect": "move", "reason": "Xid 48."}


def alive_with(health: Any) -> Any:
    empty: dict[str, Any] = {"residents": [], "events": [], "logs": [], "facts": {}}
    return {"is": "Alive", "device": "h.0", "incarnation": "i", "sent_us": 1, **empty} | {
        "health": health
    }


@pytest.mark.parametrize(
    "health",
    [{}, {"checked": -1}, {"checked": 3, "reading": {"power_w": 1.5}, "findings": [FOUND] * 32}],
)
def test_what_a_monitor_found_is_read(health: Any) -> None:
    assert decode(alive_with(health)).health == health


@pytest.mark.parametrize(
    "health",
    [
        [],
        {"checked": -2},
        {"checked": True},
        {"reading": {"power_w": "much"}},
        {"reading": {"power_w": float("nan")}},
        {"reading": {"power_w": float("inf")}},
        {"reading": {"power_w": float("-inf")}},
        {"reading": {"a b": 1}},
        {"findings": [FOUND] * 33},
        {"findings": [{**FOUND, "reason": "x" * 501}]},
        {"findings": [{**FOUND, "reason": "x\x00"}]},
        {"findings": [{**FOUND, "rule": "a b"}]},
        {"findings": [{"rule": "xid"}]},
    ],
)
def test_a_health_that_is_not_well_formed_is_refused(health: Any) -> None:
    with pytest.raises(BadMessage, match=r"Alive\.health"):
        decode(alive_with(health))


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({}, "unknown message None"),
        ({"is": "Promote"}, "unknown message 'Promote'"),
        ({"is": "Order", "task": "t", "epoch": 1, "seq": 1}, "unknown message 'Order'"),
        ({"is": "Pause", "task": "t", "epoch": 1}, "seq"),
        ({"is": "Pause", "task": "t", "epoch": 1, "seq": 1, "now": True}, "Pause has no now"),
    ],
)
def test_invalid_message_is_refused(body: dict[str, Any], told: str) -> None:
    with pytest.raises(BadMessage, match=told):
        decode(body)


def test_a_broken_message_inside_another_is_refused() -> None:
    body = encode(sample(Alive))
    body["events"][0]["surprise"] = 1
    with pytest.raises(BadMessage, match="Paused has no surprise"):
        decode(body)


@pytest.mark.parametrize(
    "told", [[], [1, 2], [1, 2, 3, 4], [1, 2, -1], [1, 2, True], [1, 2, 3.0], [1, 2, 2**53], None]
)
def test_progress_is_three_counts(told: Any) -> None:
    body = encode(sample(Pulse))
    with pytest.raises(BadMessage, match=r"Pulse\.progress"):
        decode({**body, "progress": [[1, 2, 3], told]})


def test_every_order_and_event_can_be_fenced() -> None:
    for kind in (*messages.Order.__subclasses__(), *messages.Event.__subclasses__()):
        required = {field.name for field in fields(kind) if field.default is MISSING}
        assert {"task", "epoch", "seq"} <= required


def test_key_names_one_epoch_of_one_task() -> None:
    event = Paused(task="tsk_1", epoch=2, seq=3, step=4, held_us=5)
    assert key(event.task, event.epoch) == "tsk_1/2"


def test_log_line_may_look_like_a_message() -> None:
    logs = LogLines(task="t", epoch=1, first=0, lines=[["stdout", '{"is": "Alive"}']])
    assert decode(encode(logs)) == logs
