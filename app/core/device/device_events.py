"""Defines the events that a device's state machine takes, and the instructions that it gives.

An event says what happened: an order, an answer or a message of a resident arrived, a process
ended, time passed. An instruction says what to do: send a message, kill a process, tell the island.
Both are values; `core.device.device_machine` turns events into instructions, and the supervisor of
a device (`workers.device.supervisor`) carries them out.

A stay is named by its task and epoch, a process by a number that is never used again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from app.core.model.protocol.messages import Answer, Event, Launch, Order, Resize

JSON = dict[str, Any]
StayKey = tuple[str, int]  # task, epoch


class DeviceEvent:
    """Reports something that happened on the device and may change the state of its stays."""


class ProcessEvent(DeviceEvent):
    """Reports something about one process. Once the process has exited, such an event changes
    nothing.
    """

    process: int


# --- from the island ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderCame(DeviceEvent):
    """An order arrived, perhaps again, late, or before an earlier order."""

    order: Order


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCame(DeviceEvent):
    answer: Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class StayForgotten(DeviceEvent):
    """The island has heard all of an ended stay."""

    stay: StayKey


# --- from the supervisor --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsJoined(DeviceEvent):
    """All hosts of the task's gang are connected."""

    stay: StayKey


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsMissed(DeviceEvent):
    """A host of the task's gang did not connect in time; `told` is the message for the task's
    owner.
    """

    stay: StayKey
    told: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskUnable(DeviceEvent):
    """The task cannot get something that it needs: its code, an image or an input.

    `reason` is the kill reason of its process, if it has one.
    """

    stay: StayKey
    cause: str
    told: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DropAsked(DeviceEvent):
    """The supervisor gives up a stay without an event, to make room."""

    stay: StayKey
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseAsked(DeviceEvent):
    """The supervisor lets a task leave its slot, without an order, to make room for another one."""

    stay: StayKey


@dataclass(frozen=True, slots=True, kw_only=True)
class KillAsked(ProcessEvent):
    process: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveAsked(DeviceEvent):
    """The device worker stops: every task is paused, and no further task is taken.

    A task with a notice gets only the part of its notice that ends before `pause_by_us`.
    """

    pause_by_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinesDue(DeviceEvent):
    """Time has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportDue(DeviceEvent):
    """A report is about to be made; it will ask for the grace that the machine wants at this
    moment.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotDue(DeviceEvent):
    """A round ends: the slot changes hands if that is due.

    `is_short` is True if a task waits for memory or for room for its process. `waiting` are the
    tasks without a process that wait for the slot, `away` the processes with memory off the device.
    """

    is_short: bool = False
    waiting: frozenset[str] = frozenset()
    away: frozenset[int] = frozenset()


# --- from a resident process ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessBegan(DeviceEvent):
    """A new process begins a stay.

    `saved_step` is the step of the durable image that it restores.
    """

    process: int
    stay: StayKey
    is_command: bool = False
    saved_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRenewed(DeviceEvent):
    """A resting process begins the stay of its next function."""

    process: int
    stay: StayKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPrepared(ProcessEvent):
    process: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPaused(ProcessEvent):
    """The process left the slot at a safe point.

    `lacks` is the late input for which it waited in the slot without success, or ""; `is_lacking`
    tells whether that input is still missing. `unstored` is why the store refused an output of the
    ended task, or "": it is to be launched again after `wait_us`.
    """

    process: int
    step: int
    has_state: bool = True
    lacks: str = ""
    is_lacking: bool = False
    unstored: str = ""
    wait_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessProgressed(ProcessEvent):
    process: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStood(ProcessEvent):
    """The process stopped because its time to step is over, or continues after that
    (`is_still`).
    """

    process: int
    is_still: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessResized(ProcessEvent):
    process: int
    step: int
    slots: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConcluded(ProcessEvent):
    """The process sent its final message: "finished", "failed" or "stopped".

    A process that `rests` does not exit: it can run another function
    (`core.model.shared_process`).
    """

    process: int
    step: int
    word: str
    rests: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnding(ProcessEvent):
    """The command of the process has ended: its folder or its results are being stored."""

    process: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageKept(ProcessEvent):
    """An image of the process became durable."""

    process: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExited(ProcessEvent):
    process: int


# --- instructions ---------------------------------------------------------------------------------


class Instruction:
    """Something that the supervisor carries out without deciding anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStay(Instruction):
    """Keep a new stay of a launched task."""

    launch: Launch


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchInputs(Instruction):
    """Fetch the task's code, inputs and image; then start a process."""

    stay: StayKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinueProcess(Instruction):
    """Let the task's paused process go on as the new stay."""

    process: int
    stay: StayKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendTrust(Instruction):
    """Let the processes step until this time. They read it in shared memory."""

    until_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendWord(Instruction):
    """Send a message to a process: pause, save, cancel, yield, look or end."""

    process: int
    word: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveNotice(Instruction):
    """Tell the command of a process why (`NoticeReason`) and when it will be stopped."""

    process: int
    why: str
    until_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveSlot(Instruction):
    """Give the slot to a process.

    `is_first`: for the first time in its stay. It could have begun `waited_us` ago.
    """

    process: int
    is_first: bool
    waited_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KillProcess(Instruction):
    """Kill a process; `why` goes to the log."""

    process: int
    reason: str
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TellIsland(Instruction):
    """Report an event of a stay.  With `is_end`, the stay has ended."""

    stay: StayKey
    kind: type[Event]
    details: Mapping[str, Any] = field(default_factory=dict)
    is_end: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TellSaved(Instruction):
    """Report the newest durable image of a process as that of its stay."""

    process: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TellVerdict(Instruction):
    """Report how the stay of a process ended: by its final message, or by the way the process
    died.
    """

    process: int
    was_stopping: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DropStay(Instruction):
    """Release what the stay holds, without a report: the island notices that the stay is gone."""

    stay: StayKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetStay(Instruction):
    """Forget the stay, and even its events."""

    stay: StayKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectHosts(Instruction):
    """Wait for the other hosts of the task's gang, at its launch or for a resize."""

    stay: StayKey
    slots: list[int]
    how: JSON
    resize: Resize | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetHosts(Instruction):
    stay: StayKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSoon(Instruction):
    """Send a report: at once if something happened, otherwise together with the next chatter."""

    is_urgent: bool
