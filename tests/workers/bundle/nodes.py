"""Functions of graphs."""

import os
import random
import time

import numpy
import torch


def start(ctx, *, seed=0, size=4):
    return {"y": torch.full((size,), float(seed), device=ctx.device)}


def add(ctx, x, *, by=1.0):
    return {"y": x + by}


def double(ctx, x, *, nap_s=0.0):
    rest(nap_s)
    return {"y": x * 2}


def total(ctx, xs):
    return {"y": torch.stack(list(xs)).sum(0)}


def draw(ctx, x):
    """Different numbers from each source, that depend on nothing but the node's name."""
    drawn = torch.rand(4, device=ctx.device) + random.random() + float(numpy.random.random())
    return {"y": x + drawn}


def rest(nap_s):
    """Sleep so long, or until the test lets the graph end (the file `end`)."""
    until_s = time.monotonic() + nap_s
    while (left_s := until_s - time.monotonic()) > 0 and not os.path.exists("end"):
        time.sleep(min(left_s, 0.02))


def nap(ctx, x, *, nap_s=0.004):
    rest(nap_s)
    return draw(ctx, x)


def pieces(ctx, *, count=5, size=4):
    return {"parts": [torch.full((size,), float(n), device=ctx.device) for n in range(count)]}


def pairs(ctx, x, y):
    return {"y": x * 10 + y}


def named(ctx, **ports):
    """What it is given, in that order."""
    return {"y": ",".join(ports)}


def grow(ctx, state, *, by=1.0):
    """Writes to what it is given."""
    state += by
    return {"state": state}


def scribble(ctx, x):
    x += 1
    return {"y": x.clone()}


def begin_training(ctx, *, size=300):
    torch.manual_seed(1)
    model = torch.nn.Linear(size, size).to(ctx.device)
    return {"state": {"model": model, "opt": torch.optim.AdamW(model.parameters(), 0.01)}}


def train(ctx, state, *, nap_s=0.003):
    model, opt = state["model"], state["opt"]
    loss = model(torch.randn(8, model.in_features, device=ctx.device)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    rest(nap_s)
    ctx.log(loss=loss.item())
    return {"state": state}


def checksum(ctx, state):
    flat = torch.cat([p.detach().flatten() for p in state["model"].parameters()])
    return {"sum": flat.double().sum().item(), "first": flat[:3].tolist()}


def listed(ctx, x):
    return {"y": x.tolist()}


def lying(ctx, x, gate):
    """Is its memory that of a file?  And what is in it."""
    at = x.data_ptr()
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, *_, last = line.split()
            begin, end = (int(n, 16) for n in span.split("-"))
            if begin <= at < end:
                return {"y": [last.startswith("/"), x.sum().item()]}


def expanded(ctx):
    return {"y": torch.ones(1).expand(2**51)}


def first(ctx, x):
    return {"y": x[0].clone()}


def sparse(ctx):
    return {"y": torch.eye(3).to_sparse()}


def dense(ctx, x):
    return {"y": x.to_dense()}


def wrong(ctx, x):
    raise ValueError(f"no good: {x.sum().item()}")


def misnamed(ctx, x):
    return {"z": x}


def with_history(ctx, x):
    weight = torch.ones(4, requires_grad=True)
    return {"y": x * weight}


def a_generator(ctx, x):
    return {"y": (n for n in range(3))}


def stop(ctx, x):
    ctx.finish({"stopped": x.sum().item()})
    return {"y": x}


def indices(ctx, *, count):
    return {"parts": list(range(count))}


def filled(ctx, n, *, size):
    return {"y": torch.full((size,), float(n), device=ctx.device)}


def summed(ctx, x):
    return {"y": x.double().sum().item()}


def said(ctx, x):
    print(float(x.double().sum()))
    return {"y": x.clone()}
