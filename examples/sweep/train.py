"""Tell two spirals apart: a small network, whose result depends much on how it is trained.

A job is a class. It imports nothing of Roundhouse and has no code that saves or loads. It may be
paused between any two steps and go on elsewhere; the result has the same bits.
"""

import hashlib
import math

import torch
from torch import nn
from torch.nn import functional as F

POINTS, BATCH = 2000, 64
MINIBATCHES = 20  # of a step


class Train:
    def __init__(self, ctx, *, lr=1e-3, width=64, optimizer="adam", steps=480, seed=0):
        torch.manual_seed(seed)
        points, labels = spirals(POINTS)
        half = POINTS // 2
        self.train, self.test = (points[:half], labels[:half]), (points[half:], labels[half:])
        self.model = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )
        kind = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[optimizer]
        self.opt = kind(self.model.parameters(), lr)
        # a torch generator, because its state can be captured
        self.dice = torch.Generator().manual_seed(seed)
        self.steps = steps

    def step(self, ctx):
        for _ in range(MINIBATCHES):
            points, labels = self.train
            chosen = torch.randint(len(labels), (BATCH,), generator=self.dice)
            self.opt.zero_grad()
            self.loss(points[chosen], labels[chosen]).backward()
            self.opt.step()
        with torch.no_grad():
            loss = self.loss(*self.test).item()
        if ctx.step == self.steps:
            ctx.finish({"loss": loss, "parameters": fingerprint(self.model)})
        return {"loss": loss}

    def loss(self, points, labels):
        return F.binary_cross_entropy_with_logits(self.model(points).squeeze(1), labels)


def spirals(number):
    """Return points (number, 2) of two spirals with some noise, and to which each belongs."""
    dice = torch.Generator().manual_seed(0)
    turn = torch.rand(number, generator=dice).sqrt() * 3 * math.pi
    labels = torch.randint(2, (number,), generator=dice).float()
    angle = turn + math.pi * labels
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1) / (3 * math.pi)
    return points + 0.02 * torch.randn(points.shape, generator=dice), labels


def fingerprint(model):
    """Return the SHA-256 of all parameters, bit by bit."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
