"""Code that needs a package of its environment."""

import time

import torch


class Tower:
    """Counts with a class of the package, so that its state refers to the package."""

    def __init__(self, ctx, *, steps=5, nap_s=0.0):
        import towers

        self.steps, self.nap_s, self.tower = steps, nap_s, towers.Tower()
        self.weights = torch.zeros(4)

    def step(self, ctx):
        time.sleep(self.nap_s)
        self.tower.height += 1
        self.weights += 1
        if ctx.step == self.steps:
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
