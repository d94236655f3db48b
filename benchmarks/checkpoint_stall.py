"""Measure how long a checkpoint stalls a job, and how long it takes until the checkpoint is
durable.

    python -m benchmarks.checkpoint_stall [--quick]

A transformer with AdamW trains on one thread. Its parameters and optimizer state are 300 MB and 1
GB (one tenth of that with --quick). Every other step is followed by a checkpoint to the same disk,
and flushed to it. Each way of writing runs in a process of its own, in turn:

* ours captures and stages as a resident does, and another process writes chunks as a device worker
  does; the stall is the time at the safe point and the time for which the optimizer waits;
* the peers are `torch.save` and fsync; `dcp.save`; and `dcp.async_save` (threads, a stager that
  keeps its buffers), its first call and the later ones.

The figures are medians in wall time over all rounds and all checkpoints but the first of each
process. Two figures stand beside them: the CPU time of the job's own thread, which is more reliable
on a loaded machine, and by how much the next step is longer than a step without a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from benchmarks import Target, quick, report

WAYS = ("ours", "torch.save", "dcp.save", "dcp.async_save")
SIZES = {"300 MB": 300_000_000, "1 GB": 1_000_000_000}
STEP_S = 1.0  # the bound on the stall is a fraction of this
WIDTH = 512
WATCHED_S = 0.6  # seconds of forward and backward in a step, so that there is work to overlap with

JSON = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--write", type=int, help="the descriptor of a slab")
    parser.add_argument("--bytes", type=int)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--times", type=int)
    asked = parser.parse_args()
    if asked.write is not None:
        return write_for(asked.write, asked.folder)
    if asked.way:
        said = {"rows": train(asked.way, asked.bytes, asked.folder, asked.times)}
        sys.stdout.write(json.dumps(said) + "\n")
        return 0
    return compare()


# --- all ways -----------------------------------------------------------------------------------


def compare() -> int:
    rounds, times = (1, 4) if quick() else (2, 6)
    targets: list[Target] = []
    peers: JSON = {"load average at the start": round(os.getloadavg()[0], 1)}
    for name, size in SIZES.items():
        rows: dict[str, list[JSON]] = {way: [] for way in WAYS}
        firsts: dict[str, list[JSON]] = {way: [] for way in WAYS}
        for number in range(rounds):
            for way in WAYS if number % 2 == 0 else reversed(WAYS):
                first, *later = in_a_process(way, size // 10 if quick() else size, times)
                firsts[way].append(first)
                rows[way] += later
        name = f"{name} / 10" if quick() else name
        targets += compared(name, rows)
        for way in WAYS:
            peers[f"{way}, {name}"] = summed(rows[way])
            peers[f"{way}, {name}, first"] = summed(firsts[way])
    return report("checkpoint_stall", targets, peers)


def compared(name: str, rows: dict[str, list[JSON]]) -> list[Target]:
    stall_s = {way: median(rows[way], "stall_s") for way in WAYS}
    durable_s = {way: median(rows[way], "durable_s") for way in WAYS}
    best_dcp_s = min(durable_s["dcp.save"], durable_s["dcp.async_save"])
    ours = stall_s["ours"]
    figures = [
        ("stall, part of a 1 s step", 100 * ours / STEP_S, "%", "<=", 1.0),
        ("stall of torch.save to ours", stall_s["torch.save"] / ours, "times", ">=", 100),
        ("stall of dcp.async_save to ours", stall_s["dcp.async_save"] / ours, "times", ">=", 10),
        ("until durable, ours to the faster DCP", durable_s["ours"] / best_dcp_s, "times", "<=", 1),
    ]
    return [
        Target(name=f"{name}: {what}", value=round(value, 3), unit=unit, op=op, bound=bound)
        for what, value, unit, op, bound in figures
    ]


def summed(rows: list[JSON]) -> JSON:
    worst = max(row["stall_s"] for row in rows)
    return {
        "stall ms": round(1000 * median(rows, "stall_s"), 2),
        "of it CPU of the job's thread ms": round(1000 * median(rows, "cpu_s"), 2),
        "worst ms": round(1000 * worst, 2),
        "durable s": round(median(rows, "durable_s"), 3),
        "next step slower ms": round(1000 * median(rows, "slower_s"), 1),
    }


def median(rows: list[JSON], what: str) -> float:
    return float(statistics.median(row[what] for row in rows))


def in_a_process(way: str, size: int, times: int) -> list[JSON]:
    from workers.process.isolation.sandbox import ENVIRONMENT

    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        command = [*(sys.executable, "-m", "benchmarks.checkpoint_stall", "--way", way)]
        command += ["--bytes", str(size), "--folder", folder, "--times", str(times)]
        environment = {**os.environ, **ENVIRONMENT}
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, env=environment
        )
    rows: list[JSON] = json.loads(done.stdout.splitlines()[-1])["rows"]
    return rows


# --- one way ------------------------------------------------------------------------------------


class Training:
    """Trains a model with about `size` bytes of parameters and optimizer state."""

    def __init__(self, size: int) -> None:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)

        def layer() -> torch.nn.Module:
            return torch.nn.TransformerEncoderLayer(
                WIDTH, 8, 4 * WIDTH, batch_first=True, dropout=0.1
            )

        each = 3 * 4 * sum(part.numel() for part in layer().parameters())
        self.net = torch.nn.Sequential(*[layer() for _ in range(max(1, round(size / each)))])
        self.opt = torch.optim.AdamW(self.net.parameters())
        self.batch = torch.randn(1, 16, WIDTH)
        self.took_s = 0.0

    def step(self) -> None:
        """Run forward and backward for at least WATCHED_S, then the optimizer."""
        began_s = time.perf_counter()
        while True:
            self.net(self.batch).square().mean().backward()
            if time.perf_counter() - began_s >= WATCHED_S:
                break
        self.opt.step()
        self.opt.zero_grad()
        self.took_s = time.perf_counter() - began_s

    def state(self) -> JSON:
        return {"net": self.net.state_dict(), "opt": self.opt.state_dict()}


def train(way: str, size: int, folder: Path, times: int) -> list[JSON]:
    job = Training(size)
    save, waited_s = _WAYS[way](job, folder)
    for _ in range(2):
        job.step()
    rows = []
    for number in range(times):
        job.step()
        alone_s, before_s, began_s = job.took_s, waited_s(), time.perf_counter()
        cpu_s = time.thread_time()
        durable = save(number)
        blocked_s, cpu_s = time.perf_counter() - began_s, time.thread_time() - cpu_s
        job.step()
        with_it_s, stall_s = job.took_s, blocked_s + waited_s() - before_s
        durable_s = durable.result() - began_s
        rows.append(
            {
                "stall_s": stall_s,
                "cpu_s": cpu_s,
                "durable_s": durable_s,
                "slower_s": with_it_s - alone_s,
            }
        )
    return rows


Save = Callable[[int], "Future[float]"]  # returns the time at which it was durable, by perf_counter


def done_now() -> Future[float]:
    future: Future[float] = Future()
    future.set_result(time.perf_counter())
    return future


def with_torch_save(job: Training, folder: Path) -> tuple[Save, Callable[[], float]]:
    import torch

    def save(number: int) -> Future[float]:
        with (folder / f"{number}.pt").open("wb") as file:
            torch.save(job.state(), file)
            file.flush()
            os.fsync(file.fileno())
        (folder / f"{number - 1}.pt").unlink(missing_ok=True)
        return done_now()

    return save, lambda: 0.0


def with_dcp(job: Training, folder: Path) -> tuple[Save, Callable[[], float]]:
    from torch.distributed.checkpoint.state_dict_saver import save as save_state

    def save(number: int) -> Future[float]:
        save_state(job.state(), checkpoint_id=folder / str(number), no_dist=True)
        shutil.rmtree(folder / str(number - 1), ignore_errors=True)
        return done_now()

    return save, lambda: 0.0


def with_dcp_async(job: Training, folder: Path) -> tuple[Save, Callable[[], float]]:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import async_save

    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
    )

    def save(number: int) -> Future[float]:
        durable: Future[float] = Future()
        written = async_save(
            job.state(), checkpoint_id=folder / str(number), async_stager=stager, no_dist=True
        )
        assert isinstance(written, Future)
        written.add_done_callback(lambda _: durable.set_result(time.perf_counter()))
        shutil.rmtree(folder / str(number - 1), ignore_errors=True)
        return durable

    return save, lambda: 0.0


def with_ours(job: Training, folder: Path) -> tuple[Save, Callable[[], float]]:
    from workers.capture.capture import Surroundings, capture
    from workers.hardware.accelerator import Accelerator
    from workers.hardware.dirty_pages import Watch
    from workers.hardware.preset import fingerprint
    from workers.process import slab
    from workers.process.image_layout import Layout
    from workers.switching.staging import Staging

    fd = slab.made(4 << 30)
    mapped, around, cpu = slab.Slab(fd), Surroundings(), Accelerator("cpu")
    staging = Staging(mapped, Watch(), cpu)
    worker = subprocess.Popen(
        [
            *(sys.executable, "-m", "benchmarks.checkpoint_stall"),
            *("--write", str(fd), "--folder", str(folder)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[fd],
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdout.readline()
    said, heard = worker.stdin, worker.stdout

    def save(number: int) -> Future[float]:
        durable: Future[float] = Future()
        captured = capture(job, around=around, accelerator=cpu)

        def staged(layout: Layout) -> None:
            index = {
                "layout": layout.as_json(),
                "fingerprint": fingerprint(cpu),
                "tensors": captured.tensors,
            }
            said.write(f"{number} {slab.write_index(fd, index)}\n")
            said.flush()
            heard.readline()
            durable.set_result(time.perf_counter())

        staging.begin(captured, staged)
        return durable

    return save, lambda: staging.waited_s


def write_for(fd: int, folder: Path) -> int:
    """Act as the device worker: write the slab's image to the store whenever a line says so."""
    from app.core.model.descriptor import RunSpec, TaskDescriptor
    from app.core.model.protocol.messages import Launch
    from app.storage.store import Store
    from workers.device import store_io
    from workers.transfer.checkpoint import Known
    from workers.transfer.host_context import House

    house = House(device="h.0", island="i", store=Store.at(folder / "store"), run=folder / "run")
    known = Known()
    spec = TaskDescriptor(name="t", type="default", run=RunSpec(kind="job"))
    nothing: JSON = {"bundle": "", "inputs": {}, "preset": {}, "images": [], "budget_us": 0}
    launch = Launch(task="t", epoch=1, seq=1, tenant="t", spec=spec, **nothing)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        step, size = map(int, line.split())
        written = store_io.keep(fd, size, launch, step, known=known, house=house)
        sys.stdout.write(f"{written.new_bytes}\n")
        sys.stdout.flush()
    return 0


_WAYS: dict[str, Callable[[Training, Path], tuple[Save, Callable[[], float]]]] = {
    "ours": with_ours,
    "torch.save": with_torch_save,
    "dcp.save": with_dcp,
    "dcp.async_save": with_dcp_async,
}


if __name__ == "__main__":
    sys.exit(main())
