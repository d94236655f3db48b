"""Moves that bring free devices together: who needs little gives up a device for who needs more.

Any devices of a kind make a gang that may part, so for it free ones are scattered only by memory:
large devices held by tasks for which a small one, that is free, would do.  If the first in line of
those who find too few large ones could be launched after such moves, they are made: all that are
needed, or none.

What always holds: nobody is moved before a full slice, nor while another move of the kind is under
way; and nobody is moved to a device on which it does not fit.
"""

from __future__ import annotations

from itertools import islice

from app.core import reclaim
from app.core.board import Board, Pool, Stay
from app.core.fairshare import Lane
from app.core.island import Task
from app.core.lifecycle import State

LANES = 64  # so many are looked at; there may be as many as sizes of tasks


def moves(board: Board) -> list[tuple[str, str]]:
    """Who is to be moved, and the free device that will do for it."""
    busy = {board.devices[id].kind for id in board.kept_for}
    found: list[tuple[str, str]] = []
    for kind in sorted(board.pools.keys() - busy):
        pool = board.pools[kind]
        task = _first_without_room(board, pool) if pool.free else None
        if task is not None and reclaim.shut_by(board, task) is None:
            found += _for(board, pool, board.lane(task))
    return found


def _first_without_room(board: Board, pool: Pool) -> Task | None:
    """Who goes first of those for whom too few large devices are free, and enough small ones."""
    lanes = (
        lane
        for lane in board.tree.lanes
        if lane.kind == pool.kind
        and lane.pin is None
        and lane.host is None
        and pool.fitting(lane) < lane.width <= len(pool.free)
    )
    found = board.tree.first(dict.fromkeys(islice(lanes, LANES)))
    return None if found is None else found[2]


def _for(board: Board, pool: Pool, lane: Lane) -> list[tuple[str, str]]:
    lacking = lane.width - pool.fitting(lane)
    small = sorted(
        (pool.open[id], id)
        for id, leaving in pool.free.items()
        if not leaving and pool.open[id] < lane.memory_bytes
    )
    found: list[tuple[str, str]] = []
    for stay in _movable(board, lane):
        to = next((id for memory, id in small if memory >= stay.task.memory_bytes), None)
        if to is not None and len(found) < lacking:
            found.append((stay.id, to))
            small = [(memory, id) for memory, id in small if id != to]
    return found if len(found) == lacking else []


def _movable(board: Board, lane: Lane) -> list[Stay]:
    """Those who hold a device on which the lane would fit and can leave it, the smallest first."""
    found = [
        stay
        for stay in board.stays.values()
        if stay.lane.kind == lane.kind
        and stay.ripe
        and not stay.leaving
        and len(stay.devices) == 1
        and stay.task.state == State.running
        and stay.task.movable
        and stay.task.moves_to is None
        and board.pools[lane.kind].suits(stay.devices[0], lane)
    ]
    return sorted(found, key=lambda stay: (stay.task.memory_bytes, stay.id))
