"""Represents a resident: one process of a tenant, and what the supervisor knows of it.

Nothing that a resident sends is trusted: see `workers.process.untrusted`.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.core.device.device_records import ProcessRecord
from app.core.device.token_bucket import TokenBucket
from app.core.model.checkpoints.manifest import Manifest
from app.core.model.device_choice import WHOLE_MILLI
from app.core.model.device_fraction import cap_bytes
from app.core.model.protocol import messages
from app.core.model.protocol.messages import CheckpointRef
from workers.device.processes.job_shells import JobShells
from workers.device.processes.process_ends import ProcessEnds, RepeatedOrder, close_all
from workers.device.stay import Stay
from workers.process import slab
from workers.process.isolation.sandbox import Room
from workers.process.wire import Parts, TenantWire
from workers.transfer.checkpoint import HeldChunks, Known
from workers.transfer.installs.environments import HeldEnvironment

JSON = dict[str, Any]

FRAMES_BURST, FRAMES_PER_S = 2_000, 500.0  # per process; excess messages wait
BYTES_BURST, BYTES_PER_S = 4 * 2**20, float(2**20)
# in seconds: how long a process may be muted, at once and per second; above this it is ended
MUTED_BURST_S, MUTED_PER_S = 20.0, 0.2
# in microseconds: how long a paused process may lack an image while other tasks lack memory
OWED_US = 30_000_000
# in microseconds: how long a process may leave its messages unread; then it is ended
UNREAD_US = 10_000_000
KERNEL_US = 100_000  # least interval between two reads of a process's memory from the kernel
PROCESSES_LIMIT = 256  # most processes and threads read for one such count
ALL_PROCESSES = 2048  # more than a resident can have (`sandbox.Room.processes`, control groups)
STORED_LIMIT = 16 * 1024  # most processes and threads of a command that are stored or restored


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Describes a durable image."""

    step: int
    sha256: str
    key: str  # public key of the host that wrote it
    size_bytes: int
    took_us: int = 0
    new_bytes: int = 0
    has_processes: bool = False  # True if the image has the processes of its command
    bound_because: str = ""  # why the image has no processes, although they were asked for
    printed: tuple[int, ...] = ()  # epoch and number of log lines when the processes were dumped
    ranked: JSON = field(default_factory=dict)  # as in `Saved`

    @property
    def ref(self) -> CheckpointRef:
        return CheckpointRef(sha256=self.sha256, step=self.step, key=self.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """Describes an output that a process has announced.

    `early` is True if other tasks may begin with it before this one ends.
    """

    name: str
    size_bytes: int
    head_bytes: int
    early: bool


@dataclass
class Adoption:
    """Holds the processes of a command's image, and our ends of the pipes to which they write.

    `held` are chunks of the image that were fetched ahead.
    """

    manifest: Manifest
    pipes: dict[str, int]
    held: HeldChunks = field(default_factory=dict, repr=False)

    def close(self) -> None:
        for fd in self.pipes.values():
            os.close(fd)
        self.pipes = {}


@dataclass
class Resident:
    """Represents one resident process.

    `verdict` is its own final message.
    """

    record: ProcessRecord  # what the device's machine decides from
    wire: TenantWire
    bulk: socket.socket
    slab: int  # file descriptor of its `workers.process.slab`
    pipes: dict[int, str]  # descriptor -> "stdout" or "stderr"
    room: Room
    stay: Stay
    # locks of the folders that it sees (`workers.transfer.folder_cache`)
    folders: list[int] = field(default_factory=list)
    pidfd: int | None = None
    pid: int = 0
    preset: JSON = field(default_factory=dict)
    # the part of its preset that the driver has taken
    device_preset: JSON = field(default_factory=dict)
    capabilities: list[str] = field(default_factory=list)
    saved: Saving | None = None  # its newest durable image
    # Step of the newest durable image that has the processes of a command.
    processes_step: int | None = None
    bound_because: str = ""  # why the processes of its command cannot go to another device
    # epoch and number of its log lines when its processes were dumped last
    printed: tuple[int, ...] = ()
    adoption: Adoption | None = None  # the processes of a command wait to be restored below it
    dump_damaged: bool = False  # a dump has damaged the processes of its command, now or before
    memory_bytes: int = 0
    # memory on the device by the driver's count; None: not counted yet
    measured_bytes: int | None = None
    idle_us: int = 0  # how long the processes of a session have computed nothing
    staged_us: int = 0  # time for which the process stopped in the slot to copy its state
    slab_bytes: int = 0  # memory of the slab as counted by the kernel
    spilled_bytes: int = 0  # blocks of a graph in host memory
    known: Known = field(default_factory=Known)
    level: str = "device"  # place of its state, see `workers.device.memory_tiers`
    may_leave: bool = True  # True if the process frees device memory when told to
    leave_by_us: int = 0
    turn: int = 0  # number of orders about the place of its memory
    away_bytes: int = 0  # bytes of its memory that are off the device
    granted_bytes: int = 0  # device memory granted for its return
    absent_us: int = 0  # usual time between a pause and its next slice; 0: unknown
    saves: int = 0  # number of images and outputs being stored
    is_read: bool = False  # an output is being read from `bulk`
    leaving: deque[Leaving] = field(default_factory=deque)  # announced outputs that wait to be read
    save_again_us: int | None = None  # when to retry a failed image
    # image or output -> why the store refused it the last time
    refusals: dict[str, str] = field(default_factory=dict)
    holds: int = 0  # how often it has left the slot because the store refused an output
    has_entered: bool = False  # its sandbox stands, and code of a tenant may have run
    is_gone: bool = False
    outputs: JSON = field(default_factory=dict)
    dropped: JSON = field(default_factory=dict)  # files that its command left and that are not kept
    verdict: JSON | None = None
    # Orders since it was told to go on in another sandbox; its next process must get them, too.
    # None if it was not told so.
    repeated: list[RepeatedOrder] | None = None
    is_beginning: bool = False  # True until that next process can take orders
    shells: JobShells = field(default_factory=JobShells)  # processes beside a job
    parts: Parts = field(default_factory=Parts)  # received parts of a long message
    is_parsed: bool = False  # another thread parses a long message; later messages wait
    is_muted: bool = False  # True while it is not read from, because it sent too much
    said: deque[JSON] = field(default_factory=deque)  # messages read and not processed yet
    checked: JSON | None = None  # the event made of a final message that came in parts
    exit_status: int | None = None  # exit status, if the process exited while a message was parsed
    frames: TokenBucket = field(default_factory=lambda: TokenBucket(FRAMES_BURST, FRAMES_PER_S))
    said_bytes: TokenBucket = field(default_factory=lambda: TokenBucket(BYTES_BURST, BYTES_PER_S))
    calm: TokenBucket = field(default_factory=lambda: TokenBucket(MUTED_BURST_S, MUTED_PER_S))
    kernel: tuple[int, int] | None = None  # (own, shared) bytes of its processes in the kernel
    kernel_us: int = 0  # when the kernel was last asked for its memory
    # sandbox directory, in use until the process is gone
    environment: HeldEnvironment | None = None
    refused: str = ""  # what its limits refused the process, in a sentence
    lacked_memory: bool = False  # the kernel ended a process of it for lack of host memory
    # resource -> highest use of the host that was seen (`provisions.resources`)
    peaks: dict[str, int] = field(default_factory=dict)
    look_us: int = 0  # when the process is looked at next
    cpu: tuple[int, int] = (0, 0)  # processor time of the process, and when it was read

    @property
    def id(self) -> int:
        return self.record.id

    @property
    def task(self) -> str:
        return self.record.task

    @property
    def kill_reason(self) -> str:
        return self.record.kill_reason

    @property
    def is_prepared(self) -> bool:
        return self.record.is_prepared

    @property
    def is_still(self) -> bool:
        return self.record.is_still

    @property
    def has_state(self) -> bool:
        return self.record.has_state

    @property
    def paused_us(self) -> int:
        return self.record.paused_us

    @property
    def is_resting(self) -> bool:
        return self.record.is_resting

    @property
    def is_saving(self) -> bool:
        return self.saves > 0

    @property
    def is_command(self) -> bool:
        return self.record.is_command

    def rest(self) -> None:
        """Stop the process between two functions, so that nothing computes there meanwhile."""
        self.shells.seat(is_seated=False)
        self._signal(signal.SIGSTOP)

    def begin_again(self, stay: Stay) -> None:
        """Let the resting process run the function of another stay."""
        self.stay.leave_process()
        self.stay, stay.resident = stay, self
        self.saved, self.verdict, self.refused, self.refusals = None, None, "", {}
        self.lacked_memory = False
        self.preset, self.device_preset, self.capabilities = {}, {}, []
        self.outputs, self.peaks, self.cpu, self.staged_us = {}, {}, (0, 0), 0
        self.frames = TokenBucket(FRAMES_BURST, FRAMES_PER_S)
        self.said_bytes = TokenBucket(BYTES_BURST, BYTES_PER_S)
        self.calm = TokenBucket(MUTED_BURST_S, MUTED_PER_S)
        self._signal(signal.SIGCONT)

    def go_on(self, ends: ProcessEnds, room: Room, start: JSON, fds: list[int]) -> None:
        """Take another process in the place of one that has ended; the caller closes the old wire.

        `start` and `fds` are its first order; later ones wait until it `can_take_orders`.
        """
        self.shells.close()
        for fd in self.pipes:
            os.close(fd)
        if self.pidfd is not None:
            os.close(self.pidfd)
        self.bulk.close()
        self.wire, self.bulk, self.pipes, self.room = ends.wire, ends.bulk, ends.pipes, room
        self.pid, self.pidfd, self.exit_status, self.shells = 0, None, None, JobShells()
        self.said.clear()
        self.parts, self.is_muted, self.has_entered = Parts(), False, False
        orders, self.repeated = self.repeated or [], None
        self.send("begin", fds, start=start, files=len(fds))
        # late inputs are brought again
        self.repeated = [order for order in orders if order.word != "block"]
        self.is_beginning = True

    def can_take_orders(self) -> None:
        """Send the orders that waited for the next process."""
        if not self.is_beginning:
            return
        self.shells.seat(is_seated=True)
        orders, self.repeated, self.is_beginning = self.repeated or [], None, False
        for order in orders:
            self.send(order.word, order.fds, **order.said)
            close_all(order.fds)

    def _forget_repeated(self) -> None:
        close_all([fd for order in self.repeated or () for fd in order.fds])
        self.repeated = None

    def may_rest(self) -> bool:
        """True if another function may run in the process: the last one left nothing in it, as far
        as this process can see.
        """
        if not self.stay.shared_key or self.is_saving or self.leaving or self.pidfd is None:
            return False
        if not self._has_streams() or self.shells.is_there():
            return False  # it closed its streams; a tunnel leads into its process
        try:
            return not below(self.pid)
        except (OSError, ValueError):
            return False

    def _has_streams(self) -> bool:
        """True if the process can still print, on both streams."""
        hung_up = select.poll()
        for fd in self.pipes:
            hung_up.register(fd, 0)  # the end of a stream is told in any case
        return len(self.pipes) == 2 and not hung_up.poll(0)

    def may_give(self, output: str) -> bool:
        declared = output in self.stay.spec.outputs
        return declared or (self.is_command and output == messages.ARTIFACTS)

    def is_awaited(self, output: str) -> bool:
        """True if other tasks wait for the output and may start with it while this task still
        runs.
        """
        return output in (self.stay.spec.run.part or {}).get("after_ms", ())

    @property
    def unstored(self) -> str:
        """Return why the store refuses its newest image or output, or ""."""
        return next(iter(self.refusals.values()), "")

    @property
    def unstored_output(self) -> str:
        """Return why the store refuses one of its outputs, or ""."""
        refused = (why for what, why in self.refusals.items() if what != "image")
        return next(refused, "")

    @property
    def left(self) -> JSON:
        """Return what an end other than success says of the files of a command."""
        if not self.is_command:
            return {}
        kept = {name: kept for name, kept in self.outputs.items() if name == messages.ARTIFACTS}
        return {"outputs": kept, "dropped": self.dropped}

    @property
    def is_kept(self) -> bool:
        """True if its state is durable as far as that is possible; for a command: if its working
        folder is.
        """
        return self.record.is_kept

    @property
    def is_durable(self) -> bool:
        """True if ending it now loses nothing; for a command its processes must be stored, too."""
        has_all = not (self.is_command and self.has_state)
        return self.is_kept and (has_all or self.are_processes_stored)

    @property
    def are_processes_stored(self) -> bool:
        """True if the newest durable image of a command has its processes."""
        step = self.processes_step
        return step is not None and step == self.record.saved_step

    @property
    def is_in_image(self) -> bool:
        """True if its newest image includes the processes as they were at the last step."""
        return self.are_processes_stored and self.processes_step == self.stay.step

    @property
    def on_device_bytes(self) -> int:
        """The device memory that it has, or may take without asking: up to its declared memory."""
        if self.level == "host":
            return self.memory_bytes
        if self.level == "coming":
            return self.memory_bytes + self.granted_bytes
        reserved = max(self.memory_bytes, self.stay.spec.devices.memory_bytes)
        return max(0, reserved - self.away_bytes) if self.level == "leaving" else reserved

    @property
    def lacking_bytes(self) -> int:
        """The memory that must still be granted before the resident is back on the device."""
        asked = self.stay.spec.devices.memory_bytes - self.memory_bytes
        return max(0, max(self.away_bytes, asked) - self.granted_bytes)

    @property
    def host_bytes(self) -> int:
        return self.slab_bytes + self.spilled_bytes

    def where(self) -> JSON:
        held = {"on_device_bytes": self.on_device_bytes, "host_bytes": self.host_bytes}
        return {"level": self.level, **held}

    def cap_bytes(self, device_bytes: int) -> int:
        """Return the most memory that the resident may have, on a device with `device_bytes`."""
        asked_bytes = self.stay.spec.devices.memory_bytes
        return cap_bytes(self.record.stay.milli, asked_bytes, device_bytes)

    @property
    def is_fraction(self) -> bool:
        """True if it has only a fraction of the device; other tasks may have the rest."""
        return self.record.stay.milli < WHOLE_MILLI

    def was_absent(self, now_us: int) -> None:
        """Update the usual time from a pause to the next slice; called when the process has the
        slot again.
        """
        if self.paused_us:
            took_us = max(1, now_us - self.paused_us)
            self.absent_us = (self.absent_us + took_us) // 2 if self.absent_us else took_us

    def reach(self, resource: str, used: int) -> None:
        """Note a peak."""
        if used > self.peaks.get(resource, 0):
            self.peaks[resource] = used

    def measure(self) -> None:
        if self.slab >= 0:
            self.slab_bytes = slab.held_bytes(self.slab)

    def bounded_memory(self, told: int, house_bytes: int, kind: str, now_us: int) -> int:
        """Bound the memory that a job reports: by the device's memory, and by the count of the
        kernel or the driver.

        The kernel's count for a CPU device is current. The driver's count for an accelerator is
        older, and the job may have taken more since then.
        """
        if kind != "cpu":
            return max(min(told, house_bytes), self.measured_bytes or 0)
        return self._bounded(min(told, house_bytes), 0, kind, now_us)

    def bounded_spill(self, told: int, house_bytes: int, kind: str, now_us: int) -> int:
        """Bound, in the same way, the reported bytes of a graph's blocks in host memory (shared
        mappings).
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
        """Count what was read from the process; return for how many microseconds it is muted, if it
        sends too much.
        """
        self.frames.take(frames, now_us)
        self.said_bytes.take(read_bytes, now_us)
        muted_us = max(self.frames.debt_us(now_us), self.said_bytes.debt_us(now_us))
        self.calm.take(muted_us / 1e6, now_us)
        return muted_us

    def owes_image(self, now_us: int) -> bool:
        """True if a job has been paused for long without an image, and none is being made."""
        if self.stay.state != "paused" or self.is_durable or self.is_command:
            return False
        on_its_way = self.is_saving or self.save_again_us is not None
        return not on_its_way and now_us - self.paused_us >= OWED_US

    def is_deaf(self, now_us: int) -> bool:
        """True if the process has left messages unread for UNREAD_US, or if too many wait for
        it.
        """
        since_us = self.wire.unread_since_us
        long = since_us is not None and now_us - since_us >= UNREAD_US
        return long or self.wire.is_overfull

    def send(self, word: str, fds: list[int] | None = None, **said: Any) -> None:
        if self.kill_reason:
            return
        if word == "go":
            self.shells.seat(is_seated=True)
            self._forget_repeated()
        # nothing that it leaves is unsettled, so a `kept` is never for the next process
        if self.repeated is not None and word != "kept":
            kept = [os.dup(fd) for fd in fds or ()] if self.is_beginning else []
            self.repeated.append(RepeatedOrder(word, said, kept))
        if self.is_beginning:
            return
        try:
            self.wire.send({"is": word, **said}, fds)
        except OSError:
            return  # the process is dying; its exit will be reported

    def kill(self) -> None:
        """Kill the process and all that it started, at once."""
        if not self._signal(signal.SIGKILL):
            return  # it has ended, or is killed when its pidfd is known
        try:
            # without sandbox layers, its children are in its process group
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return

    def _signal(self, number: signal.Signals) -> bool:
        """Send a signal to the process; False if it has ended or has not begun."""
        if self.pidfd is None:
            return False
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            return False
        return True

    def close_stores(self) -> None:
        """Close the descriptors that a storing thread may read from.

        Call it only when no thread does.
        """
        self.bulk.close()
        if self.slab >= 0:
            os.close(self.slab)
            self.slab = -1

    def close(self) -> None:
        """Close everything except the wire, `bulk` and `slab`, which may take long to close."""
        self.shells.close()
        close_all([*self.pipes, *self.folders])
        self._forget_repeated()
        self.pipes, self.folders = {}, []
        if self.adoption is not None:
            self.adoption.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        if self.environment is not None:
            self.environment.close()
            self.environment = None


def kernel_memory(pid: int) -> tuple[int, int] | None:
    """Return the (own, shared) bytes of memory of a process and its descendants, by the kernel's
    count.

    Descendants that end meanwhile are left out, so a task cannot evade the count by programs that
    come and go, and so are those beyond PROCESSES_LIMIT.  None if the process itself has ended.
    """
    own = shared = 0
    try:
        for at in family(pid):
            status = _read(f"/proc/{at}/status", must=at == pid)
            own += _status_bytes(status, "RssAnon:")
            shared += _status_bytes(status, "RssShmem:")
    except OSError:
        return None
    except ValueError:
        pass  # a report is believed up to what was counted
    return own, shared


def below(pid: int) -> list[int]:
    """Return the descendants of the stub of a command; raises as `family`."""
    return list(family(pid, STORED_LIMIT))[1:]


def memory_to_dump(pid: int) -> int:
    """Return how many bytes of memory a dump of the processes below a stub writes.

    Pages that processes still share after a fork count for each process, as the dump has them for
    each; memory that they share for writing counts once. Raises as `family`.
    """
    all_bytes = 0
    for at in below(pid):
        status = _read(f"/proc/{at}/status")
        all_bytes += _status_bytes(status, "RssAnon:") + _status_bytes(status, "VmSwap:")
        all_bytes += _status_bytes(_read(f"/proc/{at}/smaps_rollup"), "Pss_Shmem:")
    return all_bytes


def family(pid: int, limit: int = PROCESSES_LIMIT) -> Iterator[int]:
    """Yield the ids of a process and its descendants; those that end meanwhile may be left out.

    Raises OSError if the process itself has ended, and ValueError if there are too many.
    """
    looked, left = 0, [pid]
    while left:
        at = left.pop()
        yield at
        try:
            tasks = os.listdir(f"/proc/{at}/task")
        except (FileNotFoundError, ProcessLookupError):
            if at == pid:
                raise
            continue
        looked += len(tasks)
        if looked > limit:
            raise ValueError(f"process {pid} has more than {limit} descendants")
        for task in tasks:
            left += map(int, _read(f"/proc/{at}/task/{task}/children").split())


def _read(path: str, *, must: bool = False) -> str:
    """Read a file of /proc.

    If its process has ended, returns ""; raises OSError if the file `must` be there.
    """
    try:
        return Path(path).read_text()
    except (FileNotFoundError, ProcessLookupError):
        if must:
            raise
        return ""


def _status_bytes(status: str, name: str) -> int:
    """Return the bytes of a row of /proc/PID/status, which has KiB; 0 if there is no such row."""
    _, _, rest = status.partition(f"\n{name}")
    return 1024 * int(rest.split(maxsplit=1)[0]) if rest else 0
