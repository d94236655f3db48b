"""Tenants' code: what training scripts get wrong.  Of three ranks number 1 is the odd one."""

from __future__ import annotations

import torch
import torch.distributed as dist
from jobs import Mlp


def is_odd(ctx):
    return ctx.rank == 1


def other_root(ctx):
    dist.broadcast(torch.zeros(4), src=int(is_odd(ctx)))
    dist.barrier()  # else who sends may have ended well before another one calls


def other_operation(ctx):
    dist.all_reduce(torch.zeros(4), op=dist.ReduceOp.MAX if is_odd(ctx) else dist.ReduceOp.SUM)


def other_type(ctx):
    dist.all_reduce(torch.zeros(4, dtype=torch.float64 if is_odd(ctx) else torch.float32))


def barrier_in_a_branch(ctx):
    if is_odd(ctx):
        dist.barrier()
    dist.all_reduce(torch.zeros(4))


def groups_in_another_order(ctx):
    groups = [dist.new_group(list(range(ctx.world_size))) for _ in range(2)]
    for group in groups[::-1] if is_odd(ctx) else groups:
        dist.all_reduce(torch.zeros(4), group=group)


def key_set_after_the_barrier(ctx):
    store = dist.distributed_c10d._get_default_store()
    if is_odd(ctx):
        store.get("late")
    dist.barrier()
    if ctx.rank == 0:
        store.set("late", "here")


def uneven_inputs_without_join(ctx):
    job = Mlp(ctx)
    for _ in range(2 + is_odd(ctx)):
        job.step(ctx)


class LeavesAStepOut(Mlp):
    """As for a batch that it does not like."""

    def step(self, ctx):
        if is_odd(ctx) and ctx.step == 4:
            return {"loss": 0.0}
        return super().step(ctx)
