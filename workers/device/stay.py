"""Keeps one epoch of one task on this device: its events, log lines and slot time.

A paused resident that is launched again begins a new stay in the same process.  The old stay is
kept until the island has acknowledged all its events.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from app.core.device.device_records import StayRecord
from app.core.device.stay_state import StayState
from app.core.model.descriptor import TaskDescriptor
from app.core.model.metric_rows import MESSAGE_BYTES, WHOLE_STEPS, MetricRows
from app.core.model.protocol.messages import Event, Launch, LogLines, ResidentView
from app.core.model.shared_process import shared_process_key
from app.core.placement.partitions import late
from app.core.security.redaction import NO_SECRETS, Redactor
from workers.device.log_buffer import Log
from workers.transfer.peer_auth import Sockets

JSON = dict[str, Any]

THINNED = (
    "… metrics come faster than they are kept, or it made more than"
    f" {WHOLE_STEPS:,} steps: of some neighbouring rows only the lowest, highest and last value of"
    " each metric are kept"
)


class StayProcess(Protocol):
    """Says what a stay reads and calls of its process, which is `processes.resident.Resident`."""

    stay: Stay
    peaks: dict[str, int]
    memory_bytes: int
    staged_us: int
    idle_us: int
    is_gone: bool

    @property
    def id(self) -> int: ...

    @property
    def unstored(self) -> str: ...

    def where(self) -> JSON: ...

    def send(self, word: str, fds: list[int] | None = None, **said: Any) -> None: ...


@dataclass
class Stay:
    """Represents one epoch of one task on this device."""

    launch: Launch
    record: StayRecord  # the facts from which the device's machine decides
    shared_key: str = ""  # of the processes in which it may run after other functions
    metrics: JSON = field(default_factory=dict)
    # rows of metrics that no answer has confirmed
    rows: MetricRows = field(default_factory=MetricRows)
    is_thinning_told: bool = False
    resident: StayProcess | None = None
    resumed: str = "fresh"
    links: Sockets | None = None  # sockets to the other hosts of its gang, for its process
    expects: str = ""  # secret of the hosts that are to connect
    give_up_us: int | None = None  # when the wait for those hosts ends
    event_seq: int = 0
    events: list[Event] = field(default_factory=list)
    log: Log = field(default_factory=Log)
    redactor: Redactor = NO_SECRETS
    unstaged_us: int = 0  # `staged_us` of its process when this stay began
    input_bytes: int = 0  # bytes of all its inputs
    fetched_bytes: int = 0  # bytes of the inputs that came from the store
    ways: JSON = field(default_factory=dict)  # port -> way by which the input came
    lacks: set[str] = field(default_factory=set)  # ports of late inputs that have not arrived
    given: JSON = field(default_factory=dict)  # port -> source of a late input that can be fetched
    coming: set[str] = field(default_factory=set)  # ports of late inputs being fetched
    awaits: str = ""  # port of the input that its process waits for
    network: JSON = field(default_factory=dict)  # use of the network (`ResidentView`)
    waits_for: str = ""  # what it waits for before it starts (`ResidentView`)
    behind: str = ""  # which of its ranks is behind
    # peaks and memory of its function, whose process runs another one now
    peaks: dict[str, int] = field(default_factory=dict)
    memory_bytes: int = 0

    @classmethod
    def of(cls, launch: Launch, record: StayRecord) -> Stay:
        lacks = set(late(launch.spec.run.part)) - launch.inputs.keys()
        return cls(launch=launch, record=record, shared_key=shared_process_key(launch), lacks=lacks)

    @property
    def state(self) -> StayState:
        return self.record.state

    @property
    def step(self) -> int:
        return self.record.step

    @property
    def arrived_us(self) -> int:
        return self.record.arrived_us

    @property
    def spec(self) -> TaskDescriptor:
        return self.launch.spec

    @property
    def key(self) -> tuple[str, int]:
        return self.launch.task, self.launch.epoch

    def keep_out(self, redactor: Redactor) -> None:
        """From now on, replace the values of these secrets in all output of the process."""
        self.redactor = self.log.redactor = redactor

    def leave_process(self) -> None:
        """Let go of its process, which runs another function from now on."""
        assert self.resident is not None
        self.peaks, self.memory_bytes = self.resident.peaks, self.resident.memory_bytes
        self.resident = None

    def is_given(self, port: str, source: JSON) -> None:
        if port in self.lacks:
            self.given.setdefault(port, source)

    def goes_on_from(self, before: Stay) -> None:
        """Take over from the stay `before`, which used the same process.

        Inputs that did not reach the process are still lacking, even if the launch names them.
        """
        self.metrics, self.lacks = before.metrics, {*before.lacks}
        self.rows, self.is_thinning_told = before.rows, before.is_thinning_told
        self.keep_out(before.redactor)
        self.log.goes_on_from(before.log)
        for port, source in self.launch.inputs.items():
            self.is_given(port, source)

    @property
    def is_outpost(self) -> bool:
        """True if the stay has remote ranks; their coordinator host reports for them."""
        return self.record.is_remote

    def hand_over(self) -> list[int]:
        """Hand over the descriptors of its links; the caller closes them."""
        taken, self.links = self.links or [], []
        return [sock.detach() for sock in taken]

    def held_us(self, now_us: int) -> int:
        return self.record.held_us(now_us)

    def staged_us(self, now_us: int) -> int:
        """The time for which its process was stopped to copy state; at most its time in the
        slot.
        """
        told_us = 0 if self.resident is None else self.resident.staged_us - self.unstaged_us
        return max(0, min(told_us, self.held_us(now_us)))

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
    def process(self) -> StayProcess | None:
        """Its process, if it has one now."""
        resident = self.resident
        return resident if resident is not None and resident.stay is self else None

    def add_rows(self, rows: list[list[Any]], *, is_thinned: bool) -> None:
        """Keep rows of metrics until they are delivered."""
        for step, values in rows:
            self.rows.add(step, values)
        if self.step > WHOLE_STEPS:
            self.rows.keep_extremes()
        if (is_thinned or self.rows.thinned) and not self.is_thinning_told:
            self.is_thinning_told = True
            self.log.say(THINNED)

    def heard(self, seq: int, sent_us: int) -> None:
        """Forget what is delivered: events up to `seq`, and what a report of `sent_us` had."""
        self.events = [event for event in self.events if event.seq > seq]
        self.rows.delivered(sent_us)

    def is_over(self) -> bool:
        """True if the stay has ended and has nothing left to report."""
        if self.events:
            return False
        waits = bool(self.log.waiting or self.rows)
        return self.state == "dropped" or (self.state == "ended" and not waits)

    @property
    def stands_still(self) -> bool:
        """True if its process waits for an input."""
        return self.awaits in self.lacks

    def view(self, now_us: int, rows_bytes: int = MESSAGE_BYTES) -> ResidentView:
        """Return what the next report says; it has about `rows_bytes` of rows of metrics."""
        return ResidentView(
            task=self.launch.task,
            epoch=self.launch.epoch,
            state=str(self.state),
            step=self.step,
            held_us=self.held_us(now_us),
            order_seq=self.record.order_seq,
            memory_bytes=self.resident.memory_bytes if self.resident else self.memory_bytes,
            **(self.resident.where() if self.resident and self.resident.stay is self else {}),
            staged_us=self.staged_us(now_us),
            lacks=sorted({self.awaits} & (self.lacks - self.given.keys())),
            metrics=self.metrics,
            points=[[*row] for row in self.rows.part(rows_bytes, now_us)],
            peaks=dict(self.resident.peaks if self.resident else self.peaks),
            network=self.network,
            idle_us=self.process.idle_us if self.process else 0,
            waits_for=self.waits_for,
            unstored=self.process.unstored if self.process else "",
            behind=self.behind if self.state == "running" else "",
        )


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
