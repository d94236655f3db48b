"""What takes datablocks and publishes some."""

import hashlib
import os
import time

import numpy
import torch


def digest(value):
    """Of a tensor, or of tensors by name: their types, shapes and bytes."""
    named = value if isinstance(value, dict) else {"": value}
    told = hashlib.sha256()
    for name in sorted(named):
        tensor = named[name].contiguous()
        told.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        told.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return told.hexdigest()


def look(ctx, **inputs):
    """What every input is."""
    return {"seen": {port: digest(value) for port, value in inputs.items()}}


def by_name(ctx, x, *, names):
    return {"same": [ctx.datablock(name) is x for name in names]}


def unnamed(ctx, x):
    ctx.datablock("pictures")


def scribble(ctx, x):
    """Write over all that was given."""
    for tensor in x.values() if isinstance(x, dict) else [x]:
        tensor.zero_()
    return {"seen": digest(x)}


def tokens(ctx, *, seed=0):
    dice = numpy.random.default_rng(seed)
    ids = torch.from_numpy(dice.integers(0, 99, (20, 8)))
    made = {"ids": ids.t(), "mask": dice.random(20) < 0.5, "scale": torch.tensor(2.0).bfloat16()}
    return {"tokens": made, "alone": ids, "count": ids.numel()}


def bad(ctx, *, what):
    values = {
        "a list": [1, 2],
        "a number in a dict": {"x": torch.ones(2), "y": 3},
        "a number for a name": {1: torch.ones(2)},
        "sparse": torch.eye(3).to_sparse(),
        "texts": numpy.array(["a"]),
        "complex128": torch.ones(2, dtype=torch.complex128),
    }
    return {"tokens": values[what]}


class Sum:
    """Adds the rows of an input one by one; holds on to all of it.

    If it `waits`, it steps on with its result, which it gives once there is a file `end`.
    """

    def __init__(self, ctx, *, steps=10, nap_s=0.0, waits=False):
        self.x, self.total = ctx.inputs["x"], 0
        self.steps, self.nap_s, self.waits, self.result = steps, nap_s, waits, None

    def step(self, ctx):
        time.sleep(self.nap_s)
        self.total += int(self.x[ctx.step % len(self.x)].sum())
        if ctx.step == self.steps:
            self.result = {"total": self.total, "seen": digest(self.x), "made": self.x[:2] + 1}
        if self.result is not None and (not self.waits or os.path.exists("end")):
            ctx.finish(self.result)
        return {"total": self.total}


class Hold:
    """Holds on to a large input in many ways; writes into it at a step, if it is told to.

    If it `waits`, it steps on with its result, which it gives once there is a file `end`.  Only
    then it looks whether it holds what it was given, since it may have moved after its last step.
    """

    def __init__(self, ctx, *, steps=200, write_at=0, nap_s=0.01, waits=False):
        x = ctx.inputs["x"]
        self.whole, self.part, self.array = x, x[100:200, ::2], x.numpy()
        self.own = torch.zeros(3)
        self.steps, self.write_at, self.nap_s = steps, write_at, nap_s
        self.waits, self.result = waits, None

    def step(self, ctx):
        time.sleep(self.nap_s)
        self.own += self.part[ctx.step % len(self.part)].sum()
        if ctx.step == self.write_at:
            self.part[7] = -1.0
        if ctx.step == self.steps:
            parts = {"whole": self.whole, "part": self.part, "own": self.own}
            tied = self.part.data_ptr() - self.whole.data_ptr()
            same = self.array.ctypes.data == self.whole.data_ptr()
            self.result = {"seen": digest(parts), "tied": tied, "same": same}
        if self.result is not None and (not self.waits or os.path.exists("end")):
            given = digest(ctx.inputs["x"]) == digest(self.whole)
            ctx.finish({**self.result, "given": given})
