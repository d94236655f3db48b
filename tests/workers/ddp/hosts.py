"""Tenants' code for gangs of several hosts, some of which are lost in the middle."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist

from workers.ranks import process_group
from workers.ranks.shared_memory import DEPTH


def _kill_bridge():
    os.kill(process_group._here.arena.bridge_process, signal.SIGKILL)


def last_rank_kills_its_bridge(ctx):
    dist.barrier()
    if ctx.rank == ctx.world_size - 1:
        _kill_bridge()
    while True:
        dist.all_reduce(torch.ones(4))


def last_host_goes(ctx):
    """All at once, and without a word: its bridge and its one rank."""
    dist.barrier()
    if ctx.rank == ctx.world_size - 1:
        _kill_bridge()
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        dist.all_reduce(torch.ones(4))


def runs_ahead(ctx):
    """More calls under way than a group has room for; the last rank takes none before all are made
    that can be.  What it received, summed up.
    """
    last, calls = ctx.world_size - 1, DEPTH + 7
    if ctx.rank == last:
        taken = torch.zeros(4096, dtype=torch.float64)
        time.sleep(0.5)
        total = 0.0
        for _ in range(calls):
            dist.broadcast(taken, src=0)
            total += taken.sum().item()
        return total
    for number in range(calls):
        dist.broadcast(torch.full((4096,), float(number), dtype=torch.float64), src=0)
    return None


def store(ctx):
    """Every change is answered, and all ranks see the same content in the end."""
    own = dist.distributed_c10d._get_default_store()
    numbers = [own.add("count", 1) for _ in range(5)]
    own.append("names", f"{ctx.rank};")
    won = own.compare_set("first", "", str(ctx.rank)).decode()
    dist.barrier()
    kept = own.get("count").decode(), sorted(own.get("names").decode().split(";"))
    return {
        "numbers": numbers,
        "won": won,
        "kept": [kept[0], *kept[1]],
        "first": own.get("first").decode(),
    }


def groups_come_and_go(ctx):
    """More groups one after the other than a gang may have at a time."""
    total = torch.zeros(1)
    for number in range(300):
        group = dist.new_group(list(range(ctx.world_size)))
        ones = torch.full((1,), float(number))
        dist.all_reduce(ones, group=group)
        total += ones
        dist.destroy_process_group(group)
    return total.item()
