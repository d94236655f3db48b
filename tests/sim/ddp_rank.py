"""Trains one rank of a data-parallel model: `python -m tests.sim.ddp_rank RANK STORE cpu|sim`.

Collectives of a simulated accelerator go through host memory and gloo.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.sim import through_host


def main(rank: int, path: str, kind: str) -> None:
    device = torch.device(kind, rank) if kind != "cpu" else torch.device("cpu")
    torch.set_num_threads(1)
    through_host.register(kind)
    store = dist.FileStore(path, 2)
    dist.init_process_group(through_host.NAME, store=store, rank=rank, world_size=2)
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
    print(json.dumps(digest.hexdigest()), flush=True)  # noqa: T201
    # A gloo thread that outlives the interpreter aborts it (pytorch/pytorch#179291), and the model
    # holds the group in a reference cycle.
    del parallel, stepper
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
