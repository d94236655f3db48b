"""A frozen base with small trained additions, accumulating gradients over three steps."""

import torch
from torch import nn


class Added(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + nn.functional.dropout(x, 0.1, self.training) @ self.down.T @ self.up.T


class Train:
    def __init__(self, ctx):
        self.net = nn.Sequential(*(Added(nn.Linear(16, 16)) for _ in range(3))).to(ctx.device)
        self.opt = torch.optim.AdamW([p for p in self.net.parameters() if p.requires_grad], 1e-2)
        self.seen = []
        for layer in self.net:
            layer.register_forward_hook(lambda layer, _, out: self.seen.append(out.mean().item()))

    def step(self, ctx):
        x = torch.randn(4, 16, device=ctx.device)
        loss = (self.net(x) - x.roll(1, 1)).square().mean() / 3
        loss.backward()
        if ctx.step % 3 == 0:
            self.opt.step()
            self.opt.zero_grad()
        self.seen = self.seen[-9:]
        return {"loss": loss, "seen": sum(self.seen)}
