"""Moves CUDA processes off the device and back, whatever they run: the driver's checkpoint API.

`cuCheckpointProcess*` moves all device memory of another process into host memory that the driver
holds, and frees the device: lock, checkpoint; later restore, unlock.  While a process is locked its
CUDA calls block and its other threads go on.  So it is stopped (`freezer`) afterwards, and
continued before it is restored: a thread of that process does part of the work.

While the memory is away the process has no file or mapping of the device, so CRIU can store it
(`workers.criu`).  After a restore, `adopt` takes over the memory that is away, and `come_back`
brings it onto the device of this host.  The driver is told which GPU takes the place of which.

Invariants:
* Every call has a deadline, as drivers have been seen to hang here for ever without an error.  A
  call that is late is abandoned, and its process must be killed.
* Several processes leave one after the other; if one cannot be locked, none stays locked.
* Missing driver support is found before any task relies on it (`TreeMemory.found`): then a pause
  frees no device memory, and the task's capabilities have no "device_memory".

Limits, by the driver's own documentation: no memory shared between processes (CUDA IPC) before
driver 610, no unified memory, no MPS.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

LOCK_WITHIN_S = 10.0  # time limit for submitted work, which must finish first
MOVE_WITHIN_S = 180.0  # about 5 GB/s were measured, and devices have up to 140 GB
ANSWER_WITHIN_S = 5.0  # time limit of calls that move no memory
_LOOK_S = 0.05

RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)  # values of CUprocessState
_STATES = ("running", "locked", "checkpointed", "failed")
_REFUSED = frozenset({800, 801, 802, 803})  # not permitted, not supported, not ready, old driver


class NotDone(Exception):
    """Raised when the driver failed or was late; the message says which process and which call."""


class LateCall(NotDone):
    """Raised when a call to the driver was late: it may still take effect at any later moment."""


class StillHeld(NotDone):
    """Raised when the driver refused: no device memory was moved, and the processes continue."""


class Driver(Protocol):
    """Declares the calls to the driver; each raises NotDone with the driver's own words."""

    def state(self, pid: int) -> int: ...
    def lock(self, pid: int, timeout_ms: int) -> None: ...
    def checkpoint(self, pid: int) -> None: ...
    def restore(self, pid: int, left: str) -> None: ...
    def unlock(self, pid: int) -> None: ...


@dataclass
class TreeMemory:
    """Moves the device memory of one process tree; `away` are the processes whose memory is moved
    off.

    `here` is the UUID of the GPU that the processes see; `left` is the UUID of the GPU that they
    left, if that is another one. `may_go_on` is called while a driver call lasts; if it returns
    False, the call is abandoned.
    """

    driver: Driver | None
    is_of: Callable[[int], bool] = lambda pid: _holds_a_device(pid)
    may_go_on: Callable[[], bool] = lambda: True
    away: list[int] = field(default_factory=list)
    here: str = ""
    left: str = ""

    @classmethod
    def found(cls, kind: str, **more: Any) -> TreeMemory:
        if kind != "cuda":
            return cls(driver=None, is_of=lambda pid: False, **more)
        return cls(driver=_driver(), here=os.environ.get("CUDA_VISIBLE_DEVICES", ""), **more)

    @property
    def can_leave(self) -> bool:
        return self.driver is not None

    def leave(self, pids: Iterable[int]) -> None:
        """Move the processes' device memory into host memory.

        Raises StillHeld if nothing was moved and the processes continue. After any other NotDone
        they must be killed.
        """
        if self.driver is None or self.away:
            return
        of_devices = self.holding(pids)
        locked: list[int] = []
        try:
            for pid in of_devices:
                self._lock(self.driver, pid)
                locked.append(pid)
        except NotDone as error:
            for pid in locked:
                self._do("unlock", pid, ANSWER_WITHIN_S, self.driver.unlock)
            if isinstance(error, LateCall):
                raise
            raise StillHeld(str(error)) from error
        for pid in of_devices:
            self._do("checkpoint", pid, MOVE_WITHIN_S, self.driver.checkpoint)
            self.away.append(pid)

    def holding(self, pids: Iterable[int]) -> list[int]:
        """Return the processes that hold device memory, or may hold some, at this moment."""
        return [pid for pid in pids if self.is_of(pid)]

    def adopt(self, away: Iterable[int], device: str) -> None:
        """Take over restored processes, whose memory left this `device`."""
        self.away, self.left = [*away], "" if device == self.here else device

    def come_back(self) -> None:
        """Move the device memory back and unlock the processes; raises NotDone."""
        if not self.away:
            return
        if (driver := self.driver) is None:
            raise NotDone("there is no driver here that brings memory of processes back")
        for pid in self.away:
            self._do("restore", pid, MOVE_WITHIN_S, lambda pid: driver.restore(pid, self.left))
        for pid in self.away:
            self._do("unlock", pid, ANSWER_WITHIN_S, driver.unlock)
        self.away, self.left = [], ""

    def _lock(self, driver: Driver, pid: int) -> None:
        state = self._do("state", pid, ANSWER_WITHIN_S, driver.state)
        if state != RUNNING:
            told = _STATES[state] if 0 <= state < len(_STATES) else state
            raise NotDone(f"the driver reports process {pid} as {told}; expected running")
        timeout_ms = int(LOCK_WITHIN_S * 1000)
        self._do("lock", pid, LOCK_WITHIN_S + 1, lambda pid: driver.lock(pid, timeout_ms))

    def _do(self, what: str, pid: int, within_s: float, call: Callable[[int], Any]) -> Any:
        """Run `call(pid)` in a separate thread; if it is late, abandon the thread and raise
        LateCall.
        """
        answer: list[Any] = []
        ended = threading.Event()

        def work() -> None:
            try:
                answer.append(call(pid))
            except BaseException as error:
                answer.append(error)
            ended.set()

        threading.Thread(target=work, name=f"{what} {pid}", daemon=True).start()
        until_s = time.monotonic() + within_s
        while not ended.wait(_LOOK_S):
            if not self.may_go_on():
                raise LateCall(f"{what} of process {pid} outlasted the device's lease")
            if time.monotonic() >= until_s:
                raise LateCall(f"{what} of process {pid} was not done within {within_s:g} s")
        if isinstance(answer[0], NotDone):
            raise NotDone(f"{what} of process {pid}: {answer[0]}") from answer[0]
        if isinstance(answer[0], BaseException):
            raise answer[0]
        return answer[0]


def _holds_a_device(pid: int) -> bool:
    """True if the process has mapped a CUDA device.

    Processes that have not need not be moved.
    """
    try:
        maps = Path(f"/proc/{pid}/maps").read_text("utf-8", "replace")
    except OSError:
        return False  # the process has ended
    return "/dev/nvidia" in maps


# --- the driver's bindings ------------------------------------------------------------------------

_CALLS = (
    "cuCheckpointProcessGetState",
    "cuCheckpointProcessLock",
    "cuCheckpointProcessCheckpoint",
    "cuCheckpointProcessRestore",
    "cuCheckpointProcessUnlock",
    "CUcheckpointLockArgs",
)


def _driver() -> Driver | None:
    """Return the driver if it has this API and permits its use; None if not, or if it answers too
    late.
    """
    try:
        from cuda.bindings import driver as bindings  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return None
    if not all(hasattr(bindings, name) for name in _CALLS):
        return None
    asked = TreeMemory(driver=None)
    try:
        found = asked._do("probe", 0, ANSWER_WITHIN_S, lambda _: _is_served(bindings))
    except (NotDone, RuntimeError):  # the bindings have the call, but the driver lacks it
        return None
    return _Bindings(bindings) if found else None


def _is_served(bindings: Any) -> bool:
    (error,) = bindings.cuInit(0)
    if int(error):
        return False
    error, *_ = bindings.cuCheckpointProcessGetState(os.getpid())
    return int(error) not in _REFUSED


class _Bindings:
    """Implements `Driver` with cuda-bindings."""

    def __init__(self, bindings: Any) -> None:
        self.bindings = bindings

    def state(self, pid: int) -> int:
        return int(self._checked(self.bindings.cuCheckpointProcessGetState(pid))[0])

    def lock(self, pid: int, timeout_ms: int) -> None:
        args = self.bindings.CUcheckpointLockArgs()
        args.timeoutMs = timeout_ms
        self._checked(self.bindings.cuCheckpointProcessLock(pid, args))

    def checkpoint(self, pid: int) -> None:
        self._checked(self.bindings.cuCheckpointProcessCheckpoint(pid, None))

    def restore(self, pid: int, left: str) -> None:
        args = self._moved_from(left) if left else None
        self._checked(self.bindings.cuCheckpointProcessRestore(pid, args))

    def _moved_from(self, left: str) -> Any:
        """Return the argument that makes the GPU of this host take the place of the GPU `left`."""
        if not hasattr(self.bindings, "CUcheckpointGpuPair"):
            raise NotDone("this driver brings processes back to the same GPU only")
        (here,) = self._checked(self.bindings.cuDeviceGet(0))
        (new,) = self._checked(self.bindings.cuDeviceGetUuid(here))
        # the bindings make a UUID only from an address, and copy it from there
        raw = ctypes.create_string_buffer(bytes.fromhex(left.removeprefix("GPU-").replace("-", "")))
        pair, args = self.bindings.CUcheckpointGpuPair(), self.bindings.CUcheckpointRestoreArgs()
        pair.oldUuid, pair.newUuid = self.bindings.CUuuid(ctypes.addressof(raw)), new
        args.gpuPairs, args.gpuPairsCount = [pair], 1
        return args

    def unlock(self, pid: int) -> None:
        self._checked(self.bindings.cuCheckpointProcessUnlock(pid, None))

    def _checked(self, answer: tuple[Any, ...]) -> tuple[Any, ...]:
        error, *values = answer
        if int(error):
            raise NotDone(f"the driver says {getattr(error, 'name', error)}")
        return tuple(values)
