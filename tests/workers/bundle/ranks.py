"""Jobs of several ranks: an ordinary DDP job, and some that misbehave."""

import hashlib
import os
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Train:
    """Data parallel, with dropout, a learning rate schedule and data of each rank's own.

    If it `waits`, it steps on with its result, which it gives once there is a file `end`.
    """

    inputs = 16

    def __init__(self, ctx, steps=12, pace=0.0, waits=False):
        assert dist.get_world_size() == ctx.world_size
        assert dist.get_rank() == ctx.rank
        torch.manual_seed(7)
        net = self.layers()
        self.net = self.parallel(net.to(ctx.device))
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.sched = torch.optim.lr_scheduler.StepLR(self.opt, 5)
        torch.manual_seed(100 + ctx.rank)
        self.steps, self.pace, self.waits = steps, pace, waits
        self.seen, self.result = [], None

    def layers(self):
        return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4))

    def parallel(self, net):
        return nn.parallel.DistributedDataParallel(net)

    def step(self, ctx):
        time.sleep(self.pace)
        self.opt.zero_grad()
        loss = self.net(torch.randn(8, self.inputs, device=ctx.device)).square().mean()
        loss.backward()
        self.opt.step()
        self.sched.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        self.seen.append(mean.item())
        if ctx.step == self.steps:
            digest = hashlib.sha256()
            for parameter in self.net.parameters():
                own = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                digest.update(own.detach().cpu().numpy().tobytes())
            self.result = {"digest": digest.hexdigest(), "seen": [*self.seen]}
        if self.result is not None and self.may_end(ctx):
            ctx.finish(self.result)
        return {"loss": loss.item()}

    def may_end(self, ctx):
        """Say whether all ranks have seen the file."""
        if not self.waits:
            return True
        seen = torch.tensor(float(os.path.exists("end")), device=ctx.device)
        dist.all_reduce(seen)
        return seen.item() == ctx.world_size


def summed(ctx, steps=0, pace=0.0, waits=False):
    """A function of several ranks: each has a part of the numbers."""
    mine = torch.arange(100.0, device=ctx.device)[ctx.rank :: ctx.world_size].square().sum()
    dist.all_reduce(mine)
    assert mine.device == ctx.device
    return {"total": mine.item()}


class Wide(Train):
    """A state of 64 MiB, and DDP's bucket of 16 MiB."""

    inputs = 1024

    def layers(self):
        return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))


class Sharded(Train):
    """FSDP2: every rank holds a part of each layer."""

    def parallel(self, net):
        for layer in (net[0], net[3], net):
            fully_shard(layer)
        return net


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


class Tells(Train):
    """Each rank says whose collectives it has."""

    def __init__(self, ctx, **more):
        print(f"rank {ctx.rank} by {dist.get_backend()} of {type(dist.group.WORLD).__name__}")
        super().__init__(ctx, **more)


LOOKED = []  # not in any image, so it is empty in a new process


class Looks(Train):
    """Each rank says, whenever it begins in a process, which devices it sees."""

    def step(self, ctx):
        if not LOOKED:
            LOOKED.append(self)
            folder = os.environ["SIM_HOME"]
            nodes = sorted(name[4:] for name in os.listdir(folder) if name.startswith("node"))
            shown, count = os.environ["SIM_VISIBLE_DEVICES"], torch.sim.device_count()
            print(f"rank {ctx.rank} sees {count}: {shown} of {' '.join(nodes)}")
        return super().step(ctx)


class Strays(Train):
    """At step 3, the last rank does something else, until there is a file `go on`."""

    def __init__(self, ctx, how, **more):
        super().__init__(ctx, **more)
        self.how = how

    def step(self, ctx):
        if ctx.rank == ctx.world_size - 1 and ctx.step == 3:
            getattr(self, self.how)(ctx)
        return super().step(ctx)

    def computes(self, ctx):
        while not os.path.exists("go on"):
            torch.ones(64, 64) @ torch.ones(64, 64)

    def sleeps(self, ctx):
        """Sleep where no call of ours sees it."""
        while not os.path.exists("go on"):
            threading.Event().wait(0.1)

    def calls_another(self, ctx):
        dist.broadcast(torch.ones(3), 0)

    def leaves(self, ctx):
        ctx.finish({"left": "early"})


if __name__ == "__main__":  # as torchrun starts it
    import json
    import sys
    from types import SimpleNamespace

    dist.init_process_group("gloo")
    ctx = SimpleNamespace(
        device=torch.device("cpu"), rank=dist.get_rank(), world_size=dist.get_world_size(), step=0
    )
    ended = []
    ctx.finish = ended.append
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    job = Train(ctx, steps=int(sys.argv[1]))
    while not ended:
        ctx.step += 1
        job.step(ctx)
    print(json.dumps(ended[0]))
