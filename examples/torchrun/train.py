"""A plain script for torchrun: DistributedDataParallel, and nothing of Roundhouse.

    torchrun --nproc-per-node 2 train.py
    roundhouse submit examples/torchrun

Both end with the same bits: with two ranks there is one order in which to add two gradients.
"""

import argparse
import gc
import hashlib
import json
import os

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

BATCH = 32  # of each rank


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    train(distributed.get_rank(), own_device(), options.steps)
    # A gloo thread that outlives the interpreter aborts it (pytorch/pytorch#179291), and the model
    # holds the group in a reference cycle.
    gc.collect()
    distributed.destroy_process_group()


def own_device():
    """Return this rank's accelerator, or the CPU where there is none."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    index = int(os.environ["LOCAL_RANK"])
    torch.accelerator.set_device_index(index)
    return torch.device(torch.accelerator.current_accelerator().type, index)


def train(rank, device, steps):
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.from_numpy(images).float() / 16, torch.from_numpy(labels)
    images, labels = images.to(device), labels.to(device)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
    model = DistributedDataParallel(net.to(device))
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    torch.manual_seed(1000 + rank)  # of the dropout, on the device
    dice = torch.Generator().manual_seed(2000 + rank)
    for step in range(1, steps + 1):
        chosen = torch.randint(len(labels), (BATCH,), generator=dice)
        loss = F.cross_entropy(model(images[chosen]), labels[chosen])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0 and step % 10 == 0:
            report(step=step, loss=loss.item())
    if rank == 0:
        print(f"loss {loss.item()!r} parameters {fingerprint(model.module)}")


def fingerprint(model):
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def report(**metrics):
    """Append metrics as lines of JSON for display; only under Roundhouse."""
    if path := os.environ.get("ROUNDHOUSE_METRICS"):
        with open(path, "a") as file:
            file.write(json.dumps(metrics) + "\n")


if __name__ == "__main__":
    main()
