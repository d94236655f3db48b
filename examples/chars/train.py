"""Learn to write Python: a small character transformer, on the source of the standard library.

A job is a class. It imports nothing of Roundhouse and has no code that saves or loads. It may be
paused between any two steps and go on elsewhere; the result has the same bits.
"""

import hashlib
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

TEXT_BYTES = 400_000
CONTEXT = 48  # bytes that the model sees before the predicted one
BATCH = 8


class Train:
    """A training job; `work` minibatches make one step."""

    def __init__(self, ctx, *, lr=1e-3, width=48, layers=2, steps=400, seed=0, work=1):
        torch.manual_seed(seed)
        text = standard_library()
        self.train, self.test = text[: -len(text) // 10], text[-len(text) // 10 :]
        self.model = Writer(width, layers).to(ctx.device)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr)
        self.rate = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, T_max=steps)
        # a torch generator, because its state can be captured
        self.dice = torch.Generator().manual_seed(seed)
        self.steps, self.work, self.device = steps, work, ctx.device

    def step(self, ctx):
        loss = sum(self.loss(self.batch(self.train)) for _ in range(self.work)) / self.work
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        self.rate.step()
        if ctx.step % 100 == 0:
            print(f"step {ctx.step}: loss {loss.item():.4f}")
        if ctx.step == self.steps:
            ctx.finish(
                {
                    "loss": loss.item(),
                    "accuracy": self.accuracy(),
                    "parameters": fingerprint(self.model),
                }
            )
        return {"loss": loss.item()}

    def batch(self, text):
        """Return (BATCH, CONTEXT + 1) random pieces of the text."""
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1), generator=self.dice)
        return text[starts + torch.arange(CONTEXT + 1)].long().to(self.device)

    def loss(self, pieces):
        guesses = self.model(pieces[:, :-1])
        return F.cross_entropy(guesses.flatten(0, 1), pieces[:, 1:].flatten())

    @torch.no_grad()
    def accuracy(self):
        """Return the share of bytes guessed right, over a few unseen pieces."""
        self.model.eval()
        pieces = torch.cat([self.batch(self.test) for _ in range(20)])
        return (self.model(pieces[:, :-1]).argmax(-1) == pieces[:, 1:]).float().mean().item()


class Writer(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.out = nn.Linear(width, 256)
        later = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1)
        self.register_buffer("later", later, persistent=False)

    def forward(self, pieces):
        """Map (batch, time) bytes to (batch, time, 256) scores of the next byte."""
        time = pieces.shape[1]
        x = self.bytes(pieces) + self.places.weight[:time]
        for layer in self.layers:
            x = layer(x, src_mask=self.later[:time, :time])
        return self.out(x)


def standard_library():
    """Return the first TEXT_BYTES bytes of Python's own modules, in the order of their names."""
    text = bytearray()
    for file in sorted(Path(os.__file__).parent.glob("*.py")):
        text += file.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    return torch.frombuffer(text[:TEXT_BYTES], dtype=torch.uint8).clone()


def fingerprint(model):
    """Return the SHA-256 of all parameters, bit by bit."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
