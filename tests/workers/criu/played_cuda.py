"""Plays the CUDA driver for commands without a GPU: a zygote calls `play` before it forks.

This module then stands in for `cuda.bindings.driver`.  A command plays its part with `PRELUDE`: its
device memory is a mapped file whose path has `/dev/nvidia` in it.  A checkpoint takes the file
away, and a restore brings it back, so what was in it is lost unless the process itself kept it.
States and calls lie in the working folder.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

STATES, CALLS, REFUSED = Path(".played"), Path("calls"), Path("refused")
RUNNING, LOCKED, CHECKPOINTED = range(3)
HERE = bytes(range(16))
_ILLEGAL = 401

#: Maps "device memory" as `memory`; a step runs inside `with step:`, as kernels do not stop midway.
PRELUDE = """
import mmap, os, signal, time
from contextlib import contextmanager
PATH, SIGNALS = "dev/nvidia0", {signal.SIGUSR1, signal.SIGUSR2}
os.makedirs("dev", exist_ok=True)
memory = kept = None
def take(*_):
    global memory
    with open(PATH, "w+b") as file:
        file.truncate(4096)
        memory = mmap.mmap(file.fileno(), 4096)
    memory[:] = kept or bytes(4096)
def leave(*_):
    global memory, kept
    kept = bytes(memory)
    memory.close()
    memory = None
    os.unlink(PATH)
signal.signal(signal.SIGUSR1, leave)
signal.signal(signal.SIGUSR2, take)
take()
@contextmanager
def step():
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    while memory is None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        time.sleep(0.001)
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    yield
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
"""


class CUuuid:
    def __init__(self, address: int) -> None:
        self.bytes = ctypes.string_at(address, 16)


class CUcheckpointGpuPair:
    oldUuid: Any
    newUuid: Any


class CUcheckpointRestoreArgs:
    gpuPairs: list[Any]
    gpuPairsCount: int


class CUcheckpointLockArgs:
    timeoutMs: int


def cuInit(flags: int) -> tuple[int]:
    (Path.home() / ".nv").mkdir(exist_ok=True)  # as the driver does for its cache
    return (0,)


def cuDeviceGet(number: int) -> tuple[int, int]:
    return 0, number


def cuDeviceGetUuid(device: int) -> tuple[int, CUuuid]:
    raw = ctypes.create_string_buffer(HERE)
    return 0, CUuuid(ctypes.addressof(raw))


def cuCheckpointProcessGetState(pid: int) -> tuple[int, int]:
    file = STATES / str(pid)
    return 0, int(file.read_text()) if file.exists() else RUNNING


def cuCheckpointProcessLock(pid: int, args: CUcheckpointLockArgs) -> tuple[int]:
    return _changed("lock", pid, RUNNING, LOCKED)


def cuCheckpointProcessCheckpoint(pid: int, args: None) -> tuple[int]:
    return _changed("checkpoint", pid, LOCKED, CHECKPOINTED, signal.SIGUSR1, is_held=False)


def cuCheckpointProcessRestore(pid: int, args: CUcheckpointRestoreArgs | None) -> tuple[int]:
    pairs = [(pair.oldUuid.bytes, pair.newUuid.bytes) for pair in args.gpuPairs] if args else []
    told = "".join(f" {old.hex()} to {new.hex()}" for old, new in pairs)
    return _changed(f"restore{told}", pid, CHECKPOINTED, LOCKED, signal.SIGUSR2, is_held=True)


def cuCheckpointProcessUnlock(pid: int, args: None) -> tuple[int]:
    return _changed("unlock", pid, LOCKED, RUNNING)


def _changed(
    what: str, pid: int, before: int, after: int, number: int = 0, *, is_held: bool = False
) -> tuple[int]:
    with CALLS.open("a") as calls:
        calls.write(f"{what}\n")
    is_refused = REFUSED.exists() and what.split()[0] in REFUSED.read_text()
    if is_refused or cuCheckpointProcessGetState(pid)[1] != before:
        return (_ILLEGAL,)
    if number:
        os.kill(pid, number)
        while ("/dev/nvidia" in Path(f"/proc/{pid}/maps").read_text()) != is_held:
            time.sleep(0.001)
    STATES.mkdir(exist_ok=True)
    (STATES / str(pid)).write_text(str(after))
    return (0,)


def play() -> None:
    cuda, bindings = ModuleType("cuda"), ModuleType("cuda.bindings")
    driver = sys.modules[__name__]
    cuda.bindings, bindings.driver = bindings, driver  # type: ignore[attr-defined]
    sys.modules |= {"cuda": cuda, "cuda.bindings": bindings, "cuda.bindings.driver": driver}
