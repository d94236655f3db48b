"""Measure how long a device computes nothing while one job leaves its slot and another takes it.

    python -m benchmarks.context_switch [--quick]

Two jobs take turns on one CPU device: a real supervisor and real residents, with a simulated
island. A switch lasts from the end of the last step of one job to the beginning of the first step
of the other, by the jobs' own clocks, so it includes everything.

* fits: both jobs have their memory on the device.
* must move: the device has memory for one job. Every turn changes all bytes of its job. At a switch
  the bytes of one job are offloaded to its slab, while those of the other job come back from
  theirs. The bandwidth of both together is compared with `memcpy` of the same sizes, out and then
  back. The copy uses two threads, as coming back does, and memory that was touched before, in turn
  with the switches. The first four switches touch memory for the first time, so they are reported
  apart.
* the peer is a new process that imports torch and loads the same bytes by `torch.load`.

With a CUDA device the same storages are also offloaded from there and brought back. Each direction
is measured beside a pinned copy, and then two storages in opposite directions at once. Without a
CUDA device the result says so.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from app.core.model.protocol.messages import Paused, Started
from benchmarks import Target, quick, report
from tests.workers.conftest import DeviceRig, bundled

MB = 2**20
PART_BYTES = 4 * MB
THREADS = 2
# number of switches after which both jobs have left and come back, and all memory was touched once
NEW = 4

JOB = """
import time
import torch

class Turns:
    def __init__(self, ctx, *, parts, part_bytes):
        self.parts = [torch.randn(part_bytes // 4) for _ in range(parts)]
        self.ended = 0.0

    def step(self, ctx):
        began = time.monotonic()
        if began - self.ended > 0.1:  # the first of a turn
            for part in self.parts:
                part.add_(1)
        time.sleep(0.005)
        self.ended = time.monotonic()
        print(f"{began!r} {self.ended!r}")
"""

JSON = dict[str, Any]


def main() -> int:
    size, turns = (64 * MB, 16) if quick() else (300 * MB, 40)
    with tempfile.TemporaryDirectory(prefix="switch-") as folder:
        fits = switched(Path(folder) / "fits", size, turns, memory_bytes=8 * size)
        moves = switched(Path(folder) / "moves", size, turns, memory_bytes=size * 3 // 2)
        restart_s = restarted_s(Path(folder), size)
    first_s = moves[0]["switch_s"]
    fits, moves = fits[NEW:], moves[NEW:]
    move_s = median(moves, "switch_s")
    ratio = statistics.median(row["memcpy_s"] / row["switch_s"] for row in moves)
    targets = [
        target("fits: a switch, median", 1000 * median(fits, "switch_s"), "ms", "<=", 1.0),
        target("must move: of the bandwidth of memcpy, median", ratio, "of it", ">=", 0.85),
    ]
    peers: JSON = {
        "bytes of each job": size,
        "switches of each kind": len(moves),
        "fits, worst ms": round(1000 * max(row["switch_s"] for row in fits), 2),
        "fits, the seat empty as told, median ms": round(1000 * median(fits, "told_s"), 3),
        "must move, median ms": round(1000 * move_s, 1),
        "must move, the best ms": round(1000 * min(row["switch_s"] for row in moves), 1),
        "must move, the first of all, ms": round(1000 * first_s, 1),
        "must move, the seat empty as told, median ms": round(1000 * median(moves, "told_s"), 1),
        "must move, GB/s out and in together": round(2 * size / move_s / 1e9, 2),
        "memcpy of the same, median ms": round(1000 * median(moves, "memcpy_s"), 1),
        "new process that imports torch and loads it, ms": round(1000 * restart_s),
        "load average": round(os.getloadavg()[0], 1),
    }
    if torch.cuda.is_available():
        more, told = on_accelerator("cuda", max(size, 2**30))
        targets, peers = targets + more, {**peers, **told}
    else:
        peers["cuda"] = "no CUDA device here: not measured"
    return report("context_switch", targets, peers)


def target(name: str, value: float, unit: str, op: str, bound: float) -> Target:
    return Target(name=name, value=round(value, 3), unit=unit, op=op, bound=bound)


def median(rows: list[JSON], name: str) -> float:
    return float(statistics.median(row[name] for row in rows))


# --- two jobs on a device -------------------------------------------------------------------------


def switched(home: Path, size: int, turns: int, *, memory_bytes: int) -> list[JSON]:
    ground = DeviceRig(
        home,
        lease_s=60.0,
        memory_bytes=memory_bytes,
        host_memory_bytes=4 * size,
        sandbox="off",
    )
    ground.open()
    memcpy = Memcpy(size)
    try:
        turn(ground, "a", 1, size)
        ground.event(Started, "a", timeout_s=60)
        rows = []
        for number in range(1, turns + NEW + 1):
            before, after = ("a", "b") if number % 2 else ("b", "a")
            row = switch(ground, (before, (number + 1) // 2), (after, number // 2 + 1), size)
            rows.append({**row, "memcpy_s": memcpy.once_s()})
        return rows
    finally:
        memcpy.close()
        ground.close()


def switch(ground: DeviceRig, before: tuple[str, int], after: tuple[str, int], size: int) -> JSON:
    turn(ground, *after, size)
    ground.until(lambda: ground.view(*after))
    at_rest(ground)
    ground.steps(before[0], ground.view(*before).step + 10, before[1])
    ground.pause(*before)
    ground.event(Paused, *before, timeout_s=60)
    started = ground.event(Started, *after, timeout_s=60)
    ground.steps(after[0], started.step + 10, after[1])
    ground.until(lambda: ground.printed(*after))
    ended_s = float(ground.printed(*before)[-1].split()[1])
    began_s = float(ground.printed(*after)[0].split()[0])
    return {"switch_s": began_s - ended_s, "told_s": started.switch_us / 1e6}


def turn(ground: DeviceRig, task: str, epoch: int, size: int) -> None:
    bundle, _ = ground.store.put([bundled({"turns.py": JOB})])
    params = {"parts": size // PART_BYTES, "part_bytes": PART_BYTES}
    more = {"bundle": bundle, "params": params, "memory_bytes": size + 16 * MB}
    ground.launch(task, "turns:Turns", epoch, budget_us=10**12, **more)


def at_rest(ground: DeviceRig) -> None:
    """Wait until earlier images are in the store, so that nothing but steps goes on."""
    residents = ground.supervisor.stays.residents

    def quiet() -> bool:
        paused = [r for r in list(residents.values()) if r is not ground.supervisor.stays.holder]
        return all(r.is_durable and not r.is_saving for r in paused)

    ground.until(quiet, timeout_s=60)


class Memcpy:
    """Copies as many bytes as each job moves off the device and then back, with THREADS threads."""

    def __init__(self, size: int) -> None:
        self.size, self.threads = size, ThreadPoolExecutor(THREADS)
        self.state = torch.ones(size // 4)
        self.file = os.memfd_create("peer")
        os.ftruncate(self.file, size)
        self.slab = mmap.mmap(self.file, size)
        self.at = ctypes.addressof(ctypes.c_char.from_buffer(self.slab))
        self.once_s()

    def once_s(self) -> float:
        began_s = time.perf_counter()
        self._copy(self.at, self.state.data_ptr())
        self._copy(self.state.data_ptr(), self.at)
        return time.perf_counter() - began_s

    def _copy(self, to: int, source: int) -> None:
        part = self.size // THREADS
        starts = [number * part for number in range(THREADS)]
        copies = [self.threads.submit(ctypes.memmove, to + n, source + n, part) for n in starts]
        for copy in copies:
            copy.result()

    def close(self) -> None:
        self.threads.shutdown()
        os.close(self.file)


def restarted_s(folder: Path, size: int) -> float:
    """Return the seconds in which a new process imports torch and loads the bytes.

    The best of three runs counts.
    """
    path = folder / "checkpoint.pt"
    torch.save([torch.ones(PART_BYTES // 4) for _ in range(size // PART_BYTES)], path)
    code = f"import torch; torch.load({str(path)!r})"

    def once_s() -> float:
        began_s = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - began_s

    return min(once_s() for _ in range(3))


# --- on an accelerator ----------------------------------------------------------------------------


def on_accelerator(kind: str, size: int) -> tuple[list[Target], JSON]:
    """Measure each direction beside a pinned copy of the same bytes, and both at once."""
    from workers.capture.capture import Surroundings, capture
    from workers.hardware.accelerator import Accelerator
    from workers.process import slab
    from workers.process.slab import Slab
    from workers.switching.offload import Absence
    from workers.switching.staging import Staging

    accelerator = Accelerator(kind)

    class Parked:
        """Holds a job's state on the device, with the code that offloads it and brings it back."""

        def __init__(self) -> None:
            count = size // (16 * MB)
            self.parts = [torch.randn(4 * MB, device=accelerator.device) for _ in range(count)]
            held = Slab(slab.made(2 * size))
            held.make_ready(size + MB)
            self.staging = Staging(held, None, accelerator)
            self.absence = Absence(held, accelerator, self.staging.pinned)

        def leave(self) -> None:
            captured = capture(self.parts, around=Surroundings(), accelerator=accelerator)
            _, lying = self.staging.bring(captured)
            self.absence.leave(lying, lambda: None)

        def come_back(self) -> None:
            self.absence.come_back(lambda size: None)

    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device=accelerator.device)
    one, other = Parked(), Parked()
    for parked in (one, other):  # a first time, for the page tables
        parked.leave()
        parked.come_back()
    rows = []
    for _ in range(5):
        row = {"peer out": timed(accelerator, lambda: host.copy_(device, non_blocking=True))}
        row["out"] = timed(accelerator, one.leave)
        row["peer in"] = timed(accelerator, lambda: device.copy_(host, non_blocking=True))
        row["in"] = timed(accelerator, one.come_back)
        other.leave()
        with ThreadPoolExecutor(2) as threads:
            row["both"] = timed(
                accelerator, lambda: list(threads.map(_call, (one.leave, other.come_back)))
            )
        one.come_back()
        rows.append(row)
    larger_s = max(median(rows, "out"), median(rows, "in"))
    targets = [
        target(f"{kind}, {way}: of a pinned copy's bandwidth", median(rows, f"peer {way}")
               / median(rows, way), "of it", ">=", 0.90)
        for way in ("out", "in")
    ]  # fmt: skip
    both = median(rows, "both") / larger_s
    targets.append(target(f"{kind}, out with in, to the larger", both, "times", "<=", 1.15))
    told = {f"{kind}, {name}, ms": round(1000 * median(rows, name), 1) for name in rows[0]}
    return targets, told


def _call(work: Callable[[], None]) -> None:
    work()


def timed(accelerator: Any, work: Callable[[], Any]) -> float:
    accelerator.synchronize()
    began_s = time.perf_counter()
    work()
    accelerator.synchronize()
    return time.perf_counter() - began_s


if __name__ == "__main__":
    sys.exit(main())
