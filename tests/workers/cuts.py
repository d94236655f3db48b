"""A gang that is asked for other seats and brought to a cut, in any order, while it steps.

`wander` is the job.  Its first rank forks what stands for the conductor of a resident: a process of
its own that wishes and calls whenever it likes, and tells those who stand at a cut to go on.  They
meet over a file of words, one row per rank.
"""

from __future__ import annotations

import mmap
import os
import random
import select
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from examples.gang_alone import state_hash
from tests.workers.ddp.jobs import Mlp
from workers.ranks import process_group, turns
from workers.ranks.turns import Turns

PAUSE_S = 0.0002
_AT, _ENDED, _LET_GO = range(3)  # words of a row; the last row has the number of cuts let go


class Notes:
    """What ranks and conductor tell each other."""

    def __init__(self, path: str, ranks: int) -> None:
        self.ranks = ranks
        with open(path, "ab+") as file:
            os.ftruncate(file.fileno(), mmap.PAGESIZE)
            self._map = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self.words = memoryview(self._map).cast("q")

    def row(self, rank: int) -> int:
        return rank * 4

    def standing(self) -> list[int]:
        """Before which step each rank stands that has not ended; 0 while it runs."""
        rows = (self.row(rank) for rank in range(self.ranks))
        return [self.words[at + _AT] for at in rows if not self.words[at + _ENDED]]


def wander(ctx: Any, *, notes: str, seed: int, steps: int, together: bool) -> dict[str, Any]:
    """Step, alone or `together`; by `seed` (0: nobody) seats and cuts are asked for meanwhile."""
    own, board = process_group._here.turns, Notes(notes, ctx.world_size)
    job = Mlp(ctx) if together else None
    with _conductor(own, board, seed if ctx.rank == 0 else 0):
        losses, cuts = [], []
        for step in range(1, steps + 1):
            own.boundary(step, 30.0)
            if own.is_cut(step):
                cuts.append(step)
                _stand(own, board, step)
            ctx.step = step
            if job is not None:
                losses.append(job.step(ctx)["loss"])
        board.words[board.row(ctx.rank) + _ENDED] = 1
    seats = {turn.seat for turn in own.log}
    told = {"losses": losses, "cuts": cuts, "seats": sorted(seats), "maps": own.generation}
    return told | {"hash": state_hash(job) if job is not None else ""}


def _stand(own: Turns, board: Notes, step: int) -> None:
    """As a rank does in a resident: without its seat, until it is told to go on."""
    row, let_go = board.row(own.rank), board.row(board.ranks) + _LET_GO
    with own.away(f"the cut before step {step}"):
        before = board.words[let_go]
        board.words[row + _AT] = step
        while board.words[let_go] == before:
            pause(PAUSE_S)
        board.words[row + _AT] = 0


@contextmanager
def _conductor(own: Turns, board: Notes, seed: int) -> Iterator[None]:
    """A process that disturbs the gang until all its ranks have ended."""
    pid = os.fork() if seed else 0
    if seed and not pid:
        status = 1
        try:
            _conduct(own, board, random.Random(seed), os.getppid())
            status = 0
        finally:
            os._exit(status)
    while seed and not own.cut:  # a conductor that comes late finds a step to cut before
        pause(PAUSE_S)
    yield
    if seed:
        with own.away("the conductor's end"):
            _, status = os.waitpid(pid, 0)
        assert not status, "the conductor failed"


def _conduct(own: Turns, board: Notes, dice: random.Random, parent: int) -> None:
    arena, calling = own.arena, True
    turns.call_to_cut(arena)
    while (standing := board.standing()) and os.getppid() == parent:
        if calling and all(standing):
            assert len(set(standing)) == 1, standing
            if dice.random() < 0.5:
                turns.wish(arena, dice.randint(1, board.ranks))
            turns.end_cut(arena)
            board.words[board.row(board.ranks) + _LET_GO] += 1
            while any(board.standing()):  # until all have gone on
                pause(PAUSE_S)
            calling = False
        elif dice.random() < 0.4:
            if calling or dice.random() < 0.5:
                turns.wish(arena, dice.randint(1, board.ranks))
            else:
                turns.call_to_cut(arena)
                calling = True
        pause(dice.random() * 10 * PAUSE_S)


def pause(seconds: float) -> None:
    """Unlike `time.sleep` in a gang, this gives no seat away."""
    select.select([], [], [], seconds)
