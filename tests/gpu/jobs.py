"""Steps with a device worker's supervisor and real residents behind their walls."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from app.core.model.protocol.messages import CheckpointRef, Finished, Paused, Started
from tests.gpu.devices import GB, MB, found_device
from tests.gpu.step import Run
from tests.workers.conftest import BUNDLE, PRESET, ROOT, DeviceRig, bundled
from tests.workers.journeys import (
    ANIMALS,
    CLEAN,
    Animal,
    Station,
    evicted,
    points,
    travelled,
    undisturbed,
)
from workers.hardware.accelerator import Accelerator

START_S = 60.0  # the first use of a device takes a driver long
LENIENT = {**PRESET, "deterministic": "warn"}  # of an accelerator: others would raise


@contextlib.contextmanager
def rig_of(run: Run, memory_bytes: int = 0, **more: Any) -> Iterator[DeviceRig]:
    """Serve the device, with so much of its memory; all of it for 0."""
    found = found_device(run.kind)
    given = memory_bytes or found.memory_bytes
    with tempfile.TemporaryDirectory(prefix="gpu-rig-") as folder:
        Path(folder).chmod(0o755)
        rig = DeviceRig(
            Path(folder),
            kind=run.kind,
            access=found.access,
            memory_bytes=given,
            device_fraction=given / found.memory_bytes,
            lease_s=60.0,
            **more,
        )
        try:
            rig.open()
            run.figures["limits in force"] = ", ".join(rig.reports[-1].facts["limits"])
            yield rig
        finally:
            rig.close()


def alone(run: Run, entry: str, params: dict[str, Any]) -> Any:
    """Return the result of a job in a plain process, where nothing happens to it."""
    command = [sys.executable, "-m", "examples.job_alone", str(BUNDLE), entry]
    command += ["--params", json.dumps(params), "--preset", json.dumps(LENIENT), "--kind", run.kind]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=ROOT)
    return json.loads(done.stdout.splitlines()[-1])["result"]


def resident(run: Run) -> None:
    params = {"steps": 60, "nap_s": 0.002}
    expected = alone(run, "jobs:Everything", params)
    is_exact = alone(run, "jobs:Everything", params) == expected
    run.figures["undisturbed twice, the same bits"] = is_exact
    images: list[CheckpointRef] = []
    resumed = []
    with rig_of(run) as rig:
        for epoch in range(1, 6):
            how: Any = {"params": params, "images": images, "preset": LENIENT}
            rig.launch("t1", "jobs:Everything", epoch, checkpoint_every_s=0.05, **how)
            started = rig.event(Started, "t1", epoch, timeout_s=START_S)
            resumed.append(started.resumed)
            if epoch < 5:
                rig.steps("t1", started.step + 1, epoch)  # before its first step nothing is saved
                images = rig.paused_and_saved("t1", epoch)
            if epoch in (1, 3):
                rig.drop.append(["t1", epoch])
                rig.until(lambda: not rig.supervisor.stays.residents)
        found = rig.event(Finished, "t1", 5, timeout_s=START_S).result
    run.figures |= {"each time it began": ", ".join(resumed), "same bits": found == expected}
    run.must(found == expected or not is_exact, "the job's bits are others than undisturbed")
    run.must({"fresh", "resident", "image"} == set(resumed), "it was not paused and moved")


# --- two large jobs -------------------------------------------------------------------------------

TURNS = """
import time
import torch

class Turns:
    def __init__(self, ctx, *, parts, part_bytes):
        numbers = range(parts)
        self.parts = [torch.full((part_bytes // 4,), float(n), device=ctx.device) for n in numbers]
        self.turns, self.ended, self.right = 0, 0.0, True

    def step(self, ctx):
        began = time.monotonic()
        if began - self.ended > 0.1:  # the first of a turn
            self.turns += 1
            for number, part in enumerate(self.parts):
                part.add_(1)
                ends = (part[0].item(), part[-1].item())
                self.right = self.right and ends == (number + self.turns,) * 2
        time.sleep(0.005)
        self.ended = time.monotonic()
        print(f"{began!r} {self.ended!r} {self.right}")
"""


def swap(run: Run) -> None:
    """The figures are the device's idle time: from the last step of one job to the first of the
    other, by their own clocks."""
    size = _size_of_each(run)
    part = 16 * MB if run.is_simulated else 256 * MB
    parts, turns = size // part, 6
    limits = {"memory_bytes": size * 3 // 2, "host_memory_bytes": 3 * size}
    seconds, right = [], []
    with rig_of(run, **limits) as rig:
        bundle, _ = rig.store.put([bundled({"turns.py": TURNS})])
        params = {"parts": parts, "part_bytes": part}
        how = {"bundle": bundle, "params": params, "memory_bytes": size + size // 8}
        start = functools.partial(
            rig.launch, run="turns:Turns", budget_us=10**12, preset=LENIENT, **how
        )
        start("a", epoch=1)
        rig.event(Started, "a", timeout_s=START_S)
        for number in range(1, turns + 1):
            before, after = ("a", "b") if number % 2 else ("b", "a")
            old, new = (before, (number + 1) // 2), (after, number // 2 + 1)
            rig.steps(old[0], rig.view(*old).step + 10, old[1])
            start(new[0], epoch=new[1])
            rig.until(lambda new=new: rig.view(*new))
            rig.pause(*old)
            rig.event(Paused, *old, timeout_s=START_S)
            started = rig.event(Started, *new, timeout_s=START_S)
            rig.steps(new[0], started.step + 10, new[1])
            rig.until(lambda new=new: rig.printed(*new))
            ended_s = float(rig.printed(*old)[-1].split()[1])
            first = rig.printed(*new)[0].split()
            seconds.append(float(first[0]) - ended_s)
            right.append(first[2] == "True")
    switch_s = statistics.median(seconds[2:])  # the first two touch memory for the first time
    run.figures |= {
        "bytes of each job, GB": round(parts * part / GB, 3),
        "idle at each switch, s": [round(one, 3) for one in seconds],
        "out and in together, GB/s": round(2 * parts * part / switch_s / GB, 2),
        "same bytes after each switch": all(right),
    }
    ways = [run.figure_of("bandwidth", f"registered slab, {way}, GB/s") for way in ("out", "in")]
    if all(ways):
        copied_s = sum(parts * part / GB / way for way in ways)
        run.figures["of pinned copies out and then in"] = round(copied_s / switch_s, 2)
    run.must(all(right), "a job's bytes are others after a switch")


def _size_of_each(run: Run) -> int:
    """Return bytes of which the device holds two with their contexts, and the host three."""
    if run.is_simulated:
        return 128 * MB
    memory_bytes = found_device(run.kind).memory_bytes
    return min(40 * GB, int(0.42 * memory_bytes), psutil.virtual_memory().available // 6)


# --- the zoo --------------------------------------------------------------------------------------


def zoo(run: Run) -> None:
    steps = 8
    with Station(run.kind) as station:
        for animal in CLEAN if run.is_simulated else ANIMALS:
            try:
                run.figures[animal.name] = _journeys(run, station, animal, steps)
            except AssertionError as error:  # of this job alone: the others still say something
                run.figures[animal.name] = "failed"
                run.must(False, f"{animal.name}: {str(error)[-300:]}")


def _journeys(run: Run, station: Station, animal: Animal, steps: int) -> str:
    """Return "exact" or "equivalent": whether two undisturbed runs have the same bits."""
    places = points(zlib.crc32(animal.name.encode()), steps, 2)
    one, other = (undisturbed(station, animal, steps) for _ in range(2))
    moved = travelled(station, animal, steps, places)
    away = evicted(station, animal, steps, places)
    parts = ("trace", "digest")
    if any(one[part] != other[part] for part in parts):
        return "equivalent: its own bits differ from run to run"
    for name, found in (("moved", moved), ("offloaded", away)):
        is_same = all(found[part] == one[part] for part in parts)
        run.must(is_same, f"{animal.name}, {name}: other bits than undisturbed")
    run.must(min(away["away_bytes"]) > 0, f"{animal.name}: nothing left the device")
    return "exact"


# --- kill -9 --------------------------------------------------------------------------------------


def kill(run: Run) -> None:
    """Kill a process that holds device memory; how long does the device not have it back?"""
    megabytes = 128 if run.is_simulated else 4096
    accelerator = Accelerator(run.kind)
    with rig_of(run, host_memory_bytes=2 * megabytes * MB) as rig:  # for its images
        free_bytes = accelerator.free_bytes()
        how: Any = {"params": {"megabytes": megabytes}, "preset": LENIENT}
        rig.launch("t1", "jobs:Count", **how)
        rig.event(Started, "t1", timeout_s=START_S)
        rig.steps("t1", 2)
        held = free_bytes - accelerator.free_bytes()
        run.figures["held by the job, MB"] = held // MB
        run.must(held >= megabytes * MB, "the driver counts less than the job holds")
        began_s = time.monotonic()
        (held_by,) = rig.supervisor.stays.residents.values()
        os.kill(held_by.pid, signal.SIGKILL)
        slack = 64 * MB  # of other processes
        while accelerator.free_bytes() < free_bytes - slack and time.monotonic() < began_s + 20:
            time.sleep(0.01)
        run.figures["free again after, s"] = round(time.monotonic() - began_s, 3)
        run.must(accelerator.free_bytes() >= free_bytes - slack, "the memory did not come back")
        rig.launch("t2", "jobs:Count", **how)
        rig.event(Started, "t2", timeout_s=START_S)
        run.figures["the next job started after, s"] = round(time.monotonic() - began_s, 3)
