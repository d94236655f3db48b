"""Code that looks at its environment variables."""

import os
import subprocess

AT_IMPORT = {**os.environ}


def seen(ctx, *, names):
    """Returns what its module saw of these variables at its import, and it and a child see now."""
    child = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
    inherited = dict(line.split("=", 1) for line in child.splitlines() if "=" in line)
    return {name: [each.get(name) for each in (AT_IMPORT, os.environ, inherited)] for name in names}


class Say:
    """Says what each of its ranks sees of a variable."""

    def __init__(self, ctx, *, name):
        self.name = name

    def step(self, ctx):
        print(f"rank {ctx.rank} sees {os.environ.get(self.name)}")
        ctx.finish()
