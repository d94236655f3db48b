"""Code that needs a package of its environment."""

import os
import time

import torch


class Tower:
    """Counts with a class of the package, so that its state refers to the package.

    If it `waits`, it counts no further than `steps`, and ends once there is a file `end`.
    """

    def __init__(self, ctx, *, steps=5, nap_s=0.0, waits=False):
        import towers

        self.steps, self.nap_s, self.tower = steps, nap_s, towers.Tower()
        self.waits = waits
        self.weights = torch.zeros(4)

    def step(self, ctx):
        time.sleep(self.nap_s)
        if ctx.step <= self.steps:
            self.tower.height += 1
        self.weights += 1
        if ctx.step >= self.steps and (not self.waits or os.path.exists("end")):
            import numpy
            import towers

            ctx.finish(
                {
                    "height": self.tower.height,
                    "file": towers.__file__,
                    "numpy": numpy.__version__,
                    "torch": torch.__version__,
                }
            )


def grow(ctx, x=None):
    import towers

    return {"y": torch.ones(2) * towers.ONE}
