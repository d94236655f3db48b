"""Moves graphs that share a device to another device: decides which graph moves, and where to.

Each device gives turns by itself. A user with graphs on several devices evens them out. Where the
devices have no user in common, the graphs of one may come to be served less than those of another:
with weights 1, 2, 4 and 8 and one graph each, 1 and 2 get more on their device than 4 and 8 on
theirs. Then a graph moves from the device that is behind to the one that is ahead. It has turns
there until it has caught up, and leaves more turns to the others. A graph also moves to a free
device for which no task waits, or gives up its turns for a device of its own that it is owed (F6).

A move is a pause, with the image saved at once, and a wait in line.
`core.scheduling.sharing.time_sharing` finds the device on which it resumes, as for any other graph.

These rules always hold: no graph moves before a full slice, so no task is asked twice within one; a
graph leaves no device empty; one graph of a kind moves at a time; and none moves while a task waits
that goes before it. A move ends the preemptible state of the graph at that instant, so there is no
cycle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from app.core.fairness.fair_tree import Branch
from app.core.scheduling.reclaim.preemption import sides
from app.core.scheduling.sharing.time_sharing import (
    APART_US,
    EVEN_US,
    Join,
    SharedDevices,
    above_both,
    all_run,
    has_others,
    in_line,
    join,
    may_not_be_passed,
    of_user,
    takes_from,
    waiting_graphs,
    would_give_way,
)
from app.core.scheduling.stays import BoardStay

# If a user gets less than this part of what is due to it, a graph moves; otherwise graphs become
# level by themselves.
CATCH_UP = Fraction(3, 4)

FREE = "A device is free: it continues there, and the other graphs take its turns here."
AHEAD = (
    "It has had less usage than the graphs on another device: it continues there and shares that "
    "device."
)
HELD = (
    "It has had less usage than the task on another device: it continues there when that task has "
    "left."
)


@dataclass(frozen=True, slots=True)
class _Mover:
    """Describes a graph that could leave its shared device.

    A standby (`heir`) has no turns to leave to others.
    """

    stay: BoardStay
    device: str
    heir: bool

    @property
    def leaf(self) -> Branch:
        return self.stay.leaf


def graph_to_move(here: SharedDevices) -> tuple[BoardStay, str] | None:
    """Return the graph to pause so that it resumes on another device, and why; or None."""
    movers = list(_movers(here)) if _is_calm(here) else []
    if not movers:
        return None
    if not here.board.tree.root.in_line(here.kind):
        mover = _to_free(here, movers)
        if mover is not None:
            return mover.stay, FREE
    first = may_not_be_passed(here)
    movers = [m for m in movers if not any(_goes_before(here, leaf, m.leaf) for leaf in first)]
    mover = _to_others(here, movers)
    if mover is not None:
        return mover.stay, AHEAD
    mover = next((one for one in movers if _takes(here, one)), None)
    return None if mover is None else (mover.stay, HELD)


def _is_calm(here: SharedDevices) -> bool:
    """True if no graph of this kind is moving between devices, or may soon be."""
    graphs = (stay for stay in here.board.graphs.values() if stay.lane.kind == here.kind)
    if any(stay.leaving for stay in graphs):
        return False
    return not any(task.graph and lane.pin is not None for _, lane, task in waiting_graphs(here))


def _movers(here: SharedDevices) -> Iterator[_Mover]:
    """Yield the last graph of each user on each device, if the user would gain nothing from it
    there.
    """
    for device in here.devices:
        group = here.groups[device]
        if len(group) < 2 or not all_run(group):
            continue
        for leaf in dict.fromkeys(stay.leaf for stay in sorted(group, key=in_line)):
            own = of_user(leaf, group)
            if own[-1].ripe and (
                own[-1] not in here.in_turn(group) or _is_level(here, leaf, group)
            ):
                yield _Mover(own[-1], device, len(own) > 1)


def _is_level(here: SharedDevices, leaf: Branch, group: list[BoardStay]) -> bool:
    """True if the user is level with the others of the group.

    Until then the user gets the turns anyway.
    """
    return all(
        here.apart(leaf, stay.leaf) <= here.usage(stay.lane, EVEN_US)
        for stay in group
        if stay.leaf is not leaf
    )


def _goes_before(here: SharedDevices, leaf: Branch, other: Branch) -> bool:
    mine, theirs = sides(leaf, other)
    score = here.board.tree.score
    return mine is not theirs and score(mine, kind=here.kind) <= score(theirs, kind=here.kind)


def _to_free(here: SharedDevices, movers: list[_Mover]) -> _Mover | None:
    """Return the graph that moves to a free device: a standby first, since it had no turns.

    Otherwise it is one from the fullest device, whose move takes about half of what is due there.
    """
    free = [id for id, leaving in here.pool.free.items() if not leaving]

    def rank(mover: _Mover) -> tuple[bool, Fraction, Fraction, tuple[int, float, str]]:
        load = here.load(mover.device)
        return not mover.heir, -load, abs(load - 2 * _takes_along(here, mover)), in_line(mover.stay)

    fit = [m for m in movers if any(here.pool.takes(id, m.stay.lane) for id in free)]
    return min(fit, key=rank, default=None)


def _takes_along(here: SharedDevices, mover: _Mover) -> Fraction:
    return here.due(mover.leaf) / here.spread(mover.leaf)


def _to_others(here: SharedDevices, movers: list[_Mover]) -> _Mover | None:
    """Return a graph that is behind on its device, to move to a device where graphs are ahead.

    The choice is the move that makes the shares due on both devices most equal.
    """
    pairs = [
        (abs(_difference(here, mover, device)), in_line(mover.stay), device, mover)
        for mover in movers
        for device in here.devices
        if device != mover.device and _may_move(here, mover, device)
    ]
    return min(pairs, key=lambda pair: pair[:3])[3] if pairs else None


def _may_move(here: SharedDevices, mover: _Mover, device: str) -> bool:
    group, stay = here.groups[device], mover.stay
    if here.is_level(mover.leaf, device, APART_US):
        return False
    if any(other.leaf is mover.leaf for other in group) or not all_run(group):
        return False
    if here.load(mover.device) < CATCH_UP * here.load(device):
        return False
    if not any(_is_worth_it(here, mover, other.leaf, group) for other in here.in_turn(group)):
        return False
    return isinstance(join(here, mover.leaf, stay.lane, stay.task, device), Join)


def _is_worth_it(here: SharedDevices, mover: _Mover, other: Branch, there: list[BoardStay]) -> bool:
    """True if the graph would get more turns beside `other`, which is ahead.

    It would not if one branch is above both and has turns beside other branches on both devices:
    then that branch gets as many turns on either device.
    """
    over, group = above_both(mover.leaf, other), here.groups[mover.device]
    if here.apart(mover.leaf, other) <= here.usage(mover.stay.lane, APART_US):
        return False
    if mover.stay not in here.in_turn(group):
        return True
    return not (has_others(group, over) and has_others(there, over))


def _difference(here: SharedDevices, mover: _Mover, device: str) -> Fraction:
    """Return the difference between the shares due on both devices after the move.

    The user of a standby then has graphs on both.
    """
    due, spread = here.due(mover.leaf), here.spread(mover.leaf)
    each = due / (spread + mover.heir)
    left = here.load(mover.device) - due / spread + (each if mover.heir else 0)
    return left - (here.load(device) + each)


def _takes(here: SharedDevices, mover: _Mover) -> bool:
    stay, leaf = mover.stay, mover.leaf
    if not would_give_way(here, leaf, stay.task):
        return False
    found = (join(here, leaf, stay.lane, stay.task, device) for device in here.devices)
    near = [one.device for one in found if isinstance(one, Join)]
    return takes_from(here, leaf, stay.lane, stay.task, [*near, mover.device])
