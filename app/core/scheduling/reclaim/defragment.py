"""Chooses moves of tasks that free suitable devices for a waiting task.

A waiting task may find no suitable device although devices are free:

* Its processes are frozen on a device, or its image there is not durable yet, so it can go on only
  there. Another task holds that device and could run on a free one.
* It needs a large device, or one that suits its choice, or all its devices on one host. Tasks that
  could run elsewhere hold them.

The first waiting task that moves would let start is helped: all moves that it needs are made, or
none. Only tasks whose state moves with them are moved. So a device stands idle beside such a task
only while a task that would begin again elsewhere holds what it needs, or for a gang (F7).

Four things always hold. No task is moved before a full slice (F6). No task is moved while another
move of the kind is under way. No task is moved to a device on which it does not fit, nor to one on
which another waiting task is frozen. A move frees no device for a task that is not first in line
for it, and each move is followed by a launch, so moves make no cycle.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from app.core.fairness.fair_tree import Lane
from app.core.model.lifecycle import State
from app.core.scheduling.board import Board
from app.core.scheduling.pool import Pool
from app.core.scheduling.reclaim import preemption
from app.core.scheduling.stays import BoardStay

LANES = 64  # most lanes that are looked at; each size of task may have a lane of its own
TRIES = 4  # most waiting tasks of a kind for which moves are searched in a round


def moves(board: Board) -> list[tuple[str, str]]:
    """Return the tasks to move, each with the free device to which it moves."""
    busy = {board.devices[id].kind for id in board.kept_for}
    found: list[tuple[str, str]] = []
    for kind in sorted(board.pools.keys() - busy - board.memory.kept):
        pool = board.pools[kind]
        if any(not leaving for leaving in pool.free.values()):
            found += _of_kind(board, pool)
    return found


def _of_kind(board: Board, pool: Pool) -> list[tuple[str, str]]:
    """Return moves for the first waiting task that they let start."""
    lanes = {
        line: here
        for line in islice(board.tree.lanes, LANES)
        if (here := _short(board, pool, line))
    }
    for _ in range(TRIES):
        first = board.tree.first(lanes)
        if first is None:
            break
        _, line, task = first
        here = lanes.pop(line)
        if preemption.shut_by(board, task) is None and (found := _for(board, pool, here)):
            return found
    return []


def _short(board: Board, pool: Pool, line: Lane) -> Lane | None:
    """Return the lane with its host, if enough devices are free but too few of them suit it."""
    if line.kind != pool.kind or line.width > len(pool.free):
        return None
    here = board.bound(line)
    have = pool.pins_free(here) if here.pins else pool.fitting(here)
    return here if have < here.width else None


def _for(board: Board, pool: Pool, lane: Lane) -> list[tuple[str, str]]:
    """Return the moves that empty enough devices for the lane; [] if these cannot be made."""
    frozen_on = set(board.pinned())
    left = sorted(
        (pool.open[id], id)
        for id, leaving in pool.free.items()
        if not leaving and not pool.takes(id, lane) and id not in frozen_on
    )
    lacking = lane.width - (pool.pins_free(lane) if lane.pins else pool.fitting(lane))
    found: list[tuple[str, str]] = []
    for stays in _emptied(board, pool, lane):
        if lacking <= 0:
            break
        there = _elsewhere(board, pool, stays, left)
        if there:
            lacking -= 1
            found += there
            left = [free for free in left if free[1] not in {to for _, to in there}]
    return found if lacking <= 0 else []


def _elsewhere(
    board: Board, pool: Pool, stays: list[BoardStay], left: list[tuple[int, str]]
) -> list[tuple[str, str]]:
    """Return a free device for each of the stays; [] if there is none for one of them."""
    found: list[tuple[str, str]] = []
    for stay in stays:
        target, taken = board.lane_elsewhere(stay), {to for _, to in found}
        to = next((id for _, id in left if id not in taken and pool.fits(id, target)), None)
        if to is None:
            return []
        found.append((stay.id, to))
    return found


def _emptied(board: Board, pool: Pool, lane: Lane) -> Iterator[list[BoardStay]]:
    """Yield the stays on each device that suits the lane and that all stays on it can leave, the
    smallest first.
    """
    held = lane.pins or {stay.devices[0]: None for stay in board.stays.values() if stay.devices}
    groups = [board.group(id) for id in held if id not in pool.free and pool.takes(id, lane)]
    groups = [group for group in groups if group and all(map(_may_move, group))]
    yield from sorted(groups, key=lambda group: [(s.task.memory_bytes, s.id) for s in group])


def _may_move(stay: BoardStay) -> bool:
    """True if the stay has had a full slice, and its state moves with it."""
    task = stay.task
    is_alone = len(stay.devices) == 1 and not stay.leaving
    return is_alone and stay.ripe and task.state == State.running and _is_free_to_move(stay)


def _is_free_to_move(stay: BoardStay) -> bool:
    return stay.task.movable and stay.task.moves_to is None and not stay.task.cancel_asked
