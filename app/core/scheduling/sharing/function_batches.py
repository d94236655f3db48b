"""Launches functions behind others of their user, so that a device runs them one after another.

A message to a device and its answer take longer than most functions. So a device that gets a
function also gets, with the same message, the user's next functions: as many as take `BATCH_US`
together, if each takes as long as the last one did. They have the device together, like tasks that
take turns on one: a function is charged only when it runs, and only for its own time. A function
that has waited behind others for `device_records.BEHIND_US` is returned to the queue. So a batch
makes no other task wait much longer than `BEHIND_US` for a device.

This happens only where no guarantee and no limit applies, and only on CPU devices: there functions
share a process (`core.model.shared_process`), or the processes of the next ones are made ready
while one runs.
"""

from __future__ import annotations

from collections.abc import Iterator

from app.core.fairness.fair_tree import both_of
from app.core.model.descriptor import SHARING_NEED
from app.core.model.device_choice import choice_in
from app.core.model.shared_process import HOST_KIND
from app.core.model.snapshot import BoardTask
from app.core.scheduling.board import Board
from app.core.scheduling.sharing import time_sharing
from app.core.scheduling.stays import BoardStay

OFFER = "isolation"  # of devices whose workers run functions one after another
IN_BATCHES = {"env", OFFER, SHARING_NEED}  # needs of functions that may be in a batch
APART_MOST = 8  # most functions in a batch if each needs a process, which takes long to start


def may_lead(board: Board, task: BoardTask, *devices: str) -> bool:
    """True if other functions may be launched behind this one on the devices where it was
    launched.
    """
    if not task.function or task.kind != HOST_KIND or task.width != 1 or task.gang:
        return False
    if any(OFFER not in board.devices[id].traits.offers for id in devices):
        return False  # the worker is of an older version
    if board.lane_in_line(task).is_fraction:
        return False
    if not IN_BATCHES.issuperset(_needs(task)):
        return False
    return time_sharing.are_plain(board.leaf(task))


def _needs(task: BoardTask) -> tuple[str, ...]:
    return choice_in(task.choice).lasting.needs if task.choice else ()


def _size(board: Board, leader: BoardTask) -> int:
    size = board.batch_of(leader).size
    return min(size, APART_MOST) if OFFER in _needs(leader) else size


def next_functions(board: Board) -> Iterator[tuple[BoardStay, BoardTask]]:
    """Yield pairs: a function launched in this round, and the function to launch behind it.

    The caller launches each before it asks for the next. Batches get one function each in turn.
    """
    leaders = [board.stays[id] for id in board.memory.leaders if id in board.stays]
    place = 1
    while leaders:
        leaders = [stay for stay in leaders if place < _size(board, stay.task)]
        for leader in list(leaders):
            found = board.tree.first_below(leader.leaf, both_of(leader.lane))
            if found is None or board.short or not leader.leaf.room(leader.lane):
                leaders.remove(leader)
                continue
            task = found[2]
            if not task.function or task.cancel_asked:
                board.memory.in_the_way.add(task.id)
                leaders.remove(leader)
                continue
            yield leader, task
        place += 1
