"""DistributedDataParallel as it stands, with one rank."""

import torch
import torch.distributed as dist
from torch import nn


class Train:
    def __init__(self, ctx, *, sharded=False):
        if not dist.is_initialized():
            dist.init_process_group(rank=0, world_size=1, store=dist.HashStore())
        net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
        net.to(ctx.device)
        self.net = self.sharded(net) if sharded else nn.parallel.DistributedDataParallel(net)
        self.opt = torch.optim.AdamW(self.net.parameters(), 1e-2)
        self.group = dist.new_group([0], group_desc="of my own")

    def sharded(self, net):
        from torch.distributed.fsdp import fully_shard

        for layer in (net[0], net[3]):
            fully_shard(layer)
        return fully_shard(net)

    def step(self, ctx):
        x = torch.randn(6, 8, device=ctx.device)
        loss = nn.functional.cross_entropy(self.net(x), (x.sum(1) > 0).long())
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.group)
        return {"loss": total}
