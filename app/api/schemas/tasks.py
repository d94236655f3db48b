"""Models of tasks: their state, reasons, checkpoints, placements, events and logs."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from app.api.schemas.base import (
    EXAMPLE_AT,
    EXAMPLE_REQUEST,
    EXAMPLE_SHA256,
    EXAMPLE_TASK,
    EXAMPLE_TENANT,
    PHASE_TEXT,
    In,
    Out,
    PhaseWord,
    TaskState,
    Tier,
    example,
)


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
    code: str = Field(description="`BLOCKED`, `TOO_WIDE`, `NO_HISTORY` or `TOO_FAR`.")
    message: str


class NeedOut(Out):
    """A need: `task` must be done first; `port` takes its `output`."""

    task: str = Field(description="Its name within its request.")
    port: str = ""
    output: str = ""
    request_id: str = Field("", description="Its request, if that is another one.")


class RequestNeedOut(Out):
    """Says what a task awaits of another request, and whether it has happened."""

    model_config = example(
        request_id=EXAMPLE_REQUEST, request="prep", task="", on="done", otherwise="fail"
    )
    request_id: str
    request: str = Field(description="Its name.")
    task: str = Field("", description="Its task whose output is taken; empty: the whole request.")
    on: Literal["done", "ended", "failed", "started"] = Field(
        description="What must have happened: it is `done`; it has `ended`, however, or `failed`,"
        " after it had started; or it has `started`."
    )
    otherwise: Literal["fail", "hold", "run"] = Field(
        serialization_alias="else",
        description="What becomes of the task once that can no longer happen.",
    )
    outcome: Literal["waits", "met", "fail", "hold", "run", "waived"] = Field(
        "waits",
        description="`waits`, `met`, or what `else` decided; `waived`: somebody resumed the task"
        " that was held.",
    )


class ResourcesOut(Out):
    """Amounts of what a task takes of its host, in the form of the field `resources`."""

    cpus: float = Field(0.0, description="Processors.")
    memory_bytes: int = Field(0, description="Host memory.")
    disk_bytes: int = Field(0, description="Disk of the working folder.")
    processes: int = Field(0, description="Processes and threads.")


class NetworkOut(Out):
    """Says what a task may reach over the network, and what it used of it over all epochs."""

    model_config = example(
        allow=["huggingface.co:443"],
        connections=12,
        refused=0,
        sent_bytes=48_211,
        received_bytes=3_120_448_112,
    )
    allow: list[str] = Field(description="What the task may reach, as HOST:PORT.")
    connections: int = Field(0, description="Connections that were made.")
    refused: int = Field(0, description="Connections that were refused; the log has the reasons.")
    sent_bytes: int = Field(0, description="Bytes that the task sent.")
    received_bytes: int = Field(0, description="Bytes that the task received.")


class DroppedFilesOut(Out):
    """Files that a command wrote, outside the folders that are kept."""

    files: int
    bytes: int
    first: list[str] = Field(description="The paths of up to five of them.")


class RungOut(Out):
    """Counts the members that reached a rung of a lot's rule `stop`."""

    model_config = example(step=1000, reached=21, passed=7, best=0.412)
    step: int
    reached: int = Field(description="Members with a value of the metric at this step or after it.")
    passed: int = Field(description="Those of them that went on, or may.")
    best: float | None = Field(description="The best value; null: none is a finite number.")


class LotOut(Out):
    """Counts the members of a lot, which is many tasks from one description."""

    model_config = example(
        count=10_000,
        at_once=200,
        max_failures=100,
        phases={"queued": 6676, "running": 200, "done": 3112, "failed": 12},
        left=6676,
        is_held=False,
        rungs=[],
        ends_in_s=5410.0,
    )
    count: int
    at_once: int = Field(description="Most members that are queued or run at any time.")
    max_failures: int | None = Field(description="More failures hold the lot; null: none do.")
    phases: dict[str, int] = Field(description="Number of members in each phase.")
    left: int = Field(description="Members that wait for their turn, and are no tasks yet.")
    rungs: list[RungOut] = Field(description="By the steps of `stop`; empty without it.")
    is_held: bool = Field(description="Too many members failed, so no more start.")
    ends_in_s: float | None = Field(
        description="Expected time until the last member ends: those that remain, times the median "
        "of those that are done, divided by those that run. With `stop`: times the mean device time"
        " of those that are done or paused. Null: not known yet."
    )


class TaskOut(Out):
    model_config = example(
        id=EXAMPLE_TASK,
        request_id=EXAMPLE_REQUEST,
        tenant_id=EXAMPLE_TENANT,
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
        submitted_at=EXAMPLE_AT,
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
    hosts: int | None = Field(
        None,
        description="The number of hosts on which the devices are, as many on each; null: one, or "
        "any number if `across_hosts` is set.",
    )
    tier: Tier = Field("standard", description="The tier of the request.")
    state: TaskState = Field(description="The scheduler's state, finer than `phase`.")
    phase: PhaseWord = Field(description=PHASE_TEXT)
    hold: str = Field(
        "",
        description="Who paused the task: empty, `user`, `admin`, `idle` for an idle session, "
        "`rule` for a rule of `retry`, `rung` for a rung of `stop`, or `promoted`: it goes on past "
        "a rung when `at_once` leaves room.",
    )
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
    peak_device_bytes: int = Field(
        0,
        description="The most memory of a device that the task's processes held, as the kernel or "
        "the driver counted it; 0: not counted yet.",
    )
    peak_host_bytes: int = Field(
        0,
        description="The most memory of the host that the task's images and spilled blocks took.",
    )
    memory_to_request_bytes: int | None = Field(
        None,
        description="What to request as `devices.memory_bytes` for the next such task: the peak, "
        "with an eighth to spare. Null until the task is done.",
    )
    peak_resources: ResourcesOut = Field(
        ResourcesOut(),
        description="The most that the task took of its host, as the kernel counted it; memory "
        "without its images. An empty field was not counted.",
    )
    resources_to_request: ResourcesOut | None = Field(
        None,
        description="What to ask for as `resources` of the next such task: the peaks, with an "
        "eighth to spare. Null until the task is done.",
    )
    network: NetworkOut | None = Field(
        None, description="What the task used of the network; null: it may not reach any."
    )
    no_tunnel: str = Field(
        "",
        description="Why you cannot open a shell or a port of the task; empty: you can. A tunnel "
        "into a task that does not run now waits until it does.",
    )
    held_us: int = Field(
        0, description="Total time that the task has held devices, over all epochs."
    )
    guest_held_us: int = Field(
        0, description="Total time that the task has held additional, borrowed devices."
    )
    needs: list[NeedOut] = []
    after_requests: list[RequestNeedOut] = Field(
        [], description="The other requests that the task comes after."
    )
    inputs: dict[str, str] = Field(
        {},
        description="The source of each input: `TASK.OUTPUT`, `REQUEST/TASK.OUTPUT`, "
        "`REQUEST/LOT@best.OUTPUT` or "
        "`datablock:NAME@VERSION`. Without a version in the descriptor, it is the newest version at"
        " submission; of a request, it is the id.",
    )
    from_checkpoint: str | None = Field(
        None, description="The checkpoint from which it began; of `NAME@best`, it is the id."
    )
    publish: dict[str, str] = Field(
        {}, description="The outputs that become new datablock versions when the task is done."
    )
    lot: LotOut | None = Field(None, description="What became of its members, if it is a lot.")
    lot_id: str | None = Field(None, description="The lot of which the task is a member.")
    lot_index: int | None = Field(None, description="The index of the member in its lot.")
    lot_values: dict[str, str | int | float | bool] | None = Field(
        None, description="The values that the matrix or search has for it."
    )
    metrics: dict[str, Any] = {}
    capabilities: list[str] = Field(
        [],
        description="The supported operations: `pause`; `save` a durable checkpoint; `move` the "
        "task with its state; resume `exact`ly, or with `equivalent` bits. A command has "
        "`restart` instead of `save`, and `move` only where its processes can be stored: without "
        "`move` it restarts in its last saved working folder on another device. "
        "`device_memory`: other tasks can use its device memory while it is "
        "paused. `notice`: it is told before a stop, and moves after it has saved its state.",
    )
    movement: str = Field(
        "",
        description="What becomes of the task if it leaves its device, and why, in a sentence; "
        "empty before its first start.",
    )
    preset: dict[str, Any] = {}
    cause: str | None = Field(None, description="Why the last attempt failed.")
    message: str | None = None
    detail: str | None = Field(
        None, description="The traceback of the job; only its owner sees it."
    )
    result: dict[str, Any] | None = None
    outputs: dict[str, Any] = {}
    dropped: DroppedFilesOut | None = Field(
        None, description="Files of a command that it wrote and that were not kept when it ended."
    )
    unstored: str = Field(
        "", description="Why the store refuses its newest checkpoint or output, or empty."
    )
    behind: str = Field(
        "",
        description="For which rank of the gang the others wait, in a sentence, or empty while all "
        "move.",
    )
    submitted_at: datetime
    first_started_at: datetime | None = None
    ended_at: datetime | None = None


class MigrateIn(In):
    model_config = example(to="local.1")
    to: str | None = Field(None, description="The target device; null: the best other free device.")


class ResizeIn(In):
    model_config = example(devices_max=2)
    devices_max: int = Field(ge=1, description="The most devices that the task may hold.")


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
        task_id=EXAMPLE_TASK,
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
    movement: str = Field("", description="As in the task: whether it can move, and if not, why.")
    time: TimeSpentOut


class AskedTaskOut(Out):
    model_config = example(
        task_id=EXAMPLE_TASK,
        request_id=EXAMPLE_REQUEST,
        descriptor={
            "name": "train",
            "run": {"kind": "job", "entry": "train:Train"},
            "params": {"lr": 0.001},
            "devices": {"kind": "cuda", "min": 1, "max": 1},
        },
    )
    task_id: str
    request_id: str
    descriptor: dict[str, Any] = Field(
        description="The fields of a task in a descriptor; those that were left out have their "
        "defaults."
    )


class RunningFileOut(Out):
    model_config = example(path="out/model.pt", size_bytes=4_194_304, modified_at=EXAMPLE_AT)
    path: str
    size_bytes: int
    modified_at: datetime


class RunningFilesOut(Out):
    model_config = example(
        task_id=EXAMPLE_TASK,
        files=[{"path": "out/model.pt", "size_bytes": 4_194_304, "modified_at": EXAMPLE_AT}],
        is_cut=False,
    )
    task_id: str
    files: list[RunningFileOut]
    is_cut: bool = Field(description="There are more files; name a folder in `path`.")


class MetricOut(Out):
    model_config = example(step=120, at=EXAMPLE_AT, values={"loss": 0.31})
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
        task_id=EXAMPLE_TASK,
        epoch=2,
        step=1200,
        sha256=EXAMPLE_SHA256,
        size_bytes=184_320,
        new_bytes=12_288,
        took_us=21_000,
        host="alpha",
        key=EXAMPLE_SHA256,
        created_at=EXAMPLE_AT,
        damaged_at=None,
        deleted_at=None,
        pinned_at=None,
        best=True,
        ranked_value=0.125,
        ranked_step=1190,
    )
    id: str
    task_id: str = Field(description="The task that saved it; of a lot, the member.")
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
    pinned_at: datetime | None = Field(description="If set, it is not deleted for its age.")
    best: bool = Field(
        description="One of the task's best by `checkpoint.best`: it is not deleted for its age."
    )
    ranked_value: float | None = Field(
        description="The metric of `checkpoint.best` at this step, or last before it; null: it was "
        "no finite number, or not reported."
    )
    ranked_step: int | None = Field(description="The step at which the value was reported.")


class PlacementOut(Out):
    """One launch of a task on one device."""

    model_config = example(
        epoch=2,
        device_id="local.0",
        kind="cpu",
        launched_at=EXAMPLE_AT,
        started_at=EXAMPLE_AT,
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
        at=EXAMPLE_AT,
        type="task.paused",
        task_id=EXAMPLE_TASK,
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
        cursor="MTI",
        at=EXAMPLE_AT,
        task_id=EXAMPLE_TASK,
        task="train",
        epoch=2,
        stream="stdout",
        text="loss 0.3",
    )
    cursor: str
    at: datetime
    task_id: str
    task: str
    epoch: int
    stream: str
    text: str
