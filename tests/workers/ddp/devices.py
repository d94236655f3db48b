"""The jobs of `jobs.py` on the device of their rank: all that they make lies there by default."""

from __future__ import annotations

import jobs
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def _on_its_device(job):
    class OnItsDevice(job):
        def __init__(self, ctx, **params):
            torch.set_default_device(ctx.device)
            super().__init__(ctx, **params)

    return OnItsDevice


Mlp = _on_its_device(jobs.Mlp)
Conv = _on_its_device(jobs.Conv)
Accumulating = _on_its_device(jobs.Accumulating)
Joined = _on_its_device(jobs.Joined)
Sharded = _on_its_device(jobs.Sharded)
ByHand = _on_its_device(jobs.ByHand)
TwoPasses = _on_its_device(jobs.TwoPasses)


class Wide:
    """A state of 80 MiB, with gradients and their bucket; the data of a step is small."""

    def __init__(self, ctx):
        torch.set_default_device(ctx.device)
        torch.manual_seed(1)
        net = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
        self.net = DistributedDataParallel(net)
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=0.01)

    def step(self, ctx):
        loss = self.net(torch.ones(2, 1024) * ctx.rank).square().mean()
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        return {"loss": loss.item()}


class DrawsOnTheDevice(jobs.Mlp):
    """A model on the host; its optimizer draws numbers on the device."""

    def __init__(self, ctx):
        super().__init__(ctx)

        class Noisy(torch.optim.SGD):
            def step(self, closure=None):
                super().step(closure)
                for group in self.param_groups:
                    for p in group["params"]:
                        p.data.add_(torch.randn(p.shape, device=ctx.device).cpu() * 1e-3)

        torch.randn(1, device=ctx.device)
        self.opt = Noisy(self.net.parameters(), lr=0.01)


def numbers_by_hand(ctx):
    """Collectives on tensors of the device, blocking and not."""
    mine = torch.arange(5.0, device=ctx.device) + ctx.rank
    total = mine.clone()
    dist.all_reduce(total)
    rows = [torch.empty_like(mine) for _ in range(ctx.world_size)]
    work = dist.all_gather(rows, mine * 2, async_op=True)
    part = torch.empty(2, device=ctx.device)
    dist.reduce_scatter_tensor(part, torch.arange(2.0 * ctx.world_size, device=ctx.device))
    work.wait()
    word = [f"rank {ctx.rank}"]
    dist.broadcast_object_list(word, src=1)
    assert {one.device for one in (total, *rows, part)} == {ctx.device}
    return [total.tolist(), [row.tolist() for row in rows], part.tolist(), word]
