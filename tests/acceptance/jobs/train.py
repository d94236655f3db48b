"""Jobs for the acceptance tests: small, exact, and printing when each step runs."""

import hashlib
import os
import random
import time

import torch

LATE = 10  # how many times as long a late step of a job rests while its gate is shut
PROCESS = int.from_bytes(os.urandom(4))  # in the sandbox every process has number 1


def say(what, step):
    print(what, time.monotonic_ns(), PROCESS, step, flush=True)


def rest(nap_s, gate, *, is_late=False):
    """Sleep; not at all once the file `gate` is there.

    A job whose gate is shut is slower still when it `is_late` in its steps, so that it is there yet
    when a slow machine comes to its test.
    """
    if gate and is_late:
        nap_s *= LATE
    until_s = time.monotonic() + nap_s
    while not (gate and os.path.exists(gate)) and (left_s := until_s - time.monotonic()) > 0:
        time.sleep(min(left_s, 0.05) if gate else left_s)


class Train:
    """A small net with dropout, momentum and three sources of random numbers.

    Every step prints when it began and ended, so that a reader of the log can tell if two processes
    ever ran the same task at once.
    """

    def __init__(self, ctx, *, steps=100, seed=0, step_s=0.02, gate=""):
        torch.manual_seed(seed)
        random.seed(seed)
        self.steps, self.step_s, self.gate, self.done = steps, step_s, gate, 0
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(32, 4)
        ).to(ctx.device)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)

    def step(self, ctx):
        say("begin", ctx.step)
        # the duration of a real step, without the load
        rest(self.step_s, self.gate, is_late=2 * ctx.step > self.steps)
        x = torch.randn(8, 16, device=ctx.device) + random.random()
        loss = self.net(x).square().mean()
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        self.done += 1
        say("end", ctx.step)
        if ctx.step == self.steps:
            ctx.finish({"done": self.done, "parameters": digest(self.net)})
        return {"loss": loss.item()}


class TrainAloud(Train):
    """Prints the loss of every step, exactly."""

    def step(self, ctx):
        metrics = super().step(ctx)
        print("loss", ctx.step, metrics["loss"], flush=True)
        return metrics


class Valley(Train):
    """Reports a loss that falls for LOW steps, and then rises."""

    LOW = 4

    def step(self, ctx):
        return {**super().step(ctx), "loss": abs(ctx.step - self.LOW)}


def digest(net):
    found = hashlib.sha256()
    for value in net.state_dict().values():
        found.update(value.cpu().numpy().tobytes())
    return found.hexdigest()


class Ranks:
    """Plain data parallel training; every rank has random numbers and data of its own."""

    def __init__(self, ctx, *, steps=60, step_s=0.02, gate=""):
        self.steps, self.step_s, self.gate = steps, step_s, gate
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.2))
        self.net = torch.nn.parallel.DistributedDataParallel(net.to(ctx.device))
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        torch.manual_seed(1 + ctx.rank)

    def step(self, ctx):
        rest(self.step_s, self.gate, is_late=2 * ctx.step > self.steps)
        self.opt.zero_grad()
        loss = self.net(torch.randn(8, 16, device=ctx.device)).square().mean()
        loss.backward()
        self.opt.step()
        torch.distributed.all_reduce(total := loss.detach().clone())
        if ctx.step == self.steps:
            ctx.finish({"parameters": digest(self.net), "loss": total.item()})


class Raises:
    def __init__(self, ctx):
        self.count = 0

    def step(self, ctx):
        self.count += 1
        if self.count == 3:
            raise ValueError("the third step is cursed")


class Hangs:
    def __init__(self, ctx):
        self.count = 0

    def step(self, ctx):
        self.count += 1
        if self.count == 2:
            while True:
                time.sleep(0.1)


class Uncapturable:
    def __init__(self, ctx):
        self.data = {"source": [self.batches()]}

    def batches(self):
        while True:
            yield torch.zeros(1)

    def step(self, ctx):
        next(self.data["source"][0])


def make(ctx, *, n):
    return {"numbers": torch.arange(n)}


def total(ctx, *, numbers, scale):
    return {"total": int(numbers.sum()) * scale}


def joined(ctx, *, a, b):
    return {"total": int(a.sum() + b.sum())}
