"""Names the orders in which the simulated accelerator may run its work, and sets one.

An order is "eager", "lazy" or "random SEED".  The tests' usual one is lazy.  With `SIM_MODE=random`
and `SIM_SEED` it is that random one, in which every test marked `sim` then runs.
"""

from __future__ import annotations

import os

import torch

ENVIRON = {
    "SIM_MODE": os.environ.get("SIM_MODE", "lazy"),
    "SIM_SEED": os.environ.get("SIM_SEED", "0"),
}
IS_RANDOM = ENVIRON["SIM_MODE"] == "random"
USUAL = f"random {ENVIRON['SIM_SEED']}" if IS_RANDOM else ENVIRON["SIM_MODE"]


def several(seeds: int) -> list[str]:
    """Return the orders that a test of waits runs in: with so many seeds, unless one is named."""
    return [USUAL] if IS_RANDOM else ["eager", "lazy", *(f"random {seed}" for seed in range(seeds))]


def choose(order: str = USUAL) -> None:
    mode, _, seed = order.partition(" ")
    torch.sim.set_mode(mode, int(seed or 0))
