"""What travels between an island and its devices: orders down, heartbeats up, answers down.

Messages are hints; Postgres is the truth.  Any of them may be lost, doubled or late, and three
things make that harmless:

* every order and event carries `(task, epoch, seq)`; a stale or doubled one changes nothing;
* a heartbeat (`Alive`) is the *whole* truth of a device: every resident it holds, and every event
  and log line that has not been acknowledged yet.  Losing one only delays it to the next;
* the `Answer` to a heartbeat says until when the device may go on (its lease), what arrived, and
  which of the residents it named belong to an older epoch and must be dropped.

A resident may take the seat only after an answer to a heartbeat *that named it* said "keep", or
while its Launch is so fresh that the answer could be no other; and it steps only until the lease of
the last answer ends.  So an order that comes late, or to a device that has been given up, runs
nothing: the answer to the first heartbeat that names it says "drop".
(tests/app/test_protocol.py finds two devices running one task if this is left out.)

Everything is JSON.  `encode` and `decode` are exact inverses; `decode` refuses what is not well
formed, so that no name has to be looked at again.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any

from app.core import wellformed
from app.core.wellformed import BadMessage

JSON = dict[str, Any]


# --- orders, down to one device -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """`seq` numbers the orders of one epoch of one task from 1; handling one twice is harmless."""

    task: str
    epoch: int
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch(Order):
    """Seat this task: at once if the device is free, else when the one being paused has let go.

    `images` are checkpoints to go on from, newest first, as `{"sha256", "step", "key"}`, `key`
    being the public one of the host that signed it; a device that
    still holds a paused resident of this task at the newest step goes on from that instead, and one
    that kept a newer image in the epoch before, of which the island had not heard, from that.
    `budget_us` is what is left of `max_duration_s`, measured in seat time.  Of the `outputs`, those
    to `publish` are kept as files of tensors (`core.tensorfile`), the others as images.

    A gang's `seats` lie on one host or several, home's first; this device is of the `host` with
    that number.  On any but home it is an outpost, which runs ranks there and says nothing of them:
    home does.  `links` are {"secret"}, and for an outpost {"home": [address, port]}: how it joins
    them (`workers.links`).

    Until `surely_until_us`, by the device's clock and for this incarnation of it, the island cannot
    have given the task to anybody else; then the order alone seats it, and no answer is waited for.

    If it is `beside`, others stay there, and they take turns as the answers say (`Answer.rota`).

    Of the inputs that may come late (`core.legs.late`) those that are not there yet are left out.
    An input without a `format` is an image; `datablock` is "NAME@VERSION".  Its `copies` are
    device workers that may have it still: {"place": [address, port], "key"} (`workers.giving`).
    """

    tenant: str
    run: JSON  # {"job": "module:Class"}, {"function": "module:name"} or {"graph": "sha256:…"}
    bundle: str  # sha256 of the uploaded code
    params: JSON
    inputs: JSON  # port -> {"sha256", "size_bytes", "format"?, "datablock"?, "copies"?}, see below
    outputs: list[str]
    world_size: int
    preset: JSON
    images: list[JSON]
    budget_us: int
    checkpoint_every_s: float
    memory_bytes: int
    publish: list[str] = field(default_factory=list)
    seats: list[int] = field(default_factory=lambda: [1])
    host: int = 0
    links: JSON = field(default_factory=dict)
    incarnation: str = ""
    surely_until_us: int = 0
    beside: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause(Order):
    """Stop at the next safe point, stage the image in host memory, let go of the seat.

    If a `successor` is named, the device first lets that task get ready beside this one, so that
    the seat hardly stands empty between them.
    """

    successor: str = ""  # a task that is launched on this device, or ""
    moves: bool = False  # it goes on on another device, which waits for its image


@dataclass(frozen=True, slots=True, kw_only=True)
class Save(Order):
    """Write a durable checkpoint at the next safe point and go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize(Order):
    """From the next safe point on the ranks take turns on so many `seats`, as in a Launch: this
    one, and others that are kept for them."""

    seats: list[int]
    links: JSON = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(Order):
    """End at the next safe point, or by force after the grace period; keep nothing."""


# --- events, up to the island -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """`seq` numbers the events of one epoch of one task from 1, without gaps.

    `held_us` is how long this epoch has held its seat so far, by the device's own clock; for
    `staged_us` of it the job stood still, because its state was copied.
    """

    task: str
    epoch: int
    seq: int
    step: int
    held_us: int
    staged_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Event):
    """The job sits on the device, its preset applied and read back; it goes on after `step`."""

    preset: JSON
    capabilities: list[str]
    resumed: str  # "fresh", "resident" (never left the device), "image"; "folder" for a command
    switch_us: int = 0  # how long the seat stood empty for it, once it could have been taken
    input_bytes: int = 0  # of its inputs,
    fetched_bytes: int = 0  # of which so many were read from the store
    ways: JSON = field(default_factory=dict)  # port -> which of WAYS its input came by


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved(Event):
    """A checkpoint at `step` is durable in the store, which grew by `new_bytes`."""

    sha256: str
    size_bytes: int
    took_us: int
    new_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored(Event):
    """One output of a leg is durable in the store, `kept` there as a Finished says it; the leg
    runs on, and whoever waits for that output alone may start.
    """

    output: str
    kept: JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Came(Event):
    """An input that came late is here, by one of WAYS."""

    port: str
    way: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized(Event):
    """The ranks sit on so many `seats` now; what they left is free.

    They are not those that were ordered if a host could not be reached: then it is as it was.
    """

    seats: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused(Event):
    """The seat is free; the image at `step` lies in the host memory of this device.

    A leg of a graph leaves its seat by itself when what it `lacks` there, an input, does not come.
    """

    lacks: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Event):
    """`outputs`: name -> {"sha256", "size_bytes"}, and TensorFile.summary of what is published; of
    a command also ARTIFACTS, if it left any.  `passed` are the copies of blocks between the
    executors of a graph: {"block", "source", "target", "bytes"}.  `took_ms` is how long each of its
    nodes took, or each shard of one, where it was launched for the last time, and `made_bytes` how
    large blocks were that they made there, lists as a whole.
    """

    result: JSON
    outputs: JSON
    passed: list[JSON] = field(default_factory=list)
    took_ms: JSON = field(default_factory=dict)
    made_bytes: JSON = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Event):
    """`cause` is one of CAUSES; `detail` is for the owner: a traceback, a path, a difference.

    `outputs` are the ARTIFACTS of a command that failed by itself, if it left any.
    """

    cause: str
    message: str
    detail: str = ""
    outputs: JSON = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped(Event):
    """Cancelled as ordered; nothing of it is left on the device."""


#: The files that a command left in its folder `artifacts`; no declared output can be called so.
ARTIFACTS = "artifacts.zip"

#: How an input came to a task: it lay on its host, another host gave it, or the store was read.
WAYS = ("here", "host", "store")

#: Why an attempt failed -> whether another attempt may help (`retry.max` permitting).
CAUSES = {
    "exception": True,  # the tenant's code raised
    "exit": True,  # the process ended without a word: killed, out of memory, os._exit
    "max_duration": False,  # held its seat for max_duration_s
    "uncapturable": False,  # its state cannot be captured, so it could never be paused
    "preset": False,  # the device did not take the preset
    "bundle": False,  # the code could not be loaded
    "image": True,  # the checkpoint could not be restored; an older one is tried
    "host": True,  # another host of its gang was lost: tried again, and no attempt is used up
    "store": True,  # the store did not answer: tried again, and no attempt is used up
}


# --- the heartbeat and its answer ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentView:
    """One job as the device sees it.

    `state` is seating (not on the seat yet), running, pausing, paused, stopping or ended.  `level`
    is where its memory lies (`workers.residency`): `on_device_bytes` is what it is counted for
    there, `host_bytes` what its images take of host memory.  `lacks` is the input for which it
    stands still, and of which it was not told yet where it lies, and those that came straight and
    of which it was not told yet what they are.  `points` are the metrics of steps before `step`.
    """

    task: str
    epoch: int
    state: str
    step: int
    held_us: int
    order_seq: int  # the highest order of this epoch that the device has taken in
    memory_bytes: int
    staged_us: int = 0
    level: str = "device"
    on_device_bytes: int = 0
    host_bytes: int = 0
    lacks: list[str] = field(default_factory=list)
    metrics: JSON = field(default_factory=dict)
    points: list[list[Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLines:
    """Lines `first`, `first + 1`, ... of what this epoch printed; each line is `[stream, text]`."""

    task: str
    epoch: int
    first: int
    lines: list[list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """All that a device holds, at this instant of its own monotonic clock.

    `incarnation` names the device worker's process and sorts after those of all processes before
    it; `facts` describe the device itself: host, island, kind, threads, memory_bytes, sandbox,
    torch.  `ahead` are the images of expected tasks that are here: {"task", "sha256", "bytes",
    "us"}, the last two being what had to be fetched for it and how long that took.  Other hosts
    reach the device worker at `links`, [address, port], and `secret` opens the blocks that it gives
    (`workers.giving`).  `hung` are [task, epoch] of what the process before was busy with when its
    supervisor hung (`workers.hung`).
    """

    device: str
    incarnation: str
    sent_us: int
    facts: JSON
    residents: list[ResidentView]
    events: list[Event]
    logs: list[LogLines]
    ahead: list[JSON] = field(default_factory=list)
    links: list[Any] = field(default_factory=list)
    secret: str = ""
    hung: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A late input of a task that is durable now: `source` says of it what a Launch would.

    It is sent as soon as that is written down, and in answers as long as the task lacks it.
    """

    task: str
    epoch: int
    port: str
    source: JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a leg that runs will make and legs on other hosts lack, who run too: it is sent straight
    there when it is made, and before it is durable (`workers.giving`).

    `takers` are [{"output", "task", "epoch", "port", "place", "key"}].  It is told when one of both
    starts, and not again: who hears nothing of it is given the block when it is written down.
    """

    task: str
    epoch: int
    takers: list[JSON]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The island heard the heartbeat sent at `sent_us`: go on until `sent_us + lease_us`.

    `heard` maps "task/epoch" to the last event seq recorded; `logged` to the next line expected.
    Of the residents that the heartbeat named, `keep` are known to be here and may have the seat;
    `drop` belong to an older epoch, or are not wanted.  `expect` are all tasks that are being moved
    here, and the next legs of graphs that run here: what of them can be fetched already ({"task",
    "epoch", "tenant", "bundle", "inputs", "image"}; image and inputs as in a Launch).  Nothing else
    may be kept ahead.  `next` are those of `keep` that wait for a device, in the order in which
    they are expected to get one.  `rota` are the shares of those who take turns on it
    (`core.rota`), if several do; None: as before.  `given` is what residents lack and can have.
    `wanted`: somebody in line could use it, as far as is known.  `peers` are the public keys of the
    other islands, which may send orders here, too: a gang may span islands.
    """

    device: str
    incarnation: str
    sent_us: int
    lease_us: int
    heard: dict[str, int]
    logged: dict[str, int]
    keep: list[list[Any]]  # [task, epoch]
    drop: list[list[Any]]
    expect: list[JSON] = field(default_factory=list)
    next: list[str] = field(default_factory=list)  # tasks
    rota: list[JSON] | None = None
    given: list[Given] = field(default_factory=list)
    wanted: bool = True
    peers: list[str] = field(default_factory=list)


def key(task: str, epoch: int) -> str:
    """How `heard` and `logged` name one epoch of one task."""
    return f"{task}/{epoch}"


# --- to JSON and back ---------------------------------------------------------------------------

_KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        Launch, Pause, Save, Resize, Cancel,
        Started, Saved, Stored, Came, Resized, Paused, Finished, Failed, Stopped,
        ResidentView, LogLines, Alive, Given, Wanted, Answer,
    )
}  # fmt: skip


def encode(message: Any) -> JSON:
    """A message as JSON, its kind under "is"; what is as ever is left out, so that a worker of an
    older version can read what says nothing new.
    """
    body = asdict(message)
    for f in fields(message):
        value = getattr(message, f.name)
        as_ever = f.default if f.default_factory is MISSING else f.default_factory()
        if value == as_ever:
            del body[f.name]
        elif isinstance(value, list) and value and is_dataclass(value[0]):
            body[f.name] = [encode(item) for item in value]
    return {"is": type(message).__name__, **body}


def decode(body: JSON) -> Any:
    """The message that `encode` made `body` of; raises BadMessage for anything else.

    Every name in it may be made a path or a key of (`core.wellformed`).
    """
    named = body.get("is") if isinstance(body, dict) else body
    kind = _KINDS.get(named) if isinstance(named, str) else None
    if kind is None:
        raise BadMessage(f"unknown message {named!r:.100}")
    values = {name: value for name, value in body.items() if name != "is"}
    if unknown := values.keys() - _types(kind).keys():
        raise BadMessage(f"{kind.__name__} has no {', '.join(sorted(unknown))[:100]}")
    wellformed.check(kind.__name__, _types(kind), values)
    values = {name: _decode_value(kind, name, value) for name, value in values.items()}
    try:
        return kind(**values)
    except TypeError as error:
        raise BadMessage(str(error)) from error


@cache
def _types(kind: type) -> dict[str, str]:
    return {field.name: str(field.type) for field in fields(kind)}


def _decode_value(kind: type, name: str, value: Any) -> Any:
    inner = _INNER.get(_types(kind)[name])
    if inner is None:
        return value
    messages = [decode(item) for item in value]
    for message in messages:
        if not isinstance(message, inner):
            raise BadMessage(f"{kind.__name__}.{name} holds a {type(message).__name__}")
    return messages


#: The types of fields that hold other messages.
_INNER: dict[str, type] = {
    f"list[{each.__name__}]": each for each in (Event, ResidentView, LogLines, Given)
}
