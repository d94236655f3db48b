"""Chooses moves of tasks that free suitable devices for a waiting task.

A gang may use any devices of a kind that fit its memory and its choice. Other tasks may hold large
devices, and could run on a free device that is too small for the gang or does not suit its choice.
The first waiting task that finds too few suitable devices is considered. If moves would let it
start, all moves that it needs are made; otherwise none.

Three things always hold. No task is moved before a full slice. No task is moved while another move
of the kind is under way. No task is moved to a device on which it does not fit.
"""

from __future__ import annotations

from itertools import islice

from app.core.fairness.fair_tree import Lane
from app.core.model.lifecycle import State
from app.core.model.snapshot import BoardTask
from app.core.scheduling.board import Board
from app.core.scheduling.pool import Pool
from app.core.scheduling.reclaim import preemption
from app.core.scheduling.stays import BoardStay

LANES = 64  # most lanes that are looked at; each size of task may have a lane of its own


def moves(board: Board) -> list[tuple[str, str]]:
    """Return the tasks to move, each with the free device to which it moves."""
    busy = {board.devices[id].kind for id in board.kept_for}
    found: list[tuple[str, str]] = []
    for kind in sorted(board.pools.keys() - busy):
        pool = board.pools[kind]
        task = _first_without_room(board, pool) if pool.free else None
        if task is not None and preemption.shut_by(board, task) is None:
            found += _for(board, pool, board.lane(task))
    return found


def _first_without_room(board: Board, pool: Pool) -> BoardTask | None:
    """Return the first waiting task for which too few of the free devices are suitable."""
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
    left = sorted(
        (pool.open[id], id)
        for id, leaving in pool.free.items()
        if not leaving and not pool.fits(id, lane)
    )
    found: list[tuple[str, str]] = []
    for stay in _movable(board, lane):
        target = board.lane_elsewhere(stay)
        to = next((id for _, id in left if pool.fits(id, target)), None)
        if to is not None and len(found) < lacking:
            found.append((stay.id, to))
            left = [(memory, id) for memory, id in left if id != to]
    return found if len(found) == lacking else []


def _movable(board: Board, lane: Lane) -> list[BoardStay]:
    """Return the stays that can leave a device that suits the lane, the smallest first."""
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
        and not stay.lane.is_fraction
        and board.pools[lane.kind].takes(stay.devices[0], lane)
    ]
    return sorted(found, key=lambda stay: (stay.task.memory_bytes, stay.id))
