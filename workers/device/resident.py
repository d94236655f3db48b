"""Keeps what the supervisor knows of a resident process and of each stay of a task on this device.

A `Resident` is a process.  A `Stay` is one epoch of one task on this device: its events, log lines
and slot time.  A paused resident that is launched again begins a new stay in the same process.  The
old stay is kept until the island has acknowledged all its events.

Nothing that a resident sends is trusted: it is a tenant's process.  Texts are cut and cleaned
before they are passed on, and an invalid message ends the resident.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.core.device.token_bucket import Bucket
from app.core.model import messages
from app.core.model.messages import Event, Launch, LogLines, Order, ResidentView, Resize
from app.core.model.task_graph import MAX_BYTES, MAX_EST_MS, MAX_NODES, SIZED_LIMIT
from app.core.placement.partitions import late
from workers.process import slab
from workers.process.sandbox import ENVIRONMENT, Room
from workers.process.wire import Parts, TenantWire, pair, parsed_parts
from workers.transfer.checkpoint import Known
from workers.transfer.peer_auth import Sockets

JSON = dict[str, Any]

LINE_LIMIT_BYTES = 8 * 1024
# kept per stay until acknowledged; the rest is dropped and reported as dropped
LOG_LIMIT_BYTES = 1 * 2**20
LAST_LINES = 20  # of stderr, the detail of a failed command
TEXT_LIMIT = 64 * 1024
NAMES_LIMIT = 20_000
FRAMES_BURST, FRAMES_PER_S = 2_000, 500.0  # per process; excess messages wait
BYTES_BURST, BYTES_PER_S = 4 * 2**20, float(2**20)
# seconds for which a process may be muted: at once, and per second; beyond, it is ended
MUTED_BURST_S, MUTED_PER_S = 20.0, 0.2
OWED_US = 30_000_000  # how long a paused process may lack an image while others lack memory
UNREAD_US = 10_000_000  # how long a process may leave its messages unread; then it is ended
KERNEL_US = 100_000  # least interval between two reads of a process's memory from the kernel
PROCESSES_LIMIT = 256  # most processes and threads read for one such count


# --- one epoch of one task ------------------------------------------------------------------------


@dataclass
class Stay:
    """Represents one epoch of one task on this device.

    `state` is one of core.model.messages.ResidentView, or "vanished" (dropped without an event).

    A stay `is_confirmed` once the island answered "keep" to a report that named it, or if its order
    was so fresh that this is the only possible answer.  Only a confirmed stay may take the slot, so
    that a late order runs nothing.
    """

    launch: Launch
    arrived_us: int
    state: str = "seating"
    is_confirmed: bool = False
    step: int = 0
    metrics: JSON = field(default_factory=dict)
    points: list[list[Any]] = field(default_factory=list)
    order_seq: int = 1
    # seq -> order that arrived before an earlier one
    early: dict[int, Order] = field(default_factory=dict)
    resident: Resident | None = None
    resumed: str = "fresh"
    successor: str = ""  # the task that this one yields to; it may prepare first
    yield_by_us: int | None = None  # when it yields at the latest
    moves: bool = False  # another device waits for its image
    seats: list[int] = field(default_factory=lambda: [1])  # number of slots of its ranks, by host
    wanted: Resize | None = None  # an ordered resize that is not done yet
    links: Sockets | None = None  # sockets to the other hosts of its gang, for its process
    expects: str = ""  # secret of the hosts that are to connect
    give_up_us: int | None = None  # when the wait for those hosts ends
    event_seq: int = 0
    events: list[Event] = field(default_factory=list)
    log: Log = field(default_factory=lambda: Log())
    seated_us: int | None = None
    before_us: int = 0
    unstaged_us: int = 0  # `staged_us` of its process when this stay began
    input_bytes: int = 0  # of all its inputs
    fetched_bytes: int = 0  # of its inputs that came from the store
    ways: JSON = field(default_factory=dict)  # port -> way by which the input came
    lacks: set[str] = field(default_factory=set)  # ports of late inputs that have not arrived
    given: JSON = field(default_factory=dict)  # port -> source of a late input that can be fetched
    coming: set[str] = field(default_factory=set)  # ports of late inputs being fetched
    awaits: str = ""  # port of the input that its process waits for

    @classmethod
    def of(cls, launch: Launch, now_us: int) -> Stay:
        lacks = set(late(launch.run)) - launch.inputs.keys()
        return cls(launch=launch, arrived_us=now_us, order_seq=launch.seq, lacks=lacks)

    @property
    def key(self) -> tuple[str, int]:
        return self.launch.task, self.launch.epoch

    def is_given(self, port: str, source: JSON) -> None:
        if port in self.lacks:
            self.given.setdefault(port, source)

    def goes_on_from(self, before: Stay) -> None:
        """Continue `before` in the same process.

        Inputs that did not reach the process are still lacking, even if the launch names them.
        """
        self.step, self.metrics, self.lacks = before.step, before.metrics, {*before.lacks}
        for port, source in self.launch.inputs.items():
            self.is_given(port, source)

    @property
    def is_started(self) -> bool:
        """True if the stay has had the slot."""
        return self.seated_us is not None or self.before_us > 0

    @property
    def is_outpost(self) -> bool:
        """True for remote ranks; their coordinator host reports for them."""
        return self.launch.host > 0

    @property
    def is_linked(self) -> bool:
        """True if all other hosts of its gang are connected, or there are none."""
        return len(self.launch.seats) == 1 or self.is_outpost or self.links is not None

    def hand_over(self) -> list[int]:
        """Hand over the descriptors of its links; the caller closes them."""
        taken, self.links = self.links or [], []
        return [sock.detach() for sock in taken]

    def held_us(self, now_us: int) -> int:
        on_it_us = 0 if self.seated_us is None else now_us - self.seated_us
        return self.before_us + on_it_us

    def staged_us(self, now_us: int) -> int:
        """The time its process stopped to copy state; it may lie, so slot time is the bound."""
        told_us = 0 if self.resident is None else self.resident.staged_us - self.unstaged_us
        return max(0, min(told_us, self.held_us(now_us)))

    @property
    def is_off_the_seat(self) -> bool:
        """True while another task that shares the device has its slice."""
        return self.state == "running" and self.seated_us is None

    def take_seat(self, now_us: int) -> None:
        self.seated_us = now_us

    def leave_seat(self, now_us: int) -> None:
        self.before_us, self.seated_us = self.held_us(now_us), None

    def tell(self, kind: type[Event], now_us: int, *, step: int | None = None, **said: Any) -> None:
        if self.is_outpost:
            return
        self.event_seq += 1
        event = kind(
            task=self.launch.task,
            epoch=self.launch.epoch,
            seq=self.event_seq,
            step=self.step if step is None else step,
            held_us=self.held_us(now_us),
            staged_us=self.staged_us(now_us),
            **said,
        )
        self.events.append(event)

    @property
    def process(self) -> Resident | None:
        """Its process, if it has one now."""
        resident = self.resident
        return resident if resident is not None and resident.stay is self else None

    def heard(self, seq: int) -> None:
        self.events = [event for event in self.events if event.seq > seq]

    def is_over(self) -> bool:
        """True if the stay has ended and has nothing left to report."""
        if self.events:
            return False
        return self.state == "vanished" or (self.state == "ended" and not self.log.waiting)

    @property
    def stands_still(self) -> bool:
        """True if its process waits for an input."""
        return self.awaits in self.lacks

    def view(self, now_us: int) -> ResidentView:
        return ResidentView(
            task=self.launch.task,
            epoch=self.launch.epoch,
            state=self.state,
            step=self.step,
            held_us=self.held_us(now_us),
            order_seq=self.order_seq,
            memory_bytes=self.resident.memory_bytes if self.resident else 0,
            **(self.resident.where() if self.resident and self.resident.stay is self else {}),
            staged_us=self.staged_us(now_us),
            lacks=sorted({self.awaits} & (self.lacks - self.given.keys())),
            metrics=self.metrics,
            points=self.points,
        )


class Log:
    """Keeps the unacknowledged log lines of one stay, numbered from 0."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[str, str]] = deque()
        self.first = 0  # number of the first line in `waiting`
        self.held_bytes = 0
        self.dropped = 0
        self.last = deque[str](maxlen=LAST_LINES)  # last lines of stderr, acknowledged or not
        self._open = {"stdout": b"", "stderr": b""}  # incomplete last lines

    @property
    def is_full(self) -> bool:
        return self.held_bytes >= LOG_LIMIT_BYTES

    def write(self, stream: str, data: bytes) -> None:
        if self.is_full:  # lines of a flood are only counted
            self.dropped += data.count(b"\n")
            if b"\n" in data:
                self._open[stream] = b""
            data = data[data.rfind(b"\n") + 1 :]
        *whole, rest = (self._open[stream] + data).split(b"\n")
        for line in whole:
            self._add(stream, _last_frame(line))
        rest = _last_frame(rest)
        while len(rest) > LINE_LIMIT_BYTES:
            self._add(stream, rest[:LINE_LIMIT_BYTES])
            rest = rest[LINE_LIMIT_BYTES:]
        self._open[stream] = rest

    def end(self) -> None:
        """Add the incomplete last lines as lines."""
        for stream, rest in self._open.items():
            if rest:
                self._add(stream, rest)
            self._open[stream] = b""
        self._say_what_was_dropped()

    def acknowledged(self, next_line: int) -> None:
        while self.waiting and self.first < next_line:
            stream, text = self.waiting.popleft()
            self.held_bytes -= _line_bytes(stream, text)
            self.first += 1
        if not self.is_full:
            self._say_what_was_dropped()

    def part(self, limit_bytes: int) -> tuple[list[list[str]], int]:
        """Return the next lines that fit, and their size in bytes."""
        lines: list[list[str]] = []
        taken = 0
        for stream, text in self.waiting:
            taken += _line_bytes(stream, text)
            if lines and taken > limit_bytes:
                return lines, taken - _line_bytes(stream, text)
            lines.append([stream, text])
        return lines, taken

    def _add(self, stream: str, line: bytes) -> None:
        while len(line) > LINE_LIMIT_BYTES:
            self._add(stream, line[:LINE_LIMIT_BYTES])
            line = line[LINE_LIMIT_BYTES:]
        if self.is_full:
            self.dropped += 1
            return
        self._say_what_was_dropped()
        self._keep(stream, line.decode("utf-8", "replace").rstrip("\r").replace("\0", "\ufffd"))

    def _say_what_was_dropped(self) -> None:
        if self.dropped:
            dropped, self.dropped = self.dropped, 0
            self._keep("stderr", f"… {dropped} lines dropped: printed faster than they are kept")

    def _keep(self, stream: str, text: str) -> None:
        self.waiting.append((stream, text))
        if stream == "stderr":
            self.last.append(text)
        self.held_bytes += _line_bytes(stream, text)


def _last_frame(line: bytes) -> bytes:
    """Return what a terminal shows of a line with carriage returns, as progress bars print them.

    A carriage return at the end stays until the line goes on: the text after it replaces the line.
    """
    start = line.rfind(b"\r", 0, len(line.rstrip(b"\r"))) + 1
    return line[start:]


def _line_bytes(stream: str, text: str) -> int:
    return len(stream) + len(text.encode()) + 16  # estimated size as JSON


def log_lines(stays: list[Stay], limit_bytes: int) -> list[LogLines]:
    """Return the next lines of all stays, about `limit_bytes` together; the rest comes later."""
    parts = []
    for stay in stays:
        if not stay.log.waiting or limit_bytes <= 0:
            continue
        lines, taken = stay.log.part(limit_bytes)
        limit_bytes -= taken
        task, epoch = stay.key
        parts.append(LogLines(task=task, epoch=epoch, first=stay.log.first, lines=lines))
    return parts


# --- one process ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    step: int
    sha256: str
    size_bytes: int
    took_us: int = 0
    new_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """An output that a process has announced; `early` if other tasks may begin before this one
    ends.
    """

    name: str
    size_bytes: int
    head_bytes: int
    early: bool


@dataclass
class Resident:
    """Represents one resident process.

    `doom` is the reason why the supervisor kills it, if it does.  `verdict` is its own final
    message.
    """

    id: int
    task: str
    wire: TenantWire
    bulk: socket.socket
    slab: int  # file descriptor of its `workers.process.slab`
    pipes: dict[int, str]  # descriptor -> "stdout" or "stderr"
    room: Room
    stay: Stay
    deadline_us: int  # deadline to be prepared
    pidfd: int | None = None
    pid: int = 0
    is_prepared: bool = False
    yields: bool = False  # it was told that its slice is over
    is_still: bool = False  # the device's trust has ended, and it has stopped
    preset: JSON = field(default_factory=dict)
    capabilities: list[str] = field(default_factory=list)
    saved: Saving | None = None  # its newest durable image
    has_state: bool = False  # it has had the slot, so it has state to lose
    memory_bytes: int = 0
    staged_us: int = 0  # how long it stopped in the slot to copy its state
    slab_bytes: int = 0  # as counted by the kernel
    spilled_bytes: int = 0  # blocks of a graph in host memory
    known: Known = field(default_factory=Known)
    level: str = "device"  # place of its state, see `workers.device.memory_tiers`
    may_leave: bool = True  # it frees device memory when told to
    leave_by_us: int = 0
    turn: int = 0  # number of orders about the place of its memory
    away_bytes: int = 0  # its memory that is off the device
    granted_bytes: int = 0  # device memory granted for its return
    paused_us: int = 0
    absent_us: int = 0  # usual time between a pause and its next slice; 0: unknown
    saves: int = 0  # number of images and outputs being stored
    is_read: bool = False  # an output is being read from `bulk`
    leaving: deque[Leaving] = field(default_factory=deque)  # announced outputs that wait to be read
    save_again_us: int | None = None  # when to retry a failed image
    is_gone: bool = False
    outputs: JSON = field(default_factory=dict)
    verdict: JSON | None = None
    parts: Parts = field(default_factory=Parts)  # received parts of a long message
    is_parsed: bool = False  # another thread parses a long message; later messages wait
    is_muted: bool = False  # not read from for a while, as it sent too much
    said: deque[JSON] = field(default_factory=deque)  # messages read and not processed yet
    checked: JSON | None = None  # the event made of a final message that came in parts
    exit_status: int | None = None  # its exit status, if it exited while a message was parsed
    frames: Bucket = field(default_factory=lambda: Bucket(FRAMES_BURST, FRAMES_PER_S))
    said_bytes: Bucket = field(default_factory=lambda: Bucket(BYTES_BURST, BYTES_PER_S))
    calm: Bucket = field(default_factory=lambda: Bucket(MUTED_BURST_S, MUTED_PER_S))
    kernel: tuple[int, int] | None = None  # (own, shared) bytes of its processes in the kernel
    kernel_us: int = 0  # when the kernel was last asked for its memory
    doom: str = ""
    refused: str = ""  # what its limits denied it, in a sentence
    kill_us: int | None = None  # when its grace period after a cancel ends

    @property
    def step(self) -> int:
        return self.stay.step

    @property
    def is_saving(self) -> bool:
        return self.saves > 0

    @property
    def is_command(self) -> bool:
        return "command" in self.stay.launch.run

    def may_give(self, output: str) -> bool:
        declared = output in self.stay.launch.outputs
        return declared or (self.is_command and output == messages.ARTIFACTS)

    def is_awaited(self, output: str) -> bool:
        """True if other tasks may start with the output while this one runs on."""
        return output in self.stay.launch.run.get("part", {}).get("after_ms", ())

    @property
    def artifacts(self) -> JSON:
        return {name: kept for name, kept in self.outputs.items() if name == messages.ARTIFACTS}

    @property
    def is_kept(self) -> bool:
        """True if its state is durable, as far as possible; for a command that is its working
        folder.
        """
        return not self.has_state or (self.saved is not None and self.saved.step == self.step)

    @property
    def is_durable(self) -> bool:
        """True if ending it now loses nothing; the processes of a command are never durable."""
        return self.is_kept and not (self.is_command and self.has_state)

    @property
    def on_device_bytes(self) -> int:
        """The device memory that it has or may take without asking: up to its declared memory."""
        if self.level == "host":
            return self.memory_bytes
        if self.level == "coming":
            return self.memory_bytes + self.granted_bytes
        reserved = max(self.memory_bytes, self.stay.launch.memory_bytes)
        return max(0, reserved - self.away_bytes) if self.level == "leaving" else reserved

    @property
    def lacking_bytes(self) -> int:
        """The memory that it must still be granted before it is back on the device."""
        asked = self.stay.launch.memory_bytes - self.memory_bytes
        return max(0, max(self.away_bytes, asked) - self.granted_bytes)

    @property
    def host_bytes(self) -> int:
        return self.slab_bytes + self.spilled_bytes

    def where(self) -> JSON:
        held = {"on_device_bytes": self.on_device_bytes, "host_bytes": self.host_bytes}
        return {"level": self.level, **held}

    def was_absent(self, now_us: int) -> None:
        """Update the usual time between a pause and the next slice, as it has the slot again."""
        if self.paused_us:
            took_us = max(1, now_us - self.paused_us)
            self.absent_us = (self.absent_us + took_us) // 2 if self.absent_us else took_us

    def measure(self) -> None:
        if self.slab >= 0:
            self.slab_bytes = slab.held_bytes(self.slab)

    def bounded_memory(self, told: int, house_bytes: int, kind: str, now_us: int) -> int:
        """Bound the memory that a job reports by its device and by the kernel's count."""
        return self._bounded(min(told, house_bytes), 0, kind, now_us)

    def bounded_spill(self, told: int, house_bytes: int, kind: str, now_us: int) -> int:
        """Bound the bytes of its graph's blocks in host memory (shared mappings) in the same
        way.
        """
        return self._bounded(min(told, house_bytes), 1, kind, now_us)

    def _bounded(self, told: int, which: int, kind: str, now_us: int) -> int:
        if kind != "cpu":
            return told
        is_known = self.kernel is not None and told <= self.kernel[which]
        if not is_known and now_us >= self.kernel_us + KERNEL_US:
            self.kernel, self.kernel_us = kernel_memory(self.pid), now_us
        return told if self.kernel is None else min(told, self.kernel[which])

    def heard(self, frames: int, read_bytes: int, now_us: int) -> int:
        """Count what was read from it; return for how many microseconds it is not read from now."""
        self.frames.take(frames, now_us)
        self.said_bytes.take(read_bytes, now_us)
        muted_us = max(self.frames.debt_us(now_us), self.said_bytes.debt_us(now_us))
        self.calm.take(muted_us / 1e6, now_us)
        return muted_us

    def owes_image(self, now_us: int) -> bool:
        """True if a long-paused job has no image, and none on its way."""
        if self.stay.state != "paused" or self.is_durable or self.is_command:
            return False
        on_its_way = self.is_saving or self.save_again_us is not None
        return not on_its_way and now_us - self.paused_us >= OWED_US

    def is_deaf(self, now_us: int) -> bool:
        """True if it has left messages unread for UNREAD_US, or too many wait for it."""
        since_us = self.wire.unread_since_us
        long = since_us is not None and now_us - since_us >= UNREAD_US
        return long or self.wire.is_overfull

    def send(self, word: str, fds: list[int] | None = None, **said: Any) -> None:
        if self.doom:
            return
        try:
            self.wire.send({"is": word, **said}, fds)
        except OSError:
            return  # it is dying; its exit will be reported

    def kill(self) -> None:
        """Kill the process and all that it started, at once."""
        if self.pidfd is None:
            return  # it is killed when its pidfd is known
        try:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        except ProcessLookupError:
            return
        try:
            # without sandbox layers, its children are in its process group
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return

    def close_stores(self) -> None:
        """Close what a storing thread may read from; call it when no thread does."""
        self.bulk.close()
        if self.slab >= 0:
            os.close(self.slab)
            self.slab = -1

    def close(self) -> None:
        """Close all but the wire, `bulk` and `slab`, which may take long to close."""
        for fd in self.pipes:
            os.close(fd)
        self.pipes = {}
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


def kernel_memory(pid: int) -> tuple[int, int] | None:
    """Return the (own, shared) bytes of memory of a process and its descendants, by the kernel's
    count.

    None if they cannot be read, or there are too many processes.
    """
    own = shared = looked = 0
    left = [pid]
    try:
        while left:
            at = left.pop()
            status = Path(f"/proc/{at}/status").read_text()
            own += _status_bytes(status, "RssAnon:")
            shared += _status_bytes(status, "RssShmem:")
            tasks = os.listdir(f"/proc/{at}/task")
            looked += len(tasks)
            if looked > PROCESSES_LIMIT:
                return None
            for task in tasks:
                left += map(int, Path(f"/proc/{at}/task/{task}/children").read_text().split())
    except (OSError, ValueError):
        return None
    return own, shared


def _status_bytes(status: str, name: str) -> int:
    """Return a row of /proc/PID/status, there in KiB, in bytes; 0 for a process that has ended."""
    _, _, rest = status.partition(f"\n{name}")
    return 1024 * int(rest.split(maxsplit=1)[0]) if rest else 0


# --- checks of a tenant's messages ----------------------------------------------------------------


class Nonsense(Exception):
    """A resident sent a message that no genuine resident sends."""


def verdict(message: JSON) -> JSON:
    """Return the event for a resident's final message: its type, as `is`, and its fields."""
    if message["is"] == "failed":
        return {"is": messages.Failed, **failed(message)}
    if message["is"] == "stopped":
        return {"is": messages.Stopped}
    return {
        "is": messages.Finished,
        "result": table(message, "result"),
        "passed": passed(message),
        "took_ms": took_ms(message),
        "made_bytes": made_bytes(message),
    }


def whole(body: bytes) -> tuple[JSON, JSON | None]:
    """Parse a message that came in parts; also return its event if it is a final message.  Slow."""
    message = parsed_parts(body)
    return message, verdict(message) if message["is"] in LAST_WORDS else None


LAST_WORDS = ("failed", "finished", "stopped")
HOSTS_LIMIT = 64  # hosts of one gang
METRICS_LIMIT = 2_000  # over all executors of a graph
METRIC_CHARACTERS = 200
POINTS_LIMIT = 32
POINT_VALUES_LIMIT = 1_000  # over all points
COPIES_LIMIT = 100_000  # copies of blocks between executors
_COPY = ("block", "source", "target", "bytes")


def number(message: JSON, name: str) -> int:
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**62:
        raise Nonsense(f"{name} is {value!r}")
    return value


def numbers(message: JSON, name: str) -> list[int]:
    """Return a short list of numbers."""
    value = message.get(name)
    if not isinstance(value, list) or len(value) > HOSTS_LIMIT:
        raise Nonsense(f"{name} is {value!r:.100}")
    return [number({name: each}, name) for each in value]


def text(message: JSON, name: str) -> str:
    value = message.get(name)
    if not isinstance(value, str):
        raise Nonsense(f"{name} is {value!r:.100}")
    return str(clean(value))


def late_input(resident: Resident, message: JSON, name: str) -> str:
    """Return an input name, checked to be one that may come late to this task."""
    port = text(message, name)
    if port not in late(resident.stay.launch.run):
        raise Nonsense(f"it lacks {port!r:.100}")
    return port


def table(message: JSON, name: str) -> JSON:
    value = message.get(name)
    if not isinstance(value, dict) or len(value) > NAMES_LIMIT:
        raise Nonsense(f"{name} is not a small table")
    cleaned: JSON = clean(value)
    return cleaned


def points(message: JSON) -> list[list[Any]]:
    """Return the metrics of some steps before the newest: [step, metrics]."""
    value = message.get("points", [])
    if not isinstance(value, list) or len(value) > POINTS_LIMIT:
        raise Nonsense("points is no short list")
    if any(not isinstance(each, list) or len(each) != 2 for each in value):
        raise Nonsense("a point is not [step, metrics]")
    if sum(len(it) for _, it in value if isinstance(it, dict)) > POINT_VALUES_LIMIT:
        raise Nonsense("points have too many values")
    return [[number({"step": step}, "step"), metrics({"metrics": it})] for step, it in value]


def metrics(message: JSON) -> JSON:
    """Return metrics: numbers and short texts by name."""
    value = message.get("metrics")
    if not isinstance(value, dict) or len(value) > METRICS_LIMIT:
        raise Nonsense("metrics is not a small table")
    if any(isinstance(each, dict | list) for each in value.values()):
        raise Nonsense("a metric is a list or a table")
    short = {
        name[:METRIC_CHARACTERS]: each[:METRIC_CHARACTERS] if isinstance(each, str) else each
        for name, each in value.items()
    }
    cleaned: JSON = clean(short)
    return cleaned


def words(message: JSON, name: str) -> list[str]:
    """Return a few short words; the rest is cut off."""
    value = message.get(name)
    if not isinstance(value, list):
        raise Nonsense(f"{name} is {value!r:.100}")
    return [str(clean(str(word)[:40])) for word in value[:16]]


def clean(value: Any, depth: int = 0) -> Any:
    """Return the value as JSON that Postgres takes: no NUL, lone surrogates or NaN, and of bounded
    size.

    A whole number outside int64 becomes a text: readers in other languages could not hold it.
    """
    if depth > 16:
        raise Nonsense("nested deeper than 16")
    if isinstance(value, str):
        text = value[:TEXT_LIMIT].encode("utf-8", "replace").decode()
        return text.replace("\0", "\ufffd")
    if isinstance(value, dict):
        return {clean(key, depth + 1): clean(part, depth + 1) for key, part in value.items()}
    if isinstance(value, list):
        return [clean(part, depth + 1) for part in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return f"{value:e}" if abs(value) < 10**300 else "more than 1e300"
    if isinstance(value, float) and (value != value or value in (float("inf"), -float("inf"))):
        return str(value)
    return value


def passed(message: JSON) -> list[JSON]:
    """Return the copies between the executors of a graph, as in core.model.messages.Finished."""
    said = message.get("passed", [])
    if not isinstance(said, list) or len(said) > COPIES_LIMIT:
        raise Nonsense("passed is no short list")
    found = []
    for one in said:
        if not isinstance(one, list) or len(one) != len(_COPY):
            raise Nonsense(f"what passed is {one!r:.100}")
        copy = dict(zip(_COPY, one, strict=True))
        numbers = {name: number(copy, name) for name in _COPY[1:]}
        found.append({"block": text(copy, "block")[:200], **numbers})
    return found


def took_ms(message: JSON) -> dict[str, float]:
    """Return the durations of a graph's nodes, as in core.model.messages.Finished."""
    return _measured(message, "took_ms", float, rows=MAX_NODES, most=MAX_EST_MS)


def made_bytes(message: JSON) -> dict[str, int]:
    """Return the sizes of a graph's blocks, as in core.model.messages.Finished."""
    return _measured(message, "made_bytes", int, rows=SIZED_LIMIT, most=MAX_BYTES)


def _measured(message: JSON, what: str, kind: type[int | float], *, rows: int, most: float) -> JSON:
    """Return numbers of one kind by name, checked to lie between 0 and `most`."""
    said = message.get(what, {})
    if not isinstance(said, dict) or len(said) > rows:
        raise Nonsense(f"{what} is no short table")
    for value in said.values():
        if type(value) is not kind or not 0 <= value <= most:
            raise Nonsense(f"{what} of {value!r:.100}")
    return {clean(name[:200]): value for name, value in said.items()}


def failed(message: JSON) -> JSON:
    """Return the fields of core.model.messages.Failed from a resident's final message."""
    cause = text(message, "cause")
    if cause not in messages.CAUSES or cause == "store":  # a resident knows nothing of the store
        raise Nonsense(f"cause is {cause!r}")
    return {
        "cause": cause,
        "message": text(message, "message")[:4000],
        "detail": text(message, "detail"),
    }


# --- the zygote, which forks residents ------------------------------------------------------------

_ROOT = Path(__file__).resolve().parents[2]
_BOOT = (
    "import sys; sys.path.insert(0, {root!r}); from workers.zygote import main; main({fd}, {lock})"
)
_KEPT_VARIABLES = (
    "PATH",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "CUDA_VISIBLE_DEVICES",
    "ATEN_CPU_CAPABILITY",
)


def start_zygote(fd: int, lock_fd: int) -> subprocess.Popen[bytes]:
    """Start a process of `workers.zygote` that serves at `fd` and holds the lock."""
    return subprocess.Popen(
        [sys.executable, "-B", "-c", _BOOT.format(root=str(_ROOT), fd=fd, lock=lock_fd)],
        env=zygote_environment(),
        pass_fds=(fd, lock_fd),
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the supervisor, which drains first
        cwd="/",
    )


class Zygote:
    """The process of `workers.zygote`.  It dies with the thread that starts it."""

    def __init__(self, *, lock_fd: int, probe: Room | None, records: Path) -> None:
        self.wire, theirs = pair()
        self.is_ready = False
        self.process = start_zygote(theirs.fileno(), lock_fd)
        theirs.close()
        tried = None if probe is None else _room(probe)
        self.wire.send({"is": "begin", "probe": tried, "records": str(records)})

    def spawn(self, id: int, room: Room, walls: list[str], fds: list[int], sort: str) -> None:
        """Have the zygote fork a resident; the caller closes its `fds`
        (`wire.FDS_PER_RESIDENT`).
        """
        body = {"is": "spawn", "id": id, "room": _room(room), "walls": walls, "sort": sort}
        self.wire.send(body, fds)

    def end(self) -> None:
        """Kill the zygote, and with it all processes that it forked."""
        self.process.kill()
        self.process.wait()
        self.wire.close()


def _room(room: Room) -> JSON:
    template = "" if room.template is None else str(room.template)
    return {
        "code": str(room.code),
        "scratch": str(room.scratch),
        "uid": room.uid,
        "kind": room.kind,
        "passages": [os.fspath(folder) for folder in room.passages],
        "groups": room.groups,
        "tmp_bytes": room.tmp_bytes,
        "template": template,
    }


def zygote_environment() -> dict[str, str]:
    """Return the zygote's environment: no secrets, only where programs and libraries lie."""
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return {**kept, **ENVIRONMENT, "HOME": "/nonexistent"}
