"""Tenants' code: ordinary data-parallel training that imports nothing of ours."""

from __future__ import annotations

import os
import random
import signal
import time
from datetime import timedelta

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Mlp:
    """The smallest of them: two layers and AdamW."""

    def __init__(self, ctx, *, width=64, bucket_mb=25.0, optimizer="AdamW", spoil=None):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(32, width), nn.Tanh(), nn.Linear(width, 8))
        self.net = DistributedDataParallel(net, bucket_cap_mb=bucket_mb)
        self.opt = getattr(torch.optim, optimizer)(self.net.parameters(), lr=0.01)
        self.spoil = spoil or {}
        torch.manual_seed(100 + ctx.rank)

    def step(self, ctx):
        data = torch.randn(16, 32)
        loss = self.net(data).square().mean() + self.net(data).sin().mean()
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        if self.spoil.get("step") == ctx.step and self.spoil.get("rank") == ctx.rank:
            with torch.no_grad():
                next(iter(self.net.parameters())).view(-1)[self.spoil.get("at", 0)] += 1e-7
        return {"loss": loss.item()}


class Transformer:
    """Dropout, gradient clipping, a schedule, and numbers of torch, numpy and Python per rank."""

    def __init__(self, ctx):
        torch.manual_seed(1)
        self.words, self.out = nn.Embedding(50, 32), nn.Linear(32, 50)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        net = nn.Sequential(self.words, nn.TransformerEncoder(layer, 2), self.out)
        self.net = DistributedDataParallel(net, bucket_cap_mb=0.02)
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        self.plan = torch.optim.lr_scheduler.LambdaLR(self.opt, lambda step: 1 / (1 + step))
        for seeded in (torch.manual_seed, numpy.random.seed, random.seed):
            seeded(100 + ctx.rank)

    def step(self, ctx):
        length = 4 + random.randrange(4)
        tokens = torch.from_numpy(numpy.random.randint(0, 50, (4, length + 1)))
        out = self.net(tokens[:, :-1])
        loss = nn.functional.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        self.opt.step()
        self.opt.zero_grad()
        self.plan.step()
        return {"loss": loss.item()}


class Conv:
    """Batch norm (whose running statistics differ per rank) and accumulation over two batches."""

    def __init__(self, ctx):
        torch.manual_seed(1)
        net = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)
        )
        net = net.to(memory_format=torch.channels_last)
        self.net = DistributedDataParallel(net, gradient_as_bucket_view=True)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        torch.manual_seed(100 + ctx.rank)

    def step(self, ctx):
        self.opt.zero_grad()
        with self.net.no_sync():
            self._loss().backward()
        loss = self._loss()
        loss.backward()
        self.opt.step()
        return {"loss": loss.item()}

    def _loss(self):
        return self.net(torch.randn(4, 1, 8, 8)).square().mean()


class Counting(torch.optim.SGD):
    """An optimizer that counts in Python: its step is more than its tensors."""

    counted = 0

    def step(self, closure=None):
        self.counted += 1
        for group in self.param_groups:
            group["lr"] = 0.01 / self.counted
        return super().step(closure)


class Noisy(torch.optim.SGD):
    """Each rank would draw the same noise, but each has to draw it."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(torch.randn_like(p) * 1e-3)


class OwnOptimizer(Mlp):
    """Optimizers that cannot be squashed, and uses of them that end it."""

    def __init__(self, ctx, *, kind):
        super().__init__(ctx)
        self.kind = kind
        parameters = list(self.net.parameters())
        if kind in ("Counting", "Noisy"):
            self.opt = globals()[kind](parameters, lr=0.01)
        if kind == "LBFGS":
            self.opt = torch.optim.LBFGS(parameters, lr=0.1, max_iter=2)
        if kind == "same noise":
            torch.manual_seed(7)

    def step(self, ctx):
        if self.kind == "LBFGS":
            data = torch.randn(16, 32)

            def closure():
                self.opt.zero_grad()
                loss = self.net(data).square().mean()
                loss.backward()
                return loss

            return {"loss": self.opt.step(closure).item()}
        if self.kind == "other rate" and ctx.step >= 6:
            self.opt.param_groups[0]["lr"] = 0.01 * (1 + ctx.rank)
        told = super().step(ctx)
        if self.kind == "decay by hand":
            with torch.no_grad():
                for p in self.net.parameters():
                    p.mul_(0.999)
        if self.kind == "state by hand" and ctx.step == 6 and ctx.rank == 0:
            self.opt.state[next(self.net.parameters())]["exp_avg"].mul_(1.5)
        return told


class TwoOptimizers(Mlp):
    """Only rank 0 steps the second one now and then: the common step of the others never comes."""

    def __init__(self, ctx):
        super().__init__(ctx)
        torch.manual_seed(3)
        self.extra = nn.Linear(4, 4)
        self.second = torch.optim.Adam(self.extra.parameters(), lr=0.01)
        torch.manual_seed(100 + ctx.rank)

    def step(self, ctx):
        told = super().step(ctx)
        if ctx.step < 6 or ctx.rank == 0:
            self.extra(torch.ones(2, 4)).sum().backward()
            self.second.step()
            self.second.zero_grad()
        return told


# --- faults ---


def mismatched(ctx):
    if ctx.rank == 1:
        dist.broadcast(torch.zeros(3), src=0)
    else:
        dist.all_reduce(torch.zeros(4))


def other_shapes(ctx):
    dist.all_reduce(torch.zeros(4 + ctx.rank))


def cross_waiting(ctx):
    """Each waits for a message that the next one would send afterwards."""
    dist.recv(torch.zeros(1), src=(ctx.rank + 1) % ctx.world_size)
    dist.send(torch.zeros(1), dst=(ctx.rank - 1) % ctx.world_size)


def one_leaves(ctx):
    if ctx.rank != 2:
        dist.all_reduce(torch.zeros(2))
    return "left"


def one_is_killed(ctx):
    dist.barrier()
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(2))


def key_that_nobody_sets(ctx):
    dist.distributed_c10d._get_default_store().get(f"never {ctx.rank}")


def one_raises(ctx):
    if ctx.rank == 1:
        raise ValueError("the tenant's own mistake")
    dist.barrier()


def one_is_late(ctx):
    """Rank 1 sleeps longer than the others wait."""
    if ctx.rank == 1:
        time.sleep(4)
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=0.3))
    except RuntimeError as error:
        return str(error)
    return "all came"


def sizes_differ(ctx):
    n = ctx.world_size
    rows = [torch.zeros(2) for _ in range(n)]
    dist.all_gather(rows, torch.zeros(2 + (ctx.rank == 1)))


def unsupported(ctx):
    told = []
    sparse = torch.sparse_coo_tensor([[0]], [1.0], (3,))
    calls = [
        lambda: dist.all_reduce(sparse),
        lambda: dist.all_reduce(torch.ones(2), op=dist._make_nccl_premul_sum(2.0)),
        lambda: dist.group.WORLD.split_group([0]),
    ]
    for call in calls:
        try:
            call()
        except NotImplementedError as error:
            told.append(str(error))
    return told


def order(ctx):
    """Sums that show in which order they were made."""
    given = [1e8, 1.0, -1e8, 1.0, 3.0]
    tensor = torch.tensor([given[ctx.rank]])
    dist.all_reduce(tensor)
    return tensor.item()


def watches_its_handle(ctx):
    tensor = torch.tensor([float(ctx.rank)])
    work = dist.all_reduce(tensor, async_op=True)
    completed = work.is_completed()
    before = tensor.tolist()
    work.wait()
    return {"completed at once": completed, "before": before, "after": tensor.tolist()}


class Alone:
    """Ranks that need nothing of each other."""

    def __init__(self, ctx):
        self.total = torch.zeros(1)
        dist.barrier()

    def step(self, ctx):
        self.total += ctx.rank
        return {"total": self.total.item()}


class Views(Mlp):
    """Tensors of its own and views of parameters: they must stay what they are."""

    def __init__(self, ctx, *, view_at=0, spoil=None):
        super().__init__(ctx, spoil=spoil)
        self.own = torch.full((2**15,), float(ctx.rank))
        self.view = self.own[5:10]
        self.weight = next(self.net.parameters())
        self.view_at = view_at
        self.row = None if view_at else self.weight.data[3]

    def step(self, ctx):
        told = super().step(ctx)
        self.view += 1
        assert self.weight is next(self.net.parameters())
        if ctx.step == self.view_at:
            self.row = self.weight.data[3]
        assert self.row is None or torch.equal(self.row, self.weight[3])
        assert self.own[5].item() == ctx.rank + ctx.step
        return told | {"own": self.own.sum().item()}


def waits_outside(ctx, *, folder):
    """Rank 0 waits for rank 1 in something that only the operating system knows."""
    pipe = os.path.join(folder, "pipe")
    if ctx.rank == 0:
        os.mkfifo(pipe)
    dist.barrier()
    if ctx.rank == 0:
        with open(pipe) as file:
            said = file.read()
    else:
        said = "hello"
        with open(pipe, "w") as file:
            file.write(said)
    total = torch.ones(1)
    dist.all_reduce(total)
    return [said, total.item()]
