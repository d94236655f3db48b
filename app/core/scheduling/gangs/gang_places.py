"""Finds the devices that a gang on even hosts can have first, and when.

Holders give way by the same rules as to any other task (`core.scheduling.reclaim.preemption`); here
all devices of the gang are chosen by when that is. So tasks are paused, and devices kept, on the
hosts where the gang can start, and no more of them than it takes there.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.core.fairness.fair_tree import Branch, above
from app.core.model.snapshot import TIERS, BoardTask
from app.core.scheduling.board import HELD_COST, LENT_COST, Board
from app.core.scheduling.gangs.even_hosts import DeviceOffer
from app.core.scheduling.reclaim import preemption
from app.core.scheduling.stays import NEVER, BoardStay

#: (when a stay ends or gives way, task, devices), as in `Pool.ends`
StayEnd = tuple[float, str, int]


def can_have_now(
    board: Board, task: BoardTask, *, within: Branch | None, urgent: bool
) -> tuple[str, ...]:
    """Return devices whose holders give way to the gang now; () if too few do on even hosts.

    `within` and `urgent` are as for `preemption.victims`.
    """
    if not (board.unprotected(task.kind) or board.grown):
        return ()
    if within is None and not urgent and preemption.hopeless(board, task):
        return ()
    shut = preemption.shut_by(board, task)
    if shut is not None and (within is None or shut.depth > within.depth):
        within = shut
    ends = preemption.turns_end(board, task, urgent=urgent)
    if within is not None:
        ends = [end for end in ends if within in above(board.stays[end[1]].leaf)]
    places, at_s = soonest(board, task, ends)
    return places if at_s <= board.now_s else ()


def soonest(
    board: Board, task: BoardTask, ends: Sequence[StayEnd]
) -> tuple[tuple[str, ...], float]:
    """Return the devices on even hosts that the gang can have first, and when; () and NEVER if the
    ends of stays leave too few.
    """
    pool, here = board.pools[task.kind], board.lane_in_line(task)
    offers = {offer.id: offer for offer in board.idle_offers(pool, here)}
    lent = board.lent_places()
    for at_s, id, _ in ends:
        stay = board.stays[id]
        order = _victims_order(board, task, stay)
        for device in stay.devices:
            if device in offers or at_s >= NEVER or not pool.fits(device, here):
                continue
            from_s, cost = (board.now_s, LENT_COST) if device in lent else (at_s, HELD_COST)
            offers[device] = DeviceOffer(
                max(from_s, board.now_s), cost, order, device, is_idle=False
            )
    places = pool.evenly(here, offers.values())
    at_s = max((offers[id].at_s for id in places), default=NEVER)
    return places, at_s


def _victims_order(board: Board, task: BoardTask, stay: BoardStay) -> tuple[float, ...]:
    """Sort key of holders that give way at the same time, as `preemption` chooses victims: lower
    tiers first, then the most over-served branches, the lowest priority, and the latest start.
    """
    theirs, score = preemption.sides(board.leaf(task), stay.leaf)[1], board.tree.score
    kind, held = task.kind, stay.task
    return (
        TIERS.index(held.tier),
        -score(theirs, kind=kind),
        -score(stay.leaf, kind=kind),
        held.priority,
        held.is_bound,
        -(held.started_s or 0.0),
    )
