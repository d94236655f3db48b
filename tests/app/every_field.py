"""Requests that together give every field of a descriptor a value that is not its default.

`leaves` lists the fields of the published schema, so a new field is missing here until it gets a
value. Values stand in the form in which `as_json` writes them, and no two numbers are alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from app.api import descriptor_schema

JSON = dict[str, Any]
Place = tuple[str, ...]  # keys from the request or task inwards

CODE = """
class Train:
    def __init__(self, ctx, *, steps=3): ...

    def step(self, ctx): ...


def make(ctx, *, limit=1): ...


def double(ctx, x): ...
"""
FILES = {
    "train.py": CODE,
    "requirements.txt": "six\n",
    "pins.lock": "six==1.16.0 --hash=sha256:" + "5" * 64 + "\n",
}
OTHER_PYTHON = "3.13"
KIND = "cuda"
#: What the devices offer beside the needs of mounts, packages and limits.
FACTS = {
    "sandbox": "off",
    "model": "NVIDIA H100 80GB HBM3",
    "compute_capability": "9.0",
    "labels": ["fast", "nvlink"],
    "gives": {"cpus": 64_000, "memory": 2**40, "disk": 2**40, "processes": 1000},
    "offers": [
        "egress", "env", "fraction", "image:debian", "isolation", "isolation:user", "limit:cpus",
        "limit:disk", "limit:memory", "limit:processes", "mount:pictures", "native", "notice",
        "secrets", "session",
    ],
}  # fmt: skip
CHECKPOINT = f"ckp_{7:032x}"
EARLIER = f"req_{3:032x}"  # another request
BEGUN_PARAMS = {"steps": 11}

GRAPH: JSON = {
    "nodes": [
        {
            "name": "first",
            "function": "train:double",
            "inputs": {"x": "input:raw"},
            "outputs": ["h", "x"],
            "params": {"width": 64},
            "inout": ["x"],
            "tensors": {"h": {"dtype": "float32", "shape": ["n", 4]}},
            "est": {"ms": 1.5, "memory_bytes": 4096},
            "draws": False,
        },
        {
            "name": "second",
            "function": "train:double",
            "inputs": {"x": ["first.h", "first.h"]},
            "outputs": ["y"],
            "map": ["x"],
        },
        {
            "name": "third",
            "graph": {
                "nodes": [
                    {
                        "name": "inner",
                        "function": "train:double",
                        "inputs": {"x": "input:z"},
                        "outputs": ["w"],
                    }
                ],
                "outputs": {"w": "inner.w"},
            },
            "inputs": {"z": "first.h"},
        },
    ],
    "outputs": {"y": "second.y"},
    "tensors": {"raw": {"dtype": "float32", "shape": ["n", 4]}},
    "limits": {"memory_bytes": 1_000_000},
}

TASKS: list[JSON] = [
    {
        "name": "make",
        "type": "preprocess",
        "run": {"function": "train:make"},
        "params": {"limit": 9},
        "outputs": ["tokens"],
        "isolation": "process",
        "devices": {"kind": KIND},
    },
    {
        "name": "train",
        "type": "train",
        "run": {"job": "train:Train"},
        "params": {"steps": 8},
        "inputs": {"tokens": "make.tokens", "corpus": "datablock:corpus@1"},
        "outputs": ["weights"],
        "publish": {"weights": "model"},
        "start": {
            "after": ["make"],
            "after_requests": [{"request": EARLIER, "on": "ended", "else": "hold"}],
            "not_before": "2099-01-02T03:04:05+00:00",
            "hold": True,
        },
        "world_size": 6,
        "devices": {
            "kind": KIND,
            "min": 2,
            "max": 5,
            "memory_bytes": 5_000_000,
            "across_hosts": True,
            "model": "h100",
            "compute_capability": "8.9",
            "labels": ["fast", "nvlink"],
            "avoid_labels": ["spot"],
        },
        "checkpoint": {
            "every_s": 45.0,
            "keep": 17,
            "best": {"metric": "accuracy", "goal": "max", "keep": 19},
        },
        "retry": {
            "max": 4,
            "backoff": {"first_s": 3.5, "most_s": 77.0},
            "rules": [
                {"exit": [75, 137], "log": "NCCL.*timeout", "do": "elsewhere"},
                {"cause": "memory", "do": "hold"},
            ],
        },
        "islands": 3,
        "max_duration_s": 7200.0,
        "network": {"allow": ["data.example.org:443"]},
        "env": {"EPOCHS": "13"},
        "secrets": ["HF_TOKEN"],
        "mounts": {"/data": "pictures"},
        "resources": {
            "cpus": 1.5,
            "memory_bytes": 300_000_000,
            "disk_bytes": 400_000_000,
            "processes": 50,
        },
    },
    {
        "name": "tool",
        "run": {"command": ["python", "tool.py", "--name", "two words"]},
        "artifacts": ["out"],
        "reservation": "workshop",
        "notice": {"signal": "SIGUSR2", "seconds": 30.0},
        "devices": {"kind": KIND, "fraction": 0.25},
    },
    {
        "name": "shell",
        "run": {"command": ["bash"]},
        "session": {"idle_s": 600.0},
        "devices": {"kind": KIND},
    },
    {
        "name": "graph",
        "run": {"graph": GRAPH},
        "inputs": {"raw": "datablock:corpus@1"},
        "outputs": ["y"],
        "devices": {"kind": KIND},
    },
    {
        "name": "again",
        "run": {"job": "train:Train"},
        "params": BEGUN_PARAMS,
        "from_checkpoint": CHECKPOINT,
        "devices": {"kind": KIND},
    },
    {
        "name": "lot",
        "run": {"command": ["python", "lot.py", "--seed", "${matrix.seed}"]},
        "devices": {"kind": KIND},
        "array": {"count": 5, "at_once": 22, "max_failures": 0.6},
        "matrix": {"seed": [31, 32, 33], "way": ["a", "b"], "exclude": [{"seed": 31, "way": "b"}]},
    },
    {
        "name": "drawn",
        "run": {"command": ["python", "lot.py", "--rate", "${search.rate}"]},
        "devices": {"kind": KIND},
        "search": {
            "method": "grid",
            "trials": 3,
            "seed": 41,
            "space": {"rate": [51, 52], "deep": {"int": [61, 63]}},
        },
        "stop": {"metric": "acc", "goal": "max", "rungs": [71, 72], "keep": 0.4},
    },
    {
        "name": "gang",
        "run": {"command": ["python", "tool.py"]},
        "world_size": 2,
        "collectives": "native",
        "devices": {"kind": KIND, "min": 2, "max": 2},
    },
    {
        "name": "even",
        "run": {"job": "train:Train"},
        "world_size": 4,
        "devices": {"kind": KIND, "min": 2, "max": 2, "across_hosts": True, "hosts": 2},
    },
    {"name": "boxed", "run": {"command": ["true"]}, "image": "debian", "devices": {"kind": KIND}},
]

#: Of one request: what an environment excludes. The others bring packages.
REQUEST: JSON = {
    "name": "every-field",
    "tier": "basic",
    "priority": 7,
    "tasks": TASKS,
    "labels": {"exp": "a1"},
    "notify": {"webhook": "https://hooks.example.org/x", "on": ["failed"]},
}
_COMMAND = [{"name": "a", "run": {"command": ["true"]}, "devices": {"kind": KIND}}]
PACKAGES: JSON = {
    "tasks": _COMMAND,
    "environment": {"requirements": "requirements.txt", "python": OTHER_PYTHON},
}
LOCKED: JSON = {"tasks": _COMMAND, "environment": {"lock": "pins.lock"}}


def leaves(schema: JSON, path: Place = ()) -> Iterator[Place]:
    """Yield each field of the schema that has no fields of its own; "*" stands for each item.

    A graph inside a task is one field: its own are those of `GRAPH_FIELDS`.
    """
    schema = resolved(schema)
    if has_named_fields(schema) and path[-1:] != ("graph",):
        for name, inner in schema["properties"].items():
            yield from leaves(inner, (*path, name))
    elif "$ref" in schema.get("items", {}):
        yield from leaves(schema["items"], (*path, "*"))
    else:
        yield path


def has_named_fields(schema: JSON) -> bool:
    """Return whether all fields of this object have names; in a matrix the tenant names them."""
    return "properties" in schema and not schema.get("additionalProperties")


def resolved(schema: JSON) -> JSON:
    """Return the schema to which a field refers, whether or not it may also be null."""
    for one in (schema, *schema.get("anyOf", ())):
        if "$ref" in one:
            return descriptor_schema.COMPONENTS[one["$ref"].rpartition("/")[2]]
    return schema


FIELDS = frozenset(leaves(descriptor_schema.SCHEMA))
GRAPH_FIELDS = frozenset(leaves(descriptor_schema.COMPONENTS["Graph"]))
TASK_FIELDS = frozenset(path[2:] for path in FIELDS if path[:2] == ("tasks", "*"))


def given(body: Any, fields: frozenset[Place], path: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yield each of these fields that the body has, with its value."""
    if path in fields:
        yield path, body
    elif isinstance(body, Mapping):
        for name, value in body.items():
            yield from given(value, fields, (*path, name))
    elif isinstance(body, list):
        for value in body:
            yield from given(value, fields, (*path, "*"))


def at(body: Any, path: Place) -> Any:
    """Return what the body has at the path; KeyError without it."""
    for name in path:
        body = body[name]
    return body
