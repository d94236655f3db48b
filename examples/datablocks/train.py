"""Learn to read the digits of a datablock; the trained model becomes another datablock."""

import torch
from torch import nn
from torch.nn import functional as F

BATCH = 64


class Train:
    def __init__(self, ctx, *, lr=5e-3, steps=600, seed=0):
        torch.manual_seed(seed)
        self.examples = {name: part.to(ctx.device) for name, part in ctx.inputs["examples"].items()}
        layers = nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
        self.model = nn.Sequential(*layers).to(ctx.device)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr)
        self.steps = steps

    def step(self, ctx):
        images, labels = self.examples["train.images"], self.examples["train.labels"]
        chosen = torch.randint(len(labels), (BATCH,), device=labels.device)
        loss = F.cross_entropy(self.model(images[chosen]), labels[chosen])
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        if ctx.step == self.steps:
            ctx.finish({"accuracy": self.accuracy(), "model": self.model.state_dict()})
        return {"loss": loss.item()}

    @torch.no_grad()
    def accuracy(self):
        images, labels = self.examples["test.images"], self.examples["test.labels"]
        return (self.model(images).argmax(1) == labels).float().mean().item()
