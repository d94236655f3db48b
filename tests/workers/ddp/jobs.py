"""Tenants' code: ordinary data-parallel training that imports nothing of ours."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from datetime import timedelta

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
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


class Accumulating(Mlp):
    """Several batches in one update, each of them summed over the ranks, or all at the last."""

    def __init__(self, ctx, *, no_sync=False):
        super().__init__(ctx)
        self.no_sync = no_sync

    def step(self, ctx):
        told = 0.0
        for batch in range(3):
            quiet = self.no_sync and batch < 2
            with self.net.no_sync() if quiet else contextlib.nullcontext():
                loss = self.net(torch.randn(8, 32)).square().mean() / 3
                loss.backward()
            told += loss.item()
        self.opt.step()
        self.opt.zero_grad()
        return {"loss": told}


class Joined(Mlp):
    """In every step another rank has the most batches."""

    def step(self, ctx):
        told = []
        with Join([self.net]):
            for _ in range(1 + (ctx.rank + ctx.step) % ctx.world_size):
                loss = self.net(torch.randn(8, 32)).square().mean()
                loss.backward()
                self.opt.step()
                self.opt.zero_grad()
                told.append(loss.item())
        return {"losses": told}


class Sharded:
    """FSDP2: every rank holds a part of each layer."""

    def __init__(self, ctx):
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 8))
        for layer in (self.net[0], self.net[2], self.net):
            fully_shard(layer)
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        torch.manual_seed(100 + ctx.rank)

    def step(self, ctx):
        loss = self.net(torch.randn(16, 32)).square().mean()
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        return {"loss": loss.item()}


class ByHand:
    """No DDP: gradients are averaged and metrics gathered by calls of its own."""

    def __init__(self, ctx):
        torch.manual_seed(ctx.rank)
        self.net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
        for parameter in self.net.parameters():
            dist.broadcast(parameter.data, src=ctx.world_size - 1)
        self.opt = torch.optim.Adam(self.net.parameters(), lr=0.01)
        torch.manual_seed(100 + ctx.rank)

    def step(self, ctx):
        loss = self.net(torch.randn(16, 32)).square().mean()
        loss.backward()
        works = [dist.all_reduce(p.grad, async_op=True) for p in self.net.parameters()]
        for work, parameter in zip(works, self.net.parameters(), strict=True):
            work.wait()
            parameter.grad.mul_(1.0 / ctx.world_size)
        self.opt.step()
        self.opt.zero_grad()
        losses = [torch.zeros(()) for _ in range(ctx.world_size)]
        dist.all_gather(losses, loss.detach())
        return {"losses": [one.item() for one in losses]}


class Flow(Mlp):
    """Between the common calls each rank does what it likes: other batches, messages, pauses."""

    def step(self, ctx):
        size = ctx.world_size
        loss = self.net(torch.randn(8 + 4 * ctx.rank, 32)).square().mean()
        if (ctx.step + ctx.rank) % 2:
            loss = loss + self.net.module(torch.randn(4, 32)).sum() * 0.01
        loss.backward()
        if ctx.rank == ctx.step % size:
            time.sleep(0.005)
        self.opt.step()
        self.opt.zero_grad()
        baton = torch.tensor([loss.item()])
        if ctx.step % 2 and ctx.rank:
            dist.send(baton, dst=0)
        elif ctx.step % 2:
            for source in range(1, size):
                dist.recv(baton, src=source)
        return {"loss": loss.item(), "baton": baton.item()}


class TwoPasses:
    """Two losses with a backward pass each: DDP sums the first bucket in the one pass, and reads it
    in the other."""

    def __init__(self, ctx, *, views=False):
        torch.manual_seed(1)
        self.heads = nn.ModuleList([nn.Linear(32, 8), nn.Linear(32, 8)])
        self.net = DistributedDataParallel(
            _Both(self.heads), bucket_cap_mb=0.0001, gradient_as_bucket_view=views
        )
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        torch.manual_seed(100 + ctx.rank)

    def step(self, ctx):
        first, second = self.net(torch.randn(16, 32))
        second.square().mean().backward()
        between = torch.ones(4)
        dist.all_reduce(between)  # may take the place of what was summed, if that were let go
        first.square().mean().backward()
        self.opt.step()
        self.opt.zero_grad()
        return {"loss": first.sum().item(), "between": between.tolist()}


class _Both(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.heads = heads

    def forward(self, x):
        return self.heads[0](x), self.heads[1](x)


class LooksAtItsBucket(Mlp):
    """A comm hook that goes on with the tensor that it gave, not with what the future holds."""

    def __init__(self, ctx):
        super().__init__(ctx)

        def hook(_, bucket):
            tensor = bucket.buffer().div_(ctx.world_size)
            future = dist.all_reduce(tensor, async_op=True).get_future()
            return future.then(lambda _: tensor * 1.0)

        self.net.register_comm_hook(None, hook)


class SyncNorm:
    """What torch has on CUDA only."""

    def __init__(self, ctx):
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.net = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(net))

    def step(self, ctx):
        return {"loss": self.net(torch.randn(8, 4)).sum().item()}


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
        if kind == "other gradient":
            self.opt.register_step_pre_hook(self._add_to_gradient)

    def _add_to_gradient(self, *_):
        next(self.net.parameters()).grad.add_(self.nudge)

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
        self.nudge = 1e-7 * ctx.rank if ctx.step == 6 else 0.0
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


def _call_in_turn(ctx, order):
    """Return once all ranks before this one in `order` are about to call or wait in their call.

    On one slot a rank that is about to call keeps the slot until it waits, so the order is exact.
    """
    store = dist.distributed_c10d._get_default_store()
    place = order.index(ctx.rank)
    if place:
        store.wait([f"turn {place}"])
    store.set(f"turn {place + 1}", "")


def mismatched(ctx, order=None):
    """Rank 1 calls something else than the others, in any order or in this one."""
    if order is not None:
        _call_in_turn(ctx, order)
    if ctx.rank == 1:
        dist.broadcast(torch.zeros(3), src=0)
    else:
        dist.all_reduce(torch.zeros(4))


def others_go_on(ctx):
    """Rank 1 leaves the default group at once; the other two go on with messages until their groups
    were made anew twice.
    """
    if ctx.rank == 1:
        dist.destroy_process_group()
        return "left"
    found, last = torch.zeros(1), 99.0
    while found.item() != (2 * last if ctx.rank == 0 else last):
        time.sleep(0.005)  # so that orders come between the messages
        if ctx.rank == 0:
            is_last = dist.group.WORLD.owner.times_built > 1
            dist.send(torch.full((1,), last if is_last else 1.0), dst=2)
            assert dist.recv(found) == 2
        else:
            dist.recv(found, src=0)
            dist.send(2 * found, dst=0)
    return found.item()


def messages_beside_a_barrier(ctx, tags=8):
    """Rank 0 receives from any rank while rank 1 is in a monitored barrier and sends nothing."""
    store, sources = dist.distributed_c10d._get_default_store(), []
    if ctx.rank == 0:
        works = [dist.irecv(torch.zeros(1), tag=tag) for tag in range(tags)]
        store.set("posted", "")
        for work in works:
            work.wait()
            sources.append(work._source_rank())
    else:
        store.wait(["posted"])
    if ctx.rank == 2:
        time.sleep(0.2)  # rank 1 comes to its barrier first
        for tag in range(tags):
            dist.send(torch.ones(1), dst=0, tag=tag)
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    return sources


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
