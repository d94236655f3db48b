"""Manages a command's ranks for its stub: their environment and the number of their slots.

A rank is a process of the command, so the stub cannot trust it: the ranks can write to the shared
memory (`workers.ranks.shared_memory`). So the stub never waits for the lock there, which a rank
might hold for ever or while frozen. From the shared memory the stub uses only the number of slots,
and where the ranks stand.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

from app.core.device.gang_watch import RankStanding
from app.core.model.provisions.collectives import NATIVE
from workers.commands.gang.gathering import Gathering
from workers.ranks import shared_memory, turns
from workers.ranks.native.standings import native_standings
from workers.ranks.shared_memory import GANG, LAND_BYTES, STORED_LAND_BYTES, Arena, Handles
from workers.ranks.standings import standings

JSON = dict[str, Any]

SITE = Path(__file__).parents[1] / "site"  # on the PYTHONPATH of the ranks
LOOK_S = 0.05  # interval at which the stub checks for a changed number of slots
WATCH_S = 0.5  # how often the stub looks for a rank that is behind


class Gang:
    """The ranks of one start of the command.

    `engine` is whose collectives they use (`core.model.provisions.collectives`).  With torch's own
    they come to a common point before their processes are stored (`gathering`).
    """

    def __init__(self, handles: Handles, slots: int, engine: str, kind: str) -> None:
        self.ranks, self.handles = handles.ranks, handles
        self.engine, self.kind = engine, kind
        self.inside = handles  # handles in the form that the ranks have
        self.is_told = True  # False until the wanted number of slots is reached and reported
        self._wanted = slots
        self.board = Arena(handles)
        self.gathering = Gathering(self.board) if engine == NATIVE else None
        self._port = _free_port()

    @classmethod
    def made(cls, ranks: int, slots: int, engine: str, kind: str, *, is_stored: bool) -> Gang:
        """Return a new gang; with `is_stored` its processes may be stored."""
        land_bytes = STORED_LAND_BYTES if is_stored else LAND_BYTES
        handles = shared_memory.make(ranks, land_bytes=land_bytes)
        gang = cls(handles, slots, engine, kind)
        turns.seat_all(gang.board, slots)
        return gang

    @classmethod
    def adopted(cls, inside: JSON, pid: int, slots: int, engine: str, kind: str) -> Gang:
        """Return the gang of restored ranks, whose memory process `pid` has open.

        `inside` are their handles.  Raises OSError, ValueError, TypeError if they are not there.
        """
        theirs = Handles(**{**inside, "bells": tuple(inside["bells"])})
        numbers = theirs.board, theirs.land, theirs.lock
        board, land, lock = (os.open(f"/proc/{pid}/fd/{n}", os.O_RDWR) for n in numbers)
        handles = Handles(ranks=theirs.ranks, board=board, land=land, lock=lock, bells=())
        gang = cls(handles, slots, engine, kind)
        gang.inside = theirs
        if gang.gathering is not None:
            gang.gathering.adopt()
        return gang

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors that its ranks inherit."""
        handles = self.handles
        return (handles.board, handles.land, handles.lock, *handles.bells)

    # --- slots ---

    def want(self, seats: int, *, tell: bool) -> None:
        """Request a number of slots; it takes effect when all ranks meet in a collective."""
        self._wanted, self.is_told = seats, not tell

    def has_resized(self) -> int:
        """Return the new number of slots once, when the ranks have adopted it; in all other calls
        0.
        """
        words, seats = self.board.words, turns.seats(self.board)
        # The request is one word, so the write is atomic even without the lock. The stub writes it
        # again until the ranks have obeyed. It never writes 0: a rank that has just seen a request
        # relies on finding one.
        if words[turns.WISH] != self._wanted and (words[turns.WISH] or seats != self._wanted):
            words[turns.WISH] = self._wanted
        if self.is_told or seats != self._wanted:
            return 0
        self.is_told = True
        return self._wanted

    # --- where the ranks stand ---

    def standings(self) -> list[RankStanding]:
        """Return where each rank stands, for the sentence about a rank that is behind."""
        if self.gathering is not None:
            return native_standings(self.board)
        return standings(self.board)

    # --- the environment of a rank ---

    def environment(self, rank: int, restarts: int, path: str) -> dict[str, str]:
        """Return a rank's environment: torchrun's variables, and how it finds the other ranks.

        `path` is the PYTHONPATH of a command without ranks.
        """
        gang = {**asdict(self.handles), "rank": rank, "engine": self.engine, "kind": self.kind}
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
            "PYTHONPATH": os.pathsep.join([str(SITE), *([path] if path else [])]),
        }


def _free_port() -> int:
    """Return a free port for torch's own rendezvous.

    A sandbox has a loopback of its own, so no other task can take the port.
    """
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
