"""Steps with ranks, commands and other programs of the host."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from typing import Any

import torch

from app.core.model.messages import Finished, Paused, Started
from benchmarks import context_switch
from tests.gpu.devices import GB, MB, holding
from tests.gpu.jobs import LENIENT, START_S, rig_of
from tests.gpu.step import CannotRun, Run
from tests.workers.conftest import ROOT, bundled
from tests.workers.gangs import Gangs, bits
from workers.commands.cuda_checkpoint import TreeMemory
from workers.hardware.accelerator import Accelerator


def ranks(run: Run) -> None:
    gangs = Gangs()
    try:
        for job in ("Mlp", "Conv", "Accumulating", "Sharded", "Wide"):
            how: Any = {"ranks": 2, "seats": 1, "steps": 6, "kind": run.kind}
            stays = gangs.right(f"devices:{job}", **how)
            swaps = gangs.right(f"devices:{job}", swap=True, **how)
            moved = sum(story["out_bytes"] for story in swaps)
            run.figures[f"{job}: left the device between turns, MB"] = round(moved / MB, 1)
            run.must(bits(stays) == bits(swaps), f"{job}: other bits where its ranks leave")
            run.must(moved > 0, f"{job}: nothing left the device")
    finally:
        gangs.close()


# --- commands -------------------------------------------------------------------------------------

SCRIPT = """
import sys, time, torch
kind, size, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
x = torch.arange(size // 8, device=kind)
for step in range(steps):
    x.add_(1)
    print(f"step {step}", flush=True)
    time.sleep(0.05)
print(f"sum {int(x.sum())}")
"""


def command(run: Run) -> None:
    """Whether memory is free meanwhile depends on the driver; the result must be right."""
    can_leave = TreeMemory.found(run.kind).can_leave
    run.figures["device memory can leave"] = can_leave
    size, steps = (64 * MB, 40) if run.is_simulated else (4096 * MB, 60)
    accelerator = Accelerator(run.kind)
    with rig_of(run) as rig:
        bundle, _ = rig.store.put([bundled({"script.py": SCRIPT})])
        words = ["python", "script.py", run.kind, str(size), str(steps)]
        how: Any = {"bundle": bundle, "preset": LENIENT, "memory_bytes": 2 * size}
        before = accelerator.free_bytes()
        rig.launch("c1", words, **how)
        rig.event(Started, "c1", timeout_s=START_S)
        rig.until(lambda: "step 5" in rig.printed("c1"), timeout_s=START_S)
        held = before - accelerator.free_bytes()
        began_s = time.monotonic()
        rig.pause("c1")
        rig.event(Paused, "c1", timeout_s=START_S)
        run.figures["a pause, s"] = round(time.monotonic() - began_s, 3)
        freed = held - (before - accelerator.free_bytes())
        run.figures |= {"held, MB": held // MB, "freed by the pause, MB": freed // MB}
        run.must(freed >= size if can_leave else True, "its device memory did not leave")
        rig.launch("c1", words, 2, **how)
        rig.event(Finished, "c1", 2, timeout_s=START_S)
        said = [*rig.printed("c1"), *rig.printed("c1", 2)]
    count = size // 8
    expected = f"sum {count * (count - 1) // 2 + steps * count}"
    run.must(expected in said, f"it said {said[-1:]}, not {expected}")
    if not can_leave:
        raise CannotRun("the driver's way is not there; the pause was tried, and frees no memory")


# --- other programs -------------------------------------------------------------------------------


def tests(run: Run) -> None:
    chosen = ["-m", "gpu", "tests/workers"] if run.kind == "cuda" else ["-m", "sim", *_OF_SIM]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("SIM_")},
        capture_output=True,
        text=True,
        check=False,
    )
    run.figures["pytest"] = next(reversed(done.stdout.splitlines()), "said nothing")
    run.must(done.returncode == 0, done.stdout[-1500:])


_OF_SIM = (
    "tests/workers/device/test_memory_tiers_on_accelerators.py",
    "tests/workers/switching/test_on_accelerator.py",
)


def benchmark(run: Run) -> None:
    size = 64 * MB if run.is_simulated else 1024 * MB
    targets, told = context_switch.on_accelerator(run.kind, size)
    run.figures |= told
    for target in targets:
        missed = "" if target.met else ", missed"
        run.figures[target.name] = f"{target.value} (target {target.op} {target.bound}{missed})"


def peers(run: Run) -> None:
    run.only_on_cuda("cuda-checkpoint and torch_memory_saver")
    size = 2048 * MB
    _by_cuda_checkpoint(run, size)
    _by_memory_saver(run, size)


def _by_cuda_checkpoint(run: Run, size: int) -> None:
    name, program = "cuda-checkpoint", shutil.which("cuda-checkpoint")
    if program is None:
        run.figures[name] = "not installed"
        return
    with holding(run, size) as (process, holds_the_same):
        for way in ("out", "in"):
            began_s = time.perf_counter()
            toggle = [program, "--toggle", "--pid", str(process.pid)]
            done = subprocess.run(toggle, capture_output=True, text=True, check=False)
            took_s = time.perf_counter() - began_s
            if done.returncode:
                run.figures[name] = f"refused: {done.stderr.strip()[-200:]}"
                process.kill()
                return
            run.figures[f"{name}, {way}, GB/s"] = round(size / took_s / GB, 2)
        run.figures[f"{name}, same bytes"] = holds_the_same()


SAVER = """
import json, time, torch
from torch_memory_saver import torch_memory_saver as saver
saver.hook_mode = "torch"
with saver.region(enable_cpu_backup=True):
    x = torch.arange({size} // 8, device="cuda")
before, took = int(x.sum()), []
for act in (saver.pause, saver.resume):
    torch.cuda.synchronize(); began = time.perf_counter(); act(); torch.cuda.synchronize()
    took.append(time.perf_counter() - began)
print(json.dumps([*took, int(x.sum()) == before]))
"""


def _by_memory_saver(run: Run, size: int) -> None:
    name = "torch_memory_saver"
    if importlib.util.find_spec(name) is None:
        run.figures[name] = "not installed"
        return
    code = SAVER.format(size=size)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        run.figures[name] = f"failed: {done.stderr.strip()[-200:]}"
        return
    out_s, in_s, is_same = json.loads(done.stdout.splitlines()[-1])
    for way, took_s in (("out", out_s), ("in", in_s)):
        run.figures[f"{name}, {way}, GB/s"] = round(size / took_s / GB, 2)
    run.figures[f"{name}, same bytes"] = is_same
    run.figures["torch"] = torch.__version__
