"""A job large enough that its memory is watched, and that does what watching is there for."""

import os
import time

import torch
from jobs import digest


class Large:
    """A frozen part, a buffer that grows, weights clipped in forward, gradients that add up.

    If it `waits`, it steps on with its result, which it gives once there is a file `end`.
    """

    def __init__(self, ctx, *, steps=40, nap_s=0.0, clip=True, waits=False):
        self.base = torch.nn.Linear(200, 200).requires_grad_(False)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(200, 200), torch.nn.BatchNorm1d(200), torch.nn.Linear(200, 200)
        )
        self.opt = torch.optim.AdamW(self.net.parameters(), 1e-3)
        self.average = [p.detach().clone() for p in self.net.parameters()]
        self.steps, self.nap_s, self.clip = steps, nap_s, clip
        self.waits, self.result = waits, None

    def step(self, ctx):
        time.sleep(self.nap_s)
        if self.clip and ctx.step % 5 == 0:
            self.net[0].weight.data.clamp_(-0.05, 0.05)
        loss = self.net(self.base(torch.randn(16, 200))).square().mean()
        loss.backward()
        if ctx.step % 2 == 0:  # of two steps' gradients
            self.opt.step()
            self.opt.zero_grad(set_to_none=ctx.step % 4 == 0)
            torch._foreach_lerp_(self.average, [p.detach() for p in self.net.parameters()], 0.1)
        if ctx.step == self.steps:
            average = sum(part.double().sum().item() for part in self.average)
            self.result = {"digest": digest(self.net), "average": average, "whole": True}
        if self.result is not None and (not self.waits or os.path.exists("end")):
            ctx.finish(self.result)
        return {"loss": loss}


def watch_memory(ctx):
    """Uses what its resident watches memory with, as only the resident itself should."""
    import gc

    (watch,) = [thing for thing in gc.get_objects() if type(thing).__name__ == "Watch"]
    memory_range = type(watch).protect.__globals__["Range"]
    tensor = torch.zeros(100_000, dtype=torch.uint8)
    part = memory_range.inside(tensor.data_ptr(), 100_000)
    refused, before = watch.protect([part]), watch.written([part])
    tensor[50_000] = 1
    return {"refused": len(refused), "before": len(before), "after": len(watch.written([part]))}
