"""Reads a task descriptor, which is what a tenant submits, and reports all of its faults at once.

`parse` turns plain JSON values into frozen ones with all defaults filled in.  If there are faults,
it raises BadDescriptor with a JSON Pointer for each fault.  `as_json` writes a task in full, so
that `parse` reads back an equal task.

`core.model.dependencies` checks whether the tasks fit together and whether they can ever run here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from difflib import get_close_matches
from itertools import islice
from typing import Any

JSON = dict[str, Any]

TIERS = ("premium", "standard", "basic")
ENDS = ("done", "failed", "cancelled")
RUNS = ("job", "function", "command", "graph")
_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
# ranks of these stay on their devices, unless the descriptor says otherwise
ONE_DEVICE = ("function", "command")

MAX_TASKS = 1000
MAX_ISLANDS = 64
MAX_FAULTS = 100  # further faults are counted, not listed
UNKNOWN_TOLD = 10  # unknown fields listed per object; further ones are counted
MAX_HINTED = 64  # characters; for a longer name no similar name is suggested
MAX_COMPARED = 200  # known names with which an unknown name is compared
MAX_DEPTH = 32  # nesting of lists and objects
MAX_PARAMS_BYTES = 256 * 1024  # bytes per task, as JSON
# bytes of all words, and of the parameters as JSON: the limit of exec
MAX_COMMAND_BYTES = 64 * 1024
MAX_WORDS = 1000
MAX_LABELS = 64
MAX_MEMORY_BYTES = 2**50
MAX_DURATION_S = 365 * 86400.0

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_VERSION = re.compile(r"[1-9][0-9]{0,8}")
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
ENTRY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")
_URL = re.compile(r"https?://[^\s/]\S*")
_CHECKPOINT = re.compile(r"ckp_[0-9a-f]{32}")

NAME_RULE = "1 to 63 of a-z, 0-9, '.', '_' and '-', starting with a letter or digit"
WORD_RULE = "1 to 63 letters, digits and '_', not starting with a digit"
_DIGEST_RULE = '"sha256:" and 64 hexadecimal digits'
_CHECKPOINT_RULE = 'the id of a checkpoint: "ckp_" and 32 hexadecimal digits'


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of the input: its place (a JSON Pointer), a sentence, and a stable code."""

    pointer: str
    detail: str
    code: str = "invalid"


class BadDescriptor(Exception):
    """The input is not a valid descriptor; `faults` lists all that is wrong with it."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        self.faults = faults
        super().__init__("; ".join(f"{fault.pointer or '/'}: {fault.detail}" for fault in faults))


# --- the values ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """The code of a task: `kind` is one of RUNS; `entry` is "module:Name", `argv` a command.

    `graph` is "sha256:<hex>" of a stored graph of the tenant, or a graph as JSON
    (`core.model.task_graph`).  `part` is the part of the graph that a task runs
    (`core.placement.partitions`).  `took_ms` and `made_bytes` are how long the graph's nodes took
    before, and how large their blocks were.  These three are computed, so `parse` rejects them.
    """

    kind: str
    entry: str = ""
    argv: tuple[str, ...] = ()
    graph: str | JSON = ""
    part: JSON | None = None
    took_ms: Mapping[str, float] = field(default_factory=dict)
    made_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The source of an input: `output` of the task `name`, or the datablock `name`.

    `version` is the version of a datablock; None is the newest at the time of the submission.
    """

    kind: str  # "task" or "datablock"
    name: str
    output: str = ""
    version: int | None = None

    @property
    def block(self) -> str:
        """The name of the block: "TASK.OUTPUT", "NAME" or "NAME@VERSION"."""
        if self.kind == "task":
            return f"{self.name}.{self.output}"
        return self.name if self.version is None else f"{self.name}@{self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartConditions:
    """Start conditions other than the inputs; `not_before_s` is in seconds since 1970."""

    after: tuple[str, ...] = ()
    not_before_s: float | None = None
    hold: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """Asks for `min` to `max` devices of one kind, each with at least `memory_bytes`.

    The devices lie on one host, or on several hosts of an island if `across_hosts` is set.
    """

    kind: str = "cpu"
    min: int = 1
    max: int = 1
    memory_bytes: int = 0
    across_hosts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    every_s: float = 60.0
    keep: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Notify:
    webhook: str
    on: tuple[str, ...] = ENDS


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDescriptor:
    """`type` selects the preset; `inputs` maps a port to its source; `retry_max` counts crashes.

    `publish` maps an output to the datablock that gets it as its new version.  `from_checkpoint` is
    the id of a checkpoint of another task, from which this job continues.  `islands` is the most
    islands that a graph may be partitioned for, or that a gang with `across_hosts` may span.
    """

    name: str
    type: str
    run: RunSpec
    params: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Source] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    publish: Mapping[str, str] = field(default_factory=dict)
    start: StartConditions = field(default_factory=StartConditions)
    world_size: int = 1
    devices: Devices = field(default_factory=Devices)
    islands: int = 1
    checkpoint: Checkpointing = field(default_factory=Checkpointing)
    retry_max: int = 0
    max_duration_s: float = 86400.0
    from_checkpoint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """One request.  `name` is None if the tenant gave none; `bundle` is "sha256:<hex>" or None."""

    name: str | None
    tier: str
    priority: int
    tasks: tuple[TaskDescriptor, ...]
    bundle: str | None
    labels: Mapping[str, str] = field(default_factory=dict)
    notify: Notify | None = None


# --- from JSON ----------------------------------------------------------------------------------


def parse(body: object) -> Descriptor:
    """Read a request; raises BadDescriptor with all its faults."""
    faults = list(not_plain(body))
    if faults:
        raise BadDescriptor(shortened(faults))
    fields = Fields(body, "", faults)
    descriptor = Descriptor(
        name=fields.text("name", None, NAME, NAME_RULE),
        tier=fields.one_of("tier", TIERS, "standard"),
        priority=fields.integer("priority", 0, least=-100, most=100),
        tasks=_tasks(fields),
        bundle=fields.text("bundle", None, _DIGEST, _DIGEST_RULE),
        labels=_labels(fields),
        notify=_notify(fields),
    )
    fields.close()
    if fields.body.get("bundle") is None and any(
        task.run.entry or task.run.graph for task in descriptor.tasks
    ):
        told = "jobs, functions and graphs need a bundle with their code"
        faults.append(Fault("/bundle", told, "missing"))
    if faults:
        raise BadDescriptor(shortened(faults))
    return descriptor


def _tasks(fields: Fields) -> tuple[TaskDescriptor, ...]:
    found = fields.items("tasks", least=1, most=MAX_TASKS)
    tasks = tuple(_task(Fields(body, where, fields.faults)) for where, body in found)
    seen: set[str] = set()
    for (where, _), task in zip(found, tasks, strict=True):
        if task.name in seen:
            fields.faults.append(
                Fault(f"{where}/name", f"the task name {task.name!r} is used twice", "twice")
            )
        seen.add(task.name or where)
    return tasks


def _task(fields: Fields) -> TaskDescriptor:
    fields.require("name", "run")
    name = fields.text("name", "", NAME, NAME_RULE)
    run = _run(fields.inside("run"))
    usual = _executors(fields.body) if run.kind == "graph" else 1
    world_size = fields.integer("world_size", usual, least=1, most=100_000)
    task = TaskDescriptor(
        name=name,
        type=fields.text("type", "default", NAME, NAME_RULE),
        run=run,
        params=_params(fields),
        inputs=_inputs(fields),
        outputs=fields.texts("outputs", WORD, WORD_RULE),
        publish=_publish(fields),
        start=_start(fields.inside("start")),
        world_size=world_size,
        devices=_devices(
            fields.inside("devices"), world_size, 1 if run.kind in ONE_DEVICE else world_size
        ),
        islands=fields.integer("islands", 1, least=1, most=MAX_ISLANDS),
        checkpoint=_checkpoint(fields.inside("checkpoint")),
        retry_max=_retry(fields.inside("retry")),
        max_duration_s=fields.number("max_duration_s", 86400.0, above=0, most=MAX_DURATION_S),
        from_checkpoint=fields.text("from_checkpoint", None, _CHECKPOINT, _CHECKPOINT_RULE),
    )
    if task.run.kind == "command":
        _check_command(fields, task)
    if task.islands > 1 and not (task.run.kind == "graph" or task.devices.across_hosts):
        told = "only a graph, or a job with devices.across_hosts, can use several islands; set 1"
        fields.fault("islands", told)
    if task.from_checkpoint is not None and task.run.kind != "job":
        fields.fault(
            "from_checkpoint", f"only a job can start from a checkpoint, not a {task.run.kind}"
        )
    fields.close()
    return task


def _run(fields: Fields) -> RunSpec:
    given = [kind for kind in RUNS if kind in fields.body]
    if fields.given and len(given) != 1:
        said = ", ".join(given) or "none of them"
        fields.fault("", f"must have exactly one of {', '.join(RUNS)}; got {said}")
    rule = 'of the form "module:Name"'
    entries = {kind: fields.text(kind, "", ENTRY, rule) for kind in ("job", "function")}
    argv = fields.texts("command", None, "")
    graph = _graph(fields)
    if fields.body.get("command") == []:
        fields.fault("command", "must have at least one word", "missing")
    elif argv and not argv[0]:
        fields.fault("command/0", "the first word must be the program to run; got an empty word")
    fields.close()
    if len(given) != 1:
        return RunSpec(kind="job")
    return RunSpec(kind=given[0], entry=entries.get(given[0], ""), argv=argv, graph=graph)


def _graph(fields: Fields) -> str | JSON:
    if isinstance(fields.body.get("graph"), str):
        name: str = fields.text("graph", "", _DIGEST, _DIGEST_RULE)
        return name
    graph = fields.mapping("graph")
    if fields.body.get("graph") == {}:
        fields.fault("graph/nodes", "nodes is required", "missing")
    return graph or ""


def _check_command(fields: Fields, task: TaskDescriptor) -> None:
    """Report a command or parameters that exceed what the operating system passes to a program."""
    argv = task.run.argv
    size = sum(len(word.encode()) for word in argv)
    if len(argv) > MAX_WORDS or size > MAX_COMMAND_BYTES:
        told = (
            f"must have at most {MAX_WORDS} words of {MAX_COMMAND_BYTES} bytes in total; got "
            f"{len(argv)} words of {size} bytes"
        )
        fields.fault("run/command", f"{told}; put data into a file of the bundle", "range")
    if task.world_size > 1 and (launcher := _launcher(argv)):
        told = (
            f"must not be {launcher}, which would start the ranks a second time: Roundhouse starts "
            "each rank as torchrun would. Name the script itself, as in [python, train.py]"
        )
        fields.fault("run/command", told, "launcher")
    size = len(json.dumps(dict(task.params)).encode())
    if size > MAX_COMMAND_BYTES:
        told = (
            f"must be at most {MAX_COMMAND_BYTES} bytes for a command (ROUNDHOUSE_PARAMS); got "
            f"{size} bytes"
        )
        fields.fault("params", f"{told}; put data into a file of the bundle", "range")


def _launcher(argv: Sequence[str]) -> str:
    """Return the launcher of ranks that the command runs, or "" if it runs none."""
    program = argv[0].rpartition("/")[2] if argv else ""
    if program == "torchrun":
        return program
    if program.startswith("python") and "-m" in argv[1:-1]:
        module = argv[argv.index("-m") + 1]
        return module if module in _LAUNCHERS else ""
    return ""


def _params(fields: Fields) -> JSON:
    params = fields.mapping("params")
    size = len(json.dumps(params).encode())
    if size > MAX_PARAMS_BYTES:
        told = (
            f"must be at most {MAX_PARAMS_BYTES} bytes; got {size} bytes. Put data into a "
            "file of the bundle"
        )
        fields.fault("params", told, "range")
    for name in params:
        if not WORD.fullmatch(name):
            fields.fault(f"params/{escaped(name)}", f"the name of a parameter must be {WORD_RULE}")
    return params


def _inputs(fields: Fields) -> dict[str, Source]:
    sources = {}
    for port, said in fields.mapping("inputs").items():
        where = f"inputs/{escaped(port)}"
        if not WORD.fullmatch(port):
            fields.fault(where, f"the name of an input must be {WORD_RULE}")
        source = source_of(said) if isinstance(said, str) else None
        if source is None:
            fields.fault(
                where, 'must be "TASK.OUTPUT", "datablock:NAME" or "datablock:NAME@VERSION"'
            )
        else:
            sources[port] = source
    return sources


def source_of(said: str) -> Source | None:
    """Return the source that an input names, or None if the text has no valid form."""
    if said.startswith("datablock:"):
        return datablock(said.removeprefix("datablock:"))
    name, _, output = said.rpartition(".")
    if not NAME.fullmatch(name) or not WORD.fullmatch(output):
        return None
    return Source(kind="task", name=name, output=output)


def datablock(said: str) -> Source | None:
    """Return the datablock that "NAME" or "NAME@VERSION" names, or None for another form."""
    name, at, version = said.partition("@")
    if not NAME.fullmatch(name) or (at and not _VERSION.fullmatch(version)):
        return None
    return Source(kind="datablock", name=name, version=int(version) if at else None)


def _publish(fields: Fields) -> dict[str, str]:
    published: dict[str, str] = {}
    names: set[str] = set()
    said = fields.body.get("outputs")
    outputs = {port for port in said if isinstance(port, str)} if isinstance(said, list) else set()
    for port, name in fields.mapping("publish").items():
        where = f"publish/{escaped(port)}"
        if port not in outputs:
            fields.fault(where, f"{port!r:.80} is not in this task's outputs", "unknown-output")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            fields.fault(where, f"the name of a datablock must be {NAME_RULE}")
        elif name in names:
            fields.fault(
                where, f"another output of this task is also published as {name!r}", "twice"
            )
        else:
            published[port] = name
            names.add(name)
    return published


def _start(fields: Fields) -> StartConditions:
    start = StartConditions(
        after=fields.texts("after", NAME, NAME_RULE),
        not_before_s=fields.time("not_before"),
        hold=fields.flag("hold", False),
    )
    fields.close()
    return start


def _executors(body: JSON) -> int:
    """Return the default world size of a graph: the most devices that it may have."""
    devices = body.get("devices")
    said = devices if isinstance(devices, dict) else {}
    most = said.get("min") if said.get("max") is None else said["max"]
    return most if isinstance(most, int) and 1 <= most <= 100_000 else 1


def _devices(fields: Fields, world_size: int, usual_most: int) -> Devices:
    least = fields.integer("min", 1, least=1, most=world_size)
    most = fields.integer("max", max(least, usual_most), least=1, most=world_size)
    if least > most:
        fields.fault("min", f"min must be at most max; got min {least} and max {most}", "range")
    devices = Devices(
        kind=fields.text("kind", "cpu", NAME, NAME_RULE),
        min=least,
        max=most,
        memory_bytes=fields.integer("memory_bytes", 0, least=0, most=MAX_MEMORY_BYTES),
        across_hosts=fields.flag("across_hosts", False),
    )
    fields.close()
    return devices


def _checkpoint(fields: Fields) -> Checkpointing:
    checkpoint = Checkpointing(
        every_s=fields.number("every_s", 60.0, above=0, most=MAX_DURATION_S),
        keep=fields.integer("keep", 3, least=1, most=1000),
    )
    fields.close()
    return checkpoint


def _retry(fields: Fields) -> int:
    retry_max = fields.integer("max", 0, least=0, most=100)
    fields.close()
    return retry_max


def _labels(fields: Fields) -> dict[str, str]:
    labels = fields.mapping("labels")
    if len(labels) > MAX_LABELS:
        fields.fault("labels", f"must have at most {MAX_LABELS} labels; got {len(labels)}", "range")
    for name, value in labels.items():
        where = f"labels/{escaped(name)}"
        if not _LABEL.fullmatch(name):
            fields.fault(
                where, "the name of a label must be 1 to 63 letters, digits, '.', '_', '/' and '-'"
            )
        if not isinstance(value, str) or len(value) > 255:
            fields.fault(
                where, "the value of a label must be a text of at most 255 characters", "type"
            )
    return labels


def _notify(fields: Fields) -> Notify | None:
    inside = fields.inside("notify")
    if not inside.given:
        return None
    inside.require("webhook")
    notify = Notify(
        webhook=inside.text("webhook", "", _URL, "an http or https address"),
        on=inside.texts("on", re.compile("|".join(ENDS)), f"of {', '.join(ENDS)}") or ENDS,
    )
    inside.close()
    return notify


# --- to JSON ------------------------------------------------------------------------------------


def as_json(task: TaskDescriptor) -> JSON:
    """Return the task in full, every default written out; `parse` reads the same task from it."""
    said = {"command": list(task.run.argv), "graph": task.run.graph}
    run: Any = said.get(task.run.kind, task.run.entry)
    before = {"took_ms": dict(task.run.took_ms), "made_bytes": dict(task.run.made_bytes)}
    planned = {"part": task.run.part, **before}
    return {
        "name": task.name,
        "type": task.type,
        "run": {task.run.kind: run, **{name: said for name, said in planned.items() if said}},
        "params": dict(task.params),
        "inputs": {port: _said(source) for port, source in task.inputs.items()},
        "outputs": list(task.outputs),
        "publish": dict(task.publish),
        "start": {
            "after": list(task.start.after),
            "not_before": _rfc3339(task.start.not_before_s),
            "hold": task.start.hold,
        },
        "world_size": task.world_size,
        "devices": {
            "kind": task.devices.kind,
            "min": task.devices.min,
            "max": task.devices.max,
            "memory_bytes": task.devices.memory_bytes,
            "across_hosts": task.devices.across_hosts,
        },
        "islands": task.islands,
        "checkpoint": {"every_s": task.checkpoint.every_s, "keep": task.checkpoint.keep},
        "retry": {"max": task.retry_max},
        "max_duration_s": task.max_duration_s,
        "from_checkpoint": task.from_checkpoint,
    }


def _said(source: Source) -> str:
    return f"datablock:{source.block}" if source.kind == "datablock" else source.block


def _rfc3339(at_s: float | None) -> str | None:
    return None if at_s is None else datetime.fromtimestamp(at_s, UTC).isoformat()


# --- how fields are read ------------------------------------------------------------------------


class Fields:
    """Reads the fields of one object and collects faults; fields that are never read are unknown.

    A field that is missing, null or wrong reads as its default, so that reading can go on.
    """

    def __init__(self, body: object, pointer: str, faults: list[Fault], given: bool = True) -> None:
        self.pointer, self.faults = pointer, faults
        self.given = given and isinstance(body, dict)
        self.body: JSON = body if isinstance(body, dict) else {}
        self._known: list[str] = []
        if given and not self.given:
            self.fault("", f"must be an object, not {_kind(body)}", "type")

    def fault(self, key: str, detail: str, code: str = "invalid") -> None:
        where = f"{self.pointer}/{key}" if key else self.pointer
        self.faults.append(Fault(where, detail, code))

    def require(self, *keys: str) -> None:
        for key in keys:
            if self.given and self.body.get(key) is None:
                self.fault(key, f"{key} is required", "missing")

    def close(self) -> None:
        """Report each field that was not read as unknown, with a hint; UNKNOWN_TOLD at most."""
        known = set(self._known)
        unknown = [key for key in self.body if key not in known]
        for key in unknown[:UNKNOWN_TOLD]:
            # Faults beyond MAX_FAULTS are not listed, so no similar name is searched for them.
            near = near_name(key, self._known) if len(self.faults) < MAX_FAULTS else None
            hint = f"did you mean {near!r}?" if near else f"known: {', '.join(self._known)}"
            where = key if len(key) <= MAX_HINTED else ""
            self.fault(escaped(where), f"unknown field {_shown(key)}; {hint}", "unknown-field")
        if (more := len(unknown) - UNKNOWN_TOLD) > 0:
            self.fault("", f"{more} more unknown fields", "unknown-field")

    def text(self, key: str, default: Any, pattern: re.Pattern[str], rule: str) -> Any:
        """Return a text, or `default` (which may be None)."""
        value = self._read(key, str, "a text")
        if value is None:
            return default
        if not pattern.fullmatch(value):
            self.fault(key, f"must be {rule}; got {_shown(value)}")
            return default
        return value

    def texts(self, key: str, pattern: re.Pattern[str] | None, rule: str) -> tuple[str, ...]:
        """Return a list of texts; a text that must match `pattern` may occur only once."""
        good: list[str] = []
        seen: set[str] = set()
        for n, value in enumerate(self._read(key, list, "a list") or []):
            if not isinstance(value, str):
                self.fault(f"{key}/{n}", f"must be a text, not {_kind(value)}", "type")
            elif pattern is not None and not pattern.fullmatch(value):
                self.fault(f"{key}/{n}", f"must be {rule}; got {_shown(value)}")
            elif pattern is not None and value in seen:
                self.fault(f"{key}/{n}", f"must not list {value!r} twice", "twice")
            else:
                good.append(value)
                seen.add(value)
        return tuple(good)

    def integer(self, key: str, default: int, *, least: int, most: int) -> int:
        """Return a whole number; a form like 8e9 is accepted."""
        value = self._read(key, (int, float), "a whole number")
        if value is None:
            return default
        if isinstance(value, float) and not value.is_integer():
            self.fault(key, f"must be a whole number; got {value}", "type")
        elif not least <= value <= most:
            self.fault(key, f"must be from {least} to {most}; got {value}", "range")
        else:
            return int(value)
        return default

    def number(self, key: str, default: float, *, above: float, most: float) -> float:
        value = self._read(key, (int, float), "a number")
        if value is None:
            return default
        if not above < value <= most:
            self.fault(key, f"must be above {above:g} and at most {most:g}; got {value}", "range")
            return default
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._read(key, bool, "true or false")
        return default if value is None else bool(value)

    def one_of(self, key: str, words: tuple[str, ...], default: str) -> str:
        value = self._read(key, str, "a text")
        if value is None or value in words:
            return value or default
        self.fault(key, f"must be one of {', '.join(words)}; got {_shown(value)}")
        return default

    def time(self, key: str) -> float | None:
        """Return an RFC 3339 time, which must have an offset, in seconds since 1970."""
        value = self._read(key, str, "a text")
        if value is None:
            return None
        try:
            at = datetime.fromisoformat(value)
            if at.tzinfo is not None and "T" in value.upper():
                # raises OverflowError if the year in UTC is out of range
                return at.astimezone(UTC).timestamp()
        except (ValueError, OverflowError):
            pass  # reported below, like a time without an offset
        self.fault(key, f"must be a time like 2026-01-31T18:00:00+01:00; got {_shown(value)}")
        return None

    def mapping(self, key: str) -> JSON:
        value: JSON = self._read(key, dict, "an object") or {}
        return value

    def items(self, key: str, *, least: int, most: int) -> list[tuple[str, object]]:
        """Return the items of a list, each with its pointer."""
        value = self._read(key, list, "a list")
        if value is None and self.given and self.body.get(key) is None:
            self.fault(key, f"{key} is required", "missing")
        elif value is not None and not least <= len(value) <= most:
            self.fault(key, f"must have from {least} to {most} items; got {len(value)}", "range")
        return [(f"{self.pointer}/{key}/{n}", item) for n, item in enumerate((value or [])[:most])]

    def inside(self, key: str) -> Fields:
        """Return the object under `key`; if it is missing, all of its fields read as defaults."""
        self._known.append(key)
        given = self.body.get(key) is not None
        return Fields(self.body.get(key), f"{self.pointer}/{key}", self.faults, given)

    def _read(self, key: str, kind: type | tuple[type, ...], wanted: str) -> Any:
        """Return the value under `key`, or None if it is missing, null or of another kind."""
        self._known.append(key)
        value = self.body.get(key)
        if value is None:
            return None
        if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
        self.fault(key, f"must be {wanted}, not {_kind(value)}", "type")
        return None


def not_plain(body: object) -> Iterator[Fault]:
    """Yield faults for values that JSON in Postgres cannot hold, and for too deep nesting."""
    stack: list[tuple[str, object, int]] = [("", body, 0)]
    while stack:
        where, value, depth = stack.pop()
        if depth > MAX_DEPTH:
            yield Fault(where, f"must be nested at most {MAX_DEPTH} levels deep", "range")
        elif isinstance(value, dict):
            stack += [(f"{where}/{escaped(key)}", item, depth + 1) for key, item in value.items()]
            stack += [(f"{where}/{escaped(key)}", key, depth + 1) for key in value]
        elif isinstance(value, list):
            stack += [(f"{where}/{n}", item, depth + 1) for n, item in enumerate(value)]
        elif isinstance(value, float) and not math.isfinite(value):
            yield Fault(where, f"{value} is not a valid JSON number")
        elif isinstance(value, str) and not _storable(value):
            yield Fault(where, "a text contains a NUL character or half a surrogate pair")


def _storable(text: str) -> bool:
    return "\x00" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)


def shortened(faults: Sequence[Fault]) -> tuple[Fault, ...]:
    if len(faults) <= MAX_FAULTS:
        return tuple(faults)
    more = Fault("", f"{len(faults) - MAX_FAULTS} more faults are not listed", "more")
    return (*faults[:MAX_FAULTS], more)


_KINDS: tuple[tuple[type, str], ...] = (
    (bool, "true or false"),
    (int, "a number"),
    (float, "a number"),
    (str, "a text"),
    (list, "a list"),
    (dict, "an object"),
)


def _kind(value: object) -> str:
    return next((name for kind, name in _KINDS if isinstance(value, kind)), "null")


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


def near_name(word: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant.

    Names longer than MAX_HINTED are not compared, because that takes long.
    """
    if len(word) > MAX_HINTED:
        return None
    near = get_close_matches(word, list(islice(known, MAX_COMPARED)), n=1)
    return near[0] if near else None


class Hints:
    """Says which known names were probably meant, for the first MAX_FAULTS unknown names.

    Each costs a millisecond, and further faults are not listed.
    """

    def __init__(self) -> None:
        self._left = MAX_FAULTS

    def hint(self, word: str, known: Iterable[str]) -> str:
        self._left -= 1
        near = near_name(word, known) if self._left >= 0 else None
        return f"; did you mean {near!r}?" if near else ""


def escaped(key: str) -> str:
    """Escape a key as one token of a JSON Pointer."""
    return str(key).replace("~", "~0").replace("/", "~1")
