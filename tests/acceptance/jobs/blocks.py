"""A job and a function that read and publish datablocks, slow enough to be killed meanwhile."""

import torch
from train import rest


class Total:
    """Adds up all rows, a row per step; publishes the running sums."""

    def __init__(self, ctx, *, step_s=0.02, gate=""):
        self.rows, self.step_s, self.gate = ctx.datablock("rows"), step_s, gate
        self.sums = torch.zeros(len(self.rows), dtype=torch.int64)

    def step(self, ctx):
        rest(self.step_s, self.gate, is_late=2 * ctx.step > len(self.rows))
        self.sums[ctx.step - 1] = self.rows[: ctx.step].sum()
        if ctx.step == len(self.rows):
            ctx.finish({"total": int(self.sums[-1]), "sums": self.sums})
        return {"sum": int(self.sums[ctx.step - 1])}


def double(ctx, x):
    return {"y": x * 2}
