"""Functions of a graph for the acceptance tests; the nodes of its chain print when they run."""

import torch
from train import digest, rest, say


def data(ctx, *, shards):
    return {"x": [torch.full((8, 16), float(n)) for n in range(shards)]}


def noisy(ctx, x, *, nap_s, gate=""):
    rest(nap_s, gate)
    return {"y": x.to(ctx.device) + torch.randn(8, 16, device=ctx.device)}


def merge(ctx, xs):
    return {"y": torch.cat(xs)}


def begin(ctx):
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.2), torch.nn.ReLU())
    opt = torch.optim.SGD(net.to(ctx.device).parameters(), lr=0.05, momentum=0.9)
    return {"state": (net, opt)}


def train(ctx, state, x, *, n, nap_s, gate=""):
    say("begin", n)
    net, opt = state
    rest(nap_s, gate)
    opt.zero_grad()
    net(x).square().mean().backward()
    opt.step()
    say("end", n)
    return {"state": state}


def finish(ctx, state):
    return {"parameters": digest(state[0])}


def stage(ctx, *, nap_s, x=None, y=None, n=0, gate=""):
    """A node of a pipeline: print when it runs, and mix its inputs with random numbers."""
    say("begin", n)
    rest(nap_s, gate)
    given = [one for one in (x, y) if one is not None]
    h = torch.randn(32, 32) + sum(one @ one.T for one in given) / 1000
    say("end", n)
    return {"h": h}


def summed(ctx, a, b):
    return {"parameters": [float(a.double().sum()), float(b.double().sum())]}
