"""Jobs as a tenant would write them; each is run by real residents."""

import hashlib
import random
import sys
import time

import numpy as np
import torch


def digest(model):
    parts = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(parts).hexdigest()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(32, 16)
        self.inner = torch.nn.Linear(16, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.out = torch.nn.Linear(16, 32, bias=False)
        self.out.weight = self.embed.weight  # tied
        self.drop = torch.nn.Dropout(0.2)

    def forward(self, x):
        return self.out(self.drop(torch.relu(self.norm(self.inner(self.embed(x))))))


class Everything:
    """Dropout, three sources of randomness, AdamW, a schedule with a lambda, ties, views, aliases."""

    def __init__(self, ctx, *, steps=40, nap_s=0.0):
        self.model = Net().to(ctx.device)
        self.opt = torch.optim.AdamW(self.model.parameters(), 3e-3)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.opt, lambda e: 0.97**e)
        self.own = torch.Generator().manual_seed(5)
        self.rng = np.random.default_rng(7)
        self.order = iter([i % 7 for i in range(10_000)])
        self.table = np.zeros(8)
        self.table_as_tensor = torch.from_numpy(self.table)
        self.running = torch.zeros(4)
        self.row = self.running[1:3]  # a view
        self.seen = []
        self.steps, self.nap_s = steps, nap_s
        self.opt.register_step_post_hook(self.count)
        self.counted = 0
        print("built")

    def count(self, *_):
        self.counted += 1

    def step(self, ctx):
        x = torch.randint(0, 32, (16,), generator=self.own)
        noise = float(np.random.rand()) + random.random() + self.rng.normal()
        loss = torch.nn.functional.cross_entropy(self.model(x), (x + next(self.order)) % 32)
        (loss * (1 + 0.01 * noise)).backward()
        self.opt.step()
        self.opt.zero_grad()
        self.schedule.step()
        self.table_as_tensor += 1
        self.row += loss.detach()
        assert self.table[0] == ctx.step, "the array no longer looks into the tensor"
        assert self.running[1] == self.row[0], "the view no longer looks into its base"
        assert self.model.out.weight is self.model.embed.weight, "the tie is cut"
        assert self.counted == ctx.step, "the optimizer's hook is gone"
        self.seen.append(ctx.step)
        print(f"step {ctx.step}")
        time.sleep(self.nap_s)
        if ctx.step == self.steps:
            whole = self.seen == list(range(1, self.steps + 1))
            ctx.finish(
                {
                    "digest": digest(self.model),
                    "loss": loss.item(),
                    "norm": self.model.norm.running_var.sum().item(),
                    "row": self.row.sum().item(),
                    "whole": whole,
                }
            )
        return {"loss": loss, "noise": noise}


class Count:
    """Steps quickly and does nothing."""

    def __init__(self, ctx, *, steps=10**9, nap_s=0.005, megabytes=0):
        self.steps, self.nap_s, self.done = steps, nap_s, 0
        self.ballast = torch.ones(megabytes << 18)

    def step(self, ctx):
        self.done += 1
        assert self.done == ctx.step
        time.sleep(self.nap_s)
        if ctx.step == self.steps:
            ctx.finish({"done": self.done})
        return {"done": self.done}


class Hang:
    def __init__(self, ctx):
        pass

    def step(self, ctx):
        time.sleep(1000)


class Raise:
    def __init__(self, ctx, *, at=3):
        self.at = at

    def step(self, ctx):
        if ctx.step == self.at:
            self.deeper(ctx.step)

    def deeper(self, step):
        raise ValueError(f"no good at {step}")


class Chatty:
    def __init__(self, ctx, *, lines=1000):
        self.lines = lines

    def step(self, ctx):
        for i in range(self.lines):
            print(f"line {i}")
        print("to stderr", file=sys.stderr)
        print("no end", end="")
        ctx.finish()


def tokenize(ctx, *, text):
    print("tokenizing")
    return {"tokens": torch.tensor([ord(c) for c in text]), "count": len(text)}


def total(ctx, tokens, *, plus=0):
    return {"total": tokens.sum() + plus}
