"""Steps that ask the device and its driver, without a job of Roundhouse."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from app.settings import Settings
from tests.gpu.step import CannotRun, Run
from workers.device import device_check
from workers.device.device_memory import CONTEXT_BYTES
from workers.device.monitors import NvmlMonitor
from workers.hardware.accelerator import Accelerator, Pinned
from workers.hardware.cuda_checkpoint import TreeMemory
from workers.process import slab
from workers.process.isolation.device_access import FoundDevice
from workers.process.slab import Slab

MB, GB = 2**20, 10**9


def settings_of(kind: str) -> Settings:
    """Return the settings of a worker of this device, as the environment has them."""
    more: dict[str, Any] = {}
    if kind == "sim":
        more = {"accelerator": "0", "device_nodes": f"{os.environ['SIM_HOME']}/budget"}
    elif which := os.environ.get("ROUNDHOUSE_ACCELERATOR"):
        more = {"accelerator": which}
    return Settings(device="h.0", device_kind=kind, **more)


def found_device(kind: str) -> FoundDevice:
    return device_check.find_device(settings_of(kind))


def find(run: Run) -> None:
    found = found_device(run.kind)
    told = {name: value for name, value in asdict(found).items() if name != "access"}
    run.figures |= {**told, "id": found.access.id, "nodes": list(map(str, found.access.nodes))}
    run.figures["memory GB"] = round(found.memory_bytes / GB, 2)
    if run.kind == "cuda":
        run.figures["driver"] = _first_line(Path("/proc/driver/nvidia/version"))
        run.figures["torch's CUDA"] = torch.version.cuda


def _first_line(file: Path) -> str:
    return file.read_text().splitlines()[0] if file.exists() else "unknown"


HOLDER = """
import sys, torch
x = torch.arange(int(sys.argv[2]) // 8, device=sys.argv[1])
print(int(x.sum()), flush=True)
sys.stdin.readline()
print(int(x.sum()), flush=True)
"""


@contextlib.contextmanager
def holding(run: Run, size: int) -> Iterator[tuple[subprocess.Popen[str], Callable[[], bool]]]:
    """Let a process hold so many bytes of the device.

    Gives the process, and a function that lets it end and says whether its bytes are the same.
    """
    command = [sys.executable, "-c", HOLDER, run.kind, str(size)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        reads, writes = process.stdout, process.stdin
        assert reads is not None
        assert writes is not None
        before = reads.readline()

        def holds_the_same() -> bool:
            writes.write("\n")
            writes.flush()
            return reads.readline() == before

        yield process, holds_the_same


def checkpoint(run: Run) -> None:
    run.only_on_cuda("the driver's checkpoint of a process")
    held = TreeMemory.found(run.kind)
    run.figures["permitted"] = held.can_leave
    if not held.can_leave:
        raise CannotRun("the driver has no checkpoint API, or does not permit its use here")
    size = 512 * MB
    with holding(run, size) as (process, holds_the_same):
        seconds = {
            "out": _seconds(lambda: held.leave([process.pid])),
            "in": _seconds(held.come_back),
        }
        run.must(holds_the_same(), "the bytes are others than before")
    run.figures |= {f"{way} GB/s": round(size / took / GB, 2) for way, took in seconds.items()}
    with holding(run, size) as (process, holds_the_same):
        held.leave([process.pid])
        held.left = found_device(run.kind).access.id  # as if it had been another GPU
        held.come_back()
        run.figures["told which GPU takes the place of which, same bytes"] = holds_the_same()


def _seconds(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def bandwidth(run: Run) -> None:
    accelerator = Accelerator(run.kind)
    size = 64 * MB if run.is_simulated else 1024 * MB
    device = torch.empty(size, dtype=torch.uint8, device=accelerator.device)
    held = Slab(slab.made(2 * size))
    pinned = Pinned(held.address, held.memory, accelerator)
    run.figures["registering, s"] = round(_seconds(lambda: pinned.reach(size)), 3)
    run.must(pinned.size >= size, "the slab's memory could not be registered")
    hosts = {
        "pinned by torch": torch.empty(size, dtype=torch.uint8, pin_memory=True),
        "registered slab": torch.frombuffer(held.memory, dtype=torch.uint8)[:size],
        "pageable": torch.empty(size, dtype=torch.uint8),
    }
    for name, host in hosts.items():
        ways = {"out": (host, device), "in": (device, host)}
        for way, (to, source) in ways.items():

            def copied(to: torch.Tensor = to, source: torch.Tensor = source) -> None:
                to.copy_(source, non_blocking=True)
                accelerator.synchronize()

            copied()
            best_s = min(_seconds(copied) for _ in range(5))
            run.figures[f"{name}, {way}, GB/s"] = round(size / best_s / GB, 2)


def accounts(run: Run) -> None:
    """Compare the counts; what torch does not say is contexts, and workspaces of libraries."""
    accelerator, size = Accelerator(run.kind), 64 * MB if run.is_simulated else 2048 * MB
    before, total = accelerator.module.mem_get_info(accelerator.device)
    held = torch.ones(size // 4, device=accelerator.device)
    accelerator.synchronize()
    after, _ = accelerator.module.mem_get_info(accelerator.device)
    run.figures |= {
        "total GB": round(total / GB, 2),
        "free before, GB": round(before / GB, 2),
        "torch says that it holds, MB": accelerator.held_bytes() // MB,
        "the device has less by, MB": (before - after) // MB,
    }
    run.must(before - after >= held.nbytes, "the driver counts less than was allocated")
    if run.kind != "cuda":
        run.figures["count per process"] = "only by NVML, which this kind has not"
        return
    monitor = NvmlMonitor(found_device(run.kind).access.id)
    health = monitor.read(0.0)
    counted = dict(health.processes).get(os.getpid())
    monitor.close()
    run.figures |= {f"NVML: {name}": str(value) for name, value in asdict(health).items()}
    if counted is None:
        raise CannotRun("NVML does not list this process (another process namespace?)")
    x = torch.randn(2048, 2048, device=accelerator.device)
    (x @ x).sum().item()  # its library makes a workspace
    beside = counted - accelerator.held_bytes()
    run.figures |= {
        "NVML counts for this process, MB": counted // MB,
        "of that beside torch's allocator, MB": beside // MB,
    }
    run.must(beside <= CONTEXT_BYTES, "a context takes more than what each task is allowed for it")
