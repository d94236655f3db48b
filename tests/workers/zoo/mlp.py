"""A plain network with dropout, momentum, and a log that it writes into its working folder."""

import random

import numpy as np
import torch
from torch import nn


class Train:
    def __init__(self, ctx):
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4))
        self.net.to(ctx.device)
        self.opt = torch.optim.SGD(self.net.parameters(), 0.05, momentum=0.9)
        self.table = torch.randn(64, 8, device=ctx.device)
        self.order = iter(range(0, 10_000, 3))
        self.log = open("losses.txt", "a")  # noqa: SIM115

    def step(self, ctx):
        rows = [(next(self.order) + random.randrange(64)) % 64 for _ in range(16)]
        rows = torch.tensor(rows, device=ctx.device)
        x = self.table[rows] + 0.1 * float(np.random.rand())
        loss = nn.functional.cross_entropy(self.net(x), rows % 4)
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        self.log.write(f"{ctx.step} {loss.item()}\n")
        return {"loss": loss.item(), "written": self.log.tell()}
