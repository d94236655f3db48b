"""A recurrent network whose hidden state is carried from step to step, reading a file."""

from pathlib import Path

import torch
from torch import nn


class Train:
    def __init__(self, ctx, *, sparse=True):
        self.rnn = nn.LSTM(8, 16, 2, dropout=0.2).to(ctx.device)
        self.out = nn.Linear(16, 128).to(ctx.device)
        self.embed = nn.Embedding(128, 8, sparse=sparse).to(ctx.device)
        dense = [*self.rnn.parameters(), *self.out.parameters()]
        self.opts = [
            torch.optim.Adagrad(dense, 0.05),
            (torch.optim.SparseAdam if sparse else torch.optim.Adam)(self.embed.parameters(), 0.01),
        ]
        self.state = tuple(torch.zeros(2, 4, 16, device=ctx.device) for _ in range(2))
        self.text = Path(__file__).open()  # noqa: SIM115

    def step(self, ctx):
        read = self.text.read(40)
        if len(read) < 40:
            self.text.seek(0)
            read = self.text.read(40)
        tokens = torch.tensor([ord(c) % 128 for c in read], device=ctx.device).reshape(10, 4)
        hidden, state = self.rnn(self.embed(tokens[:-1]), self.state)
        self.state = tuple(part.detach() for part in state)
        loss = nn.functional.cross_entropy(self.out(hidden).flatten(0, 1), tokens[1:].flatten())
        loss.backward()
        for opt in self.opts:
            opt.step()
            opt.zero_grad()
        return {"loss": loss, "state": self.state[0].norm()}
