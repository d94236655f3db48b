"""Describes the descriptor for the OpenAPI page, as a schema.

`core.model.descriptor` reads and checks descriptors; this module only describes them. A test
compares the two: the example is accepted, and every field named here is known there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Body
from pydantic import WithJsonSchema

from app.core.model.descriptor import ISOLATIONS
from app.core.model.failure_causes import MOST_PATTERN, OF_RULES
from app.core.model.fields import parser_of
from app.core.model.provisions.after_requests import MOST_REQUESTS
from app.core.model.provisions.artifacts import MOST_PATHS, USUAL_FOLDERS
from app.core.model.provisions.best_rule import MOST_BEST
from app.core.model.provisions.lot_values import (
    MOST_COMBINATIONS,
    MOST_KEYS,
    MOST_TEXT,
    MOST_VALUES,
)
from app.core.model.provisions.lots import (
    EXCLUDE,
    MOST_AT_ONCE,
    MOST_EXCLUDED,
    MOST_MEMBERS,
    USUAL_AT_ONCE,
)
from app.core.model.provisions.network_policy import MAX_DESTINATIONS
from app.core.model.provisions.notice import MOST_S, SIGNALS
from app.core.model.provisions.notify import EVENTS, MOST_CHANNELS
from app.core.model.provisions.retry import (
    DOES,
    GROWABLE,
    MOST_EXITS,
    MOST_GROWTH,
    MOST_RULES,
    NEVER,
)
from app.core.model.provisions.searches import METHODS, MOST_BOUND, MOST_SEED, SCALES
from app.core.model.provisions.session import LEAST_IDLE_S, MOST_IDLE_S, USUAL_IDLE_S
from app.core.model.provisions.stop_rule import (
    GOALS,
    MOST_KEEP,
    MOST_RUNGS,
    MOST_STEP,
    MOST_STOPPED,
    USUAL_KEEP,
)
from app.core.model.provisions.variables import MAX_SECRETS
from app.core.model.request_needs import AWAITED, DONE, FAIL, OTHERWISE

EXAMPLE: dict[str, Any] = {
    "name": "digits-7",
    "priority": 0,
    "tasks": [
        {
            "name": "prep",
            "type": "preprocess",
            "run": {"function": "ops:tokenize"},
            "params": {"limit": 1000},
            "outputs": ["tokens"],
        },
        {
            "name": "train",
            "type": "train",
            "run": {"job": "train:Train"},
            "params": {"lr": 0.001, "steps": 2000},
            "inputs": {"tokens": "prep.tokens"},
            "devices": {"kind": "cpu"},
            "checkpoint": {"every_s": 60, "keep": 3},
            "retry": {"max": 2},
            "max_duration_s": 14400,
        },
    ],
    "bundle": "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "labels": {"exp": "a1"},
}


def _object(properties: dict[str, Any], required: Sequence[str] = ()) -> dict[str, Any]:
    """Return the schema of an object; an optional field may also be null, which means the same."""
    return {
        "type": "object",
        "properties": {
            name: shown if name in required else _or_null(_with_units(name, shown))
            for name, shown in properties.items()
        },
        "additionalProperties": False,
        **({"required": list(required)} if required else {}),
    }


def _ref(name: str) -> dict[str, Any]:
    """Return a reference to a schema of COMPONENTS, for which a generated client has one class."""
    return {"$ref": f"#/components/schemas/{name}"}


def _or_null(shown: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in shown or "enum" in shown:
        return {"anyOf": [shown, {"type": "null"}]}
    if "anyOf" in shown:
        return {**shown, "anyOf": [*shown["anyOf"], {"type": "null"}]}
    types = shown["type"] if isinstance(shown["type"], list) else [shown["type"]]
    return {**shown, "type": [*types, "null"]}


def _with_units(name: str, shown: dict[str, Any]) -> dict[str, Any]:
    """Let a number with a unit in its name be a text with a unit, too."""
    if parser_of(name) is None or shown.get("type") not in ("integer", "number"):
        return shown
    example = "16GB" if name.endswith("_bytes") else "4h"
    told = f"{shown['description']}; or a text such as `{example}`"
    return {**shown, "type": [shown["type"], "string"], "description": told}


def _texts(description: str) -> dict[str, Any]:
    return {"type": "array", "items": {"type": "string"}, "description": description}


def _whole(description: str, default: int | None) -> dict[str, Any]:
    said: dict[str, Any] = {"type": "integer", "description": description}
    return said if default is None else {**said, "default": default}


_METRIC: dict[str, Any] = {
    "type": "string",
    "minLength": 1,
    "maxLength": 100,
    "description": "name of a metric that the task reports",
}
_GOAL: dict[str, Any] = {
    "type": "string",
    "enum": [*GOALS],
    "default": GOALS[0],
    "description": "which values are better: low or high ones",
}

#: The forms of a key's values in a matrix or a search.
_VALUES: list[dict[str, Any]] = [
    {
        "type": "array",
        "minItems": 1,
        "maxItems": MOST_VALUES,
        "items": {"type": ["string", "number", "boolean"], "maxLength": MOST_TEXT},
    },
    {"type": "string", "pattern": "^[0-9]{1,9}-[0-9]{1,9}$"},
]
_BOUND = {"type": "number", "minimum": -MOST_BOUND, "maximum": MOST_BOUND}
_INTERVAL: dict[str, Any] = {
    "type": "object",
    "minProperties": 1,
    "maxProperties": 1,
    "propertyNames": {"enum": [*SCALES]},
    "additionalProperties": {"type": "array", "minItems": 2, "maxItems": 2, "items": _BOUND},
}

GRAPH_EXAMPLE: dict[str, Any] = {
    "nodes": [
        {
            "name": "encode",
            "function": "ops:encode",
            "inputs": {"x": "input:raw"},
            "outputs": ["h"],
            "params": {"width": 64},
        },
        {
            "name": "vote",
            "function": "ops:vote",
            "inputs": {"parts": ["encode.h", "encode.h"]},
            "outputs": ["y"],
        },
    ],
    "outputs": {"y": "vote.y"},
}

_SOURCE = {"type": "string", "description": '"NODE.OUTPUT", or "input:PORT" of the task'}
_TENSOR = _object(
    {
        "dtype": {"type": "string", "description": 'as torch names it: "float32"'},
        "shape": {
            "type": "array",
            "items": {"type": ["integer", "string"]},
            "description": "each a number, or a name that stands for one number in this graph",
        },
    },
    ["dtype", "shape"],
)
_TENSORS = {
    "type": "object",
    "additionalProperties": _ref("GraphTensor"),
    "description": "what is declared of ports, and checked; of a node that maps: of one item",
}
_NODE = _object(
    {
        "name": {"type": "string", "description": "unique in its graph"},
        "function": {"type": "string", "description": '"module:name" in the bundle'},
        "graph": {"type": "object", "description": "instead of a function: a graph inside it"},
        "inputs": {
            "type": "object",
            "additionalProperties": {"anyOf": [_SOURCE, {"type": "array", "items": _SOURCE}]},
            "description": "port -> the block that it reads, or a list of blocks",
        },
        "outputs": _texts("the names of the blocks that it returns, as a dict"),
        "params": {"type": "object", "description": "more arguments of the function"},
        "inout": _texts("ports read and written: the block's memory may be written to"),
        "map": {
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
            "description": "ports with lists: it runs once for each item, each output is a list",
        },
        "tensors": _TENSORS,
        "est": _object(
            {
                "ms": {"type": "number", "description": "how long it takes"},
                "memory_bytes": _whole("what it takes beside its blocks", 0),
            }
        ),
        "draws": {
            "type": "boolean",
            "default": True,
            "description": "it may draw random numbers; if not, it starts some microseconds sooner",
        },
    },
    ["name"],
)
_GRAPH = {
    **_object(
        {
            "nodes": {"type": "array", "items": _ref("GraphNode"), "minItems": 1},
            "outputs": {
                "type": "object",
                "additionalProperties": _SOURCE,
                "description": "the task's outputs, and what else its result shall hold",
            },
            "tensors": _TENSORS,
            "limits": _object({"memory_bytes": _whole("of blocks on the device at once", 0)}),
        },
        ["nodes", "outputs"],
    ),
    "title": "Graph",
    "examples": [GRAPH_EXAMPLE],
}

_AFTER_REQUEST = {
    **_object(
        {
            "request": {
                "type": "string",
                "description": "its name, which means the newest request of that name at the"
                " submit, or its id",
            },
            "on": {
                "enum": [*AWAITED],
                "default": DONE,
                "description": "what must have happened: it is `done`; it has `ended`, however, or"
                " has `failed`, both after it had started; or it has `started`",
            },
            "else": {
                "enum": [*OTHERWISE],
                "default": FAIL,
                "description": "what becomes of the task once that can no longer happen: it is to"
                " `fail`; to `hold` until that request is retried or somebody resumes the task; or"
                " to `run` all the same",
            },
        }
    ),
    "required": ["request"],
}

_RETRY_RULE = _object(
    {
        "exit": {
            "type": "array",
            "items": {"type": "integer", "minimum": 1, "maximum": 255},
            "maxItems": MOST_EXITS,
            "description": "exit statuses that it fits; 128 + N after signal N",
        },
        "cause": {"enum": [*OF_RULES], "description": "the cause of the failure that it fits"},
        "log": {
            "type": "string",
            "maxLength": MOST_PATTERN,
            "description": "regular expression (RE2) that one of the last lines of its log, its"
            " message or its traceback contains",
        },
        "do": {
            "enum": [*DOES],
            "description": "`retry` it; `fail` at once; `hold` it until somebody resumes it; or"
            " retry it `elsewhere`, not on the same device within ten minutes",
        },
        "grow": {
            "type": "object",
            "properties": {
                name: {
                    "type": ["number", "null"],
                    "exclusiveMinimum": 1,
                    "maximum": MOST_GROWTH,
                    "description": f"factor by which `{name}` grows",
                }
                for name in GROWABLE
            },
            "additionalProperties": False,
            "description": "what the next attempt asks for more of, up to what a device can give",
        },
    },
    ["do"],
)
_TASK = _object(
    {
        "name": {"type": "string", "description": "unique in the request"},
        "type": {"type": "string", "default": "default", "description": "selects the preset"},
        "run": {
            **_object(
                {
                    "job": {"type": "string", "description": 'a class: "module:Name"'},
                    "function": {"type": "string", "description": 'a function: "module:name"'},
                    "command": _texts(
                        "an unmodified program and its arguments. It runs in a copy of the bundle."
                        " A pause freezes its processes. If it must leave its device, it goes on"
                        " where it stood if the device offers `command-images`; else it begins"
                        " again in its working folder, as last kept (`checkpoint.every_s`, at"
                        " pauses and drains)"
                    ),
                    "graph": {
                        "anyOf": [{"type": "string"}, _ref("Graph")],
                        "description": 'many small functions: a graph, or "sha256:…" of a stored'
                        " graph; its ports are the task's inputs and outputs",
                    },
                }
            ),
            "description": "exactly one of these",
        },
        "params": {
            "type": "object",
            "description": "arguments of the job or function; for a command, ROUNDHOUSE_PARAMS",
        },
        "inputs": {
            "type": "object",
            "additionalProperties": {"type": "string"},
            "description": 'port -> source: "TASK.OUTPUT" of this request, so that the task starts'
            ' when TASK is done; "REQUEST/TASK.OUTPUT" of another request, by name or id;'
            ' "REQUEST/LOT@best.OUTPUT" of the best member of its lot, once the lot is done;'
            ' "datablock:NAME", the newest version at the submit; or'
            ' "datablock:NAME@VERSION"',
        },
        "outputs": _texts("names of results that other tasks may take as inputs"),
        "artifacts": {
            **_texts(
                "files and folders in the working folder of a command that are kept when it ends,"
                f" however it ends. Default: what it wrote to {', '.join(USUAL_FOLDERS)}"
            ),
            "maxItems": MOST_PATHS,
        },
        "publish": {
            "type": "object",
            "additionalProperties": {"type": "string"},
            "description": "output -> datablock: the output becomes its next version when the task"
            " is done. A job gives a tensor, an array, or a dict of them by name; a command a file"
            " NAME.safetensors or NAME.npy",
        },
        "start": {
            **_object(
                {
                    "after": _texts("tasks of this request that must be done first"),
                    "after_requests": {
                        "type": "array",
                        "maxItems": MOST_REQUESTS,
                        "items": _AFTER_REQUEST,
                        "description": "other requests of your tenant that the task comes after; it"
                        " starts once all have happened, before or after the submission",
                    },
                    "not_before": {
                        "type": "string",
                        "format": "date-time",
                        "description": "the task does not start before this time",
                    },
                    "hold": {
                        "type": "boolean",
                        "default": False,
                        "description": "it is paused until a person resumes it",
                    },
                }
            ),
            "description": "start conditions beyond the inputs",
        },
        "world_size": _whole(
            "number of ranks; they take turns on the devices that the task holds. Each rank of a"
            " command on accelerators needs a device of its own. A command with 1 may have several"
            " devices and start its ranks by itself, as torchrun does",
            1,
        ),
        "reservation": {
            "type": "string",
            "description": "name of a reservation for your tenant or you. The task runs in its"
            " windows alone: it waits for the next one, and is paused where one ends, without a"
            " loss. Without it a task uses a reservation unasked, and runs at any time",
        },
        "collectives": {
            "type": "string",
            "enum": ["exact", "native"],
            "default": "exact",
            "description": "whose collectives the ranks use. `exact`: the service's own, with the"
            " same bits on any number of devices. `native`: torch's own, NCCL or gloo, at full"
            " speed, for commands and jobs with a device for each rank (devices.min: world_size)",
        },
        "devices": _object(
            {
                "kind": {
                    "type": "string",
                    "default": "cpu",
                    "description": "kind of the devices",
                },
                "min": _whole(
                    "devices that it needs at once, on one host unless `across_hosts` is set", 1
                ),
                "max": _whole(
                    "devices that it can use; default: as many as ranks for a job, else `min`. A"
                    " command keeps `min`",
                    1,
                ),
                "memory_bytes": _whole("memory that each device must have", 0),
                "across_hosts": {
                    "type": "boolean",
                    "default": False,
                    "description": "its ranks or executors may lie on several hosts. Implied by"
                    " `hosts` of more than 1, and then never false",
                },
                "hosts": _whole(
                    "the number of hosts of one island on which the devices of a job lie, as many"
                    " on each: `min` is a multiple of it, and `max` is `min`. Default: 1, or any"
                    " number if `across_hosts` is set",
                    None,
                ),
                "fraction": {
                    "type": "number",
                    "minimum": 0.001,
                    "maximum": 0.999,
                    "description": "the part of one device that it takes, in thousandths, such as"
                    " `0.5`; other tasks have the rest at the same time. Its memory is bounded by"
                    " `memory_bytes`, or else by this part of the device's. Not for graphs",
                },
                "model": {
                    "type": "string",
                    "description": "words of the model's name that each device has, such as `h100`,"
                    " or the profile of a MIG instance, such as `1g.10gb`",
                },
                "compute_capability": {
                    "type": "string",
                    "description": "the least compute capability of each device, such as `9.0`",
                },
                "labels": _texts("labels that each device must have, such as `nvlink`"),
                "avoid_labels": _texts("labels of devices that it must not get, such as `spot`"),
            }
        ),
        "islands": _whole(
            "number of islands that a graph may be cut for, or that a job with `across_hosts` may"
            " span",
            1,
        ),
        "checkpoint": _object(
            {
                "every_s": {
                    "type": "number",
                    "default": 60.0,
                    "description": "seconds between checkpoints. A command stands still for"
                    " them at most one fiftieth of its time",
                },
                "keep": _whole("number of the newest checkpoints that are kept", 3),
                "best": {
                    **_object(
                        {
                            "metric": _METRIC,
                            "goal": _GOAL,
                            "keep": {
                                **_whole("number of the best checkpoints that are kept", 1),
                                "minimum": 1,
                                "maximum": MOST_BEST,
                            },
                        },
                        ["metric"],
                    ),
                    "description": "keeps the best checkpoints of a job or a command beside the"
                    " newest, by the metric at their step or last before it; of a command, by the"
                    " last value that it wrote before its files were copied. They are not deleted"
                    " for their age",
                },
            }
        ),
        "retry": {
            **_object(
                {
                    "max": _whole("further attempts after a failure; a pause never counts", 0),
                    "backoff": _object(
                        {
                            "first_s": {
                                "type": "number",
                                "default": 2.0,
                                "description": "seconds until the first further attempt; each one"
                                " after it waits twice as long",
                            },
                            "most_s": {
                                "type": "number",
                                "default": 600.0,
                                "description": "the most seconds until the next attempt",
                            },
                        }
                    ),
                    "rules": {
                        "type": "array",
                        "maxItems": MOST_RULES,
                        "items": _RETRY_RULE,
                        "description": "what follows which failure: the first rule that fits wins."
                        " If none fits, it is retried where that may help",
                    },
                }
            ),
            "type": ["object", "string"],
            "pattern": f"^{NEVER}$",
            "description": "what follows a failure; `never`: it is never started again, even"
            " if its device was lost",
        },
        "max_duration_s": {
            "type": "number",
            "default": 86400.0,
            "description": "seconds of device time after which it is ended",
        },
        "from_checkpoint": {
            "type": "string",
            "description": "id of a checkpoint of the same job and of your tenant, from which this"
            " task continues, or `NAME@best`: the best that the newest request of this name has at"
            " the submission, over all members of a lot (`NAME/TASK@best`: of one of its tasks)."
            " `params` are those of the checkpoint, and may be left out. A command"
            " begins in the working folder of another command's checkpoint, with any `world_size`."
            " If it is the same program with the same parameters, and the checkpoint has its"
            " processes, these go on where they stood",
        },
        "network": _object(
            {
                "allow": {
                    **_texts(
                        "what it may reach, as HOST:PORT; `*.pypi.org:443` stands for the names"
                        " below pypi.org. The tenant's policy must allow it"
                    ),
                    "maxItems": MAX_DESTINATIONS,
                }
            }
        ),
        "env": {
            "type": "object",
            "additionalProperties": {"type": "string"},
            "description": "environment variables of its process and of all that this starts, by"
            " name. Variables that the platform sets are refused",
        },
        "secrets": {
            **_texts(
                "secrets of yours or of your tenant, such as HF_TOKEN: each becomes the environment"
                " variable of its name, and its value is replaced in logs"
            ),
            "maxItems": MAX_SECRETS,
        },
        "mounts": {
            "type": "object",
            "additionalProperties": {"type": "string"},
            "description": "target -> mount: a folder of the host, named by an administrator, which"
            " the task sees at the target, read-only, such as `/data`",
        },
        "image": {
            "type": "string",
            "description": "the container image whose files are the root of this command,"
            " read-only: a name that an administrator gave, or REGISTRY/NAME@sha256:DIGEST of a"
            " registry that an administrator allows",
        },
        "resources": {
            **_object(
                {
                    "cpus": {
                        "type": "number",
                        "minimum": 0.1,
                        "description": "processors that it may use at once; 1.5 is one and a half",
                    },
                    "memory_bytes": _whole("host memory of its processes together", None),
                    "disk_bytes": _whole("disk of its working folder", None),
                    "processes": _whole("processes and threads, 1,000 at most", None),
                }
            ),
            "description": "limits on what it takes of its host. A host that cannot keep one of"
            " them never gets the task",
        },
        "notice": {
            **_object(
                {
                    "signal": {
                        "type": "string",
                        "enum": list(SIGNALS),
                        "default": "SIGUSR1",
                        "description": "sent to the first process of each rank; `none` sends none",
                    },
                    "seconds": {
                        "type": "number",
                        "default": 60.0,
                        "exclusiveMinimum": 0,
                        "maximum": MOST_S,
                        "description": "time before the stop, and less than `max_duration_s`; an"
                        " administrator may bound it",
                    },
                }
            ),
            "description": "notice that a command gets before its processes are stopped for good."
            " With it, exit status 85 means that the command begins again in its working folder",
        },
        "session": {
            **_object(
                {
                    "idle_s": {
                        "type": "number",
                        "default": USUAL_IDLE_S,
                        "minimum": LEAST_IDLE_S,
                        "maximum": MOST_IDLE_S,
                        "description": "seconds without computing and without input, after which"
                        " its device is given back; it comes back at the next keystroke",
                    },
                }
            ),
            "description": "a command that a person uses through `roundhouse shell` or `forward`",
        },
        "isolation": {
            "type": "string",
            "enum": [*ISOLATIONS],
            "description": "`process`: a function gets a process that no other task uses. Without"
            " it, functions of one request with the same module, bundle, packages, preset and"
            " limits may run one after another in one process; with `user`, those of all requests"
            " of the user that say so, too",
        },
        "array": {
            **_object(
                {
                    "count": {
                        **_whole("how many members; a matrix or a search counts its own", None),
                        "minimum": 1,
                        "maximum": MOST_MEMBERS,
                    },
                    "at_once": {
                        **_whole(
                            "most members that are queued or run at any time; 0 holds the lot",
                            USUAL_AT_ONCE,
                        ),
                        "minimum": 0,
                        "maximum": MOST_AT_ONCE,
                    },
                    "max_failures": {
                        "type": "number",
                        "minimum": 0,
                        "maximum": MOST_MEMBERS,
                        "description": "more failures hold the lot; below 1 a share of `count`",
                    },
                }
            ),
            "description": "makes the task a lot: many members from one description. Each has its"
            " index as `${array.index}` in params, env, the words of a command and the names in"
            " publish, and in the variable ROUNDHOUSE_ARRAY_INDEX unless it is a function",
        },
        "matrix": {
            "type": "object",
            "minProperties": 1,
            "maxProperties": MOST_KEYS + 1,
            "properties": {
                EXCLUDE: {"type": "array", "maxItems": MOST_EXCLUDED, "items": {"type": "object"}}
            },
            "additionalProperties": {"anyOf": _VALUES},
            "description": "makes the task a lot with a member for each combination of the values:"
            f" of each key a list, or a range such as `0-9`; at most {MOST_COMBINATIONS}"
            f" combinations. Keys go in the order of the alphabet, the last varies fastest."
            f" `{EXCLUDE}` lists combinations without a member. A value is"
            " `${matrix.KEY}`, or a parameter of that name if no text names it",
        },
        "stop": {
            **_object(
                {
                    "metric": _METRIC,
                    "goal": _GOAL,
                    "rungs": {
                        "type": "array",
                        "minItems": 1,
                        "maxItems": MOST_RUNGS,
                        "items": {"type": "integer", "minimum": 1, "maximum": MOST_STEP},
                        "description": "steps at which members are compared, rising; the last one"
                        " before their end",
                    },
                    "keep": {
                        "type": "number",
                        "default": USUAL_KEEP,
                        "exclusiveMinimum": 0,
                        "maximum": MOST_KEEP,
                        "description": "share of the members that goes on past a rung; 0.33 is a"
                        " third",
                    },
                },
                ["metric", "rungs"],
            ),
            "description": "pauses members of a lot that do worse: at each of the `rungs` the best"
            " `keep` go on. A paused one goes on from the same bits if it is among the best later,"
            " or if a person resumes it; it is cancelled when all others have ended. For jobs and"
            f" commands, and lots of at most {MOST_STOPPED} members",
        },
        "search": {
            **_object(
                {
                    "method": {
                        "type": "string",
                        "enum": [*METHODS],
                        "default": METHODS[0],
                        "description": "`random`: each trial draws each key; `grid`: combinations"
                        " in a shuffled order, none twice; `tpe`: proposed from the results of the"
                        " members so far, by the metric of `stop`, or else of `checkpoint.best`",
                    },
                    "trials": {
                        **_whole("how many members; default: all combinations of a grid", None),
                        "minimum": 1,
                        "maximum": MOST_COMBINATIONS,
                    },
                    "seed": {
                        **_whole("another seed draws other values", 0),
                        "minimum": 0,
                        "maximum": MOST_SEED,
                    },
                    "space": {
                        "type": "object",
                        "minProperties": 1,
                        "maxProperties": MOST_KEYS,
                        "additionalProperties": {"anyOf": [*_VALUES, _INTERVAL]},
                        "description": "of each key a list of values, a range such as `0-9`, or an"
                        " interval: `uniform`, `log`, `int` or `log_int` with the lowest and the"
                        " highest value",
                    },
                },
                ["space"],
            ),
            "description": "makes the task a lot whose members draw their values. A member's values"
            " depend on this field and on its index alone, except with `tpe`. A value is"
            " `${search.KEY}`, or a parameter of that name if no text names it",
        },
    },
    ["name", "run"],
)

_CHANNEL = _object(
    {
        "to": {"type": "string", "description": "name of a channel of the tenant"},
        "on": {
            "type": "array",
            "items": {"type": "string", "enum": list(EVENTS)},
            "description": "what is told there; default: done, failed, cancelled",
        },
    },
    ["to"],
)

SCHEMA = {
    **_object(
        {
            "name": {
                "type": "string",
                "description": "name of the request; default: made from the first task",
            },
            "tier": {
                "type": "string",
                "enum": ["premium", "standard", "basic"],
                "description": "default: standard, or less if the tenant may not have that",
            },
            "priority": _whole(
                "-100 to 100: the order among the tasks of one user; higher goes first", 0
            ),
            "tasks": {"type": "array", "items": _ref("DescriptorTask"), "minItems": 1},
            "bundle": {"type": "string", "description": "the code: sha256:… of an uploaded bundle"},
            "environment": {
                **_object(
                    {
                        "requirements": {
                            "type": "string",
                            "description": "path of a requirements.txt in the bundle",
                        },
                        "lock": {
                            "type": "string",
                            "description": "path of a uv.lock, a pylock.toml, or requirements with"
                            " hashes in the bundle",
                        },
                        "python": {
                            "type": "string",
                            "description": "version of Python, such as `3.12`; another one than the"
                            " platform's only where all tasks are commands",
                        },
                    }
                ),
                "description": "the packages that its tasks bring: `requirements` or `lock`."
                " They are locked with their hashes, are wheels only, and lie over the"
                " platform's",
            },
            "labels": {
                "type": "object",
                "additionalProperties": {"type": "string"},
                "description": "names and values of your own, by which lists can be filtered",
            },
            "notify": {
                "anyOf": [
                    _object(
                        {
                            "webhook": {
                                "type": "string",
                                "description": "http(s) URL that is called when the request ends,"
                                " or when a lot of it is held",
                            },
                            "on": _texts(
                                "for what it is called: done, failed, cancelled (the default: each"
                                " end), and held: more members of a lot failed than `max_failures`"
                                " allows"
                            ),
                        }
                    ),
                    {"type": "array", "maxItems": MOST_CHANNELS, "items": _CHANNEL},
                ],
                "description": "who is told of the request: channels of the tenant, or one URL;"
                " default: what `PUT /v1/me/notifications` set",
            },
        },
        ["tasks"],
    ),
    "title": "Descriptor",
    "examples": [EXAMPLE],
}

#: `app.api.openapi` adds these to the document, where bodies refer to them.
COMPONENTS = {
    "Descriptor": SCHEMA,
    "DescriptorTask": _TASK,
    "Graph": _GRAPH,
    "GraphNode": _NODE,
    "GraphTensor": _TENSOR,
}


def in_order(descriptor: dict[str, Any]) -> dict[str, Any]:
    """Return the descriptor with its fields, and those of its tasks, in the order of the schema."""
    tasks = [_ordered(task, _TASK) for task in descriptor.get("tasks", ())]
    return _ordered({**descriptor, "tasks": tasks}, SCHEMA)


def _ordered(given: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    known = {name: given[name] for name in schema["properties"] if name in given}
    return {**known, **given}  # an older version may have had further fields


DescriptorIn = Annotated[dict[str, Any], WithJsonSchema(_ref("Descriptor")), Body()]
GraphIn = Annotated[dict[str, Any], WithJsonSchema(_ref("Graph")), Body()]
