"""The `ctx` that a tenant's code gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from workers.residents.endings import JSON


class Context:
    """The `ctx` that a tenant's code gets.  `step` is the number of the current step, from 1."""

    def __init__(self, *, device: torch.device, rank: int, world_size: int, params: JSON) -> None:
        self.device = device
        self.rank = rank
        self.world_size = world_size
        self.params = params
        self.inputs: JSON = {}
        self.blocks: dict[str, str] = {}  # "NAME@VERSION" -> input port of this datablock
        self.step = 0
        self.result: JSON | None = None
        self.logged: JSON = {}
        self.allocate: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return memory for a node's result.

        Other executors can read a block in this memory without a copy.
        """
        if self.allocate is not None:
            return self.allocate(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self.device)

    def finish(self, result: JSON | None = None) -> None:
        """End the task when this step returns.

        The declared outputs are taken from `result`, too.
        """
        if not isinstance(result, dict | None):
            raise TypeError(f"ctx.finish takes a dict, not a {type(result).__name__}")
        self.result = result or {}

    def log(self, **metrics: Any) -> None:
        """Add metrics of this step to the dict that `step` returns."""
        self.logged.update(metrics)

    def datablock(self, name: str) -> Any:
        """Return the input that is this datablock: "NAME" (the newest) or "NAME@VERSION"."""
        named = [block for block in self.blocks if name in (block, block.partition("@")[0])]
        if not named:
            there = ", ".join(sorted(self.blocks)) or "none"
            raise LookupError(
                f"ctx.datablock({name!r}): no input of this task is that datablock. Declare it in"
                f' the descriptor: `inputs: {{PORT: "datablock:{name}"}}`. Declared: {there}.'
            )
        newest = max(named, key=lambda block: int(block.partition("@")[2]))
        return self.inputs[self.blocks[newest]]
