"""Reads a task descriptor, which is what a tenant submits, and reports all of its faults at once.

`parse` turns plain JSON values into frozen ones with all defaults filled in.  If there are faults,
it raises BadDescriptor with a JSON Pointer for each fault.  `as_json` writes a task in full; in
this form it is stored, and `from_json` reads it back, with what was computed since (`RunSpec`).
The frozen TaskDescriptor travels whole: from the row into the launch order (`to_wire`), and from
there to the process that runs the task.

`core.model.graphs.dependencies` checks whether the tasks fit together and whether they can ever run
here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from app.core.model import codec, device_fraction
from app.core.model.codec import BadValue
from app.core.model.device_choice import (
    ANY_DEVICE,
    CAPABILITY,
    MODEL,
    WHOLE_MILLI,
    DeviceChoice,
    text_of,
    with_packages,
)
from app.core.model.device_fraction import read_fraction
from app.core.model.fields import (
    NAME,
    NAME_RULE,
    WORD,
    WORD_RULE,
    Fault,
    Fields,
    escaped,
    not_plain,
    shortened,
)
from app.core.model.launchers import find_launcher
from app.core.model.provisions import collectives, network_policy, notice, session
from app.core.model.provisions.after_requests import AfterRequest, read_after_requests
from app.core.model.provisions.artifacts import read_artifacts
from app.core.model.provisions.best_rule import OF_BEST, BestRule, read_best
from app.core.model.provisions.collectives import (
    EXACT,
    NATIVE,
    check_devices,
    read_collectives,
)
from app.core.model.provisions.container_image import need_of_image, read_image
from app.core.model.provisions.environment import (
    EnvironmentFile,
    TaskEnvironment,
    read_environment,
    read_task_environment,
)
from app.core.model.provisions.host_parts import check_parts, read_hosts
from app.core.model.provisions.lots import Array, Matrix, read_lot
from app.core.model.provisions.mounts import need_of, read_mounts
from app.core.model.provisions.network_policy import NO_NETWORK, NetworkWish, read_network
from app.core.model.provisions.notice import Notice, read_notice
from app.core.model.provisions.notify import ChannelWish, Notify, read_notify
from app.core.model.provisions.resources import NO_RESOURCES, Resources, read_resources
from app.core.model.provisions.retry import RetryPolicy, check_rules, read_retry
from app.core.model.provisions.searches import LotSearch
from app.core.model.provisions.session import InteractiveSession, read_session
from app.core.model.provisions.stop_rule import StopRule, read_stop
from app.core.model.provisions.variables import check_variables, read_secrets, read_variables

JSON = dict[str, Any]

TIERS = ("premium", "standard", "basic")
RUNS = ("job", "function", "command", "graph")
OF_REQUEST = "request"  # kind of a source that is an output of another request's task
# Values of `isolation`: a function that shares its process with no other function, and one that
# shares it with all requests of its user.  The default is to share it within its request.
OWN_PROCESS, OF_USER = "process", "user"
ISOLATIONS = (OWN_PROCESS, OF_USER)
SHARING_NEED = "isolation:user"  # of devices whose workers know that value
# ranks of these programs keep their devices, unless the descriptor says otherwise
ONE_DEVICE = ("function", "command")

MAX_TASKS = 1000
MAX_MATRICES = 16  # most tasks of a request that have a matrix or a search
MAX_ISLANDS = 64
MAX_RANKS = 100_000  # of a task, and most devices of a command that starts its own ranks
MAX_PARAMS_BYTES = 256 * 1024  # most bytes of a task's parameters as JSON
# bytes of all words, and of the parameters as JSON: the limit of exec
MAX_COMMAND_BYTES = 64 * 1024
MAX_WORDS = 1000
MAX_LABELS = 64
MAX_DEVICE_LABELS = 16  # most labels of devices that a task may name
MAX_MEMORY_BYTES = 2**50
MAX_DURATION_S = 365 * 86400.0


_VERSION = re.compile(r"[1-9][0-9]{0,8}")
ENTRY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")
_CHECKPOINT = re.compile(rf"ckp_[0-9a-f]{{32}}|{NAME.pattern}(/{NAME.pattern})?{OF_BEST}")

_MODEL_RULE = "1 to 63 letters, digits, spaces and ._/()+-, starting with a letter or digit"
_CAPABILITY_RULE = 'a version such as "9.0"'
_DIGEST_RULE = '"sha256:" and 64 hexadecimal digits'
_CHECKPOINT_RULE = (
    'the id of a checkpoint ("ckp_" and 32 hexadecimal digits), "NAME@best" or "NAME/TASK@best"'
)


class BadDescriptor(Exception):
    """Raised for an invalid descriptor; `faults` lists everything that is wrong."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        self.faults = faults
        super().__init__("; ".join(f"{fault.pointer or '/'}: {fault.detail}" for fault in faults))


# --- the values ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """Describes the code of a task."""

    kind: str  # one of RUNS
    entry: str = ""  # "module:Name" of a job or function
    argv: tuple[str, ...] = ()  # the command and its arguments
    # "sha256:<hex>" of a stored graph of the tenant, or, in a request, a graph as JSON
    # (`core.model.graphs.task_graph`)
    graph: str | JSON = ""
    # The part of the graph that the task runs (`core.placement.partitions`). This field and the
    # next two are computed, so `parse` rejects them.
    part: JSON | None = None
    # how long the nodes of the graph took in an earlier run
    took_ms: Mapping[str, float] = field(default_factory=dict)
    # how large the blocks of the graph were in an earlier run
    made_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def graph_sha256(self) -> str:
        """The hash of the stored graph."""
        assert isinstance(self.graph, str), "a graph is stored before it runs"
        return self.graph.removeprefix("sha256:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Names the source of an input: `output` of the task `name`, or the datablock `name`.

    `version` is the version of a datablock; None is the newest at the time of the submission.
    `request` is the name or the id of another request, whose task is meant. If `name` ends in
    `@best`, it names a lot of that request, and its best member is meant.
    """

    kind: str  # "task", "datablock" or OF_REQUEST
    name: str
    output: str = ""
    version: int | None = None
    request: str = ""

    @property
    def is_of_best(self) -> bool:
        """True if the output is that of the best member of a lot."""
        return self.name.endswith(OF_BEST)

    @property
    def task(self) -> str:
        """The name of the task, or of the lot."""
        return self.name.removesuffix(OF_BEST)

    @property
    def block(self) -> str:
        """The name of the block: "TASK.OUTPUT", "REQUEST/TASK.OUTPUT", "NAME" or "NAME@VERSION"."""
        if self.kind == "task":
            return f"{self.name}.{self.output}"
        if self.kind == OF_REQUEST:
            return f"{self.request}/{self.name}.{self.output}"
        return self.name if self.version is None else f"{self.name}@{self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartConditions:
    """Start conditions other than the inputs; `not_before_s` is in seconds since 1970."""

    after: tuple[str, ...] = ()
    after_requests: tuple[AfterRequest, ...] = ()
    not_before_s: float | None = None
    hold: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """Asks for `min` to `max` devices of one kind, each with at least `memory_bytes`.

    The devices lie on one host, or on several hosts of an island if `across_hosts` is set; if the
    `choice` names their number, on so many, as many on each.  Each of them suits the `choice`.
    """

    kind: str = "cpu"
    min: int = 1
    max: int = 1
    memory_bytes: int = 0
    across_hosts: bool = False
    choice: DeviceChoice = ANY_DEVICE

    @property
    def hosts(self) -> int | None:
        """On how many hosts the devices lie, as many on each; None for one, or for any number if
        `across_hosts` is set.
        """
        return self.choice.hosts or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """Says when checkpoints are made, and how many of the newest, and of the best, are kept."""

    every_s: float = 60.0
    keep: int = 3
    best: BestRule | None = None

    def as_json(self) -> JSON:
        best = self.best.as_json() if self.best is not None else None
        return {"every_s": self.every_s, "keep": self.keep, "best": best}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDescriptor:
    """Describes one task."""

    name: str
    type: str  # selects the preset
    run: RunSpec
    params: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Source] = field(default_factory=dict)  # port -> its source
    outputs: tuple[str, ...] = ()
    # paths in a command's working folder that are kept (`provisions.artifacts`); (): usual ones
    artifacts: tuple[str, ...] = ()
    # output -> the datablock that gets it as its new version
    publish: Mapping[str, str] = field(default_factory=dict)
    start: StartConditions = field(default_factory=StartConditions)
    world_size: int = 1
    devices: Devices = field(default_factory=Devices)
    # most islands that a graph may be partitioned for, or that a gang across hosts may span
    islands: int = 1
    reservation: str | None = None  # name of the reservation in whose windows alone it runs
    checkpoint: Checkpointing = field(default_factory=Checkpointing)
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    max_duration_s: float = 86400.0
    # Checkpoint of another task, from which this job continues, or in whose working folder this
    # command begins: an id; in a request, also "NAME@best" or "NAME/TASK@best".
    from_checkpoint: str | None = None
    network: NetworkWish = NO_NETWORK
    # environment variables of its process, and of all that the process starts
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()  # names of the variables whose values are secrets
    # target -> the mount that it shows (`provisions.mounts`)
    mounts: Mapping[str, str] = field(default_factory=dict)
    image: str | None = None  # container image that is its root (`provisions.container_image`)
    environment: TaskEnvironment | None = None  # computed from the environment of the request
    notice: Notice | None = None
    resources: Resources = NO_RESOURCES
    session: InteractiveSession | None = None
    # one of ISOLATIONS, or "" for a function that shares its process within its request
    # (`core.model.shared_process`)
    isolation: str = ""
    # whose sums the ranks have: one of `provisions.collectives.ENGINES`
    collectives: str = EXACT
    # Set for a lot, which is many tasks (`provisions.lots`); its members have none.
    array: Array | None = None
    matrix: Matrix | None = None
    search: LotSearch | None = None
    stop: StopRule | None = None  # of a lot, and of each of its members

    @property
    def drawn_from(self) -> Matrix | LotSearch | None:
        """Return the source of the values that differ between the members of a lot."""
        return self.matrix or self.search


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """Describes one request. `name` is None if the tenant gave none; `bundle` is "sha256:<hex>" or
    None.
    """

    name: str | None
    tier: str
    priority: int
    tasks: tuple[TaskDescriptor, ...]
    bundle: str | None
    labels: Mapping[str, str] = field(default_factory=dict)
    # what is called, or the channels that are told; () is nobody, None what the user usually wants
    notify: Notify | tuple[ChannelWish, ...] | None = None
    environment: EnvironmentFile | None = None


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
        notify=read_notify(fields),
        environment=read_environment(fields.inside("environment")),
    )
    fields.close()
    faults.extend(_faults_together(descriptor, has_bundle=fields.body.get("bundle") is not None))
    if faults:
        raise BadDescriptor(shortened(faults))
    return descriptor


def _faults_together(descriptor: Descriptor, *, has_bundle: bool) -> Iterator[Fault]:
    """Yield faults of fields that do not go together."""
    if descriptor.environment is not None:
        if not has_bundle:
            yield Fault("/bundle", "the environment needs a bundle with its file", "missing")
        for n, task in enumerate(descriptor.tasks):
            if task.image is not None:
                told = "a container image has its own packages; leave out environment"
                yield Fault(f"/tasks/{n}/image", told)
    if not has_bundle and any(task.run.entry or task.run.graph for task in descriptor.tasks):
        told = "jobs, functions and graphs need a bundle with their code"
        yield Fault("/bundle", told, "missing")


def _tasks(fields: Fields) -> tuple[TaskDescriptor, ...]:
    found = fields.items("tasks", least=1, most=MAX_TASKS)
    matrices = [
        f"{where}/{group}"
        for where, body in found
        if isinstance(body, dict)
        for group in (Matrix.GROUP, LotSearch.GROUP)
        if body.get(group)
    ]
    if len(matrices) > MAX_MATRICES:
        told = f"at most {MAX_MATRICES} tasks may have a matrix or a search; got {len(matrices)}"
        fields.faults.append(Fault(matrices[MAX_MATRICES], told, "range"))
        return ()
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
    task = _read_task(fields)
    if task.run.kind == "command":
        _check_command(fields, task)
    check_variables(fields, task.env, task.secrets, is_command=task.run.kind == "command")
    if task.collectives == NATIVE:
        on = task.devices
        check_devices(
            fields,
            task.world_size,
            least=on.min,
            most=on.max,
            kind=on.kind,
            across_hosts=on.across_hosts,
            hosts=on.choice.hosts,
        )
    if task.islands > 1 and not (task.run.kind == "graph" or task.devices.across_hosts):
        told = "only a graph, or a job with devices.across_hosts, can use several islands; set 1"
        fields.fault("islands", told)
    if task.islands > 1 and task.devices.choice.hosts:
        told = "must be 1: the devices on a number of hosts are of one island; or leave hosts out"
        fields.fault("islands", told)
    if task.islands > 1 and task.reservation is not None:
        told = "a reservation is of one island; set islands to 1, or leave it out"
        fields.fault("reservation", told)
    if task.run.kind == "graph" and task.devices.choice.fraction_milli < WHOLE_MILLI:
        told = "graphs share a device in turns; a fraction is for jobs, functions and commands"
        fields.fault("devices/fraction", told, "fraction")
    check_rules(fields, task.retry, amounts_of(task), islands=task.islands)
    if task.isolation and task.run.kind != "function":
        told = f"a {task.run.kind} never shares its processes with other tasks; leave it out"
        fields.fault("isolation", told)
    if task.from_checkpoint is not None and task.run.kind not in ("job", "command"):
        told = f"only a job or a command can start from a checkpoint, not a {task.run.kind}"
        fields.fault("from_checkpoint", told)
    fields.close()
    return task


def faults_of_task(task: TaskDescriptor, pointer: str) -> list[Fault]:
    """Return what a tenant that submitted this very task would be told."""
    faults: list[Fault] = []
    _task(Fields(as_json(task), pointer, faults))
    return faults


def _read_task(fields: Fields, *, is_planned: bool = False) -> TaskDescriptor:
    fields.require("name", "run")
    name = fields.text("name", "", NAME, NAME_RULE)
    run = _run(fields.inside("run"), is_planned)
    usual = _executors(fields.body) if run.kind == "graph" else 1
    world_size = fields.integer("world_size", usual, least=1, most=MAX_RANKS)
    max_duration_s = fields.number("max_duration_s", 86400.0, above=0, most=MAX_DURATION_S)
    array, matrix, search = read_lot(fields)
    engine = read_collectives(fields, run_kind=run.kind, world_size=world_size)
    task = TaskDescriptor(
        name=name,
        type=fields.text("type", "default", NAME, NAME_RULE),
        run=run,
        params=_params(fields),
        inputs=_inputs(fields),
        outputs=fields.texts("outputs", WORD, WORD_RULE),
        artifacts=read_artifacts(fields, run_kind=run.kind),
        publish=_publish(fields, is_lot=array is not None),
        start=_start(fields.inside("start")),
        world_size=world_size,
        devices=_devices(
            fields.inside("devices"),
            world_size,
            least=world_size if engine == NATIVE else 1,
            most=1 if run.kind in ONE_DEVICE else world_size,
            own_ranks=run.kind == "command" and world_size == 1,
        ),
        islands=fields.integer("islands", 1, least=1, most=MAX_ISLANDS),
        reservation=fields.text("reservation", None, NAME, NAME_RULE),
        checkpoint=_checkpoint(fields.inside("checkpoint"), run_kind=run.kind),
        retry=read_retry(fields),
        max_duration_s=max_duration_s,
        from_checkpoint=fields.text("from_checkpoint", None, _CHECKPOINT, _CHECKPOINT_RULE),
        network=read_network(fields.inside("network")),
        env=read_variables(fields),
        secrets=read_secrets(fields),
        mounts=read_mounts(fields),
        environment=_task_environment(fields, is_planned),
        notice=read_notice(
            fields.inside("notice"), run_kind=run.kind, max_duration_s=max_duration_s
        ),
        resources=read_resources(fields.inside("resources")),
        session=read_session(fields.inside("session"), run_kind=run.kind, world_size=world_size),
        image=read_image(
            fields,
            run_kind=run.kind,
            world_size=world_size,
            is_session=fields.body.get("session") is not None,
        ),
        isolation=fields.one_of("isolation", ISOLATIONS, ""),
        collectives=engine,
        array=array,
        matrix=matrix,
        search=search,
        stop=read_stop(fields, run_kind=run.kind),
    )
    return _with_needs(task)


def _with_needs(task: TaskDescriptor) -> TaskDescriptor:
    needs, asked = tuple(sorted(needs_of(task))), tuple(task.resources.asked())
    if not needs and not asked:
        return task
    choice = replace(task.devices.choice, needs=needs, resources=asked)
    return replace(task, devices=replace(task.devices, choice=choice))


def needs_of(task: TaskDescriptor) -> dict[str, str]:
    """Return what the task needs of a host (`device_choice.NEED`), each with its field."""
    asked = {
        device_fraction.NEED: (
            "devices/fraction",
            task.devices.choice.fraction_milli < WHOLE_MILLI,
        ),
        network_policy.NEED: ("network", task.network.allow),
        "env": ("env", task.env),
        "secrets": ("secrets", task.secrets),
        notice.NEED: ("notice", task.notice),
        session.NEED: ("session", task.session),
        "isolation": ("isolation", task.isolation == OWN_PROCESS),
        SHARING_NEED: ("isolation", task.isolation == OF_USER),
    }
    if task.collectives == NATIVE and (need := collectives.NEEDS.get(task.run.kind)):
        asked[need] = ("collectives", True)
    needs = {need: field for need, (field, value) in asked.items() if value}
    mounts = {need_of(name): f"mounts/{escaped(target)}" for target, name in task.mounts.items()}
    environment = {} if task.environment is None else {task.environment.need: "environment"}
    image = {} if task.image is None else {need_of_image(task.image): "image"}
    return {**needs, **mounts, **environment, **image}


def in_environment(descriptor: Descriptor, environment: TaskEnvironment) -> Descriptor:
    """Return the request with its environment in each task."""
    tasks = (replace(task, environment=environment) for task in descriptor.tasks)
    return replace(descriptor, tasks=tuple(map(_with_needs, tasks)))


def _task_environment(fields: Fields, is_planned: bool) -> TaskEnvironment | None:
    is_empty = fields.body.get("environment", "") is None  # as `as_json` writes none
    if is_planned or is_empty:
        return read_task_environment(fields.inside("environment"))
    return None  # only a plan has this field; in a tenant's request it is reported as unknown


def _run(fields: Fields, is_planned: bool) -> RunSpec:
    given = [kind for kind in RUNS if fields.body.get(kind) is not None]
    if fields.given and len(given) != 1:
        said = ", ".join(given) or "none of them"
        fields.fault("", f"must have exactly one of {', '.join(RUNS)}; got {said}")
    rule = 'of the form "module:Name"'
    entries = {kind: fields.text(kind, "", ENTRY, rule) for kind in ("job", "function")}
    argv = fields.texts("command", None, "")
    graph = _graph(fields)
    computed: JSON = {}
    if is_planned:
        computed = {name: fields.mapping(name) for name in ("took_ms", "made_bytes")}
        computed["part"] = fields.mapping("part") or None
        if isinstance(graph, dict):
            fields.fault("graph", f"must be {_DIGEST_RULE}", "type")
    if fields.body.get("command") == []:
        fields.fault("command", "must have at least one word", "missing")
    elif argv and not argv[0]:
        fields.fault("command/0", "the first word must be the program to run; got an empty word")
    fields.close()
    if len(given) != 1:
        return RunSpec(kind="job")
    entry = entries.get(given[0], "")
    return RunSpec(kind=given[0], entry=entry, argv=argv, graph=graph, **computed)


def _graph(fields: Fields) -> str | JSON:
    if isinstance(fields.body.get("graph"), str):
        name: str = fields.text("graph", "", _DIGEST, _DIGEST_RULE)
        return name
    graph = fields.mapping("graph")
    if fields.body.get("graph") == {}:
        fields.fault("graph/nodes", "nodes is required", "missing")
    return graph or ""


def _check_command(fields: Fields, task: TaskDescriptor) -> None:
    """Report a command or parameters that are longer than the operating system passes to a
    program.
    """
    argv = task.run.argv
    size = sum(len(word.encode()) for word in argv)
    if len(argv) > MAX_WORDS or size > MAX_COMMAND_BYTES:
        told = (
            f"must have at most {MAX_WORDS} words of {MAX_COMMAND_BYTES} bytes in total; got "
            f"{len(argv)} words of {size} bytes"
        )
        fields.fault("run/command", f"{told}; put data into a file of the bundle", "range")
    _check_launcher(fields, task)
    size = len(json.dumps(dict(task.params)).encode())
    if size > MAX_COMMAND_BYTES:
        told = (
            f"must be at most {MAX_COMMAND_BYTES} bytes for a command (ROUNDHOUSE_PARAMS); got "
            f"{size} bytes"
        )
        fields.fault("params", f"{told}; put data into a file of the bundle", "range")


def _check_launcher(fields: Fields, task: TaskDescriptor) -> None:
    """Report a launcher of ranks where its ranks would be too many.

    On CPU devices they may share the devices of one command.
    """
    launcher = find_launcher(task.run.argv)
    if launcher is None:
        return
    if task.world_size > 1:
        told = (
            f"must not be {launcher.name}, which would start the ranks a second time: Roundhouse "
            "starts each rank as torchrun would. Name the script itself, as in [python, train.py]"
        )
        fields.fault("run/command", told, "launcher")
    elif launcher.ranks > (has := task.devices.min) and task.devices.kind != "cpu":
        told = (
            f"{launcher.name} would start {launcher.ranks} ranks on {has} {task.devices.kind} "
            f"device{'s' * (has > 1)}. Set devices.min to {launcher.ranks}; or, so that the ranks "
            f"can be moved, set world_size to {launcher.ranks} and name the script itself: "
            f"{launcher.advice}"
        )
        fields.fault("run/command", told, "launcher")


def _params(fields: Fields) -> JSON:
    params = fields.mapping("params")
    if not params:
        return params
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
                where,
                'must be "TASK.OUTPUT", "REQUEST/TASK.OUTPUT", "REQUEST/LOT@best.OUTPUT", '
                '"datablock:NAME" or "datablock:NAME@VERSION"',
            )
        elif source.is_of_best and source.kind != OF_REQUEST:
            fields.fault(
                where,
                "the best member of a lot is known when the lot is done, and only another request "
                "can take its output: submit this task in a request of its own, with "
                f'"REQUEST/{source.block}"',
            )
        else:
            sources[port] = source
    return sources


def source_of(said: str) -> Source | None:
    """Return the source that an input names, or None if the text has no valid form."""
    if said.startswith("datablock:"):
        return datablock(said.removeprefix("datablock:"))
    request, slash, block = said.rpartition("/")
    name, _, output = block.rpartition(".")
    if not NAME.fullmatch(name.removesuffix(OF_BEST)) or not WORD.fullmatch(output):
        return None
    if slash and not NAME.fullmatch(request):
        return None
    kind = OF_REQUEST if slash else "task"
    return Source(kind=kind, name=name, output=output, request=request)


def datablock(said: str) -> Source | None:
    """Return the datablock that "NAME" or "NAME@VERSION" names, or None for another form."""
    name, at, version = said.partition("@")
    if not NAME.fullmatch(name) or (at and not _VERSION.fullmatch(version)):
        return None
    return Source(kind="datablock", name=name, version=int(version) if at else None)


def _publish(fields: Fields, *, is_lot: bool) -> dict[str, str]:
    """Read `publish`; the names of a lot are checked when its values are in them
    (`core.model.lot_members`).
    """
    published: dict[str, str] = {}
    names: set[str] = set()
    said = fields.body.get("outputs")
    outputs = {port for port in said if isinstance(port, str)} if isinstance(said, list) else set()
    for port, name in fields.mapping("publish").items():
        where = f"publish/{escaped(port)}"
        if port not in outputs:
            fields.fault(where, f"{port!r:.80} is not in this task's outputs", "unknown-output")
        if not isinstance(name, str) or not (is_lot or NAME.fullmatch(name)):
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
    if not fields.given:
        return StartConditions()
    start = StartConditions(
        after=fields.texts("after", NAME, NAME_RULE),
        after_requests=read_after_requests(fields),
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
    return most if isinstance(most, int) and 1 <= most <= MAX_RANKS else 1


def _devices(fields: Fields, world_size: int, *, least: int, most: int, own_ranks: bool) -> Devices:
    """Read `devices`; `least` and `most` are the numbers of devices that the task has by
    default.

    With `own_ranks` the task is one process, which may start a rank on each device by itself.
    """
    if not fields.given:
        return Devices(min=least, max=max(least, most))
    why = "" if own_ranks else f", as world_size is {world_size}"
    widest = MAX_RANKS if own_ranks else world_size
    hosts, across_hosts = read_hosts(fields, most=widest, why=why)
    least = fields.integer("min", least, least=1, most=widest, why=why)
    usual = least if hosts else max(least, most)
    most = fields.integer("max", usual, least=1, most=widest, why=why)
    if least > most:
        fields.fault("min", f"min must be at most max; got min {least} and max {most}", "range")
    elif hosts:
        check_parts(fields, hosts, least=least, most=most)
    devices = Devices(
        kind=fields.text("kind", "cpu", NAME, NAME_RULE),
        min=least,
        max=most,
        memory_bytes=fields.integer("memory_bytes", 0, least=0, most=MAX_MEMORY_BYTES),
        across_hosts=across_hosts,
        choice=replace(_choice(fields, world_size, least), hosts=hosts),
    )
    fields.close()
    return devices


def labels_in(joined: str) -> tuple[str, ...]:
    """Return the labels in a text with "," between them, which is how settings and tables hold
    labels.
    """
    return tuple(sorted({*joined.split(",")} - {""}))


def _choice(fields: Fields, world_size: int, devices: int) -> DeviceChoice:
    return DeviceChoice(
        model=fields.text("model", "", MODEL, _MODEL_RULE),
        compute_capability=fields.text("compute_capability", "", CAPABILITY, _CAPABILITY_RULE),
        labels=_device_labels(fields, "labels"),
        avoid_labels=_device_labels(fields, "avoid_labels"),
        fraction_milli=read_fraction(fields, world_size=world_size, devices=devices),
    )


def _device_labels(fields: Fields, key: str) -> tuple[str, ...]:
    labels = fields.texts(key, NAME, NAME_RULE)
    if len(labels) > MAX_DEVICE_LABELS:
        told = f"must have at most {MAX_DEVICE_LABELS} labels; got {len(labels)}"
        fields.fault(key, told, "range")
    return tuple(sorted(labels))


def _checkpoint(fields: Fields, *, run_kind: str) -> Checkpointing:
    if not fields.given:
        return Checkpointing()
    checkpoint = Checkpointing(
        every_s=fields.number("every_s", 60.0, above=0, most=MAX_DURATION_S),
        keep=fields.integer("keep", 3, least=1, most=1000),
        best=read_best(fields, run_kind=run_kind),
    )
    fields.close()
    return checkpoint


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
        "artifacts": list(task.artifacts),
        "publish": dict(task.publish),
        "start": {
            "after": list(task.start.after),
            "after_requests": [each.as_json() for each in task.start.after_requests],
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
            "hosts": task.devices.hosts,
            "model": task.devices.choice.model or None,
            "compute_capability": task.devices.choice.compute_capability or None,
            "labels": list(task.devices.choice.labels),
            "avoid_labels": list(task.devices.choice.avoid_labels),
            "fraction": _fraction(task.devices.choice),
        },
        "islands": task.islands,
        "reservation": task.reservation,
        "checkpoint": task.checkpoint.as_json(),
        "retry": task.retry.as_json(),
        "max_duration_s": task.max_duration_s,
        "from_checkpoint": task.from_checkpoint,
        "network": task.network.as_json(),
        "env": dict(task.env),
        "secrets": list(task.secrets),
        "mounts": dict(task.mounts),
        "image": task.image,
        "environment": task.environment.as_json() if task.environment else None,
        "notice": task.notice.as_json() if task.notice is not None else None,
        "resources": task.resources.as_json(),
        "session": task.session.as_json() if task.session is not None else None,
        "isolation": task.isolation or None,
        "collectives": task.collectives,
        "array": task.array.as_json() if task.array is not None else None,
        "matrix": task.matrix.as_json() if task.matrix is not None else None,
        "search": task.search.as_json() if task.search is not None else None,
        "stop": task.stop.as_json() if task.stop is not None else None,
    }


def amounts_of(task: TaskDescriptor) -> dict[str, float]:
    """Return the amounts that may grow from one attempt to the next (`provisions.retry`)."""
    return {
        "devices.memory_bytes": task.devices.memory_bytes,
        "max_duration_s": task.max_duration_s,
        "resources.disk_bytes": task.resources.disk_bytes,
        "resources.memory_bytes": task.resources.memory_bytes,
    }


def with_amount(task: TaskDescriptor, name: str, value: float) -> TaskDescriptor:
    """Return the task with another value for one of its `amounts_of`; bytes are rounded down."""
    body = as_json(task)
    *path, last = name.split(".")
    inner = body[path[0]] if path else body
    inner[last] = int(value) if last.endswith("_bytes") else value
    return from_json(body)


def choice_text(task: TaskDescriptor) -> str:
    """Return which devices suit the task, as tables hold it."""
    choice = text_of(task.devices.choice)
    return choice if task.environment is None else with_packages(choice, task.environment.lock)


def _fraction(choice: DeviceChoice) -> float | None:
    is_whole = choice.fraction_milli == WHOLE_MILLI
    return None if is_whole else choice.fraction_milli / WHOLE_MILLI


def to_wire(task: TaskDescriptor) -> JSON:
    """Return the task as `as_json` does, without empty values: the form in which it goes to a
    device.

    If a later version adds a field that is empty by default, an older device gets it only with a
    task that sets it. The device then refuses the order, since it cannot honour the field.
    """
    said = as_json(task)
    groups = {name: _filled(said[name]) for name in ("start", "devices", "checkpoint")}
    return _filled({**said, **groups, "retry": task.retry.to_wire()})


def _filled(said: JSON) -> JSON:
    return {name: value for name, value in said.items() if value}


def from_json(body: object, pointer: str = "") -> TaskDescriptor:
    """Read a task that `as_json` or `to_wire` wrote; raises BadValue with the first fault.

    Only the form is checked; the limits on what a tenant may ask for are not checked again.
    """
    faults: list[Fault] = []
    fields = Fields(body, pointer, faults)
    task = _read_task(fields, is_planned=True)
    fields.close()
    if faults:
        raise BadValue(faults[0].pointer, faults[0].detail)
    return task


def run_from_json(body: object) -> RunSpec:
    """Read what a task runs, as `as_json` wrote it; raises BadValue."""
    faults: list[Fault] = []
    run = _run(Fields(body, "/run", faults), is_planned=True)
    if faults:
        raise BadValue(faults[0].pointer, faults[0].detail)
    return run


codec.OWN_FORMS[TaskDescriptor] = codec.OwnForm(write=to_wire, read=from_json)


def _said(source: Source) -> str:
    return f"datablock:{source.block}" if source.kind == "datablock" else source.block


def _rfc3339(at_s: float | None) -> str | None:
    return None if at_s is None else datetime.fromtimestamp(at_s, UTC).isoformat()
