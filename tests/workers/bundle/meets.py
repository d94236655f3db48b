"""Ranks that each ask for another backend, meet twice, and end as the word they are given says."""

import os
import sys

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
for backend in (["gloo"], ["nccl"], [])[rank], ["gloo"]:
    dist.init_process_group(*backend)
    total = torch.tensor([1.0 + rank])
    dist.all_reduce(total)
    if sys.argv[1] == "well":
        print(f"{dist.get_backend()} {rank} {total.item()}\n", end="")
        dist.destroy_process_group()
    elif rank == 1:
        if sys.argv[1] == "raise":
            raise ValueError("rank one has had enough")
        os.kill(os.getpid(), 9)
    else:
        dist.barrier()
