"""Gives the devices of a reservation that names them, or their labels, to those it is for.

Such a device is lent like any other until a task wants it that it is reserved for. Then whoever
borrowed it gives it back after a full slice, even within a guarantee of its own: another device is
no replacement. Those it is reserved for are not paused there for others, so nothing goes back and
forth.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from app.core.fairness.fair_tree import Branch, Lane, above, on_host
from app.core.model.lifecycle import State
from app.core.model.snapshot import BoardTask
from app.core.scheduling.board import HELD_COST, Board
from app.core.scheduling.gangs.even_hosts import DeviceOffer
from app.core.scheduling.reclaim import preemption
from app.core.scheduling.stays import NEVER, BoardStay, ripe_s, slice_us


@dataclass(frozen=True, slots=True)
class ReservedPlace:
    """Lists reserved devices for a task, who has to leave them first, and when all of those have
    had a full slice; NEVER if that is not known.
    """

    devices: tuple[str, ...]
    lent: tuple[BoardStay, ...]
    at_s: float


def by_owner(board: Board) -> Iterator[tuple[Branch, list[str]]]:
    """Yield each tenant or user that waits for devices that are reserved for it, with these."""
    found = defaultdict[str, list[str]](list)
    for device in sorted(board.reserved):
        found[board.reserved[device]].append(device)
    for owner, devices in found.items():
        branch = board.branch_of(owner)
        if branch is not None and branch.lines:
            yield branch, devices


def place(board: Board, task: BoardTask, devices: list[str]) -> ReservedPlace | None:
    """Return the devices of its owner's reservation for a task; None if there are too few."""
    leaf = board.leaf(task)
    is_last = any(branch.is_demoted for branch in above(leaf))
    if task.gang or is_last or preemption.shut_by(board, task) is not None:
        return None
    waits = [board.lane_in_line(task) if task.hosts else board.lane(task)]
    waits += [on_host(board.lane_in_line(task), host) for host in board.others(task)]
    places = [found for lane in waits if (found := _place(board, task, lane, devices))]
    found = min(places, key=lambda one: (one.at_s, len(one.lent)), default=None)
    return None if found and found.lent and not board.policy.turns else found


def _place(board: Board, task: BoardTask, lane: Lane, devices: list[str]) -> ReservedPlace | None:
    pool, leaves_at_s = board.pools[task.kind], preemption.leaves_at_s(board, task)
    turn_over_s = partial(_turn_over_s, slice_us(board.policy, task) / 1e6)
    suits = pool.fits if lane.hosts and not lane.pins else pool.takes
    free, held = list[str](), list[tuple[bool, float, str]]()
    for id in devices:
        if not suits(id, lane):
            continue
        if id in pool.free or (lane.is_fraction and pool.fits_beside(id, lane)):
            free.append(id)
        elif stays := board.group(id):
            own = any(board.reserved[id] in stay.leaf.path for stay in stays)
            leaves_s = max(map(leaves_at_s, stays)) if own else board.now_s
            if leaves_s < NEVER:
                held.append((own, max(leaves_s, *map(turn_over_s, stays)), id))
    if lane.hosts and not lane.pins:
        even = _on_even_hosts(board, lane, free, held)
        free, held = [id for id in free if id in even], [each for each in held if each[2] in even]
    held = sorted(held)[: max(0, task.width - len(free))]
    taken = (*free[: task.width], *(id for *_, id in held))
    if len(taken) < task.width or not (free or any(not own for own, *_ in held)):
        return None  # the rules for all devices decide which of its own tasks has its turn
    lent = {stay.id: stay for *_, id in held for stay in board.group(id)}
    at_s = max((board.now_s, *(at_s for _, at_s, _ in held)))
    return ReservedPlace(taken, (*lent.values(),), at_s)


def _on_even_hosts(
    board: Board, lane: Lane, free: Iterable[str], held: Iterable[tuple[bool, float, str]]
) -> frozenset[str]:
    """Return those of the reserved devices that a gang can have first, as many on each host."""
    pool, now_s = board.pools[lane.kind], board.now_s
    offers = [DeviceOffer(now_s, 0, (pool.open[id],), id, is_idle=True) for id in free]
    offers += [
        DeviceOffer(max(at_s, now_s), HELD_COST + own, (pool.open[id],), id, is_idle=False)
        for own, at_s, id in held
    ]
    return frozenset(pool.evenly(lane, offers))


def _turn_over_s(turn_s: float, stay: BoardStay) -> float:
    """Return when the stay has had its turn, which is as long as that of the waiting task."""
    started_s = stay.task.started_s
    if started_s is None or stay.task.state != State.running:
        return NEVER
    return max(ripe_s(stay), started_s + turn_s)


def is_owed(board: Board, task: BoardTask) -> bool:
    """True if devices are free that are reserved for nobody, and the task is owed any of its kind:
    then these are as good as its own.
    """
    lane, pool = board.lane(task), board.pools[task.kind]
    if preemption.shut_by(board, task) is not None or board.leaf(task).top.borrows(lane):
        return False
    free = pool.free.keys() - board.reserved.keys()
    return sum(pool.takes(id, lane) for id in free) >= task.width
