"""Trains a data-parallel model of two ranks on each kind: `python -m tests.sim.ddp_ranks FOLDER`.

Collectives of a simulated accelerator go through host memory and gloo.  Each rank is a fork of this
process, which has imported what ranks need and used no device.
"""

from __future__ import annotations

import gc
import hashlib
import json
import multiprocessing
import sys
from pathlib import Path

import torch
import torch._dynamo  # else each rank imports it for DistributedDataParallel
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.sim import through_host

RANKS = 2


def train(rank: int, path: Path, kind: str) -> None:
    device = torch.device(kind, rank) if kind != "cpu" else torch.device("cpu")
    torch.set_num_threads(1)
    through_host.register(kind)
    store = dist.FileStore(str(path), RANKS)
    dist.init_process_group(through_host.NAME, store=store, rank=rank, world_size=RANKS)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 4)).to(device)
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.01)
    stepper = torch.optim.SGD(parallel.parameters(), lr=0.1)
    numbers = torch.Generator().manual_seed(rank)
    for _ in range(3):
        stepper.zero_grad()
        batch = torch.randn(8, 16, generator=numbers).to(device)
        parallel(batch).square().mean().backward()
        stepper.step()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    path.with_suffix(f".{rank}").write_text(digest.hexdigest())
    # A gloo thread that outlives the interpreter aborts it (pytorch/pytorch#179291), and the model
    # holds the group in a reference cycle.
    del parallel, stepper
    gc.collect()
    dist.destroy_process_group()


def main(folder: Path) -> None:
    """Print the digest of each rank's parameters, by kind."""
    digests = {}
    forks = multiprocessing.get_context("fork")
    for kind in ("sim", "cpu"):
        path = folder / kind
        ranks = [forks.Process(target=train, args=(rank, path, kind)) for rank in range(RANKS)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert [rank.exitcode for rank in ranks] == [0] * RANKS
        digests[kind] = [path.with_suffix(f".{rank}").read_text() for rank in range(RANKS)]
    print(json.dumps(digests))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
