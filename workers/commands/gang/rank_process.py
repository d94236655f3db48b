"""Joins a process of a command to its gang when it asks for its process group
(`workers.commands.site`).

    script -> init_process_group(...) -> here: joined to the gang -> the group is `splice`

From then on the process takes turns with the other ranks, as a rank of a job does; before that it
runs like any process.  With native collectives it takes no turns, and the group is `native`, which
hands its calls to torch's own.

The first process of a rank that asks becomes the rank.  Further processes that the script starts,
and a script that makes a world of another size, get torch's own group.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

from workers.ranks import process_group, turns
from workers.ranks.native import group as native_group
from workers.ranks.native.rank import NativeRank
from workers.ranks.rank import Rank
from workers.ranks.shared_memory import GANG, LAND_BYTES, STORED_LAND_BYTES, Arena, Handles
from workers.ranks.turns import RankState

# Ranks that wait for each other, or for a dead rank, are detected without a deadline.  A deadline
# would also expire while all ranks are frozen.
DEADLINE_S = 365 * 86400.0
# Seconds that a rank whose group failed waits at most for the ranks that ended before it.
GO_FIRST_S = 10.0

_rank: Rank | NativeRank | None = None
_begun = 1  # default groups made so far


def init_process_group(
    stock: Callable[..., None], arguments: tuple[Any, ...], named: dict[str, Any]
) -> None:
    """Replace torch's function, which is `stock`: any requested backend becomes one of ours."""
    global _rank
    asked = {*arguments[:1], named.get("backend")}
    is_our_own = bool(asked & {process_group.BACKEND, native_group.BACKEND})
    if not is_our_own and _rank is None:
        _rank = _joined(named.get("world_size", -1))
    if is_our_own or _rank is None:
        stock(*arguments, **named)
    elif not dist.is_initialized():
        _begin_again(_rank)


def _joined(world_size: int) -> Rank | NativeRank | None:
    """Make this process a rank, and return it on its first turn; None if the process is to be no
    rank.

    Raises RuntimeError if it cannot become one.
    """
    told = json.loads(os.environ[GANG])
    number, engine, kind = told.pop("rank"), told.pop("engine"), told.pop("kind")
    handles = Handles(**{**told, "bells": tuple(told["bells"])})
    if world_size not in (-1, handles.ranks):
        return None
    if not _is_open(handles):
        raise RuntimeError(
            f"rank {number} cannot reach the others: what started this process closed the"
            " descriptors that it was given; name the script itself in `command`"
        )
    if turns.state(Arena(handles), number) != RankState.NEW:
        return None
    _open_lock_anew(handles.lock)
    rank: Rank | NativeRank = (
        NativeRank(handles, number, kind=kind)
        if engine == native_group.BACKEND
        else Rank(handles, number, timeout_s=DEADLINE_S)
    )
    rank.begin()
    atexit.register(_leave, rank, os.getpid())
    sys.excepthook = partial(_tell, sys.excepthook, rank)
    return rank


def _open_lock_anew(fd: int) -> None:
    """Open the lock's file again, so that no other process shares its locks; keep the descriptor's
    number.

    Where ranks share one open file, CRIU stores the locks of one rank only.
    """
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    os.dup2(own, fd)
    os.close(own)


def _begin_again(rank: Rank | NativeRank) -> None:
    """Make a default group again after the script destroyed one.

    All ranks take part, as the group's name is reused.
    """
    global _begun
    _begun += 1
    store = rank.store()
    if store.add(f"ranks that begin group {_begun}", 1) == rank.turns.arena.ranks:
        store.set(f"all begin group {_begun}", b"")
    store.wait([f"all begin group {_begun}"])
    rank.start()


def _is_open(handles: Handles) -> bool:
    """True if these descriptors still refer to the gang's shared memory.

    A script may have closed them.
    """
    try:
        return os.fstat(handles.land).st_size in (LAND_BYTES, STORED_LAND_BYTES)
    except OSError:
        return False


def _leave(rank: Rank | NativeRank, pid: int) -> None:
    """End this process's rank; called when the process ends for any reason."""
    if os.getpid() == pid:
        _let_others_go_first(rank)
        rank.finish()


def _tell(stock: Callable[..., None], rank: Rank | NativeRank, *exception: Any) -> None:
    _let_others_go_first(rank)
    stock(*exception)


def _let_others_go_first(rank: Rank | NativeRank) -> None:
    """If this rank ends because of other ranks, wait until those have ended.

    So the failure of the first rank is reported.
    """
    arena, until_s = rank.turns.arena, time.monotonic() + GO_FIRST_S
    if not rank.turns.words[turns.FAILED]:
        return
    others = [other for other in range(arena.ranks) if other != rank.number]
    for other in (each for each in others if turns.state(arena, each) == RankState.DONE):
        while not arena.is_dead(other) and time.monotonic() < until_s:
            arena.sleep(rank.number, 0.01)
