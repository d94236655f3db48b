"""The input and output models of the API.

An In model forbids unknown fields.  Each Out model has an example, which the OpenAPI page shows.
Durations and charges are integer microseconds (`_us`).  Weights and costs are thousandths in the
tables and plain numbers here.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from app.api.descriptor_schema import GRAPH_EXAMPLE
from app.api.times import Time

Scope = Literal[
    "work:read",
    "work:write",
    "usage:read",
    "devices:read",
    "devices:write",
    "admin:read",
    "admin:write",
]
Role = Literal["platform_admin", "tenant_admin", "member", "viewer"]
RequestState = Literal["queued", "running", "done", "failed", "cancelled"]
TaskState = Literal[
    "blocked",
    "waiting",
    "starting",
    "running",
    "splicing",
    "pausing",
    "stopping",
    "done",
    "failed",
    "cancelled",
]

PhaseWord = Literal[
    "queued", "starting", "running", "paused", "preempted", "done", "failed", "cancelled"
]
_PHASE = (
    "The state in one word, as the pages and the CLI show it. `paused`: a user or an "
    "administrator paused the task. `preempted`: the scheduler paused it and resumes it "
    "automatically."
)

KIND = r"[a-z0-9][a-z0-9._-]{0,62}"  # pattern of device kinds

_REQUEST, _TASK = "req_0192f0c1b7e97d3e9a4c5b6d7e8f9a0b", "tsk_0192f0c1b7e97d3e9a4c5b6d7e8f9a0c"
_TENANT, _USER = "ten_0192f0c1b7e97d3e9a4c5b6d7e8f9a01", "usr_0192f0c1b7e97d3e9a4c5b6d7e8f9a02"
_AT = "2026-11-21T12:00:00Z"
_SHA256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"


def _word(text: str) -> str:
    if text != text.strip() or not text.isprintable():
        raise ValueError("must have no spaces at its ends and no control characters")
    return text


Name = Annotated[str, Field(min_length=1, max_length=100), AfterValidator(_word)]
Tier = Literal["premium", "standard", "basic"]
Weight = Annotated[float, Field(ge=0.001, le=1_000_000, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=1_000_000_000)]
_ByKind = dict[str, Annotated[int, Field(ge=0, le=1_000_000)]]
Guarantee = Annotated[
    _ByKind, Field(max_length=32, json_schema_extra={"propertyNames": {"pattern": f"^{KIND}$"}})
]
DeviceLimit = Annotated[
    _ByKind,
    Field(max_length=32, json_schema_extra={"propertyNames": {"pattern": rf"^({KIND}|\*)$"}}),
]
Labels = dict[
    Annotated[str, Field(min_length=1, max_length=63), AfterValidator(_word)],
    Annotated[str, Field(max_length=255)],
]


class In(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Out(BaseModel):
    model_config = ConfigDict(from_attributes=True)


def example(**values: Any) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": [values]})


def example_of(model: type[BaseModel]) -> dict[str, Any]:
    extra: Any = model.model_config["json_schema_extra"]
    found: dict[str, Any] = extra["examples"][0]
    return found


# --- problems and lists -------------------------------------------------------------------------


class FaultOut(Out):
    pointer: str = Field(description="JSON Pointer into the body; `?name` names a query parameter.")
    detail: str
    code: str


class Problem(Out):
    """An error (RFC 9457)."""

    type: str = Field(description="URL of a page that explains the problem and what to do.")
    title: str
    status: int
    detail: str
    instance: str
    request_id: str
    errors: list[FaultOut] = []


Item = TypeVar("Item")


class Page(Out, Generic[Item]):
    """One page of a list; `next_cursor` is null on the last page."""

    items: list[Item]
    next_cursor: str | None = None


# --- requests and tasks -------------------------------------------------------------------------


class RequestPatch(In):
    model_config = example(priority=10, labels={"exp": "a1"})
    priority: int | None = Field(None, ge=-100, le=100)
    labels: Labels | None = Field(None, max_length=32)


class ChangeOut(Out):
    """A change that would end a reason, for programs.

    docs/reference/waiting.md lists the actions.
    """

    action: str
    value: int | float | str | list[str] | None = None
    of: str = Field("", description="The device kind, device or island concerned.")


class ReasonOut(Out):
    """A reason why a task waits."""

    code: str
    message: str
    next_action: str = Field(
        description="What can be done: `wait`, `change_request` or `ask_admin`."
    )
    unblocked_by: str = ""
    change: ChangeOut


class NearestOut(ChangeOut):
    """The change to make first; changes for the other reasons cannot help before it."""

    code: str
    message: str


class StartOut(Out):
    """Seconds from now to the task's next turn; 80 % of such tasks start within the interval."""

    p10_s: float
    p50_s: float
    p90_s: float
    starts_at: datetime = Field(description="After `p50_s`.")
    earliest_at: datetime
    latest_at: datetime


class UnknownOut(Out):
    code: str = Field(description="`BLOCKED`, `TOO_WIDE` or `NO_HISTORY`.")
    message: str


class NeedOut(Out):
    """A need: `task` (a name within the request) must be done first; `port` takes its `output`."""

    task: str
    port: str = ""
    output: str = ""


class TaskOut(Out):
    model_config = example(
        id=_TASK,
        request_id=_REQUEST,
        tenant_id=_TENANT,
        name="train",
        type="train",
        kind="cpu",
        devices_min=1,
        devices_max=1,
        tier="standard",
        state="running",
        phase="running",
        hold="",
        cancel_asked=False,
        island="local",
        seat="local.0",
        epoch=3,
        step=1200,
        pauses=2,
        lost_steps=0,
        held_us=52_400_000,
        submitted_at=_AT,
        metrics={"loss": 0.31},
    )
    id: str
    request_id: str
    tenant_id: str
    name: str
    type: str
    kind: str
    devices_min: int = Field(1, description="Number of devices of this kind that the task needs.")
    devices_max: int = Field(1, description="Number of devices that the task can use.")
    across_hosts: bool = Field(False, description="Whether the devices may be on several hosts.")
    tier: Tier = Field("standard", description="The tier of the request.")
    state: TaskState = Field(description="The scheduler's state, finer than `phase`.")
    phase: PhaseWord = Field(description=_PHASE)
    hold: str = Field("", description="Who paused the task: empty, `user` or `admin`.")
    cancel_asked: bool = False
    island: str | None = None
    seat: str | None = Field(
        None, description="The device that the task holds or is about to hold."
    )
    lent: list[str] = Field(
        [], description="Additional devices that the task holds until another task needs them."
    )
    image_on: str | None = Field(
        None, description="The device whose host memory holds the task's saved state."
    )
    move_to: str | None = Field(
        None, description="The device to which the task is being moved; `*`: any other device."
    )
    epoch: int = Field(0, description="Number of launches so far.")
    step: int = Field(
        0,
        description="Completed steps; for a command, lines of progress plus the number of "
        "times it was stopped.",
    )
    attempts: int = 0
    pauses: int = 0
    lost_steps: int = 0
    held_us: int = Field(
        0, description="Total time that the task has held devices, over all epochs."
    )
    guest_held_us: int = Field(
        0, description="Total time that the task has held additional, borrowed devices."
    )
    needs: list[NeedOut] = []
    inputs: dict[str, str] = Field(
        {},
        description="The source of each input: `TASK.OUTPUT` or `datablock:NAME@VERSION`. Without "
        "a version in the descriptor, it is the newest version at submission.",
    )
    publish: dict[str, str] = Field(
        {}, description="The outputs that become new datablock versions when the task is done."
    )
    metrics: dict[str, Any] = {}
    capabilities: list[str] = Field(
        [],
        description="The supported operations: `pause`; `save` a durable checkpoint; `move` the "
        "task with its state; resume `exact`ly, or with `equivalent` bits. A command has "
        "`restart` instead of `save` and `move`: on another device it restarts in its last saved "
        "working folder. `device_memory`: other tasks can use its device memory while it is "
        "paused.",
    )
    preset: dict[str, Any] = {}
    cause: str | None = Field(None, description="Why the last attempt failed.")
    message: str | None = None
    detail: str | None = Field(
        None, description="The traceback of the job; only its owner sees it."
    )
    result: dict[str, Any] | None = None
    outputs: dict[str, Any] = {}
    submitted_at: datetime
    first_started_at: datetime | None = None
    ended_at: datetime | None = None


class MigrateIn(In):
    model_config = example(to="local.1")
    to: str | None = Field(None, description="The target device; null: the best other free device.")


class ResizeIn(In):
    model_config = example(devices_max=2)
    devices_max: int = Field(ge=1, description="The most devices that the task may hold.")


class RequestSummary(Out):
    model_config = example(
        id=_REQUEST,
        name="sweep-7",
        state="running",
        phase="running",
        tier="standard",
        priority=0,
        labels={"exp": "a1"},
        tenant_id=_TENANT,
        tenant="vision",
        user_id=_USER,
        user="ada",
        submitted_at=_AT,
        ended_at=None,
        task_states={"running": 1, "blocked": 1},
        task_phases={"running": 1, "queued": 1},
    )
    id: str
    name: str
    state: RequestState = Field(
        description="The request is `running` from its first start to its end."
    )
    phase: PhaseWord = Field(description=_PHASE + " The phase of its most advanced task.")
    tier: str
    priority: int
    labels: dict[str, Any]
    tenant_id: str
    tenant: str
    user_id: str
    user: str
    submitted_at: datetime
    ended_at: datetime | None
    task_states: dict[str, int] = Field(description="Number of tasks in each state.")
    task_phases: dict[str, int] = Field(description="Number of tasks in each phase.")
    hold: str = Field(
        "", description="Who paused all tasks that have not ended: `user` or `admin`."
    )


class RequestOut(RequestSummary):
    model_config = example(
        **example_of(RequestSummary),
        bundle=_SHA256,
        tasks=[example_of(TaskOut)],
    )
    bundle: str
    tasks: list[TaskOut]
    notes: list[str] = Field(
        default=[],
        description="Warnings about likely mistakes; only in the response to a submission.",
    )


class ValidatedTask(Out):
    """A task as it would be submitted, with every default filled in."""

    name: str
    type: str
    kind: str
    needs: list[NeedOut]
    descriptor: dict[str, Any]


class Validated(Out):
    model_config = example(
        name="sweep-7",
        tier="standard",
        tasks=[{"name": "train", "type": "train", "kind": "cpu", "needs": [], "descriptor": {}}],
    )
    name: str
    tier: Tier
    tasks: list[ValidatedTask]
    notes: list[str] = Field(default=[], description="Warnings: valid, but a likely mistake.")


class TimeSpentOut(Out):
    """How a task spent its time; the fields add up to its whole life, until its end or now."""

    waited_s: float = Field(description="On no device: queued, blocked or paused.")
    switched_s: float = Field(description="Assigned to a device, but not yet running there.")
    moved_s: float = Field(description="Migrating to another device.")
    computed_s: float = Field(description="Running on its device.")
    staged_s: float = Field(description="On its device, stopped while its state is copied.")


class Explained(Out):
    """Why a task waits, until when (empty if it does not wait), and how it spent its time."""

    model_config = example(
        task_id=_TASK,
        state="waiting",
        phase="queued",
        place=2,
        message="2 of 2 cpu devices in use; a time slice lasts at least 1 s.",
        reasons=[
            {
                "code": "WAITING_FOR_DEVICE",
                "message": "2 of 2 cpu devices in use; a time slice lasts at least 1 s.",
                "next_action": "wait",
                "unblocked_by": "a cpu device becomes free",
                "change": {"action": "free_devices", "value": 1, "of": "cpu"},
            }
        ],
        nearest={
            "code": "WAITING_FOR_DEVICE",
            "message": "A cpu device becomes free.",
            "action": "free_devices",
            "value": 1,
            "of": "cpu",
        },
        starts_at="2026-11-21T12:01:30Z",
        estimate={
            "p10_s": 20.0,
            "p50_s": 90.0,
            "p90_s": 240.0,
            "starts_at": "2026-11-21T12:01:30Z",
            "earliest_at": "2026-11-21T12:00:20Z",
            "latest_at": "2026-11-21T12:04:00Z",
        },
        no_estimate=None,
        time={
            "waited_s": 71.5,
            "switched_s": 0.4,
            "moved_s": 0.0,
            "computed_s": 8.1,
            "staged_s": 0.01,
        },
    )
    task_id: str
    state: TaskState
    phase: PhaseWord
    place: int | None = Field(
        description="Place in the queue of its device kind on its island, from 1."
    )
    message: str
    reasons: list[ReasonOut]
    nearest: NearestOut | None
    starts_at: datetime | None = Field(description="The estimated start.")
    estimate: StartOut | None
    no_estimate: UnknownOut | None = Field(description="Why there is no estimate.")
    time: TimeSpentOut


class MetricOut(Out):
    model_config = example(step=120, at=_AT, values={"loss": 0.31})
    step: int
    at: datetime
    values: dict[str, Any]


class TensorOut(Out):
    model_config = example(
        name="model.embed.weight",
        dtype="bfloat16",
        shape=[50257, 768],
        size_bytes=77_194_752,
        exported=True,
    )
    name: str
    dtype: str
    shape: list[int]
    size_bytes: int
    exported: bool = Field(description="False if safetensors does not support this dtype.")


class CheckpointOut(Out):
    model_config = example(
        id="ckp_0192f0c1b7e97d3e9a4c5b6d7e8f9a0d",
        epoch=2,
        step=1200,
        sha256=_SHA256,
        size_bytes=184_320,
        new_bytes=12_288,
        took_us=21_000,
        host="alpha",
        key=_SHA256,
        created_at=_AT,
        damaged_at=None,
        deleted_at=None,
    )
    id: str
    epoch: int
    step: int
    sha256: str = Field(description="The address of the manifest in the store.")
    size_bytes: int = Field(description="Size of the checkpoint.")
    new_bytes: int = Field(
        description="Bytes that were added to the store; the other chunks were already there."
    )
    took_us: int
    host: str = Field(
        description="The host that wrote and signed the checkpoint; empty if unknown."
    )
    key: str = Field(description="The public key (Ed25519) of the signature, in hexadecimal.")
    created_at: datetime
    damaged_at: datetime | None
    deleted_at: datetime | None


class PlacementOut(Out):
    """One launch of a task on one device."""

    model_config = example(
        epoch=2,
        device_id="local.0",
        kind="cpu",
        launched_at=_AT,
        started_at=_AT,
        ended_at=None,
        held_us=4_200_000,
        input_bytes=786_560,
        fetched_bytes=0,
        ways={"weights": "here"},
        guest=False,
        first_step=800,
        last_step=1200,
        end=None,
    )
    epoch: int
    device_id: str
    guest: bool = Field(
        description="True for an additional device of an elastic task, beyond its first."
    )
    kind: str
    launched_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    held_us: int
    input_bytes: int = Field(0, description="Size of the inputs: outputs and datablocks.")
    fetched_bytes: int = Field(
        0,
        description="Input bytes that were read from the store; the others came from this "
        "host or from another host.",
    )
    ways: dict[str, Literal["here", "host", "store"]] = Field(
        {},
        description="The source of each input port: `here` (this host), `host` (another host) "
        "or `store`.",
    )
    first_step: int | None
    last_step: int | None
    end: str | None = Field(
        description="`paused`, `moved`, `resized`, `finished`, `failed`, `stopped`, `lost` or "
        "`hung`."
    )


class EventOut(Out):
    model_config = example(
        cursor="MTIzLjQ1",
        at=_AT,
        type="task.paused",
        task_id=_TASK,
        message="Paused after step 1200 on local.0; no step is lost.",
        data={"task": "train", "device": "local.0", "step": 1200},
    )
    cursor: str = Field(description="Pass as `?cursor=` to read the next events.")
    at: datetime
    type: str
    task_id: str | None
    message: str
    data: dict[str, Any]


class LogLineOut(Out):
    model_config = example(
        cursor="MTI", at=_AT, task_id=_TASK, task="train", epoch=2, stream="stdout", text="loss 0.3"
    )
    cursor: str
    at: datetime
    task_id: str
    task: str
    epoch: int
    stream: str
    text: str


# --- bundles ------------------------------------------------------------------------------------


class BundleOut(Out):
    model_config = example(
        sha256=_SHA256,
        size_bytes=1834,
        entry_points={"train:Train": "class", "ops:tokenize": "function"},
        created_at=_AT,
    )
    sha256: str
    size_bytes: int
    entry_points: dict[str, str] = Field(description="The entry points that `run` may name.")
    created_at: datetime


class BundleStored(BundleOut):
    model_config = example(
        **example_of(BundleOut),
        files=2,
        unparsed={},
    )
    files: int
    unparsed: dict[str, str] = Field(description="Python files with syntax errors, and the errors.")


# --- graphs -------------------------------------------------------------------------------------


class GraphSummary(Out):
    model_config = example(sha256=_SHA256, nodes=2, created_at=_AT)
    sha256: str
    nodes: int = Field(description="Number of functions, including those of nested graphs.")
    created_at: datetime


class GraphOut(GraphSummary):
    model_config = example(
        **example_of(GraphSummary),
        body=GRAPH_EXAMPLE,
    )
    body: dict[str, Any]


class NodePlace(Out):
    node: str
    executor: int | None = Field(
        description="null: a mapped node, of which each executor runs some items."
    )


class CopyOut(Out):
    """A block, or one executor's part of a list, that passes to another executor."""

    block: str
    source: int = Field(description="The executor that produced the block.")
    target: int
    planned_bytes: int | None = Field(
        description="As declared, else as measured in an earlier run of the graph; null: unknown."
    )
    moved_bytes: int | None = Field(description="null until the task is done; includes headers.")


class GraphPlan(Out):
    task: str
    graph: str = Field(description="SHA-256 of the graph.")
    executors: int
    nodes: list[NodePlace] = Field(description="In the order in which all executors run them.")
    copies: list[CopyOut]
    planned_bytes: int = Field(description="Total of the copies of known size.")
    moved_bytes: int | None = Field(description="Total of all copies; null until the task is done.")


class TaskPlace(Out):
    task: str
    island: str | None = Field(
        description="null: no islands have the devices for the whole request."
    )
    because: str
    crossing_bytes: int = Field(
        description="Expected size of the inputs from tasks on other islands, when the island was "
        "assigned."
    )


class CrossingOut(Out):
    """An output of a task that another island takes; one entry per such island."""

    block: str
    source: str = Field(description="The island that produces the output.")
    target: str
    planned_bytes: int | None = Field(
        description="For a graph over islands: as declared, else as measured in an earlier run, "
        "else 1 MiB; null for other tasks."
    )
    moved_bytes: int | None = Field(
        description="null until the output was transferred; without the header."
    )
    head_bytes: int | None = Field(
        description="Size of the file's header; null until the output was transferred."
    )
    ways: list[Literal["host", "store"]] = Field(
        description="How the output was transferred: from the producing host or from the store. "
        "Both, if it was transferred more than once. Empty before the first transfer, or if it "
        "was already on the receiving host."
    )


class RequestPlan(Out):
    model_config = example(
        tasks=[
            {
                **{"task": "whole", "island": "local", "crossing_bytes": 0},
                "because": "Only local has such devices.",
            }
        ],
        crossings=[],
        graphs=[
            {
                "task": "whole",
                "graph": _SHA256,
                "executors": 2,
                "nodes": [{"node": "encode", "executor": 0}, {"node": "vote", "executor": 1}],
                "copies": [
                    {
                        **{"block": "encode.h", "source": 0, "target": 1},
                        **{"planned_bytes": 4096, "moved_bytes": 4160},
                    }
                ],
                **{"planned_bytes": 4096, "moved_bytes": 4160},
            }
        ],
    )
    tasks: list[TaskPlace] = Field(description="The island of each task, and the reason.")
    crossings: list[CrossingOut] = Field(description="Transfers between islands.")
    graphs: list[GraphPlan] = Field(description="The graphs of the request's tasks, as submitted.")


# --- datablocks ---------------------------------------------------------------------------------


class TensorOfBlock(Out):
    """A tensor of a datablock; the tensor of an npy file has no name."""

    name: str
    dtype: str
    shape: list[int]


class DatablockOut(Out):
    model_config = example(
        id="blk_0192f0c1b7e97d3e9a4c5b6d7e8f9a0e",
        tenant_id=_TENANT,
        user_id=_USER,
        name="faces",
        version=3,
        format="safetensors",
        sha256=_SHA256,
        size_bytes=786_560,
        tensors=[{"name": "pixels", "dtype": "uint8", "shape": [64, 64, 64, 3]}],
        tensor_count=1,
        task_id=None,
        output="",
        holders=2,
        created_at=_AT,
        deleted_at=None,
    )
    id: str
    tenant_id: str
    user_id: str = Field(
        description="The user who uploaded the version, or whose task published it."
    )
    name: str = Field(description="The name of the datablock; `NAME@VERSION` names this version.")
    version: int = Field(description="From 1; a number is never reused.")
    format: Literal["safetensors", "npy"]
    sha256: str = Field(description="SHA-256 of the downloaded bytes.")
    size_bytes: int
    tensors: list[TensorOfBlock] = Field(description="The first 100 tensors.")
    tensor_count: int
    task_id: str | None = Field(
        description="The task that published the version; null if it was uploaded."
    )
    output: str = Field(description="The name of the output of that task.")
    holders: int = Field(
        description="Number of unfinished tasks that need this version; its bytes are kept for "
        "them."
    )
    created_at: datetime
    deleted_at: datetime | None


class UploadOut(Out):
    """The progress of an upload: continue from `received_bytes`."""

    model_config = example(name="faces", sha256=_SHA256, size_bytes=786_560, received_bytes=524_288)
    name: str = Field(description="The datablock's name; empty for a bundle.")
    sha256: str
    size_bytes: int
    received_bytes: int = Field(description="Bytes that are stored durably; continue after them.")


# --- tenants, users, keys -----------------------------------------------------------------------


_WEIGHT = "Relative share among siblings: the child tenants and the users of the same parent."
_GUARANTEE = (
    "Guaranteed devices by kind. They are lent to others while unused. The guarantees of the "
    "child tenants must not exceed this in total. The number of installed devices is not checked."
)
_LIMIT = "Maximum number of devices by kind, including child tenants; `*`: all kinds together."
_MAX_RUNNING = (
    "Maximum number of tasks that hold devices at once, including child tenants; null: no limit."
)
_MAX_QUEUED = (
    "Maximum number of queued tasks, including child tenants; further submissions are rejected; "
    "null: no limit."
)
_TIER = "The highest tier for requests of this tenant and its child tenants."


class TenantIn(In):
    model_config = example(
        name="vision",
        weight=2.0,
        guarantee={"cuda": 4},
        limit={"cuda": 8, "*": 16},
        max_running=32,
        max_queued=10_000,
        tier="standard",
    )
    name: Name
    weight: Weight = Field(1.0, description=_WEIGHT)
    parent_id: str | None = Field(
        None, description="Default: the root tenant; for a tenant admin, the own tenant."
    )
    guarantee: Guarantee = Field({}, description=_GUARANTEE)
    limit: DeviceLimit = Field({}, description=_LIMIT)
    max_running: Count | None = Field(None, description=_MAX_RUNNING)
    max_queued: Count | None = Field(None, description=_MAX_QUEUED)
    tier: Tier = Field("standard", description=_TIER)


class TenantPatch(In):
    """A change of a tenant; fields that are left out stay unchanged.  `guarantee` and `limit` are
    replaced as a whole; null removes `max_running` and `max_queued`.
    """

    model_config = example(weight=3.0, limit={"cuda": 6}, max_queued=None)
    name: Name | None = None
    weight: Weight | None = Field(None, description=_WEIGHT)
    parent_id: str | None = None
    guarantee: Guarantee | None = Field(None, description=_GUARANTEE)
    limit: DeviceLimit | None = Field(None, description=_LIMIT)
    max_running: Count | None = Field(None, description=_MAX_RUNNING)
    max_queued: Count | None = Field(None, description=_MAX_QUEUED)
    tier: Tier | None = Field(None, description=_TIER)


class TenantOut(Out):
    model_config = example(
        id=_TENANT,
        name="vision",
        parent_id="platform",
        weight=2.0,
        guarantee={"cuda": 4},
        limit={"cuda": 8, "*": 16},
        max_running=32,
        max_queued=None,
        tier="standard",
        version=1,
        created_at=_AT,
    )
    id: str
    name: str
    parent_id: str | None
    weight: float = Field(description=_WEIGHT)
    guarantee: dict[str, int] = Field(description=_GUARANTEE)
    limit: dict[str, int] = Field(description=_LIMIT)
    max_running: int | None = Field(description=_MAX_RUNNING)
    max_queued: int | None = Field(description=_MAX_QUEUED)
    tier: Tier = Field(description=_TIER)
    version: int
    created_at: datetime


_USER_WEIGHT = "Relative share among the users of the tenant."

_SERVICE = "A service account: a user that is a program and cannot sign in."
_SCOPES = "The scopes to which the key is restricted; null: everything that its role permits."


class UserIn(In):
    model_config = example(name="ada", weight=1.0)
    name: Name
    weight: Weight = Field(1.0, description=_USER_WEIGHT)
    tenant_id: str | None = Field(None, description="Default: the caller's tenant.")
    service: bool = Field(False, description=_SERVICE)


class UserPatch(In):
    """A change of a user; fields that are left out stay unchanged."""

    model_config = example(weight=2.0)
    name: Name | None = None
    weight: Weight | None = Field(None, description=_USER_WEIGHT)


class UserOut(Out):
    model_config = example(
        id=_USER,
        tenant_id=_TENANT,
        name="ada",
        weight=1.0,
        service=False,
        version=1,
        created_at=_AT,
    )
    id: str
    tenant_id: str
    name: str
    weight: float = Field(description=_USER_WEIGHT)
    service: bool = Field(description=_SERVICE)
    version: int
    created_at: datetime


class KeyIn(In):
    model_config = example(user_id=_USER, role="member", name="laptop", scopes=["work:write"])
    user_id: str
    role: Role
    name: Name
    scopes: list[Scope] | None = Field(None, min_length=1, max_length=7, description=_SCOPES)
    expires_at: Time = None


class RotateKeyIn(In):
    """A new key's terms; without `expires_at` its lifetime is that of the old key."""

    model_config = example(overlap_s=3600)
    overlap_s: float = Field(
        86_400.0,
        ge=0,
        le=30 * 86_400.0,
        allow_inf_nan=False,
        strict=False,
        description="How long the old key stays valid.",
    )
    expires_at: Time = None


class KeyOut(Out):
    model_config = example(
        id="x7Kq29Zb",
        user_id=_USER,
        tenant_id=_TENANT,
        role="member",
        scopes=["work:write"],
        name="laptop",
        replaced_by=None,
        created_at=_AT,
        expires_at=None,
        revoked_at=None,
        last_used_at=_AT,
    )
    id: str
    user_id: str
    tenant_id: str
    role: Role
    scopes: list[Scope] | None = Field(description=_SCOPES)
    name: str
    replaced_by: str | None = Field(description="The id of the key that replaced this key.")
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


class KeyMade(KeyOut):
    model_config = example(
        **example_of(KeyOut),
        key="rh_x7Kq29Zb_…",
    )
    key: str = Field(description="The secret key. It is shown only once.")


class MeOut(Out):
    model_config = example(
        user_id=_USER,
        user="ada",
        tenant_id=_TENANT,
        tenant="vision",
        role="member",
        scopes=None,
        key_id="x7Kq29Zb",
    )
    user_id: str
    user: str
    tenant_id: str
    tenant: str
    role: Role
    scopes: list[Scope] | None = Field(description=_SCOPES)
    key_id: str


# --- islands, hosts, devices, presets -----------------------------------------------------------


class IslandOut(Out):
    model_config = example(name="local", leader="9b2f", led=True, term=4, devices=2, key="5e" * 32)
    name: str
    leader: str | None
    led: bool = Field(description="Whether the island's scheduler holds a current lease.")
    term: int
    devices: int
    key: str | None = Field(
        description="The public key that verifies the island's messages to devices."
    )


class HostOut(Out):
    model_config = example(name="host-a", island="local", cordoned=False, devices=2, up=2)
    name: str
    island: str
    cordoned: bool
    devices: int
    up: int


class EnrolmentIn(In):
    model_config = example(device_id="host-a.0", key="3d" * 32)
    device_id: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,126}\.[0-9]{1,4}$")] = Field(
        description="The device id: the host's name, a dot and a number."
    )
    key: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] = Field(
        description="The host's public key, as `roundhouse device key` prints it on that host."
    )


class EnrolmentOut(Out):
    model_config = example(
        device_id="host-a.0",
        key="3d" * 32,
        enrolled_by="platform_admin",
        enrolled_at=_AT,
        revoked_at=None,
    )
    device_id: str
    key: str = Field(description="The host's public key; reports signed with it are accepted.")
    enrolled_by: str
    enrolled_at: datetime
    revoked_at: datetime | None = Field(description="Reports are rejected from this time on.")


class DevicePatch(In):
    model_config = example(cost=1.5)
    cost: Weight


class SandboxOut(Out):
    model_config = example(mode="required", layers=["files", "network"], missing=[], refuses="")
    mode: str = Field(
        description="`required`: the device takes work only with all sandbox layers; `preferred`: "
        "with the available layers; `off`: without a sandbox."
    )
    layers: list[str] = Field(description="The active sandbox layers.")
    missing: list[str] = Field(description="The configured sandbox layers that are not active.")
    refuses: str = Field(description="Why the device takes no work; empty if it does.")


class HeldBytes(Out):
    device: int = Field(description="In device memory.")
    host: int = Field(description="In host memory.")


class DeviceFacts(Out):
    """The facts of a device that are shown; other facts that it reports are not."""

    sandbox: list[str] | str | None = Field(
        None, description="The sandbox layers around the processes of a task."
    )
    torch: str | None = None
    capabilities: list[str] = []
    splice: bool = Field(False, description="Whether ranks can take turns on the device.")
    host_memory_bytes: int | None = None
    held_bytes: HeldBytes | None = Field(
        None, description="Memory held by the tasks of all tenants together."
    )


class DeviceOut(Out):
    model_config = example(
        id="host-a.0",
        host="host-a",
        island="local",
        kind="cpu",
        up=True,
        cordoned=False,
        busy=True,
        task_id=_TASK,
        tasks=[_TASK],
        threads=1,
        memory_bytes=4 * 2**30,
        cost=1.0,
        seen_at=_AT,
        version=1,
        sandbox={"mode": "required", "layers": ["files", "network"], "missing": [], "refuses": ""},
        facts={"sandbox": ["files", "network"], "torch": "2.13.0", "splice": True},
    )
    id: str
    host: str
    island: str
    kind: str
    up: bool
    cordoned: bool = Field(description="The device or its host takes no new work.")
    busy: bool = Field(description="A task holds the device.")
    task_id: str | None = Field(description="The task on the device, if you may see it.")
    tasks: list[str] = Field(
        description="The tasks on the device that you may see. Several graphs can share a device."
    )
    threads: int
    memory_bytes: int
    cost: float
    seen_at: datetime | None
    version: int
    sandbox: SandboxOut
    facts: DeviceFacts


class PresetIn(In):
    model_config = example(params={"deterministic": True, "threads": 1})
    params: dict[str, Any]


class PresetOut(Out):
    model_config = example(
        task_type="train", kind="cpu", params={"deterministic": True}, version=1, updated_at=_AT
    )
    task_type: str
    kind: str
    params: dict[str, Any]
    version: int
    updated_at: datetime
