"""Steps with ranks, commands and other programs of the host."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from app.core.model.protocol.messages import CheckpointRef, Finished, Paused, Saved, Started
from benchmarks import context_switch
from tests.gpu.devices import GB, MB, holding
from tests.gpu.jobs import LENIENT, START_S, rig_of
from tests.gpu.step import CannotRun, Run
from tests.workers.conftest import ROOT, bundled
from tests.workers.criu import prefixes
from tests.workers.gangs import Gangs, bits
from workers.criu import program
from workers.hardware.accelerator import Accelerator
from workers.hardware.cuda_checkpoint import TreeMemory


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


@contextmanager
def _criu() -> Iterator[str]:
    """Yield the prefix of a CRIU that works here, even if root lacks CAP_SYS_RESOURCE."""
    if (prefix := os.environ.get("ROUNDHOUSE_CRIU", "")) or prefixes.may_read_limits():
        yield prefix
        return
    with tempfile.TemporaryDirectory(prefix="gpu-criu-") as folder:
        try:
            made = prefixes.with_limits_from_proc(program.PREFIX, Path(folder) / "prefix")
        except (pytest.skip.Exception, OSError) as error:
            raise CannotRun(f"processes cannot be stored here: {error}") from error
        yield str(made)


TRAINING = """
import sys, time, torch
torch.manual_seed(3)
kind, steps = sys.argv[1], int(sys.argv[2])
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Dropout(0.1)).to(kind)
optimizer = torch.optim.AdamW(model.parameters())
ballast = torch.arange(2**25, device=kind)
batches = (torch.randn(64, 512, device=kind) for _ in range(steps))  # a generator, on its way
for step, batch in enumerate(batches):
    loss = model(batch).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    ballast.add_(1)
    print(step, loss.item().hex(), flush=True)
    time.sleep(0.05)
print("sum", int(ballast.sum()), model[0].weight.double().sum().item().hex())
"""


def move(run: Run) -> None:
    """Let a script go on twice from the image of a pause, and once from one made while it ran.

    Each time its processes are killed first, and go on in another sandbox with another user.
    """
    run.only_on_cuda("images of processes with device memory")
    if not TreeMemory.found(run.kind).can_leave:
        raise CannotRun("the driver has no checkpoint API, or does not permit its use here")
    words = ["script.py", run.kind, "150"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "script.py").write_text(TRAINING)
        alone = subprocess.run(
            [sys.executable, *words], cwd=folder, capture_output=True, text=True, check=True
        )
    how: Any = {"preset": LENIENT, "memory_bytes": 4096 * MB}
    more: Any = {"host_memory_bytes": 16 * GB, "can_checkpoint": True}
    with _criu() as prefix, rig_of(run, criu=prefix, **more) as rig:
        images = rig.supervisor.images
        if images.mover is None:
            raise CannotRun(f"processes cannot be stored here: {images.missing}")
        how["bundle"], _ = rig.store.put([bundled({"script.py": TRAINING})])
        begun, printed, kept = [], list[str](), list[CheckpointRef]()
        for epoch in range(1, 5):
            runs: Any = {"checkpoint_every_s": 0.5} if epoch == 3 else {}
            rig.launch("m1", ["python", *words], epoch, images=kept, **runs, **how)
            started = rig.event(Started, "m1", epoch, timeout_s=START_S)
            begun.append(f"{started.resumed} ({started.switch_us / 1e6:.2f} s)")
            if epoch == 4:
                rig.event(Finished, "m1", epoch, timeout_s=START_S)
                printed += rig.printed("m1", epoch)
                break
            rig.until(lambda epoch=epoch: len(rig.printed("m1", epoch)) > 10, timeout_s=START_S)
            if epoch < 3:
                began_s = time.monotonic()
                kept = rig.paused_and_saved("m1", epoch)
                run.figures[f"paused and stored, {epoch}, s"] = round(time.monotonic() - began_s, 2)
            else:
                rig.until(lambda: rig.all(Saved, "m1", 3), timeout_s=START_S)
            saved = rig.all(Saved, "m1", epoch)[-1]
            run.must(saved.has_processes, f"its processes are in no image: {saved.bound_because}")
            run.figures[f"image, {epoch}, MB"] = saved.size_bytes // MB
            (held,) = rig.supervisor.stays.residents.values()
            os.kill(held.pid, signal.SIGKILL)
            rig.until(lambda epoch=epoch: rig.view("m1", epoch) is None)
            kept = [rig.image(rig.all(Saved, "m1", epoch)[-1])]
            printed += rig.printed("m1", epoch) if epoch < 3 else []
    expected = alone.stdout.splitlines()
    ended = [line for line in printed if not line.startswith("Roundhouse: ")]
    is_same = ended[-1:] == expected[-1:]
    run.figures |= {"each time it began": ", ".join(begun), "same bits": is_same}
    run.must(is_same, f"it ends with {ended[-1:]}, not {expected[-1:]}")
    twice = len(ended) != len(set(ended))
    run.must({*ended} <= {*expected} and not twice, f"other lines than undisturbed: {printed[-5:]}")


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
