"""What the supervisor knows of one job's process, and of each stay of a task on this device.

A `Resident` is a process.  A `Stay` is one epoch of one task here: its events, log lines and seat
time.  A paused resident that is launched again begins a new stay in the same process; the old stay
is kept until all it had to say has been heard.

Nothing that comes from a resident is believed: it is a tenant's process.  Texts are cut and cleaned
before they are passed on, and what makes no sense ends the resident.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

from app.core import messages
from app.core.bucket import Bucket
from app.core.legs import another_follows, late
from app.core.messages import Event, Launch, LogLines, Order, ResidentView, Resize
from app.core.taskgraph import MAX_BYTES, MAX_EST_MS, MAX_NODES, SIZED_LIMIT
from workers import slab
from workers.checkpoint import Known
from workers.links import Sockets
from workers.sandbox import ENVIRONMENT, Room
from workers.wire import Parts, TenantWire, pair, parsed_parts

JSON = dict[str, Any]

LINE_LIMIT_BYTES = 8 * 1024
LOG_LIMIT_BYTES = 1 * 2**20  # kept per stay until acknowledged; more is dropped, and said so
LAST_LINES = 20  # of stderr, told as the detail of a command that failed
TEXT_LIMIT = 64 * 1024
NAMES_LIMIT = 20_000
FRAMES_BURST, FRAMES_PER_S = 2_000, 500.0  # of one process; what exceeds it waits
BYTES_BURST, BYTES_PER_S = 4 * 2**20, float(2**20)
MUTED_BURST_S, MUTED_PER_S = 20.0, 0.2  # so long it may be made to wait, then it is ended
OWED_US = 30_000_000  # so long a paused process may owe its image while others lack room
UNREAD_US = 10_000_000  # so long a process may not read what it is sent, then it is ended
KERNEL_US = 100_000  # so often the kernel is asked for a process's memory, if that says more
PROCESSES_LIMIT = 256  # processes and threads that are looked at for that
LINGER_US = 10_000_000  # so long who has run a leg waits for the next one
TOLD_US = 100_000  # so soon it is usually told what came straight, and asks if it was not
UNSURE_US = 15_000_000  # so long nothing counts that it makes of what came straight, then never


# --- one epoch of one task ------------------------------------------------------------------------


#: Events that rest on no input: they are true whatever came straight.
_TRUE_ANYWAY = (messages.Started, messages.Came, messages.Stopped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Straight:
    """An input that came straight: what it seems to be, and since when it is here."""

    sha256: str
    since_us: int


@dataclass
class Stay:
    """`state` is one of core.messages.ResidentView, or "vanished": gone without a word; or, of a
    process that has no task now, "lingering".

    It `is_confirmed` once the island, told that it is here, said "keep", or if its order was so
    fresh that it could only say so: only then may it take the seat, so that an order that comes too
    late runs nothing.

    It is `unsure` of inputs that came straight from who made them, until its island says what they
    are.  What it has to tell meanwhile rests on them, and is `held` back: were it not what was
    written down, nothing that was made of it may count.
    """

    launch: Launch
    arrived_us: int
    state: str = "seating"
    is_confirmed: bool = False
    step: int = 0
    metrics: JSON = field(default_factory=dict)
    points: list[list[Any]] = field(default_factory=list)
    order_seq: int = 1
    early: dict[int, Order] = field(default_factory=dict)  # orders that overtook another
    resident: Resident | None = None
    resumed: str = "fresh"
    successor: str = ""  # the task that it gives way to, which may get ready first,
    yield_by_us: int | None = None  # until then
    moves: bool = False  # its image is waited for on another device
    seats: list[int] = field(default_factory=lambda: [1])  # that its ranks sit on, by host,
    wanted: Resize | None = None  # and are to sit on
    links: Sockets | None = None  # to the other hosts of its gang, for its process
    expects: str = ""  # the secret of those hosts that are waited for,
    give_up_us: int | None = None  # until then
    event_seq: int = 0
    events: list[Event] = field(default_factory=list)
    log: Log = field(default_factory=lambda: Log())
    seated_us: int | None = None
    before_us: int = 0
    unstaged_us: int = 0  # what its process had stood still before this stay
    input_bytes: int = 0  # that were brought here for it,
    fetched_bytes: int = 0  # of which so many from the store
    ways: JSON = field(default_factory=dict)  # by which each of them came, by port
    lacks: set[str] = field(default_factory=set)  # inputs that come late,
    given: JSON = field(default_factory=dict)  # of which it was told where these lie,
    coming: set[str] = field(default_factory=set)  # and these are on their way;
    awaits: str = ""  # its process stands still for this one
    unsure: dict[str, Straight] = field(default_factory=dict)  # by port
    held: list[tuple[Event, AbstractSet[str]]] = field(default_factory=list)  # on what each rests
    is_void: bool = False  # it was something else: nothing of it is told any more
    takers: dict[tuple[str, str], JSON] = field(default_factory=dict)  # to whom it gives straight

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
        """In the same process: what did not come there is lacking still, whatever it was told."""
        self.step, self.metrics, self.lacks = before.step, before.metrics, {*before.lacks}
        for port, source in self.launch.inputs.items():
            self.is_given(port, source)

    @property
    def is_started(self) -> bool:
        """It has been told that it has the seat."""
        return self.seated_us is not None or self.before_us > 0

    @property
    def is_outpost(self) -> bool:
        """Its home speaks for it."""
        return self.launch.host > 0

    @property
    def is_linked(self) -> bool:
        """All other hosts of its gang are connected, or there are none."""
        return len(self.launch.seats) == 1 or self.is_outpost or self.links is not None

    def hand_over(self) -> list[int]:
        """The descriptors of its links, for whoever sends them to its process and closes them."""
        taken, self.links = self.links or [], []
        return [sock.detach() for sock in taken]

    def held_us(self, now_us: int) -> int:
        on_it_us = 0 if self.seated_us is None else now_us - self.seated_us
        return self.before_us + on_it_us

    def staged_us(self, now_us: int) -> int:
        """As its process says, who may lie; but not for longer than it held the seat."""
        told_us = 0 if self.resident is None else self.resident.staged_us - self.unstaged_us
        return max(0, min(told_us, self.held_us(now_us)))

    @property
    def is_off_the_seat(self) -> bool:
        """Another one's turn lasts, on a device that they share."""
        return self.state == "running" and self.seated_us is None

    def take_seat(self, now_us: int) -> None:
        self.seated_us = now_us

    def leave_seat(self, now_us: int) -> None:
        self.before_us, self.seated_us = self.held_us(now_us), None

    def tell(
        self,
        kind: type[Event],
        now_us: int,
        *,
        step: int | None = None,
        rests_on: AbstractSet[str] | None = None,
        **said: Any,
    ) -> None:
        """An event, which rests on these inputs: if nothing is said, on all that came straight."""
        if self.is_outpost or self.is_void:
            return
        event = kind(
            task=self.launch.task,
            epoch=self.launch.epoch,
            seq=0,
            step=self.step if step is None else step,
            held_us=self.held_us(now_us),
            staged_us=self.staged_us(now_us),
            **said,
        )
        if rests_on is None:
            rests_on = frozenset[str]() if kind in _TRUE_ANYWAY else frozenset(self.unsure)
        self._tell(event, rests_on)

    def _tell(self, event: Event, rests_on: AbstractSet[str]) -> None:
        if rests_on & self.unsure.keys():
            self.held.append((event, rests_on))
            return
        self.event_seq += 1
        self.events.append(replace(event, seq=self.event_seq))

    @property
    def process(self) -> Resident | None:
        """Its own, if it has one now."""
        resident = self.resident
        return resident if resident is not None and resident.stay is self else None

    @property
    def unsure_us(self) -> float:
        """Since when."""
        return min((one.since_us for one in self.unsure.values()), default=inf)

    def is_wanted(self, takers: list[JSON]) -> None:
        """Of each launch of a taker it is told where that is; the newest counts."""
        for taker in takers:
            place = taker["task"], taker["port"]
            if taker["epoch"] >= self.takers.get(place, taker)["epoch"]:
                self.takers[place] = taker

    def takers_of(self, output: str) -> list[JSON]:
        return [taker for taker in self.takers.values() if taker["output"] == output]

    def keeps_to_itself(self, output: str) -> None:
        """It does not go straight any more."""
        self.takers = {at: one for at, one in self.takers.items() if one["output"] != output}

    def is_sure(self, port: str) -> None:
        """It was what was written down.  Who rests on less overtakes no one who rests on more."""
        del self.unsure[port]
        held, self.held = self.held, []
        for event, rests_on in held:
            self._tell(event, rests_on)

    def void(self) -> None:
        """It was not, or nobody knows: what was made of it is not told."""
        self.is_void, self.unsure, self.held = True, {}, []

    def heard(self, seq: int) -> None:
        self.events = [event for event in self.events if event.seq > seq]

    def is_over(self) -> bool:
        """Nothing of it is left to hold or to say."""
        if self.events or self.held:
            return False
        return self.state == "vanished" or (self.state == "ended" and not self.log.waiting)

    @property
    def stands_still(self) -> bool:
        """Its process waits for an input."""
        return self.awaits in self.lacks

    def _lacks(self, now_us: int) -> list[str]:
        """For what it asks."""
        awaited = {self.awaits} & (self.lacks - self.given.keys())
        untold = (p for p, one in self.unsure.items() if now_us >= one.since_us + TOLD_US)
        return sorted({*awaited, *untold})

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
            lacks=self._lacks(now_us),
            metrics=self.metrics,
            points=self.points,
        )


class Log:
    """The lines of one stay that have not been acknowledged, numbered from 0."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[str, str]] = deque()
        self.first = 0  # the number of the first line in `waiting`
        self.held_bytes = 0
        self.dropped = 0
        self.last = deque[str](maxlen=LAST_LINES)  # of stderr, whether acknowledged or not
        self._open = {"stdout": b"", "stderr": b""}  # lines without an end, as yet

    @property
    def is_full(self) -> bool:
        return self.held_bytes >= LOG_LIMIT_BYTES

    def write(self, stream: str, data: bytes) -> None:
        if self.is_full:  # a flood costs no more than to count its lines
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
        """Whatever was printed last without a line's end is a line too."""
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
        """The next lines that fit, and how many bytes they take."""
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
    """What a terminal would show of a line that returns to its start, as progress bars do.

    A carriage return at the end stays until the line goes on: what follows it replaces the line.
    """
    start = line.rfind(b"\r", 0, len(line.rstrip(b"\r"))) + 1
    return line[start:]


def _line_bytes(stream: str, text: str) -> int:
    return len(stream) + len(text.encode()) + 16  # as JSON, about


def log_lines(stays: list[Stay], limit_bytes: int) -> list[LogLines]:
    """The next lines of all stays, together about `limit_bytes`; the rest is for the next time."""
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
    """An output that a process has announced; `early` if others are to begin with it.

    It `rests_on` those inputs that came straight, and of which the stay was unsure at that time.
    """

    name: str
    size_bytes: int
    head_bytes: int
    early: bool
    rests_on: AbstractSet[str]


@dataclass
class Resident:
    """`doom` is why the supervisor ends it; `verdict` is the last word that it said itself."""

    id: int
    task: str
    wire: TenantWire
    bulk: socket.socket
    slab: int  # the descriptor of `workers.slab`
    pipes: dict[int, str]  # descriptor -> "stdout" or "stderr"
    room: Room
    stay: Stay
    deadline_us: int  # by when it must be prepared
    pidfd: int | None = None
    pid: int = 0
    is_prepared: bool = False
    yields: bool = False  # it was told that its turn is over
    is_still: bool = False  # it stands still because the device's trust has ended
    preset: JSON = field(default_factory=dict)
    capabilities: list[str] = field(default_factory=list)
    saved: Saving | None = None  # the newest image of it that is durable
    has_state: bool = False  # it has been on the seat, so there is something to lose
    memory_bytes: int = 0
    staged_us: int = 0  # how long it has stood still, on its seat, while its state was copied
    slab_bytes: int = 0  # as the kernel says
    spilled_bytes: int = 0  # of a graph's blocks, in host memory
    known: Known = field(default_factory=Known)
    level: str = "device"  # where its state lies, as `workers.residency` says
    may_leave: bool = True  # it lets go of the device's memory when it is told to
    leave_by_us: int = 0
    turn: int = 0  # how often it was told where its memory shall be
    away_bytes: int = 0  # of its memory that is not on the device
    granted_bytes: int = 0  # that it may take there for what is away
    paused_us: int = 0
    absent_us: int = 0  # how long it usually is between a pause and its next turn; 0: not known
    saves: int = 0  # images and outputs that are being stored,
    is_read: bool = False  # one of them still from `bulk`
    leaving: deque[Leaving] = field(default_factory=deque)  # outputs behind that, on their way
    save_again_us: int | None = None  # the last attempt to store its image failed
    is_gone: bool = False
    outputs: JSON = field(default_factory=dict)
    verdict: JSON | None = None
    parts: Parts = field(default_factory=Parts)  # of a long message, as far as they have come
    is_parsed: bool = False  # such a message is, by another thread; what is behind it waits
    is_muted: bool = False  # it said so much that it is not read from for a while
    said: deque[JSON] = field(default_factory=deque)  # messages that were read and not taken yet
    checked: JSON | None = None  # the verdict of a long last word
    exit_status: int | None = None  # it ended meanwhile
    frames: Bucket = field(default_factory=lambda: Bucket(FRAMES_BURST, FRAMES_PER_S))
    said_bytes: Bucket = field(default_factory=lambda: Bucket(BYTES_BURST, BYTES_PER_S))
    calm: Bucket = field(default_factory=lambda: Bucket(MUTED_BURST_S, MUTED_PER_S))
    kernel: tuple[int, int] | None = None  # what its processes hold, as the kernel said last,
    kernel_us: int = 0  # at this time
    doom: str = ""
    refused: str = ""  # what the kernel refused it at its limits, in a sentence
    kill_us: int | None = None  # when its grace ends

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
        """Others are to begin with it while this one runs on."""
        return output in self.stay.launch.run.get("part", {}).get("after_ms", ())

    @property
    def lingers(self) -> bool:
        """Its leg has ended, and it stays a while for the next one."""
        return self.stay.state == "lingering"

    @property
    def may_linger(self) -> bool:
        follows = another_follows(self.stay.launch.run)
        return follows and self.saved is None and not self.is_saving

    def linger(self, now_us: int) -> None:
        """Of nobody, until a launch takes it."""
        launch, self.task, self.verdict = self.stay.launch, "", None
        self.stay = Stay(launch=launch, arrived_us=now_us, state="lingering", resident=self)
        self.is_prepared, self.has_state, self.deadline_us = False, False, now_us + LINGER_US

    def made_of(self, launch: Launch) -> dict[str, str]:
        """Of the inputs of a launch that it may go on with, those that lie in its memory: port ->
        the output that it gave them as.
        """
        if not self.lingers or launch.images or _setting(launch) != _setting(self.stay.launch):
            return {}
        made = {self.outputs[name]["sha256"]: name for name in self.outputs}
        inputs = launch.inputs.items()
        return {
            port: made[one["sha256"]]
            for port, one in inputs
            if one["sha256"] in made and not one.get("format")
        }

    def go_on(self, stay: Stay, deadline_us: int) -> None:
        """With another leg, as if it were newly born."""
        self.task, self.stay, stay.resident = stay.launch.task, stay, self
        self.deadline_us, self.outputs = deadline_us, {}
        self.yields, self.save_again_us = False, None
        self.staged_us = self.spilled_bytes = 0

    @property
    def artifacts(self) -> JSON:
        return {name: kept for name, kept in self.outputs.items() if name == messages.ARTIFACTS}

    @property
    def is_kept(self) -> bool:
        """Of its state, all that can be kept is durable: of a command, its working folder."""
        return not self.has_state or (self.saved is not None and self.saved.step == self.step)

    @property
    def is_durable(self) -> bool:
        """Nothing is lost if it is ended now; the processes of a command are never durable."""
        return self.is_kept and not (self.is_command and self.has_state)

    @property
    def on_device_bytes(self) -> int:
        """What it has there, or may take without asking: it may grow to what its launch said."""
        if self.level == "host":
            return self.memory_bytes
        if self.level == "coming":
            return self.memory_bytes + self.granted_bytes
        reserved = max(self.memory_bytes, self.stay.launch.memory_bytes)
        return max(0, reserved - self.away_bytes) if self.level == "leaving" else reserved

    @property
    def lacking_bytes(self) -> int:
        """What it must be granted before it is back on the device."""
        asked = self.stay.launch.memory_bytes - self.memory_bytes
        return max(0, max(self.away_bytes, asked) - self.granted_bytes)

    @property
    def host_bytes(self) -> int:
        return self.slab_bytes + self.spilled_bytes

    def where(self) -> JSON:
        held = {"on_device_bytes": self.on_device_bytes, "host_bytes": self.host_bytes}
        return {"level": self.level, **held}

    def was_absent(self, now_us: int) -> None:
        """It is back on the seat: how long it took, and before."""
        if self.paused_us:
            took_us = max(1, now_us - self.paused_us)
            self.absent_us = (self.absent_us + took_us) // 2 if self.absent_us else took_us

    def measure(self) -> None:
        if self.slab >= 0:
            self.slab_bytes = slab.held_bytes(self.slab)

    def bounded_memory(self, told: int, house_bytes: int, kind: str, now_us: int) -> int:
        """Bound the memory that a job tells by its device and by the kernel's count."""
        return self._bounded(min(told, house_bytes), 0, kind, now_us)

    def bounded_spill(self, told: int, house_bytes: int, kind: str, now_us: int) -> int:
        """The same of what it holds for its graph in host memory, in shared mappings."""
        return self._bounded(min(told, house_bytes), 1, kind, now_us)

    def _bounded(self, told: int, which: int, kind: str, now_us: int) -> int:
        if kind != "cpu":
            return told
        is_known = self.kernel is not None and told <= self.kernel[which]
        if not is_known and now_us >= self.kernel_us + KERNEL_US:
            self.kernel, self.kernel_us = kernel_memory(self.pid), now_us
        return told if self.kernel is None else min(told, self.kernel[which])

    def heard(self, frames: int, read_bytes: int, now_us: int) -> int:
        """So much was read from it; for how long it is not read from now, in microseconds."""
        self.frames.take(frames, now_us)
        self.said_bytes.take(read_bytes, now_us)
        muted_us = max(self.frames.debt_us(now_us), self.said_bytes.debt_us(now_us))
        self.calm.take(muted_us / 1e6, now_us)
        return muted_us

    def owes_image(self, now_us: int) -> bool:
        """Return whether a long-paused job has no image, and none on its way."""
        if self.stay.state != "paused" or self.is_durable or self.is_command:
            return False
        on_its_way = self.is_saving or self.save_again_us is not None
        return not on_its_way and now_us - self.paused_us >= OWED_US

    def is_deaf(self, now_us: int) -> bool:
        """It has not read for long what it was sent, or very much waits for it."""
        since_us = self.wire.unread_since_us
        long = since_us is not None and now_us - since_us >= UNREAD_US
        return long or self.wire.is_overfull

    def send(self, word: str, fds: list[int] | None = None, **said: Any) -> None:
        if self.doom:
            return
        try:
            self.wire.send({"is": word, **said}, fds)
        except OSError:
            return  # it is dying: its exit will be reported

    def kill(self) -> None:
        """End the process and all that it started, at once."""
        if self.pidfd is None:
            return  # it is killed when its process is known
        try:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        except ProcessLookupError:
            return
        try:
            os.killpg(self.pid, signal.SIGKILL)  # without walls, its children are in its group
        except (ProcessLookupError, PermissionError):
            return

    def close_stores(self) -> None:
        """What a thread may be reading from, when none does any more."""
        self.bulk.close()
        if self.slab >= 0:
            os.close(self.slab)
            self.slab = -1

    def close(self) -> None:
        """All but the wire, `bulk` and `slab`: to close those may take long."""
        for fd in self.pipes:
            os.close(fd)
        self.pipes = {}
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


def kernel_memory(pid: int) -> tuple[int, int] | None:
    """What a process and all below it hold, as the kernel says: bytes of their own, and bytes of
    shared memory.  None if that cannot be said, or there are too many processes to look at.
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
    """A row of /proc/PID/status, which is in KiB; a process that has ended has none."""
    _, _, rest = status.partition(f"\n{name}")
    return 1024 * int(rest.split(maxsplit=1)[0]) if rest else 0


def _setting(launch: Launch) -> JSON:
    """What legs have in common that one process may run, one after the other."""
    names = ("tenant", "bundle", "params", "preset", "memory_bytes", "seats", "host", "world_size")
    return {**{name: getattr(launch, name) for name in names}, "graph": launch.run.get("graph")}


# --- what a tenant's process says -----------------------------------------------------------------


class Nonsense(Exception):
    """A resident said what no resident of ours says."""


def verdict(message: JSON) -> JSON:
    """The event that a resident's last word becomes: its type, as `is`, and its fields."""
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
    """A message that came in parts, and, if it is a last word, its verdict; takes a while."""
    message = parsed_parts(body)
    return message, verdict(message) if message["is"] in LAST_WORDS else None


LAST_WORDS = ("failed", "finished", "stopped")
HOSTS_LIMIT = 64  # of one gang
METRICS_LIMIT = 2_000  # of all executors of a graph together
METRIC_CHARACTERS = 200
POINTS_LIMIT = 32
POINT_VALUES_LIMIT = 1_000  # of all points together
COPIES_LIMIT = 100_000  # of blocks, between executors
_COPY = ("block", "source", "target", "bytes")


def number(message: JSON, name: str) -> int:
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**62:
        raise Nonsense(f"{name} is {value!r}")
    return value


def numbers(message: JSON, name: str) -> list[int]:
    """A few."""
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
    """One that may come late to what it runs."""
    port = text(message, name)
    if port not in late(resident.stay.launch.run):
        raise Nonsense(f"it lacks {port!r:.100}")
    return port


def ports(message: JSON, name: str) -> set[str]:
    """Some inputs, or none."""
    value = message.get(name, [])
    if not isinstance(value, list) or len(value) > NAMES_LIMIT:
        raise Nonsense(f"{name} is no short list")
    return {text({name: each}, name) for each in value}


def table(message: JSON, name: str) -> JSON:
    value = message.get(name)
    if not isinstance(value, dict) or len(value) > NAMES_LIMIT:
        raise Nonsense(f"{name} is not a small table")
    cleaned: JSON = clean(value)
    return cleaned


def points(message: JSON) -> list[list[Any]]:
    """The metrics of some steps besides the newest: [step, metrics]."""
    value = message.get("points", [])
    if not isinstance(value, list) or len(value) > POINTS_LIMIT:
        raise Nonsense("points is no short list")
    if any(not isinstance(each, list) or len(each) != 2 for each in value):
        raise Nonsense("a point is not [step, metrics]")
    if sum(len(it) for _, it in value if isinstance(it, dict)) > POINT_VALUES_LIMIT:
        raise Nonsense("points have too many values")
    return [[number({"step": step}, "step"), metrics({"metrics": it})] for step, it in value]


def metrics(message: JSON) -> JSON:
    """Numbers and short texts by name."""
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
    """A few short ones; the rest is cut off."""
    value = message.get(name)
    if not isinstance(value, list):
        raise Nonsense(f"{name} is {value!r:.100}")
    return [str(clean(str(word)[:40])) for word in value[:16]]


def clean(value: Any, depth: int = 0) -> Any:
    """As Postgres takes it as JSON: no NUL, no lone surrogates, no NaN, and of bounded size.

    A whole number that is no int64 becomes a text: a reader in another language could not hold it.
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
    """What passed between the executors of a graph, as in core.messages.Finished."""
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
    """How long the nodes of a graph took, as in core.messages.Finished."""
    return _measured(message, "took_ms", float, rows=MAX_NODES, most=MAX_EST_MS)


def made_bytes(message: JSON) -> dict[str, int]:
    """How large blocks of a graph were, as in core.messages.Finished."""
    return _measured(message, "made_bytes", int, rows=SIZED_LIMIT, most=MAX_BYTES)


def _measured(message: JSON, what: str, kind: type, *, rows: int, most: float) -> JSON:
    """Numbers of one kind by name, from 0 to `most`."""
    said = message.get(what, {})
    if not isinstance(said, dict) or len(said) > rows:
        raise Nonsense(f"{what} is no short table")
    for value in said.values():
        if type(value) is not kind or not 0 <= value <= most:
            raise Nonsense(f"{what} of {value!r:.100}")
    return {clean(name[:200]): value for name, value in said.items()}


def failed(message: JSON) -> JSON:
    """The fields of core.messages.Failed out of a resident's last word."""
    cause = text(message, "cause")
    if cause not in messages.CAUSES or cause == "store":  # of that it knows nothing
        raise Nonsense(f"cause is {cause!r}")
    return {
        "cause": cause,
        "message": text(message, "message")[:4000],
        "detail": text(message, "detail"),
    }


# --- the process that forks them ------------------------------------------------------------------

_ROOT = Path(__file__).resolve().parent.parent
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


class Zygote:
    """`workers.zygote`, started by the thread whose end shall be its end too."""

    def __init__(self, *, lock_fd: int, probe: Room | None, records: Path) -> None:
        self.wire, theirs = pair()
        self.is_ready = False
        boot = _BOOT.format(root=str(_ROOT), fd=theirs.fileno(), lock=lock_fd)
        self.process = subprocess.Popen(
            [sys.executable, "-B", "-c", boot],
            env=_environment(),
            pass_fds=(theirs.fileno(), lock_fd),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is for the supervisor, who drains first
            cwd="/",
        )
        theirs.close()
        tried = None if probe is None else _room(probe)
        self.wire.send({"is": "begin", "probe": tried, "records": str(records)})

    def spawn(self, id: int, room: Room, walls: list[str], fds: list[int], sort: str) -> None:
        """`fds`: see `wire.FDS_PER_RESIDENT`.  The caller closes its copies."""
        body = {"is": "spawn", "id": id, "room": _room(room), "walls": walls, "sort": sort}
        self.wire.send(body, fds)

    def end(self) -> None:
        """Kill it, and with it everything that it forked."""
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


def _environment() -> dict[str, str]:
    """No secrets: nothing of ours but what says where programs and libraries are."""
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return {**kept, **ENVIRONMENT, "HOME": "/nonexistent"}
