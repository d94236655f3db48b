"""Functions of a graph on the source text of Python's own library: a model of letter pairs."""

import os
from pathlib import Path

import torch

LETTERS = 128


def read(ctx, *, limit):
    """Return the first `limit` bytes of the library's modules, in the order of their names."""
    text = bytearray()
    for file in sorted(Path(os.__file__).parent.glob("*.py")):
        text += file.read_bytes()
        if len(text) >= limit:
            break
    return {"text": bytes(text[:limit])}


def tokenized(ctx, text):
    """Return the letters as numbers, 0 for all that is not ASCII.

    Nine tenths train, the rest tests.
    """
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    tokens[tokens >= LETTERS] = 0
    cut = len(tokens) * 9 // 10
    return {"train": tokens[:cut].clone(), "test": tokens[cut:].clone()}


def sharded(ctx, tokens, *, count):
    """Cut the tokens into pieces that overlap by one letter, so that no pair is lost."""
    size = -(-len(tokens) // count)
    starts = range(0, len(tokens), size)
    return {"shards": [tokens[at : at + size + 1].clone() for at in starts]}


def pairs(ctx, shard):
    """Count how often each letter follows each letter in this shard."""
    codes = shard[:-1] * LETTERS + shard[1:]
    return {"counts": torch.bincount(codes, minlength=LETTERS**2).view(LETTERS, LETTERS)}


def merged(ctx, counts, *, smoothing):
    """Return the log-probabilities of the next letter."""
    total = sum(counts).double() + smoothing
    return {"model": (total / total.sum(1, keepdim=True)).log()}


def surprise(ctx, model, tokens):
    """Return the bits per letter of a text that was not used for training."""
    nats = -model[tokens[:-1], tokens[1:]].mean()
    return {"bits": (nats / torch.log(torch.tensor(2.0))).item()}
