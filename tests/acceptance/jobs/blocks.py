"""A job and a function that read and publish datablocks, slow enough to be killed meanwhile."""

import time

import torch


class Total:
    """Adds up all rows, a row per step; publishes the running sums."""

    def __init__(self, ctx, *, step_s=0.02):
        self.rows, self.step_s = ctx.datablock("rows"), step_s
        self.sums = torch.zeros(len(self.rows), dtype=torch.int64)

    def step(self, ctx):
        time.sleep(self.step_s)
        self.sums[ctx.step - 1] = self.rows[: ctx.step].sum()
        if ctx.step == len(self.rows):
            ctx.finish({"total": int(self.sums[-1]), "sums": self.sums})
        return {"sum": int(self.sums[ctx.step - 1])}


def double(ctx, x):
    return {"y": x * 2}
