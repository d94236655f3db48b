"""Defines the messages between an island and its devices: orders down, heartbeats up, answers down.

Messages are hints; Postgres is the truth. Any message may be lost, repeated or late. Three things
make that harmless:

* Every order and event carries `(task, epoch, seq)`; a stale or repeated one changes nothing.
* A report (`Alive`) is the *whole* truth of a device: every resident it holds, and every event
  and log line that is not acknowledged yet. A lost report only delays these to the next one.
* A `Pulse` says that an acknowledged report still holds, and how far its tasks are. The report's
  number is the time when it was sent. An island that does not know the number, or may have lost
  something, asks for the whole report (`ReportWanted`). Reports and pulses are *heartbeats*. The
  pulses of a host's devices go in one message (`HostPulses`), and so do the answers to them.
* The `Answer` to a report says until when the device may continue (its lease), which events
  arrived, and which of the named residents belong to an older epoch and must be dropped.

A resident may take the slot only after an answer to a heartbeat *that named it* said "keep", or
while its Launch is so fresh that the answer could only be "keep". It steps only until the lease of
the last answer ends. So an order that arrives late, or at a device that the island has given up,
runs nothing: the answer to the first heartbeat that names its resident says "drop".
(tests/app/scheduling/test_protocol.py finds two devices that run one task if this rule is left
out.)

All messages are JSON. `encode` and `decode` are exact inverses. `decode` rejects names that are not
well formed, so no later code has to check a name again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any

from app.core.model import codec
from app.core.model.codec import BadValue
from app.core.model.descriptor import TaskDescriptor
from app.core.model.protocol import wellformed
from app.core.model.protocol.wellformed import BadMessage

JSON = dict[str, Any]


# --- orders, down to one device -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Carries an instruction from the island to a device.

    `seq` numbers the orders of one epoch of one task from 1. An order that is handled twice does no
    harm.
    """

    task: str
    epoch: int
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRef:
    """Names a checkpoint in the store; `key` is the public key of the host that signed it."""

    sha256: str
    step: int
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch(Order):
    """Give this task the slot: at once if the device is free, else after the paused task has left.

    `spec` is the task's descriptor; all other fields say where and from what it runs this time.

    On hosts other than the coordinator host the device runs remote ranks. It reports nothing of
    them: the coordinator host does.

    Outputs in `spec.publish` are stored as files of tensors (`core.model.checkpoints.tensor_file`),
    the other outputs as images.
    """

    tenant: str
    spec: TaskDescriptor
    bundle: str  # sha256 of the uploaded code
    # By port: {"sha256", "size_bytes", "format"?, "datablock"?, "copies"?}. Inputs that may come
    # late (`core.placement.partitions.late`) and do not exist yet are left out. An input without a
    # `format` is an image; `datablock` is "NAME@VERSION". `copies` are device workers that may
    # still have the input: {"place": [address, port], "key"} (`workers.transfer.peer_blocks`).
    inputs: JSON
    preset: JSON
    # Checkpoints to resume from, newest first. If the device still holds a paused resident of this
    # task at the newest step, it resumes that resident. If it kept a newer image of the previous
    # epoch, of which the island had not heard, it resumes from that image.
    images: list[CheckpointRef]
    budget_us: int  # in µs on the slot: what is left of `spec.max_duration_s`
    # number of the gang's slots on each of its hosts; the coordinator host comes first
    seats: list[int] = field(default_factory=lambda: [1])
    host: int = 0  # number of this device's host in `seats`
    # {"secret"}, and for remote ranks also {"home": [address, port]}, with which they join the gang
    # (`workers.transfer.peer_auth`)
    links: JSON = field(default_factory=dict)
    # Other devices of this host that the task's processes use, in the order in which they see them,
    # after this device. Empty on a CPU, whose devices need no names.
    guests: list[str] = field(default_factory=list)
    # By target: paths of the folders that the task may see on its host, as they are registered now.
    # A target of `spec.mounts` that is missing here cannot be shown any more.
    mounts: JSON = field(default_factory=dict)
    # path of `spec.image`, as it is registered now; "" if the tenant may not use it any more
    root: str = ""
    incarnation: str = ""  # process of the device worker whose clock `surely_until_us` uses
    # A time of the device's clock. Until then the island cannot have given the task to another
    # device, so the order alone gives the task the slot, without waiting for an answer.
    surely_until_us: int = 0
    # True: other tasks stay on the device, and all of them take turns (`Answer.rota`). A function
    # waits behind them instead (`core.scheduling.sharing.function_batches`).
    beside: bool = False
    # The task's secrets: {"mark", "sealed"}. `mark` changes with any of their values; `sealed`
    # opens on the device's host only (`app.storage.sealing`). Or {"mark", "refused"}, with the
    # reason why the task cannot have them.
    secrets: JSON = field(default_factory=dict)
    # Key with which the images of a command are encrypted: {"sealed"}, which opens on the device's
    # host only, or {"refused"}, with the reason why there is none.
    image_key: JSON = field(default_factory=dict)
    # destinations of `spec.network` that the tenant may not reach any more
    withdrawn: list[str] = field(default_factory=list)
    # User and request of the task; "" for a worker of an older version. Only functions of one
    # request share a process, or those of one user (`core.model.shared_process`).
    user: str = ""
    request: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause(Order):
    """Stop at the next safe point, stage the image in host memory, release the slot.

    If a `successor` is named, the device first lets that task prepare beside this one, so that the
    slot is empty between the two only for a short time.
    """

    successor: str = ""  # a task that is launched on this device, or ""
    moves: bool = False  # the task continues on another device, which waits for its image
    # in microseconds: how long the task runs on after its notice; 0: it gets no notice
    notice_us: int = 0
    why: str = ""  # the reason of its notice (`provisions.notice.NoticeReason`)


@dataclass(frozen=True, slots=True, kw_only=True)
class Save(Order):
    """Write a durable checkpoint at the next safe point and continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize(Order):
    """Let the ranks take turns on `seats` slots from the next safe point on; `seats` and `guests`
    are as in a Launch.

    The slots are the present one and further slots that are reserved for the ranks.
    """

    seats: list[int]
    links: JSON = field(default_factory=dict)
    guests: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(Order):
    """End at the next safe point, or by force after the grace period.

    Nothing is stored but the artifacts of a command.
    """


# --- events, up to the island -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Reports something about a task from a device to the island.

    `seq` numbers the events of one epoch of one task from 1, without gaps. `held_us` is how long
    this epoch has held its device so far, by the device's own clock: its time in the slot, and
    before that its start, while the slot was empty for it. For `staged_us` of that time the job
    stood still while its state was copied.
    """

    task: str
    epoch: int
    seq: int
    step: int
    held_us: int
    staged_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Event):
    """The job is on the device, with its preset applied and read back; it resumes after `step`.

    `bound_because` is why the processes of a command cannot go to another device.
    """

    preset: JSON
    capabilities: list[str]
    resumed: str  # "fresh", "resident" (never left the device), "image"; "folder" for a command
    # time for which the slot stood empty although the task could have taken it
    switch_us: int = 0
    input_bytes: int = 0  # bytes of all inputs
    fetched_bytes: int = 0  # bytes of the inputs that were read from the store
    ways: JSON = field(default_factory=dict)  # port -> one of WAYS, by which its input came
    bound_because: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved(Event):
    """A checkpoint at `step` is durable in the store.

    A checkpoint of a command with neither `has_processes` nor `bound_because` is an image of its
    working folder alone.
    """

    sha256: str
    size_bytes: int
    took_us: int
    new_bytes: int = 0  # by how much the store grew
    has_processes: bool = False  # True: it has the processes of a command
    bound_because: str = ""  # why the processes of a command could not be in it
    # [epoch, lines]: how many lines had been printed in that epoch when the processes were dumped
    printed: list[int] = field(default_factory=list)
    # {"step", "value"} of the metric that ranks its task's checkpoints (`provisions.best_rule`), as
    # it was reported last before the image; {} if its process has not reported any
    ranked: JSON = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored(Event):
    """One output of a partition is durable in the store; `kept` is as in Finished.

    The partition continues to run. Tasks that wait only for this output may start.
    """

    output: str
    kept: JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Came(Event):
    """A late input has arrived, in one of WAYS."""

    port: str
    way: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized(Event):
    """The ranks are on `seats` slots now; the slots that they left are free.

    If a host could not be reached, `seats` differs from the order: the ranks stay where they were.
    """

    seats: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused(Event):
    """The slot is free; the image at `step` lies in the host memory of this device.

    A partition of a graph leaves its slot by itself when an input that it `lacks` does not arrive.
    A task that has ended leaves it when the store refuses an output: `unstored` says why, and
    `wait_us` when to launch the task again.
    """

    lacks: str = ""
    unstored: str = ""
    wait_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Event):
    """The task is done."""

    result: JSON
    # name -> {"sha256", "size_bytes"}, with TensorFile.summary for published outputs. A command
    # adds ARTIFACTS, if it left any.
    outputs: JSON
    # copies of blocks between the executors of a graph: {"block", "source", "target", "bytes"}
    passed: list[JSON] = field(default_factory=list)
    # how long each node, or each of its shards, took in the last launch
    took_ms: JSON = field(default_factory=dict)
    # how large the blocks made in that launch were; a list counts as a whole
    made_bytes: JSON = field(default_factory=dict)
    # files of a command that are not kept: {"files", "bytes", "first"}, or {}
    dropped: JSON = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Event):
    """The task failed: `cause` is one of `core.model.failure_causes.CAUSES`; `detail` is for the
    owner: a traceback, a path, a difference.

    `exit_status` is that of the task's process, or None; after signal N it is 128 + N, as in a
    shell. `outputs` are the ARTIFACTS of a command, if it left any; `dropped` is as in Finished.
    `noticed` is the reason of the notice that a command got before it asked to begin again, or
    empty. `matched` has the patterns of `retry` that a line of the log matches, each with the line.
    """

    cause: str
    message: str
    detail: str = ""
    outputs: JSON = field(default_factory=dict)
    dropped: JSON = field(default_factory=dict)
    noticed: str = ""
    exit_status: int | None = None
    matched: JSON = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped(Event):
    """Cancelled as ordered; nothing of the task is left on the device.

    `outputs` and `dropped` are as in Failed.
    """

    outputs: JSON = field(default_factory=dict)
    dropped: JSON = field(default_factory=dict)


#: The files of a command that are kept (`provisions.artifacts`); no declared output has this name.
ARTIFACTS = "artifacts.zip"

#: How an input came to its task: it was on the host, another host gave it, or it came from the
#: store.
WAYS = ("here", "host", "store")


# --- the heartbeat and its answer ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentView:
    """Describes one job as the device sees it."""

    task: str
    epoch: int
    # seating (does not hold the slot yet), running, noticed, pausing, paused, stopping or ended
    state: str
    step: int
    held_us: int
    order_seq: int  # number of the highest order of this epoch that the device has handled
    memory_bytes: int
    staged_us: int = 0
    level: str = "device"  # where the job's memory lies (`workers.device.memory_tiers`)
    on_device_bytes: int = 0  # device memory charged to the job
    host_bytes: int = 0  # host memory of the job's images
    # the missing input for which the job stands still, if the device does not know yet where it
    # lies
    lacks: list[str] = field(default_factory=list)
    metrics: JSON = field(default_factory=dict)
    points: list[list[Any]] = field(default_factory=list)  # rows of metrics: [step, metrics]
    # what this epoch used of the network here, if it may use it: {"connections", "refused",
    # "sent_bytes", "received_bytes"}
    network: JSON = field(default_factory=dict)
    # the most that its process took of the host, by resource (`provisions.resources`)
    peaks: JSON = field(default_factory=dict)
    idle_us: int = 0  # how long the processes of a session have computed nothing
    # what a launched task waits for on the device: "bytes" of device memory, "places" for processes
    # and host memory, or "disk"; "" if it waits for none of them
    waits_for: str = ""
    unstored: str = ""  # why the store refuses its newest image or output, or ""
    # for which of its ranks the others wait, in a sentence (`core.device.gang_watch`); or ""
    behind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLines:
    """Lines `first`, `first + 1`, ... that this epoch printed; each line is `[stream, text]`."""

    task: str
    epoch: int
    first: int
    lines: list[list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """All that a device holds, at this instant of its own monotonic clock."""

    device: str
    incarnation: str  # the device worker's process; sorts after all earlier processes of the device
    sent_us: int
    # Describes the device: host, island, kind, threads, memory_bytes, sandbox, torch. "image_key"
    # and "user" say that a Launch may have these fields here. "exchange_key" is the key that the
    # host announces (`app.messaging.message_keys`). "mounts" is the hash of the mounts that the
    # host knows, if it may show any (`provisions.mounts`); "images" is the same for container
    # images. "host_news" says that the news for all devices of the host go to the host's own queue.
    # "offers" is what the host can do and tasks may need. "clock_began_s" is the time of
    # the host's wall clock at which its monotonic clock was 0; it is shown, and decides nothing.
    # So is "protocol" (`protocol_version`).
    facts: JSON
    residents: list[ResidentView]
    events: list[Event]
    logs: list[LogLines]
    # Images of expected tasks that are here: {"task", "sha256", "bytes", "us"}. To get the image,
    # `bytes` had to be fetched, which took `us`.
    ahead: list[JSON] = field(default_factory=list)
    # [address, port] at which other hosts reach the device worker
    links: list[Any] = field(default_factory=list)
    # opens the blocks that the device worker gives (`workers.transfer.peer_blocks`)
    secret: str = ""
    # [task, epoch] with which the previous process was busy when its supervisor hung
    # (`workers.device.hang_report`)
    hung: list[Any] = field(default_factory=list)
    grace_us: int = 0  # how long a step may go on after the lease (`core.device.lease`)
    # what the device's monitor reads and finds, if it has one (`core.device.health_findings`)
    health: JSON = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """Says that a device still holds what an acknowledged report says, and nothing more.

    A device sends it in place of a report, if no event or log line waits for an acknowledgement.
    """

    device: str
    incarnation: str
    sent_us: int
    report: int  # `sent_us` of the report
    answer: int  # `sent_us` of the newest Answer that the device has
    # [step, held_us, staged_us] of each resident, in the order of the report
    progress: list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPulses:
    """Carries the pulses of several devices of one host, in one message.

    The message names its devices before its time: a later message with the same names takes its
    place.
    """

    processes: list[list[str]]  # [device, incarnation] of each pulse
    sent_us: int  # that of the newest pulse
    pulses: list[list[Any]]  # [sent_us, report, answer, progress] of each, as in a Pulse

    @classmethod
    def of(cls, pulses: Iterable[Pulse]) -> HostPulses:
        ordered = sorted(pulses, key=lambda pulse: pulse.device)
        return cls(
            processes=[[pulse.device, pulse.incarnation] for pulse in ordered],
            sent_us=max(pulse.sent_us for pulse in ordered),
            pulses=[[it.sent_us, it.report, it.answer, it.progress] for it in ordered],
        )

    def each(self) -> list[Pulse]:
        """Return the pulses; raises BadMessage if one has no process, or a process has none."""
        if len(self.processes) != len(self.pulses):
            raise BadMessage(f"{len(self.processes)} processes, {len(self.pulses)} pulses")
        return [
            Pulse(
                device=device,
                incarnation=incarnation,
                sent_us=sent_us,
                report=report,
                answer=answer,
                progress=progress,
            )
            for (device, incarnation), (sent_us, report, answer, progress) in zip(
                self.processes, self.pulses, strict=True
            )
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A late input of a task is durable now; `source` describes it as a Launch would.

    The message is sent as soon as the input is recorded, and in answers as long as the task lacks
    it.
    """

    task: str
    epoch: int
    port: str
    source: JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTask:
    """Names a task that is being moved to a device, and what the device can fetch already.

    `inputs` are those that exist so far, as in a Launch; `image` is its newest checkpoint.
    `environment` is the lock of the packages that its request brings, or "". `image_key` is as in a
    Launch.
    """

    task: str
    epoch: int
    tenant: str
    bundle: str
    inputs: list[JSON]
    image: CheckpointRef | None
    environment: str = ""
    image_key: JSON = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Acknowledges the heartbeat of `sent_us`.

    The device may continue until `sent_us + lease_us`.
    """

    device: str
    incarnation: str
    sent_us: int
    lease_us: int
    heard: dict[str, int]  # by "task/epoch": seq of the last event recorded
    logged: dict[str, int]  # by "task/epoch": number of the next log line expected
    # [task, epoch]: residents that are known to be here and may have the slot
    keep: list[list[Any]]
    drop: list[list[Any]]  # [task, epoch]: residents of an older epoch, or not wanted
    # all tasks that are being moved here; the device keeps nothing else ahead
    expect: list[ExpectedTask] = field(default_factory=list)
    # tasks of `keep` that wait for a device, in the order in which they are expected to get one
    next: list[str] = field(default_factory=list)
    # shares of the tasks that take turns on the device (`core.scheduling.sharing.turns`), if there
    # are several; None: unchanged
    rota: list[JSON] | None = None
    given: list[Given] = field(default_factory=list)  # inputs that residents lack and can have now
    wanted: bool = True  # True: a waiting task could use the device, as far as is known
    # public keys of the other islands, which may send orders here too, because a gang may span
    # islands
    peers: list[str] = field(default_factory=list)
    # how much longer a step that has begun may go on; until then the island leaves its task alone
    grace_us: int = 0
    check: int = 0  # number of the last health check that the device is to make
    mounts: JSON | None = None  # paths of all mounts by name; None: unchanged
    images: JSON | None = None  # paths of all container images by name; None: unchanged
    # Locks of all packages that the host is to have ready, the next one first. A device with the
    # fact "builds" gets them.
    environments: list[str] = field(default_factory=list)
    # The device reports again within this time; 0: within its own beat. A device with the fact
    # "paced" gets it.
    beat_us: int = 0
    # True: the island remembers the report, so a Pulse will do while it holds. A device with the
    # fact "pulses" gets it.
    pulses: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRenewal:
    """Answers the Pulse of `sent_us` as the Answer `answer` did, whose `sent_us` that is."""

    device: str
    incarnation: str
    sent_us: int
    answer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportWanted:
    """Asks for the whole report: the island does not know the report that the Pulse of `sent_us`
    named.
    """

    device: str
    incarnation: str
    sent_us: int


def about_secrets(task: str, epoch: int, device: str) -> str:
    """Return the text that binds sealed secrets to one launch, so that they open for no other
    launch.
    """
    return f"{task}\n{epoch}\n{device}"


def about_image_key(task: str, epoch: int, device: str) -> str:
    """Return the text that binds the sealed key of a task's images to one launch."""
    return f"{about_secrets(task, epoch, device)}\nimages"


def key(task: str, epoch: int) -> str:
    """Return the key by which `heard` and `logged` name one epoch of one task."""
    return f"{task}/{epoch}"


# --- to JSON and back ---------------------------------------------------------------------------

_KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        Launch, Pause, Save, Resize, Cancel,
        Started, Saved, Stored, Came, Resized, Paused, Finished, Failed, Stopped,
        ResidentView, LogLines, Alive, Pulse, HostPulses, Given, Answer, LeaseRenewal, ReportWanted,
    )
}  # fmt: skip


def encode(message: Any) -> JSON:
    """Return a message as JSON, with its kind under "is".

    Fields at their default are omitted, so that workers of an older version can read the message.
    """
    kind: Any = type(message)
    named = ((name, getattr(message, name), usual) for name, usual in codec.usual_values(kind))
    said = {name: _plain(value) for name, value, usual in named if value != usual}
    return {"is": kind.__name__, **said}


def checked(message: Any) -> JSON:
    """Return a message as JSON; raises BadMessage if a name in it is not well formed."""
    body = encode(message)
    values = {name: value for name, value in body.items() if name != "is"}
    kind: Any = type(message)
    wellformed.check(kind.__name__, _types(kind), values)
    return body


def _plain(value: Any) -> Any:
    if isinstance(value, list) and value and is_dataclass(value[0]):
        return [_plain(item) for item in value]
    if is_dataclass(value):
        return encode(value) if type(value).__name__ in _KINDS else codec.to_json(value)
    return value


def decode(body: JSON) -> Any:
    """Return the message from which `encode` made `body`; raises BadMessage for anything else.

    Every name in the message is safe to use as a path or a key (`core.model.protocol.wellformed`).
    """
    named = body.get("is") if isinstance(body, dict) else body
    kind = _KINDS.get(named) if isinstance(named, str) else None
    if kind is None:
        raise BadMessage(f"unknown message {named!r:.100}")
    values = {name: value for name, value in body.items() if name != "is"}
    if unknown := values.keys() - _types(kind).keys():
        raise BadMessage(f"{kind.__name__} has no {', '.join(sorted(unknown))[:100]}")
    wellformed.check(kind.__name__, _types(kind), values)
    for name in _compound(kind) & values.keys():
        values[name] = _decode_value(kind, name, values[name])
    try:
        return kind(**values)
    except TypeError as error:
        raise BadMessage(str(error)) from error


@cache
def _types(kind: type) -> dict[str, str]:
    return {field.name: str(field.type) for field in fields(kind)}


@cache
def _compound(kind: type) -> frozenset[str]:
    """Return the fields that hold other messages or values."""
    types = _types(kind)
    return frozenset(name for name in types if types[name] in {*_INNER, *_VALUES})


def _decode_value(kind: type, name: str, value: Any) -> Any:
    declared = _types(kind)[name]
    if (values := _VALUES.get(declared)) is not None:
        try:
            return codec.from_json(values, value, f"{kind.__name__}.{name}")
        except BadValue as error:
            raise BadMessage(str(error)) from error
    inner = _INNER[declared]
    messages = [decode(item) for item in value]
    for message in messages:
        if not isinstance(message, inner):
            raise BadMessage(f"{kind.__name__}.{name} holds a {type(message).__name__}")
    return messages


#: The types of fields that hold other messages.
_INNER: dict[str, type] = {
    f"list[{each.__name__}]": each for each in (Event, ResidentView, LogLines, Given)
}

#: The types of fields that hold other values.
_VALUES: dict[str, Any] = {
    "TaskDescriptor": TaskDescriptor,
    "list[CheckpointRef]": list[CheckpointRef],
    "list[ExpectedTask]": list[ExpectedTask],
}
