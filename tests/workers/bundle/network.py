"""What reaches the network through the proxy of its task."""

import hashlib
import os
import time
import urllib.request


class Download:
    """Fetch a file in each step, with what Python itself brings.

    If it `waits`, it goes on until there is a file `end`.
    """

    def __init__(self, ctx, *, url, steps=40, waits=False):
        self.url, self.steps, self.waits, self.sha256 = url, steps, waits, ""

    def step(self, ctx):
        with urllib.request.urlopen(self.url, timeout=60) as answer:
            self.sha256 = hashlib.sha256(answer.read()).hexdigest()
        time.sleep(0.02)
        if ctx.step >= self.steps and (not self.waits or os.path.exists("end")):
            ctx.finish({"sha256": self.sha256})
