"""A job and a function that read the folder of a mount."""

import os
import time
from pathlib import Path


def _texts(at):
    return [(Path(at) / name).read_text() for name in ("a.txt", "deep/b.txt")]


class Reads:
    def __init__(self, ctx):
        self.first = Path("/data/a.txt").read_text()

    def step(self, ctx):
        ctx.finish({"texts": [self.first, _texts("/data")[1]]})


def reads(ctx, *, at):
    return {"texts": _texts(at)}


def words(ctx, corpus):
    return {"texts": _texts(corpus)}


class Words:
    def __init__(self, ctx):
        self.corpus = ctx.inputs["corpus"]

    def step(self, ctx):
        is_block = ctx.datablock("corpus") == self.corpus
        ctx.finish({"texts": _texts(self.corpus), "block": is_block})


class Slow:
    """Keeps the path, and a file that it has open there, until there is a file `end`."""

    def __init__(self, ctx):
        self.corpus = ctx.inputs["corpus"]
        self.file = (self.corpus / "a.txt").open()
        self.first = self.file.read(2)

    def step(self, ctx):
        if os.path.exists("end"):
            text = self.first + self.file.read()
            ctx.finish({"texts": [text, _texts(self.corpus)[1]]})
        time.sleep(0.05)
