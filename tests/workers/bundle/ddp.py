"""A script for torchrun that knows nothing of Roundhouse: plain DDP, its checkpoint by rank 0."""

import argparse
import hashlib
import json
import os
import time

import torch
import torch.distributed as dist
from torch import nn

CHECKPOINT = "checkpoint.pt"


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--pace", type=float, default=0.0)
    options.add_argument("--backend", default="gloo")
    options.add_argument("--kind", default="cpu")
    options = options.parse_args()

    dist.init_process_group(options.backend or None)
    rank, world = dist.get_rank(), dist.get_world_size()
    assert (rank, world) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    device = torch.device("cpu")
    if options.kind != "cpu":
        device = torch.device(options.kind, int(os.environ["LOCAL_RANK"]))
        module = torch.get_device_module(device)
        module.set_device(device)
        print(f"rank {rank} of {world} on {module.get_device_name()}\n", end="")
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    model.to(device)
    net = nn.parallel.DistributedDataParallel(model)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    step = 0
    if os.path.exists(CHECKPOINT):
        state = torch.load(CHECKPOINT, map_location=device)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        step = state["step"]
    if rank == 0:
        print(f"begins after {step} restarts {os.environ['ROUNDHOUSE_RESTARTS']}")
    while step < options.steps:
        step += 1
        torch.manual_seed(1000 * step + rank)
        time.sleep(options.pace)
        opt.zero_grad()
        net(torch.randn(8, 16).to(device)).square().mean().backward()
        opt.step()
        if rank == 0:
            save({"model": model.state_dict(), "opt": opt.state_dict(), "step": step})
        with open(os.environ["ROUNDHOUSE_METRICS"], "a") as file:
            file.write(json.dumps({"step": step}) + "\n")
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    digests = [None] * world
    dist.all_gather_object(digests, digest.hexdigest())
    assert len(set(digests)) == 1
    if rank == 0:
        print("parameters", digests[0])
        with open("result.txt", "w") as file:
            file.write(digests[0])
    dist.destroy_process_group()


def save(state):
    torch.save(state, f"{CHECKPOINT}.new")
    os.replace(f"{CHECKPOINT}.new", CHECKPOINT)


main()
