"""The ranks of a command as its stub sees them: what each is told, and on how many seats they sit.

A rank is a process of the command like any other, so the stub cannot rely on it: what they share
(`workers.ground`) is in their hands.  So here nobody waits for its lock, which a rank might keep
for ever or be frozen with, and nobody believes what is read there but for the number of seats.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict
from pathlib import Path

from workers import ground, turns
from workers.ground import Ground

GANG = "ROUNDHOUSE_GANG"  # of a rank's environment: `Handles` and "rank", as JSON
SITE = Path(__file__).parent / "site"  # of the PYTHONPATH of its ranks
LOOK_S = 0.05  # so often it is looked whether the seats have changed


class Gang:
    """Made once for each time that the command begins."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.handles = ground.make(ranks)
        self.is_told = True  # that they sit on so many seats as are wanted
        self._wanted = 1
        self._board = Ground(self.handles)
        self._port = _free_port()
        turns.seat_all(self._board, 1)

    @property
    def fds(self) -> tuple[int, ...]:
        """What its ranks inherit."""
        handles = self.handles
        return (handles.board, handles.land, handles.lock, *handles.bells)

    # --- seats ---

    def want(self, seats: int, *, tell: bool) -> None:
        """It comes true where all ranks meet in a collective; not before, and perhaps never."""
        self._wanted, self.is_told = seats, not tell

    def has_resized(self) -> int:
        """The seats that they have come to sit on, told once; 0 while there is nothing to tell."""
        words, seats = self._board.words, turns.seats(self._board)
        # One word, written at once: with the lock or without, and again until it has come true.
        # Never 0: a rank that has just seen a wish would find none.
        if words[turns.WISH] != self._wanted and (words[turns.WISH] or seats != self._wanted):
            words[turns.WISH] = self._wanted
        if self.is_told or seats != self._wanted:
            return 0
        self.is_told = True
        return self._wanted

    # --- what a rank is told ---

    def environment(self, rank: int, restarts: int) -> dict[str, str]:
        """As torchrun says it, and how it finds the others."""
        given = os.environ.get("PYTHONPATH")
        gang = {**asdict(self.handles), "rank": rank}
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "ROLE_RANK": str(rank),
            "ROLE_NAME": "default",
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "GROUP_WORLD_SIZE": "1",
            "ROLE_WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port),
            "TORCHELASTIC_RUN_ID": "roundhouse",
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            GANG: json.dumps(gang),
            "PYTHONPATH": os.pathsep.join([str(SITE), *([given] if given else [])]),
        }


def _free_port() -> int:
    """For what a script does with torch's own means; behind the walls it has its own loopback."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
