"""A descriptor is read in full, or all its faults are told at once, each with its place."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.model.descriptor import (
    MAX_FAULTS,
    BadDescriptor,
    Devices,
    Fault,
    Notify,
    RunSpec,
    Source,
    as_json,
    parse,
)
from tests.thoroughness import examples

BUNDLE = "sha256:" + "0a" * 32


@pytest.mark.parametrize(
    "argv",
    [
        ["torchrun", "--nproc-per-node", "2", "ddp.py"],
        ["/usr/bin/torchrun", "ddp.py"],
        ["python", "-m", "torch.distributed.run", "ddp.py"],
    ],
)
def test_a_launcher_of_ranks_is_refused_where_ranks_are_started_anyhow(argv: list[str]) -> None:
    task = {"name": "ddp", "run": {"command": argv}, "world_size": 2}
    with pytest.raises(BadDescriptor) as refused:
        parse({"bundle": BUNDLE, "tasks": [task]})
    [fault] = refused.value.faults
    assert fault.pointer == "/tasks/0/run/command"
    assert "Name the script itself, as in [python, train.py]" in fault.detail
    parse({"bundle": BUNDLE, "tasks": [{**task, "world_size": 1}]})
    script = {**task, "run": {"command": ["python", "-m", "train"]}}
    parse({"bundle": BUNDLE, "tasks": [script]})


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


def test_the_example_of_the_design_is_read() -> None:
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
    assert (train.checkpoint.every_s, train.retry_max, train.max_duration_s) == (600, 2, 14400)
    assert sweep.labels == {"exp": "a1"}
    assert sweep.notify == Notify(webhook="https://example.org/hook", on=("done", "failed"))


def test_a_datablock_may_be_named_with_its_version_and_outputs_may_become_some() -> None:
    inputs = {"new": "datablock:corpus", "old": "datablock:corpus@3"}
    task = parse(one(inputs=inputs, outputs=["x"], publish={"x": "tokens"})).tasks[0]
    assert task.inputs["new"] == Source(kind="datablock", name="corpus")
    assert task.inputs["old"] == Source(kind="datablock", name="corpus", version=3)
    assert [source.block for source in task.inputs.values()] == ["corpus", "corpus@3"]
    assert task.publish == {"x": "tokens"}


def test_all_but_the_task_is_optional() -> None:
    descriptor = parse(one())
    task = descriptor.tasks[0]
    assert (descriptor.name, descriptor.tier, descriptor.priority) == (None, "standard", 0)
    assert (task.type, task.world_size, task.devices) == ("default", 1, Devices())
    assert (task.checkpoint.every_s, task.checkpoint.keep) == (60, 3)
    assert (task.retry_max, task.max_duration_s) == (0, 86400)


def test_only_ranks_that_have_steps_may_have_a_device_each() -> None:
    def most(run: dict[str, Any]) -> int:
        return parse(one(run=run, world_size=4)).tasks[0].devices.max

    runs = ({"job": "m:C"}, {"function": "m:f"}, {"command": ["x"]})
    assert [most(run) for run in runs] == [4, 1, 1]


def test_a_graph_that_says_how_many_devices_it_needs_may_have_as_many() -> None:
    graph = {"graph": "sha256:" + "0" * 64}
    task = parse(one(run=graph, devices={"min": 2})).tasks[0]
    assert (task.world_size, task.devices) == (2, Devices(min=2, max=2))
    with pytest.raises(BadDescriptor):
        parse(one(run=graph, devices={"min": 2, "max": 1}))


def test_null_means_not_given() -> None:
    body = one(start=None, devices=None, params=None, outputs=None)
    assert parse({**body, "name": None, "labels": None, "notify": None}) == parse(one())


def test_a_command_needs_no_bundle() -> None:
    body = {"tasks": [{"name": "t", "run": {"command": ["python", "train.py", "--x", "--x"]}}]}
    assert parse(body).tasks[0].run == RunSpec(
        kind="command", argv=("python", "train.py", "--x", "--x")
    )


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
def test_what_the_operating_system_cannot_start_is_refused(
    task: dict[str, Any], pointer: str, told: str
) -> None:
    with pytest.raises(BadDescriptor) as found:
        parse({"tasks": [{"name": "t", **task}]})
    (fault,) = found.value.faults
    assert fault.pointer == f"/tasks/0/{pointer}"
    assert told in fault.detail


def test_a_name_with_dots_is_told_from_its_output() -> None:
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
def test_a_time_is_read_with_its_offset(written: str, at_s: float) -> None:
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
            {}, optional={"kind": names, "memory_bytes": st.integers(0, 2**50)}
        ),
        "checkpoint": st.fixed_dictionaries({}, optional={"every_s": st.floats(0.01, 1e6)}),
        "max_duration_s": st.floats(0.01, 1e6),
    },
)


@settings(max_examples=examples(150))
@given(task=tasks, published=st.booleans())
def test_what_is_written_down_in_full_reads_back_the_same(
    task: dict[str, Any], published: bool
) -> None:
    if published:
        outputs = enumerate(task.get("outputs", []))
        task = {**task, "publish": {port: f"block-{n}" for n, port in outputs}}
    read = parse({"tasks": [task], "bundle": BUNDLE}).tasks[0]
    written = json.loads(json.dumps(as_json(read)))
    assert parse({"tasks": [written], "bundle": BUNDLE}).tasks[0] == read
    assert as_json(parse({"tasks": [written], "bundle": BUNDLE}).tasks[0]) == written


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
        ({"devices": {"max": 2}}, "/devices/max", "range"),  # more devices than ranks
        ({"world_size": 4, "devices": {"min": 3, "max": 2}}, "/devices/min", "range"),
        ({"checkpoint": {"every_s": 0}}, "/checkpoint/every_s", "range"),
        ({"checkpoint": {"keep": 0}}, "/checkpoint/keep", "range"),
        ({"retry": {"max": -1}}, "/retry/max", "range"),
        ({"retry": 3}, "/retry", "type"),
        ({"max_duration_s": 0}, "/max_duration_s", "range"),
        ({"max_duration_s": 10**400}, "/max_duration_s", "range"),
        ({"command": ["x"]}, "/command", "unknown-field"),
        ({"a/b~c": 1}, "/a~1b~0c", "unknown-field"),
    ],
)
def test_a_wrong_field_of_a_task_is_pointed_at(
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
def test_a_wrong_field_of_a_request_is_pointed_at(
    fields: dict[str, Any], pointer: str, code: str
) -> None:
    assert told({**one(), **fields}) == {pointer: code}


@pytest.mark.parametrize("body", [None, [], "x", 7, True])
def test_what_is_no_object_is_refused(body: object) -> None:
    assert told(body) == {"": "type"}


def test_all_faults_are_told_at_once() -> None:
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


def test_an_unknown_field_says_what_was_meant() -> None:
    (fault,) = faults(one(worldsize=2))
    assert fault.detail == "unknown field 'worldsize'; did you mean 'world_size'?"


def test_a_misspelt_command_is_told_its_name() -> None:
    found = {fault.pointer: fault.detail for fault in faults(one(run={"comand": ["ls"]}))}
    assert found["/tasks/0/run/comand"] == "unknown field 'comand'; did you mean 'command'?"


def test_a_name_that_is_given_twice_is_told_at_the_second() -> None:
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
def test_what_postgres_cannot_hold_is_refused(value: object) -> None:
    assert told(one(params={"x": [value]})) == {"/tasks/0/params/x/0": "invalid"}


def test_a_key_that_postgres_cannot_hold_is_refused() -> None:
    assert told(one(params={"x\x00": 1})) == {"/tasks/0/params/x\x00": "invalid"}


def test_deep_nesting_is_refused_without_going_down() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    (fault,) = faults(one(params={"x": deep}))
    assert fault.code == "range"
    assert fault.pointer.startswith("/tasks/0/params/x/0/0")


def test_a_flood_of_faults_is_counted_not_listed() -> None:
    found = faults({"tasks": [{"name": f"t{n}"} for n in range(MAX_FAULTS + 50)]})
    assert len(found) == MAX_FAULTS + 1
    assert found[-1].detail == "50 more faults are not listed"


@settings(max_examples=examples(200))
@given(body=plain | st.builds(lambda task: {"tasks": [task]}, plain))
def test_whatever_json_is_sent_is_read_or_refused(body: object) -> None:
    with contextlib.suppress(BadDescriptor):  # and nothing else may be raised
        parse(body)
