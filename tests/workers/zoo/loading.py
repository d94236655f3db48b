"""Several processes load and augment at random, a fresh epoch begins when one ends."""

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, index):
        rng = torch.Generator().manual_seed(index)
        x = torch.randn(6, generator=rng) + 0.1 * torch.randn(6) + 0.1 * float(np.random.rand())
        return (x.flip(0) if random.random() < 0.5 else x), index % 3


class Train:
    def __init__(self, ctx):
        self.net = nn.Linear(6, 3).to(ctx.device)
        self.opt = torch.optim.SGD(self.net.parameters(), 0.1)
        self.loader = DataLoader(Noisy(), 8, shuffle=True, num_workers=2, drop_last=True)
        self.batches = iter(self.loader)

    def step(self, ctx):
        try:
            x, y = next(self.batches)
        except StopIteration:
            self.batches = iter(self.loader)
            x, y = next(self.batches)
        x, y = x.to(ctx.device), y.to(ctx.device)
        loss = nn.functional.cross_entropy(self.net(x), y)
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        return {"loss": loss, "x": x.sum()}
