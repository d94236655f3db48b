"""Two networks against each other, each with its optimizer; spectral norm and a gradient hook."""

import torch
from torch import nn


class Train:
    def __init__(self, ctx):
        self.make = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 2)).to(
            ctx.device
        )
        judge = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 16))
        self.judge = nn.Sequential(judge, nn.LeakyReLU(0.2), nn.Linear(16, 1)).to(ctx.device)
        self.opts = {
            "make": torch.optim.Adam(self.make.parameters(), 1e-3, betas=(0.5, 0.9), amsgrad=True),
            "judge": torch.optim.NAdam(self.judge.parameters(), 2e-3),
        }
        self.clipped = 0
        self.handle = self.make[0].weight.register_hook(self.clip)

    def clip(self, grad):
        self.clipped += 1
        return grad.clamp(-0.01, 0.01)

    def step(self, ctx):
        loss = nn.functional.softplus
        real = torch.randn(8, 2, device=ctx.device) * 0.5 + 2
        made = self.make(torch.randn(8, 4, device=ctx.device))
        against = loss(self.judge(made.detach())).mean() + loss(-self.judge(real)).mean()
        self.opts["judge"].zero_grad()
        against.backward()
        self.opts["judge"].step()
        if ctx.step % 2:
            for_it = loss(-self.judge(made)).mean()
            self.opts["make"].zero_grad()
            for_it.backward()
            self.opts["make"].step()
        return {"against": against, "clipped": self.clipped}
