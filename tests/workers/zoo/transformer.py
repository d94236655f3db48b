"""A small language model: bfloat16 autocast, a loss scaler, AdamW, a schedule with a lambda."""

import math

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, words=40, width=32):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, words, bias=False)
        self.out.weight = self.embed.weight  # tied
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(12))

    def forward(self, tokens):
        return self.out(self.body(self.embed(tokens), mask=self.mask, is_causal=True))


class Train:
    def __init__(self, ctx):
        self.model = Model().to(ctx.device)
        decay = [p for p in self.model.parameters() if p.ndim > 1]
        rest = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        self.opt = torch.optim.AdamW(groups, 3e-3)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.opt, lambda n: min(1, (n + 1) / 5) * 0.5 * (1 + math.cos(n / 30))
        )
        self.scaler = torch.amp.GradScaler(ctx.device.type, init_scale=256.0, growth_interval=4)
        self.draw = torch.Generator(ctx.device).manual_seed(11)

    def step(self, ctx):
        tokens = torch.randint(0, 40, (4, 13), generator=self.draw, device=ctx.device)
        with torch.autocast(ctx.device.type, torch.bfloat16):
            logits = self.model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad(set_to_none=True)
        self.schedule.step()
        return {"loss": loss, "norm": norm, "scale": self.scaler.get_scale()}
