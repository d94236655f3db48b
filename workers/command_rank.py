"""In a process of a command's rank, once it asks for its process group (`workers.site`).

    script -> init_process_group(...) -> here: joined to the gang -> the group is ours

From then on it takes turns with the other ranks as a rank of a job does; before that it runs as any
process.  The first process of a rank that asks is the rank; another one that the script starts, and
a script that makes a world of another size, gets what torch gives it.
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

from workers import collectives, turns
from workers.command_gang import GANG
from workers.ground import LAND_BYTES, Ground, Handles
from workers.splice import Rank
from workers.turns import State

# Ranks that wait for each other, or for one that has died, are found out without any deadline; and
# a clock goes on while all of them are frozen.
DEADLINE_S = 365 * 86400.0
GO_FIRST_S = 10.0  # so long who ends because of others waits for them to be gone

_rank: Rank | None = None
_begun = 1  # default groups so far


def init_process_group(
    stock: Callable[..., None], arguments: tuple[Any, ...], named: dict[str, Any]
) -> None:
    """As torch's own, which is `stock`; whatever backend is asked for, it is `splice`."""
    global _rank
    is_our_own = collectives.BACKEND in (*arguments[:1], named.get("backend"))
    if not is_our_own and _rank is None:
        _rank = _joined(named.get("world_size", -1))
    if is_our_own or _rank is None:
        stock(*arguments, **named)
    elif not dist.is_initialized():
        _begin_again(_rank)


def _joined(world_size: int) -> Rank | None:
    """This process as the rank that it is, on its first turn; None where it is none.

    Raises RuntimeError where it cannot be one.
    """
    told = json.loads(os.environ[GANG])
    number = told.pop("rank")
    handles = Handles(**{**told, "bells": tuple(told["bells"])})
    if world_size not in (-1, handles.ranks):
        return None
    if not _is_open(handles):
        raise RuntimeError(
            f"rank {number} cannot reach the others: what started this process closed the"
            " descriptors that it was given; name the script itself in `command`"
        )
    if turns.state(Ground(handles), number) != State.NEW:
        return None
    rank = Rank(handles, number, timeout_s=DEADLINE_S)
    rank.begin()
    atexit.register(_leave, rank, os.getpid())
    sys.excepthook = partial(_tell, sys.excepthook, rank)
    return rank


def _begin_again(rank: Rank) -> None:
    """A default group after one that was destroyed: by all, as it takes that one's name."""
    global _begun
    _begun += 1
    store = collectives.SharedStore(rank.turns, rank.timeout_s)
    if store.add(f"ranks that begin group {_begun}", 1) == rank.turns.ground.ranks:
        store.set(f"all begin group {_begun}", b"")
    store.wait([f"all begin group {_begun}"])
    collectives.start(rank.turns, rank.timeout_s)


def _is_open(handles: Handles) -> bool:
    """Whether these descriptors are still what they were when we were started."""
    try:
        return os.fstat(handles.land).st_size == LAND_BYTES
    except OSError:
        return False


def _leave(rank: Rank, pid: int) -> None:
    """This process ends, however."""
    if os.getpid() == pid:
        _let_others_go_first(rank)
        rank.turns.finish()


def _tell(stock: Callable[..., None], rank: Rank, *exception: Any) -> None:
    _let_others_go_first(rank)
    stock(*exception)


def _let_others_go_first(rank: Rank) -> None:
    """If this one ends because of others: so that who ended first is the one heard, and named."""
    ground, until_s = rank.turns.ground, time.monotonic() + GO_FIRST_S
    if not rank.turns.words[turns.FAILED]:
        return
    others = [other for other in range(ground.ranks) if other != rank.number]
    for other in (each for each in others if turns.state(ground, each) == State.DONE):
        while not ground.is_dead(other) and time.monotonic() < until_s:
            ground.sleep(rank.number, 0.01)
