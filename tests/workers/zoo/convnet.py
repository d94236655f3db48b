"""Convolutions with batch norm, whose statistics change in forward, and averaged weights."""

import torch
from torch import nn


class Train:
    def __init__(self, ctx):
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.utils.parametrizations.weight_norm(nn.Linear(16, 5)),
        ).to(ctx.device)
        self.opt = torch.optim.RMSprop(self.net.parameters(), 1e-3, momentum=0.5)
        self.plan = torch.optim.lr_scheduler.OneCycleLR(self.opt, 1e-2, total_steps=200)
        self.mean = torch.optim.swa_utils.AveragedModel(
            self.net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
        )

    def step(self, ctx):
        images = torch.rand(6, 3, 8, 8, device=ctx.device)
        images = images.flip(-1) if torch.rand((), device=ctx.device) < 0.5 else images
        wanted = torch.randint(5, (6,), device=ctx.device)
        loss = nn.functional.cross_entropy(self.net(images), wanted)
        self.opt.zero_grad()
        loss.backward()  # the gradients stay until the next step
        self.opt.step()
        self.plan.step()
        self.mean.update_parameters(self.net)
        return {"loss": loss, "lr": self.plan.get_last_lr()[0]}
