"""A descriptor is read in full, or all its faults are told at once, each with its place."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.model import fields as field_reader
from app.core.model.codec import BadValue
from app.core.model.descriptor import (
    BadDescriptor,
    Devices,
    Notify,
    RunSpec,
    Source,
    as_json,
    from_json,
    parse,
    to_wire,
)
from app.core.model.device_choice import CAPABILITY, MODEL
from app.core.model.fields import MAX_FAULTS, Fault
from app.core.model.provisions.retry import RetryPolicy, RetryRule
from tests.thoroughness import examples

JSON = dict[str, Any]

BUNDLE = "sha256:" + "0a" * 32


@pytest.mark.parametrize(
    "argv",
    [
        ["torchrun", "--nproc-per-node", "2", "ddp.py"],
        ["/usr/bin/torchrun", "ddp.py"],
        ["python", "-m", "torch.distributed.run", "ddp.py"],
    ],
)
def test_launcher_of_ranks_is_refused_for_a_task_that_starts_ranks(argv: list[str]) -> None:
    task = {"name": "ddp", "run": {"command": argv}, "world_size": 2}
    with pytest.raises(BadDescriptor) as refused:
        parse({"bundle": BUNDLE, "tasks": [task]})
    [fault] = refused.value.faults
    assert fault.pointer == "/tasks/0/run/command"
    assert "Name the script itself, as in [python, train.py]" in fault.detail
    parse({"bundle": BUNDLE, "tasks": [{**task, "world_size": 1}]})
    script = {**task, "run": {"command": ["python", "-m", "train"]}}
    parse({"bundle": BUNDLE, "tasks": [script]})


def test_launcher_of_several_ranks_is_refused_on_one_accelerator_with_the_number() -> None:
    run = {"command": ["bash", "-c", "torchrun --nproc-per-node 4 ddp.py --lr 1"]}
    task = {"name": "ddp", "run": run, "devices": {"kind": "cuda"}}
    with pytest.raises(BadDescriptor) as refused:
        parse({"bundle": BUNDLE, "tasks": [task]})
    [fault] = refused.value.faults
    assert (fault.pointer, fault.code) == ("/tasks/0/run/command", "launcher")
    assert "--ranks 4 -- python ddp.py --lr 1" in fault.detail
    assert "Set devices.min to 4" in fault.detail
    for devices in ({"kind": "cpu"}, {"kind": "cuda", "min": 4}, {"kind": "cuda", "min": 8}):
        [it] = parse({"bundle": BUNDLE, "tasks": [{**task, "devices": devices}]}).tasks
        assert (it.devices.min, it.devices.max) == (devices.get("min", 1),) * 2


def test_only_a_command_of_one_rank_may_have_more_devices_than_ranks() -> None:
    devices = {"min": 2}
    [it] = parse(one(run={"command": ["x"]}, devices=devices)).tasks
    assert (it.world_size, it.devices.min, it.devices.max) == (1, 2, 2)
    for task in (
        {"run": {"job": "train:Train"}},
        {"run": {"function": "m:f"}},
        {"run": {"command": ["x"]}, "world_size": 2, "devices": {"min": 3}},
    ):
        assert "as world_size is" in faults(one(**{"devices": devices, **task}))[0].detail
    part = {"min": 2, "fraction": 0.5}
    [fault] = faults(one(run={"command": ["x"]}, devices=part))
    assert (fault.pointer, fault.detail) == (
        "/tasks/0/devices/fraction", "a fraction is of one device; min is 2",
    )  # fmt: skip


#: A descriptor that uses most fields.
SWEEP: dict[str, Any] = {
    "name": "sweep-7",
    "tier": "standard",
    "priority": 0,
    "tasks": [
        {
            "name": "prep",
            "type": "preprocess",
            "run": {"function": "ops:tokenize"},
            "inputs": {"raw": "datablock:corpus-v3"},
            "outputs": ["tokens"],
        },
        {
            "name": "train",
            "type": "train",
            "run": {"job": "train:Train"},
            "params": {"lr": 0.001},
            "inputs": {"tokens": "prep.tokens"},
            "start": {"after": [], "not_before": None, "hold": False},
            "world_size": 4,
            "devices": {"kind": "cuda", "min": 1, "max": 4, "memory_bytes": 8e9},
            "checkpoint": {"every_s": 600, "keep": 3},
            "retry": {"max": 2},
            "max_duration_s": 14400,
        },
    ],
    "bundle": BUNDLE,
    "labels": {"exp": "a1"},
    "notify": {"webhook": "https://example.org/hook", "on": ["done", "failed"]},
}


def one(**fields: Any) -> dict[str, Any]:
    """A request with one task that has these fields."""
    task = {"name": "t", "run": {"job": "m:J"}, **fields}
    return {"tasks": [task], "bundle": BUNDLE}


def faults(body: object) -> tuple[Fault, ...]:
    with pytest.raises(BadDescriptor) as caught:
        parse(body)
    return caught.value.faults


def told(body: object) -> dict[str, str]:
    """pointer -> code of each fault"""
    return {fault.pointer: fault.code for fault in faults(body)}


# --- what is read -------------------------------------------------------------------------------


def test_example_descriptor_is_read() -> None:
    sweep = parse(SWEEP)
    prep, train = sweep.tasks
    assert (sweep.name, sweep.tier, sweep.priority, sweep.bundle) == (
        "sweep-7",
        "standard",
        0,
        BUNDLE,
    )
    assert prep.run == RunSpec(kind="function", entry="ops:tokenize")
    assert prep.inputs == {"raw": Source(kind="datablock", name="corpus-v3")}
    assert train.inputs == {"tokens": Source(kind="task", name="prep", output="tokens")}
    assert train.devices == Devices(kind="cuda", min=1, max=4, memory_bytes=8_000_000_000)
    assert (train.checkpoint.every_s, train.retry.max, train.max_duration_s) == (600, 2, 14400)
    assert sweep.labels == {"exp": "a1"}
    assert sweep.notify == Notify(webhook="https://example.org/hook", on=("done", "failed"))


def test_input_may_name_a_version_and_output_may_be_published() -> None:
    inputs = {"new": "datablock:corpus", "old": "datablock:corpus@3"}
    task = parse(one(inputs=inputs, outputs=["x"], publish={"x": "tokens"})).tasks[0]
    assert task.inputs["new"] == Source(kind="datablock", name="corpus")
    assert task.inputs["old"] == Source(kind="datablock", name="corpus", version=3)
    assert [source.block for source in task.inputs.values()] == ["corpus", "corpus@3"]
    assert task.publish == {"x": "tokens"}


def test_every_field_but_the_task_is_optional() -> None:
    descriptor = parse(one())
    task = descriptor.tasks[0]
    assert (descriptor.name, descriptor.tier, descriptor.priority) == (None, "standard", 0)
    assert (task.type, task.world_size, task.devices) == ("default", 1, Devices())
    assert (task.checkpoint.every_s, task.checkpoint.keep) == (60, 3)
    assert (task.retry.max, task.max_duration_s) == (0, 86400)


def test_only_ranks_with_steps_may_have_a_device_each() -> None:
    def most(run: dict[str, Any]) -> int:
        return parse(one(run=run, world_size=4)).tasks[0].devices.max

    runs = ({"job": "m:C"}, {"function": "m:f"}, {"command": ["x"]})
    assert [most(run) for run in runs] == [4, 1, 1]


def test_graph_may_have_as_many_devices_as_it_says_it_needs() -> None:
    graph = {"graph": "sha256:" + "0" * 64}
    task = parse(one(run=graph, devices={"min": 2})).tasks[0]
    assert (task.world_size, task.devices) == (2, Devices(min=2, max=2))
    with pytest.raises(BadDescriptor):
        parse(one(run=graph, devices={"min": 2, "max": 1}))


def test_null_means_that_a_field_is_absent() -> None:
    body = one(start=None, devices=None, params=None, outputs=None)
    assert parse({**body, "name": None, "labels": None, "notify": None}) == parse(one())


def test_a_command_needs_no_bundle() -> None:
    body = {"tasks": [{"name": "t", "run": {"command": ["python", "train.py", "--x", "--x"]}}]}
    assert parse(body).tasks[0].run == RunSpec(
        kind="command", argv=("python", "train.py", "--x", "--x")
    )


@pytest.mark.parametrize(
    "task",
    [
        {"run": {"command": ["x"] * 1000}},
        {"run": {"command": ["é" * 32768]}},
        {"run": {"command": ["x"]}, "params": {"p": "x" * (65536 - len('{"p": ""}'))}},
    ],
    ids=["words", "bytes", "params"],
)
def test_command_of_the_largest_size_is_taken(task: dict[str, Any]) -> None:
    assert parse({"tasks": [{"name": "t", **task}]}).tasks


@pytest.mark.parametrize(
    ("task", "pointer", "told"),
    [
        ({"run": {"command": ["", "x"]}}, "run/command/0", "the program to run"),
        ({"run": {"command": ["x"] * 1001}}, "run/command", "1001 words of 1001 bytes"),
        ({"run": {"command": ["é" * 32769]}}, "run/command", "1 words of 65538 bytes"),
        # exec takes 128 KiB in one variable of the environment
        ({"run": {"command": ["x"]}, "params": {"p": "x" * 65536}}, "params", "65545 bytes"),
    ],
)
def test_command_that_no_system_can_start_is_refused(
    task: dict[str, Any], pointer: str, told: str
) -> None:
    with pytest.raises(BadDescriptor) as found:
        parse({"tasks": [{"name": "t", **task}]})
    (fault,) = found.value.faults
    assert fault.pointer == f"/tasks/0/{pointer}"
    assert told in fault.detail


def test_task_name_with_dots_is_told_apart_from_its_output() -> None:
    inputs = parse(one(inputs={"x": "a.b.c"})).tasks[0].inputs
    assert inputs == {"x": Source(kind="task", name="a.b", output="c")}


@pytest.mark.parametrize(
    ("written", "at_s"),
    [
        ("1970-01-02T00:00:00+00:00", 86400.0),
        ("1970-01-02T00:00:00Z", 86400.0),
        ("1970-01-02T01:00:00.5+01:00", 86400.5),
    ],
)
def test_time_is_read_with_its_offset_from_utc(written: str, at_s: float) -> None:
    assert parse(one(start={"not_before": written})).tasks[0].start.not_before_s == at_s


# --- there and back -----------------------------------------------------------------------------

names = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,20}", fullmatch=True)
words = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)
runs = st.one_of(
    st.builds(lambda m, n: {"job": f"{m}:{n}"}, words, words),
    st.builds(lambda m, n: {"function": f"{m}:{n}"}, words, words),
    st.builds(lambda argv: {"command": argv}, st.lists(words, min_size=1, max_size=3)),
)
instants = st.datetimes(datetime(1971, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC))
offsets = st.integers(-23 * 60, 23 * 60).map(lambda n: timezone(timedelta(minutes=n)))
tasks = st.fixed_dictionaries(
    {"name": names, "run": runs},
    optional={
        "type": names,
        "params": st.dictionaries(words, plain, max_size=3),
        "inputs": st.dictionaries(
            words,
            st.builds(lambda n, o: f"{n}.{o}", names, words)
            | names.map("datablock:".__add__)
            | st.builds(lambda n, v: f"datablock:{n}@{v}", names, st.integers(1, 10**9 - 1)),
        ),
        "outputs": st.lists(words, unique=True, max_size=3),
        "start": st.fixed_dictionaries(
            {},
            optional={
                "after": st.lists(names, unique=True, max_size=3),
                "not_before": st.builds(
                    lambda at, minutes: at.astimezone(minutes).isoformat(), instants, offsets
                ),
                "hold": st.booleans(),
            },
        ),
        "devices": st.fixed_dictionaries(
            {},
            optional={
                "kind": names,
                "memory_bytes": st.integers(0, 2**50),
                "model": st.from_regex(MODEL, fullmatch=True),
                "compute_capability": st.from_regex(CAPABILITY, fullmatch=True),
                "labels": st.lists(names, unique=True, max_size=16),
                "avoid_labels": st.lists(names, unique=True, max_size=16),
            },
        ),
        "checkpoint": st.fixed_dictionaries({}, optional={"every_s": st.floats(0.01, 1e6)}),
        "max_duration_s": st.floats(0.01, 1e6),
    },
)


@settings(max_examples=examples(150))
@given(task=tasks, published=st.booleans())
def test_descriptor_written_in_full_reads_back_the_same(
    task: dict[str, Any], published: bool
) -> None:
    if published:
        outputs = enumerate(task.get("outputs", []))
        task = {**task, "publish": {port: f"block-{n}" for n, port in outputs}}
    read = parse({"tasks": [task], "bundle": BUNDLE}).tasks[0]
    written = json.loads(json.dumps(as_json(read)))
    assert parse({"tasks": [written], "bundle": BUNDLE}).tasks[0] == read
    assert as_json(parse({"tasks": [written], "bundle": BUNDLE}).tasks[0]) == written
    assert from_json(written) == from_json(json.loads(json.dumps(to_wire(read)))) == read


def test_what_was_computed_of_a_run_travels_with_it() -> None:
    (task,) = parse({"tasks": [{"name": "t", "run": {"job": "m:J"}}], "bundle": BUNDLE}).tasks
    run = RunSpec(
        kind="graph",
        graph="sha256:" + "0" * 64,
        part={"nodes": ["a"], "late": ["b0"]},
        took_ms={"a": 1.5},
        made_bytes={"a.y": 8},
    )
    planned = replace(task, run=run)
    assert from_json(to_wire(planned)) == from_json(as_json(planned)) == planned


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"surprise": 1}, "/surprise: unknown field 'surprise'"),
        ({"run": {"graph": {"nodes": []}}}, '/run/graph: must be "sha256:'),
        ({"run": {"graph": "../../../store"}}, '/run/graph: must be "sha256:'),
        ({"run": {"job": None}}, "/run: must have exactly one of"),
        ({"run": {"job": "m:J", "part": []}}, "/run/part: must be an object"),
        ({"outputs": ["../x"]}, "/outputs/0: must be"),
        ({"name": None}, "/name: name is required"),
    ],
)
def test_what_is_no_stored_task_is_refused_with_its_place(
    change: dict[str, Any], told: str
) -> None:
    with pytest.raises(BadValue) as error:
        from_json({"name": "t", "run": {"job": "m:J"}, **change})
    assert str(error.value).startswith(told)


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "pointer", "code"),
    [
        ({"name": "A"}, "/name", "invalid"),
        ({"name": "-a"}, "/name", "invalid"),
        ({"name": "a" * 64}, "/name", "invalid"),
        ({"name": 7}, "/name", "type"),
        ({"name": None}, "/name", "missing"),
        ({"run": None}, "/run", "missing"),
        ({"run": "m:J"}, "/run", "type"),
        ({"run": {}}, "/run", "invalid"),
        ({"run": {"job": "m:J", "function": "m:f"}}, "/run", "invalid"),
        ({"run": {"job": "train.py"}}, "/run/job", "invalid"),
        ({"run": {"job": "../m:J"}}, "/run/job", "invalid"),
        ({"run": {"command": []}}, "/run/command", "missing"),
        ({"run": {"command": "python x"}}, "/run/command", "type"),
        ({"run": {"job": "m:J", "jobb": 1}}, "/run/jobb", "unknown-field"),
        ({"params": [1]}, "/params", "type"),
        ({"params": {"a-b": 1}}, "/params/a-b", "invalid"),
        ({"params": {"x": "y" * 300_000}}, "/params", "range"),
        ({"inputs": {"x": "prep"}}, "/inputs/x", "invalid"),
        ({"inputs": {"x": "datablock:"}}, "/inputs/x", "invalid"),
        ({"inputs": {"x": "datablock:c@"}}, "/inputs/x", "invalid"),
        ({"inputs": {"x": "datablock:c@0"}}, "/inputs/x", "invalid"),
        ({"inputs": {"x": "datablock:c@-1"}}, "/inputs/x", "invalid"),
        ({"inputs": {"x": "datablock:c@1234567890"}}, "/inputs/x", "invalid"),
        ({"inputs": {"x": 1}}, "/inputs/x", "invalid"),
        ({"inputs": {"a/b": "p.q"}}, "/inputs/a~1b", "invalid"),
        ({"outputs": ["x", "x"]}, "/outputs/1", "twice"),
        ({"outputs": ["x.y"]}, "/outputs/0", "invalid"),
        ({"outputs": "x"}, "/outputs", "type"),
        ({"publish": {"x": "c"}}, "/publish/x", "unknown-output"),
        ({"outputs": ["x"], "publish": {"y": "c"}}, "/publish/y", "unknown-output"),
        ({"outputs": ["x"], "publish": {"x": "C"}}, "/publish/x", "invalid"),
        ({"outputs": ["x"], "publish": {"x": "c@2"}}, "/publish/x", "invalid"),
        ({"outputs": ["x"], "publish": {"x": 1}}, "/publish/x", "invalid"),
        ({"outputs": ["x", "y"], "publish": {"x": "c", "y": "c"}}, "/publish/y", "twice"),
        ({"outputs": ["x"], "publish": ["x"]}, "/publish", "type"),
        ({"start": {"after": [1]}}, "/start/after/0", "type"),
        ({"start": {"not_before": "2026-01-01"}}, "/start/not_before", "invalid"),
        ({"start": {"not_before": "2026-01-01T00:00:00"}}, "/start/not_before", "invalid"),
        ({"start": {"not_before": "soon"}}, "/start/not_before", "invalid"),
        ({"start": {"hold": "yes"}}, "/start/hold", "type"),
        ({"start": {"when": 1}}, "/start/when", "unknown-field"),
        ({"world_size": 0}, "/world_size", "range"),
        ({"world_size": 1.5}, "/world_size", "type"),
        ({"world_size": True}, "/world_size", "type"),
        ({"devices": {"memory_bytes": -1}}, "/devices/memory_bytes", "range"),
        ({"devices": {"memory_bytes": "8e9"}}, "/devices/memory_bytes", "type"),
        ({"devices": {"memory_bytes": 0.5}}, "/devices/memory_bytes", "type"),
        ({"devices": {"model": "a,b"}}, "/devices/model", "invalid"),
        ({"devices": {"model": 100}}, "/devices/model", "type"),
        ({"devices": {"compute_capability": "9"}}, "/devices/compute_capability", "invalid"),
        ({"devices": {"compute_capability": 9.0}}, "/devices/compute_capability", "type"),
        ({"devices": {"labels": ["a b"]}}, "/devices/labels/0", "invalid"),
        ({"devices": {"avoid_labels": "spot"}}, "/devices/avoid_labels", "type"),
        ({"devices": {"avoid_labels": ["a,b"]}}, "/devices/avoid_labels/0", "invalid"),
        ({"devices": {"avoid_labels": ["a", "a"]}}, "/devices/avoid_labels/1", "twice"),
        (
            {"devices": {"avoid_labels": [f"l{n}" for n in range(17)]}},
            "/devices/avoid_labels",
            "range",
        ),
        ({"devices": {"max": 2}}, "/devices/max", "range"),  # more devices than ranks
        ({"world_size": 4, "devices": {"min": 3, "max": 2}}, "/devices/min", "range"),
        ({"checkpoint": {"every_s": 0}}, "/checkpoint/every_s", "range"),
        ({"checkpoint": {"keep": 0}}, "/checkpoint/keep", "range"),
        ({"retry": {"max": -1}}, "/retry/max", "range"),
        ({"retry": 3}, "/retry", "type"),
        ({"retry": "often"}, "/retry", "type"),
        ({"retry": {"backoff": {"first_s": 0}}}, "/retry/backoff/first_s", "range"),
        ({"retry": {"backoff": {"first_s": 9, "most_s": 8}}}, "/retry/backoff/most_s", "range"),
        ({"retry": {"rules": {}}}, "/retry/rules", "type"),
        *[
            ({"retry": {"max": 1, "rules": [rule]}}, f"/retry/rules/0/{field}", code)
            for rule, field, code in (
                ({"exit": [1]}, "do", "missing"),
                ({"do": "stop"}, "do", "invalid"),
                ({"do": "fail", "exits": [1]}, "exits", "unknown-field"),
                ({"do": "fail", "exit": [0]}, "exit/0", "range"),
                ({"do": "fail", "exit": [1, 256]}, "exit/1", "range"),
                ({"do": "fail", "exit": [None]}, "exit/0", "missing"),
                ({"do": "fail", "exit": 1}, "exit", "type"),
                ({"do": "fail", "exit": [*range(1, 34)]}, "exit", "range"),
                ({"do": "fail", "cause": "oom"}, "cause", "invalid"),
                ({"do": "fail", "cause": "store"}, "cause", "invalid"),
                ({"do": "fail", "log": "x" * 201}, "log", "invalid"),
                ({"do": "retry", "grow": {"cpus": 2}}, "grow/cpus", "unknown-field"),
                ({"do": "retry", "grow": {"max_duration_s": 1}}, "grow/max_duration_s", "range"),
                ({"do": "fail", "grow": {"max_duration_s": 2}}, "grow", "invalid"),
                (
                    {"do": "retry", "grow": {"resources.memory_bytes": 2}},
                    "grow/resources.memory_bytes",
                    "invalid",
                ),
            )
        ],
        (
            {"retry": {"rules": [{"do": "hold", "log": c} for c in "abcde"]}},
            "/retry/rules",
            "range",
        ),
        ({"retry": {"rules": [{"do": "fail", "cause": "exit"}] * 17}}, "/retry/rules", "range"),
        ({"retry": {"rules": [{"do": "retry"}]}}, "/retry/max", "range"),
        ({"retry": {"rules": [{"do": "fail"}, {"do": "hold"}]}}, "/retry/rules/0", "invalid"),
        ({"max_duration_s": 0}, "/max_duration_s", "range"),
        ({"max_duration_s": 10**400}, "/max_duration_s", "range"),
        ({"command": ["x"]}, "/command", "unknown-field"),
        ({"a/b~c": 1}, "/a~1b~0c", "unknown-field"),
    ],
)
def test_wrong_field_of_a_task_is_reported_with_its_pointer(
    fields: dict[str, Any], pointer: str, code: str
) -> None:
    assert told(one(**fields)) == {f"/tasks/0{pointer}": code}


@pytest.mark.parametrize(
    ("fields", "pointer", "code"),
    [
        ({"tier": "gold"}, "/tier", "invalid"),
        ({"priority": 101}, "/priority", "range"),
        ({"priority": "high"}, "/priority", "type"),
        ({"bundle": None}, "/bundle", "missing"),
        ({"bundle": "sha256:xyz"}, "/bundle", "invalid"),
        ({"labels": {"a": 1}}, "/labels/a", "type"),
        ({"labels": {"a b": "1"}}, "/labels/a b", "invalid"),
        ({"labels": {f"l{n}": "" for n in range(65)}}, "/labels", "range"),
        ({"notify": {}}, "/notify/webhook", "missing"),
        ({"notify": {"webhook": "ftp://x"}}, "/notify/webhook", "invalid"),
        ({"notify": {"webhook": "http://x", "on": ["started"]}}, "/notify/on/0", "invalid"),
        ({"tasks": []}, "/tasks", "range"),
        ({"tasks": None}, "/tasks", "missing"),
        ({"tasks": {}}, "/tasks", "type"),
        ({"tasks": ["t"]}, "/tasks/0", "type"),
        ({"tenant": "me"}, "/tenant", "unknown-field"),
    ],
)
def test_wrong_field_of_a_request_is_reported_with_its_pointer(
    fields: dict[str, Any], pointer: str, code: str
) -> None:
    assert told({**one(), **fields}) == {pointer: code}


@pytest.mark.parametrize("body", [None, [], "x", 7, True])
def test_descriptor_that_is_no_object_is_refused(body: object) -> None:
    assert told(body) == {"": "type"}


def test_all_faults_are_reported_at_once() -> None:
    body = copy.deepcopy(SWEEP)
    body["priority"] = 200
    body["tasks"][0]["name"] = "Prep"
    body["tasks"][1]["devices"]["memory_bytes"] = "lots"
    body["taks"] = 1
    assert told(body) == {
        "/priority": "range",
        "/tasks/0/name": "invalid",
        "/tasks/1/devices/memory_bytes": "type",
        "/taks": "unknown-field",
    }


def test_unknown_field_gets_a_suggestion() -> None:
    (fault,) = faults(one(worldsize=2))
    assert fault.detail == "unknown field 'worldsize'; did you mean 'world_size'?"


def test_misspelt_command_gets_a_suggestion() -> None:
    found = {fault.pointer: fault.detail for fault in faults(one(run={"comand": ["ls"]}))}
    assert found["/tasks/0/run/comand"] == "unknown field 'comand'; did you mean 'command'?"


@pytest.mark.parametrize(
    ("where", "field", "place"),
    [
        ("run", "params", "a task, beside name and run"),
        ("task", "priority", "the request, beside tasks"),
        ("request", "max_duration_s", "a task, beside name and run"),
        ("devices", "world_size", "a task, beside name and run"),
    ],
)
def test_field_at_a_wrong_place_is_told_its_place(where: str, field: str, place: str) -> None:
    body = one(devices={})
    task = body["tasks"][0]
    {"request": body, "task": task, "run": task["run"], "devices": task["devices"]}[where][
        field
    ] = 1
    (fault,) = faults(body)
    assert fault.detail == f"unknown field {field!r}; it belongs to {place}"


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"devices": 2}, 'must be an object, not a number; for example {"max": 2}'),
        ({"retry": 3}, 'must be an object, not a number; for example {"max": 3}, or "never"'),
        (
            {"run": {"command": "python train.py"}},
            'must be a list, not a text; for example ["python", "train.py"]',
        ),
        ({"devices": {"min": 5}}, "must be from 1 to 1, as world_size is 1; got 5"),
    ],
)
def test_fault_shows_the_right_form_or_why_a_bound_holds(fields: JSON, detail: str) -> None:
    (fault,) = faults(one(**fields))
    assert fault.detail == detail


def test_fields_of_requests_and_tasks_are_known_by_their_place() -> None:
    request = parse(one())
    assert {part.name for part in dataclasses.fields(request)} - {"name"} == field_reader.OF_REQUEST
    computed = {"name", "type", "environment"}
    assert as_json(request.tasks[0]).keys() - computed == field_reader.OF_TASK


def test_duplicate_name_is_reported_at_its_second_place() -> None:
    body = one()
    body["tasks"] *= 2
    (fault,) = faults(body)
    assert (fault.pointer, fault.code) == ("/tasks/1/name", "twice")


def test_more_than_a_thousand_tasks_are_refused() -> None:
    body = one()
    body["tasks"] = [{"name": f"t{n}", "run": {"job": "m:J"}} for n in range(1001)]
    assert told(body) == {"/tasks": "range"}
    assert len(parse({**body, "tasks": body["tasks"][:1000]}).tasks) == 1000


@pytest.mark.parametrize("value", [math.nan, math.inf, "a\x00b", "\ud800"])
def test_text_that_postgres_cannot_store_is_refused(value: object) -> None:
    assert told(one(params={"x": [value]})) == {"/tasks/0/params/x/0": "invalid"}


def test_a_key_that_postgres_cannot_hold_is_refused() -> None:
    assert told(one(params={"x\x00": 1})) == {"/tasks/0/params/x\x00": "invalid"}


def test_deep_nesting_is_refused_without_recursion() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    (fault,) = faults(one(params={"x": deep}))
    assert fault.code == "range"
    assert fault.pointer.startswith("/tasks/0/params/x/0/0")


def test_many_faults_are_counted_and_not_all_listed() -> None:
    found = faults({"tasks": [{"name": f"t{n}"} for n in range(MAX_FAULTS + 50)]})
    assert len(found) == MAX_FAULTS + 1
    assert found[-1].detail == "50 more faults are not listed"


@settings(max_examples=examples(200))
@given(body=plain | st.builds(lambda task: {"tasks": [task]}, plain))
def test_any_json_is_read_or_refused(body: object) -> None:
    with contextlib.suppress(BadDescriptor):  # and nothing else may be raised
        parse(body)


def _command(**more):
    task = {"name": "t", "run": {"command": ["python", "t.py"]}, **more}
    return {"tasks": [task]}


def test_notice_of_a_command_is_read_written_and_needs_a_device_that_gives_one():
    task = parse(_command(notice={})).tasks[0]
    assert (task.notice.signal, task.notice.seconds) == ("SIGUSR1", 60.0)
    assert task.devices.choice.needs == ("notice",)
    assert from_json(to_wire(task)) == from_json(as_json(task)) == task
    assert "notice" not in to_wire(parse(_command()).tasks[0])


@pytest.mark.parametrize(
    ("task", "pointer", "told"),
    [
        (_command(notice={"signal": "SIGKILL"}), "/signal", "must be one of SIGUSR1, "),
        (_command(notice={"seconds": 301}), "/seconds", "must be above 0 and at most 300"),
        (_command(notice={"seconds": 0}), "/seconds", "must be above 0"),
        (
            _command(notice={"seconds": 60}, max_duration_s=60),
            "/seconds",
            "must be less than max_duration_s, which is 60; got 60",
        ),
        (_command(notice={"second": 5}), "/second", "did you mean 'seconds'?"),
        (_command(notice=60), "", "must be an object, not a number; for example"),
        (
            {**_command(notice={}, run={"job": "m:J"}), "bundle": "sha256:" + "0" * 64},
            "",
            "only a command gets a notice: a job is saved without one",
        ),
    ],
)
def test_notice_that_cannot_be_given_is_refused(task, pointer, told):
    with pytest.raises(BadDescriptor) as raised:
        parse(task)
    (fault,) = raised.value.faults
    assert fault.pointer == f"/tasks/0/notice{pointer}"
    assert told in fault.detail


@pytest.mark.parametrize(("said", "milli"), [(0.5, 500), (0.3333, 333), (0.001, 1), (0.999, 999)])
def test_a_fraction_is_read_in_thousandths_and_needs_a_host_that_gives_them(
    said: float, milli: int
) -> None:
    task = {"name": "small", "run": {"job": "m:J"}, "devices": {"fraction": said}}
    [read] = parse({"bundle": BUNDLE, "tasks": [task]}).tasks
    choice = read.devices.choice
    assert (choice.fraction_milli, choice.needs) == (milli, ("fraction",))
    assert from_json(as_json(read)) == read
    assert from_json(to_wire(read)) == read


@pytest.mark.parametrize(
    "task",
    [
        {"devices": {"fraction": 1}},
        {"devices": {"fraction": 0}},
        {"devices": {"fraction": 0.0001}},
        {"devices": {"fraction": "half"}},
        {"devices": {"fraction": 0.5}, "world_size": 2},
        {"devices": {"fraction": 0.5}, "run": {"graph": f"sha256:{'0' * 64}"}},
    ],
)
def test_a_fraction_that_no_device_can_give_is_refused(task: JSON) -> None:
    with pytest.raises(BadDescriptor) as refused:
        parse({"bundle": BUNDLE, "tasks": [{"name": "x", "run": {"job": "m:J"}, **task}]})
    assert [fault.pointer for fault in refused.value.faults] == ["/tasks/0/devices/fraction"]


def test_checkpoints_of_a_task_that_only_says_how_often_are_three():
    task = parse(_command(checkpoint={"every_s": 30})).tasks[0]
    assert (task.checkpoint.every_s, task.checkpoint.keep) == (30, 3)


@pytest.mark.parametrize(
    ("isolation", "needs"), [("process", ("isolation",)), ("user", ("isolation:user",))]
)
def test_isolation_of_a_function_needs_a_device_that_knows_it(isolation, needs):
    body = one(run={"function": "m:f"}, isolation=isolation)
    assert parse(body).tasks[0].devices.choice.needs == needs


def test_tenth_of_a_processor_core_is_the_least():
    assert parse(_command(resources={"cpus": 0.1})).tasks[0].resources.cpus_milli == 100


def test_limits_of_a_task_are_read_written_and_asked_of_a_device():
    said = {"cpus": 1.5, "memory_bytes": 4e9, "processes": 64}
    task = parse(_command(resources=said)).tasks[0]
    asked = (("cpus", 1500), ("memory", 4_000_000_000), ("processes", 64))
    assert task.devices.choice.resources == asked
    assert as_json(task)["resources"] == said
    assert from_json(to_wire(task)) == from_json(as_json(task)) == task
    assert "resources" not in to_wire(parse(_command(resources={})).tasks[0])


@pytest.mark.parametrize("wrong", ["not_labels", "no_labels", "exclude_labels", "avoid_label"])
def test_hint_for_a_negated_field_is_not_its_opposite(wrong):
    with pytest.raises(BadDescriptor) as raised:
        parse(_command(devices={wrong: ["flaky"]}))
    (fault,) = raised.value.faults
    assert fault.detail == f"unknown field {wrong!r}; did you mean 'avoid_labels'?"


def test_sizes_and_durations_are_read_with_units():
    (task,) = parse(
        _command(
            resources={"memory_bytes": "16GB", "disk_bytes": "1GiB"},
            max_duration_s="4h",
            checkpoint={"every_s": "5m"},
            notice={"seconds": "90s"},
        )
    ).tasks
    assert (task.resources.memory_bytes, task.resources.disk_bytes) == (16 * 10**9, 2**30)
    assert (task.max_duration_s, task.checkpoint.every_s) == (14400.0, 300.0)
    assert task.notice is not None
    assert task.notice.seconds == 90.0


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("memory_bytes", "16 parsecs", 'such as "16GB" or "1.5GiB"; got'),
        ("cpus", "4h", "must be a number"),
        ("memory_bytes", "1kB", "must be from 67108864 to"),
        ("cpus", 0, "must be above 0"),
        ("cpus", 0.05, "must be at least 0.1; got 0.05"),
        ("memory_bytes", 1000, "must be from 67108864 to"),
        ("disk_bytes", 2**51, "must be from 67108864 to"),
        ("processes", 1001, "must be from 1 to 1000; got 1001"),
        ("processes", True, "must be a whole number"),
        ("memory", 1, "unknown field 'memory'; did you mean 'memory_bytes'?"),
    ],
)
def test_limit_that_no_host_keeps_is_refused(field, value, told):
    with pytest.raises(BadDescriptor) as raised:
        parse(_command(resources={field: value}))
    (fault,) = raised.value.faults
    assert fault.pointer == f"/tasks/0/resources/{field}"
    assert told in fault.detail


def test_retry_reads_its_short_form_its_rules_and_what_older_versions_stored() -> None:
    rule = {"cause": "memory", "do": "retry", "grow": {"resources.memory_bytes": 1.5}}
    body = {"max": 2, "rules": [rule, {"exit": [75], "log": "a.*b", "do": "fail"}]}
    (task,) = parse(one(resources={"memory_bytes": "1GB"}, retry=body)).tasks
    assert task.retry == RetryPolicy(
        max=2,
        rules=(
            RetryRule(cause="memory", grow={"resources.memory_bytes": 1.5}),
            RetryRule(exits=(75,), log="a.*b", do="fail"),
        ),
    )
    (never,) = parse(one(retry="never")).tasks
    assert (never.retry.max, as_json(never)["retry"], to_wire(never)["retry"]) == (
        -1,
        "never",
        "never",
    )
    for each in (task, never):
        assert from_json(as_json(each)) == from_json(to_wire(each)) == each
    assert from_json({**as_json(task), "retry": {"max": 3}}).retry == RetryPolicy(max=3)
    (plain,) = parse(one(retry={"max": 3})).tasks
    assert to_wire(plain)["retry"] == {"max": 3}, "older devices know no more"
