"""The API's cost of a body grows no faster than its length, and stays small.

CPU time is compared with that of the same bytes as one text, so a busy or slow machine fails no
test.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from app.api.middleware import strict_json
from app.core.model import preset
from app.core.model.descriptor import BadDescriptor, parse
from app.core.model.fields import MAX_FAULTS, UNKNOWN_TOLD
from app.core.model.graphs import dependencies, task_graph

pytestmark = pytest.mark.security

MANY = 20_000
RUN = {"job": "train:Train"}
UNKNOWN = {f"nam{n}": 1 for n in range(MANY)}
SOME_UNKNOWN = {name: 1 for name in list(UNKNOWN)[:100]}
TASK = {"name": "t", "run": RUN}


def cpu_s(act: Callable[[], object]) -> float:
    began_s = time.process_time()
    act()
    return time.process_time() - began_s


def faults(body: Any) -> int:
    try:
        parse(body)
    except BadDescriptor as error:
        return len(error.faults)
    raise AssertionError("it was taken")


@pytest.mark.parametrize(
    "body",
    [
        {"tasks": [TASK], **UNKNOWN},
        {"tasks": [{**TASK, **UNKNOWN}]},
        {"tasks": [{**TASK, **SOME_UNKNOWN} for _ in range(200)]},
        {"tasks": [TASK], "n" * 400_000: 1},
    ],
    ids=["of a request", "of a task", "of 1000 tasks", "a long one"],
)
def test_unknown_names_cost_little_more_than_to_read_them(body: Any):
    text = json.dumps(body).encode()
    read_s = min(cpu_s(lambda: strict_json(text)) for _ in range(3))
    told = faults(body)
    parsed_s = min(cpu_s(lambda: faults(body)) for _ in range(2))
    assert parsed_s < 10 * read_s + 0.5
    assert told <= MAX_FAULTS + 1


NAMES = [f"nam{n}" for n in range(MANY)]
FEW = [{"name": f"few{n}", "run": RUN} for n in range(200)]
BUNDLE = f"sha256:{'0' * 64}"
MAKER = {**TASK, "outputs": NAMES}

REQUESTS: dict[str, Any] = {
    "long address": {"tasks": [TASK], "notify": {"webhook": "https://" + "a" * 400_000 + " "}},
    "needs of nothing": {"tasks": [*FEW, {**TASK, "start": {"after": NAMES}}]},
    "outputs": {"tasks": [MAKER]},
    "published outputs": {"tasks": [{**MAKER, "publish": {name: name for name in NAMES}}]},
    "published nothing": {"tasks": [{**TASK, "publish": {name: name for name in NAMES}}]},
    "inputs": {
        "tasks": [MAKER, {"name": "u", "run": RUN, "inputs": {n: f"t.{n}" for n in NAMES}}]
    },
    "inputs of nothing": {
        "tasks": [MAKER, {"name": "u", "run": RUN, "inputs": {n: f"t.un{n}" for n in NAMES}}]
    },
    "states that are none": {
        "tasks": [TASK], "notify": {"webhook": "https://x", "on": NAMES}
    },
}  # fmt: skip


def _node(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "function": "f:f", "outputs": ["y"], **more}


NODES = [_node(f"n{n}") for n in range(2000)]
RING = [_node(f"n{n}", inputs={"x": f"n{(n or 10_000) - 1}.y"}) for n in range(10_000)]
GRAPHS: dict[str, Any] = {
    "blocks of no node": {"nodes": [*NODES, _node("q", inputs={"x": [f"z{n}.y" for n in NAMES]})]},
    "ports of no node": {"nodes": [*NODES, _node("q", inputs={n: f"{n}.y" for n in NAMES})]},
    "outputs of no node": {"nodes": NODES, "outputs": {name: f"{name}.y" for name in NAMES}},
    "ports of the task": {"nodes": [_node("q", inputs={n: f"input:{n}" for n in NAMES})]},
    "tensors that no node reads": {
        "nodes": [_node("q", inputs={n: f"input:{n}" for n in NAMES[:5000]})],
        "tensors": {name: {"dtype": "uint8", "shape": []} for name in NAMES},
    },
    "ring": {"nodes": RING},
    "ports that are mapped, written and declared": {
        "nodes": [
            _node("k"),
            _node("q", inputs=dict.fromkeys(NAMES, "k.y"), outputs=NAMES, inout=NAMES, map=NAMES),
        ]
    },
    "graph within that lacks ports": {
        "nodes": [
            {
                "name": "q",
                "inputs": {f"other{name}": f"input:{name}" for name in NAMES[:5000]},
                "graph": {
                    "nodes": [_node("q", inputs={n: f"input:{n}" for n in NAMES[:5000]})],
                    "outputs": {"y": "q.y"},
                },
            }
        ]
    },
}


def _checked(body: Any) -> None:
    with suppress(BadDescriptor):
        dependencies.check(parse({"bundle": BUNDLE, **body}))


def _checked_graph(body: Any) -> None:
    """Read the graph, and compare it with a task that has other ports."""
    task = {"name": "t", "run": {"graph": BUNDLE}, "outputs": NAMES[:5000]}
    inputs = {f"in{name}": "datablock:x" for name in NAMES[:5000]}
    of_task = parse({"bundle": BUNDLE, "tasks": [{**task, "inputs": inputs}]}).tasks[0]
    with suppress(BadDescriptor):
        graph = task_graph.parse({"outputs": {"y": f"{body['nodes'][-1]['name']}.y"}, **body})
        task_graph.check_task(graph, of_task, "/tasks/0")


@pytest.mark.parametrize(
    ("body", "read"),
    [(body, _checked) for body in REQUESTS.values()]
    + [(body, _checked_graph) for body in GRAPHS.values()],
    ids=[*REQUESTS, *GRAPHS],
)
def test_long_lists_cost_little_more_than_to_read_them(body: Any, read: Callable[[Any], None]):
    text = json.dumps(body).encode()
    read_s = min(cpu_s(lambda: strict_json(text)) for _ in range(3))
    assert cpu_s(lambda: read(body)) < 20 * read_s + 1.0


def test_unknown_fields_beyond_the_first_are_counted():
    with pytest.raises(BadDescriptor) as raised:
        parse({"tasks": [TASK], **UNKNOWN, "tsks": []})
    told = [fault for fault in raised.value.faults if fault.code == "unknown-field"]
    assert len(told) == UNKNOWN_TOLD + 1
    assert told[-1].detail == f"{MANY + 1 - UNKNOWN_TOLD} more unknown fields"


def test_unknown_field_is_told_with_what_was_meant():
    with pytest.raises(BadDescriptor) as raised:
        parse({"tasks": [TASK], "prioritty": 1})
    [fault] = [each for each in raised.value.faults if each.code == "unknown-field"]
    assert fault.pointer == "/prioritty"
    assert "did you mean 'priority'?" in fault.detail


def test_unknown_parameters_of_a_preset_cost_little():
    assert cpu_s(lambda: preset.check(UNKNOWN, kind="cpu")) < 1


def test_key_that_comes_twice_behind_many_is_found_in_one_pass():
    once = b"{" + b",".join(b'"k%d":1' % n for n in range(MANY)) + b"}"
    twice = once[:-1] + b',"k19999":2}'

    def read() -> None:
        with suppress(json.JSONDecodeError):
            strict_json(twice)

    assert cpu_s(read) < 10 * cpu_s(lambda: strict_json(once)) + 0.5
    with pytest.raises(json.JSONDecodeError, match="duplicate key 'k19999'"):
        strict_json(twice)
