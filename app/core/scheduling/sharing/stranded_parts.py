"""Charges fractions for the part of their device that they make unusable (rule F1).

A fraction pays for its part, as others can use the rest. While a task of another user waits that
would suit the device and does not fit into the rest, the rest serves no task: then the fractions on
the device pay for all of it. Each pays in proportion to its part. A round looks at this after it
has launched what fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from app.core.fairness.fair_tree import Branch, Lane
from app.core.model.lifecycle import State
from app.core.scheduling.board import Board
from app.core.scheduling.stays import BoardStay

PAYS = frozenset({State.starting, State.running})


def changed_costs(board: Board) -> Iterator[tuple[BoardStay, int]]:
    """Yield the fractions whose cost has to change, and the cost of one second from now on."""
    for device in sorted(board.fractions):
        stays = [stay for stay in board.group(device) if stay.task.state in PAYS]
        own = [board.cost(stay.task, (device,)) for stay in stays]
        whole = board.devices[device].cost
        if sum(own) < whole and _is_stranded(board, device, stays):
            own = split(whole, own)
        for stay, cost in zip(stays, own, strict=True):
            if cost != stay.rate:
                yield stay, cost


def split(whole: int, parts: list[int]) -> list[int]:
    """Divide a cost in proportion to the parts; the results add up to it exactly."""
    ends = [whole * end // sum(parts) for end in accumulate(parts)]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def _is_stranded(board: Board, device: str, stays: list[BoardStay]) -> bool:
    """True if a task waits that these fractions keep from the device."""
    leaves = {stay.leaf for stay in stays}
    kind = board.devices[device].kind
    return any(
        _waits_for(board, lane, device) and _is_anothers(board, lane, leaves)
        for lane in board.tree.lanes
        if lane.kind == kind
    )


def _waits_for(board: Board, lane: Lane, device: str) -> bool:
    pool = board.pools[lane.kind]
    suits = pool.fits(device, lane) if not lane.pins else device in lane.pins
    return suits and not pool.fits_beside(device, lane)


def _is_anothers(board: Board, lane: Lane, leaves: set[Branch]) -> bool:
    """True if a task of the lane may start now, and is not of the only user on the device."""
    found = board.tree.first((lane,))
    if found is None:
        return False
    return leaves != {found[0]} or board.tree.root.lines[lane].below > 1
