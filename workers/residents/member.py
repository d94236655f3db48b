"""Connects the process of one rank with its gang, which `coordinator` conducts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from workers.hardware.accelerator import Accelerator
from workers.ranks.native.rank import NativeRank
from workers.ranks.rank import Rank
from workers.ranks.shared_memory import Handles

COLLECTIVE_S = 1800.0  # as long as torch itself waits for a collective


class Member:
    """Connects a rank's own process with its gang.

    `collective` is False for ranks that are the executors of a graph: they have no process group.
    `native_on` is the kind of device on which the ranks use torch's own collectives; "" if they do
    not.
    """

    def __init__(
        self, handles: Handles, rank: int, *, collective: bool = True, native_on: str = ""
    ) -> None:
        # no time limit, as one node may take hours
        timeout_s = COLLECTIVE_S if collective else math.inf
        self.rank: Rank | NativeRank = (
            NativeRank(handles, rank, kind=native_on)
            if native_on
            else Rank(handles, rank, timeout_s=timeout_s, squash=collective, apart=not collective)
        )
        self.collective = collective
        self._is_away = False

    def offload(
        self, accelerator: Accelerator
    ) -> Callable[[torch.UntypedStorage], torch.Tensor | None]:
        """From now on, move the rank's memory off the device between its turns.

        Returns the function that finds an offloaded storage's content in host memory. Ranks with a
        device each have one turn, and keep their memory there.
        """
        if not (isinstance(self.rank, Rank) and self.collective) or accelerator.is_host:
            return lambda storage: None
        return self.rank.swap(accelerator).content

    def begin(self) -> None:
        """Wait for the first turn; afterwards the default process group exists."""
        if self.collective:
            self.rank.begin()
        else:
            self.rank.turns.join()

    def end(self) -> None:
        self.rank.end()

    @contextmanager
    def away(self, text: str) -> Iterator[None]:
        """Let the other ranks run while this rank waits for an order; such waits may be nested."""
        if self._is_away:
            yield
            return
        with self.rank.turns.away(text):
            self._is_away = True
            try:
                yield
            finally:
                self._is_away = False

    @contextmanager
    def between(self, step: int, at_cut: Callable[[], None]) -> Iterator[None]:
        """Stop at the safe point before step `step`. If a cut lies there, give the turn away and
        run `at_cut`.

        `at_cut` returns when the ranks have learned why all of them had to stop there.
        """
        self.rank.boundary(step)
        own = self.rank.turns
        if not own.is_cut(step):
            yield
            return
        cut = own.cut
        with self.away(f"the cut before step {step}"):
            at_cut()
            own.leave_cut(cut)
            yield
