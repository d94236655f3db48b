"""A script without steps that asks for other seats itself: in the midst of a step of its own.

Only there can the test say at which instant a wish comes; anything else knows nothing of ours.
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from workers.ranks import process_group, turns

STEPS = 8


def wishing(ctx, *, wishes=None):
    """`wishes`: {"step:rank": seats}, each between that rank's backward and its optimizer."""
    wishes = wishes or {}
    torch.manual_seed(1)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)))
    opt = torch.optim.AdamW(net.parameters(), lr=0.01)
    torch.manual_seed(100 + ctx.rank)
    losses = []
    for step in range(1, STEPS + 1):
        loss = net(torch.randn(8, 16)).square().mean()
        loss.backward()
        if seats := wishes.get(f"{step}:{ctx.rank}"):
            turns.wish(process_group._here.arena, seats)
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    digest = hashlib.sha256()
    for parameter in net.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    dist.barrier()
    return {"losses": losses, "parameters": digest.hexdigest()}
