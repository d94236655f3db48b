"""What training code calls, one function per row of the feature matrix: each returns plain numbers.

Every function runs on every rank, knows nothing of ours, and checks by itself what can be said by
hand.  What it returns must be the same for every number of seats.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import tempfile
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def digest(*tensors):
    found = hashlib.sha256()
    for tensor in tensors:
        local = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found.update(local.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


class Net(nn.Module):
    def __init__(self, norm=False):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 32)
        self.norm = nn.BatchNorm1d(32) if norm else nn.Identity()
        self.last = nn.Linear(32, 4)

    def forward(self, x):
        return self.last(self.norm(self.second(self.first(x).tanh()).relu()))


def train(ctx, model, *, steps=5, optimizer=None, loss_of=None, around=contextlib.nullcontext):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(10 + ctx.rank)
    losses = []
    for _ in range(steps):
        with around():
            out = model(torch.randn(8, 16))
            loss = (loss_of or (lambda o: o.square().mean()))(out)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [digest(*model.parameters(), *model.buffers()), losses]


# --- data parallel ---


def ddp(ctx):
    return train(ctx, DDP(Net()))


def ddp_small_buckets(ctx):
    return train(ctx, DDP(Net(), bucket_cap_mb=0.001))


def ddp_bucket_views(ctx):
    return train(ctx, DDP(Net(), gradient_as_bucket_view=True))


def ddp_batch_norm(ctx):
    return train(ctx, DDP(Net(norm=True)))


def ddp_no_sync(ctx):
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(10 + ctx.rank)
    for step in range(8):
        held = model.no_sync() if step % 4 != 3 else contextlib.nullcontext()
        with held:
            model(torch.randn(8, 16)).square().mean().backward()
        if step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    return digest(*model.parameters())


class Halves(nn.Module):
    """Which half is used depends on the rank and the step."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(1)
        self.halves = nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 4)])
        self.rank, self.calls = rank, 0

    def forward(self, x):
        self.calls += 1
        return self.halves[(self.calls + self.rank) % 2](x)


def ddp_find_unused(ctx):
    return train(ctx, DDP(Halves(ctx.rank), find_unused_parameters=True))


def ddp_static_graph(ctx):
    return train(ctx, DDP(Net(), static_graph=True, bucket_cap_mb=0.001))


def hook_allreduce(ctx):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = DDP(Net(), bucket_cap_mb=0.001)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    return train(ctx, model)


def hook_fp16(ctx):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = DDP(Net(), bucket_cap_mb=0.001)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train(ctx, model)


def hook_power_sgd(ctx):
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    model = DDP(Net())
    state = power.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, power.powerSGD_hook)
    return train(ctx, model, steps=6)


def zero_optimizer(ctx):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DDP(Net())
    sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    return train(ctx, model, optimizer=sharded)


def autocast(ctx):
    around = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    return train(ctx, DDP(Net()), around=around, loss_of=lambda o: o.float().square().mean())


def compiled_aot(ctx):
    return train(ctx, torch.compile(DDP(Net()), backend="aot_eager"), steps=4)


def compiled_inductor(ctx):
    return train(ctx, DDP(torch.compile(Net(), backend="inductor")), steps=4)


def activation_checkpoint(ctx):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Net):
        def forward(self, x):
            hidden = checkpoint(lambda v: self.second(self.first(v).tanh()), x, use_reentrant=False)
            return self.last(hidden)

    return train(ctx, DDP(Checkpointed(), static_graph=True))


# --- sharded ---


def fsdp1(ctx):
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))
        return train(ctx, model)


def fsdp2(ctx):
    from torch.distributed.fsdp import fully_shard

    model = Net()
    for layer in (model.first, model.second, model.last):
        fully_shard(layer)
    fully_shard(model)
    return train(ctx, model)


def fsdp2_hybrid(ctx):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape = (ctx.world_size, 1) if ctx.world_size % 2 else (ctx.world_size // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = fully_shard(Net(), mesh=mesh)
    return train(ctx, model)


def tensor_parallel(ctx):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(1)
    width = 12 * ctx.world_size
    model = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4))
    mesh = init_device_mesh("cpu", (ctx.world_size,))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(3)
    for _ in range(3):
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return digest(*model.parameters())


def checkpoint_inside(ctx):
    """DCP saves and loads what FSDP2 has sharded."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(Net())
    train(ctx, model, steps=2)
    folder = [tempfile.mkdtemp() if ctx.rank == 0 else None]
    dist.broadcast_object_list(folder)
    state = get_model_state_dict(model)
    before = digest(*state.values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder[0])
        for value in state.values():
            value.detach().zero_()
        dcp.load(state, checkpoint_id=folder[0])
    assert digest(*state.values()) == before
    return before


# --- collectives by hand ---


def all_reduce(ctx):
    n = ctx.world_size
    tensor = torch.full((5,), float(ctx.rank + 1))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [n * (n + 1) / 2] * 5
    late = torch.full((3,), float(ctx.rank))
    work = dist.all_reduce(late, async_op=True)
    work.wait()
    assert late.tolist() == [n * (n - 1) / 2] * 3
    doubled = (
        dist.all_reduce(torch.ones(2), async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    )
    assert doubled.wait().tolist() == [2.0 * n] * 2
    return [tensor.tolist(), late.tolist()]


def reductions(ctx):
    n, rank = ctx.world_size, ctx.rank
    made = {}
    for name, first in (("MIN", 0), ("MAX", n - 1), ("PRODUCT", 0 if n else 1)):
        tensor = torch.tensor([rank], dtype=torch.int64)
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name))
        assert tensor.item() == first
        made[name] = tensor.item()
    for name, want in (("BAND", 0), ("BOR", (1 << n) - 1), ("BXOR", (1 << n) - 1)):
        tensor = torch.tensor([1 << rank], dtype=torch.int64)
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name))
        assert tensor.item() == want or n == 1
        made[name] = tensor.item()
    mean = torch.tensor([float(rank)])
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    half = torch.full((4,), 0.1 * (rank + 1), dtype=torch.bfloat16)
    dist.all_reduce(half)
    return [made, mean.tolist(), half.tolist()]


def gathers(ctx):
    n, rank = ctx.world_size, ctx.rank
    rows = [torch.zeros(2) for _ in range(n)]
    dist.all_gather(rows, torch.tensor([rank, -rank], dtype=torch.float32))
    assert [row.tolist() for row in rows] == [[r, -r] for r in range(n)]
    flat = torch.zeros(2 * n)
    dist.all_gather_into_tensor(flat, torch.full((2,), float(rank)))
    assert flat.tolist() == [float(r) for r in range(n) for _ in range(2)]
    places = [torch.zeros(1) for _ in range(n)] if rank == n - 1 else None
    dist.gather(torch.tensor([float(rank)]), places, dst=n - 1)
    mine = torch.zeros(1)
    given = [torch.tensor([10.0 * r]) for r in range(n)] if rank == 0 else None
    dist.scatter(mine, given, src=0)
    assert mine.item() == 10.0 * rank
    total = torch.tensor([float(rank)])
    dist.reduce(total, dst=1 % n)
    assert rank != 1 % n or total.item() == n * (n - 1) / 2
    root = torch.full((3,), float(rank))
    dist.broadcast(root, src=n - 1)
    assert root.tolist() == [n - 1.0] * 3
    return [flat.tolist(), mine.item(), [p.item() for p in places] if places else None]


def scatters(ctx):
    n, rank = ctx.world_size, ctx.rank
    out = torch.zeros(2)
    dist.reduce_scatter(out, [torch.full((2,), float(r + rank)) for r in range(n)])
    assert out.tolist() == [n * rank + n * (n - 1) / 2] * 2
    flat = torch.zeros(2)
    dist.reduce_scatter_tensor(flat, torch.arange(2.0 * n))
    assert flat.tolist() == [n * 2.0 * rank, n * (2.0 * rank + 1)]
    outs = [torch.zeros(1) for _ in range(n)]
    dist.all_to_all(outs, [torch.tensor([10.0 * rank + r]) for r in range(n)])
    assert [o.item() for o in outs] == [10.0 * r + rank for r in range(n)]
    single = torch.zeros(n)
    dist.all_to_all_single(single, torch.arange(float(n)) + 10 * rank)
    assert single.tolist() == [10.0 * r + rank for r in range(n)]
    sizes = [r + 1 for r in range(n)]  # rank r is sent r+1 elements by each
    uneven = torch.zeros((rank + 1) * n)
    dist.all_to_all_single(uneven, torch.full((sum(sizes),), float(rank)), [rank + 1] * n, sizes)
    assert uneven.tolist() == [float(r) for r in range(n) for _ in range(rank + 1)]
    return [flat.tolist(), single.tolist(), uneven.tolist()]


def objects(ctx):
    n, rank = ctx.world_size, ctx.rank
    found = [None] * n
    dist.all_gather_object(found, {"rank": rank, "text": "x" * rank})
    assert [f["rank"] for f in found] == list(range(n))
    said = [{"from": rank}, "two"] if rank == n - 1 else [None, None]
    dist.broadcast_object_list(said, src=n - 1)
    assert said == [{"from": n - 1}, "two"]
    got = [None]
    dist.scatter_object_list(got, [f"for {r}" for r in range(n)] if rank == 0 else None, src=0)
    assert got == [f"for {rank}"]
    heap = [None] * n if rank == 0 else None
    dist.gather_object(rank * rank, heap, dst=0)
    return [found, got, heap]


def sub_groups(ctx):
    n, rank = ctx.world_size, ctx.rank
    made = []
    groups = [(ranks, dist.new_group(ranks)) for ranks in ([0, n - 1], list(range(n))[::-1], [0])]
    for ranks, group in groups:
        if rank in ranks:
            tensor = torch.tensor([float(rank + 1)])
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == sum(r + 1 for r in set(ranks))
            made.append(tensor.item())
    dist.barrier()
    for ranks, group in groups:
        if rank in ranks:
            dist.destroy_process_group(group)
    return made


def as_under_torchrun(ctx):
    """A script that makes its own groups, by names of backends."""
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    tensor = torch.tensor([ctx.rank + 1.0])
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == ctx.world_size * (ctx.world_size + 1) / 2
    return tensor.item()


def coalesced(ctx):
    n, rank = ctx.world_size, ctx.rank
    tensors = [torch.full((3,), float(rank + i)) for i in range(4)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    total = n * (n - 1) / 2
    assert [t[0].item() for t in tensors] == [total + n * i for i in range(4)]
    outs = [torch.zeros(n) for _ in range(2)]
    with dist._coalescing_manager(async_ops=True) as held:
        for i, out in enumerate(outs):
            dist.all_gather_into_tensor(out, torch.tensor([float(rank + i)]))
    held.wait()
    assert outs[1].tolist() == [r + 1.0 for r in range(n)]
    more = [torch.ones(2), torch.ones(1)]
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as held:
        dist.all_reduce(more[0])
        dist.broadcast(more[1], src=0)
    held.wait()
    return [[t.tolist() for t in tensors], [o.tolist() for o in outs], [m.tolist() for m in more]]


def different_numbers_of_asynchronous_calls(ctx):
    """Ranks wait at other places than their peers; only the order of the calls is common."""
    tensors = [torch.full((2,), float(ctx.rank + i)) for i in range(8)]
    works = []
    for i, tensor in enumerate(tensors):
        works.append(dist.all_reduce(tensor, async_op=True))
        if i % (ctx.rank + 1) == 0:
            works[i // 2].wait()
    for work in works:
        work.wait()
    return [t.tolist() for t in tensors]


def asynchronous(ctx):
    """Every collective as a handle: completed by its future in one half, by `wait` in the other."""
    n, rank = ctx.world_size, ctx.rank
    row = torch.arange(float(n)) + 10 * rank
    parts = [torch.tensor([10.0 * rank + r]) for r in range(n)]

    def rows():
        return [torch.zeros(1) for _ in range(n)]

    told = []
    for by_future in (True, False):
        one, flat, mine, many = row.clone(), torch.zeros(n), torch.zeros(1), rows()
        total, root, dealt, own = torch.ones(2) * rank, torch.ones(2) * rank, rows(), torch.zeros(1)
        heap, swapped, sums = rows() if rank == 0 else None, torch.zeros(n), torch.zeros(1)
        given = parts if rank == n - 1 else None
        works = [
            dist.all_reduce(one, async_op=True),
            dist.broadcast(root, src=n - 1, async_op=True),
            dist.reduce(total, dst=0, async_op=True),
            dist.all_gather(many, parts[0], async_op=True),
            dist.all_gather_into_tensor(flat, parts[0], async_op=True),
            dist.gather(parts[0], heap, dst=0, async_op=True),
            dist.scatter(mine, given, src=n - 1, async_op=True),
            dist.reduce_scatter(own, parts, async_op=True),
            dist.reduce_scatter_tensor(sums, row, async_op=True),
            dist.all_to_all(dealt, parts, async_op=True),
            dist.all_to_all_single(swapped, row, async_op=True),
            dist.barrier(async_op=True),
        ]
        for work in works:
            if by_future:
                assert work.get_future().then(lambda _: 7).wait() == 7
            work.wait()
            assert work.is_completed()
        assert flat.tolist() == [10.0 * r for r in range(n)] == [m.item() for m in many]
        assert own.item() == sums.item() == n * rank + 10.0 * n * (n - 1) / 2
        assert swapped.tolist() == [10.0 * r + rank for r in range(n)] == [d.item() for d in dealt]
        assert root.tolist() == [n - 1.0] * 2
        assert mine.item() == 10.0 * (n - 1) + rank
        told.append([one.tolist(), flat.tolist(), swapped.tolist(), own.item()])
    assert told[0] == told[1]
    return told


def differentiable(ctx):
    """Collectives that a backward pass goes through, as contrastive losses gather their batches."""
    import torch.distributed.nn.functional as through

    n, rank = ctx.world_size, ctx.rank
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = (torch.arange(3.0) + rank).requires_grad_()
        gathered = torch.cat(through.all_gather(x * 2))
        total = through.all_reduce(x * x)
        (gathered.square().sum() * (rank + 1) + total.sum()).backward()
    assert gathered.tolist() == [2.0 * (i + r) for r in range(n) for i in range(3)]
    return [x.grad.tolist(), total.tolist()]


def functional_rest(ctx):
    import torch.distributed._functional_collectives as funcol

    n, rank = ctx.world_size, ctx.rank
    ranks = list(range(n))
    root = funcol.broadcast(torch.full((2,), float(rank)), n - 1, ranks) + 0
    dealt = funcol.all_to_all_single(torch.arange(float(n)) + 10 * rank, None, None, ranks) + 0
    moved = funcol.permute_tensor(
        torch.full((2,), float(rank)), [(r + 1) % n for r in ranks], ranks
    )
    given = [torch.full((n,), float(rank)), torch.full((2 * n,), 1.0)]
    totals = [t + 0 for t in funcol.all_reduce_coalesced(given, "sum", ranks)]
    rows = [t + 0 for t in funcol.all_gather_into_tensor_coalesced(given, ranks)]
    parts = funcol.reduce_scatter_tensor_coalesced(given, "sum", [0, 0], ranks)
    assert root.tolist() == [n - 1.0] * 2
    assert (moved + 0).tolist() == [float((rank - 1) % n)] * 2
    assert rows[0].tolist() == [float(r) for r in ranks for _ in ranks]
    return [
        dealt.tolist(),
        *([t.tolist() for t in s] for s in (totals, rows, [p + 0 for p in parts])),
    ]


def functional(ctx):
    import torch.distributed._functional_collectives as funcol

    ranks = list(range(ctx.world_size))
    total = funcol.all_reduce(torch.full((2,), float(ctx.rank)), "sum", ranks) + 0
    rows = funcol.all_gather_tensor(torch.full((1,), float(ctx.rank)), 0, ranks) + 0
    parts = funcol.reduce_scatter_tensor(torch.arange(2.0 * len(ranks)), "sum", 0, ranks) + 0
    assert rows.tolist() == [float(r) for r in ranks]
    return [total.tolist(), rows.tolist(), parts.tolist()]


def store_waits(ctx):
    """Every rank waits for a key that the next one sets."""
    store, n = dist.distributed_c10d._get_default_store(), ctx.world_size
    if ctx.rank == n - 1:
        store.set(f"key {ctx.rank}", "here")
    else:
        store.wait([f"key {ctx.rank + 1}"], timedelta(seconds=60))
        store.set(f"key {ctx.rank}", store.get(f"key {ctx.rank + 1}"))
    store.add("count", ctx.rank)
    dist.barrier()
    assert store.get("key 0") == b"here"
    copy = store.clone()
    if ctx.rank == 0:
        before = copy.num_keys()
        assert store.delete_key("key 1")
        assert copy.num_keys() == before - 1
    dist.barrier()
    assert not store.check(["key 1"])
    return int(copy.add("count", 0))


# --- from one to one ---


def send_recv(ctx):
    n, rank = ctx.world_size, ctx.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    got = torch.zeros(2)
    if rank % 2:
        dist.recv(got, src=left)
        dist.send(torch.full((2,), float(rank)), dst=right)
    else:
        dist.send(torch.full((2,), float(rank)), dst=right)
        dist.recv(got, src=left)
    assert got.tolist() == [float(left)] * 2
    back = torch.zeros(1)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.tensor([rank + 0.5]), left, tag=1),
            dist.P2POp(dist.irecv, back, right, tag=1),
        ]
    )
    for work in works:
        work.wait()
    assert back.item() == right + 0.5
    if rank == 0:
        sources = sorted(dist.recv(torch.zeros(1), tag=2) for _ in range(n - 1))
        assert sources == list(range(1, n)), sources
    else:
        dist.send(torch.ones(1), dst=0, tag=2)
    objects = [{"of": rank}]
    if rank == 0:
        dist.send_object_list(objects, dst=n - 1)
    elif rank == n - 1:
        dist.recv_object_list(objects, src=0)
        assert objects == [{"of": 0}]
    return [got.tolist(), back.item()]


def monitored_barrier(ctx):
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    return "together"


def join_uneven(ctx):
    from torch.distributed.algorithms.join import Join

    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(10 + ctx.rank)
    with Join([model]):
        for _ in range(3 + 2 * ctx.rank):
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return digest(*model.parameters())


def join_zero(ctx):
    from torch.distributed.algorithms.join import Join
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DDP(Net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    torch.manual_seed(10 + ctx.rank)
    with Join([model, optimizer]):
        for _ in range(2 + ctx.rank):
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return digest(*model.parameters())


def rank_dependent_flow(ctx):
    """Ranks do different things between the same collectives, and one sleeps."""
    import time

    net = Net()
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(10 + ctx.rank)
    extra = torch.zeros(())
    for step in range(5):
        data = torch.randn(8 + 4 * ctx.rank, 16)
        loss = model(data).square().mean()
        if (step + ctx.rank) % 2:
            extra += net(data).sum().detach()
        loss.backward()
        if ctx.rank == 1:
            time.sleep(0.01)
        optimizer.step()
        optimizer.zero_grad()
    return [digest(*model.parameters()), extra.item()]


def metrics_by_hand(ctx):
    """A validation loss gathered by a list of tensors, and a barrier with all ranks' help."""
    value = torch.tensor(float(ctx.rank))
    dist.barrier()
    dist.all_reduce(value, op=dist.ReduceOp.SUM)
    return (value / ctx.world_size).item()


ROWS = [
    ddp,
    ddp_small_buckets,
    ddp_bucket_views,
    ddp_batch_norm,
    ddp_no_sync,
    ddp_find_unused,
    ddp_static_graph,
    hook_allreduce,
    hook_fp16,
    hook_power_sgd,
    zero_optimizer,
    autocast,
    activation_checkpoint,
    fsdp1,
    fsdp2,
    fsdp2_hybrid,
    tensor_parallel,
    checkpoint_inside,
    all_reduce,
    reductions,
    gathers,
    scatters,
    objects,
    sub_groups,
    as_under_torchrun,
    coalesced,
    different_numbers_of_asynchronous_calls,
    asynchronous,
    differentiable,
    functional,
    functional_rest,
    store_waits,
    send_recv,
    monitored_barrier,
    join_uneven,
    join_zero,
    rank_dependent_flow,
    metrics_by_hand,
]
SLOW_ROWS = [compiled_aot, compiled_inductor]


def every(ctx, names=None):
    """All rows, one after the other, in the same gang: the warmest way to run them."""
    rows = {row.__name__: row for row in ROWS + SLOW_ROWS}
    found = {}
    for name in names or [row.__name__ for row in ROWS]:
        found[name] = rows[name](ctx)
    return found
