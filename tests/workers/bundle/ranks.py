"""Jobs of several ranks: an ordinary DDP job, and some that misbehave."""

import hashlib
import os
import time

import torch
import torch.distributed as dist
from torch import nn


class Train:
    """Data parallel, with dropout, a learning rate schedule and data of each rank's own."""

    def __init__(self, ctx, steps=12, pace=0.0):
        assert dist.get_world_size() == ctx.world_size
        assert dist.get_rank() == ctx.rank
        torch.manual_seed(7)
        net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4))
        self.net = nn.parallel.DistributedDataParallel(net)
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.sched = torch.optim.lr_scheduler.StepLR(self.opt, 5)
        torch.manual_seed(100 + ctx.rank)
        self.steps, self.pace = steps, pace
        self.seen = []

    def step(self, ctx):
        time.sleep(self.pace)
        self.opt.zero_grad()
        loss = self.net(torch.randn(8, 16)).square().mean()
        loss.backward()
        self.opt.step()
        self.sched.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        self.seen.append(mean.item())
        if ctx.step == self.steps:
            digest = hashlib.sha256()
            for parameter in self.net.parameters():
                digest.update(parameter.detach().numpy().tobytes())
            ctx.finish({"digest": digest.hexdigest(), "seen": self.seen})
        return {"loss": loss.item()}


class Fails(Train):
    def step(self, ctx):
        if ctx.rank == 1 and ctx.step == 3:
            raise ValueError("rank one has had enough")
        return super().step(ctx)


class LastFails(Train):
    def step(self, ctx):
        if ctx.rank == ctx.world_size - 1 and ctx.step == 3:
            raise ValueError("the last rank has had enough")
        return super().step(ctx)


class Prints(Train):
    def step(self, ctx):
        if ctx.step == 3:
            print(f"rank {ctx.rank}, step {ctx.step}")
        return super().step(ctx)


class Dies(Train):
    def step(self, ctx):
        if ctx.rank == 1 and ctx.step == 3:
            os.kill(os.getpid(), 9)
        return super().step(ctx)
