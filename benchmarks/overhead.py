"""Measure what it costs a job to run under Roundhouse when nothing happens.

    python -m benchmarks.overhead [--quick]

One process runs the same job in two ways in turn. One block of steps runs as in a resident
(`stages`: safe points with the wire to a supervisor, the trust deadline, metrics, reports, the hook
before an optimizer steps). The other block has bare calls of `step`. The figure is how much more
CPU time of its thread the first block took, as the median over all pairs of blocks. Pairs alternate
in order.

Three figures stand beside it: the same in microseconds of a step; the time of a turn of a job that
does nothing, which hardly depends on other load; and the whole step with the memory settings that
residents get (`sandbox.ENVIRONMENT`), compared with glibc's defaults.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import Target, quick, report

BOUND = 0.5  # per cent
BLOCK_S = 0.2  # of CPU time, about
TURNS = 2000
FOREVER_US = 1 << 60


def main() -> int:
    if "--alone" in sys.argv:
        sys.stdout.write(f"{bare_step_s()}\n")
        return 0
    if "--here" in sys.argv:
        sys.stdout.write(json.dumps(compare()) + "\n")
        return 0
    found = in_a_process("--here", residents=True)
    with_ours_s, with_glibc_s = both_memories()
    percent, step_us = found["percent"], found["step_us"]
    targets = [
        Target(
            name="a job under Roundhouse to the same loop alone, CPU time",
            value=round(percent, 3),
            unit="%",
            op="<=",
            bound=BOUND,
        )
    ]
    peers = {
        "a bare step, us": round(step_us),
        "more for each step, us": round(step_us * percent / 100, 1),
        "quarter of the pairs below, above, %": found["quarters"],
        "pairs of blocks": found["pairs"],
        "all that we do between two steps, of a job that does nothing, us": round(
            found["turn_us"], 1
        ),
        "a bare step with residents' memory settings, ms": round(1000 * with_ours_s, 2),
        "a bare step with glibc's own, ms": round(1000 * with_glibc_s, 2),
        "load average": round(os.getloadavg()[0], 1),
    }
    return report("overhead", targets, peers)


def in_a_process(what: str, *, residents: bool) -> Any:
    from workers.process.isolation.sandbox import ENVIRONMENT

    more = dict(ENVIRONMENT)
    if not residents:
        del more["GLIBC_TUNABLES"]
    arguments = [sys.executable, "-m", "benchmarks.overhead", what]
    arguments += ["--quick"] if quick() else []
    done = subprocess.run(
        arguments, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **more}
    )
    return json.loads(done.stdout.splitlines()[-1])


def both_memories() -> tuple[float, float]:
    times = 1 if quick() else 3
    pairs = [
        (in_a_process("--alone", residents=True), in_a_process("--alone", residents=False))
        for _ in range(times)
    ]
    ours, theirs = zip(*pairs, strict=True)
    return statistics.median(ours), statistics.median(theirs)


# --- in a process of its own --------------------------------------------------------------------


class Job:
    """Makes steps of about ten milliseconds."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        layers = [
            torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True) for _ in range(2)
        ]
        self.net = torch.nn.Sequential(*layers)
        self.opt = torch.optim.AdamW(self.net.parameters())
        self.batch = torch.randn(8, 32, 256)

    def step(self, ctx: Any) -> dict[str, float]:
        loss = self.net(self.batch).square().mean()
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        return {"loss": loss.item()}


class Nothing:
    """Does nothing, so that only the cost of Roundhouse is left."""

    def step(self, ctx: Any) -> None:
        pass


def bare_step_s() -> float:
    job = Job()
    for _ in range(5):
        job.step(None)
    return statistics.median(cpu_s(lambda: job.step(None), 10) / 10 for _ in range(9))


def compare() -> dict[str, Any]:
    from torch.optim import optimizer

    work = resident(Job())
    from workers.residents import stages

    hooks = optimizer._global_optimizer_pre_hooks
    ours = dict(hooks)

    def under() -> None:
        stages.one_step(work)

    def alone() -> None:
        work.job.step(work.ctx)

    def block(step: Callable[[], None]) -> float:
        hooks.clear()
        if step is under:
            hooks.update(ours)
        return cpu_s(step, steps)

    steps = 5
    steps = max(5, round(5 * BLOCK_S / max(block(alone), block(under))))
    pairs = 20 if quick() else 150
    more, bare = [], []
    for number in range(pairs):
        if number % 2:
            alone_s, under_s = block(alone), block(under)
        else:
            under_s, alone_s = block(under), block(alone)
        more.append(100 * (under_s / alone_s - 1))
        bare.append(alone_s / steps)
    work.job = Nothing()
    idle_s = statistics.median(cpu_s(under, TURNS) / TURNS for _ in range(9))
    low, middle, high = statistics.quantiles(more, n=4)
    return {
        "percent": middle,
        "quarters": [round(low, 3), round(high, 3)],
        "step_us": 1e6 * statistics.median(bare),
        "pairs": pairs,
        "turn_us": 1e6 * idle_s,
    }


def cpu_s(step: Callable[[], object], times: int) -> float:
    began_s = time.thread_time()
    for _ in range(times):
        step()
    return time.thread_time() - began_s


def resident(job: Job | None, kind: str = "job", *, world_size: int = 1, rank: int = 0) -> Any:
    """Return a resident on its slot, where a job has made its first steps; its supervisor only
    reads.

    Its task is of this `kind`, and it makes no checkpoints.
    """
    from app.core.model.descriptor import RunSpec, TaskDescriptor
    from workers.capture.capture import Surroundings
    from workers.hardware.accelerator import Accelerator
    from workers.hardware.dirty_pages import Watch
    from workers.process import slab
    from workers.process.slab import Slab
    from workers.process.task_start import TaskStart
    from workers.process.wire import Trust, TrustSeen, Wire
    from workers.residents import stages
    from workers.residents.context import Context
    from workers.residents.images import Images
    from workers.residents.outputs import Outgoing
    from workers.residents.work import Work

    ours, theirs = socket.socketpair()
    subprocess.Popen(["cat"], stdin=theirs.fileno(), stdout=subprocess.DEVNULL)  # ends when we do
    theirs.close()
    trust = Trust()
    trust.extend(FOREVER_US)
    bulk, _ = socket.socketpair()
    held = Slab(slab.made(1 << 30))
    work = Work(
        wire=Wire(ours), bulk=bulk, trust=TrustSeen(os.dup(trust.fd)), slab=held, watch=Watch()
    )
    accelerator = Accelerator("cpu")
    run = RunSpec(kind=kind)
    work.start = TaskStart(
        task="t",
        kind="cpu",
        inputs={},
        preset={},
        code="",
        scratch="",
        spec=TaskDescriptor(name="t", type="default", run=run, world_size=world_size),
        lease_margin_s=1.0,
        patience_s=1.0,
    ).as_rank(rank)
    work.ctx = Context(device=accelerator.device, rank=0, world_size=1, params={})
    work.around, work.accelerator, work.job = Surroundings(), accelerator, job
    work.outgoing, work.images = Outgoing(work), Images(work)
    for _ in range(5 if job is not None else 0):
        stages.one_step(work)
    return work


if __name__ == "__main__":
    sys.exit(main())
