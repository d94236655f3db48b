"""Gives a rank its turns, exchange, squashing and offload, inside its own process.

Nothing here knows the scheduler: the process that hosts a gang calls `turns.wish` to resize it.
`examples.gang_alone` runs a gang by hand.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from workers.hardware.accelerator import Accelerator
from workers.ranks import process_group, turns
from workers.ranks.rendezvous import Rendezvous
from workers.ranks.replica_dedup import Squash
from workers.ranks.shared_memory import Arena, Handles
from workers.ranks.swap import RankOffload
from workers.ranks.turns import Turns

JSON = dict[str, Any]

TIMEOUT_S = 60.0


class Rank:
    """A rank in its process; holds its turns, exchange, squashing and offload."""

    def __init__(
        self,
        handles: Handles,
        rank: int,
        *,
        squash: bool = True,
        swap: bool = False,
        slice_s: float = 1.0,
        timeout_s: float = TIMEOUT_S,
        accelerator: Accelerator | None = None,
        apart: bool = False,
    ) -> None:
        self.stow: RankOffload | None = None
        self.turns = Turns(Arena(handles), rank, slice_s=slice_s, apart=apart)
        if swap:
            self.swap(accelerator or Accelerator("cpu"))
        self.exchange = Rendezvous(self.turns, timeout_s=timeout_s)
        self.squash = Squash(self.exchange) if squash else None
        self.timeout_s = timeout_s

    def swap(self, accelerator: Accelerator) -> RankOffload:
        """From now on, offload the rank's device memory between its turns."""
        self.stow = RankOffload(accelerator)
        self.turns.leave, self.turns.enter = self.stow.leave, self.stow.enter
        register_optimizer_step_post_hook(self.stow.after_optimizer)
        return self.stow

    def begin(self) -> None:
        """Install the process group, and wait for the first turn."""
        process_group.install(self.exchange)
        if self.squash is not None:
            self.squash.install()
        self.turns.join()
        self.start()

    def start(self) -> None:
        """Create the default group."""
        process_group.start(self.turns, self.timeout_s)

    def store(self) -> process_group.SharedStore:
        """Return a store of the gang's keys."""
        return process_group.SharedStore(self.turns, self.timeout_s)

    @property
    def number(self) -> int:
        return self.turns.rank

    def boundary(self, step: int, seats: int | None = None) -> None:
        """Stop before step `step` if a stop is due.

        From this step on there are `seats` slots, if all ranks ask for the same number.
        """
        if self.stow is not None:
            self.stow.begin_step()
        words = self.turns.words
        if seats not in (None, words[turns.SEATS], words[turns.WISH]):
            turns.wish(self.turns.arena, seats)
        self.turns.boundary(step, self.timeout_s)

    def end(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        self.finish()

    def finish(self) -> None:
        """Mark this rank as done."""
        self.turns.finish()

    def accounts(self) -> JSON:
        squash, stow, words = self.squash, self.stow, self.turns.words
        return {
            "turns": words[self.turns.me + turns.TURNS],
            "log": [asdict(turn) for turn in self.turns.log],
            "events": squash.events if squash else [],
            "updates": squash.updates if squash else 0,
            "spared": squash.spared if squash else 0,
            "common_bytes": squash.common_bytes() if squash else 0,
            "out_bytes": stow.out_bytes if stow else 0,
            "in_bytes": stow.in_bytes if stow else 0,
            "last_bytes": stow.last_bytes if stow else 0,
            "largest_bytes": stow.largest_bytes if stow else 0,
        }
