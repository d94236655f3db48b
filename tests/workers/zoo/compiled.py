"""A network that torch compiles; after a restore it is compiled again."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.b(nn.functional.gelu(self.a(x))) + x


class Train:
    def __init__(self, ctx, *, backend="aot_eager"):
        self.net = torch.compile(Net().to(ctx.device), backend=backend)
        self.opt = torch.optim.Adam(self.net.parameters(), 1e-2)

    def step(self, ctx):
        x = torch.randn(4, 8, device=ctx.device)
        loss = (self.net(x) - x.flip(1)).square().mean()
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        return {"loss": loss}
