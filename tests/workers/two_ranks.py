"""Two ranks, each a process of its own, whose jobs are captured and put back in new processes.

    python -m tests.workers.two_ranks FOLDER sharded|replicated

Six steps undisturbed, and three with three more in new processes; prints the losses of each rank,
[[whole, begun, rest], ...].  The default group is made before a job comes back, as it will be in a
resident; the job's own group is made again with it.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.workers.journeys import block_of, bytes_of
from workers.capture.capture import Surroundings, capture
from workers.capture.restore import rebuilt, return_to
from workers.hardware.accelerator import Accelerator

CPU = Accelerator("cpu")


class Job:
    def __init__(self, rank: int, kind: str) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 2))
        if kind == "sharded":
            self.net: Any = fully_shard(net)
        else:
            self.net = nn.parallel.DistributedDataParallel(net)
        self.opt = torch.optim.AdamW(self.net.parameters(), 1e-2)
        self.group = dist.new_group([0, 1])
        torch.manual_seed(rank)

    def step(self) -> float:
        loss = self.net(torch.randn(4, 8)).square().mean()
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total.item()


def rank(
    folder: str, number: int, kind: str, steps: int, before: str, after: str
) -> tuple[list[float], Job]:
    """Return the losses of some steps, from the image `before`, if any, into the image `after`, if
    any.  The job comes with them, and must live until the process ends: where its last reference
    is dropped, torch 2.13 joins the thread of its group with Python's lock held, and that thread
    may be waiting for the lock.
    """
    store = dist.FileStore(f"{folder}/store-{before}-{after}", 2)  # each run has its own
    wait = timedelta(seconds=120)
    dist.init_process_group("gloo", timeout=wait, rank=number, world_size=2, store=store)
    if before:
        graph, blocks = pickle.loads(Path(folder, f"{before}-{number}").read_bytes())
        storages = [block_of(block) for block in blocks]
        world = rebuilt(memoryview(graph), storages, around=Surroundings())
        return_to(world, CPU)
        job = world["job"]
    else:
        job = Job(number, kind)
    losses = [job.step() for _ in range(steps)]
    if after:
        found = capture(job, around=Surroundings(), accelerator=CPU)
        image = (bytes(found.graph), [bytes_of(storage) for storage in found.storages])
        Path(folder, f"{after}-{number}").write_bytes(pickle.dumps(image))
    dist.barrier()
    dist.destroy_process_group()
    return losses, job


def run(folder: str, kind: str, steps: int, before: str = "", after: str = "") -> list[list[float]]:
    """Both ranks, forked from this process, which has imported torch and made no group."""
    told = [Path(folder, f"losses-{before}-{after}-{number}") for number in range(2)]
    pids = []
    for number in range(2):
        if not (pid := os.fork()):
            status = 1
            try:
                losses, _job = rank(folder, number, kind, steps, before, after)
                told[number].write_text(json.dumps(losses))
                status = 0
            finally:
                os._exit(status)  # with the job alive
        pids.append(pid)
    for pid in pids:
        if os.waitpid(pid, 0)[1]:
            raise RuntimeError(f"a rank failed: {folder}, {kind}")
    return [json.loads(path.read_text()) for path in told]


def main(folder: str, kind: str) -> None:
    torch.set_num_threads(1)
    runs = (
        run(folder, kind, 6),
        run(folder, kind, 3, after="middle"),
        run(folder, kind, 3, before="middle"),
    )
    sys.stdout.write(json.dumps(list(zip(*runs, strict=True))) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
